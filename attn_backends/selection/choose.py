"""Choice of a backend's kernel for a step kind: the best that runs on the device and suits the `Workload`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from attn_backends.contract.capabilities import Capabilities
from attn_backends.contract.kernel import Kernel
from attn_backends.errors import BackendUnavailableError
from attn_backends.layer import AttentionLayer
from spec_metadata import Capacity, StepKind


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """The steps and layers that kernels are chosen for, as far as they are known.

    page_size: tokens. layers, dtype, cache_dtype: of the models, none if unknown. capacity: of the steps, which a
    backend fills in.
    """

    page_size: int
    layers: Sequence[AttentionLayer] = ()
    dtype: torch.dtype | None = None
    cache_dtype: torch.dtype | None = None
    capacity: Capacity | None = None

    def reasons_against(self, capabilities: Capabilities, kind: StepKind) -> list[str]:
        """Reasons why a kernel can't serve its steps of a kind; empty if it can."""
        reasons, is_tree = capabilities.kind_reasons(kind) + capabilities.page_reasons(self.page_size), False
        if self.capacity is not None and kind is not StepKind.PREFILL:
            bucket = self.capacity.bucket(kind, 1)
            is_tree = bucket.tree
            reasons += capabilities.width_reasons(bucket.width, is_tree)
        if self.dtype is not None:
            for layer in self.layers:
                reasons += capabilities.layer_reasons(layer, self.dtype, self.cache_dtype or self.dtype)
                reasons += capabilities.tree_reasons(layer) if is_tree else []
        return list(dict.fromkeys(reasons))


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel of a step kind. passed_over: the reason why each better one was rejected. layers: of the workload."""

    kernel: Kernel
    passed_over: tuple[str, ...] = ()
    layers: Sequence[AttentionLayer] = ()

    def slower_mixed(self, num_running: int, num_prompt_rows: int) -> str:
        """The reason why so many running requests and rows of prompts are faster as two steps than as one
        (`spec_metadata.mixed_step`), of the kernel of prefills; empty if one is as fast. That depends on the layers,
        which the workload names.
        """
        reasons = [self.kernel.slower_mixed(layer, num_running, num_prompt_rows) for layer in self.layers]
        return next(filter(None, reasons), "" if reasons else "the workload names no layers")


def choose_kernels(
    owner: str,
    kernels: Sequence[Kernel],
    asked: str | Mapping[StepKind, str],
    device: torch.device,
    workload: Workload,
) -> dict[StepKind, Choice]:
    """The kernel of each step kind.

    owner: the backend's name. kernels: its own, best first. asked: "auto"; a name, which runs every kind that it has,
    the others being chosen as "auto"; or a name for each kind, and then there are no others. Raises with everyone's
    reasons if a kernel that was asked for, or for some kind none, runs on the device.
    """
    known = {kernel.name: kernel for kernel in kernels}
    names = {asked} if isinstance(asked, str) else set(asked.values())
    for name in sorted(names - {"auto", *known}):
        raise BackendUnavailableError(f"{owner} kernel {name!r}", ["unknown name"], f"It has {', '.join(known)}.")
    choices = {}
    for kind in dict.fromkeys(kind for kernel in kernels for kind in kernel.capabilities):
        if isinstance(asked, str):
            name = asked if asked in known and kind in known[asked].capabilities else "auto"
        elif kind in asked:
            name = asked[kind]
        else:
            continue
        able = [kernel for kernel in kernels if kind in kernel.capabilities]
        if name != "auto":
            able = [kernel.by_name() for kernel in able if kernel.name == name]
        choices[kind] = _choose(f"{owner} on {device}, {kind}", able, kind, device, workload)
    return choices


def missing_reason(kind: StepKind, kernels: Sequence[Kernel]) -> str:
    """The reason why a backend of these kernels has none for a step kind: it was not requested, or there is none, and
    then what works instead of a draft block.
    """
    able = [kernel.name for kernel in kernels if kind in kernel.capabilities]
    if able or kind is not StepKind.DRAFT_BLOCK:
        return f"no kernel for {kind} was asked for ({', '.join(able) or 'none'} has it)"
    return (
        f"no kernel of it takes a {kind} step, whose rows see those after them (it needs a non-causal kernel: draft "
        "token by token, in draft_decode steps, or take a backend that has one)"
    )


def _choose(what: str, able: Sequence[Kernel], kind: StepKind, device: torch.device, workload: Workload) -> Choice:
    """The first that runs and suits the workload, or else the first that runs, which refuses with its reasons."""
    passed_over: list[str] = []
    running: list[Kernel] = []
    for kernel in able:
        reasons = kernel.unavailable_reasons(device)
        if not reasons:
            running.append(kernel)
            reasons = workload.reasons_against(kernel.capabilities[kind], kind)
            if kernel.needs_layers and (not workload.layers or workload.dtype is None):
                reasons.append("takes some of the backend's layers and caches alone, and no layers of a type are named")
        if not reasons:
            return Choice(kernel, tuple(passed_over), workload.layers)
        passed_over += [f"{kernel.name}: {reason}" for reason in reasons]
    if not running:
        raise BackendUnavailableError(what, passed_over or ["no kernel of that name has this kind of step"])
    return Choice(running[0], tuple(passed_over), workload.layers)
