"""Parts of a DSpark draft that DFlash has not: a Markov head, and a confidence head that is not read here.

The forms are those of speculators' ``models/dspark``, as SGLang's ``models/dspark.py`` and vLLM's ``qwen3_dspark.py``
read them. The Markov head adds scores to a row's own that follow from the token before it: a table of two factors,
``markov_w1`` and ``markov_w2``. What stands between them is gated by the row's hidden state (``gated``), or a state
that is handed from row to row (``rnn``). The confidence head estimates acceptance, for engines that cut drafts by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from attn_backends.errors import CheckpointError
from attn_backends_reference.models.head_keys import Fields, refuse

KINDS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True)
class MarkovConfig:
    """DSpark's part of a configuration. rank: columns of the factors. kind: one of `KINDS`. from_root: the root
    proposes a token too. confidence: columns that the confidence head reads, 0 without one.
    """

    rank: int
    kind: str
    from_root: bool
    confidence: int


class MarkovHead(nn.Module):
    """The modules of a Markov head, by published names. num_ids: tokens that the draft can propose."""

    def __init__(self, markov: MarkovConfig, layer: PreTrainedConfig, num_ids: int) -> None:
        super().__init__()
        rank, width = markov.rank, layer.hidden_size
        self.kind = markov.kind
        self.markov_w1 = nn.Embedding(layer.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, num_ids, bias=False)
        if markov.kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif markov.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def first_state(self, hidden: Tensor) -> Tensor:
        """[bs, rank], what the first row of a block is handed. hidden: [bs, hidden_size], of that row."""
        return hidden.new_zeros(len(hidden), self.markov_w2.in_features)

    def forward(self, before: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Additions to the scores of a row, [bs, num_ids], and the state for the next one.

        before: [bs] int64, the target's ids of the tokens before. hidden: [bs, hidden_size], of the row. state: [bs,
        rank], which `rnn` alone reads.
        """
        factor = self.markov_w1(before)
        if self.kind == "gated":
            factor = factor * self.gate_proj(torch.cat((hidden, factor), dim=-1)).sigmoid()
        elif self.kind == "rnn":
            kept, new, out = self.joint_proj(torch.cat((state, factor, hidden), dim=-1)).chunk(3, dim=-1)
            state, factor = torch.lerp(new.tanh(), state, kept.sigmoid()), out.tanh()
        return self.markov_w2(factor), state


def read_markov(flat: Fields, table: Fields, where: object) -> MarkovConfig:
    """DSpark's part of a configuration. Raises `CheckpointError`, which names the key, for what is not served."""
    rank, kind = integer(flat, table, "markov_rank", where), said(flat, table, "markov_head_type", where)
    if rank < 1:
        refuse(where, "markov_rank", rank, "a DSpark draft has a Markov head")
    if kind not in KINDS:
        refuse(where, "markov_head_type", kind, f"served are {', '.join(KINDS)}")
    from_root = said(flat, table, "sample_from_anchor", where)
    if from_root is None and "speculators_model_type" in flat:
        why = "speculators takes it for true and vLLM for false; add what the draft was trained with"
        refuse(where, "sample_from_anchor", None, why)
    from_root = from_root is None or bool(from_root)
    if kind == "rnn" and not from_root:
        why = "speculators begins the state at the root and SGLang at the row after, unless sample_from_anchor is true"
        refuse(where, "markov_head_type", kind, why)
    has_confidence = bool(flat.get("enable_confidence_head"))
    confidence = flat["hidden_size"] + (rank if flat.get("confidence_head_with_markov") else 0)
    return MarkovConfig(rank, kind, from_root, confidence if has_confidence else 0)


def said(flat: Fields, table: Mapping[str, Any], key: str, where: object) -> Any:
    """A key of `dflash_config`, or of the file, which must not contradict it."""
    inner, outer = table.get(key), flat.get(key)
    if inner is not None and outer is not None and inner != outer:
        raise CheckpointError(f"{where}/config.json says {key}={outer!r} and, in dflash_config, {inner!r}")
    return outer if inner is None else inner


def integer(flat: Fields, table: Fields, key: str, where: object) -> int:
    """`said`, which must be an integer."""
    value = said(flat, table, key, where)
    if type(value) is not int:
        refuse(where, key, value, "it must be an integer")
    return int(value)
