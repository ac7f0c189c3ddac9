"""Numbers that small worlds never reach: large scores, many pages, tables of other widths, buffers of any contents."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import CheckFailure, Measured, Subject, check
from attn_backends.conformance.comparisons import (
    compare_memory,
    compare_outputs,
    compare_ranges,
    expectations,
    nearest,
    returns_lse,
)
from attn_backends.conformance.exercise import (
    Captured,
    Ran,
    batch_of,
    prepare_memory,
    run_case,
    run_forwards,
    scene_of,
    setup_of,
    world_of,
)
from attn_backends.conformance.scenes import Scene
from attn_backends.conformance.situations import (
    Cases,
    any_graph,
    eager,
    graph,
    growing,
    in_rows,
    joined,
    one_page_size,
    packed_graph,
    padded,
    situations,
)
from attn_backends.errors import CaptureError
from attn_backends.planning.metadata import Metadata
from spec_metadata import BlockTable, BufferSpec, Paging, StepKind
from spec_metadata.capacity import UNIFORM_KINDS

LARGEST_SCORE = 1200.0
"""Of `math.large_scores`, within a factor of the root of 2: its exponential, and that of its negative, is no
number of float64. The layer's scale is multiplied by a power of 2, so that whoever plans with the scale of a model can
multiply queries instead, and rounds nothing.
"""
MANY_PAGES = 70_000


def prompts(subject: Subject) -> list[Case]:
    """Prefills after prefixes, and one without."""
    return [in_rows(replace(case, lens=case.lens[:3])) for case in situations(subject, StepKind.PREFILL)]


def _measure(ran: Ran, *, padded: bool) -> Measured:
    compare_memory(ran.scene, ran.before, padded=padded)
    return compare_outputs(ran.scene, ran.inputs, ran.outputs)


def _own_types(cases: Cases) -> Cases:
    """Of the cases, those of dense layers whose cache has the query's type."""
    return lambda subject: [case for case in cases(subject) if not (case.layer or case.cache_dtype)]


@check("math.large_scores", _own_types(one_page_size(joined(eager(), graph(), prompts))))
def large_scores(subject: Subject, case: Case) -> Measured:
    """Scores in the hundreds, whose exponentials are no numbers: the largest is subtracted first, also where parts of a
    row's keys are joined by their log-sum-exps.
    """
    world = world_of(setup_of(subject, case))
    times = math.log2(LARGEST_SCORE / (world.layer.head_dim * world.layer.scale))
    world.layer = replace(world.layer, scale=world.layer.scale * 2.0 ** round(times))
    if case.path == "graph":
        ran = Captured(world, case).run(scene_of(world, batch_of(case), case.seed + 1), case)
    else:
        scene = scene_of(world, batch_of(case), case.seed)
        ran = _ran_eagerly(scene, case, scene.paging())
    compare_memory(ran.scene, ran.before, padded=case.path == "graph")
    return _near_in_exponent(ran)


def _near_in_exponent(ran: Ran) -> Measured:
    """Outputs and LSEs within budgets that let a score be off by some rounding steps, which its exponential shows."""
    out, lse = expectations(ran.scene, ran.inputs)
    eps = torch.finfo(torch.float64 if out.dtype is torch.float64 else torch.float32).eps
    largest = max(float(x.abs().max()) for x in lse.exact)
    out.budget += 16 * eps * largest * max(float(x.abs().max()) for x in out.exact)
    lse.budget += 16 * eps * largest
    found = [out.compare([o.out for o in ran.outputs])]
    if returns_lse(ran.scene):
        found.append(lse.compare([o.lse for o in ran.outputs]))
    return nearest(found)


def _ran_eagerly(scene: Scene, case: Case, paging: Paging) -> Ran:
    """A scene with a table of one's own."""
    before, inputs = prepare_memory(scene, case), scene.inputs()
    meta = scene.world.backend.init_forward_metadata(replace(scene.step(), paging=paging))
    return Ran(scene, inputs, run_forwards(scene.world, meta, inputs), before, meta)


def _many_pages(subject: Subject) -> list[Case]:
    """A case of each kind on the smallest pages; where those are large, of decodes alone."""
    cases: list[Case] = prompts(subject)[:1]
    for kind in UNIFORM_KINDS:
        for path in (eager((kind,)), graph(kinds=(kind,))):
            cases += [case for case in path(subject) if not case.layer][:1]
    few = [case for case in cases if case.page_size <= 4 or case.kind == StepKind.DECODE]
    return [replace(case, size=f"cache{MANY_PAGES}", lens=case.lens[:3]) for case in few]


@check("cache.many_pages", _many_pages)
def many_pages(subject: Subject, case: Case) -> Measured:
    """Requests whose pages have numbers over 32,767 and over 65,535."""
    return _measure(run_case(subject, case), padded=case.path == "graph")


def _narrow(subject: Subject) -> list[Case]:
    short = [replace(case, lens=(1, 2, 1)) for case in joined(eager())(subject)]
    captured = [case for case in graph()(subject) if case.table == "block"]
    return short + [replace(case, lens=(1, 2), captured_lens=case.lens[:2]) for case in captured]


@check("math.narrow_tables", one_page_size(_narrow))
def narrow_tables(subject: Subject, case: Case) -> Measured:
    """A table with no more columns than its requests need, narrower than the capacity; a graph takes such a block table
    after one of full width.
    """
    world = world_of(setup_of(subject, case))
    captured = Captured(world, case) if case.path == "graph" else None
    scene = scene_of(world, batch_of(case), case.seed + 1)
    most = max(len(request.slots) for request in scene.requests)
    num_pages = -(-most // case.page_size)
    paging = _cut(scene.paging(), num_pages)
    if captured is None:
        return _measure(_ran_eagerly(scene, case, paging), padded=False)
    captured.run(scene_of(world, batch_of(replace(case, lens=case.captured_lens)), case.seed), case)
    scene = scene_of(world, batch_of(case), case.seed + 1)
    before = prepare_memory(scene, case)
    captured.load(scene)
    world.backend.replay(captured.meta, replace(scene.step(), paging=paging))
    return _measure(captured.replay(scene, before), padded=True)


def _cut(paging: Paging, num_pages: int) -> Paging:
    """The leading pages of a table."""
    if isinstance(paging, BlockTable):
        return replace(paging, table=paging.table[:, :num_pages].contiguous())
    return replace(paging, table=paging.table[:, : num_pages * paging.geometry.page_size].contiguous())


def _tails(subject: Subject) -> list[Case]:
    return joined(prompts, any_graph(padded))(subject)


@check("poison.planned_tails", one_page_size(_tails))
def planned_tails(subject: Subject, case: Case) -> Measured:
    """Entries of a table past a request's tokens may hold anything in a prefill, and in what a graph is replayed on."""
    world = world_of(setup_of(subject, case))
    captured = Captured(world, case) if case.path == "graph" else None
    scene = scene_of(world, batch_of(case), case.seed + 1)
    scene.poison_table_tails()
    compare_ranges(scene, world.backend.init_forward_metadata(scene.step()).buffers)
    if captured is None:
        return _measure(_ran_eagerly(scene, case, scene.paging()), padded=False)
    return _measure(captured.run(scene, case), padded=True)


@check("poison.stale_buffers", one_page_size(any_graph(growing)))
def stale_buffers(subject: Subject, case: Case) -> Measured:
    """A replay plans all that its kernel reads: the buffers may hold any values of their declared ranges before it."""
    world = world_of(setup_of(subject, case))
    captured, rng = Captured(world, case), torch.Generator().manual_seed(case.seed)
    _spoil(world.backend.buffers(StepKind(case.kind)), captured.meta, rng)
    return _measure(captured.run(scene_of(world, batch_of(case), case.seed + 1), case), padded=True)


def _spoil(specs: tuple[BufferSpec, ...], meta: Metadata, rng: torch.Generator) -> None:
    """Fill declared buffers with random values of their ranges."""
    for spec in specs:
        buffer = meta.buffers[spec.name]
        low = spec.low or 0
        high = 2 if buffer.dtype is torch.bool else spec.high.of(meta.buffers.extent) if spec.high else low + 8
        values = torch.randint(low, max(high, low + 1), buffer.shape, generator=rng)
        buffer.copy_(values.to(buffer.dtype))


def _over_reading(subject: Subject) -> list[Case]:
    """One page size of each kind whose kernel declares an over-read."""
    return [case for case in one_page_size(eager())(subject) if subject.capabilities[StepKind(case.kind)].over_read]


@check("poison.pages_that_no_row_sees", _over_reading)
def pages_that_no_row_sees(subject: Subject, case: Case) -> Measured:
    """NaN in every page that no request owns reaches no output, even where the kernel declares an over-read of the
    pages that they own.
    """
    world = world_of(setup_of(subject, case))
    scene = scene_of(world, batch_of(case), case.seed)
    prepare_memory(scene, replace(case, poison="finite"))
    owned = {slot // case.page_size for request in scene.requests for slot in request.slots.values()}
    owned.add(world.geometry.reserved_page)
    others = torch.tensor([page for page in range(world.geometry.num_pages) if page not in owned])
    _fill_nan(world.memory, others.to(world.device))
    before, inputs = world.memory.clone(), scene.inputs()
    meta = world.backend.init_forward_metadata(scene.step())
    return _measure(Ran(scene, inputs, run_forwards(world, meta, inputs), before, meta), padded=False)


def _fill_nan(memory: Tensor, pages: Tensor) -> None:
    """Fill pages with what reads as NaN."""
    if memory.is_floating_point() and memory.dtype.itemsize > 1:
        memory[pages] = float("nan")
    else:
        memory.view(torch.uint8)[pages] = 0xFF


@check("graph.idle_of_another_width", one_page_size(_own_types(graph(growing))))
def idle_of_another_width(subject: Subject, case: Case) -> Measured:
    """An idle step of a rank without requests, whose table has no column or another width, is replayed between two
    others, and leaves both right.
    """
    world = world_of(setup_of(subject, case))
    captured, found = Captured(world, case), Measured()
    idle = scene_of(world, batch_of(replace(case, lens=())), case.seed)
    for number, columns in enumerate((0, 1, 2 * world.max_pages)):
        before = prepare_memory(idle, case)
        table = torch.zeros(0, columns, dtype=world.setup.index, device=world.device)
        paging = replace(idle.paging(), table=table) if world.setup.block_table else idle.paging()
        world.backend.replay(captured.meta, replace(idle.step(), paging=paging))
        captured.graph.replay()
        compare_memory(idle, before, padded=True)
        found = _measure(captured.run(scene_of(world, batch_of(case), case.seed + 1 + number), case), padded=True)
    return found


_STALE = "captured metadata that the replay of another graph has overwritten"


@check("graph.stale_everywhere", one_page_size(joined(graph(growing), packed_graph(growing))))
def stale_everywhere(subject: Subject, case: Case) -> Measured:
    """Captured metadata that was overwritten is refused by `refresh`; one forward of it by `store` and `forward`, and
    not only by `at`.
    """
    world = world_of(setup_of(subject, case))
    large, scene = Captured(world, case), scene_of(world, batch_of(case), case.seed + 1)
    large.load(scene)
    given = large.static[0]
    at = large.meta.at(0, given.ancestors)
    few = replace(case, bs=2, lens=case.lens[:2], widths=case.widths[:2])
    small = Captured(world, few)
    small.load(scene_of(world, batch_of(few), case.seed + 2))
    calls = {
        "refresh": lambda: world.backend.refresh(large.meta),
        "store": lambda: world.store(given, at),
        "forward": lambda: world.attend(given, at),
    }
    reasons = []
    for name, call in calls.items():
        try:
            call()
        except CaptureError as error:
            reasons.append(str(error))
        else:
            raise CheckFailure(name, f"took {_STALE}")
    return Measured(refusal=reasons[-1])
