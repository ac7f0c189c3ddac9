"""What we lack is refused while an engine is built, in vLLM's own words or ours, and nothing takes its place."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BloomConfig, Gemma2Config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention.prefill_prefix_lm_attention import PrefillPrefixLMAttention
from vllm.model_executor.layers.attention.static_sink_attention import StaticSinkAttention
from vllm.model_executor.models import llama
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from attn_backends.backends.flashinfer_mla import FlashInferMLABackend
from attn_backends.engines.vllm import NAMES, register
from attn_backends.engines.vllm.api import version_reason
from attn_backends.engines.vllm.refusals import KERNEL, config_reasons
from tests.engines.vllm.engine import EngineFailed, Row, arguments, run
from tests.engines.vllm.rows import FULL
from tests.engines.vllm.test_block_drafts import judged

GQA, MLA = Row("gqa", "ATTN_BACKENDS_FA3"), Row("mla-1", "ATTN_BACKENDS_TRTLLM_MLA", block_size=32)


def with_options(row: Row, **others: Any) -> Row:
    return replace(row, others=tuple(others.items()))


REFUSED = {
    "an MLA model on a backend of keys and values": (replace(GQA, model="mla-1"), "MLA not supported"),
    "a grouped-query model on a backend of latents": (replace(MLA, model="gqa"), "non-MLA not supported"),
    "pages that the metadata has not": (
        replace(MLA, block_size=16),
        r"block_size not supported', 'block_size 16 \(it takes multiples of 64, multiples of 32\)",
    ),
    "a cache type": (
        with_options(GQA, kv_cache_dtype="fp8_e5m2"),
        r"kv_cache_dtype fp8_e5m2 \(it takes auto, float16,",
    ),
    "a dtype": (with_options(GQA, dtype=torch.float64), r"dtype torch.float64 \(it takes torch.float32,"),
    "LoRA": (with_options(GQA, enable_lora=True), r"LoRA \(enable_lora\), which was not tested"),
}
CONFIGURED: dict[str, tuple[dict[str, Any], str]] = {
    "decode": (
        {"decode_context_parallel_size": 2, "tensor_parallel_size": 2},
        r"\['DCP not supported', 'decode context parallelism \(2 ranks\)'\]",
    ),
    "prefill": (
        {"prefill_context_parallel_size": 2},
        r"\['PCP not supported', 'prefill context parallelism \(2 ranks\)'\]",
    ),
    "pipeline": ({"pipeline_parallel_size": 2}, r"\['pipeline parallelism \(2 ranks\), which was not tested'\]"),
    "KV connector": (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        r"\['KV connector not supported'\]",
    ),
}
"""What an engine of latents is given, and all reasons against it. Two are context parallelism, of a phase."""
DRAFTS: dict[str, tuple[Row, dict[str, Any], str]] = {
    "parallel drafting": (
        replace(GQA, graphs=FULL),
        {"parallel_drafting": True},
        r"V1 \(vLLM chose it itself, .*\); parallel drafting",
    ),
    "a backend of the draft's own": (
        GQA,
        {"attention_backend": "ATTN_BACKENDS_TRTLLM_MLA"},
        r"TRTLLM_MLA of the draft: non-MLA not supported; .* of the draft: block_size 16 \(it takes multiples of 64",
    ),
    "the target's backend": (MLA, {}, "TRTLLM_MLA of the draft: non-MLA not supported"),
    "a cache type of the draft's own": (
        GQA,
        {"kv_cache_dtype": "fp8_e5m2"},
        "FA3 of the draft: kv_cache_dtype fp8_e5m2",
    ),
    "a verify that the device cuts": (
        replace(MLA, backend="ATTN_BACKENDS_FA3_MLA", graphs=FULL, is_cut=True),
        {"attention_backend": "ATTN_BACKENDS_TRTLLM_MLA", "enable_adaptive_verification": True},
        "TRTLLM_MLA of the draft: non-MLA not supported; .* of the draft: adaptive verification, whose rows the device",
    ),
}
"""Ways of drafting with EAGLE-3's head: what is added to the speculative configuration, and why it is refused. vLLM's
validation does so, or our layer where that has its answer from an engine before.
"""
LAYERS: dict[str, tuple[dict[str, Any], str]] = {
    "cross-attention": ({"attn_type": "encoder_decoder"}, "attention type encoder_decoder not supported"),
    "ALiBi": ({"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]}, "ALiBi slopes"),
    "a soft cap": ({"logits_soft_cap": 30.0}, "a soft cap of 30.0 on logits"),
    "the cache of another layer": (
        {"kv_sharing_target_layer_name": "model.layers.0.self_attn.attn"},
        "the cache of an",
    ),
}
"""What the layers of a Llama are given, all but the first."""
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "spans of images": ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
    "a scale for each head": ({"use_per_head_quant_scales": True}, "per-head quant scales not supported"),
    "a reference window": ({"use_rswa": True}, "R-SWA not supported"),
    "chosen keys": ({"use_sparse": True}, "sparse not supported"),
    "an encoder": ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
    "equal results in each batch": ({"use_batch_invariant": True}, "batch invariance not supported"),
}
"""What vLLM asks each backend for, layer by layer, and what it says of ours."""
DERIVED: dict[str, Callable[..., Any]] = {
    "EncoderOnlyAttention_FA3": PrefillPrefixLMAttention,
    "StaticSink_FA3": partial(StaticSinkAttention, sink_len=16),
}
"""Classes that vLLM makes of ours, and its layers that do."""
MODELS = {
    "ALiBi": (BloomConfig(vocab_size=256, hidden_size=64, n_layer=1, n_head=2), "ALiBi slopes"),
    "a soft cap": (
        Gemma2Config(
            vocab_size=256, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            head_dim=32, intermediate_size=64,
        ),
        "a soft cap of 50.0 on logits",
    ),
}  # fmt: skip
"""Real ones of vLLM's, of which it looks at the class in a process of its own, for half a minute; without weights."""


@pytest.fixture(autouse=True)
def _no_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    def load_weights(*args: Any) -> None:
        raise AssertionError("weights are loaded before the engine is refused")

    monkeypatch.setattr(DefaultModelLoader, "load_weights", load_weights)


@pytest.mark.parametrize("what", REFUSED)
def test_an_engine_is_refused(what: str, models: Path) -> None:
    row, words = REFUSED[what]
    with pytest.raises(EngineFailed, match=words):
        run(row, models, [[1, 2, 3]], 1)


@pytest.mark.parametrize("what", CONFIGURED)
def test_a_configuration_is_refused(what: str, models: Path) -> None:
    """By what each rank does before it makes a layer. No rank is started here."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    more, words = CONFIGURED[what]
    config = EngineArgs(**arguments(with_options(MLA, **more), models)).create_engine_config()
    with set_current_vllm_config(config), pytest.raises(ValueError, match=words):
        get_attn_backend(80, torch.float32, "auto", use_mla=True, num_heads=4)


@pytest.mark.full
def test_ranks_refuse_context_parallelism(
    models: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    more, words = CONFIGURED["decode"]
    with pytest.raises(EngineFailed):
        run(with_options(MLA, distributed_executor_backend="mp", **more), models, [[1, 2, 3]], 1)
    told = "".join(capfd.readouterr())
    assert re.search(words, told)
    assert "Loading weights took" not in told


def test_vllm_has_no_cascade_attention_that_could_be_asked_for(models: Path) -> None:
    """Else a builder would be given prefixes that all requests share, which ours does not read."""
    from vllm.v1.attention.backend import AttentionMetadataBuilder

    given = arguments(with_options(GQA, disable_cascade_attn=False), models)
    assert EngineArgs(**given).create_engine_config().model_config.disable_cascade_attn
    assert not hasattr(AttentionMetadataBuilder, "use_cascade_attention")


@pytest.mark.parametrize("what", DRAFTS)
def test_a_way_of_drafting_is_refused(what: str, models: Path, tmp_path: Path) -> None:
    row, more, words = DRAFTS[what]
    copytree(models / "gqa-draft", tmp_path / "draft")
    fields = json.loads((tmp_path / "draft/config.json").read_text()) | {"ptd_token_id": 0}  # vLLM's own condition
    (tmp_path / "draft/config.json").write_text(json.dumps(fields))
    drafts = {"method": "eagle3", "model": str(tmp_path / "draft"), "num_speculative_tokens": 3}
    with pytest.raises(EngineFailed, match=words):
        run(with_options(row, speculative_config=drafts | more), models, [[1, 2, 3]], 1)


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_a_draft_for_which_vllm_would_choose_is_refused(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, ours = {"dflash": "SpecForge DFlash", "dspark": "DSpark"}[method], "ATTN_BACKENDS_FA3"
    with pytest.raises(EngineFailed, match=f'a {method} draft without "attention_backend"'):
        judged(name, tmp_path, monkeypatch, ours, attention_backend=None)


def test_a_draft_of_blocks_on_a_backend_of_latents_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "ATTN_BACKENDS_FA3_MLA of the draft: non-MLA not supported"
    with pytest.raises(EngineFailed, match=words):
        judged(
            "SpecForge DFlash", tmp_path, monkeypatch, "ATTN_BACKENDS_FA3", attention_backend="ATTN_BACKENDS_FA3_MLA"
        )


def test_a_name_that_is_not_registered_is_refused_where_it_is_read(models: Path) -> None:
    """As of `dsv4`, which has no view of vLLM's caches."""
    with pytest.raises(ValueError, match="ATTN_BACKENDS_DSV4"):
        EngineArgs(**arguments(replace(GQA, backend="ATTN_BACKENDS_DSV4"), models)).create_engine_config()


@pytest.mark.parametrize("name", NAMES)
def test_deepseek_v4_asks_no_backend_that_is_registered(name: str) -> None:
    """So nothing of ours can refuse it, as the page says. If vLLM asks one day, the page is wrong."""
    from vllm.models.deepseek_v4.nvidia.model import _select_dsv4_attn_cls

    register()
    config = SimpleNamespace(attention_config=SimpleNamespace(backend=AttentionBackendEnum[name]))
    assert _select_dsv4_attn_cls(config).__name__ == "DeepseekV4FlashMLAAttention"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("what", LAYERS)
def test_a_layer_is_refused(what: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more, words = LAYERS[what]
    attention = llama.Attention

    def given(*args: Any, prefix: str, **kwargs: Any) -> Any:
        is_first = ".layers.0." in prefix
        return attention(*args, prefix=prefix, **kwargs if is_first else kwargs | more)

    monkeypatch.setattr(llama, "Attention", given)
    with pytest.raises(EngineFailed, match=words):
        run(GQA, models, [[1, 2, 3]], 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", OTHERS)
def test_what_no_backend_of_ours_has_is_refused(name: str, what: str) -> None:
    register()
    backend: Any = AttentionBackendEnum[name].get_class()
    more, words = OTHERS[what]
    asked = AttentionSelectorConfig(80, torch.float32, "auto", None, use_mla=backend.is_mla())._replace(**more)
    assert words in backend.validate_configuration(device_capability=DeviceCapability(9, 0), **asked._asdict())


@pytest.mark.parametrize("name", DERIVED)
def test_a_layer_whose_batches_vllm_changes_is_refused(
    name: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, "Attention", DERIVED[name])
    with pytest.raises(EngineFailed, match=f"ATTN_BACKENDS_FA3 in vLLM.*attention of the kind {name}, which was not"):
        run(GQA, models, [[1, 2, 3]], 1)


def test_what_the_host_does_to_a_batch_is_refused(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # else microbatches make vLLM take V1
    chunks = {"hf_overrides": {"attention_chunk_size": 32}}
    given = arguments(with_options(replace(GQA, graphs=FULL, is_cut=True), **chunks), models)
    config = EngineArgs(**given).create_engine_config()
    config.parallel_config.enable_dbo = True
    assert config_reasons(config) == [
        "adaptive verification in chunks of 32 tokens, made on the host",
        "microbatches (enable_dbo), which were not tested",
    ]


@pytest.mark.full
@pytest.mark.parametrize("what", MODELS)
def test_a_model_is_refused(what: str, tmp_path: Path) -> None:
    config, words = MODELS[what]
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(tmp_path / "model")
    with pytest.raises(EngineFailed, match=words):
        run(replace(GQA, model="model", drafts=False), tmp_path, [[1, 2, 3]], 1)


def test_model_runner_v1_is_refused_by_name(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(EngineFailed, match=r"model runner V1 \(unset VLLM_USE_V2_MODEL_RUNNER;"):
        run(GQA, models, [[1, 2, 3]], 1)


def test_a_kernel_that_plans_on_the_host_is_refused(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as FlashInfer's of a version that our device plan does not know."""
    kernel = FlashInferMLABackend.kernels[-1]
    on_host = {kind: replace(able, needs_host_lens=True) for kind, able in kernel.capabilities.items()}
    monkeypatch.setattr(FlashInferMLABackend, "kernels", (replace(kernel, capabilities=on_host),))
    with pytest.raises(EngineFailed, match="kernel torch plans lengths on the host"):
        run(replace(MLA, backend="ATTN_BACKENDS_FLASHINFER_MLA"), models, [[1, 2, 3]], 1)


def test_a_kernel_that_is_asked_for_is_the_one_or_none(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNEL, "triton")
    with pytest.raises(EngineFailed, match=f"{KERNEL}=triton: fa3 on cpu"):
        run(GQA, models, [[1, 2, 3]], 1)


def test_another_version_is_refused_with_both_numbers() -> None:
    assert version_reason("0.33.0") == version_reason("0.33.2+cu130") == ""
    reason = version_reason("0.34.1")
    assert "0.34.1" in reason
    assert "0.33" in reason.replace("0.34.1", "")


def test_all_names_are_registered_and_again_is_nothing() -> None:
    register()
    register()
    for name in NAMES:
        assert AttentionBackendEnum[name].get_class().get_name() == name
