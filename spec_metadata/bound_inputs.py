"""An engine's own buffers as the inputs of a captured step: a graph reads them at every replay, where they lie.

An engine that captures its model keeps lengths, slots and rows of a table in static buffers of the bucket's size, and
pads them by a convention of its own. `BoundInputs` says what they mean, and `BoundStep.read` writes the captured step
from them, on the device only. It counts the real requests, pads the others (rule R6) and brings every value within the
capacity and the pool. A graph that holds it costs the host nothing beside its own launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_metadata.capacity import AnyBucket, Capacity, StepKind, TokenBucket
from spec_metadata.errors import INTEGERS, InvalidStepError, check_tensor, describe
from spec_metadata.layout import Step, next_slots
from spec_metadata.paging import BlockTable, CacheGeometry, Paging, RequestTable
from spec_metadata.query import BoundedQuery, PaddedQuery, UniformQuery
from spec_metadata.static_inputs import fill_rows
from spec_metadata.step_checks import check_device, check_lens, check_rows
from spec_metadata.widths import check_widths, fit_widths


@dataclass(frozen=True, slots=True, eq=False)
class BoundInputs:
    """Buffers of an engine for one bucket; the table, and the rows or pages in it, come as the capture's paging.

    seq_lens: [bs] int32 or int64, committed tokens; with this step's query rows where lens_include_rows (vLLM).
    out_cache_loc: int32 or int64 as of `Step`; None takes the slots of the table right after the committed tokens. A
    slot outside the pool, such as vLLM's -1, writes to the reserved page.
    num_real: [1] int32 or int64, leading requests that are real. None counts them by how an engine fills the others: in
    a request table those of the reserved row (SGLang's row 0), in a block table those of length 0 (vLLM's, whose
    lengths include rows). Padded requests come last.
    tree_mask: [bs, width, width] bool of a verify over a tree.
    widths: [bs] int32 or int64, rows of each request of a ragged step (`BoundedQuery`), whose out_cache_loc is
    [bs * width], the slots that each has for the longest; those that don't fit are cut by `fit_widths`.
    All of any stride, on one device. Values are read at each replay; those beyond what the capacity and the pool hold
    are clamped there, and told in checking mode.
    """

    seq_lens: Tensor
    out_cache_loc: Tensor | None = None
    num_real: Tensor | None = None
    tree_mask: Tensor | None = None
    lens_include_rows: bool = False
    widths: Tensor | None = None


def check_bound(inputs: BoundInputs | None, bucket: AnyBucket, paging: Paging, capacity: Capacity) -> None:
    """Refuse buffers that don't fit a bucket; None binds none. Reads shapes and types only."""
    if inputs is None:
        return
    is_ragged = isinstance(bucket, TokenBucket)
    if is_ragged and bucket.kind is StepKind.PREFILL:
        raise InvalidStepError(f"({bucket}) has packed rows, whose inputs are copied: capture it without inputs")
    bs, slots = bucket.bs, inputs.out_cache_loc
    width, num_steps = bucket.max_query(capacity), bucket.num_steps
    check_tensor("inputs.seq_lens", inputs.seq_lens, (bs,), INTEGERS)
    if paging.bs != bs:
        raise InvalidStepError(f"the paging of bound inputs has {paging.bs} requests, the bucket ({bucket}) {bs}")
    if is_ragged != (inputs.widths is not None):
        given = describe(inputs.widths)
        raise InvalidStepError(f"inputs.widths of ({bucket}) is {given}; a ragged step has them, no other")
    if inputs.widths is not None:
        check_tensor("inputs.widths", inputs.widths, (bs,), INTEGERS)
    if slots is not None:
        check_tensor("inputs.out_cache_loc", slots, (bs * width * num_steps,), INTEGERS)
    if inputs.lens_include_rows and num_steps > 1:
        raise InvalidStepError(f"lengths of ({bucket}) are committed tokens; its forwards have rows of their own each")
    if inputs.num_real is not None:
        check_tensor("inputs.num_real", inputs.num_real, (1,), INTEGERS)
    elif isinstance(paging, BlockTable) and not inputs.lens_include_rows:
        raise InvalidStepError(
            "a block table and committed lengths don't tell which requests are real (0 committed tokens may be): pass "
            "num_real, or lengths that include the step's rows"
        )
    if (inputs.tree_mask is not None) != (bucket.tree and bucket.kind is StepKind.TARGET_VERIFY):
        given = describe(inputs.tree_mask)
        raise InvalidStepError(f"inputs.tree_mask of ({bucket}) is {given}; a verify over a tree has one, no other")
    if inputs.tree_mask is not None:
        check_tensor("inputs.tree_mask", inputs.tree_mask, (bs, width, width), (torch.bool,))
    others = {"out_cache_loc": slots, "num_real": inputs.num_real, "tree_mask": inputs.tree_mask}
    check_device(inputs.seq_lens, paging=paging.static_input(), widths=inputs.widths, **others)


@dataclass(frozen=True, slots=True, eq=False)
class BoundStep:
    """A captured step and the engine's buffers that it is read from.

    static: over static buffers (`static_step`). paging: the engine's, in place.
    """

    static: Step
    inputs: BoundInputs
    paging: Paging
    capacity: Capacity

    @property
    def num_added(self) -> int:
        """Tokens that a request may add."""
        return self.static.width if isinstance(self.static.query, PaddedQuery) else self.static.num_added_at_least

    @property
    def most(self) -> int:
        """Committed tokens up to which a request is taken: any that the capacity and its table row hold."""
        return min(self.capacity.max_kv_len, self.static.paging.row_tokens) - self.num_added

    def read(self) -> None:
        """Write the captured step. Device only, fixed shapes, no host reads."""
        static, inputs, paging = self.static, self.inputs, self.paging
        num_real, bs = static.num_real, paging.bs
        assert isinstance(num_real, Tensor), "a graph reads it from a buffer"
        num_real.copy_(_num_real(inputs, paging))
        real = torch.arange(bs, device=static.device) < num_real
        static.seq_lens[:bs].copy_(torch.where(real, self._committed().clamp(0, self.most), 0))
        static.seq_lens[bs:].zero_()
        _read_paging(static.paging, paging, real)
        if isinstance(static.query, PaddedQuery):
            _read_rows(static, static.query, inputs, real)
        else:
            static.flat_slots().copy_(_write_slots(static, inputs, paging.geometry))
        if static.tree_mask is not None and inputs.tree_mask is not None:
            own = torch.eye(static.width, dtype=torch.bool, device=static.device)
            static.tree_mask.copy_(torch.where(real.view(-1, 1, 1), inputs.tree_mask, own))

    def check(self) -> None:
        """Refuse values that `read` brought within bounds. Reads the device back."""
        static, inputs, paging = self.static, self.inputs, self.paging
        num_real, num_added = int(static.num_real), self.num_added
        check_lens(self._committed()[:num_real].tolist(), [num_added] * num_real, self.most + num_added)
        check_rows(paging, num_real)
        if inputs.widths is not None:
            check_widths(_bounded(inputs.widths, static), num_real)
        num_slots, given = paging.geometry.num_slots, inputs.out_cache_loc
        slots = [] if given is None else given[: num_real * given.shape[0] // paging.bs].tolist()
        if wrong := [slot for slot in slots if not 0 <= slot < num_slots]:
            raise InvalidStepError(f"out_cache_loc of a real request holds {wrong}, outside [0, {num_slots})")
        if inputs.num_real is not None and int(inputs.num_real) != num_real:
            raise InvalidStepError(f"num_real is {int(inputs.num_real)}; this bucket has {paging.bs} requests")

    def _committed(self) -> Tensor:
        """[bs] int64."""
        widths = self.inputs.widths
        added = self.static.num_added_at_least if widths is None else widths.long()
        return self.inputs.seq_lens.long() - (added if self.inputs.lens_include_rows else 0)


def _read_paging(static: Paging, paging: Paging, real: Tensor) -> None:
    """Rows, or pages, of real requests; reserved ones of others. real: [bs] bool."""
    bs, into = paging.bs, static.static_input()
    if isinstance(paging, RequestTable):
        inside = real & (paging.rows >= 0) & (paging.rows < paging.table.shape[0])
        into[:bs].copy_(torch.where(inside, paging.rows, paging.padding))
    else:
        columns = min(paging.table.shape[1], into.shape[1])
        given = paging.table[:, :columns]
        inside = real.unsqueeze(1) & (given >= 0) & (given < paging.geometry.num_pages)
        into[:bs, :columns].copy_(torch.where(inside, given, paging.padding))
    into[bs:] = paging.padding


def _num_real(inputs: BoundInputs, paging: Paging) -> Tensor:
    """[1] int64."""
    if inputs.num_real is not None:
        return inputs.num_real.long().clamp(0, paging.bs)
    if isinstance(paging, RequestTable):
        return (paging.rows != paging.padding).sum().view(1)
    return (inputs.seq_lens > 0).sum().view(1)


def _bounded(widths: Tensor, static: Step) -> BoundedQuery:
    """The widths with the bounds of what was captured."""
    return BoundedQuery(widths, static.num_tokens, static.width)


def _read_rows(static: Step, query: PaddedQuery, inputs: BoundInputs, real: Tensor) -> None:
    """Rows of a ragged step and their slots. static: with its other inputs written. real: [bs] bool."""
    assert inputs.widths is not None, "capture refused a ragged step without"
    bs, given = real.shape[0], inputs.out_cache_loc
    if given is None:
        paging = static.paging.on_static(static.paging.static_input()[:bs])
        given = next_slots(UniformQuery(query.width), 1, static.seq_lens[:bs], paging)
    fill_rows(static, query, fit_widths(_bounded(inputs.widths, static), real), given)
    geometry, slots = static.paging.geometry, static.flat_slots()
    inside = (slots >= 0) & (slots < geometry.num_slots)
    slots.copy_(torch.where(inside, slots, geometry.reserved_slots(static.num_tokens, static.device)))


def _write_slots(static: Step, inputs: BoundInputs, geometry: CacheGeometry) -> Tensor:
    """[num_writes] int64. static: with its other inputs written."""
    given = inputs.out_cache_loc
    if given is None:
        given = next_slots(static.query, static.num_steps, static.seq_lens, static.paging)
    num_writes = static.num_real * (static.num_writes // static.bs)
    inside = (torch.arange(static.num_writes, device=static.device) < num_writes) & (given >= 0)
    padding = geometry.reserved_slots(static.num_writes, static.device)
    return torch.where(inside & (given < geometry.num_slots), given.long(), padding)
