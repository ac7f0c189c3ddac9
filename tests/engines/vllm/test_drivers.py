"""vLLM's own backends under the suite, with stand-ins of their kernels: what is right passes, and a mistake of a driver
does not read as vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from attn_backends.conformance import Outcome
from tests.engines.vllm import drivers

CHECKS = ("math.decode", "math.draft_decode", "math.target_verify", "math.draft_extend", "cache.writes_owned_slots")
COMMITTED_ALONE = "drafted since, its own token last: the length is that of the committed tokens"


def each(quick: type) -> list[Any]:
    """All drivers. quick: the one of which a test is quick."""
    marks = {driver: () if driver is quick else pytest.mark.full for driver in drivers.DRIVEN}
    return [pytest.param(driver, marks=marks[driver], id=driver.__name__) for driver in drivers.DRIVEN]


@pytest.fixture(scope="module")
def rows_of() -> Iterator[Any]:
    """`drivers.rows_of` in a process of their own, since they choose another platform of vLLM than its engine here."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield lambda *given: pool.submit(drivers.rows_of, *given).result()


@pytest.mark.parametrize("driver", each(quick=drivers.FlashMLA))
def test_what_vllm_plans_is_right(rows_of, driver):
    rows = rows_of(driver, CHECKS)
    assert {row.status for row in rows} == {Outcome.PASS}
    paths = {"eager"} if driver is drivers.CPUAttn else {"eager", "graph"}
    assert {row.case.path for row in rows if row.case.kind == "draft_decode"} == paths


@pytest.mark.parametrize("driver", each(quick=drivers.FlashAttn))
@pytest.mark.parametrize("bug", ["DriverCountsOneLess", "DriverTurnsPagesRound"])
def test_the_drivers_mistake_is_an_error_and_no_failure(rows_of, bug, driver):
    found = rows_of(drivers.BUGS[bug, driver.__name__], ("math.decode", "cache.writes_owned_slots"), "decode")
    broken = [row for row in found if row.status is not Outcome.PASS]
    assert broken
    assert {row.status for row in broken} == {Outcome.ERROR}
    assert all("a mistake of the driver, not of vLLM" in row.reason for row in broken)


@pytest.mark.parametrize("driver", each(quick=drivers.FlashMLA))
@pytest.mark.parametrize(
    ("bug", "check", "path", "cause"),
    [
        ("DecodesOneKeyLess", "math.decode", "eager", COMMITTED_ALONE),
        ("HoldsWhatWasCaptured", "math.target_verify", "graph", "keys and must to"),
    ],
    ids=["DecodesOneKeyLess", "HoldsWhatWasCaptured"],
)
def test_the_backends_bug_is_a_failure_with_its_cause(rows_of, bug, check, path, cause, driver):
    if (bug, driver) == ("HoldsWhatWasCaptured", drivers.CPUAttn):  # it captures nothing
        bug, path, cause = "VerifiesOthers", "eager", "key 0 is slot"
    rows = rows_of(drivers.BUGS[bug, driver.__name__], (check,), check.removeprefix("math."))
    assert {row.case.path for row in rows if row.status is Outcome.FAIL} == {path}
    assert {row.status for row in rows if row.case.path != path} <= {Outcome.PASS}
    assert all(cause in row.reason for row in rows if row.status is Outcome.FAIL)


def test_values_that_were_written_elsewhere_are_told(rows_of):
    rows = rows_of(drivers.StoresValuesElsewhere, ("cache.writes_owned_slots",), "target_verify")
    assert {row.status for row in rows} == {Outcome.FAIL}
    assert all("row 0 belongs to slot" in row.reason and "is nowhere" in row.reason for row in rows)
