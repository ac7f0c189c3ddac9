"""As of `sgl_kernel`: no name of this module has a stand-in."""

from __future__ import annotations

from sgl_missing import Missing


def __getattr__(name: str) -> Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"kvcacheio.{name}")
