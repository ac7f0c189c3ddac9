"""The built package holds what the library reads, and works away from the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parent.parent

USE = """
import attn_backends
from attn_backends.cli import main
from attn_backends.config import load_run_config
assert attn_backends.__file__.startswith({folder!r}), attn_backends.__file__
assert load_run_config("tree").source.startswith({folder!r})
raise SystemExit(main(["list"]))
"""


def files(folder: Path) -> list[Path]:
    """The files under a folder that belong to the repository."""
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the contents of the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_holds_all_files_of_the_packages_and_the_configurations(installed):
    packages = [path.relative_to(ROOT) for name in ("spec_metadata", "attn_backends") for path in files(ROOT / name)]
    configs = ["attn_backends" / path.relative_to(ROOT) for path in files(ROOT / "configs")]
    assert len(configs) >= 6
    assert [file for file in packages + configs if not (installed / file).is_file()] == []


def test_the_wheel_works_in_an_empty_folder(installed, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    code = USE.format(folder=str(installed))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "flashinfer_mla" in done.stdout
