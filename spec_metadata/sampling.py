"""The target's choice at every row: greedy or sampled, request by request, as fixed-shape device code without state.

A choice is the winner of an exponential race (the Gumbel-max trick): argmax of log p + g with g = -log(-log u). The
noise u is a pure function of (the request's seed, the row's position, the token). So a choice depends on neither batch
nor bucket, eager and replayed steps agree, replays advance because positions do, and a speculative worker makes the
very choices that plain decoding with the same seed makes.

Following these choices through a draft tree (`spec_metadata.accept`) preserves the target's distribution, because
drafts are deterministic. Speculative sampling accepts child k with p(c_k) / (1 - sum of p(c_j), j < k), and draws from
the renormalised residual if no child is accepted. That has the same distribution as drawing t ~ p once, going to the
child that holds t if one does, and emitting t otherwise. Two nodes of one depth share a position and therefore their
noise. At most one of them is on the accepted path, and which one depends on noise of earlier positions only, so on the
path noise is fresh at every node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_metadata.errors import InvalidStepError, check_tensor

_MAX_TEMPERATURE = torch.finfo(torch.float32).max
_MAX_TOP_K = torch.iinfo(torch.int32).max
_SEEDS = torch.iinfo(torch.int64)

# SplitMix64's odd increment and multipliers, as int64.
_GAMMA, _FIRST, _SECOND = (x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
# Weights are summed as integers in units of 2**-40: exactly, so in any order, on any device.
_UNIT = 2.0**40


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling options of one request.

    temperature: logits are divided by it; 0 is greedy. top_k: the most likely tokens that may be chosen; 0 is all.
    top_p: of those, renormalised, the fewest most likely that hold this much probability. seed: any int64; requests of
    one seed share their noise, so independent texts need different seeds. Raises `InvalidStepError` for values out of
    range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_real("temperature", self.temperature)
        if not 0 <= self.temperature <= _MAX_TEMPERATURE:
            raise InvalidStepError(
                f"temperature must be in [0, {_MAX_TEMPERATURE:.3g}] (0 is greedy), got {self.temperature}"
            )
        _check_real("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise InvalidStepError(f"top_p must be in (0, 1] (1 keeps every token), got {self.top_p}")
        _check_integer("top_k", self.top_k, 0, _MAX_TOP_K, "0 keeps every token")
        _check_integer("seed", self.seed, _SEEDS.min, _SEEDS.max, "int64")


def _check_real(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -math.inf < value < math.inf:
        raise InvalidStepError(f"{name} must be a finite number, got {value!r}")


def _check_integer(name: str, value: object, least: int, most: int, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidStepError(f"{name} must be an integer, got {value!r}")
    if not least <= value <= most:
        raise InvalidStepError(f"{name} must be in [{least}, {most}] ({meaning}), got {value}")


_DTYPES = {"temperature": torch.float32, "top_p": torch.float32, "top_k": torch.int32, "seed": torch.int64}


@dataclass(frozen=True, slots=True, eq=False)
class SamplingParams:
    """The `Sampling` of each request of a batch, on the device.

    temperature, top_p: [bs] float32. top_k: [bs] int32. seed: [bs] int64. Their values are trusted: a padded row may
    hold zeros, which is greedy.
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    seed: Tensor

    def __post_init__(self) -> None:
        check_tensor("seed", self.seed, ("bs",), (torch.int64,))
        for name, dtype in _DTYPES.items():
            check_tensor(f"{name}, one entry a request,", getattr(self, name), self.seed.shape, (dtype,))

    @classmethod
    def of(cls, requests: Sequence[Sampling], device: torch.device | str = "cpu") -> SamplingParams:
        """Copy the records of a batch to the device."""
        columns = {name: [getattr(request, name) for request in requests] for name in _DTYPES}
        return cls(**{name: torch.tensor(columns[name], dtype=_DTYPES[name], device=device) for name in columns})

    @classmethod
    def greedy(cls, bs: int, device: torch.device | str = "cpu") -> SamplingParams:
        """Greedy for every request of a batch."""
        return cls.of([Sampling()] * bs, device)


def choose(logits: Tensor, params: SamplingParams, positions: Tensor) -> Tensor:
    """The target's token at every row: [bs, width] int64.

    logits: [bs, width, vocab] of any float type, computed in float32, or in float64 if they are. positions: [bs, width]
    int64, where the rows' own tokens stand; the choice is the token of the position after. Filters are applied as vLLM
    and transformers do: temperature, then top-k, then top-p on what top-k left (a token is kept if the more likely ones
    hold less than top_p). Of tied logits the lower token id counts as the more likely, and exactly top_k tokens remain.
    The most likely token is always kept. A row whose largest logit is not finite has no distribution: its argmax is
    chosen, which of NaN is the first.

    This is the definition: it sorts the vocabulary of every row.
    """
    check_rows(logits, params, positions)
    precise = logits if logits.dtype is torch.float64 else logits.float()
    best_first, tokens = precise.sort(dim=-1, descending=True, stable=True)
    temperature = params.temperature.view(-1, 1, 1)
    divisor = torch.where(temperature > 0, temperature, 1)
    scores = (best_first - best_first[..., :1]) / divisor  # at most 0, so that no small temperature overflows
    keys = _draw(params.seed.unsqueeze(1), positions).unsqueeze(2)
    noisy = scores - _race_times(_draw(keys, tokens), scores.dtype).log()
    # Should top_p be so small that it keeps nothing, the first of equals wins, which is the most likely.
    winners = noisy.masked_fill(~_kept(scores, params), -math.inf).argmax(dim=-1, keepdim=True)
    winners = winners.masked_fill(~best_first[..., :1].isfinite(), 0)
    return tokens.gather(2, winners).squeeze(2)


def check_rows(logits: Tensor, params: SamplingParams, positions: Tensor) -> None:
    """Raise `InvalidStepError` unless logits are [bs, width, vocab] and positions [bs, width], bs as in params."""
    if logits.shape[:2] != positions.shape or logits.ndim != 3 or positions.shape[0] != params.seed.shape[0]:
        raise InvalidStepError(
            f"logits must be [bs, width, vocab] with positions [bs, width] for the {params.seed.shape[0]} requests of "
            f"the sampling parameters; got {list(logits.shape)} and {list(positions.shape)}"
        )


def _kept(scores: Tensor, params: SamplingParams) -> Tensor:
    """Which tokens may be chosen: [bs, width, vocab] bool. scores: log-weights, the best first, the best being 0."""
    temperature, top_p, top_k = (x.view(-1, 1, 1) for x in (params.temperature, params.top_p, params.top_k))
    ranks = torch.arange(scores.shape[-1], device=scores.device)
    limit = torch.where(top_k > 0, top_k, scores.shape[-1])
    in_top_k = ranks < torch.where(temperature > 0, limit, 1)
    weights = (scores.exp() * _UNIT * in_top_k).long()
    before = weights.cumsum(dim=-1) - weights
    in_top_p = (before < top_p.double() * weights.sum(dim=-1, keepdim=True)) | (top_p >= 1)
    return in_top_k & in_top_p


def _race_times(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Exponentially distributed times from random int64. The shortest, which decide, have the finest resolution."""
    uniform = (_shift(bits, 11).to(dtype) + 0.5) * 2.0**-53
    return -torch.log1p(-uniform.clamp_max(1 - torch.finfo(dtype).eps))


def _draw(states: Tensor, indices: Tensor) -> Tensor:
    """Number `indices` (0 is the first) of the SplitMix64 streams that start at `states`; int64, broadcast.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014, in arithmetic that wraps around.
    """
    mixed = states + (indices + 1) * _GAMMA
    mixed = (mixed ^ _shift(mixed, 30)) * _FIRST
    mixed = (mixed ^ _shift(mixed, 27)) * _SECOND
    return mixed ^ _shift(mixed, 31)


def _shift(bits: Tensor, count: int) -> Tensor:
    """Shift right, zeros coming in: `>>` of a negative int64 brings in ones."""
    return (bits >> count) & (2 ** (64 - count) - 1)
