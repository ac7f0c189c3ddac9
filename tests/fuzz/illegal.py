"""Illegal steps and uses, of two kinds.

What the host can see (types, shapes, host bounds, metadata that is stale or another engine's) must be refused in the
library's own errors, before anything is written. Values on the device are refused in checking mode; outside of it they
may do anything but write outside the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tests.fuzz import steps
from tests.fuzz.driver import REFUSALS, Attention, Engine, Handed
from tests.fuzz.steps import World

Parts = dict[str, Any]
Change = Callable[[Parts, Engine], Parts | None]


def _tensor(name: str, change: Callable[[Any], Any]) -> Change:
    """Change one part of steps that have it."""
    return lambda p, e: None if p[name] is None else p | {name: change(p[name])}


def _packed(change: Callable[[Parts], Parts]) -> Change:
    return lambda p, e: None if p["starts"] is None else p | change(p)


def _uniform(kinds: tuple[str, ...], change: Callable[[Parts], Parts]) -> Change:
    return lambda p, e: p | change(p) if p["kind"] in kinds else None


HOST: dict[str, Change] = {
    "seq_lens of floats": _tensor("lens", lambda x: x.float()),
    "seq_lens of two dimensions": _tensor("lens", lambda x: x[:, None]),
    "seq_lens of another batch": _tensor("lens", lambda x: x.repeat(2)),
    "seq_lens as a list": _tensor("lens", lambda x: x.tolist()),
    "rows of floats": _tensor("rows", lambda x: x.float()),
    "rows as a list": _tensor("rows", lambda x: x.tolist()),
    "a table of floats": _tensor("table", lambda x: x.float()),
    "a table of one dimension": _tensor("table", lambda x: x[0]),
    "no table": _tensor("table", lambda x: None),
    "slots too few": _tensor("slots", lambda x: x[:-1]),
    "slots of floats": _tensor("slots", lambda x: x.double()),
    "slots of two dimensions": _tensor("slots", lambda x: x[:, None]),
    "slots as a list": _tensor("slots", lambda x: x.tolist()),
    "a mask of integers": _tensor("mask", lambda x: x.int()),
    "a mask of another width": _tensor("mask", lambda x: x[:, :, 1:]),
    "starts of int64": _tensor("starts", lambda x: x.long()),
    "starts too few": _tensor("starts", lambda x: x[1:]),
    "a request without rows": _packed(lambda p: {"widths": (0, *p["widths"][1:])}),
    "widths of another batch": _packed(lambda p: {"widths": (*p["widths"], 1)}),
    "device widths of floats": _tensor("asked", lambda x: x.float()),
    "device widths too few": _tensor("asked", lambda x: x[1:]),
    "no room for the roots": lambda p, e: None if p["asked"] is None else p | {"num_tokens": len(p["asked"]) - 1},
    "no query rows": _uniform(("verify", "extend"), lambda p: {"width": 0, "slots": None}),
    "no draft steps": _uniform(("draft",), lambda p: {"num_steps": 0, "slots": None}),
    "max_committed below 0": lambda p, e: p | {"max_committed": -1, "lens_cpu": None},
    "lens_cpu as a tensor": lambda p, e: p | {"lens_cpu": p["lens"]},
    "lens_cpu too few": lambda p, e: p | {"lens_cpu": p["lens"].tolist()[1:]},
    "lens_cpu below 0": lambda p, e: p | {"lens_cpu": [-1] * len(p["widths"])},
    "lens_cpu over max_committed": lambda p, e: p | {"lens_cpu": [5] * len(p["widths"]), "max_committed": 4},
    "lens_cpu over the capacity": lambda p, e: p | {
        "lens_cpu": [e.world.max_pages * e.world.page_size] * len(p["widths"]), "max_committed": None,
    },
    "a table narrower than the step": lambda p, e: p | {
        "table": p["table"][:, :0], "max_committed": None,
    },
    "another page size": lambda p, e: p | {"geometry": replace(p["geometry"], page_size=e.world.page_size + 1)},
    "a reserved row that is none": lambda p, e: None if p["rows"] is None else p | {
        "geometry": replace(p["geometry"], reserved_row=e.world.num_rows),
    },
}  # fmt: skip


def _first(x: Any, value: int) -> Any:
    changed = x.clone()
    changed.reshape(-1)[:1] = value
    return changed


DEVICE: dict[str, Change] = {
    "seq_lens below 0": lambda p, e: None if p["slots"] is None else p | {
        "lens": _first(p["lens"], -3), "lens_cpu": None, "max_committed": None,
    },
    "seq_lens over the capacity": lambda p, e: None if p["slots"] is None else p | {
        "lens": _first(p["lens"], e.world.max_pages * e.world.page_size + 1), "lens_cpu": None, "max_committed": None,
    },
    "seq_lens over max_committed": lambda p, e: p | {
        "lens": _first(p["lens"], 3), "lens_cpu": None, "max_committed": 2,
    },
    "lens_cpu of other lengths": lambda p, e: p | {
        "lens": _first(p["lens"], 2), "lens_cpu": [3, *p["lens"].tolist()[1:]], "max_committed": None,
    },
    "a row outside the table": lambda p, e: None if p["rows"] is None or p["slots"] is None else p | {
        "rows": _first(p["rows"], e.world.num_rows + 7),
    },
    "a slot below 0": _tensor("slots", lambda x: _first(x, -1)),
    "a slot outside the pool": lambda p, e: None if p["slots"] is None else p | {
        "slots": _first(p["slots"], e.world.num_pages * e.world.page_size + 1),
    },
    "a slot of the reserved page": lambda p, e: None if p["slots"] is None else p | {
        "slots": _first(p["slots"], e.world.reserved_page * e.world.page_size),
    },
    "a slot written twice": lambda p, e: None if p["slots"] is None or len(p["slots"]) < 2 else p | {
        "slots": _first(p["slots"], int(p["slots"][-1])),
    },
    "starts that do not rise": lambda p, e: None if p["starts"] is None or p["slots"] is None else p | {
        "starts": _first(p["starts"].flip(0), 1),
    },
    "a device width of 0": _tensor("asked", lambda x: _first(x, 0)),
    "a device width over its bound": lambda p, e: None if p["asked"] is None else p | {
        "asked": _first(p["asked"], p["width"] + 1),
    },
    "a mask that sees nothing": _tensor("mask", lambda x: x & False),
    "a mask that sees later nodes": _tensor("mask", lambda x: x | True),
    "a mask of nodes that do not see themselves": _tensor("mask", lambda x: x.tril(-1)),
    "a mask of a node that does not see the root": lambda p, e: _without(p, 0),
    "a mask of a node that does not see what its parent sees": lambda p, e: _without(p, 1),
    "a row of no whole pages": lambda p, e: _moved(p),
    "a visible token of the reserved page": lambda p, e: _committed(p, e.world.reserved_page),
    "one page twice": lambda p, e: None if e.world.page_size * 2 > 16 else _committed(p, None),
}  # fmt: skip


def _without(p: Parts, ancestor: int) -> Parts | None:
    """A mask of chains in which the last node of the first request does not see an ancestor that its parent sees."""
    if p["mask"] is None or p["mask"].shape[1] < ancestor + 3:
        return None
    mask = (p["mask"] | True).tril()
    mask[0, -1, ancestor] = False
    return p | {"mask": mask}


def _same(ancestors: Any) -> Any:
    return ancestors


PATHS: dict[str, Callable[[Any], Any]] = {
    "ancestors below 0": lambda x: _first(x, -1),
    "ancestors that are no branches": lambda x: _first(x, 99),
    "ancestors of another branch": lambda x: x.flip(1),
}
"""Wrong values of the ancestors of a drafted tree."""


def _moved(p: Parts) -> Parts | None:
    """A request table whose first request has its first two tokens, which are committed, in each other's slots."""
    if p["rows"] is None or p["geometry"].page_size < 2 or int(p["lens"][0]) < 2:
        return None
    table, row = p["table"].clone(), int(p["rows"][0])
    table[row, :2] = table[row, :2].flip(0)
    return p | {"table": table}


def _committed(p: Parts, page: int | None) -> Parts | None:
    """A block table whose first page, of committed tokens, is another one; None: its second, which is not written."""
    size, length = p["geometry"].page_size, int(p["lens"][0])
    if p["rows"] is not None or length < 2 * size:
        return None
    table = p["table"].clone()
    table[0, 0] = int(table[0, 1]) if page is None else page
    return p | {"table": table}


class Scene:
    """An engine of a world, a step of it that is legal, and a captured slot that takes it."""

    def __init__(self, world: World, device: str, rng: np.random.Generator, *, checking: bool) -> None:
        self.world = replace(world, row_tokens=world.max_pages * world.page_size, path="eager", attends=True)
        self.engine, truth = Engine(self.world, device, "torch", checking=checking), steps.truth(rng, self.world)
        self.engine.set_table(truth.owned)
        self.slot = steps.slot(rng, replace(self.world, path="replay"))
        self.handed = Handed(self.engine, steps.steps(rng, self.world, truth, self.slot, np.arange(1)))
        self.layer = Attention(self.engine, rng)
        self.meta = self.engine.capture(self.slot)

    def plan(self, parts: Parts, meta: Any = None) -> Any:
        """Plan a step of parts, eagerly or into captured metadata."""
        return self.engine.plan(meta, self.engine.build(parts))

    def paths(self) -> dict[str, Callable[[Any], Any]]:
        """The wrong values of ancestors, if the step has any."""
        return PATHS if self.handed.ancestors(0) else {}

    def attend(self, meta: Any, change: Callable[[Any], Any] = _same) -> None:
        """Store and attend all forwards of what was planned. change: of the ancestors of a drafted tree."""
        heads, kv_heads, dim, v_dim = self.layer.sizes
        rng = np.random.default_rng(0)
        for at, num in self.engine.forwards(meta, tuple(map(change, self.handed.ancestors(0)))):
            new = [self.layer.random(rng, num, kv_heads, size)[0] for size in (dim, v_dim)[: len(self.layer.pools)]]
            self.layer.run(at, self.layer.random(rng, num, heads, dim)[0], new)

    def written(self) -> list[Any]:
        """Everything that may be written."""
        return [*self.layer.contents(), *self.engine.contents(self.meta)]


def run(world: World, device: str, counted: Counter[tuple[str, ...]], rng: np.random.Generator) -> dict[str, str]:
    """Try all classes on random steps of a world; what became of those that did not end as they must, by class."""
    outcomes = [("host", *each) for each in _host(Scene(world, device, rng, checking=False))]
    outcomes += [("checking", *each) for each in _checking(Scene(world, device, rng, checking=True))]
    if device == "cpu":  # on a GPU an index outside of a tensor stops the process, in torch's own operators
        outcomes += [("plain", *each) for each in _plain(world, device, rng)]
    for kind, name, outcome in outcomes:
        counted[kind, name, outcome.split(":")[0]] += 1
    ended = {"host": "refused", "checking": "refused", "plain": "kept"}
    return {
        f"{kind}, {name}": f"{outcome}, {world}"
        for kind, name, outcome in outcomes
        if not outcome.startswith(ended[kind])
    }


def _outcome(do: Callable[[], Any], written: Callable[[], list[Any]]) -> str:
    before = written()
    try:
        do()
    except REFUSALS:
        same = all(np.array_equal(a, b) for a, b in zip(before, written(), strict=True))
        return "refused" if same else "written: and then refused"
    except Exception as error:
        return f"raised: {type(error).__name__}: {error}"
    return "accepted: nothing was refused"


def _host(scene: Scene) -> Iterator[tuple[str, str]]:
    legal = scene.handed.parts(0)
    for name, change in HOST.items():
        if changed := change(legal, scene.engine):
            for where, meta in (("eagerly", None), ("replayed", scene.meta)):
                yield f"{name}, {where}", _outcome(partial(scene.plan, changed, meta), scene.written)
    for name, use in USES.items():
        yield name, _outcome(partial(use, scene), scene.layer.contents)


def _checking(scene: Scene) -> Iterator[tuple[str, str]]:
    for name, change in DEVICE.items():
        if changed := change(scene.handed.parts(0), scene.engine):
            for where, meta in (("eagerly", None), ("replayed", scene.meta)):
                yield f"{name}, {where}", _outcome(partial(scene.plan, changed, meta), scene.written)
    for name, change in scene.paths().items():
        for where, meta in (("eagerly", None), ("replayed", scene.meta)):
            planned = scene.plan(scene.handed.parts(0), meta)
            yield f"{name}, {where}", _outcome(partial(scene.attend, planned, change), scene.written)


def _plain(world: World, device: str, rng: np.random.Generator) -> Iterator[tuple[str, str]]:
    scene = Scene(world, device, rng, checking=False)
    legal, before = scene.handed.parts(0), scene.layer.guards()
    changed = [(name, change(legal, scene.engine), _same) for name, change in DEVICE.items()]
    changed += [(name, legal, change) for name, change in scene.paths().items()]
    for name, parts, change in changed:
        if parts:
            outcome = "kept"
            try:
                scene.attend(scene.plan(parts), change)
            except Exception as error:
                outcome = f"kept, and raised {type(error).__name__}"
            same = all(np.array_equal(a, b) for a, b in zip(before, scene.layer.guards(), strict=True))
            yield name, outcome if same else "written: outside of the pool"


def _stale(scene: Scene) -> None:
    meta = scene.engine.capture(scene.slot)
    scene.engine.capture(scene.slot)
    scene.attend(meta)


def _foreign(scene: Scene) -> None:
    """Of a larger capacity: what fits there may not fit here."""
    more, parts = scene.world.page_size, scene.handed.parts(0)
    world = replace(scene.world, max_context=scene.world.max_context + more, row_tokens=scene.world.row_tokens + more)
    other = Engine(world, scene.engine.device.type, "torch")
    table = parts["table"] if parts["rows"] is None else other.table
    known = {"lens_cpu": parts["lens"].tolist(), "max_committed": int(parts["lens"].max())}
    scene.attend(other.plan(None, other.build(parts | known | {"table": table})))


def _foreign_replayed(scene: Scene) -> None:
    other = Engine(scene.world, scene.engine.device.type, "torch")
    scene.engine.plan(other.capture(scene.slot), scene.handed.step(0))


def _eager_replayed(scene: Scene) -> None:
    scene.engine.plan(scene.plan(scene.handed.parts(0)), scene.handed.step(0))


USES: dict[str, Callable[[Scene], object]] = {
    "stale metadata": _stale,
    "metadata of another instance": _foreign,
    "captured metadata of another instance": _foreign_replayed,
    "eager metadata replayed": _eager_replayed,
    "a bucket of too many requests": lambda s: s.engine.capture_kind("decode", s.world.max_bs + 1, 1),
    "a bucket of no requests": lambda s: s.engine.capture_kind("decode", 0, 1),
    "a decode bucket of 2 rows": lambda s: s.engine.capture_kind("decode", 1, 2),
    "a verify bucket of 5000 rows": lambda s: s.engine.capture_kind("verify", 1, 5000),
    "an idle bucket": lambda s: s.engine.capture_kind("idle", 1, 1),
}
