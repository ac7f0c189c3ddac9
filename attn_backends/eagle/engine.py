"""From a run's configuration to models, backends and workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from attn_backends.base import AttentionBackend
from attn_backends.config import PHASES, RunConfig
from attn_backends.eagle.serving import Completion, Server, serve
from attn_backends.eagle.worker import EagleWorker, PhaseBackends, PlainWorker, WorkerOptions
from attn_backends.errors import ConfigError
from attn_backends.graphs import CudaGraph, RecordedGraph
from attn_backends.models import DraftModel, TargetModel, Tokenizer, load_draft, load_target, load_tokenizer
from attn_backends.registry import get_backend
from attn_backends.selection import Workload
from spec_metadata import CacheGeometry


class Engine:
    """A target and a draft with their backends; generates by EAGLE, or plainly with the target alone."""

    def __init__(self, config: RunConfig, target: TargetModel, draft: DraftModel, tokenizer: Tokenizer) -> None:
        self.config, self.target, self.draft, self.tokenizer = config, target, draft, tokenizer
        capacity = config.capacity
        self.geometry = CacheGeometry(1 + capacity.max_bs * capacity.max_pages, capacity.page_size)
        longest, limit = capacity.max_context + capacity.draft_room, min(target.max_positions, draft.max_positions)
        if longest > limit:
            raise ConfigError(
                f"{config.source}: runtime.max_context {capacity.max_context} and {capacity.draft_room} drafted tokens "
                f"need {longest} positions; the models have {limit}"
            )
        made = {name: self._backend(name) for name in config.backends.distinct}
        self.backends = PhaseBackends(**{phase: made[config.backends.of(phase)] for phase in PHASES})

    @cached_property
    def eagle(self) -> EagleWorker:
        """The speculative worker; its graphs are captured at the first use."""
        capacity = self.config.capacity
        return EagleWorker(self.target, self.draft, self.backends, capacity, self.geometry, self._options)

    @cached_property
    def plain(self) -> PlainWorker:
        """The worker that decodes one token a step."""
        return PlainWorker(self.target, self.backends, self.config.capacity, self.geometry, self._options)

    @property
    def kernels(self) -> dict[str, str]:
        """The kernel of each phase."""
        return {phase: getattr(self.backends, phase).kernel_of(PHASES[phase]).name for phase in PHASES}

    @property
    def ran(self) -> dict[str, dict[str, int]]:
        """How many steps of each phase the workers ran through graphs and how many eagerly."""
        counts: dict[str, dict[str, int]] = {}
        workers = [self.__dict__[name] for name in ("eagle", "plain") if name in self.__dict__]
        for worker in workers:
            for path, steps in (("graph", worker.num_graph_steps), ("eager", worker.num_eager_steps)):
                for phase, number in steps.items():
                    counts.setdefault(phase, {"graph": 0, "eager": 0})[path] += number
        return counts

    def server(self) -> Server:
        """Serves requests by EAGLE as they come and go, and makes text of them; one at a time."""
        return Server(self.eagle, self.tokenizer.decode)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Generate by EAGLE, greedily. on_progress gets the number of tokens newly emitted."""
        return serve(self.eagle, prompts, max_new_tokens, on_progress)

    def generate_plain(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Generate with the target alone, greedily: what `generate` must equal."""
        return serve(self.plain, prompts, max_new_tokens, on_progress)

    def _backend(self, name: str) -> AttentionBackend:
        config, backend = self.config, get_backend(name)
        if self.target.cache_format not in backend.formats:
            raise ConfigError(
                f"{config.source}: backend {name} takes a cache of {' or '.join(sorted(backend.formats))}, the model "
                f"{config.model.target} stores {self.target.cache_format}. Choose another backend or model"
            )
        workload = Workload(
            config.page_size, (*self.target.layers, *self.draft.layers), config.dtype, config.cache_dtype
        )
        return backend(config.capacity, self.geometry, config.device, kernel=config.kernels[name], workload=workload)

    @property
    def _options(self) -> WorkerOptions:
        runtime = self.config.runtime
        buckets = tuple(bs for bs in runtime.buckets if bs <= runtime.max_bs and runtime.path == "graph")
        make_graph = CudaGraph if self.config.device.type == "cuda" else RecordedGraph
        return WorkerOptions(
            buckets,
            make_graph,
            runtime.prefill_chunk,
            self.tokenizer.eos_token_id,
            runtime.seed,
            runtime.host_lag,
            self.config.cache_dtype,
        )


def build_engine(config: RunConfig) -> Engine:
    """Load the models of a run and put them on its backends.

    Raises `ConfigError`, `CheckpointError` or `BackendUnavailableError` before anything is computed.
    """
    target = load_target(config.model.target, config.dtype, config.device)
    draft = load_draft(config.model.draft, target)
    tokenizer = load_tokenizer(config.model.target, target.vocab_size)
    return Engine(config, target, draft, tokenizer)
