"""One world, from its seed to its counts; and where it goes wrong, the shortest sequence of steps that still does."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tests.fuzz import compressed, decode, illegal, steps
from tests.fuzz.attend import attend
from tests.fuzz.decode import DECODERS, Malformed
from tests.fuzz.driver import REFUSALS, Attention, Engine, Handed, Recorder, interpret_fused_planners
from tests.fuzz.model import Group, Truth, expected
from tests.fuzz.steps import Drawn, Slot

EAGER_STEPS = 16  # of one layout
ILLEGAL_WORLDS = 0.1  # the share of worlds in which illegal steps are tried


class Spec(NamedTuple):
    """A world by its seed: everything in it follows. keep: the steps, counted from 0, that are run (None: all)."""

    seed: int
    number: int
    backend: str
    planner: str
    path: str
    device: str = "cpu"
    kernel: str = "torch"
    keep: tuple[int, int] | None = None

    @property
    def cell(self) -> tuple[str, str, str]:
        """Backend, planner and path."""
        return self.backend, self.planner, self.path

    @property
    def is_interpreted(self) -> bool:
        """Whether the planner runs in Triton's interpreter, which takes a thousand times as long."""
        return self.device == "cpu" and self.planner == "fused"

    @property
    def num_steps(self) -> tuple[int, int]:
        """About so many chunks, and steps of each."""
        return (1, 4) if self.is_interpreted else (3, 128)

    def command(self) -> str:
        """What runs it again."""
        keep = "" if self.keep is None else f" --keep {self.keep[0]}:{self.keep[1]}"
        where = f" --device {self.device}" if self.device != "cpu" else ""
        return (
            f"python -m tests.fuzz --world {self.seed}:{self.number} --backend {self.backend} --planner {self.planner} "
            f"--path {self.path} --kernel {self.kernel}{where}{keep}"
        )


@dataclass
class Tally:
    """What was run. planned, attended: steps of (backend, planner, path, kind). refused: legal steps, by words.
    illegal: (kind, class, what became of it). sizes: (what, size). mismatches: a line each. wrong: an illegal class
    that did not end as it must, and a line of it.
    """

    planned: Counter[tuple[str, ...]] = field(default_factory=Counter)
    attended: Counter[tuple[str, ...]] = field(default_factory=Counter)
    refused: Counter[tuple[str, ...]] = field(default_factory=Counter)
    illegal: Counter[tuple[str, ...]] = field(default_factory=Counter)
    sizes: Counter[tuple[str, ...]] = field(default_factory=Counter)
    mismatches: list[str] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)

    def add(self, other: Tally) -> list[str]:
        """Count another world in; the lines that are new."""
        for mine, its in ((getattr(self, each.name), getattr(other, each.name)) for each in fields(self)):
            if isinstance(mine, Counter):
                mine.update(its)
        new = [*other.mismatches, *(line for name, line in other.wrong.items() if name not in self.wrong)]
        self.mismatches += other.mismatches
        self.wrong = other.wrong | self.wrong
        return new


class Broken(Exception):
    """A mismatch. last: the number of the step that shows it."""

    def __init__(self, what: str, last: int) -> None:
        super().__init__(what)
        self.last = last


def run(spec: Spec) -> Tally:
    """Run a world; a mismatch is reduced and told in a line that runs it again."""
    tally = Tally()
    try:
        _run(spec, tally)
    except Broken as broken:
        tally.mismatches.append(_reduced(spec, broken))
    return tally


def _reduced(spec: Spec, broken: Broken) -> str:
    """The shortest run of steps up to the broken one that still breaks, told."""
    shortest, what = spec, str(broken)
    for before in (0, 1, 3, 7, 31):
        tried = spec._replace(keep=(max(broken.last - before, 0), broken.last + 1))
        try:
            _run(tried, Tally())
        except Broken as again:
            shortest, what = tried, str(again)
            break
    return f"{shortest.command()}\n    {what}"


def _run(spec: Spec, tally: Tally) -> None:
    if spec.is_interpreted:
        interpret_fused_planners()
    rng = np.random.default_rng([spec.seed, spec.number, steps.CELLS.index(spec.cell)])
    world = steps.world(rng, *spec.cell)
    engine = Engine(world, spec.device, spec.kernel)
    layer = Attention(engine, rng.spawn(1)[0]) if world.attends else None
    num_chunks, number = spec.num_steps
    number = min(number, steps.ATTENDED_STEPS) if world.attends else number
    captured = [] if world.path == "eager" else _captured(tally, engine, _layouts(rng, engine, int(rng.integers(2, 5))))
    for chunk in range(num_chunks if captured or world.path == "eager" else 0):
        truth = steps.truth(rng, world)
        engine.set_table(truth.owned)
        layouts = captured or [(each, None) for each in _layouts(rng, engine, -(-number // EAGER_STEPS))]
        which = rng.permutation(np.arange(number) % len(layouts))
        drawn = [
            steps.steps(rng, world, truth, slot, chunk * number + np.flatnonzero(which == i))
            for i, (slot, _) in enumerate(layouts)
        ]
        Sequence(spec, engine, truth, drawn, [meta for _, meta in layouts], tally, layer).run()
    if spec.keep is None and not spec.is_interpreted and rng.random() < ILLEGAL_WORLDS:
        wrong = illegal.run(world, spec.device, tally.illegal, rng)
        tally.wrong |= {name: f"{spec.command()}\n    {name}: {what}" for name, what in wrong.items()}


def _layouts(rng: np.random.Generator, engine: Engine, number: int) -> list[Slot]:
    """Random layouts that the engine's kernels take."""
    drawn = [steps.slot(rng, engine.world) for _ in range(number)]
    return [slot for slot in drawn if engine.takes(slot)] or [Slot("decode", 1, 1, 1, False, 1)]


def _captured(tally: Tally, engine: Engine, slots: list[Slot]) -> list[tuple[Slot, Any]]:
    """The slots that the engine captures, which should be all, and their metadata."""
    metas = [(slot, _legal(tally, 0, partial(engine.capture, slot))) for slot in slots]
    return [(slot, meta) for slot, meta in metas if meta is not None]


def _legal(tally: Tally, number: int, do: Callable[[], Any]) -> Any:
    """What a legal use returns; None if the library refuses it, which is counted, and broken if it raises else."""
    try:
        return do()
    except REFUSALS as error:
        tally.refused[(type(error).__name__, re.sub(r"\d+", "#", str(error)[:200]))] += 1
        return None
    except Malformed as error:
        raise Broken(str(error), number) from error
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise Broken(f"{type(error).__name__} at {where.name}:{where.lineno}: {error}", number) from error


@dataclass
class Sequence:
    """Steps of some layouts, one after the other in random order, and then their metadata against the model."""

    spec: Spec
    engine: Engine
    truth: Truth
    drawn: list[Drawn]
    metas: list[Any]
    tally: Tally
    layer: Attention | None

    def run(self) -> None:
        """Plan, attend and compare all steps."""
        handed = [Handed(self.engine, drawn) for drawn in self.drawn]
        recorders = [Recorder(drawn.group.number) for drawn in self.drawn]
        done: list[list[int]] = [[] for _ in self.drawn]
        first, end = self.spec.keep or (0, 2**31)
        order = sorted(
            (n, i, place) for i, each in enumerate(self.drawn) for place, n in enumerate(each.order.tolist())
        )
        for number, layout, place in order:
            plan = partial(self._plan, number, handed[layout], self.metas[layout], place, recorders[layout])
            if first <= number < end and _legal(self.tally, number, plan):
                done[layout].append(place)
        for drawn, places, recorder in zip(self.drawn, done, recorders, strict=True):
            if places:
                self._compare(drawn, np.array(places), recorder)

    def _plan(self, number: int, handed: Handed, meta: Any, place: int, recorder: Recorder) -> bool:
        if self.spec.path == "eager" and number % EAGER_STEPS == 0:
            idle = self.engine.plan(None, self.engine.idle())
            if any(rows for _, rows in self.engine.forwards(idle, ())):
                raise Malformed("an idle step has query rows", 0)
            self.tally.planned[(*self.spec.cell, "idle")] += 1
        meta, group = self.engine.plan(meta, handed.step(place)), handed.drawn.group
        self.tally.planned[(*self.spec.cell, _label(group) if group.num_real[place] else "idle")] += 1
        ancestors = handed.ancestors(place)
        recorder.add(place, meta, ancestors)
        if self.layer is not None:
            ats = [at for at, _ in self.engine.forwards(meta, ancestors)]
            attend(self.layer, np.random.default_rng(number), self.truth, group, place, ats)
            self.tally.attended[(*self.spec.cell, _label(group))] += 1
        return True

    def _compare(self, drawn: Drawn, places: Any, recorder: Recorder) -> None:
        group, world = drawn.group.take(places), self.engine.world
        try:
            for forward, (plan, writes, tree) in enumerate(recorder.forwards(places)):
                wanted = expected(self.truth, group, forward)
                if world.backend == "dsv4":
                    window = self.engine.backend.window
                    compressed.check_forward(self.truth, group, forward, plan, window, self.engine.rings)
                    found = replace(wanted, writes=writes, sums=np.where(group.is_real, wanted.sums, np.uint64(0)))
                else:
                    found = replace(DECODERS[world.backend](self.truth, group, plan), writes=writes)
                    found = decode.join(self.truth, group, found, *tree) if tree else found
                decode.check_rows(self.truth, group, wanted, found)
                if "block_table" in plan and forward == group.num_forwards - 1:
                    decode.check_over_read(self.truth, plan)
        except Malformed as error:
            what = f"{_label(group)}, {group.num_real[error.step]} of {group.bs} requests, forward {forward}, {world}"
            raise Broken(f"{error}: {what}", int(drawn.order[places[error.step]])) from error
        self._count(group)

    def _count(self, group: Group) -> None:
        world = self.engine.world
        added = group.width * group.num_steps if not group.is_packed else group.widths
        ends = np.where(np.arange(group.bs) < group.num_real[:, None], group.lens + added, 0).max(1)
        pages = -(-ends // world.page_size)
        for name, sizes in (("requests", group.num_real), ("pages of the longest", pages)):
            for size, number in zip(*np.unique(sizes, return_counts=True), strict=True):
                self.tally.sizes[name, str(size)] += int(number)
        self.tally.sizes["page size", str(world.page_size)] += group.number
        self.tally.sizes["to the capacity's last slot", ""] += int((ends == world.max_context + world.draft_room).sum())


def _label(group: Group) -> str:
    form = (" tree" if group.is_tree else " chain") if group.kind in ("draft", "verify") else ""
    return group.kind + form
