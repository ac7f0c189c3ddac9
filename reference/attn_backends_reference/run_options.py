"""The keys of a run's file: its tables as forms, and what their values may be."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator

from attn_backends.config.backend_files import Count
from attn_backends.config.toml_options import Options
from spec_metadata import Capacity, StepKind

PHASES = {
    "prefill": StepKind.PREFILL,
    "decode": StepKind.DECODE,
    "draft": StepKind.DRAFT_DECODE,
    "verify": StepKind.TARGET_VERIFY,
    "draft_extend": StepKind.DRAFT_EXTEND,
}


CHAINS = {"mtp": "one token a module", "block": "one token a mask", "parallel": "one token a row"}
"""Workers that draft chains alone, and what of."""


class PhaseNames(Options):
    """The name of each phase's backend."""

    prefill: str
    decode: str
    draft: str
    verify: str
    draft_extend: str

    def of(self, phase: str) -> str:
        """The backend of a phase."""
        return str(getattr(self, phase))

    @property
    def distinct(self) -> tuple[str, ...]:
        """The backends, each once, in the order of the phases."""
        return tuple(dict.fromkeys(map(self.of, PHASES)))


class SetOptions(Options):
    """A set of steps, in the words of `EagleOptions`."""

    topk: Count
    num_steps: Count
    num_draft_tokens: Count


class CostOptions(Options):
    """Milliseconds of a cycle of each set with so many requests."""

    bs: Count
    ms: Annotated[tuple[float, ...], Field(strict=False)]


class AdaptiveOptions(Options):
    """Sets of steps, and what chooses one for each cycle: `eagle.adaptive.AdaptiveSteps`."""

    sets: Annotated[tuple[SetOptions, ...], Field(min_length=1, strict=False)]
    cycle_ms: Annotated[tuple[CostOptions, ...], Field(min_length=1, strict=False)]
    window: Count = 32
    margin: Annotated[float, Field(ge=0)] = 0.05

    @field_validator("cycle_ms")
    @classmethod
    def _has_one_for_each_set(cls, value: tuple[CostOptions, ...], info: ValidationInfo) -> tuple[CostOptions, ...]:
        num_sets = len(info.data.get("sets", ()))
        for each in value:
            if num_sets and (len(each.ms) != num_sets or min(each.ms) <= 0):
                raise ValueError(f"ms of bs = {each.bs} must be a positive number for each of {num_sets} sets")
        if len({each.bs for each in value}) < len(value):
            raise ValueError(f"bs must differ from row to row, got {[each.bs for each in value]}")
        return value


class EagleOptions(Options):
    """Options of drafting. num_draft_tokens counts the root, which is the last sampled token.

    worker: "eagle", one draft for all steps, "mtp", a module for each, "block", all in one forward, or "parallel", all
    in the draft extend. draft_graphs: of "mtp", "one" graph for all modules (the default) or one "per_module".
    verify_threshold: of "eagle" with topk = 1, least probability that the draft gives to the path of a row that is
    verified; verify_rows: rows of a verify at most, of all requests, at least one each. Without both, all that is
    drafted is verified. draft_window: of "eagle", the last committed tokens that drafts see (None: all);
    draft_sink_tokens: the first ones, beside it, in whole pages. adaptive: of "eagle", sets of steps within these
    sizes, one for each cycle; None drafts as these sizes say.
    """

    worker: Literal["eagle", "mtp", "block", "parallel"] = "eagle"
    topk: Count
    num_steps: Count
    num_draft_tokens: Count
    draft_graphs: Literal["one", "per_module"] | None = None
    verify_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    verify_rows: Count | None = None
    draft_window: Count | None = None
    draft_sink_tokens: Annotated[int, Field(ge=0)] = 0
    adaptive: AdaptiveOptions | None = None

    @field_validator("adaptive")
    @classmethod
    def _is_within_the_sizes(cls, value: AdaptiveOptions | None, info: ValidationInfo) -> AdaptiveOptions | None:
        if value is None or not {"topk", "num_steps", "num_draft_tokens"} <= info.data.keys():
            return value
        if (worker := info.data.get("worker")) != "eagle":
            raise ValueError(f"worker = {worker!r} drafts one number of tokens; worker = 'eagle' adapts")
        if info.data.get("verify_threshold") is not None or info.data.get("verify_rows") is not None:
            raise ValueError("verify_threshold and verify_rows cut each request's draft; leave them or this out")
        largest = Capacity(1, 1, 1, *(info.data[name] for name in ("topk", "num_steps", "num_draft_tokens")))
        for each in value.sets:
            largest.with_draft(each.topk, each.num_steps, each.num_draft_tokens)
        return value

    @field_validator("verify_threshold", "verify_rows")
    @classmethod
    def _is_of_chains(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and (worker := info.data.get("worker")) != "eagle":
            raise ValueError(f"worker = {worker!r} keeps no probabilities of its drafts; worker = 'eagle' does")
        if value is not None and info.data.get("topk", 1) > 1:
            raise ValueError(f"the rows of a ragged verify are a chain; set topk = 1, not {info.data['topk']}")
        return value

    @field_validator("draft_window")
    @classmethod
    def _is_of_one_draft(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and (worker := info.data.get("worker")) != "eagle":
            raise ValueError(f"worker = {worker!r} has no forwards of drafts to window; worker = 'eagle' does")
        return value

    @field_validator("draft_sink_tokens")
    @classmethod
    def _stand_before_a_window(cls, value: int, info: ValidationInfo) -> int:
        if value and info.data.get("draft_window", 1) is None:
            raise ValueError("drafts see all tokens; set draft_window, beside which the first tokens stay")
        return value

    @field_validator("num_draft_tokens")
    @classmethod
    def _fits_the_tree(cls, value: int, info: ValidationInfo) -> int:
        if {"topk", "num_steps"} <= info.data.keys():
            topk, num_steps = info.data["topk"], info.data["num_steps"]
            Capacity(1, 1, 1, topk, num_steps, value)
            worker = info.data.get("worker")
            if worker in CHAINS and (topk, value) != (1, num_steps + 1):
                raise ValueError(
                    f"worker = {worker!r} drafts {CHAINS[worker]}, so num_steps = {num_steps} needs topk = 1 and "
                    f"num_draft_tokens = {num_steps + 1}; got {topk} and {value}"
                )
        return value

    @field_validator("draft_graphs")
    @classmethod
    def _is_of_mtp(cls, value: str | None, info: ValidationInfo) -> str | None:
        if (worker := info.data.get("worker")) != "mtp":
            raise ValueError(f"worker = {worker!r} has one draft and one graph of it; worker = 'mtp' has modules")
        return value

    @property
    def num_rerun(self) -> int:
        """Committed positions that a draft extend runs again."""
        return self.num_steps - 1 if self.worker == "mtp" else 0


class ModelOptions(Options):
    """Names of embedded models, or folders. draft: None to decode plainly. placeholder_token: what stands in prompts
    for embeddings that come with them, None if prompts are text. draft_positions: positions that the draft is taken to
    reach, None for its folder's max_position_embeddings.
    """

    target: str
    draft: str | None = None
    draft_positions: Count | None = None
    placeholder_token: Annotated[int, Field(ge=0)] | None = None


class RuntimeOptions(Options):
    """Options of a run's execution.

    path: through captured graphs or eagerly. max_bs: requests in one step, the rest waits. buckets: batch sizes to
    capture, None for 1, 2, 4 and 8 as far as max_bs, or that itself if less; larger ones run eagerly. max_context:
    tokens of a request, prompt and output together. prefill_chunk: prompt tokens of a request in one forward. prefill:
    of path "graph", "eager" all the same, "piecewise", captured between its attention calls, or "full", with them.
    prefill_buckets: numbers of tokens to capture it at; larger steps run eagerly. None for 64, each next four times as
    many, up to max_bs prompts of prefill_chunk. seed: of the order in which pages are used. host_lag: cycles launched
    before tokens are read. planner, planning: what writes metadata, and whether before a graph or as its first node.
    kernel, page_size: None for those of the backend's file. cache_dtype: 8-bit floats, None for those of the weights.
    """

    path: Literal["graph", "eager"] = "graph"
    max_bs: Count = 8
    buckets: Annotated[tuple[Count, ...], Field(min_length=1, strict=False, validate_default=True)] = None  # type: ignore[assignment]
    max_context: Count = 1024
    max_new_tokens: Count = 64
    prefill_chunk: Count = 256
    prefill: Literal["eager", "piecewise", "full"] = "eager"
    prefill_buckets: Annotated[tuple[Count, ...], Field(min_length=1, strict=False, validate_default=True)] = None  # type: ignore[assignment]
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    device: str = "cpu"
    seed: int = 0
    host_lag: Literal[0, 1] = 0
    planner: Literal["auto", "torch", "fused"] = "auto"
    planning: Literal["before", "in_graph"] = "before"
    kernel: str | None = None
    page_size: Count | None = None
    cache_dtype: Literal["float8_e4m3fn"] | None = None

    @field_validator("buckets", mode="before")
    @classmethod
    def _as_far_as_a_step(cls, value: object, info: ValidationInfo) -> object:
        if value is None:
            return tuple(sorted({min(bs, info.data.get("max_bs", bs)) for bs in (1, 2, 4, 8)}))
        return value

    @field_validator("prefill_buckets", mode="before")
    @classmethod
    def _as_far_as_all_prompts(cls, value: object, info: ValidationInfo) -> object:
        if value is None:
            most = info.data.get("max_bs", 1) * info.data.get("prefill_chunk", 1)
            return (*(size for size in (64 * 4**power for power in range(16)) if size < most), most)
        if info.data.get("prefill") == "eager":
            raise ValueError(f"prefill = 'eager' captures none, got {value}; set 'piecewise' or 'full', or omit them")
        return value

    @field_validator("buckets")
    @classmethod
    def _hold_no_more_than_a_step(cls, value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        if max(value) > info.data.get("max_bs", max(value)):
            raise ValueError(f"a bucket of {max(value)} requests is larger than max_bs = {info.data['max_bs']}")
        return value

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, value: str) -> str:
        try:
            kind = torch.device(value).type
        except RuntimeError:
            kind = ""
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"{value!r} is not a device to run on; give 'cpu', 'cuda' or, to choose one, 'cuda:1'")
        return value


class RunOptions(Options):
    """A run's file. eagle: None if `model` names a target and no draft."""

    backend: PhaseNames
    eagle: EagleOptions | None = None
    model: ModelOptions | None = None
    runtime: RuntimeOptions = RuntimeOptions()

    @field_validator("backend", mode="before")
    @classmethod
    def _one_for_all(cls, value: object) -> object:
        if not isinstance(value, str | dict):
            raise ValueError(f"must be a backend's name, or a table with one for each phase, got {value!r}")
        return dict.fromkeys(PHASES, value) if isinstance(value, str) else value
