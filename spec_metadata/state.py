"""The committed state of a cache group, for an engine without buffers of its own: the plans of a cycle belong to it.

It is loaded once a cycle. Every phase that was captured on it reads it in place (`BoundInputs`), so no phase has a step
or copies of its own: each graph plans itself, alone or beside the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Self, cast

import torch
from torch import Tensor

from spec_metadata.bound_inputs import BoundInputs
from spec_metadata.errors import InvalidStepError, describe
from spec_metadata.paging import Paging, RequestTable
from spec_metadata.step_checks import INTEGERS, check_tensor


@dataclass(frozen=True, slots=True, eq=False)
class CommittedState:
    """The requests of a cycle, at most max_bs.

    seq_lens: [max_bs] int32, committed tokens. num_real: [1] int32, leading requests that are real. paging: the
    engine's table, read in place; a request table has the state's own rows, [max_bs] int64. Target and draft whose
    lengths differ have a state each.
    """

    seq_lens: Tensor
    num_real: Tensor
    paging: Paging

    @classmethod
    def of(cls, paging: Paging, max_bs: int) -> Self:
        """A state of no request. paging: the engine's table; a block table has max_bs requests or more."""
        table = paging.table
        if not isinstance(max_bs, Integral) or max_bs < 1:
            raise InvalidStepError(f"a state holds at least 1 request, got max_bs={max_bs!r}")
        if isinstance(paging, RequestTable):
            place = torch.full((max_bs,), paging.geometry.reserved_row, dtype=torch.int64, device=table.device)
        elif table.shape[0] < max_bs:
            raise InvalidStepError(f"a state of {max_bs} requests reads a block table of {table.shape[0]}")
        else:
            place = table[:max_bs]
        lens, num_real = (torch.zeros(size, dtype=torch.int32, device=table.device) for size in (max_bs, 1))
        return cls(lens, num_real, paging.on_static(place))

    def load(self, seq_lens: Tensor, rows: Tensor | None = None) -> None:
        """Hold the requests of the next cycle: copies and a fill on the device, which a graph can record. On another
        stream than the last cycle's graphs, wait for those first (`Metadata.wait_for_reads` of each phase).

        seq_lens: [bs] int32 or int64, committed tokens. rows: [bs] int32 or int64, of a request table; None of a block
        table, whose pages the engine writes. bs may be 0. Raises `InvalidStepError` for others, with nothing written.
        """
        most = self.seq_lens.shape[0]
        if not isinstance(seq_lens, Tensor) or seq_lens.ndim != 1 or seq_lens.shape[0] > most:
            raise InvalidStepError(f"seq_lens must be [bs] of at most {most} requests, got {describe(seq_lens)}")
        bs, given = seq_lens.shape[0], [("seq_lens", seq_lens, self.seq_lens)]
        if isinstance(self.paging, RequestTable):
            given.append(("rows", cast("Tensor", rows), self.paging.rows))
        elif rows is not None:
            raise InvalidStepError(f"a block table has no rows, got {describe(rows)}: write pages into the table")
        for name, tensor, own in given:
            check_tensor(name, tensor, (bs,), INTEGERS)
            if tensor.device != own.device:
                raise InvalidStepError(f"{name} is on {tensor.device} and the state on {own.device}")
        for _, tensor, own in given:
            (own if bs == most else own[:bs]).copy_(tensor)
        self.num_real.fill_(bs)

    def bound(
        self,
        bs: int,
        out_cache_loc: Tensor | None = None,
        *,
        tree_mask: Tensor | None = None,
        widths: Tensor | None = None,
    ) -> tuple[Paging, BoundInputs]:
        """What a phase of a bucket of bs requests is captured with: the paging and the inputs. The rest are buffers of
        the phase's own, as of `BoundInputs`.
        """
        if not 1 <= bs <= self.seq_lens.shape[0]:
            raise InvalidStepError(f"a bucket of {bs} requests on a state of {self.seq_lens.shape[0]}")
        inputs = BoundInputs(self.seq_lens[:bs], out_cache_loc, self.num_real, tree_mask, widths=widths)
        return self.paging.on_static(self.paging.static_input()[:bs]), inputs
