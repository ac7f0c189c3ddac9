"""Our own kernels of the dense backends, on whatever lists a backend's pages.

    gluon     on Hopper (SM90): MLA of latents of 512 + 64 elements, the operator `latent_attention`, or prompts over
              keys and values of `HEAD_SIZES`, the operator `prefill_attention`; of `fa3`, which has both, the
              first is `gluon_mla`
    triton    anything else, on any GPU from SM80 on: the operator `paged_attention`

Where a batch is too small to fill the GPU, the keys of a request are divided, and the parts are merged through scratch
memory. How many there are follows from sizes that a graph freezes anyway: the bucket, the layer, the capacity's
context, the GPU. A request that is much longer than the others is divided further, on the device (`triton_pieces`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_backends.cache import PagedCache, PagedLatent
from attn_backends.contract.capabilities import FP8_TYPES, Capabilities
from attn_backends.contract.kernel import Kernel, LayerShape, Schedule, Scheduled
from attn_backends.errors import UnsupportedStepError
from attn_backends.kernels.devices import gpu_of
from attn_backends.kernels.paged_operators import LATENT, RANK, latent_attention, paged_attention
from attn_backends.kernels.prefill_operator import HEAD_SIZES, prefill_attention
from attn_backends.layer import AttentionLayer, AttentionOutput
from attn_backends.selection import providers
from spec_metadata import BufferSpec, StepKind
from spec_metadata.buffers import Dim
from spec_metadata.plans.block_table import BlockTablePlan
from spec_metadata.plans.csr import CsrPlan
from spec_metadata.plans.ragged import RaggedPlan
from spec_metadata.visibility import windowed

NAME, GLUON = "triton", "gluon"
PagedPlan = CsrPlan | BlockTablePlan | RaggedPlan

# Enough for two programs of 64 rows and 512 elements on each of 128 multiprocessors.
_NUM_OUT, _NUM_LSE = 2**23, 2**18
PARTIAL_OUT = BufferSpec(
    "triton_partial_out",
    torch.float32,
    (Dim(str(_NUM_OUT), lambda e: _NUM_OUT),),
    "outputs of the parts that a request's keys are divided into",
)
PARTIAL_LSE = BufferSpec(
    "triton_partial_lse", torch.float32, (Dim(str(_NUM_LSE), lambda e: _NUM_LSE),), "log-sum-exp of each such output"
)


# query_indptr, page_indptr, page_ids, kv_lens, max_query, max_kv_len, causal: as of `paged_attention`.
PagedKeys = tuple[Tensor | None, Tensor | None, Tensor, Tensor, int, int, bool]


def paged_keys(plan: PagedPlan) -> PagedKeys:
    """Queries and pages of a plan, as arguments of `kernels.paged_operators.paged_attention`."""
    if isinstance(plan, CsrPlan):
        lists = (plan.qo_indptr, plan.kv_indptr, plan.kv_indices, plan.kv_len)
        return *lists, plan.max_query, plan.max_kv_len, plan.causal
    if isinstance(plan, RaggedPlan):
        bounds = (plan.max_seqlen_q, plan.max_seqlen_k)
        return plan.cu_seqlens_q, None, plan.page_table, plan.seqused_k, *bounds, plan.causal
    return None, None, plan.block_table, plan.cache_seqlens, plan.width, plan.max_kv_len, plan.causal


class Scratch(Schedule):
    """Scratch memory for a forward's launches. partial: outputs and log-sum-exps of parts."""

    def __init__(self, plan: PagedPlan, shape: LayerShape, buffers: Mapping[str, Tensor]) -> None:
        self.keys = paged_keys(plan)
        self.partial = (buffers[PARTIAL_OUT.name], buffers[PARTIAL_LSE.name])
        device = self.partial[0].device
        if device.type == "cuda":
            _refuse_8_bits(shape.cache_dtype, torch.cuda.get_device_capability(device))
            _refuse_sizes(shape, device)


def triton_kernel(definition: Mapping[StepKind, Capabilities]) -> Kernel[PagedPlan]:
    """The kernel of a backend. definition: what its torch kernel can do; it does the same, but for float64."""
    return Kernel(
        NAME,
        _launch,
        {kind: replace(able, dtypes=able.dtypes - {torch.float64}) for kind, able in definition.items()},
        providers.runs_on_triton,
        architectures=frozenset({8, 9, 10, 11, 12}),
        schedule=Scratch,
        scratch=(PARTIAL_OUT, PARTIAL_LSE),
    )


def gluon_kernel(definition: Mapping[StepKind, Capabilities]) -> Kernel[PagedPlan]:
    """The kernel of a backend of latents. definition: what its torch kernel can do; it does the same for 16-bit queries
    and one size of heads, without windows and sinks.
    """
    return _gluon(definition, _launch_latent, frozenset({(LATENT, RANK)}))


def gluon_prefill_kernel(definition: Mapping[StepKind, Capabilities]) -> Kernel[PagedPlan]:
    """The kernel of a backend of keys and values, of prompts alone; else as `gluon_kernel`."""
    prompts = {StepKind.PREFILL: definition[StepKind.PREFILL]}
    return _gluon(prompts, _launch_prefill, HEAD_SIZES)


def _gluon(
    definition: Mapping[StepKind, Capabilities],
    launch: Callable[[Tensor, PagedCache, Scheduled[PagedPlan], AttentionLayer], AttentionOutput],
    sizes: frozenset[tuple[int, int]],
) -> Kernel[PagedPlan]:
    types = frozenset({torch.bfloat16, torch.float16})

    def narrowed(able: Capabilities) -> Capabilities:
        able = replace(able, dtypes=types, cache_dtypes=FP8_TYPES, head_sizes=sizes)
        return replace(able, window=False, tree_window=False, sinks=False)

    return Kernel(
        GLUON,
        launch,
        {kind: narrowed(able) for kind, able in definition.items()},
        providers.runs_on_gluon,
        architectures=frozenset({9}),
        schedule=Scratch,
        scratch=(PARTIAL_OUT, PARTIAL_LSE),
        # One step took 1.08 to 1.49 times as long as two (H200, mixed_gluon.json).
        slower_mixed=lambda *_: "packed rows have no split over keys",
    )


def _launch_latent(
    q: Tensor, cache: PagedCache, planned: Scheduled[PagedPlan], layer: AttentionLayer
) -> AttentionOutput:
    assert isinstance(cache, PagedLatent)
    return AttentionOutput(*latent_attention(q, cache.latent, *_arguments(planned, layer)))


def _launch_prefill(
    q: Tensor, cache: PagedCache, planned: Scheduled[PagedPlan], layer: AttentionLayer
) -> AttentionOutput:
    return AttentionOutput(*prefill_attention(q, *cache.pages, *_arguments(planned, layer)))


def _launch(q: Tensor, cache: PagedCache, planned: Scheduled[PagedPlan], layer: AttentionLayer) -> AttentionOutput:
    window = windowed(layer.window, planned.plan.drafted if isinstance(planned.plan, RaggedPlan) else 0)
    arguments: tuple[Any, ...] = (*cache.pages, *_arguments(planned, layer), *window, layer.sinks)
    return AttentionOutput(*paged_attention(q, *arguments))


def _arguments(planned: Scheduled[PagedPlan], layer: AttentionLayer) -> tuple[Any, ...]:
    """What each operator takes after queries and pages: lists of the plan, scales, room for partial results."""
    scratch = planned.schedule
    assert isinstance(scratch, Scratch)
    return *scratch.keys, layer.scale, layer.k_scale, layer.v_scale, *scratch.partial


def _refuse_8_bits(cache_dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """Triton reads e4m3 from SM89 on."""
    if cache_dtype in FP8_TYPES and capability < (8, 9):
        major, minor = capability
        reason = f"a cache of {cache_dtype} on SM{major}{minor} (Triton reads it from SM89 on)"
        raise UnsupportedStepError(f"kernel {NAME}", [reason], "use a cache of the queries' type")


def _refuse_sizes(shape: LayerShape, device: torch.device) -> None:
    """Even the least of a program's tiles must fit into shared memory."""
    from attn_backends.kernels.triton_tiles import largest_head, least_bytes, sizes_of

    gpu, is_latent = gpu_of(device), shape.num_kv_heads == 1 and shape.head_dim > shape.v_head_dim
    needed = least_bytes(sizes_of(shape.head_dim, shape.v_head_dim, is_latent), shape.dtype, gpu)
    if needed > gpu.shared:
        sizes = f"head sizes {(shape.head_dim, shape.v_head_dim)} in {shape.dtype}"
        reason = f"{sizes} ({needed} bytes of shared memory, of which this GPU has {gpu.shared})"
        raise UnsupportedStepError(f"kernel {NAME}", [reason], f"head sizes up to {largest_head(shape.dtype, gpu)}")
