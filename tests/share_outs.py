"""Vendors' schedules as their kernels read them: which blocks of keys every part of the GPU works on.

    python -m tests.share_outs --json FILE [--sets 10000] [--device cpu]

shares random sets of lengths out as we do for FlashMLA's dense and sparse kernels, and for FlashInfer's. It fails if
one is no partition: a block of keys that no part reads, or that two do. A row is a kernel.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_backends import results
from attn_backends.kernels.schedule_operators import share_out
from tests import work_lists

NUM_PARTS = (1, 2, 16, 33, 66, 132, 144)
WINDOW = 128  # of DeepSeek-V4's layers


class Lens(NamedTuple):
    """Keys of requests, or of rows, and of a second list; at most `most` of those are read. more: None without one."""

    lens: list[int]
    more: list[int] | None = None
    most: int = 2**30

    @property
    def read(self) -> list[int]:
        """Entries of the second list that are read."""
        return [min(each, self.most) for each in self.more or [0] * len(self.lens)]

    @property
    def blocks(self) -> list[int]:
        """Blocks of each, of both lists."""
        return [-(-a // 64) - (-b // 64) for a, b in zip(self.lens, self.read, strict=True)]


def random_lens(rng: random.Random) -> Lens:
    """Lengths of some requests, some of them of none or of whole blocks, or one long among short ones."""
    most = rng.choice((1, 64, 65, 300, 4100, 131072))
    edges = (0, 1, 64, most)
    n = rng.choice((1, 1, 2, 3, 5, 8, 31, 32, 33, 100, 128, 257))
    lens = [rng.randint(0, most) if rng.random() < 0.8 else rng.choice(edges) for _ in range(n)]
    if rng.random() < 0.1:
        lens = [1024] * n
        lens[rng.randrange(n)] = 131072
    return Lens(lens)


def random_rows(rng: random.Random) -> Lens:
    """Windows of some rows, and entries of which an indexer selects 512, or all are read."""
    most, n = rng.choice((0, 1, 64, 600, 1100, 33000)), rng.choice((1, 2, 3, 5, 8, 31, 33, 128, 512, 1028))
    lens = [rng.choice((0, 1, 64, WINDOW, rng.randint(0, WINDOW))) for _ in range(n)]
    return Lens(lens, [rng.randint(0, most) for _ in range(n)], rng.choice((512, 2**30)))


def planned(given: Lens, num_parts: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """parts, splits, and the entries that are read."""
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    n = len(given.lens)
    parts, splits, read = (torch.full(size, -7, **ints) for size in ((num_parts, 8), (n + 1,), (n,)))
    entries = {} if given.more is None else {"more_lens": torch.tensor(given.more, **ints), "read_lens": read}
    share_out(torch.tensor(given.lens, **ints), parts, splits, torch.zeros(n, 2, **ints), most=given.most, **entries)
    return parts.cpu(), splits.cpu(), read.cpu()


def check_partition(given: Lens, num_parts: int, device: str = "cpu") -> None:
    """Refuse a share-out by which not every block of keys belongs to one part."""
    parts, splits, read = planned(given, num_parts, device)
    assert given.more is None or read.tolist() == given.read, "other entries are read"
    check_whole(parts, splits, given.blocks)


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


def check_whole(parts: Tensor, splits: Tensor, blocks: list[int]) -> None:
    """Refuse a schedule that is no partition, or by which a request does not end at its last block."""
    ends = shared_out(parts, splits)
    wrong = [i for i, (end, own) in enumerate(zip(ends, blocks, strict=True)) if end not in (-1, own)]
    assert not wrong, f"requests {wrong} end at blocks {[ends[i] for i in wrong]}"


def is_whole(parts: Tensor, splits: Tensor, blocks: list[int]) -> bool:
    """Whether `check_whole` refuses nothing."""
    try:
        check_whole(parts, splits, blocks)
    except AssertionError:
        return False
    return True


DRAWN: dict[str, Callable[[random.Random], Lens]] = {"flashmla": random_lens, "flashmla_sparse": random_rows}


def rows(num_sets: int, device: str = "cpu") -> Iterator[dict[str, Any]]:
    """Each kernel's sets, of FlashMLA's on every number of parts in turn."""
    for kernel in (*DRAWN, "flashinfer"):
        rng, wrong = random.Random(0), []
        for number in range(num_sets):
            try:
                if kernel in DRAWN:
                    check_partition(DRAWN[kernel](rng), NUM_PARTS[number % len(NUM_PARTS)], device)
                else:
                    work_lists.check_random(rng)
            except AssertionError as error:
                wrong.append({"set": number, "reason": str(error)})
        found = {"kernel": kernel, "sets": num_sets, "wrong": len(wrong), "first_wrong": wrong[:1]}
        yield found | {"status": "fail" if wrong else "pass"}


def main() -> int:
    """Check; 1 if a set is not shared out as a partition."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path, metavar="FILE")
    parser.add_argument("--sets", type=int, default=10_000, metavar="N", help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    args = parser.parse_args()
    command = ["python", "-m", "tests.share_outs", "--sets", str(args.sets), "--json", str(args.json)]
    head, found = results.head(command, args.device), list(rows(args.sets, args.device))
    results.write(args.json, head, found)
    for row in found:
        print(*row.values())
    return int(any(row["status"] == "fail" for row in found))


if __name__ == "__main__":
    sys.exit(main())
