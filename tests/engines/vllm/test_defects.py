"""Six bugs of adapters: tokens show few of them, the comparison of every call shows each."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_backends.engines.vllm.plans import Plans
from tests.engines.vllm.defects import DEFECTS
from tests.engines.vllm.engine import EngineFailed, Row, prompts, run
from tests.engines.vllm.laws import assert_attended
from tests.engines.vllm.shadow import compared

ROW = Row("gqa", "ATTN_BACKENDS_FA3", "FULL_DECODE_ONLY")


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_caught_by_name(name: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, check = DEFECTS[name]
    plant(monkeypatch)
    with compared() as shadow:
        shadow.compares = False  # dummy batches, while graphs are captured
        with pytest.raises(EngineFailed, match=check):
            run(ROW, models, prompts(3), 8, begin=shadow.begin)


def test_a_verify_that_is_planned_as_a_prefill_is_counted(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is the same; a kernel for prompts is slower, and may not be one that graphs can record."""
    monkeypatch.setattr(Plans, "_step", lambda self, batch: batch.prefill())
    row = Row("gqa", "ATTN_BACKENDS_FA3")
    found = run(row, models, prompts(2), 8)
    with pytest.raises(AssertionError, match=r"layers.0.self_attn.attn: 0 of \d target_verify"):
        assert_attended(row, found)
