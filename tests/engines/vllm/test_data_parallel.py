"""Data parallelism of a model with experts: ranks step together, in graphs of one size, and without requests too."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
from vllm.utils.network_utils import get_open_port

from tests.engines.vllm.engine import CAPTURE_SIZES, MAX_MODEL_LEN, Row, Run, prompts, run
from tests.engines.vllm.laws import assert_attended, assert_compared, wrong_drafts
from tests.engines.vllm.recompute import NUM_PROMPTS, NUM_TOKENS, plain
from tests.engines.vllm.rows import BOTH, FULL
from tests.engines.vllm.shadow import compared

EXPERTS = {"gqa": {"num_experts": 2}, "mla-1": {"n_routed_experts": 2, "first_k_dense_replace": 99}}
"""Fields by which vLLM counts a model among those with experts; no layer has any, which attention does not see."""
_SIZES = [*CAPTURE_SIZES, 2 * MAX_MODEL_LEN]
WIDE = (
    ("max_num_batched_tokens", 2 * MAX_MODEL_LEN),
    ("compilation_config", {"mode": 0, "cudagraph_mode": BOTH, "cudagraph_capture_sizes": _SIZES}),
)
"""A rank without requests has one of more tokens than a context."""
ROWS = [
    Row("gqa", "ATTN_BACKENDS_FA3", caching=True),
    Row("gqa", "ATTN_BACKENDS_FA3", FULL, caching=True),
    Row("mla-1", "ATTN_BACKENDS_TRTLLM_MLA", BOTH, caching=True, block_size=32),
    Row("gqa", "ATTN_BACKENDS_FA3", BOTH, others=WIDE),
]
SHARES = slice(0, NUM_PROMPTS - 1), slice(NUM_PROMPTS - 1, NUM_PROMPTS)
"""Of the prompts: the second rank has one, then none."""


@pytest.mark.full
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_ranks_decode_as_one_engine(row: Row, models: Path) -> None:
    """Calls without a request, too, equal float64, and write no slot that a request or the prefix cache has."""
    tokens = plain(row.model, models, NUM_PROMPTS, False).tokens
    drafted = plain(row.model, models, NUM_PROMPTS, True, False).drafts
    busy, idle = ranks = on_two_ranks(row, models)
    for found, share in zip(ranks, SHARES, strict=True):
        assert found.tokens == tokens[share]
        wanted = {
            (i - share.start, known): ids for (i, known), ids in drafted.items() if i in range(NUM_PROMPTS)[share]
        }
        assert wrong_drafts(found, Run([], wanted), prompts(NUM_PROMPTS)[share]) == []
        assert bool(found.graphs.get("replayed")) == (row.graphs != "NONE")
    assert busy.steps.total() == idle.steps.total()
    assert busy.idle == 0
    assert idle.idle > busy.steps["target_verify"] // 2
    assert bool(busy.cached) == row.caching


def on_two_ranks(row: Row, models: Path) -> Sequence[Run]:
    """What came out of each, in a process of its own. Steps are synchronous: as vLLM's `LLM` waits for other ranks in
    one process, asynchronous ones would wait for one another.
    """
    others = {"hf_overrides": EXPERTS[row.model], "distributed_executor_backend": "uni"}
    row = replace(row, is_async=False, others=(*row.others, *others.items()))
    shared = {"VLLM_DP_SIZE": "2", "VLLM_DP_MASTER_PORT": str(get_open_port()), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    given = [(row, models, share, shared | {"VLLM_DP_RANK": str(rank)}) for rank, share in enumerate(SHARES)]
    with get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        return pool.starmap(_on_rank, given, chunksize=1)


def _on_rank(row: Row, models: Path, share: slice, environment: dict[str, str]) -> Run:
    os.environ |= environment
    with compared() as shadow:
        found = run(row, models, prompts(NUM_PROMPTS)[share], NUM_TOKENS, begin=shadow.begin)
    assert_attended(row, found)
    assert_compared(row, found, shadow)
    return found
