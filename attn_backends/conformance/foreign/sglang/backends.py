"""SGLang's backends as the suite names them, each with what it declares, refuses and attends to."""

from __future__ import annotations

from abc import abstractmethod
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor

from attn_backends.cache import CacheFormat, PagedCache, PagedLatent
from attn_backends.conformance.foreign.driver import (
    Exempt,
    ForeignBackend,
    ForeignStep,
    first_use,
    launch,
)
from attn_backends.conformance.foreign.sglang.engine import Engine
from attn_backends.conformance.foreign.sglang.parts import FLASH_ATTENTION, FLASHINFER, TRITON, TRTLLM, Parts
from attn_backends.conformance.foreign.sglang.steps import CapturedStep, EagerStep
from attn_backends.conformance.worlds import layer_of
from attn_backends.contract.capabilities import Capabilities
from attn_backends.contract.kernel import Kernel
from attn_backends.layer import AttentionLayer
from spec_metadata import Bucket, CacheGeometry, Capacity, Step, StepKind

KNOWN_VERSIONS = ("0.5.23",)
CPU_ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "SGLANG_FLASHINFER_WORKSPACE_SIZE": "1024",
}


def missing_reasons() -> list[str]:
    """Why SGLang can't be driven here; empty if it can."""
    known = f"the driver knows {', '.join(KNOWN_VERSIONS)}"
    try:
        found = version("sglang")
    except PackageNotFoundError:
        return [f"sglang is not installed ({known})"]
    return [] if found in KNOWN_VERSIONS else [f"sglang {found} is installed ({known})"]


def on_cpu(device: torch.device) -> list[str]:
    """Why stand-ins of kernels do not run where no GPU is."""
    if device.type != "cpu":
        return [f"it stands for kernels where no GPU is, not on {device.type}"]
    reasons = missing_reasons()
    if not reasons and find_spec("sgl_kernel") is None:
        reasons = ["sgl_kernel is not installed, nor its CPU stand-in of this project's tests (make test-sglang)"]
    return reasons


def on_gpu(device: torch.device) -> list[str]:
    """Why a GPU's kernels, or stand-ins of kernels over metadata that SGLang's kernels make there, do not run."""
    return missing_reasons() if device.type == "cuda" else [f"it runs on a GPU, not on {device.type}"]


def flashinfer_reasons(device: torch.device) -> list[str]:
    """Why FlashInfer's kernels do not run on a device."""
    if device.type != "cuda":
        return [f"FlashInfer's kernels run on a GPU, not on {device.type}"]
    reasons = missing_reasons()
    return reasons if reasons or find_spec("flashinfer") else ["flashinfer is not installed"]


def flash_attention_reasons(device: torch.device) -> list[str]:
    """Why the FlashAttention-3 of SGLang's kernels does not run on a device."""
    reasons = on_gpu(device)
    if reasons or torch.cuda.get_device_capability(device) == (9, 0):
        return reasons
    return ["it is built for Hopper GPUs (compute capability 9.0)"]


Where = tuple[tuple[int, int], int, torch.dtype]
"""Head sizes, query heads and type that a place is driven with."""


def can(where: Where, pages: set[int], **others: Any) -> Capabilities:
    """What all of SGLang's MLA backends can do in a step kind."""
    sizes, heads, dtype = where
    given = {"head_sizes": frozenset({sizes}), "query_heads": frozenset({heads}), "needs_host_lens": True, **others}
    return Capabilities(frozenset(pages), frozenset({dtype}), **given)


ON_CPU: Where = ((80, 64), 4, torch.float32)
ON_GPU: Where = ((576, 512), 16, torch.bfloat16)
ONE_POOL = Exempt(("api.cache_groups", "graph.cache_groups"), "a backend of SGLang reads one pool")
ROWS_AS_PLANNED = Exempt(
    ("cache.keeps_first_rows", "cache.reads_alone"), "a backend of SGLang stores the rows of its batch, all of them"
)
DECODES = (StepKind.DECODE, StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY)


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


class SGLangBackend(ForeignBackend):
    """A backend of SGLang. right: whether what is driven is right instead (`control`). engine_type: of its server.
    eager_type, captured_type: of its steps.
    """

    project = "SGLang"
    exempt = (*ForeignBackend.exempt, ONE_POOL, ROWS_AS_PLANNED)
    parts: ClassVar[Parts]
    right: ClassVar[bool] = False
    engine_type: ClassVar[type[Engine]] = Engine
    eager_type: ClassVar[type[EagerStep]] = EagerStep
    captured_type: ClassVar[type[CapturedStep]] = CapturedStep

    def __init__(
        self, capacity: Capacity, geometry: CacheGeometry, device: torch.device | str = "cpu", **options: Any
    ) -> None:
        super().__init__(capacity, geometry, device, **options)
        names = {choice.kernel.name for choice in self.choices.values()}
        own = not any(name.startswith("stand_in") for name in names)
        place = capacity, geometry, self.device, *self.model_on(self.device)
        self.engine = self.engine_type(self.parts, *place, has_kernels=own, right=self.right)

    @classmethod
    @abstractmethod
    def model_on(cls, device: torch.device) -> tuple[torch.dtype, AttentionLayer]:
        """The type and the layer of the model that is served on a device."""

    @staticmethod
    @abstractmethod
    def pages_of(cache: Any) -> Tensor:
        """[num_pages, ...] the memory of the suite's cache, as the pool's."""

    @classmethod
    def control(cls) -> type[ForeignBackend]:
        """The same driver in front of `control.RightBackend`."""
        return type(cls.__name__, (cls,), {"right": True, "__module__": cls.__module__})

    @classmethod
    def environment(cls, device: str) -> dict[str, str]:
        """On a CPU, SGLang's own kernels of metadata run in Triton's interpreter."""
        return {} if torch.device(device).type == "cuda" else CPU_ENVIRONMENT

    def plan_eagerly(self, step: Step) -> ForeignStep:
        """A batch of a server without graphs."""
        return self.eager_type(self.engine, step)

    def plan_captured(self, bucket: Bucket) -> ForeignStep:
        """A batch over a graph runner's buffers."""
        return self.captured_type(self.engine, bucket, self.capacity.num_steps)

    def bring_in(self, cache: PagedCache) -> None:
        """Copy the cache into the pool, whose page 0 is the reserved one."""
        _copy(self.pages_of(cache), self.engine.pages, self.geometry.reserved_page)

    def bring_out(self, cache: PagedCache) -> None:
        """Copy the pool into the cache."""
        _copy(self.engine.pages, self.pages_of(cache), self.geometry.reserved_page)


def _copy(source: Tensor, destination: Tensor, reserved: int) -> None:
    """Copy all pages; page 0 and the reserved one change places."""
    destination.copy_(source)
    destination[reserved].copy_(source[0])
    destination[0].copy_(source[reserved])


class SGLangMLA(SGLangBackend):
    """A backend of SGLang over latents."""

    formats = frozenset({CacheFormat.LATENT})

    @classmethod
    def model_on(cls, device: torch.device) -> tuple[torch.dtype, AttentionLayer]:
        """A layer over latents."""
        sizes, heads, dtype = ON_GPU if device.type == "cuda" else ON_CPU
        return dtype, layer_of(CacheFormat.LATENT, sizes, frozenset({heads}))[0]

    @staticmethod
    def pages_of(cache: Any) -> Tensor:
        """[num_pages, page_size, dim]"""
        assert isinstance(cache, PagedLatent), "it takes no other format"
        return cache.latent


class FlashInferMLA(SGLangMLA):
    """SGLang's `flashinfer` backend of MLA models, and its multi-step draft backend."""

    name = "sglang:flashinfer_mla"
    parts = FLASHINFER
    kernels = (
        Kernel("flashinfer", launch, _flashinfer(ON_GPU, over_read=True), flashinfer_reasons, schedule=first_use),
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
            flash_attention_reasons,
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
