"""FlashMLA's schedules as its kernels read them: which blocks of keys every part of the GPU works on."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def shared_out(parts: Tensor, splits: Tensor) -> list[int]:
    """The end block of each request in a schedule, -1 where its own end is; refuses a schedule that is no partition.

    parts: [num_parts, 8] int32. splits: [n + 1] int32. A request without keys has a part, and no block of it. Every
    part but those behind the end works on something, as FlashMLA's kernels require.
    """
    firsts = splits.tolist()
    begun: list[tuple[int, int, bool]] = []  # of each request: end block so far, pieces, whether they say "split"
    n = len(firsts) - 1
    for first, last, first_block, end_block, piece, is_first_split, is_last_split, _ in parts.tolist():
        if first >= n:
            continue
        assert first <= last < n, "a part without work makes a kernel leave while its loads are under way"
        for request in range(first, last + 1):
            begin = first_block if request == first else 0
            end = end_block if request == last else None  # else to the request's own end
            split = bool(is_first_split if request == first else is_last_split if request == last else False)
            if begin == 0:
                assert len(begun) == request, f"request {request} begins twice, or after {len(begun)}"
                assert request != first or piece == 0
                begun.append((-1 if end is None else end, 1, split))
            else:
                before, pieces, was_split = begun[request]
                assert (before, pieces) == (begin, piece), f"request {request}: {begin} does not follow {before}"
                assert was_split, f"request {request} is split and its first part says it is not"
                assert split
                begun[request] = (-1 if end is None else end, pieces + 1, True)
    assert len(begun) == n, f"{n - len(begun)} requests have no part"
    pieces = [each[1] for each in begun]
    assert [b - a for a, b in pairwise(firsts)] == pieces, "splits count other pieces"
    assert firsts[-1] <= n + len(parts), "more pieces than the kernels have room for"
    assert [split for _, _, split in begun] == [count > 1 for count in pieces]
    return [end for end, _, _ in begun]


def reach(parts: Tensor, splits: Tensor, lens: Tensor) -> Tensor:
    """[n] keys of each request that a schedule reaches, for requests of lens [n]. Reads nothing on the host."""
    request, (first, last, _, end_block) = torch.arange(len(lens)), parts.T[:4].unsqueeze(-1)
    end = torch.where(request == last, 64 * end_block, lens)  # whole requests end where they end at the launch
    return torch.where((first <= request) & (request <= last), end, 0).amax(0)


def one_part_each(lens: Tensor, num_parts: int) -> tuple[Tensor, Tensor]:
    """A schedule (parts, splits) that gives whole requests of lens [n] int32 to parts, the last part the rest."""
    n, parts = len(lens), torch.zeros(num_parts, 8, dtype=torch.int32)
    first = torch.arange(num_parts, dtype=torch.int32)
    last = torch.where(first == num_parts - 1, max(n, num_parts) - 1, first)
    parts[:, 0], parts[:, 1] = first, last
    parts[:, 3] = -(-lens[last.clamp(max=n - 1)] // 64)
    return parts, torch.arange(n + 1, dtype=torch.int32)
