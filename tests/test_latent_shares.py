"""Which requests of MLA on Hopper are divided, by a simulation of multiprocessors that take program after program."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from math import ceil

import pytest

from attn_backends.kernels.latent_shares import Batch, Shares, blocks_taken, share_requests

ROOM = 2**14  # rows of parts that a backend has memory for
PROGRAM, MERGE, MERGED_ROWS = 2.5, 1.0, 2**14  # as measured


def simulated(batch: Batch, shares: Shares, num_processors: int) -> float:
    """Time of programs in their order, each on the multiprocessor that is free first, and of the merge."""
    part, rest = ceil(batch.blocks / shares.num_splits), batch.bs - shares.num_whole
    sizes = [batch.blocks] * shares.num_whole * batch.tiles
    for start in range(0, batch.blocks, part):
        sizes += [min(part, batch.blocks - start)] * rest * batch.tiles
    ends = [0.0] * num_processors
    for size in sizes:
        heapq.heapreplace(ends, ends[0] + size + PROGRAM)
    rows = rest * batch.tiles * 64 * shares.num_splits
    return max(ends) + (MERGE + rows / MERGED_ROWS if shares.num_splits > 1 else 0.0)


def all_alike(batch: Batch, num_processors: int) -> Shares:
    """The rule before this one: all requests are divided alike, or none is."""
    num_programs = batch.bs * batch.tiles
    most = min(batch.room // (batch.bs * batch.rows), batch.blocks, ceil(2 * num_processors / num_programs))
    fills = [num_programs * parts / num_processors for parts in range(1, max(most, 1) + 1)]
    used = [fill / ceil(fill) for fill in fills]
    parts = next(i for i, each in enumerate(used, start=1) if each >= 0.9 * max(used))
    return Shares(0 if parts > 1 else batch.bs, parts)


def batches(num: int) -> Iterator[tuple[Batch, int]]:
    """Batches at random, and multiprocessors of Hopper's cards."""
    draw = random.Random(7)
    while num:
        rows = draw.choice((16, 32, 64, 128)) * draw.choice((1, 2, 3, 4, 5, 8, 16))
        context = draw.choice((500, 1024, 4096, 5003, 32768, 131072, draw.randint(1, 40000)))
        batch = Batch(draw.choice((1, 8, 20, 32, 100, 128, draw.randint(1, 256))), rows, ceil(context / 128), ROOM)
        if rows > 16 and batch.bs * batch.tiles < 5000:
            num -= 1
            yield batch, draw.choice((132, 132, 114))


def test_no_batch_takes_longer_than_when_all_are_divided_alike_and_the_worst_takes_far_less():
    gained = []
    for batch, num_processors in batches(600):
        shares = share_requests(batch, num_processors)
        before = simulated(batch, all_alike(batch, num_processors), num_processors)
        gained.append(before / simulated(batch, shares, num_processors))
        assert gained[-1] > 0.98, (batch, shares, num_processors)
    assert max(gained) > 1.5
    assert sum(each > 1.02 for each in gained) > 0.3 * len(gained)


def test_its_times_are_those_of_the_simulation():
    """But that a request's last part may be shorter than the others, which it does not count."""
    for batch, num_processors in batches(300):
        shares = share_requests(batch, num_processors)
        even = batch._replace(blocks=ceil(batch.blocks / shares.num_splits) * shares.num_splits)
        assert blocks_taken(even, shares, num_processors) == pytest.approx(simulated(even, shares, num_processors))


def test_parts_fit_into_their_memory():
    for batch, num_processors in batches(300):
        num_whole, num_splits = share_requests(batch, num_processors)
        assert 0 <= num_whole <= batch.bs
        assert 1 <= num_splits <= batch.blocks
        assert (num_whole == batch.bs) == (num_splits == 1)
        assert num_splits == 1 or (batch.bs - num_whole) * batch.rows * num_splits <= ROOM
    assert share_requests(Batch(20, 512, 40, 0), 132) == (20, 1)


@pytest.mark.parametrize(
    ("batch", "shares"),
    [
        ((20, 512, 40), (16, 4)),  # 160 programs on 132: 128 whole, then 32 in four parts each
        ((32, 512, 32), (32, 1)),  # 256, two waves
        ((32, 128, 32), (0, 2)),
        ((8, 128, 32), (0, 8)),
        ((100, 128, 40), (66, 3)),
        ((1, 8192, 64), (1, 1)),
        ((1, 64, 0), (1, 1)),
    ],
)
def test_the_last_requests_fill_what_whole_ones_leave(batch, shares):
    assert share_requests(Batch(*batch, ROOM), 132) == shares


@pytest.mark.parametrize(
    "batch", [Batch(0, 64, 4, ROOM), Batch(3, 0, 4, ROOM), Batch(3, 64, 0, ROOM), Batch(3, 64, 4, 0)]
)
def test_a_batch_with_nothing_to_share_is_whole(batch: Batch) -> None:
    assert share_requests(batch, 132) == Shares(batch.bs, 1)
