"""vLLM's adaptive verification: its host has an even share of rows for each request, the device what the draft's
confidences say. Every attention call is compared by the device's lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.worker.gpu.spec_decode import adaptive_verification

from tests.engines.vllm import stand_ins
from tests.engines.vllm.engine import EngineFailed, Row, Run, prompts, run
from tests.engines.vllm.recompute import NUM_PROMPTS, greedy_by_transformers, plain
from tests.engines.vllm.rows import BOTH, FULL
from tests.engines.vllm.shadow import Shadow, compared
from tests.engines.vllm.test_block_drafts import END, PROMPTS, assert_drafts, judged

GQA = Row("gqa", "ATTN_BACKENDS_FA3", FULL, is_cut=True)
ROWS = [
    pytest.param(GQA, marks=pytest.mark.full),
    Row("mla-1", "ATTN_BACKENDS_FLASHINFER_MLA", BOTH, is_cut=True),
    pytest.param(Row("mla-1", "ATTN_BACKENDS_FA3_MLA", FULL, is_cut=True), marks=pytest.mark.full),
]
FEWER, SHORTER = 5, 8
"""Prompts, one more than fit at once, and tokens of a text."""


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """Rows of each request, on the device, of every batch that was cut: uneven ones are none of the host's."""
    stand_ins.install_adaptive_verification(monkeypatch)
    manager, found = adaptive_verification.AdaptiveVerificationManager, list[list[int]]()
    reallocate = manager.reallocate_drafts

    def noted(self: Any, req_ids: list[str], *rest: Any) -> Any:
        result = reallocate(self, req_ids, *rest)
        found.append(result[1][: len(req_ids) + 1].diff().tolist())
        return result

    monkeypatch.setattr(manager, "reallocate_drafts", noted)
    yield found
    assert any(max(lens) - min(lens) > 1 for lens in found), "shares of the host differ by one at most"


def assert_cut(found: Run, shadow: Shadow) -> None:
    """Where the target attended."""
    assert shadow.compared["target layer, in a graph"]
    assert shadow.compared["target layer, eagerly"] > len(found.layers[0]), "verifies beside prompts"
    for name in found.layers[0]:
        kinds = found.attended[name]
        assert sum(kind["forwards"] for kind in kinds.values()) == found.steps.total()
        assert kinds.keys() == {"prefill", "target_verify"}


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_draft_loop(row: Row, models: Path, cuts: list[list[int]]) -> None:
    with compared() as shadow:
        found = run(row, models, prompts(FEWER), SHORTER, begin=shadow.begin)
    wanted = plain(row.model, models, NUM_PROMPTS, False).tokens[:FEWER]
    assert found.tokens == [text[:SHORTER] for text in wanted]
    drafts = plain(row.model, models, NUM_PROMPTS, True).drafts
    both = found.drafts.keys() & drafts.keys()
    assert len(both) > 10
    assert [found.drafts[key] for key in both] == [drafts[key] for key in both]
    assert_cut(found, shadow)


def test_a_block_draft(cuts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, more = [*PROMPTS, *PROMPTS], {"enable_adaptive_verification": True}
    with compared() as shadow:
        place = "ATTN_BACKENDS_FA3", FULL, shadow.begin, given, END
        oracle, found = judged("DSpark", tmp_path, monkeypatch, *place, **more)
    assert_drafts(oracle, found, given, END)
    for prompt, text in zip(given, found.tokens, strict=True):
        assert text == greedy_by_transformers(tmp_path / "target", prompt, text)
    assert_cut(found, shadow)


def test_a_kernel_of_one_width_is_refused(models: Path) -> None:
    row = Row("mla-1", "ATTN_BACKENDS_TRTLLM_MLA", FULL, block_size=32, is_cut=True)
    with pytest.raises(EngineFailed, match="needed for adaptive verification"):
        run(row, models, [[1, 2, 3]], 1)
