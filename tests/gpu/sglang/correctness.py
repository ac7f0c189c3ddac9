"""Greedy tokens of every case beside plain decoding's on the same backend, and who attended."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from tests.gpu.sglang import sampling
from tests.gpu.sglang.cases import PLAIN, SGLANG, SPECULATIVE, TIE, Case, differences, lengths, prompts
from tests.gpu.sglang.server import EngineFailedError, Server

AT_ONCE = 12
LIMIT = 240.0
FEW = 8


def run(case: Case, models: Path, folder: Path) -> dict[str, Any]:
    """What an engine gave: all prompts, twice; a few tokens of a few, for the launches; these one by one; and draws."""
    greedy = [{"temperature": 0, "ignore_eos": True, "max_new_tokens": length} for length in lengths()]
    asked: dict[str, Any] = {"input_ids": prompts(), "sampling_params": greedy}
    if not case.topk:
        asked |= {"return_logprob": True, "top_logprobs_num": 2}
    few = {"input_ids": prompts()[:FEW], "sampling_params": greedy[0] | {"max_new_tokens": 32}}
    with Server(str(case), case.options(models), case.environment, folder, LIMIT) as server:
        try:
            start = server.wait()
            server.ask(**few)
            server.ask(flush=True)
            answers = [one for _ in range(2) for one in server.ask(**asked)["answers"]]
            server.ask(flush=True)
            together = server.ask(**few)["answers"]
            server.ask(flush=True)
            alone = [server.ask(**few | {"input_ids": [prompt]})["answers"][0] for prompt in prompts()[:FEW]]
            _, counted, profiled = server.watched()
            is_drawn = case in {each for drawn in sampling.DRAWN_FROM for each in (drawn, drawn.plain)}
            drawn = sampling.draw(server) if is_drawn else None
        except EngineFailedError as error:
            return {"failed": str(error)}
    return {
        "start": start,
        "answers": answers,
        "seen": counted,
        "launches": profiled["launches"],
        "alone": alone,
        "together": together,
        "drawn": drawn,
    }


def rows(models: Path, folder: Path, chosen: str) -> Iterator[dict[str, Any]]:
    """One a case, as soon as it and its plain decoding are done. chosen: a part of the names of cases."""
    plain = {case: case.plain for case in (*SPECULATIVE, *SGLANG) if chosen in str(case)}
    order = dict.fromkeys([*(case for case in PLAIN if case in plain.values()), *plain])
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = {case: pool.submit(run, case, models, folder) for case in order}
        for case in order:
            beside = runs[plain[case]].result() if case in plain and plain[case] in runs else None
            yield row(case, runs[case].result(), beside)


def row(case: Case, run: dict[str, Any], plain: dict[str, Any] | None) -> dict[str, Any]:
    """What is to be said of a case. plain: the same backend's run without a draft, None for one of SGLang's."""
    told: dict[str, Any] = {"case": str(case), **asdict(case)}
    if "failed" in run:
        return told | {"ok": False, "failed": run["failed"]}
    wrong = case.wrong_counts(run["seen"])
    is_ours = case.backend.startswith("attn_")
    told |= {
        "start_s": run["start"],
        "graphs": run["seen"]["batches"],
        "attended": sum(run["seen"]["attended"].values()),
        "wrong_counts": wrong if is_ours else len(wrong),
        "cached": sum(one["cached"] > 0 for one in run["answers"]),
        "launches": run["launches"],
    }
    ok = (not wrong) if is_ours else bool(wrong)
    if is_ours:
        ok = ok and run["launches"].get("plans replay", [0, 1])[1] == 0 and run["launches"]["plans eager"][1] > 0
    if case.topk:
        told |= {
            "acceptance": _acceptance(run["answers"]),
            "acceptance_together": _acceptance(run["together"]),
            "acceptance_alone": _acceptance(run["alone"]),
        }
    if plain is not None and case.topk:
        if "failed" in plain:
            return told | {"ok": False, "failed": f"plain decoding: {plain['failed']}"}
        different = differences([one["ids"] for one in run["answers"]], plain["answers"])
        told |= {"requests": len(run["answers"]), "differ": different}
        ok = ok and all(each["gap"] <= TIE for each in different)
        if run["drawn"] is not None:
            told["sampled"] = sampling.told(run["drawn"], plain["drawn"])
            ok = ok and told["sampled"]["ok"]
    return told | {"ok": ok}


def _acceptance(answers: list[dict[str, Any]]) -> float:
    return round(mean(one["accepted"] for one in answers), 4)
