"""Mutants of graphs over packed rows: where requests start, and who owns the rows that are padding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attn_backends.backend import AttentionBackend
from attn_backends.contract.capabilities import Capabilities
from spec_metadata import PackedQuery, PaddedQuery, TokenBucket, UniformQuery, static_inputs
from tests.mutants.mutant import mutant


@mutant("SGLang #21987: lengths of the capture", "math.prefill", "math.packed_draft_extend", "prefill.full", graph=True)
def starts_of_the_first_step(patch: pytest.MonkeyPatch) -> None:
    """Where requests start is what it was in a graph's first replay."""
    fill, first = static_inputs._fill_starts, {}

    def once(query, given):
        fill(query, given)
        key = query.cu_seqlens.data_ptr(), query.num_tokens
        if given is not None:
            query.cu_seqlens.copy_(first.setdefault(key, query.cu_seqlens.clone()))

    patch.setattr(static_inputs, "_fill_starts", once)


@mutant("padding that has no request of its own", "graph.shrinking", "prefill.full", graph=True)
def last_request_has_the_padded_rows(patch: pytest.MonkeyPatch) -> None:
    """Rows after the real ones are counted to the last real request."""
    fill = static_inputs._fill_starts

    def counted(query, given):
        fill(query, given)
        if given is not None:
            query.cu_seqlens[given.shape[0] - 1 :] = query.num_tokens

    patch.setattr(static_inputs, "_fill_starts", counted)


@mutant("a tail that no replay resets", "graph.shrinking", "graph.padded", "graph.sequence", "prefill.full", graph=True)
def padded_rows_write_where_others_wrote(patch: pytest.MonkeyPatch) -> None:
    """Padded rows write to the slots of rows that an earlier replay had there, which belong to requests."""
    fill, before = static_inputs._fill, {}

    def kept(static, step):
        fill(static, step)
        if isinstance(static.query, PaddedQuery) and step is not None:
            key = static.out_cache_loc.data_ptr(), static.num_writes
            old = before.setdefault(key, static.out_cache_loc.clone())
            static.out_cache_loc[step.num_writes :] = old[step.num_writes :]
            before[key] = static.out_cache_loc.clone()

    patch.setattr(static_inputs, "_fill", kept)


@mutant("eager padding and a replay's, written twice", "graph.equals_eager", "prefill.full_exact", graph=True)
def padded_request_has_a_token(patch: pytest.MonkeyPatch) -> None:
    """The request of the padded rows has a committed token after a replay, and none eagerly."""
    copy_inputs = AttentionBackend.copy_inputs

    def longer(self, meta, step):
        copy_inputs(self, meta, step)
        if isinstance(meta.bucket, TokenBucket):
            meta.step.seq_lens[-1] = 1

    patch.setattr(AttentionBackend, "copy_inputs", longer)


@mutant("divisible taken for uniform", "graph.uniform_is_not_packed", backend="reference", graph=True)
def uniform_step_in_a_packed_graph(patch: pytest.MonkeyPatch) -> None:
    """A uniform step with room enough is taken by a graph of packed rows, as so many requests of equal lengths."""
    fill = static_inputs._fill

    def as_packed(static, step):
        if step is not None and isinstance(static.query, PaddedQuery) and isinstance(step.query, UniformQuery):
            step = replace(step, query=PackedQuery.of([step.width] * step.bs, step.device))
        fill(static, step)

    patch.setattr(static_inputs, "_query_misfit", lambda static, step: [])
    patch.setattr(static_inputs, "_fill", as_packed)


@mutant("graphs that any kernel is trusted with", "refusals.packed_graph", backend="trtllm_mla", graph=True)
def every_kernel_takes_packed_graphs(patch: pytest.MonkeyPatch) -> None:
    """Whether a kernel can be captured over packed rows is asked of none."""
    reasons = Capabilities.step_reasons
    patch.setattr(Capabilities, "capture_reasons", lambda self, bucket: [])
    patch.setattr(
        Capabilities, "step_reasons", lambda self, step: [] if step.bs > step.max_real else reasons(self, step)
    )
