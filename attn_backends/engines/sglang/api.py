"""All that is imported of SGLang, once the version was found to be the supported one.

A missing name raises here; `plugin.register_all` keeps the reason for whoever asks for one of the backends.
"""

from __future__ import annotations

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.allocation import get_last_loc_torch
from sglang.srt.models.deepseek_common import attention_backend_handler
from sglang.srt.runtime_context import attention_backends, get_exec, get_parallel, get_schedule, get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.ragged_verify import ragged_verify_compact_enabled

absorbed = attention_backend_handler._dispatch_mla_subtype
"""Says that DeepSeek's attention is absorbed in every situation; SGLang's default sends some prompts elsewhere."""
mla_handlers = attention_backend_handler.AttentionBackendRegistry

__all__ = [
    "AttentionBackend",
    "RadixAttention",
    "TRTLLMHAAttnBackend",
    "TreeMaskMode",
    "VerifyMask",
    "absorbed",
    "attention_backends",
    "get_exec",
    "get_last_loc_torch",
    "get_parallel",
    "get_schedule",
    "get_spec",
    "mla_handlers",
    "ragged_verify_compact_enabled",
]
