"""A law that fails says with which values: asserts of the helpers are rewritten as those of test files are."""

from __future__ import annotations

import ast
import importlib
import os
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook

from tests.commands import run_module

TESTS = Path(__file__).parent
PLANTED = """
from tests import sampling_laws

class Served:
    def __init__(self, shape, bs, buckets=()):
        self.token = 41 if buckets else 37  # graphs give other tokens

    def texts(self, requests, num_tokens):
        return {request: [request, self.token] for request in requests}

def test_law(monkeypatch):
    monkeypatch.setattr(sampling_laws, "Served", Served)
    sampling_laws.check_reproducible()
"""


LEAKING = """
import ctypes

def test_leak():
    from triton._C.libtriton import ir

    context = ir.context()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(context))
"""


def asserting_helpers() -> list[str]:
    """Modules of the tests that assert and are no test files; tests inside an engine run elsewhere."""
    files = [
        path
        for path in sorted(TESTS.rglob("*.py"))
        if not path.name.startswith(("test_", "conftest")) and "engines" not in path.parts
    ]
    asserting = [
        path for path in files if any(isinstance(x, ast.Assert) for x in ast.walk(ast.parse(path.read_text())))
    ]
    return [".".join(path.relative_to(TESTS.parent).with_suffix("").parts) for path in asserting]


def run_planted(folder: Path, test: str, *words: str) -> tuple[int | None, str]:
    """A test of the text's, run by pytest with what all tests here have."""
    (folder / "test_planted.py").write_text(test)
    words = ("pytest", *words, "-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir", str(folder))
    paths = os.pathsep.join((str(TESTS.parent), str(TESTS.parent / "reference")))
    return run_module(words, folder, {**os.environ, "PYTHONPATH": paths})


def test_a_failing_law_shows_its_values(tmp_path: Path) -> None:
    code, output = run_planted(tmp_path, PLANTED)
    assert code == 1, output
    assert "{0: [0, 41]" in output
    assert "{0: [0, 37]" in output


def test_workers_list_no_leaks_of_triton_amid_the_result(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    code, output = run_planted(tmp_path, LEAKING, "-n", "1")
    assert code == 0, output
    assert "nanobind" not in output


@pytest.mark.parametrize("name", asserting_helpers())
def test_asserts_of_every_helper_are_rewritten(name: str) -> None:
    assert isinstance(importlib.import_module(name).__loader__, AssertionRewritingHook)
