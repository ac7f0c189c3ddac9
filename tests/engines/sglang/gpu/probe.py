"""What is seen of an engine from inside, as a second plug-in of SGLang's: which of our layers attended, and when.

Calls of our attention are counted on the device, by a tensor that each adds one to. So a replayed graph counts, too,
though no Python of ours runs in it. SGLang's own forwards are counted on the host, where it starts them. Whenever its
cache is emptied, a line of JSON is written, and the counts begin anew:

    attended: "backend.kernel/kind/layer" -> calls. forwards: "target EXTEND" or "draft draft_decode" -> forwards; those
    of prompts before requests of one row, as running ones are, are `APART`, and verifies and extends of one row each
    are "decode". batches: by kind of graph, how many replays there were, of how many real requests at least and at
    most. drafted: "requests:tokens that were drafted for each" -> verifies. widths: rows of a request -> requests, of
    verifies whose rows the device divides. launches: by scope, calls of CUDA's runtime that launch or copy, of the part
    that was profiled: the second after a start.

With ATTN_PROBE_DRAFTS, of an engine without its overlap schedule, a line a drafted chain or block instead: the
committed text with its root, the drafted tokens, and of a chain, without graphs, the draft's logits behind each but the
last.
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

from tests.engines.sglang.probe import Log, blocks, proposals

EXECUTES = {
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner": "target",
    "sglang.srt.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner": "draft_decode",
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner": "draft_extend",
}
VERIFY_INPUT = "sglang.srt.speculative.eagle_worker_v2.build_eagle_verify_input"
DRAFTED_BLOCKS = {
    "sglang.srt.speculative.dflash_info.DFlashVerifyInput.prepare_for_verify": blocks,
    "sglang.srt.speculative.dspark_components.dspark_draft.DraftBlockProposer.propose": proposals,
}
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaMemcpy", "cuMemcpy", "cudaMemset", "cuMemset", "cudaGraphLaunch")
APART = "APART"
MAX_WIDTH = 64
PROFILED = 2  # counts are written at the first two, launches at the third


class Probe:
    """The counts of one process."""

    def __init__(self, path: Path) -> None:
        self.path, self.num_flushes = path, 0
        self.indices: dict[str, int] = {}
        self.attended: torch.Tensor | None = None
        self.widths: torch.Tensor | None = None
        self.forwards: Counter[str] = Counter()
        self.drafted: Counter[str] = Counter()
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
        mode, lens = mode_of(batch), batch.extend_seq_lens_cpu
        if mode in ("EXTEND", "MIXED") and lens[-1] == 1 < max(lens):
            mode = APART
        if batch.forward_mode.name == "TARGET_VERIFY" and not runner.is_draft_worker:
            self._verifies(batch)
        self.forwards[f"{'draft' if runner.is_draft_worker else 'target'} {mode}"] += 1
        out = original(runner, batch, *rest, **named)
        if self.logits is not None and runner.is_draft_worker and mode == "DECODE":
            self.logits.append(out.logits_output.next_token_logits.float().tolist())
        return out

    def _verifies(self, batch: Any) -> None:
        """One of the target, before it runs."""
        layout = layout_of(batch)
        if layout is None:
            self.drafted[f"{batch.batch_size}:{len(batch.input_ids) // batch.batch_size - 1}"] += 1
            return
        widths = layout.verify_lens.long()
        if self.widths is None:
            with torch.inference_mode(False):
                self.widths = torch.zeros(MAX_WIDTH, dtype=torch.int64, device=widths.device)
        self.widths.index_add_(0, widths, torch.ones_like(widths))

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
        """Around the `execute` of a runner of graphs; one of the draft loop holds all its forwards. `runs` counts those
        of the target's runner, and of the same for blocks.
        """
        is_counted = kind == "target"
        if is_counted and runner.model_runner.is_draft_worker:
            kind = "draft_block"
        self.batches[kind].append(batch.batch_size)
        if not is_counted:
            mode = "decode" if mode_of(batch) == "decode" else kind
            self.forwards[f"draft {mode}"] += runner.speculative_num_steps - 1 if kind == "draft_decode" else 1
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
        entry |= {"drafted": dict(self.drafted), "widths": self._read_widths()}
        if self.profile is not None:
            self.profile.stop()
            entry["launches"], self.profile = launches_of(self.profile), None
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        for counted in (self.forwards, self.batches, self.drafted):
            counted.clear()
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

    def _read_widths(self) -> dict[str, int]:
        if self.widths is None:
            return {}
        counts = self.widths.tolist()
        self.widths.zero_()
        return {str(width): count for width, count in enumerate(counts) if count}


def layout_of(batch: Any) -> Any:
    """Of a verify whose rows the device divides; None of all else."""
    return getattr(batch.spec_info, "ragged_verify_layout", None)


def mode_of(batch: Any) -> str:
    """SGLang's name; of a verify or a draft extend of one row a request "decode"."""
    mode, may_be_one = batch.forward_mode.name, layout_of(batch) is None
    is_one = may_be_one and mode in ("TARGET_VERIFY", "DRAFT_EXTEND_V2") and len(batch.input_ids) == batch.batch_size
    return "decode" if is_one else str(mode)


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
        for name, hook in DRAFTED_BLOCKS.items():
            HookRegistry.register(name, functools.partial(hook, Log(probe.path)), around)
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
