"""A layer that compresses its keys, and what a model hands to it.

It attends to a window of tokens and to entries that stand for blocks of them. A row is key and value at once,
for all heads. Projections, norms and rotations of rows and queries are the model's; those of entries are done when a
block closes, from the parameters that the layer brings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_backends.errors import UnsupportedStepError
from attn_backends.layer import AttentionLayer
from spec_metadata.plans.compressed import Compression


@dataclass(frozen=True, slots=True, eq=False)
class Compressor:
    """The parameters that make an entry of projected tokens: `rope(norm(pool(values, gates + position_bias)))`.

    position_bias: [ratio, channels] float, channels being the entry's size, or twice it where blocks overlap.
    norm_weight: [dim]. norm_eps: of its root mean square. inv_freq: [rope / 2] float, radians a token of each rotated
    pair; an entry stands at its block's first token.
    """

    position_bias: Tensor
    norm_weight: Tensor
    norm_eps: float
    inv_freq: Tensor

    @property
    def dim(self) -> int:
        """Elements of an entry."""
        return self.norm_weight.shape[0]

    @property
    def channels(self) -> int:
        """Values, and as many gates, that a token is projected to."""
        return self.position_bias.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class Projections:
    """Projections of a layer's input for a compressor. values, gates: [num_tokens, channels], not normed, not rotated.
    Blocks of one token have no gates (DeepSeek-V4.1): pass the values twice.
    """

    values: Tensor
    gates: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CompressedInputs:
    """Rows that a compressed layer stores. rows: [num_tokens, head_dim], normed and rotated. compressor, indexer:
    projections for the compressors that the layer has.
    """

    rows: Tensor
    compressor: Projections | None = None
    indexer: Projections | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Type of the rows."""
        return self.rows.dtype


@dataclass(frozen=True, slots=True, eq=False)
class IndexQuery:
    """The indexer's query, which selects entries by score: the sum over heads of weights * relu(q · key).

    q: [num_tokens, index_heads, index_dim], rotated. weights: [num_tokens, index_heads], the model's scales of heads
    and of dot products multiplied in.
    """

    q: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CompressedLayer(AttentionLayer):
    """A layer that attends to a window of tokens and, with a compression, to entries that stand for blocks of them.

    compression: None for the window alone. compressor: of its entries. indexer: of the keys by which entries are
    selected, and index_topk how many; both where the compression is indexed, else neither.
    """

    compression: Compression | None = None
    compressor: Compressor | None = None
    indexer: Compressor | None = None
    index_topk: int = 0

    def __post_init__(self) -> None:
        AttentionLayer.__post_init__(self)
        indexed = self.compression is not None and self.compression.indexed
        reasons = []
        if self.window is None:
            reasons.append("it has no window")
        if self.num_kv_heads != 1 or self.head_dim != self.v_head_dim:
            reasons.append(
                f"{self.num_kv_heads} KV heads of sizes {(self.head_dim, self.v_head_dim)}: a row is the one key and "
                "value of all heads"
            )
        if (self.compression is None) != (self.compressor is None):
            reasons.append("compression and compressor come together")
        if indexed != (self.indexer is not None) or indexed != (self.index_topk > 0):
            reasons.append("an indexed compression has an indexer and an index_topk of at least 1, another has neither")
        for name, given in (("compressor", self.compressor), ("indexer", self.indexer)):
            if given is not None and self.compression is not None:
                reasons += _compressor_reasons(name, given, self.compression)
        if self.compressor is not None and self.compressor.dim != self.head_dim:
            reasons.append(f"its compressor makes entries of {self.compressor.dim}, rows are {self.head_dim}")
        if reasons:
            raise UnsupportedStepError(f"layer {self.id}", reasons)

    def checked_inputs(self, inputs: object, num_tokens: int) -> CompressedInputs:
        """The inputs. Raises `UnsupportedStepError` if their types or shapes are not those of num_tokens rows."""
        if not isinstance(inputs, CompressedInputs):
            raise UnsupportedStepError(f"layer {self.id}", [f"it can't store {type(inputs).__name__}"])
        reasons = []
        if inputs.rows.shape != (num_tokens, self.head_dim):
            reasons.append(f"rows are {list(inputs.rows.shape)}, not {[num_tokens, self.head_dim]}")
        parts = {"compressor": (inputs.compressor, self.compressor), "indexer": (inputs.indexer, self.indexer)}
        for name, (given, compressor) in parts.items():
            if (given is None) != (compressor is None):
                reasons.append(f"{'no ' if given is None else ''}projections of the {name}")
            elif given is not None and compressor is not None:
                expected = (num_tokens, compressor.channels)
                if given.values.shape != expected or given.gates.shape != expected:
                    shapes = f"{list(given.values.shape)} and {list(given.gates.shape)}"
                    reasons.append(f"values and gates of the {name} are {shapes}, not {list(expected)}")
        if reasons:
            raise UnsupportedStepError(f"layer {self.id}", reasons)
        return inputs

    def check_query(self, q: Tensor, index: IndexQuery | None, num_tokens: int) -> None:
        """Raise `UnsupportedStepError` unless q is [num_tokens, num_heads, head_dim] and index suits the indexer."""
        expected = (num_tokens, self.num_heads, self.head_dim)
        reasons = [] if q.shape == expected else [f"q is {list(q.shape)}, not {list(expected)}"]
        if (index is None) != (self.indexer is None):
            reasons.append("an index query goes with an indexed layer, and with no other")
        elif index is not None and self.indexer is not None:
            heads = (num_tokens, index.q.shape[1])
            if index.q.shape != (*heads, self.indexer.dim) or index.weights.shape != heads:
                shapes = f"{list(index.q.shape)} and {list(index.weights.shape)}"
                reasons.append(f"index q and weights are {shapes}, not {[*heads, self.indexer.dim]} and {list(heads)}")
        if reasons:
            raise UnsupportedStepError(f"layer {self.id}", reasons)


def _compressor_reasons(name: str, given: Compressor, compression: Compression) -> list[str]:
    expected = (compression.ratio, given.dim * (2 if compression.overlap else 1))
    if given.position_bias.shape == expected:
        return []
    return [f"the position_bias of its {name} is {list(given.position_bias.shape)}, not {list(expected)}"]
