"""One engine: options on the command line, requests as lines of JSON on the standard input, answers likewise."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch

from tests.engines.vllm.gpu import counts


class Engine:
    """vLLM's engine in this process, and what is counted of it."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.spans = Spans()
        self.llm: Any = LLM(**options)
        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)  # of this process
        asked = self.llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        self.is_async = asked if core is None else getattr(core, "batch_queue", None) is not None
        self.llm.collective_rpc(counts.watch)
        self._time_builders()

    def _time_builders(self) -> None:
        """The host's time in builders of metadata, whosever they are."""
        from vllm.v1.attention.backend import AttentionMetadataBuilder

        classes = [AttentionMetadataBuilder]
        for made in classes:
            classes += made.__subclasses__()
            for name in ("build", "build_for_drafting", "update_draft_decode_metadata"):
                if name in vars(made):
                    setattr(made, name, self.spans.timed("metadata", vars(made)[name]))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Of one request, by its name."""
        return getattr(self, request.pop("do"))(**request)

    def generate(self, prompts: list[list[int]], lengths: list[int], gaps: bool) -> dict[str, Any]:
        """Greedy texts, and what was counted meanwhile. gaps: between the two best scores of each token, too."""
        self.forget()
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [_greedy(length, gaps) for length in lengths],
            use_tqdm=False,
        )
        texts = [output.outputs[0] for output in outputs]
        return {
            "ids": [list(text.token_ids) for text in texts],
            "gaps": [[_gap(scores) for scores in text.logprobs] for text in texts] if gaps else [],
            "cached": sum(bool(output.num_cached_tokens) for output in outputs),
            "drafts": self.drafts(len(prompts)),
        } | self.counted()

    def forget(self) -> None:
        """Count from zero."""
        self.llm.collective_rpc(counts.forget)
        self.before = self.acceptance()

    def counted(self) -> dict[str, Any]:
        """Since `forget`, of the first rank. otherwise: ranks that counted something else. accepted: by position."""
        first, *others = self.llm.collective_rpc(counts.told)
        accepted = [now - then for now, then in zip(self.acceptance(), self.before, strict=True)]
        found = {
            "ranks": 1 + len(others),
            "otherwise": [rank for rank, each in enumerate(others, 1) if each != first],
            "accepted": accepted,
            "is_async": self.is_async,
        }
        return dict(first) | found

    def drafts(self, num_prompts: int) -> list[tuple[int, int, list[int]]]:
        """Since `forget`, of the first rank: number of the prompt, tokens known by then, and drafts. vLLM numbers on
        from one call to the next.
        """
        found = self.llm.collective_rpc(counts.drafts)[0]
        return [(request % num_prompts, known, drafts) for request, known, drafts in found]

    def acceptance(self) -> list[int]:
        """Drafted tokens that were accepted, by position."""
        found = {metric.name: metric for metric in self.llm.get_metrics()}
        metric = found.get("vllm:spec_decode_num_accepted_tokens_per_pos")
        return list(metric.values) if metric else []

    def decode(self, prompts: list[list[int]], steps: int, hosted: int, profiled: int) -> dict[str, Any]:
        """Tokens a second of steps in which every request decodes, after 8 that are not timed. hosted, profiled: steps
        after those in which the host's parts are timed, and steps whose launches are named.
        """
        engine = self.llm.llm_engine
        names = [f"{time.monotonic_ns()}-{i}" for i in range(len(prompts))]
        room = 4 * (steps + hosted + profiled + 24)
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, _greedy(room, False))
        done: dict[str, int] = {}

        def step() -> None:
            done.update({output.request_id: len(output.outputs[0].token_ids) for output in engine.step()})

        while len(done) < len(prompts):
            step()
        for _ in range(8):
            step()
        torch.cuda.synchronize()
        self.spans.seconds.clear()
        before, marks = sum(done.values()), [time.perf_counter()]
        for _ in range(steps):
            step()
            marks.append(time.perf_counter())
        torch.cuda.synchronize()
        seconds = time.perf_counter() - marks[0]
        found: dict[str, Any] = {
            "seconds": seconds,
            "tokens": sum(done.values()) - before,
            "steps": steps,
            "step_us": [round((end - start) * 1e6) for start, end in pairwise(marks)],
            "metadata_us": self.spans.seconds["metadata"] / steps * 1e6,
            "host_us": self.host(step, hosted),
        }
        if profiled:
            found["launches"] = launches(step, profiled)
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
        return found

    def host(self, step: Callable[[], None], steps: int) -> dict[str, float]:
        """The host's us a step, part by part, of which "wait" is for the device."""
        from vllm.v1.executor.uniproc_executor import AsyncOutputFuture

        engine = self.llm.llm_engine
        core = engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        parts = [
            ("schedule", core.scheduler, "schedule"),
            ("update", core.scheduler, "update_from_output"),
            ("detokenize", engine.output_processor, "process_outputs"),
            ("output", AsyncOutputFuture, "result"),
            ("wait", torch.cuda.Event, "synchronize"),
            ("runner", core.model_executor, "execute_model"),
            ("runner", core.model_executor, "sample_tokens"),
            ("inputs", runner, "prepare_inputs"),
            ("inputs", runner, "prepare_attn"),
            ("batch", runner.model_state, "prepare_attn"),
            ("sample", runner, "sample"),
            ("draft", runner.speculator, "propose"),
            ("launch", torch.cuda.CUDAGraph, "replay"),
        ]
        with ExitStack() as stack:
            for name, owner, function in parts:
                timed = self.spans.timed(name, getattr(owner, function))
                stack.enter_context(patch.object(owner, function, timed))
            self.spans.seconds.clear()
            for _ in range(steps):
                self.spans.timed("engine", step)()
        return {name: seconds / steps * 1e6 for name, seconds in self.spans.seconds.items()}


class Spans:
    """Seconds of functions by name, without those of other ones that they call."""

    def __init__(self) -> None:
        self._inner = [0.0]
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                self.seconds[name] += took - self._inner.pop()
                self._inner[-1] += took

        return call


def launches(step: Callable[[], None], steps: int) -> list[tuple[str, float, float]]:
    """Name, µs a step and launches a step of what the device ran, longest first, and of all together."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in profiled.events() or []:
        if event.device_time_total:
            times[event.name[:90]] += event.device_time_total
            calls[event.name[:90]] += 1
    all_of_them = ("all", times.total() / steps, calls.total() / steps)
    return [all_of_them, *((name, time / steps, calls[name] / steps) for name, time in times.most_common(40))]


def _greedy(num_tokens: int, gaps: bool) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, logprobs=2 if gaps else None
    )


def _gap(scores: dict[int, Any]) -> float:
    second, first = sorted(score.logprob for score in scores.values())[-2:]
    return round(first - second, 4)


def main() -> None:
    """Until the input ends. vLLM writes where errors go."""
    start = time.perf_counter()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = Engine(json.loads(sys.argv[1]))
    print(json.dumps({"seconds": round(time.perf_counter() - start, 1)}), file=answers)
    for line in sys.stdin:
        print(json.dumps(engine.answer(json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
