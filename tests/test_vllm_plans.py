"""What vLLM's batches are planned as by the plug-in, without vLLM: objects of its shapes, and a backend of ours."""

from __future__ import annotations

import gc
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attn_backends import results
from attn_backends.adapters import vllm
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.cache import PagedKV
from attn_backends.engines.vllm.attended import Attended, attended, counter, forget_attended
from attn_backends.engines.vllm.plans import Plans
from attn_backends.engines.vllm.refusals import RUNNER, config_reasons, kernel_reasons, layer_reasons, refuse
from attn_backends.errors import ConfigError, UnsupportedStepError
from attn_backends.graphs import RecordedGraph
from attn_backends.layer import AttentionLayer
from attn_backends.planning.metadata import Metadata
from attn_backends.registry import get_backend, list_backends
from attn_backends.selection.choose import Choice, Workload
from attn_backends.vendors import flash_attention, flashinfer
from spec_metadata import Capacity, InvalidStepError, StepKind

ROOT = Path(__file__).parent.parent
PAGE_SIZE, NUM_DRAFT_TOKENS, MAX_BS, COLUMNS = 4, 3, 4, 8


class Engine:
    """vLLM's persistent buffers, filled as it fills them."""

    def __init__(self, max_context: int = COLUMNS * PAGE_SIZE - 3) -> None:
        capacity = Capacity(MAX_BS, max_context, PAGE_SIZE, num_steps=2, num_draft_tokens=NUM_DRAFT_TOKENS)
        self.backend = FA3Backend(capacity, vllm.geometry(64, PAGE_SIZE))
        self.plans = Plans(self.backend, {NUM_DRAFT_TOKENS})
        self.seq_lens = torch.zeros(MAX_BS, dtype=torch.int32)
        self.starts = torch.zeros(MAX_BS + 1, dtype=torch.int32)
        self.slots = torch.full((MAX_BS * NUM_DRAFT_TOKENS,), -1)
        self.table = torch.zeros(MAX_BS, COLUMNS, dtype=torch.int32)

    def common(self, lens: list[int], committed: list[int], padded: tuple[int, int] | None = None) -> SimpleNamespace:
        """A batch. lens: query rows. padded: requests and rows of the graph that runs it."""
        pages = torch.randperm(63)[: MAX_BS * COLUMNS].view(MAX_BS, COLUMNS) + 1
        num_reqs, num_rows = padded or (len(lens), sum(lens))
        self.table.zero_()
        self.table[: len(lens)] = pages[: len(lens)]
        self.seq_lens.zero_()
        self.seq_lens[: len(lens)] = torch.tensor(committed) + torch.tensor(lens)
        self.starts.fill_(sum(lens))
        self.starts[: len(lens) + 1] = torch.tensor([0, *lens]).cumsum(0)
        self.slots.fill_(-1)
        positions = [
            (i, done + row) for i, (num, done) in enumerate(zip(lens, committed, strict=True)) for row in range(num)
        ]
        for row, (request, position) in enumerate(positions):
            self.slots[row] = self.table[request, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
        return SimpleNamespace(
            query_start_loc=self.starts[: num_reqs + 1],
            query_start_loc_cpu=self.starts[: num_reqs + 1].clone(),
            seq_lens=self.seq_lens[:num_reqs],
            num_reqs=num_reqs,
            num_actual_tokens=num_rows,
            max_query_len=max(lens, default=0),
            max_seq_len=COLUMNS * PAGE_SIZE,
            block_table_tensor=self.table[:num_reqs],
            slot_mapping=self.slots[:num_rows],
            causal=True,
        )


def metadata(plan: object) -> Metadata:
    plan.current()
    (made,) = plan._made
    return made


def assert_describes(meta: Metadata, engine: Engine, lens: list[int], committed: list[int]) -> None:
    """The plan shows each real request its keys, and writes its rows where vLLM says; padding writes the null block."""
    (plan,) = meta.plans
    num = len(lens)
    assert plan.seqused_k[:num].tolist() == [a + b for a, b in zip(lens, committed, strict=True)]
    for request, length in enumerate(plan.seqused_k[:num].tolist()):
        columns = -(-length // PAGE_SIZE)
        assert plan.page_table[request, :columns].tolist() == engine.table[request, :columns].tolist()
    slots = meta.at().write_slots.tolist()
    assert slots[: sum(lens)] == engine.slots[: sum(lens)].tolist()
    assert all(slot < PAGE_SIZE for slot in slots[sum(lens) :])


@pytest.mark.parametrize(
    ("lens", "kind"),
    [
        ([1, 1, 1], StepKind.DECODE),
        ([3, 3], StepKind.TARGET_VERIFY),
        ([2, 2], StepKind.PREFILL),
        ([5, 3, 3, 1], StepKind.PREFILL),
        ([], StepKind.IDLE),
    ],
    ids=str,
)
def test_a_batch_is_the_step_that_its_query_lengths_say(lens: list[int], kind: StepKind) -> None:
    engine = Engine()
    meta = metadata(engine.plans.of(engine.common(lens, [5] * len(lens))))
    assert meta.step.kind is kind
    assert meta.bucket is None
    if lens:
        assert_describes(meta, engine, lens, [5] * len(lens))


@pytest.mark.parametrize("width", [1, NUM_DRAFT_TOKENS])
def test_a_recorded_graph_plans_from_vllms_buffers(width: int) -> None:
    engine, graph = Engine(), RecordedGraph()
    common = engine.common([width] * MAX_BS, [1] * MAX_BS)
    engine.plans.capture(common).current()  # vLLM's warm-up
    plan = engine.plans.capture(common)
    graph.capture(plan.current)
    for lens, committed in (([width] * 4, [3, 9, 0, 20]), ([width] * 2, [7, 1])):
        engine.common(lens, committed, padded=(MAX_BS, MAX_BS * width))
        graph.replay()
        assert_describes(metadata(plan), engine, lens, committed)


def test_a_batch_of_a_captured_size_is_planned_again_though_no_graph_runs() -> None:
    engine = Engine()
    captured = metadata(engine.plans.capture(engine.common([3, 3], [1, 2])))
    for committed in ([4, 8], [5, 12]):
        meta = metadata(engine.plans.of(engine.common([3, 3], committed)))
        assert meta is captured
        assert_describes(meta, engine, [3, 3], committed)


def test_a_padded_batch_is_the_captured_one() -> None:
    engine = Engine()
    captured = metadata(engine.plans.capture(engine.common([3, 3, 3], [1, 2, 3])))
    assert metadata(engine.plans.of(engine.common([3, 3], [1, 2], padded=(3, 9)))) is captured


def test_a_batch_that_a_graph_runs_costs_the_host_nothing() -> None:
    Engine().plans.of(SimpleNamespace())  # no field of it is read


def padding(engine: Engine, num_reqs: int) -> SimpleNamespace:
    """A batch whose requests have more rows each than a context, and no slots."""
    num_rows, common = COLUMNS * PAGE_SIZE + 1, engine.common([1] * num_reqs, [0] * num_reqs)
    common.query_start_loc = common.query_start_loc_cpu = torch.arange(num_reqs + 1, dtype=torch.int32) * num_rows
    common.num_actual_tokens, common.max_query_len, common.max_seq_len = num_reqs * num_rows, num_rows, num_rows
    common.slot_mapping = torch.full((num_reqs * num_rows,), -1)
    return common


def test_a_lone_request_of_more_rows_than_a_context_is_padding() -> None:
    """As a rank of data parallelism has it, whose graph of a piece is for more rows: nothing is read or written. More
    such requests are an error.
    """
    engine = Engine()
    meta = metadata(engine.plans.of(padding(engine, 1)))
    assert meta.step.kind is StepKind.IDLE
    assert meta.at().write_slots.numel() == 0
    with pytest.raises(InvalidStepError, match="adds 33"):
        engine.plans.of(padding(engine, 2)).current()


def test_a_prompt_as_large_as_a_captured_batch_is_not_taken_for_it() -> None:
    engine = Engine()
    engine.plans.capture(engine.common([3, 3], [1, 2]))
    for lens in ([2, 4], [5, 1]):
        meta = metadata(engine.plans.of(engine.common(lens, [1, 2])))
        assert meta.step.kind is StepKind.PREFILL
        assert_describes(meta, engine, lens, [1, 2])


@pytest.mark.parametrize(
    ("lens", "first"), [([3, 3, 5], StepKind.TARGET_VERIFY), ([1, 1, 4], StepKind.DECODE), ([1, 5], StepKind.DECODE)]
)
def test_running_requests_and_prompts_are_two_steps_where_one_is_slower(lens: list[int], first: StepKind) -> None:
    engine = Engine()
    layer = AttentionLayer(0, num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=8, scale=0.5)
    pages = torch.randn(2, 64, PAGE_SIZE, 2, 8)
    q, cache = torch.randn(sum(lens), 4, 8), PagedKV(*pages)
    outputs = []
    for slower in ("packed rows have no split", ""):
        kernel = replace(engine.backend.kernel_of(StepKind.PREFILL), slower_mixed=lambda *_, slower=slower: slower)
        engine.backend.choices[StepKind.PREFILL] = Choice(kernel, layers=[layer])
        torch.manual_seed(3)
        planned = engine.plans.of(engine.common(lens, [9, 4, 6][: len(lens)]))
        parts = [part for _, part in planned.current()]
        assert [part.kind for part in parts] == ([first, StepKind.PREFILL] if slower else [StepKind.PREFILL])
        slots = torch.cat([part.write_slots for part in parts])
        assert slots.tolist() == engine.slots[: sum(lens)].tolist()
        rows = q.split([len(part.write_slots) for part in parts])
        pairs = zip(rows, parts, strict=True)
        outputs.append(torch.cat([engine.backend.forward(own, cache, part, layer).out for own, part in pairs]))
    assert torch.allclose(*outputs, atol=1e-6)


def test_one_step_is_planned_only_where_it_was_measured_to_be_as_fast() -> None:
    folder = ROOT / "docs" / "results" / "h200"
    rows = [row for file in folder.glob("mixed*.json") for row in results.read(file).rows]
    kernels = {name: {kernel.name: kernel for kernel in get_backend(name).kernels} for name in list_backends()}
    one, two = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for row in rows:
        heads, kernel = row["heads"], kernels[row["backend"]][row["kernel"]]
        sizes = (heads, 1, 576, 512) if heads in (16, 128) else (heads, 1 if heads == 8 else 8, 128, 128)
        chunk = int(row["peer"].removeprefix("chunk ").partition(",")[0])
        slower = kernel.slower_mixed(AttentionLayer(0, *sizes, 1.0), row["batch_size"] - 1, chunk)
        (two if slower else one)[kernel.name].append(row["ratio"])
    ratios = [ratio for each in one.values() for ratio in each]
    assert len(ratios) > len(rows) / 3
    assert max(ratios) <= 1
    assert min(ratios) <= 0.9
    for name, rule in (("vllm_flash_attn", flash_attention.slower_mixed), ("flashinfer_fa3", flashinfer._slower_mixed)):
        told = re.findall(r"(\d\.\d\d) to\s+(\d\.\d\d)\s+times", rule.__doc__ or "")
        assert told == [(f"{min(each):.2f}", f"{max(each):.2f}") for each in (one[name], two[name])], "its docstring"


def test_buffers_elsewhere_are_not_those_of_a_graph() -> None:
    engine = Engine()
    engine.plans.capture(engine.common([3, 3], [1, 2]))
    common = engine.common([3, 3], [1, 2])
    common.block_table_tensor = common.block_table_tensor.clone()
    assert metadata(engine.plans.of(common)).bucket is None


@pytest.mark.parametrize("captured", [False, True])
def test_a_draft_loop_is_planned_again_for_every_forward(captured: bool) -> None:
    engine = Engine()
    common = engine.common([1, 1], [4, 8])
    plan = engine.plans.capture(common) if captured else engine.plans.of(common)
    assert_describes(metadata(plan), engine, [1, 1], [4, 8])
    engine.common([1, 1], [5, 9])
    kept, of_a_layer = metadata(plan), plan.current()
    assert plan.current() is of_a_layer, "layers share it"
    plan.expire()
    assert plan.current() is not of_a_layer
    again = metadata(plan)
    assert_describes(again, engine, [1, 1], [5, 9])
    assert (kept is again) == captured


def test_other_graphs_are_refused() -> None:
    engine = Engine()
    for lens in ([2, 2], [3, 2]):
        with pytest.raises(UnsupportedStepError, match="each has 1 row, or in a verify 3"):
            engine.plans.capture(engine.common(lens, [1, 2]))


def test_where_the_number_of_drafts_depends_on_the_batch_verifies_have_several_widths() -> None:
    """One of the numbers may be none at all, of which a verify is a decode."""
    engine = Engine()
    engine.plans = Plans(engine.backend, {1, 2, 3})
    for width, kind in ((1, StepKind.DECODE), (2, StepKind.TARGET_VERIFY), (3, StepKind.TARGET_VERIFY)):
        common = engine.common([width, width], [4, 8])
        (_, eager), (_, captured) = *engine.plans.of(common).current(), *engine.plans.capture(common).current()
        assert [captured.kind, eager.kind] == [kind] * 2
        assert captured.captured is not None
        assert captured.captured.bucket.width == width
    with pytest.raises(UnsupportedStepError, match="in a verify 1 or 2 or 3"):
        engine.plans.capture(engine.common([4, 4], [4, 8]))


def count_three(engine: Engine) -> Attended:
    """One forward eagerly, one while it is recorded and one in a replay."""
    meta = [part for _, part in engine.plans.of(engine.common([1, 1], [4, 8])).current()]
    with torch.inference_mode():
        counts, graph = counter("model.layers.0", "fa3", torch.device("cpu")), RecordedGraph()
        assert counts is not None
        counts.add(meta)
        graph.capture(lambda: counts.add(meta))
    graph.replay()
    return counts


def test_a_forward_is_counted_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BACKENDS_COUNT", "1")
    counts = count_three(Engine())
    row = {"decode": {"backend": "fa3", "kernel": "torch", "forwards": 3}}
    assert attended() == {"model.layers.0": row}
    forget_attended()
    assert attended() == {"model.layers.0": {}}
    del counts
    gc.collect()
    assert attended() == {}


def test_nothing_is_counted_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTN_BACKENDS_COUNT", raising=False)
    assert counter("model.layers.0", "fa3", torch.device("cpu")) is None
    with pytest.raises(ConfigError, match="ATTN_BACKENDS_COUNT is not set: set it to 1"):
        attended()


def test_what_a_layer_has_that_we_lack_is_named() -> None:
    assert layer_reasons("decoder", None, None, None, {"sinks": None}) == []
    reasons = layer_reasons("encoder_decoder", [0.5], 30.0, "model.layers.0", {"chunk_lookback": 4})
    assert reasons == [
        "encoder_decoder attention",
        "ALiBi slopes",
        "a soft cap of 30.0 on logits",
        "the cache of another layer (model.layers.0)",
        "the argument chunk_lookback",
    ]


@pytest.mark.parametrize("width", [2, NUM_DRAFT_TOKENS])
def test_rows_that_see_one_another_are_a_block_draft(width: int) -> None:
    """DSpark's block has no row for the root."""
    engine, lens, committed = Engine(), [width, width], [4, 9]
    engine.plans = Plans(engine.backend, {2, NUM_DRAFT_TOKENS})
    common = engine.common(lens, committed)
    captured = metadata(engine.plans.capture(common))  # of the same rows, which are causal
    common.causal = False
    for plan in (engine.plans.of(common), engine.plans.capture(common), engine.plans.of(common)):
        meta = metadata(plan)
        assert meta is not captured
        assert (meta.step.kind, meta.step.width) == (StepKind.DRAFT_BLOCK, width)
        assert_describes(meta, engine, lens, committed)


def drafts(*, blocks: bool = False, **fields: object) -> SimpleNamespace:
    known = {"parallel_drafting": False, "attention_backend": None, "method": "dspark" if blocks else "mtp"}
    known |= {"enable_adaptive_verification": False, "draft_model_config": None}
    return SimpleNamespace(use_dflash=lambda: False, use_dspark=lambda: blocks, **known | fields)


def config(**fields: object) -> SimpleNamespace:
    spec = drafts()
    phases = {f"{phase}_context_parallel_size": 1 for phase in ("decode", "prefill")}
    ranks = SimpleNamespace(pipeline_parallel_size=1, use_ubatching=False, **phases)
    known = {"use_v2_model_runner": True, "speculative_config": spec, "parallel_config": ranks, "lora_config": None}
    known["model_config"] = SimpleNamespace(is_hybrid=False, is_diffusion=False)
    return SimpleNamespace(**known | fields)


def test_engines_that_we_do_not_serve_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_reasons(None) == config_reasons(config()) == config_reasons(config(speculative_config=None)) == []
    assert config_reasons(config(model_config=None)) == []
    assert config_reasons(config(lora_config=object())) == ["LoRA (enable_lora), which was not tested"]
    for value, advice in ((None, "vLLM chose it itself, and its warning"), ("0", "unset VLLM_USE_V2_MODEL_RUNNER")):
        monkeypatch.delenv(RUNNER, raising=False) if value is None else monkeypatch.setenv(RUNNER, value)
        (reason,) = config_reasons(config(use_v2_model_runner=False))
        assert f"model runner V1 ({advice}" in reason
    for blocks, wrong in ((True, []), (False, ["parallel drafting other than DFlash's and DSpark's"])):
        spec = drafts(blocks=blocks, parallel_drafting=True, attention_backend="ATTN_BACKENDS_FA3")
        assert config_reasons(config(speculative_config=spec)) == wrong
    (reason,) = config_reasons(config(speculative_config=drafts(blocks=True, parallel_drafting=True)))
    assert 'a dspark draft without "attention_backend"' in reason
    states, blocks = config_reasons(config(model_config=SimpleNamespace(is_hybrid=True, is_diffusion=True)))
    assert ("keep a state" in states, "diffusion" in blocks) == (True, True)
    ranks = config().parallel_config
    ranks.pipeline_parallel_size = 2
    assert config_reasons(config(parallel_config=ranks)) == ["pipeline parallelism (2 ranks), which was not tested"]


def test_kernels_are_asked_before_an_engine_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, torch_kernel = torch.device("cpu"), FA3Backend.kernels[-1]
    assert kernel_reasons(FA3Backend, cpu, Workload(16)) == []
    on_host = {kind: replace(able, needs_host_lens=True) for kind, able in torch_kernel.capabilities.items()}
    monkeypatch.setattr(FA3Backend, "kernels", (replace(torch_kernel, capabilities=on_host),))
    (reason,) = kernel_reasons(FA3Backend, cpu, Workload(16))
    assert "plans lengths on the host" in reason
    monkeypatch.setattr(FA3Backend, "kernels", (replace(torch_kernel, unavailable_reasons=lambda device: ["broken"]),))
    assert kernel_reasons(FA3Backend, cpu, Workload(16)) == ["fa3 on cpu, prefill can't run here: torch: broken"]
    monkeypatch.setenv("ATTN_BACKENDS_KERNEL", "tritn")
    assert kernel_reasons(FA3Backend, cpu, Workload(16)) == [
        "ATTN_BACKENDS_KERNEL=tritn: fa3 kernel 'tritn' can't run here: unknown name. It has torch"
    ]
    with pytest.raises(UnsupportedStepError, match="Instead: another ATTN_BACKENDS_KERNEL or none, or another -"):
        refuse("fa3", ["broken"])
