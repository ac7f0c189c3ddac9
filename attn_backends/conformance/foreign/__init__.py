"""Backends of other projects, with their own metadata interfaces, under the suite.

A name is `project:backend`. Nothing of a project is imported before a case of it runs.
"""

from __future__ import annotations

from importlib import import_module

from attn_backends.conformance.foreign.driver import ForeignBackend
from attn_backends.errors import BackendUnavailableError

_SGLANG = "attn_backends.conformance.foreign.sglang.backends"
_VLLM = "attn_backends.conformance.foreign.vllm.backends"
FOREIGN = {
    "sglang:flashinfer_mla": f"{_SGLANG}:FlashInferMLA",
    "sglang:trtllm_mla": f"{_SGLANG}:TRTLLMMLA",
    "sglang:fa3": f"{_SGLANG}:FA3",
    "sglang:triton": f"{_SGLANG}:TritonMLA",
    "sglang:dsv4": "attn_backends.conformance.foreign.sglang.dsv4:DeepSeekV4",
    "vllm:flashmla": f"{_VLLM}:FlashMLA",
    "vllm:flash_attn_mla": f"{_VLLM}:FlashAttnMLA",
    "vllm:triton_mla": f"{_VLLM}:TritonMLA",
    "vllm:flashinfer_mla": f"{_VLLM}:FlashInferMLA",
    "vllm:triton_attn": f"{_VLLM}:TritonAttn",
    "vllm:flash_attn": f"{_VLLM}:FlashAttn",
    "vllm:cpu_attn": f"{_VLLM}:CPUAttn",
}


def foreign_backend(name: str) -> type[ForeignBackend] | None:
    """The driver of `project:backend`; None of a name that is of no project here. Refuses an unknown backend of one."""
    if name not in FOREIGN:
        project = name.partition(":")[0]
        if known := [each for each in FOREIGN if each.partition(":")[0] == project]:
            raise BackendUnavailableError(f"backend {name!r}", [f"no driver for it; there are {', '.join(known)}"])
        return None
    module, _, driver = FOREIGN[name].partition(":")
    found: type[ForeignBackend] = getattr(import_module(module), driver)
    return found
