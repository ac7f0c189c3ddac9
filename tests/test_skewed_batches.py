"""The batch of one long request among short ones, on a CPU: what is timed is right, and a slow kernel is told."""

from __future__ import annotations

import pytest
import torch

from attn_backends.cache import CacheFormat
from attn_backends.graphs import RecordedGraph
from benchmarks.shapes import LAYERS, PAGE_SIZE
from tests import skewed_batches as skewed

LAYER = LAYERS[CacheFormat.KV][0]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(skewed, "LENS", (200, 70, 10))
    monkeypatch.setattr(skewed, "CASES", (skewed.Case("fa3", LAYER, ("torch", "gluon", "torch")),))
    monkeypatch.setattr(skewed, "CudaGraph", RecordedGraph)
    monkeypatch.setattr("benchmarks.shapes.COLD_BYTES", 1)


def test_each_request_has_pages_of_its_own_and_the_reserved_one_after():
    pool = skewed.skewed_pool(LAYER, torch.device("cpu"))
    owned = [row[row > 0].tolist() for row in pool.pages]
    assert [len(pages) for pages in owned] == [-(-length // PAGE_SIZE) for length in skewed.LENS]
    assert len({page for pages in owned for page in pages}) == sum(map(len, owned))


@pytest.mark.parametrize("width", skewed.WIDTHS)
def test_requests_attend_to_their_own_keys(width):
    pool = skewed.skewed_pool(LAYER, torch.device("cpu"))
    out = skewed.attention(skewed.CASES[0], pool, width, "torch")(pool.caches[0])
    q = skewed.problem(pool, LAYER, width).q.float()
    for request, length in enumerate(skewed.LENS):
        k, v = (x[pool.pages[request]].flatten(0, 1)[:length].float() for x in (pool.caches[0].k, pool.caches[0].v))
        last = (request + 1) * width - 1
        scores = torch.einsum("hd,khd->hk", q[last], k.repeat_interleave(4, 1)) * LAYER.scale
        right = torch.einsum("hk,khd->hd", scores.softmax(1), v.repeat_interleave(4, 1))
        torch.testing.assert_close(out[last].float(), right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("us", "status"), [((65.0, 100.0), "met"), ((64.0, 100.0), "missed")])
def test_a_speed_that_is_missed_is_told(monkeypatch, us, status):
    case = skewed.Case("fa3", LAYER, ("torch", "gluon", "slow"))
    monkeypatch.setattr(skewed, "CASES", (case,))
    monkeypatch.setattr(skewed, "WIDTHS", (1,))
    attention = skewed.attention
    monkeypatch.setattr(
        skewed, "attention", lambda case, pool, width, name: attention(case, pool, width, name.replace("slow", "torch"))
    )
    monkeypatch.setattr(skewed, "take_turns", lambda *given: us)
    absent, row = skewed.rows("cpu")
    assert (absent["kernel"], absent["status"]) == ("gluon", "not_run")
    assert (row["kernel"], row["status"], row["speed"]) == ("slow", status, us[0] / us[1])
