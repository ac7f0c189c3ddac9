"""The plug-in's plans without SGLang: what its graphs read, what it hands out, and what attends on it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_backends import RecordedGraph
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.cache import CacheFormat, KeyValues
from attn_backends.conformance.scenes import Batch, Scene
from attn_backends.conformance.worlds import Setup, World
from attn_backends.engines.sglang.attended import Attended
from attn_backends.engines.sglang.layers import Layers
from attn_backends.engines.sglang.plans import Plans, forwards_of, own_branches
from attn_backends.layer import AttentionLayer
from attn_backends.selection.choose import Choice
from spec_metadata import PackedQuery, StepKind
from tests.checks import check_memory
from tests.engine_batches import data_parallel_padded, forward_batch, sglang_scene, sglang_steps
from tests.launches import CountsLaunches
from tests.sglang_graphs import (
    StaticBuffers,
    differing,
    each_graph,
    each_with_lens,
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


@each_with_lens
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
    scene = sglang_scene(kind, 1, topk)
    assert plans_of(scene).kind_of(forward_batch(scene)) is kind


def test_a_branch_sees_its_own_tokens_and_each_forward_has_its_metadata() -> None:
    scene = sglang_scene(StepKind.DRAFT_DECODE, 1, topk=3)
    plans = plans_of(scene)
    (meta,) = plans.eager(forward_batch(scene))
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


@each_with_lens
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
        attended.parts = [part.at() for part in plans.eager(forward_batch(scene))]
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


LENS, WIDTHS = (0, 5, 8, 3), (6, 3, 1, 1)
LATE = "packed rows have no split"


def mixed_scene(lens: tuple[int, ...] = LENS, widths: tuple[int, ...] = WIDTHS) -> Scene:
    batch = Batch(StepKind.PREFILL, lens, widths=widths)
    return Scene(World(Setup(FA3Backend, CacheFormat.KV, 4)), batch, seed=6)


def plans_with(scene: Scene, slower: Callable[[AttentionLayer, int, int], str]) -> Plans:
    """The plans of a scene on its own memory, with what a kernel says of mixed batches."""
    plans, layer = plans_of(scene), scene.world.layer
    kernel = replace(plans.backend.kernel_of(StepKind.PREFILL), slower_mixed=slower)
    plans.backend.choices[StepKind.PREFILL] = Choice(kernel, layers=[layer])
    plans.facts.mixes = True
    planes = scene.world.memory.flatten(0, 1)
    plans.facts.pool.k, plans.facts.pool.v = planes[:, 0], planes[:, 1, :, : layer.v_head_dim]
    return plans


@pytest.mark.parametrize("padding", [0, 7], ids=["alone", "data_parallel"])
@pytest.mark.parametrize(("slower", "kinds"), [(LATE, ["prefill", "decode"]), ("", ["prefill"])])
def test_a_mixed_batch_in_one_step_or_two_is_the_attention_of_its_tokens(
    slower: str, kinds: list[str], padding: int
) -> None:
    scene = mixed_scene()
    plans, batch = plans_with(scene, lambda *_: slower), forward_batch(scene)
    parts = plans.eager(data_parallel_padded(batch) if padding else batch)
    attended = Attended(plans.backend, Layers(plans.facts.pool, 4, plans.facts.format))
    attended.parts = [part.at() for part in parts]
    assert [part.kind for part in attended.parts] == kinds
    before, (given,) = scene.reset_memory(), scene.inputs()
    assert isinstance(given.stored, KeyValues)
    rows = (pad(each.flatten(1), (0, 0, 0, padding)) for each in (given.q, given.stored.k, given.stored.v))
    out = attended(*rows, radix_attention(scene), True, {})
    expected = scene.expected_output([given], 0)[0].flatten(1)
    torch.testing.assert_close(out.double(), pad(expected, (0, 0, 0, padding)), atol=1e-6, rtol=1e-6)
    check_memory(scene, before)


@pytest.mark.parametrize("has_host_lens", [True, False])
def test_each_step_of_a_mixed_batch_has_the_lengths_of_its_own_requests(has_host_lens: bool) -> None:
    scene = mixed_scene()
    batch = forward_batch(scene, **({} if has_host_lens else {"seq_lens_cpu": None}))
    prompts, running = (part.step for part in plans_with(scene, lambda *_: LATE).eager(batch))
    assert (prompts.seq_lens.tolist(), running.seq_lens.tolist()) == ([0, 5], [8, 3])
    assert (prompts.seq_lens_cpu, running.seq_lens_cpu) == (((0, 5), (8, 3)) if has_host_lens else (None, None))
    assert (prompts.max_committed, running.max_committed) == ((5, 8) if has_host_lens else (None, None))


def test_two_steps_of_a_mixed_batch_are_views_of_the_one_that_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lengths are sent to the device once."""
    sent, make = list[object](), PackedQuery.of
    monkeypatch.setattr(PackedQuery, "of", lambda *given: sent.append(given) or make(*given))
    scene = mixed_scene()
    assert len(plans_with(scene, lambda *_: LATE).eager(forward_batch(scene))) == 2
    assert len(sent) == 1


def test_the_prefills_kernel_is_asked_and_the_log_says_its_reason_once(caplog: pytest.LogCaptureFixture) -> None:
    scene, asked = mixed_scene(), list[tuple[int, int]]()
    plans = plans_with(scene, lambda layer, *sizes: asked.append(sizes) or LATE)
    with caplog.at_level(logging.INFO, "attn_backends.engines.sglang.plans"):
        for _ in range(2):
            plans.eager(forward_batch(scene))
    assert asked == [(2, 9)] * 2
    assert caplog.messages == [f"fa3 attends prompts and 2 running requests in two steps: {LATE}"]


@pytest.mark.parametrize("widths", [(6, 3, 2, 4), (1, 1, 6, 3), (1, 1, 1, 1)], ids=str)
def test_a_batch_of_prompts_or_of_running_requests_alone_is_one_step(widths: tuple[int, ...]) -> None:
    scene = mixed_scene(widths=widths)
    (only,) = plans_with(scene, lambda *_: LATE).eager(forward_batch(scene))
    assert (only.step.kind, only.step.bs) == (StepKind.PREFILL, 4)


def test_a_server_without_mixed_batches_has_one_step_for_prompts_of_one_row() -> None:
    scene = mixed_scene()
    plans = plans_with(scene, lambda *_: LATE)
    plans.facts.mixes = False
    (only,) = plans.eager(forward_batch(scene))
    assert (only.step.kind, only.step.bs) == (StepKind.PREFILL, 4)
