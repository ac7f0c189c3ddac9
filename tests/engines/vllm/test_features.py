"""What not every model has, call by call: tokens have nothing of the same precision to be compared with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attn_backends.engines.vllm import builder
from tests.engines.vllm.engine import Row, prompts, run
from tests.engines.vllm.laws import assert_attended, assert_compared
from tests.engines.vllm.rows import BOTH, FULL
from tests.engines.vllm.shadow import compared

FEATURES = {
    "an 8-bit cache": (
        Row("gqa", "ATTN_BACKENDS_FA3", FULL, others=(("kv_cache_dtype", "fp8"),)),
        {(torch.float8_e4m3fn, None)},
    ),
    "windows": (Row("gqa-window", "ATTN_BACKENDS_FA3", BOTH), {(torch.float32, None), (torch.float32, 20)}),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature(feature: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(builder.logger, "info", lambda words, *args: told.append(words % args))
    row, seen = FEATURES[feature]
    with compared() as shadow:
        found = run(row, models, prompts(4), 8, begin=shadow.begin)
    assert shadow.seen == seen
    mixed = [line for line in told if "running requests in two steps" in line]
    kernels = [line for line in told if line not in mixed]
    assert all(line.startswith("fa3 attends in model.layers.") and "'decode': 'torch'" in line for line in kernels)
    assert kernels
    assert all(line.endswith("no measurement has one step as fast as two") for line in mixed)
    assert mixed
    assert_attended(row, found)
    assert_compared(row, found, shadow)
