"""Floors: how fast kernels are beside what their device allows. On a CPU, with times that the test makes up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from attn_backends.cli import conformance as command
from attn_backends.cli import main
from attn_backends.conformance import floors, run_conformance, runner
from attn_backends.conformance.floors import NO_SPLIT, Floor, Scale
from attn_backends.conformance.outcomes import Report
from attn_backends.conformance.report import html_page
from attn_backends.conformance.selection import Selection
from attn_backends.conformance.subjects import resolve_subjects
from attn_backends.contract.kernel import Schedule
from attn_backends.layer import AttentionLayer
from spec_metadata import CacheGeometry, StepKind

TINY = Scale(requests=3, context=200, long=400, copied=2**12, product=8)
SLOW = Floor("fa3", "torch", "a tree of 16, times a chain of as many", 1.25, 1.5)
ABSENT = Floor("fa3", "torch", "planning a cycle, times one layer's verify", 1.0, None, "no graph")


def subject_of(name):
    return resolve_subjects(name, "torch")[0][0]


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setattr(floors, "REPLAYS", 1)
    monkeypatch.setattr(floors, "_ROOFS", {})


@pytest.mark.parametrize("name", ["fa3", "trtllm_mla", "flashinfer_mla", "reference"])
def test_every_floor_of_a_dense_kernel_is_measured(name):
    found = list(floors.floors(subject_of(name), TINY))
    assert [each.reason for each in found if each.value is None] == []
    assert [each.most for each in found] == [1.3, 1.3, 1.25, 1.0]
    assert {(each.backend, each.kernel) for each in found} == {(name, "torch")}


def test_keys_and_values_may_have_sizes_of_their_own():
    layer = AttentionLayer(0, 32, 8, 192, 128, 0.1)
    cache = floors.cache_of(layer, CacheGeometry(3, 16), torch.float32, torch.device("cpu"), is_latent=False)
    assert [tuple(pages.shape) for pages in cache.pages] == [(3, 16, 8, 192), (3, 16, 8, 128)]


def test_a_kernel_without_floors_says_why():
    found = list(floors.floors(subject_of("dsv4"), TINY))
    assert {(each.value, each.met) for each in found} == {(None, None)}
    assert all("compressed layers have no floors" in each.reason for each in found)


def changed(monkeypatch, **changes):
    """trtllm_mla's kernel in torch, with changes."""
    subject = subject_of("trtllm_mla")
    monkeypatch.setattr(subject.backend, "kernels", (replace(subject.chosen, **changes),))
    return resolve_subjects("trtllm_mla", "torch")[0][0]


def test_planning_is_of_what_a_vendor_plans_too(monkeypatch):
    refreshed, timed = [], []

    class Counting(Schedule):
        def refresh(self):
            refreshed.append(self)

    def count(call, device):
        refreshed.clear()
        call()
        timed.append(len(refreshed))
        return 1.0

    launch = subject_of("trtllm_mla").chosen.launch
    on_plan = {"launch": lambda q, cache, planned, layer: launch(q, cache, planned.plan, layer)}
    subject = changed(monkeypatch, schedule=lambda plan, shape, buffers: Counting(), **on_plan)
    monkeypatch.setattr(floors, "_timed", count)
    assert floors._Bench(subject, TINY).planning() == 1.0
    assert timed[0] == 4, "of two draft forwards, a verify and a draft extend"


def test_a_kernel_of_prompts_alone_says_so(monkeypatch):
    able = {StepKind.PREFILL: subject_of("trtllm_mla").capabilities[StepKind.PREFILL]}
    found = list(floors.floors(changed(monkeypatch, capabilities=able), TINY))
    assert {each.reason for each in found} == {"the kernel has no step of kind decode or target_verify"}


def test_a_kernel_is_compared_with_what_the_roofs_allow_and_one_without_a_split_is_named(monkeypatch):
    """Bytes take all the time here: four rows may take hardly more than one."""
    times = {(3, 1): 10.0, (3, 4): 11.0, (1, 1): 10.0, (1, 4): 40.0, (3, 16): 20.0}
    monkeypatch.setattr(floors, "roofs", lambda *_: (1.0, 1e-9))
    bench = floors._Bench
    timed = lambda self, bs, context, width, is_tree=False: times[bs, width] * (1.2 if is_tree else 1)  # noqa: E731
    monkeypatch.setattr(bench, "_time", timed)
    verify, split, tree, _ = floors.floors(subject_of("fa3"), TINY)
    assert (verify.met, split.met, tree.met) == (True, False, True)
    assert tree.value == 1.2
    entry, row = 576, 16 * (576 + 512)
    assert verify.value == round(1.1 / ((3 * 200 * entry + 12 * row) / (3 * 200 * entry + 3 * row)), 3)
    assert [each.reason for each in (verify, split)] == ["", NO_SPLIT]


def test_operations_are_a_roof_too(monkeypatch):
    monkeypatch.setattr(floors, "roofs", lambda *_: (1e-9, 1.0))
    monkeypatch.setattr(floors._Bench, "_time", lambda self, bs, context, width, is_tree=False: float(width))
    verify, *_ = floors.floors(subject_of("trtllm_mla"), TINY)
    assert verify.value == 1.0, "four rows are four times the operations"


def test_only_a_gpu_is_timed_and_only_in_a_run_of_all_checks(monkeypatch):
    asked = []
    monkeypatch.setattr(runner, "floors_of", lambda *arguments: asked.append(arguments) or [SLOW.to_dict()])
    report = run_conformance("reference", kernel="torch", select="plan.write_slots", quick=True)
    assert (asked, report.floors) == ([], ())
    wholes = Selection(), Selection(quick=True), Selection("api.*"), Selection(profile="tree")
    assert [each.is_whole for each in wholes] == [True, False, False, False]
    monkeypatch.undo()
    assert runner.floors_of(["fa3"], "torch", "cpu") == []


def test_a_report_holds_its_floors_and_none_fails_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "floors_of", lambda *_: [SLOW.to_dict(), ABSENT.to_dict()])
    monkeypatch.setattr(command.Selection, "is_whole", True)
    path, page = tmp_path / "report.json", tmp_path / "report.html"
    words = ["conformance", "reference", "--kernel", "torch", "--select", "api.idle", "--json", str(path)]
    assert main([*words, "--report", str(page)]) == 0
    written = json.loads(path.read_text())["floors"]
    assert [Floor(**each) for each in written] == [SLOW, ABSENT]
    output = " ".join(capsys.readouterr().out.split())
    assert f"slow {SLOW}" in output
    assert "no time fa3 (torch) planning a cycle, times one layer's verify: not measured; no graph" in output
    assert "<td>a tree of 16, times a chain of as many</td>" in page.read_text()
    assert Report.from_json(path.read_text()).floors == written


def test_a_report_without_floors_says_where_they_come_from():
    report = run_conformance("reference", kernel="torch", select="api.idle")
    assert "Times are taken in a run of all cases on a GPU." in html_page(report)
