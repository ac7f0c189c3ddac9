"""vLLM's backends as the suite names them, each with what it declares, refuses and attends to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor

from attn_backends.cache import CacheFormat, PagedCache, PagedKV
from attn_backends.conformance.foreign import places
from attn_backends.conformance.foreign.driver import Exempt, ForeignBackend, first_use, launch
from attn_backends.conformance.foreign.places import DECODES, LATENTS_ON_CPU, LATENTS_ON_GPU, Where, can
from attn_backends.conformance.foreign.served import ServedBackend
from attn_backends.conformance.foreign.vllm.engine import Engine, KVEngine, LatentEngine
from attn_backends.conformance.foreign.vllm.parts import (
    CPU_ATTN,
    FLASH_ATTN,
    FLASH_ATTN_MLA,
    FLASHINFER_MLA,
    FLASHMLA,
    TRITON_ATTN,
    TRITON_MLA,
    Parts,
)
from attn_backends.conformance.foreign.vllm.steps import CapturedStep, EagerStep
from attn_backends.conformance.worlds import layer_of
from attn_backends.contract.capabilities import Capabilities
from attn_backends.contract.kernel import Kernel
from attn_backends.layer import AttentionLayer
from spec_metadata import StepKind

KNOWN_VERSIONS = ("0.33.0",)
CPU_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # vLLM counts Triton as there without a driver
    "TRITON_INTERPRET": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
missing_reasons = partial(places.missing_reasons, "vllm", KNOWN_VERSIONS)


def on_cpu(device: torch.device) -> list[str]:
    """Reasons why stand-ins of kernels do not run where no GPU is."""
    if device.type != "cpu":
        return [f"it stands for kernels where no GPU is, not on {device.type}"]
    reasons = missing_reasons()
    if not reasons and find_spec("triton") is None:
        reasons = ["triton is not installed, in whose interpreter vLLM's own kernels of metadata run"]
    return reasons


def on_gpu(device: torch.device, *, majors: tuple[int, ...] = ()) -> list[str]:
    """Reasons why a backend's own kernels do not run. majors: of compute capabilities on which vLLM loads it, () for
    all.
    """
    if device.type != "cuda":
        return [f"its kernels run on a GPU, not on {device.type}"]
    if reasons := missing_reasons():
        return reasons
    major, minor = torch.cuda.get_device_capability(device)
    if not majors or major in majors:
        return []
    known = " or ".join(f"{each}.x" for each in majors)
    return [f"vLLM loads it on GPUs of compute capability {known}, and this one has {major}.{minor}"]


ONE_CACHE = Exempt(("api.cache_groups", "graph.cache_groups"), "a builder of vLLM plans for one group of layers")
ROWS_AS_PLANNED = Exempt(
    ("cache.keeps_first_rows", "cache.reads_alone"), "vLLM stores the rows of its batch, all of them"
)


def _decodes(where: Where, pages: set[int], *, packed: bool = False, **others: Any) -> dict[StepKind, Capabilities]:
    """MLA without prompts, which vLLM does not absorb. packed: whether it decodes rows of differing widths."""
    able = dict.fromkeys(DECODES, can(where, pages, **others))
    return able | {StepKind.DRAFT_EXTEND: can(where, pages, packed=packed, **others)}


class VLLMBackend(ServedBackend):
    """A backend of vLLM."""

    project = "vLLM"
    exempt = (*ForeignBackend.exempt, ONE_CACHE, ROWS_AS_PLANNED)
    parts: ClassVar[Parts]
    engine_type: ClassVar[type[Engine]]
    eager_type: ClassVar[type[EagerStep]] = EagerStep
    captured_type: ClassVar[type[CapturedStep]] = CapturedStep
    cpu_environment = CPU_ENVIRONMENT


class VLLMLatents(VLLMBackend):
    """A backend of vLLM over latents."""

    formats = frozenset({CacheFormat.LATENT})
    engine_type = LatentEngine

    @classmethod
    def model_on(cls, device: torch.device) -> tuple[torch.dtype, AttentionLayer]:
        """A layer over latents."""
        sizes, heads, dtype = LATENTS_ON_GPU if device.type == "cuda" else LATENTS_ON_CPU
        return dtype, layer_of(CacheFormat.LATENT, sizes, frozenset({heads}))[0]


def _kernels(pages: set[int], own: Callable[[torch.device], list[str]], *, packed: bool = False) -> tuple[Kernel, ...]:
    """The kernels of a backend over latents. On a GPU the driver captures no graphs: vLLM builds metadata once more
    between a warm-up and the capture, and the suite has no place for that.
    """
    theirs = _decodes(LATENTS_ON_GPU, pages, packed=packed, graph=False, over_read=True)
    ours = _decodes(LATENTS_ON_CPU, pages, packed=packed)
    return (
        Kernel("own", launch, theirs, own, schedule=first_use),
        Kernel("stand_in", launch, ours, on_cpu, source="own", schedule=first_use),
    )


class FlashMLA(VLLMLatents):
    """vLLM's `FLASHMLA`."""

    name = "vllm:flashmla"
    parts = FLASHMLA
    kernels = _kernels({64}, partial(on_gpu, majors=(9, 10)))


class FlashAttnMLA(VLLMLatents):
    """vLLM's `FLASH_ATTN_MLA`, which also decodes rows of differing widths."""

    name = "vllm:flash_attn_mla"
    parts = FLASH_ATTN_MLA
    kernels = _kernels({16, 64}, partial(on_gpu, majors=(9,)), packed=True)


class TritonMLA(VLLMLatents):
    """vLLM's `TRITON_MLA`."""

    name = "vllm:triton_mla"
    parts = TRITON_MLA
    kernels = _kernels({16, 64}, on_gpu)


class FlashInferMLA(VLLMLatents):
    """vLLM's `FLASHINFER_MLA`, which also decodes rows of differing widths."""

    name = "vllm:flashinfer_mla"
    parts = FLASHINFER_MLA
    kernels = _kernels({32, 64}, partial(on_gpu, majors=(10,)), packed=True)


KEYS_ON_CPU: Where = ((32, 32), 6, torch.float32)
KEYS_ON_GPU: Where = ((128, 128), 6, torch.bfloat16)  # of six query heads all worlds have two of keys and values


class VLLMKeys(VLLMBackend):
    """A backend of vLLM over keys and values, prompts among its steps."""

    formats = frozenset({CacheFormat.KV})
    engine_type = KVEngine

    @classmethod
    def model_on(cls, device: torch.device) -> tuple[torch.dtype, AttentionLayer]:
        """A layer over keys and values."""
        sizes, heads, dtype = KEYS_ON_GPU if device.type == "cuda" else KEYS_ON_CPU
        return dtype, layer_of(CacheFormat.KV, sizes, frozenset({heads}))[0]

    def pairs(self, cache: PagedCache) -> list[tuple[Tensor, Tensor]]:
        """Keys, then values."""
        assert isinstance(cache, PagedKV), "it takes no other format"
        return list(zip((cache.k, cache.v), self.engine.halves, strict=True))


def _packed(where: Where, pages: set[int], *, graph: bool = True, **others: Any) -> dict[StepKind, Capabilities]:
    """Rows of one width or of differing widths, prompts too, which have no graph of one width."""
    able = dict.fromkeys(DECODES, can(where, pages, graph=graph, **others))
    able[StepKind.DRAFT_EXTEND] = can(where, pages, graph=graph, packed=True, **others)
    return able | {StepKind.PREFILL: can(where, pages, graph=False, packed=True, **others)}


class TritonAttn(VLLMKeys):
    """vLLM's `TRITON_ATTN`."""

    name = "vllm:triton_attn"
    parts = TRITON_ATTN
    kernels = (
        Kernel("own", launch, _packed(KEYS_ON_GPU, {16, 64}, graph=False, over_read=True), on_gpu, schedule=first_use),
        Kernel("stand_in", launch, _packed(KEYS_ON_CPU, {16, 64}), on_cpu, source="own", schedule=first_use),
    )


class FlashAttn(VLLMKeys):
    """vLLM's `FLASH_ATTN`, of FlashAttention-3."""

    name = "vllm:flash_attn"
    parts = FLASH_ATTN
    kernels = (
        Kernel(
            "own",
            launch,
            _packed(KEYS_ON_GPU, {16, 64}, graph=False, over_read=True),
            partial(on_gpu, majors=(9,)),
            schedule=first_use,
        ),
        Kernel("stand_in", launch, _packed(KEYS_ON_CPU, {16, 64}), on_cpu, source="own", schedule=first_use),
    )


class CPUAttn(VLLMKeys):
    """vLLM's `CPU_ATTN`, which captures no graphs."""

    name = "vllm:cpu_attn"
    parts = CPU_ATTN
    kernels = (Kernel("stand_in", launch, _packed(KEYS_ON_CPU, {32, 64}, graph=False), on_cpu, schedule=first_use),)
