"""Fused plans of eager steps of one layout: from the third step on launched as the second one was, by addresses alone.

Fresh buffers lie in one allocation, at the same places for all steps of a layout and an extent. So a launch needs the
addresses of the step's tensors and of the allocation; all else was written down before (`cuda_launch`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from threading import get_ident
from typing import Any

from torch import Tensor

from attn_backends.kernels.devices import is_watched
from attn_backends.kernels.plan_operators import Repeated, StepInputs
from spec_metadata import BoundStep, Buffers, Step

_NUM_INPUTS = len(StepInputs._fields) - 2  # tensors of a step, which are a launch's first arguments
_FIRST = "write_slots"  # a buffer of every plan, from which places in the allocation are counted
MOST_KEPT = 1024
"""Launches that a `KeptPlans` keeps; with one more it begins anew."""

Bind = Callable[[Step, Buffers, BoundStep | None], Callable[[], None]]


PlanAnother = Callable[[Step, Buffers, Bind], None]


class KeptPlans:
    """Launches of a backend's eager plans."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, PlanAnother | None] = {}

    def bind(self, step: Step, buffers: Buffers, bind: Bind, like: Hashable) -> Callable[[], None]:
        """A function that plans a step into fresh buffers. bind: the same for any step. like: what steps share that
        differ in values, addresses and the host's bound alone; None where nothing is to be kept. A launch is a thread's
        own, because it has one place for its parameters.
        """
        key = get_ident(), like, buffers.extent
        kept = self._kept.get(key)
        if kept is not None:
            return partial(kept, step, buffers, bind)
        plan = bind(step, buffers, None)
        if key in self._kept:
            self._kept[key] = _by_addresses(plan, buffers)
        elif like is not None:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[key] = None
        return plan


def _anew(step: Step, buffers: Buffers, bind: Bind) -> None:
    """Plan as the first steps were."""
    bind(step, buffers, None)()


def _by_addresses(plan: Callable[[], None], buffers: Buffers) -> PlanAnother:
    """What launches a plan for another step and buffers, anew where Triton must launch or the plan is none of ours."""
    prepared = plan.prepared() if isinstance(plan, Repeated) else None
    launch = None if prepared is None else prepared.bind_tensors()
    start = buffers[_FIRST].data_ptr()
    if prepared is None or launch is None or not start:  # a buffer of no elements has no address
        return _anew
    outputs = _tensors(prepared.arguments[_NUM_INPUTS:])
    places = [each.data_ptr() - start if each.numel() else 0 for each in outputs]  # nothing is read of no elements

    def plan_another(step: Step, buffers: Buffers, bind: Bind) -> None:
        if is_watched():
            _anew(step, buffers, bind)
            return
        start, inputs = buffers[_FIRST].data_ptr(), StepInputs.of(step, None)[:_NUM_INPUTS]
        launch(*[each.data_ptr() for each in inputs if isinstance(each, Tensor)], *[start + place for place in places])

    return plan_another


def _tensors(arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    """Those of a launch, in tuples too, in the order of its parameters."""
    for each in arguments:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, tuple):
            yield from _tensors(each)
