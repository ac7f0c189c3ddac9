"""Sampled tokens of speculative engines beside plain ones', and top_k of 1 beside greedy ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tests.gpu.sglang.cases import FA3, FLASHINFER, Case, lengths, prompts
from tests.gpu.sglang.server import EngineFailedError, Server

CASES = (Case("gqa", FA3, "triton", 1), Case("mla", FLASHINFER, "flashinfer_fa3", 4))
DRAWS, AT_ONCE, NUM_BINS = 20_000, 4_000, 16
PROMPT, DRAWN = [0, *b"import os\n"], 2
"""What the tokens follow on, and which of them is counted: the third, which a verify may take from the draft."""
SMALLEST_P = 1e-3
LIMIT = 240.0


def rows(models: Path, folder: Path, chosen: str) -> Iterator[dict[str, Any]]:
    """One a case. chosen: a part of their names."""
    cases = [case for case in CASES if chosen in str(case)]
    with ThreadPoolExecutor() as pool:
        runs = {each: pool.submit(run, each, models, folder) for case in cases for each in (case.plain, case)}
        for case in cases:
            yield {"case": str(case)} | told(runs[case].result(), runs[case.plain].result())


def run(case: Case, models: Path, folder: Path) -> dict[str, Any]:
    """Tokens of many requests alike, and whether top_k of 1 gives greedy ones; or why not."""
    sampling = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": DRAWN + 2}
    options = case.options(models) | {"max_running_requests": 256, "cuda_graph_bs_decode": [1, 16, 64, 256]}
    with Server(f"sampling-{case}", options, case.environment, folder, LIMIT) as server:
        try:
            server.wait()
            drawn: list[int] = []
            while len(drawn) < DRAWS:
                out = server.ask(input_ids=[PROMPT] * AT_ONCE, sampling_params=sampling)["answers"]
                drawn += [one["ids"][DRAWN] for one in out]
            greedy, one_of_one = (
                [one["ids"] for one in server.ask(input_ids=prompts(), sampling_params=given)["answers"]]
                for given in (_asked(temperature=0), _asked(temperature=1.0, top_k=1))
            )
        except EngineFailedError as error:
            return {"failed": str(error)}
    return {"drawn": drawn, "top_k_1_is_greedy": greedy == one_of_one}


def _asked(**given: Any) -> list[dict[str, Any]]:
    return [given | {"ignore_eos": True, "max_new_tokens": length} for length in lengths()]


def told(found: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Of the draws with a draft and without one."""
    for run in (found, plain):
        if "failed" in run:
            return {"ok": False, "failed": run["failed"]}
    p = p_value(found["drawn"], plain["drawn"])
    ok = p > SMALLEST_P and found["top_k_1_is_greedy"]
    return {"ok": ok, "draws": DRAWS, "p": round(p, 4), "top_k_1_is_greedy": found["top_k_1_is_greedy"]}


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
