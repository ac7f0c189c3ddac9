"""What `python -m tests.gpu drafts` asks of workers, on a CPU's recorded graphs, with fewer requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from tests import device_laws
from tests.gpu import drafts
from tests.gpu.workers import judged
from tests.mutants import MUTANTS
from tests.serving_scenes import TREE

GQA, FEW = ("gqa", "fa3", 4), {"num_requests": 4}
LAWS = {
    "ragged verify": partial(device_laws.check_drafts, "ragged verify", GQA, 1, **FEW),
    "adaptive steps": partial(device_laws.check_drafts, "adaptive steps", GQA, 1, **FEW),
    "windowed draft": partial(device_laws.check_drafts, "windowed draft", ("mla", "flashinfer_mla", 16), 0, **FEW),
    "draft blocks": partial(device_laws.check_blocks, 1, **FEW),
    "gpt-oss": partial(device_laws.check_gpt_oss, TREE, **FEW),
}
CAUGHT = {
    "ragged verify": "lengths_count_the_largest_width",
    "adaptive steps": "sets_share_a_plan",
    "windowed draft": "verify_reads_the_draft_s_window",
    "draft blocks": "block_leaves_its_mask_behind",
    "gpt-oss": "sinks_counted_twice_in_a_tree",
}


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def judge(law: Callable[[], object]) -> dict[str, str]:
    (row,) = judged([({}, law)])
    return row


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", LAWS)
def test_a_law_holds_and_fails_with_a_known_bug(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge(LAWS[name]) == {"status": "pass"}
    MUTANTS[CAUGHT[name]].plant(monkeypatch)
    found = judge(LAWS[name])
    assert found["status"] == "fail"
    assert found["reason"].startswith("AssertionError"), found


def test_every_law_has_its_places() -> None:
    found = [about for about, _ in drafts.laws("cpu")]
    assert {about["law"] for about in found} >= {*LAWS, "eagle3 chain", "eagle3 tree", "eagle3 window"}
    assert len({tuple(about.items()) for about in found}) == len(found) == 23
    assert [about["draft"] for about in found if about["law"] == "gpt-oss"] == ["chain", "tree"]


def test_a_law_that_breaks_does_not_hide_the_next() -> None:
    rows = list(judged([({"law": "a"}, lambda: 1 // 0), ({"law": "b"}, lambda: None)]))
    assert [row["status"] for row in rows] == ["fail", "pass"]
    assert "ZeroDivisionError" in rows[0]["reason"]
