"""The hot path: how many lines it has, and how many files a replay passes through."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from statistics import median
from types import FrameType

import torch

from attn_backends import get_backend
from spec_metadata import CacheGeometry, Capacity, RequestTable, Step, StepKind
from tests import hot_path

CEILING, MEDIAN, MAX_STAYS, MAX_RETURNS = 4028, 8, 8, 2
ROOT = Path(hot_path.__file__).parent.parent


def test_the_hot_path_does_not_grow():
    now = sum(hot_path.total(places) for _, places in hot_path.THEN.values())
    assert now <= CEILING, "python -m tests.hot_path"
    assert sum(map(hot_path.total, hot_path.SINCE.values())) > 0, "what came since has other names now"
    assert median(hot_path.functions()) <= MEDIAN


def test_a_replay_passes_through_few_files_and_returns_to_fewer():
    """Of a step like the one before; without the planner, which is a launch on a GPU."""
    capacity = Capacity(max_bs=4, max_context=100, page_size=16, topk=1, num_steps=3, num_draft_tokens=4)
    geometry = CacheGeometry(num_pages=64, page_size=16)
    table = torch.arange(5 * capacity.max_pages * 16, dtype=torch.int32).view(5, -1)
    backend, paging = get_backend("fa3")(capacity, geometry), RequestTable(table, torch.tensor([1, 2]), geometry)
    meta = backend.capture(capacity.bucket(StepKind.TARGET_VERIFY, 4), paging)
    step = Step.target_verify(4, torch.tensor([5, 90]), paging)
    backend.replay(meta, step)
    assert meta.captured is not None
    meta.captured.copy_inputs = lambda step: None
    object.__setattr__(meta, "write", lambda: None)
    called = list[str]()

    def trace(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and "tests" not in path.parts:
            called.append(path.name)

    sys.setprofile(trace)
    try:
        backend.replay(meta, step)
    finally:
        sys.setprofile(None)
    stays = [file for file, _ in groupby(called)]
    assert called[0] == "backend.py"
    assert len(stays) <= MAX_STAYS, stays
    assert len(stays) - len(set(stays)) <= MAX_RETURNS, stays
