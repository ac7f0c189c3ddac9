"""The plug-in's classes of SGLang through both halves of its graphs, which its CPU engine does not capture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from attn_backends import RecordedGraph
from attn_backends.conformance.sizes import MAX_BS
from attn_backends.engines.sglang import backends
from attn_backends.engines.sglang.backends import DraftLoop, EngineBackend
from spec_metadata import StepKind
from tests.engine_batches import sglang_scene
from tests.sglang_graphs import StaticBuffers, differing, each_graph, eager_padded, planned, plans_of, view_of
from tests.test_adapter_ragged import scene_of
from tests.test_sglang_ragged import RaggedBuffers, copied
from tests.test_sglang_refusals import execution, layer, parallel, runner, spec


def backend_of(kind: StepKind, plans: Any) -> Any:
    runner = SimpleNamespace(
        is_draft_worker=kind in (StepKind.DRAFT_DECODE, StepKind.DRAFT_EXTEND, StepKind.DRAFT_BLOCK),
        token_to_kv_pool=plans.facts.pool,
        req_to_token_pool=None,
    )
    if kind is StepKind.DRAFT_DECODE:
        return DraftLoop(runner, plans, plans.facts.capacity.num_steps)
    return EngineBackend(runner, plans)


@each_graph
def test_a_replay_plans_in_the_graph_alone(kind, topk):
    scene = sglang_scene(kind, 1 if topk > 1 else 4, topk)
    plans, static = plans_of(scene), StaticBuffers(scene)
    backend = backend_of(kind, plans)
    backend.init_cuda_graph_state(MAX_BS, MAX_BS * scene.width)
    if kind is StepKind.TARGET_VERIFY:
        assert backend.verify_mask.mode is TreeMaskMode.QLEN_ONLY
        assert backend.verify_mask.is_read is (topk > 1)
        assert backend.verify_mask.fits(MAX_BS)
        static.masks = backend.verify_mask.buffer
    batch = static.batch(scene)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    graph = RecordedGraph()
    graph.capture(lambda: backend.init_forward_metadata_in_graph(batch))
    backend.init_forward_metadata_out_graph(view_of(scene))
    static.fill(scene)  # after the host's half, as SGLang's second stream may
    if kind is StepKind.TARGET_VERIFY:
        backend.update_verify_buffers_to_fill_after_draft(None, MAX_BS)
    graph.replay()
    children = backend.attn_backends if kind is StepKind.DRAFT_DECODE else [backend]
    assert [child.attended.parts[0].forward for child in children] == list(range(len(children)))
    assert differing(planned(plans.load(view_of(scene))), eager_padded(scene)) == []


def test_ragged_verifies_are_staged_by_sglang_for_as_many_slots():
    """Its runner's own layouts, at capture and padded."""
    scene = scene_of(StepKind.TARGET_VERIFY)
    plans, static = plans_of(scene), RaggedBuffers(scene, 5)
    backend = backend_of(StepKind.TARGET_VERIFY, plans)
    assert backend.supports_ragged_verify_graph
    fields = {"max_bs": 5, "captured_req_width": 4, "capture_num_tokens": [8, 20], "device": "cpu"}
    its = SimpleNamespace(ragged_verify_mode=True, _captured_ragged_layouts={}, **fields)
    its._ragged_capture_slots = lambda num_rows: DecodeCudaGraphRunner._ragged_capture_slots(its, num_rows)
    graphs = {}
    for num_rows in (20, 8):
        static.layouts[num_rows] = DecodeCudaGraphRunner._capture_ragged_verify_layout(its, num_rows)
        batch, graphs[num_rows] = static.batch(num_rows), RecordedGraph()
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        graphs[num_rows].capture(lambda batch=batch: backend.init_forward_metadata_in_graph(batch))
    for num_rows, widths in ((8, (2, 4, 1)), (20, (1, 1, 3)), (8, (1, 2, 1))):
        view = static.fill(widths, num_rows)
        live = RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=widths, device="cpu", grid=[num_rows])
        static.layouts[num_rows].verify_lens.zero_()
        DecodeCudaGraphRunner._stage_ragged_verify_layout(its, live, num_rows)
        view.spec_info.ragged_verify_layout = live
        backend.init_forward_metadata_out_graph(view)
        graphs[num_rows].replay()
        meta = plans.load(view)
        assert meta.buffers["cu_seqlens_q"].tolist()[:4] == torch.tensor([0, *widths]).cumsum(0).tolist()
        expected = copied(scene, num_rows, widths)
        names = set(differing(planned(meta), expected)) - {"page_table"}  # what was there before stays behind its end
        assert names == set()


def test_a_runner_is_told_of_compact_mode(monkeypatch):
    schedule = SimpleNamespace(enable_mixed_chunk=False)
    options = {"spec": spec("DSPARK"), "exec": execution(), "parallel": parallel(), "schedule": schedule}
    for name, value in options.items():
        monkeypatch.setattr(backends.api, f"get_{name}", lambda value=value: value)
    monkeypatch.setattr(backends, "_layers", lambda runner: [layer()])
    for mode in ("static", "cap-accept", "compact"):
        monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", mode)
        facts = backends.plans_of(runner(model=torch.nn.Module()), "fa3").facts
        assert facts.is_ragged is (mode == "compact")


def test_what_sglang_asks_of_the_class():
    """It captures draft extends of classes that it lists, and reads the table again when an event says so."""
    backend = backend_of(StepKind.DECODE, plans_of(sglang_scene(StepKind.DECODE)))
    assert isinstance(backend, TRTLLMHAAttnBackend)
    assert not backend.needs_cpu_seq_lens
    assert not backend.support_triton()
    assert not backend.supports_ragged_verify_graph, "it verifies nothing"
    assert backend.verify_mask is None
    assert backend.shared_read_ends(ForwardMode.TARGET_VERIFY) is SharedReadEnds.IN_REPLAY
    assert backend.shared_read_ends(ForwardMode.DECODE) is SharedReadEnds.IN_REPLAY
    assert backend.shared_read_ends(ForwardMode.DRAFT_EXTEND_V2) is SharedReadEnds.UNKNOWN


def test_the_kernels_are_chosen_for_the_layers_of_the_model(monkeypatch):
    schedule = SimpleNamespace(enable_mixed_chunk=False)
    options = {"spec": spec(None), "exec": execution(), "parallel": parallel(), "schedule": schedule}
    for name, value in options.items():
        monkeypatch.setattr(backends.api, f"get_{name}", lambda value=value: value)
    monkeypatch.setattr(backends, "_layers", lambda runner: [layer(sliding_window_size=15)])
    (given,) = backends.plans_of(runner(model=torch.nn.Module()), "fa3").backend.choices[StepKind.PREFILL].layers
    assert (given.num_heads, given.num_kv_heads, given.head_dim, given.window) == (4, 2, 64, 16)


@pytest.mark.parametrize("page_size", [1, 4])
def test_slots_are_found_where_sglang_found_them(page_size):
    """`get_last_loc` of SGLang launches a Triton kernel on a CPU; the one that stands for it there is SGLang's too."""
    from attn_backends.engines.sglang.plugin import _last_loc

    table = torch.arange(40, dtype=torch.int32).view(2, 20) * page_size
    rows, lens = torch.tensor([1, 0]), torch.tensor([5, 0])
    assert _last_loc(table, rows, lens).tolist() == [int(table[1, 4]), -1]


class Radix(torch.nn.Module):
    """A layer as SGLang's `RadixAttention` describes itself."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.__dict__.update(vars(layer(layer_id=number)))


class Holder(torch.nn.Module):
    """What holds a layer, and perhaps its sinks, as `GptOssAttention` does."""

    def __init__(self, number: int, sinks: torch.Tensor | None) -> None:
        super().__init__()
        self.attn = Radix(number)
        if sinks is not None:
            self.sinks = torch.nn.Parameter(sinks, requires_grad=False)


def test_kernels_are_chosen_for_layers_with_their_sinks(monkeypatch):
    sinks = torch.arange(layer().tp_q_head_num).bfloat16()
    monkeypatch.setattr(backends.api, "RadixAttention", Radix)
    schedule = SimpleNamespace(enable_mixed_chunk=False)
    options = {"spec": spec(None), "exec": execution(), "parallel": parallel(), "schedule": schedule}
    for name, value in options.items():
        monkeypatch.setattr(backends.api, f"get_{name}", lambda value=value: value)
    given = runner(model=torch.nn.ModuleList([Holder(0, sinks), Holder(1, None)]))
    first, second = backends.plans_of(given, "fa3").backend.choices[StepKind.PREFILL].layers
    assert torch.equal(first.sinks, sinks)
    assert second.sinks is None
