"""From a run's configuration to models, backends and workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from attn_backends.backend import AttentionBackend
from attn_backends.errors import ConfigError
from attn_backends.graphs import CudaGraph, RecordedGraph
from attn_backends.memory.static_memory import StaticMemory
from attn_backends.registry import get_backend
from attn_backends.selection.choose import Workload
from attn_backends_reference.config import RunConfig
from attn_backends_reference.eagle.adaptive import AdaptiveSteps
from attn_backends_reference.eagle.block import BlockWorker
from attn_backends_reference.eagle.mtp import MtpWorker
from attn_backends_reference.eagle.options import PhaseBackends, WorkerOptions
from attn_backends_reference.eagle.parallel import ParallelWorker
from attn_backends_reference.eagle.requests import Completion, DraftShape
from attn_backends_reference.eagle.serving import Server, serve
from attn_backends_reference.eagle.worker import EagleWorker, PlainWorker
from attn_backends_reference.models import (
    DraftModel,
    TargetModel,
    Tokenizer,
    load_draft,
    load_mtp,
    load_parallel,
    load_tokenizer,
    open_target,
)
from attn_backends_reference.models.block import BlockModel, load_block
from attn_backends_reference.models.decoder import PagedModel
from attn_backends_reference.run_options import PHASES, AdaptiveOptions
from spec_metadata import CacheGeometry, Capacity

Speculative = EagleWorker | MtpWorker | BlockWorker | ParallelWorker


class Engine:
    """A target and what drafts for it with their backends; generates speculatively, or plainly with the target alone.

    drafts: the draft of EAGLE or of blocks, the modules of MTP, or none if the run has no [eagle].
    """

    def __init__(
        self, config: RunConfig, target: TargetModel, drafts: Sequence[DraftModel | BlockModel], tokenizer: Tokenizer
    ) -> None:
        self.config, self.target, self.drafts, self.tokenizer = config, target, drafts, tokenizer
        self._capacity = capacity = _capacity(config, drafts)
        self.geometry = CacheGeometry(1 + capacity.max_bs * capacity.max_pages, capacity.page_size)
        if config.eagle and config.eagle.worker == "mtp" and capacity.num_steps > len(drafts):
            raise ConfigError(
                f"{config.source}: eagle.num_steps {capacity.num_steps} takes as many modules; {config.model.draft} "
                f"has {len(drafts)}. Draft fewer steps, or all of them with its first module (worker = 'eagle')"
            )
        self._check_positions()
        memory = StaticMemory()
        made = {name: self._backend(name, memory) for name in config.backends.distinct}
        self.backends = PhaseBackends(**{phase: made[config.backends.of(phase)] for phase in PHASES})

    @cached_property
    def eagle(self) -> Speculative:
        """The speculative worker; its graphs are captured at the first use."""
        if self.config.eagle is None:
            raise ConfigError(
                f"{self.config.source} names no draft, so nothing can be drafted; add model.draft and [eagle]"
            )
        place = self.backends, self._capacity, self.geometry, self._options
        first, *further = self.drafts
        if isinstance(first, BlockModel):
            return BlockWorker(self.target, first, *place)
        from attn_backends_reference.models.peagle import PEagleModel

        if isinstance(first, PEagleModel):
            return ParallelWorker(self.target, first, *place)
        if self.config.eagle.worker == "mtp":
            return MtpWorker(self.target, [first, *(each for each in further if isinstance(each, DraftModel))], *place)
        return EagleWorker(self.target, first, *place)

    @cached_property
    def plain(self) -> PlainWorker:
        """The worker that decodes one token per step."""
        return PlainWorker(self.target, self.backends, self._capacity, self.geometry, self._options)

    @property
    def worker(self) -> Speculative | PlainWorker:
        """The worker of the run: plain if it has no draft."""
        return self.plain if self.config.eagle is None else self.eagle

    @property
    def kernels(self) -> dict[str, str]:
        """The kernel of each phase of the run."""
        phases = self.config.phases
        return {phase: getattr(self.backends, phase).kernel_of(kind).name for phase, kind in phases.items()}

    @property
    def ran(self) -> dict[str, dict[str, int]]:
        """Numbers of steps that the workers ran, by phase and path, graph or eager."""
        counts: dict[str, dict[str, int]] = {}
        workers = [self.__dict__[name] for name in ("eagle", "plain") if name in self.__dict__]
        for worker in workers:
            for path, steps in (("graph", worker.num_graph_steps), ("eager", worker.num_eager_steps)):
                for phase, number in steps.items():
                    counts.setdefault(phase, {"graph": 0, "eager": 0})[path] += number
        return counts

    def server(self) -> Server:
        """Serves requests as they come and go, and makes text of them; one at a time."""
        return Server(self.worker, self.tokenizer.decode)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Generate greedily, speculatively if the run has a draft. on_progress gets the number of new tokens."""
        return serve(self.worker, prompts, max_new_tokens, on_progress)

    def generate_plain(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Generate with the target alone, greedily: what `generate` must equal."""
        return serve(self.plain, prompts, max_new_tokens, on_progress)

    def _check_positions(self) -> None:
        """Raises `ConfigError` if the longest request has more positions than one of the models."""
        capacity, model = self._capacity, self.config.model
        room = capacity.draft_room if self.drafts else 0
        limits = {f"the target {model.target}": self.target.max_positions}
        limits |= {f"the draft {model.draft}": model.draft_positions or draft.max_positions for draft in self.drafts}
        shortest = min(limits, key=lambda name: limits[name])
        if capacity.max_context + room > limits[shortest]:
            raise ConfigError(
                f"{self.config.source}: runtime.max_context {capacity.max_context} and {room} drafted tokens need "
                f"{capacity.max_context + room} positions; {shortest} has {limits[shortest]} "
                f"(max_position_embeddings). Set runtime.max_context to {limits[shortest] - room}, or less"
                f"{', or model.draft_positions' if 'draft' in shortest else ''}"
            )

    def _backend(self, name: str, memory: StaticMemory) -> AttentionBackend:
        config, backend, models = self.config, get_backend(name), self._models_on(name)
        for called, model in models:
            if model.cache_format not in backend.formats:
                raise ConfigError(
                    f"{config.source}: backend {name} takes a cache of {' or '.join(sorted(backend.formats))}, the "
                    f"model {called} stores {model.cache_format}. Choose another backend or model"
                )
        layers = tuple(layer for _, model in models for layer in model.layers)
        workload = Workload(config.page_size, layers, config.dtype, config.cache_dtype)
        return backend(
            self._capacity,
            self.geometry,
            config.device,
            kernel=config.kernels[name],
            workload=workload,
            planner=config.runtime.planner,
            memory=memory,
        )

    def _models_on(self, name: str) -> list[tuple[str | None, PagedModel]]:
        """The models that run on a backend, which may be one for the target and another for its draft, with names."""
        backends, names, found = self.config.backends, self.config.model, list[tuple[str | None, PagedModel]]()
        if name in map(backends.of, ("prefill", "decode", "verify")):
            found.append((names.target, self.target))
        if name in map(backends.of, ("prefill", "draft", "draft_extend")):
            found += [(names.draft, draft) for draft in self.drafts]
        return found

    @property
    def _options(self) -> WorkerOptions:
        runtime, eagle = self.config.runtime, self.config.eagle
        captures = runtime.path == "graph"
        captures_prefill = captures and runtime.prefill != "eager"
        own = () if self.tokenizer.eos_token_id is None else (self.tokenizer.eos_token_id,)
        make_graph = CudaGraph if self.config.device.type == "cuda" else RecordedGraph
        return WorkerOptions(
            buckets=runtime.buckets if captures else (),
            prefill_buckets=runtime.prefill_buckets if captures_prefill else (),
            prefill_graphs="full" if captures_prefill and runtime.prefill == "full" else "piecewise",
            make_graph=make_graph,
            chunk=runtime.prefill_chunk,
            eos_tokens=tuple(self.target.eos_token_ids.union(own)),
            seed=runtime.seed,
            host_lag=runtime.host_lag,
            planning=runtime.planning,
            draft_graphs=(eagle and eagle.draft_graphs) or "one",
            verify_threshold=eagle.verify_threshold if eagle else None,
            verify_rows=eagle.verify_rows if eagle else None,
            draft_window=eagle.draft_window if eagle else None,
            draft_sink_tokens=eagle.draft_sink_tokens if eagle else 0,
            adaptive=_adaptive_steps(eagle.adaptive) if eagle and eagle.adaptive else None,
            cache_dtype=self.config.cache_dtype,
            placeholder_token=self.config.model.placeholder_token,
        )


def build_engine(config: RunConfig, on_bytes: Callable[[int], None] = lambda _: None) -> Engine:
    """Load the models of a run and put them on its backends.

    on_bytes: gets the bytes of the target's files that were read, see `TargetFolder.load`. Raises `ConfigError`,
    `CheckpointError`, `MemoryLimitError` or `BackendUnavailableError` before anything is computed.
    """
    target = open_target(config.model.target).load(config.dtype, config.device, on_bytes)
    tokenizer = load_tokenizer(config.model.target, target.vocab_size)
    return Engine(config, target, _load_drafts(config, target), tokenizer)


def _capacity(config: RunConfig, drafts: Sequence[DraftModel | BlockModel]) -> Capacity:
    """That of a run; a block draft says how many rows a block has, and P-EAGLE extends by its mask rows, too."""
    if config.eagle is not None and config.eagle.worker == "parallel":
        return replace(config.capacity, num_extended=2 * config.eagle.num_steps)
    sizes = [draft.block_size for draft in drafts if isinstance(draft, BlockModel)]
    return replace(config.capacity, block_size=sizes[0]) if sizes else config.capacity


def _adaptive_steps(options: AdaptiveOptions) -> AdaptiveSteps:
    sets = tuple(DraftShape(each.topk, each.num_steps, each.num_draft_tokens) for each in options.sets)
    return AdaptiveSteps(sets, {each.bs: each.ms for each in options.cycle_ms}, options.window, options.margin)


def _load_drafts(config: RunConfig, target: TargetModel) -> tuple[DraftModel | BlockModel, ...]:
    if config.eagle is None or config.model.draft is None:
        return ()
    if config.eagle.worker == "mtp":
        return load_mtp(config.model.draft, target)
    if config.eagle.worker == "block":
        return (load_block(config.model.draft, target),)
    if config.eagle.worker == "parallel":
        return (load_parallel(config.model.draft, target),)
    return (load_draft(config.model.draft, target),)
