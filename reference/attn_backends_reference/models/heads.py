"""Loading the folders of published EAGLE and EAGLE-3 heads, which `head_config` lists by their configurations.

Tensors come under several names: ``midlayer`` or ``layers.0``, with or without the prefix ``model.``. SGLang's reader
also has ``aux_norm_low``, ``aux_norm_mid`` and ``aux_norm_high`` for the norms before ``fc``, and ``hidden_norm`` for
the input norm of a later layer. ``d2t`` is int64 (draft id i is the target's ``i + d2t[i]``) and ``t2d`` bool (which of
the target's ids the draft has), which may be absent, as SGLang never reads it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attn_backends.errors import CheckpointError
from attn_backends_reference.models import weights
from attn_backends_reference.models.decoder import DraftModel, TargetModel
from attn_backends_reference.models.eagle1 import Eagle1Draft, Eagle1Model
from attn_backends_reference.models.eagle3 import MAPS, Eagle3Draft, Eagle3Model
from attn_backends_reference.models.fit import cast, check_fit
from attn_backends_reference.models.head_config import HeadConfig, read_eagle, read_eagle3
from attn_backends_reference.models.head_keys import Fields
from attn_backends_reference.models.stored import Weight

if TYPE_CHECKING:
    from attn_backends_reference.models.dflash import DFlashDraft

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
RENAMES = (
    (r"model\.", ""),
    (r"midlayer\.", "layers.0."),
    (r"aux_norm_low\.", "fc_norm.0."),
    (r"aux_norm_mid\.", "fc_norm.1."),
    (r"aux_norm_high\.", "fc_norm.2."),
    (r"layers\.([1-9]\d*)\.hidden_norm\.", r"layers.\1.input_layernorm."),
)


def is_eagle(names: Collection[str]) -> bool:
    """Whether a folder's tensors are those of an EAGLE-1 or EAGLE-2 head of SafeAILab's format."""
    named = {rename(name) for name in names}
    has_layer = any(name.startswith("layers.0.") for name in named)
    return has_layer and "fc.weight" in named and not named & {"layers.0.input_layernorm.weight", "norm.weight"}


def load_eagle3(path: Path, fields: Fields, target: TargetModel) -> DraftModel:
    """The EAGLE-3 draft in a folder whose config.json says `fields`. Raises `CheckpointError` as `load_draft` does."""
    head = read_eagle3(fields, path)
    check_sizes(path, head, target)
    layers = head.feature_layers(path, len(target.layers))
    draft = Eagle3Draft(head)
    embedding, output = fill(path, draft, target)
    return Eagle3Model(cast(draft, target), target, layers, embedding, output)


def load_eagle(path: Path, fields: Fields, target: TargetModel) -> DraftModel:
    """The EAGLE-1 or EAGLE-2 draft in a folder, in the same way. An output head that it holds is the target's."""
    head = read_eagle(fields, path)
    check_sizes(path, head, target)
    stored = renamed(weights.read_headers(path, None))
    has_bias = "fc.bias" in stored.tensors
    if head.fc_bias is not None and head.fc_bias != has_bias:
        raise CheckpointError(f"{path} says bias={head.fc_bias} and {'has' if has_bias else 'lacks'} fc.bias")
    draft = Eagle1Draft(replace(head, fc_bias=has_bias))
    shared = {EMBEDDING: _empty_embedding(head), OUTPUT: target.head.weight}
    given = weights.read_checked(stored, draft.state_dict() | shared, shared)
    if OUTPUT in given and not _same(given.pop(OUTPUT), target.head.weight):
        raise CheckpointError(f"{path} has an output head ({OUTPUT}), which is not the target's as it should be")
    embedding = take_embedding(path, head, given, target)
    draft.load_state_dict(given)
    return Eagle1Model(cast(draft, target), target, embedding)


def rename(name: str) -> str:
    """A tensor's name as the modules have it."""
    for found, ours in RENAMES:
        name = re.sub(rf"^{found}", ours, name)
    return name


def renamed(stored: weights.Weights) -> weights.Weights:
    """Weights by the names that the modules have. Raises `CheckpointError` if two of them are the same."""
    found: dict[str, Weight] = {}
    for name, weight in stored.tensors.items():
        if rename(name) in found:
            raise CheckpointError(f"{stored.path} has two tensors for {rename(name)}, one of them {name}")
        found[rename(name)] = weight
    return replace(stored, tensors=found)


def check_sizes(path: Path, head: HeadConfig, target: TargetModel) -> None:
    """Raises `CheckpointError` unless a head is made for targets of these sizes."""
    width = "hidden_size" if head.target_hidden_size == head.layer.hidden_size else "target_hidden_size"
    given = {"vocab_size": head.layer.vocab_size, width: head.target_hidden_size}
    check_fit(path, given, {"vocab_size": target.vocab_size, width: target.hidden_size})


def _same(tensor: Tensor, weight: Tensor) -> bool:
    """Whether they have the same values; of a target on the meta device, which has none, the same shape."""
    if tensor.shape != weight.shape or weight.is_meta:
        return tensor.shape == weight.shape
    return torch.equal(tensor.to(weight.device, weight.dtype), weight)


def take_embedding(path: Path, head: HeadConfig, given: dict[str, Tensor], target: TargetModel) -> nn.Embedding:
    """The draft's embedding: its own, or the target's, if the folder leaves it out or holds the same."""
    weight, width = given.pop(EMBEDDING, None), head.layer.hidden_size
    if weight is None or _same(weight, target.embedding.weight):
        if width != target.hidden_size:
            raise CheckpointError(
                f"{path} has no {EMBEDDING}, and the target's has {target.hidden_size} columns, not {width}"
            )
        return target.embedding
    return nn.Embedding.from_pretrained(weight.to(target.device, target.dtype))


def shares_output(head: HeadConfig, names: Collection[str]) -> bool:
    """Whether the output head is not the draft's own: it is its embedding, if the two are tied, or the target's, if the
    folder has none and does not say how many tokens it proposes.
    """
    return head.tied or (OUTPUT not in names and head.draft_vocab_size is None)


def check_output(path: Path, head: HeadConfig, names: Collection[str], target: TargetModel) -> None:
    """Raises `CheckpointError` unless a shared output head fits."""
    if head.tied and (OUTPUT in names or head.num_ids != head.layer.vocab_size):
        raise CheckpointError(
            f"{path} says tie_word_embeddings, so its output head is its embedding, of {head.layer.vocab_size} "
            f"tokens; it must not have {OUTPUT} or another draft_vocab_size ({head.num_ids})"
        )
    if shares_output(head, names) and not head.tied and head.layer.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{path} has no {OUTPUT}, and the target's reads {target.hidden_size} columns, not {head.layer.hidden_size}"
        )


def _tied(embedding: nn.Embedding) -> nn.Linear:
    """The output head that shares an embedding's memory."""
    tied = nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False, device="meta")
    tied.weight = embedding.weight
    return tied


def complete_maps(head: HeadConfig, given: dict[str, Tensor], draft: Eagle3Draft | DFlashDraft) -> None:
    """Adds the maps of the draft's vocabulary that a folder may leave out."""
    if head.num_ids == head.layer.vocab_size:
        given.setdefault("d2t", draft.d2t)
    d2t = given.get("d2t")
    if d2t is not None and d2t.dtype == torch.int64 and "t2d" not in given:
        ids = (torch.arange(len(d2t)) + d2t).clamp(0, len(draft.t2d) - 1)
        given["t2d"] = torch.zeros_like(draft.t2d).index_fill_(0, ids, True)


def check_maps(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises `CheckpointError` unless the maps of a draft's vocabulary are sound and agree."""
    d2t, t2d = (tensors[name] for name in MAPS)
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        raise CheckpointError(f"{path} holds d2t as {d2t.dtype} and t2d as {t2d.dtype}, not int64 and bool")
    ids = torch.arange(len(d2t)) + d2t
    outside = ((ids < 0) | (ids >= len(t2d))).nonzero().flatten()
    if len(outside):
        first = int(outside[0])
        raise CheckpointError(
            f"d2t in {path} maps {len(outside)} draft ids out of the target's vocabulary of {len(t2d)}: the first, "
            f"{first}, to {first} + {int(d2t[first])}"
        )
    named = torch.zeros_like(t2d).index_fill_(0, ids, True)
    if int(named.sum()) != len(d2t) or not torch.equal(named, t2d):
        raise CheckpointError(
            f"d2t in {path} names {int(named.sum())} different target ids for {len(d2t)} draft ids, and t2d "
            f"{int(t2d.sum())}, {int((named & t2d).sum())} of them the same; they must be one set"
        )


def fill(path: Path, draft: Eagle3Draft | DFlashDraft, target: TargetModel) -> tuple[nn.Embedding, nn.Linear | None]:
    """Gives a draft the tensors of its folder, and returns its embedding, and its output head unless that is
    `draft.lm_head`. Raises `CheckpointError` unless they are the draft's own; names, shapes and types are compared
    before any is read.
    """
    head, stored = draft.head, renamed(weights.read_headers(path, None))
    check_output(path, head, stored.tensors, target)
    if shares_output(head, stored.tensors):
        del draft.lm_head
    optional = {EMBEDDING, *(MAPS if head.num_ids == head.layer.vocab_size else ("t2d",))}
    needed = draft.state_dict() | {EMBEDDING: _empty_embedding(head)}
    given = weights.read_checked(stored, needed, optional)
    embedding = take_embedding(path, head, given, target)
    complete_maps(head, given, draft)
    check_maps(path, given)
    draft.load_state_dict(given)
    return embedding, _tied(embedding) if head.tied else None if hasattr(draft, "lm_head") else target.head


def _empty_embedding(head: HeadConfig) -> Tensor:
    """An embedding of a head's own, without memory."""
    return torch.empty(head.layer.vocab_size, head.layer.hidden_size, device="meta")
