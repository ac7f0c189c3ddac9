"""A replay, traced call by call: how many modules it passes through, and how many of them it returns to.

The replay of a uniform step like one before, planned by the fused planner as on a GPU. A place is a module of ours that
is called into, whose calls in a row are one stay; a return is a stay in a module that was left before. Launches end the
trace: here they do nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import FrameType

import pytest

import attn_backends
import spec_metadata
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.kernels.triton_launch import Launch
from spec_metadata import BlockTable, RequestTable, StepKind
from tests.test_replay_sequences import CAPACITY, GEOMETRY, KINDS, Engine, fused

__all__ = ["fused"]  # a fixture
MOST_PLACES, MOST_RETURNS = 8, 2
ROOTS = [Path(str(package.__file__)).parent for package in (attn_backends, spec_metadata)]


def stays(call: Callable[[], None]) -> list[str]:
    """The modules that a call passes through, in order."""
    entered: list[str] = []

    def look(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and any(Path(frame.f_code.co_filename).is_relative_to(root) for root in ROOTS):
            entered.append(frame.f_code.co_filename)

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [Path(name).stem for name, _ in groupby(entered)]


@pytest.mark.parametrize("form", [RequestTable, BlockTable])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not StepKind.PREFILL])
@pytest.mark.usefixtures("fused")
def test_a_replay_goes_one_way(kind: StepKind, form: type, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(form)
    backend = FA3Backend(CAPACITY, GEOMETRY, kernel="torch", planner="fused")
    bucket = engine.bucket(kind)
    meta = backend.capture(bucket, engine.paging([0]))
    step = engine.step(bucket)
    monkeypatch.setattr(Launch, "bind", lambda self, variant, fixed: lambda *moving: None)
    for _ in range(2):
        backend.replay(meta, step)
    found = stays(lambda: backend.replay(meta, step))
    places = set(found)
    assert found[0] == "backend"
    assert (len(places) <= MOST_PLACES, len(found) - len(places) <= MOST_RETURNS) == (True, True), found
