"""FlashInfer's lists of work as its kernels read them, and FlashInfer's own balance of them."""

from __future__ import annotations

import heapq
import random
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from attn_backends.kernels.work_operators import BLOCK_KEYS, MAX_WORK, NUM_WORDS, OVERHEAD, WorkLists, list_work
from spec_metadata.capacity import ceil_div

NUM_PROCESSORS = (1, 2, 7, 16, 66, 114, 132, 148)


class Requests(NamedTuple):
    """Query rows and keys of requests, and the heads that each row has."""

    q_lens: list[int]
    kv_lens: list[int]
    num_heads: int
    causal: bool

    @property
    def indptrs(self) -> tuple[Tensor, Tensor, Tensor]:
        """qo_indptr, kv_indptr (pages of one token), kv_len."""
        starts = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (self.q_lens, self.kv_lens)]
        return *starts, torch.tensor(self.kv_lens, dtype=torch.int32)

    def ends(self, rows: int) -> list[list[int]]:
        """Keys that the last row of each tile of so many rows sees, by request."""
        found = []
        for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True):
            seen = [kv_len - q_len + ceil_div(end, self.num_heads) for end in range(rows, q_len * self.num_heads, rows)]
            own = [max(min(end, kv_len), 0) if self.causal else kv_len for end in seen]
            found.append([*own, kv_len] if q_len else [])
        return found


def random_requests(rng: random.Random) -> Requests:
    """Requests of one width or packed, some of them without rows or keys, or of whole blocks."""
    most = rng.choice((1, 64, 65, 300, 1024, 4100, 131072))
    n = rng.choice((1, 1, 2, 3, 5, 8, 31, 32, 33, 100, 128, 257))
    kv_lens = [rng.randint(0, most) if rng.random() < 0.8 else rng.choice((0, 1, 64, most)) for _ in range(n)]
    if rng.random() < 0.2:
        kv_lens = [most] * n
    if rng.random() < 0.1:
        kv_lens = [1024] * n
        kv_lens[rng.randrange(n)] = 131072
    width = rng.choice((1, 1, 2, 4, 8, 65 if n < 40 else 9))
    q_lens = [width] * n if rng.random() < 0.7 else [rng.randint(0, width) for _ in range(n)]
    causal = rng.random() < 0.7
    if causal:
        kv_lens = [max(pair) for pair in zip(q_lens, kv_lens, strict=True)]
    return Requests(q_lens, kv_lens, rng.choice((1, 2, 4, 8, 16, 20, 32, 64, 96, 128, 192)), causal)


def new_lists(num_processors: int, cluster_size: int) -> WorkLists:
    """Lists that nothing was written to."""
    words = torch.full((NUM_WORDS,), -7, dtype=torch.int32)
    return WorkLists.of(words, max(num_processors // cluster_size, 1), cluster_size)


def listed(requests: Requests, num_processors: int, cluster_size: int, spare_tokens: int = 0) -> WorkLists:
    """The lists of work of requests. spare_tokens: rows that the host's bound has too many."""
    lists, num_tokens = new_lists(num_processors, cluster_size), sum(requests.q_lens) + spare_tokens
    causal, heads = requests.causal, requests.num_heads
    list_work(*requests.indptrs, lists, num_tokens=num_tokens, num_heads=heads, causal=causal)
    return lists


class Item(NamedTuple):
    """An item of work, as `ITEM_FIELDS`."""

    q_indptr: int
    kv_indptr: int
    partial_indptr: int
    q_len: int
    kv_len: int
    q_start: int
    kv_start: int
    kv_end: int


def items_of(lists: WorkLists) -> list[list[Item]]:
    """The items of each cluster; refuses an index that is not in order."""
    indptr = lists.work_indptr.tolist()
    assert indptr[0] == 0
    assert indptr[-1] <= MAX_WORK
    columns = [Item(*column) for column in lists.items[:, : indptr[-1]].T.tolist()]
    assert all(begin <= end for begin, end in pairwise(indptr)), "clusters begin in order"
    return [columns[begin:end] for begin, end in pairwise(indptr)]


def loads(lists: WorkLists) -> list[int]:
    """Blocks of keys of each cluster, and an overhead for each of its items."""
    return [sum(ceil_div(i.kv_end - i.kv_start, BLOCK_KEYS) + OVERHEAD for i in items) for items in items_of(lists)]


def check_partition(lists: WorkLists, requests: Requests) -> None:
    """Refuse lists by which not every row attends every key once, or not every row is written once."""
    size, num_clusters = lists.tile_rows, lists.work_indptr.shape[0] - 1
    room = 2 * num_clusters * size
    heads = requests.num_heads
    qo_indptr, kv_indptr, _ = (t.tolist() for t in requests.indptrs)
    found: dict[tuple[int, int], list[Item]] = {}
    for item in chain.from_iterable(items_of(lists)):
        found.setdefault((item.q_indptr, item.q_start), []).append(item)
    merged: dict[int, tuple[int, int]] = {}  # of each row: its first partial result, and the end of these
    for row, end, partial, partial_end, stride in lists.merges.T.tolist():
        assert 0 <= row <= end
        for each in range(row, end):
            assert each not in merged, "a row is merged twice"
            assert stride == size
            merged[each] = partial + each - row, partial_end
    partial_rows: set[int] = set()
    for request, ends in enumerate(requests.ends(size)):
        for tile, end in enumerate(ends):
            pieces = sorted(found.pop((qo_indptr[request], tile * size)), key=lambda item: item.kv_start)
            assert {(i.kv_indptr, i.q_len, i.kv_len) for i in pieces} == {
                (kv_indptr[request], requests.q_lens[request], requests.kv_lens[request])
            }
            assert [i.kv_start for i in pieces] == [0, *(i.kv_end for i in pieces[:-1])], "a gap, or keys read twice"
            assert pieces[-1].kv_end == end
            assert all(i.kv_start % BLOCK_KEYS == 0 for i in pieces), "kernels count blocks from the first key"
            assert len(pieces) == 1 or all(i.kv_start < i.kv_end for i in pieces)
            num_rows = min(size, requests.q_lens[request] * heads - tile * size)
            rows = range(qo_indptr[request] * heads + tile * size, qo_indptr[request] * heads + tile * size + num_rows)
            if len(pieces) == 1:
                assert pieces[0].partial_indptr == -1
                assert not any(row in merged for row in rows)
                continue
            for number, row in enumerate(rows):
                first, end_partial = merged.pop(row)
                places = {i.partial_indptr + number for i in pieces}
                assert set(range(first, end_partial, size)) == places, "other partial results are merged"
                assert len(places) == len(pieces), "partial results overlap"
                assert not places & partial_rows, "partial results overlap"
                assert all(0 <= place < room for place in places)
                partial_rows |= places
    assert not found, "work that no request has"
    assert not merged, "rows are merged that no cluster split"


def vendor_load(requests: Requests, num_clusters: int, size: int) -> int:
    """The most that a cluster does by FlashInfer's own scheduler, measured as by `loads`: it cuts tiles at a length
    that it rounds up, and gives every piece to the cluster that has least to do.
    """
    ends = [end for ends in requests.ends(size) for end in ends]
    even = max(ceil_div(sum(ends), num_clusters), 1)
    limit = next((b for a, b in ((8, 32), (16, 64), (32, 128), (64, 192)) if even <= a), ceil_div(even, 256) * 256)
    heap, found = [(0, cluster) for cluster in range(num_clusters)], [0] * num_clusters
    for end in ends:
        for begin in range(0, max(end, 1), limit):
            cost, cluster = heapq.heappop(heap)
            length = min(limit, end - begin)
            heapq.heappush(heap, (cost + 2 * size + length, cluster))
            found[cluster] += ceil_div(length, BLOCK_KEYS) + OVERHEAD
    return max(found)


def check_random(rng: random.Random) -> None:
    """Check the lists of a random set of requests, on a random number of processors."""
    requests = random_requests(rng)
    check_partition(
        listed(requests, rng.choice(NUM_PROCESSORS), rng.choice((1, 2)), rng.choice((0, 0, 5, 300))), requests
    )
