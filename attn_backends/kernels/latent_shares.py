"""Division of the keys of `gluon_mla`'s requests into parts, so that no multiprocessor waits long.

A program has a multiprocessor to itself, and takes as long as its blocks of keys. If all programs are alike, the last
ones leave most multiprocessors idle: 160 programs on 132 take as long as 264. So the first requests are left whole, in
waves that are nearly full, and the others are divided to fill what is left.

It is a rule of sizes that a graph freezes anyway. Times are in blocks of 128 keys, 3.6 us each on an H200, as measured
there (docs/results/h200/kernels_gluon.json). In 20 requests of 5003 keys, 128 heads and width 4, undivided ones took
304 us, FlashMLA 178; the rule leaves 16 of these whole and expects 206.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

_PROGRAM = 2.5  # what a program takes beside its blocks
_MERGE, _MERGED_ROWS = 1.0, 16384  # a launch more, and as much again for so many rows of parts
_MOST_WAVES = 4  # of parts
_HARDLY = 1.02  # longer


class Shares(NamedTuple):
    """num_whole: requests that are not divided, the first ones. num_splits: parts of each of the others; 1 if none is
    divided.
    """

    num_whole: int
    num_splits: int


class Batch(NamedTuple):
    """bs: requests. rows: query rows times heads of each, at most. blocks: of keys, of each, at most. room: rows of
    parts that there is memory for.
    """

    bs: int
    rows: int
    blocks: int
    room: int

    @property
    def tiles(self) -> int:
        """Programs of a request that is not divided."""
        return -(-self.rows // 64)


@lru_cache(1024)
def share_requests(batch: Batch, num_processors: int) -> Shares:
    """The shares with the fewest programs of divided requests, of those that take hardly longer than the best."""
    if batch.tiles == 0:
        return Shares(batch.bs, 1)
    found, last = [Shares(batch.bs, 1)], batch.bs * batch.tiles // num_processors
    for waves in range(max(last - 1, 0), last + 1):
        num_whole = waves * num_processors // batch.tiles
        rest = batch.bs - num_whole
        if rest:
            most = -(-_MOST_WAVES * num_processors // (rest * batch.tiles))
            most = min(most, batch.blocks, batch.room // (rest * batch.rows))
            found += [Shares(num_whole, num_splits) for num_splits in range(2, most + 1)]
    times = [blocks_taken(batch, shares, num_processors) for shares in found]
    near = [shares for shares, time in zip(found, times, strict=True) if time <= _HARDLY * min(times)]
    return min(near, key=lambda shares: (batch.bs - shares.num_whole) * shares.num_splits)


def blocks_taken(batch: Batch, shares: Shares, num_processors: int) -> float:
    """The time of shares, in blocks. Programs are begun in their order, each where one has ended first."""
    num_whole, num_splits = shares
    rest = (batch.bs - num_whole) * batch.tiles
    whole, part = batch.blocks + _PROGRAM, -(-batch.blocks // num_splits) + _PROGRAM
    waves, num_later = divmod(num_whole * batch.tiles, num_processors)
    early, late = waves * whole, (waves + 1) * whole if num_later else 0.0
    left = rest * num_splits
    while left > 0:
        if not num_later or early <= late:
            early, left = early + part, left - (num_processors - num_later)
        else:
            late, left = late + part, left - num_later
    merged = _MERGE + rest * 64 * num_splits / _MERGED_ROWS if num_splits > 1 else 0.0
    return max(early, late) + merged
