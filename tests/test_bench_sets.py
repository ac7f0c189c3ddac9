"""The sets of `benchmarks attention` beside the default one: kernels beside each other, trees beside chains."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from attn_backends.cache import CacheFormat
from attn_backends.compressed_cache import CompressedFormat
from attn_backends.errors import BackendUnavailableError, CaptureError, UnsupportedStepError
from attn_backends.graphs import RecordedGraph
from attn_backends.layer import AttentionOutput
from attn_backends.registry import get_backend
from benchmarks import ceilings, compressed, kernels, shapes, trees
from benchmarks.ceilings import Ceilings, measure_ceilings
from benchmarks.compressed import COMPRESSION, TOPK, WINDOW, compressed_problems
from benchmarks.kernels import compare_kernels, measure_kernels, runnable_kernels
from benchmarks.rows import KernelRow, Missing, Row, Stage
from benchmarks.shapes import LAYERS, dense_problems, fill_pool, problem
from benchmarks.trees import NUM_NODES, measure_trees, tree_mask
from spec_metadata import StepKind
from tests.test_bench import CPU, Ticks

ONE = Ceilings(1.0, 1.0)  # a terabyte, or 1e12 operations, a second


@pytest.fixture
def stage(monkeypatch):
    """A CPU on which a replay takes one tick."""
    monkeypatch.setattr(shapes, "COLD_BYTES", 1)
    monkeypatch.setattr(compressed, "COLD_BYTES", 1)
    clock = Ticks()

    class Graph(RecordedGraph):
        def replay(self):
            clock.now += 1
            super().replay()

    return Stage(CPU, Graph, clock, rounds=2)


def backend_of(name, **launches):
    """A backend whose kernels are its torch kernel under other names. launches: a kernel's own launch, or None."""
    base = get_backend(name)
    torch_kernel = next(kernel for kernel in base.kernels if kernel.name == "torch")
    own = tuple(
        replace(torch_kernel, name=name, launch=launch or torch_kernel.launch) for name, launch in launches.items()
    )
    return type(base.__name__, (base,), {"kernels": own})


def all_backends():
    return [backend_of(name, triton=None) for name in ("fa3", "trtllm_mla", "dsv4")]


def off_by_one(q, cache, plan, layer):
    out, lse = next(kernel for kernel in get_backend("fa3").kernels if kernel.name == "torch").launch(
        q, cache, plan, layer
    )
    return AttentionOutput(out + 1, lse)


def raising(error):
    def launch(*_):
        raise error

    return launch


def on_one_problem(stage, backend, width=4, format=CacheFormat.KV):
    asked = next(dense_problems(format, [width], 2, 70, CPU))
    return list(compare_kernels(backend, backend.kernels, asked, ONE, stage))


def test_ours_are_compared_with_the_first_vendor_kernel_and_that_with_a_copy(stage):
    rows = on_one_problem(stage, backend_of("fa3", vllm_flash_attn=None, sgl_kernel=None, triton=None, torch=None))
    assert [(row.kernel, row.peer) for row in rows] == [
        ("vllm_flash_attn", "copy"),
        ("sgl_kernel", "copy"),
        ("triton", "vllm_flash_attn"),
        ("torch", "vllm_flash_attn"),
    ]
    assert {(row.bench, row.backend, row.batch_size, row.context, row.heads, row.width) for row in rows} == {
        ("kernels", "fa3", 2, 70, 32, 4)
    }
    assert [(row.us, row.peer_us) for row in rows[2:]] == [(1.0, 1.0)] * 2


def test_without_a_vendor_ours_are_compared_with_a_copy_of_as_many_bytes(stage):
    (row,) = on_one_problem(stage, backend_of("fa3", triton=None))
    num_bytes = 2 * (2 * 70 * 2 * 8 * 128 + 2 * 2 * 4 * 32 * 128)  # keys and values, queries and outputs
    num_operations = 2 * 2 * 2 * (67 + 68 + 69 + 70) * 32 * 128
    assert (row.peer, row.us, row.peer_us) == ("copy", 1.0, round(num_bytes / 1e6, 2))
    assert row.tb_per_s == round(num_bytes / 1e6, 3)
    assert row.tflop_per_s == round(num_operations / 1e6, 1)
    assert row.ratio == round(1 / (num_bytes / 1e6), 4)


def test_a_latent_is_read_once(stage):
    (row,) = on_one_problem(stage, backend_of("flashinfer_mla", triton=None), 1, CacheFormat.LATENT)
    assert row.tb_per_s == round(2 * (2 * 70 * 576 + 2 * 16 * (576 + 512)) / 1e6, 3)
    assert row.tflop_per_s == round(2 * 2 * 70 * 16 * (576 + 512) / 1e6, 1)


@pytest.mark.parametrize(
    ("error", "failed", "reason"),
    [
        (RuntimeError("broken"), True, "RuntimeError: broken"),
        (UnsupportedStepError("triton", ["no"]), False, "triton: no."),
        (BackendUnavailableError("triton", ["no"]), False, "triton can't run here: no."),
        (torch.OutOfMemoryError("2 GiB"), False, "it does not fit into the device's memory"),
    ],
)
def test_a_kernel_that_raises_is_listed_and_the_others_are_measured(stage, error, failed, reason):
    first, second = on_one_problem(stage, backend_of("fa3", triton=raising(error), torch=None))
    assert (first.kernel, first.failed, first.reason) == ("triton", failed, reason)
    assert first.case == "batch 2, context 70, 32 heads, width 4"
    assert second.kernel == "torch"


def test_too_little_memory_for_a_graph_is_no_failure(stage):
    full = CaptureError("no memory to capture")
    full.__cause__ = torch.OutOfMemoryError("2 GiB")
    (absent,) = on_one_problem(stage, backend_of("fa3", triton=raising(full)))
    assert not absent.failed


def test_a_kernel_that_computes_something_else_has_no_row(stage):
    absent, row = on_one_problem(stage, backend_of("fa3", vllm_flash_attn=None, triton=off_by_one))
    assert (absent.kernel, absent.failed) == ("triton", True)
    assert "the outputs differ by" in absent.reason
    assert row.kernel == "vllm_flash_attn"


def test_what_a_graph_reads_lives_as_long_as_the_graph(stage):
    """A recorded graph keeps its tensors itself, a CUDA graph does not."""

    class Attend:
        def __call__(self, cache):
            return cache

    made = []

    def call(*_):
        attend = Attend()
        made.append(weakref.ref(attend))
        return attend

    asked = SimpleNamespace(pool=SimpleNamespace(caches=[torch.zeros(1)]), call=call)
    forgetful = replace(stage, make_graph=lambda: SimpleNamespace(capture=lambda region: region()))
    captured = kernels.capture(asked, get_backend("fa3"), "torch", forgetful)
    assert made[0]() is not None
    del captured
    assert made[0]() is None


def test_a_pool_is_gone_before_the_next_is_made(stage):
    pools = []

    def make(batch_size, context, device):
        assert all(pool() is None for pool in pools)
        for asked in dense_problems(CacheFormat.KV, [1], batch_size, context, device):
            pools.append(weakref.ref(asked.pool.caches[0].k))
            yield asked

    backend = backend_of("fa3", triton=None)
    assert (
        len(list(measure_kernels({CacheFormat.KV: make}, {backend: backend.kernels}, [1, 2, 3], [70], ONE, stage))) == 6
    )


def test_long_calls_take_turns_less_often(stage, monkeypatch):
    turns = []
    monkeypatch.setattr(kernels, "TURNS_US", 3e5)
    monkeypatch.setattr(kernels, "take_turns", lambda runs, rounds, clock: turns.append(rounds) or [2e4, 3e4])
    graphs = {"a": SimpleNamespace(replay=None), "b": SimpleNamespace(replay=None)}
    assert kernels._times(graphs, 2, replace(stage, rounds=20)) == {"a": 1e4, "b": 1.5e4}
    assert kernels._times(graphs, 2, replace(stage, rounds=2)) == {"a": 1e4, "b": 1.5e4}
    monkeypatch.setattr(kernels, "TURNS_US", 1.0)
    kernels._times(graphs, 2, replace(stage, rounds=20))
    assert turns == [1, 6, 1, 2, 1, 3]


def test_only_a_prefill_finds_its_keys_where_the_last_call_left_them(monkeypatch):
    monkeypatch.setattr(shapes, "COLD_BYTES", 2**21)
    monkeypatch.setattr(compressed, "COLD_BYTES", 4 * 640 * 584)
    pools = [fill_pool(CacheFormat.LATENT, 2, 70, CPU, widths) for widths in ([1, 16], [16, 17])]
    assert [len(pool.caches) for pool in pools] == [6, 1]
    assert [pool.capacity.num_draft_tokens for pool in pools] == [16, 2]
    problems = [next(compressed_problems(widths, 2, 70, CPU)) for widths in ([1, 4], [4])]
    assert [len(asked.pool.caches) for asked in problems] == [2, 1]


def test_a_pool_that_does_not_fit_is_said_and_the_next_is_measured(stage):
    def make(batch_size, context, device):
        if batch_size == 3:
            raise torch.OutOfMemoryError("2 GiB")
        return dense_problems(CacheFormat.KV, [1], batch_size, context, device)

    backend = backend_of("fa3", triton=None)
    found = list(measure_kernels({CacheFormat.KV: make}, {backend: backend.kernels}, [3, 1], [70], ONE, stage))
    assert found[0] == Missing(
        "fa3", "every kernel", "batch 3, context 70 (kv)", "it does not fit into the device's memory", failed=False
    )
    assert [(row.batch_size, row.heads) for row in found[1:]] == [(1, 32), (1, 64)]


def test_every_format_is_measured_on_the_backends_that_take_it(stage):
    problems = {
        CacheFormat.LATENT: partial(dense_problems, CacheFormat.LATENT, [1]),
        CacheFormat.KV: partial(dense_problems, CacheFormat.KV, [1]),
        CompressedFormat.COMPRESSED: partial(compressed_problems, [1, 4]),
    }
    assert kernels.DECODES.keys() == kernels.PREFILLS.keys() == problems.keys()
    found = {backend: backend.kernels for backend in all_backends()}
    rows = list(measure_kernels(problems, found, [1], [600], ONE, stage))
    assert all(isinstance(row, KernelRow) for row in rows), rows
    assert {(row.backend, row.heads, row.width) for row in rows} == {
        *(("fa3", heads, 1) for heads in (16, 128, 32, 64)),
        *(("trtllm_mla", heads, 1) for heads in (16, 128)),
        *(("dsv4", heads, width) for heads in (64, 16) for width in (1, 4)),
    }


def test_every_kernel_but_torch_is_asked_whether_it_runs():
    backend = backend_of("fa3", vllm_flash_attn=None, torch=None)
    assert runnable_kernels([backend], CPU) == ({backend: [backend.kernels[0]]}, [])
    found, missing = runnable_kernels([get_backend(name) for name in ("fa3", "trtllm_mla", "dsv4")], CPU)
    assert not found
    assert {absent.kernel for absent in missing} >= {"flashmla", "flashmla_sparse", "vllm_flash_attn", "triton"}


@pytest.mark.parametrize("context", [600, 2400])
def test_a_compressed_problem_is_its_window_and_the_selected_entries(stage, context):
    asked = list(compressed_problems([1, 4], 2, context, CPU))[3]
    assert (asked.layer.num_heads, asked.width) == (16, 4)
    pool, cache = asked.pool, asked.pool.caches[0]
    found = asked.call(get_backend("dsv4"), "torch")(cache)
    for row in (0, 3, 7):
        pages, position = pool.pages[row // 4], context - 4 + row % 4
        tokens = torch.arange(position - WINDOW + 1, position + 1)
        rows = cache.rows.read(pages[tokens // 256] * 256 + tokens % 256)
        slots = asked.entry_slots[row][asked.entry_slots[row] >= 0]
        assert len(slots.unique()) == min(TOPK, (position + 1) // COMPRESSION.ratio)
        assert set((slots // 64).tolist()) <= set(pages[: -(-context // 256)].tolist())
        keys = torch.cat((rows, cache.compressor.entries.read(slots)))
        scores = torch.cat((asked.q[row].float() @ keys.T * asked.layer.scale, torch.zeros(16, 1)), dim=1)
        torch.testing.assert_close(found[row].float(), scores.softmax(1)[:, :-1] @ keys, rtol=0.02, atol=0.02)
    num_keys = WINDOW + min(TOPK, context // 4)
    assert asked.num_bytes == 8 * (num_keys * 584 + 2 * 16 * 512 * 2)
    assert asked.num_operations == 8 * 4 * num_keys * 16 * 512


def test_ceilings_are_bytes_and_operations_by_time(stage, monkeypatch):
    monkeypatch.setattr(ceilings, "COPY_BYTES", 10**6)
    monkeypatch.setattr(ceilings, "MATMUL_SIZE", 100)
    found = measure_ceilings(stage)
    assert found == Ceilings(2.0, 2.0)
    assert found.copy_us(10**6) == 0.5


def test_a_tree_is_compared_with_a_chain_of_as_many_rows(stage):
    backend = backend_of("fa3", triton=None)
    rows = list(measure_trees({backend: backend.kernels}, [2], [70], stage))
    assert all(isinstance(row, Row) for row in rows), rows
    assert [(row.bench, row.kernel, row.heads, row.width, row.peer) for row in rows] == [
        ("trees", "triton", heads, NUM_NODES, "triton, a chain") for heads in (16, 128, 32)
    ]
    assert {(row.us, row.peer_us, row.ratio) for row in rows} == {(1.0, 1.0, 1.0)}


def test_the_tree_is_measured_as_a_tree_and_the_chain_as_a_chain(stage, monkeypatch):
    steps = []
    nothing = SimpleNamespace(graph=RecordedGraph())
    monkeypatch.setattr(trees, "capture", lambda asked, *_: steps.append(asked.step) or nothing)
    pool = fill_pool(CacheFormat.KV, 2, 70, CPU, [NUM_NODES])
    chain = problem(pool, LAYERS[CacheFormat.KV][0], NUM_NODES)
    tree = replace(chain, tree_mask=tree_mask(CPU).expand(2, -1, -1))
    with pytest.raises(ZeroDivisionError):  # nothing ran, and the clock stood still
        trees.compare(get_backend("fa3"), "triton", tree, chain, stage)
    assert [step.is_tree for step in steps] == [True, False]
    assert [step.seq_lens.tolist() for step in steps] == [[70 - NUM_NODES] * 2] * 2


def test_a_kernel_that_takes_no_trees_is_listed(stage):
    backend = backend_of("fa3", triton=raising(UnsupportedStepError("triton", ["trees"])))
    found = list(measure_trees({backend: backend.kernels}, [1], [70], stage))
    assert [(absent.failed, absent.reason) for absent in found] == [(False, "triton: trees.")] * 3


def test_nodes_of_the_tree_see_themselves_and_their_ancestors():
    mask = tree_mask(CPU)
    assert mask.sum(1).tolist() == [1, *[2] * 4, *[3] * 11]
    assert mask[7].nonzero().flatten().tolist() == [0, 1, 7]
    assert mask[15].nonzero().flatten().tolist() == [0, 3, 15]


PREFILLED = {"fa3": (16, 128, 32, 64), "trtllm_mla": (16, 128), "dsv4": (64, 16)}  # and the heads of each


@pytest.mark.parametrize("names", [["trtllm_mla"], pytest.param([*PREFILLED], marks=pytest.mark.full)], ids=len)
def test_a_prefill_is_the_last_chunk_of_a_prompt_and_all_of_it(names, stage, monkeypatch):
    monkeypatch.setattr(shapes, "PREFILL_CHUNK", 17)
    monkeypatch.setattr(shapes, "MAX_PREFILLED", 60)
    found = {backend: backend.kernels for backend in all_backends() if backend.name in names}
    rows = list(measure_kernels(kernels.PREFILLS, found, [2], [24, 48], ONE, stage))
    assert all(isinstance(row, KernelRow) for row in rows), rows
    assert {(row.backend, row.heads, row.context, row.width) for row in rows} == {
        (name, heads, *sizes) for name in names for heads in PREFILLED[name] for sizes in ((24, 17), (24, 24), (48, 17))
    }
    assert not list(measure_kernels(kernels.PREFILLS, found, [31], [20], ONE, stage))


def test_a_prefill_is_a_packed_step_on_eager_metadata():
    pool = fill_pool(CacheFormat.KV, 2, 70, CPU)
    asked = problem(pool, LAYERS[CacheFormat.KV][0], 20)
    assert (asked.step.kind, asked.step.query.lens_cpu) == (StepKind.PREFILL, (20, 20))
    made, meta = shapes.planned(pool, asked.step, get_backend("fa3"), "torch")
    assert meta.bucket is None
    expected = made.forward(asked.q, pool.caches[0], meta.at(), asked.layer).out
    torch.testing.assert_close(asked.call(get_backend("fa3"), "torch")(pool.caches[0]), expected)
