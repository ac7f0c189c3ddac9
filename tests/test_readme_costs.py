"""The README's table of costs says what the runs of both engines say, and names the fastest of each."""

from __future__ import annotations

from typing import Any

from attn_backends import results
from tests.quoted import README, ROOT, rows, text_of

BATCHES = (1, 32, 128)
LLAMA, DEEPSEEK, SGLANG = "engine_vllm_llama", "engine_vllm_deepseek", "engine_sglang_throughput"
FA3 = ("llama-fa3-vllm_flash_attn", "llama-flash_attn")
FLASHMLA = ("deepseek-trtllm_mla-flashmla", "deepseek-flashmla")
FA3_MLA = ("deepseek-fa3_mla-vllm_flash_attn", "deepseek-flash_attn_mla")
OURS, PAGED = "deepseek-attn_", ("llama-attn_fa3.vllm_flash_attn-page64", "llama-fa3-page64")
COLUMNS = "| what | requests | ours | the same kernel in theirs | their fastest in the run |"
COSTS = [
    ("vLLM, Llama: `fa3` on FlashAttention-3", LLAMA, "tokens_per_s", FA3, (128,)),
    ("vLLM, DeepSeek: `trtllm_mla` on FlashMLA", DEEPSEEK, "tokens_per_s", FLASHMLA, BATCHES),
    ("vLLM, DeepSeek: `fa3` on FlashAttention-3", DEEPSEEK, "tokens_per_s", FA3_MLA, (32, 128)),
    ("SGLang, Llama: `fa3` on FlashAttention-3", SGLANG, "tokens_per_s", PAGED, (128,)),
    (
        "SGLang, DeepSeek: `trtllm_mla` on FlashMLA",
        SGLANG,
        "tokens_per_s",
        (f"{OURS}trtllm_mla.flashmla-page64", "deepseek-flashmla-page64"),
        (32, 128),
    ),
    (
        "SGLang, DeepSeek: `flashinfer_mla` on FlashInfer",
        SGLANG,
        "tokens_per_s",
        (f"{OURS}flashinfer_mla.flashinfer_fa3-page1", "deepseek-flashinfer-page1"),
        (128,),
    ),
    ("vLLM, Llama, metadata in us: `fa3`", LLAMA, "metadata_us", FA3, (128,)),
    ("vLLM, DeepSeek, metadata in us: `trtllm_mla`", DEEPSEEK, "metadata_us", FLASHMLA, (32,)),
]
"""Of the README's table of costs: what a row is called, the run, its key, both sides, numbers of requests."""


def measured(row: Any, key: str) -> str:
    """A median, with the least and the most where the run has them."""
    if not row["ok"]:
        return "out of memory"
    around = f" ({row['least']:,.0f} to {row['most']:,.0f})" if key == "tokens_per_s" else ""
    return f"{row[key]:,.0f}{around}"


def costs() -> list[str]:
    """Rows of the README's table of costs. A side with `best`, the fastest of the engine's own, is one of ours."""
    found = []
    for what, run, key, sides, batches in COSTS:
        for batch in batches:
            ours, same = (row for side in sides for row in rows(f"h200/{run}", side=side, batch=batch))
            model = ours["side"].split("-")[0]
            sides_of = [row for row in rows(f"h200/{run}") if row["side"].startswith(model) and row.get(key)]
            theirs = [row for row in sides_of if row["batch"] == batch and not row.get("best")]
            is_speed = key == "tokens_per_s"
            best = max(theirs, key=lambda row: row[key]) if is_speed else min(theirs, key=lambda row: row[key])
            assert len(theirs) > 1
            assert not is_speed or best["side"] == ours["best"]
            name = best["side"].split("-")[1]
            name = name if run == SGLANG else name.upper()
            fastest = "the same" if best["side"] == same["side"] else f"`{name}`: {measured(best, key)}"
            found.append(f"| {what} | {batch} | {measured(ours, key)} | {measured(same, key)} | {fastest} |")
    return found


def test_the_table_of_costs_says_what_the_results_say_and_names_their_fastest():
    _, table = (ROOT / README).read_text().split(f"{COLUMNS}\n|---|---|---|---|---|\n")
    assert table.split("\n\n")[0].splitlines() == costs()
    llama, deepseek, sglang = (
        results.read(ROOT / f"docs/results/h200/{run}.json").head.date for run in (LLAMA, DEEPSEEK, SGLANG)
    )
    assert llama == deepseek
    assert f"vLLM's of {llama}, SGLang's of {sglang}" in text_of(README)
