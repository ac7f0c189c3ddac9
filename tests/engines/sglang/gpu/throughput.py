"""Tokens a second of engines on our backends beside ones on SGLang's own, in turn on one GPU.

All engines of a model are up at once, and one at a time is asked: A, B, C, A, B, C, ... Models have no weights, so what
is accepted is simulated (SGLANG_SIMULATE_ACC_LEN), at the same rate for all. Every prompt was served before, so its
prefix comes out of the cache, and what is timed are cycles.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.engines.sglang.gpu.profiles import profiled
from tests.engines.sglang.gpu.server import EngineFailedError, Server

PREFIX = 768
NUM_TOKENS = {1: 1024, 32: 768, 128: 384}
"""Of each request, by how many there are at once: a turn takes one to six seconds."""
REPEATS = 5
OF_SAME_KERNEL, OF_BEST = 0.98, 0.95
"""Sides of ours below are profiled, with what they are held to."""
PROFILED = 24
"""Tokens of a request under the profiler."""
ACCEPTED = 3.0
LIMIT = 540.0
DRAFTS = {"llama": ("EAGLE3", "llama_eagle3"), "deepseek": ("EAGLE", "deepseek_nextn")}


@dataclass(frozen=True)
class Side:
    """An engine. kernel: of our backends, "" for SGLang's own. family: of kernels; those of one are held to another."""

    model: str
    backend: str
    kernel: str
    page_size: int
    family: str

    def __str__(self) -> str:
        return f"{self.model}-{self.backend}{self.kernel and '.'}{self.kernel}-page{self.page_size}"

    def options(self, models: Path) -> dict[str, Any]:
        """Of sglang.Engine."""
        algorithm, draft = DRAFTS[self.model]
        ragged = {"flashinfer_mla_disable_ragged": True} if self.backend in ("flashinfer", "flashmla") else {}
        return ragged | {
            "model_path": str(models / f"{self.model}_target"),
            "load_format": "dummy",
            "attention_backend": self.backend,
            "page_size": self.page_size,
            "speculative_algorithm": algorithm,
            "speculative_draft_model_path": str(models / draft),
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4,
            "max_running_requests": max(NUM_TOKENS),
            "cuda_graph_bs_decode": list(NUM_TOKENS),
            "max_total_tokens": max(bs * (PREFIX + tokens + 64) for bs, tokens in NUM_TOKENS.items()),
            "sleep_on_idle": False,
            "mem_fraction_static": 0.9,
            "chunked_prefill_size": 8192,
        }

    @property
    def environment(self) -> dict[str, str]:
        """Of its processes. The probe is not in them."""
        plugins = "fa3_of_vllm" if self.backend == "fa3" else "attn_backends"
        given = {
            "SGLANG_PLUGINS": plugins,
            "SGLANG_SIMULATE_ACC_LEN": str(ACCEPTED),
            "TORCHDYNAMO_DISABLE": "1",  # as in `cases`; of all sides alike
        }
        if self.kernel:
            given["ATTN_BACKENDS_KERNEL"] = self.kernel
        if self.backend in ("flashinfer", "flashmla"):
            given["SGLANG_IS_FLASHINFER_AVAILABLE"] = "true"
        return given


SIDES = [
    Side("llama", "attn_fa3", "vllm_flash_attn", 64, "fa3"),
    Side("llama", "fa3", "", 64, "fa3"),
    Side("llama", "triton", "", 64, "triton"),
    Side("deepseek", "attn_trtllm_mla", "flashmla", 64, "flashmla"),
    Side("deepseek", "flashmla", "", 64, "flashmla"),
    Side("deepseek", "attn_flashinfer_mla", "flashinfer_fa3", 1, "flashinfer"),
    Side("deepseek", "flashinfer", "", 1, "flashinfer"),
]


def rows(models: Path, folder: Path, chosen: str) -> Iterator[dict[str, Any]]:
    """One a side and batch. chosen: an expression found in the names of sides."""
    sides = [side for side in SIDES if re.search(chosen, str(side))]
    with ExitStack() as stack:
        servers = {
            side: stack.enter_context(Server(str(side), side.options(models), side.environment, folder, LIMIT))
            for side in sides
        }
        up, failed = [], {}
        for side, server in servers.items():
            try:
                server.wait()
                up.append(side)
            except EngineFailedError as error:
                failed[side] = str(error)
        yield from ({"side": str(side), "ok": False, "not_run": reason} for side, reason in failed.items())
        wait_for_idle_gpu()
        for model in DRAFTS:
            together = [side for side in up if side.model == model]
            for batch in NUM_TOKENS:
                try:
                    times = in_turn({side: servers[side] for side in together}, batch)
                    for told in summarized(times, batch):
                        profiles = profiles_of(told, servers, batch, folder)
                        yield told | ({"profiles": profiles} if profiles else {})
                except EngineFailedError as error:
                    yield {"side": model, "batch": batch, "ok": False, "failed": str(error)}
                    break


def wait_for_idle_gpu() -> None:
    """Until nothing ran on it for three seconds: what else is there would be timed."""
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    idle = 0
    while idle < 3:
        busy = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0] != "0"
        idle = 0 if busy else idle + 1
        time.sleep(1)


def profiles_of(
    told: dict[str, Any], servers: dict[Side, Server], batch: int, folder: Path
) -> dict[str, dict[str, Any]]:
    """Of a side of ours that is below what it is held to, and of what it is held to."""
    same, best = (told.get(name) or 1.0 for name in ("of_same_kernel", "of_best"))
    if same >= OF_SAME_KERNEL and best >= OF_BEST:
        return {}
    ours = next(side for side in servers if str(side) == told["side"])
    peers = [side for side in servers if not side.kernel and side.model == ours.model]
    held_to = [side for side in peers if str(side) == told["best"] or side.family == ours.family]
    asked = requests(batch, PROFILED)
    return {
        str(side): profiled(servers[side], folder / f"profile-{side}-{batch}-{ours.backend}", PROFILED // 3, **asked)
        for side in (ours, *held_to)
    }


def requests(batch: int, num_tokens: int) -> dict[str, Any]:
    """What is asked of an engine: as many prompts, all of whose prefixes differ."""
    prompts = [[(7 * i + 13 * j) % 30000 + 1 for j in range(PREFIX)] for i in range(batch)]
    return {
        "input_ids": prompts,
        "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": num_tokens},
    }


def in_turn(servers: dict[Side, Server], batch: int) -> dict[Side, list[float]]:
    """Tokens a second of each side, REPEATS times, after one that fills its cache and warms up."""
    asked = requests(batch, NUM_TOKENS[batch])
    found: dict[Side, list[float]] = {side: [] for side in servers}
    for server in servers.values():
        server.ask(**asked)
    for _ in range(REPEATS):
        for side, server in servers.items():
            found[side].append(batch * NUM_TOKENS[batch] / server.ask(**asked)["seconds"])
    return found


def summarized(times: dict[Side, list[float]], batch: int) -> Iterator[dict[str, Any]]:
    """Medians and spreads; of ours, over the median of SGLang's on the same kernels, and over the best of SGLang's."""
    medians = {side: median(found) for side, found in times.items()}
    theirs = {side: rate for side, rate in medians.items() if not side.kernel}
    for side, found in times.items():
        told: dict[str, Any] = {
            "side": str(side),
            "batch": batch,
            "tokens_per_s": round(medians[side], 1),
            "least": round(min(found), 1),
            "most": round(max(found), 1),
        }
        if side.kernel and theirs:
            same = [rate for other, rate in theirs.items() if other.family == side.family]
            best = max(theirs, key=lambda other: theirs[other])
            told |= {
                "of_same_kernel": round(medians[side] / same[0], 3) if same else None,
                "of_best": round(medians[side] / theirs[best], 3),
                "best": str(best),
            }
        yield told | {"ok": True}
