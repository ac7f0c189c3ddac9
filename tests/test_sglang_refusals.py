"""What the plug-in refuses before a server starts, without SGLang: its options, pools, models and versions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_backends import BackendUnavailableError, UnsupportedStepError, get_backend
from attn_backends.cache import CacheFormat
from attn_backends.engines.sglang import plugin, versions
from attn_backends.engines.sglang.facts import RunnerFacts, kinds_of
from attn_backends.engines.sglang.layers import Layers, check_extras
from attn_backends.engines.sglang.refusals import model_reasons, refuse, server_reasons
from spec_metadata import StepKind


class MHATokenToKVPool:
    """Of SGLang's name: what is not of this very class is not viewed."""

    size = 256


class MLATokenToKVPool(MHATokenToKVPool):
    """As above."""


class SWAKVPool(MHATokenToKVPool):
    """One that is not viewed."""


def layer(**fields: Any) -> Any:
    """A RadixAttention of grouped queries."""
    given: dict[str, Any] = {
        "layer_id": 0,
        "tp_q_head_num": 4,
        "tp_k_head_num": 2,
        "tp_v_head_num": 2,
        "head_dim": 64,
        "qk_head_dim": 64,
        "v_head_dim": 64,
        "scaling": 0.125,
        "sliding_window_size": -1,
        "k_scale_float": None,
        "v_scale_float": None,
        "is_cross_attention": False,
        "attn_type": SimpleNamespace(value="decoder"),
        "logit_cap": 0.0,
        "pos_encoding_mode": "NONE",
        "xai_temperature_len": -1,
        "use_irope": False,
    }
    return SimpleNamespace(**(given | fields))


LATENT = {"tp_q_head_num": 16, "tp_k_head_num": 1, "head_dim": 576, "qk_head_dim": 576, "v_head_dim": 512}


def runner(*, is_mla: bool = False, page_size: int = 64, **fields: Any) -> Any:
    given = {
        "req_to_token_pool": SimpleNamespace(req_to_token=torch.zeros(5, 256, dtype=torch.int32)),
        "token_to_kv_pool": MLATokenToKVPool() if is_mla else MHATokenToKVPool(),
        "page_size": page_size,
        "device": "cpu",
        "use_mla_backend": is_mla,
        "is_draft_worker": False,
        "sliding_window_size": None,
        "dtype": torch.float32,
        "kv_cache_dtype": torch.float32,
        "model_config": SimpleNamespace(context_len=200),
        "decode_num_tokens_per_req": lambda: 4,
    }
    return SimpleNamespace(**(given | fields))


def spec(algorithm: str | None = "EAGLE3", topk: int = 1, nodes: int = 4, **fields: Any) -> Any:
    given = {
        "speculative_algorithm": algorithm,
        "speculative_eagle_topk": topk,
        "speculative_num_steps": 3,
        "speculative_num_draft_tokens": nodes,
        "enable_multi_layer_eagle": False,
        "speculative_draft_window_size": None,
    }
    return SimpleNamespace(**(given | fields))


def execution(*, two_batches: bool = False, prefill: str = "disabled") -> Any:
    return SimpleNamespace(
        overlap=SimpleNamespace(enable_two_batch_overlap=two_batches),
        graph=SimpleNamespace(cuda_graph_config=SimpleNamespace(prefill=SimpleNamespace(backend=prefill))),
    )


def parallel(**fields: Any) -> Any:
    return SimpleNamespace(**({"dcp_enabled": False, "attn_cp_size": 1, "pp_size": 1} | fields))


WINDOWED = {"speculative_draft_window_size": 64}
SERVERS: dict[str, tuple[Any, Any, Any, Any]] = {
    "--speculative-algorithm NGRAM": (runner(), spec("NGRAM"), execution(), parallel()),
    "--enable-multi-layer-eagle": (runner(), spec(enable_multi_layer_eagle=True), execution(), parallel()),
    "--speculative-draft-window-size 64": (runner(is_draft_worker=True), spec(**WINDOWED), execution(), parallel()),
    "--speculative-eagle-topk 4 with --page-size 64": (runner(), spec(topk=4), execution(), parallel()),
    "decode context parallelism": (runner(), spec(), execution(), parallel(dcp_enabled=True)),
    "context parallelism of 2": (runner(), spec(), execution(), parallel(attn_cp_size=2)),
    "--pipeline-parallel-size 2": (runner(), spec(), execution(), parallel(pp_size=2)),
    "--enable-two-batch-overlap": (runner(), spec(), execution(two_batches=True), parallel()),
    "--disable-prefill-cuda-graph": (runner(device="cuda"), spec(), execution(prefill="breakable"), parallel()),
    "a KV pool SWAKVPool": (runner(token_to_kv_pool=SWAKVPool()), spec(), execution(), parallel()),
    "a KV pool MHATokenToKVPool": (runner(use_mla_backend=True), spec(), execution(), parallel()),
}


@pytest.mark.parametrize("reason", SERVERS)
def test_a_server_that_we_lack_is_refused_by_its_option(reason: str) -> None:
    (found,) = server_reasons(*SERVERS[reason])
    assert reason in found
    with pytest.raises(UnsupportedStepError, match=r"attn_fa3 inside SGLang: .*Instead: change the named options"):
        refuse("fa3", [found])


@pytest.mark.parametrize("is_mla", [False, True])
@pytest.mark.parametrize("algorithm", [None, "EAGLE", "EAGLE3"])
def test_a_server_that_we_have_is_not(algorithm: str | None, is_mla: bool) -> None:
    served = (runner(is_mla=is_mla, page_size=1), spec(algorithm, topk=4, nodes=16), execution(), parallel())
    assert list(server_reasons(*served)) == []
    refuse("fa3", [])


@pytest.mark.parametrize("fields", [{}, {"is_draft_worker": True, "sliding_window_size": 64}])
def test_a_draft_window_is_taken_by_layers_that_have_it(fields: dict[str, Any]) -> None:
    assert list(server_reasons(runner(**fields), spec(**WINDOWED), execution(), parallel())) == []


MODELS: dict[str, tuple[str, Any, Any]] = {
    "whose cache is of kv": ("trtllm_mla", runner(), [layer()]),
    "page size 1": ("trtllm_mla", runner(is_mla=True, page_size=1), [layer(**LATENT)]),
    "layer 0 has a logit cap of 30.0": ("fa3", runner(), [layer(logit_cap=30.0)]),
    "layer 0 has attention of type encoder_only": (
        "fa3",
        runner(),
        [layer(attn_type=SimpleNamespace(value="encoder_only"))],
    ),
    "cross True": ("fa3", runner(), [layer(is_cross_attention=True)]),
    "position encoding ROPE_LLAMA": ("fa3", runner(), [layer(pos_encoding_mode="ROPE_LLAMA")]),
    "a temperature by length": ("fa3", runner(), [layer(xai_temperature_len=1024)]),
    "irope": ("fa3", runner(), [layer(use_irope=True)]),
    "a sliding window of 128 tokens": (
        "flashinfer_mla",
        runner(is_mla=True),
        [layer(**LATENT, sliding_window_size=127)],
    ),
    "a cache of torch.int8": ("fa3", runner(kv_cache_dtype=torch.int8), [layer()]),
    "queries or rows of torch.int16": ("fa3", runner(dtype=torch.int16), [layer()]),
    "a model without attention layers": ("fa3", runner(), []),
}


def reasons_of(name: str, of: Any, layers: list[Any], **options: Any) -> list[str]:
    facts = RunnerFacts.of(of, spec(**options), layers, mixes=False)
    backend = get_backend(name)(facts.capacity, facts.batches.geometry, kernel="torch")
    return list(model_reasons(facts, backend))


@pytest.mark.parametrize("reason", MODELS)
def test_a_model_that_we_lack_is_refused_by_its_layer(reason: str) -> None:
    found = reasons_of(*MODELS[reason])
    assert found
    assert any(reason in each for each in found), found


@pytest.mark.parametrize("is_draft", [False, True])
def test_a_model_that_we_have_is_not(is_draft: bool) -> None:
    grouped, latent = (runner(is_mla=is_mla, page_size=1, is_draft_worker=is_draft) for is_mla in (False, True))
    assert reasons_of("fa3", grouped, [layer()], topk=4, nodes=16) == []
    for name in ("fa3", "flashinfer_mla"):
        assert reasons_of(name, latent, [layer(**LATENT)], topk=4, nodes=16) == []
    paged = runner(is_mla=True, is_draft_worker=is_draft)
    assert reasons_of("trtllm_mla", paged, [layer(**LATENT)]) == []


def test_what_a_runner_runs_and_how_large_its_steps_are() -> None:
    facts = RunnerFacts.of(runner(page_size=1), spec(topk=4, nodes=16), [layer()], mixes=False)
    assert facts.capacity.max_tokens == 256, "a row of the table, draft room included"
    assert facts.capacity.bucket(StepKind.DRAFT_EXTEND, 2).width == 16, "SGLang extends by every verified node"
    assert facts.format is CacheFormat.KV
    assert facts.batches.geometry.num_pages == 257, "SGLang has a page more than its size says"


@pytest.mark.parametrize("is_draft", [False, True])
def test_a_row_of_the_table_may_end_inside_a_page(is_draft: bool) -> None:
    part = SimpleNamespace(req_to_token=torch.zeros(5, 250, dtype=torch.int32))
    served = runner(req_to_token_pool=part, is_draft_worker=is_draft)
    assert RunnerFacts.of(served, spec(), [layer()], mixes=False).capacity.max_tokens == 250


@pytest.mark.parametrize("is_draft", [False, True])
def test_a_setting_of_a_server_that_adapts_may_draft_nothing(is_draft: bool) -> None:
    options = spec(nodes=1, speculative_num_steps=0)
    facts = RunnerFacts.of(runner(page_size=1, is_draft_worker=is_draft), options, [layer()], mixes=False)
    assert facts.kinds == (StepKind.PREFILL, StepKind.DECODE)
    assert facts.capacity.bucket(StepKind.DECODE, 2).width == 1


@pytest.mark.parametrize(
    ("runner_of", "kinds"),
    [
        ({"is_draft": False, "num_steps": 0}, (StepKind.PREFILL, StepKind.DECODE)),
        ({"is_draft": True, "num_steps": 0}, (StepKind.PREFILL, StepKind.DECODE)),
        ({"is_draft": False, "num_steps": 3}, (StepKind.PREFILL, StepKind.TARGET_VERIFY)),
        ({"is_draft": True, "num_steps": 1}, (StepKind.PREFILL, StepKind.DRAFT_EXTEND)),
    ],
)
def test_in_mixed_batches_every_runner_decodes(runner_of: dict[str, Any], kinds: tuple[StepKind, ...]) -> None:
    assert kinds_of(**runner_of, mixes=False) == kinds
    assert kinds_of(**runner_of, mixes=True) == tuple(dict.fromkeys((*kinds, StepKind.DECODE)))


def test_an_argument_of_attention_that_nothing_reads_is_refused() -> None:
    check_extras(layer(), {"q_rope": torch.ones(1), "topk_indices": None, "is_neox": False})
    with pytest.raises(UnsupportedStepError, match="layer 0: arguments cos_sin_cache, topk_indices"):
        check_extras(layer(), {"topk_indices": torch.ones(1), "cos_sin_cache": torch.ones(1)})


def test_rope_may_come_beside_latents_or_behind_them() -> None:
    given, rows = layer(**LATENT), 3
    layers = Layers(None, 1, CacheFormat.LATENT)
    q, k = torch.randn(rows, 16, 576), torch.randn(rows, 1, 576)
    apart = {"q_rope": q[..., 512:], "k_rope": k[..., 512:]}
    assert torch.equal(layers.queries(q[..., :512], given, apart), layers.queries(q.flatten(1), given, {}))
    stored = (layers.entries(k[..., :512], k, given, apart, slice(2)), layers.entries(k, k, given, {}, slice(2)))
    assert torch.equal(stored[0].latent, stored[1].latent)
    assert torch.equal(stored[0].latent, k[:2, 0])


def test_another_version_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda: "0.6.0")
    error = plugin.problem()
    assert isinstance(error, BackendUnavailableError)
    assert "SGLang 0.6.0 is installed, and its plug-in is for 0.5.23" in str(error)
    with pytest.raises(BackendUnavailableError, match=r"Install sglang==0\.5\.23"):
        plugin.create("fa3", error, None)
