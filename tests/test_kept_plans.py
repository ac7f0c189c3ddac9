"""Eager plans of a layout that was met twice are launched by addresses, those that a plan bound anew has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.graphs import RecordedGraph
from attn_backends.kernels import kept_plans
from attn_backends.kernels.kept_plans import KeptPlans
from attn_backends.kernels.plan_operators import Repeated
from spec_metadata import BlockTable, RequestTable, Step
from tests.plan_batches import COMPRESSED_KINDS, KINDS, PACKED_KINDS, Case, elsewhere
from tests.planner_laws import FORMS, GARBAGE, RINGS, Form, garbage
from tests.triton_interpreter import interpreted

Parts = tuple[list[int], list[object]]
UNIFORM = [kind for kind in KINDS if kind not in PACKED_KINDS]
CASES = [(name, kind) for name in FORMS for kind in UNIFORM] + [
    (name, kind) for name in ("small", "window alone") for kind in COMPRESSED_KINDS if kind not in PACKED_KINDS
]


def form_of(name: str) -> tuple[int, Form]:
    return (4, FORMS[name]) if name in FORMS else (RINGS[name][0], RINGS[name][1].form)


def parts(arguments: tuple[Any, ...]) -> Parts:
    """Addresses of a launch's tensors, 0 of no elements; and all else that it takes, with their types."""
    found = list(_flat(arguments))
    addresses = [each.data_ptr() for each in found if isinstance(each, Tensor)]
    return addresses, [each.dtype if isinstance(each, Tensor) else each for each in found]


def _flat(arguments: tuple[Any, ...]) -> Iterator[object]:
    for each in arguments:
        yield from _flat(each) if isinstance(each, tuple) else (each,)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Parts]:
    """What kernels are launched with by addresses, where a driver would. A plan is never compiled here."""
    interpreted("triton_plan", "_plan_pages")
    interpreted("triton_plan_compressed", "_plan_compressed")
    from attn_backends.kernels.triton_launch import Launch

    found: list[Parts] = []

    def bind_tensors(self: Launch, variant: object, arguments: tuple[Any, ...]) -> Callable[..., None]:
        others = parts(arguments)[1]
        return lambda *addresses: found.append((list(addresses), others))

    monkeypatch.setattr(Launch, "bind_tensors", bind_tensors)
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("table", [RequestTable, BlockTable])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_step_of_a_known_layout_is_launched_as_one_bound_anew(
    name: str, kind: str, table: type, launched: list[Parts]
) -> None:
    """Argument by argument: the third step's tensors, in its own buffers."""
    page_size, form = form_of(name)
    case, kept = Case(kind, page_size, 1, form=table, has_slots=table is RequestTable), KeptPlans()
    for _ in range(2):
        kept.bind(case.step, garbage(form.specs, case), form.bind, "layout")()
    assert not launched, "the first two are bound"
    third, buffers = elsewhere(case.step), garbage(form.specs, case)
    kept.bind(third, buffers, form.bind, "layout")()
    anew = form.bind(third, buffers, None)
    assert isinstance(anew, Repeated)
    wanted, others = parts(anew.prepared().arguments)
    if buffers["write_slots"].numel() == 0:  # a draft of one step, which has no forward
        assert not launched, "buffers of no elements have no address"
        return
    ((addresses, as_bound),) = launched
    assert as_bound == others
    assert [a for a, b in zip(addresses, wanted, strict=True) if b] == [b for b in wanted if b]


def bind_never(*place: object) -> Callable[[], None]:
    raise AssertionError("a step of a known layout is not bound")


def test_what_differs_in_layout_extent_or_thread_has_a_launch_of_its_own(launched: list[Parts]) -> None:
    """A launch has one place for its parameters, which two threads would write at once."""
    form, kept, binds = FORMS["ragged"], KeptPlans(), list[Step]()

    def bind(step: Step, *place: Any) -> Callable[[], None]:
        binds.append(step)
        return form.bind(step, *place)

    def plan(case: Case, like: object = "layout") -> int:
        binds.clear()
        kept.bind(case.step, garbage(form.specs, case), bind, like)()
        return len(binds)

    case = Case("decode", 4, 0, context=9)
    assert [plan(case) for _ in range(4)] == [1, 1, 0, 0]
    assert plan(case, "another") == 1
    assert plan(Case("decode", 4, 0, context=90)) == 1, "another extent"
    assert [plan(case, None) for _ in range(3)] == [1, 1, 1], "nothing is kept of no layout"
    others = list[int]()
    thread = Thread(target=lambda: others.extend(plan(case) for _ in range(3)))
    thread.start()
    thread.join()
    assert others == [1, 1, 0]
    assert plan(case) == 0


def test_no_more_launches_are_kept_than_is_said(monkeypatch: pytest.MonkeyPatch, launched: list[Parts]) -> None:
    monkeypatch.setattr(kept_plans, "MOST_KEPT", 2)
    form, kept, case = FORMS["ragged"], KeptPlans(), Case("decode", 4, 0)
    for like in range(5):
        for _ in range(2):
            kept.bind(case.step, garbage(form.specs, case), form.bind, like)
        assert len(kept._kept) <= 2
    kept.bind(case.step, garbage(form.specs, case), bind_never, 4)


def test_what_triton_must_launch_is_bound_anew(monkeypatch: pytest.MonkeyPatch, launched: list[Parts]) -> None:
    """And is asked about once."""
    from attn_backends.kernels.triton_launch import Launch

    asked = list[object]()
    monkeypatch.setattr(Launch, "bind_tensors", lambda self, variant, arguments: asked.append(variant))
    form, kept, case = FORMS["ragged"], KeptPlans(), Case("verify chain", 4, 0)
    first, *others = [garbage(form.specs, case) for _ in range(4)]
    for buffers in (first, *others):
        kept.bind(case.step, buffers, form.bind, "layout")()
    assert len(asked) == 1
    assert all(torch.equal(buffers[name], first[name]) for buffers in others for name in first)


def test_a_plan_that_somebody_is_to_see_runs_as_its_operator(launched: list[Parts]) -> None:
    form, kept, case = FORMS["ragged"], KeptPlans(), Case("verify chain", 4, 0)
    for _ in range(2):
        kept.bind(case.step, garbage(form.specs, case), form.bind, "layout")()
    buffers = garbage(form.specs, case)
    plan, graph = kept.bind(case.step, buffers, form.bind, "layout"), RecordedGraph()
    graph.capture(plan)
    planned = {name: buffer.clone() for name, buffer in buffers.items()}
    for buffer in buffers.values():
        buffer.fill_(GARBAGE)
    graph.replay()
    assert not launched
    assert all(torch.equal(buffer, planned[name]) for name, buffer in buffers.items())
