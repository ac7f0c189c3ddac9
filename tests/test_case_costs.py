"""What cases cost: measured apart from each other, and the table of a page is that of the committed file."""

from __future__ import annotations

import sys
import time
from datetime import date
from pathlib import Path

import pytest
import torch

from attn_backends.conformance import Selection
from attn_backends.results import read
from tests import case_costs

ROOT = Path(__file__).parent.parent
FILE = ROOT / "docs" / "results" / "case_costs.json"


def test_a_group_is_one_row_of_its_cases(monkeypatch):
    monkeypatch.setattr(case_costs, "run_case", lambda subject, case: None)
    (row,) = case_costs.rows(["fa3", "reference"], Selection("math.decode", quick=True))
    assert (row["group"], row["cases"]) == ("math", 6)
    assert row["slowest"] <= row["seconds"] < 1
    assert row["case"].startswith(("fa3 math.decode", "reference math.decode"))


@pytest.mark.parametrize(
    ("spends", "code"),
    [(lambda: None, 0), (lambda: time.sleep(0.3), 0), (lambda: spin(0.3), 1)],
    ids=["nothing", "waits", "computes"],
)
def test_a_case_that_costs_too_much_fails(spends, code, monkeypatch, tmp_path, capsys):
    """Of CPU time alone."""
    monkeypatch.setattr(case_costs, "run_case", lambda subject, case: spends())
    monkeypatch.setattr(case_costs, "SECONDS", 0.2)
    file = tmp_path / "costs.json"
    monkeypatch.setattr(sys, "argv", ["case_costs", "--json", str(file), "--select", "api.idle", "--quick", "fa3"])
    assert case_costs.main() == code
    monkeypatch.setattr(sys, "argv", ["case_costs", "--json", str(file), "--table"])
    assert case_costs.main() == code
    assert capsys.readouterr().out.count("| api | 2 | ") == 2


def spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        torch.zeros(1000).sum()


def test_memory_is_that_of_the_case(monkeypatch):
    """A case that fills 400 MB holds at least 350 more than one that does nothing."""
    held = {}
    for size in (1, 400 << 20):
        monkeypatch.setattr(
            case_costs, "run_case", lambda subject, case, size=size: torch.ones(size, dtype=torch.uint8)
        )
        (row,) = case_costs.rows(["fa3"], Selection("api.idle", quick=True))
        held[size] = row["most_mb"]
    assert held[400 << 20] - held[1] >= 350


def test_the_page_has_the_table_of_the_committed_file():
    found, day = [dict(row) for row in read(FILE).rows], date.fromisoformat(read(FILE).head.date)
    page = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    assert case_costs.table(found) in page
    assert f"on {day.day} {day:%B}, on all five backends" in page
    assert all(row["slowest"] < case_costs.SECONDS and row["most_mb"] < case_costs.MEGABYTES for row in found)
