"""Code lines of the hot path, what an engine's step passes through until a kernel is launched, then and now.

    python -m tests.hot_path

prints a table. Then is b0a2d93, before states were planned once; `THEN` has its lines.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from tests.code_lines import ROOT, numbers_of_code

THEN: dict[str, tuple[int, tuple[str, ...]]] = {
    "`spec_metadata/layout`, with queries and checks": (
        439,
        ("layout", "query", "step_checks", "admission", "errors"),
    ),
    "`spec_metadata/static_inputs`": (145, ("static_inputs", "widths", "bound_inputs", "state", "mixed", "upload")),
    "`spec_metadata/visibility`": (95, ("visibility",)),
    "`spec_metadata/buffers`, `capacity`, `paging`": (355, ("buffers", "capacity", "paging")),
    "`spec_metadata/plans`": (
        436,
        ("plans/block_table", "plans/compressed", "plans/csr", "plans/declared", "plans/ragged", "plans/slots"),
    ),
    "`spec_metadata/tree`, `acceptance`, `sampling`": (210, ("tree", "acceptance", "sampling")),
    "`spec_metadata/__init__`, names": (56, ("__init__",)),
    "`backend` (before, `base`), `contract/kernel`": (
        382,
        ("@backend", "@contract/definition", "@contract/checked_layers", "@contract/kernel"),
    ),
    "`memory/arenas`, `static_memory`": (
        180,
        ("@memory/phases", "@memory/static_memory", "@memory/reads", "@memory/phase_sets"),
    ),
    "`planning/metadata`, `planners`": (112, ("@planning/metadata", "@planning/captured", "@planning/planners")),
    "`runner`": (205, ("@runner",)),
    "`kernels/plan_operators`": (157, ("@kernels/plan_operators",)),
}
"""Old files: their lines then, and where their content is now. Of `spec_metadata`, or with @ of `attn_backends`."""

SINCE: dict[str, tuple[str, ...]] = {
    "bound inputs, committed states": (
        "bound_inputs",
        "state",
        "@kernels/plan_operators:BoundSizes",
        "@kernels/plan_operators:_bound_inputs",
        "@planning/planners:bind_load",
        "@planning/captured:Captured.check_bound",
        "@contract/kernel:Kernel.bound_reasons",
    ),
    "ragged and mixed steps": (
        "widths",
        "mixed",
        "query:BoundedQuery",
        "query:_check_bounds",
        "query:check_room",
        "query:most_rows",
        "query:as_packed",
        "capacity:Capacity.ragged_bucket",
        "static_inputs:_fill_bounded",
        "static_inputs:fill_rows",
        "static_inputs:closed",
    ),
    "draft blocks, kept rows, frozen drafts": (
        "visibility:BlockRows",
        "visibility:KeptRows",
        "visibility:kept_rows",
        "admission:check_kept",
        "admission:check_num_kept",
        "layout:Step.draft_block",
        "layout:Step.frozen_draft",
        "@planning/metadata:Metadata.keeping",
        "@planning/metadata:Metadata.reading",
        "@planning/metadata:slots_to_write",
        "@planning/metadata:all_rows",
    ),
    "windows and sinks": ("visibility:windowed", "visibility:drafted", "visibility:TreePart.within"),
    "sets of phases, events": (
        "@memory/phase_sets",
        "@memory/reads",
        "capacity:Capacity.with_draft",
        "@memory/phases:PhaseMemory.renew",
        "@memory/phases:PhaseMemory.forget",
        "@planning/captured:Captured._check_alive",
        "@planning/metadata:Metadata.reads_end",
        "@planning/metadata:Metadata.wait_for_reads",
    ),
    "vendors' schedules in the planning launch": (
        "@kernels/plan_operators:PagePlanner",
        "@contract/kernel:Schedules.name",
    ),
    "chains as two parts": ("visibility:chain_parts",),
    "checks of trees, masks and slots in checking mode": (
        "admission:_check_mask",
        "admission:_no_path",
        "admission:check_ancestors",
        "admission:_check_own_slots",
        "admission:_check_pages",
        "@planning/captured:Captured._check_replay",
        "@planning/captured:_same_requests",
    ),
}
"""What came later: files, and definitions in files."""


def text_of(file: str) -> str:
    path = f"attn_backends/{file[1:]}.py" if file.startswith("@") else f"spec_metadata/{file}.py"
    return (ROOT / path).read_text(encoding="utf-8")


def functions() -> list[int]:
    """Lines of each function of the files, from `def` to its end."""
    trees = [ast.walk(ast.parse(text_of(file))) for _, files in THEN.values() for file in files]
    found = [node for tree in trees for node in tree if isinstance(node, ast.FunctionDef)]
    return [(node.end_lineno or 0) - node.lineno + 1 for node in found]


def lines(place: str) -> int:
    """Code lines of a file, or of a definition in one."""
    file, _, name = place.partition(":")
    text = text_of(file)
    held = numbers_of_code(text)
    if not name:
        return len(held)
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        node = next(each for each in ast.iter_child_nodes(node) if getattr(each, "name", "") == part)
    assert isinstance(node, ast.FunctionDef | ast.ClassDef), f"{place} is a definition"
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return len(held & set(range(first, (node.end_lineno or 0) + 1)))


def total(places: Sequence[str]) -> int:
    """Code lines of several places."""
    return sum(map(lines, places))


def table() -> Iterator[str]:
    """The table, line by line."""
    yield "| then | lines | now |"
    yield "|---|---|---|"
    for name, (then, places) in THEN.items():
        yield f"| {name} | {then:,} | {total(places):,} |"
    now = sum(total(places) for _, places in THEN.values())
    since = sum(map(total, SINCE.values()))
    yield f"| together | {sum(then for then, _ in THEN.values()):,} | {now:,} |"
    for name, places in SINCE.items():
        yield f"| came since: {name} | | {total(places):,} |"
    yield f"| together without these | | {now - since:,} |"


def main() -> None:
    """Print the table."""
    print("\n".join(table()))


if __name__ == "__main__":
    main()
