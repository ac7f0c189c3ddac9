"""What is drafted beside a float64 recompute: the logits of chains, forward by forward, of our FlashInfer MLA and
SGLang's own, and the tokens of blocks.

SGLang's draft forwards of an MLA model do not see the tokens drafted before (D1, D2), and store where they read strides
as dense (D8). Tokens stay right, because every drafted one is verified. Eight requests at once; chains are eager,
blocks run through graphs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from tests.engines.sglang.cases import NUM_STEPS
from tests.engines.sglang.gpu.cases import FA3, FLASHINFER, Case, prompts
from tests.engines.sglang.gpu.server import EngineFailedError, Server
from tests.engines.sglang.oracle import BlockDraft, Draft, draft_of

CASES = (
    Case("mla", FLASHINFER, "flashinfer_fa3", 1),
    Case("mla", "flashinfer", "", 1),
    Case("gqa", FA3, "triton", 1, drafts="block"),
    Case("gqa", FA3, "vllm_flash_attn", 1, 64, drafts="dspark-compact"),
    Case("mla", FLASHINFER, "triton", 1, drafts="block", of_draft=FA3),
)
SAME = 0.9
"""Of the tokens of blocks, that are the recompute's at least: scores of bfloat16 have ties."""
BATCH, NUM_TOKENS = 8, 48
LIMIT = 200.0


def rows(models: Path, folder: Path, chosen: str) -> Iterator[dict[str, Any]]:
    """One a case. chosen: an expression found in their names."""
    cases = [case for case in CASES if re.search(chosen, str(case))]
    with ThreadPoolExecutor() as pool:
        yield from pool.map(lambda case: row(case, models, folder), cases)


def row(case: Case, models: Path, folder: Path) -> dict[str, Any]:
    """What a case drafted."""
    alone = {"disable_overlap_schedule": True, "disable_cuda_graph": not case.in_blocks}
    environment = case.environment | {"ATTN_PROBE_DRAFTS": "1"}
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": NUM_TOKENS}
    name = f"drafts-{case}"
    with Server(name, case.options(models) | alone, environment, folder, LIMIT) as server:
        try:
            server.wait()
            answers = server.ask(input_ids=prompts()[:BATCH], sampling_params=sampling)["answers"]
        except EngineFailedError as error:
            return {"case": str(case), "ok": False, "failed": str(error)}
        cycles = server.watched()
    draft = draft_of(models / f"{case.model}_target", models / case.draft[1])
    of_draft = told_blocks(draft, cycles) if isinstance(draft, BlockDraft) else told(draft, cycles)
    ok = bool(cycles) and (not case.in_blocks or of_draft["same_tokens"] >= SAME)
    acceptance = round(mean(one["accepted"] for one in answers), 4)
    return {"case": str(case), "ok": ok, "acceptance": acceptance} | of_draft


def told_blocks(draft: BlockDraft, cycles: list[dict[str, Any]]) -> dict[str, Any]:
    """How many tokens of blocks are the recompute's, up to the first of each that is not, by which DSpark chooses the
    next.
    """
    same = compared = 0
    for cycle in cycles:
        expected = draft.drafted(cycle["text"], 1, NUM_STEPS, NUM_STEPS + 1).tokens
        pairs = zip(cycle["tokens"], expected, strict=True)
        num_same = next((at for at, (found, right) in enumerate(pairs) if found != right), NUM_STEPS)
        same, compared = same + num_same, compared + min(num_same + 1, NUM_STEPS)
    return {"cycles": len(cycles), "same_tokens": round(same / max(compared, 1), 4)}


def told(draft: Draft, cycles: list[dict[str, Any]]) -> dict[str, Any]:
    """By forward, the error of the logits over their size, median and largest; and how many drafted tokens are the
    recompute's.
    """
    errors: dict[int, list[float]] = {}
    same = 0
    for cycle in cycles:
        expected = draft.chain_logits(cycle["text"], cycle["tokens"])
        for i, (logits, right) in enumerate(zip(cycle["logits"], expected, strict=True)):
            found = torch.tensor(logits, dtype=torch.float64)
            errors.setdefault(i, []).append(float((found - right).norm() / right.norm()))
            same += int(found.argmax()) == int(right.argmax())
    return {
        "cycles": len(cycles),
        "error_median": [round(median(each), 4) for each in errors.values()],
        "error_largest": [round(max(each), 4) for each in errors.values()],
        "same_tokens": round(same / max(sum(map(len, errors.values())), 1), 4),
    }
