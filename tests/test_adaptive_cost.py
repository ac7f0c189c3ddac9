"""The cost model of steps that adapt: what it plays is what was measured."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attn_backends import results
from training import adaptive
from training.adaptive import STEPS, PlayedRow, cycle_ms, missed, play, simulate

ROWS = [
    {"batch_size": bs, "width": width, "target_ms": 5 + max(bs * width - 64, 0) * 0.03, "draft_ms": 0.3}
    for bs in (1, 8, 32, 128)
    for width in (1, *(n + 1 for n in STEPS))
]


def trace(rate: float) -> list[int]:
    """Drafts that are each accepted at a rate, where the one before was."""
    rng = random.Random(3)
    return [next(n for n in range(8) if n == 7 or rng.random() > rate) for _ in range(300)]


TRACES = {"predictable": trace(0.7), "random": trace(0.1)}


def test_the_cost_of_a_cycle_is_that_of_its_forwards() -> None:
    costs = cycle_ms(ROWS, STEPS)
    assert costs[1] == pytest.approx([5.3, 5.9, 6.5, 7.1])
    assert costs[128][1] == pytest.approx(2 * 0.3 + 5 + (128 * 4 - 64) * 0.03 + 0.3)


def test_tokens_per_second_of_a_trace_that_is_known() -> None:
    costs = {1: (10.0, 20.0, 30.0, 40.0)}
    assert play(costs, {"all": [7]}, [(1, "all", 80)], 3) == pytest.approx(8 / 0.04)
    assert play(costs, {"none": [0]}, [(1, "none", 80)], 0) == pytest.approx(1 / 0.01)


def test_what_a_cycle_accepted_is_observed_once_the_next_is_chosen() -> None:
    calls: list[str] = []
    policy: Any = SimpleNamespace(
        choose=lambda bs: calls.append("choose") or 0, observe=lambda *_: calls.append("observe")
    )
    play({1: (10.0,)}, {"none": [0]}, [(1, "none", 3)], policy)
    assert calls == ["choose", "choose", "observe", "choose", "observe"]


def test_adaptive_steps_are_near_the_best_at_each_batch_and_beat_any_over_a_change() -> None:
    played = simulate(ROWS, TRACES)
    assert missed(played) == []
    assert len(played) == 2 * 4 + 1
    slow = PlayedRow("batch 1", {1: 1.0}, 0.9, 0.9), PlayedRow("all", {1: 1.0}, 1.04, 1.04)
    assert missed(slow) == ["batch 1: 0.9, not 0.95", "all: 1.04, not 1.05"]


def test_what_is_committed_is_what_was_measured() -> None:
    folder = Path(__file__).parent.parent / "docs" / "results"
    times, traces = (results.read(folder / name).rows for name in ("h200/adaptive_times.json", "adaptive_traces.json"))
    accepted = {row["text"]: [int(digit) for digit in row["accepted"]] for row in traces}
    rows = results.read(folder / "adaptive.json").rows
    committed = [PlayedRow(**row | {"fixed": {int(n): speed for n, speed in row["fixed"].items()}}) for row in rows]
    assert list(simulate(times, accepted)) == committed
    assert missed(committed) == []


def test_the_command_simulates_what_was_measured(tmp_path, monkeypatch) -> None:
    times, traces, out = (tmp_path / name for name in ("times.json", "traces.json", "adaptive.json"))
    results.write(times, results.head(["times"]), ROWS)
    texts = [{"text": name, "accepted": "".join(map(str, trace))} for name, trace in TRACES.items()]
    results.write(traces, results.head(["traces"]), texts)
    monkeypatch.setattr("sys.argv", ["adaptive", "--json", str(out), str(times), str(traces)])
    assert adaptive.main() == 0
    assert results.read(out).rows[-1]["ratio"] >= adaptive.GAIN
