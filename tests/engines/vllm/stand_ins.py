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


def _define(namespace: str, schema: str, function: Any) -> None:
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(schema)
    library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    _LIBRARIES.append(library)
