"""The smoke tier and the models' tests with other versions of the packages that pyproject.toml declares: what
`make test-versions` runs.

    python -m tests.versions [--tests NAME] [--json FILE] [ROW ...]
    python -m tests.versions --page

A row is a virtual environment on top of this one, in which some packages are replaced:

    oldest      every package at its lower bound
    newest      every package at the newest release that its bounds admit
    registry    every package at the newest release of all; it reports, and fails nothing
    NAME==1.2   what is asked for; several with commas between them

torch is the one of this environment in every row: another build of it may bring gigabytes of CUDA. Environments are
kept in .venv-versions. pip looks at them before each run, so that "newest" stays newest.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from packaging.requirements import Requirement

from attn_backends import results
from tests.generated_tables import page_with

ROOT = Path(__file__).parent.parent
RESULT, PAGE = ROOT / "docs" / "results" / "versions.json", ROOT / "docs" / "models.md"
ENVIRONMENTS = ROOT / ".venv-versions"
USES_MODELS = re.compile(r"^\s*(from|import) (transformers|attn_backends_reference\.models)\b", re.MULTILINE)
PACKAGES = ("transformers", "triton", "pydantic", "safetensors", "rich", "pytest")
ROWS, REPORTS_ONLY = ("oldest", "newest", "registry"), "registry"
LIMIT = 900  # seconds of a row's tests
VERSIONS = "import json, sys, importlib.metadata as m; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"


def declared(root: Path = ROOT) -> dict[str, Requirement]:
    """What the library and the reference engine ask for of `PACKAGES`, for use or for tests."""
    listed: list[str] = []
    for file in (root / "pyproject.toml", root / "reference" / "pyproject.toml"):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        listed += project["dependencies"]
        listed += [line for group in project.get("optional-dependencies", {}).values() for line in group]
    return {found.name: found for found in map(Requirement, listed) if found.name in PACKAGES}


def lower_bound(requirement: Requirement) -> str:
    """The oldest version that a requirement admits."""
    (bound,) = (each.version for each in requirement.specifier if each.operator == ">=")
    return bound


def wanted(row: str) -> list[str]:
    """What pip is asked for in a row."""
    if row == "registry":
        return list(PACKAGES)
    if row == "newest":
        return [f"{name}{requirement.specifier}" for name, requirement in declared().items()]
    if row == "oldest":
        return [f"{name}=={lower_bound(requirement)}" for name, requirement in declared().items()]
    return row.split(",")


def selections() -> dict[str, list[str]]:
    """The arguments of pytest for the smoke tier, and for the tests of models: each file that imports transformers or
    our models, cases of `make test-full` included.
    """
    files = sorted((ROOT / "tests").glob("test_*.py"))
    models = [f"tests/{file.name}" for file in files if USES_MODELS.search(file.read_text(encoding="utf-8"))]
    return {"smoke": ["-m", "smoke"], "models": ["-m", "full or not full", *models]}


def make_environment(folder: Path, requirements: list[str]) -> Path:
    """A virtual environment that sees this one's packages behind its own, made anew if they lie elsewhere than when it
    was made; returns its Python.
    """
    installed = [path for path in sys.path if path.endswith("site-packages")]
    seen = "".join(f"{path}\n" for path in (ROOT, ROOT / "reference", *installed))
    if [path.read_text() for path in folder.glob("lib/python*/site-packages/below.pth")] != [seen]:
        venv.create(folder, clear=True)
        (next(folder.glob("lib/python*/site-packages")) / "below.pth").write_text(seen)
    python, constraints = folder / "bin" / "python", folder / "constraints.txt"
    constraints.write_text(f"torch=={version('torch')}\n")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--upgrade"]
    subprocess.run([*command, "-c", str(constraints), *requirements], check=True, capture_output=True)
    return python


def run_row(row: str, tests: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Of a row the versions that it had, and what came of each of `selections` that `tests` names."""
    head = {"row": row, "gates": row != REPORTS_ONLY}
    try:
        python = make_environment(ENVIRONMENTS / re.sub(r"[^\w.,=-]", "_", row), wanted(row))
    except subprocess.CalledProcessError as error:
        yield head | {"tests": "none", "reason": reason(error.stderr.decode())}
        return
    found = subprocess.run([python, "-c", VERSIONS, *PACKAGES], capture_output=True, text=True, check=True)
    for name in tests:
        yield head | {"tests": name, "versions": json.loads(found.stdout)} | outcome(python, selections()[name])


def outcome(python: Path, selection: list[str]) -> dict[str, Any]:
    """What came of tests in an environment."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        try:
            done = subprocess.run(
                [python, "-m", "pytest", "-q", *selection, f"--junitxml={report}"],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                timeout=LIMIT,
                capture_output=True,
                text=True,
            )
            found = counts(report.read_text()) if report.exists() else {"reason": reason(done.stdout + done.stderr)}
        except subprocess.TimeoutExpired:
            found = {"reason": f"no end after {LIMIT} s"}
    return found | {"seconds": round(time.monotonic() - start)}


def counts(report: str) -> dict[str, Any]:
    """What pytest's XML report says: how many tests passed, were skipped and failed, and which failed with what."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    wrong = [(case, problem) for case in cases for problem in (*case.iter("failure"), *case.iter("error"))]
    skipped = sum(case.find("skipped") is not None for case in cases)
    failures = [
        f"{case.get('name')}: {reason((problem.get('message') or '?').splitlines()[0])}" for case, problem in wrong
    ]
    failed = len({id(case) for case, _ in wrong})
    found = {"passed": len(cases) - skipped - failed, "skipped": skipped, "failed": failed}
    return found | ({"failures": failures} if failures else {})


def reason(text: str) -> str:
    """The line of a command's output that says most, without addresses and folders."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith("ERROR:")), lines[-1] if lines else "nothing was said")
    return results.without_folders(re.sub(r"\w+://[^\s)]+", "ADDRESS", said))[:300]


def passes(row: dict[str, Any]) -> bool:
    """Whether tests ran in a row, and none failed."""
    return row.get("passed", 0) > 0 and row["failed"] == 0


def in_words(row: dict[str, Any]) -> Iterator[str]:
    """A row as lines for people."""
    versions = ", ".join(f"{name} {number}" for name, number in row.get("versions", {}).items())
    said = row.get("reason") or f"{row['passed']} passed, {row['skipped']} skipped, {row['failed']} failed"
    verdict = "passes" if passes(row) else "FAILS"
    yield f"{row['row']}, {row['tests']}: {verdict} ({said}) with {versions or 'nothing installed'}"
    yield from (f"    {failure}" for failure in row.get("failures", ()))


def table(found: results.Results) -> list[str]:
    """The lines of the table of docs/models.md: the versions of each row, and how many of each selection passed."""
    rows = {row["row"]: row["versions"] for row in found.rows}
    passed = {
        (row["row"], row["tests"]): f"{row['passed']:,} of {row['passed'] + row['failed']:,}" for row in found.rows
    }
    tests = list(dict.fromkeys(row["tests"] for row in found.rows))
    lines = [f"| {' | '.join(('row', *PACKAGES, *tests))} |", "|" + "---|" * (1 + len(PACKAGES) + len(tests))]
    for row, versions in rows.items():
        cells = (row, *(versions[name] for name in PACKAGES), *(passed[row, name] for name in tests))
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", f"{found.head.date}, with torch {found.head.versions['torch']}: `{found.head.command}`."]


def main() -> int:
    """Run rows and say what came of each; 1 if one fails that counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"default: {' '.join(ROWS)}")
    parser.add_argument("--tests", action="append", choices=selections(), help="default: both")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--page", action="store_true", help="run nothing, write the table of docs/models.md")
    args = parser.parse_args()
    if args.page:
        made = {"versions": table(results.read(RESULT))}
        PAGE.write_text(page_with(made, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    rows = []
    for name in args.rows or ROWS:
        for row in run_row(name, args.tests or selections()):
            print(*in_words(row), sep="\n", flush=True)
            rows.append(row)
    if args.json:
        results.write(args.json, results.head(["python", "-m", "tests.versions", *sys.argv[1:]]), rows)
    return int(any(row["gates"] and not passes(row) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
