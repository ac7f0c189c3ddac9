"""Choice of the planner of a backend's metadata: its definition in torch, or one fused launch per phase."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attn_backends.errors import BackendUnavailableError
from attn_backends.planning.captured import CopyInputs
from attn_backends.planning.metadata import WRITE_SLOTS
from attn_backends.selection import providers
from spec_metadata import BoundStep, Buffers, CommittedState, Step, copy_step, write_slots
from spec_metadata.state import LOADS, Load, copy_requests

PLANNERS = ("auto", "torch", "fused")


@dataclass(frozen=True, slots=True)
class Planner:
    """A planner, "torch" or "fused", and why it was taken."""

    name: str
    reason: str

    @property
    def is_fused(self) -> bool:
        """Whether it plans a phase in one launch."""
        return self.name == "fused"


@dataclass(slots=True, eq=False)
class Alike:
    """Eager steps that differ in values, addresses and the host's bound alone. most: committed tokens up to which they
    were found to fit.
    """

    most: int = -1


def choose_planner(owner: str, asked: str, device: torch.device, *, has_fused: bool) -> Planner:
    """The planner of a backend on a device. owner: the backend's name. has_fused: whether it declares a fused one."""
    if asked not in PLANNERS:
        raise BackendUnavailableError(f"planner {asked!r} of {owner}", [f"there are {', '.join(PLANNERS)}"])
    if asked == "torch":
        return Planner("torch", "asked for")
    reasons = providers.runs_on_triton(device) if has_fused else [f"{owner} declares none"]
    if not reasons:
        return Planner("fused", "asked for" if asked == "fused" else "one launch a phase")
    if asked == "fused":
        raise BackendUnavailableError(f"the fused planner of {owner}", reasons, "Take planner='torch' or 'auto'.")
    return Planner("torch", f"no fused planner: {'; '.join(reasons)}")


def bind_inputs(planner: Planner, static: Step) -> Callable[[Step], CopyInputs]:
    """Returns a function of a step. It gives the function that copies the inputs of steps of that layout, padded, into
    the static step; by a fused planner on a GPU in one launch.
    """
    if planner.is_fused and static.device.type == "cuda":
        from attn_backends.kernels import triton_inputs  # Triton is imported by those that run it

        return triton_inputs.bind_inputs(static)
    return lambda like: lambda step: copy_step(static, step)


def bind_load(state: CommittedState) -> Load:
    """The function that loads a committed state: one launch where Triton runs, else its definition in torch."""
    if providers.runs_on_triton(state.seq_lens.device):
        return copy_requests
    from attn_backends.kernels import triton_state  # Triton is imported by those that run it

    return triton_state.bind_load(state)


LOADS["cuda"] = bind_load


def bind_torch(
    write: Callable[[Step, Buffers], None], step: Step, buffers: Buffers, bound: BoundStep | None
) -> Callable[[], None]:
    """A planner in torch, of the write slots and a backend's plan. bound: read into the step first, if any."""

    def plan() -> None:
        if bound is not None:
            bound.read()
        for forward in range(step.num_forwards):
            buffers[WRITE_SLOTS.name][forward].copy_(write_slots(step, forward))
        write(step, buffers)

    return plan
