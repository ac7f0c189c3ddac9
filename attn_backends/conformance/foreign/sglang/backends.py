"""SGLang's backends as the suite names them, each with what it declares, refuses and attends to."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from attn_backends.cache import CacheFormat
from attn_backends.conformance.foreign import places
from attn_backends.conformance.foreign.driver import (
    Exempt,
    ForeignBackend,
    first_use,
    launch,
)
from attn_backends.conformance.foreign.places import DECODES, Where, can
from attn_backends.conformance.foreign.places import LATENTS_ON_CPU as ON_CPU
from attn_backends.conformance.foreign.places import LATENTS_ON_GPU as ON_GPU
from attn_backends.conformance.foreign.served import ServedBackend
from attn_backends.conformance.foreign.sglang.engine import Engine
from attn_backends.conformance.foreign.sglang.parts import FLASH_ATTENTION, FLASHINFER, TRITON, TRTLLM, Parts
from attn_backends.conformance.foreign.sglang.steps import CapturedStep, EagerStep
from attn_backends.conformance.worlds import layer_of
from attn_backends.contract.capabilities import Capabilities
from attn_backends.contract.kernel import Kernel
from attn_backends.layer import AttentionLayer
from spec_metadata import StepKind

KNOWN_VERSIONS = ("0.5.23",)
CPU_ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "SGLANG_FLASHINFER_WORKSPACE_SIZE": "1024",
}
missing_reasons = partial(places.missing_reasons, "sglang", KNOWN_VERSIONS)


def on_cpu(device: torch.device) -> list[str]:
    """Reasons why stand-ins of kernels do not run where no GPU is."""
    if device.type != "cpu":
        return [f"it stands for kernels where no GPU is, not on {device.type}"]
    reasons = missing_reasons()
    if not reasons and find_spec("sgl_kernel") is None:
        reasons = ["sgl_kernel is not installed, nor its CPU stand-in of this project's tests (make test-sglang)"]
    return reasons


def on_gpu(device: torch.device) -> list[str]:
    """Reasons why a GPU's kernels, or stand-ins over metadata that SGLang's kernels make there, do not run."""
    return missing_reasons() if device.type == "cuda" else [f"it runs on a GPU, not on {device.type}"]


def _flashinfer_reasons(device: torch.device) -> list[str]:
    """Why FlashInfer's kernels do not run on a device."""
    if device.type != "cuda":
        return [f"FlashInfer's kernels run on a GPU, not on {device.type}"]
    reasons = missing_reasons()
    return reasons if reasons or find_spec("flashinfer") else ["flashinfer is not installed"]


def _flash_attention_reasons(device: torch.device) -> list[str]:
    """Why the FlashAttention-3 of SGLang's kernels does not run on a device."""
    reasons = on_gpu(device)
    if reasons or torch.cuda.get_device_capability(device) == (9, 0):
        return reasons
    return ["it is built for Hopper GPUs (compute capability 9.0)"]


ONE_POOL = Exempt(("api.cache_groups", "graph.cache_groups"), "a backend of SGLang reads one pool")
ROWS_AS_PLANNED = Exempt(
    ("cache.keeps_first_rows", "cache.reads_alone"), "a backend of SGLang stores the rows of its batch, all of them"
)


def _flashinfer(where: Where, **others: Any) -> dict[StepKind, Capabilities]:
    """FlashInfer-MLA: a draft extend has no graph."""
    able = dict.fromkeys(DECODES, can(where, {1, 64}, **others))
    able[StepKind.DRAFT_EXTEND] = can(where, {1, 64}, graph=False, **others)
    return able | {StepKind.PREFILL: can(where, {1, 64}, graph=False, packed=True, **others)}


def _trtllm(where: Where) -> dict[StepKind, Capabilities]:
    """TRT-LLM-MLA: a prompt is not absorbed, so this driver has none for it."""
    return dict.fromkeys((*DECODES, StepKind.DRAFT_EXTEND), can(where, {32, 64}))


def _flash_attention(where: Where, **others: Any) -> dict[StepKind, Capabilities]:
    """FlashAttention-3 over latents."""
    able = dict.fromkeys((*DECODES, StepKind.DRAFT_EXTEND), can(where, {1, 64}, **others))
    return able | {StepKind.PREFILL: can(where, {1, 64}, graph=False, packed=True, **others)}


class SGLangBackend(ServedBackend):
    """A backend of SGLang."""

    project = "SGLang"
    exempt = (*ForeignBackend.exempt, ONE_POOL, ROWS_AS_PLANNED)
    parts: ClassVar[Parts]
    engine_type: ClassVar[type[Engine]] = Engine
    eager_type: ClassVar[type[EagerStep]] = EagerStep
    captured_type: ClassVar[type[CapturedStep]] = CapturedStep
    cpu_environment = CPU_ENVIRONMENT


class SGLangMLA(SGLangBackend):
    """A backend of SGLang over latents."""

    formats = frozenset({CacheFormat.LATENT})

    @classmethod
    def model_on(cls, device: torch.device) -> tuple[torch.dtype, AttentionLayer]:
        """A layer over latents."""
        sizes, heads, dtype = ON_GPU if device.type == "cuda" else ON_CPU
        return dtype, layer_of(CacheFormat.LATENT, sizes, frozenset({heads}))[0]


class FlashInferMLA(SGLangMLA):
    """SGLang's `flashinfer` backend of MLA models, and its multi-step draft backend."""

    name = "sglang:flashinfer_mla"
    parts = FLASHINFER
    kernels = (
        Kernel("flashinfer", launch, _flashinfer(ON_GPU, over_read=True), _flashinfer_reasons, schedule=first_use),
        Kernel("stand_in", launch, _flashinfer(ON_CPU), on_cpu, source="flashinfer", schedule=first_use),
    )


class TRTLLMMLA(SGLangMLA):
    """SGLang's `trtllm_mla` backend, and its multi-step draft backend. Its kernels want a Blackwell GPU, for which this
    driver has none: SGLang's metadata is read by a stand-in on a GPU, too.
    """

    name = "sglang:trtllm_mla"
    parts = TRTLLM
    kernels = (
        Kernel("stand_in_on_gpu", launch, _trtllm(ON_GPU), on_gpu, source="stand_in", schedule=first_use),
        Kernel("stand_in", launch, _trtllm(ON_CPU), on_cpu, source="stand_in", schedule=first_use),
    )


class FA3(SGLangMLA):
    """SGLang's `fa3` backend over latents, and its multi-step draft backend."""

    name = "sglang:fa3"
    parts = FLASH_ATTENTION
    kernels = (
        Kernel(
            "flash_attention",
            launch,
            _flash_attention(ON_GPU, over_read=True),
            _flash_attention_reasons,
            source="flash_attention_3",
            schedule=first_use,
        ),
        Kernel("stand_in_on_gpu", launch, _flash_attention(ON_GPU), on_gpu, source="stand_in", schedule=first_use),
        Kernel("stand_in", launch, _flash_attention(ON_CPU), on_cpu, source="stand_in", schedule=first_use),
    )


class TritonMLA(SGLangMLA):
    """SGLang's `triton` backend over latents, and its multi-step draft backend."""

    name = "sglang:triton"
    parts = TRITON
    kernels = (
        Kernel("triton", launch, _flash_attention(ON_GPU), on_gpu, schedule=first_use),
        Kernel("stand_in", launch, _flash_attention(ON_CPU), on_cpu, source="triton", schedule=first_use),
    )
