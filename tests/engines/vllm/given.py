"""What these tests give an engine that no small model or CPU has, in each of its processes and on a GPU, too."""

from __future__ import annotations

import os
from typing import Any

SINKS = "ATTN_BACKENDS_TESTS_SINKS"
COSTS = "ATTN_BACKENDS_TESTS_COSTS"
"""Environment variables: set where `register` gives them."""
BUG = "ATTN_BACKENDS_TESTS_BUG"
"""That names a bug of `defects.py`, which is planted."""


def with_sinks() -> Any:
    """vLLM's attention layer with sinks. No model of vLLM's that is this small has them."""
    import torch
    from vllm.model_executor.layers.attention import Attention

    class WithSinks(Attention):
        def __init__(self, num_heads: int, *args: Any, **kwargs: Any) -> None:
            super().__init__(num_heads, *args, sinks=torch.linspace(-1.0, 2.0, num_heads), **kwargs)

    return WithSinks


def costs_by_rows(manager: Any, samples: Any) -> None:
    """In place of the times that adaptive verification measures: a verify costs as it has rows, so that it is cut. On a
    model this small each takes as long as another.
    """
    manager.set_cost_curves([(1, 1.0)], [(rows, 1.0 + 0.1 * rows) for rows in range(1, 257)])


def register() -> None:
    """Entry point of `vllm.general_plugins`: Llama's layers, target and draft, get sinks, and verifies their costs."""
    if os.environ.get(SINKS) == "1":
        from vllm.model_executor.models import llama

        llama.Attention = with_sinks()
    if os.environ.get(COSTS) == "1":
        from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

        AdaptiveVerificationManager.set_initial_cost_curves = costs_by_rows
