"""Checks of runner, worker and sampling, in the form of the catalogue's, which has checks of backends only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attn_backends.cache import KeyValues
from attn_backends.conformance import Case, Check, CheckFailure, Measured, Subject
from attn_backends.conformance.comparisons import compare_identical, compare_outputs
from attn_backends.conformance.exercise import batch_of, prepare_memory, setup_of
from attn_backends.conformance.scenes import Scene
from attn_backends.conformance.worlds import World
from attn_backends.graphs import CudaGraph, RecordedGraph
from attn_backends.layer import AttentionOutput
from attn_backends.runner import PerToken, Phase, PhaseRunner, Planning
from spec_metadata import StepKind
from spec_metadata.capacity import Capacity
from tests import sampling_laws
from tests.mutants.eagle3_checks import EAGLE3_CHECKS
from tests.mutants.mtp_checks import MTP_CHECKS
from tests.mutants.multimodal_checks import MULTIMODAL_CHECKS
from tests.mutants.parallel_checks import PARALLEL_CHECKS
from tests.mutants.prefill_checks import PREFILL_CHECKS
from tests.mutants.serving_checks import SERVING_CHECKS


@dataclass(frozen=True, eq=False)
class Given:
    q: PerToken
    k: PerToken
    v: PerToken


@dataclass(frozen=True, eq=False)
class Made:
    out: PerToken
    lse: PerToken


def given_of(scene: Scene) -> Given:
    inputs = scene.inputs()[0]
    assert isinstance(inputs.stored, KeyValues)
    return Given(inputs.q, inputs.stored.k, inputs.stored.v)


def runner_of(world: World, bucket: int, planning: Planning = "before") -> PhaseRunner[Given, Made]:
    """A verify in one graph."""

    def region(meta, given: Given) -> Made:
        world.backend.store(KeyValues(given.k, given.v), world.cache, meta.at(), world.layer)
        return Made(*world.backend.forward(given.q, world.cache, meta.at(), world.layer))

    def safe_inputs(bs: int) -> Given:
        given, rows = given_of(Scene(world, batch_of(CASES["runner.results"]))), bs * world.capacity.num_draft_tokens
        return Given(*(t.new_zeros(rows, *t.shape[1:]) for t in (given.q, given.k, given.v)))

    kind, graph = StepKind.TARGET_VERIFY, CudaGraph if world.device.type == "cuda" else RecordedGraph
    phase = Phase("verify", region, safe_inputs, Made, lambda bs: world.capacity.bucket(kind, bs))
    return PhaseRunner(phase, world.backend, world.paging(), (bucket,), graph, planning)


def results(subject: Subject, case: Case) -> Measured:
    """Results of steps in and above the graph's batch size are right, and no later step changes an earlier one."""
    world = World(setup_of(subject, case))
    return _in_turn(world, runner_of(world, case.bs), case)


def planned_in_graph(subject: Subject, case: Case) -> Measured:
    """The same of graphs that plan their steps themselves."""
    world = World(setup_of(subject, case))
    return _in_turn(world, runner_of(world, case.bs, "in_graph"), case)


def _in_turn(world: World, runner: PhaseRunner[Given, Made], case: Case) -> Measured:
    kept = []
    for turn, lens in enumerate((case.captured_lens, case.lens, case.captured_lens)):
        scene = Scene(world, batch_of(replace(case, lens=lens)), case.seed + turn)
        prepare_memory(scene, case)
        made = runner.run(scene.step(), given_of(scene)).value
        compare_outputs(scene, scene.inputs(), [AttentionOutput(made.out, made.lse)])
        kept.append((made.out, made.out.clone()))
    for turn, (now, then) in enumerate(kept):
        compare_identical(f"result of turn {turn} after later turns", now, then)
    return Measured()


def lossless(subject: Subject, case: Case) -> Measured:
    """Speculative decoding over trees emits what plain decoding emits."""
    from tests.serving_scenes import TREE, eagle, plain, prompts, tokens  # needs the models' packages

    capacity, given = Capacity(3, 96, case.page_size, **TREE), prompts(3, 40)
    expected, _ = plain("gqa", "reference", capacity, given, 16)
    found, _ = eagle("gqa", subject.backend.name, capacity, given, 16)
    if tokens(found) != tokens(expected):
        raise CheckFailure("tokens", "not those of plain decoding", None, str(tokens(expected)), str(tokens(found)))
    return Measured()


def sampled_law(subject: Subject, case: Case) -> Measured:
    """A verify of sampled requests emits runs of the target's own distribution."""
    sampling_laws.check_law(sampling_laws.TREE, sampling_laws.PLAIN)
    return Measured()


def reproducible(subject: Subject, case: Case) -> Measured:
    """A sampled text is the request's own, in any batch, bucket and order, eager or replayed, chain or tree."""
    sampling_laws.check_reproducible()
    return Measured()


def filters(subject: Subject, case: Case) -> Measured:
    """Temperature, top-k and top-p are those of a simple float64 reference, request by request."""
    sampling_laws.check_filters()
    return Measured()


def noise(subject: Subject, case: Case) -> Measured:
    """The random bits of neighbouring seeds, positions and tokens are uniform and independent."""
    sampling_laws.check_noise()
    return Measured()


def ranges(subject: Subject, case: Case) -> Measured:
    """Temperature, top-p, top-k and seeds out of range are refused."""
    sampling_laws.check_ranges()
    return Measured()


def sampled_lossless(subject: Subject, case: Case) -> Measured:
    """Sampled speculative decoding over trees emits what sampled plain decoding emits with the same seeds."""
    from tests.serving_scenes import EAGER, TREE  # needs the models' packages

    sampling_laws.check_lossless(TREE, EAGER)
    return Measured()


RUNS = {
    "runner.results": results,
    "runner.planned_in_graph": planned_in_graph,
    "worker.lossless": lossless,
    "worker.sampled_lossless": sampled_lossless,
    "sampling.law": sampled_law,
    "sampling.reproducible": reproducible,
    "sampling.filters": filters,
    "sampling.noise": noise,
    "sampling.ranges": ranges,
}
CASES = {
    "runner.results": Case(
        "runner.results", StepKind.TARGET_VERIFY, "graph", page_size=4, lens=(4, 8, 2), captured_lens=(5, 3), bs=2
    ),
    "runner.planned_in_graph": Case(
        "runner.planned_in_graph",
        StepKind.TARGET_VERIFY,
        "graph",
        page_size=4,
        lens=(4, 8, 2),
        captured_lens=(5, 3),
        bs=2,
    ),
    "worker.lossless": Case("worker.lossless", StepKind.TARGET_VERIFY, topk=4),
    "worker.sampled_lossless": Case("worker.sampled_lossless", StepKind.TARGET_VERIFY, topk=4),
    "sampling.law": Case("sampling.law", StepKind.TARGET_VERIFY, topk=4),
    "sampling.reproducible": Case("sampling.reproducible", StepKind.TARGET_VERIFY, "graph", topk=4),
    "sampling.filters": Case("sampling.filters", StepKind.DECODE),
    "sampling.noise": Case("sampling.noise", StepKind.DECODE),
    "sampling.ranges": Case("sampling.ranges", StepKind.DECODE),
}
LOCAL_CHECKS = (
    {
        run_id: Check(run_id, run.__doc__ or "", run, lambda subject, case=CASES[run_id]: [case])
        for run_id, run in RUNS.items()
    }
    | SERVING_CHECKS
    | MTP_CHECKS
    | PREFILL_CHECKS
    | EAGLE3_CHECKS
    | MULTIMODAL_CHECKS
    | PARALLEL_CHECKS
)
