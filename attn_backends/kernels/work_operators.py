"""FlashInfer's work lists for paged MLA, written on the device: an operator of `torch.library`.

    list_work    which cluster of thread blocks attends which rows to which keys, and which block merges what they found

The CPU implementation in torch is the definition; on a GPU one Triton launch writes the same integers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attn_backends.kernels.devices import on_its_device

BLOCK_KEYS = BLOCK_ROWS = 64
OVERHEAD = 4
"""What a cluster pays for an item beside its keys, in blocks: FlashInfer's own estimate for two thread blocks."""
TRIES = 8

MAX_WORK, MAX_PROCESSORS = 16384, 256
ITEM_FIELDS = ("q_indptr", "kv_indptr", "partial_indptr", "q_len", "kv_len", "q_start", "kv_start", "kv_end")
MERGE_FIELDS = ("packed_start", "packed_end", "partial_start", "partial_end", "partial_stride")
NUM_WORDS = (len(ITEM_FIELDS) + 1) * MAX_WORK + len(MERGE_FIELDS) * MAX_PROCESSORS

_library = torch.library.Library("attn_backends", "FRAGMENT")
_library.define(
    "list_work(Tensor qo_indptr, Tensor kv_indptr, Tensor kv_len, Tensor(a!) items, Tensor(b!) merges, "
    "Tensor(c!) work_indptr, int num_tokens, int num_heads, bool causal) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class WorkLists(NamedTuple):
    """Views of one allocation that FlashInfer's kernels read.

    items: [8, MAX_WORK] int32, `ITEM_FIELDS` of each item of work. work_indptr: [num_clusters + 1] int32, first item
    of each cluster, and the end. merges: [5, num_blocks] int32, `MERGE_FIELDS` of what each thread block merges.
    """

    items: Tensor
    merges: Tensor
    work_indptr: Tensor

    @classmethod
    def of(cls, words: Tensor, num_clusters: int, cluster_size: int) -> WorkLists:
        """The lists in `words` [NUM_WORDS] int32, for so many clusters of thread blocks."""
        num_items = len(ITEM_FIELDS) * MAX_WORK
        items, work_indptr, merges = words.tensor_split((num_items, num_items + MAX_WORK))
        return cls(
            items.view(len(ITEM_FIELDS), MAX_WORK),
            merges[: len(MERGE_FIELDS) * MAX_PROCESSORS].view(-1, MAX_PROCESSORS)[:, : num_clusters * cluster_size],
            work_indptr[: num_clusters + 1],
        )

    @property
    def tile_rows(self) -> int:
        """Query rows, all heads counted, that a cluster attends at once."""
        return BLOCK_ROWS * (self.merges.shape[1] // (self.work_indptr.shape[0] - 1))


def list_work(
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_len: Tensor,
    lists: WorkLists,
    *,
    num_tokens: int,
    num_heads: int,
    causal: bool,
) -> None:
    """Share the keys of n requests out to clusters of thread blocks, as evenly as FlashInfer's own scheduler or better.

    qo_indptr, kv_indptr: [n + 1] int32, first query row and first page of each request, and the end. kv_len: [n] int32.
    num_tokens: the most query rows of all requests, known on the host. causal: bottom-right.

    The rows of a request, all heads counted, make tiles of `lists.tile_rows`. The keys that a tile sees are cut into
    chunks of equal length. Each whole chunk is the only item of a cluster. What is left of tiles goes to the clusters
    after these: one after the other, cut at the length of a chunk. Where they are so equal that no cluster would do
    a 32nd more than a chunk, they are dealt out whole and in turn instead. Clusters then read the keys of few
    requests at a time, which the L2 cache holds. The length is the least at which that fits; where keys are few it is
    two or three blocks, as FlashInfer has it. No cluster does more than a chunk, a 32nd of it and an `OVERHEAD`; none
    of a tile's rows is in more than one merge; there are at most two partial results for each cluster.
    """
    assert num_slots(num_tokens, num_heads, kv_len.shape[0], lists.tile_rows) <= max_tiles(), "the caller refuses more"
    torch.ops.attn_backends.list_work(qo_indptr, kv_indptr, kv_len, *lists, num_tokens, num_heads, causal)


def num_slots(num_tokens: int, num_heads: int, num_requests: int, tile_rows: int) -> int:
    """Places for tiles: those of request i begin at `(qo_indptr[i] * num_heads + i * spare_rows) // tile_rows`, so that
    the last one's rows fit, and some stay empty.
    """
    return max((num_tokens * num_heads + num_requests * spare_rows(num_heads, tile_rows)) // tile_rows, 1)


def spare_rows(num_heads: int, tile_rows: int) -> int:
    """The most rows that a request's last tile lacks: rows come in multiples of the heads."""
    return tile_rows - math.gcd(num_heads, tile_rows)


def max_tiles() -> int:
    """Tiles for which the lists have room: of each there is an item, and one more where two clusters share it."""
    return MAX_WORK - MAX_PROCESSORS


class _Tiles(NamedTuple):
    """Tiles of query rows in their slots, all [num_slots] int64. first_row, num_rows: of a tile in its request, all
    heads counted. end: keys that its last row sees. blocks: of them. is_real: whether a slot has a tile.
    """

    is_real: Tensor
    request: Tensor
    q_len: Tensor
    first_row: Tensor
    num_rows: Tensor
    end: Tensor
    blocks: Tensor


class _Cut(NamedTuple):
    """How tiles are cut. chunk: blocks of one, and between two cuts of what is left. dealt: what is left, if dealt out
    in turn, else 0. num_chunks: whole ones. pieces: a bound of partial results.
    """

    chunk: Tensor
    dealt: Tensor
    num_chunks: Tensor
    pieces: Tensor


def _tiles(qo_indptr: Tensor, kv_len: Tensor, size: int, slots: int, num_heads: int, causal: bool) -> _Tiles:
    starts, n = qo_indptr.long(), kv_len.shape[0]
    slot = torch.arange(slots, device=kv_len.device)
    slot_starts = (starts[:-1] * num_heads + torch.arange(n, device=slot.device) * spare_rows(num_heads, size)) // size
    request = torch.searchsorted(slot_starts, slot, right=True) - 1
    q_len, lens = starts.diff()[request], kv_len.long()[request]
    first_row, num_rows = (slot - slot_starts[request]) * size, q_len * num_heads
    is_real = first_row < num_rows
    seen = lens - q_len + (first_row + size + num_heads - 1) // num_heads
    end = torch.minimum(seen, lens).clamp_min(0) if causal else lens
    end = torch.where(is_real, end, 0)
    rows = (num_rows - first_row).clamp(0, size)
    return _Tiles(is_real, request, q_len, first_row, rows, end, (end + BLOCK_KEYS - 1) // BLOCK_KEYS)


def _is_left(tiles: _Tiles, chunk: Tensor) -> Tensor:
    """Whether something of a tile is left beside whole chunks; all of one without keys, whose rows are written too."""
    return tiles.is_real & ((tiles.blocks % chunk != 0) | (tiles.blocks == 0))


def _cut(tiles: _Tiles, num_clusters: int) -> _Cut:
    total, overheads = tiles.blocks.sum(), OVERHEAD * tiles.is_real.sum()
    least, most = ((sum_ + num_clusters - 1) // num_clusters for sum_ in (total, total + overheads))
    few = (total <= num_clusters).long()  # blocks than clusters: many pieces cost more to merge than they save
    floor = 1 + few * ((4 * total > num_clusters).long() + (2 * total > num_clusters))
    least, most = torch.maximum(least, floor), torch.maximum(most, floor)
    tried = least + torch.arange(TRIES, device=total.device)
    num_left = _is_left(tiles, tried.unsqueeze(1)).sum(1)
    fits = total + OVERHEAD * num_left <= num_clusters * tried
    chunk = torch.minimum(torch.where(fits, tried, most).amin(), most).clamp_min(1)

    whole, left, is_left = tiles.blocks // chunk, tiles.blocks % chunk, _is_left(tiles, chunk)
    num_chunks, num_left = whole.sum(), is_left.sum()
    spare = num_clusters - num_chunks
    most_dealt = (num_left + spare.clamp_min(1) - 1) // spare.clamp_min(1) * (left.amax() + OVERHEAD)
    is_level = most_dealt <= chunk + chunk // 32 + OVERHEAD
    split = torch.where(tiles.blocks > chunk, whole + (left > 0), 0).sum()
    return _Cut(
        chunk,
        torch.where(is_level, num_left, 0),
        num_chunks,
        (split + torch.where(is_level, 0, 2 * (spare - 1).clamp_min(0))).clamp_min(1),
    )


def _first_dealt(turn: Tensor, cut: _Cut, spare: Tensor) -> Tensor:
    """How much is dealt to the clusters before one of `spare`."""
    return turn * (cut.dealt // spare) + torch.minimum(turn, cut.dealt % spare)


def _num_below(live: Tensor, values: Tensor, bounds: Tensor) -> Tensor:
    """How many live values are below each bound."""
    return torch.searchsorted(torch.where(live, values, torch.iinfo(torch.int64).max).sort().values, bounds)


def _before(counts: Tensor) -> Tensor:
    """The sum of all earlier elements."""
    return counts.cumsum(0) - counts


def _list_work_torch(
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_len: Tensor,
    items: Tensor,
    merges: Tensor,
    work_indptr: Tensor,
    num_tokens: int,
    num_heads: int,
    causal: bool,
) -> None:
    num_clusters, num_blocks, device = work_indptr.shape[0] - 1, merges.shape[1], items.device
    size = WorkLists(items, merges, work_indptr).tile_rows
    slots = num_slots(num_tokens, num_heads, kv_len.shape[0], size)
    tiles = _tiles(qo_indptr, kv_len, size, slots, num_heads, causal)
    cut = _cut(tiles, num_clusters)

    whole, left, is_left = tiles.blocks // cut.chunk, tiles.blocks % cut.chunk, _is_left(tiles, cut.chunk)
    line = _before(torch.where(is_left, left + OVERHEAD, 0))
    first, last = line // cut.chunk, (line + (left - 1).clamp_min(0)) // cut.chunk
    is_cut = is_left & (last > first) & (cut.dealt == 0)
    left_items = is_left.long() + is_cut
    num_pieces = whole + left_items
    partials = torch.where(num_pieces > 1, num_pieces, 0)
    partial = torch.where(num_pieces > 1, _before(partials), -1)
    spare, number = (num_clusters - cut.num_chunks).clamp_min(1), _before(left_items)
    in_turn = _first_dealt(number % spare, cut, spare) + number // spare
    place = cut.num_chunks + torch.where(cut.dealt > 0, in_turn, number)

    def put(at: Tensor, live: Tensor, tile: Tensor, piece: Tensor, begin: Tensor, blocks: Tensor) -> None:
        """List items: piece number `piece` of a tile, so many blocks of keys from block `begin` on."""
        request, end = tiles.request[tile], tiles.end[tile]
        columns = (
            qo_indptr[request],
            kv_indptr[request],
            torch.where(partial[tile] >= 0, (partial[tile] + piece) * size, -1),
            tiles.q_len[tile],
            kv_len[request],
            tiles.first_row[tile],
            begin * BLOCK_KEYS,
            torch.minimum((begin + blocks) * BLOCK_KEYS, end),
        )
        _put(items, at, live, torch.stack([column.int() for column in columns]))

    cluster, tile = torch.arange(num_clusters, device=device), torch.arange(slots, device=device)
    of_chunk = torch.searchsorted(whole.cumsum(0), cluster, right=True).clamp(max=slots - 1)
    chunk = cluster - _before(whole)[of_chunk]
    put(cluster, cluster < cut.num_chunks, of_chunk, chunk, chunk * cut.chunk, cut.chunk)
    until = torch.where(is_cut, last * cut.chunk - line, left)
    put(place, is_left, tile, whole, whole * cut.chunk, until)
    put(place + 1, is_cut, tile, whole + 1, whole * cut.chunk + until, left - until)

    turn = (torch.arange(num_clusters + 1, device=device) - cut.num_chunks).clamp_min(0)
    begins = turn * cut.chunk  # of shares of the line; of an item that is cut, the second part begins at the cut
    earlier = _num_below(is_left, line, begins) + _num_below(is_cut, last * cut.chunk, begins)
    earlier = torch.where(cut.dealt > 0, _first_dealt(turn, cut, spare), earlier)
    work_indptr.copy_(torch.arange(num_clusters + 1, device=device) - turn + earlier)
    _put_merges(
        merges, qo_indptr[tiles.request] * num_heads, tiles, partials, num_blocks * _before(partials), cut, size
    )


def _put_merges(
    merges: Tensor, request_row: Tensor, tiles: _Tiles, partials: Tensor, begin: Tensor, cut: _Cut, size: int
) -> None:
    """List what thread blocks merge: each a tile's share of all partial results, in whole rows of that tile."""
    num_blocks = merges.shape[1]
    begins, ends = begin // cut.pieces, (begin + num_blocks * partials) // cut.pieces
    block = torch.arange(num_blocks, device=merges.device)
    tile = torch.searchsorted(ends, block, right=True).clamp(max=len(ends) - 1)
    num_shares = (ends - begins).clamp_min(1)[tile]
    num_rows, first = tiles.num_rows[tile], begin[tile] // num_blocks * size
    share = (num_rows + num_shares - 1) // num_shares
    low = torch.minimum((block - begins[tile]) * share, num_rows)
    high = torch.minimum(low + share, num_rows)
    row = request_row[tile] + tiles.first_row[tile]
    columns = (row + low, row + high, first + low, first + partials[tile] * size, torch.full_like(row, size))
    merges.copy_(torch.where(block < ends[-1], torch.stack(columns), 0))


def _put(lists: Tensor, at: Tensor, live: Tensor, columns: Tensor) -> None:
    """Write live columns of lists, in fixed shapes: the others go to a column after the end."""
    longer = torch.nn.functional.pad(lists, (0, 1))
    longer[:, torch.where(live, at, lists.shape[1])] = columns
    lists.copy_(longer[:, :-1])


@on_its_device
def _list_work_cuda(
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_len: Tensor,
    items: Tensor,
    merges: Tensor,
    work_indptr: Tensor,
    num_tokens: int,
    num_heads: int,
    causal: bool,
) -> None:
    from attn_backends.kernels import triton_work

    lists = WorkLists(items, merges, work_indptr)
    triton_work.list_work(qo_indptr, kv_indptr, kv_len, lists, num_tokens, num_heads, causal)


_library.impl("list_work", _list_work_torch, "CPU")
_library.impl("list_work", _list_work_cuda, "CUDA")
torch.library.register_fake("attn_backends::list_work", lambda *_: None, lib=_library)
