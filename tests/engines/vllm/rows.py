"""The rows of the matrix: few that cover every pair of values, and all."""

from __future__ import annotations

from itertools import combinations, product

from tests.engines.vllm.engine import Row

FULL, BOTH = "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"
BLOCK_SIZES = {"ATTN_BACKENDS_FA3": 16, "ATTN_BACKENDS_FA3_MLA": 16, "ATTN_BACKENDS_FLASHINFER_MLA": 16}
"""Of the rows of the full product; trtllm_mla's is 32."""

QUICK = [
    Row("gqa", "ATTN_BACKENDS_FA3", is_async=False),
    Row("gqa", "ATTN_BACKENDS_FA3", FULL, caching=True, chunked=False),
    Row("gqa", "ATTN_BACKENDS_FA3", BOTH, caching=True, fused=False),
    Row("mla-1", "ATTN_BACKENDS_TRTLLM_MLA", caching=True, block_size=32),
    Row("mla-1", "ATTN_BACKENDS_TRTLLM_MLA", BOTH, chunked=False, block_size=None),
    Row("mla-3", "ATTN_BACKENDS_FLASHINFER_MLA", caching=True, chunked=False),
    Row("mla-1", "ATTN_BACKENDS_FLASHINFER_MLA", BOTH),
    Row("mla-3", "ATTN_BACKENDS_FA3_MLA", BOTH, caching=True),
]


EAGLE = Row("gqa-eagle", "ATTN_BACKENDS_FA3", FULL)
"""Beside them: to attention it is EAGLE-3's head in another place of the model."""


def full_product() -> list[Row]:
    """Every model on every backend that takes it, in every way of running."""
    backends = {"gqa": ["FA3"], "mla-1": (mla := ["TRTLLM_MLA", "FLASHINFER_MLA", "FA3_MLA"]), "mla-3": mla}
    rows = []
    for model, names in backends.items():
        ways = product(names, ("NONE", FULL, BOTH), (False, True), (False, True), (True, False))
        for name, graphs, caching, chunked, fused in ways:
            if fused or model != "mla-3":  # modules of their own have no loop
                backend = f"ATTN_BACKENDS_{name}"
                size = BLOCK_SIZES.get(backend, 32)
                rows.append(Row(model, backend, graphs, caching, chunked, fused=fused, block_size=size))
    return rows


def values(row: Row) -> set[tuple[str, object]]:
    """What of the matrix a row has. FULL_AND_PIECEWISE runs both kinds of graph."""
    library = row.backend.removeprefix("ATTN_BACKENDS_").lower().removesuffix("_mla")
    modes = {"NONE": ["eager"], FULL: ["full"], BOTH: ["full", "pieces"]}[row.graphs]
    model = "mla + MTP" if row.is_mla else "gqa + EAGLE-3"
    one_each = {("model", model), ("backend", library), ("caching", row.caching), ("chunked", row.chunked)}
    return one_each | {("mode", mode) for mode in modes}


def pairs(row: Row) -> set[frozenset[tuple[str, object]]]:
    """All pairs of values of different columns."""
    return {frozenset(pair) for pair in combinations(values(row), 2) if pair[0][0] != pair[1][0]}
