"""Graphs: captured on one batch, replayed on others. What a graph would freeze, move or forget shows here."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import CheckFailure, Measured, Subject, check
from attn_backends.conformance.comparisons import compare_identical, compare_memory, compare_outputs, nearest
from attn_backends.conformance.exercise import (
    Captured,
    Ran,
    batch_of,
    check_addresses,
    check_guarded,
    prepare_memory,
    run_forwards,
    scene_of,
    setup_of,
    world_of,
)
from attn_backends.conformance.scenes import Scene
from attn_backends.conformance.situations import (
    any_graph,
    around_pages,
    graph,
    graphable,
    growing,
    idle,
    joined,
    one_page_size,
    packed_graph,
    padded,
    shrinking,
    situations,
    spacious,
)
from attn_backends.errors import CaptureError, UnsupportedStepError
from attn_backends.graphs import leaves
from attn_backends.planning.metadata import Metadata
from spec_metadata import PackedQuery, StepKind


def _measure(ran: Ran) -> Measured:
    compare_memory(ran.scene, ran.before, padded=True)
    return compare_outputs(ran.scene, ran.inputs, ran.outputs)


def _captured(subject: Subject, case: Case) -> tuple[Captured, Scene]:
    """The captured graph, and the scene to replay it on."""
    world = world_of(setup_of(subject, case))
    captured = Captured(world, case)
    return captured, scene_of(world, batch_of(case), case.seed + 1)


def _replay_another(subject: Subject, case: Case) -> Measured:
    captured, scene = _captured(subject, case)
    return _measure(captured.run(scene, case))


@check("graph.shrinking", any_graph(shrinking))
def shrinking_batch(subject: Subject, case: Case) -> Measured:
    """A graph captured on a large batch computes and writes for a smaller one of shorter requests."""
    return _replay_another(subject, case)


def _spacious(subject: Subject) -> list[Case]:
    return [spacious(case) for case in one_page_size(packed_graph(padded))(subject)]


@check("graph.padded", joined(any_graph(padded), _spacious))
def padded_batch(subject: Subject, case: Case) -> Measured:
    """Rows past the real requests change no output, and write in the reserved page alone."""
    return _replay_another(subject, case)


@check("graph.idle", any_graph(idle))
def idle_batch(subject: Subject, case: Case) -> Measured:
    """A replay without any request writes in the reserved page alone."""
    return _replay_another(subject, case)


@check(
    "graph.refresh_recorded",
    joined(*(any_graph(change, refresh=True) for change in (growing, shrinking, padded, idle))),
)
def refresh_recorded(subject: Subject, case: Case) -> Measured:
    """`refresh` may be the graph's first node, with `copy_inputs` alone between replays."""
    return _replay_another(subject, case)


@check("graph.captured_batch", one_page_size(any_graph(growing)))
def captured_batch(subject: Subject, case: Case) -> Measured:
    """The graph is right on the very batch that it was captured on."""
    captured, _ = _captured(subject, replace(case, lens=case.captured_lens, widths=case.captured_widths))
    before = prepare_memory(captured.scene, case)
    return _measure(captured.replay(captured.scene, before))


@check("graph.sequence", one_page_size(any_graph(growing)))
def sequence(subject: Subject, case: Case) -> Measured:
    """One graph, replayed on long, short, idle and long batches in turn, keeps nothing of the one before."""
    captured, _ = _captured(subject, case)
    found = []
    batches = (case.lens, case.widths), (case.captured_lens, case.captured_widths), ((), ())
    for turn, (lens, widths) in enumerate((*batches, (case.lens[::-1], case.widths[::-1]))):
        scene = scene_of(captured.world, batch_of(replace(case, lens=lens, widths=widths)), case.seed + 10 + turn)
        found.append(_measure(captured.run(scene, case)))
    return nearest(found)


@check("graph.two_buckets", one_page_size(any_graph(growing)))
def two_buckets(subject: Subject, case: Case) -> Measured:
    """Graphs of two batch sizes of one backend, replayed in turn, don't disturb each other."""
    large, _ = _captured(subject, case)
    lens, widths = case.lens[1::-1], case.widths[1::-1]  # other lengths than the large one's, in the rows of both
    few = replace(case, bs=2, lens=lens, widths=widths, num_tokens=max(case.num_tokens - 1, 0))
    small = Captured(large.world, few)
    found = []
    for turn, (captured, its) in enumerate(((large, case), (small, few), (large, case))):
        found.append(_measure(captured.run(scene_of(large.world, batch_of(its), case.seed + 20 + turn), its)))
    return nearest(found)


def _two_kinds(subject: Subject) -> list[Case]:
    if not graphable(subject, StepKind.DRAFT_EXTEND):
        return []
    return one_page_size(graph(growing, kinds=(StepKind.TARGET_VERIFY,)))(subject)


@check("graph.two_kinds", _two_kinds)
def two_kinds(subject: Subject, case: Case) -> Measured:
    """Graphs of two step kinds at one batch size of one backend, replayed in turn, don't disturb each other."""
    verify, _ = _captured(subject, case)
    its = replace(case, kind=str(StepKind.DRAFT_EXTEND))
    extend, found = Captured(verify.world, its), []
    for turn, (captured, case_of) in enumerate(((verify, case), (extend, its), (verify, case))):
        scene = scene_of(verify.world, batch_of(case_of), case.seed + 30 + turn)
        found.append(_measure(captured.run(scene, case_of)))
    return nearest(found)


@check("graph.stale_is_refused", one_page_size(graph(growing)))
def stale_is_refused(subject: Subject, case: Case) -> Measured:
    """Captured metadata that the replay of another graph has overwritten is refused until its own next replay."""
    large, scene = _captured(subject, case)
    few = replace(case, bs=2, lens=case.lens[:2])
    small, ancestors = Captured(large.world, few), large.static[0].ancestors
    large.load(scene)
    refusal = _refusal(large.meta, ancestors)
    if refusal:
        raise CheckFailure("metadata", f"refused after its own replay: {refusal}")
    small.load(scene_of(large.world, batch_of(few), case.seed + 2))
    refusal = _refusal(large.meta, ancestors)
    if not refusal:
        raise CheckFailure("metadata", f"that of {case.bs} requests was taken after a replay of {few.bs}")
    return Measured(refusal=refusal)


def _refusal(meta: Metadata, ancestors: Tensor | None) -> str:
    """Why metadata is refused; empty if it is taken."""
    try:
        meta.at(0, ancestors)
    except CaptureError as error:
        return str(error)
    return ""


@check("graph.equals_eager", joined(any_graph(growing), graph(growing, refresh=True)))
def equals_eager(subject: Subject, case: Case) -> Measured:
    """A replay equals the eager step on the same padded layout bit for bit: outputs, cache, and metadata.

    Metadata is compared where both begin with buffers as they were allocated: a planner may leave what no kernel reads.
    """
    captured, scene = _captured(subject, case)
    ran = captured.run(scene, case)
    world, backend = captured.world, captured.world.backend
    eager_meta = backend.init_forward_metadata(captured.padded(scene))
    after = world.memory.clone()
    world.memory.copy_(ran.before)
    expected = run_forwards(world, eager_meta, captured.static)
    compare_identical("cache", after, world.memory)
    for forward, (one, two) in enumerate(zip(ran.outputs, expected, strict=True)):
        compare_identical(f"output of forward {forward}", one.out, two.out)
        compare_identical(f"LSE of forward {forward}", one.lse, two.lse)
    assert captured.meta.captured is not None, "it was captured"
    captured.meta.captured.phase.reset()
    again = captured.run(scene, case)
    for name in ("write_slots", *(spec.name for spec in backend.buffers(StepKind(case.kind)))):
        compare_identical(f"replayed metadata {name}", again.meta.buffers[name], eager_meta.buffers[name])
    return Measured()


@check("graph.stable_addresses", any_graph(growing))
def stable_addresses(subject: Subject, case: Case) -> Measured:
    """A replay writes into the tensors that the graph was captured with, and replaces none of them."""
    captured, scene = _captured(subject, case)
    check_addresses(captured)
    captured.load(scene)
    check_addresses(captured)
    return Measured()


@check("graph.keeps_no_memory", any_graph(growing))
def keeps_no_memory(subject: Subject, case: Case) -> Measured:
    """`replay` frees all memory that it allocates: a graph can't read it."""
    captured, scene = _captured(subject, case)
    step = scene.step()
    kept = _kept_by(lambda: captured.world.backend.replay(captured.meta, step))
    if kept:
        raise CheckFailure(
            "replay", "it keeps memory that it allocated, which no graph reads", None, "0", f"{kept} tensors"
        )
    return Measured()


class _Allocations(TorchDispatchMode):
    """Notes the memory of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        old = {t.untyped_storage()._cdata for t in leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in leaves(outputs):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in old:
                reference = StorageWeakRef(tensor.untyped_storage())
                self.made[reference.cdata] = reference
        return outputs

    def num_alive(self) -> int:
        """Of that memory, what is not freed."""
        return sum(not reference.expired() for reference in self.made.values())


def _kept_by(call: Callable[[], None]) -> int:
    """Tensors that a call made and that live on after it."""
    with _Allocations() as allocations:
        call()
    if allocations.num_alive():
        gc.collect()  # of those in cycles
    return allocations.num_alive()


@check("graph.owns_its_inputs", any_graph(growing))
def owns_its_inputs(subject: Subject, case: Case) -> Measured:
    """After `replay` the caller may overwrite the step's tensors: the graph has copies."""
    captured, scene = _captured(subject, case)
    before = prepare_memory(scene, case)
    step = captured.load(scene)
    for given in (step.seq_lens, step.out_cache_loc, step.num_real, step.paging.static_input(), step.tree_mask):
        if isinstance(given, Tensor):
            given.zero_()
    if isinstance(step.query, PackedQuery):
        step.query.cu_seqlens.zero_()
    return _measure(captured.replay(scene, before))


@check("graph.guards", any_graph(growing))
def guards(subject: Subject, case: Case) -> Measured:
    """In checking mode, nothing is written next to a declared buffer, where it is noticed, or outside its range."""
    world = world_of(replace(setup_of(subject, case), checking=True))
    captured, scene = Captured(world, case), scene_of(world, batch_of(case), case.seed + 1)
    captured.run(scene, case)
    for meta in (captured.meta, world.backend.init_forward_metadata(scene.step())):
        check_guarded(world.backend, meta)
    return Measured()


def _too_large(subject: Subject) -> list[Case]:
    cases = []
    for kind in (StepKind.DECODE, StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND):
        for case in situations(subject, kind) if graphable(subject, kind) else ():
            edge, less, more, _ = around_pages(case)
            cases.append(replace(case, path="graph", captured_lens=(edge, less), lens=(more, 1, less), bs=2))
    packed = packed_graph(shrinking)(subject)
    return [*cases, *(replace(case, bs=1, captured_lens=case.lens[:1], captured_widths=(1,)) for case in packed)]


def _too_many_rows(subject: Subject) -> list[Case]:
    return [replace(case, num_tokens=sum(case.widths) - 1, captured_widths=(1, 1)) for case in packed_graph()(subject)]


@check("graph.larger_than_bucket", one_page_size(joined(_too_large, _too_many_rows)))
def larger_than_bucket(subject: Subject, case: Case) -> Measured:
    """A graph refuses a batch larger than its own, unwritten; the same step then runs eagerly."""
    captured, scene = _captured(subject, case)
    before = prepare_memory(scene, case)
    buffers = {name: tensor.clone() for name, tensor in captured.meta.buffers.items()}
    step = scene.step()
    try:
        captured.world.backend.replay(captured.meta, step)
    except UnsupportedStepError:
        pass
    else:
        raise CheckFailure("replay", f"took what is too large: {case.in_words()}")
    for name, old in buffers.items():
        compare_identical(f"captured {name}", captured.meta.buffers[name], old)
    meta = captured.world.backend.init_forward_metadata(step)
    inputs = scene.inputs()
    return _measure(Ran(scene, inputs, run_forwards(captured.world, meta, inputs), before, meta))


def _packed(subject: Subject) -> list[Case]:
    kind = StepKind.DRAFT_EXTEND
    if not graphable(subject, kind):
        return []
    return [
        replace(case, path="graph", captured_lens=(5, 3), lens=(5, 3), widths=(4, 4), bs=2)
        for case in situations(subject, kind, topks=(1,))
    ]


@check("graph.packed_is_not_uniform", _packed)
def packed_is_not_uniform(subject: Subject, case: Case) -> Measured:
    """A graph of a uniform width refuses packed accept lengths, even those that divide evenly."""
    return _refused_layout(subject, case)


def _uniform(subject: Subject) -> list[Case]:
    cases = [case for case in packed_graph(shrinking)(subject) if case.kind == StepKind.DRAFT_EXTEND]
    return [replace(case, widths=(), num_tokens=3 * case.num_tokens) for case in cases]


@check("graph.uniform_is_not_packed", _uniform)
def uniform_is_not_packed(subject: Subject, case: Case) -> Measured:
    """A graph of packed rows refuses a uniform width, even one that it has room for."""
    return _refused_layout(subject, case)


def _refused_layout(subject: Subject, case: Case) -> Measured:
    captured, scene = _captured(subject, case)
    step = scene.step()
    try:
        captured.world.backend.replay(captured.meta, step)
    except UnsupportedStepError as refusal:
        return Measured(refusal="; ".join(refusal.reasons))
    raise CheckFailure("replay", f"took {step.query} into a graph of {captured.meta.bucket}")
