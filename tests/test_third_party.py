"""What another package uses of the suite: a decorator for its own tests, a badge, and a workflow for its CI."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest

from attn_backends import BackendUnavailableError, ConfigError
from attn_backends.backends.dsv4 import DSV4Backend
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.backends.trtllm_mla import TrtllmMLABackend
from attn_backends.conformance import Case, ExpectedFailure, Outcome, Report, Row, run_conformance
from attn_backends.conformance.badge import badge, main
from attn_backends_pytest import parametrize_with_checks
from spec_metadata import CacheGeometry, Capacity
from tests.commands import run_module

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "out_of_tree_backend"
WORKFLOW = EXAMPLE / ".github" / "workflows" / "conformance.yml"
QUICK = {"kernel": "torch", "quick": True, "select": "api.[ik]*"}


class Halving(FA3Backend):
    """A backend whose constructor has an argument of its own, without which it is wrong."""

    name = "halving"

    def __init__(self, *args, lost: int = 1, **options):
        self.lost = lost
        super().__init__(*args, **options)

    def write(self, step, buffers):
        super().write(step, buffers)
        buffers["seqused_k"].sub_(self.lost).clamp_(min=0)


def checks(*backends, **asked) -> dict:
    """What the decorator gives to a test, by its id."""
    mark = parametrize_with_checks(*backends, **{**QUICK, **asked}).mark
    assert mark.args[0] == "check"
    return dict(zip(mark.kwargs["ids"], mark.args[1], strict=True))


def place() -> tuple:
    return Capacity(2, 64, 64), CacheGeometry(4, 64)


def test_the_decorator_takes_classes_and_names():
    found = checks(FA3Backend, "trtllm_mla")
    assert {name.split("-")[0] for name in found} == {"fa3", "trtllm_mla"}
    for check in found.values():
        check()


@pytest.mark.parametrize(
    "right",
    [
        Halving(*place(), lost=0),
        partial(Halving, lost=0),
        lambda *args, **options: Halving(*args, lost=0, **options),
    ],
    ids=["instance", "partial", "factory"],
)
def test_instances_and_factories_keep_their_own_arguments(right):
    for check in checks(right, select="api.keeps_no_state").values():
        check()
    with pytest.raises(pytest.fail.Exception, match=r"fail: api.keeps_no_state on halving.*\n(?s:.*)again: pytest -k "):
        next(iter(checks(Halving, select="api.keeps_no_state").values()))()


def test_a_partial_of_compressed_keys_and_instances_of_built_in_backends():
    assert run_conformance(partial(DSV4Backend, checking=False), **QUICK).exit_code(require_run=True) == 0
    assert run_conformance(TrtllmMLABackend(*place(), kernel="torch"), **QUICK).exit_code(require_run=True) == 0


def test_what_can_t_be_made_again_is_refused():
    class Forgets(FA3Backend):
        def __init__(self, *args, lost, **options):
            super().__init__(*args, **options)

    with pytest.raises(BackendUnavailableError, match=r"instance of Forgets.*takes lost.*pass a factory"):
        parametrize_with_checks(Forgets(*place(), lost=1))
    with pytest.raises(BackendUnavailableError, match="made a dict"):
        parametrize_with_checks(lambda *args, **options: {})
    with pytest.raises(BackendUnavailableError, match=r"smaller window.*functools.partial"):
        parametrize_with_checks(lambda *args, **options: DSV4Backend(*args, **options))
    with pytest.raises(BackendUnavailableError, match="no subclass"):
        parametrize_with_checks(3)
    with pytest.raises(ConfigError, match="no profile 'trees'"):
        parametrize_with_checks(FA3Backend, profile="trees")


def test_an_expected_failure_is_an_xfail_of_the_user_s_test():
    known = ExpectedFailure("api.keeps_no_state", "*", "a length is lost", "https://example.org/1")
    found = checks(Halving, select="api.keeps_no_state", expected_failures=[known])
    with pytest.raises(pytest.xfail.Exception, match="a length is lost"):
        next(iter(found.values()))()


def report(*statuses: Outcome, **own) -> Report:
    case = Case("math.decode", "decode", lens=(3,))
    rows = tuple(Row("mine", "own", case.check, case, case.path, status) for status in statuses)
    return Report("2026.11", "CPU", {}, rows, **own)


def text_of(svg: str) -> str:
    root = ElementTree.fromstring(svg)
    return "|".join(str(each.text) for each in root.iter("{http://www.w3.org/2000/svg}text"))


def test_a_badge_says_what_every_kernel_passes():
    both = {"mine/own": ["chain", "tree"], "mine/other": ["chain"]}
    assert (
        text_of(badge(report(Outcome.PASS, contract="2.0", profiles=both)))
        == "attention conformance|contract 2.0: chain"
    )
    many = {"mine/own": ["chain", "chain-graph", "tree", "packed"]}
    assert "contract 2.0: 4 profiles" in badge(report(Outcome.PASS, contract="2.0", profiles=many))
    assert "contract 2.0: 2 checks" in badge(report(Outcome.PASS, Outcome.REFUSED, contract="2.0"))
    assert "2 of 3 failed" in badge(report(Outcome.PASS, Outcome.FAIL, Outcome.ERROR, contract="2.0", profiles=both))
    assert "nothing ran" in badge(report(Outcome.NOT_RUN, contract="2.0"))


def test_a_badge_of_no_report_is_refused(tmp_path, capsys):
    (tmp_path / "report.json").write_text("{}")
    assert main([str(tmp_path / "report.json"), str(tmp_path / "badge.svg")]) == 2
    assert "not a result" in capsys.readouterr().err


@pytest.mark.install
def test_the_workflow_s_steps_run_in_a_clean_folder(tmp_path, site):
    """Every `run` of it, with pip's own settings for a machine without a network: wheels, and no dependencies."""
    project, target = tmp_path / "project", tmp_path / "installed"
    shutil.copytree(EXAMPLE, project, ignore=shutil.ignore_patterns("__pycache__"))
    (wheel,) = site.parent.glob("attn_backends-*.whl")
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_TARGET": str(target)}
    paths = {"PATH": f"{target / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(target)}
    environment = {**os.environ, **offline, **paths, "ATTN_BACKENDS": str(wheel), "PIP_UPGRADE": "1"}
    steps = re.findall(r"- run: (.+)", WORKFLOW.read_text())
    assert len(steps) == 4
    for step in steps:
        step = step.replace(" pytest", "")  # which this machine has, and no network for another
        done = subprocess.run(
            step, shell=True, cwd=project, env=environment, capture_output=True, text=True, timeout=170, check=False
        )
        assert done.returncode == 0, f"{step}\n{done.stdout}{done.stderr}"
    assert "contract 2.0: chain" in (project / "conformance.svg").read_text()
    assert "passes chain of contract 2.0" in (project / "conformance.html").read_text()


OWN_TESTS = """
from attn_backends_pytest import parametrize_with_checks
from seqmajor import SeqMajorBackend

@parametrize_with_checks(SeqMajorBackend, quick=True, select="plan.*")
def test_my_backend(check):
    check()
"""


def test_the_decorator_runs_from_wheels_in_an_empty_folder(tmp_path, site):
    (tmp_path / "test_mine.py").write_text(OWN_TESTS)
    words = ["pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    code, output = run_module(words, tmp_path, {**os.environ, "PYTHONPATH": str(site)})
    assert code == 0, output
    assert re.search(r"\b15 passed", output), output
