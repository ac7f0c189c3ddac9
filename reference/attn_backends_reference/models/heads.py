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
from attn_backends_reference.models import folders
from attn_backends_reference.models.decoder import DraftModel, TargetModel
from attn_backends_reference.models.eagle1 import Eagle1Draft, Eagle1Model
from attn_backends_reference.models.eagle3 import MAPS, Eagle3Draft, Eagle3Model
from attn_backends_reference.models.fit import cast, check_fit
from attn_backends_reference.models.head_config import HeadConfig, read_eagle, read_eagle3
from attn_backends_reference.models.head_keys import Fields

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
    draft, given = Eagle3Draft(head), renamed(path, folders.read_tensors(folders.locate_tensors(path)))
    embedding = take_embedding(path, head, given, target)
    output = shared_output(path, head, given, embedding, target)
    if output is not None:
        del draft.lm_head
    complete_maps(head, given, draft)
    fill(path, draft, given)
    return Eagle3Model(cast(draft, target), target, layers, embedding, output)


def load_eagle(path: Path, fields: Fields, target: TargetModel) -> DraftModel:
    """The EAGLE-1 or EAGLE-2 draft in a folder, in the same way. An output head that it holds is the target's."""
    head = read_eagle(fields, path)
    check_sizes(path, head, target)
    given = renamed(path, folders.read_tensors(folders.locate_tensors(path)))
    has_bias = "fc.bias" in given
    if head.fc_bias is not None and head.fc_bias != has_bias:
        raise CheckpointError(f"{path} says bias={head.fc_bias} and {'has' if has_bias else 'lacks'} fc.bias")
    draft = Eagle1Draft(replace(head, fc_bias=has_bias))
    if OUTPUT in given and not _same(given.pop(OUTPUT), target.head.weight):
        raise CheckpointError(f"{path} has an output head ({OUTPUT}), which is not the target's as it should be")
    embedding = take_embedding(path, head, given, target)
    fill(path, draft, given)
    return Eagle1Model(cast(draft, target), target, embedding)


def rename(name: str) -> str:
    """A tensor's name as the modules have it."""
    for found, ours in RENAMES:
        name = re.sub(rf"^{found}", ours, name)
    return name


def renamed(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names that the modules have. Raises `CheckpointError` if two of them are the same."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if rename(name) in found:
            raise CheckpointError(f"{path} has two tensors for {rename(name)}, one of them {name}")
        found[rename(name)] = tensor
    return found


def check_sizes(path: Path, head: HeadConfig, target: TargetModel) -> None:
    """Raises `CheckpointError` unless a head is made for targets of these sizes."""
    given = {"vocabulary": head.layer.vocab_size, "hidden size": head.target_hidden_size}
    check_fit(path, given, {"vocabulary": target.vocab_size, "hidden size": target.hidden_size})


def _same(tensor: Tensor, weight: Tensor) -> bool:
    """Whether they have the same values; of a target on the meta device, which has none, the same shape."""
    if tensor.shape != weight.shape or weight.is_meta:
        return tensor.shape == weight.shape
    return torch.equal(tensor.to(weight.device, weight.dtype), weight)


def take_embedding(path: Path, head: HeadConfig, given: dict[str, Tensor], target: TargetModel) -> nn.Embedding:
    """The draft's embedding: its own, or the target's, if the folder leaves it out or holds the same."""
    weight, size = given.pop(EMBEDDING, None), (target.vocab_size, head.layer.hidden_size)
    if weight is None or _same(weight, target.embedding.weight):
        if size[1] != target.hidden_size:
            raise CheckpointError(
                f"{path} has no {EMBEDDING}, and the target's has {target.hidden_size} columns, not {size[1]}"
            )
        return target.embedding
    needed = {EMBEDDING: torch.empty(size, device="meta")}
    folders.check_tensors(path, (), (), folders.compare_shapes({EMBEDDING: weight}, needed))
    return nn.Embedding.from_pretrained(weight.to(target.device, target.dtype))


def shared_output(
    path: Path, head: HeadConfig, given: Mapping[str, Tensor], embedding: nn.Embedding, target: TargetModel
) -> nn.Linear | None:
    """The output head, where it is not the draft's own: its embedding, if the two are tied, or the target's, if the
    folder has none and does not say how many tokens it proposes.
    """
    if head.tied:
        if OUTPUT in given or head.num_ids != head.layer.vocab_size:
            raise CheckpointError(
                f"{path} says tie_word_embeddings, so its output head is its embedding, of {head.layer.vocab_size} "
                f"tokens; it must not have {OUTPUT} or another draft_vocab_size ({head.num_ids})"
            )
        tied = nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False, device="meta")
        tied.weight = embedding.weight
        return tied
    if OUTPUT in given or head.draft_vocab_size is not None:
        return None
    if head.layer.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{path} has no {OUTPUT}, and the target's reads {target.hidden_size} columns, not {head.layer.hidden_size}"
        )
    return target.head


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


def fill(path: Path, draft: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Gives a draft its tensors. Raises `CheckpointError` unless they are its own, in name and shape."""
    needed = draft.state_dict()
    shapes = folders.compare_shapes(given, needed)
    folders.check_tensors(path, needed.keys() - given.keys(), given.keys() - needed.keys(), shapes)
    if "d2t" in needed:
        check_maps(path, given)
    draft.load_state_dict(given)
