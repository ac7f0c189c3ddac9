"""Six bugs of adapters: tokens show few of them, the comparison of every call shows each. A seventh changes no number,
and its forwards are counted as another kind.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.vllm.defects import CAUGHT, CAUGHT_IN_MLA, SWITCH, planted
from tests.engines.vllm.engine import EngineFailed, Row, prompts, run
from tests.engines.vllm.gpu.cases import WITH_BUGS
from tests.engines.vllm.laws import assert_attended
from tests.engines.vllm.shadow import compared

GQA = Row("gqa", "ATTN_BACKENDS_FA3", "FULL_DECODE_ONLY")
MLA = Row("mla-1", "ATTN_BACKENDS_TRTLLM_MLA", "FULL_DECODE_ONLY", block_size=32)
CASES = [pytest.param(GQA, *each, id=each[0]) for each in CAUGHT.items()]
OF_MLA = [pytest.param(MLA, *each, id=f"mla, {each[0]}", marks=pytest.mark.full) for each in CAUGHT_IN_MLA.items()]


@pytest.mark.parametrize(("row", "name", "words"), [*CASES, *OF_MLA])
def test_a_bug_is_caught_by_name(
    row: Row, name: str, words: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, name)
    with compared() as shadow, pytest.raises(EngineFailed, match=words):
        run(row, models, prompts(3), 8, begin=shadow.begin)


def test_a_verify_that_is_planned_as_a_prefill_is_counted(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "verify as prefill")
    row = Row("gqa", "ATTN_BACKENDS_FA3")
    found = run(row, models, prompts(2), 8)
    with pytest.raises(AssertionError, match=r"layers.0.self_attn.attn: 0 of \d target_verify"):
        assert_attended(row, found)


def test_a_gpu_runs_with_each() -> None:
    found = {model: {case.bug for case in WITH_BUGS if case.model == model} for model in ("gqa", "mla-1")}
    assert found == {"gqa": CAUGHT.keys(), "mla-1": CAUGHT_IN_MLA.keys()}


def test_a_bug_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "no bug")
    with pytest.raises(ValueError, match="'no bug'; the bugs are draft length one short"):
        planted()
