"""Stand-ins for operators that vLLM compiles and a CPU's pure Python build lacks. There are no others."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.spec_decode import adaptive_verification

from attn_backends.conformance.foreign.vllm.stand_ins import concat_and_cache_mla
from tests.engines.vllm import given

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


def install_adaptive_verification(patch: pytest.MonkeyPatch) -> None:
    """Costs of steps, which only a GPU measures, and confidences that differ as a trained head's do. Streams and events
    on a CPU are vLLM's own.
    """
    manager = adaptive_verification.AdaptiveVerificationManager
    patch.setattr(adaptive_verification, "stream", lambda *streams: nullcontext())
    patch.setattr(
        adaptive_verification, "_assign_draft_token_budget_compiled", adaptive_verification._assign_draft_token_budget
    )
    record, drawn = manager.record_confidences, torch.Generator().manual_seed(0)
    patch.setattr(
        manager,
        "record_confidences",
        lambda self, probs, batch: record(self, torch.rand(probs.shape, generator=drawn), batch),
    )
    patch.setattr(manager, "batches_to_profile", lambda self, sizes: ())
    patch.setattr(manager, "set_initial_cost_curves", given.costs_by_rows)


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
