"""Vendors' kernels, and reasons why one can't run here: the only module that looks for their packages and loads them.

Looking imports nothing. Loading a call checks that it takes the arguments that we pass, so that another version of a
package is refused with that reason before anything is computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from attn_backends.selection.packages import is_installed


@dataclass(frozen=True, slots=True)
class VendorCall:
    """A function or method of a vendor. path: `module:attribute.attribute`. parameters: those that we pass."""

    path: str
    parameters: frozenset[str]


@dataclass(frozen=True, slots=True)
class VendorKernel:
    """A vendor's kernel.

    module: what it is imported from. distribution: what it is installed as. source: how to get it. architectures:
    compute capabilities (major, minor) it is built for, the least and the greatest; None: no upper end. calls: what we
    call of it.
    """

    module: str
    distribution: str
    source: str
    architectures: tuple[tuple[int, int], tuple[int, int] | None]
    calls: tuple[VendorCall, ...] = ()


_SM80_UP = ((8, 0), None)
_SM90 = ((9, 0), (9, 0))
_SM100 = ((10, 0), (10, 3))
_FLASHINFER = "pip install 'attn-backends[flashinfer]'"
_FLASHMLA = "pip install 'attn-backends[flashmla]'"
_HOPPER_FOLDER = "build the hopper folder of flash-attention; it is on no registry"


def _call(path: str, parameters: str) -> VendorCall:
    return VendorCall(path, frozenset(parameters.split()))


# What it compiles has no signature to look at. The second goes with a compiled `run` of the arguments that we pass, the
# third with a `plan` that may be called again while its copies are under way.
_FLASHINFER_MLA = (
    _call(
        "flashinfer.mla:get_batch_mla_module",
        "backend dtype_q dtype_kv dtype_o dtype_idx head_dim_ckv head_dim_kpe use_profiler",
    ),
    _call("flashinfer.mla:BatchMLAPagedAttentionWrapper.run", "ckv_scale kpe_scale"),
    _call("flashinfer.jit.attention.modules:_BatchMLAModuleProxy.plan_with_staged_workspace_bytes", ""),
)

_FLASHMLA_CALLS = (
    _call(
        "flash_mla:flash_mla_with_kvcache",
        "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata softmax_scale causal use_legacy",
    ),
    _call("flash_mla:get_mla_decoding_metadata", "seqlens_k num_q_tokens_per_head_k h_k use_legacy"),
    _call("flash_mla.flash_mla_interface:FlashMLASchedMeta", "tile_scheduler_metadata num_splits"),
)
_FLASHMLA_SPARSE_CALLS = (
    _call(
        "flash_mla:flash_mla_with_kvcache",
        "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata softmax_scale is_fp8_kvcache indices "
        "attn_sink extra_k_cache extra_indices_in_kvcache topk_length extra_topk_length use_legacy",
    ),
    *_FLASHMLA_CALLS[1:],
)
_TRTLLM_GEN = _call(
    "flashinfer.decode:trtllm_batch_decode_with_kv_cache_mla",
    "query kv_cache workspace_buffer qk_nope_head_dim kv_lora_rank qk_rope_head_dim block_tables seq_lens max_seq_len "
    "bmm1_scale bmm2_scale backend return_lse return_lse_base",
)
_WITH_KVCACHE = (
    "q k_cache v_cache qv cache_seqlens page_table cu_seqlens_q max_seqlen_q softmax_scale causal window_size "
    "return_softmax_lse"
)
_SCHEDULER_METADATA = (
    "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens qkv_dtype headdim_v "
    "cu_seqlens_q page_size causal window_size"
)
_FA3_HOPPER = (
    _call("flash_attn_interface:flash_attn_with_kvcache", f"{_WITH_KVCACHE} scheduler_metadata"),
    _call("flash_attn_interface:get_scheduler_metadata", _SCHEDULER_METADATA),
)
_FA3_SGLANG = (_call("sgl_kernel.flash_attn:flash_attn_with_kvcache", _WITH_KVCACHE),)
_FA3_VLLM = (
    _call(
        "vllm.vllm_flash_attn.flash_attn_interface:flash_attn_varlen_func",
        "q k v q_v cu_seqlens_q seqused_k block_table max_seqlen_q max_seqlen_k softmax_scale causal window_size "
        "return_softmax_lse scheduler_metadata fa_version s_aux",
    ),
    _call("vllm.vllm_flash_attn.flash_attn_interface:get_scheduler_metadata", _SCHEDULER_METADATA),
)

VENDOR_KERNELS = {
    "flashinfer_fa2": VendorKernel("flashinfer", "flashinfer-python", _FLASHINFER, _SM80_UP, _FLASHINFER_MLA),
    "flashinfer_fa3": VendorKernel("flashinfer", "flashinfer-python", _FLASHINFER, _SM90, _FLASHINFER_MLA),
    "flashmla": VendorKernel("flash_mla", "sgl-flash-mla", _FLASHMLA, _SM90, _FLASHMLA_CALLS),
    "flashmla_sparse": VendorKernel("flash_mla", "sgl-flash-mla", _FLASHMLA, _SM90, _FLASHMLA_SPARSE_CALLS),
    "trtllm_gen": VendorKernel("flashinfer", "flashinfer-python", _FLASHINFER, _SM100, (_TRTLLM_GEN,)),
    "flash_attn_interface": VendorKernel("flash_attn_interface", "flash-attn-3", _HOPPER_FOLDER, _SM90, _FA3_HOPPER),
    "sgl_kernel": VendorKernel("sgl_kernel", "sgl-kernel", "comes with SGLang", _SM90, _FA3_SGLANG),
    "vllm_flash_attn": VendorKernel("vllm", "vllm", "comes with vLLM", _SM90, _FA3_VLLM),
}


GLUON_TRITON = "3.6"
"""The version of Triton that our kernels in Gluon were tried with."""


def runs_anywhere(device: torch.device) -> list[str]:
    """Reasons against a torch kernel: only a device that this torch lacks."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return ["torch sees no CUDA device"]
    return []


def runs_on_triton(device: torch.device) -> list[str]:
    """Reasons against a Triton kernel of ours."""
    if device.type != "cuda":
        return [f"runs on CUDA devices, not on {device.type}"]
    reasons = _sm_reasons(device, *_SM80_UP)
    if not is_installed("triton"):
        reasons.append("triton is not installed (pip install 'attn-backends[triton]')")
    return reasons


def runs_on_gluon(device: torch.device) -> list[str]:
    """Reasons against a kernel of ours in Gluon, which changes from one version of Triton to the next."""
    reasons = runs_on_triton(device)
    if not reasons:
        reasons = _sm_reasons(device, *_SM90)
        here = version_of("triton") or "of unknown version"
        if not here.startswith(f"{GLUON_TRITON}."):
            reasons.append(f"needs the Gluon of triton {GLUON_TRITON}, which no other version keeps; this is {here}")
    return reasons


def vendor_reasons(kernel: str) -> Callable[[torch.device], list[str]]:
    """A kernel's `unavailable_reasons`: the device, the package, and whether its calls take what we pass."""
    return lambda device: list(_vendor_reasons(kernel, device))


@cache
def _vendor_reasons(kernel: str, device: torch.device) -> tuple[str, ...]:
    vendor = VENDOR_KERNELS[kernel]
    if device.type != "cuda":
        return (f"runs on CUDA devices, not on {device.type}",)
    reasons = device_reasons(kernel, device)
    if not is_installed(vendor.module):
        reasons.append(_installation(kernel))
    return tuple(reasons or [problem for call in vendor.calls if (problem := _problem(kernel, call))])


@cache
def load(path: str) -> Any:
    """The object that `module:attribute.attribute` names; imports its module. Cached: a launch calls it every time."""
    module, _, attributes = path.partition(":")
    found = import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute)
    return found


def _problem(kernel: str, call: VendorCall) -> str:
    """Why a vendor's call can't be used; empty if it can."""
    vendor = VENDOR_KERNELS[kernel]
    what = f"{vendor.distribution} {version_of(vendor.distribution) or 'of unknown version'}"
    try:
        found = load(call.path)
    except Exception as error:  # a vendor's module may raise anything, such as a symbol that its torch lacks
        return f"{what}: importing {call.path} failed: {type(error).__name__}: {error} ({vendor.source})"
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):
        return ""  # a compiled function says nothing of its arguments
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return ""
    missing = sorted(call.parameters - parameters.keys())
    if missing:
        return f"{what}: {call.path} takes no {', '.join(missing)}; install another version ({vendor.source})"
    return ""


def _installation(kernel: str) -> str:
    """The version of a vendor kernel's package, or how to install it."""
    vendor = VENDOR_KERNELS[kernel]
    found = version_of(vendor.distribution)
    if is_installed(vendor.module):
        return f"{vendor.distribution} {found or 'of unknown version'} is installed"
    flash_attention_2 = version_of("flash-attn")
    if kernel == "flash_attn_interface" and flash_attention_2:
        return (
            f"installed flash-attn {flash_attention_2} is FlashAttention-2; FA3 is a source build of its hopper folder"
        )
    return f"{vendor.distribution} is not installed ({vendor.source})"


def device_reasons(kernel: str, device: torch.device) -> list[str]:
    """Reasons why a vendor kernel can't run on a GPU of this machine; empty if it can."""
    return _sm_reasons(device, *VENDOR_KERNELS[kernel].architectures)


def _sm_reasons(device: torch.device, least: tuple[int, int], most: tuple[int, int] | None) -> list[str]:
    upper = "" if most == least else " or newer" if most is None else f" to {_sm(most)}"
    needed = f"needs {_sm(least)}{upper}"
    if not torch.cuda.is_available():
        return [f"{needed}; torch sees no CUDA device"]
    here = torch.cuda.get_device_capability(device)
    if here < least or (most is not None and here > most):
        return [f"{needed}; this GPU is {_sm(here)}"]
    return []


def version_of(distribution: str) -> str | None:
    """The installed version of a package; None if it is not installed, or says none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _sm(capability: tuple[int, int]) -> str:
    return f"SM{capability[0]}{capability[1]}"
