"""Options of a backend in `configs/backends/NAME.toml`: its defaults, and its expected failures."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

from pydantic import Field

from attn_backends.config.toml_options import Options, read_toml, validated

Count = Annotated[int, Field(ge=1)]


class ExpectedFailureOptions(Options):
    """An expected failure in the conformance suite: a check's id, a case's name or pattern, the reason, and a link."""

    check: str
    case: str
    reason: str
    link: str


class BackendOptions(Options):
    """Defaults of a backend. model: the embedded model that it is shown on. expected_failures: of the
    conformance suite.
    """

    name: str
    page_size: Count
    model: str
    kernel: str = "auto"
    expected_failures: Annotated[tuple[ExpectedFailureOptions, ...], Field(strict=False)] = ()


def backend_options(name: str) -> BackendOptions | None:
    """Options of a backend in `configs/backends`; None if it has no file there."""
    path = _config_folder() / "backends" / f"{name}.toml"
    return validated(BackendOptions, read_toml(path), path) if path.is_file() else None


def _config_folder() -> Path:
    """The shipped files: inside an installed package, at the top of a checkout."""
    package = Path(str(resources.files("attn_backends")))
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"
