"""Visible keys and write slots of rows: the one definition of each (rule R4), for the worker, plans and backends.

Attention of a step is a dense part, a prefix of the request's tokens, and for trees a tree part: drafted tokens read by
slot under an ancestor mask. The two are joined by their log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import add

import torch
from torch import Tensor

from spec_metadata.capacity import StepKind
from spec_metadata.errors import INTEGERS, check_tensor
from spec_metadata.layout import Step
from spec_metadata.query import PackedQuery, UniformQuery, as_packed, packed_rows
from spec_metadata.step_checks import check_device, check_forward


@dataclass(frozen=True, slots=True, eq=False)
class DensePart:
    """The tokens that a forward reads in position order.

    kv_lens: [bs] int32, keys that the last row of a request sees. causal: row j of w sees kv_lens - (w - 1 - j) keys
    (bottom-right aligned); otherwise every row sees all.
    """

    kv_lens: Tensor
    causal: bool


@dataclass(frozen=True, slots=True)
class HostLens:
    """A forward's exact lengths on the host, padded rows included, for kernels that plan there. Equal ones ask for the
    same plan.

    query_lens, kv_lens: an integer for each of bs requests; causal as in `DensePart`.
    """

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    causal: bool


@dataclass(frozen=True, slots=True, eq=False)
class TreePart:
    """The drafted tokens that a forward reads by slot.

    slots: [bs, num_keys] int64. mask: [bs, width, num_keys] bool, row sees key.
    """

    slots: Tensor
    mask: Tensor

    def within(self, window: int | None) -> Tensor:
        """The mask in a sliding window. Keys are nodes of a verify, or the tokens of each depth of each branch."""
        _, width, num_keys = self.mask.shape
        if window is None or window >= (most := num_keys if num_keys == width else num_keys // width):
            return self.mask
        depth = self.mask.sum(dim=2)
        of_keys = depth if num_keys == width else torch.arange(1, most + 1, device=depth.device).repeat(width)
        return self.mask & (depth.unsqueeze(2) - of_keys.expand(len(depth), -1).unsqueeze(1) < window)


@dataclass(frozen=True, slots=True)
class BlockRows:
    """The rows of draft blocks of `bs` requests: row j of `width` sees the width - 1 - j that come after it, too."""

    bs: int
    width: int
    device: torch.device

    def behind_end(self) -> Tensor:
        """[bs * width] int32: each row's position relative to the last key of the block: 1 - width to 0."""
        return torch.arange(1 - self.width, 1, dtype=torch.int32, device=self.device).repeat(self.bs)


def dense_part(step: Step, forward: int | None) -> DensePart:
    """The dense part of forward `forward` of a step.

    A chain sees the committed tokens and itself, causally; draft forward i sees committed + i + 1 keys. In a draft
    block every row sees the committed tokens and the whole block, in a tree all committed tokens and no more. A padded
    row reads as many keys of the reserved page as it has query rows, whatever the forward: it is never advanced.
    forward=None: the prefix that all forwards share. Of a draft chain it is the committed tokens; the drafted ones come
    from `chain_parts`.
    """
    committed, causal = step.seq_lens.int(), is_causal(step)
    if not isinstance(step.query, UniformQuery):
        return DensePart((committed + as_packed(step.query).cu_seqlens.diff()).int(), causal)
    kv_lens = torch.where(real_rows(step), committed + num_added(step, forward), step.width)
    return DensePart(kv_lens, causal)


def host_lens(step: Step, bs: int, forward: int | None) -> HostLens:
    """The exact lengths of a forward on the host, padded to `bs` requests; the step must bring `seq_lens_cpu`.

    forward: as in `dense_part`.
    """
    lens, query = step.seq_lens_cpu, step.query
    assert lens is not None, "the caller refuses steps without seq_lens_cpu"
    if isinstance(query, UniformQuery):
        added, padding = num_added(step, forward), (step.width,) * (bs - len(lens))
        kv_lens = tuple([length + added for length in lens])
        return HostLens((step.width,) * bs, kv_lens + padding, is_causal(step))
    assert isinstance(query, PackedQuery), "the host knows no lengths of a bounded query"
    assert bs == step.bs, "packed rows that were padded are bounded"
    return HostLens(query.lens_cpu, tuple(map(add, (*lens, *(0,) * (bs - len(lens))), query.lens_cpu)), is_causal(step))


def num_added(step: Step, forward: int | None) -> int:
    """Keys of the dense part after the committed ones that the last row of each uniform request sees."""
    if step.is_tree:
        return 0
    if step.kind is StepKind.DRAFT_DECODE:
        return 0 if forward is None else forward + 1
    return step.width


def is_causal(step: Step) -> bool:
    """Whether the rows of a request see ever more of its tokens in the dense part, and not all of it as in a tree or a
    draft block.
    """
    return not (step.is_tree or step.kind is StepKind.DRAFT_BLOCK)


Drafted = Tensor | BlockRows | int


def drafted(step: Step, forward: int) -> Drafted:
    """The drafted tokens that rows of a forward see beside its dense part: their number, the same for each row, or a
    verify's tree mask, [bs, width, width] bool. Of a draft block its rows, which see none besides.
    """
    if step.kind is StepKind.DRAFT_BLOCK:
        return BlockRows(step.bs, step.width, step.device)
    if not step.is_tree:
        return 0
    return forward + 1 if step.tree_mask is None else step.tree_mask


def windowed(window: int | None, drafted: Drafted) -> tuple[int | None, Tensor | None]:
    """The last keys of the dense part in a sliding window of W: their number, and how many fewer they are in each row,
    for its drafted keys: [bs * width] int32, None for none.

    A row's window is measured by its depth: in a tree rows differ in it, and in their first key with it. In a draft
    block after L committed tokens row j, at position L + j, sees from max(0, L + j - W + 1) to the end of the block:
    those besides are less than none.
    """
    if window is None:
        return None, None
    if isinstance(drafted, int):
        return max(window - drafted, 0), None
    if isinstance(drafted, BlockRows):
        return window, drafted.behind_end()
    return window, drafted.sum(dim=2, dtype=torch.int32).flatten()


def real_rows(step: Step) -> Tensor:
    """[bs] bool: the rows that are real requests."""
    return torch.arange(step.bs, device=step.device) < step.num_real


def tree_part(step: Step, forward: int, ancestors: Tensor | None = None) -> TreePart | None:
    """The tree part of a forward; None if the step is no tree.

    ancestors: for a draft of topk > 1, [bs, topk, forward + 1] int64: for each depth so far, the ancestor branch of
    branch k; the last entry is k itself. Raises `InvalidStepError` for others, and for a forward that the
    step does not plan.
    """
    check_forward(step.kind, forward, step.num_forwards)
    if not step.is_tree:
        return None
    if step.kind is StepKind.TARGET_VERIFY:
        assert step.tree_mask is not None
        return TreePart(step.flat_slots().long().reshape(step.bs, step.width), step.tree_mask)
    name = "ancestors, the branch of each row's path at each depth,"
    check_tensor(name, ancestors, (step.bs, step.width, forward + 1), INTEGERS)
    assert ancestors is not None, "it was refused"
    check_device(step.seq_lens, ancestors=ancestors)
    branches = torch.arange(step.width, device=step.device)
    on_path = ancestors.unsqueeze(2) == branches.view(1, 1, -1, 1)
    mask = torch.zeros((*on_path.shape[:3], step.num_steps), dtype=torch.bool, device=step.device)
    mask[..., : forward + 1] = on_path
    num_keys = step.width * step.num_steps
    slots = step.flat_slots().long().reshape(step.bs, num_keys)
    return TreePart(slots, mask.reshape(step.bs, step.width, num_keys))


def chain_parts(step: Step, write_slots: Tensor | None = None) -> tuple[TreePart, ...]:
    """The drafted tokens of each forward of a drafted chain, as trees of one branch; none of other steps.

    Beside the dense part that all forwards see alike. Made once for a step: views of its slots, and of one constant.
    write_slots: [num_forwards, bs] int64, what to copy instead of reading a step whose slots may be overwritten.
    """
    if step.kind is not StepKind.DRAFT_DECODE or step.is_tree:
        return ()
    if write_slots is None:
        slots = step.flat_slots().long().reshape(step.bs, step.num_steps)
    else:
        slots = write_slots.t().contiguous()
    seen = torch.ones((), dtype=torch.bool, device=step.device)
    sizes = range(1, step.num_forwards + 1)
    return tuple(TreePart(slots[:, :size], seen.expand(step.bs, 1, size)) for size in sizes)


def write_slots(step: Step, forward: int = 0) -> Tensor:
    """[num_tokens] int64, dense: where the rows of a forward write.

    The flat out_cache_loc of a draft is (batch, topk, step); taking one step of it is a strided view, which kernels
    that read slots with stride one would misread, so it is copied here once. Raises `InvalidStepError` for a forward
    that the step does not plan.
    """
    check_forward(step.kind, forward, step.num_forwards)
    if step.kind is not StepKind.DRAFT_DECODE:
        return step.flat_slots().long().contiguous()
    per_step = step.flat_slots().long().reshape(step.bs, step.width, step.num_steps)
    return per_step[:, :, forward].reshape(-1).contiguous()


@dataclass(frozen=True, slots=True, eq=False)
class KeptRows:
    """Leading query rows of each request of a uniform step, packed.

    rows: [num_rows] int64, their numbers among the step's; 0 after the last one. slots: [num_rows] int64, where they
    are written; the reserved page after the last one.
    """

    rows: Tensor
    slots: Tensor


def kept_rows(step: Step, slots: Tensor, num_kept: Tensor, num_rows: int) -> KeptRows:
    """The first num_kept [bs] rows of each request, of a step whose rows are positions one after the other. Device
    only, fixed shapes.

    slots: [num_tokens] int64, the step's write slots, which are those of padding, too. num_kept: integers, clamped to
    the step's width. num_rows: bound on their sum; later rows are left out.
    """
    kept = num_kept.long().clamp(0, step.width)
    ends, row = kept.cumsum(0), torch.arange(num_rows, device=step.device)
    request = torch.searchsorted(ends, row, right=True)
    is_kept, request = request < step.bs, request.clamp(max=step.bs - 1)
    rows = torch.where(is_kept, request * step.width + row - (ends - kept)[request], 0)
    geometry = step.paging.geometry
    return KeptRows(rows, torch.where(is_kept, slots[rows], geometry.reserved_slots(num_rows, step.device)))


def token_positions(step: Step, forward: int = 0) -> Tensor:
    """[num_tokens] int64 RoPE positions of a step's rows: committed length + depth.

    For draft decode, forward i stands at depth i for every branch. In a verify over a tree a node stands as deep as it
    has ancestors in the tree mask. Raises `InvalidStepError` for a forward that the step does not plan.
    """
    check_forward(step.kind, forward, step.num_forwards)
    start = step.seq_lens.long()
    if not isinstance(step.query, UniformQuery):
        request, offsets = packed_rows(step.query)
        return start[request] + offsets
    if step.kind is StepKind.DRAFT_DECODE:
        return (start + forward).unsqueeze(1).expand(-1, step.width).reshape(-1)
    if step.tree_mask is not None:
        return (start.unsqueeze(1) + step.tree_mask.sum(2) - 1).reshape(-1)
    return (start.unsqueeze(1) + torch.arange(step.width, device=step.device)).reshape(-1)


def query_starts(step: Step) -> Tensor:
    """[bs + 1] int32: first query row of each request, and the end."""
    if not isinstance(step.query, UniformQuery):
        return as_packed(step.query).cu_seqlens
    return torch.arange(step.bs + 1, dtype=torch.int32, device=step.device) * step.width


def num_visible_pages(step: Step, dense: DensePart) -> Tensor:
    """[bs] int32: pages that hold the visible keys of each request."""
    page_size = step.paging.geometry.page_size
    return torch.div(dense.kv_lens + (page_size - 1), page_size, rounding_mode="floor").int()


def visible_pages(step: Step, dense: DensePart, max_pages: int) -> Tensor:
    """[bs, max_pages] int64: the pages of each request's visible keys, then the reserved page to the end of the row."""
    if step.bs == 0:  # the table of an idle rank may be of any width
        return torch.empty((0, max_pages), dtype=torch.int64, device=step.device)
    pages = step.paging.pages(max_pages)
    live = leading(num_visible_pages(step, dense), max_pages)
    return torch.where(live, pages, step.paging.geometry.reserved_page)


def write_pages(step: Step, dense: DensePart, table: Tensor) -> None:
    """Write the pages of each request's visible keys into a table [bs, max_pages] of integers, and leave the rest, as a
    shared table needs.
    """
    if step.bs > 0:  # the table of an idle rank may be of any width
        live = leading(num_visible_pages(step, dense), table.shape[1])
        table.copy_(torch.where(live, step.paging.pages(table.shape[1]), table))


def leading(num: Tensor, size: int) -> Tensor:
    """[*num.shape, size] bool: the first `num` elements of each row of `size`."""
    return torch.arange(size, device=num.device) < num.unsqueeze(-1)
