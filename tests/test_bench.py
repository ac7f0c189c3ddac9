"""The benchmarks measure what they say: turns, caches, sizes, that both sides compute the same. No time is asserted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from attn_backends.cache import CacheFormat, PagedLatent
from attn_backends.errors import UnsupportedStepError
from attn_backends.graphs import RecordedGraph
from attn_backends.registry import get_backend
from benchmarks import attention, peers, shapes
from benchmarks import cli_attention as bench
from benchmarks.__main__ import main
from benchmarks.attention import Missing, Row, Stage, contenders, measure_attention
from benchmarks.peers import Peer
from benchmarks.shapes import LAYERS, fill_pool, problem
from benchmarks.timing import take_turns

CPU = torch.device("cpu")
KEYS = "bench backend kernel batch_size context heads width us peer peer_us ratio"


class Ticks:
    """A clock that runs do not move by themselves."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def wait(self) -> None:
        """Nothing is queued."""

    def microseconds(self, start: float, end: float) -> float:
        return end - start


def test_contenders_take_turns_and_the_median_forgets_what_disturbed():
    clock, order = Ticks(), []

    def runner(name: str, times: list[float]):
        left: Iterator[float] = iter(times)

        def run():
            order.append(name)
            clock.now += next(left)

        return run

    ours, peers_ = runner("ours", [900, 10, 12, 500]), runner("peer", [900, 7, 300, 8])
    assert take_turns([ours, peers_], rounds=3, clock=clock) == [12, 8]
    assert order == ["ours", "peer"] * 4, "one run each to warm up, then in turn"


def raw_attention(problem: shapes.Problem, wrong: float = 0.0) -> Peer:
    """A peer for a CPU: float32 attention over a request's pages, one request after the other."""
    pool, layer, width = problem.pool, problem.layer, problem.width
    group = layer.num_heads // layer.num_kv_heads
    seen = torch.ones(width, pool.context).tril(pool.context - width).bool()

    def request(cache, row):
        if isinstance(cache, PagedLatent):
            k = cache.latent[pool.pages[row]].unsqueeze(2)
            k, v = k, k[..., : cache.rank]
        else:
            k, v = cache.k[pool.pages[row]], cache.v[pool.pages[row]]
        k, v = (x.flatten(0, 1)[: pool.context].float().repeat_interleave(group, 1) for x in (k, v))
        q = problem.q[row * width : (row + 1) * width].float()
        scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v) + wrong

    return Peer("by hand", lambda cache: torch.cat([request(cache, row) for row in range(pool.batch_size)]).bfloat16())


@pytest.fixture
def stage(monkeypatch):
    """A CPU as a stage, on which torch kernels are measured against attention by hand."""
    monkeypatch.setitem(peers.PEERS, "torch", raw_attention)
    monkeypatch.setattr(shapes, "COLD_BYTES", 1)
    clock = Ticks()

    class Graph(RecordedGraph):
        def replay(self):
            clock.now += 1
            super().replay()

    return Stage(CPU, Graph, clock, rounds=2)


def measure(stage, names, batch_sizes, contexts):
    found, _ = contenders([get_backend(name) for name in names], CPU)
    return list(measure_attention(found, batch_sizes, contexts, stage))


def test_every_backend_is_measured_on_every_layer_that_it_takes(stage):
    rows = measure(stage, ["flashinfer_mla", "fa3"], [2], [70])
    assert all(isinstance(row, Row) for row in rows), rows
    on_latents = {(name, heads, width) for name in ("flashinfer_mla", "fa3") for heads in (16, 128) for width in (1, 4)}
    assert {(row.backend, row.heads, row.width) for row in rows} == on_latents | {("fa3", 32, 1), ("fa3", 32, 4)}
    assert {(row.batch_size, row.context, row.kernel, row.peer) for row in rows} == {(2, 70, "torch", "by hand")}
    assert {(row.us, row.peer_us, row.ratio) for row in rows} == {(1.0, 1.0, 1.0)}


def test_a_time_is_that_of_one_cache(stage, monkeypatch):
    monkeypatch.setattr(shapes, "COLD_BYTES", 2 * 64 * (1 + 2) * 576 * 2 + 1)
    monkeypatch.setattr(shapes, "LAYERS", LAYERS)
    pool = fill_pool(CacheFormat.LATENT, 1, 70, CPU)
    assert len(pool.caches) == 3
    assert sum(cache.latent.nbytes for cache in pool.caches) >= shapes.COLD_BYTES
    kernel = next(kernel for kernel in get_backend("flashinfer_mla").kernels if kernel.name == "torch")
    asked = problem(pool, LAYERS[CacheFormat.LATENT][0], 1)
    row = attention.compare(get_backend("flashinfer_mla"), kernel, asked, stage)
    assert (row.us, row.ratio) == (0.33, 1.0)


def test_the_last_row_sees_the_whole_context_and_requests_share_no_page():
    pool = fill_pool(CacheFormat.KV, 3, 70, CPU)
    assert pool.pages.unique().numel() == pool.pages.numel()
    assert 0 not in pool.pages
    for width in (1, 4):
        step = problem(pool, LAYERS[CacheFormat.KV][0], width).step
        assert (step.width, step.is_tree, step.seq_lens.tolist()) == (width, False, [70 - width] * 3)
        assert step.seq_lens_cpu == (70 - width,) * 3


def test_a_peer_that_computes_something_else_is_no_comparison(stage, monkeypatch):
    monkeypatch.setitem(peers.PEERS, "torch", lambda problem: raw_attention(problem, wrong=1.0))
    (first, *_) = measure(stage, ["flashinfer_mla"], [1], [70])
    assert isinstance(first, Missing)
    assert first.failed
    assert first.case == "batch 1, context 70, 16 heads, width 1"
    assert "the outputs differ by" in first.reason


@pytest.mark.parametrize(
    ("error", "failed", "reason"),
    [
        (RuntimeError("no kernel in /home/me/.cache/x.so"), True, "RuntimeError: no kernel in x.so"),
        (UnsupportedStepError("flashmla", ["128 query heads"]), False, "flashmla: 128 query heads."),
    ],
)
def test_one_that_can_not_be_measured_is_listed_and_the_others_are_measured(stage, monkeypatch, error, failed, reason):
    def peer(asked):
        if asked.layer.num_heads == 128:
            raise error
        return raw_attention(asked)

    monkeypatch.setitem(peers.PEERS, "torch", peer)
    rows = measure(stage, ["flashinfer_mla"], [1], [70])
    assert [isinstance(row, Row) for row in rows] == [True, True, False, False]
    assert (rows[2].failed, rows[2].reason) == (failed, reason)


def test_kernels_that_can_not_be_measured_are_listed_with_reasons():
    found, missing = contenders([get_backend("trtllm_mla"), get_backend("fa3")], CPU)
    assert found == []
    reasons = {(absent.backend, absent.kernel): absent.reason for absent in missing}
    assert reasons["trtllm_mla", "torch"] == "no vendor call to measure it against"
    assert reasons["fa3", "vllm_flash_attn"] == "runs on CUDA devices, not on cpu"
    assert not any(absent.failed for absent in missing)


def attend(q, k_pages, v_pages, table, lens, causal, scale):
    """What a vendor computes from its arguments. q: [bs, width, heads, dim]; pages: [num_pages, 64, kv_heads, dim]."""
    outputs = []
    for row, (pages, length) in enumerate(zip(table, lens, strict=True)):
        group = q.shape[2] // k_pages.shape[2]
        k, v = (x[pages.long()].flatten(0, 1)[:length].float().repeat_interleave(group, 1) for x in (k_pages, v_pages))
        seen = torch.ones(q.shape[1], int(length)).tril(int(length) - q.shape[1] if causal else 10**6).bool()
        scores = torch.einsum("qhd,khd->hqk", q[row].float(), k) * scale
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v).bfloat16())
    return torch.stack(outputs)


def flash_mla(q, k_cache, block_table, cache_seqlens, head_dim_v, sched, *, softmax_scale, causal, use_legacy):
    assert use_legacy
    sched.append("planned")
    return attend(q, k_cache, k_cache[..., :head_dim_v], block_table, cache_seqlens, causal, softmax_scale), None


class Wrapper:
    """FlashInfer's, as far as it is used."""

    def __init__(self, workspace, use_cuda_graph, *, qo_indptr, kv_indptr, kv_indices, kv_len_arr, backend):
        assert use_cuda_graph

    def plan(self, *, metadata, num_heads, head_dim_ckv, page_size, causal, sm_scale, lse_mode, **types):
        self.qo_indptr, self.kv_indptr, self.kv_indices, self.kv_len = metadata
        self.rank, self.causal, self.scale = head_dim_ckv, causal, sm_scale

    def run(self, *, query, kv_cache, return_lse, return_lse_base_on_e):
        table = [self.kv_indices[a:b] for a, b in pairwise(self.kv_indptr.tolist())]
        q = torch.stack([query[a:b] for a, b in pairwise(self.qo_indptr.tolist())])
        cache = kv_cache.unsqueeze(2)
        return attend(q, cache, cache[..., : self.rank], table, self.kv_len, self.causal, self.scale).flatten(
            0, 1
        ), None


def flash_attn_varlen(q, k, v, max_q, starts, max_k, *, seqused_k, q_v, softmax_scale, causal, block_table, **others):
    assert others["scheduler_metadata"] == "scheduled"
    if q_v is not None:
        q, k = torch.cat((q_v, q), -1), torch.cat((v, k), -1)
    q = torch.stack([q[a:b] for a, b in pairwise(starts.tolist())])
    assert (q.shape[1], max_k) == (max_q, 64 * block_table.shape[1])
    return attend(q, k, v, block_table, seqused_k, causal, softmax_scale).flatten(0, 1), None


VENDORS = {
    "flash_mla:flash_mla_with_kvcache": flash_mla,
    "flash_mla:get_mla_metadata": lambda: ([], None),
    "flashinfer.mla:BatchMLAPagedAttentionWrapper": Wrapper,
    "flashinfer.mla:MLAPlanMetadata": type("Metadata", (), {"csr": staticmethod(lambda *tensors: tensors)}),
    "vllm.vllm_flash_attn.flash_attn_interface:flash_attn_varlen_func": flash_attn_varlen,
    "vllm.vllm_flash_attn.flash_attn_interface:get_scheduler_metadata": lambda *args, **kwargs: "scheduled",
}


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize(
    ("kernel", "format"),
    [*((kernel, CacheFormat.LATENT) for kernel in sorted(peers.PEERS)), ("vllm_flash_attn", CacheFormat.KV)],
)
def test_the_arguments_made_by_hand_describe_the_problem(kernel, format, width, monkeypatch):
    """Vendors that compute from their arguments what these say; their own kernels are compared on a GPU."""
    monkeypatch.setattr(peers, "load", VENDORS.__getitem__)
    monkeypatch.setattr(shapes, "COLD_BYTES", 1)
    pool = fill_pool(format, 2, 70, CPU)
    asked = problem(pool, LAYERS[format][0], width)
    found = peers.PEERS[kernel](asked).call(pool.caches[0])
    torch.testing.assert_close(found, raw_attention(asked).call(pool.caches[0]), rtol=0.01, atol=0.01)


def test_every_vendor_kernel_of_this_gpu_generation_has_a_peer():
    assert peers.PEERS.keys() == {"flashmla", "flashinfer_fa2", "flashinfer_fa3", "vllm_flash_attn"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "torch sees no CUDA device"),
        (["--backend", "fa3", "--quick"], "torch sees no CUDA device"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--context", "4096", "4"], "--context must be over 4"),
        (["--json", "no/such/folder/rows.json"], "there is no folder no/such/folder"),
    ],
)
def test_the_command_refuses_with_a_reason(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["attention", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def fake_gpu(monkeypatch):
    """A command that measures nothing: what `measure_attention` gives is up to the test."""
    measured = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "contenders", lambda backends, device: ([("fa3", "k")], []))
    monkeypatch.setattr(bench, "measure_attention", lambda *args: iter(measured))
    monkeypatch.setattr(bench.results, "device_name", lambda device: "NVIDIA H200")
    return measured


ROW = Row("attention", "fa3", "vllm_flash_attn", 1, 4096, 32, 1, 10.2, "raw", 10.0, 1.02)


@pytest.mark.parametrize(
    ("missing", "code"),
    [([], 0), ([Missing("fa3", "x", "", "not here", False)], 0), ([Missing("fa3", "x", "c", "RuntimeError", True)], 1)],
)
def test_the_command_writes_rows_and_what_is_missing(fake_gpu, missing, code, tmp_path, capsys):
    fake_gpu += [ROW, *missing]
    path = tmp_path / "rows.json"
    assert main(["attention", "--json", str(path)]) == code
    written = json.loads(path.read_text())
    assert [list(row) for row in written["rows"]] == [KEYS.split()]
    assert (written["device"], written["command"]) == ("NVIDIA H200", "python -m benchmarks attention --json FILE")
    assert [absent["reason"] for absent in written["missing"]] == [absent.reason for absent in missing]
    output = capsys.readouterr().out
    assert "1.020" in output
    assert all(absent.reason in output for absent in missing)


def test_nothing_measured_is_an_error(fake_gpu):
    assert main(["attention"]) == 2
