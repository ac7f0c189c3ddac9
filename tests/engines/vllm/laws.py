"""What every run must show."""

from __future__ import annotations

from tests.engines.vllm.engine import Row, Run
from tests.engines.vllm.kinds import draft_steps, wrong_layers
from tests.engines.vllm.shadow import Shadow


def assert_attended(row: Row, found: Run) -> None:
    """The backend of the row, and no other, attended in every layer in the engine's steps, kind by kind."""
    assert found.steps
    loops = (row.forwards - 1) * (found.steps.total() - found.undrafted)
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
