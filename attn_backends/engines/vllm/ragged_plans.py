"""Plans under adaptive verification: the device cuts each request's draft, and vLLM's host knows the sum of rows alone.

On the host vLLM gives each verified request an even share of the rows. The lengths that count are `query_start_loc` on
the device: they are the widths of a ragged verify. Prompts follow the verified requests, as long as the host says.

A ragged verify needs room for the most rows after the committed tokens of every request. At the end of the context vLLM
drafts less, and its table ends. So the capacity has a whole context and room for drafts, and tables are copied to wider
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import takewhile

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_backends.adapters.batch import BlockTableBatch
from attn_backends.engines.vllm.plans import Batch, Plans, Refresh
from attn_backends.planning.metadata import Metadata
from spec_metadata import BlockTable, BoundedQuery, BoundInputs, Step, StepKind


class RaggedPlans(Plans):
    """As `Plans`, for verifies whose rows the device divides among requests, at most max(verified) each."""

    def may_run_in_graph(self, common: Batch) -> bool:
        """Whether a graph may run it; where rows may be cut, any batch without a longer request."""
        if not _may_be_cut(common):
            return super().may_run_in_graph(common)
        return max(common.query_start_loc_cpu[: common.num_reqs + 1].diff().tolist(), default=0) <= max(self.verified)

    def captured(self, common: Batch) -> Refresh:
        """As of `Plans`; where rows may be cut, a ragged verify over so many requests and rows."""
        table = self._tables[: common.num_reqs]
        given = common.block_table_tensor[:, : table.shape[1]]
        on_wider = copy(common)
        on_wider.block_table_tensor = table
        plan = self._ragged(on_wider) if _may_be_cut(common) else super().captured(on_wider)

        def refresh() -> Sequence[Metadata]:
            table[:, : given.shape[1]].copy_(given)
            return plan()

        return refresh

    def eager(self, common: Batch) -> Sequence[Metadata]:
        """As of `Plans`; where rows may be cut, verifies, then prompts, or one step of both if that is not slower."""
        if not _may_be_cut(common):
            return super().eager(common)
        batch, most = self._read(common), max(self.verified)
        num_cut = len(list(takewhile(lambda length: length <= most, batch.query_lens)))
        cut, prompts = batch.split(num_cut)
        if cut.bs and prompts.bs and not self._mixed.are_apart(cut.bs, sum(prompts.query_lens)):
            return [self.backend.init_forward_metadata(self._whole(batch, num_cut, common))]
        steps = []
        if cut.bs:
            cut = replace(cut, paging=self._wider(cut.paging), max_committed=common.max_seq_len - 1)
            steps.append(cut.ragged_verify(common.query_start_loc[: num_cut + 1].diff(), most))
        if prompts.bs:
            steps.append(replace(prompts, max_committed=common.max_seq_len - min(prompts.query_lens)).prefill())
        return [self.backend.init_forward_metadata(step) for step in steps or [batch.idle()]]

    def _whole(self, batch: BlockTableBatch, num_cut: int, common: Batch) -> Step:
        """Verifies and prompts as one step, of as many rows as the host says and of widths as the device has them."""
        most = (max(self.verified),) * num_cut + tuple(batch.query_lens[num_cut:])
        query = BoundedQuery(common.query_start_loc[: batch.bs + 1].diff(), sum(batch.query_lens), max(most), most)
        given = batch.committed, self._wider(batch.paging), None, batch.bs
        return Step(StepKind.PREFILL, query, *given, max_committed=common.max_seq_len - 1)

    def _wider(self, paging: BlockTable) -> BlockTable:
        """With room for drafts at the end of a context."""
        geometry, columns = self.backend.geometry, self._tables.shape[1] - paging.table.shape[1]
        return BlockTable(pad(paging.table, (0, max(columns, 0)), value=geometry.reserved_page), geometry)

    @cached_property
    def _tables(self) -> Tensor:
        """[max_bs, max_pages] int32: of the batch whose graph runs, which copies it here."""
        backend = self.backend
        size = backend.capacity.max_bs, backend.capacity.max_pages
        return torch.full(size, backend.geometry.reserved_page, dtype=torch.int32, device=backend.device)

    def _ragged(self, common: Batch) -> Refresh:
        backend, starts = self.backend, common.query_start_loc
        widths = starts.diff()
        bucket = backend.capacity.ragged_bucket(StepKind.TARGET_VERIFY, common.num_reqs, common.num_actual_tokens)
        inputs = BoundInputs(common.seq_lens, lens_include_rows=True, widths=widths)
        meta = backend.capture(bucket, BlockTable(common.block_table_tensor, backend.geometry), inputs)

        def refresh() -> Sequence[Metadata]:
            torch.sub(starts[1:], starts[:-1], out=widths)
            backend.refresh(meta)
            return (meta,)

        return refresh


def _may_be_cut(common: Batch) -> bool:
    """Blocks of a draft are not, nor the forwards of a draft loop, which have one row per request."""
    return bool(common.causal) and common.max_query_len > 1
