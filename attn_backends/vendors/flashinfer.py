"""FlashInfer's paged MLA kernels, `fa3` (SM90) and `fa2` (SM80 and newer); written against flashinfer-python 0.7.2.

    q [num_tokens, num_heads, 576], latents [num_pages, page_size, 576]  ->  out [num_tokens, num_heads, 512], lse

FlashInfer plans on the host: from exact lengths it divides every request into tiles and writes a list of work for each
block of threads into an integer workspace. A run reads that workspace, the page ids and nothing else of the metadata;
its grid and the places inside the workspaces depend on the query rows and the device only, so a graph that holds a run
is right for other lengths once they are planned into the same workspace.

What is called is the module beneath `flashinfer.mla.BatchMLAPagedAttentionWrapper`, its `plan` and `run`. The wrapper
takes no integer workspace from its caller (it allocates 8 MiB, of which the kernel can use 0.6), and in its graph mode
copies that workspace and the metadata aside at every plan, to be able to go back; a plan of the module takes 0.13 to
0.29 ms of an H200's host, a sixth of that (`docs/results/flashinfer_h200.json`), and gives the same bits.
`get_batch_mla_module` hands out a proxy of it, whose own `plan` copies the whole list once more on the host, from one
page-locked buffer into another. What the wrapper checks beside is declared in `mla_capabilities`, or refused here.

The log-sum-exp is natural by FlashInfer's own switch. `fa2` sums the softmax's weights as it multiplies them, rounded
to the queries' type, so its log-sum-exp is off by up to half a rounding step: 2**-9 in bfloat16.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_backends.cache import PagedCache, PagedLatent
from attn_backends.contract.capabilities import Capabilities, LseBase
from attn_backends.contract.kernel import Kernel, LayerShape, Schedule, Scheduled
from attn_backends.errors import CaptureError, UnsupportedStepError
from attn_backends.layer import AttentionLayer, AttentionOutput
from attn_backends.selection import providers
from spec_metadata import BufferSpec, StepKind
from spec_metadata.buffers import ONE, Dim, Producer
from spec_metadata.capacity import ceil_div
from spec_metadata.plans.csr import CsrPlan, csr_rows
from spec_metadata.visibility import HostLens

RANK, ROPE = 512, 64
FP8 = torch.float8_e4m3fn

# FlashInfer's scheduler (`MLAPlan` in scheduler.cuh): nine lists of at most 16384 items of work and five with an entry
# per streaming multiprocessor; two partial results, in the query's type with a float32 log-sum-exp, of each of the 64
# rows that a multiprocessor works on. No GPU has 256 multiprocessors yet; on one that has more, its plan fails.
MAX_WORK, MAX_PROCESSORS, TILE_ROWS = 16384, 256, 64
_INT_BYTES = 4 * (9 * MAX_WORK + 5 * MAX_PROCESSORS)
_FLOAT_BYTES = 2 * MAX_PROCESSORS * TILE_ROWS * (2 * RANK + 4)

INT_WORKSPACE = BufferSpec(
    "flashinfer_work",
    torch.uint8,
    (ONE, Dim(str(_INT_BYTES), lambda e: _INT_BYTES)),
    "FlashInfer's list of work, of all forwards alike",
    producer=Producer.HOST,
)
FLOAT_WORKSPACE = BufferSpec(
    "flashinfer_partial",
    torch.uint8,
    (Dim(str(_FLOAT_BYTES), lambda e: _FLOAT_BYTES),),
    "FlashInfer's partial outputs of requests that several blocks share",
)


def mla_capabilities(backend: str) -> dict[StepKind, Capabilities]:
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
        needs_host_lens=True,
        rounded_lse=backend == "fa2",
        kv_scales=True,
    )
    packed = replace(uniform, packed=True)
    return {
        StepKind.PREFILL: replace(packed, graph=False),
        StepKind.DECODE: uniform,
        StepKind.DRAFT_DECODE: uniform,
        StepKind.TARGET_VERIFY: uniform,
        StepKind.DRAFT_EXTEND: packed,
    }


class MLASchedule(Schedule):
    """FlashInfer's list of work for one plan and shape of layers.

    backend: "fa2" or "fa3", whose module is compiled when it is first used (20 s; FlashInfer keeps it on disk).
    """

    def __init__(self, backend: str, plan: CsrPlan, shape: LayerShape, buffers: Mapping[str, Tensor]) -> None:
        self._work, self._partial = buffers[INT_WORKSPACE.name], buffers[FLOAT_WORKSPACE.name]
        _refuse(f"flashinfer_{backend}", _type_reasons(shape, self._work.device))
        self._csr, self._shape = plan, shape
        proxy = providers.load("flashinfer.mla:get_batch_mla_module")(
            backend,
            dtype_q=shape.dtype,
            dtype_kv=shape.cache_dtype,
            dtype_o=shape.dtype,
            dtype_idx=plan.kv_indices.dtype,
            head_dim_ckv=shape.v_head_dim,
            head_dim_kpe=shape.head_dim - shape.v_head_dim,
            use_profiler=False,
        )
        self._module = proxy._module
        self._layout: Any = None

    def plan_host(self, lens: HostLens) -> None:
        """Plan from exact lengths and copy the list of work to the device, on the current stream, without waiting.

        The host may be ahead of the stream: PyTorch does not give out the page-locked memory again before it was read.
        """
        assert lens.causal == self._csr.causal, "the host and the device planned different steps"
        _refuse("FlashInfer's MLA scheduler", _work_reasons(lens, self._shape.num_heads))
        rows = csr_rows(_on_host(lens.query_lens), _on_host(lens.kv_lens), self._csr.page_size)
        staging = torch.empty(self._work.shape, dtype=torch.uint8, pin_memory=self._work.is_cuda)
        buffers = (self._partial, self._work, staging)
        layout, _ = self._module.plan(*buffers, *rows, self._shape.num_heads, self._shape.v_head_dim, lens.causal)
        self._work.copy_(staging, non_blocking=True)
        self._take(layout)

    def adopts(self, last: Schedule) -> bool:
        """A list of work is that of its lengths, whatever the phase: a chain's draft extend has the verify's."""
        assert isinstance(last, MLASchedule)
        assert last._layout is not None, "it planned"
        self._take(last._layout)
        return True

    def _take(self, layout: Any) -> None:
        """Attend by a layout from now on. Asking FlashInfer's own lists whether they are equal saves reading them."""
        known = self._layout
        if known is not None and layout != known and list(layout) != list(known):
            raise CaptureError(
                f"FlashInfer's grid and workspace were laid out as {list(known)} and are {list(layout)} for other "
                "lengths; a graph keeps the first, so run this step eagerly"
            )
        self._layout = layout

    def run(
        self, q: Tensor, latent: Tensor, out: Tensor, lse: Tensor, softmax_scale: float, latent_scale: float
    ) -> None:
        """Write attention into out and lse. latent_scale: of an fp8 cache's entries; of others it is not read."""
        rank, causal = self._shape.v_head_dim, int(self._csr.causal)
        queries, latents = (q[..., :rank], q[..., rank:]), (latent[..., :rank], latent[..., rank:])
        scales, natural_lse, scales_by_block = (latent_scale, latent_scale), True, None
        self._module.run(
            self._partial,
            self._work,
            self._layout,
            *queries,
            *latents,
            self._csr.kv_indices,
            out,
            lse,
            causal,
            self._shape.num_heads,
            self._csr.page_size,
            softmax_scale,
            natural_lse,
            *scales,
            scales_by_block,
        )


def mla_kernel(backend: str, architectures: frozenset[int]) -> Kernel[CsrPlan]:
    """The kernel `flashinfer_<backend>` on CSR metadata (`spec_metadata.plans.csr`)."""
    name = f"flashinfer_{backend}"
    return Kernel(
        name,
        _launch_mla,
        mla_capabilities(backend),
        providers.vendor_reasons(name),
        architectures=architectures,
        schedule=partial(MLASchedule, backend),
        workspaces=(INT_WORKSPACE,),
        scratch=(FLOAT_WORKSPACE,),
    )


def _launch_mla(q: Tensor, cache: PagedCache, scheduled: Scheduled[CsrPlan], layer: AttentionLayer) -> AttentionOutput:
    assert isinstance(cache, PagedLatent)
    assert isinstance(scheduled.schedule, MLASchedule)
    _refuse(f"FlashInfer, layer {layer.id}", _tensor_reasons(q, cache.latent, layer))
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


def _refuse(what: str, reasons: list[str]) -> None:
    if reasons:
        raise UnsupportedStepError(what, reasons)


def _type_reasons(shape: LayerShape, device: torch.device) -> list[str]:
    """Why an fp8 cache can't be read; empty if it can, or is none."""
    if shape.cache_dtype is not FP8:
        return []
    reasons = []
    if shape.dtype is not torch.bfloat16:
        reasons.append(f"a cache of {FP8} under queries of {shape.dtype} (it takes torch.bfloat16)")
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
        reasons.append(f"a cache of {FP8} on this GPU (it needs SM90)")
    return reasons


def _work_reasons(lens: HostLens, num_heads: int) -> list[str]:
    """Why FlashInfer's list of work is too short for a batch; empty if it is not.

    It holds an item for each tile of query rows, and at most one more for each multiprocessor where a tile's keys are
    divided: the parts are at least as long as an even share of all keys. FlashInfer itself would write past the end.
    """
    num_tokens, bs, room = sum(lens.query_lens), len(lens.query_lens), MAX_WORK - MAX_PROCESSORS
    tile = TILE_ROWS * (2 if num_tokens * num_heads // bs > TILE_ROWS else 1)
    if num_tokens * num_heads // tile + bs <= room:  # all tiles full, but one of each request: most batches end here
        return []
    num_tiles = sum(ceil_div(length * num_heads, tile) for length in lens.query_lens)
    if num_tiles <= room:
        return []
    return [
        f"{num_tokens} query rows of {num_heads} heads, {num_tiles} tiles (it has room for {room}; prefill in smaller "
        "chunks)"
    ]


def _on_host(lens: Sequence[int]) -> Tensor:
    """[bs] int32, in a third of the time that `torch.tensor` takes."""
    return torch.frombuffer(array("i", lens), dtype=torch.int32)


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
