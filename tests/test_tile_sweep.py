"""The sweep of tiles goes on where it stopped, tells gains over what rules take, and names entries that never win."""

from __future__ import annotations

import pytest
import torch

from tests import tile_sweep as sweep

CPU = torch.device("cpu")


@pytest.fixture
def timed(monkeypatch):
    """Shapes that were timed: every entry takes 10 us, the last of each line 9 us with one request."""
    timed = []

    def times(line, shape, stage):
        timed.append(shape)
        entries = [str(tuple(entry)) for entry in (*line.entries, *line.more)]
        return dict.fromkeys(entries, 10.0) | {entries[-1]: 9.0 if shape[2] == 1 else 10.0}

    monkeypatch.setattr(sweep, "_times", times)
    return timed


def test_it_goes_on_where_it_stopped(timed):
    rows = sweep.rows([], 1e9, CPU)
    first = [next(rows), next(rows)]
    others = list(sweep.rows(first, 1e9, CPU))
    assert len(timed) == 2 + len(others) == sum(len(line.shapes) for line in sweep.LINES.values())
    assert not list(sweep.rows([*first, *others], 1e9, CPU))
    assert not list(sweep.rows(first, -1.0, CPU))


def test_entries_that_never_win_are_named(timed):
    said = list(sweep.summary(list(sweep.rows([], 1e9, CPU)), CPU))
    assert len(said) == sum(len(line.entries) + len(line.more) for line in sweep.LINES.values())
    wins = [line.split(" wins")[0] for line in said if " wins: 1.111 of" in line]
    assert wins == [
        "decode, latents: (16, 64, 4, 2, 0)",
        "decode, keys and values: (16, 128, 4, 2, 0)",
        "prompts, latents: (16, 16, 4, 1, 0)",
        "prompts, keys and values: (128, 128, 8, 2, 0)",
        "sparse rows: (32, 64, 4, 2)",
    ]
    assert sum("NEVER 5 % faster" in line for line in said) == len(said) - len(wins)


def test_what_a_rule_takes_is_an_entry_of_its_line():
    for name, line in sweep.LINES.items():
        for shape in line.shapes:
            assert sweep.chosen_here(name, shape, CPU) in [str(tuple(entry)) for entry in line.entries], (name, shape)


def test_an_entry_is_taken_in_place_of_the_rules(monkeypatch):
    """Of a compressed line, on a CPU: the rule's module gives the entry while it is captured, and its own after."""
    line, taken = sweep.LINES["sparse rows"], []

    def capture(call, caches, stage):
        taken.append(line.module.choose_blocks(64, torch.bfloat16, 2**18))
        raise RuntimeError("no GPU")

    monkeypatch.setattr(sweep, "capture", capture)
    monkeypatch.setattr(sweep, "take_turns", lambda *given: [])
    problem = type("Problem", (), {"pool": type("Pool", (), {"caches": ()}), "call": lambda *given: None})
    monkeypatch.setattr(sweep, "_problem", lambda *given: problem())
    stage = sweep.Stage(CPU, None, None, 1)
    assert set(sweep._times(line, (64, 1, 1, 64), stage).values()) == {None}
    assert taken == [*line.entries, *line.more]
    assert line.module.choose_blocks(64, torch.bfloat16, 2**18) == line.entries[0]
