"""Runs: TOML files, validated, with what `configs/backends` says of their backends.

`reference/configs/eagle/PRESET.toml` of this package, or a file of the same form, describes a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator

from attn_backends.config.backend_files import BackendOptions, Count, backend_options
from attn_backends.config.toml_options import Options, closest_to, read_toml, validated
from attn_backends.contract.capabilities import DTYPES
from attn_backends.errors import ConfigError
from attn_backends.registry import get_backend
from attn_backends.selection.choose import Workload, choose_kernels
from spec_metadata import Capacity, StepKind

PHASES = {
    "prefill": StepKind.PREFILL,
    "decode": StepKind.DECODE,
    "draft": StepKind.DRAFT_DECODE,
    "verify": StepKind.TARGET_VERIFY,
    "draft_extend": StepKind.DRAFT_EXTEND,
}
CACHE_DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn}


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


class EagleOptions(Options):
    """How tokens are drafted. num_draft_tokens counts the root, which is the last sampled token.

    worker: "eagle", one draft for all steps, or "mtp", a module for each. draft_graphs: of "mtp", "one" graph for all
    modules (the default) or one "per_module".
    """

    worker: Literal["eagle", "mtp"] = "eagle"
    topk: Count
    num_steps: Count
    num_draft_tokens: Count
    draft_graphs: Literal["one", "per_module"] | None = None

    @field_validator("num_draft_tokens")
    @classmethod
    def _fits_the_tree(cls, value: int, info: ValidationInfo) -> int:
        if {"topk", "num_steps"} <= info.data.keys():
            topk, num_steps = info.data["topk"], info.data["num_steps"]
            Capacity(1, 1, 1, topk, num_steps, value)
            if info.data.get("worker") == "mtp" and (topk, value) != (1, num_steps + 1):
                raise ValueError(
                    f"worker = 'mtp' drafts one token a module, so num_steps = {num_steps} needs topk = 1 and "
                    f"num_draft_tokens = {num_steps + 1}; got {topk} and {value}"
                )
        return value

    @field_validator("draft_graphs")
    @classmethod
    def _is_of_mtp(cls, value: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("worker") == "eagle":
            raise ValueError("worker = 'eagle' has one draft and one graph of it; worker = 'mtp' has modules")
        return value

    @property
    def num_rerun(self) -> int:
        """Committed positions that a draft extend runs again."""
        return self.num_steps - 1 if self.worker == "mtp" else 0


class ModelOptions(Options):
    """Names of embedded models, or folders. placeholder_token: what stands in prompts for embeddings that come with
    them, None if prompts are text.
    """

    target: str
    draft: str
    placeholder_token: Annotated[int, Field(ge=0)] | None = None


class RuntimeOptions(Options):
    """How a run is carried out.

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
    """A run's file."""

    backend: PhaseNames
    eagle: EagleOptions
    model: ModelOptions | None = None
    runtime: RuntimeOptions = RuntimeOptions()

    @field_validator("backend", mode="before")
    @classmethod
    def _one_for_all(cls, value: object) -> object:
        return dict.fromkeys(PHASES, value) if isinstance(value, str) else value


class RunConfig(Options):
    """A run, with everything decided: what an engine is built from.

    source: the file. backends: of each phase. kernels: of each backend, by name. page_size: tokens.
    """

    source: str
    backends: PhaseNames
    kernels: Mapping[str, str]
    page_size: Count
    model: ModelOptions
    eagle: EagleOptions
    runtime: RuntimeOptions

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights, and of the cache unless it has its own."""
        return DTYPES[self.runtime.dtype]

    @property
    def cache_dtype(self) -> torch.dtype:
        """Type of the cache's entries."""
        return CACHE_DTYPES[self.runtime.cache_dtype] if self.runtime.cache_dtype else self.dtype

    @property
    def device(self) -> torch.device:
        """Where the run is."""
        return torch.device(self.runtime.device)

    @property
    def phases(self) -> dict[str, StepKind]:
        """The phases that the run has, and their kinds of step; MTP drafts in its draft extend."""
        return {phase: kind for phase, kind in PHASES.items() if phase != "draft" or self.eagle.worker == "eagle"}

    @property
    def capacity(self) -> Capacity:
        """The largest step of the run."""
        runtime, eagle = self.runtime, self.eagle
        shape = (eagle.topk, eagle.num_steps, eagle.num_draft_tokens, eagle.num_rerun)
        return Capacity(runtime.max_bs, runtime.max_context, self.page_size, *shape)


def load_run_config(
    config: str, *, backend: str | None = None, runtime: Mapping[str, object] | None = None
) -> RunConfig:
    """A run from a file, or from the name of a preset in `reference/configs/eagle`.

    backend: runs all phases instead of the file's. runtime: replaces keys of the file's [runtime].
    """
    path = _run_file(config)
    raw = read_toml(path)
    if backend is not None:
        raw["backend"] = backend
    if runtime and isinstance(raw.setdefault("runtime", {}), dict):
        raw["runtime"] |= runtime
    run = validated(RunOptions, raw, path)
    backends = {name: get_backend(name) for name in run.backend.distinct}
    options = {name: backend_options(name) for name in backends}
    page_size = run.runtime.page_size or _page_size(path, options)
    kernels = {name: run.runtime.kernel or (found.kernel if found else "auto") for name, found in options.items()}
    for name, found in backends.items():
        choose_kernels(name, found.kernels, kernels[name], torch.device(run.runtime.device), Workload(page_size))
    _check_formats(path, run.backend)
    return RunConfig(
        source=str(path),
        backends=run.backend,
        kernels=kernels,
        page_size=page_size,
        model=run.model or _model(path, options),
        eagle=run.eagle,
        runtime=run.runtime,
    )


def preset_folder() -> Path:
    """The shipped presets: inside an installed package, beside it in a checkout."""
    package = Path(str(resources.files("attn_backends_reference")))
    installed = package / "configs" / "eagle"
    return installed if installed.is_dir() else package.parent / "configs" / "eagle"


def preset_names() -> list[str]:
    """The presets of `reference/configs/eagle`."""
    return sorted(path.stem for path in preset_folder().glob("*.toml"))


def _run_file(config: str) -> Path:
    if config in preset_names():
        return preset_folder() / f"{config}.toml"
    path = Path(config)
    if not path.is_file():
        closest = closest_to(config, preset_names())
        raise ConfigError(f"{config!r} is neither a file nor a preset ({', '.join(preset_names())}){closest}")
    return path


def _check_formats(path: Path, backends: PhaseNames) -> None:
    """Phases share the cache, so some format must suit all of their backends."""
    formats = {phase: get_backend(backends.of(phase)).formats for phase in PHASES}
    if not frozenset.intersection(*formats.values()):
        taken = [f"{phase} ({backends.of(phase)}) takes {' or '.join(sorted(formats[phase]))}" for phase in PHASES]
        raise ConfigError(f"{path}: backend: the phases share one cache and agree on no format: {', '.join(taken)}")


def _page_size(path: Path, options: Mapping[str, BackendOptions | None]) -> int:
    sizes = {name: found.page_size for name, found in options.items() if found is not None}
    if not sizes:
        raise ConfigError(f"{path}: runtime.page_size is missing; {', '.join(options)} has no file that gives one")
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(
            f"{path}: backend: the phases share one cache and their page sizes differ: {listed}. Set runtime.page_size "
            f"to one that all of them take"
        )
    return next(iter(sizes.values()))


def _model(path: Path, options: Mapping[str, BackendOptions | None]) -> ModelOptions:
    names = {name: found.model for name, found in options.items() if found is not None}
    if len(set(names.values())) != 1:
        listed = ", ".join(f"{name} {model}" for name, model in names.items()) or "no file of a backend gives one"
        raise ConfigError(f"{path}: model is missing, and backends don't agree on one ({listed}). Add [model]")
    model = next(iter(names.values()))
    return ModelOptions(target=model, draft=model)
