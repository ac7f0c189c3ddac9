"""Determinism: one thread, a fixed seed before every test. Where no GPU is, Triton's interpreter runs its kernels.

Asserts of helpers are rewritten too, so that a law that fails shows its values; of itself pytest does so for
test files only.
"""

import os
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
HELPERS = [path.stem for path in HERE.glob("*.py") if not path.stem.startswith(("test_", "conftest", "__init__"))]
pytest.register_assert_rewrite("tests.fuzz", "tests.gpu", "tests.mutants", *(f"tests.{name}" for name in HELPERS))

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it when it is imported, which no test may do before


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is marked `one_in(n)`, all cases but every n-th are `full`."""
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is not None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.args[0]:
                item.add_marker(pytest.mark.full)
            seen[test] += 1


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


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
