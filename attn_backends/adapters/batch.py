"""The common part of vLLM's and TensorRT-LLM's batches: a block table, and query lengths known on the host.

Neither engine's object says in which situation it is, and both put prompts and running requests into one batch. The
worker knows, so it splits the batch and names the situation of each part:

    batch = vllm.read(common, geometry)
    running, prompts = batch.split(batch.leading(1 + num_speculative_tokens))
    verify, prefill = running.target_verify(), prompts.prefill()
    q_verify, q_prefill = q[running.rows], q[prompts.rows]

The plug-ins for vLLM and SGLang ask `MixedBatches` whether two steps are faster than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from logging import Logger
from typing import Self

from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.errors import UnsupportedStepError
from attn_backends.planning.metadata import ForwardMetadata
from spec_metadata import BlockTable, BoundedQuery, InvalidStepError, PackedQuery, Step, StepKind, UniformQuery


@dataclass(frozen=True, slots=True, eq=False)
class BlockTableBatch:
    """Requests of one batch, the engine's padding left out.

    query_lens: query rows of each request. committed: [bs] int32 or int64, tokens of each request before these rows.
    paging: the engine's block table. out_cache_loc: [num_rows] slots that the rows write, or None for those right after
    the committed tokens. max_committed: host bound on `committed`, None if the engine has none. first_row: row of the
    engine's queries at which this batch begins.
    """

    query_lens: tuple[int, ...]
    committed: Tensor
    paging: BlockTable
    out_cache_loc: Tensor | None
    max_committed: int | None
    first_row: int = 0

    @property
    def bs(self) -> int:
        """Requests."""
        return len(self.query_lens)

    @property
    def rows(self) -> slice:
        """The rows of the engine's queries and outputs that belong to this batch."""
        return slice(self.first_row, self.first_row + sum(self.query_lens))

    def leading(self, width: int) -> int:
        """The number of requests at the front that have exactly `width` query rows."""
        return len(list(takewhile(lambda length: length == width, self.query_lens)))

    def split(self, num_requests: int) -> tuple[Self, Self]:
        """The first `num_requests` requests and the others; either part may be empty."""
        if not 0 <= num_requests <= self.bs:
            raise InvalidStepError(f"a batch of {self.bs} requests can't be split after {num_requests}")
        return self._part(0, num_requests), self._part(num_requests, self.bs)

    def prefill(self) -> Step:
        """Any query lengths. A running request among the prompts is a prompt chunk of one token."""
        query = PackedQuery.of(self.query_lens, self.committed.device)
        return Step.prefill(query, self.committed, self.paging, self.out_cache_loc, max_committed=self.max_committed)

    def decode(self) -> Step:
        """One new token per request."""
        self._check_width("decode", 1)
        return Step.decode(self.committed, self.paging, self.out_cache_loc, max_committed=self.max_committed)

    def draft_decode(self, num_steps: int) -> Step:
        """All num_steps - 1 forwards of a chain's draft loop, from the batch of the first of them.

        They write right after the committed tokens: the engine's slots are of the first forward only.
        """
        self._check_width("draft decode", 1)
        return Step.draft_decode(1, num_steps, self.committed, self.paging, max_committed=self.max_committed)

    def target_verify(self, tree_mask: Tensor | None = None) -> Step:
        """One row per node of the draft tree. tree_mask: [bs, width, width] bool, row sees column; None for a chain."""
        return Step.target_verify(
            self._width("target verify"),
            self.committed,
            self.paging,
            self.out_cache_loc,
            tree_mask=tree_mask,
            max_committed=self.max_committed,
        )

    def ragged_verify(self, widths: Tensor, width: int) -> Step:
        """A verify whose rows the device divides among requests, by widths, [bs], at most width each. query_lens is a
        guess of the host, of as many rows in all. Slots are those of the table.
        """
        query = BoundedQuery(widths, sum(self.query_lens), width)
        return Step.target_verify(query, self.committed, self.paging, max_committed=self.max_committed)

    def draft_block(self) -> Step:
        """The rows of a block draft, which see one another."""
        width = self._width("draft block")
        return Step.draft_block(
            width, self.committed, self.paging, self.out_cache_loc, max_committed=self.max_committed
        )

    def draft_extend(self) -> Step:
        """The draft catches up on running requests, rejected rows included; its prompts are a `prefill`."""
        query = UniformQuery(self._width("draft extend"))
        return Step.draft_extend(
            query, self.committed, self.paging, self.out_cache_loc, max_committed=self.max_committed
        )

    def idle(self) -> Step:
        """The step of a batch without requests."""
        if self.bs:
            raise InvalidStepError(f"an idle step has no requests, this batch has {self.bs}")
        return Step.idle(self.paging)

    def _part(self, start: int, stop: int) -> Self:
        first = sum(self.query_lens[:start])
        last = sum(self.query_lens[:stop])
        return type(self)(
            query_lens=self.query_lens[start:stop],
            committed=self.committed[start:stop],
            paging=BlockTable(self.paging.table[start:stop], self.paging.geometry),
            out_cache_loc=None if self.out_cache_loc is None else self.out_cache_loc[first:last],
            max_committed=self.max_committed,
            first_row=self.first_row + first,
        )

    def _width(self, situation: str) -> int:
        widths = set(self.query_lens)
        if len(widths) != 1:
            raise UnsupportedStepError(
                f"a {situation} step",
                [f"it has one width, the requests have {list(self.query_lens)} query rows"],
                "split() the batch and prefill() the rest; a batch without requests is idle()",
            )
        return widths.pop()

    def _check_width(self, situation: str, width: int) -> None:
        if self._width(situation) != width:
            raise UnsupportedStepError(
                f"a {situation} step",
                [f"it has {width} query row per request, these requests have {self.query_lens[0]}"],
                "target_verify() or draft_extend() if they are drafted tokens, prefill() if they are a prompt",
            )


@dataclass(slots=True, eq=False)
class MixedBatches:
    """Whether an engine's batches of prompts and running requests are planned as two steps or as one.

    backend: plans them. logger: gets the reason for two steps, once.
    """

    backend: AttentionBackend
    logger: Logger
    _told: bool = False

    def are_apart(self, num_running: int, num_prompt_rows: int) -> bool:
        """Whether so many running requests, and so many rows of prompts, are two steps; never if one of them is 0."""
        if not num_running or not num_prompt_rows:
            return False
        reason = self.backend.choices[StepKind.PREFILL].slower_mixed(num_running, num_prompt_rows)
        if reason and not self._told:
            name = self.backend.name
            self.logger.info("%s attends prompts and %d running requests in two steps: %s", name, num_running, reason)
            self._told = True
        return bool(reason)


def with_rows(parts: Sequence[ForwardMetadata]) -> list[tuple[slice, ForwardMetadata]]:
    """The parts of a batch, each with its rows of the engine's queries, which follow one another."""
    ends = list(accumulate(meta.write_slots.shape[0] for meta in parts))
    return [(slice(start, end), meta) for start, end, meta in zip([0, *ends], ends, parts, strict=False)]


def host_list(name: str, tensor: Tensor | None) -> list[int]:
    """The values of a host mirror, 1-D of integers. Refuses None, and one on a device, which would be read back."""
    if tensor is None:
        raise InvalidStepError(f"{name} is None; it is needed on the host and is not read back from the device")
    if tensor.device.type != "cpu":
        raise InvalidStepError(
            f"{name} is on {tensor.device}; it is needed on the host and is not read back from there"
        )
    return [int(value) for value in tensor.tolist()]
