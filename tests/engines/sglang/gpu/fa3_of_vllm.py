"""A plug-in for SGLang: its FlashAttention-3 on vLLM's build of the kernel, where sglang-kernel's is not carried.

Both build the same source; theirs takes a chunk of attention and masks, which these engines leave out, and vLLM's the
ranks of context parallelism.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

CHUNK, METADATA_CHUNK, SINKS = 27, 19, 34
"""Where SGLang's arguments have their chunk of attention, of `fwd` and of the metadata, and where `fwd`'s end that vLLM
takes, too.
"""


def install() -> None:
    """Called by SGLang in each of its processes."""
    import torch
    import vllm.vllm_flash_attn.flash_attn_interface  # noqa: F401  (loads the operators)

    theirs = torch.ops._vllm_fa3_C

    def fwd(*given: Any) -> Any:
        assert not any((given[CHUNK], *given[SINKS + 1 :])), "vLLM's build has neither chunks nor masks"
        return theirs.fwd(*given[:CHUNK], *given[CHUNK + 1 : SINKS + 1], 1, 0, None)

    def get_scheduler_metadata(*given: Any) -> Any:
        return theirs.get_scheduler_metadata(*given[:METADATA_CHUNK], *given[METADATA_CHUNK + 1 :])

    torch.ops.sgl_kernel.fwd = SimpleNamespace(default=fwd)
    torch.ops.sgl_kernel.get_scheduler_metadata = get_scheduler_metadata
    sys.modules["sgl_kernel.flash_ops"] = ModuleType("sgl_kernel.flash_ops")
