"""What is seen of an engine from inside, as a second plug-in of SGLang's: which of our layers attended, and when.

Calls of our attention are counted on the device, by a tensor that each adds one to. So a replayed graph counts, too,
though no Python of ours runs in it. SGLang's own forwards are counted on the host, where it starts them. Whenever its
cache is emptied, a line of JSON is written, and the counts begin anew:

    attended: "backend.kernel/kind/layer" -> calls. forwards: "target EXTEND" or "draft draft_decode" -> forwards; those
    of prompts before requests of one row, as running ones are, are `APART`.
    batches: by kind of graph, how many replays there were, of how many real requests at least and at most. launches: by
    scope, calls of CUDA's runtime that launch or copy, of the part that was profiled: the second after a start.

With ATTN_PROBE_DRAFTS, of an engine without graphs and without its overlap schedule, a line a drafted chain instead:
the committed text with its root, the drafted tokens, and the draft's logits behind each but the last.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import torch

EXECUTES = {
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner": "target",
    "sglang.srt.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner": "draft_decode",
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner": "draft_extend",
}
VERIFY_INPUT = "sglang.srt.speculative.eagle_worker_v2.build_eagle_verify_input"
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaMemcpy", "cuMemcpy", "cudaMemset", "cuMemset", "cudaGraphLaunch")
APART = "APART"
PROFILED = 2  # counts are written at the first two, launches at the third


class Probe:
    """The counts of one process."""

    def __init__(self, path: Path) -> None:
        self.path, self.num_flushes = path, 0
        self.indices: dict[str, int] = {}
        self.attended: torch.Tensor | None = None
        self.forwards: Counter[str] = Counter()
        self.batches: dict[str, list[int]] = defaultdict(list)
        self.profile: Any = None
        self.logits: list[list[list[float]]] | None = [] if "ATTN_PROBE_DRAFTS" in os.environ else None

    def attends(self, original: Any, backend: Any, q: Any, cache: Any, meta: Any, layer: Any) -> Any:
        """Around `AttentionBackend.forward`."""
        if self.attended is None:
            with torch.inference_mode(False):
                self.attended = torch.zeros(4096, dtype=torch.int64, device=q.device)
        name = f"{backend.name}.{backend.kernel_of(meta.kind).name}/{meta.kind}/{layer.id}"
        self.attended[self.indices.setdefault(name, len(self.indices))].add_(1)
        return original(backend, q, cache, meta, layer)

    def runs(self, original: Any, runner: Any, batch: Any, *rest: Any, **named: Any) -> Any:
        """Around `ModelRunner.forward`: all of the target's, and those of the draft that no graph holds."""
        mode, lens = batch.forward_mode.name, batch.extend_seq_lens_cpu
        if mode in ("EXTEND", "MIXED") and lens[-1] == 1 < max(lens):
            mode = APART
        self.forwards[f"{'draft' if runner.is_draft_worker else 'target'} {mode}"] += 1
        out = original(runner, batch, *rest, **named)
        if self.logits is not None and runner.is_draft_worker and mode == "DECODE":
            self.logits.append(out.logits_output.next_token_logits.float().tolist())
        return out

    def drafts(
        self, original: Any, batch: Any, draft: Any, parents: Any, chosen: Any, tokens: Any, *rest: Any, **named: Any
    ) -> Any:
        """Around `build_eagle_verify_input`, to which the drafted tokens go."""
        logits, self.logits = self.logits or [], []
        with self.path.open("a") as file:
            for i, request in enumerate(batch.reqs):
                text = [*request.origin_input_ids, *request.output_ids][: int(batch.seq_lens[i])]
                text = [*map(int, text), int(draft.bonus_tokens[i])]
                entry = {"text": text, "tokens": tokens[i].tolist(), "logits": [forward[i] for forward in logits]}
                file.write(json.dumps(entry) + "\n")
        return original(batch, draft, parents, chosen, tokens, *rest, **named)

    def replays(self, kind: str, original: Any, runner: Any, batch: Any, *rest: Any, **named: Any) -> Any:
        """Around the `execute` of a runner of graphs; one of the draft loop holds all its forwards."""
        self.batches[kind].append(batch.batch_size)
        if kind != "target":
            self.forwards[f"draft {kind}"] += runner.speculative_num_steps - 1 if kind == "draft_decode" else 1
        return original(runner, batch, *rest, **named)

    def scoped(self, scope: str, original: Any, *arguments: Any, **named: Any) -> Any:
        """Around what plans: its launches can be told from others."""
        with torch.profiler.record_function(scope):
            return original(*arguments, **named)

    def flushed(self, result: Any, *_: Any, **__: Any) -> Any:
        """After `Scheduler.flush_cache`."""
        if self.logits is not None:
            return result
        self.num_flushes += 1
        batches = {kind: [len(found), min(found), max(found)] for kind, found in self.batches.items()}
        entry = {"attended": self._read(), "forwards": dict(self.forwards), "batches": batches}
        if self.profile is not None:
            self.profile.stop()
            entry["launches"], self.profile = launches_of(self.profile), None
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        self.forwards.clear()
        self.batches.clear()
        if self.num_flushes == PROFILED:
            kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self.profile = torch.profiler.profile(activities=kinds)
            self.profile.start()
        return result

    def _read(self) -> dict[str, int]:
        if self.attended is None:
            return {}
        counts = self.attended.tolist()
        self.attended.zero_()
        return {name: counts[index] for name, index in self.indices.items() if counts[index]}


def launches_of(profile: Any) -> dict[str, list[int]]:
    """By scope: how often it was entered, and launches and copies by the host within; "all": anywhere."""
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CPU]
    launches = [event for event in events if event.name.startswith(LAUNCHES)]
    scopes: dict[str, list[int]] = {"all": [1, len(launches)]}
    for scope in (event for event in events if event.name.startswith("plans ")):
        span = scope.time_range
        within = sum(span.start <= each.time_range.start and each.time_range.end <= span.end for each in launches)
        entered, launched = scopes.get(scope.name, [0, 0])
        scopes[scope.name] = [entered + 1, launched + within]
    return scopes


def install() -> None:
    """Called by SGLang in each of its processes, of which only its scheduler runs a model."""
    if parent_process() is None or "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from attn_backends.backend import AttentionBackend

    probe = Probe(Path(os.environ["ATTN_PROBE"]))
    around, ours = HookType.AROUND, "attn_backends.engines.sglang.backends"
    original = AttentionBackend.forward
    AttentionBackend.forward = _around(original, probe.attends)
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.forward", probe.runs, around)
    if probe.logits is not None:
        HookRegistry.register(VERIFY_INPUT, probe.drafts, around)
    for owner, kind in EXECUTES.items():
        HookRegistry.register(f"{owner}.execute", functools.partial(probe.replays, kind), around)
    for owner in ("EngineBackend", "DraftLoop"):
        for half, scope in (("init_forward_metadata_out_graph", "replay"), ("init_forward_metadata", "eager")):
            HookRegistry.register(f"{ours}.{owner}.{half}", functools.partial(probe.scoped, f"plans {scope}"), around)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.flush_cache", probe.flushed, HookType.AFTER)


def _around(original: Any, hook: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        return hook(original, *arguments, **named)

    return wrapped
