"""The version of SGLang that the plug-in is for, checked without importing it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from attn_backends.errors import BackendUnavailableError

SUPPORTED = "0.5.23"
"""The version whose interfaces it was written against and is tested with."""


def installed() -> str:
    """The version of SGLang here, "none" if there is none."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "none"


def check_version() -> None:
    """Refuse any other version, with both numbers."""
    if (found := installed()) != SUPPORTED:
        raise BackendUnavailableError(
            "attn_backends inside SGLang",
            [f"SGLang {found} is installed, and its plug-in is for {SUPPORTED}"],
            f"Install sglang=={SUPPORTED}, or name one of SGLang's own backends.",
        )
