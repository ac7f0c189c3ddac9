"""SGLang's verifies and draft extends of one row, of no draft, and of another number of rows for each request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_backends.adapters import sglang
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.cache import CacheFormat
from attn_backends.conformance.comparisons import compare_memory, compare_outputs
from attn_backends.conformance.exercise import run_forwards
from attn_backends.conformance.scenes import Batch, Scene
from attn_backends.conformance.worlds import Setup, World
from spec_metadata import BoundedQuery, PackedQuery, Step, StepKind
from tests.engine_batches import LENS, Mode, forward_batch, sglang_scene, sglang_steps
from tests.sglang_graphs import StaticBuffers, differing, eager_padded, longer, planned, plans_of

NO_DRAFT = {
    Mode.TARGET_VERIFY: (0, SimpleNamespace(draft_token_num=1, topk=1)),
    Mode.DRAFT_EXTEND_V2: (1, None),
}
"""Of each mode the rows that SGLang's lengths count, and its spec_info."""


def of_no_draft(scene: Scene, mode: Mode, **fields: Any) -> SimpleNamespace:
    counted, spec = NO_DRAFT[mode]
    lens = torch.tensor(scene.batch.lens)
    extends = {"extend_prefix_lens": lens, "extend_seq_lens_cpu": [1] * len(lens)} if counted else {}
    given = {"seq_lens": lens + counted, "seq_lens_cpu": lens + counted, "spec_info": spec, **extends, **fields}
    return forward_batch(scene, forward_mode=mode, **given)


@pytest.mark.parametrize("mode", NO_DRAFT)
def test_a_verify_and_an_extend_of_no_draft_are_decodes(mode: Mode) -> None:
    scene = sglang_scene(StepKind.DECODE)
    step = sglang_steps(scene).step(of_no_draft(scene, mode))
    assert step.kind is StepKind.DECODE
    assert step.seq_lens_cpu == scene.batch.lens
    assert step.seq_lens.tolist() == list(scene.batch.lens)
    assert step.flat_slots().tolist() == scene.write_order()


@pytest.mark.parametrize("mode", NO_DRAFT)
def test_so_they_are_in_graphs(mode: Mode) -> None:
    scene = sglang_scene(StepKind.DECODE)
    static, plans = StaticBuffers(scene), plans_of(scene)
    batch = static.batch(scene)
    batch.forward_mode, batch.spec_info = mode, NO_DRAFT[mode][1]
    meta = plans.capture(batch, None)
    static.fill(scene)
    static.seq_lens[: len(LENS)] = of_no_draft(scene, mode).seq_lens
    plans.refresh(batch)
    assert differing(planned(meta), eager_padded(scene)) == []


def scene_of(kind: StepKind, page_size: int = 4) -> Scene:
    """Rows of another number for each request."""
    return Scene(World(Setup(FA3Backend, CacheFormat.KV, page_size)), Batch(kind, LENS, widths=(2, 4, 1)), seed=6)


def compute(scene: Scene, step: Step) -> None:
    """Against the oracle: outputs, and what is written."""
    before, inputs = scene.reset_memory(), scene.inputs()
    outputs = run_forwards(scene.world, scene.world.backend.init_forward_metadata(step), inputs)
    compare_memory(scene, before, padded=True)
    compare_outputs(scene, inputs, outputs)


def ragged_batch(scene: Scene, num_padding: int = 0) -> SimpleNamespace:
    """As DSpark's worker makes it: packed slots, and lengths on the host that count the rows. num_padding: requests as
    a graph has them behind the others.
    """
    lens, widths = torch.tensor(LENS), torch.tensor(scene.widths)
    rows, reserved = torch.tensor(scene.table_rows), scene.world.geometry.reserved_row
    layout = SimpleNamespace(verify_lens=longer(widths.int(), num_padding), graph_num_tokens=scene.batch.bound)
    spec = SimpleNamespace(draft_token_num=scene.most_rows, topk=1, live_seq_lens_cpu=lens, ragged_verify_layout=layout)
    given = {
        "forward_mode": Mode.TARGET_VERIFY,
        "batch_size": len(lens) + num_padding,
        "req_pool_indices": longer(rows, num_padding, reserved),
        "seq_lens": longer(lens, num_padding),
        "seq_lens_cpu": lens + widths,
        "out_cache_loc": torch.tensor(scene.write_order()),
        "spec_info": spec,
        "_original_batch_size": None,
        "_original_forward_mode": None,
    }
    return SimpleNamespace(**dict.fromkeys(sglang.REFUSED), **given)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_ragged_verify_has_the_widths_of_the_device(page_size: int) -> None:
    scene = scene_of(StepKind.TARGET_VERIFY, page_size)
    step = sglang_steps(scene).step(ragged_batch(scene))
    assert isinstance(step.query, BoundedQuery)
    assert (step.query.widths.tolist(), step.num_tokens) == (list(scene.widths), scene.batch.bound)
    assert step.seq_lens_cpu == LENS, "what is committed, without the rows"
    compute(scene, step)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_draft_extend_may_have_packed_rows(page_size: int) -> None:
    scene = scene_of(StepKind.DRAFT_EXTEND, page_size)
    step = sglang_steps(scene).step(forward_batch(scene))
    assert isinstance(step.query, PackedQuery)
    assert step.query.lens_cpu == scene.widths
    compute(scene, step)


def test_a_graph_reads_the_widths_of_each_replay() -> None:
    scene = scene_of(StepKind.TARGET_VERIFY)
    batch, steps, backend = ragged_batch(scene, 2), sglang_steps(scene), scene.world.backend
    bucket = scene.world.capacity.ragged_bucket(StepKind.TARGET_VERIFY, 5, scene.batch.bound)
    batch.spec_info.ragged_verify_layout.verify_lens.fill_(1)  # at capture
    meta = backend.capture(bucket, *steps.bound(batch))
    batch.spec_info.ragged_verify_layout.verify_lens[:3] = torch.tensor(scene.widths)
    backend.refresh(meta)
    copied = FA3Backend(scene.world.capacity, scene.world.geometry, kernel="torch")
    step = steps.step(ragged_batch(scene))
    expected = copied.capture(bucket, step.paging)
    copied.replay(expected, step)
    assert differing(planned(meta), planned(expected)) == []
    assert meta.buffers["cu_seqlens_q"].tolist()[:4] == [0, 2, 6, 7]
