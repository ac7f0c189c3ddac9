"""Stand-in for SGLang's kernels on a CPU: the operators that its EAGLE worker calls there, in plain torch.

SGLang's own build of `sgl_kernel` for CPUs is on no registry. Each function does what the Triton or CUDA kernel of the
same name does; `tests/engines/sglang/test_stand_ins.py` holds them to SGLang's own definitions. Any other name imports,
and raises when it is called.
"""

from __future__ import annotations

import torch
from sgl_missing import Missing

from sgl_kernel.slots import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from sgl_kernel.trees import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

__version__ = "0.4.10"

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]


def __getattr__(name: str) -> Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(name)


if not torch.cuda.is_available():  # SGLang's DeepSeek calls it whatever the device
    torch.cuda.synchronize = lambda device=None: None
