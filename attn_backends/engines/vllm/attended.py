"""Counts of the backend and kernel that attended in each layer, taken where they run: in a graph, by the device.

Off unless ATTN_BACKENDS_COUNT=1 is set before the engine is built: each layer then adds to a counter in a launch of its
own, which graphs record and repeat.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attn_backends.errors import ConfigError
from attn_backends.planning.metadata import ForwardMetadata
from spec_metadata import StepKind

SWITCH = "ATTN_BACKENDS_COUNT"
_KINDS = list(StepKind)
_layers: WeakValueDictionary[str, Attended] = WeakValueDictionary()  # held by the layers of a living engine


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Attended:
    """One layer's counts of attention. backend: its name. counts: [kinds of step] int64, on the layer's device.
    kernels: of the kinds that were seen.
    """

    backend: str
    counts: Tensor
    kernels: dict[StepKind, str] = field(default_factory=dict)

    def add(self, parts: Sequence[ForwardMetadata]) -> None:
        """Count one forward, of the kind of its last part; recordable."""
        self.kernels.update({meta.kind: meta.schedules.kernel.name for meta in parts})
        self.counts[_KINDS.index(parts[-1].kind)].add_(1)


def counter(layer: str, backend: str, device: torch.device) -> Attended | None:
    """A new counter of a layer, in place of the one of an engine before; None if nothing is counted."""
    if os.environ.get(SWITCH) != "1":
        return None
    with torch.inference_mode(False):  # so that it can be set to zero outside of an engine's
        made = Attended(backend, torch.zeros(len(_KINDS), dtype=torch.int64, device=device))
    _layers[layer] = made
    return made


def attended(worker: object = None) -> dict[str, dict[str, dict[str, object]]]:
    """Layer -> kind of step -> {"backend", "kernel", "forwards"}, of this process; waits for the device.
    Raises `ConfigError` where nothing is counted.

    worker: not used; it lets `LLM.collective_rpc(attended)` call this in the engine's workers.
    """
    if os.environ.get(SWITCH) != "1":
        raise ConfigError(f"{SWITCH} is {os.environ.get(SWITCH, 'not set')}: set it to 1 before the engine is built")
    return {
        name: {
            str(kind): {"backend": layer.backend, "kernel": layer.kernels.get(kind, ""), "forwards": count}
            for kind, count in zip(_KINDS, layer.counts.tolist(), strict=True)
            if count
        }
        for name, layer in _layers.items()
    }


def forget_attended(worker: object = None) -> None:
    """Count from zero again, such as after warm-up and capture. worker: as of `attended`."""
    for layer in _layers.values():
        layer.counts.zero_()
