"""SGLang's ForwardBatch, whose forward mode says in which situation it is.

Which of its modes count the new tokens in `seq_lens`: EXTEND, MIXED, DECODE and DRAFT_EXTEND_V2 do; TARGET_VERIFY and a
DECODE of the draft model do not. Rows that SGLang adds for data-parallel attention are dropped: a step's rows are the
first `step.num_tokens` of the batch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from attn_backends.adapters.batch import host_list
from attn_backends.errors import UnsupportedStepError
from spec_metadata import (
    BoundedQuery,
    BoundInputs,
    CacheGeometry,
    DraftTree,
    InvalidStepError,
    PackedQuery,
    RequestTable,
    Step,
    UniformQuery,
)
from spec_metadata.layout import HostBounds
from spec_metadata.query import most_rows


class Named(Protocol):
    """A forward mode. name: of the enumeration's member."""

    @property
    def name(self) -> str:
        """Such as EXTEND."""
        ...


class ForwardBatch(Protocol):
    """The fields that are read.

    req_pool_indices, seq_lens: [batch_size] int32 or int64. out_cache_loc: flat int64. seq_lens_cpu: host mirror of
    seq_lens, or None. extend_prefix_lens: [batch_size], tokens before the new ones; extend_seq_lens_cpu: numbers of new
    tokens, on the host; None outside the extend modes. spec_info: None, or see `VerifyInput`. The originals are what
    the batch was before padding for data parallelism, None if there was none.
    """

    forward_mode: Named
    batch_size: int
    req_pool_indices: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor
    seq_lens_cpu: Tensor | None
    extend_prefix_lens: Tensor | None
    extend_seq_lens_cpu: list[int] | None
    spec_info: Any
    _original_batch_size: int | None
    _original_forward_mode: Named | None


class VerifyInput(Protocol):
    """The fields that are read of the EagleVerifyInput or DFlashVerifyInput of a TARGET_VERIFY.

    draft_token: [bs * draft_token_num]. retrieve_next_token, retrieve_next_sibling: [bs, draft_token_num] int64, first
    child and next sibling of each node, -1 if none. topk, spec_steps: of the tree.

    DFlash's has two more. ragged_verify_layout is None or has verify_lens, [bs] int32 on the device, and
    graph_num_tokens, the rows of all, padding included. live_seq_lens_cpu: [bs] on the host, what is committed; its
    batch's seq_lens_cpu counts the verified rows. DFlash's own worker leaves it None, and its batch's then counts
    reserved slots, too.
    """

    draft_token: Tensor
    draft_token_num: int
    topk: int
    spec_steps: int
    retrieve_next_token: Tensor
    retrieve_next_sibling: Tensor


REFUSED = {
    "out_cache_loc_virtual": "a table of virtual slots (translate it and pass the physical one)",
    "encoder_lens": "cross-attention",
    "attn_cp_metadata": "context parallelism",
    "attn_dcp_metadata": "decode context parallelism",
    "dcp_kv_mask": "decode context parallelism",
    "encoder_swa_row_floor": "an encoder replay folded into the extend",
}


def geometry(size: int, page_size: int) -> CacheGeometry:
    """The cache of a KV pool. size: its tokens, a multiple of page_size.

    SGLang allocates one page more, page 0, and one request row more, row 0, for padding.
    """
    return CacheGeometry(size // page_size + 1, page_size, reserved_page=0, reserved_row=0)


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatches:
    """Builds the steps of one model runner.

    req_to_token: [num_rows, row_len] int32, its request-to-token table, read in place. geometry: of its KV pool. topk,
    num_steps: of the draft (speculative_eagle_topk, speculative_num_steps).
    """

    req_to_token: Tensor
    geometry: CacheGeometry
    topk: int = 1
    num_steps: int = 1

    def step(self, batch: ForwardBatch) -> Step:
        """The step of a batch. On the host it reads the batch's own mirrors only; a missing one is refused by name."""
        mode = (batch.forward_mode if batch._original_forward_mode is None else batch._original_forward_mode).name
        bs = batch.batch_size if batch._original_batch_size is None else batch._original_batch_size
        reasons = [f"{why} ({name})" for name, why in REFUSED.items() if getattr(batch, name, None) is not None]
        builders: dict[str, Callable[[ForwardBatch, int], Step]] = {
            "EXTEND": self._prefill,
            "MIXED": self._prefill,
            "DECODE": self._decode if batch.spec_info is None else self._draft_decode,
            "TARGET_VERIFY": self._verify,
            "DRAFT_EXTEND_V2": self._draft_extend,
        }
        if mode != "IDLE" and mode not in builders:
            reasons.append(f"forward mode {mode} (it takes IDLE, {', '.join(builders)})")
        if reasons:
            raise UnsupportedStepError("SGLang's ForwardBatch", reasons, "leave it to SGLang's backend")
        if mode == "IDLE" or bs == 0:
            return Step.idle(self._paging(batch, 0))
        if batch.out_cache_loc is None:
            raise InvalidStepError(
                "ForwardBatch.out_cache_loc is None; build the step when SGLang has allocated slots for the new tokens"
            )
        return builders[mode](batch, bs)

    def bound(self, batch: ForwardBatch, mask: Tensor | None = None) -> tuple[RequestTable, BoundInputs]:
        """The parts of a batch that a graph reads at every replay: the paging of its capture, and bound inputs.

        batch: what SGLang captures with, whose tensors are the runner's static buffers; their padded requests name row
        0 of the table. mask: [bs, width, width] bool, where the mask of a verify over a tree is written before each
        replay. Nothing is read here.
        """
        mode = batch.forward_mode.name
        layout = getattr(batch.spec_info, "ragged_verify_layout", None)
        inputs = BoundInputs(
            batch.seq_lens,
            batch.out_cache_loc if layout is None else None,
            tree_mask=mask,
            lens_include_rows=mode == "DRAFT_EXTEND_V2" or (mode == "DECODE" and batch.spec_info is None),
            widths=None if layout is None else layout.verify_lens,
        )
        return self._paging(batch, batch.batch_size), inputs

    def replayed(self, view: Any, width: int) -> Step:
        """The step of what SGLang hands over before a replay, without its padded requests; for kernels that plan on the
        host, which can't be bound. width: query rows of a request.

        view: of the decode and verify runner, the draft's or the draft extend's. Their lengths and rows of the table
        are padded; what counts the real ones is num_padding, of a draft extend the number of input_ids.
        """
        mode = getattr(view, "actual_forward_mode", None) or view.forward_mode
        extends = mode.name == "DRAFT_EXTEND_V2"
        bs = view.input_ids.shape[0] // width if extends else view.batch_size - view.num_padding
        real = SimpleNamespace(
            forward_mode=mode,
            batch_size=bs,
            req_pool_indices=view.req_pool_indices[:bs],
            seq_lens=view.seq_lens[:bs],
            out_cache_loc=view.out_cache_loc,
            seq_lens_cpu=None if view.seq_lens_cpu is None else view.seq_lens_cpu[:bs],
            extend_prefix_lens=view.seq_lens[:bs] - width if extends else None,
            extend_seq_lens_cpu=[width] * bs if extends else None,
            spec_info=view.spec_info,
            out_cache_loc_virtual=view.out_cache_loc_virtual,
            _original_batch_size=None,
            _original_forward_mode=None,
        )
        return self.step(real)

    def _prefill(self, batch: ForwardBatch, bs: int) -> Step:
        lens, prefix_lens = _extended(batch, bs)
        return Step.prefill(
            PackedQuery.of(lens, batch.seq_lens.device),
            prefix_lens,
            self._paging(batch, bs),
            batch.out_cache_loc[: sum(lens)],
            **_host(batch.seq_lens_cpu, lens),
        )

    def _decode(self, batch: ForwardBatch, bs: int) -> Step:
        paging, host = self._paging(batch, bs), _host(batch.seq_lens_cpu, [1] * bs)
        return Step.decode(batch.seq_lens[:bs] - 1, paging, batch.out_cache_loc[:bs], **host)

    def _draft_decode(self, batch: ForwardBatch, bs: int) -> Step:
        if batch.spec_info.num_tokens_per_req != self.topk:
            raise InvalidStepError(
                f"the batch drafts {batch.spec_info.num_tokens_per_req} branches (spec_info.num_tokens_per_req), this "
                f"builder was made for topk={self.topk}"
            )
        return Step.draft_decode(
            self.topk,
            self.num_steps,
            batch.seq_lens[:bs],
            self._paging(batch, bs),
            batch.out_cache_loc[: bs * self.topk * self.num_steps],
            **_host(batch.seq_lens_cpu, [0] * bs),
        )

    def _verify(self, batch: ForwardBatch, bs: int) -> Step:
        spec: VerifyInput = batch.spec_info
        lens, paging, width = batch.seq_lens[:bs], self._paging(batch, bs), spec.draft_token_num
        slots, layout = batch.out_cache_loc[: bs * width], getattr(spec, "ragged_verify_layout", None)
        live = getattr(spec, "live_seq_lens_cpu", batch.seq_lens_cpu)
        host = _bound(batch, bs) if live is None else _host(live, [0] * bs)
        if width == 1:
            return Step.decode(lens, paging, slots, **host)
        if layout is not None:  # its slots are packed; those of the table are its whole window
            query = BoundedQuery(layout.verify_lens[:bs], layout.graph_num_tokens, width)
            return Step.target_verify(query, lens, paging, **host)
        mask = None if spec.topk == 1 else tree_mask(spec)[:bs]
        return Step.target_verify(width, lens, paging, slots, tree_mask=mask, **host)

    def _draft_extend(self, batch: ForwardBatch, bs: int) -> Step:
        lens, prefix_lens = _extended(batch, bs)
        if front := getattr(batch.spec_info, "num_front_tokens", 0):
            reason = f"a draft extend that starts {front} tokens before the committed length (num_front_tokens)"
            raise UnsupportedStepError("SGLang's ForwardBatch", [reason], "extend after the committed tokens")
        paging, slots, host = self._paging(batch, bs), batch.out_cache_loc[: sum(lens)], _host(batch.seq_lens_cpu, lens)
        if max(lens) == 1:
            return Step.decode(prefix_lens, paging, slots, **host)
        query = UniformQuery(lens[0]) if len({*lens}) == 1 else PackedQuery.of(lens, batch.seq_lens.device)
        return Step.draft_extend(query, prefix_lens, paging, slots, **host)

    def _paging(self, batch: ForwardBatch, bs: int) -> RequestTable:
        return RequestTable(self.req_to_token, batch.req_pool_indices[:bs], self.geometry)


class BlockDraftBatches(ForwardBatches):
    """Builds the steps of a DFlash draft's runner: its TARGET_VERIFY is a block, whose rows see one another."""

    def _verify(self, batch: ForwardBatch, bs: int) -> Step:
        lens, paging, width = batch.seq_lens[:bs], self._paging(batch, bs), batch.spec_info.draft_token_num
        return Step.draft_block(width, lens, paging, batch.out_cache_loc[: bs * width], **_bound(batch, bs))


def tree_mask(spec: VerifyInput) -> Tensor:
    """[bs, draft_token_num, draft_token_num] bool, node sees its ancestors and itself.

    From the children and siblings, not from custom_mask, which has one of three layouts and may be a larger buffer.
    """
    child, sibling = spec.retrieve_next_token, spec.retrieve_next_sibling
    end = spec.draft_token_num  # one column more, which a -1 is written to
    nodes = torch.arange(end + 1, device=child.device).expand(child.shape[0], -1)
    parent = torch.zeros_like(nodes).scatter(1, child.remainder(end + 1), nodes[:, :end])
    first = nodes.scatter(1, sibling.remainder(end + 1), nodes[:, :end])  # the sibling before a node, or itself
    for _ in range((end - 1).bit_length()):
        first = first.gather(1, first)
    parents = parent.gather(1, first)[:, :end]
    tokens = spec.draft_token.reshape(parents.shape)
    return DraftTree.from_parents(tokens, parents, spec.spec_steps).mask


def num_running(step: Step) -> int:
    """Requests of one row at the end of a packed step, where SGLang puts the running ones of a mixed batch."""
    return len(list(takewhile(lambda length: length == 1, reversed(most_rows(step.query) or ()))))


def split(step: Step, num_prompts: int) -> tuple[Step, Step]:
    """A mixed batch's step as two over the same tensors: prompts, and the running requests, which SGLang puts last."""
    query, paging, slots, known = step.query, step.paging, step.out_cache_loc, step.seq_lens_cpu
    assert isinstance(query, PackedQuery)
    assert isinstance(paging, RequestTable)
    assert slots is not None
    lens, first, last = query.lens_cpu[:num_prompts], slice(num_prompts), slice(num_prompts, None)
    tables = [RequestTable(paging.table, paging.rows[part], paging.geometry) for part in (first, last)]
    bounds = [HostBounds()] * 2
    if known is not None:
        bounds = [HostBounds(max_committed=max(known[part]), seq_lens_cpu=known[part]) for part in (first, last)]
    prompts = PackedQuery(query.cu_seqlens[: num_prompts + 1], lens)
    return (
        Step.prefill(prompts, step.seq_lens[first], tables[0], slots[: sum(lens)], **bounds[0]),
        Step.decode(step.seq_lens[last], tables[1], slots[sum(lens) :], **bounds[1]),
    )


def _extended(batch: ForwardBatch, bs: int) -> tuple[list[int], Tensor]:
    """New tokens of each request, and [bs] the tokens before them."""
    lens, prefix_lens = batch.extend_seq_lens_cpu, batch.extend_prefix_lens
    if lens is None or prefix_lens is None:
        missing = "extend_seq_lens_cpu" if lens is None else "extend_prefix_lens"
        raise InvalidStepError(
            f"ForwardBatch.{missing} is None; an extend needs its numbers of new tokens on the host, where they are "
            "not read back from extend_seq_lens, and the tokens before them"
        )
    return lens[:bs], prefix_lens[:bs]


def _bound(batch: ForwardBatch, bs: int) -> HostBounds:
    """Of DFlash's steps, whose lengths on the host count the rows, and slots that are reserved: no exact lengths."""
    known = _host(batch.seq_lens_cpu, [batch.spec_info.draft_token_num] * bs)
    return HostBounds(max_committed=known.get("max_committed"))


def _host(mirror: Tensor | None, included: Sequence[int]) -> HostBounds:
    """Committed lengths on the host; nothing without a mirror. included: new tokens that its lengths count."""
    if mirror is None:
        return HostBounds()
    lens = host_list("ForwardBatch.seq_lens_cpu", mirror[: len(included)])
    committed = [length - new for length, new in zip(lens, included, strict=True)]
    return HostBounds(max_committed=max(committed), seq_lens_cpu=committed)
