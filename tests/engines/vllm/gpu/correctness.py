"""Greedy tokens of every case beside plain decoding on vLLM's own backend, and who attended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.engines.vllm.gpu.cases import (
    FLASHINFER_KERNELS,
    IN_PARALLEL,
    OTHERS,
    SPECULATIVE,
    Case,
    differences,
    lengths,
    prompts,
)
from tests.engines.vllm.gpu.server import EngineFailedError, Server

AT_ONCE = 20
LIMIT = 150.0


def run(case: Case, models: Path, folder: Path) -> dict[str, Any]:
    """What an engine gave: all prompts, twice, so that the second time they come out of the prefix cache."""
    asked: dict[str, Any] = {"prompts": prompts(), "lengths": lengths(), "gaps": not case.drafts}
    with Server(str(case), case.options(models), case.environment, folder, LIMIT) as server:
        try:
            start = server.wait()
            return {"start": start, "first": server.ask("generate", **asked), "again": server.ask("generate", **asked)}
        except EngineFailedError as error:
            return {"failed": str(error)}


def rows(models: Path, folder: Path, chosen: str) -> Iterator[dict[str, Any]]:
    """One a case, as soon as it and its plain decoding are done. chosen: a pattern that is in the names of cases."""
    num_gpus = torch.cuda.device_count()
    cases = [case for case in (*SPECULATIVE, *IN_PARALLEL, *OTHERS) if re.search(chosen, str(case))]
    too_many = [case for case in cases if case.ranks > max(1, num_gpus)]
    cases = [case for case in cases if case not in too_many]
    cases += [case for case in FLASHINFER_KERNELS if chosen and re.search(chosen, str(case))]
    slowest_first = sorted(cases, key=lambda case: case.mode != "pieces")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        order = dict.fromkeys([*(case.plain for case in cases), *slowest_first])
        runs = {case: pool.submit(run, case, models, folder) for case in order}
        for case in cases:
            yield row(case, runs[case].result(), runs[case.plain].result())
    yield from ({"case": str(case), "ok": True, "not_run": f"GPUs: {num_gpus}"} for case in too_many)
    if not chosen:
        yield from ({"case": str(case), "ok": True, "not_run": "not asked for"} for case in FLASHINFER_KERNELS)


def row(case: Case, run: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """What is to be said of a case."""
    told: dict[str, Any] = {"case": str(case), **asdict(case), "beside": str(case.plain)}
    for which in (run, plain):
        if "failed" in which:
            return told | {"ok": False, "failed": which["failed"]}
    answers = [run["first"], run["again"]]
    wrong = [reason for answer in answers for reason in case.wrong_counts(answer)]
    kernels = {kind: done["kernel"] for kinds in answers[0]["attended"].values() for kind, done in kinds.items()}
    different = [each for answer in answers for each in differences(answer["ids"], plain["first"])]
    near = all(gap <= case.tie for _, _, gap in different)
    attended = sum(kind["forwards"] for kinds in answers[0]["attended"].values() for kind in kinds.values())
    return told | {
        "start_s": run["start"],
        "is_async": answers[0]["is_async"],
        "steps": [answer["steps"] for answer in answers],
        "replays": [answer["replays"] for answer in answers],
        "cached": [answer["cached"] for answer in answers],
        "accepted": [answer["accepted"] for answer in answers],
        "attended": attended,
        "kernels": kernels,
        "wrong_counts": wrong if case.is_ours else len(wrong),
        "tokens": sum(len(ids) for answer in answers for ids in answer["ids"]),
        "differ": different,
        "ok": near and (not wrong if case.is_ours else bool(wrong) and not attended),
    }
