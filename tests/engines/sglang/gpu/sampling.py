"""Sampled tokens of speculative engines beside plain ones', and top_k of 1 beside greedy ones."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from tests.engines.sglang.gpu.cases import FA3, FLASHINFER, TIE, Case, differences, lengths, prompts
from tests.engines.sglang.gpu.server import EngineFailedError, Server

CASES = (Case("gqa", FA3, "triton", 1), Case("mla", FLASHINFER, "flashinfer_fa3", 4))
ENGINES = {engine for case in CASES for engine in (case, case.plain)}
DRAWS, AT_ONCE, NUM_BINS = 20_000, 4_000, 16
PROMPT, DRAWN = [0, *b"import os\n"], 2
"""What the tokens follow on, and which of them is counted: the third, which a verify may take from the draft."""
SMALLEST_P = 1e-3


def sampled(server: Server) -> dict[str, Any]:
    """Tokens of many requests alike, and those of all prompts with top_k of 1; or why there are none."""
    sampling = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": DRAWN + 2}
    likeliest = [{"temperature": 1.0, "top_k": 1, "ignore_eos": True, "max_new_tokens": n} for n in lengths()]
    drawn: list[int] = []
    try:
        answers = server.ask(input_ids=prompts(), sampling_params=likeliest)["answers"]
        while len(drawn) < DRAWS:
            out = server.ask(input_ids=[PROMPT] * AT_ONCE, sampling_params=sampling)["answers"]
            drawn += [one["ids"][DRAWN] for one in out]
    except EngineFailedError as error:
        return {"failed": str(error)}
    return {"drawn": drawn, "top_k_1": [one["ids"] for one in answers]}


def told(found: dict[str, Any], plain: dict[str, Any], greedy: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the draws with a draft and without one. greedy: answers of plain decoding, of which a tie may differ."""
    for run in (found, plain):
        if "failed" in run:
            return {"ok": False, "failed": run["failed"]}
    p = p_value(found["drawn"], plain["drawn"])
    different = differences(found["top_k_1"], greedy[: len(found["top_k_1"])])
    ok = p > SMALLEST_P and all(each["gap"] <= TIE for each in different)
    return {"ok": ok, "draws": DRAWS, "p": round(p, 4), "top_k_1_differs": different}


def p_value(found: list[int], plain: list[int]) -> float:
    """Of a chi-square test that both are drawn from one distribution: the 15 most frequent tokens, and all others."""
    often = [token for token, _ in Counter(plain).most_common(NUM_BINS - 1)]
    counted = [Counter(drawn) for drawn in (found, plain)]
    table = torch.tensor([[each[token] for token in often] for each in counted], dtype=torch.float64)
    totals = torch.tensor([[len(found)], [len(plain)]], dtype=torch.float64)
    table = torch.cat((table, totals - table.sum(1, keepdim=True)), 1)
    table = table[:, table.sum(0) > 0]
    expected = totals * table.sum(0) / totals.sum()
    squares = ((table - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((table.shape[1] - 1) / 2, dtype=torch.float64), squares / 2))
