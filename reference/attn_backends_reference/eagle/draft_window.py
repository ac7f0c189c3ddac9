"""Windowed drafts: a draft that reads the first tokens of a request and the last ones before what it drafts.

A window of W tokens and S sink tokens is a table of its own, in which whole pages between the two are left out. A
kernel sees a shorter request in it, so any kernel takes it. Drafted rows stand at their true positions, and write where
they would without a window. The verify and the draft extend see all tokens, so what is emitted does not change. SGLang
windows the same forwards (`speculative_draft_window_size`, `speculative_draft_sink_size`); pages of one token leave out
the same keys as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_backends.cache import CacheFormat
from attn_backends.errors import UnsupportedStepError
from attn_backends_reference.eagle.options import WorkerOptions
from attn_backends_reference.eagle.slots import SlotAllocator
from attn_backends_reference.models.decoder import DraftModel
from spec_metadata import Capacity, CommittedState, RequestTable
from spec_metadata.capacity import ceil_div


@dataclass(frozen=True, slots=True, eq=False)
class DraftWindow:
    """The table that windowed drafts read.

    slots: table and pages of the requests. table: [num_rows, row_len] int32, as that of `slots`, without the pages that
    are left out. size: the last tokens that a draft sees at least. num_sinks: the first ones, at least. draft_room:
    tokens that a cycle drafts.
    """

    slots: SlotAllocator
    table: Tensor
    size: int
    num_sinks: int
    draft_room: int

    @classmethod
    def of(
        cls, options: WorkerOptions, draft: DraftModel, capacity: Capacity, slots: SlotAllocator
    ) -> DraftWindow | None:
        """The window of a worker; None if its drafts see all tokens."""
        if options.draft_window is None:
            return None
        reasons = [f"layer {each.id} has a window of {each.window} of its own" for each in draft.layers if each.window]
        if not isinstance(draft.cache_format, CacheFormat):
            reasons.append(f"its cache ({draft.cache_format}) keeps states of tokens beside their pages")
        if reasons:
            why = f"draft_window={options.draft_window}"
            raise UnsupportedStepError(why, reasons, "no draft_window, or a draft whose layers see all tokens")
        return cls(slots, slots.table.clone(), options.draft_window, options.draft_sink_tokens, capacity.draft_room)

    def num_skipped(self, lens: Tensor) -> Tensor:
        """Tokens between sinks and window, in whole pages. lens: committed tokens, any shape."""
        page_size = self.slots.geometry.page_size
        pages = torch.div(lens - self.size, page_size, rounding_mode="floor") - ceil_div(self.num_sinks, page_size)
        return pages.clamp_min(0) * page_size

    def read(self, rows: Tensor, lens: Tensor) -> Tensor:
        """Write the table of drafts that begin after `lens` [bs] int32 committed tokens, and return their lengths, [bs]
        int32. rows: [bs] int64. Device only.
        """
        page_size, skipped = self.slots.geometry.page_size, self.num_skipped(lens)
        num_sinks = ceil_div(self.num_sinks, page_size) * page_size
        longest = num_sinks + self.size + page_size + self.draft_room
        columns = torch.arange(min(longest, self.table.shape[1]), device=lens.device)
        positions = columns + (columns >= num_sinks) * skipped.unsqueeze(1)
        self.table[rows, : len(columns)] = self.slots.paging(rows).slots(positions).to(self.table.dtype)
        return lens - skipped

    def state(self, max_bs: int) -> CommittedState:
        """The committed state of drafts, on their table."""
        rows = torch.empty(0, dtype=torch.int64, device=self.table.device)
        return CommittedState.of(RequestTable(self.table, rows, self.slots.geometry), max_bs)

    def bounds(self, max_committed: int, seq_lens_cpu: Sequence[int] | None) -> dict[str, Any]:
        """Host bounds (`HostBounds`) of the lengths that `read` returns, from those of all tokens."""
        known = torch.tensor([max_committed] if seq_lens_cpu is None else seq_lens_cpu)
        left = (known - self.num_skipped(known)).tolist()
        page_size = self.slots.geometry.page_size
        most = ceil_div(self.num_sinks, page_size) * page_size + self.size + page_size - 1
        return {"max_committed": min(max_committed, most), "seq_lens_cpu": None if seq_lens_cpu is None else left}
