"""SGLang's backends as the suite names them, each with what it declares, refuses and attends to."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor

from attn_backends.cache import CacheFormat, PagedCache, PagedLatent
from attn_backends.conformance.foreign.driver import (
    DECLARED,
    OURS,
    Exempt,
    ForeignBackend,
    ForeignStep,
    first_use,
    launch,
)
from attn_backends.conformance.foreign.sglang.engine import Engine
from attn_backends.conformance.foreign.sglang.steps import CapturedStep, EagerStep
from attn_backends.conformance.worlds import layer_of
from attn_backends.contract.capabilities import Capabilities
from attn_backends.contract.kernel import Kernel
from spec_metadata import Bucket, CacheGeometry, Capacity, Step, StepKind

KNOWN_VERSIONS = ("0.5.23",)
CPU_SIZES, CPU_HEADS = (80, 64), 4
GPU_SIZES, GPU_HEADS = (576, 512), 16
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


def stand_in_reasons(device: torch.device) -> list[str]:
    """Why the stand-ins of kernels do not run on a device."""
    if device.type != "cpu":
        return [f"it stands for kernels where no GPU is, not on {device.type}"]
    reasons = missing_reasons()
    if not reasons and find_spec("sgl_kernel") is None:
        reasons = ["sgl_kernel is not installed, nor its CPU stand-in of this project's tests (make test-sglang)"]
    return reasons


def flashinfer_reasons(device: torch.device) -> list[str]:
    """Why FlashInfer's kernels do not run on a device."""
    if device.type != "cuda":
        return [f"FlashInfer's kernels run on a GPU, not on {device.type}"]
    reasons = missing_reasons()
    return reasons if reasons or find_spec("flashinfer") else ["flashinfer is not installed"]


def latents(sizes: tuple[int, int], heads: int, dtype: torch.dtype, over_read: bool) -> dict[StepKind, Capabilities]:
    """What FlashInfer-MLA can do in SGLang: chains, draft extends of one width and no graph."""
    common: dict[str, Any] = {
        "page_sizes": frozenset({1, 64}),
        "dtypes": frozenset({dtype}),
        "head_sizes": frozenset({sizes}),
        "query_heads": frozenset({heads}),
        "needs_host_lens": True,
        "over_read": over_read,
    }
    return {
        StepKind.PREFILL: Capabilities(**common, packed=True, graph=False),
        StepKind.DECODE: Capabilities(**common),
        StepKind.DRAFT_DECODE: Capabilities(**common),
        StepKind.TARGET_VERIFY: Capabilities(**common),
        StepKind.DRAFT_EXTEND: Capabilities(**common, graph=False),
    }


ONE_POOL = Exempt(("api.cache_groups",), "a backend of SGLang reads one pool")


class FlashInferMLA(ForeignBackend):
    """SGLang's `flashinfer` backend of MLA models, and its multi-step draft backend."""

    name = "sglang:flashinfer_mla"
    project = "SGLang"
    backend: ClassVar[str] = "flashinfer"
    right: ClassVar[bool] = False
    formats = frozenset({CacheFormat.LATENT})
    exempt = (DECLARED, OURS, ONE_POOL)
    kernels = (
        Kernel(
            "flashinfer",
            launch,
            latents(GPU_SIZES, GPU_HEADS, torch.bfloat16, over_read=True),
            flashinfer_reasons,
            schedule=first_use,
        ),
        Kernel(
            "stand_in",
            launch,
            latents(CPU_SIZES, CPU_HEADS, torch.float32, over_read=False),
            stand_in_reasons,
            source="flashinfer",
            schedule=first_use,
        ),
    )

    def __init__(
        self, capacity: Capacity, geometry: CacheGeometry, device: torch.device | str = "cpu", **options: Any
    ) -> None:
        super().__init__(capacity, geometry, device, **options)
        on_gpu = self.device.type == "cuda"
        sizes, heads = (GPU_SIZES, GPU_HEADS) if on_gpu else (CPU_SIZES, CPU_HEADS)
        layer, _ = layer_of(CacheFormat.LATENT, sizes, frozenset({heads}))
        dtype = torch.bfloat16 if on_gpu else torch.float32
        self.engine = Engine(self.backend, capacity, geometry, self.device, dtype, layer, self.right)

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
        return EagerStep(self.engine, step, read_lists)

    def plan_captured(self, bucket: Bucket) -> ForeignStep:
        """A batch over a graph runner's buffers."""
        return CapturedStep(self.engine, bucket, self.capacity.num_steps, read_lists)

    def bring_in(self, cache: PagedCache) -> None:
        """Copy the cache into the pool, whose page 0 is the reserved one."""
        assert isinstance(cache, PagedLatent), "it takes no other format"
        _copy(cache.latent, self.engine.pages, self.geometry.reserved_page)

    def bring_out(self, cache: PagedCache) -> None:
        """Copy the pool into the cache."""
        assert isinstance(cache, PagedLatent), "it takes no other format"
        _copy(self.engine.pages, cache.latent, self.geometry.reserved_page)


def _copy(source: Tensor, destination: Tensor, reserved: int) -> None:
    """Copy all pages; page 0 and the reserved one change places."""
    destination.copy_(source)
    destination[reserved].copy_(source[0])
    destination[0].copy_(source[reserved])


def read_lists(backend: Any, planned: Any, batch: Any) -> list[list[int]] | None:
    """What a FlashInfer wrapper's plan lists for each row, the request's last row seeing all of its keys."""
    wrapper = getattr(planned, "decode_wrapper", None) or getattr(planned, "prefill_wrapper", None)
    if wrapper is None:
        return None
    starts, offsets, lens = (each.tolist() for each in _plan_of(backend, planned, wrapper))
    indices, rows = wrapper._kv_indices_buf, []
    for request, length in enumerate(lens):
        width = starts[request + 1] - starts[request]
        listed = indices[offsets[request] : offsets[request] + length].tolist()
        rows += [listed[: length - width + 1 + row] for row in range(width)]
    return rows


def _plan_of(backend: Any, planned: Any, wrapper: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(qo_indptr, kv_indptr, kv_len) that the wrapper's work was planned from."""
    if work := getattr(wrapper._cached_module, "work", None):
        return tuple(work)
    fast = getattr(backend, "fast_decode_kwargs", {})
    if wrapper._use_cuda_graph and hasattr(planned, "decode_wrapper") and "kv_len_arr_cpu" in fast:
        return fast["qo_indptr_cpu"], fast["kv_indptr_cpu"], fast["kv_len_arr_cpu"]
    return wrapper._qo_indptr_buf, wrapper._kv_indptr_buf, wrapper._kv_len_arr_buf
