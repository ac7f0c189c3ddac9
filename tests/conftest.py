"""Determinism: one thread, a fixed seed before every test. Where no GPU is, Triton's interpreter runs its kernels.

Asserts of helpers are rewritten too, so that a law that fails shows its values; of itself pytest does so for
test files only.
"""

import atexit
import gc
import os
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
HELPERS = [path.stem for path in HERE.glob("*.py") if not path.stem.startswith(("test_", "conftest", "__init__"))]
pytest.register_assert_rewrite("tests.fuzz", "tests.gpu", "tests.mutants", *(f"tests.{name}" for name in HELPERS))

gc.disable()  # while tests are collected, which stay: a fifth of that time

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it when it is imported, which no test may do before

# triton's nanobind lists leaks at exit, amid or after the result; it has no switch
atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is marked `one_in(n)`, every n-th case is quick, and of a cross the first with each value that no
    other quick one has. The others are `full`.
    """
    crosses: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("one_in") and not item.get_closest_marker("full"):
            crosses[item.nodeid.partition("[")[0]].append(item)
    for cases in crosses.values():
        quick = cases[:: cases[0].get_closest_marker("one_in").args[0]]
        seen = set().union(*map(values_of, quick))
        for case in cases:
            if case not in quick and values_of(case) <= seen:
                case.add_marker(pytest.mark.full)
            seen |= values_of(case)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def values_of(case: pytest.Item) -> set[tuple[str, str]]:
    """What a case has of each parameter of a cross; nothing of a test with one list of cases."""
    crossed = [mark.args[0] for mark in case.iter_markers("parametrize")]
    lists = [names.split(",") if isinstance(names, str) else names for names in crossed]
    given = [[case.callspec.params[name.strip()] for name in names] for names in lists]
    return {(str(names), repr(values)) for names, values in zip(lists, given, strict=True)} if len(lists) > 1 else set()


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _packages_are_listed_once() -> Iterator[None]:
    """Of a path: it takes 3 ms."""
    from attn_backends import registry

    with pytest.MonkeyPatch.context() as patch:
        listed = cache(lambda group, path, read=registry.entry_points: read(group=group))
        patch.setattr(registry, "entry_points", lambda group: listed(group, tuple(sys.path)))
        yield


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """A folder with what the wheels of the library and of its out-of-tree example install, entry points included."""
    from hatchling.builders.wheel import WheelBuilder

    root = Path(__file__).parent.parent
    folder = tmp_path_factory.mktemp("wheels")
    for project in (root, root / "examples" / "out_of_tree_backend"):
        (wheel,) = WheelBuilder(str(project)).build(directory=str(folder), versions=["standard"])
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "site")
    return folder / "site"
