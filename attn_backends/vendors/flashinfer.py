"""FlashInfer's paged MLA kernels, `fa3` (SM90) and `fa2` (SM80 and newer); written against flashinfer-python 0.7.2.

    q [num_tokens, num_heads, 576], latents [num_pages, page_size, 576]  ->  out [num_tokens, num_heads, 512], lse

What they read of a plan is a work list (`flashinfer_work`). Where the installed version's format is known the list
is written on the device, so that no step needs lengths on the host; else FlashInfer plans there from exact lengths.
What FlashInfer's own wrapper checks beside is declared in `_mla_capabilities`, or refused here.

The log-sum-exp is natural by FlashInfer's own switch. `fa2` sums the softmax's weights as it multiplies them, rounded
to the queries' type, so its log-sum-exp is off by up to half a rounding step: 2**-9 in bfloat16.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attn_backends.cache import PagedCache, PagedLatent
from attn_backends.contract.capabilities import Capabilities, LseBase, of_dense
from attn_backends.contract.kernel import Kernel, Scheduled
from attn_backends.layer import AttentionLayer, AttentionOutput
from attn_backends.selection import providers
from attn_backends.vendors.flashinfer_work import (
    FLOAT_WORKSPACE,
    FP8,
    INT_WORKSPACE,
    KNOWN_VERSIONS,
    RANK,
    ROPE,
    VENDOR_INT_WORKSPACE,
    MLASchedule,
    VendorMLASchedule,
    listed_along,
    refuse,
)
from spec_metadata import StepKind
from spec_metadata.plans.csr import CsrPlan


def _mla_capabilities(backend: str) -> dict[StepKind, Capabilities]:
    """What `fa2` and `fa3` can do, for every step kind.

    query_heads: those that divide a tile of 64 or 128 query rows; for others FlashInfer refuses batches whose causal
    edge falls between two tiles. cache_dtypes: e4m3 under bfloat16 queries, on SM90. Keys past a request's length are
    never read, so a page's unseen tail may hold anything.
    """
    uniform = Capabilities(
        page_sizes=None,
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        cache_dtypes=frozenset({FP8}),
        head_sizes=frozenset({(RANK + ROPE, RANK)}),
        query_heads=frozenset({1, 2, 4, 8, 16, 32, 64, 128}),
        non_causal=True,
        lse=LseBase.NATURAL,
        rounded_lse=backend == "fa2",
        kv_scales=True,
    )
    return of_dense(uniform)


def mla_kernel(backend: str, architectures: frozenset[int], version: str | None) -> Kernel[CsrPlan]:
    """The kernel `flashinfer_<backend>` on CSR metadata (`spec_metadata.plans.csr`).

    version: of the package that is installed, None if there is none: it decides who plans.
    """
    name = f"flashinfer_{backend}"
    kernel = Kernel(
        name,
        _launch_mla,
        _mla_capabilities(backend),
        providers.vendor_reasons(name),
        architectures=architectures,
        schedule=partial(MLASchedule, backend),
        workspaces=(INT_WORKSPACE,),
        along=listed_along,
        scratch=(FLOAT_WORKSPACE,),
    )
    if backend == "fa3":
        kernel = replace(kernel, slower_mixed=_slower_mixed)
    return kernel if version is None or version in KNOWN_VERSIONS else planned_by_vendor(kernel, backend)


def _slower_mixed(layer: AttentionLayer, num_running: int, num_prompt_rows: int) -> str:
    """`Kernel.slower_mixed`. One step took 0.92 to 1.00 times as long as two, and 1.09 to 1.24 times at 2,048 rows of
    heads (H200, mixed_flashinfer.json).
    """
    rows = layer.num_heads * num_running
    return "" if rows <= 512 or rows >= 4096 else f"{rows} rows of heads (it takes up to 512, and 4096 or more)"


def planned_by_vendor(kernel: Kernel[CsrPlan], backend: str) -> Kernel[CsrPlan]:
    """A kernel with FlashInfer's own scheduler, which needs exact lengths on the host and can't be recorded."""
    capabilities = {
        kind: replace(known, needs_host_lens=True, packed_graph=False, graph=kind is not StepKind.PREFILL)
        for kind, known in kernel.capabilities.items()
    }
    return replace(
        kernel,
        capabilities=capabilities,
        schedule=partial(VendorMLASchedule, backend),
        workspaces=(VENDOR_INT_WORKSPACE,),
        along=None,
    )


def _launch_mla(q: Tensor, cache: PagedCache, scheduled: Scheduled[CsrPlan], layer: AttentionLayer) -> AttentionOutput:
    assert isinstance(cache, PagedLatent)
    assert isinstance(scheduled.schedule, MLASchedule)
    refuse(f"FlashInfer, layer {layer.id}", _tensor_reasons(q, cache.latent, layer))
    out = q.new_empty(q.shape[0], layer.num_heads, cache.rank)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    in_kernel = _as_bfloat16(layer.k_scale) if cache.dtype is FP8 else 1.0
    scheduled.schedule.run(q, cache.latent, out, lse, layer.scale * layer.k_scale / in_kernel, in_kernel)
    if cache.dtype is not FP8 and layer.v_scale != 1.0:
        out.mul_(layer.v_scale)
    return AttentionOutput(out, lse)


def _as_bfloat16(scale: float) -> float:
    """A scale as FlashInfer multiplies fp8 latents with it, in bfloat16: what it rounds off goes into the softmax's
    scale, where it would otherwise shift every score the same way.
    """
    mantissa, exponent = math.frexp(scale)
    return math.ldexp(round(math.ldexp(mantissa, 8)), exponent - 8)


def _tensor_reasons(q: Tensor, latent: Tensor, layer: AttentionLayer) -> list[str]:
    """Why FlashInfer can't address these tensors; empty if it can."""
    reasons = []
    for name, tensor in (("queries", q), ("latents", latent)):
        places = (tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:2]))
        if tensor.stride(2) != 1 or any(place % 16 for place in places):
            reasons.append(f"{name} with strides {tensor.stride()} (it reads 16 bytes at a time, aligned)")
    if q.shape[0] * max(q.stride(0), layer.num_heads * layer.v_head_dim) > 2**32:
        reasons.append(f"{q.shape[0]} query rows of {q.stride(0)} elements (its offsets have 32 bits)")
    return reasons
