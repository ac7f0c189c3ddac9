"""Two ranks on a CPU: of tensor parallelism, and of data parallelism, which pads batches and has idle ranks."""

from __future__ import annotations

import pytest

from tests.engines.sglang.cases import FA3, FLASHINFER, Case
from tests.engines.sglang.engine import run

TENSOR = {"tp_size": 2}
DATA = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
RANKS = {
    "gqa-tensor": (Case("gqa", FA3, 1), TENSOR),
    "gqa-block-tensor": (Case("gqa", FA3, 1, in_blocks=True), TENSOR),
    "gqa-dspark-tensor": (Case("gqa", FA3, 1, in_blocks=True, dspark="compact"), TENSOR),
    "mla-tree-tensor": (Case("mla", FLASHINFER, 4), TENSOR),
    "mla-tree-data": (Case("mla", FLASHINFER, 4), DATA),
}


@pytest.mark.parametrize(("case", "options"), RANKS.values(), ids=RANKS)
def test_two_ranks_give_the_tokens_and_drafts_of_one(runs, models, tmp_path, case, options):
    both = run(tmp_path / "engine", **(case.options(models) | options))
    assert both.error == ""
    assert both.tokens == runs(case).tokens
    assert case.wrong_counts(both) == []
    assert case.wrong_drafts(both, models) == []
    idle = [forward for forward in both.forwards if forward["forward"] == "IDLE"]
    assert bool(idle) is (options is DATA)
    assert len(both.forwards) - len(idle) > len(runs(case).forwards)
