"""The tables of vLLM's page say what the committed rows of its engines on a GPU say."""

from __future__ import annotations

from typing import Any

from attn_backends import results
from tests.quoted import ROOT, text_of

PAGE = "docs/vllm.md"
SIDES = {
    "FlashAttention-3": ("llama-fa3-vllm_flash_attn", "llama-flash_attn"),
    "Triton, grouped-query": ("llama-fa3-triton", "llama-triton_attn"),
    "FlashMLA": ("deepseek-trtllm_mla-flashmla", "deepseek-flashmla"),
    "FlashAttention-3 of MLA": ("deepseek-fa3_mla-vllm_flash_attn", "deepseek-flash_attn_mla"),
    "Triton, MLA": ("deepseek-trtllm_mla-triton", "deepseek-triton_mla"),
}


def measured(name: str) -> dict[Any, Any]:
    kept = results.read(ROOT / f"docs/results/h200/engine_vllm_{name}.json").rows
    return {(row["side"], row["batch"]): row for row in kept if row["ok"] and "batch" in row}


def table() -> list[str]:
    """The page's: FlashMLA's rows are of the run of its two engines, but for the ratio to the fastest of all six."""
    of_all = measured("llama") | measured("deepseek")
    of_two = of_all | measured("flashmla")
    found = []
    for name, sides in SIDES.items():
        for batch in (1, 32, 128):
            ours, theirs = (of_two[side, batch] for side in sides)
            cells = [f"{side['tokens_per_s']:,.0f}" for side in (ours, theirs)]
            cells += [f"{ours['of_same_kernel']:.3f}", f"{of_all[sides[0], batch]['of_best']:.3f}"]
            cells += [f"{side['launches_us'][0][1]:,.0f}" for side in (ours, theirs)]
            cells += [f"{side['metadata_us']:.0f}" for side in (ours, theirs)]
            found.append(f"| {name} | {batch} | {' | '.join(cells)} |")
    return found


def test_the_table_of_the_page_is_the_committed_rows() -> None:
    _, _, after = (ROOT / PAGE).read_text().partition("| kernel | requests | ours, tokens/s |")
    assert after.partition("\n\n")[0].splitlines()[2:] == table()


def test_the_page_has_the_profile_of_each_lower_case() -> None:
    rows = measured("llama") | measured("deepseek") | measured("flashmla")
    assert all((row.get("of_same_kernel") or 1) >= 0.98 for row in rows.values())
    lower = {key: row["best"] for key, row in rows.items() if row.get("of_best", 1) < 0.95}
    ours, theirs = "deepseek-trtllm_mla-triton", "deepseek-flash_attn_mla"
    assert lower == {(ours, 32): theirs, (ours, 128): theirs}

    def attention(side: str, batch: int) -> str:
        launches = rows[side, batch]["launches_us"]
        return f"{sum(time for name, time, _ in launches if '_attend' in name or 'flash::' in name):,.0f}"

    first, then = ([attention(side, batch) for side in (ours, theirs)] for batch in (32, 128))
    told = f"{first[0]} us in Triton and {first[1]} in FlashAttention-3 at 32 requests, {then[0]} and {then[1]} at 128"
    assert told in text_of(PAGE)
