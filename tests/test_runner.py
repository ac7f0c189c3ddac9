"""The phase runner: owned results, trimming by class, buckets and the eager fallback above them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

from attn_backends.backend import Metadata
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.cache import CacheFormat, KeyValues
from attn_backends.conformance.scenes import Batch, Scene
from attn_backends.conformance.sizes import HEAD_DIM, HEADS, KV_HEADS, MAX_BS
from attn_backends.conformance.worlds import Setup, World
from attn_backends.errors import AttnBackendsError, CaptureError
from attn_backends.graphs import RecordedGraph
from attn_backends.layer import AttentionOutput
from attn_backends.runner import (
    FieldClass,
    PassThrough,
    PerRequest,
    PerToken,
    Phase,
    PhaseRunner,
    Planning,
    StepResult,
    classify,
)
from spec_metadata import InvalidStepError, StepKind
from tests.checks import check_memory, check_outputs
from tests.mutants.hosted import HostedBackend

KIND = StepKind.TARGET_VERIFY
WIDTH = 4
IDLE = Batch(StepKind.IDLE, ())


@dataclass(frozen=True, eq=False)
class Given:
    q: PerToken
    k: PerToken
    v: PerToken
    tag: PerRequest


@dataclass(frozen=True, eq=False)
class Made:
    out: PerToken
    lse: PerToken
    tag: PerRequest
    ruler: PassThrough


def given_of(scene: Scene) -> Given:
    """Inputs of a scene's one forward; tags are the committed lengths."""
    inputs = scene.inputs()[0]
    assert isinstance(inputs.stored, KeyValues)
    return Given(inputs.q, inputs.stored.k, inputs.stored.v, torch.tensor(scene.batch.lens))


def safe_inputs(bs: int) -> Given:
    rows = bs * WIDTH
    k = torch.zeros(rows, KV_HEADS, HEAD_DIM, dtype=torch.float64)
    q = torch.zeros(rows, HEADS, HEAD_DIM, dtype=torch.float64)
    return Given(q, k, k.clone(), torch.zeros(bs, dtype=torch.int64))


def phase_of(world: World, output: type = Made) -> Phase[Given, Any]:
    ruler = torch.arange(7)

    def region(meta: Metadata, given: Given) -> Any:
        at = meta.at()
        world.backend.store(KeyValues(given.k, given.v), world.cache, at, world.layer)
        out, lse = world.backend.forward(given.q, world.cache, at, world.layer)
        return output(out, lse, given.tag + 1, ruler)

    return Phase("verify", region, safe_inputs, output, lambda bs: world.capacity.bucket(KIND, bs))


def runner_of(
    world: World, buckets: tuple[int, ...] = (1, 3), planning: Planning = "before"
) -> PhaseRunner[Given, Made]:
    return PhaseRunner(phase_of(world), world.backend, world.paging(), buckets, RecordedGraph, planning)


@pytest.fixture
def world() -> World:
    return World(Setup(FA3Backend, CacheFormat.KV, 4))


def run(runner: PhaseRunner[Given, Made], world: World, lens: tuple[int, ...], seed: int = 0) -> StepResult[Made]:
    """Run a batch and check its result against the oracle."""
    scene = Scene(world, Batch(KIND, lens), seed)
    before = scene.reset_memory()
    result = runner.run(scene.step(), given_of(scene))
    assert result.value.out.shape[0] == len(lens) * WIDTH
    check_outputs(scene, scene.inputs(), [AttentionOutput(result.value.out, result.value.lse)])
    check_memory(scene, before, padded=result.ran_graph)
    assert result.value.tag.tolist() == [length + 1 for length in lens]
    assert result.value.ruler.tolist() == list(range(7))
    return result


@pytest.mark.parametrize(
    ("lens", "bucket"), [((5,), 1), ((5, 3), 3), ((5, 3, 9), 3), ((5, 3, 9, 1), None), ((1, 2, 3, 4, 5), None)], ids=str
)
def test_smallest_bucket_that_holds_the_batch_else_eager(
    world: World, lens: tuple[int, ...], bucket: int | None
) -> None:
    result = run(runner_of(world), world, lens)
    assert result.ran_graph == (bucket is not None)
    assert result.bucket == (None if bucket is None else world.capacity.bucket(KIND, bucket))


def test_runner_without_buckets_is_eager(world: World) -> None:
    runner = PhaseRunner(phase_of(world), world.backend, world.paging())
    assert run(runner, world, (5, 3)).bucket is None


def test_results_are_owned(world: World) -> None:
    """No later step, through the same graph, another one or eagerly, changes an earlier result."""
    runner = runner_of(world)
    batches = [(5, 3, 9), (4, 8), (7,), (1, 2, 3, 4), (6, 2, 1)]
    results = [run(runner, world, lens, seed) for seed, lens in enumerate(batches)]
    kept = [[getattr(result.value, f.name).clone() for f in fields(Made)] for result in results]
    again = [run(runner, world, lens, seed + 9) for seed, lens in enumerate(reversed(batches))]
    for result, copies in zip(results, kept, strict=True):
        for field, copy in zip(fields(Made), copies, strict=True):
            assert torch.equal(getattr(result.value, field.name), copy), field.name
    storages = [getattr(r.value, f.name).untyped_storage().data_ptr() for r in results + again for f in fields(Made)]
    assert len(set(storages)) == len(storages)


def test_graphs_that_plan_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in static memory that the others have written over since; nothing is planned outside of them."""
    world = World(Setup(FA3Backend, CacheFormat.KV, 4, checking=False))
    runner = runner_of(world, planning="in_graph")
    monkeypatch.setattr(world.backend, "write", lambda step, buffers: pytest.fail("planned outside of the graph"))
    for seed, lens in enumerate([(5, 3, 9), (4,), (7, 8), (2,)]):
        assert run(runner, world, lens, seed).ran_graph


def test_a_graph_that_plans_itself_cannot_check() -> None:
    world = World(Setup(FA3Backend, CacheFormat.KV, 4, checking=True))
    with pytest.raises(
        CaptureError, match=r"planning is 'in_graph' and fa3 checks.*Plan 'before', or .*without checking"
    ):
        runner_of(world, planning="in_graph")


def test_a_consumer_cannot_read_a_graph_that_did_not_run(world: World) -> None:
    """Seed 000: after a graph has run, a larger batch runs eagerly; its result is its own, of its own size."""
    runner = runner_of(world)
    captured = run(runner, world, (5, 3, 9))
    eager = run(runner, world, (4, 8, 2, 6, 1), seed=1)
    assert captured.ran_graph
    assert not eager.ran_graph
    assert eager.value.tag.tolist() == [5, 9, 3, 7, 2]
    assert not torch.equal(eager.value.out[: 3 * WIDTH], captured.value.out)


def test_inputs_are_read_only_and_padding_is_zero(world: World) -> None:
    """What a larger batch left behind never reaches a smaller one's padded rows."""
    seen: list[Given] = []
    phase = phase_of(world)

    def watched(meta: Metadata, given: Given) -> Made:
        seen.append(given)
        return phase.region(meta, given)

    watching = Phase("verify", watched, safe_inputs, Made, phase.bucket)
    runner = PhaseRunner(watching, world.backend, world.paging(), (3,), RecordedGraph)
    run(runner, world, (5, 3, 9))
    scene = Scene(world, Batch(KIND, (4,)))
    scene.reset_memory()
    given = given_of(scene)
    before = [getattr(given, f.name).clone() for f in fields(Given)]
    runner.run(scene.step(), given)
    for field, copy in zip(fields(Given), before, strict=True):
        static = getattr(seen[0], field.name)
        assert torch.equal(getattr(given, field.name), copy)
        assert torch.equal(static[: len(copy)], copy), field.name
        assert not static[len(copy) :].any(), field.name


def test_idle_step_gives_empty_results(world: World) -> None:
    for runner in (runner_of(world), PhaseRunner(phase_of(world), world.backend, world.paging())):
        scene = Scene(world, IDLE)
        before = scene.reset_memory()
        result = runner.run(scene.step(), safe_inputs(0))
        assert result.value.out.shape == (0, HEADS, HEAD_DIM)
        assert result.value.tag.shape == (0,)
        assert result.value.ruler.shape == (7,)
        check_memory(scene, before, padded=True)


@pytest.mark.parametrize("rows", [1, 3], ids=["too few", "too many"])
@pytest.mark.parametrize("buckets", [(), (3,)], ids=["eager", "graph"])
def test_inputs_that_are_not_the_steps_are_refused(world: World, buckets: tuple[int, ...], rows: int) -> None:
    """A request without inputs must not silently be given zeros."""
    runner = PhaseRunner(phase_of(world), world.backend, world.paging(), buckets, RecordedGraph)
    other = Scene(world, Batch(KIND, (7,) * rows), seed=1)
    scene = Scene(world, Batch(KIND, (5, 3)))
    scene.reset_memory()
    with pytest.raises((AttnBackendsError, InvalidStepError)):
        runner.run(scene.step(), given_of(other))


@dataclass(frozen=True, eq=False)
class Unclassified:
    out: PerToken
    lse: PerToken
    tag: PerRequest
    forgotten: Tensor


@dataclass(frozen=True, eq=False)
class TwoClasses:
    out: Annotated[Tensor, FieldClass.PER_TOKEN, FieldClass.PER_REQUEST]


@pytest.mark.parametrize("buckets", [(), (3,)], ids=["eager", "graph"])
def test_field_without_a_class_is_refused_when_the_runner_is_built(world: World, buckets: tuple[int, ...]) -> None:
    phase = phase_of(world, Unclassified)
    with pytest.raises(CaptureError, match=r"Unclassified\.forgotten has no class"):
        PhaseRunner(phase, world.backend, world.paging(), buckets, RecordedGraph)


def test_classes_of_fields() -> None:
    assert classify(Made) == {
        "out": FieldClass.PER_TOKEN,
        "lse": FieldClass.PER_TOKEN,
        "tag": FieldClass.PER_REQUEST,
        "ruler": FieldClass.PASS_THROUGH,
    }
    with pytest.raises(CaptureError, match=r"TwoClasses\.out"):
        classify(TwoClasses)
    with pytest.raises(CaptureError, match="dataclass"):
        classify(dict)


def test_buckets_need_a_graph(world: World) -> None:
    with pytest.raises(CaptureError, match=r"buckets \[1, 3\] were given and no graph"):
        PhaseRunner(phase_of(world), world.backend, world.paging(), (1, 3))


def test_bucket_above_the_capacity_is_refused(world: World) -> None:
    with pytest.raises(CaptureError, match=f"max_bs={MAX_BS}"):
        runner_of(world, (1, MAX_BS + 1))


@dataclass(frozen=True, eq=False)
class Scaled:
    q: PerToken
    factor: PassThrough


@dataclass(frozen=True, eq=False)
class Product:
    q: PerToken


@pytest.mark.parametrize("buckets", [(), (3,)], ids=["eager", "graph"])
def test_an_input_that_does_not_depend_on_the_batch_may_be_a_scalar(world: World, buckets: tuple[int, ...]) -> None:
    phase = Phase(
        "scale",
        lambda meta, given: Product(given.q * given.factor),
        lambda bs: Scaled(torch.zeros(bs * WIDTH), torch.tensor(0.0)),
        Product,
        lambda bs: world.capacity.bucket(KIND, bs),
    )
    runner = PhaseRunner(phase, world.backend, world.paging(), buckets, RecordedGraph)
    scene = Scene(world, Batch(KIND, (5, 3)))
    scene.reset_memory()
    for factor in (2.0, 3.0):
        result = runner.run(scene.step(), Scaled(torch.ones(2 * WIDTH), torch.tensor(factor)))
        assert result.value.q.tolist() == [factor] * 2 * WIDTH


@pytest.mark.parametrize(
    "given",
    [Scaled(torch.ones(WIDTH, 7), torch.ones(1)), Scaled(torch.ones(WIDTH, 1), torch.tensor(2.0))],
    ids=["factor", "q"],
)
def test_a_graph_never_broadcasts_an_input(world: World, given: Scaled) -> None:
    """What was captured for other sizes would be filled up without a word."""
    phase = Phase(
        "scale",
        lambda meta, given: Product(given.q.sum(1) * given.factor),
        lambda bs: Scaled(torch.zeros(bs * WIDTH, 7), torch.zeros(())),
        Product,
        lambda bs: world.capacity.bucket(KIND, bs),
    )
    runner = PhaseRunner(phase, world.backend, world.paging(), (1,), RecordedGraph)
    scene = Scene(world, Batch(KIND, (5,)))
    scene.reset_memory()
    with pytest.raises(InvalidStepError, match=r"phase scale: input (q|factor) .* captured as"):
        runner.run(scene.step(), given)


def test_an_idle_step_runs_on_kernels_that_plan_on_the_host() -> None:
    """Nobody brings lengths for the one row of padding that an idle step is run on without graphs."""
    world = World(Setup(HostedBackend, CacheFormat.KV, 4))
    scene = Scene(world, IDLE)
    scene.reset_memory()
    result = PhaseRunner(phase_of(world), world.backend, world.paging()).run(scene.step(), safe_inputs(0))
    assert result.value.out.shape == (0, HEADS, HEAD_DIM)
