"""The benchmarks measure what they say, on a CPU in the device's place. No time is asserted."""

from __future__ import annotations

import gc
import json
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from attn_backends.cache import CacheFormat, PagedLatent
from attn_backends.compressed_cache import CompressedFormat
from attn_backends.errors import BackendUnavailableError, CaptureError, UnsupportedStepError
from attn_backends.graphs import RecordedGraph
from attn_backends.layer import AttentionOutput
from attn_backends.registry import get_backend
from benchmarks import __main__ as command
from benchmarks import compressed, host, layers, memory, peers, plans, ragged, rows, sampling, shapes
from benchmarks.compressed import COMPRESSION, TOPK, WINDOW, compressed_problems
from benchmarks.layers import NUM_NODES, compare_kernels, everywhere, measure_ceilings, tree_mask
from benchmarks.peers import Peer
from benchmarks.ragged import BOUND, MEAN, rows_of, widths_of
from benchmarks.rows import Asked, Missing, Stage
from benchmarks.shapes import LAYERS, dense_problems, fill_pool, problem
from benchmarks.speculation import CYCLE, PHASES, Tables, speculative
from benchmarks.timing import CALIBRATION, Work, take_host_turns, take_turns
from spec_metadata import Sampling, SamplingParams, StepKind, choose
from spec_metadata import sampling as definition

CPU = torch.device("cpu")
ONE = {"copy_tb_per_s": 1.0, "matmul_tflop_per_s": 1.0}  # 1e12 bytes, or operations, a second
REFUSAL = UnsupportedStepError("triton", ["no"])


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


@pytest.fixture
def stage(monkeypatch):
    """A CPU on which a replay takes one tick, and torch's kernels are measured as a vendor's are on a GPU."""
    monkeypatch.setattr(shapes, "COLD_BYTES", 1)
    monkeypatch.setattr(compressed, "COLD_BYTES", 1)
    monkeypatch.setattr(rows, "TORCH", "")
    clock = Ticks()

    class Graph(RecordedGraph):
        def replay(self):
            clock.now += 1
            super().replay()

    return Stage(CPU, Graph, clock, rounds=2)


def asked_of(stage, *names, batch_sizes=(2,), contexts=(70,)):
    return Asked(stage, [get_backend(name) for name in names], batch_sizes, contexts)


def backend_of(name, **launches):
    """A backend whose kernels are its torch kernel under other names. launches: a kernel's own launch, or None."""
    base = get_backend(name)
    own = next(kernel for kernel in base.kernels if kernel.name == "torch")
    kernels = tuple(replace(own, name=name, launch=launch or own.launch) for name, launch in launches.items())
    return type(base.__name__, (base,), {"kernels": kernels})


def raising(error):
    def launch(*_):
        raise error

    return launch


def off_by_one(*arguments):
    out, lse = next(kernel for kernel in get_backend("fa3").kernels if kernel.name == "torch").launch(*arguments)
    return AttentionOutput(out + 1, lse)


def split(measured):
    """Rows, and what is missing but not by the whole kernel."""
    measured = list(measured)
    absent = [x for x in measured if isinstance(x, Missing)]
    return [x for x in measured if x not in absent], [x for x in absent if x.case]


# Timing


def test_contenders_take_turns_and_the_median_forgets_what_disturbed():
    clock, order = Ticks(), []

    def runner(name: str, times: list[float]):
        left: Iterator[float] = iter(times)

        def run():
            order.append(name)
            clock.now += next(left)

        return run

    ours, theirs = runner("ours", [900, 10, 12, 500]), runner("peer", [900, 7, 300, 8])
    assert take_turns([ours, theirs], rounds=3, clock=clock) == [12, 8]
    assert order == ["ours", "peer"] * 4, "one run each to warm up, then in turn"


def test_the_host_is_timed_without_arguments_and_without_the_collector(monkeypatch):
    order, was_on, now = [], [], iter(range(0, 10**6, 1000))
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(now))
    work = Work(lambda: order.append("ready") or (lambda: was_on.append(gc.isenabled())), lambda: order.append("graph"))
    assert take_host_turns([work, CALIBRATION], 2, CPU) == [1.0, 1.0]
    assert order == ["ready", "graph"] * 11
    assert was_on == [True, *[False] * 10]
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        take_host_turns([Work.of(lambda: 1 // (gc.isenabled() or 0))], 1, CPU)
    assert gc.isenabled()
    assert CALIBRATION.ready()() == 10_000 * 9_999 // 2


# Layers


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


def test_layers_are_measured_beside_a_raw_call_that_computes_the_same(stage, monkeypatch):
    monkeypatch.setitem(peers.PEERS, "torch", raw_attention)
    found, absent = split(layers.raw(asked_of(stage, "flashinfer_mla", "fa3")))
    assert not absent, absent
    latents = {(name, heads, width) for name in ("flashinfer_mla", "fa3") for heads in (16, 128) for width in (1, 4)}
    grouped = {("fa3", heads, width) for heads in (32, 64) for width in (1, 4)}
    assert {(row["backend"], row["heads"], row["width"]) for row in found} == latents | grouped
    assert {(row["bench"], row["peer"], row["us"], row["ratio"]) for row in found} == {("attention", "by hand", 1, 1)}

    def sometimes(asked):
        if asked.layer.num_heads == 128:
            raise RuntimeError("no kernel in /home/me/.cache/x.so")
        return raw_attention(asked, wrong=asked.width == 4)

    monkeypatch.setitem(peers.PEERS, "torch", sometimes)
    found, absent = split(layers.raw(asked_of(stage, "flashinfer_mla", batch_sizes=[1])))
    assert [(row["heads"], row["width"]) for row in found] == [(16, 1)]
    assert absent[0].case == "batch 1, context 70, 16 heads, width 4"
    assert "the outputs differ by" in absent[0].reason
    assert [(each.failed, each.reason) for each in absent[1:]] == [(True, "RuntimeError: no kernel in x.so")] * 2


def test_a_time_is_that_of_one_of_the_caches_which_no_l2_holds(stage, monkeypatch):
    monkeypatch.setattr(shapes, "COLD_BYTES", 2 * 64 * (1 + 2) * 576 * 2 + 1)
    monkeypatch.setitem(peers.PEERS, "torch", raw_attention)
    pool = fill_pool(LAYERS[CacheFormat.LATENT][0], 1, 70, CPU)
    assert len(pool.caches) == 3
    assert sum(cache.latent.nbytes for cache in pool.caches) >= shapes.COLD_BYTES
    found, _ = split(layers.raw(asked_of(stage, "flashinfer_mla", batch_sizes=[1])))
    assert {(row["us"], row["ratio"]) for row in found} == {(0.33, 1.0)}


def test_the_last_row_sees_the_whole_context_and_requests_share_no_page():
    pool = fill_pool(LAYERS[CacheFormat.KV][0], 3, 70, CPU)
    assert pool.pages.unique().numel() == pool.pages.numel()
    assert 0 not in pool.pages
    for width in (1, 4, 20):
        step = problem(pool, LAYERS[CacheFormat.KV][0], width).step
        assert (step.num_tokens, step.is_tree, step.seq_lens.tolist()) == (3 * width, False, [70 - width] * 3)
        assert (step.kind is StepKind.PREFILL, step.seq_lens_cpu) == (width == 20, (70 - width,) * 3)


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
        out = attend(q, cache, cache[..., : self.rank], table, self.kv_len, self.causal, self.scale)
        return out.flatten(0, 1), None


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
    pool = fill_pool(LAYERS[format][0], 2, 70, CPU)
    asked = problem(pool, LAYERS[format][0], width)
    found = peers.PEERS[kernel](asked).call(pool.caches[0])
    torch.testing.assert_close(found, raw_attention(asked).call(pool.caches[0]), rtol=0.01, atol=0.01)


# Kernels beside each other


def on_one_problem(stage, backend, width=4, format=CacheFormat.KV):
    asked = next(dense_problems(format, [width], 2, 70, CPU))
    return list(compare_kernels(backend, backend.kernels, asked, stage, ONE))


def test_ours_are_compared_with_the_first_vendor_kernel_and_that_with_a_copy(stage):
    found = on_one_problem(stage, backend_of("fa3", vllm_flash_attn=None, sgl_kernel=None, triton=None, torch=None))
    beside = ["copy", "copy", "vllm_flash_attn", "vllm_flash_attn"]
    assert [row["kernel"] for row in found] == ["vllm_flash_attn", "sgl_kernel", "triton", "torch"]
    assert [row["peer"] for row in found] == beside
    assert [(row["us"], row["peer_us"]) for row in found[2:]] == [(1.0, 1.0)] * 2


def test_without_a_vendor_ours_are_compared_with_a_copy_of_as_many_bytes(stage):
    (row,) = on_one_problem(stage, backend_of("fa3", triton=None))
    num_bytes = 2 * (2 * 70 * 2 * 8 * 128 + 2 * 2 * 4 * 32 * 128)  # keys and values, queries and outputs
    num_operations = 2 * 2 * 2 * (67 + 68 + 69 + 70) * 32 * 128
    assert (row["peer"], row["us"], row["peer_us"]) == ("copy", 1.0, round(num_bytes / 1e6, 2))
    assert (row["tb_per_s"], row["tflop_per_s"]) == (round(num_bytes / 1e6, 3), round(num_operations / 1e6, 1))
    (row,) = on_one_problem(stage, backend_of("flashinfer_mla", triton=None), 1, CacheFormat.LATENT)
    assert row["tb_per_s"] == round(2 * (2 * 70 * 576 + 2 * 16 * (576 + 512)) / 1e6, 3), "a latent is read once"


@pytest.mark.parametrize(
    ("error", "failed", "reason"),
    [
        (RuntimeError("broken"), True, "RuntimeError: broken"),
        (REFUSAL, False, "triton: no."),
        (BackendUnavailableError("triton", ["no"]), False, "triton can't run here: no."),
        (torch.OutOfMemoryError("2 GiB"), False, "it does not fit into the device's memory"),
    ],
)
def test_a_kernel_that_raises_is_listed_and_the_others_are_measured(stage, error, failed, reason):
    first, second = on_one_problem(stage, backend_of("fa3", triton=raising(error), torch=None))
    assert first == Missing("fa3", "triton", "batch 2, context 70, 32 heads, width 4", reason, failed)
    assert second["kernel"] == "torch"


def test_too_little_memory_for_a_graph_is_no_failure_and_another_output_is_one(stage):
    full = CaptureError("no memory to capture")
    full.__cause__ = torch.OutOfMemoryError("2 GiB")
    (absent,) = on_one_problem(stage, backend_of("fa3", triton=raising(full)))
    assert not absent.failed
    absent, row = on_one_problem(stage, backend_of("fa3", vllm_flash_attn=None, triton=off_by_one))
    assert (absent.kernel, absent.failed, row["kernel"]) == ("triton", True, "vllm_flash_attn")
    assert "the outputs differ by" in absent.reason


def test_what_a_graph_reads_lives_as_long_as_the_graph(stage):
    """A recorded graph keeps its tensors itself, a CUDA graph does not."""

    forgetful = replace(stage, make_graph=lambda: SimpleNamespace(capture=lambda region: region()))
    attend = lambda cache: cache  # noqa: E731
    made = weakref.ref(attend)
    captured = layers.capture(attend, [torch.zeros(1)], forgetful)
    del attend
    assert made() is not None
    del captured
    assert made() is None


def test_a_pool_is_gone_before_the_next_is_made_and_one_that_does_not_fit_is_listed(stage):
    pools = []

    def make(batch_size, context, device):
        assert all(pool() is None for pool in pools)
        if batch_size == 2:
            raise torch.OutOfMemoryError
        for asked in dense_problems(CacheFormat.KV, [1], batch_size, context, device):
            pools.append(weakref.ref(asked.pool.caches[0].k))
            yield asked

    backend = backend_of("fa3", triton=None)
    measure = partial(compare_kernels, stage=stage, ceilings=ONE)
    asked = asked_of(stage, batch_sizes=[1, 2, 3])
    found, absent = split(everywhere(asked, {backend: backend.kernels}, {CacheFormat.KV: make}, measure))
    assert [row["batch_size"] for row in found] == [1, 1, 3, 3]
    assert [(each.kernel, each.case) for each in absent] == [("every kernel", "batch 2, context 70 (kv)")]


def test_every_kernel_but_torch_is_asked_whether_it_runs(stage, monkeypatch):
    monkeypatch.setattr(rows, "TORCH", "torch")
    found, missing = asked_of(stage, "fa3", "trtllm_mla", "dsv4").runnable()
    assert not found
    assert {absent.kernel for absent in missing} >= {"flashmla", "flashmla_sparse", "vllm_flash_attn", "triton"}
    assert not {"torch"} & {absent.kernel for absent in missing}


PREFILLED = {"fa3": (16, 128, 32, 64), "trtllm_mla": (16, 128), "dsv4": (64, 16)}  # and the heads of each


@pytest.mark.parametrize("names", [["trtllm_mla"], pytest.param([*PREFILLED], marks=pytest.mark.full)], ids=len)
def test_a_prefill_is_the_last_chunk_of_a_prompt_and_all_of_it(names, stage, monkeypatch):
    sizes = {shapes: {"PREFILL_CHUNK": 17, "MAX_PREFILLED": 60}, layers: {"COPY_BYTES": 2, "MATMUL_SIZE": 1}}
    for module, name, value in ((module, *one) for module, own in sizes.items() for one in own.items()):
        monkeypatch.setattr(module, name, value)
    found, absent = split(layers.prefill(asked_of(stage, *names, contexts=[24, 48])))
    assert not absent, absent
    assert {(row["backend"], row["heads"], row["context"], row["width"]) for row in found} == {
        (name, heads, *sizes) for name in names for heads in PREFILLED[name] for sizes in ((24, 17), (24, 24), (48, 17))
    }
    assert split(layers.prefill(asked_of(stage, *names, batch_sizes=[31], contexts=[20]))) == ([], [])
    assert layers.DECODES.keys() == layers.PREFILLS.keys() == {*CacheFormat, CompressedFormat.COMPRESSED}


def test_ceilings_are_bytes_and_operations_by_time(stage, monkeypatch):
    monkeypatch.setattr(layers, "COPY_BYTES", 10**6)
    monkeypatch.setattr(layers, "MATMUL_SIZE", 100)
    assert measure_ceilings(stage) == {"copy_tb_per_s": 2.0, "matmul_tflop_per_s": 2.0}


@pytest.mark.parametrize("context", [600, 2400])
def test_a_compressed_problem_is_its_window_and_the_selected_entries(stage, context):
    asked = list(compressed_problems([1, 4], 2, context, CPU))[3]
    assert (asked.layer.num_heads, asked.width) == (16, 4)
    pool, cache = asked.pool, asked.pool.caches[0]
    found = asked.call(get_backend("dsv4"), "torch")(cache)
    for row in (0, 3, 7):
        pages, position = pool.pages[row // 4], context - 4 + row % 4
        tokens = torch.arange(position - WINDOW + 1, position + 1)
        read = cache.rows.read(pages[tokens // 256] * 256 + tokens % 256)
        slots = asked.entry_slots[row][asked.entry_slots[row] >= 0]
        assert len(slots.unique()) == min(TOPK, (position + 1) // COMPRESSION.ratio)
        assert set((slots // 64).tolist()) <= set(pages[: -(-context // 256)].tolist())
        keys = torch.cat((read, cache.compressor.entries.read(slots)))
        scores = torch.cat((asked.q[row].float() @ keys.T * asked.layer.scale, torch.zeros(16, 1)), dim=1)
        torch.testing.assert_close(found[row].float(), scores.softmax(1)[:, :-1] @ keys, rtol=0.02, atol=0.02)
    num_keys = WINDOW + min(TOPK, context // 4)
    assert asked.num_bytes == 8 * (num_keys * 584 + 2 * 16 * 512 * 2)
    assert asked.num_operations == 8 * 4 * num_keys * 16 * 512


# Trees, ragged verifies, mixed steps


def test_a_tree_is_compared_with_a_chain_of_as_many_rows(stage, monkeypatch):
    steps, one_step = [], shapes.one_step
    monkeypatch.setattr(shapes, "one_step", lambda *args: steps.append(one_step(*args)) or steps[-1])
    found, absent = split(layers.trees(asked_of(stage, "fa3")))
    assert not absent, absent
    assert [(row["heads"], row["width"], row["peer"], row["ratio"]) for row in found] == [
        (heads, NUM_NODES, "torch, a chain", 1.0) for heads in (16, 128, 32, 64)
    ]
    assert [step.is_tree for step in steps] == [True, False] * 4
    assert {tuple(step.seq_lens.tolist()) for step in steps} == {(70 - NUM_NODES, 70 - NUM_NODES)}
    mask = tree_mask(CPU)
    assert mask.sum(1).tolist() == [1, *[2] * 4, *[3] * 11]
    assert mask[7].nonzero().flatten().tolist() == [0, 1, 7]
    assert mask[15].nonzero().flatten().tolist() == [0, 3, 15]


@pytest.fixture
def small(monkeypatch):
    layer = replace(LAYERS[CacheFormat.KV][0], num_heads=8)
    monkeypatch.setattr(ragged, "LAYERS", {CacheFormat.KV: (layer,)})
    monkeypatch.setattr(ragged, "CHUNKS", (20,))
    for module in (ragged, shapes):
        monkeypatch.setattr(module, "DTYPE", torch.float32)


def test_a_ragged_verify_is_beside_the_best_uniform_one(stage, small, monkeypatch):
    asked = asked_of(stage, "fa3", batch_sizes=[3], contexts=[64])
    (row,), absent = split(ragged.ragged(asked))
    assert not absent, absent
    assert (row["bench"], row["batch_size"], row["width"], row["peer"]) == ("ragged", 3, BOUND, "fa3 torch, 8 rows")
    assert row["ratio"] == row["us"] / row["peer_us"] == 1, "a replay takes a tick"
    monkeypatch.setattr(ragged, "rows_of", lambda out, widths: rows_of(out, widths).flip(0))
    found, (absent,) = split(ragged.ragged(asked))
    assert not found
    assert "the outputs differ" in absent.reason


def test_without_a_uniform_verify_ragged_ones_are_missing(stage, small, monkeypatch):
    made = ragged.verify_of
    refused = lambda *args, is_ragged: made(*args, is_ragged=True) if is_ragged else 1 // 0  # noqa: E731
    monkeypatch.setattr(ragged, "verify_of", refused)
    found, (uniform, beside) = split(ragged.ragged(asked_of(stage, "fa3", batch_sizes=[3], contexts=[64])))
    assert (found, uniform.failed, beside.failed) == ([], True, False)
    assert "no kernel ran the uniform verify" in beside.reason


def test_widths_have_the_mean_and_change():
    found = widths_of(128)
    assert all(int(each.sum()) == int(128 * MEAN) for each in found)
    assert all(1 <= int(each.min()) <= int(each.max()) <= BOUND for each in found)
    assert len({tuple(each.tolist()) for each in found}) == len(found)


def test_a_mixed_step_is_beside_its_halves(stage, small):
    found, absent = split(ragged.mixed(asked_of(stage, "fa3", batch_sizes=[3], contexts=[64])))
    assert not absent, absent
    assert [(row["bench"], row["width"], row["peer"]) for row in found] == [
        ("mixed", width, "chunk 20, two steps: torch, torch") for width in (1, 4, 1, 4)
    ]


# Planning, the host, memory, sampling


def test_requests_share_no_page_and_padding_has_its_own():
    table = Tables.of(speculative(4, 1024, 4, 1, 3), CPU).table
    assert table[1:].unique().numel() == table[1:].numel()
    assert table[0].max() < 4 <= table[1:].min()
    assert (table[1:].view(4, -1, 4).diff() == 1).all()
    assert not torch.equal(table[1:].flatten(), table[1:].flatten().sort().values), "shuffled"


@pytest.mark.parametrize("name", plans.PAGE_SIZES)
@pytest.mark.one_in(2)
def test_a_cycle_is_planned_by_graphs_that_read_an_engines_buffers(name, stage, monkeypatch):
    planned = []

    class Watched(get_backend(name)):
        def refresh(self, meta):
            planned.append((meta.step.kind, self))
            super().refresh(meta)

    monkeypatch.setattr(plans, "take_turns", lambda replays, *_: [*[2 * plans.COPIES + 1] * (len(replays) - 1), 1])
    monkeypatch.setattr(plans, "nodes_of", lambda graph: graph.replay() or [0.5] * 4 * plans.COPIES)
    asked = Asked(stage, [Watched], (2,), (600,), page_size=256 if name == "dsv4" else 64)
    monkeypatch.setattr(plans, "CAPACITY_CONTEXT", 1024)
    found, absent = split(plans.plans(asked))
    assert not absent, absent
    told = {row["phase"]: row for row in found}
    three, cycle = told.pop(plans.INSTANCES), told[CYCLE]
    ragged = [plans.RAGGED[of] for of in ("verify", "draft_extend", CYCLE)] * (name != "trtllm_mla")
    assert told.keys() == {*plans.KINDS, CYCLE, *ragged}
    assert {(row["kernel"], row["us"], row["kernel_us"], row["nodes"]) for row in told.values()} == {("torch", 2, 2, 4)}
    assert [phase for phase, row in told.items() if "host_us" in row] == [CYCLE]
    assert (three["us"], three["cycle_us"], three["nodes"]) == (6, 2, 12)
    assert three["bytes"] == cycle["bytes"] < sum(told[phase]["bytes"] for phase in PHASES), "one table of three"
    assert [len(set(each)) for each in zip(*planned, strict=True)] == [4, 5], "kinds; a backend of each, and of cycles"
    assert Counter(planned).total() == plans.COPIES * (len(plans.KINDS) + 3 + (2 + 3) * bool(ragged))


def test_a_kernel_with_a_schedule_plans_for_layers_of_two_shapes(stage, monkeypatch):
    monkeypatch.setattr(plans, "_rows", lambda backend, kernel, shape, *_: [(kernel.name, shape[:2])])
    backend = backend_of("trtllm_mla", flashmla=None, triton=None)
    first, second = backend.kernels
    monkeypatch.setattr(backend, "kernels", (replace(first, schedule=lambda *_: None), second))
    asked = Asked(stage, [backend], (2,), (600,), page_size=64)
    assert [*plans.plans(asked)] == [("flashmla", (16, 1)), ("flashmla", (128, 1)), ("triton", (16, 1))]
    assert [shape[:2] for shape in plans.layer_shapes(get_backend("fa3"))] == [(32, 8), (8, 1)]


def test_the_best_vendor_kernel_and_the_best_of_ours_are_measured(monkeypatch):
    backend = get_backend("trtllm_mla")
    runs = [replace(kernel, unavailable_reasons=lambda device: []) for kernel in backend.kernels]
    monkeypatch.setattr(backend, "kernels", tuple(runs))
    assert [kernel.name for kernel in plans.kernels_of(backend, CPU)] == ["trtllm_gen", "gluon"]
    without = replace(runs[0], capabilities={StepKind.DECODE: runs[0].capabilities[StepKind.DECODE]})
    monkeypatch.setattr(backend, "kernels", (without, *runs[1:]))
    assert [kernel.name for kernel in plans.kernels_of(backend, CPU)] == ["flashmla", "gluon"]


@pytest.mark.parametrize("backend", ["fa3", "trtllm_mla"])
def test_eager_layers_are_timed_beside_a_scatter_and_a_call(backend, stage, monkeypatch):
    called, size = [], rows.Size(70, 1)
    monkeypatch.setattr(host, "NUM_LAYERS", 2)
    raw = lambda asked, meta: ("nothing", called.append)  # noqa: E731
    row = host.eager_row(get_backend(backend), "torch", raw, size, asked_of(stage))
    assert (row["backend"], row["kernel"], row["layers"], row["peer"]) == (backend, "torch", 2, "scatter and nothing")
    assert len(called) == 2 * 11, "a first time, and five in each of two rounds"
    found, absent = split(host.eager(asked_of(stage, "trtllm_mla")))
    assert (found, {each.kernel for each in absent}) == ([], {*host.KERNELS["trtllm_mla"]})
    (absent,) = host.eager(asked_of(stage, "flashinfer_mla"))
    assert "no raw call" in absent.reason
    assert not absent.failed


def test_a_cycle_has_three_steps_however_they_are_made(stage):
    for (table, slots, bounds), make in host.cycles(2, 70, CPU):
        made = make()
        assert [step.kind for step in made] == [*PHASES.values()]
        for step in made:
            assert type(step.paging).__name__.lower() == f"{table}table"
            assert (step.out_cache_loc is None) == (slots == "left out")
            assert (step.max_committed is None) == (bounds == "none")
            assert (step.seq_lens_cpu is None) == (bounds != "seq_lens_cpu")
    found = list(host.steps(asked_of(stage)))
    assert len(found) == 12
    assert not any(row["operators"] for row in found)
    with host.Operators() as operators:
        torch.ones(2) + 1
    assert operators.num == 2


POSITIONS = torch.arange(200_000)


def counted(logits: torch.Tensor, given: Sampling, token: int, position: int) -> list[str]:
    """Reasons found for a token chosen from one row."""
    params, positions = SamplingParams.of([given]), torch.tensor([[position]])
    found = sampling.compared(logits.view(1, 1, -1), params, positions, torch.tensor([[token]]))
    return [reason for reason, count in found.items() if count]


def test_choices_that_float32_excuses_are_told_from_wrong_ones():
    logits, given = torch.randn(50), Sampling(1.0, 0.9, 20, 3)
    expected = choose(logits.double().view(1, 1, -1), SamplingParams.of([given]), torch.tensor([[7]]))
    assert counted(logits, given, int(expected), 7) == []
    assert counted(torch.tensor([0.0, 3.0]), Sampling(), 0, 5) == ["wrong"]
    assert counted(torch.tensor([0.0, 30.0]), Sampling(1.0, seed=1), 0, 5) == ["wrong"]
    assert counted(torch.tensor([0.0, 9.0, 9.0]), Sampling(1.0, 1.0, 2, 1), 0, 5) == ["wrong"]
    half = Sampling(1.0, 0.5, 0, 1)
    assert counted(torch.zeros(2), half, 1, 5) == ["boundaries"]
    assert counted(torch.tensor([0.001, 0.0]), half, 1, 5) == ["wrong"]
    bits = definition._draw(definition._draw(torch.tensor(5), POSITIONS).unsqueeze(1), torch.arange(2))
    times = definition._race_times(bits, torch.float64).log()
    position = int((times[:, 0] - times[:, 1]).abs().argmin())
    first = int(times[position].argmin())
    assert counted(torch.zeros(2), Sampling(1.0, seed=5), 1 - first, position) == ["close_races"]


# The command


def run(arguments, tmp_path, monkeypatch, measure=None):
    """Exit code and result of a command whose set gives what it is told."""
    if measure is not None:
        monkeypatch.setitem(command.SETS, "raw", command.SETS["raw"]._replace(measure=measure, needs_gpu=False))
    path = tmp_path / "rows.json"
    code = command.main([*arguments, "--json", str(path)])
    return code, json.loads(path.read_text())


@pytest.mark.parametrize(
    ("missing", "code"),
    [([], 0), ([Missing("fa3", "x", "", "not here", False)], 0), ([Missing("fa3", "x", "c", "RuntimeError", True)], 1)],
)
def test_the_command_writes_rows_targets_and_what_is_missing(missing, code, tmp_path, monkeypatch, capsys):
    row = {"bench": "attention", "backend": "fa3", "kernel": "k", "batch_size": 1}
    row |= {"context": 4096, "us": 1, "ratio": 1.04}

    def measure(asked):
        assert ([b.name for b in asked.backends], asked.batch_sizes, asked.contexts) == (["fa3"], [1, 32], [4096])
        asked.own["ceilings"] = ONE
        yield from (row, *missing)

    found, written = run(["raw", "--backend", "fa3", "--quick"], tmp_path, monkeypatch, measure)
    assert found == code
    assert (written["rows"], written["rounds"], written["ceilings"]) == ([row], command.QUICK_ROUNDS, ONE)
    assert written["command"] == "python -m benchmarks raw --backend fa3 --quick --json FILE"
    assert [absent["reason"] for absent in written["missing"]] == [absent.reason for absent in missing]
    assert [each[-2:] for each in written["targets"]] == [["value", "met"], [1.04, False]]
    output = capsys.readouterr().out
    assert "missed: a layer, times the raw call: fa3/k: 0 of 1; at worst 1.04" in output
    assert "4,096" in output
    assert all(absent.reason in output for absent in missing)


def test_nothing_measured_is_an_error(tmp_path, monkeypatch):
    assert run(["raw"], tmp_path, monkeypatch, lambda asked: iter(()))[0] == 2


def test_memory_needs_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, written = run(["memory"], tmp_path, monkeypatch)
    assert code == 0
    places = {(row["backend"], row["page_size"], row["topk"]) for row in written["rows"]}
    assert places == {(name, *case) for name, cases in memory.CASES.items() for case in cases}
    assert all(is_met for *_, is_met in written["targets"])
    words = ["memory", "--backend", "fa3", "--page-size", "16", "--batch-size", "2", "--context", "100"]
    found = run(words, tmp_path, monkeypatch)[1]["rows"]
    tables = [row["buffers"]["page_table"] for row in found if row["phase"] == "all"]
    assert tables == [4 * 2 * 7] * 2, "7 pages of 16 hold 100 tokens and 5 nodes"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(([name], f"benchmarks {name} can't run here: torch sees no CUDA device")
          for name, chosen in command.SETS.items() if chosen.needs_gpu),
        (["raw", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["raw", "--context", "4096", "4"], "--context must be at least 5, got 4"),
        (["raw", "--json", "no/such/folder/rows.json"], "there is no folder no/such/folder"),
        (["trees", "--context", "16"], "--context must be at least 17"),
        (["raw", "--topk", "0"], "benchmarks raw has no --topk"),
        (["steps", "--backend", "fa3", "--page-size", "4"], "benchmarks steps has no --backend or --page-size"),
        (["memory", "--page-size", "0"], "--page-size must be at least 1, got 0"),
        (["memory", "--topk", "0"], "topk must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_the_command_refuses_with_a_reason(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())
