"""SGLang's own backends under the suite, with stand-ins of their kernels: what it reports of them by itself, and that a
bug in a driver does not read as SGLang's.
"""

from __future__ import annotations

import pytest

from attn_backends.conformance import Outcome, Row, Subject, selected_cases
from attn_backends.conformance.foreign import foreign_backend
from attn_backends.conformance.foreign.isolation import running
from tests.engines.sglang import drivers

COMMITTED_ALONE = "drafted since, its own token last: the length is that of the committed tokens"
OTHER_OFFSETS = "the offsets were made from other lengths than the list"
READ_AS_DENSE = "as a view of stride 3, and read them as if they were dense"
CUT_OFF = "the slots of all forwards were cut off at the batch size, not sliced for this forward"
CAPTURED_SLOTS = "raw_out_loc of forward 0 is slots"
ENTRIES = ("c4_out_loc", "c128_out_loc")
RIGHT = ("math.decode", "math.target_verify", "math.draft_extend", "math.prefill")
DRAFTS = ("math.draft_decode", "cache.writes_owned_slots")


def rows_of(backend, checks, kind=None) -> list[Row]:
    """The first case of each check, step kind and path. kind: of them one alone."""
    subject = Subject(backend, "stand_in")
    cases = [case for check in checks for case in selected_cases(subject, check) if kind in (None, case.kind)]
    first = {(case.check, case.kind, case.path): case for case in reversed(cases)}
    with running(subject) as run:
        return [run(case) for case in first.values()]


@pytest.mark.parametrize(
    ("name", "eager", "graph"),
    [
        ("sglang:flashinfer_mla", (COMMITTED_ALONE,), (COMMITTED_ALONE, OTHER_OFFSETS)),
        ("sglang:trtllm_mla", (COMMITTED_ALONE,), (COMMITTED_ALONE,)),
        ("sglang:fa3", (), ()),
    ],
)
def test_defects_of_drafts_are_reported_with_their_causes_and_all_else_passes(name, eager, graph):
    rows = rows_of(foreign_backend(name), (*RIGHT, *DRAFTS))
    drafts = [row for row in rows if row.case.kind == "draft_decode"]
    assert {row.status for row in rows if row not in drafts} == {Outcome.PASS}
    assert {(row.check, row.case.path) for row in drafts} == {
        (check, path) for check in DRAFTS for path in ("eager", "graph")
    }
    for row in drafts:
        wanted = {*(graph if row.case.path == "graph" else eager), READ_AS_DENSE}
        told = {cause for cause in (COMMITTED_ALONE, OTHER_OFFSETS, READ_AS_DENSE) if cause in row.reason}
        assert (row.status, told) == (Outcome.FAIL, wanted), row.reason


def test_sglangs_triton_backend_passes():
    rows = rows_of(foreign_backend("sglang:triton"), (*RIGHT, *DRAFTS))
    assert {(row.case.kind, row.case.path) for row in rows} >= {("draft_decode", "eager"), ("draft_decode", "graph")}
    assert {row.status for row in rows} == {Outcome.PASS}


def test_of_deepseek_v4_the_lengths_of_drafts_are_reported_and_slots_that_its_windows_do_not_write_by():
    rows = rows_of(foreign_backend("sglang:dsv4"), (*RIGHT, *DRAFTS))
    failed = {(row.check, row.case.path): row.reason for row in rows if row.status is not Outcome.PASS}
    assert failed.keys() == {(check, path) for check in DRAFTS for path in ("eager", "graph")}
    assert {row.case.kind for row in rows if row.status is Outcome.FAIL} == {"draft_decode"}
    lengths, slots = DRAFTS
    for path in ("eager", "graph"):
        assert COMMITTED_ALONE in failed[lengths, path]
        assert failed[slots, path].startswith("latent, because all that is written here is right")
        assert all(f"{name} of forward 0 has the entry of" in failed[slots, path] for name in ENTRIES)
        assert (CUT_OFF in failed[slots, path]) == (path == "graph")


@pytest.mark.parametrize("driver", [driver.__name__ for driver in drivers.DRIVEN])
@pytest.mark.parametrize("bug", ["DriverCountsOneLess", "DriverTurnsPagesRound"])
def test_the_drivers_mistake_is_an_error_and_no_failure(bug, driver):
    found = rows_of(drivers.BUGS[bug, driver], ("math.decode", "cache.writes_owned_slots"), "decode")
    broken = [row for row in found if row.status is not Outcome.PASS]
    assert broken
    assert {row.status for row in broken} == {Outcome.ERROR}
    assert all("a mistake of the driver, not of SGLang" in row.reason for row in broken)


@pytest.mark.parametrize("driver", [driver.__name__ for driver in drivers.DRIVEN])
@pytest.mark.parametrize(
    ("bug", "check", "path", "cause"),
    [
        ("DecodesOneKeyLess", "math.decode", "eager", COMMITTED_ALONE),
        ("VerifiesWhatWasCaptured", "math.target_verify", "graph", "it lists 2 keys and must list"),
    ],
    ids=["DecodesOneKeyLess", "VerifiesWhatWasCaptured"],
)
def test_the_backends_bug_is_a_failure_with_its_cause(bug, check, path, cause, driver):
    if (bug, driver) == ("VerifiesWhatWasCaptured", "DeepSeekV4"):  # its graphs look at lengths, not at slots
        check, cause = "cache.writes_owned_slots", CAPTURED_SLOTS
    rows = rows_of(drivers.BUGS[bug, driver], (check,), "target_verify" if path == "graph" else "decode")
    assert {row.case.path for row in rows if row.status is Outcome.FAIL} == {path}
    assert {row.status for row in rows if row.case.path != path} == {Outcome.PASS}
    assert all(cause in row.reason for row in rows if row.status is Outcome.FAIL)


@pytest.mark.parametrize("mended", [drivers.DenseSlices, drivers.MendedDrafts])
def test_a_draft_whose_cause_is_mended_passes(mended):
    rows = rows_of(mended, DRAFTS)
    assert {row.case.path for row in rows if row.case.kind == "draft_decode"} == {"eager", "graph"}
    assert {row.status for row in rows} == {Outcome.PASS}
