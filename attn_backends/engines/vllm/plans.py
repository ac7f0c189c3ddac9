"""From vLLM's batches to metadata: what a group of layers attends with, planned when the first of them does.

vLLM pads a batch to the size of a captured graph, which only the sizes show, and discards its builder's metadata where
the graph runs. So nothing is planned while it is built. A captured plan reads vLLM's own buffers in place
(`BoundInputs`): the graph that records its first layer records the planning with it, and costs the host nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from attn_backends.adapters import vllm as adapter
from attn_backends.adapters.batch import BlockTableBatch, MixedBatches, with_rows
from attn_backends.backend import AttentionBackend
from attn_backends.errors import UnsupportedStepError
from attn_backends.planning.metadata import ForwardMetadata, Metadata
from spec_metadata import BlockTable, BoundInputs, Bucket, Step, StepKind

logger = logging.getLogger("vllm.attn_backends")


class Batch(adapter.CommonAttentionMetadata, Protocol):
    """vLLM's `CommonAttentionMetadata`: what `adapter.read` reads, num_actual_tokens, its query rows, those that pad a
    graph included, and max_query_len, a bound on those of a request.
    """

    num_actual_tokens: int
    max_query_len: int


Refresh = Callable[[], Sequence[Metadata]]


class Plan:
    """Metadata that is planned at the first use, and again at the first one after `expire`. make: the metadata of each
    part of the batch, whose rows follow one another.
    """

    def __init__(self, make: Refresh) -> None:
        self._make = make
        self._made: Sequence[Metadata] = ()
        self._parts: list[tuple[slice, ForwardMetadata]] = []

    def current(self) -> list[tuple[slice, ForwardMetadata]]:
        """The metadata of each part of the batch, with its rows; the same for all layers."""
        if not self._made:
            self._made = self._make()
            self._parts = with_rows([each.at() for each in self._made])
        return self._parts

    def expire(self) -> None:
        """vLLM's buffers hold another step now, such as the next forward of a draft loop."""
        self._made = ()


class Plans:
    """The plans of a group of layers that share a block table.

    backend: of the group. verified: query rows that a request may have in a verify, the last sampled token included;
    several where the number of drafts depends on the batch.
    """

    def __init__(self, backend: AttentionBackend, verified: Collection[int]) -> None:
        self.backend, self.verified = backend, verified
        self._captured: dict[Hashable, Refresh] = {}
        self._mixed = MixedBatches(backend, logger)

    def of(self, common: Batch) -> Plan:
        """The plan of a batch: the captured one of its size and buffers if there is one, else an eager one. It is
        chosen at the first use: none where a graph runs the batch.
        """
        return Plan(partial(self._chosen, common))

    def capture(self, common: Batch) -> Plan:
        """The plan of a graph that is captured now, for every batch of this size. The buffers of `common` are those
        that vLLM fills before each replay.
        """
        key = _key(common)
        if key not in self._captured:
            self._captured[key] = self.captured(common)
        return Plan(self._captured[key])

    def _chosen(self, common: Batch) -> Sequence[Metadata]:
        captured = self._captured.get(_key(common)) if self.may_run_in_graph(common) else None
        return captured() if captured else self.eager(common)

    def may_run_in_graph(self, common: Batch) -> bool:
        """Whether a captured graph of its size may run a batch: its requests have as many rows each, of a graph's
        padded batch too, whose last requests have none.
        """
        num_reqs = common.num_reqs
        width, rest = divmod(common.num_actual_tokens, num_reqs) if num_reqs else (0, 1)
        lens = common.query_start_loc_cpu[: num_reqs + 1].diff().tolist()
        real = [length for length in lens if length]
        return not rest and lens[: len(real)] == [width] * len(real)

    def captured(self, common: Batch) -> Refresh:
        """A planner of batches of this size, captured on the buffers of `common`."""
        num_rows = common.num_actual_tokens
        width, rest = divmod(num_rows, common.num_reqs)
        if rest or (common.causal and width not in (1, *self.verified)):
            raise UnsupportedStepError(
                "a full graph of vLLM",
                [
                    f"{num_rows} rows of {common.num_reqs} requests (each has 1 row, or in a verify "
                    f"{' or '.join(map(str, sorted(self.verified)))})"
                ],
                "cudagraph_mode FULL_DECODE_ONLY or FULL_AND_PIECEWISE",
            )
        kind = StepKind.DECODE if width == 1 else StepKind.TARGET_VERIFY
        bucket = Bucket(kind if common.causal else StepKind.DRAFT_BLOCK, common.num_reqs, width)
        inputs = BoundInputs(common.seq_lens, common.slot_mapping[:num_rows], lens_include_rows=True)
        meta = self.backend.capture(bucket, BlockTable(common.block_table_tensor, self.backend.geometry), inputs)

        def refresh() -> Sequence[Metadata]:
            self.backend.refresh(meta)
            return (meta,)

        return refresh

    def eager(self, common: Batch) -> Sequence[Metadata]:
        """The metadata of a batch, part by part."""
        if not common.causal:
            return [self.backend.init_forward_metadata(adapter.read_block(common, self.backend.geometry))]
        batch = self._read(common)
        num_apart = self._num_apart(batch)
        parts = [batch]
        if num_apart:
            bound = common.max_seq_len  # counts query rows, of which a part has its own
            parts = [replace(part, max_committed=bound - min(part.query_lens)) for part in batch.split(num_apart)]
        return [self.backend.init_forward_metadata(self._step(part)) for part in parts]

    def _read(self, common: Batch) -> BlockTableBatch:
        """The requests of a batch. A lone one of more rows than a context is none: a rank of data parallelism without
        requests has it, of all rows of a graph of pieces.
        """
        batch, capacity = adapter.read(common, self.backend.geometry), self.backend.capacity
        most = min(capacity.max_kv_len, batch.paging.table.shape[1] * capacity.page_size)
        return batch.split(0)[0] if batch.bs == 1 and batch.query_lens[0] > most else batch

    def _step(self, batch: BlockTableBatch) -> Step:
        widths = set(batch.query_lens)
        if not widths:
            return batch.idle()
        if widths == {1}:
            return batch.decode()
        return batch.target_verify() if len(widths) == 1 and widths <= {*self.verified} else batch.prefill()

    def _num_apart(self, batch: BlockTableBatch) -> int:
        """Running requests that are a step of their own beside prompts: vLLM has those of one width first."""
        first = batch.query_lens[0] if batch.bs else 0
        running = batch.leading(first) if first in (1, *self.verified) else 0
        return running if self._mixed.are_apart(running, sum(batch.query_lens[running:])) else 0


def _key(common: Batch) -> Hashable:
    """A captured batch: its size, and the buffers that its graph reads."""
    buffers = (common.seq_lens, common.slot_mapping, common.block_table_tensor)
    places = tuple((buffer.data_ptr(), buffer.stride()) for buffer in buffers)
    return common.num_actual_tokens, common.num_reqs, common.causal, places
