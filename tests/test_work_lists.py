"""FlashInfer's lists of work, planned by us: a partition, as even as FlashInfer's own, and attention by it."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from attn_backends.kernels.work_operators import BLOCK_ROWS, MAX_PROCESSORS, NUM_WORDS, WorkLists
from attn_backends.vendors.flashinfer_work import FLOAT_WORKSPACE, cluster_size, layout_of
from tests.listed_attention import attend
from tests.triton_interpreter import interpreted
from tests.work_lists import (
    NUM_PROCESSORS,
    Requests,
    check_random,
    listed,
    loads,
    new_lists,
    random_requests,
    vendor_load,
)

RANK, ROPE = 512, 8
SKEWED = [131072, *[1024] * 127]


@pytest.mark.parametrize("seed", range(4))
def test_every_row_attends_every_key_once(seed: int):
    """`python -m tests.share_outs` checks ten thousand sets."""
    rng = random.Random(seed)
    for _ in range(100):
        check_random(rng)


@pytest.mark.parametrize("lens", [[1024] * 128, [4096] * 128, [32768] * 32, SKEWED], ids=["1k", "4k", "32k", "skewed"])
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("width", [1, 4, 8])
def test_of_what_engines_run_no_cluster_does_more_than_by_flashinfer(lens: list[int], num_heads: int, width: int):
    requests = Requests([width] * len(lens), lens, num_heads, causal=True)
    lists = listed(requests, 132, cluster_size(width * len(lens), num_heads, len(lens)))
    assert max(loads(lists)) <= 1.01 * vendor_load(requests, lists.work_indptr.shape[0] - 1, lists.tile_rows)


@pytest.mark.parametrize("seed", range(3))
def test_clusters_are_as_even_as_by_flashinfers_own_scheduler(seed: int):
    """Within a tenth; of a few blocks, within two."""
    rng = random.Random(seed)
    for _ in range(80):
        requests, size = random_requests(rng), rng.choice((1, 2))
        if sum(requests.q_lens):
            lists = listed(requests, rng.choice(NUM_PROCESSORS[2:]), size)
            most = vendor_load(requests, lists.work_indptr.shape[0] - 1, lists.tile_rows)
            assert max(loads(lists)) <= max(1.1 * most, most + 2)


def test_even_requests_are_merged_only_where_clusters_share_them():
    """128 requests of 4,096 keys on 132 clusters are whole, of 32 each is one of four."""
    for bs, num_items, num_merges in ((128, 128, 0), (32, 128, 32)):
        lists = listed(Requests([1] * bs, [4096] * bs, 16, causal=True), 132, 1)
        assert lists.work_indptr[-1] == num_items
        assert len({tuple(column) for column in lists.merges.T[:, 3:].tolist() if column[1]}) == num_merges


@pytest.mark.parametrize("width", [4, 8])
def test_whole_requests_are_dealt_out_tile_by_tile(width: int):
    """128 requests of 128 heads: clusters side by side attend tiles of one request, and none does more than one tile
    more than another. With 8 rows that is 1.6 % more than an even cut.
    """
    num_tiles = 128 * width
    lists = listed(Requests([width] * 128, [1024] * 128, 128, causal=True), 132, 2)
    num_clusters, begins = lists.work_indptr.shape[0] - 1, lists.work_indptr.tolist()
    dealt = [(first_page // 1024, start // 128) for first_page, start in lists.items[[1, 5], :num_tiles].T.tolist()]
    turns = [dealt[begins[tile % num_clusters] + tile // num_clusters] for tile in range(num_tiles)]
    assert turns == [divmod(tile, width) for tile in range(num_tiles)]


@pytest.mark.parametrize(("most_slots", "times"), [(16, 6), (1024, 12)], ids=["some_blocks", "a_block"])
def test_triton_writes_the_same(most_slots: int, times: int, monkeypatch: pytest.MonkeyPatch):
    triton_work = interpreted("triton_work", "_list_work")
    monkeypatch.setattr(triton_work, "_MOST_SLOTS", most_slots)
    rng = random.Random(7)
    without_keys = Requests([2] * 40, [0] * 39 + [4096], 16, causal=False)
    even, nearly = Requests([4] * 40, [1024] * 40, 64, causal=True), Requests([8] * 128, [1024] * 128, 128, causal=True)
    for requests in (without_keys, even, nearly, *(random_requests(rng) for _ in range(times))):
        processors, size = (132, 2) if requests is nearly else (rng.choice(NUM_PROCESSORS), rng.choice((1, 2)))
        spare, found = rng.choice((0, 300)), new_lists(processors, size)
        expected = listed(requests, processors, size, spare)
        num_tokens = sum(requests.q_lens) + spare
        triton_work.list_work(*requests.indptrs, found, num_tokens, requests.num_heads, requests.causal)
        assert [torch.equal(*pair) for pair in zip(expected, found, strict=True)] == [True] * 3


def test_lists_lie_where_the_layout_says():
    words = torch.arange(NUM_WORDS, dtype=torch.int32)
    lists = WorkLists.of(words, 66, 2)
    layout = layout_of(lists, words.view(torch.uint8))
    assert layout[:2] == [2, 66]
    rows = [*lists.items[:3], *lists.merges, *lists.items[3:], lists.work_indptr]
    assert [place // 4 for place in layout[2:16]] == [int(row[0]) for row in rows]
    assert lists.merges.shape == (5, 132)
    assert layout[17] + 4 * 2 * MAX_PROCESSORS * BLOCK_ROWS == int(str(FLOAT_WORKSPACE.shape[0]))


def attended(requests: Requests, lists: WorkLists, words: Tensor, page_size: int = 16) -> float:
    """The largest error of attention by lists, of the output and the log-sum-exp."""
    num_tokens, heads = sum(requests.q_lens), requests.num_heads
    num_pages = [-(-length // page_size) for length in requests.kv_lens]
    qo_indptr, kv_indptr = (torch.tensor([0, *each]).cumsum(0).int() for each in (requests.q_lens, num_pages))
    kv_indices = torch.randperm(sum(num_pages)).int()
    q, latents = torch.randn(num_tokens, heads, RANK + ROPE), torch.randn(sum(num_pages), page_size, RANK + ROPE) / 8
    lists.items[1, : lists.work_indptr[-1]] = kv_indptr[
        torch.searchsorted(qo_indptr, lists.items[0, : lists.work_indptr[-1]], right=True) - 1
    ]
    out, lse = torch.full((num_tokens, heads, RANK), math.nan), torch.full((num_tokens, heads), math.nan)
    partial = torch.zeros(2**25, dtype=torch.uint8)
    layout = layout_of(lists, words.view(torch.uint8))
    layout[17] = 2**24
    scale, causal = 0.1, requests.causal
    attend(partial, words.view(torch.uint8), layout, q, latents, kv_indices, out, lse, causal, scale, 1.0)
    worst = 0.0
    for i, length in enumerate(requests.kv_lens):
        rows = slice(qo_indptr[i], qo_indptr[i + 1])
        keys = latents[kv_indices[kv_indptr[i] : kv_indptr[i + 1]].long()].flatten(0, 1)[:length]
        hidden = torch.arange(length) + requests.q_lens[i] > length + torch.arange(requests.q_lens[i])[:, None]
        scores = torch.einsum("qhd,kd->qhk", q[rows], keys) * scale
        scores = scores.masked_fill(hidden[:, None] & causal, -math.inf)
        expected = scores.softmax(2).nan_to_num(0.0) @ keys[:, :RANK]
        for one, two in ((out[rows], expected), (lse[rows], scores.logsumexp(2))):
            error = (one - two).abs().where(one != two, 0.0)
            worst = max(worst, float(error.nan_to_num(math.inf).amax()) if error.numel() else 0.0)
    return worst


def planned(requests: Requests, num_processors: int) -> tuple[WorkLists, Tensor]:
    size = cluster_size(sum(requests.q_lens), requests.num_heads, len(requests.q_lens))
    words = torch.zeros(NUM_WORDS, dtype=torch.int32)
    lists = WorkLists.of(words, num_processors // size, size)
    for own, made in zip(lists, listed(requests, num_processors, size), strict=True):
        own.copy_(made)
    return lists, words


CASES = {
    "one": Requests([1], [3000], 16, True),
    "skewed": Requests([2, 2, 2, 2], [2000, 70, 1, 300], 16, False),
    "edges": Requests([8, 8, 8], [1500, 64, 200], 32, True),
    "packed": Requests([70, 0, 3, 1], [400, 5, 900, 64], 8, True),
    "nothing": Requests([1, 1, 2], [0, 500, 0], 4, False),
    "many_heads": Requests([3, 1, 0, 0, 0, 0, 0, 0], [500, 130, 3, 3, 3, 3, 3, 3], 128, True),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_by_the_lists_is_right(name: str):
    for num_processors in (2, 16, 132):
        assert attended(CASES[name], *planned(CASES[name], num_processors)) < 1e-4


DEFECTS = {
    "a block less": lambda lists: lists.items[7].sub_(64),
    "a block twice": lambda lists: lists.items[6].sub_(64).clamp_(min=0),
    "rows of another tile": lambda lists: lists.items[5].add_(64),
    "another request": lambda lists: lists.items[0].add_(1).remainder_(4),
    "no partial results": lambda lists: lists.items[2].fill_(-1),
    "a shorter merge": lambda lists: lists.merges[3].sub_(64).clamp_(min=0),
    "merged rows that begin late": lambda lists: lists.merges[0].add_(1).clamp_(max=lists.merges[1]),
    "other strides": lambda lists: lists.merges[4].mul_(2),
    "an item that no cluster has": lambda lists: lists.work_indptr[-1:].sub_(1),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_wrong_list_gives_a_wrong_output(name: str):
    lists, words = planned(CASES["skewed"], 16)
    DEFECTS[name](lists)
    assert not attended(CASES["skewed"], lists, words) < 1e-2
