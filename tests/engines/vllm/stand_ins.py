"""Stand-ins for operators that vLLM compiles and a CPU's pure Python build lacks. There are no others."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from attn_backends.conformance.foreign.vllm.stand_ins import concat_and_cache_mla

_LIBRARIES: list[torch.library.Library] = []


@cache
def install() -> None:
    """Define them, once a process."""
    _define("_C", "init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None)
    _define(
        "_C_cache_ops",
        "concat_and_cache_mla(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, str kv_cache_dtype, "
        "Tensor scale, bool skip_scale) -> ()",
        concat_and_cache_mla,
    )


@cache
def install_sampling() -> None:
    """That of greedy sampling in model runner V1, once a process."""
    _define("_C", "greedy_argmax(Tensor logits) -> Tensor", lambda logits: logits.argmax(dim=-1).view(-1))


@cache
def install_block_drafts() -> None:
    """Those that a block draft's context is made by, once a process."""
    _define("_C", "rms_norm(Tensor(a!) out, Tensor input, Tensor weight, float epsilon) -> ()", _rms_norm)
    _define(
        "_C",
        "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor? key, int head_size, Tensor cos_sin_cache, "
        "bool is_neox) -> ()",
        _rotary_embedding,
    )


def _rms_norm(out: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    """weight: [size], or [layers, size] of rows [layers, ..., size]."""
    weight = weight.view(*weight.shape[:-1], *[1] * (rows.dim() - weight.dim()), weight.shape[-1])
    out.copy_(rows * (rows.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight)


def _rotary_embedding(
    positions: torch.Tensor, query: torch.Tensor, key: Any, head_size: int, cache: torch.Tensor, is_neox: bool
) -> None:
    assert is_neox, "halves are rotated"
    rows = query.view(len(positions), -1, head_size)
    cos, sin = cache[positions].unsqueeze(1).chunk(2, -1)
    first, second = rows.chunk(2, -1)
    rows.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))


def _define(namespace: str, schema: str, function: Any) -> None:
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(schema)
    library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    _LIBRARIES.append(library)
