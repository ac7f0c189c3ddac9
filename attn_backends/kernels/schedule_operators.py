"""Vendors' schedules, planned on the device by us: operators of `torch.library`, namespace `attn_backends`.

    share_out    a share-out of blocks of keys to the parts of the GPU, as FlashMLA reads it

The CPU implementation in torch is the definition; on a GPU one Triton launch writes the same integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_backends.kernels.devices import on_its_device

BLOCK_KEYS = 64
OVERHEAD = 5
"""What a part pays to begin a request, in blocks: FlashMLA's own estimate for its kernels of SM90."""

_library = torch.library.Library("attn_backends", "FRAGMENT")
_library.define(
    "share_out(Tensor lens, Tensor? more_lens, Tensor(a!) parts, Tensor(b!) splits, Tensor(c!) marks, "
    "Tensor(d!)? read_lens, int most) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def share_out(
    lens: Tensor,
    parts: Tensor,
    splits: Tensor,
    marks: Tensor,
    *,
    more_lens: Tensor | None = None,
    read_lens: Tensor | None = None,
    most: int = 2**30,
) -> None:
    """Share blocks of 64 keys of n requests out to parts of the GPU, in FlashMLA's format.

    lens: [n] int32, keys of each request. parts: [num_parts, 8] int32, written: first and last request of a part (both
    inclusive), first block of the first and end block of the last, number of the first piece in its request. Then
    whether the first and the last request are split, 0. The format is FlashMLA's `DecodingSchedMeta`. splits: [n + 1]
    int32, written: first piece of each request among all, and the end. marks: [n, 2] int32, scratch. more_lens: [n]
    int32, keys of a second list, which begin at a whole block; at most `most` of them are read, and `read_lens` [n]
    int32 is written with how many.

    Requests lie on an axis of costs, a unit for each block, and every part gets an even share of the axis, so that a
    block's part follows from its place alone. They lie one after the other, an overhead between two. Where the longest
    allows it they lie evenly, so that parts begin with requests, which then have no more pieces than they need.
    FlashMLA fills one part after the other instead, by the same costs; its shares are as even.
    """
    torch.ops.attn_backends.share_out(lens, more_lens, parts, splits, marks, read_lens, most)


def _share_out_torch(
    lens: Tensor,
    more_lens: Tensor | None,
    parts: Tensor,
    splits: Tensor,
    marks: Tensor,
    read_lens: Tensor | None,
    most: int,
) -> None:
    num_parts, n = parts.shape[0], lens.shape[0]
    blocks = (lens.long() + BLOCK_KEYS - 1) // BLOCK_KEYS
    if more_lens is not None:
        more = more_lens.long().clamp(max=most)
        blocks = blocks + (more + BLOCK_KEYS - 1) // BLOCK_KEYS
        if read_lens is not None:
            read_lens.copy_(more)
    sizes, request = blocks.clamp_min(1), torch.arange(n, device=lens.device)
    ends, longest = (sizes + OVERHEAD).cumsum(0), sizes.max()
    share = (ends[-1] + num_parts - 1) // num_parts
    if n <= num_parts:  # whole parts a request, or else whole requests a part
        pieces_of_each = num_parts // n
        even_share = torch.maximum((longest + pieces_of_each - 1) // pieces_of_each, share)
        stride, is_even = pieces_of_each * even_share, even_share <= share + OVERHEAD
    else:
        each = -(-n // num_parts)
        stride, even_share, is_even = longest, each * longest, each * (longest + OVERHEAD) <= share + 2 * OVERHEAD
    starts = torch.where(is_even, request * stride, ends - OVERHEAD - sizes)
    share, ends = torch.where(is_even, even_share, share), starts + sizes
    marks.copy_(torch.stack((starts, ends), 1))
    first, pieces = starts // share, (ends - 1) // share - starts // share + 1
    splits[:1].zero_()
    splits[1:].copy_(pieces.cumsum(0))
    part = torch.arange(num_parts, device=lens.device)
    begin = torch.searchsorted(ends, part * share, right=True)
    end = torch.searchsorted(starts, (part + 1) * share) - 1
    is_used, begin = (begin <= end).unsqueeze(1), begin.clamp(max=n - 1)
    used = torch.stack(
        (
            begin,
            end,
            (part * share - starts[begin]).clamp_min(0),
            torch.minimum((part + 1) * share - starts[end], blocks[end]),
            part - first[begin],
            (pieces[begin] > 1).long(),
            (pieces[end] > 1).long(),
            torch.zeros_like(part),
        ),
        1,
    )
    unused = torch.tensor([n, n - 1, 0, 0, 0, 0, 0, 0], device=lens.device)
    parts.copy_(torch.where(is_used, used, unused))


@on_its_device
def _share_out_cuda(
    lens: Tensor,
    more_lens: Tensor | None,
    parts: Tensor,
    splits: Tensor,
    marks: Tensor,
    read_lens: Tensor | None,
    most: int,
) -> None:
    from attn_backends.kernels import triton_share_out

    triton_share_out.share_out(lens, more_lens, parts, splits, marks, read_lens, most)


_library.impl("share_out", _share_out_torch, "CPU")
_library.impl("share_out", _share_out_cuda, "CUDA")
torch.library.register_fake("attn_backends::share_out", lambda *_: None, lib=_library)
