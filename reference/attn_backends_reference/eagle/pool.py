"""The first MTP module's last inputs: a ring of positions for each row of the request table.

`docs/mtp.md` derives that nothing else must be kept. An entry at a position is the target's hidden state there and the
token after it, and lies at `position % num_rerun` of its row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_backends.kernels.operators import store_ring
from spec_metadata import BufferSpec, Capacity, Dim, Extent, StepKind, allocate
from spec_metadata.buffers import BS


class InputPool:
    """The rings of all table rows. hidden: [max_bs + 1, num_rerun, H]. tokens: [max_bs + 1, num_rerun] int64."""

    def __init__(self, capacity: Capacity, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        largest = Extent.of_bucket(capacity.bucket(StepKind.DRAFT_EXTEND, capacity.max_bs), capacity)
        ring, width = Dim("num_rerun", lambda _: capacity.num_rerun), Dim("hidden_size", lambda _: hidden_size)
        specs = (
            BufferSpec("hidden", dtype, (BS + 1, ring, width), "target's hidden state at a position"),
            BufferSpec("tokens", torch.int64, (BS + 1, ring), "token after the position"),
        )
        tables = allocate(specs, largest, device)
        self.hidden, self.tokens = tables["hidden"], tables["tokens"]

    def read(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [*n, H] and tokens [*n] at positions, in memory of their own; garbage where none was kept.

        rows: int64, broadcasts to positions. positions: [*n] int64, negative ones too; none if num_rerun is 0.
        """
        place = rows, positions % self.hidden.shape[1]
        return self.hidden[place], self.tokens[place]

    def keep(self, rows: Tensor, starts: Tensor, ends: Tensor, hidden: Tensor, tokens: Tensor, offsets: Tensor) -> None:
        """Keep the last inputs of positions [starts, ends) of each row (`store_ring`).

        Sources are results that a step returned, never a graph's buffers: an eager step fills none.
        """
        store_ring(self.hidden, self.tokens, hidden, tokens, rows, starts, ends, offsets)
