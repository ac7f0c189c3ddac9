"""How a command ends that somebody interrupts, kills or stops reading, or that finds no space: in real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from attn_backends import results
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.cli import main
from attn_backends.conformance import Report
from attn_backends.conformance.matrix import main as write_matrix
from attn_backends.errors import ConfigError
from attn_backends.results import files
from tests.gpu_results import is_done

ROOT = Path(__file__).parent.parent
LONG = ("conformance", "fa3", "--kernel", "torch")
DEADLINE = 120


class Raising(FA3Backend):
    """A backend whose author made a mistake."""

    name = "raising"

    def write(self, step, buffers):
        raise ValueError("no row\nis free")


@pytest.mark.parametrize("command", ["explain NAME", "demo --backend NAME", "generate --backend NAME --prompt x"])
def test_an_error_of_a_backend_is_one_line_that_names_its_place(command, capsys):
    """And no failed comparison, which 1 would mean."""
    assert main(command.replace("NAME", f"{__name__}:Raising").split()) == 2
    place = rf"test_cli_ends\.py:{Raising.write.__code__.co_firstlineno + 1} in write"
    assert re.fullmatch(rf"error: ValueError: no row is free; raised at {place}\n", capsys.readouterr().err)


@pytest.fixture(autouse=True, scope="module")
def _interrupts_are_answered() -> Iterator[None]:
    """Processes of a test don't ignore interrupts, though a shell made pytest do so in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def start(*arguments: str, output: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """A command in a process of its own."""
    words = [sys.executable, "-m", "attn_backends.cli", *arguments]
    return subprocess.Popen(words, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True)


def wait_for_rows(path: Path, process: subprocess.Popen[str]) -> None:
    """Until a run under way has written some."""
    end = time.monotonic() + DEADLINE
    while not (path.exists() and json.loads(path.read_text())["rows"]):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "nothing was written"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run of the suite that was interrupted: its file, exit code and what it said."""
    path = tmp_path_factory.mktemp("interrupted") / "rows.json"
    process = start(*LONG, "--json", str(path))
    wait_for_rows(path, process)
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=DEADLINE)
    return path, process.returncode, output, error


def test_an_interrupt_is_one_line_and_keeps_the_rows(interrupted):
    path, code, output, error = interrupted
    assert (code, output) == (130, "")
    kept = results.read(path)
    assert error == f"interrupted: {path} holds the {len(kept.rows)} rows that were done, and says it is incomplete\n"
    assert kept.own["incomplete"] is True
    assert {row["status"] for row in kept.rows} == {"pass"}


def test_an_incomplete_result_is_not_taken_for_a_whole_one(interrupted, tmp_path, capsys):
    path, *_ = interrupted
    with pytest.raises(ConfigError, match="interrupted after"):
        Report.from_json(path.read_text())
    assert write_matrix([str(path), "--output", str(tmp_path / "matrix.md")]) == 2
    assert "rows.json: the run was interrupted" in capsys.readouterr().err
    assert not is_done(path, results.read(path).head.commit.removesuffix("+dirty"))


@pytest.mark.parametrize(
    "torch",
    [
        "raise KeyboardInterrupt",
        "signal.raise_signal(signal.SIGINT)",
        "try: signal.raise_signal(signal.SIGINT)\nexcept BaseException: pass\nabs = cuda = device = None",
        "try: signal.raise_signal(signal.SIGINT)\nexcept BaseException: raise ImportError('half') from None",
    ],
    ids=["raised", "sent", "swallowed", "made another error"],
)
def test_an_interrupt_while_torch_is_imported_is_one_line_too(torch, tmp_path):
    """The installed command imports torch inside of what answers; here the interrupt comes then for certain. numpy,
    which torch imports, swallows it or fails later on.
    """
    (tmp_path / "torch.py").write_text("import signal\n" + torch)
    done = run_installed(tmp_path)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_an_import_that_fails_without_an_interrupt_is_told(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no such library')")
    done = run_installed(tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith("ImportError: no such library\n")


def run_installed(folder: Path) -> subprocess.CompletedProcess[str]:
    """The installed command, which finds modules in a folder first."""
    (script,) = re.findall(r'^attn-backends = "(\w+):main"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return subprocess.run(
        [sys.executable, "-P", "-c", f"import sys, {script}; sys.exit({script}.main())"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


def test_output_that_the_shell_closed_is_no_error():
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m attn_backends.cli list >&-"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.full
def test_an_interrupted_pytest_run_leaves_an_incomplete_report(tmp_path):
    path = tmp_path / "rows.json"
    (tmp_path / "conftest.py").write_text(
        "def pytest_runtest_logreport(report):\n    if report.when == 'teardown':\n        raise KeyboardInterrupt\n"
    )
    words = ["-p", "no:cacheprovider", "--pyargs", "attn_backends.conformance", "-p", "conftest", "-o", "addopts="]
    words += ["--attn-backend", "fa3", "--attn-select", "plan.*", "--attn-kernel", "torch", "--attn-json", str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 2, done.stdout
    kept = results.read(path)
    assert (kept.is_complete, len(kept.rows)) == (False, 1)


def test_a_killed_run_leaves_a_readable_file(tmp_path):
    path = tmp_path / "rows.json"
    process = start(*LONG, "--json", str(path))
    wait_for_rows(path, process)
    process.kill()
    process.communicate(timeout=DEADLINE)
    assert not results.read(path).is_complete


def test_a_reader_that_goes_away_is_no_failed_check():
    """As `| head` does; 1 would mean that a check failed."""
    process = start("info", "fa3")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(timeout=DEADLINE) == 141


def test_a_reader_that_goes_away_costs_no_result(tmp_path):
    path = tmp_path / "rows.json"
    process = start(*LONG, "--select", "api.idle", "--quick", "--json", str(path))
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=DEADLINE) == 141
    assert results.read(path).is_complete


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_one_line():
    process = start(*LONG, "--select", "api.idle", "--quick", "--json", "/dev/full")
    output, error = process.communicate(timeout=DEADLINE)
    assert error == "error: /dev/full can't be written: No space left on device\n"
    assert "exit code 0" in output, "what was found is printed all the same"
    assert process.returncode == 2
    with open("/dev/full", "w") as full:
        process = start("list", output=full.fileno())
        assert process.communicate(timeout=DEADLINE)[1] == "error: standard output can't be written: no space is left\n"
    assert process.returncode == 2


def test_a_file_that_can_not_be_written_is_named_before_anything_is_computed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("attn_backends.cli.conformance.conformance_rows", lambda *args: pytest.fail("it ran"))
    (tmp_path / "rows.json.part").mkdir()
    path = tmp_path / "rows.json"
    assert main([*LONG, "--json", str(path)]) == 2
    assert f"error: {path} can't be written: " in capsys.readouterr().err


def test_a_version_that_can_not_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    head = results.head(["attn-backends"])
    full = OSError(28, "No space left on device")

    def fill_the_disk() -> None:
        with results.Recording(path, head) as recording:
            recording.add({"row": 1})
            monkeypatch.setattr(Path, "replace", lambda *args: (_ for _ in ()).throw(full))
            recording.finish()

    with pytest.raises(ConfigError, match="No space left") as stop:
        fill_the_disk()
    assert stop.value.__notes__ == [f"{path} holds the 1 rows that were done, and says it is incomplete"]
    assert results.read(path).rows == ({"row": 1},)
    assert os.listdir(tmp_path) == ["rows.json"]


def test_rows_that_come_fast_are_written_together(tmp_path, monkeypatch):
    """Writing each of many rows would take longer than they do."""
    now, written = iter(range(10**6)), []
    monkeypatch.setattr(files.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(files, "write_text", lambda path, text: written.append(len(json.loads(text)["rows"])))
    with results.Recording(tmp_path / "rows.json", results.head(["attn-backends"])) as recording:
        for number in range(200):
            recording.add({"row": number})
        recording.finish()
    assert written[:2] == [0, 1]
    assert written[-1] == 200
    assert len(written) < 40


def test_the_exit_codes_are_documented():
    page = (ROOT / "docs" / "command-line.md").read_text()
    assert re.findall(r"^\| (\d+) \|", page, flags=re.MULTILINE) == ["0", "1", "2", "130", "141"]
