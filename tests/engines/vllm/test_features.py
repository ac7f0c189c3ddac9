"""What not every model has, call by call; of the same precision, tokens and drafts too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention import attention, mla_attention
from vllm.model_executor.models import llama

from attn_backends.engines.vllm import builder
from tests.engines.vllm import given, stand_ins
from tests.engines.vllm.engine import Row, prompts, run
from tests.engines.vllm.laws import assert_attended, assert_compared
from tests.engines.vllm.rows import BOTH, FULL
from tests.engines.vllm.shadow import compared

EIGHT_BITS = (("kv_cache_dtype", "fp8"),)
SCALE, V_SCALE = 0.25, 0.5


def with_sinks(patch: pytest.MonkeyPatch) -> None:
    """Llama's layers, target and draft, are given some."""
    patch.setattr(llama, "Attention", given.with_sinks())


def with_scales(patch: pytest.MonkeyPatch) -> None:
    """As a checkpoint that was calibrated has them; a latent's is that of keys."""
    default = attention.set_default_quant_scales

    def scaled(layer: Any, register_buffer: bool = False) -> None:
        default(layer, register_buffer)
        layer._k_scale.fill_(SCALE)
        layer._v_scale.fill_(V_SCALE)
        layer._k_scale_float, layer._v_scale_float = SCALE, V_SCALE

    for module in (attention, mla_attention):
        patch.setattr(module, "set_default_quant_scales", scaled)


@dataclass(frozen=True)
class Feature:
    """seen: as of `Shadow`. change: of the model."""

    row: Row
    seen: set[tuple[torch.dtype, int | None, bool]]
    change: Callable[[pytest.MonkeyPatch], None] = lambda patch: None


WINDOWS = Row("gqa-window", "ATTN_BACKENDS_FA3", BOTH)
BY_BATCH = (1, 1, 3), (2, 2, 0), (3, 4, 2)
FEATURES = {
    "windows and sinks": Feature(WINDOWS, {(torch.float32, None, True), (torch.float32, 20, True)}, with_sinks),
    "latents of 8 bits, with a scale": Feature(
        Row("mla-1", "ATTN_BACKENDS_TRTLLM_MLA", FULL, block_size=32, others=EIGHT_BITS),
        {(torch.float8_e4m3fn, None, False)},
        with_scales,
    ),
    "keys and values of 8 bits, each with a scale": Feature(
        Row("gqa", "ATTN_BACKENDS_FA3", FULL, others=EIGHT_BITS), {(torch.float8_e4m3fn, None, False)}, with_scales
    ),
    "drafts by the number of requests": Feature(
        Row("gqa", "ATTN_BACKENDS_FA3", FULL, schedule=BY_BATCH), {(torch.float32, None, False)}
    ),
}
ALONE = {
    "drafts by the number of requests, of latents": Feature(
        Row("mla-1", "ATTN_BACKENDS_TRTLLM_MLA", BOTH, block_size=32, schedule=BY_BATCH), {(torch.float32, None, False)}
    ),
    "windows": Feature(WINDOWS, {(torch.float32, None, False), (torch.float32, 20, False)}),
    "sinks": Feature(Row("gqa", "ATTN_BACKENDS_FA3", FULL), {(torch.float32, None, True)}, with_sinks),
    "latents of 8 bits, fa3": Feature(
        Row("mla-3", "ATTN_BACKENDS_FA3_MLA", BOTH, others=EIGHT_BITS), {(torch.float8_e4m3fn, None, False)}
    ),
}
CASES = [pytest.param(each, id=name) for name, each in FEATURES.items()]
CASES += [pytest.param(each, id=name, marks=pytest.mark.full) for name, each in ALONE.items()]


@pytest.mark.parametrize("feature", CASES)
def test_a_feature(feature: Feature, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(builder.logger, "info", lambda words, *args: told.append(words % args))
    row = feature.row
    feature.change(monkeypatch)
    with compared() as shadow:
        found = run(row, models, prompts(4), 8, begin=shadow.begin)
    assert shadow.seen == feature.seen
    mixed = [line for line in told if "running requests in two steps" in line]
    kernels = [line for line in told if line not in mixed]
    assert all(" attends in model.layers." in line and "'decode': 'torch'" in line for line in kernels)
    assert kernels
    assert all(line.endswith("no measurement has one step as fast as two") for line in mixed)
    assert mixed
    assert_attended(row, found)
    assert_compared(row, found, shadow)
    if row.others != EIGHT_BITS:
        plain = "TESTS_PLAIN_MLA" if row.is_mla else "TESTS_PLAIN"
        wanted = run(replace(row, backend=plain, graphs="NONE"), models, prompts(4), 8)
        assert (found.tokens, found.drafts) == (wanted.tokens, wanted.drafts)
    assert {*found.drafted} - {0} == row.drafted - {0}


def test_the_stand_in_stores_latents_of_8_bits_by_their_scale() -> None:
    stand_ins.install()
    rows, cache = torch.randn(3, 6), torch.zeros(2, 4, 6, dtype=torch.uint8)
    slots, scale = torch.tensor([5, -1, 2]), torch.tensor(SCALE)
    torch.ops._C_cache_ops.concat_and_cache_mla(*rows.split((4, 2), -1), cache, slots, "fp8", scale, False)
    stored = cache.flatten(0, 1).view(torch.float8_e4m3fn).float() * SCALE
    torch.testing.assert_close(stored[[5, 2]], rows[[0, 2]], rtol=2**-4, atol=2**-9)
    assert not stored[[0, 1, 3, 4, 6, 7]].any()
