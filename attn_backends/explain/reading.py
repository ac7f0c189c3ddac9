"""Slots that each row sees, read from the metadata by the kernel itself (`probes`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.conformance.exercise import new_graph
from attn_backends.explain.probes import Probe, probes_of
from attn_backends.planning.metadata import Metadata
from spec_metadata import StepKind
from spec_metadata.buffers import out_of_range


@dataclass(frozen=True)
class ForwardReading:
    """The metadata of one forward, as its kernel reads it. seen: for each row, how often it reads each slot, by pool
    (`probes.ROWS`, or the ratio of entries). write_slots: of each row. tree: tensors of its drafted tokens, by name;
    none of a chain.
    """

    seen: tuple[Mapping[int, Counter[int]], ...]
    write_slots: tuple[int, ...]
    tree: Mapping[str, Tensor]


class Reader:
    """Reads the metadata of a step through its backend's kernel.

    Captured metadata is read through a graph, recorded here. Make the reader before the replay that it is to show:
    the graph then holds the tensors that a worker's graph holds, whatever the replay does.
    """

    def __init__(self, meta: Metadata) -> None:
        """Raises `ConfigError` for a cache that is too large for a picture, or of a format that it does not know."""
        self.meta, self.backend = meta, cast("AttentionBackend", meta.owner)
        self.probes = probes_of(self.backend, meta.step.kind)
        self._ancestors = _own_branches(meta)
        self._graph = None
        if meta.captured is not None:
            self._attend()  # a vendor's schedules are made by the first forward, which a graph may not hold
            self._graph = new_graph(self.backend.device)
            self._outputs = self._graph.capture(self._attend)

    @property
    def path(self) -> str:
        """The use of the metadata: eager or graph."""
        return "eager" if self._graph is None else "graph"

    def problems(self) -> list[str]:
        """Values outside of what buffers declare; a kernel that reads them may read any memory."""
        return out_of_range(self.backend.buffers(self.meta.step.kind), self.meta.buffers)

    def read(self, ancestors: Sequence[Tensor] = ()) -> tuple[ForwardReading, ...]:
        """The slots that each forward's rows see and write. ancestors: of each forward of a draft of topk > 1, as
        `Metadata.at` takes them, [bs, topk, forward + 1].
        """
        for own, given in zip(self._ancestors, ancestors, strict=bool(ancestors)):
            own[: len(given)].copy_(given)
        places = self._places()
        return tuple(self._reading(forward, rows) for forward, rows in enumerate(places))

    def _reading(self, forward: int, rows: list[list[Counter[int]]]) -> ForwardReading:
        at = self.meta.at(forward, self._ancestors_of(forward))
        tree = {} if at.tree is None else {"tree.slots": at.tree.slots, "tree.mask": at.tree.mask}
        seen = tuple(_joined(self.probes, row) for row in zip(*rows, strict=True))
        return ForwardReading(seen, tuple(at.write_slots.tolist()), tree)

    def _places(self) -> list[list[list[Counter[int]]]]:
        """How often each row sees each place: of each forward, probe and row."""
        most = max(probe.num_places for probe in self.probes)
        weights: list[list[list[dict[int, float]]]] = []
        for first in range(0, most, self.probes[0].layer.v_head_dim):
            for probe in self.probes:
                probe.show(first)
            outputs = self._run()
            weights = weights or [[[{} for _ in out] for out in outs] for outs in outputs]
            for found, out in (
                (f, o) for fs, os in zip(weights, outputs, strict=True) for f, o in zip(fs, os, strict=True)
            ):
                heads = out[:, 0].float().cpu()
                for row, element in heads.nonzero().tolist():
                    found[row][first + element] = float(heads[row, element])
        return [[[_times(row) for row in rows] for rows in of_probes] for of_probes in weights]

    def _run(self) -> list[list[Tensor]]:
        if self._graph is None:
            return self._attend()
        self._graph.replay()
        return self._outputs

    def _attend(self) -> list[list[Tensor]]:
        """Outputs of each forward and probe."""
        outputs = []
        for forward in range(self.meta.step.num_forwards):
            at = self.meta.at(forward, self._ancestors_of(forward))
            outputs.append([probe.attend(at, at.write_slots.shape[0]) for probe in self.probes])
        return outputs

    def _ancestors_of(self, forward: int) -> Tensor | None:
        return self._ancestors[forward] if self._ancestors else None


def _own_branches(meta: Metadata) -> list[Tensor]:
    """Ancestors of a drafted tree in which each branch grew from itself alone; none of other steps."""
    step = meta.step
    if step.kind is not StepKind.DRAFT_DECODE or not step.is_tree:
        return []
    branches = torch.arange(step.width, device=step.device).view(1, -1, 1)
    return [branches.repeat(step.bs, 1, forward + 1) for forward in range(step.num_forwards)]


def _times(weights: Mapping[int, float]) -> Counter[int]:
    """How often a row reads each place: the least weight stands for one time."""
    least = min(weights.values(), default=1.0)
    return Counter({place: max(round(weight / least), 1) for place, weight in weights.items()})


def _joined(probes: Sequence[Probe], places: Sequence[Counter[int]]) -> dict[int, Counter[int]]:
    """What a row sees through all probes; each sees the same tokens, or the row that differs is told by its union."""
    joined: dict[int, Counter[int]] = {}
    for probe, own in zip(probes, places, strict=True):
        for ratio, found in probe.named(own).items():
            joined[ratio] = joined.get(ratio, Counter()) | found
    return joined
