"""The kill matrix: which check kills which mutant, on its smallest killing case.

    python -m tests.mutants.matrix [MUTANT ...]

searches the checks' cases, smallest first, for one that fails, and writes the cases to tests/mutants/kills.json and
the pages to docs/kill-matrix.md and docs/real-bugs.md. The gate, tests/test_mutants.py, runs what was found.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from attn_backends.conformance import CATALOGUE, Case, Check, Outcome, Row, Subject, run_case
from attn_backends.registry import get_backend
from tests.mutants import MUTANTS, Mutant, real_bugs
from tests.mutants.local_checks import LOCAL_CHECKS

ROOT = Path(__file__).parent.parent.parent
KILLS, PAGE = Path(__file__).with_name("kills.json"), ROOT / "docs" / "kill-matrix.md"
COMMAND = "python -m tests.mutants.matrix"

CHECKS = CATALOGUE | LOCAL_CHECKS
Kills = dict[str, dict[str, Case]]


def subject_of(mutant: Mutant, device: str = "cpu") -> Subject:
    """The backend that carries a mutant, on its torch kernel."""
    return Subject(get_backend(mutant.backend), "torch", device)


def run_clean(mutant: Mutant, case: Case, device: str = "cpu") -> Row:
    """Run a case as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CATALOGUE, case.check, CHECKS[case.check])
        return run_case(subject_of(mutant, device), case)


def run_planted(mutant: Mutant, case: Case, device: str = "cpu") -> Row:
    """Run a case with the mutant planted."""
    with pytest.MonkeyPatch.context() as patch:
        mutant.plant(patch)
        return run_clean(mutant, case, device)


def size(case: Case) -> tuple:
    """What makes a case small: little to capture, few requests and tokens; then its JSON, for one order."""
    batch = len(case.lens) + case.bs
    return case.path, batch, sum(case.lens) + sum(case.widths), case.topk, case.page_size, case.to_json()


def passes(mutant: Mutant, case: Case) -> bool:
    """Whether the backend without the mutant is right on a case."""
    return run_clean(mutant, case).status in (Outcome.PASS, Outcome.REFUSED)


def candidates(mutant: Mutant, check: Check) -> list[Case]:
    """A check's cases, smallest first: all if it must kill, else the first of each kind and path."""
    cases = sorted(check.cases(subject_of(mutant)), key=size)
    if check.id in mutant.killed_by:
        return cases
    first = {(case.kind, case.path): case for case in reversed(cases)}
    return [case for case in cases if case in first.values()]


def smallest_kills(name: str, checks: Sequence[str]) -> dict[str, Case]:
    """Of each check, the smallest case that fails under a mutant, and without it does not."""
    mutant, kills = MUTANTS[name], {}
    for check in checks:
        for case in candidates(mutant, CHECKS[check]):
            if run_planted(mutant, case).status is Outcome.FAIL and passes(mutant, case):
                kills[check] = case
                break
    return kills


def search(chosen: Sequence[str] = (), *, everywhere: bool = False) -> Kills:
    """The kills of all mutants that need nothing which this machine may lack. chosen: the names to search for, and of
    other mutants what the last search found; all if there are none. everywhere: by any of the catalogue's checks, not
    only by those that must kill.
    """
    every = [mutant.name for mutant in MUTANTS.values() if not mutant.needs]
    known = read_kills() if chosen else {}
    names = [name for name in every if name in chosen or name not in known]
    checks = [[c for c in CHECKS if c in MUTANTS[n].killed_by or (everywhere and c in CATALOGUE)] for n in names]
    with ProcessPoolExecutor(2) as pool:
        found = known | dict(zip(names, pool.map(smallest_kills, names, checks), strict=True))
    return {name: found[name] for name in every}


def read_kills() -> Kills:
    """The kills that the last search found."""
    read = json.loads(KILLS.read_text(encoding="utf-8"))
    return {
        name: {check: Case.from_dict({"check": check, **read["cases"][key]}) for check, key in found.items()}
        for name, found in read["kills"].items()
    }


def write_kills(kills: Kills) -> None:
    """Cases without their check, each once on a line, by a key that follows from it; of each mutant its cases' keys."""
    texts = {name: {check: _short(case) for check, case in cases.items()} for name, cases in kills.items()}
    known = {_key(text): text for found in texts.values() for text in found.values()}
    cases = ",\n".join(f'"{key}":{text}' for key, text in sorted(known.items()))
    lines = [
        f'"{name}":' + json.dumps({c: _key(text) for c, text in found.items()}, separators=(",", ":"))
        for name, found in texts.items()
    ]
    KILLS.write_text('{"cases":{\n' + cases + '},\n"kills":{\n' + ",\n".join(lines) + "}}\n", encoding="utf-8")
    assert read_kills() == kills, "two cases have one key"


def _short(case: Case) -> str:
    given = {name: value for name, value in case.to_dict().items() if name != "check"}
    return json.dumps(given, separators=(",", ":"))


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def page(kills: Kills) -> str:
    """The page, the same for the same mutants, checks and kills."""
    killed = sum(bool(kills.get(name)) for name in MUTANTS)
    lines = [
        "# Kill matrix",
        "",
        f"Written by `{COMMAND}`; not edited by hand. Each mutant is a known bug, put into correct code. {killed} of "
        f"{len(MUTANTS)} mutants are killed on a CPU, by {len(CATALOGUE)} checks of the suite and {len(LOCAL_CHECKS)} "
        "of `tests/mutants/local_checks.py`, most of them of workers.",
        "",
        "A check must kill the mutants that name it: the gate `tests/test_mutants.py` runs its smallest failing case. "
        "What else it kills is listed where `--everywhere` has looked. `on` names the backend that the mutant is put "
        "into; `graph` says that a replayed graph shows it.",
        "",
        "| mutant | what is wrong | found in, or its kind | on | must be killed by |",
        "|---|---|---|---|---|",
    ]
    for mutant in MUTANTS.values():
        needs = f"; needs {', '.join(mutant.needs)}" if mutant.needs else ""
        by = ", ".join(mutant.killed_by)
        too = "".join(f", and {check}" for check in kills.get(mutant.name, {}) if check not in mutant.killed_by)
        place = f"{mutant.backend}{', graph' if mutant.graph else ''}{needs}"
        lines.append(f"| `{mutant.name}` | {mutant.about} | {mutant.origin} | {place} | {by}{too} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Search, and write the files."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--everywhere", action="store_true", help="look for kills by other checks too (10 minutes)")
    parser.add_argument("mutants", nargs="*", help="search for these alone (default: all)")
    args = parser.parse_args()
    if unknown := [name for name in args.mutants if name not in MUTANTS]:
        parser.error(f"there are no mutants {unknown}; {PAGE.name} lists them")
    kills = search(args.mutants, everywhere=args.everywhere)
    write_kills(kills)
    PAGE.write_text(page(kills), encoding="utf-8")
    real_bugs.PAGE.write_text(real_bugs.page(kills), encoding="utf-8")


if __name__ == "__main__":
    main()
