"""What `benchmarks metadata` hands to SGLang, on stand-ins that take what its 0.5.23 takes and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_backends.errors import BackendUnavailableError, UnsupportedStepError
from attn_backends.graphs import RecordedGraph
from attn_backends.registry import get_backend
from benchmarks import sglang
from benchmarks.counts import Counts
from benchmarks.metadata import Bench, Problem, measure_metadata
from benchmarks.rows import MetadataRow
from benchmarks.speculation import CYCLE, PHASES, Batch, Tables, speculative

CPU = torch.device("cpu")


def batch_of(page_size=64, topk=1):
    return Batch(Tables.of(speculative(4, 1024, page_size, topk, 3), CPU), batch_size=2, context=600)


class Mode(Enum):
    DECODE = "decode"
    TARGET_VERIFY = "verify"
    DRAFT_EXTEND_V2 = "extend"


@dataclass
class ForwardBatch:
    forward_mode: Any
    batch_size: int
    input_ids: Any
    req_pool_indices: Any
    seq_lens: Any
    out_cache_loc: Any
    seq_lens_sum: Any
    kv_loc_plan: Any = None
    seq_lens_cpu: Any = None
    spec_info: Any = None
    positions: Any = None
    extend_seq_lens: Any = None
    extend_prefix_lens: Any = None
    extend_prefix_lens_cpu: Any = None


@dataclass
class DraftInput:
    topk_p: Any = None
    topk_index: Any = None
    kv_indptr: Any = None
    kv_indices: Any = None


@dataclass
class VerifyInput:
    draft_token: Any
    custom_mask: Any
    positions: Any
    retrieve_index: Any
    retrieve_next_token: Any
    retrieve_next_sibling: Any
    retrieve_cum_len: Any
    spec_steps: int
    topk: int
    draft_token_num: int
    capture_hidden_mode: Any
    seq_lens_sum: Any
    seq_lens_cpu: Any


@dataclass
class DraftExtendInput:
    hidden_states: Any = None
    num_correct_drafts: Any = None
    num_tokens_per_req: int = -1


@dataclass
class Prepares:
    """A metadata backend that says what it was given."""

    what: str
    calls: list
    batches: list = field(default_factory=list)

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        self.calls.append((self.what, max_bs, max_num_tokens))

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        self._given("capture" if in_capture else "replay", forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch):
        self._given("in graph", forward_batch)

    def init_forward_metadata(self, forward_batch):
        self._given("eager", forward_batch)

    def _given(self, what, given):
        assert given.kv_loc_plan == "own", "a batch has a plan before its metadata is made"
        lens_stay_away = given.seq_lens_cpu is None
        assert lens_stay_away == (given.seq_lens_sum is None)
        self.batches.append(given)
        self.calls.append((what, given.forward_mode.name, lens_stay_away))


@dataclass(frozen=True)
class Case:
    name: str
    backend: str
    forward_mode: Any
    num_heads: int
    page_size: int
    prefix_lens: tuple
    extend_lens: tuple = ()


@dataclass(frozen=True)
class Settings:
    topk: int
    speculative_num_steps: int
    speculative_num_draft_tokens: int
    capture_batch_size: int
    hidden_size: int
    vocab_size: int
    max_context_len: int
    dtype: Any
    device: str
    atol: float
    rtol: float


class ModelConfig:
    def __init__(self, *, num_heads, kv_lora_rank, qk_rope_head_dim, hidden_size, context_len):
        self.head_dim, self.context_len = kv_lora_rank + qk_rope_head_dim, context_len


class Pool:
    def __init__(self, size, max_context_len, device, enable_memory_saver):
        assert isinstance(device, str), "SGLang compares it to the name of a device type"
        self.size = size
        self.req_to_token = torch.zeros(size + 1, max_context_len, dtype=torch.int32, device=device)


class Runner:
    def __init__(
        self,
        *,
        case,
        model_config,
        dtype,
        device,
        max_context_len,
        kv_lora_rank,
        qk_rope_head_dim,
        disable_cuda_graph=True,
    ):
        self.case, self.model_config, self.device = case, model_config, device
        self.is_draft_worker, self.settings = False, None
        self.init_kv_index_translator()

    def init_kv_index_translator(self):
        bind = lambda given: setattr(given, "kv_loc_plan", "own")  # noqa: E731
        table = self.req_to_token_pool.req_to_token if hasattr(self, "req_to_token_pool") else None
        self.kv_index_translator = SimpleNamespace(bind_own_plan=bind, req_to_token=table)


class Factory:
    def __init__(self, draft_model_runner, topk, speculative_num_steps):
        assert draft_model_runner.is_draft_worker
        assert (topk, speculative_num_steps) == (1, 3)
        self.runner = draft_model_runner

    def create_decode_backend(self):
        return Prepares("draft", self.runner.calls)

    def create_draft_extend_backend(self):
        return Prepares("draft_extend", self.runner.calls)


def configure(runner, case, settings):
    runner.settings, runner.is_draft_worker, runner.calls = settings, True, []


def target(runner):
    assert not runner.is_draft_worker
    assert runner.kv_index_translator.req_to_token is runner.req_to_token_pool.req_to_token
    return Prepares("verify", runner.calls)


KIT = "sglang.test.kits.attention_unittest"
MLA, DRAFT = f"{KIT}.attention_methods.mla_attention", f"{KIT}.runner_modes.speculative_draft_runner"
EAGLE, BATCH = "sglang.srt.speculative.eagle_info", "sglang.srt.model_executor.forward_batch_info"
SGLANG = {
    f"{MLA}:MLAAttentionCase": Case,
    f"{MLA}:TinyMLAModelConfig": ModelConfig,
    f"{MLA}:MockMLAModelRunner": Runner,
    f"{DRAFT}:EagleDraftRunnerSettings": Settings,
    f"{DRAFT}:_configure_runner_for_eagle_draft": configure,
    "sglang.srt.mem_cache.memory_pool:ReqToTokenPool": Pool,
    "sglang.srt.layers.attention.attention_registry:ATTENTION_BACKENDS": dict.fromkeys(
        ("flashinfer", "trtllm_mla", "fa3"), target
    ),
    "sglang.srt.speculative.draft_utils:DraftBackendFactory": Factory,
    f"{EAGLE}:EagleDraftInput": DraftInput,
    f"{EAGLE}:EagleVerifyInput": VerifyInput,
    f"{EAGLE}:EagleDraftExtendInput": DraftExtendInput,
    f"{BATCH}:ForwardBatch": ForwardBatch,
    f"{BATCH}:ForwardMode": Mode,
}


@pytest.fixture
def sglang_here(monkeypatch):
    monkeypatch.setattr(sglang, "is_installed", lambda name: True)
    monkeypatch.setattr(sglang, "load", SGLANG.__getitem__)
    sglang._backends.cache_clear()
    yield
    sglang._backends.cache_clear()


def test_it_is_refused_where_it_is_not_installed_and_for_trees(monkeypatch):
    monkeypatch.setattr(sglang, "is_installed", lambda name: False)
    with pytest.raises(BackendUnavailableError, match="sglang is not installed"):
        sglang.works("fa3", batch_of())
    monkeypatch.setattr(sglang, "is_installed", lambda name: True)
    with pytest.raises(UnsupportedStepError, match="topk=4"):
        sglang.works("fa3", batch_of(topk=4))


@pytest.mark.parametrize(("backend", "name"), sglang.BACKENDS.items())
def test_its_backends_are_built_once_over_our_table(backend, name, sglang_here):
    batch = batch_of()
    sglang.works(backend, batch)
    made = sglang._backends(backend, batch.tables)
    sglang.works(backend, Batch(batch.tables, 4, 100))
    assert sglang._backends(backend, batch.tables) is made
    context, runner = batch.tables.capacity.max_kv_len, made.runner
    assert torch.equal(runner.req_to_token_pool.req_to_token, batch.tables.table)
    assert runner.device == "cpu"
    assert runner.max_running_requests == runner.req_to_token_pool.size == 4
    assert (runner.case.backend, runner.case.page_size, runner.case.extend_lens) == (name, 64, (4,))
    assert (runner.model_config.head_dim, runner.model_config.context_len) == (576, context)
    settings = runner.settings
    assert (settings.topk, settings.speculative_num_steps, settings.speculative_num_draft_tokens) == (1, 3, 4)
    assert runner.calls[:3] == [("draft", 4, 4), ("verify", 4, 16), ("draft_extend", 4, 16)]


def test_each_phase_is_given_by_its_own_conventions(sglang_here):
    batch = batch_of(page_size=4)
    found = sglang.works("trtllm_mla", batch)
    assert {phase: name for phase, (name, _) in found.items()} == dict.fromkeys(PHASES, "Prepares")
    made = sglang._backends("trtllm_mla", batch.tables)
    draft, verify, extend = given = [getattr(made, phase).batches[0] for phase in PHASES]
    assert [each.forward_mode for each in given] == list(Mode)
    assert [each.seq_lens.tolist() for each in given] == [[600, 600], [600, 600], [604, 604]]
    assert [each.req_pool_indices.tolist() for each in given] == [[1, 2]] * 3
    assert {each.seq_lens.dtype for each in given} == {each.req_pool_indices.dtype for each in given} == {torch.int64}
    next_tokens = batch.tables.table[1:3, 600:604]
    assert draft.out_cache_loc.tolist() == next_tokens[:, :3].flatten().tolist()
    assert draft.positions.tolist() == [600, 600]
    for each in (verify, extend):
        assert each.out_cache_loc.tolist() == next_tokens.flatten().tolist()
        assert each.positions.tolist() == [600, 601, 602, 603] * 2
    assert verify.spec_info.custom_mask.numel() == 2 * 4 * 604
    assert (verify.spec_info.draft_token_num, verify.spec_info.topk, verify.spec_info.spec_steps) == (4, 1, 3)
    spec = extend.spec_info
    assert (spec.num_tokens_per_req, spec.num_correct_drafts.tolist()) == (4, [3, 3])
    assert (spec.extend_seq_lens_tensor.tolist(), spec.extend_seq_lens_cpu) == ([4, 4], [4, 4])
    assert (extend.extend_prefix_lens.tolist(), extend.extend_prefix_lens_cpu) == ([600, 600], [600, 600])
    assert (extend.extend_seq_lens.tolist(), extend.extend_seq_lens.dtype) == ([4, 4], torch.int32)


def test_host_lengths_are_there_for_flashinfer_as_its_engine_has_them(sglang_here):
    batch = batch_of(page_size=1)
    for _, work in sglang.works("flashinfer_mla", batch).values():
        work.run()
    made = sglang._backends("flashinfer_mla", batch.tables)
    given = [getattr(made, phase).batches[-1] for phase in PHASES]
    assert [each.seq_lens_cpu.tolist() for each in given] == [[600, 600], [600, 600], [604, 604]]
    assert [each.seq_lens_sum for each in given] == [1200, 1200, 1208]
    assert {each.seq_lens_cpu.dtype for each in given} == {torch.int64}


@pytest.mark.parametrize(("backend", "lens_stay_away"), [("fa3", True), ("flashinfer_mla", False)])
def test_it_prepares_as_its_runners_do(backend, lens_stay_away, sglang_here):
    batch = batch_of()
    found = sglang.works(backend, batch)
    calls = sglang._backends(backend, batch.tables).runner.calls[3:]
    modes = [mode.name for mode in Mode]
    captured = modes if lens_stay_away else modes[:2]
    assert calls == [(what, mode, False) for mode in captured for what in ("capture", "in graph")]
    calls = sglang._backends(backend, batch.tables).runner.calls
    del calls[:]
    for _, work in found.values():
        work.run()
    expected = [(what, mode, lens_stay_away) for mode in captured for what in ("replay", "in graph")]
    assert calls == [*expected, *([] if lens_stay_away else [("eager", "DRAFT_EXTEND_V2", False)])]


class Still:
    """A host's clock that stands."""

    def now(self):
        return 0.0

    def wait(self):
        pass


def test_its_cycle_is_one_although_its_classes_are_several(sglang_here):
    bench = Bench(CPU, RecordedGraph, Still(), lambda works: [Counts(0.0, 0, 0, 0) for _ in works], rounds=1)
    measured = list(measure_metadata([Problem(get_backend("fa3"), batch_of().tables)], [2], [600], bench))
    rows = [row for row in measured if isinstance(row, MetadataRow) and row.mode == "sglang"]
    assert [(row.phase, row.kernel) for row in rows] == [*((phase, "Prepares") for phase in PHASES), (CYCLE, "")]
