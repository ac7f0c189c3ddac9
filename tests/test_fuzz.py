"""The fuzzer finds what is wrong, and nothing where all is right."""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from attn_backends import backend as base
from attn_backends.selection import providers
from tests.fuzz import __main__ as command
from tests.fuzz import driver, illegal, run, steps
from tests.fuzz.mutants import MUTANTS, batches_until_found
from tests.fuzz.run import Spec, Tally

FOLDER = Path(run.__file__).parent
HOST = [*(f"{name}, {where}" for name in illegal.HOST for where in ("eagerly", "replayed")), *illegal.USES]
DEVICE = [*illegal.DEVICE, *illegal.PATHS]
CLASSES = [
    *(f"host, {name}" for name in HOST),
    *(f"checking, {name}, {where}" for name in DEVICE for where in ("eagerly", "replayed")),
    *(f"plain, {name}" for name in DEVICE),
]
BACKENDS_TRIED = 4 * steps.BACKENDS


@pytest.fixture(autouse=True)
def _planners_as_they_were(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fuzzer lets its process run fused planners in the interpreter; other tests must not see that."""
    monkeypatch.setattr(providers, "runs_on_triton", providers.runs_on_triton)
    monkeypatch.setattr(base, "bind_inputs", base.bind_inputs)
    yield
    driver.interpret_fused_planners.cache_clear()


def found(cell: tuple[str, str, str]) -> Tally:
    """What some worlds found; of a planner that Triton's interpreter runs, one."""
    tally = Tally()
    for number in range(1 if cell[1] == "fused" else 4):
        tally.add(run.run(Spec(5, number, *cell)))
    return tally


@pytest.mark.parametrize("cell", steps.CELLS, ids="-".join)
def test_the_library_is_what_the_model_says_and_no_legal_step_is_refused(cell: tuple[str, str, str]) -> None:
    tally = found(cell)
    assert tally.mismatches == []
    assert not tally.refused
    assert tally.planned.total() > 0


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, cell = MUTANTS[name]
    plant(monkeypatch)
    assert batches_until_found(cell) is not None, f"not in {cell}: {plant.__doc__}"


@pytest.fixture(scope="module")
def wrong() -> tuple[dict[str, str], set[str]]:
    """The illegal classes that did not end as they must, and those that were tried."""
    found, counted = {}, Counter[tuple[str, ...]]()
    for (number, backend), seed in product(enumerate(BACKENDS_TRIED), (1, 2)):
        rng = np.random.default_rng([seed, number])
        found |= illegal.run(steps.world(rng, backend, "torch", "eager"), "cpu", counted, rng)
    return found, {f"{kind}, {name}" for kind, name, _ in counted}


@pytest.mark.parametrize("name", CLASSES)
def test_an_illegal_class_ends_as_it_must(name: str, wrong: tuple[dict[str, str], set[str]]) -> None:
    assert name in wrong[1], "it was not tried: give BACKENDS_TRIED more"
    assert name not in wrong[0], wrong[0].get(name)


def test_a_mismatch_is_told_by_a_command_that_shows_it(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path) -> None:
    plant, cell = MUTANTS["pages_lie_one_further"]
    plant(monkeypatch)
    only = ["--backend", cell[0], "--planner", cell[1], "--path", cell[2]]
    result = tmp_path / "result.json"
    assert command.main(["--seed", "3", "--batches", "500", *only, "--json", str(result)]) == 1
    told = json.loads(result.read_text())["mismatches"][0].splitlines()[0].split()
    assert "--keep" in told
    capsys.readouterr()
    assert command.main(told[3:]) == 1
    assert "1 mismatches" in capsys.readouterr().out


def test_one_file_knows_the_library() -> None:
    """And beside it what writes results, and the mutants, which are put into it."""
    knows = {}
    for path in FOLDER.glob("*.py"):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        parts = {str(node.module).split(".")[0] for node in nodes}
        knows[path.name] = parts & {"attn_backends", "spec_metadata"}
    assert {name for name, found in knows.items() if found} == {"driver.py", "mutants.py", "__main__.py"}
