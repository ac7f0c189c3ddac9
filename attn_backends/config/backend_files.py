"""What `configs/backends/NAME.toml` says of a backend: how it runs by default, and what it is known to fail."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

from pydantic import Field

from attn_backends.config.toml_options import Options, read_toml, validated

Count = Annotated[int, Field(ge=1)]


class ExpectedFailureOptions(Options):
    """What a backend is known to fail in the conformance suite: a check's id, a case's name or pattern, why, and a
    link.
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


def backend_options(name: str) -> BackendOptions | None:
    """What `configs/backends` says of a backend; None of one that has no file there."""
    path = _config_folder() / "backends" / f"{name}.toml"
    return validated(BackendOptions, read_toml(path), path) if path.is_file() else None


def _config_folder() -> Path:
    """The shipped files: inside an installed package, at the top of a checkout."""
    package = Path(str(resources.files("attn_backends")))
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"
