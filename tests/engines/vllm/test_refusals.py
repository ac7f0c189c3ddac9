"""What we lack is refused while an engine is built, in vLLM's own words or ours, and nothing takes its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attn_backends.backends.flashinfer_mla import FlashInferMLABackend
from attn_backends.engines.vllm import NAMES, register
from attn_backends.engines.vllm.api import version_reason
from attn_backends.engines.vllm.refusals import KERNEL
from tests.engines.vllm.engine import EngineFailed, Row, run

GQA, MLA = Row("gqa", "ATTN_BACKENDS_FA3"), Row("mla-1", "ATTN_BACKENDS_TRTLLM_MLA", block_size=32)


def with_options(row: Row, **others: Any) -> Row:
    return replace(row, others=tuple(others.items()))


REFUSED = {
    "an MLA model on a backend of keys and values": (replace(GQA, model="mla-1"), "MLA not supported"),
    "a grouped-query model on a backend of latents": (replace(MLA, model="gqa"), "non-MLA not supported"),
    "pages that the metadata has not": (replace(MLA, block_size=16), "block_size not supported"),
    "a cache type": (with_options(GQA, kv_cache_dtype="fp8_e5m2"), "kv_cache_dtype not supported"),
    "DeepSeek-V4": (replace(MLA, backend="ATTN_BACKENDS_DSV4"), "dsv4 has no view of vLLM's caches"),
    "decode context parallelism": (
        with_options(GQA, decode_context_parallel_size=2, tensor_parallel_size=2),
        "DCP|decode_context|context parallel",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_engine_is_refused(what: str, models: Path) -> None:
    row, words = REFUSED[what]
    with pytest.raises(EngineFailed, match=words):
        run(row, models, [[1, 2, 3]], 1)


def test_model_runner_v1_is_refused_by_name(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(EngineFailed, match="model runner V1"):
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
    with pytest.raises(EngineFailed, match="triton: "):
        run(GQA, models, [[1, 2, 3]], 1)


def test_another_version_is_refused_with_both_numbers() -> None:
    assert version_reason("0.33.0") == version_reason("0.33.2+cu130") == ""
    reason = version_reason("0.34.1")
    assert "0.34.1" in reason
    assert "0.33" in reason.replace("0.34.1", "")


def test_all_names_are_registered_and_again_is_nothing() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register()
    register()
    for name in NAMES:
        assert AttentionBackendEnum[name].get_class().get_name() == name
