"""Backends of other projects under the suite, on one in small: whose bug is told, and what a crash leaves."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from attn_backends.backends.reference import ReferenceBackend
from attn_backends.cache import CacheFormat
from attn_backends.conformance import Outcome, Subject, resolve_subjects, run_conformance, selected_cases
from attn_backends.conformance.foreign import FOREIGN, foreign_backend, places
from attn_backends.conformance.foreign.blame import run_foreign_case
from attn_backends.conformance.foreign.causes import told_list
from attn_backends.conformance.foreign.isolation import Isolated, running
from attn_backends.conformance.profiles import passed, totals
from attn_backends.conformance.worlds import Setup, World
from attn_backends.errors import BackendUnavailableError
from tests import foreign_backends as tiny

CHECKS = ("math.*", "cache.*slots", "graph.s[eh]*", "graph.equals_eager", "graph.refresh_recorded", "poison.unwritten")


def rows_of(backend, checks=CHECKS, most=None):
    subject = Subject(backend, "its_own")
    cases = [case for check in checks for case in selected_cases(subject, check, most)]
    return [run_foreign_case(subject, case) for case in cases]


def failed(rows):
    return [row for row in rows if row.status not in (Outcome.PASS, Outcome.REFUSED)]


def test_what_is_right_passes():
    rows = rows_of(tiny.Tiny, most=4)
    assert len(rows) > 15
    assert failed(rows) == []


@pytest.mark.parametrize("bug", [tiny.DriverCountsOneLess, tiny.DriverTurnsSlotsRound])
def test_the_drivers_mistake_is_an_error_and_no_failure(bug):
    rows = failed(rows_of(bug, ("math.decode", "math.draft_decode"), most=3))
    assert rows
    assert {row.status for row in rows} == {Outcome.ERROR}
    assert all(row.reason.startswith("a mistake of the driver, not of Tiny: ") for row in rows)


@pytest.mark.parametrize(
    ("bug", "cause"),
    [
        (tiny.DraftsCommittedAlone, "its own token last: the length is that of the committed tokens"),
        (tiny.StoresDensely, "as a view of stride 3, and read them as if they were dense"),
    ],
)
def test_the_backends_bug_is_a_failure_with_its_cause(bug, cause):
    rows = failed(rows_of(bug, most=4))
    assert {row.case.kind for row in rows} == {"draft_decode"}
    assert {row.status for row in rows} == {Outcome.FAIL}
    assert all(cause in row.reason for row in rows)
    assert all(row.reason.endswith("passes with a backend that is right behind the same driver") for row in rows)


def test_a_batch_that_a_graph_refuses_has_the_cause_of_its_eager_step():
    rows = failed(rows_of(tiny.DraftsCommittedAlone, ("graph.larger_than_bucket",), most=30))
    assert {row.case.kind for row in rows} == {"draft_decode"}
    assert all("the length is that of the committed tokens" in row.reason for row in rows)


def test_slots_that_no_layer_here_writes_by_are_latent():
    rows = failed(rows_of(tiny.CutsOffSlots, ("cache.writes_owned_slots", "math.draft_decode"), most=8))
    assert {(row.status, row.check, row.case.kind) for row in rows} == {
        (Outcome.FAIL, "cache.writes_owned_slots", "draft_decode")
    }
    assert all(row.reason.startswith("latent, ") and "others of forward" in row.reason for row in rows)
    assert all("cut off at the batch size, not sliced for this forward. The case" in row.reason for row in rows)


def test_a_window_that_ends_before_the_drafted_tokens_is_told():
    told = told_list([21, 22, 23], [20, 21, 22], [[10, 11, 12]], 1)
    assert told.startswith("its window of 3 keys ends 1 too early, without slots 23, what was drafted since")
    assert "drafted" not in told_list([21, 22, 23], [20, 21, 22], [[10, 11, 12]], 2)


def test_a_graph_that_is_not_planned_again_is_seen():
    rows = failed(rows_of(tiny.PlansOnce, ("math.decode",)))
    assert {(row.status, row.case.path) for row in rows} == {(Outcome.FAIL, "graph")}
    assert all(
        "Cause: metadata of forward 0, row 0 (request 0): it attends to 1 keys and must to" in row.reason
        for row in rows
    )


def test_offsets_of_other_lengths_are_told():
    told = told_list([20, 21, 22], [12, 20, 21], [[10, 11, 12]], 1)
    assert told.startswith(
        "its list begins at entry 2 of the packed index list, in which its own tokens begin at entry 3"
    )


def test_a_case_that_ends_its_process_is_an_error_and_the_run_goes_on():
    subject = Subject(tiny.DiesInVerify, "its_own")
    (decode, *_), (verify, *_) = (selected_cases(subject, f"math.{kind}") for kind in ("decode", "target_verify"))
    with running(subject) as run:
        rows = [run(case) for case in (verify, decode)]
    assert [row.status for row in rows] == [Outcome.ERROR, Outcome.PASS]
    assert rows[0].reason == "its process ended by exit code 7; the next case runs in a fresh one"


def test_its_process_has_its_environment_and_ours_does_not():
    subject = Subject(tiny.Tiny, "its_own")
    with Isolated(subject) as isolated:
        assert isolated.run(selected_cases(subject, "math.decode", 2)[0]).status is Outcome.PASS
    assert "TINY_DEVICE" not in os.environ


def test_another_version_is_not_run():
    report = run_conformance(tiny.OfAnotherVersion)
    assert {(row.status, row.reason) for row in report.rows} == {
        (Outcome.NOT_RUN, "tiny 3.0 is installed (the driver knows 1.0, 2.0)")
    }


def test_what_a_driver_does_not_run_is_listed_and_it_earns_no_profile():
    report = run_conformance(tiny.Tiny, select="math.decode", quick=True)
    listed = [row for row in report.rows if row.status is Outcome.NOT_RUN]
    assert {"plan.*", "graph.guards", "worker.*"} <= {each for row in listed for each in row.check.split(", ")}
    assert all(row.excused and row.reason for row in listed)
    assert report.profile_cases == {}
    assert passed(report.rows, {f"{row.backend}/{row.kernel}": totals([row.case]) for row in report.rows}) == {}
    assert selected_cases(Subject(tiny.Tiny, "its_own"), "plan.*") == []


def test_an_unknown_backend_of_a_known_project_names_those_there_are():
    with pytest.raises(BackendUnavailableError, match="there are sglang:flashinfer_mla"):
        foreign_backend("sglang:flash")
    assert foreign_backend("my_package:MyBackend") is None


KNOWN = {"sglang": "0.5.23", "vllm": "0.33.0"}


@pytest.mark.parametrize("found", [None, "0.6.0"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_without_its_package_or_with_another_version_a_project_is_not_run(monkeypatch, name, device, found):
    def version(package):
        if found is None:
            raise PackageNotFoundError(package)
        return found

    monkeypatch.setattr(places, "version", version)
    project = name.partition(":")[0]
    reason = f"{project} is not installed" if found is None else f"{project} {found} is installed"
    subjects, absent = resolve_subjects(name, device=device)
    assert subjects == []
    if (name, device) != ("vllm:cpu_attn", "cuda"):
        assert f"{reason} (the driver knows {KNOWN[project]})" in {row.reason for row in absent}
    assert {row.status for row in absent} == {Outcome.NOT_RUN}


def test_of_keys_and_values_both_are_where_a_token_is():
    world = World(Setup(ReferenceBackend, CacheFormat.KV, 16))
    vector = torch.randn(*world.token_shape, dtype=torch.float64)
    world.write(world.memory, torch.tensor([3, 5]), torch.stack((vector, vector)))
    world.memory[0, 5, 1] += 1
    held = [torch.equal(slot, world.token_of(vector)) for slot in world.tokens_in(world.memory)]
    assert held.index(True) == 3
    assert held.count(True) == 1
