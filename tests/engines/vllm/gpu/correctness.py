"""Greedy tokens of every case beside plain decoding on vLLM's own backend, and who attended."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.engines.vllm.gpu.cases import (
    ALIKE,
    DEFAULT,
    FLASHINFER_KERNELS,
    IN_PARALLEL,
    OTHERS,
    SPECULATIVE,
    WITH_BUGS,
    Case,
    alike,
    as_many,
    differences,
    lengths,
    prompts,
)
from tests.engines.vllm.gpu.server import EngineFailedError, Server

BY_BUGS = "texts differ|drafts are alike|accepted for|was overwritten by a replay or capture"
"""What is told of a planted bug. An engine without memory or time fails, too, and shows none."""
AT_ONCE = 20
"""Engines, on up to two GPUs; half as many on each more."""
LIMIT, COMPILING = 240.0, 450.0
"""Seconds of an engine's life, and of one whose kernels are compiled first."""


def run(case: Case, models: Path, folder: Path, gpus: list[str]) -> dict[str, Any]:
    """What an engine gave: all prompts, twice, so that the second time they come out of the prefix cache. gpus: that it
    may use, all for none.
    """
    limit = COMPILING if case in FLASHINFER_KERNELS else LIMIT
    environment = case.environment | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
    asked: dict[str, Any] = {"prompts": prompts(), "lengths": lengths(), "gaps": not case.drafts}
    with Server(str(case), case.options(models), environment, folder, limit) as server:
        try:
            start = server.wait()
            return {"start": start, "first": server.ask("generate", **asked), "again": server.ask("generate", **asked)}
        except EngineFailedError as error:
            return {"failed": str(error)}


def rows(models: Path, folder: Path, chosen: str) -> Iterator[dict[str, Any]]:
    """One a case, as soon as it and its plain decoding are done. chosen: a pattern that is in the names of cases."""
    num_gpus = len(visible_gpus())
    cases = [case for case in (*SPECULATIVE, *IN_PARALLEL, *OTHERS) if re.search(chosen, str(case))]
    too_many = [case for case in cases if case.ranks > max(1, num_gpus)]
    cases = [case for case in cases if case not in too_many]
    cases += [case for case in FLASHINFER_KERNELS if chosen and re.search(chosen, str(case))]
    yield from judged(cases, models, folder)
    yield from ({"case": str(case), "ok": True, "not_run": f"GPUs: {num_gpus}"} for case in too_many)
    if not chosen:
        yield from ({"case": str(case), "ok": True, "not_run": "not asked for"} for case in FLASHINFER_KERNELS)


def bugs(models: Path, folder: Path, chosen: str) -> Iterator[dict[str, Any]]:
    """One a planted bug: as it should be where the case fails as `BY_BUGS` says. `why` says how."""
    cases = [case for case in WITH_BUGS if re.search(chosen, str(case))]
    for told in judged(cases, models, folder):
        yield told | {"ok": any(re.search(BY_BUGS, reason) for reason in told.get("why", []))}


def judged(cases: list[Case], models: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of cases, as soon as each and what it is held to are done."""
    gpus = visible_gpus()
    num_gpus = len(gpus)
    slowest_first = sorted(cases, key=lambda case: case.mode not in ("pieces", DEFAULT))
    beside = [*(case.plain for case in cases), *(case.exact for case in cases if case.has_exact)]
    with ThreadPoolExecutor(AT_ONCE * max(2, num_gpus) // 2) as pool:
        runs = {
            case: pool.submit(run, case, models, folder, (gpus[i % num_gpus :] + gpus)[: case.ranks] if gpus else [])
            for i, case in enumerate(dict.fromkeys([*beside, *slowest_first]))
        }
        for case in cases:
            exact = runs[case.exact].result() if case.has_exact else None
            yield row(case, runs[case].result(), runs[case.plain].result(), exact)


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES has them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]


def row(case: Case, run: dict[str, Any], plain: dict[str, Any], exact: dict[str, Any] | None = None) -> dict[str, Any]:
    """What is to be said of a case. exact: of the engine that its drafts are held to, if they are."""
    told: dict[str, Any] = {"case": str(case), **asdict(case), "beside": str(case.plain)}
    for which in (plain, exact or {}):
        if "failed" in which:
            return told | {"ok": False, "failed": which["failed"]}
    if "failed" in run:
        return told | {"ok": False, "failed": run["failed"], "why": [run["failed"]]}
    answers = [run["first"], run["again"]]
    wrong = [reason for answer in answers for reason in case.wrong_counts(answer)]
    kernels = {kind: done["kernel"] for kinds in answers[0]["attended"].values() for kind, done in kinds.items()}
    different = [each for answer in answers for each in differences(answer["ids"], plain["first"])]
    far = [gap for _, _, gap in different if gap > case.tie]
    drafts = [alike(answer, exact["first"]) for answer in answers] if exact else []
    accepted = [answer["accepted"] for answer in answers]
    wanted = exact["first"]["accepted"] if exact and case.accepts_as_exact else None
    why = [f"{len(far)} texts differ, the two best scores up to {max(far)} apart"] if far else []
    why += [f"{equal} of {num} drafts are alike" for equal, num in drafts if not 0 < num * ALIKE[case.dtype] <= equal]
    why += [f"{each} accepted for {wanted}" for each in accepted if wanted and not as_many(each, wanted)]
    if case.is_ours:
        why += wrong
    elif not wrong or answers[0]["attended"]:
        why += ["our backends attended"]
    return told | {
        "start_s": run["start"],
        "is_async": answers[0]["is_async"],
        "steps": [answer["steps"] for answer in answers],
        "replays": [answer["replays"] for answer in answers],
        "cached": [answer["cached"] for answer in answers],
        "accepted": accepted,
        "accepted_exactly": wanted,
        "attended": forwards(answers[0]),
        "alike": drafts,
        "cut": [answer["cut"] for answer in answers],
        "kernels": kernels,
        "wrong_counts": wrong if case.is_ours else len(wrong),
        "tokens": sum(len(ids) for answer in answers for ids in answer["ids"]),
        "differ": different,
        "why": why,
        "ok": not why,
    }


def forwards(answer: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Of all layers of the target and of the draft, by kind of step, as the device counted them."""
    found: dict[str, Counter[str]] = {"target": Counter(), "draft": Counter()}
    for name, kinds in answer["attended"].items():
        model = "draft" if name in answer["draft_layers"] else "target"
        found[model] += Counter({kind: done["forwards"] for kind, done in kinds.items()})
    return {model: dict(kinds) for model, kinds in found.items()}
