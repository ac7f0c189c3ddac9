"""Mutants of tiles and splits: kernels that are right up to some number of keys, rows, nodes, requests or heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.backends.fa3 import FA3Backend
from attn_backends.kernels import torch_attention
from spec_metadata import Buffers, Step
from spec_metadata.plans import ragged
from tests.mutants.mutant import mutant

Attended = tuple[Tensor, Tensor]


def after_attention(patch: pytest.MonkeyPatch, spoil: Callable[[Tensor, Tensor, Tensor, bool], Attended]) -> None:
    """Let spoil(out, lse, kv_lens, causal) follow the attention of padded requests [bs, width, num_heads, ...]."""
    over_pages = torch_attention._over_pages

    def spoilt(q: Tensor, lens: Tensor, k: Tensor, v: Tensor, pages: Tensor, kv_lens: Tensor, *rest: Any) -> Attended:
        return spoil(*over_pages(q, lens, k, v, pages, kv_lens, *rest), kv_lens, rest[0])

    patch.setattr(torch_attention, "_over_pages", spoilt)


@mutant("ROCm/aiter #2720: EAGLE-3 acceptance does not fall by position", "scale.widths")
def rows_of_odd_widths_repeated(patch: pytest.MonkeyPatch) -> None:
    """Every row of a chain gets the output of its request's first where the width is no power of two."""

    def first(out: Tensor, lse: Tensor, kv_lens: Tensor, causal: bool) -> Attended:
        width = out.shape[1]
        return (out[:, :1].expand_as(out), lse) if causal and width & (width - 1) else (out, lse)

    after_attention(patch, first)


@mutant("ROCm/aiter #4711: NaN in MTP decode at context 260, 8 rows", "scale.edges")
def masked_split_gives_nan(patch: pytest.MonkeyPatch) -> None:
    """A split of 256 keys that later rows of a request see and this row does not stores NaN, which the merge keeps."""

    def split(out: Tensor, lse: Tensor, kv_lens: Tensor, causal: bool) -> Attended:
        width = out.shape[1]
        last = kv_lens.unsqueeze(1) - 1
        row = last - torch.arange(width - 1, -1, -1, device=out.device)
        masked = causal & (last // 256 > row // 256) & (row >= 0) & (width >= 8)
        return out.masked_fill(masked[..., None, None], float("nan")), lse

    after_attention(patch, split)


@mutant("vLLM flash-attention #176, #190, vLLM #51320: the naive fix of a split for verifies", "scale.edges")
def splits_folded_on_the_first_request(patch: pytest.MonkeyPatch) -> None:
    """Of a verify whose keys are split, over 512, the combine kernel gives every request the first one's output."""

    def folded(out: Tensor, lse: Tensor, kv_lens: Tensor, causal: bool) -> Attended:
        is_split = (kv_lens > 512).view(-1, 1, 1, 1) & (out.shape[1] > 1)
        return torch.where(is_split, out[:1], out), lse

    after_attention(patch, folded)


@mutant("TensorRT-LLM #11300: wrong with 20 draft tokens (cause not established)", "scale.widths")
def rows_past_the_16th_zeroed(patch: pytest.MonkeyPatch) -> None:
    """A tile holds 16 rows of a request; the others give zeros."""
    after_attention(patch, lambda out, lse, kv_lens, causal: (out.clone().index_fill_(1, _past(out, 16), 0), lse))


def _past(out: Tensor, most: int) -> Tensor:
    return torch.arange(min(most, out.shape[1]), out.shape[1], device=out.device)


@mutant("our own: no prompt had more than 124 rows", "scale.widths")
def rows_past_the_128th_zeroed(patch: pytest.MonkeyPatch) -> None:
    """Rows of a request past the 128th give zeros."""
    after_attention(patch, lambda out, lse, kv_lens, causal: (out.clone().index_fill_(1, _past(out, 128), 0), lse))


@mutant("SGLang #12349: illegal access with 64 draft tokens, fine with 60 (cause not established)", "scale.widths")
def nodes_past_the_60th_zeroed(patch: pytest.MonkeyPatch) -> None:
    """Rows of a request past the 60th give zeros."""
    after_attention(patch, lambda out, lse, kv_lens, causal: (out.clone().index_fill_(1, _past(out, 60), 0), lse))


@mutant("a grid for few requests", "scale.edges")
def requests_past_the_256th_zeroed(patch: pytest.MonkeyPatch) -> None:
    """The grid has 256 requests; the others give zeros."""
    after_attention(patch, lambda out, lse, kv_lens, causal: (out.clone().index_fill_(0, _requests(out, 256), 0), lse))


@mutant("a grid for few requests", "scale.edges")
def requests_past_the_64th_zeroed(patch: pytest.MonkeyPatch) -> None:
    """The grid has 64 requests; the others give zeros."""
    after_attention(patch, lambda out, lse, kv_lens, causal: (out.clone().index_fill_(0, _requests(out, 64), 0), lse))


def _requests(out: Tensor, most: int) -> Tensor:
    return torch.arange(min(most, len(out)), len(out), device=out.device)


@mutant("a tile of heads", "scale.edges")
def heads_past_the_64th_zeroed(patch: pytest.MonkeyPatch) -> None:
    """Query heads past the 64th give zeros."""

    def few(out: Tensor, lse: Tensor, kv_lens: Tensor, causal: bool) -> Attended:
        heads = torch.arange(out.shape[2], device=out.device) >= 64
        return out.masked_fill(heads.view(1, 1, -1, 1), 0), lse

    after_attention(patch, few)


@mutant("a grid's index in 16 bits", "scale.crossed")
def query_rows_past_32767_zeroed(patch: pytest.MonkeyPatch) -> None:
    """A launch that numbers its requests, rows and heads in one dimension gives zeros past the 32,767th."""

    def numbered(out: Tensor, lse: Tensor, kv_lens: Tensor, causal: bool) -> Attended:
        numbers = torch.arange(out.shape[:3].numel(), device=out.device).view(*out.shape[:3], 1)
        return out.masked_fill(numbers >= 2**15, 0), lse

    after_attention(patch, numbered)


def clamp_lengths(patch: pytest.MonkeyPatch, clamp: Callable[[Tensor], Tensor]) -> None:
    """Let FA3's plan hold changed lengths."""
    write = ragged.write_ragged

    def clamped(step: Step, buffers: Buffers) -> None:
        write(step, buffers)
        buffers["seqused_k"].copy_(clamp(buffers["seqused_k"]))

    patch.setattr(ragged, "write_ragged", clamped)


@mutant("lengths in 16 bits", "scale.edges")
def lengths_in_16_bits(patch: pytest.MonkeyPatch) -> None:
    """The number of keys is kept in 16 bits."""
    clamp_lengths(patch, lambda lens: lens % 2**16)


@mutant("a loop over tiles that ends one short", "scale.edges")
def keys_past_4096_not_seen(patch: pytest.MonkeyPatch) -> None:
    """Keys past the 4,096th are not seen."""
    clamp_lengths(patch, lambda lens: lens.clamp(max=4096))


@mutant("a tail tile of one key", "scale.edges")
def tail_of_one_key_dropped(patch: pytest.MonkeyPatch) -> None:
    """The last key is dropped where it stands alone in a tile of 128."""
    clamp_lengths(patch, lambda lens: lens - ((lens % 128 == 1) & (lens > 128)).to(lens.dtype))


@mutant("TensorRT-LLM #18002: Gemma-4 FA2 decode, tiles of the captured lengths", "scale.edges", graph=True)
def splits_of_the_capture_kept(patch: pytest.MonkeyPatch) -> None:
    """A graph reads as many splits of 256 keys as the captured batch had."""

    def cut(self: FA3Backend, step: Step, buffers: Buffers) -> Any:
        longest = int(buffers["seqused_k"].max()) if step.bs else 0
        pages = -(-longest // 256) * 256 // buffers.extent.page_size or buffers.extent.max_pages
        plans = ragged.view_ragged(step, buffers)
        return [replace(plan, page_table=buffers["page_table"][:, : max(pages, 1)]) for plan in plans]

    patch.setattr(FA3Backend, "plans", cut)
