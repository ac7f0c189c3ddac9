"""Sets of captured phases that take turns in the same bytes, such as those of a worker whose number of steps adapts.

The phases of a set are alive together; two sets never are. So memory is that of the largest set, whatever their number,
and a switch from one set to another captures and allocates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_backends.errors import CaptureError
from attn_backends.graphs import is_capturing
from attn_backends.memory.reads import Reads
from spec_metadata.buffers import aligned

if TYPE_CHECKING:
    from attn_backends.memory.phases import PhaseMemory


class PhaseSets:
    """Memory in which sets of phases lie over one another.

    num_bytes: of the largest set, to be allocated now; more is allocated where phases need it. alive: the set whose
    contents it holds.
    """

    def __init__(self, device: torch.device, num_bytes: int = 0) -> None:
        self.device = device
        self.alive: PhaseSet | None = None
        self._blocks = [torch.empty(num_bytes, dtype=torch.uint8, device=device)] if num_bytes else []
        self._reads = Reads(device)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated so far, for all sets together."""
        return sum(block.numel() for block in self._blocks)

    def add(self) -> PhaseSet:
        """Another set, of no phases yet."""
        return PhaseSet(self)

    def reads_end(self) -> None:
        """Nothing that is launched later reads the set which is alive. Another set is planned after what the
        device's current stream holds now, whatever stream that is on.
        """
        self._reads.end()

    def block(self, num_bytes: int, taken: dict[int, int]) -> Tensor:
        """The block with the least room that is enough, a new one if there is none. taken: bytes of each block."""
        room = {i: block.numel() - taken.get(i, 0) for i, block in enumerate(self._blocks)}
        fitting = {i: free for i, free in room.items() if free >= num_bytes}
        if not fitting:
            fitting = {len(self._blocks): num_bytes}
            self._blocks.append(torch.empty(num_bytes, dtype=torch.uint8, device=self.device))
        best = min(fitting, key=fitting.__getitem__)
        start = taken.get(best, 0)
        taken[best] = start + num_bytes
        return self._blocks[best][start : start + num_bytes]

    def revive(self, one: PhaseSet) -> None:
        """Make a set the active one, after what still reads the last one."""
        if self.alive is one:
            return
        if self.device.type == "cuda" and is_capturing():
            raise CaptureError("another set of phases is alive: call PhaseSet.revive before the capture")
        self._reads.wait()
        if self.alive is not None:
            for member in self.alive.members:
                member.forget()
        self.alive = one
        for member in one.members:
            member.renew()


@dataclass(slots=True, eq=False)
class PhaseSet:
    """One of `PhaseSets`: what `AttentionBackend.capture(…, within=set)` puts phases into."""

    sets: PhaseSets
    members: list[PhaseMemory] = field(default_factory=list)
    _taken: dict[int, int] = field(default_factory=dict)

    @property
    def is_alive(self) -> bool:
        """Whether its memory holds its contents, not another set's."""
        return self.sets.alive is self

    def memory(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, not the memory of another phase of this set. The set is alive then."""
        self.revive()
        return self.sets.block(aligned(num_bytes), self._taken)[:num_bytes]

    def like(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor in memory of the set; what it holds is lost when another set becomes alive."""
        size = tensor.numel() * tensor.element_size()
        return self.memory(size).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def revive(self) -> None:
        """Make it the set that is alive. Planning one of its steps does so; an engine whose graphs plan from its own
        buffers does it before the first graph of a cycle.
        """
        self.sets.revive(self)
