"""The committed state of a cache group, for an engine without buffers of its own: the plans of a cycle belong to it.

It is loaded once a cycle. Every phase that was captured on it reads it in place (`BoundInputs`), so no phase has a step
or copies of its own: each graph plans itself, alone or beside the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from typing import Any, Self

import torch
from torch import Tensor

from spec_metadata.bound_inputs import BoundInputs, BoundStep
from spec_metadata.capacity import StepKind
from spec_metadata.errors import INTEGERS, InvalidStepError, check_tensor, describe
from spec_metadata.layout import Step
from spec_metadata.paging import Paging, RequestTable
from spec_metadata.static_inputs import misfit

Load = Callable[["CommittedState", Tensor, Tensor | None], None]
"""What loads a state from lengths and rows that were checked."""

LOADS: dict[str, Callable[[CommittedState], Load]] = {}
"""What binds the load of a state, by type of device; on others `copy_requests` is it. `attn_backends` brings CUDA's."""


@dataclass(frozen=True, eq=False)
class CommittedState:
    """The requests of a cycle, at most max_bs.

    seq_lens: [max_bs] int32, committed tokens. num_real: [1] int32, leading requests that are real. paging: the
    engine's table, read in place; a request table has the state's own rows, [max_bs] int64. Target and draft whose
    lengths differ have a state each.
    """

    seq_lens: Tensor
    num_real: Tensor
    paging: Paging
    _held: tuple[Tensor | None, Paging | None] = field(default=(None, None), init=False, repr=False)
    _views: dict[int, tuple[Tensor, Paging]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, paging: Paging, max_bs: int) -> Self:
        """A state of no request. paging: the engine's table; a block table has max_bs requests or more."""
        table = paging.table
        if not isinstance(max_bs, Integral) or max_bs < 1:
            raise InvalidStepError(f"a state holds at least 1 request, got max_bs={max_bs!r}")
        if isinstance(paging, RequestTable):
            place = torch.full((max_bs,), paging.padding, dtype=torch.int64, device=table.device)
        elif table.shape[0] < max_bs:
            raise InvalidStepError(f"a state of {max_bs} requests reads a block table of {table.shape[0]}")
        else:
            place = table[:max_bs]
        counts = (torch.zeros(size, dtype=torch.int32, device=table.device) for size in (max_bs, 1))
        return cls(*counts, paging.on_static(place))

    def load(self, seq_lens: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Paging]:
        """Hold the requests of the next cycle: one launch on a GPU where Triton runs, else two copies and a fill, which
        a graph can record. On another stream than the last cycle's graphs, wait for those first
        (`Metadata.wait_for_reads` of each phase).

        seq_lens: [bs] int32 or int64, committed tokens. rows: [bs] int32 or int64, of a request table; None of a block
        table, whose pages the engine writes. bs may be 0. Returns the lengths and the paging that steps of them are
        made of; a replay of a graph that recorded the load changes nothing of what `take` holds. Raises
        `InvalidStepError` for others, and for what shares memory with the state's own, with nothing written.
        """
        most = self.seq_lens.numel()
        if not isinstance(seq_lens, Tensor) or seq_lens.ndim != 1 or seq_lens.numel() > most:
            raise InvalidStepError(f"seq_lens must be [bs] of at most {most} requests, got {describe(seq_lens)}")
        self._check("seq_lens", seq_lens, seq_lens.shape, self._memory[0])
        if isinstance(self.paging, RequestTable):
            self._check("rows", rows, seq_lens.shape, self._memory[1])
        elif rows is not None:
            raise InvalidStepError(f"a block table has no rows, got {describe(rows)}: write pages into the table")
        object.__setattr__(self, "_held", (None, None))
        self._load(self, seq_lens, rows)
        object.__setattr__(self, "_held", found := self._first(seq_lens.numel()))
        return found

    def take(self, bound: BoundStep, step: Step) -> None:
        """Hold the requests of a step that a captured phase takes, on the state's table. Those that the last load held
        are there, where a step is made of what it returned. Slots, a tree mask and widths are read where the phase is
        bound to them. Raises `InvalidStepError` for others.
        """
        if step.kind is StepKind.IDLE:
            self.load(step.seq_lens, step.seq_lens if isinstance(self.paging, RequestTable) else None)
            return
        if reasons := [*misfit(bound.static, step), *self._misfit(bound, step)]:
            raise InvalidStepError(f"a graph on a state can't take this step: {'; '.join(reasons)}")
        if step.seq_lens is not self._held[0] or step.paging is not self._held[1]:
            self.load(step.seq_lens, step.paging.rows if isinstance(step.paging, RequestTable) else None)

    def _misfit(self, bound: BoundStep, step: Step) -> Iterator[str]:
        """Parts of a step that the state has no place for."""
        table, own = step.paging.table, self.paging.table
        longest = step.max_committed or 0 if step.seq_lens_cpu is None else max(step.seq_lens_cpu, default=0)
        if step.bs and (table.data_ptr(), table.stride()) != (own.data_ptr(), own.stride()):
            yield "it is on another table than the state's"
        if isinstance(step.num_real, Tensor) or step.num_real != step.bs:
            yield f"{step.num_real} of its {step.bs} requests are real, a state's all are"
        if step.out_cache_loc is not None and bound.inputs.out_cache_loc is None:
            yield "it brings slots, the graph writes to those after the committed tokens (leave out_cache_loc out)"
        if longest > bound.most:
            yield f"a request has up to {longest} committed tokens, the graph takes {bound.most}"

    def bound(
        self,
        bs: int,
        out_cache_loc: Tensor | None = None,
        *,
        tree_mask: Tensor | None = None,
        widths: Tensor | None = None,
    ) -> tuple[Paging, BoundInputs]:
        """Paging and inputs for the capture of a phase, with a bucket of bs requests. The other arguments are buffers
        of the phase's own, as in `BoundInputs`.
        """
        if not 1 <= bs <= self.seq_lens.shape[0]:
            raise InvalidStepError(f"a bucket of {bs} requests on a state of {self.seq_lens.shape[0]}")
        given = self.seq_lens[:bs], out_cache_loc, self.num_real, tree_mask
        return self._first(bs)[1], BoundInputs(*given, widths=widths)

    def _first(self, bs: int) -> tuple[Tensor, Paging]:
        """Lengths and paging of the first requests, made once: views take longer than all else of a load."""
        if bs not in self._views:
            self._views[bs] = self.seq_lens[:bs], self.paging.on_static(self.paging.static_input()[:bs])
        return self._views[bs]

    def _check(self, name: str, given: Any, shape: tuple[int, ...], own: range) -> None:
        check_tensor(name, given, shape, INTEGERS)
        if given.device != self.seq_lens.device:
            raise InvalidStepError(f"{name} is on {given.device} and the state on {self.seq_lens.device}")
        if given.data_ptr() in own and given.numel():
            advice = "make the step of what the last load returned, or load a copy"
            raise InvalidStepError(f"{name} shares memory with the state's own: {advice}")

    def __getstate__(self) -> dict[str, Any]:
        # a copy makes and binds its own
        return {n: value for n, value in self.__dict__.items() if n not in ("_load", "_memory")} | {"_views": {}}

    @cached_property
    def _memory(self) -> tuple[range, ...]:
        """The addresses of the state's own lengths, and of its rows or the engine's block table."""
        stored = (each.untyped_storage() for each in (self.seq_lens, self.paging.static_input()))
        return tuple(range(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in stored)

    @cached_property
    def _load(self) -> Load:
        bind = LOADS.get(self.seq_lens.device.type)
        return copy_requests if bind is None else bind(self)


def copy_requests(state: CommittedState, seq_lens: Tensor, rows: Tensor | None) -> None:
    """Load a state by copies and a fill: the definition. Entries after the requests are padding and stay as is.

    seq_lens, rows: as of `CommittedState.load`, checked.
    """
    bs = seq_lens.numel()
    for given, own in ((seq_lens, state.seq_lens), (rows, state.paging.static_input())):
        if given is not None:
            (own if bs == own.shape[0] else own[:bs]).copy_(given)
    state.num_real.fill_(bs)
