"""The plug-in's plans without SGLang: what its graphs read, what it hands out, and what attends on it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from attn_backends import RecordedGraph
from attn_backends.conformance.scenes import Scene
from attn_backends.engines.sglang.attended import Attended
from attn_backends.engines.sglang.layers import Layers
from attn_backends.engines.sglang.plans import Plans, forwards_of, kind_of, own_branches
from spec_metadata import StepKind
from tests.engine_batches import forward_batch, sglang_scene, sglang_steps
from tests.launches import CountsLaunches
from tests.sglang_graphs import (
    StaticBuffers,
    differing,
    each_graph,
    eager_padded,
    planned,
    plans_of,
    radix_attention,
    view_of,
)


def replayed_in_graph(scene: Scene, static: StaticBuffers) -> tuple[Plans, dict[str, Tensor]]:
    """The plan of a graph whose first nodes are the plug-in's, captured on padding and replayed on the scene."""
    plans, batch = plans_of(scene), static.batch(scene)
    meta = plans.capture(batch, static.masks)
    graph = RecordedGraph()
    graph.capture(lambda: plans.refresh(batch))
    static.fill(scene)
    view = view_of(scene)
    with CountsLaunches() as launches:
        plans.load(view)
    assert launches.num == 0, "the host has nothing to do before a replay"
    graph.replay()
    return plans, planned(meta)


@each_graph
def test_a_graph_plans_from_sglangs_buffers_what_an_eager_step_says(kind: StepKind, topk: int) -> None:
    """Padded requests idle, though SGLang says that each has a token: a draft extend's have fewer than it has rows."""
    scene = sglang_scene(kind, 1 if topk > 1 else 4, topk)
    _, found = replayed_in_graph(scene, StaticBuffers(scene))
    assert differing(found, eager_padded(scene)) == []


@each_graph
def test_padded_requests_that_are_kept_are_told(kind: StepKind, topk: int) -> None:
    """Planted: the graph takes all of the bucket for real."""
    scene = sglang_scene(kind, 1 if topk > 1 else 4, topk)
    static = StaticBuffers(scene)
    static.fill(scene)
    static.rows[len(scene.requests) :] = scene.table_rows[0]  # not the reserved row, by which they are known
    plans = plans_of(scene)
    meta = plans.capture(static.batch(scene), static.masks)
    plans.refresh(static.batch(scene))
    assert {"num_real", "seq_lens", "write_slots"} & set(differing(planned(meta), eager_padded(scene)))


@each_graph
def test_a_view_of_a_replay_is_the_step_of_its_real_requests(kind: StepKind, topk: int) -> None:
    scene = sglang_scene(kind, 1 if topk > 1 else 4, topk)
    found = sglang_steps(scene).replayed(view_of(scene), scene.width)
    expected = sglang_steps(scene).step(forward_batch(scene))
    assert found.bucket() == expected.bucket()
    assert found.seq_lens.tolist() == expected.seq_lens.tolist() == list(scene.batch.lens)
    assert found.seq_lens_cpu == expected.seq_lens_cpu == scene.batch.lens
    assert found.flat_slots().tolist() == expected.flat_slots().tolist()
    assert found.paging.static_input().tolist() == expected.paging.static_input().tolist()


def test_a_replay_of_an_idle_rank_is_idle() -> None:
    scene = sglang_scene(StepKind.DECODE)
    view = view_of(scene)
    view.actual_forward_mode, view.num_padding = SimpleNamespace(name="IDLE"), view.batch_size
    assert sglang_steps(scene).replayed(view, 1).kind is StepKind.IDLE


@each_graph
def test_the_kind_of_a_captured_batch(kind: StepKind, topk: int) -> None:
    assert kind_of(forward_batch(sglang_scene(kind, 1, topk))) is kind


def test_a_branch_sees_its_own_tokens_and_each_forward_has_its_metadata() -> None:
    scene = sglang_scene(StepKind.DRAFT_DECODE, 1, topk=3)
    plans = plans_of(scene)
    meta = plans.eager(forward_batch(scene))
    forwards = forwards_of(meta)
    assert [forward.forward for forward in forwards] == list(range(meta.step.num_forwards))
    assert own_branches(meta.step, 1)[0].tolist() == [[0, 0], [1, 1], [2, 2]]
    slots = torch.tensor(scene.write_order()).view(len(scene.requests), 3, -1)
    for i, forward in enumerate(forwards):
        assert forward.tree is not None
        for request in range(len(scene.requests)):
            for branch in range(3):
                seen = forward.tree.slots[request][forward.tree.mask[request, branch]]
                assert sorted(seen.tolist()) == sorted(slots[request, branch, : i + 1].tolist())


@each_graph
def test_a_kernel_that_plans_on_the_host_has_its_lengths_copied(
    kind: StepKind, topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the replay; the graph plans the rest."""
    monkeypatch.setattr(Plans, "plans_on_host", lambda plans, kind: True)
    scene = sglang_scene(kind, 1 if topk > 1 else 4, topk)
    plans, batch = plans_of(scene), StaticBuffers(scene).batch(scene)
    meta = plans.capture(batch, None if topk == 1 else StaticBuffers(scene).masks)
    graph = RecordedGraph()
    graph.capture(lambda: plans.refresh(batch))
    plans.load(view_of(scene))
    graph.replay()
    assert plans.needs_host_lens
    assert differing(planned(meta), eager_padded(scene)) == []


def test_rows_that_pad_a_batch_are_not_stored_and_give_zeros() -> None:
    scene = sglang_scene(StepKind.TARGET_VERIFY)
    outputs, pools = [], []
    for padding in (0, 3):
        plans = plans_of(scene)
        attended = Attended(plans.backend, Layers(plans.facts.pool, 4, plans.facts.format))
        attended.meta = plans.eager(forward_batch(scene)).at()
        given = radix_attention(scene)
        rows = scene.width * len(scene.requests)
        q, k, v = (
            torch.randn(rows + 3, heads * dim, generator=torch.Generator().manual_seed(1))[: rows + padding]
            for heads, dim in ((4, given.head_dim), (2, given.head_dim), (2, given.v_head_dim))
        )
        outputs.append(attended(q, k, v, given, True, {}))
        pools.append(torch.cat((plans.facts.pool.k, plans.facts.pool.v), -1))
    assert torch.equal(outputs[1], torch.cat((outputs[0], outputs[0].new_zeros(3, outputs[0].shape[1]))))
    assert torch.equal(*pools)
    assert pools[0].any()
