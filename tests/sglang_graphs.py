"""SGLang's graphs without SGLang: static buffers, padded as it pads them, and its views of a replay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.backends.fa3 import FA3Backend
from attn_backends.cache import CacheFormat
from attn_backends.conformance.scenes import Scene
from attn_backends.conformance.sizes import MAX_BS
from attn_backends.engines.sglang.plans import Plans
from attn_backends.planning.metadata import Metadata
from spec_metadata import StepKind
from tests.engine_batches import MODES, forward_batch, sglang_steps

GRAPHS = [
    (StepKind.DECODE, 1),
    (StepKind.DRAFT_DECODE, 1),
    (StepKind.DRAFT_DECODE, 3),
    (StepKind.TARGET_VERIFY, 1),
    (StepKind.TARGET_VERIFY, 3),
    (StepKind.DRAFT_EXTEND, 1),
]
each_with_lens = pytest.mark.parametrize(("kind", "topk"), GRAPHS, ids=str)
"""Those of which SGLang has exact lengths on the host."""
each_graph = pytest.mark.parametrize(("kind", "topk"), [*GRAPHS, (StepKind.DRAFT_BLOCK, 1)], ids=str)


class Pool:
    """A KV pool of SGLang's, [slots, heads, dim]."""

    def __init__(self, scene: Scene) -> None:
        layer, num_slots = scene.world.layer, scene.world.geometry.num_slots
        self.k = torch.zeros(num_slots, layer.num_kv_heads, layer.head_dim)
        self.v = torch.zeros(num_slots, layer.num_kv_heads, layer.v_head_dim)

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        return self.k, self.v


def radix_attention(scene: Scene) -> Any:
    """The scene's layer as SGLang has it."""
    layer = scene.world.layer
    return SimpleNamespace(
        layer_id=0,
        tp_q_head_num=layer.num_heads,
        tp_k_head_num=layer.num_kv_heads,
        tp_v_head_num=layer.num_kv_heads,
        head_dim=layer.head_dim,
        qk_head_dim=layer.head_dim,
        v_head_dim=layer.v_head_dim,
        scaling=layer.scale,
        sliding_window_size=-1,
        k_scale_float=None,
        v_scale_float=None,
    )


def plans_of(scene: Scene) -> Plans:
    world = scene.world
    facts: Any = SimpleNamespace(
        batches=sglang_steps(scene),
        capacity=world.capacity,
        kinds=(scene.batch.kind,),
        mixes=False,
        device=torch.device("cpu"),
        format=CacheFormat.KV,
        pool=Pool(scene),
        max_context=world.capacity.max_context,
    )
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
