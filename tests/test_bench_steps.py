"""`benchmarks.steps` makes the steps that it says, and sees what they cost. No time is asserted."""

from __future__ import annotations

import torch

from benchmarks import steps as bench
from spec_metadata import StepKind

CPU = torch.device("cpu")


def test_a_cycle_has_three_steps_however_they_are_made():
    for (table, slots, bounds), make in bench.cycles(2, CPU):
        made = make()
        assert [step.kind for step in made] == [
            StepKind.DRAFT_DECODE,
            StepKind.TARGET_VERIFY,
            StepKind.DRAFT_EXTEND,
        ]
        for step in made:
            assert type(step.paging).__name__.lower() == f"{table}table"
            assert (step.out_cache_loc is None) == (slots == "left out")
            assert (step.max_committed is None) == (bounds == "none")
            assert (step.seq_lens_cpu is None) == (bounds != "seq_lens_cpu")


def test_rows_tell_operators_and_time_a_loop_along(monkeypatch):
    monkeypatch.setattr(bench, "HOT_ROUNDS", 1)
    rows = bench.measured(2, CPU, 1)
    assert len(rows) == len(list(bench.cycles(2, CPU))) + 1
    assert [row.table for row in rows].count("calibration") == 1
    assert not any(row.operators for row in rows)
    cheap = bench.StepsRow("request", "given", "none", 2, 15.0, 9.0, 0)
    assert not cheap.misses
    assert bench.StepsRow("request", "given", "none", 2, 15.1, 9.0, 0).misses
    assert bench.StepsRow("request", "given", "none", 2, 1.0, 1.0, 1).misses
    assert not bench.StepsRow("calibration", "", "", 2, 300.0, 280.0, 0).misses


def test_operators_are_counted():
    with bench.Operators() as operators:
        torch.ones(2) + 1
    assert operators.num == 2
