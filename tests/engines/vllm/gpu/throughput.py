"""Tokens a second and the host's time for metadata, of engines on our backends beside ones on vLLM's, in turn on a GPU.

All engines of a model are up at once, and one at a time is asked: A, B, C, A, B, C, ... A model has as many layers as
fit that often. It has no weights, so what is accepted is drawn by vLLM, at the same rates for all. Every prompt was
served before, so its prefix comes out of the cache, and what is timed are steps in which every request decodes.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from attn_backends import results
from tests.engines.vllm.gpu.models import DEEPSEEK_LAYERS, LLAMA_LAYERS
from tests.engines.vllm.gpu.server import EngineFailedError, Server

PREFIX, HOSTED, PROFILED = 768, 12, 4
STEPS = {1: 80, 32: 48, 128: 24}
"""Timed, by requests: longer where one step's own time says least."""
REPEATS = 7
ACCEPTED = [0.8, 0.6, 0.4]
LIMIT = 420.0
LAYERS = {"llama": LLAMA_LAYERS, "deepseek": DEEPSEEK_LAYERS}


@dataclass(frozen=True)
class Side:
    """An engine. kernel: of our backends, "" for one of vLLM's. family: of kernels; ours are held to vLLM's of it."""

    model: str
    backend: str
    kernel: str
    family: str

    def __str__(self) -> str:
        return "-".join(filter(None, [self.model, self.backend.removeprefix("ATTN_BACKENDS_").lower(), self.kernel]))

    def options(self, models: Path) -> dict[str, Any]:
        """Of vllm.LLM."""
        tokens = max(
            (batch + 2) * (PREFIX + 4 * (steps + HOSTED + PROFILED + 32) + 64) for batch, steps in STEPS.items()
        )
        bytes_a_token = {"llama": 4096, "deepseek": 1152}[self.model] * (LAYERS[self.model] + 1)
        return {
            "model": str(models / self.model),
            "load_format": "dummy",
            "dtype": "bfloat16",
            "attention_backend": self.backend,
            "block_size": 64,
            "max_model_len": 2048,
            "max_num_seqs": max(STEPS),
            "max_num_batched_tokens": 4096,
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": tokens * bytes_a_token,
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": sorted({size for batch in STEPS for size in (batch, 4 * batch)}),
            },
            "async_scheduling": True,
            "speculative_config": {
                "method": "eagle3" if self.model == "llama" else "mtp",
                "model": str(models / f"{self.model}-draft"),
                "num_speculative_tokens": 3,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": ACCEPTED,
            },
        }

    @property
    def environment(self) -> dict[str, str]:
        """Of its process; nothing is counted."""
        return {"ATTN_BACKENDS_KERNEL": self.kernel} if self.kernel else {}


SIDES = [
    Side("llama", "ATTN_BACKENDS_FA3", "vllm_flash_attn", "fa3"),
    Side("llama", "FLASH_ATTN", "", "fa3"),
    Side("llama", "TRITON_ATTN", "", "triton"),
    Side("llama", "ATTN_BACKENDS_FA3", "triton", "triton"),
    Side("deepseek", "ATTN_BACKENDS_TRTLLM_MLA", "flashmla", "flashmla"),
    Side("deepseek", "FLASHMLA", "", "flashmla"),
    Side("deepseek", "FLASH_ATTN_MLA", "", "fa3"),
    Side("deepseek", "ATTN_BACKENDS_FA3_MLA", "vllm_flash_attn", "fa3"),
    Side("deepseek", "TRITON_MLA", "", "triton"),
    Side("deepseek", "ATTN_BACKENDS_TRTLLM_MLA", "triton", "triton"),
]
NOT_RUN = {
    "llama-flashinfer": "FlashInfer's kernels of prefill and decode are compiled on the machine, in about 70 s",
    "deepseek-flashinfer_mla": "vLLM's is for Blackwell; ours on FlashInfer's kernels is compiled in about 70 s",
    "deepseek-cutlass_mla": "for Blackwell",
}


def rows(models: Path, folder: Path, chosen: str) -> Iterator[dict[str, Any]]:
    """One a side and batch. chosen: a pattern that is in the names of sides."""
    for model in LAYERS:
        sides = [side for side in SIDES if side.model == model and re.search(chosen, str(side))]
        yield from timed(sides, models, folder) if sides else ()
    yield from ({"side": name, "ok": True, "not_run": reason} for name, reason in NOT_RUN.items())


def timed(sides: list[Side], models: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Rows of one model. Engines that fail to start are left out."""
    with ExitStack() as stack:
        servers = {
            side: stack.enter_context(Server(str(side), side.options(models), side.environment, folder, LIMIT))
            for side in sides
        }
        for side, server in [*servers.items()]:
            try:
                server.wait()
            except EngineFailedError as error:
                del servers[side]
                yield {"side": str(side), "ok": False, "not_run": results.without_folders(str(error))}
        wait_for_idle_gpus()
        for batch in STEPS:
            yield from in_turn(servers, batch)


def wait_for_idle_gpus() -> None:
    """Until nothing ran on any for five seconds: what else is there would be timed."""
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    idle = 0
    while idle < 5:
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        busy = set(told.split()) != {"0"}
        idle = 0 if busy else idle + 1
        time.sleep(1)


def in_turn(servers: dict[Side, Server], batch: int) -> Iterator[dict[str, Any]]:
    """A row a side: REPEATS times in turn, after one that fills its cache and warms up. One that fails is left out."""
    prompts = [[(7 * i + 13 * j) % 30000 + 1 for j in range(PREFIX)] for i in range(batch)]
    found: dict[Side, list[dict[str, Any]]] = {side: [] for side in servers}
    for repeat in range(-1, REPEATS):
        for side in list(found):
            steps = STEPS[batch] if repeat >= 0 else 8
            profiled = PROFILED if repeat == REPEATS - 1 else 0
            try:
                answer = servers[side].ask("decode", prompts=prompts, steps=steps, hosted=HOSTED, profiled=profiled)
            except EngineFailedError as error:
                del found[side], servers[side]
                yield {"side": str(side), "batch": batch, "ok": False, "not_run": results.without_folders(str(error))}
                continue
            if repeat >= 0:
                found[side].append(answer)
    yield from summarized(found, batch)


def summarized(found: dict[Side, list[dict[str, Any]]], batch: int) -> Iterator[dict[str, Any]]:
    """Medians and spreads, deciles 1, 5 and 9 of all steps, the host's parts, and what the device ran longest; ours
    also over vLLM's on the same kernels, of medians and turn by turn, and over its best. All are given the tokens that
    all accepted in a step, on average: what one drew by luck is not its speed.
    """
    every = [one for answers in found.values() for one in answers]
    accepted = sum(one["tokens"] for one in every) / max(1, sum(one["steps"] for one in every))
    rates = {side: [accepted * one["steps"] / one["seconds"] for one in answers] for side, answers in found.items()}
    medians = {side: median(each) for side, each in rates.items()}
    theirs = {side: rate for side, rate in medians.items() if not side.kernel}
    for side, answers in found.items():
        parts = answers[0]["host_us"]
        told: dict[str, Any] = {
            "side": str(side),
            "batch": batch,
            "layers": LAYERS[side.model],
            "tokens_per_s": round(medians[side], 1),
            "least": round(min(rates[side]), 1),
            "most": round(max(rates[side]), 1),
            "step_us": round(median(one["seconds"] / one["steps"] for one in answers) * 1e6, 1),
            "tokens_per_step": round(median(one["tokens"] / one["steps"] for one in answers), 2),
            "metadata_us": round(median(one["metadata_us"] for one in answers), 1),
            "deciles_us": [*map(round, quantiles((us for one in answers for us in one["step_us"]), n=10)[::4])],
            "host_us": {name: round(median(one["host_us"].get(name, 0) for one in answers)) for name in parts},
        }
        if side.kernel and theirs:
            same = [other for other in theirs if other.family == side.family]
            best = max(theirs, key=lambda other: theirs[other])
            told |= {
                "of_same_kernel": round(medians[side] / theirs[same[0]], 3) if same else None,
                "in_turn": [round(a / b, 3) for other in same for a, b in zip(rates[side], rates[other], strict=True)],
                "of_best": round(medians[side] / theirs[best], 3),
                "best": str(best),
            }
        names = [[name, round(time, 1), round(calls, 1)] for name, time, calls in answers[-1]["launches"]]
        yield told | {"launches_us": names[:9], "ok": True}
