"""A committed state's requests as one Triton launch: what `spec_metadata.state.copy_requests` copies, in one node."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import triton
import triton.language as tl
from torch import Tensor

from attn_backends.kernels.devices import is_watched
from attn_backends.kernels.triton_launch import Launch, unspecialized
from spec_metadata import CommittedState, RequestTable
from spec_metadata.state import Load, copy_requests

_BLOCK = 1024


@unspecialized
def _load_requests(
    seq_lens,
    rows,
    bs,
    lens_stride,
    rows_stride,
    own_lens,
    own_lens_stride,
    own_rows,
    own_rows_stride,
    num_real,
    BLOCK: tl.constexpr,
):
    """Lengths and rows of the first `bs` requests, and how many they are. own_rows: None on a block table."""
    request = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    given = request < bs
    tl.store(num_real, bs, mask=tl.program_id(0) == 0)
    tl.store(own_lens + request * own_lens_stride, tl.load(seq_lens + request * lens_stride, mask=given), mask=given)
    if own_rows is not None:
        tl.store(own_rows + request * own_rows_stride, tl.load(rows + request * rows_stride, mask=given), mask=given)


def bind_load(state: CommittedState) -> Load:
    """A function that loads a state on a GPU, from checked lengths and rows. While operators are watched, as by a
    `RecordedGraph`, it copies as the definition does. One thread at a time.
    """
    own, paging = state.seq_lens, state.paging
    own_rows, rows_stride = (paging.rows, paging.rows.stride(0)) if isinstance(paging, RequestTable) else (None, 0)
    into = (own, own.stride(0), own_rows, rows_stride, state.num_real, _BLOCK)
    launch = Launch(_load_requests, own.device, (triton.cdiv(own.shape[0], _BLOCK), 1, 1))
    kept: dict[Hashable, Callable[..., None]] = {}

    def load(state: CommittedState, seq_lens: Tensor, rows: Tensor | None) -> None:
        if is_watched():
            copy_requests(state, seq_lens, rows)
            return
        given = seq_lens if rows is None else rows  # on a block table nothing reads it
        variant, sizes = (seq_lens.dtype, given.dtype), (seq_lens.numel(), *seq_lens.stride(), *given.stride())
        direct = kept.get(variant)
        if direct is not None:
            direct(seq_lens.data_ptr(), given.data_ptr(), *sizes)
            return
        launch.compile(variant, seq_lens, given, *sizes, *into)
        direct = launch.bind(variant, into)
        if direct is not None:
            kept[variant] = direct

    return load
