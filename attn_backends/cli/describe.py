"""`list` and `info`: what backends there are, what of them runs on this machine, and why not where it doesn't."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from attn_backends.base import AttentionBackend
from attn_backends.capabilities import Capabilities
from attn_backends.errors import BackendUnavailableError
from attn_backends.providers import NOT_CONNECTED, VENDOR_KERNELS_OF, device_reasons, installation
from attn_backends.registry import get_backend, list_backends

DEVICES = ("cpu", "cuda")


def show_list(*, as_json: bool) -> int:
    """Print every known backend; one that can't be imported is shown with the reason."""
    backends = [_listed(name, target) for name, target in list_backends().items()]
    console = Console(highlight=False)
    if as_json:
        console.print_json(json.dumps({"backends": backends}))
        return 0
    table = Table("backend", "cache", "runs here", "does not (reasons: attn-backends info NAME)")
    for backend in backends:
        if "reason" in backend:
            table.add_row(backend["name"], "", "", backend["reason"])
            continue
        here = [f"{kernel['name']} ({', '.join(kernel['runs_on'])})" for kernel in backend["kernels"] if kernel["runs_on"]]
        not_here = [kernel["name"] for kernel in backend["kernels"] if not kernel["runs_on"]]
        table.add_row(backend["name"], ", ".join(backend["formats"]), ", ".join(here), ", ".join(not_here))
    console.print(table)
    return 0


def show_info(name: str, *, as_json: bool) -> int:
    """Print all that one backend declares."""
    described = describe(name)
    console = Console(highlight=False)
    if as_json:
        console.print_json(json.dumps(described))
        return 0
    console.print(f"[bold]{described['name']}[/]  {described['class']}\n{described['summary']}\n")
    console.print(f"cache: {', '.join(described['formats'])}\n")
    console.print(_kernel_table(described["kernels"]))
    for kernel, kinds in described["capabilities"].items():
        console.print(_capability_table(kernel, kinds))
    for kind, buffers in described["buffers"].items():
        console.print(f"\n[bold]buffers of {kind}[/]")
        for buffer in buffers:
            console.print(f"  {buffer}", markup=False)
    return 0


def describe(name: str) -> dict[str, Any]:
    """All that a backend declares, as JSON values."""
    backend = get_backend(name)
    return {
        **summarize(backend),
        "summary": (backend.__doc__ or "").strip().splitlines()[0] if backend.__doc__ else "",
        "capabilities": {
            kernel.name: {str(kind): _values(capabilities) for kind, capabilities in kernel.capabilities.items()}
            for kernel in backend.kernels
        },
        "buffers": {str(kind): list(map(str, backend.buffers(kind))) for kind in backend.kernels[0].capabilities},
    }


def summarize(backend: type[AttentionBackend]) -> dict[str, Any]:
    """A backend's name, class, cache formats and kernels, as JSON values."""
    return {
        "name": backend.name,
        "class": f"{backend.__module__}:{backend.__qualname__}",
        "formats": sorted(backend.formats),
        "kernels": [*_connected(backend), *_not_connected(backend)],
    }
