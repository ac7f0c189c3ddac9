"""`benchmarks metadata` prepares what it says, in every way, and counts what it says. On a CPU; no time is asserted."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from attn_backends.graphs import RecordedGraph
from attn_backends.registry import get_backend
from attn_backends.selection import providers
from benchmarks import metadata, vendor_plans
from benchmarks.counts import Counts
from benchmarks.host import take_host_turns
from benchmarks.metadata import Bench, Problem, build, kernels_of, measure_metadata, ours
from benchmarks.rows import MetadataRow, Missing
from benchmarks.speculation import CYCLE, PHASES, Batch, Tables, as_new, speculative
from benchmarks.vendor_plans import VENDOR_PLANS
from spec_metadata import StepKind
from tests.triton_interpreter import interpreted

CPU = torch.device("cpu")
BACKENDS = ("trtllm_mla", "fa3", "flashinfer_mla", "dsv4")


def run_all(works):
    """A probe that runs what it counts."""
    for work in works:
        work.run()
    return [Counts(float(number), 2, 1, 0, 0, 1) for number in range(len(works))]


class Steady:
    """A host's clock on which everything takes a microsecond."""

    def __init__(self):
        self.time = 0.0

    def wait(self):
        pass

    def now(self):
        self.time += 1.0
        return self.time


@pytest.fixture
def bench():
    return Bench(CPU, RecordedGraph, Steady(), run_all, rounds=2)


def batch_of(page_size=64, topk=1, batch_size=2, context=600):
    return Batch(Tables.of(speculative(4, 1024, page_size, topk, 3), CPU), batch_size, context)


def ways_of(mode, backend, kernel, batch, bench):
    return ours(mode, build(mode, backend, kernel, batch.tables, bench), batch, bench)


def test_requests_share_no_page_and_padding_has_its_own():
    tables = batch_of(page_size=4).tables
    assert tables.table[1:].unique().numel() == tables.table[1:].numel()
    assert tables.table[1:].min() >= 4
    assert tables.table[0].max() < 4
    assert (tables.table[1:].view(4, -1, 4).diff() == 1).all()
    assert not torch.equal(tables.table[1:].flatten(), tables.table[1:].flatten().sort().values), "shuffled"


@pytest.mark.parametrize("topk", [1, 4])
def test_the_steps_of_a_cycle_start_behind_the_context(topk):
    batch = batch_of(topk=topk)
    width = {StepKind.DRAFT_DECODE: topk, StepKind.TARGET_VERIFY: 4 if topk == 1 else 8, StepKind.DRAFT_EXTEND: 4}
    for kind in PHASES.values():
        step = batch.step(kind, exact=True)
        assert (step.kind, step.width, step.bs, step.seq_lens.tolist()) == (kind, width[kind], 2, [600, 600])
        assert (step.max_committed, step.seq_lens_cpu) == (600, (600, 600))
        assert batch.step(kind, exact=False).seq_lens_cpu is None
        assert step.flat_slots()[0] == batch.tables.table[1, 600]
        assert step.is_tree == (topk > 1 and kind is not StepKind.DRAFT_EXTEND)
        assert as_new(step) is not step


def watched(name):
    """A backend that keeps its metadata in `metas`, and what it was given in `steps`."""

    class Watched(get_backend(name)):
        metas, steps = [], []

        def capture(self, bucket, paging):
            self.metas.append(super().capture(bucket, paging))
            return self.metas[-1]

        def copy_inputs(self, meta, step):
            self.steps.append(step)
            super().copy_inputs(meta, step)

    return Watched


@pytest.mark.parametrize("mode", ["torch", "in_graph"])
@pytest.mark.parametrize("name", BACKENDS)
def test_every_way_plans_the_step_anew(mode, name, bench):
    backend, batch = watched(name), batch_of(256 if name == "dsv4" else 64)
    (kernel,) = kernels_of(backend, CPU)
    assert kernel.name == "torch"
    eager = backend(batch.tables.capacity, batch.tables.geometry, planner="torch")
    ways = ways_of(mode, backend, kernel, batch, bench)
    assert [way.phase for way in ways] == list(PHASES)
    for way, meta in zip(ways, backend.metas, strict=True):
        assert (way.mode, way.kernel) == (mode, "torch")
        for context in (599, 600):
            step = replace(batch, context=context).step(PHASES[way.phase], exact=False)
            planned = eager.init_forward_metadata(replace(step, max_committed=None))
            meta.captured.phase.reset()
            way.work.run()
            for field in planned.buffers:
                assert torch.equal(meta.buffers[field], planned.buffers[field]), (way.phase, field)


def test_a_phase_is_prepared_behind_the_one_before_it_from_lengths_that_change(bench):
    backend, batch = watched("fa3"), batch_of()
    (kernel,) = kernels_of(backend, CPU)
    ways = ways_of("torch", backend, kernel, batch, bench)
    assert not backend.steps
    for way in ways:
        way.work.run()
        way.work.run()
    draft, verify, extend = PHASES.values()
    assert [(step.kind, step.seq_lens.tolist()) for step in backend.steps] == [
        *((extend, [600, 600]), (draft, [599, 599]), (extend, [599, 599]), (draft, [600, 600])),
        *((draft, [599, 599]), (verify, [599, 599]), (draft, [600, 600]), (verify, [600, 600])),
        *((verify, [599, 599]), (extend, [599, 599]), (verify, [600, 600]), (extend, [600, 600])),
    ]
    assert len({id(step) for step in backend.steps}) == 12, "a step of its own for each call"


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.one_in(2)
def test_fused_is_the_fused_planner(name, bench, monkeypatch):
    """On Triton's interpreter; `tests/test_fused_plans.py` compares all that it writes."""
    interpreted("triton_plan", "_plan_pages")
    backend, batch = watched(name), batch_of(256 if name == "dsv4" else 64)
    monkeypatch.setattr(providers, "runs_on_triton", lambda device: [])
    bind, launches = backend.bind_fused, []
    counted = lambda *args: partial(lambda launch: launches.append(name) or launch(), bind(*args))  # noqa: E731
    monkeypatch.setattr(backend, "bind_fused", counted)
    (kernel,) = kernels_of(backend, CPU)
    ways = ways_of("fused", backend, kernel, batch, bench)
    del launches[:]
    for way, meta in zip(ways, backend.metas, strict=True):
        meta.buffers["write_slots"].fill_(77)
        way.work.run()
        slots = batch.tables.table[1:3, 599 : 599 + meta.step.width]
        if way.phase == "draft":
            assert meta.buffers["write_slots"].tolist() == batch.tables.table[1:3, 599:601].T.tolist()
        else:
            assert meta.buffers["write_slots"].tolist() == [slots.flatten().tolist()]
    assert launches == [name] * 3, "one a phase"


def test_a_layer_attended_before_so_that_its_vendor_plans_along(bench, monkeypatch):
    planned = []
    backend, batch = watched("fa3"), batch_of()
    (kernel,) = kernels_of(backend, CPU)
    scheduled = replace(
        kernel, schedule=lambda plan, shape, buffers: SimpleNamespace(refresh=partial(planned.append, shape))
    )
    monkeypatch.setattr(backend, "kernels", (scheduled,))
    draft, verify, _ = ways_of("torch", backend, scheduled, batch, bench)
    del planned[:]
    draft.work.run()
    assert len(planned) == 2, "one for each forward"
    verify.work.run()
    assert len(planned) == 3
    assert {(shape.num_heads, shape.head_dim, shape.v_head_dim) for shape in planned} == {(16, 576, 512)}


def test_what_the_graph_plans_is_not_the_hosts(bench):
    backend, batch = watched("fa3"), batch_of()
    kernels = kernels_of(backend, CPU)
    before, in_graph = (ways_of(mode, backend, kernels[0], batch, bench)[1] for mode in ("torch", "in_graph"))
    for way, own in ((before, 599 + 4), (in_graph, 0)):
        meta = next(meta for meta in backend.metas[::-1] if meta.step.kind is StepKind.TARGET_VERIFY)
        meta = backend.metas[1] if way is before else meta
        call = way.work.ready()
        meta.buffers["seqused_k"].zero_()
        call()
        assert meta.buffers["seqused_k"].tolist() == [[own, own]]
        way.work.in_graph()
        assert meta.buffers["seqused_k"].tolist() == [[603, 603]]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.one_in(3)
def test_rows_of_every_phase_and_their_cycle(name, bench):
    page_size = 256 if name == "dsv4" else 64
    batch = batch_of(page_size)
    measured = list(measure_metadata([Problem(get_backend(name), batch.tables)], [1, 2], [100, 600], bench))
    rows = [row for row in measured if isinstance(row, MetadataRow)]
    absent = {(each.kernel, each.case.split(",")[0]): each for each in measured if isinstance(each, Missing)}
    assert absent.keys() == {("torch", "fused"), *({("", "sglang")} if name != "dsv4" else ())}
    assert not any(each.failed for each in absent.values())
    assert {(row.batch_size, row.context) for row in rows} == {(1, 100), (1, 600), (2, 100), (2, 600)}
    assert {(row.bench, row.backend, row.kernel, row.page_size, row.topk) for row in rows} == {
        ("metadata", name, "torch", page_size, 1)
    }
    for number in range(0, len(rows), 8):
        first = rows[number : number + 8]
        ways = [(mode, phase) for mode in ("torch", "in_graph") for phase in PHASES]
        assert [(row.mode, row.phase) for row in first] == [*ways, ("torch", CYCLE), ("in_graph", CYCLE)]
        assert [row.gpu_us for row in first] == [0, 1, 2, 3, 4, 5, 3, 12]
        assert [row.host_us for row in first] == [1, 1, 1, 1, 1, 1, 3, 3]
        counted = [(row.launches, row.copies, row.syncs, row.to_host) for row in first[5:]]
        assert counted == [(2, 1, 0, 1), (6, 3, 0, 3), (6, 3, 0, 3)]
    assert bench.calibration_us == [1, 1, 1, 1]


def test_all_sizes_take_turns_and_none_is_counted_before_all_are_timed(bench, monkeypatch):
    """What grows from one to the next is then not the hour, and no profiler slows what is timed behind it."""
    order = []
    monkeypatch.setattr(
        metadata, "take_host_turns", lambda works, *rest: order.append(len(works)) or take_host_turns(works, *rest)
    )
    counting = replace(bench, probe=lambda works: order.append("counted") or run_all(works))
    problems = [Problem(get_backend(name), batch_of().tables) for name in ("fa3", "trtllm_mla")]
    list(measure_metadata(problems, [1, 2], [100, 600], counting))
    timed = [4 * (2 * len(PHASES) + 1)] * 2  # once to see how long each takes
    assert order == [*timed, *timed, *["counted"] * 8]


def test_each_time_is_that_of_its_own_way(bench, monkeypatch):
    def turns(works, *_):
        numbers = itertools.count()
        return [-1.0 if work.ready()() is not None else float(next(numbers)) for work in works]  # the loop's has a sum

    monkeypatch.setattr(metadata, "take_host_turns", turns)
    problems = [Problem(get_backend("fa3"), batch_of().tables)]
    rows = [row for row in measure_metadata(problems, [1, 2], [100], bench) if isinstance(row, MetadataRow)]
    assert [row.host_us for row in rows if row.phase != CYCLE] == list(range(12))
    assert bench.calibration_us == [-1, -1]


def test_one_backend_of_a_mode_plans_for_all_sizes(bench, monkeypatch):
    """Static memory for the largest of them, once."""
    modes, build_one = [], metadata.build
    monkeypatch.setattr(metadata, "build", lambda mode, *rest: (build_one(mode, *rest), modes.append(mode))[0])
    list(measure_metadata([Problem(get_backend("fa3"), batch_of().tables)], [1, 2], [100, 600], bench))
    assert modes == ["torch", "in_graph"], "the fused planner needs a GPU"


def test_one_way_that_raises_is_listed_and_the_others_are_measured(bench, monkeypatch):
    backend = watched("fa3")
    monkeypatch.setattr(backend, "refresh", lambda self, meta: (_ for _ in ()).throw(RuntimeError("broken")))
    monkeypatch.setattr(backend, "replay", lambda self, meta, step: None)
    measured = list(measure_metadata([Problem(backend, batch_of().tables)], [1], [100], bench))
    failed = [(each.case, each.reason) for each in measured if isinstance(each, Missing) and each.failed]
    assert failed == [("in_graph, batch 1, context 100, page size 64, topk 1", "RuntimeError: broken")]
    assert {row.mode for row in measured if isinstance(row, MetadataRow)} == {"torch"}


def test_a_way_that_raises_when_it_runs_is_listed_too(bench, monkeypatch):
    backend = watched("fa3")
    monkeypatch.setattr(backend, "replay", lambda self, meta, step: (_ for _ in ()).throw(RuntimeError("broken")))
    measured = list(measure_metadata([Problem(backend, batch_of().tables)], [1], [100], bench))
    failed = [(each.case, each.reason) for each in measured if isinstance(each, Missing) and each.failed]
    assert failed == [("torch, batch 1, context 100, page size 64, topk 1", "RuntimeError: broken")]
    assert {row.mode for row in measured if isinstance(row, MetadataRow)} == {"in_graph"}


def test_a_backend_without_a_cycle_is_listed(bench, monkeypatch):
    backend = watched("dsv4")
    monkeypatch.setattr(backend, "kernels", ())
    (absent,) = measure_metadata([Problem(backend, batch_of(256).tables)], [1], [100], bench)
    assert absent == Missing("dsv4", "", "", "no kernel that runs here has every phase of a cycle", failed=False)


def test_the_best_vendor_kernel_and_the_best_of_ours_are_measured(monkeypatch):
    backend = get_backend("trtllm_mla")
    runs = [replace(kernel, unavailable_reasons=lambda device: []) for kernel in backend.kernels]
    monkeypatch.setattr(backend, "kernels", tuple(runs))
    assert [kernel.name for kernel in kernels_of(backend, CPU)] == ["trtllm_gen", "gluon"]
    without = replace(runs[0], capabilities={StepKind.DECODE: runs[0].capabilities[StepKind.DECODE]})
    monkeypatch.setattr(backend, "kernels", (without, *runs[1:]))
    assert [kernel.name for kernel in kernels_of(backend, CPU)] == ["flashmla", "gluon"]


class Wrapper:
    """FlashInfer's, as far as it is planned."""

    def __init__(self, workspace, use_cuda_graph, **buffers):
        assert use_cuda_graph
        assert buffers.pop("backend") == "fa3"
        assert {name: tensor.dtype for name, tensor in buffers.items()} == dict.fromkeys(buffers, torch.int32)

    def plan(self, **arguments):
        return arguments


VENDORS = {
    "flash_mla:get_mla_decoding_metadata": lambda **arguments: arguments,
    "vllm.vllm_flash_attn.flash_attn_interface:get_scheduler_metadata": lambda *sizes, **named: (*sizes, named),
    "flashinfer.mla:BatchMLAPagedAttentionWrapper": Wrapper,
    "flashinfer.mla:MLAPlanMetadata": SimpleNamespace(csr=lambda *tensors: tensors),
}
SEEN = {"draft": (1, [601, 602]), "verify": (4, [604]), "draft_extend": (4, [604])}


@pytest.fixture
def vendors_here(monkeypatch):
    monkeypatch.setattr(vendor_plans, "load", VENDORS.__getitem__)
    monkeypatch.setattr(vendor_plans, "WORKSPACE_BYTES", 1)


@pytest.mark.parametrize("phase", list(PHASES))
def test_vendors_plan_each_forward_of_a_phase_for_the_keys_that_it_sees(phase, vendors_here):
    batch, (width, keys) = batch_of(page_size=4), SEEN[phase]
    given = [plan() for plan in VENDOR_PLANS["flashmla"](batch, PHASES[phase])]
    assert [each["seqlens_k"].tolist() for each in given] == [[n, n] for n in keys]
    assert {each["num_q_tokens_per_head_k"] for each in given} == {16 * width}
    given = [plan() for plan in VENDOR_PLANS["flashmla_sparse"](batch, PHASES[phase])]
    assert [each["seqlens_k"].tolist() for each in given] == [[640] * (2 * width)] * len(keys)
    given = [plan() for plan in VENDOR_PLANS["vllm_flash_attn"](batch, PHASES[phase])]
    assert [each[6].tolist() for each in given] == [[n, n] for n in keys]
    assert {each[:6] for each in given} == {(2, width, 1028, 16, 1, 64)}
    assert given[0][7]["cu_seqlens_q"].tolist() == [0, width, 2 * width]
    given = [plan() for plan in VENDOR_PLANS["flashinfer_fa3"](batch, PHASES[phase])]
    for each, n in zip(given, keys, strict=True):
        starts, page_starts, pages, lens = each["metadata"]
        num_pages = -(-n // 4)
        assert (starts.tolist(), page_starts.tolist()) == ([0, width, 2 * width], [0, num_pages, 2 * num_pages])
        assert lens.tolist() == [n, n]
        assert torch.equal(pages, (batch.tables.table[1:3, ::4] // 4)[:, :num_pages].flatten())
        assert each["causal"] == (width > 1)


def test_every_vendor_that_plans_on_this_gpu_generation_is_measured_by_its_own_call():
    planning = {
        kernel.name
        for name in BACKENDS
        for kernel in get_backend(name).kernels
        if kernel.schedule is not None and kernel.name in providers.VENDOR_KERNELS
    }
    assert planning - VENDOR_PLANS.keys() == {"trtllm_gen", "flash_attn_interface"}, "SM100, and a source build"


def test_a_vendors_own_plan_is_a_way(bench, monkeypatch, vendors_here):
    monkeypatch.setitem(VENDOR_PLANS, "torch", VENDOR_PLANS["flashmla"])
    rows = list(measure_metadata([Problem(get_backend("fa3"), batch_of().tables)], [2], [600], bench))
    found = [row.phase for row in rows if isinstance(row, MetadataRow) and row.mode == "vendor"]
    assert found == [*PHASES, CYCLE]
