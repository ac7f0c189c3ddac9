"""Options of a worker: its backends, and the options that hold for all of its requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, get_args

import torch

from attn_backends.backend import AttentionBackend
from attn_backends.graphs import Graph
from attn_backends.runner import Planning
from attn_backends_reference.eagle.adaptive import AdaptiveSteps
from spec_metadata import InvalidStepError
from spec_metadata.widths import check_threshold

DraftGraphs = Literal["one", "per_module"]
PrefillGraphs = Literal["piecewise", "full"]


@dataclass(frozen=True, slots=True)
class PhaseBackends:
    """The backend of each phase; they share one cache geometry and format."""

    prefill: AttentionBackend
    decode: AttentionBackend
    draft: AttentionBackend
    verify: AttentionBackend
    draft_extend: AttentionBackend


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of a worker, for all of its requests.

    buckets: batch sizes to capture, none to run eagerly. make_graph: what to capture with. chunk: prompt tokens of a
    request that one prefill forward takes. eos_tokens: any of them ends a request. seed: of the order in which pages
    are given out. host_lag: 0, or 1 to launch cycles before the previous cycle's tokens are read. cache_dtype: of the
    caches' entries (None: the models'). draft_graphs: of `MtpWorker`, whether one graph holds all modules or each has
    its own. prefill_buckets: numbers of tokens to capture prefill at; a draft with more rows than prompts have is also
    captured at the largest with these rows. prefill_graphs: in "piecewise" graphs between its attention calls, or in
    one "full" graph. placeholder_token: what stands in prompts for embeddings that come with them (None: prompts are
    text). planning: of captured steps, "before" their graph runs, or "in_graph", as its first node. verify_threshold:
    least probability that the draft gives to the path of a row that is verified; verify_rows: rows of a verify at most,
    at least one per request. Either makes verifies of chains ragged (None: not). adaptive: sets of steps, one for each
    cycle (None: it drafts as the capacity says). draft_window: of `EagleWorker`, the last committed tokens that drafts
    see, in whole pages (None: all); draft_sink_tokens: the first ones, beside it.
    """

    buckets: tuple[int, ...] = ()
    make_graph: Callable[[], Graph] | None = None
    chunk: int = 512
    eos_tokens: tuple[int, ...] = ()
    seed: int = 0
    host_lag: int = 0
    cache_dtype: torch.dtype | None = None
    draft_graphs: DraftGraphs = "one"
    prefill_buckets: tuple[int, ...] = ()
    prefill_graphs: PrefillGraphs = "piecewise"
    placeholder_token: int | None = None
    planning: Planning = "before"
    verify_threshold: float | None = None
    verify_rows: int | None = None
    adaptive: AdaptiveSteps | None = None
    draft_window: int | None = None
    draft_sink_tokens: int = 0

    @property
    def verifies_by_confidence(self) -> bool:
        """Whether verifies are ragged."""
        return self.verify_threshold is not None or self.verify_rows is not None

    def prefill_sizes(self, more_rows: int) -> tuple[int, ...]:
        """Numbers of tokens to capture prefill at. more_rows: that all requests may have beside those of their chunks.
        With any, the last size holds them beside the largest bucket, so that drafts prefill through a graph wherever
        the target does.
        """
        sizes = self.prefill_buckets
        return (*sizes, max(sizes) + more_rows) if sizes and more_rows else sizes

    def __post_init__(self) -> None:
        for name, sizes in (("buckets", self.buckets), ("prefill_buckets", self.prefill_buckets)):
            if not isinstance(sizes, Sequence) or not all(isinstance(size, Integral) for size in sizes):
                raise InvalidStepError(f"{name} must be a tuple of whole numbers, such as (1, 2, 4); got {sizes!r}")
        if self.verify_threshold is not None:
            check_threshold(self.verify_threshold)
        if self.verify_rows is not None and (not isinstance(self.verify_rows, Integral) or self.verify_rows < 1):
            raise InvalidStepError(f"verify_rows must be at least 1 row, got {self.verify_rows!r}")
        if self.draft_window is not None and self.draft_window < 1:
            raise InvalidStepError(f"draft_window must be at least 1 token, got {self.draft_window!r}")
        if self.draft_sink_tokens < 0 or (self.draft_sink_tokens and self.draft_window is None):
            raise InvalidStepError(
                f"draft_sink_tokens={self.draft_sink_tokens!r} stand before a draft_window; give one"
            )
        if self.host_lag not in (0, 1):
            raise InvalidStepError(f"host_lag must be 0 or 1 rounds, got {self.host_lag}")
        if self.chunk < 1:
            raise InvalidStepError(f"chunk must be at least 1 prompt token, got {self.chunk}")
        if self.draft_graphs not in get_args(DraftGraphs):
            raise InvalidStepError(f"draft_graphs must be 'one' or 'per_module', got {self.draft_graphs!r}")
        if self.prefill_graphs not in get_args(PrefillGraphs):
            raise InvalidStepError(f"prefill_graphs must be 'piecewise' or 'full', got {self.prefill_graphs!r}")
        if self.prefill_graphs == "full" and not self.prefill_buckets:
            raise InvalidStepError(
                "prefill_graphs='full' captures nothing without prefill_buckets; give numbers of tokens, such as "
                "(64, 256), or leave it out to prefill eagerly"
            )
        if self.planning not in get_args(Planning):
            raise InvalidStepError(f"planning must be 'before' or 'in_graph', got {self.planning!r}")


DEFAULTS = WorkerOptions()
