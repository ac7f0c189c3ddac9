"""Operators that write the pools of compressed layers: an implementation in torch, and one in Triton for CUDA.

    write_rows      rows to slots, as they are or in the 8-bit page format
    write_entries   entries that close in a forward, pooled, normed, rotated and written at once
    write_states    a compressor's values and gates of recent tokens

As `attn_backends.kernels.operators`: each is one node of a graph and has a fake, the CPU implementation is the
definition (`torch_compressed`), and float64 goes to it on a GPU too. Pools are as there. A slot of -1 is not written;
torch looks at the reserved page for it. Of rows for one slot, which only padding has, any may win.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_backends.kernels import fp8_pages, torch_compressed
from attn_backends.kernels.devices import on_its_device

_library = torch.library.Library("attn_backends", "FRAGMENT")
_library.define(
    "write_rows(Tensor(a!) pages, int num_rows, Tensor slots, Tensor rows, int reserved_page) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "write_entries(Tensor(a!) pages, int num_rows, Tensor slots, Tensor values, Tensor gates, Tensor states, "
    "Tensor input_rows, Tensor state_reads, Tensor first_positions, Tensor position_bias, Tensor norm_weight, "
    "float norm_eps, Tensor inv_freq, bool overlap, int reserved_page) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "write_states(Tensor(a!) states, Tensor slots, Tensor values, Tensor gates, int reserved_page) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def write_rows(pages: Tensor, num_rows: int, slots: Tensor, rows: Tensor, reserved_page: int) -> None:
    """Write rows [n, dim] to slots [n] of a pool. Raises ValueError where shapes do not fit together."""
    torch.ops.attn_backends.write_rows.default(pages, num_rows, slots, rows, reserved_page)


def write_entries(
    pages: Tensor,
    num_rows: int,
    slots: Tensor,
    values: Tensor,
    gates: Tensor,
    states: Tensor,
    input_rows: Tensor,
    state_reads: Tensor,
    first_positions: Tensor,
    position_bias: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    inv_freq: Tensor,
    overlap: bool,
    reserved_page: int,
) -> None:
    """Make the entries that close in a forward and write them to their slots [num_entries] of a pool.

    values, gates: [num_tokens, channels], what this forward's tokens are projected to. states: [num_pages, ring,
    2 * channels], those of earlier ones. input_rows, state_reads: [num_entries, read_window] int32, where the tokens of
    an entry are, -1 for nowhere. first_positions: [num_entries], of its block. position_bias: [ratio, channels];
    norm_weight: [dim]; inv_freq: [rope / 2]; overlap: the block before takes part with the first half of channels
    (`attn_backends.compressed_layer.Compressor`). Raises ValueError where shapes do not fit together.
    """
    torch.ops.attn_backends.write_entries.default(
        pages,
        num_rows,
        slots,
        values,
        gates,
        states,
        input_rows,
        state_reads,
        first_positions,
        position_bias,
        norm_weight,
        norm_eps,
        inv_freq,
        overlap,
        reserved_page,
    )


def write_states(states: Tensor, slots: Tensor, values: Tensor, gates: Tensor, reserved_page: int) -> None:
    """Write values and gates [num_tokens, channels] of tokens to slots [num_tokens] of states [num_pages, ring,
    2 * channels]. Raises ValueError where shapes do not fit together.
    """
    torch.ops.attn_backends.write_states.default(states, slots, values, gates, reserved_page)


def _write_rows_torch(pages: Tensor, num_rows: int, slots: Tensor, rows: Tensor, reserved_page: int) -> None:
    _check_write(pages, num_rows, slots, rows.shape)
    torch_compressed.write_rows(pages, num_rows, slots, rows, reserved_page)


@on_its_device
def _write_rows_cuda(pages: Tensor, num_rows: int, slots: Tensor, rows: Tensor, reserved_page: int) -> None:
    if torch.float64 in (pages.dtype, rows.dtype):
        _write_rows_torch(pages, num_rows, slots, rows, reserved_page)
        return
    from attn_backends.kernels import triton_compressor

    _check_write(pages, num_rows, slots, rows.shape)
    triton_compressor.write_rows(pages, num_rows, slots, rows)


def _write_entries_torch(pages: Tensor, num_rows: int, slots: Tensor, *rest: Any) -> None:
    *made_of, reserved_page = rest
    _check_entries(pages, num_rows, slots, *made_of)
    torch_compressed.write_rows(pages, num_rows, slots, torch_compressed.make_entries(*made_of), reserved_page)


@on_its_device
def _write_entries_cuda(pages: Tensor, num_rows: int, slots: Tensor, *rest: Any) -> None:
    if any(isinstance(x, Tensor) and x.dtype is torch.float64 for x in (pages, *rest)):
        _write_entries_torch(pages, num_rows, slots, *rest)
        return
    from attn_backends.kernels import triton_compressor

    _check_entries(pages, num_rows, slots, *rest[:-1])
    triton_compressor.write_entries(pages, num_rows, slots, *rest[:-1])


def _write_states_torch(states: Tensor, slots: Tensor, values: Tensor, gates: Tensor, reserved_page: int) -> None:
    _check_states(states, slots, values, gates)
    rows = torch.cat((values, gates), dim=-1)
    torch_compressed.write_rows(states, states.shape[1], slots, rows, reserved_page)


@on_its_device
def _write_states_cuda(states: Tensor, slots: Tensor, values: Tensor, gates: Tensor, reserved_page: int) -> None:
    if torch.float64 in (states.dtype, values.dtype):
        _write_states_torch(states, slots, values, gates, reserved_page)
        return
    from attn_backends.kernels import triton_compressor

    _check_states(states, slots, values, gates)
    triton_compressor.write_states(states, slots, values, gates)


def _nothing_fake(*arguments: object) -> None:
    """A write returns nothing."""


def _check_write(pages: Tensor, num_rows: int, slots: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse rows of a shape that do not fit into a pool."""
    if len(shape) != 2 or slots.shape != shape[:1] or shape[1] != check_pool(pages, num_rows):
        raise ValueError(
            f"a write of rows {list(shape)} to slots {list(slots.shape)} of pages {list(pages.shape)} {pages.dtype}; "
            "needed are rows [n, dim] of the pool's dim and slots [n]"
        )


def _check_states(states: Tensor, slots: Tensor, values: Tensor, gates: Tensor) -> None:
    if values.shape != gates.shape or values.shape != (*slots.shape, states.shape[2] / 2):
        raise ValueError(
            f"a write of values {list(values.shape)} and gates {list(gates.shape)} to slots {list(slots.shape)} of "
            f"states {list(states.shape)}; needed are as many of each as slots, [n, channels] and [num_pages, ring, "
            "2 * channels]"
        )


def check_pool(pages: Tensor, num_rows: int) -> int:
    """Elements of a row of a pool; a ValueError if it is none."""
    if pages.dtype is torch.uint8 and pages.ndim == 2:
        if pages.shape[1] == fp8_pages.page_bytes(num_rows) and pages.stride(1) == 1:
            return fp8_pages.ROW_DIM
    elif pages.ndim == 3 and pages.shape[1] == num_rows:
        return pages.shape[2]
    raise ValueError(
        f"pages {list(pages.shape)} {pages.dtype} of {num_rows} rows are no pool: needed is [num_pages, num_rows, "
        f"dim], or [num_pages, {fp8_pages.page_bytes(num_rows)}] uint8 with neighbouring bytes"
    )


def _check_entries(
    pages: Tensor,
    num_rows: int,
    slots: Tensor,
    values: Tensor,
    gates: Tensor,
    states: Tensor,
    input_rows: Tensor,
    state_reads: Tensor,
    first_positions: Tensor,
    position_bias: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    inv_freq: Tensor,
    overlap: bool,
) -> None:
    """Refuse what a kernel would read out of bounds or misread."""
    num_entries, dim = slots.shape[0], check_pool(pages, num_rows)
    ratio, channels = position_bias.shape
    window = (num_entries, ratio * (2 if overlap else 1))
    if (
        norm_weight.shape != (dim,)
        or channels != dim * (2 if overlap else 1)
        or values.shape != (values.shape[0], channels)
        or gates.shape != values.shape
        or states.shape[2] != 2 * channels
        or input_rows.shape != window
        or state_reads.shape != window
        or first_positions.shape != (num_entries,)
        or 2 * inv_freq.shape[0] > dim
    ):
        names = "slots values gates states input_rows state_reads first_positions position_bias norm_weight inv_freq"
        tokens = (slots, values, gates, states, input_rows, state_reads, first_positions)
        given = zip(names.split(), (*tokens, position_bias, norm_weight, inv_freq), strict=True)
        raise ValueError(
            f"write_entries: {', '.join(f'{name} {list(t.shape)}' for name, t in given)} do not fit together or to "
            f"rows of {dim}{' of overlapping blocks' if overlap else ''}"
        )


_IMPLEMENTATIONS = {
    "write_rows": (_write_rows_torch, _write_rows_cuda),
    "write_entries": (_write_entries_torch, _write_entries_cuda),
    "write_states": (_write_states_torch, _write_states_cuda),
}
for _name, (_definition, _launch) in _IMPLEMENTATIONS.items():
    _library.impl(_name, _definition, "CPU")
    _library.impl(_name, _launch, "CUDA")
    torch.library.register_fake(f"attn_backends::{_name}", _nothing_fake, lib=_library)
