"""Published DFlash drafts (https://arxiv.org/abs/2602.06036), unchanged: SpecForge's folders, and speculators'. And
DSpark drafts, which are DFlash's with a Markov head (`models.markov`).

The forms are those of SpecForge's ``modeling/draft/dflash.py`` and speculators' ``models/dflash``, as SGLang's
``models/dflash.py`` and vLLM's ``qwen3_dflash.py`` read them. The layers are Qwen3's. A mask is the target's embedding
of a token that the folder names, and the context is made of states after several of the target's layers.
docs/heads.md has the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from attn_backends.errors import CheckpointError
from attn_backends_reference.models import head_keys as keys
from attn_backends_reference.models import heads
from attn_backends_reference.models.block import BlockModel
from attn_backends_reference.models.block_draft import BlockDraft
from attn_backends_reference.models.decoder import TargetModel
from attn_backends_reference.models.eagle3 import with_windows
from attn_backends_reference.models.fit import cast, check_fit
from attn_backends_reference.models.head_config import HeadConfig, layer_config, windows
from attn_backends_reference.models.head_keys import Fields, refuse
from attn_backends_reference.models.llama import LLAMA
from attn_backends_reference.models.markov import MarkovConfig, MarkovHead, integer, read_markov, said


@dataclass(frozen=True, slots=True)
class BlockConfig(HeadConfig):
    """A block draft's configuration, decided.

    block_size: rows of a block, the root included. mask_token: the target's token whose embedding a mask is.
    num_target_layers: of the target that it is made for, None if it does not say. markov: DSpark's part of it.
    """

    block_size: int = 0
    mask_token: int = 0
    num_target_layers: int | None = None
    markov: MarkovConfig | None = None


class DFlashDraft(BlockDraft):
    """The modules of a folder."""

    d2t: Tensor
    t2d: Tensor
    parts = (Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding)

    def __init__(self, head: BlockConfig) -> None:
        head.layer.block_size = head.block_size
        super().__init__(head.layer, head.num_states * head.target_hidden_size)
        self.head, width = head, head.layer.hidden_size
        del self.mask
        self.register_buffer("mask", torch.zeros(width), persistent=False)
        self.lm_head = nn.Linear(width, head.num_ids, bias=False)
        self.register_buffer("d2t", torch.zeros(head.num_ids, dtype=torch.int64))
        self.register_buffer("t2d", torch.ones(head.layer.vocab_size, dtype=torch.bool))
        if head.markov is not None:
            self.markov_head = MarkovHead(head.markov, head.layer, head.num_ids)
            if head.markov.confidence:
                self.confidence_head = nn.ModuleDict({"proj": nn.Linear(head.markov.confidence, 1)})


class DFlashModel(BlockModel):
    """A DFlash draft as a worker sees it. Takes over `draft`. head: the draft's own, `lm_head`, if None."""

    def __init__(
        self,
        draft: DFlashDraft,
        target: TargetModel,
        feature_layers: tuple[int, ...],
        embedding: nn.Embedding,
        head: nn.Linear | None,
    ) -> None:
        super().__init__(LLAMA, draft, target)
        draft.mask.copy_(embedding.weight[draft.head.mask_token])
        self.layers = with_windows(self.layers, draft.head)
        self.embedding, self.head, self.feature_layers = embedding, head or draft.lm_head, feature_layers
        self._target_ids = torch.arange(draft.head.num_ids, device=target.device) + draft.d2t

    def target_ids(self, ids: Tensor) -> Tensor:
        """The target's ids of the draft's, in any shape."""
        return self._target_ids[ids]


class DSparkModel(DFlashModel):
    """A DSpark draft as a worker sees it: the scores of a row are corrected by the token before."""

    def __init__(self, draft: DFlashDraft, *place: Any) -> None:
        super().__init__(draft, *place)
        assert draft.head.markov is not None
        self._markov, self.num_drafted = draft.markov_head, self.num_drafted + draft.head.markov.from_root

    def propose(self, hidden: Tensor, root: Tensor) -> Tensor:
        """See `BlockModel.propose`. Each row's token is the best after the one that the row before proposes."""
        rows, tokens = self.proposing(hidden), [root]
        scores, state = self.logits(rows), self._markov.first_state(rows[:, 0])
        for index in range(self.num_drafted):
            change, state = self._markov(tokens[-1], rows[:, index], state)
            tokens.append(self.target_ids((scores[:, index] + change).argmax(dim=-1)))
        return torch.stack(tokens[1:], dim=1)


def load_dflash(path: Path, fields: Fields, target: TargetModel) -> DFlashModel:
    """The DFlash or DSpark draft in a folder whose config.json says `fields`. Raises `CheckpointError` as `load_draft`
    does.
    """
    head = read_dflash(fields, path)
    heads.check_sizes(path, head, target)
    if head.num_target_layers is not None:
        check_fit(path, {"num_target_layers": head.num_target_layers}, {"num_target_layers": len(target.layers)})
    layers = head.feature_layers(path, len(target.layers))
    draft = DFlashDraft(head)
    embedding, output = heads.fill(path, draft, target)
    model = DFlashModel if head.markov is None else DSparkModel
    return model(cast(draft, target), target, layers, embedding, output)


def read_dflash(fields: Fields, where: object) -> BlockConfig:
    """The configuration of such a draft. Raises `CheckpointError`, which names the key, for what is not served."""
    named = keys.block_drafts(keys.names(fields))
    if missing := keys.missing_parts(named):
        raise CheckpointError(f"{where} is a block draft ({', '.join(named)}) that is not served: {'; '.join(missing)}")
    is_dspark = any("dspark" in name.lower() for name in named)
    if other := [name for name in named if is_dspark and name not in keys.DSPARK_NAMES]:
        raise CheckpointError(f"{where} is a DSpark draft of other layers than Qwen3's ({', '.join(other)})")
    flat = keys.unwrapped(fields, where, "dspark" if is_dspark else "dflash")
    table = flat.pop("dflash_config", {})
    if not isinstance(table, dict):
        refuse(where, "dflash_config", table, "it must be a table")
    extra = keys.DSPARK_HONOURED if is_dspark else ()
    for key in sorted(table.keys() - {*keys.DFLASH_CONFIG_KEYS, *extra[:2]}):
        if table[key]:
            refuse(where, f"dflash_config.{key}", table[key], "no rule covers this key, which could change the draft")
    checked = {key: value for key, value in flat.items() if key != "is_causal"}
    keys.check_keys(checked, where, (*keys.DFLASH_HONOURED, *extra), keys.DFLASH_INERT)
    if flat.get("model_type", "qwen3") not in ("qwen3", "dflash") and "speculators_model_type" not in fields:
        refuse(where, "model_type", flat["model_type"], "a DFlash draft's layers are Qwen3's")
    layer = layer_config(flat | {"model_type": "qwen3"}, where, is_mla=False, in_speculators=True)
    seen = windows(flat, layer.num_hidden_layers, where)
    markov = read_markov(flat, table, where) if is_dspark else None
    if markov is None and said(flat, table, "sample_from_anchor", where):
        refuse(where, "sample_from_anchor", True, "the root of a DFlash block proposes nothing here")
    _check_rows(flat, table, seen, where)
    taps = _taps(flat, table, where)
    num_ids, size = flat.get("draft_vocab_size"), integer(flat, table, "block_size", where)
    if size < 2:
        refuse(where, "block_size", size, "a block has the root and one mask at least")
    mask = integer(flat, table, "mask_token_id", where)
    if not 0 <= mask < layer.vocab_size:
        refuse(where, "mask_token_id", mask, f"the vocabulary has {layer.vocab_size} tokens")
    return BlockConfig(
        layer=layer,
        draft_vocab_size=None if num_ids == layer.vocab_size else num_ids,
        target_hidden_size=flat.get("target_hidden_size") or layer.hidden_size,
        taps=taps,
        num_states=len(taps),
        windows=seen,
        fields=fields,
        block_size=size,
        mask_token=mask,
        num_target_layers=said(flat, table, "num_target_layers", where),
        markov=markov,
    )


def _check_rows(flat: Fields, table: Fields, seen: tuple[int | None, ...], where: object) -> None:
    """Refuses layers whose rows do not see those behind them.

    As SGLang and vLLM read folders: ``is_causal`` decides for all layers, then ``causal``; without either, full layers
    are not causal and windowed ones are, as both exporters train them.
    """
    if "speculators_model_type" in flat and any(seen):
        refuse(where, "layer_types", flat["layer_types"], "speculators' windows begin at the root, those here at a row")
    causal = flat.get("is_causal", said(flat, table, "causal", where))
    if causal or (causal is None and any(seen)):
        why = (
            "layers are causal within a block then (windowed ones by default), and here a block's rows see one another"
        )
        refuse(where, "is_causal", causal, why)


def _taps(flat: Fields, table: Fields, where: object) -> tuple[int, ...]:
    """The layers after which states are taken. speculators names those before which they are."""
    before, behind = flat.get("aux_hidden_state_layer_ids"), said(flat, table, "target_layer_ids", where)
    if (before is None) == (behind is None):
        raise CheckpointError(
            f"{where}/config.json must say target_layer_ids or aux_hidden_state_layer_ids, one of them"
        )
    layers = behind if before is None else before
    if not (isinstance(layers, list) and layers and all(type(layer) is int for layer in layers)):
        refuse(where, "target_layer_ids", layers, "it must be a list of layers")
    return tuple(layer - (before is not None) for layer in layers)
