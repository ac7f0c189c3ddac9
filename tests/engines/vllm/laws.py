"""What every run must show."""

from __future__ import annotations

from tests.engines.vllm.engine import Row, Run
from tests.engines.vllm.shadow import Shadow


def assert_attended(row: Row, found: Run) -> None:
    """The backend of the row, and no other, attended in every layer as often as the engine made a step."""
    assert found.steps
    drafted = found.undrafted + row.forwards * (found.steps - found.undrafted)
    counted = {name: sum(kind["forwards"] for kind in kinds.values()) for name, kinds in found.attended.items()}
    assert counted == dict.fromkeys(found.layers[0], found.steps) | dict.fromkeys(found.layers[1], drafted)
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
