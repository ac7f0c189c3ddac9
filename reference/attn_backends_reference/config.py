"""Runs: TOML files, validated, with what `configs/backends` says of their backends.

`reference/configs/eagle/PRESET.toml` of this package, or a file of the same form, describes a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheFormat
from attn_backends.config.backend_files import BackendOptions, Count, backend_options
from attn_backends.config.toml_options import Options, closest_to, read_toml, validated
from attn_backends.contract.capabilities import DTYPES
from attn_backends.errors import ConfigError
from attn_backends.registry import get_backend
from attn_backends.selection.choose import Workload, choose_kernels
from attn_backends_reference.folder_runs import run_of_folders
from attn_backends_reference.run_options import (
    PHASES,
    EagleOptions,
    ModelOptions,
    PhaseNames,
    RunOptions,
    RuntimeOptions,
)
from spec_metadata import Capacity, StepKind

CACHE_DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn}
NOTHING: Mapping[str, object] = MappingProxyType({})
NO_FLAGS: Mapping[str, str] = MappingProxyType({})
PAGE_SIZE = 16  # of a backend without a file in configs/backends, if its kernels take it
MODELS = {CacheFormat.KV: "gqa", CacheFormat.LATENT: "mla"}  # of such a backend, by its cache


class RunConfig(Options):
    """A run, with everything decided: what an engine is built from.

    source: the file. backends: of each phase. kernels: of each backend, by name. page_size: tokens. eagle: None if
    nothing drafts. notes: what was decided that no file says, and why.
    """

    source: str
    backends: PhaseNames
    kernels: Mapping[str, str]
    page_size: Count
    model: ModelOptions
    eagle: EagleOptions | None
    runtime: RuntimeOptions
    notes: tuple[str, ...] = ()

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
        """Device of the run."""
        return torch.device(self.runtime.device)

    @property
    def phases(self) -> dict[str, StepKind]:
        """The phases that the run has, and their kinds of step; MTP and P-EAGLE draft in their draft extend, and a
        block has none.
        """
        if self.eagle is None:
            return {phase: PHASES[phase] for phase in ("prefill", "decode")}
        if self.eagle.worker == "block":
            blocks = PHASES | {"draft": StepKind.DRAFT_BLOCK}
            return {phase: kind for phase, kind in blocks.items() if phase != "draft_extend"}
        return {phase: kind for phase, kind in PHASES.items() if phase != "draft" or self.eagle.worker == "eagle"}

    @property
    def capacity(self) -> Capacity:
        """The largest step of the run."""
        eagle, sizes = self.eagle, (self.runtime.max_bs, self.runtime.max_context, self.page_size)
        if eagle is None:
            return Capacity(*sizes)
        return Capacity(*sizes, eagle.topk, eagle.num_steps, eagle.num_draft_tokens, eagle.num_rerun)


def load_run_config(
    config: str | None,
    *,
    model: ModelOptions | None = None,
    backend: str | None = None,
    runtime: Mapping[str, object] = NOTHING,
    flags: Mapping[str, str] = NO_FLAGS,
) -> RunConfig:
    """A run from a file, or from the name of a preset in `reference/configs/eagle`.

    model: instead of the file's; without its draft a run decodes plainly, and without a file it is
    `folder_runs.run_of_folders`. backend: runs all phases instead of the file's. runtime: replaces keys of the file's
    [runtime]. flags: what errors call those keys, such as "--max-new-tokens".
    """
    path, raw, notes = _tables(config, model)
    if backend is not None:
        raw["backend"] = backend
    if runtime and isinstance(raw.setdefault("runtime", {}), dict):
        raw["runtime"] |= runtime
    given = {f"runtime.{key}": flags.get(key, f"runtime[{key!r}]") for key in runtime}
    run = validated(RunOptions, raw, path, given)
    _check_draft(path, run)
    backends = {name: get_backend(name) for name in run.backend.distinct}
    options = {name: backend_options(name) for name in backends}
    page_size = run.runtime.page_size or _page_size(path, options, run.runtime)
    kernels = {name: run.runtime.kernel or (found.kernel if found else "auto") for name, found in options.items()}
    for name, found in backends.items():
        choose_kernels(name, found.kernels, kernels[name], torch.device(run.runtime.device), Workload(page_size))
    _check_formats(path, run.backend)
    if (chosen := run.model) is None:
        chosen = _model(path, options)
        takes = f"what {' and '.join(options)} {'takes' if len(options) == 1 else 'take'}; set [model] to keep one"
        notes = (*notes, f"model {chosen.target}, draft {chosen.draft} ({takes})")
    return RunConfig(
        source=str(path),
        backends=run.backend,
        kernels=kernels,
        page_size=page_size,
        model=chosen,
        eagle=run.eagle,
        runtime=run.runtime,
        notes=notes,
    )


def preset_folder() -> Path:
    """The shipped presets: inside an installed package, beside it in a checkout."""
    package = Path(str(resources.files("attn_backends_reference")))
    installed = package / "configs" / "eagle"
    return installed if installed.is_dir() else package.parent / "configs" / "eagle"


def preset_names() -> list[str]:
    """The presets of `reference/configs/eagle`."""
    return sorted(path.stem for path in preset_folder().glob("*.toml"))


def _tables(config: str | None, model: ModelOptions | None) -> tuple[Path, dict[str, Any], tuple[str, ...]]:
    """What errors call a run, its tables and its notes."""
    if config is None:
        assert model is not None, "a run without a file is that of a model"
        found = run_of_folders(model.target, model.draft, model.draft_positions)
        return Path(model.target), found.tables, found.notes
    path = _run_file(config)
    raw = read_toml(path)
    if model is not None:
        raw["model"] = model.model_dump(exclude_none=True)
        if model.draft is None:
            raw.pop("eagle", None)
    return path, raw, ()


def _run_file(config: str) -> Path:
    if config in preset_names():
        return preset_folder() / f"{config}.toml"
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


def _page_size(path: Path, options: Mapping[str, BackendOptions | None], runtime: RuntimeOptions) -> int:
    """That of the backends' files; where none has a file, one that their kernels declare."""
    sizes = {name: found.page_size for name, found in options.items() if found is not None}
    sizes = sizes or {name: _declared_page_size(get_backend(name), runtime) for name in options}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(
            f"{path}: backend: the phases share one cache and their page sizes differ: {listed}. Set runtime.page_size "
            f"to one that all of them take"
        )
    return next(iter(sizes.values()))


def _declared_page_size(backend: type[AttentionBackend], runtime: RuntimeOptions) -> int:
    """A page size that all kinds of step take on the kernels that run; if there is none, what runs is refused."""
    running = [each for each in backend.kernels if not each.unavailable_reasons(torch.device(runtime.device))]
    asked = [each for each in running if runtime.kernel in (None, "auto", each.name)]
    limits = [record.page_sizes for each in asked for record in each.capabilities.values()]
    sizes = [frozenset(limit) for limit in limits if limit is not None]
    common = frozenset.intersection(*sizes) if sizes else frozenset()
    multiple = backend.page_multiple()
    usual = -(-PAGE_SIZE // multiple) * multiple
    return usual if usual in common or not common else min(common)


def _model(path: Path, options: Mapping[str, BackendOptions | None]) -> ModelOptions:
    """The embedded model that the backends' files name; where none has a file, one of their cache."""
    names = {name: found.model for name, found in options.items() if found is not None}
    names = names or {name: _model_of(path, get_backend(name)) for name in options}
    if len(set(names.values())) != 1:
        listed = ", ".join(f"{name} {model}" for name, model in names.items())
        raise ConfigError(f"{path}: model is missing, and backends don't agree on one ({listed}). Add [model]")
    model = next(iter(names.values()))
    return ModelOptions(target=model, draft=model)


def _model_of(path: Path, backend: type[AttentionBackend]) -> str:
    for form, model in MODELS.items():
        if form in backend.formats:
            return model
    raise ConfigError(
        f"{path}: model is missing, and for backend {backend.name!r}, whose cache is "
        f"{' or '.join(sorted(backend.formats))}, there is none; there are models for {' and '.join(MODELS)}. "
        f"Add [model]"
    )
