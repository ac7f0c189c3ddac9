"""FlashInfer's MLA kernels without a GPU: a stand-in for its compiled module attends by our lists of work."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from attn_backends.backends.flashinfer_mla import FlashInferMLABackend
from attn_backends.cache import CacheFormat, PagedLatent
from attn_backends.conformance import Subject, run_case, selected_cases, worlds
from attn_backends.conformance.scenes import Batch, Scene
from attn_backends.conformance.sizes import MAX_BS
from attn_backends.conformance.worlds import World
from attn_backends.errors import UnsupportedStepError
from attn_backends.layer import AttentionLayer
from attn_backends.selection import providers
from attn_backends.selection.providers import VendorCall, VendorKernel
from attn_backends.vendors import flashinfer
from attn_backends.vendors.flashinfer_work import KNOWN_VERSIONS, MLASchedule, _room_reasons, cluster_size
from benchmarks import ragged, shapes
from benchmarks.rows import Asked, Missing, Stage
from benchmarks.shapes import LAYERS
from spec_metadata import StepKind, pad_step
from spec_metadata.buffers import Producer
from tests.checks import check_eager, check_replay
from tests.flashinfer_stand_in import Module, OnCpu, OnCpuByVendor, WarmedUp, install, setup_of
from tests.triton_interpreter import interpreted
from tests.vendor_stand_ins import planned_once

module = pytest.fixture(install)
PLANNED = pytest.mark.parametrize("backend", [OnCpu, OnCpuByVendor], ids=["by us", "by FlashInfer"])
GRAPH_KINDS = [StepKind.DECODE, StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND]
TREE_KINDS = [StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY]
CASES = [*((kind, 1) for kind in GRAPH_KINDS), *((kind, 3) for kind in TREE_KINDS)]


@PLANNED
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(("kind", "topk"), CASES)
def test_a_replay_is_right_for_other_lengths_and_padding(
    module: Module, kind: StepKind, topk: int, page_size: int, backend: type[FlashInferMLABackend]
):
    shortest = 0 if topk > 1 else 1
    first, second = Batch(kind, (9, 4)), Batch(kind, (shortest, 12, 5))
    check_replay(World(setup_of(page_size, topk, backend)), first, second, MAX_BS)


@pytest.mark.parametrize("kind", [StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY])
def test_a_captured_step_is_planned_and_listed_by_one_launch(
    module: Module, kind: StepKind, monkeypatch: pytest.MonkeyPatch
):
    interpreted("triton_plan_work", "_plan_and_list")
    monkeypatch.setattr(worlds, "planner_of", lambda kernel: "fused")
    monkeypatch.setattr(providers, "runs_on_triton", lambda device: [])
    planned_once(monkeypatch, MLASchedule)
    for recorded in (False, True):
        world = World(replace(setup_of(4), checking=not recorded))
        check_replay(world, Batch(kind, (9, 4)), Batch(kind, (3, 12, 5)), MAX_BS, record_refresh=recorded)


@PLANNED
@pytest.mark.parametrize(("kind", "topk"), CASES)
def test_the_plan_may_be_recorded_with_the_list_of_work(
    module: Module, kind: StepKind, topk: int, backend: type[FlashInferMLABackend]
):
    """FlashInfer plans its own on the host, before the graph."""
    first, second = Batch(kind, (9, 4)), Batch(kind, (3, 12, 5))
    world = World(replace(setup_of(4, topk, backend), checking=False))
    check_replay(world, first, second, MAX_BS, record_refresh=True)


@PLANNED
@pytest.mark.parametrize("kind", [StepKind.PREFILL, StepKind.DRAFT_EXTEND])
def test_packed_steps(module: Module, kind: StepKind, backend: type[FlashInferMLABackend]):
    check_eager(World(setup_of(4, backend=backend)), Batch(kind, (5, 0, 8), widths=(3, 2, 1)))


def test_a_log_sum_exp_in_base_two_is_seen(module: Module):
    module.reads_base_two = True
    with pytest.raises(AssertionError):
        check_eager(World(setup_of(4, topk=3)), Batch(StepKind.TARGET_VERIFY, (9, 4)))


def test_what_flashinfer_can_not_do_is_refused(module: Module):
    world = World(setup_of(4))
    scene = Scene(world, Batch(StepKind.DECODE, (9, 4)))
    meta, (given,) = world.backend.init_forward_metadata(scene.step()), scene.inputs()

    def refusal(q: Tensor = given.q, latent: Tensor = world.cache.latent) -> str:
        with pytest.raises(UnsupportedStepError) as error:
            world.backend.forward(q, PagedLatent(latent, 512), meta.at(), world.layer)
        return str(error.value)

    assert "aligned" in refusal(q=given.q.new_empty(2, 3, 577)[..., 1:])
    assert "aligned" in refusal(latent=world.cache.latent.transpose(1, 2).contiguous().transpose(1, 2))
    assert "under queries of torch.float16 (it takes torch.bfloat16)" in refusal(
        given.q.half(), world.cache.latent.to(flashinfer.FP8)
    )


def test_offsets_of_more_than_32_bits_are_refused():
    layer = AttentionLayer(0, 128, 1, 576, 512, 0.1)
    latent = torch.empty(9, 16, 576, dtype=torch.bfloat16, device="meta")
    rows = torch.empty_strided((8192, 128, 576), (2**19 + 8, 576, 1), dtype=torch.bfloat16, device="meta")
    (reason,) = flashinfer._tensor_reasons(rows, latent, layer)
    assert reason == "8192 query rows of 524296 elements (its offsets have 32 bits)"
    assert not flashinfer._tensor_reasons(rows[:8191], latent, layer)


def test_scales_of_the_cache(module: Module):
    """A scale that bfloat16 rounds is exact in the scores, and the same whatever the cache's type."""
    world = World(setup_of(4))
    scene = Scene(world, Batch(StepKind.DECODE, (9, 4)))
    scene.reset_memory(0.0)
    meta, (given,) = world.backend.init_forward_metadata(scene.step()), scene.inputs()
    coarse = world.cache.latent.to(flashinfer.FP8)
    scaled = replace(world.layer, k_scale=0.3, v_scale=0.3)
    outputs = [
        world.backend.forward(given.q, PagedLatent(latent, 512), meta.at(), scaled)
        for latent in (coarse, coarse.bfloat16())
    ]
    truth = world.backend.forward(given.q, PagedLatent(coarse.bfloat16(), 512), meta.at(), world.layer)
    torch.testing.assert_close(outputs[0].lse, outputs[1].lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outputs[0].out, outputs[1].out, rtol=2**-6, atol=1e-3)
    assert not torch.allclose(truth.lse, outputs[1].lse, atol=1e-2)
    assert flashinfer._as_bfloat16(0.3) == float(torch.tensor(0.3).bfloat16())


def test_another_version_is_refused_with_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    calls = providers.VENDOR_KERNELS["flashinfer_fa3"].calls
    assert calls == providers.VENDOR_KERNELS["flashinfer_fa2"].calls

    def get_batch_mla_module(backend: str, *args: object) -> None: ...

    older = SimpleNamespace(get_batch_mla_module=get_batch_mla_module)
    monkeypatch.setattr(providers, "import_module", lambda name: older)
    problems = [providers._problem("flashinfer_fa3", call) for call in calls]
    assert "get_batch_mla_module takes no dtype_idx, dtype_kv" in problems[0]
    assert all("importing flashinfer" in problem for problem in problems[1:])
    monkeypatch.setattr(providers, "_problem", lambda kernel, call: f"no {call.path}")
    monkeypatch.setattr(providers, "device_reasons", lambda kernel, device: [])
    monkeypatch.setattr(providers, "is_installed", lambda name: True)
    reasons = providers._vendor_reasons.__wrapped__("flashinfer_fa3", torch.device("cuda"))
    assert len(reasons) == len(calls)
    assert all(isinstance(call, VendorCall) for call in calls)
    assert isinstance(providers.VENDOR_KERNELS["flashinfer_fa2"], VendorKernel)


def test_the_cpu_is_refused():
    kernels = {kernel.name: kernel for kernel in FlashInferMLABackend.kernels}
    for name in ("flashinfer_fa3", "flashinfer_fa2"):
        assert kernels[name].unavailable_reasons(torch.device("cpu")) == ["runs on CUDA devices, not on cpu"]
        assert set(kernels[name].capabilities) == set(kernels["torch"].capabilities)


@pytest.mark.parametrize("kind", [StepKind.PREFILL, StepKind.DRAFT_EXTEND])
def test_packed_steps_through_graphs(module: Module, kind: StepKind):
    subject = Subject(OnCpu, "flashinfer_fa3")
    packed = [case for case in selected_cases(subject, "graph.*") if case.num_tokens and case.kind == kind]
    assert packed
    rows = [run_case(subject, case) for case in packed[::4]]
    assert [(row.check, row.reason) for row in rows if row.status not in ("pass", "refused")] == []
    assert sum(row.status == "pass" for row in rows) > len(rows) // 2


def test_a_step_needs_no_lengths_on_the_host(module: Module):
    world = World(setup_of(4))
    step = replace(Scene(world, Batch(StepKind.DECODE, (9, 4))).step(), seq_lens_cpu=None)
    world.backend.init_forward_metadata(step)
    world.backend.replay(world.backend.capture(step.bucket(), world.paging()), step)
    assert not module.plans


def test_every_step_of_a_graph_has_the_layout_of_its_capture(module: Module, monkeypatch: pytest.MonkeyPatch):
    world, layouts = World(setup_of(4)), []
    run = module.run
    monkeypatch.setattr(module, "run", lambda *given: layouts.append(given[2]) or run(*given))
    for lens in ((9, 4), (3, 12), (1,)):
        scene = Scene(world, Batch(StepKind.TARGET_VERIFY, lens))
        step = pad_step(scene.step(), scene.step().bucket(MAX_BS), world.capacity)
        meta, (given,) = world.backend.init_forward_metadata(step), scene.inputs(MAX_BS)
        world.backend.forward(given.q, world.cache, meta.at(), world.layer)
    assert layouts[0][:2] == [1, 132]
    assert layouts == layouts[:1] * 3


@pytest.mark.parametrize("version", [*sorted(KNOWN_VERSIONS), "0.7.3", "0.7.2.post2", "1.0.0"])
def test_who_plans_is_decided_by_the_version(version: str):
    kernel = flashinfer.mla_kernel("fa2", frozenset({8}), version)
    by_host = {declared.needs_host_lens for declared in kernel.capabilities.values()}
    assert by_host == {version not in KNOWN_VERSIONS}
    assert (kernel.schedule.func is MLASchedule) == (version in KNOWN_VERSIONS)
    assert kernel.workspaces[0].producer is (Producer.DEVICE if version in KNOWN_VERSIONS else Producer.HOST)


def test_more_tiles_or_multiprocessors_than_the_lists_hold_are_refused():
    assert not _room_reasons(4096, 128, 16128, 256)
    tiles, processors = _room_reasons(16129, 128, 16129, 257)
    assert tiles == "16129 query rows of 128 heads, 16129 tiles (it has room for 16128; prefill in smaller chunks)"
    assert processors == "a GPU of 257 multiprocessors (at most 256)"


def test_a_token_is_never_longer_than_a_tile():
    """Kernels end the keys of a tile at its last whole token."""
    assert [cluster_size(*each) for each in ((8, 8, 8), (8, 16, 2), (8, 16, 1), (3, 128, 8))] == [1, 1, 2, 2]


@PLANNED
def test_the_benchmark_of_ragged_verifies_has_a_row_of_each_kernel(
    module: Module, backend: type[FlashInferMLABackend], monkeypatch: pytest.MonkeyPatch
):
    """But where FlashInfer plans on the host: no graph holds its packed rows, which a line says."""
    monkeypatch.setattr(shapes, "COLD_BYTES", 1)
    monkeypatch.setattr(ragged, "LAYERS", {CacheFormat.LATENT: LAYERS[CacheFormat.LATENT][:1]})
    clock = SimpleNamespace(mark=lambda: 0.0, wait=lambda: None, microseconds=lambda start, end: 1.0)
    stage = Stage(torch.device("cpu"), WarmedUp, clock, rounds=2)
    found = list(ragged.ragged(Asked(stage, [backend], (3,), (64,))))
    rows = [each["kernel"] for each in found if not isinstance(each, Missing)]
    assert rows == (["flashinfer_fa3", "flashinfer_fa2"] if backend is OnCpu else [])
    for absent in found[len(rows) :]:
        assert "can't be captured over packed rows: it plans on the host" in absent.reason
