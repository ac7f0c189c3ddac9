"""Configurations: TOML files of `configs/`, validated, and what a run makes of them.

`configs/backends/NAME.toml` says how a backend runs by default; `configs/eagle/PRESET.toml`, or a file of the same
form, describes a run. Both ship with the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import torch
from pydantic import Field

from attn_backends.errors import ConfigError
from attn_backends.forms import Options, closest_to, read_toml, validated
from attn_backends.registry import get_backend
from attn_backends.run_options import PHASES, Count, EagleOptions, ModelOptions, PhaseNames, RunOptions, RuntimeOptions
from attn_backends.selection import Workload, choose_kernels
from spec_metadata import Capacity, StepKind

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
CACHE_DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn}
NOTHING: Mapping[str, object] = MappingProxyType({})
NO_FLAGS: Mapping[str, str] = MappingProxyType({})


class ExpectedFailureOptions(Options):
    """What a backend is known to fail in the conformance suite: a check's id, a case's name or pattern, why, and where
    that is told.
    """

    check: str
    case: str
    reason: str
    link: str


class BackendOptions(Options):
    """How a backend runs by default. model: the embedded model that it is shown on. expected_failures: of the
    conformance suite.
    """

    name: str
    page_size: Count
    model: str
    kernel: str = "auto"
    expected_failures: Annotated[tuple[ExpectedFailureOptions, ...], Field(strict=False)] = ()


class ConformanceOptions(Options):
    """The file that a conformance run of another package's backend is given."""

    expected_failures: Annotated[tuple[ExpectedFailureOptions, ...], Field(strict=False)] = ()


class RunConfig(Options):
    """A run, with everything decided: what an engine is built from.

    source: the file. backends: of each phase. kernels: of each backend, by name. page_size: tokens. eagle: None if
    nothing drafts.
    """

    source: str
    backends: PhaseNames
    kernels: Mapping[str, str]
    page_size: Count
    model: ModelOptions
    eagle: EagleOptions | None
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
        if self.eagle is None:
            return {phase: PHASES[phase] for phase in ("prefill", "decode")}
        return {phase: kind for phase, kind in PHASES.items() if phase != "draft" or self.eagle.worker == "eagle"}

    @property
    def capacity(self) -> Capacity:
        """The largest step of the run."""
        eagle, sizes = self.eagle, (self.runtime.max_bs, self.runtime.max_context, self.page_size)
        if eagle is None:
            return Capacity(*sizes)
        return Capacity(*sizes, eagle.topk, eagle.num_steps, eagle.num_draft_tokens, eagle.num_rerun)


def load_run_config(
    config: str,
    *,
    backend: str | None = None,
    runtime: Mapping[str, object] = NOTHING,
    flags: Mapping[str, str] = NO_FLAGS,
) -> RunConfig:
    """A run from a file, or from the name of a preset in `configs/eagle`.

    backend: runs all phases instead of the file's. runtime: replaces keys of the file's [runtime]. flags: what errors
    call those keys, such as "--max-new-tokens".
    """
    path = _run_file(config)
    raw = read_toml(path)
    if backend is not None:
        raw["backend"] = backend
    if runtime and isinstance(raw.setdefault("runtime", {}), dict):
        raw["runtime"] |= runtime
    given = {f"runtime.{key}": flags.get(key, f"runtime[{key!r}]") for key in runtime}
    run = validated(RunOptions, raw, path, given)
    _check_draft(path, run)
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


def backend_options(name: str) -> BackendOptions | None:
    """What `configs/backends` says of a backend; None of one that has no file there."""
    path = config_folder() / "backends" / f"{name}.toml"
    return validated(BackendOptions, read_toml(path), path) if path.is_file() else None


def conformance_options(path: Path) -> ConformanceOptions:
    """What a file says of a backend that has none in `configs/backends`."""
    if not path.is_file():
        raise ConfigError(f"{path} is no file")
    return validated(ConformanceOptions, read_toml(path), path)


def config_folder() -> Path:
    """The shipped configurations: inside an installed package, at the top of a checkout."""
    package = Path(str(resources.files("attn_backends")))
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def preset_names() -> list[str]:
    """The presets of `configs/eagle`."""
    return sorted(path.stem for path in (config_folder() / "eagle").glob("*.toml"))


def _run_file(config: str) -> Path:
    if config in preset_names():
        return config_folder() / "eagle" / f"{config}.toml"
    path = Path(config)
    if not path.is_file():
        closest = closest_to(config, preset_names())
        raise ConfigError(f"{config!r} is neither a file nor a preset ({', '.join(preset_names())}){closest}")
    return path


def _check_draft(path: Path, run: RunOptions) -> None:
    """[eagle] and the draft come together; without both, a run decodes plainly."""
    if run.eagle is None and (run.model is None or run.model.draft is not None):
        raise ConfigError(
            f"{path}: eagle is missing, which says how tokens are drafted. To decode plainly, write a [model] with a "
            f"target and no draft"
        )
    if run.eagle is not None and run.model is not None and run.model.draft is None:
        raise ConfigError(
            f"{path}: model.draft is missing, and [eagle] says how it drafts. Name a draft, or leave [eagle] out to "
            f"decode plainly"
        )


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
