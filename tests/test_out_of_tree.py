"""The doors of the suite, from wheels in an empty folder. What guides show of them is run by `tests/test_docs.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import run_module

ROOT = Path(__file__).parent.parent
DOOR = ["pytest", "-p", "no:cacheprovider", "--pyargs", "attn_backends.conformance"]

VARIANTS = """
from dataclasses import replace
from seqmajor import SeqMajorBackend

class Stale(SeqMajorBackend):
    name = "stale"
    def replay(self, meta, step):
        pass

class Raises(SeqMajorBackend):
    name = "raises"
    def write(self, step, buffers):
        raise RuntimeError("not written yet")

class Elsewhere(SeqMajorBackend):
    name = "elsewhere"
    kernels = tuple(replace(k, unavailable_reasons=lambda device: ["no such machine"]) for k in SeqMajorBackend.kernels)
"""


@pytest.fixture
def run(site, tmp_path):
    """Runs a module in an empty folder in which only the wheels are known, as the commands `pytest` and `attn-backends`
    do: without the folder on Python's path, where `python -m` puts it.
    """

    def run(*arguments: str) -> tuple[int | None, str]:
        return run_module(arguments, tmp_path, {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "200"})

    return run


@pytest.mark.full  # `tests/test_docs.py` runs it without the report
def test_the_pytest_door(run, tmp_path):
    code, output = run(*DOOR, "--attn-backend", "seqmajor", "--attn-quick", "--attn-json", "report.json", "-v")
    assert code == 0, output
    assert "::test_case[seqmajor-math.target_verify-target_verify-eager-kv" in output
    report = json.loads((tmp_path / "report.json").read_text())
    assert {row["status"] for row in report["rows"]} == {"pass", "refused"}
    assert f"{len(report['rows'])} passed" in output


def test_the_command_line_door_finds_a_module_of_the_folder(run, tmp_path):
    (tmp_path / "variants.py").write_text(VARIANTS)
    code, output = run("attn_backends.cli", "info", "variants:Elsewhere")
    assert (code, "no such machine" in output) == (0, True), output


EXPECTED = """
[[expected_failures]]
check = "{check}"
case = "*"
reason = "replay is not written yet"
link = "https://example.org/1"
"""


@pytest.mark.full
def test_an_expected_failure_is_strict_data(run, tmp_path):
    (tmp_path / "variants.py").write_text(VARIANTS)
    door = [*DOOR, "--attn-select", "graph.padded", "--attn-quick", "--attn-config", "known.toml"]
    (tmp_path / "known.toml").write_text(EXPECTED.format(check="graph.padded"))
    code, output = run(*door, "--attn-backend", "variants:Stale")
    assert (code, " xfailed" in output, "replay is not written yet" in output) == (0, True, True), output
    code, output = run(*door, "--attn-backend", "seqmajor")
    assert (code, "unexpected pass" in output) == (1, True), output
    (tmp_path / "known.toml").write_text(EXPECTED.format(check="graph.paded"))
    code, output = run(*door, "--attn-backend", "variants:Stale")
    assert (code, "no check has this id" in output) == (2, True), output


def test_a_failure_says_what_failed_and_how_to_see_it_again(run, tmp_path):
    (tmp_path / "variants.py").write_text(VARIANTS)
    select = ["--attn-select", "graph.shrinking,graph.padded", "--attn-quick"]
    code, output = run(*DOOR, "--attn-backend", "variants:Stale", *select)
    assert code == 1, output
    for part in ("fail: graph.", "check: ", "case: ", "again: pytest --pyargs attn_backends.conformance"):
        assert part in output, output
    again = next(line for line in output.splitlines() if line.startswith("again: "))
    code, output = run(*again.removeprefix("again: ").split())
    assert (code, "1 failed" in output, "passed" in output) == (1, True, False), output


@pytest.mark.full
def test_what_breaks_is_an_error_and_no_failure_of_the_backend(run, tmp_path):
    (tmp_path / "variants.py").write_text(VARIANTS)
    door = [*DOOR, "-n", "2", "--attn-select", "math.decode", "--attn-quick", "--attn-json", "report.json"]
    code, output = run(*door, "--attn-backend", "variants:Raises")
    assert (code, "error: math.decode" in output, "RuntimeError: not written yet" in output) == (2, True, True), output
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["error"] * 3  # as the workers of pytest-xdist sent them


@pytest.mark.full
def test_what_can_not_run_is_listed_and_never_a_success(run, tmp_path):
    (tmp_path / "variants.py").write_text(VARIANTS)
    code, output = run(*DOOR, "--attn-backend", "variants:Elsewhere")
    assert (code, "no such machine" in output, "1 skipped" in output) == (2, True, True), output
    both = ["--attn-backend", "variants:Elsewhere", "--attn-backend", "seqmajor", "--attn-select", "math.decode"]
    code, output = run(*DOOR, *both, "--attn-quick")
    assert (code, "1 skipped" in output) == (0, True), output
    code, output = run(*DOOR, *both, "--attn-quick", "--attn-require-run")
    assert (code, "1 failed" in output) == (1, True), output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a backend"),
        (["--attn-backend", "seqmajr"], "Did you mean 'seqmajor'?"),
        *(
            pytest.param(["--attn-backend", *words], message, marks=pytest.mark.full)
            for words, message in (
                (["seqmajor", "--attn-kernel", "fast"], "It has torch"),
                (["seqmajor", "--attn-select", "nothing"], "no check's id matches 'nothing'"),
                (["seqmajor", "--attn-config", "missing.toml"], "missing.toml is no file"),
                (["json:JSONDecoder"], "no subclass of attn_backends.AttentionBackend"),
            )
        ),
    ],
)
def test_what_can_not_be_used_is_an_error(run, arguments, message):
    code, output = run(*DOOR, *arguments)
    assert code == (2 if arguments else 1), output
    assert message in output


def test_other_runs_import_neither_torch_nor_the_library(site, tmp_path):
    names = "sys.modules.keys() & {'torch', 'attn_backends', 'attn_backends_pytest'}"
    (tmp_path / "test_other.py").write_text(f"import sys\ndef test(): assert {names} == {{'attn_backends_pytest'}}\n")
    words = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
