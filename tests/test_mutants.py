"""The suite can fail: every planted bug is killed by the checks that it names, and every check kills a bug."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attn_backends.conformance import Outcome
from attn_backends.conformance.catalogue import group_of
from tests import commands  # noqa: F401 - what processes are forked from
from tests.mutants import MUTANTS, Mutant, gpu
from tests.mutants.matrix import CHECKS, COMMAND, PAGE, page, passes, read_kills, run_planted

KILLS = read_kills()
HERE = [mutant for mutant in MUTANTS.values() if not mutant.needs]
MAX_LINES = 10
WORKER_LAWS = {"eagle3", "mtp", "multimodal", "parallel", "prefill", "serving"}
LAWS = WORKER_LAWS | {"sampling"}  # their own tests run them without a mutant


def in_tiers(mutants: list[Mutant]) -> Iterator[Any]:
    """Laws of workers take seconds a mutant: in the quick tests each of them kills one, the first that names it."""
    seen = set[str]()
    for mutant in mutants:
        of_a_worker = {group_of(check) for check in mutant.killed_by} & WORKER_LAWS
        known = seen.issuperset(mutant.killed_by)
        yield pytest.param(mutant, id=mutant.name, marks=pytest.mark.full if of_a_worker and known else ())
        seen.update(mutant.killed_by)


@pytest.mark.parametrize("mutant", list(in_tiers(HERE)))
@pytest.mark.one_in(2)
def test_mutant_is_killed_by_the_checks_that_it_names(mutant: Mutant) -> None:
    """By a fail, never by an error; and the backend without it passes the same cases, as laws do in their own tests."""
    assert mutant.killed_by, "it names no check"
    missing = set(mutant.killed_by) - KILLS.get(mutant.name, {}).keys()
    assert not missing, f"no killing case is known for {sorted(missing)}; run `{COMMAND}`"
    for check in mutant.killed_by:
        case = KILLS[mutant.name][check]
        planted = run_planted(mutant, case)
        assert planted.status is Outcome.FAIL, f"{check} on {case.name}: {planted.status} {planted.reason}"
        assert group_of(check) in LAWS or passes(mutant, case), f"{check} on {case.name} fails without the mutant"


OF_LAWS = {check: mutant for mutant in HERE for check in mutant.killed_by if group_of(check) in LAWS}


@pytest.mark.full
@pytest.mark.parametrize("check", OF_LAWS)
def test_a_law_holds_without_a_mutant(check: str) -> None:
    mutant = OF_LAWS[check]
    assert passes(mutant, KILLS[mutant.name][check])


def test_number_of_mutants_killed(capsys: pytest.CaptureFixture[str]) -> None:
    killed = [mutant for mutant in HERE if mutant.killed_by and KILLS[mutant.name].keys() >= set(mutant.killed_by)]
    elsewhere = [f"{mutant.name} needs {', '.join(mutant.needs)}" for mutant in MUTANTS.values() if mutant.needs]
    with capsys.disabled():
        print(f"\n{len(killed)} of {len(MUTANTS)} mutants killed by {len(CHECKS)} checks; {'; '.join(elsewhere)}")
    assert killed == HERE


def test_every_check_kills_a_mutant() -> None:
    named = {check for mutant in MUTANTS.values() for check in mutant.killed_by}  # on a GPU, what needs one
    assert sorted(CHECKS.keys() - named) == [], "these checks kill nothing: they may be dead"
    assert sorted(named - CHECKS.keys()) == [], "there are no such checks"


def test_the_kill_matrix_is_current() -> None:
    assert list(KILLS) == [mutant.name for mutant in HERE], f"run `{COMMAND}`"
    assert PAGE.read_text(encoding="utf-8") == page(KILLS), f"run `{COMMAND}`"


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda mutant: mutant.name)
def test_a_mutant_is_small_and_says_where_it_comes_from(mutant: Mutant) -> None:
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(mutant.plant))).body
    assert isinstance(function, ast.FunctionDef)
    body = function.body[1:]
    lines = inspect.getsource(mutant.plant).splitlines()[body[0].lineno - 1 : body[-1].end_lineno]
    assert sum(bool(line.strip()) for line in lines) <= MAX_LINES
    assert mutant.about
    assert mutant.origin


@pytest.mark.parametrize(
    ("cpu", "cuda", "code"),
    [("fail", "fail", 0), ("not_run", "fail", 0), ("fail", "not_run", 0), ("fail", "pass", 1), ("pass", "fail", 1),
     ("fail", "error", 1)],
)  # fmt: skip
def test_a_mutant_that_survives_in_a_graph_of_some_sort_fails_the_run(
    cpu: str, cuda: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        gpu, "rows", lambda chosen, processes: [{"mutant": "m", "check": "graph.padded", "cpu": cpu, "cuda": cuda}]
    )
    monkeypatch.setattr("sys.argv", ["gpu", "--json", str(tmp_path / "mutants.json")])
    assert gpu.main() == code


def test_mutants_of_phases_run_through_graphs_where_one_kills() -> None:
    kills = {name: MUTANTS[name].killed_by[0] for name in ("slots_are_packed_from_the_first", "block_is_causal")}
    assert {gpu.case_of(MUTANTS[name], check, KILLS[name][check]).path for name, check in kills.items()} == {"graph"}
    eager = MUTANTS["block_leaves_its_mask_behind"]
    assert gpu.case_of(eager, "api.kinds_in_turn", KILLS[eager.name]["api.kinds_in_turn"]).path == "eager"
    on_a_gpu = MUTANTS["switch_waits_for_nothing"]
    assert gpu.case_of(on_a_gpu, on_a_gpu.killed_by[0], None).path == "graph"


def test_every_graph_mutant_is_in_a_set_and_those_of_streams_are_with_phases() -> None:
    found = {name: {mutant.name for mutant in MUTANTS.values() if has(mutant)} for name, has in gpu.SETS.items()}
    assert not found["graphs"] & found["phases"]
    assert found["graphs"] | found["phases"] >= {mutant.name for mutant in MUTANTS.values() if mutant.graph}
    modules = {gpu.module_of(MUTANTS[name]) for name in found["phases"]}
    assert modules == gpu.PHASES


MAKE_TENSORS = {"tensor", "arange", "zeros", "ones", "full", "empty", "eye"}
READ_VALUES = {"item", "tolist", "cpu", "numpy", "unique", "nonzero", "new_tensor"}


@pytest.mark.parametrize("module", sorted(gpu.PHASES))
def test_mutants_of_phases_name_their_tensors_device_and_read_no_values(module: str) -> None:
    """On a GPU they are killed by what they plant, never by a tensor of the CPU's or by what a capture refuses."""
    source = (Path(__file__).parent / "mutants" / f"{module}.py").read_text(encoding="utf-8")
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    wrong = []
    for call in calls:
        name, named = ast.unparse(call.func), {keyword.arg for keyword in call.keywords}
        of_torch, _, method = name.rpartition(".")
        converts = name in ("int", "bool", "float") and any(isinstance(node, ast.Call) for node in call.args)
        makes = of_torch == "torch" and method in MAKE_TENSORS and "device" not in named
        if makes or converts or (of_torch and method in READ_VALUES):
            wrong.append(f"line {call.lineno}: {ast.unparse(call)}")
    assert not wrong
