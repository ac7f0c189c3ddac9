"""Tokens of every case beside plain decoding's on the same backend, greedy and sampled, and who attended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import cycle
from pathlib import Path
from statistics import mean
from typing import Any

from tests.engines.sglang.gpu import sampling
from tests.engines.sglang.gpu.cases import MAX_BS, OURS, SGLANG, TIE, Case, differences, lengths, prompts
from tests.engines.sglang.gpu.server import EngineFailedError, Server, gpus

AT_ONCE = 8
"""Engines of a GPU: each keeps three processes busy while it starts."""
LIMIT = 420.0
FEW = 8


def run(case: Case, models: Path, folder: Path, gpu: str) -> dict[str, Any]:
    """What an engine gave: all prompts, twice, and of plain decoding also one by one, where a draft adapts a few; a few
    tokens of a few, for the launches; and these one by one.
    """
    greedy = [{"temperature": 0, "ignore_eos": True, "max_new_tokens": length} for length in lengths()]
    asked: dict[str, Any] = {"input_ids": prompts(), "sampling_params": greedy}
    if case == case.plain:
        asked |= {"return_logprob": True, "top_logprobs_num": 2}
    few = {"input_ids": prompts()[:FEW], "sampling_params": greedy[0] | {"max_new_tokens": 32}}
    environment = case.environment | {"CUDA_VISIBLE_DEVICES": gpu}
    with Server(str(case), case.options(models), environment, folder, LIMIT) as server:
        try:
            start = server.wait()
            server.ask(**few)
            server.ask(flush=True)
            answers = [one for _ in range(2) for one in server.ask(**asked)["answers"]]
            num_single = MAX_BS if case == case.plain else FEW * case.adapts
            singly = [server.ask(**one)["answers"][0] for one in _one_by_one(asked)[:num_single]]
            server.ask(flush=True)
            together = server.ask(**few)["answers"]
            server.ask(flush=True)
            alone = [server.ask(**few | {"input_ids": [prompt]})["answers"][0] for prompt in prompts()[:FEW]]
            _, counted, profiled = server.watched()
        except EngineFailedError as error:
            return {"failed": str(error)}
        sampled = sampling.sampled(server) if case in sampling.ENGINES else None
    return {
        "start": start,
        "answers": answers,
        "singly": singly,
        "seen": counted,
        "launches": profiled["launches"],
        "alone": alone,
        "together": together,
        "sampled": sampled,
    }


def rows(models: Path, folder: Path, chosen: str) -> Iterator[dict[str, Any]]:
    """One a case, as soon as it and its plain decoding are done; engines take turns on the GPUs. chosen: an expression
    found in the names of cases.
    """
    cases = [case for case in (*OURS, *SGLANG) if re.search(chosen, str(case))]
    order = dict.fromkeys(each for case in cases for each in (_beside(case), case) if each is not None)
    done: dict[Case, dict[str, Any]] = {}
    devices = gpus()
    with ThreadPoolExecutor(AT_ONCE * len(devices)) as pool:
        runs = {pool.submit(run, case, models, folder, gpu): case for case, gpu in zip(order, cycle(devices))}
        for finished in as_completed(runs):
            now = runs[finished]
            done[now] = finished.result()
            for case in order:
                beside = _beside(case)
                if now in (case, beside) and {case, beside or case} <= done.keys():
                    yield row(case, done[case], None if beside is None else done[beside])


def _one_by_one(asked: dict[str, Any]) -> list[dict[str, Any]]:
    pairs = zip(asked["input_ids"], asked["sampling_params"], strict=True)
    return [{"input_ids": [prompt], "sampling_params": sampling} for prompt, sampling in pairs]


def _beside(case: Case) -> Case | None:
    """What its tokens are compared with."""
    return None if case == case.plain else case.plain


def row(case: Case, run: dict[str, Any], plain: dict[str, Any] | None) -> dict[str, Any]:
    """What is to be said of a case; of each request that differs its number, where it first does, and the gap there.
    plain: the same backend's plain decoding, None if this is it. plain_differs: how that run differs from itself
    where its requests come one by one, which no draft has a part in. Where it does, a draft may differ as well.
    """
    told: dict[str, Any] = {"case": str(case)}
    if "failed" in run:
        return told | {"ok": False, "failed": run["failed"]}
    is_ours = case.backend.startswith("attn_")
    wrong = case.wrong_counts(run["seen"])
    missing = case.missing(run["seen"]) if is_ours else []
    told |= {
        "start_s": run["start"],
        "graphs": run["seen"]["batches"],
        "attended": sum(run["seen"]["attended"].values()),
        "wrong_counts": wrong if is_ours else len(wrong),
        "cached": sum(one["cached"] > 0 for one in run["answers"]),
        "launches": run["launches"],
        "missing": missing,
    }
    ok = not (wrong or missing) if is_ours else bool(wrong)
    if is_ours:
        ok = ok and run["launches"].get("plans replay", [0, 1])[1] == 0 and run["launches"]["plans eager"][1] > 0
    if case.is_compact:
        told["widths"] = run["seen"]["widths"]
    if is_ours and case.kernel == "auto":
        told["kernels"] = sorted({"/".join(name.split("/")[:2]) for name in run["seen"]["attended"]})
    if case.topk:
        told |= {
            "acceptance": _acceptance(run["answers"]),
            "acceptance_together": _acceptance(run["together"]),
            "acceptance_alone": _acceptance(run["alone"]),
        }
    if plain is not None:
        if "failed" in plain:
            return told | {"ok": False, "failed": f"plain decoding: {plain['failed']}"}
        right = plain["answers"] + plain["answers"][: len(run["singly"])]
        different = differences([one["ids"] for one in run["answers"] + run["singly"]], right)
        alone = differences([one["ids"] for one in plain["singly"]], plain["answers"][: len(plain["singly"])])
        told |= {
            "requests": len(right),
            "differ": [list(each.values()) for each in different],
            "plain_differs": [list(each.values()) for each in alone],
        }
        known = {(each["request"], each["at"]) for each in alone}
        num = max(len(plain["singly"]), 1)
        ties = (each["gap"] <= TIE or (each["request"] % num, each["at"]) in known for each in different)
        ok = ok and (not is_ours or all(ties))
        if run["sampled"] and plain["sampled"]:
            told["sampling"] = sampling.told(run["sampled"], plain["sampled"], plain["answers"])
            ok = ok and told["sampling"]["ok"]
    return told | {"ok": ok}


def _acceptance(answers: list[dict[str, Any]]) -> float | None:
    """Tokens that a verify accepted, None if nothing was verified; a request of one token has had no verify."""
    told = [one["accepted"] for one in answers if one["accepted"] is not None]
    return round(mean(told), 4) if told else None
