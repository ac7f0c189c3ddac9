"""The tables of vLLM's page say what the committed rows of its engines on a GPU say."""

from __future__ import annotations

from attn_backends import results
from tests.quoted import ROOT

TABLE = {
    "FlashAttention-3": ("llama-fa3-vllm_flash_attn", "llama-flash_attn"),
    "Triton, grouped-query": ("llama-fa3-triton", "llama-triton_attn"),
    "FlashMLA": ("deepseek-trtllm_mla-flashmla", "deepseek-flashmla"),
    "FlashAttention-3 of MLA, 24 November": ("deepseek-fa3_mla-vllm_flash_attn", "deepseek-flash_attn_mla"),
    "Triton, MLA": ("deepseek-trtllm_mla-triton", "deepseek-triton_mla"),
}


LATER = {"FlashAttention-3, Llama": TABLE["FlashAttention-3"], "FlashMLA": TABLE["FlashMLA"]}


def test_the_later_table_is_the_committed_rows() -> None:
    file, best = ROOT / "docs/results/h100/engine_vllm_throughput.json", "deepseek-flash_attn_mla"
    rows = {(row["side"], row["batch"]): row for row in results.read(file).rows}
    heading = "| kernel of ours | vLLM's on the same kernel | vLLM's FLASH_ATTN_MLA |\n"
    _, _, after = (ROOT / "docs/vllm.md").read_text().partition(heading)
    lines = [line.strip("|").split("|") for line in after.partition("\n\n")[0].splitlines()[1:]]
    assert len(lines) > 1
    for kernel, *cells in lines:
        ours, same = LATER[kernel.strip()]
        for cell, theirs in zip(cells, (same, best if "deepseek" in ours else None), strict=True):
            pairs = [(rows[ours, batch], rows.get((theirs, batch), {})) for batch in (1, 32, 128)]
            told = [
                f"{them['step_us'] / us['step_us']:.2f}" if them.get("ok") else "theirs failed" for us, them in pairs
            ]
            assert cell.strip() == (", ".join(told) if theirs else "")


def test_the_table_of_the_page_is_the_committed_rows() -> None:
    files = ("engine_vllm_throughput", "engine_vllm_fa3_mla", "engine_vllm_llama")  # the latest one for what it has
    kept = [row for name in files for row in results.read(ROOT / f"docs/results/h200/{name}.json").rows]
    rows = {(row["side"], row["batch"]): row for row in kept if row["ok"] and "batch" in row}
    lines = [line.strip("| ").split(" | ") for line in (ROOT / "docs/vllm.md").read_text().splitlines()]
    told = [cells for cells in lines if cells[0] in TABLE and len(cells) == 9]
    assert len(told) == 3 * len(TABLE) - 1, "one engine ran out of memory"
    for name, batch, *numbers in told:
        ours, theirs = (rows[side, int(batch)] for side in TABLE[name])
        wanted = [ours["tokens_per_s"], theirs["tokens_per_s"], ours["of_same_kernel"]]
        wanted += [side["launches_us"][0][1] for side in (ours, theirs)]
        wanted += [side["metadata_us"] for side in (ours, theirs)]
        assert all(abs(float(found) - number) <= 0.501 for found, number in zip(numbers, wanted, strict=True))
        assert float(numbers[2]) == ours["of_same_kernel"]


PROFILES = {"FlashAttention-3": "llama-fa3-vllm_flash_attn", "Triton": "llama-fa3-triton"}
BACKEND = ("metadata", "batch", "launch")


def test_each_lower_case_of_the_last_run_has_the_profile_of_its_rows() -> None:
    kept = results.read(ROOT / "docs/results/h200/engine_vllm_llama.json").rows
    rows = {(row["side"], row["batch"]): row for row in kept}
    same = dict(TABLE.values())
    lower = {(row["side"], same[row["side"]], row["batch"]) for row in kept if row.get("of_same_kernel", 1) < 0.98}
    lower |= {(row["side"], row["best"], row["batch"]) for row in kept if row.get("of_best", 1) < 0.95}
    lines = [line.strip("| ").split(" | ") for line in (ROOT / "docs/vllm.md").read_text().splitlines()]
    told = {}
    for ours, theirs, batch, *cells in (cells for cells in lines if cells[0] in PROFILES and len(cells) == 10):
        told[PROFILES[ours], f"llama-{theirs.strip('`').lower()}", int(batch)] = cells
    assert told.keys() == lower
    for (ours, theirs, number), cells in told.items():
        sides = [rows[side, number] for side in (ours, theirs)]
        hosts = [side["host_us"] for side in sides]
        wanted = [f"{sides[0]['tokens_per_s'] / sides[1]['tokens_per_s']:.3f}"]
        wanted += [", ".join(map(str, side["deciles_us"])) for side in sides]
        wanted += [str(sum(host.values())) for host in hosts]
        assert cells == [*wanted, *(str(sum(host[part] for part in BACKEND)) for host in hosts)]
