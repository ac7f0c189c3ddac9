"""The plug-in's plans without SGLang: its graphs' static buffers, padded as it pads them, and its views of a replay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends import RecordedGraph
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.conformance.scenes import Scene
from attn_backends.conformance.sizes import MAX_BS
from attn_backends.engines.sglang.plans import Plans, forwards_of, kind_of, own_branches
from attn_backends.planning.metadata import Metadata
from spec_metadata import StepKind
from tests.engine_batches import MODES, forward_batch, sglang_scene, sglang_steps
from tests.launches import CountsLaunches

GRAPHS = [
    (StepKind.DECODE, 1),
    (StepKind.DRAFT_DECODE, 1),
    (StepKind.DRAFT_DECODE, 3),
    (StepKind.TARGET_VERIFY, 1),
    (StepKind.TARGET_VERIFY, 3),
    (StepKind.DRAFT_EXTEND, 1),
]
each_graph = pytest.mark.parametrize(("kind", "topk"), GRAPHS, ids=lambda value: str(value))


def plans_of(scene: Scene) -> Plans:
    world = scene.world
    facts: Any = SimpleNamespace(batches=sglang_steps(scene), capacity=world.capacity, kinds=(scene.batch.kind,))
    return Plans(facts, FA3Backend(world.capacity, world.geometry, kernel="torch"))


class StaticBuffers:
    """What SGLang captures a batch of MAX_BS requests on, and fills before a replay: lengths of padded requests are 1,
    their row of the table the reserved one (0 in SGLang, another in the scene) and their slots 0; masks of trees lie
    behind each other.
    """

    def __init__(self, scene: Scene) -> None:
        self.bs, self.width = MAX_BS, scene.width
        self.reserved = scene.world.geometry.reserved_row
        self.seq_lens, self.rows = torch.ones(self.bs, dtype=torch.int64), torch.full((self.bs,), self.reserved)
        self.slots = torch.zeros(self.bs * len(scene.write_order()) // len(scene.requests), dtype=torch.int64)
        self.masks = torch.zeros(self.bs * self.width**2, dtype=torch.bool)

    def batch(self, scene: Scene) -> Any:
        fields = {"req_pool_indices": self.rows, "seq_lens": self.seq_lens, "out_cache_loc": self.slots}
        return forward_batch(scene, batch_size=self.bs, seq_lens_cpu=None, **fields)

    def fill(self, scene: Scene) -> None:
        real = forward_batch(scene)
        for static, given, padding in (
            (self.seq_lens, real.seq_lens, 1),
            (self.rows, real.req_pool_indices, self.reserved),
            (self.slots, real.out_cache_loc, 0),
        ):
            static.fill_(padding)
            static[: len(given)] = given
        if scene.is_tree and scene.batch.kind is StepKind.TARGET_VERIFY:
            self.masks[: scene.tree_mask().numel()] = scene.tree_mask().flatten()


def view_of(scene: Scene, num_padding: int = 2) -> SimpleNamespace:
    """What SGLang hands over before a replay; of a draft extend uncut buffers, and nothing that counts the padding."""
    batch, extends = forward_batch(scene), scene.batch.kind is StepKind.DRAFT_EXTEND
    padded = {name: longer(getattr(batch, name), num_padding) for name in ("seq_lens", "seq_lens_cpu")}
    counted = {} if extends else {"num_padding": num_padding, "actual_forward_mode": batch.forward_mode}
    return SimpleNamespace(
        forward_mode=MODES[scene.batch.kind],
        batch_size=batch.batch_size + num_padding,
        input_ids=torch.zeros(batch.batch_size * scene.width),
        req_pool_indices=longer(batch.req_pool_indices, num_padding, 0),
        out_cache_loc=batch.out_cache_loc,
        out_cache_loc_virtual=None,
        spec_info=batch.spec_info,
        **padded,
        **counted,
    )


def longer(tensor: Tensor, by: int, value: int = 1) -> Tensor:
    return torch.cat((tensor, tensor.new_full((by,), value)))


def planned(meta: Metadata) -> dict[str, Tensor]:
    """Everything that a graph reads, padded requests included."""
    return {name: buffer.clone() for name, buffer in meta.buffers.items()}


def eager_padded(scene: Scene) -> dict[str, Tensor]:
    """What the same batch plans in such a graph when it is copied as an eager step."""
    plans = plans_of(scene)
    step = plans.facts.batches.step(forward_batch(scene))
    meta = plans.backend.capture(step.bucket(MAX_BS), step.paging)
    plans.backend.replay(meta, step)
    return planned(meta)


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    return [name for name, buffer in expected.items() if not torch.equal(found[name], buffer)]


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
