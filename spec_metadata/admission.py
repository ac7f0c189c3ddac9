"""Checks of a step's values (rule R10): host bounds always, device values only when a caller asks for them.

`check_values` reads the device back, so backends call it in checking mode only; an engine that keeps host mirrors of
its tables calls `check_write_slots` on them when it admits a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from spec_metadata.capacity import PACKED_KINDS, AnyBucket, Capacity, StepKind, TokenBucket, ceil_div, check_bucket
from spec_metadata.errors import INTEGERS, InvalidStepError, check_tensor
from spec_metadata.layout import Step
from spec_metadata.paging import CacheGeometry, Paging
from spec_metadata.query import AnyPacked, BoundedQuery, PackedQuery, PaddedQuery, UniformQuery, most_rows
from spec_metadata.step_checks import check_device, check_lens, check_paging, check_rows
from spec_metadata.widths import check_widths


def check_table_room(step: Step, capacity: Capacity) -> None:
    """Refuse a step that its capacity or table can't hold. Reads shapes and host bounds only.

    A bound that is no longer than the context is the capacity's own: what fits after shorter requests is taken.
    """
    if step.kind is StepKind.IDLE:
        return
    if isinstance(step.query, BoundedQuery):
        most = TokenBucket(step.kind, step.bs, step.num_tokens).max_query(capacity)
        if min(step.width, step.num_tokens) > most:
            raise InvalidStepError(
                f"a ragged {step.kind} step of up to {step.width} rows per request; the capacity holds at most {most} "
                f"(num_draft_tokens={capacity.num_draft_tokens}, extend_width={capacity.extend_width})"
            )
    committed, num_added = _longest(step, capacity)
    if committed + num_added > capacity.max_kv_len:
        raise InvalidStepError(
            f"a request of a {step.kind} step has {_described(committed, step)} and adds {num_added}, together "
            f"{committed + num_added}; the capacity holds {capacity.max_kv_len} (max_context={capacity.max_context} "
            f"and {capacity.draft_room} drafted, in whole pages of {capacity.page_size})"
        )
    row_tokens, is_known = step.paging.row_tokens, step.seq_lens_cpu is not None or step.max_committed is not None
    if not is_known and row_tokens < capacity.max_tokens:
        advice = "Make the table wider, or pass max_committed or seq_lens_cpu if requests are shorter"
        raise InvalidStepError(f"{_too_narrow(row_tokens, capacity)}. {advice}")
    if isinstance(step.query, PaddedQuery):  # its longest request may be padding, which reads whole pages
        row_tokens = ceil_div(row_tokens, capacity.page_size) * capacity.page_size
    if committed + num_added > row_tokens:
        raise InvalidStepError(
            f"a table row holds {row_tokens} tokens; {committed + num_added} are needed: a request of the {step.kind} "
            f"step has {_described(committed, step)} and adds {num_added}. Make the table wider"
        )


def _longest(step: Step, capacity: Capacity) -> tuple[int, int]:
    """Committed tokens, and those that the step adds, of the request that needs most, as far as the host knows."""
    lens, known = most_rows(step.query), step.seq_lens_cpu
    if lens is None and not isinstance(step.query, PaddedQuery):
        return step.longest(capacity), step.num_added_at_least
    if known is not None:  # of padding, which is behind, the host knows no exact length
        return max(zip(known, lens or (), strict=False), key=sum, default=(0, 0))
    bound = step.longest(capacity)
    if (bound <= capacity.max_context and step.paging.row_tokens >= capacity.max_tokens) or step.max_committed is None:
        bound = 0
    return max((0, step.width), (bound, step.num_added_at_least), key=sum)


def _described(committed: int, step: Step) -> str:
    """Committed tokens, and how the host knows."""
    if step.seq_lens_cpu is not None:
        return f"{committed} committed tokens"
    if committed == 0 and step.max_committed != 0:
        return "0 or more committed tokens"
    return f"up to {committed} committed tokens ({'max_context' if step.max_committed is None else 'max_committed'})"


def is_on(step: Step, device: torch.device) -> bool:
    """Whether a step's tensors, which lie on one device, lie on this; one without an index is any of its type."""
    return step.device.type == device.type and (device.index is None or step.device.index in (None, device.index))


def most_committed(step: Step, capacity: Capacity) -> int:
    """Committed tokens of a request up to which `check_table_room` accepts a uniform step like one that it accepted.
    These are all that the capacity and the table hold; if the table is narrower than the capacity, those of that step.
    """
    if step.paging.row_tokens >= capacity.max_tokens:
        return min(capacity.max_kv_len, step.paging.row_tokens) - step.num_added_at_least
    return step.longest(capacity)


def check_capture(bucket: AnyBucket, paging: Paging, capacity: Capacity) -> None:
    """Refuse to capture a bucket that no step fills, or on a table that can't hold a request at the capacity."""
    check_paging(paging)
    _check_bucket(bucket, capacity)
    if paging.row_tokens < capacity.max_tokens:
        raise InvalidStepError(f"{_too_narrow(paging.row_tokens, capacity)}. Make the table wider")


def _check_bucket(bucket: AnyBucket, capacity: Capacity) -> None:
    check_bucket(bucket)
    kind = bucket.kind
    if kind is StepKind.IDLE:
        raise InvalidStepError("an idle step has no bucket of its own; captured metadata of any other takes it")
    if isinstance(bucket, TokenBucket):
        if kind not in PACKED_KINDS:
            raise InvalidStepError(f"a {kind} step has no packed rows; take Capacity.bucket, not ({bucket})")
        return
    if kind is StepKind.PREFILL:
        raise InvalidStepError(f"a prefill step has packed rows; take Capacity.prefill_bucket, not ({bucket})")
    if kind is StepKind.DECODE and bucket.width != 1:
        raise InvalidStepError(f"a decode step has 1 query row per request, got ({bucket})")
    num_steps = bucket.num_steps if kind is StepKind.DRAFT_DECODE else 1
    num_added = bucket.width * num_steps
    if num_steps < 1 or num_added > capacity.max_kv_len:
        raise InvalidStepError(
            f"({bucket}) adds {num_added} tokens to a request; the capacity holds {capacity.max_kv_len}, with what is "
            "committed"
        )
    is_tree = {StepKind.DRAFT_DECODE: bucket.width > 1, StepKind.TARGET_VERIFY: bucket.tree}.get(kind, False)
    if (bucket.tree, bucket.num_steps) != (is_tree, num_steps):
        raise InvalidStepError(
            f"no {kind} step of width {bucket.width} has num_steps={bucket.num_steps} and tree={bucket.tree}; take "
            "Capacity.bucket"
        )


def _too_narrow(row_tokens: int, capacity: Capacity) -> str:
    return (
        f"a table row holds {row_tokens} tokens; {capacity.max_tokens} are needed, max_context={capacity.max_context} "
        f"and {capacity.draft_room} drafted"
    )


def check_values(step: Step, capacity: Capacity) -> None:
    """Check lengths, rows, slots and tree mask of a step's real requests. Reads the device back: for checking mode."""
    num_real = int(step.num_real)
    lens = step.seq_lens[:num_real].tolist()
    _check_query_values(step)
    _check_mask(step, num_real)
    if not isinstance(step.query, AnyPacked):
        widths = [step.width * step.num_steps] * num_real
    else:
        widths = step.query.cu_seqlens.diff()[:num_real].tolist()
    check_lens(lens, widths, min(step.paging.row_tokens, capacity.max_kv_len))
    for request, length in enumerate(lens):
        if step.max_committed is not None and length > step.max_committed:
            raise InvalidStepError(
                f"request {request} has {length} committed tokens, max_committed={step.max_committed}"
            )
    if step.seq_lens_cpu is not None and list(step.seq_lens_cpu) != lens:
        raise InvalidStepError(f"seq_lens_cpu says {list(step.seq_lens_cpu)}, the device holds {lens}")
    if step.reads_alone:  # its own tokens are committed
        lens, widths = [length + 1 for length in lens], [0] * num_real
    positions = torch.arange(step.paging.row_tokens, device=step.device).expand(step.bs, -1)
    slots = step.paging.slots(positions)[:num_real].tolist() if num_real else []
    visible = [row[:length] for row, length in zip(slots, lens, strict=True)]
    flat = step.flat_slots().tolist()
    writes = [flat[start:end] for start, end in pairwise(accumulate(widths, initial=0))]
    check_write_slots(writes, visible, step.paging.geometry)
    read = visible
    if not step.is_tree:
        _check_own_slots(writes, [row[n : n + w] for row, n, w in zip(slots, lens, widths, strict=True)])
        read = [row[: n + w] for row, n, w in zip(slots, lens, widths, strict=True)]
    _check_pages(read, step.paging.geometry.page_size)


def _check_own_slots(writes: Sequence[Sequence[int]], own: Sequence[Sequence[int]]) -> None:
    """A chain reads what it writes through the table, so the two must be the same slots."""
    for request, (written, read) in enumerate(zip(writes, own, strict=True)):
        if list(written) != list(read):
            raise InvalidStepError(
                f"request {request} writes slots {list(written)}; its table has {list(read)} after what is committed"
            )


def _check_pages(read: Sequence[Sequence[int]], page_size: int) -> None:
    """Kernels read pages, which they find by the first slot of each."""
    for request, row in enumerate(read):
        for position, slot in enumerate(row):
            start = position - position % page_size
            if row[start] % page_size or slot != row[start] + position - start:
                raise InvalidStepError(
                    f"the table has position {position} of request {request} at slot {slot} and {start} at "
                    f"{row[start]}; a row holds whole pages of {page_size} slots"
                )


def _check_query_values(step: Step) -> None:
    if isinstance(step.query, PackedQuery):
        lens, given = step.query.lens_cpu, step.query.cu_seqlens.tolist()
        if given != [0, *accumulate(lens)]:
            raise InvalidStepError(f"cu_seqlens {given} are not the sums of the lengths {lens}")
    elif isinstance(step.query, BoundedQuery):
        check_widths(step.query, int(step.num_real))
    elif isinstance(step.query, PaddedQuery):
        given = step.query.cu_seqlens.tolist()
        if sorted(given) != given or given[0] != 0 or given[-1] != step.num_tokens:
            raise InvalidStepError(f"cu_seqlens {given} don't rise from 0 to {step.num_tokens}, the query rows")
    check_rows(step.paging, step.bs)


def _check_mask(step: Step, num_real: int) -> None:
    if step.tree_mask is None:
        return
    for request, rows in enumerate(step.tree_mask[:num_real].tolist()):
        paths = [[other for other, sees in enumerate(row) if sees] for row in rows]
        for node in range(len(paths)):
            if wrong := _no_path(node, paths):
                raise InvalidStepError(f"tree_mask: node {node} of request {request} {wrong}")


def _no_path(node: int, paths: Sequence[Sequence[int]]) -> str | None:
    """Why what a node sees is no path from the root, node 0; None if it is: what its parent sees, and itself. Parents
    come before their children, so the last node before it that it sees is its parent.
    """
    seen = paths[node]
    if not seen:
        return "sees nothing; it sees itself at least"
    if node not in seen:
        return "does not see itself"
    if 0 not in seen:
        return "does not see the root, node 0"
    if seen[-1] > node:
        return f"sees node {seen[-1]}, which comes later; ancestors come before a node"
    if node > 0 and seen[:-1] != paths[seen[-2]]:
        return (
            f"sees {seen[:-1]} before itself, but its parent, node {seen[-2]}, sees {paths[seen[-2]]}; a node sees "
            "what its parent sees, and itself"
        )
    return None


def check_ancestors(step: Step, ancestors: Tensor) -> None:
    """Check the paths of a draft's branches, of real requests. Reads the device back: for checking mode.

    ancestors: [bs, topk, forward + 1] int64, as of `spec_metadata.tree_part`, which refuses other shapes.
    """
    for request, paths in enumerate(ancestors[: int(step.num_real)].tolist()):
        for branch, path in enumerate(paths):
            if path[-1] != branch or not all(0 <= each < step.width for each in path):
                raise InvalidStepError(
                    f"branch {branch} of request {request} has ancestors {path}; they are branches in [0, {step.width})"
                    ", the last one the branch itself"
                )


def check_kept(step: Step, num_kept: Tensor) -> None:
    """Refuse to keep the first rows of requests where these are no positions one after the other. Reads no values.

    num_kept: [bs] int32 or int64.
    """
    if not isinstance(step.query, UniformQuery) or step.is_tree or step.kind is StepKind.DRAFT_DECODE:
        rows = "branches or nodes of a draft" if isinstance(step.query, UniformQuery) else "packed rows"
        raise InvalidStepError(
            f"the first rows of a {step.kind} step with {rows} can't be kept; plan a draft_block or a draft_extend of "
            "uniform width"
        )
    check_tensor("num_kept", num_kept, (step.bs,), INTEGERS)
    check_device(step.seq_lens, num_kept=num_kept)


def check_num_kept(step: Step, num_kept: Tensor, num_rows: int) -> None:
    """Refuse counts of real requests that `kept_rows` would cut. Reads the device back: for checking mode.

    num_kept: [bs] int32 or int64. num_rows: rows that are kept.
    """
    counts = num_kept[: int(step.num_real)].tolist()
    if any(not 0 <= count <= step.width for count in counts) or sum(counts) > num_rows:
        raise InvalidStepError(
            f"num_kept is {counts}, together {sum(counts)}; a request has {step.width} rows, and {num_rows} are kept"
        )


def check_write_slots(
    writes: Sequence[Sequence[int]], visible: Sequence[Sequence[int]], geometry: CacheGeometry
) -> None:
    """Check host mirrors of a batch. writes: each request's write slots. visible: each request's committed slots.

    A slot must exist and lie outside the reserved page. A request sees a slot once; requests may share what they see. A
    slot is written once, and is no committed slot of any request.
    """
    owner: dict[int, int] = {}
    committed: dict[int, int] = {}
    for request, row in enumerate(visible):
        for slot in row:
            _check_slot(request, "sees", slot, geometry)
            if committed.get(slot) == request:
                raise InvalidStepError(f"request {request} sees slot {slot} twice; a page is one place of its tokens")
            committed[slot] = request
    for request, row in enumerate(writes):
        for slot in row:
            _check_slot(request, "writes", slot, geometry)
            if slot in owner:
                raise InvalidStepError(f"slot {slot} is written twice, by requests {owner[slot]} and {request}")
            if slot in committed:
                raise InvalidStepError(
                    f"request {request} writes slot {slot}, which holds a committed token of request {committed[slot]}"
                )
            owner[slot] = request


def _check_slot(request: int, does: str, slot: int, geometry: CacheGeometry) -> None:
    if not 0 <= slot < geometry.num_slots:
        raise InvalidStepError(f"request {request} {does} slot {slot}, outside [0, {geometry.num_slots})")
    if slot // geometry.page_size == geometry.reserved_page:
        raise InvalidStepError(f"request {request} {does} slot {slot} of the reserved page, which is padding's")
