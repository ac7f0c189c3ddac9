"""Vendors' schedules, planned on the device by us: operators of `torch.library`, namespace `attn_backends`.

    share_out    FlashMLA's share-out of blocks of keys to the parts of the GPU

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
    "share_out(Tensor lens, Tensor? more_lens, Tensor(a!) parts, Tensor(b!) splits, Tensor(c!)? read_lens, "
    "int most) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def share_out(
    lens: Tensor,
    parts: Tensor,
    splits: Tensor,
    *,
    more_lens: Tensor | None = None,
    read_lens: Tensor | None = None,
    most: int = 2**30,
) -> None:
    """Share blocks of 64 keys of n requests out to parts of the GPU, as evenly as contiguous pieces allow.

    lens: [n] int32, keys of each request. parts: [num_parts, 8] int32, written: first and last request of a part (both
    inclusive), first block of the first and end block of the last, number of the first piece in its request, whether
    the first and the last request are split, 0 (FlashMLA's `DecodingSchedMeta`). splits: [n + 1] int32, written: first
    piece of each request among all, and the end. more_lens: [n] int32, keys of a second list, which begin at a whole
    block; at most `most` of them are read, and `read_lens` [n] int32 is written with how many.

    A request counts as its blocks, at least one, and an overhead of at most 5. Laid out one after the other, requests
    are cut at equal distances; a cut in an overhead begins the next request. The distance is such that every part that
    is not behind the end has at least one block.
    """
    torch.ops.attn_backends.share_out(lens, more_lens, parts, splits, read_lens, most)


def _share_out_torch(
    lens: Tensor, more_lens: Tensor | None, parts: Tensor, splits: Tensor, read_lens: Tensor | None, most: int
) -> None:
    num_parts, n, device = parts.shape[0], lens.shape[0], lens.device
    num_blocks = (lens.long() + BLOCK_KEYS - 1) // BLOCK_KEYS
    if more_lens is not None:
        more = more_lens.long().clamp(max=most)
        num_blocks = num_blocks + (more + BLOCK_KEYS - 1) // BLOCK_KEYS
        if read_lens is not None:
            read_lens.copy_(more)
    is_empty = num_blocks == 0
    num_blocks = num_blocks.clamp_min(1)
    distance, overhead = _distance(num_blocks.sum(), n, num_parts)
    ends = (num_blocks + overhead).cumsum(0) - overhead
    starts = ends - num_blocks
    pieces = torch.div(ends - 1, distance, rounding_mode="floor") - torch.div(starts, distance, rounding_mode="floor")
    splits[:1].zero_()
    splits[1:].copy_((pieces + 1).cumsum(0))

    cuts = torch.arange(num_parts + 1, device=device) * distance
    request = torch.searchsorted(ends, cuts, right=True)
    cut_request = request.clamp(max=n - 1)
    block = torch.where(request < n, (cuts - starts[cut_request]).clamp_min(0), 0)
    first, first_block, last_cut, last_block = request[:-1], block[:-1], request[1:], block[1:]
    is_last_split = last_block > 0
    whole = (last_cut - 1).clamp_min(0)
    last = torch.where(is_last_split, last_cut, last_cut - 1)
    end_block = torch.where(is_last_split, last_block, torch.where(is_empty[whole], 0, num_blocks[whole]))
    piece = torch.arange(num_parts, device=device) - torch.div(
        starts[cut_request[:-1]], distance, rounding_mode="floor"
    )
    is_first_split, is_one = first_block > 0, first == last
    either = is_first_split | is_last_split
    columns = (
        first,
        last,
        first_block,
        end_block,
        torch.where(is_first_split, piece, 0),
        torch.where(is_one, either, is_first_split),
        torch.where(is_one, either, is_last_split),
        torch.zeros_like(first),
    )
    parts.copy_(torch.stack([column.to(parts.dtype) for column in columns], 1))


def _distance(num_blocks: Tensor, n: int, num_parts: int) -> tuple[Tensor, Tensor]:
    """Blocks between two cuts, and the overhead of a request, which two cuts may not both fall in."""
    distance = torch.div(num_blocks + n * OVERHEAD + num_parts - 1, num_parts, rounding_mode="floor")
    spare = max(num_parts - n, 1)
    close = torch.div(num_blocks - n + spare - 1, spare, rounding_mode="floor").clamp(1, OVERHEAD)
    distance = torch.where(distance > OVERHEAD, distance, close)
    return distance, (distance - 1).clamp(max=OVERHEAD)


@on_its_device
def _share_out_cuda(
    lens: Tensor, more_lens: Tensor | None, parts: Tensor, splits: Tensor, read_lens: Tensor | None, most: int
) -> None:
    from attn_backends.kernels import triton_share_out

    triton_share_out.share_out(lens, more_lens, parts, splits, read_lens, most)


_library.impl("share_out", _share_out_torch, "CPU")
_library.impl("share_out", _share_out_cuda, "CUDA")
torch.library.register_fake("attn_backends::share_out", lambda *_: None, lib=_library)
