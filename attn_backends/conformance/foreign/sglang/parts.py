"""Differences between SGLang's MLA backends: how they are made, and the place and fields of their metadata."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor

from attn_backends.conformance.foreign.pages import Rows, leading_slots, seen_by_rows
from attn_backends.conformance.foreign.sglang import stand_ins


@dataclass(frozen=True)
class Parts:
    """One of SGLang's backends.

    name: of the server's option. module: where it is, as of `api.attention_module`. backend, draft: names of its class
    and of its multi-step draft class there. held: attribute of a backend that is its metadata. read: (backend,
    metadata, batch) -> what the metadata lists. install: puts stand-ins of its kernels in place. joined: whether it
    takes queries and latents whole, not in two parts.
    """

    name: str
    module: str
    backend: str
    draft: str
    held: str
    read: Callable[[Any, Any, Any], Rows | None]
    install: Callable[[Any], None]
    joined: bool = False

    def make(self, api: Any, role: str, runner: Any, num_steps: int) -> Any:
        """The backend of a role of `engine.SERVED_BY`, at topk 1."""
        module = api.attention_module(self.module)
        if role == "draft":
            return getattr(module, self.draft)(runner, 1, num_steps)
        return getattr(module, self.backend)(runner)


def _read_lists(backend: Any, planned: Any, batch: Any) -> Rows | None:
    """What a FlashInfer wrapper's plan lists for each row, the request's last row seeing all of its keys."""
    wrapper = getattr(planned, "decode_wrapper", None) or getattr(planned, "prefill_wrapper", None)
    if wrapper is None:
        return None
    starts, offsets, lens = (each.tolist() for each in _plan_of(backend, planned, wrapper))
    indices, rows = wrapper._kv_indices_buf, []
    for request, length in enumerate(lens):
        width = starts[request + 1] - starts[request]
        listed = indices[offsets[request] : offsets[request] + length].tolist()
        rows += seen_by_rows(listed, width)
    return rows


def _plan_of(backend: Any, planned: Any, wrapper: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(qo_indptr, kv_indptr, kv_len) that the wrapper's work was planned from."""
    if work := getattr(wrapper._cached_module, "work", None):
        return work[0], work[1], work[2]
    fast = getattr(backend, "fast_decode_kwargs", {})
    if wrapper._use_cuda_graph and hasattr(planned, "decode_wrapper") and "kv_len_arr_cpu" in fast:
        return fast["qo_indptr_cpu"], fast["kv_indptr_cpu"], fast["kv_len_arr_cpu"]
    return wrapper._qo_indptr_buf, wrapper._kv_indptr_buf, wrapper._kv_len_arr_buf


def _read_blocks(backend: Any, planned: Any, batch: Any) -> Rows | None:
    """What a block table and lengths list for each row of a batch of one width."""
    if planned is None:
        return None
    size, rows = backend.page_size, []
    width = batch.positions.numel() // batch.batch_size
    for pages, length in zip(planned.block_kv_indices.tolist(), planned.seq_lens_k.tolist(), strict=False):
        rows += seen_by_rows(leading_slots(pages, size, length), width)
    return rows


def _install_flashinfer(api: Any) -> None:
    for name in ("BatchMLAPagedAttentionWrapper", "BatchPrefillWithRaggedKVCacheWrapper"):
        setattr(api.attention_module("flashinfer_mla_backend"), name, stand_ins.MLAWrapper)


def _install_trtllm(api: Any) -> None:
    _install_flashinfer(api)
    module = api.attention_module("trtllm_mla_backend")
    module.flashinfer = SimpleNamespace(decode=stand_ins)
    module._jit_fixup_module = module.make_persistent_multi_ctas_kv_counter_buffer = stand_ins.nothing
    module.can_use_set_mla_kv_concat_q = module.can_use_set_mla_kv_concat_q_fp8 = stand_ins.nothing
    module.concat_mla_absorb_q_general = stand_ins.concatenate


def _read_pages(backend: Any, planned: Any, batch: Any) -> Rows | None:
    """What a page table, lengths and offsets of ragged queries list for each row."""
    if planned is None:
        return None
    size, rows = backend.page_size, []
    lists = planned.page_table.tolist(), planned.cache_seqlens_int32.tolist(), planned.cu_seqlens_q.diff().tolist()
    for pages, length, width in zip(*lists, strict=False):
        rows += seen_by_rows(leading_slots(pages, size, length), width)
    return rows


def _read_parts(backend: Any, planned: Any, batch: Any) -> Rows | None:
    """What CSR lists give each row; before the step's own rows, if the metadata has offsets of queries."""
    if planned is None:
        return None
    offsets, listed = planned.kv_indptr.tolist(), stand_ins.from_address(planned.kv_indices).tolist()
    before = [listed[start:end] for start, end in pairwise(offsets[: batch.batch_size + 1])]
    if planned.qo_indptr is None:
        return before
    own, rows = batch.out_cache_loc.tolist(), []
    for keys, (start, end) in zip(before, pairwise(planned.qo_indptr.tolist()), strict=False):
        rows += [keys + own[start : row + 1] for row in range(start, end)]
    return rows


def _install_triton(api: Any) -> None:
    decode: Any = import_module("sglang.kernels.ops.attention.decode_attention")
    extend: Any = import_module("sglang.kernels.ops.attention.extend_attention")
    decode.decode_attention_fwd = stand_ins.decode_attention_fwd
    extend.extend_attention_fwd = stand_ins.extend_attention_fwd
    masks = api.attention_module("verify_mask")
    masks.default_tree_mask_mode = lambda: masks.TreeMaskMode.FULL_MASK  # as where its Triton kernels run


def _install_flash_attention(api: Any) -> None:
    names = ("flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata")
    module: Any = ModuleType("sgl_kernel.flash_attn")
    vars(module).update(dict.fromkeys(names, stand_ins.nothing))
    sys.modules[module.__name__] = module
    api.attention_module("flashattention_backend").flash_attn_with_kvcache = stand_ins.flash_attn_with_kvcache


def read_windows(backend: Any, planned: Any, batch: Any) -> Rows | None:
    """Slots of each row's window. SGLang's lists begin with the row's own token; these end with it."""
    core = getattr(planned, "core_attn_metadata", None)
    if core is None:
        return None
    lists = core.swa_page_indices.tolist(), core.swa_topk_lengths.tolist()
    return [listed[:length][::-1] for listed, length in zip(*lists, strict=True)]


def _install_dsv4(api: Any) -> None:
    names = {"flash_mla_with_kvcache": stand_ins.flash_mla_with_kvcache, "get_mla_metadata": lambda: (None,)}
    interface: Any = ModuleType("sglang.kernels.ops.attention.flash_mla_interface")
    vars(interface).update(names, SPLIT_KV_MIN_TOPK=0)
    sys.modules[interface.__name__] = interface
    backend = api.attention_module("deepseek_v4_backend").DeepseekV4AttnBackend
    backend._flash_mla_with_kvcache = staticmethod(stand_ins.flash_mla_with_kvcache)  # as its constructor does on CUDA


FLASHINFER = Parts(
    "flashinfer",
    "flashinfer_mla_backend",
    "FlashInferMLAAttnBackend",
    "FlashInferMLAMultiStepDraftBackend",
    "forward_metadata",
    _read_lists,
    _install_flashinfer,
)
TRTLLM = Parts(
    "trtllm_mla",
    "trtllm_mla_backend",
    "TRTLLMMLABackend",
    "TRTLLMMLAMultiStepDraftBackend",
    "forward_decode_metadata",
    _read_blocks,
    _install_trtllm,
)
FLASH_ATTENTION = Parts(
    "fa3",
    "flashattention_backend",
    "FlashAttentionBackend",
    "FlashAttentionMultiStepBackend",
    "forward_metadata",
    _read_pages,
    _install_flash_attention,
)
TRITON = Parts(
    "triton",
    "triton_backend",
    "TritonAttnBackend",
    "TritonMultiStepDraftBackend",
    "forward_metadata",
    _read_parts,
    _install_triton,
    joined=True,
)
DSV4 = Parts(
    "dsv4",
    "deepseek_v4_backend",
    "DeepseekV4AttnBackend",
    "DeepseekV4MultiStepBackend",
    "forward_metadata",
    read_windows,
    _install_dsv4,
)
