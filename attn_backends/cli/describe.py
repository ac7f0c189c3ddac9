"""`list` and `info`: the backends, which of their kernels run on this machine, and why others do not."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from rich.markup import escape
from rich.table import Table

from attn_backends.backend import AttentionBackend
from attn_backends.cli import Command
from attn_backends.cli.consoles import output_console
from attn_backends.contract.capabilities import Capabilities, listed
from attn_backends.errors import BackendUnavailableError
from attn_backends.planning.planners import Planner, choose_planner
from attn_backends.registry import get_backend, list_backends

DEVICES = ("cpu", "cuda")

T = TypeVar("T")


def _show_list(*, as_json: bool) -> int:
    """Print every known backend; one that can't be imported is shown with the reason."""
    backends = [_listed(name, target) for name, target in list_backends().items()]
    console = output_console()
    if as_json:
        console.print_json(json.dumps({"backends": backends}))
        return 0
    table = Table("backend", "cache", "runs here", "does not (reasons: attn-backends info NAME)")
    for backend in backends:
        if "reason" in backend:
            table.add_row(backend["name"], "", "", escape(backend["reason"]))
            continue
        here = [
            f"{kernel['name']} ({', '.join(kernel['runs_on'])})" for kernel in backend["kernels"] if kernel["runs_on"]
        ]
        not_here = [kernel["name"] for kernel in backend["kernels"] if not kernel["runs_on"]]
        table.add_row(backend["name"], ", ".join(backend["formats"]), ", ".join(here), ", ".join(not_here))
    console.print(table)
    return 0


def _show_info(name: str, *, as_json: bool) -> int:
    """Print all that one backend declares."""
    described = describe(name)
    console = output_console()
    if as_json:
        console.print_json(json.dumps(described))
        return 0
    console.print(f"[bold]{escape(described['name'])}[/]  {described['class']}")
    console.print(described["summary"] + "\n", markup=False)
    multiple = described["page_multiple"]
    pages = f", page sizes: multiples of {multiple}" if multiple > 1 else ""
    console.print(f"cache: {', '.join(described['formats'])}{pages}\n")
    for device, planner in described["planners"].items():
        console.print(f"planner on {device}: {planner['name']} ({planner['reason']})", markup=False, soft_wrap=True)
    console.print()
    console.print(_kernel_table(described["kernels"]))
    for kernel, kinds in described["capabilities"].items():
        console.print(_capability_table(kernel, kinds))
        for buffer in described["workspaces"][kernel]:
            console.print(f"  {buffer}", markup=False, soft_wrap=True)
    console.print("\nWhat each capability means: python -m pydoc attn_backends.Capabilities")
    for kinds, buffers in _grouped(described["buffers"]):
        console.print(f"\n[bold]buffers of {kinds}[/]")
        for buffer in buffers:
            console.print(f"  {buffer}", markup=False, soft_wrap=True)
    return 0


def describe(name: str) -> dict[str, Any]:
    """All that a backend declares, as JSON values."""
    backend = get_backend(name)
    kinds = dict.fromkeys(kind for kernel in backend.kernels for kind in kernel.capabilities)
    return {
        **_summarize(backend),
        "summary": "\n\n".join(" ".join(part.split()) for part in (backend.__doc__ or "").split("\n\n")),
        "page_multiple": backend.page_multiple(),
        "planners": {device: asdict(_planner(backend, device)) for device in DEVICES},
        "capabilities": {
            kernel.name: {str(kind): _values(capabilities) for kind, capabilities in kernel.capabilities.items()}
            for kernel in backend.kernels
        },
        "workspaces": {
            kernel.name: list(map(str, (*kernel.workspaces, *kernel.scratch))) for kernel in backend.kernels
        },
        "buffers": {str(kind): list(map(str, backend.buffers(kind))) for kind in kinds},
    }


def _summarize(backend: type[AttentionBackend]) -> dict[str, Any]:
    """A backend's name, class, cache formats and kernels, as JSON values."""
    return {
        "name": backend.name,
        "class": f"{backend.__module__}:{backend.__qualname__}",
        "formats": sorted(backend.formats),
        "kernels": _kernels(backend),
    }


def _listed(name: str, target: str) -> dict[str, Any]:
    try:
        return _summarize(get_backend(name)) | {"name": name}
    except BackendUnavailableError as error:
        return {"name": name, "class": target, "reason": str(error)}


def _kernels(backend: type[AttentionBackend]) -> list[dict[str, Any]]:
    rows = []
    for kernel in backend.kernels:
        reasons = {device: kernel.unavailable_reasons(torch.device(device)) for device in DEVICES}
        rows.append(
            {
                "name": kernel.name,
                "runs_on": [device for device in DEVICES if not reasons[device]],
                "reasons": [f"{device}: {reason}" for device in DEVICES for reason in reasons[device]],
            }
        )
    return rows


def _planner(backend: type[AttentionBackend], device: str) -> Planner:
    return choose_planner(backend.name, "auto", torch.device(device), has_fused=backend.has_fused())


def _values(capabilities: Capabilities) -> dict[str, Any]:
    """The fields of a record, and whether it can do trees, as JSON values; None means no limit."""
    values = {key: _value(value) for key, value in asdict(capabilities).items()}
    return values | {"tree": capabilities.tree}


def _value(value: object) -> object:
    if isinstance(value, frozenset):
        return sorted(entry if isinstance(entry, int | tuple) else str(entry).removeprefix("torch.") for entry in value)
    return value if value is None or isinstance(value, bool | int) else str(value)


def _grouped(by_kind: Mapping[str, T]) -> list[tuple[str, T]]:
    """Step kinds that share a value, as one entry."""
    groups: list[tuple[list[str], T]] = []
    for kind, value in by_kind.items():
        same = next((kinds for kinds, shared in groups if shared == value), None)
        if same is None:
            groups.append(([kind], value))
        else:
            same.append(kind)
    return [(", ".join(kinds), value) for kinds, value in groups]


def _kernel_table(kernels: list[dict[str, Any]]) -> Table:
    table = Table("kernel", "runs on", "why not elsewhere", title="kernels, best first", title_justify="left")
    for kernel in kernels:
        table.add_row(kernel["name"], ", ".join(kernel["runs_on"]) or "-", escape("; ".join(kernel["reasons"])))
    return table


def _capability_table(kernel: str, kinds: Mapping[str, Mapping[str, Any]]) -> Table:
    groups = _grouped(kinds)
    table = Table("", *(kinds for kinds, _ in groups), title=f"kernel {kernel}", title_justify="left")
    for field in groups[0][1]:
        table.add_row(field, *(_shown(field, values[field]) for _, values in groups))
    return table


def _shown(field: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return listed(value) or "none"
    if value is None:
        return "none" if field == "lse" else "any"
    return str(value)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="a backend's name, or module:Class")
    _add_json(parser)


LIST = Command("Known backends.", _add_json, lambda args: _show_list(as_json=args.json), "attn-backends list --json")
INFO = Command(
    "All that one backend declares.",
    _add_name,
    lambda args: _show_info(args.name, as_json=args.json),
    "attn-backends info trtllm_mla",
)
