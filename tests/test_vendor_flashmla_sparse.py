"""FlashMLA's sparse launch over 8-bit pages, held to the documented call on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.backends.dsv4 import DSV4Backend
from attn_backends.compressed_cache import CompressedCache, FloatPages
from attn_backends.contract.kernel import Kernel, LayerShape, Scheduled
from attn_backends.errors import UnsupportedStepError
from attn_backends.graphs import CudaGraph, RecordedGraph
from attn_backends.kernels.schedule_operators import share_out
from attn_backends.layer import AttentionOutput
from attn_backends.planning.metadata import Metadata
from attn_backends.selection import providers
from attn_backends.selection.choose import Workload
from attn_backends.vendors import flashmla, flashmla_sparse
from spec_metadata import PackedQuery, Step, StepKind, UniformQuery
from tests.dsv4_model import SMALL, Sizes, tiny_model
from tests.dsv4_scenes import Engine, LayerInputs, Request, chains, random_inputs, run_layers
from tests.flashmla_sparse_stand_in import (
    CALLS,
    flash_mla_with_kvcache,
)
from tests.torch_kernels import torch_kernel
from tests.vendor_stand_ins import install, planned_once, pretend_hopper, recorder

FP8 = torch.float8_e4m3fn
KINDS = [
    kind for kind in flashmla_sparse.KERNEL.capabilities if kind is not StepKind.DRAFT_BLOCK
]  # of layers with entries
GRAPH_KINDS = [kind for kind in KINDS if kind is not StepKind.PREFILL]


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, CALLS)
    monkeypatch.setattr(providers, "version_of", lambda distribution: "1.0.0")


class OnCPU(Sizes):
    """A tiny model whose backend has the kernel, on the CPU, and the torch kernel."""

    @property
    def backend(self) -> type[DSV4Backend]:
        """The backend for its ratios."""
        kernel = replace(flashmla_sparse.KERNEL, unavailable_reasons=lambda device: [])
        plain = super().backend
        return type("SparseOnCPU", (plain,), {"kernels": (kernel, torch_kernel(plain))})


WIDE: dict[str, Any] = {**SMALL.__dict__, "head_dim": 512, "rope": 64, "num_heads": 3}
MODEL = tiny_model(Sizes(**WIDE))
WIDTH, NUM_STEPS, BS = 4, 3, 3


def engine_of(device: str = "cpu") -> tuple[Engine, list[Request]]:
    """An engine in hostile 8-bit pages, whose requests stand around the ends of blocks."""
    sizes = OnCPU(**WIDE) if device == "cpu" else Sizes(**WIDE)
    engine = Engine(
        MODEL, sizes, max_context=64, cache_dtype=FP8, checking=False, device=device, kernel="flashmla_sparse"
    )
    assert {choice.kernel.name for choice in engine.backend.choices.values()} == {"flashmla_sparse"}
    requests = [engine.add(chain) for chain in chains(64, 64, 64)]
    for request, length in zip(requests, (1, 15, 40), strict=True):
        fill(engine, request, length)
    return engine, requests


def fill(engine: Engine, request: Request, length: int) -> None:
    """Commit so many more tokens with random inputs."""
    query = PackedQuery.of((length,), engine.device)
    meta = engine.backend.init_forward_metadata(Step.prefill(query, engine.lens([request]), engine.paging([request])))
    for layer, cache, given in zip(engine.layers, engine.caches, inputs_of(engine, meta, request.row)[0], strict=True):
        engine.backend.store(given.stored, cache, meta.at(), layer)
    request.committed += length


def inputs_of(engine: Engine, meta: Metadata, seed: int) -> list[list[LayerInputs]]:
    """Random bfloat16 inputs of every forward and layer of a step."""
    rng, num_tokens = torch.Generator().manual_seed(seed), meta.step.num_tokens
    return [
        [random_inputs(layer, num_tokens, rng).map(lambda x: x.bfloat16().to(engine.device)) for layer in engine.layers]
        for _ in range(meta.step.num_forwards)
    ]


def step_of(engine: Engine, kind: StepKind, requests: list[Request]) -> Step:
    """A step of some requests."""
    lens, paging = engine.lens(requests), engine.paging(requests)
    match kind:
        case StepKind.PREFILL:
            return Step.prefill(PackedQuery.of((5, 9, 1)[: len(requests)], engine.device), lens, paging)
        case StepKind.DECODE:
            return Step.decode(lens, paging)
        case StepKind.DRAFT_DECODE:
            return Step.draft_decode(1, NUM_STEPS, lens, paging)
        case StepKind.TARGET_VERIFY:
            return Step.target_verify(WIDTH, lens, paging)
        case _:
            return Step.draft_extend(UniformQuery(WIDTH), lens, paging)


def check(engine: Engine, step: Step, inputs: list[list[LayerInputs]], found: list[AttentionOutput]) -> None:
    """Outputs are those of the torch kernel on what now lies in the pages."""
    plain = type(engine.backend)(engine.backend.capacity, engine.geometry, engine.device, kernel="torch")
    tolerance = 1e-3 if engine.device.type == "cpu" else 3e-2  # a kernel rounds its softmax weights to bfloat16
    meta, outputs = plain.init_forward_metadata(step), iter(found)
    for forward, of_layers in enumerate(inputs):
        for layer, cache, given in zip(engine.layers, engine.caches, of_layers, strict=True):
            given = given.map(lambda x: x[: step.num_tokens])
            expected = plain.forward(given.q, cache, meta.at(forward), layer, given.index)
            for mine, right in zip(next(outputs), expected, strict=True):
                torch.testing.assert_close(mine[: step.num_tokens], right, rtol=2**-7, atol=tolerance)


def check_eager(kind: StepKind, device: str = "cpu") -> None:
    """An eager step on three requests."""
    engine, requests = engine_of(device)
    step = step_of(engine, kind, [requests[2], requests[0], requests[1]])
    meta = engine.backend.init_forward_metadata(step)
    inputs = inputs_of(engine, meta, 1)
    check(engine, step, inputs, run_layers(engine, meta, inputs))


def check_replay(kind: StepKind, *, plans_itself: bool, device: str = "cpu") -> None:
    """Capture on two requests after a run as on a GPU, replay on others."""
    engine, requests = engine_of(device)
    backend = engine.backend
    first = step_of(engine, kind, requests[:2])
    meta = backend.capture(backend.capacity.bucket(kind, BS), first.paging)
    backend.replay(meta, first)
    static = inputs_of(engine, meta, 1)

    def region() -> list[AttentionOutput]:
        if plans_itself:
            backend.refresh(meta)
        return run_layers(engine, meta, static)

    region()
    graph = RecordedGraph() if device == "cpu" else CudaGraph()
    outputs = graph.capture(region)
    for chosen in ([2], [1, 2, 0]):
        step = step_of(engine, kind, [requests[index] for index in chosen])
        (backend.copy_inputs if plans_itself else backend.replay)(meta, step)
        graph.replay()
        check(engine, step, static, outputs)


@pytest.mark.parametrize("kind", KINDS)
def test_eager(kind: StepKind) -> None:
    check_eager(kind)


@pytest.mark.parametrize("plans_itself", [False, True], ids=["planned_before", "planned_inside"])
@pytest.mark.parametrize("kind", GRAPH_KINDS)
@pytest.mark.one_in(3)
def test_replay(kind: StepKind, plans_itself: bool) -> None:
    check_replay(kind, plans_itself=plans_itself)


@pytest.mark.parametrize("plans_itself", [False, True], ids=["planned_before", "planned_inside"])
def test_a_version_of_unknown_schedules_plans_itself(plans_itself: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "version_of", lambda distribution: "2.0.0")
    check_replay(StepKind.TARGET_VERIFY, plans_itself=plans_itself)


if not flashmla_sparse.unavailable_reasons(torch.device("cuda")):

    @pytest.mark.parametrize("kind", KINDS)
    def test_on_a_gpu(kind: StepKind, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        check_eager(kind, "cuda")
        if kind in GRAPH_KINDS:
            check_replay(kind, plans_itself=False, device="cuda")
            check_replay(kind, plans_itself=True, device="cuda")


@pytest.mark.parametrize("plans_itself", [False, True], ids=["planned_before", "planned_inside"])
def test_a_schedule_of_another_batch_is_seen(plans_itself: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    planned_once(monkeypatch, flashmla_sparse.RowSchedule)
    with pytest.raises(AssertionError, match="not close"):
        check_replay(StepKind.DECODE, plans_itself=plans_itself)


def test_layers_of_a_kind_share_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []

    def counted(lens: Tensor, parts: Tensor, splits: Tensor, marks: Tensor, **more: Any) -> None:
        share_out(lens, parts, splits, marks, **more)
        planned.append(lens)

    monkeypatch.setattr(flashmla_sparse, "share_out", counted)
    engine, requests = engine_of()
    planned.clear()
    meta = engine.backend.init_forward_metadata(step_of(engine, StepKind.DECODE, requests))
    inputs = inputs_of(engine, meta, 1)
    for _ in range(2):
        run_layers(engine, meta, inputs)
    assert len(engine.layers) == 4
    assert len(planned) == 3


def test_a_row_reads_no_more_entries_than_are_selected() -> None:
    engine, requests = engine_of()
    at = engine.backend.init_forward_metadata(step_of(engine, StepKind.DECODE, requests)).at()
    found = []
    for layer, cache in zip(engine.layers[1:3], engine.caches[1:3], strict=True):
        planned = at.schedules.planned(0, engine.backend._checked(cache, at, layer, torch.bfloat16)[2])
        assert isinstance(planned, Scheduled)
        assert isinstance(planned.schedule, flashmla_sparse.RowSchedule)
        found.append(planned.schedule.entry_lens.tolist())
    assert found == [[0, 4, SMALL.index_topk], [0, 2, 5]]


def changed(name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """The call with one of its arguments changed, where it is given."""

    def call(**given: Any) -> tuple[Tensor, Tensor]:
        if given.get(name) is not None:
            given[name] = change(given[name])
        return flash_mla_with_kvcache(**given)

    return call


@pytest.mark.parametrize(
    "call",
    [
        changed("softmax_scale", lambda given: given / 2),
        changed("topk_length", lambda given: (given - 1).clamp_min(1)),
        changed("extra_topk_length", lambda given: given + 1 - given),
        changed("attn_sink", lambda given: given + 1),
        changed("indices", lambda given: given.roll(1, 0)),
        changed("extra_indices_in_kvcache", lambda given: given.roll(1, 0)),
    ],
    ids=["scale", "lengths", "entry lengths", "sinks", "slots", "entry slots"],
)
def test_a_wrong_launch_is_seen(call: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {**CALLS, "flash_mla:flash_mla_with_kvcache": call})
    with pytest.raises(AssertionError, match="not close"):
        check_eager(StepKind.TARGET_VERIFY)


@pytest.mark.parametrize(("num_heads", "padded"), [(1, 64), (64, 64), (65, 128), (128, 128)])
def test_heads_are_padded_without_a_sink_of_their_own(
    num_heads: int, padded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def watched(**given: Any) -> tuple[Tensor, Tensor]:
        seen.append((given["q"].shape[2], given["attn_sink"]))
        return flash_mla_with_kvcache(**given)

    install(monkeypatch, {**CALLS, "flash_mla:flash_mla_with_kvcache": watched})
    engine, requests = engine_of()
    layer = replace(engine.layers[2], num_heads=num_heads, sinks=torch.ones(num_heads))
    meta = engine.backend.init_forward_metadata(step_of(engine, StepKind.DECODE, requests))
    q = torch.randn(3, num_heads, 512, generator=torch.Generator().manual_seed(3)).bfloat16()
    for given in (layer, replace(layer, sinks=None)):
        engine.backend.store(inputs_of(engine, meta, 1)[0][2].stored, engine.caches[2], meta.at(), given)
        out, lse = engine.backend.forward(q, engine.caches[2], meta.at(), given)
        assert (out.shape, lse.shape, lse.dtype) == ((3, num_heads, 512), (3, num_heads), torch.float32)
    (heads, sinks), (_, none) = seen
    assert heads == padded
    assert none is None
    assert sinks.tolist() == [1.0] * num_heads + [float("-inf")] * (padded - num_heads)


def test_auto_passes_over_it_for_other_caches_and_queries() -> None:
    engine, _ = engine_of()
    layers = [layer for layer in engine.layers if layer.compression is None]

    def chosen(dtype: torch.dtype, cache_dtype: torch.dtype | None, **changes: Any) -> tuple[str, tuple[str, ...]]:
        workload = Workload(16, [replace(layer, **changes) for layer in layers], dtype, cache_dtype)
        backend = type(engine.backend)(engine.backend.capacity, engine.geometry, workload=workload)
        choice = backend.choices[StepKind.DECODE]
        return choice.kernel.name, choice.passed_over

    half = torch.bfloat16
    assert chosen(half, FP8) == ("flashmla_sparse", ())
    for given, reason in (
        ((half, None), "a cache of torch.bfloat16 under queries of torch.bfloat16 (it takes torch.float8_e4m3fn)"),
        ((torch.float32, FP8), "queries or rows of torch.float32 (it takes torch.bfloat16)"),
    ):
        assert chosen(*given) == ("torch", (f"flashmla_sparse: {reason}",))
    name, reasons = chosen(half, FP8, head_dim=64, v_head_dim=64, sinks=None)
    assert (name, reasons) == ("torch", ("flashmla_sparse: head sizes (64, 64) (it takes (512, 512))",))
    name, reasons = chosen(half, FP8, num_heads=129, sinks=None)
    assert (name, reasons) == ("torch", ("flashmla_sparse: 129 query heads (it takes 1 to 128)",))


def test_a_cache_in_half_precision_is_refused() -> None:
    engine, requests = engine_of()
    meta = engine.backend.init_forward_metadata(step_of(engine, StepKind.DECODE, requests))
    layer, given = engine.layers[0], inputs_of(engine, meta, 1)[0][0]
    half = engine.backend.allocate_cache(layer, torch.bfloat16)
    with pytest.raises(UnsupportedStepError, match=r"a cache of torch.bfloat16 .*it takes torch.float8_e4m3fn"):
        engine.backend.forward(given.q, half, meta.at(), layer)
    plain = CompressedCache(FloatPages(half.rows.data.to(FP8)))
    with pytest.raises(UnsupportedStepError, match=r"a pool of FloatPages .it takes Fp8Pages"):
        engine.backend.forward(given.q, plain, meta.at(), layer)


def test_what_is_passed_is_what_the_version_check_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {call.path: call.parameters for call in providers.VENDOR_KERNELS["flashmla_sparse"].calls}
    passed: dict[str, set[str]] = {path: set() for path in asked}
    found: Any = {path: recorder(CALLS[path], passed[path]) for path in asked}
    install(monkeypatch, {**CALLS, **found})
    monkeypatch.setattr(providers, "version_of", lambda distribution: "2.0.0")  # so that it plans, too
    check_eager(StepKind.DECODE)
    assert passed == {path: set(parameters) for path, parameters in asked.items()}


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashmla, "unavailable_reasons", lambda device: ["no legacy kernels"])
    kernel: Kernel = flashmla_sparse.KERNEL
    assert kernel.unavailable_reasons(pretend_hopper(monkeypatch)) == ["no legacy kernels"]
    monkeypatch.setattr(flashmla, "unavailable_reasons", lambda device: [])
    assert kernel.unavailable_reasons(pretend_hopper(monkeypatch)) == []

    def older(q: Tensor, k_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor, head_dim_v: int) -> None:
        """A call that knows one pool of keys."""

    install(monkeypatch, {**CALLS, "flash_mla:flash_mla_with_kvcache": older})
    (reason,) = kernel.unavailable_reasons(pretend_hopper(monkeypatch))
    assert "takes no" in reason
    assert "extra_k_cache" in reason
    (reason,) = kernel.unavailable_reasons(torch.device("cpu"))
    assert reason == "runs on CUDA devices, not on cpu"


@pytest.mark.parametrize(("num_heads", "most"), [(128, 32767), (64, 65535), (16, 65535)])
def test_more_rows_than_its_merge_takes_are_refused(num_heads: int, most: int) -> None:
    shape = LayerShape(num_heads, 1, 512, 512, 1.0, torch.bfloat16, FP8, variant=(None, None))
    plan: Any = SimpleNamespace(window_lens=torch.empty(most + 1, device="meta"))
    with pytest.raises(UnsupportedStepError, match=f"{most + 1} query rows of {num_heads} heads .it takes {most};"):
        flashmla_sparse.RowSchedule(plan, shape, {})
    plan.window_lens = plan.window_lens[1:]
    with pytest.raises(KeyError):  # not refused: it asks for its buffers
        flashmla_sparse.RowSchedule(plan, shape, {})
