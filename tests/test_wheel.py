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
REFERENCE = ROOT / "reference"
MOST_BYTES = 1_500_000
PACKAGES = ("spec_metadata", "attn_backends", "attn_backends_command", "attn_backends_pytest")
COMMANDS = ("demo", "export", "generate", "inspect")

USE = """
import attn_backends
from attn_backends.cli import main
from attn_backends.config.backend_files import backend_options
assert attn_backends.__file__.startswith({folder!r}), attn_backends.__file__
assert backend_options("fa3").name == "fa3"
raise SystemExit(main(["list"]))
"""
USE_COMMAND = """
from attn_backends import cli
cli.entry_points = lambda group: ()  # this environment's own has the reference
raise SystemExit(cli.main(["COMMAND"]))
"""
USE_REFERENCE = """
import attn_backends_reference
from attn_backends_reference.config import load_run_config
assert attn_backends_reference.__file__.startswith({folder!r}), attn_backends_reference.__file__
assert load_run_config("tree").source.startswith({folder!r})
"""


def files(folder: Path) -> list[Path]:
    """The files under a folder that belong to the repository."""
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def unpacked(project: Path, folder: Path) -> Path:
    """The wheel of a project, unpacked into a folder."""
    (wheel,) = WheelBuilder(str(project)).build(directory=str(folder / "dist"), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return Path(wheel)


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> Path:
    """A folder with the library's wheel alone."""
    folder = tmp_path_factory.mktemp("core")
    assert unpacked(ROOT, folder).stat().st_size < MOST_BYTES
    return folder / "site"


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Path:
    """A folder with both wheels."""
    folder = tmp_path_factory.mktemp("both")
    for project in (ROOT, ROOT / "reference"):
        unpacked(project, folder)
    return folder / "site"


def run(code: str, site: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Code in a folder from which nothing of the repository is seen."""
    command = [sys.executable, "-c", code.format(folder=str(site))]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_wheels_hold_all_files_of_their_packages_and_configurations(both):
    packages = [path.relative_to(ROOT) for name in PACKAGES for path in files(ROOT / name)]
    packages += [path.relative_to(REFERENCE) for path in files(REFERENCE / "attn_backends_reference")]
    configs = ["attn_backends" / path.relative_to(ROOT) for path in files(ROOT / "configs")]
    presets = ["attn_backends_reference" / path.relative_to(REFERENCE) for path in files(REFERENCE / "configs")]
    assert len(configs) == 5
    assert len(presets) == 6
    assert [file for file in (*packages, *configs, *presets) if not (both / file).is_file()] == []


def test_the_wheel_gives_engines_their_plug_in_and_nothing_of_their_tests(core):
    (entry_points,) = core.glob("*.dist-info/entry_points.txt")
    assert "[vllm.general_plugins]\nattn_backends = attn_backends.engines.vllm:register\n" in entry_points.read_text()
    assert "platform_plugins" not in entry_points.read_text()
    assert not (core / "tests").exists()


def test_the_library_brings_the_plug_ins_of_engines_and_no_stand_in_for_them(core):
    (entries,) = core.glob("*.dist-info/entry_points.txt")
    group = entries.read_text().partition("[sglang.srt.plugins]")[2].split("[")[0]
    assert group.split() == ["attn_backends", "=", "attn_backends.engines.sglang:register"]
    assert list(core.rglob("*sgl_kernel*")) == []
    assert list(core.rglob("sitecustomize*")) == []


def test_the_library_works_alone_in_an_empty_folder(core, tmp_path):
    assert not (core / "attn_backends_reference").exists()
    done = run(USE, core, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "flashinfer_mla" in done.stdout


def test_the_reference_adds_its_commands_and_requires_the_library_of_its_version(core, both):
    (entries,) = both.glob("attn_backends_reference-*/entry_points.txt")
    group = entries.read_text().partition("[attn_backends.commands]")[2].split("[")[0]
    assert [line.split()[0] for line in sorted(group.split("\n")) if line] == list(COMMANDS)
    (library,), (metadata,) = core.glob("attn_backends-*"), both.glob("attn_backends_reference-*/METADATA")
    version = library.name.removeprefix("attn_backends-").removesuffix(".dist-info")
    assert metadata.parent.name == f"attn_backends_reference-{version}.dist-info"
    assert f"Requires-Dist: attn-backends=={version}\n" in metadata.read_text()


def test_without_the_reference_its_commands_say_how_to_install_it(core, tmp_path):
    for command in COMMANDS:
        done = run(USE_COMMAND.replace("COMMAND", command), core, tmp_path)
        assert done.returncode == 2, done.stderr
        assert f"{command} is a command of attn-backends-reference. Install it: pip install ./reference" in done.stderr


def test_both_work_in_an_empty_folder(both, tmp_path):
    done = run(USE_REFERENCE, both, tmp_path)
    assert done.returncode == 0, done.stderr
