"""What every run must show."""

from __future__ import annotations

from pathlib import Path

from tests.engines.vllm.engine import NUM_DRAFTED, Row, Run, prompts, run
from tests.engines.vllm.kinds import draft_steps, wrong_layers
from tests.engines.vllm.recompute import NUM_TOKENS, plain
from tests.engines.vllm.shadow import Shadow, compared, stepwise


def check(row: Row, models: Path, num_prompts: int) -> tuple[Run, Shadow]:
    """Run a row, and all laws on what came out; `AssertionError` says which does not hold."""
    with compared() as shadow, stepwise(row):
        found = run(row, models, prompts(num_prompts), NUM_TOKENS, begin=shadow.begin)
    assert found.tokens == plain(row.model, models, num_prompts, False).tokens, "tokens of plain decoding"
    exact = plain(row.model, models, num_prompts, True, row.is_async)
    wrong = wrong_drafts(found, exact, prompts(num_prompts))
    assert not wrong, f"drafts on attention in float64: {'; '.join(wrong)}"
    assert found.accepted == exact.accepted, "accepted drafts by position"
    assert len(found.accepted) == NUM_DRAFTED, "vLLM's metrics"
    assert_attended(row, found)
    assert_compared(row, found, shadow)
    assert bool(found.padded) == (row.graphs != "NONE"), "2 or 3 requests run in the graph of 4"
    assert bool(found.cached) == row.caching, "tokens from the cache"
    assert found.is_async == row.is_async, "scheduling"
    return found, shadow


def wrong_drafts(found: Run, wanted: Run, given: list[list[int]]) -> list[str]:
    """Where another token was drafted. given: the prompts.

    A step after which no request wants drafts has none. When that is depends on what else is scheduled, so that the two
    may differ there: behind the last token but one of a text.
    """
    wrong = []
    for key in sorted({*found.drafts, *wanted.drafts}):
        request, known = key
        mine, other = found.drafts.get(key), wanted.drafts.get(key)
        is_wanted = known < len(given[request]) + len(found.tokens[request]) - 1
        if mine != other and (is_wanted or (mine and other)):
            wrong.append(f"{mine} for {other} of prompt {request}, {known} tokens known")
    return wrong


def assert_attended(row: Row, found: Run) -> None:
    """The backend of the row, and no other, attended in every layer in the engine's steps, kind by kind."""
    assert found.steps
    loops = sum(number - 1 for number in found.drafted if number) if row.forwards > 1 else 0
    asked = dict.fromkeys(found.layers[0], found.steps) | dict.fromkeys(
        found.layers[1], draft_steps(found.steps, loops)
    )
    wrong = wrong_layers(found.attended, asked)
    assert not wrong, "; ".join(wrong)
    backend = row.backend.removeprefix("ATTN_BACKENDS_").lower()
    by = {kind["backend"] for kinds in found.attended.values() for kind in kinds.values()}
    assert by == {"fa3" if backend == "fa3_mla" else backend}


def assert_compared(row: Row, found: Run, shadow: Shadow) -> None:
    """Every call that was counted was compared, in graphs where the row has graphs."""
    forwards = sum(kind["forwards"] for kinds in found.attended.values() for kind in kinds.values())
    assert sum(shadow.compared.values()) == forwards
    for model in ("target", "draft"):
        assert shadow.compared[f"{model} layer, eagerly"], "prompts"
        assert bool(shadow.compared[f"{model} layer, in a graph"]) == (row.graphs != "NONE")
    assert bool(found.graphs.get("replayed")) == (row.graphs != "NONE")
