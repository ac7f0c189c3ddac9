"""SGLang's DSPARK without SGLang: what its runners are, and graphs of verifies whose rows the device divides."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends import RecordedGraph, get_backend
from attn_backends.adapters.sglang import BlockDraftBatches, ForwardBatches
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.conformance.scenes import Scene
from attn_backends.conformance.sizes import MAX_BS
from attn_backends.engines.sglang.facts import RunnerFacts
from attn_backends.engines.sglang.plans import Plans
from attn_backends.engines.sglang.refusals import model_reasons, server_reasons
from attn_backends.planning.metadata import Metadata
from attn_backends.selection.choose import Choice
from spec_metadata import StepKind, TokenBucket
from tests.engine_batches import sglang_steps
from tests.launches import CountsLaunches
from tests.sglang_graphs import differing, longer, planned, plans_of
from tests.test_adapter_ragged import ragged_batch, scene_of
from tests.test_sglang_blocks import BIDIRECTIONAL
from tests.test_sglang_refusals import LATENT, execution, layer, parallel, runner, spec

VERIFY = StepKind.TARGET_VERIFY
WIDTHS = [(2, 4, 1), (1, 1, 1), (4, 1, 3), (1, 3, 2)]


def facts_of(layers: list[Any], *, compact: bool = True, width: int = 3, **fields: Any) -> RunnerFacts:
    given = runner(**{"page_size": 1, "decode_num_tokens_per_req": lambda: width} | fields)
    return RunnerFacts.of(given, spec("DSPARK", speculative_num_steps=1), layers, mixes=False, compact=compact)


@pytest.mark.parametrize("width", [3, 4])
def test_a_block_is_as_wide_as_sglang_says_and_a_verify_has_all_drafted_tokens(width: int) -> None:
    """Its first row drafts too, but where the draft's folder says that it does not (`sample_from_anchor`)."""
    draft = facts_of([layer(attn_type=BIDIRECTIONAL)], is_draft_worker=True, width=width)
    target = facts_of([layer()])
    assert (draft.kinds, type(draft.batches)) == ((StepKind.DRAFT_BLOCK,), BlockDraftBatches)
    assert (target.kinds, type(target.batches)) == ((StepKind.PREFILL, VERIFY), ForwardBatches)
    assert draft.capacity.bucket(StepKind.DRAFT_BLOCK, 2).width == width
    assert target.capacity.bucket(VERIFY, 2).width == 4
    assert {facts.capacity.max_tokens for facts in (draft, target)} == {256}, "a row of the table"


def test_verifies_are_ragged_in_compact_mode_of_dspark_alone() -> None:
    assert facts_of([layer()]).is_ragged
    assert not facts_of([layer()], compact=False).is_ragged
    of_dflash = RunnerFacts.of(runner(page_size=1), spec("DFLASH"), [layer()], mixes=False, compact=True)
    assert not of_dflash.is_ragged


@pytest.mark.parametrize("is_draft", [False, True])
def test_a_server_with_dspark_is_served(is_draft: bool) -> None:
    given = runner(is_draft_worker=is_draft)
    assert list(server_reasons(given, spec("DSPARK"), execution(), parallel())) == []


def ragged_backend(facts: RunnerFacts, name: str = "fa3", *, packed_graph: bool = True) -> Any:
    backend = get_backend(name)(facts.capacity, facts.batches.geometry, kernel="torch")
    if not packed_graph:
        kernel = backend.kernel_of(VERIFY)
        able = {each: replace(found, packed_graph=False) for each, found in kernel.capabilities.items()}
        backend.choices |= {VERIFY: Choice(replace(kernel, capabilities=able))}
    return backend


@pytest.mark.parametrize("packed_graph", [False, True])
@pytest.mark.parametrize("compact", [False, True])
def test_a_kernel_of_one_width_is_refused_in_compact_mode_when_the_server_starts(
    packed_graph: bool, compact: bool
) -> None:
    facts = facts_of([layer()], compact=compact)
    backend = ragged_backend(facts, packed_graph=packed_graph)
    assert Plans(facts, backend).takes_ragged_verifies is packed_graph
    found = list(model_reasons(facts, backend))
    if packed_graph or not compact:
        assert found == []
        return
    (reason,) = found
    assert reason.startswith("target_verify by kernel torch: it takes no rows that the device divides among requests")
    assert "SGLANG_RAGGED_VERIFY_MODE=compact" in reason


@pytest.mark.parametrize(("name", "taken"), [("flashinfer_mla", True), ("trtllm_mla", False)])
def test_which_backends_of_mla_take_compact_mode(name: str, taken: bool) -> None:
    facts = facts_of([layer(**LATENT)], is_mla=True, page_size=64)
    backend = ragged_backend(facts, name)
    assert Plans(facts, backend).takes_ragged_verifies is taken
    assert (list(model_reasons(facts, backend)) == []) is taken


def test_a_draft_verifies_nothing() -> None:
    facts = facts_of([layer(attn_type=BIDIRECTIONAL)], is_draft_worker=True)
    assert not Plans(facts, ragged_backend(facts)).takes_ragged_verifies


class RaggedBuffers:
    """What SGLang captures ragged verifies of so many slots on, and fills before a replay: a layout for each number of
    rows, whose padded requests have what the real ones leave, of as many as one request may have.
    """

    def __init__(self, scene: Scene, slots: int = MAX_BS) -> None:
        self.scene, self.slots, self.reserved = scene, slots, scene.world.geometry.reserved_row
        self.seq_lens, self.rows = torch.ones(slots, dtype=torch.int64), torch.full((slots,), self.reserved)
        self.layouts: dict[int, Any] = {}

    def batch(self, num_rows: int) -> SimpleNamespace:
        """What is captured."""
        lens = torch.full((self.slots,), 1, dtype=torch.int32)
        layout = self.layouts.setdefault(num_rows, SimpleNamespace(verify_lens=lens, graph_num_tokens=num_rows))
        batch = self.live((1, 1, 1), num_rows)
        batch.spec_info.ragged_verify_layout = layout
        batch.batch_size, batch.seq_lens, batch.req_pool_indices = self.slots, self.seq_lens, self.rows
        batch.seq_lens_cpu = batch.out_cache_loc = None
        return batch

    def live(self, widths: tuple[int, ...], num_rows: int) -> SimpleNamespace:
        """What the worker hands over."""
        batch = ragged_batch(self.scene)
        lens = torch.tensor(widths, dtype=torch.int32)
        batch.spec_info.ragged_verify_layout = SimpleNamespace(verify_lens=lens, graph_num_tokens=num_rows)
        return batch

    def fill(self, widths: tuple[int, ...], num_rows: int) -> SimpleNamespace:
        """Stages a batch, and returns the view of its replay."""
        live, padding = self.live(widths, num_rows), self.slots - len(widths)
        base, rest = divmod(num_rows - sum(widths), padding)
        padded = torch.tensor([*widths, *[base + 1] * rest, *[base] * (padding - rest)])
        self.layouts[num_rows].verify_lens.copy_(padded.clamp(max=self.scene.most_rows))
        self.seq_lens.copy_(longer(live.seq_lens, padding))
        self.rows.copy_(longer(live.req_pool_indices, padding, self.reserved))
        view = SimpleNamespace(**vars(live))
        view.batch_size, view.num_padding, view.actual_forward_mode = self.slots, padding, live.forward_mode
        return view


def copied(scene: Scene, num_rows: int, *replays: tuple[int, ...]) -> dict[str, Tensor]:
    """What batches of these widths plan one after the other, each copied as an eager step."""
    steps = [sglang_steps(scene).step(RaggedBuffers(scene).live(widths, num_rows)) for widths in replays]
    backend = FA3Backend(scene.world.capacity, scene.world.geometry, kernel="torch")
    meta = backend.capture(TokenBucket(VERIFY, MAX_BS, num_rows), steps[0].paging)
    for step in steps:
        backend.replay(meta, step)
    return planned(meta)


def captured_in_graph(plans: Plans, static: RaggedBuffers, num_rows: int) -> tuple[Metadata, RecordedGraph]:
    batch, graph = static.batch(num_rows), RecordedGraph()
    meta = plans.capture(batch, None)
    graph.capture(lambda: plans.refresh(batch))
    return meta, graph


def test_graphs_of_as_many_requests_and_other_rows_read_the_widths_of_each_replay() -> None:
    """Padded requests idle, whatever rows SGLang gives them."""
    scene = scene_of(VERIFY)
    static, plans = RaggedBuffers(scene), plans_of(scene)
    graphs = {num_rows: captured_in_graph(plans, static, num_rows) for num_rows in (8, 12, 20)}
    for i, widths in enumerate(WIDTHS):
        for num_rows, (meta, graph) in graphs.items():
            view = static.fill(widths, num_rows)
            with CountsLaunches() as launches:
                assert plans.load(view) is meta
            assert launches.num == 0, "the host has nothing to do before a replay"
            graph.replay()
            assert differing(planned(meta), copied(scene, num_rows, *WIDTHS[: i + 1])) == []
            assert meta.buffers["cu_seqlens_q"].tolist()[:4] == torch.tensor([0, *widths]).cumsum(0).tolist()


def test_padded_requests_of_a_ragged_graph_that_are_kept_are_told() -> None:
    """Planted: the graph takes all of the bucket for real."""
    scene = scene_of(VERIFY)
    static, plans = RaggedBuffers(scene), plans_of(scene)
    meta, graph = captured_in_graph(plans, static, 12)
    static.fill((2, 4, 1), 12)
    static.rows[3:] = scene.table_rows[0]
    graph.replay()
    told = {"num_real", "seq_lens", "write_slots"} & set(differing(planned(meta), copied(scene, 12, (2, 4, 1))))
    assert told


def test_widths_of_the_capture_that_stay_are_told() -> None:
    """Planted: a replay whose layout was not staged."""
    scene = scene_of(VERIFY)
    static, plans = RaggedBuffers(scene), plans_of(scene)
    meta, graph = captured_in_graph(plans, static, 12)
    static.fill((2, 4, 1), 12)
    static.layouts[12].verify_lens.fill_(2)
    graph.replay()
    assert "cu_seqlens_q" in differing(planned(meta), copied(scene, 12, (2, 4, 1)))


def test_a_batch_past_the_captured_rows_is_verified_at_one_width() -> None:
    """SGLang leaves the layout out, and runs it eagerly."""
    scene = scene_of(VERIFY)
    batch = RaggedBuffers(scene).live((1, 1, 1), 12)
    batch.spec_info.ragged_verify_layout = None
    batch.out_cache_loc = torch.arange(1, 1 + 3 * scene.most_rows)
    (meta,) = plans_of(scene).eager(batch)
    assert (meta.step.width, meta.step.num_tokens) == (scene.most_rows, 3 * scene.most_rows)
