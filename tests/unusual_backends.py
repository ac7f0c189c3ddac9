"""Correct backends that declare what few do: the suite must pass every one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.backends.flashinfer_mla import FlashInferMLABackend
from attn_backends.backends.trtllm_mla import TrtllmMLABackend
from attn_backends.cache import CacheFormat
from attn_backends.contract.kernel import Kernel
from attn_backends.errors import UnsupportedStepError
from attn_backends.layer import AttentionOutput
from spec_metadata import Buffers, BufferSpec, Step, StepKind
from spec_metadata.buffers import MAX_PAGES
from spec_metadata.capacity import UNIFORM_KINDS
from spec_metadata.plans import ragged
from tests.mutants.hosted import HostedBackend, ScheduledBackend, UnitsBackend
from tests.mutants.over_reading import OverReadingBackend
from tests.torch_kernels import torch_kernel

KV = frozenset({CacheFormat.KV})
FREE = 8  # columns behind a row of pages that nobody reads


def of(base: type[AttentionBackend], kinds: Any = None, **changes: Any) -> type[AttentionBackend]:
    """A backend whose torch kernel declares something else."""
    kernel = torch_kernel(base)
    declared = {k: replace(known, **changes) for k, known in kernel.capabilities.items() if not kinds or k in kinds}
    return type(f"Unusual{base.__name__}", (base,), {"kernels": (replace(kernel, capabilities=declared),)})


def launching(change: Callable[[AttentionOutput], Any], **changes: Any) -> type[AttentionBackend]:
    """FA3 whose kernel returns its outputs in another form."""
    base = of(FA3Backend, **changes)
    (kernel,) = base.kernels

    def launch(*args: Any) -> Any:
        return change(kernel.launch(*args))

    return type("Launching", (base,), {"kernels": (replace(kernel, launch=launch),), "formats": KV})


def whole_pages(multiple: int) -> type[AttentionBackend]:
    """FA3 whose pages must be a multiple of some tokens, whatever the kernel."""

    class WholePages(FA3Backend):
        kernels = (torch_kernel(FA3Backend),)

        def __init__(self, capacity: Any, geometry: Any, *args: Any, **options: Any) -> None:
            if geometry.page_size % multiple:
                raise UnsupportedStepError(self.name, [f"page size {geometry.page_size}"])
            super().__init__(capacity, geometry, *args, **options)

        @classmethod
        def page_multiple(cls) -> int:
            return multiple

    return WholePages


def not_dense(output: AttentionOutput) -> AttentionOutput:
    """The same output at a stride of two rows."""
    return AttentionOutput(output.out.repeat_interleave(2, dim=0)[::2], output.lse)


def transposed(output: AttentionOutput) -> AttentionOutput:
    """The same output, heads outermost in memory."""
    out = output.out.transpose(0, 1).contiguous().transpose(0, 1)
    return AttentionOutput(out, output.lse.transpose(0, 1).contiguous().transpose(0, 1))


class LargerBuffers(FA3Backend):
    """Page tables with columns that no kernel reads, which hold -1 where no page is."""

    kernels = (torch_kernel(FA3Backend),)

    @classmethod
    def buffers(cls, kind: StepKind) -> tuple[BufferSpec, ...]:
        wide = BufferSpec("wide_table", torch.int32, (ragged.BS, MAX_PAGES + FREE), "pages", pad=-1, low=-1)
        return (*super().buffers(kind), wide)

    def write(self, step: Step, buffers: Buffers) -> None:
        super().write(step, buffers)
        table, wide = buffers["page_table"], buffers["wide_table"]
        column = torch.arange(table.shape[1], device=table.device)
        live = column < (buffers["seqused_k"].amax(0) + step.paging.geometry.page_size - 1).div(
            step.paging.geometry.page_size, rounding_mode="floor"
        ).unsqueeze(1)
        wide.fill_(-1)
        wide[:, : table.shape[1]].copy_(torch.where(live, table, -1))

    def plans(self, step: Step, buffers: Buffers) -> Any:
        pages = buffers.extent.max_pages
        return tuple(
            replace(plan, page_table=buffers["wide_table"][:, :pages]) for plan in super().plans(step, buffers)
        )


def clamped(kernel: Kernel) -> Kernel:
    """A kernel that takes -1 for no page."""

    def launch(q: Tensor, cache: Any, plan: Any, layer: Any) -> AttentionOutput:
        return kernel.launch(q, cache, replace(plan, page_table=plan.page_table.clamp(min=0)), layer)

    return replace(kernel, launch=launch)


LargerBuffers.kernels = (clamped(torch_kernel(FA3Backend)),)

FLOAT8 = frozenset({torch.float8_e4m3fn})
UNUSUAL: dict[str, type[AttentionBackend]] = {
    "pages of a multiple of 16": whole_pages(16),
    "pages of a multiple of 64": whole_pages(64),
    "pages of a multiple of 3": whole_pages(3),
    "no log-sum-exp, None for it": launching(lambda output: AttentionOutput(output.out, None), lse=None),  # type: ignore[arg-type]
    "no log-sum-exp, an empty tensor for it": launching(
        lambda output: AttentionOutput(output.out, output.lse[:0]), lse=None
    ),
    "outputs at a stride": launching(not_dense),
    "outputs with heads outermost": launching(transposed),
    "larger buffers with -1 where no page is": LargerBuffers,
    **{f"{kind} alone": of(FA3Backend, (kind,)) for kind in StepKind if kind is not StepKind.IDLE},
    "8-bit caches alone": of(FA3Backend, own_cache=False, cache_dtypes=FLOAT8, dtypes=frozenset({torch.bfloat16})),
    "latents in bfloat16 alone": of(FlashInferMLABackend, dtypes=frozenset({torch.bfloat16})),
    "two rows a request": of(TrtllmMLABackend, UNIFORM_KINDS, max_width=2),
    "no graphs": of(FA3Backend, graph=False, packed_graph=False),
    "no trees": of(FlashInferMLABackend, non_causal=False),
    "pages of 32 alone": of(FA3Backend, page_sizes=frozenset({32})),
    "planned on the host": HostedBackend,
    "planned on the host by rows and heads": UnitsBackend,
    "planned on the device": ScheduledBackend,
    "reads whole pages": OverReadingBackend,
}
