"""What an attention layer can't be, and what a kernel says of one that it does not take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_backends import AttentionLayer, Capabilities, UnsupportedStepError
from attn_backends.cache import CacheFormat
from attn_backends.contract.capabilities import extras_reasons
from attn_backends.kernels.operators import store_kv

LAYER = AttentionLayer(0, 4, 2, 16, 16, 0.25)
FLOAT = torch.float32


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"window": -1}, "window is -1, not a positive integer"),
        ({"window": 0}, "window is 0, not a positive integer"),
        ({"scale": None}, "scale is None, not a finite number"),
        ({"scale": float("nan")}, "scale is nan, not a finite number"),
        ({"k_scale": None}, "k_scale is None, not a finite number"),
        ({"k_scale": 0}, r"k_scale is 0, not from 2\*\*-63 to 2\*\*63"),
        ({"k_scale": -0.5}, "k_scale is -0.5, not from"),
        ({"v_scale": float("inf")}, "v_scale is inf, not a finite number"),
        ({"v_scale": 1e-46}, "v_scale is 1e-46, not from"),
        ({"v_scale": 1e39}, r"v_scale is 1e\+39, not from"),
        ({"k_scale": 1.2e-38}, "k_scale is 1.2e-38, not from"),
        ({"v_scale": 1e38}, r"v_scale is 1e\+38, not from"),
        ({"scale": 1e30, "k_scale": 1e10}, r"scale \* k_scale is 1e\+40; times log2"),
        ({"scale": 2.4e38}, r"scale \* k_scale is 2.4e\+38; times log2"),
        ({"scale": -0.25}, "scale is -0.25, not above 0"),
        ({"scale": 0.0}, "scale is 0.0, not above 0"),
        ({"scale": 1e-30, "k_scale": 1e-10}, r"scale \* k_scale is 1e-40; times log2"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0, not a positive integer"),
        ({"v_head_dim": 16.0}, "v_head_dim is 16.0, not a positive integer"),
        ({"window": True}, "window is True, not a positive integer"),
        ({"sinks": 0.5}, r"sinks are 0.5, not \[4\] float32, bfloat16 or float16"),
        ({"sinks": torch.zeros(2)}, r"sinks are \[2\] torch.float32, not \[4\] float32"),
        ({"sinks": torch.zeros(4, 1)}, r"sinks are \[4, 1\] torch.float32, not \[4\] float32"),
        ({"sinks": torch.zeros(4).double()}, r"sinks are \[4\] torch.float64, not \[4\] float32, bfloat16 or float16"),
        ({"num_kv_heads": 3}, "4 query heads can't share 3 KV heads evenly"),
    ],
    ids=str,
)
def test_a_layer_that_can_not_be(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedStepError, match=f"^layer 0: {reason}"):
        replace(LAYER, **changes)


@pytest.mark.parametrize("k_scale", [2.0**-63, 2.0**63])
def test_scales_leave_room_for_values(k_scale: float) -> None:
    """What is stored with the smallest and the largest of them is read back in float32."""
    pages, rows = torch.zeros(1, 2, 1, 8), torch.linspace(-1e15, 1e15, 16).view(2, 1, 8)
    store_kv(pages, pages.clone(), rows, rows, torch.arange(2), k_scale)
    torch.testing.assert_close(pages[0] * replace(LAYER, k_scale=k_scale).k_scale, rows)


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        ({}, torch.int32, "queries or rows of torch.int32 (it takes torch.float32)"),
        ({"window": 4}, FLOAT, "a sliding window of 4 tokens (it takes none)"),
        ({"sinks": torch.zeros(4)}, FLOAT, "attention sinks (it takes none)"),
        ({"v_scale": 2.0}, FLOAT, "scaled keys or values (k_scale=1.0, v_scale=2.0; it takes 1)"),
    ],
    ids=str,
)
def test_a_reason_reads_as_a_sentence(changes: dict[str, Any], dtype: torch.dtype, reason: str) -> None:
    capabilities = Capabilities(page_sizes=None, dtypes=frozenset({FLOAT}))
    assert capabilities.layer_reasons(replace(LAYER, **changes), dtype, dtype) == [reason]


def test_reasons_of_trees_and_latents_say_so() -> None:
    layer = replace(LAYER, window=4, sinks=torch.zeros(4))
    assert extras_reasons(layer, CacheFormat.LATENT) == ["attention sinks on latents (they take none)"]
    capabilities = Capabilities(page_sizes=None, dtypes=frozenset({FLOAT}), window=True, sinks=True)
    assert capabilities.tree_reasons(layer) == [
        "a sliding window of 4 tokens over a draft tree (rows of other depths begin at other keys of the prefix, and "
        "it takes one window for all: draft chains, or take a kernel with tree_window)"
    ]
    assert capabilities.tree_reasons(replace(layer, window=None)) == []
    assert replace(capabilities, tree_window=True).tree_reasons(layer) == []
    assert replace(capabilities, window=False).tree_reasons(layer) == [], "layer_reasons has said it"
