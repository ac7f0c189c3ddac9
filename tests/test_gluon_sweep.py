"""The forms of our Gluon kernels and their sweep: what a launch takes, what a run does with failures, and who wins."""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_backends import results
from attn_backends.kernels import gluon_forms
from attn_backends.kernels.gluon_forms import DEFAULTS, LATENT, SWEPT, Form, Key, form_of, key_of
from attn_backends.results import Head
from benchmarks.rows import Stage
from tests import gluon_sweep as sweep
from tests.doc_blocks import ROOT
from tests.gluon_sweep import FORMS, SHAPES, Shape

SHAPE = Shape(64, 64, 32, 8192, 1, 8192)
DEFAULT, FAST, SLOW, LOST, WRONG, *_ = (DEFAULTS[64], *FORMS[64])
US = {DEFAULT: 100.0, FAST: 80.0, SLOW: 125.0, WRONG: 50.0}


class Clock:
    """A host's: each replay takes what its form does. lost: the device no longer answers."""

    def __init__(self) -> None:
        self.now, self.lost = 0.0, False

    def mark(self) -> float:
        return self.now

    def wait(self) -> None:
        if self.lost:
            raise RuntimeError("the device is lost")

    def microseconds(self, start: float, end: float) -> float:
        return end - start


@pytest.fixture
def stage(monkeypatch):
    """Where forms take `US`, of which one fails, and one computes other numbers. All are compiled."""
    clock = Clock()
    module = SimpleNamespace(form_of=form_of)

    def capture(call: Any, caches: Any, stage: Stage) -> Any:
        form = module.form_of(64, 2, 64, 32, 8192, 132)
        if form == LOST:
            raise RuntimeError("no launch in /a/b/c.py")

        def replay() -> None:
            clock.now += US.get(form, 100.0) * len(caches)

        return SimpleNamespace(graph=SimpleNamespace(replay=replay), output=torch.full((2,), 1.0 + (form == WRONG)))

    monkeypatch.setattr(sweep, "attention", lambda shape, device: (module, None, (1, 2)))
    monkeypatch.setattr(sweep, "capture", capture)
    monkeypatch.setattr(sweep, "compile_all", lambda asked: dict.fromkeys(asked, ""))
    monkeypatch.setattr(sweep, "SHAPES", (SHAPE, SHAPE._replace(requests=8)))
    return Stage(torch.device("cpu"), lambda: None, clock, 3)


def test_the_table_is_what_the_kept_sweep_found_faster():
    found = results.read(ROOT / "docs/results/h100/gluon_forms.json").own["faster"]
    assert {Key(*key): Form(*form) for key, form, *_ in found} == SWEPT


def test_a_shape_outside_the_table_takes_the_default_of_its_head_size(monkeypatch):
    assert all(key.dim in DEFAULTS and form != DEFAULTS[key.dim] for key, form in SWEPT.items())
    swept, shape = Form(64, 192, turn=4), (128, 2, 16, 32, 4096, 132)
    monkeypatch.setattr(gluon_forms, "SWEPT", {key_of(*shape): swept})
    form_of.cache_clear()
    try:
        assert {form_of(*shape), form_of(128, 2, 16, 8, 1, 132)} == {swept}
        others = ((64, 2, 16, 32, 4096, 132), (128, 1, 16, 32, 4096, 132), (128, 2, 8, 32, 4096, 132))
        for other in (*others, (128, 2, 16, 32, 4096, 114)):
            assert form_of(*other) == DEFAULTS[other[0]], other
    finally:
        form_of.cache_clear()


def test_a_key_tells_heads_and_widths_of_latents_alone():
    assert key_of(LATENT, 2, 64, 16, 4, 132) == Key(LATENT, 2, 64, 16, 1, 132)
    assert key_of(192, 2, 64, 16, 4096, 132) == key_of(192, 2, 64, 32, 1, 132) == Key(192, 2, 64, 0, 2, 132)
    assert [key_of(LATENT, 2, 64, 16, width, 132).width for width in (1, 2, 16, 17)] == [0, 1, 1, 2]


def test_rows_tell_speeds_and_what_did_not_run(stage):
    found = {Form(*row["form"]): row for row in sweep.rows([], time.monotonic() + 99, stage) if row["requests"] == 1}
    assert set(found) == {DEFAULT, *FORMS[64]}
    assert {form: found[form]["us"] for form in US} == US
    assert [found[form]["speed"] for form in (DEFAULT, FAST, SLOW)] == [1.0, 1.25, 0.8]
    assert (found[LOST]["status"], found[LOST]["reason"]) == ("not_run", "RuntimeError: no launch in c.py")
    assert found[WRONG]["status"] == "fail"
    assert "outputs differ" in found[WRONG]["reason"]


def test_what_spills_is_a_row_that_says_so(stage, monkeypatch):
    monkeypatch.setattr(sweep, "compile_all", lambda asked: {i: "it spills 8 bytes" if i % 2 else "" for i in asked})
    found = list(sweep.rows([], time.monotonic() + 99, stage))
    assert {row["reason"] for row in found if row["status"] == "not_run" and "c.py" not in row["reason"]} == {
        "it spills 8 bytes"
    }
    monkeypatch.setattr(sweep, "compile_all", lambda asked: {i: "" if i else "no default" for i in asked})
    monkeypatch.setattr(sweep, "tasks", lambda: [(SHAPE.small, form) for form in (DEFAULT, *FORMS[64][:-2])])
    found = list(sweep.rows([], time.monotonic() + 99, stage))
    assert {row["status"] for row in found} == {"not_run"}
    assert any(row["reason"] == "the default form does not run here" for row in found)


def test_a_sweep_goes_on_where_it_stopped(stage, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep.results, "head", lambda *given: Head("GPU", {}, "", "", ""))
    file, num = tmp_path / "forms.json", 1 + len(FORMS[64])
    first = list(sweep.rows([], time.monotonic() + 99, stage))[:3]
    with results.Recording(file, Head("GPU", {}, "", "", "")) as recording:
        for row in first:
            recording.add(row)
    sweep.sweep(file, time.monotonic() - 1, stage)
    assert "2 shapes are left" in capsys.readouterr().out
    assert len(results.read(file).rows) == 3
    assert not results.read(file).is_complete
    sweep.sweep(file, time.monotonic() + 99, stage)
    found = results.read(file)
    assert len(found.rows) == 2 * num
    assert found.is_complete
    assert found.own["faster"] == [[list(key_of(64, 2, 64, 32, 8192, 132)), list(FAST), 1.25, 1.25]]
    assert "faster: [64, 2, 64, 0, 2, 132]" in capsys.readouterr().out


@pytest.mark.parametrize("lost_at", [DEFAULT, LOST], ids=["default", "another"])
def test_a_lost_device_ends_a_run_with_what_failed_in_the_file(lost_at, stage, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep.results, "head", lambda *given: Head("GPU", {}, "", "", ""))
    capture, forms = sweep.capture, iter((DEFAULT, *FORMS[64]))

    def losing(*given: Any) -> Any:
        stage.clock.lost |= next(forms) == lost_at
        if stage.clock.lost:
            raise RuntimeError("an illegal address")
        return capture(*given)

    monkeypatch.setattr(sweep, "capture", losing)
    file = tmp_path / "forms.json"
    with pytest.raises(RuntimeError, match="the device is lost"):
        sweep.sweep(file, time.monotonic() + 99, stage)
    found = results.read(file).rows
    assert Form(*found[0]["form"]) == lost_at
    assert {row["status"] for row in found} == {"not_run"}


def test_a_form_wins_that_is_slower_nowhere_in_its_key():
    def row(form: Form, speed: float, **other: Any) -> dict[str, Any]:
        return {**SHAPE._asdict(), **other, "form": list(form), "status": "pass", "speed": speed}

    key = key_of(64, 2, 64, 32, 8192, 132)
    good = [row(FAST, 1.06), row(FAST, 0.995, width=1024), row(SLOW, 1.05), row(SLOW, 1.0, width=1024)]
    assert list(sweep.winners(good, 132)) == [(key, FAST, 1.06, 0.995)]
    assert not list(sweep.winners([row(FAST, 1.049)], 132))
    assert not list(sweep.winners([row(FAST, 1.2), row(FAST, 0.98, requests=8)], 132))
    failed = {**row(FAST, 1.2, requests=8), "status": "not_run"}
    assert not list(sweep.winners([row(FAST, 1.2), failed], 132))
    assert [won[0] for won in sweep.winners([row(FAST, 1.2, page_size=1), *good], 132)] == [
        key._replace(page_size=1),
        key,
    ]


def test_every_form_of_every_shape_is_compiled_once():
    listed = sweep.tasks()
    made = [(shape.compiled, form) for shape, form in listed]
    assert len(set(made)) == len(made)
    needed = {
        (shape.compiled, form._replace(turn=2)) for shape in SHAPES for form in (DEFAULTS[shape.dim], *FORMS[shape.dim])
    }
    assert needed == set(made)


def test_a_process_that_dies_or_fails_names_its_tasks(monkeypatch):
    """A stand-in for the processes that compile: one task is fine, one fails, and the last one ends its process."""
    program = (
        "import sys, json\n"
        "for number in sys.argv[1:]:\n"
        "    if number == '7': sys.exit('Segmentation fault in /a/b/c.py')\n"
        "    print('some warning')\n"
        f"    print('{sweep.TOLD}' + json.dumps([int(number), 'too large' if number == '4' else '']), flush=True)\n"
    )
    popen = sweep.subprocess.Popen
    monkeypatch.setattr(sweep.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(
        sweep.subprocess, "Popen", lambda command, **how: popen([sys.executable, "-c", program, *command[4:]], **how)
    )
    found = sweep.compile_all([1, 2, 4, 7, 9])
    assert [found[i] for i in (1, 4, 9, 2)] == ["", "too large", "", ""]
    assert "or failed: Segmentation fault in c.py" in found[7]
    monkeypatch.setattr(sweep, "COMPILE_S", 0.2)
    program = "import time; time.sleep(60)"
    assert all("came to no end in 0.2 s" in reason for reason in sweep.compile_all([1, 2]).values())


def test_a_task_says_what_spills_and_what_raises(monkeypatch):
    class Kernel:
        spills = 0

        def __getitem__(self, grid: Any) -> Any:
            return lambda *given, **options: SimpleNamespace(n_spills=self.spills)

    module = SimpleNamespace(_launch=SimpleNamespace(_kernel=(kernel := Kernel())), form_of=form_of)
    seen = list[Form]()

    def call(cache: Any) -> None:
        seen.append(module.form_of())
        module._launch._kernel[(1,)](cache, num_warps=4)

    monkeypatch.setattr(sweep, "attention", lambda shape, device: (module, call, ("cache",)))
    said = sweep.compile_here([0, 3], torch.device("cpu"))
    assert next(said) == (0, "")
    kernel.spills = 6
    assert next(said) == (3, "it spills 24 bytes")
    assert seen == [sweep.tasks()[0][1], sweep.tasks()[3][1]]
    assert (module._launch._kernel, module.form_of) == (kernel, form_of)
    monkeypatch.setattr(sweep, "attention", lambda shape, device: (module, lambda cache: None, ("cache",)))
    assert next(sweep.compile_here([1], torch.device("cpu"))) == (1, "another kernel takes this shape")
    monkeypatch.setattr(sweep, "attention", lambda shape, device: 1 / 0)
    assert next(sweep.compile_here([1], torch.device("cpu"))) == (1, "ZeroDivisionError: division by zero")


def test_the_command_prints_what_a_task_came_to(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gluon_sweep", "--compile", "0", "1"])
    assert sweep.main() == 0
    told = [line.removeprefix(sweep.TOLD) for line in capsys.readouterr().out.splitlines()]
    assert [json.loads(line)[0] for line in told] == [0, 1]
    monkeypatch.setattr(sys, "argv", ["gluon_sweep"])
    with pytest.raises(SystemExit):
        sweep.main()
    assert "name a file: --json FILE" in capsys.readouterr().err
