"""Versions and sizes in which another project's backends are driven, on a CPU and on a GPU."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from attn_backends.contract.capabilities import Capabilities
from spec_metadata import StepKind

Where = tuple[tuple[int, int], int, torch.dtype]
"""Head sizes, query heads and type that a place is driven with."""

LATENTS_ON_CPU: Where = ((80, 64), 4, torch.float32)
LATENTS_ON_GPU: Where = ((576, 512), 16, torch.bfloat16)
DECODES = (StepKind.DECODE, StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY)


def missing_reasons(package: str, known: tuple[str, ...]) -> list[str]:
    """Reasons why a package can't be driven here; empty if it can. known: versions that the driver knows."""
    told = f"the driver knows {', '.join(known)}"
    try:
        found = version(package)
    except PackageNotFoundError:
        return [f"{package} is not installed ({told})"]
    return [] if found in known else [f"{package} {found} is installed ({told})"]


def can(where: Where, pages: set[int], **others: Any) -> Capabilities:
    """Capabilities that all backends of a project share in a step kind."""
    sizes, heads, dtype = where
    given = {"head_sizes": frozenset({sizes}), "query_heads": frozenset({heads}), "needs_host_lens": True, **others}
    return Capabilities(frozenset(pages), frozenset({dtype}), **given)


class OnCpu(TorchFunctionMode):
    """A mode in which calls for a CUDA device get the CPU, and page-locked memory is ordinary."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and torch.device(kwargs["device"] or "cpu").type == "cuda":
            kwargs["device"] = "cpu"
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)
