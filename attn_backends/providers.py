"""Where kernels come from, and why one can't run here: the only module that looks for vendor packages.

It looks without importing them. In this version only the torch kernels are connected; a vendor's kernel is known by
name, so that it can be refused with its reasons.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

NOT_CONNECTED = "not connected in this version"


@dataclass(frozen=True, slots=True)
class VendorKernel:
    """A vendor's kernel.

    module: what it is imported from. distribution: what it is installed as. source: how to get it. architectures:
    compute capabilities (major, minor) it is built for, the least and the greatest; None: no upper end.
    """

    module: str
    distribution: str
    source: str
    architectures: tuple[tuple[int, int], tuple[int, int] | None]


_SM80_UP = ((8, 0), None)
_SM90 = ((9, 0), (9, 0))
_SM100_UP = ((10, 0), None)
_FLASHINFER = "pip install 'attn-backends[flashinfer]'"
_FLASHMLA = "pip install 'attn-backends[flashmla]'"

VENDOR_KERNELS = {
    "triton": VendorKernel("triton", "triton", "pip install 'attn-backends[triton]'", _SM80_UP),
    "flashinfer_fa2": VendorKernel("flashinfer", "flashinfer-python", _FLASHINFER, _SM80_UP),
    "flashinfer_fa3": VendorKernel("flashinfer", "flashinfer-python", _FLASHINFER, _SM90),
    "flashmla": VendorKernel("sgl_flash_mla", "sgl-flash-mla", _FLASHMLA, _SM90),
    "flashmla_sparse": VendorKernel("sgl_flash_mla", "sgl-flash-mla", _FLASHMLA, _SM90),
    "trtllm_gen": VendorKernel("flashinfer", "flashinfer-python", _FLASHINFER, _SM100_UP),
    "flash_attn_interface": VendorKernel(
        "flash_attn_interface",
        "flash-attn-3",
        "build the hopper folder of flash-attention; it is on no registry",
        _SM90,
    ),
    "sgl_kernel": VendorKernel("sgl_kernel", "sgl-kernel", "comes with SGLang", _SM90),
    "vllm_flash_attn": VendorKernel("vllm", "vllm", "comes with vLLM", _SM90),
}

# What the metadata of a built-in backend is made for, best first.
VENDOR_KERNELS_OF = {
    "flashinfer_mla": ("flashinfer_fa3", "flashinfer_fa2", "triton"),
    "trtllm_mla": ("trtllm_gen", "flashmla", "triton"),
    "fa3": ("flash_attn_interface", "sgl_kernel", "vllm_flash_attn", "triton"),
}


def runs_anywhere(device: torch.device) -> list[str]:
    """Reasons against a torch kernel: only a device that this torch lacks."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return ["torch sees no CUDA device"]
    return []


def missing_kernel_reasons(backend: str, kernel: str) -> list[str]:
    """Why a backend has no kernel of this name, which is not one of its `kernels`."""
    if kernel not in VENDOR_KERNELS:
        return [f"no kernel has the name {kernel!r}"]
    if kernel not in VENDOR_KERNELS_OF.get(backend, ()):
        return [f"{kernel} is no kernel for the metadata of {backend}"]
    return [NOT_CONNECTED]


def installation(kernel: str) -> str:
    """Whether a vendor kernel's package is installed, in words: its version, or how to get it."""
    vendor = VENDOR_KERNELS[kernel]
    found = _version(vendor.distribution)
    if find_spec(vendor.module) is not None:
        return f"{vendor.distribution} {found or 'of unknown version'} is installed"
    flash_attention_2 = _version("flash-attn")
    if kernel == "flash_attn_interface" and flash_attention_2:
        return (
            f"installed flash-attn {flash_attention_2} is FlashAttention-2; FA3 is a source build of its hopper folder"
        )
    return f"{vendor.distribution} is not installed ({vendor.source})"


def device_reasons(kernel: str) -> list[str]:
    """Why a vendor kernel can't run on this machine's GPU; empty if it can."""
    least, most = VENDOR_KERNELS[kernel].architectures
    needed = f"needs {_sm(least)}" + ("" if most == least else " or newer")
    if not torch.cuda.is_available():
        return [f"{needed}; torch sees no CUDA device"]
    here = torch.cuda.get_device_capability()
    if here < least or (most is not None and here > most):
        return [f"{needed}; this GPU is {_sm(here)}"]
    return []


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _sm(capability: tuple[int, int]) -> str:
    return f"SM{capability[0]}{capability[1]}"
