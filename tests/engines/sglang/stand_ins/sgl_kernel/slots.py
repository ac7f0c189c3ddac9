"""Slots, tables and token rows of SGLang's speculative batches."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """The last accepted token of each request."""
    rows = torch.arange(len(accept_lens))
    last = accept_tokens.reshape(-1)[rows * accept_stride + accept_lens.long() - 1]
    bonus_tokens[: len(rows)] = last.to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """The slots of accepted rows, packed; accept_index is -1 where nothing was accepted."""
    flat = accept_index.reshape(-1)
    taken = flat[flat > -1].long()
    accept_out_cache_loc[: len(taken)] = out_cache_loc[taken].to(accept_out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """The table's slots after the committed tokens, topk * num_steps of each request."""
    columns = seq_lens.long().unsqueeze(1) + torch.arange(topk * num_steps)
    found = req_to_token[req_pool_indices.long().unsqueeze(1), columns]
    out_cache_loc.view(-1)[: found.numel()] = found.reshape(-1).to(out_cache_loc.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """The table's slots of positions from start to end, packed."""
    at = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        out_cache_loc[at : at + end - start] = req_to_token[row, start:end].to(out_cache_loc.dtype)
        at += end - start


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """The other way round: packed slots into the table."""
    at = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[at : at + end - start].to(req_to_token.dtype)
        at += end - start


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Each request's tokens one place to the left, and the new one behind them, or at its row of select_index."""
    new = topk_index.reshape(-1)
    for i, (start, length) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)):
        if length > 0:
            input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
            input_ids[start + length - 1 if select_index is None else int(select_index[i])] = new[i]


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Slots to slots in every buffer, all sources read first. data_ptrs: addresses; strides: bytes of a token."""
    for pointer, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(pointer + source * stride, stride) for source in src_loc.tolist()]
        for target, row in zip(tgt_loc.tolist(), rows, strict=True):
            ctypes.memmove(pointer + target * stride, row, stride)
