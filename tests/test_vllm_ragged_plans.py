"""The plans of vLLM's batches whose verifies the device cuts, without vLLM."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from attn_backends.cache import PagedKV
from attn_backends.engines.vllm.ragged_plans import RaggedPlans
from attn_backends.engines.vllm.refusals import takes_ragged_verifies
from attn_backends.graphs import RecordedGraph
from attn_backends.layer import AttentionLayer
from attn_backends.registry import get_backend
from attn_backends.selection.choose import Choice, Workload
from spec_metadata import StepKind
from tests.test_vllm_plans import COLUMNS, NUM_DRAFT_TOKENS, PAGE_SIZE, Engine, assert_describes, metadata, padding


class Cutting(Engine):
    """Whose host has even shares of the rows."""

    def __init__(self) -> None:
        super().__init__(max_context=COLUMNS * PAGE_SIZE)
        self.plans = RaggedPlans(self.backend, {NUM_DRAFT_TOKENS})

    def cut(
        self, lens: list[int], committed: list[int], shares: list[int], padded: tuple[int, int] | None = None
    ) -> SimpleNamespace:
        """lens: rows of each request on the device. shares: on the host."""
        assert sum(lens) == sum(shares)
        common = self.common(lens, committed, padded)
        common.query_start_loc_cpu[: len(lens) + 1] = torch.tensor([0, *shares]).cumsum(0)
        common.max_query_len = max([NUM_DRAFT_TOKENS, *shares])
        return common


def test_a_graph_reads_the_lengths_of_the_device() -> None:
    engine, graph = Cutting(), RecordedGraph()
    plan = engine.plans.capture(engine.cut([2, 2, 1, 1], [1, 1, 1, 1], [2, 2, 1, 1]))
    graph.capture(plan.current)
    for lens, committed, shares in (
        ([3, 1, 1, 1], [4, 9, 0, 20], [2, 2, 1, 1]),
        ([1, 3], [7, 2], [2, 2]),
        ([1, 1, 3], [7, 2, 3], [2, 2, 1]),
        ([1, 2, 3], [31, 30, 29], [2, 2, 2]),  # to the end of the context
    ):
        common = engine.cut(lens, committed, shares, padded=(4, 6))
        assert engine.plans.of(common).current()[0][1].captured is metadata(plan).captured
        graph.replay()
        meta = metadata(plan)
        assert meta.step.kind is StepKind.TARGET_VERIFY
        assert meta.buffers["cu_seqlens_q"].tolist()[: len(lens) + 1] == [0, *torch.tensor(lens).cumsum(0).tolist()]
        assert_describes(meta, engine, lens, committed)


def test_verifies_beside_prompts_have_the_lengths_of_the_device_too() -> None:
    engine = Cutting()
    lens, committed, shares = [3, 1, 2, 5], [4, 31, 30, 0], [2, 2, 2, 5]
    plan = engine.plans.of(engine.cut(lens, committed, shares))
    parts = plan.current()
    assert [rows for rows, _ in parts] == [slice(0, 6), slice(6, 11)]
    assert [part.kind for _, part in parts] == [StepKind.TARGET_VERIFY, StepKind.PREFILL]
    ((verify,), _) = (made.plans for made in plan._made)
    assert verify.cu_seqlens_q.tolist()[:4] == [0, 3, 4, 6]
    assert verify.seqused_k.tolist()[:3] == [7, 32, 32]
    for rows, part in parts:
        assert part.write_slots.tolist() == engine.slots[rows].tolist()


@pytest.mark.parametrize(("lens", "committed"), [([3, 1, 2, 5], [4, 31, 30, 0]), ([1, 3, 7], [9, 29, 4])])
def test_verifies_and_prompts_are_one_step_where_that_is_not_slower(lens: list[int], committed: list[int]) -> None:
    """To the end of the context, the host's shares being others. Outputs are those of two steps."""
    engine, shares = Cutting(), [2] * (len(lens) - 1) + lens[-1:]
    layer, torch_seed = AttentionLayer(0, 4, 2, 8, 8, 0.5), torch.Generator().manual_seed(3)
    q, pages = (torch.randn(*size, generator=torch_seed) for size in ((sum(lens), 4, 8), (2, 64, PAGE_SIZE, 2, 8)))
    outputs = []
    for slower in ("packed rows have no split", ""):
        kernel = replace(engine.backend.kernel_of(StepKind.PREFILL), slower_mixed=lambda *_, slower=slower: slower)
        engine.backend.choices[StepKind.PREFILL] = Choice(kernel, layers=[layer])
        torch.manual_seed(3)
        parts = engine.plans.of(engine.cut(lens, committed, shares)).current()
        assert [rows.stop for rows, _ in parts][-1] == sum(lens)
        assert [part.kind for _, part in parts] == [StepKind.TARGET_VERIFY] * bool(slower) + [StepKind.PREFILL]
        assert [slot for rows, part in parts for slot in part.write_slots.tolist()] == engine.slots[
            : sum(lens)
        ].tolist()
        given = (engine.backend.forward(q[rows], PagedKV(*pages), part, layer).out for rows, part in parts)
        outputs.append(torch.cat(list(given)))
    assert torch.allclose(*outputs, atol=1e-6)


def test_a_batch_with_a_prompt_is_not_taken_for_a_captured_one() -> None:
    engine = Cutting()
    engine.plans.capture(engine.cut([3, 3], [1, 2], [3, 3])).current()
    ((_, part),) = engine.plans.of(engine.cut([1, 5], [3, 0], [1, 5])).current()[1:]
    assert (part.kind, part.captured) == (StepKind.PREFILL, None)


def test_a_batch_of_no_request_is_idle() -> None:
    engine = Cutting()
    ((_, part),) = engine.plans.of(engine.cut([], [], [])).current()
    assert part.kind is StepKind.IDLE


def test_a_lone_request_of_more_rows_than_a_context_is_padding() -> None:
    engine = Cutting()
    assert metadata(engine.plans.of(padding(engine, 1))).step.kind is StepKind.IDLE


def test_a_forward_of_a_draft_loop_is_not_cut() -> None:
    engine = Cutting()
    common = engine.common([1, 1], [4, 9])
    for plan in (engine.plans.of(common), engine.plans.capture(common), engine.plans.of(common)):
        meta = metadata(plan)
        assert meta.step.kind is StepKind.DECODE
        assert_describes(meta, engine, [1, 1], [4, 9])


def test_rows_that_see_one_another_are_not_cut() -> None:
    engine = Cutting()
    common = engine.common([2, 2], [4, 9])
    common.causal = False
    for plan in (engine.plans.capture(common), engine.plans.of(common)):
        assert metadata(plan).step.kind is StepKind.DRAFT_BLOCK


@pytest.mark.parametrize(("name", "taken"), [("fa3", True), ("flashinfer_mla", True), ("trtllm_mla", False)])
def test_which_backends_take_cut_verifies(name: str, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert takes_ragged_verifies(get_backend(name), torch.device("cpu"), Workload(64)) is taken
    monkeypatch.setenv("ATTN_BACKENDS_KERNEL", "flashmla")  # which no CPU runs
    assert not takes_ragged_verifies(get_backend(name), torch.device("cpu"), Workload(64))
