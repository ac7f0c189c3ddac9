"""vLLM's graphs on a CPU: its managers capture and replay the library's `RecordedGraph` in place of CUDA's.

A recorded graph freezes addresses and Python values, and poisons intermediates before a replay. The managers, their
choice of a graph, their padding and their order are vLLM's own. Replaced is what asks CUDA for a stream, a pool or
memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import vllm.compilation.breakable_cudagraph as breakable
import vllm.v1.worker.gpu.cudagraph_utils as managers
from triton.runtime.interpreter import InterpretedFunction
from vllm.forward_context import DPMetadata
from vllm.model_executor.layers.attention import mla_attention

from attn_backends.graphs import RecordedGraph, run_at_replays

NUM: Counter[str] = Counter()
"""Graphs captured and replayed since it was cleared."""


class Graph(RecordedGraph):
    """With the calls of `torch.cuda.CUDAGraph`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._open = ExitStack()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """What runs inside becomes the graph."""
        NUM["captured"] += 1
        with self.recording():
            yield

    def capture_begin(self, pool: Any = None) -> None:
        """Begin a piece."""
        self._open.enter_context(self.capturing())

    def capture_end(self) -> None:
        """End it."""
        self._open.close()

    def replay(self) -> None:
        """As of a recorded graph."""
        NUM["replayed"] += 1
        super().replay()


@cache
def install() -> None:
    """Put recorded graphs in place of CUDA's, once a process."""
    for module in (breakable, managers):
        module.capture_pool = lambda pool, config: nullcontext(None)
    breakable.weak_ref_tensor = breakable.weak_ref_tensors = lambda tensors: tensors
    mla_attention.MLAAttention.forward = _forward_mla
    managers.graph_capture = lambda device: nullcontext()
    managers.current_stream = lambda: None
    torch.cuda.CUDAGraph = Graph
    torch.cuda.graph = lambda graph, pool=None, stream=None: graph.capturing()
    torch.accelerator.get_memory_info = lambda *args: (0, 0)
    DPMetadata.make = lambda config, num_tokens, across: DPMetadata(across)  # it reads the host's tensor `across`
    _record_launches()


def _forward_mla(
    self: Any, q: Any, kv_c: Any, k_pe: Any, output_shape: Any = None, q_dcp_replicated: Any = None
) -> Any:
    """As a GPU's: by the functions behind the operators of MLA attention, at which vLLM breaks a capture; a direct call
    passes them by.
    """
    mla_attention.unified_mla_kv_cache_update(kv_c, k_pe, self.layer_name, self.kv_cache_dtype, self._k_scale)
    output = torch.empty(output_shape, dtype=q.dtype)
    mla_attention.unified_mla_attention_with_output(q, kv_c, k_pe, output, self.layer_name)
    return output


def _record_launches() -> None:
    """Launches of interpreted Triton kernels pass torch's dispatcher by."""
    launch = InterpretedFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        # Held by address: a tensor that the caller moves is not followed.
        frozen = [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args]
        run_at_replays(lambda: launch(self, *frozen, grid=grid, warmup=warmup, **kwargs))

    InterpretedFunction.run = run
