"""FlashInfer's work lists for paged MLA: planned by us on the device, or by FlashInfer itself on the host.

A list says which cluster of thread blocks attends which rows to which keys. A run reads it from an integer workspace,
with the page ids and nothing else of the metadata. Its grid and the places inside the workspaces follow from the number
of query rows and the device, so a graph that holds a run is right for other lengths once these are planned.

Where the installed version's format is known we write the lists, from the lengths on the device: for a captured step in
the launch that plans it, else in one of its own (`work_operators.list_work`). FlashInfer's own scheduler needs the
lengths on the host; it plans for versions of unknown format.

What is called is the module beneath `flashinfer.mla.BatchMLAPagedAttentionWrapper`, its `run` and `plan`. The wrapper
takes no integer workspace from its caller (it allocates 8 MiB, of which the kernel can use 0.6). In its graph mode it
saves copies of that workspace and the metadata at every plan, which takes six times as long as a plan of the module
alone. `get_batch_mla_module` hands out a proxy of it, whose own `plan` copies the whole list once more on the host,
from one page-locked buffer into another.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_backends.contract.kernel import LayerShape, Schedule
from attn_backends.errors import CaptureError, UnsupportedStepError
from attn_backends.kernels.devices import gpu_of
from attn_backends.kernels.plan_operators import PagePlanner
from attn_backends.kernels.work_operators import (
    BLOCK_ROWS,
    MAX_PROCESSORS,
    NUM_WORDS,
    WorkLists,
    list_work,
    max_tiles,
    num_slots,
)
from attn_backends.selection import providers
from spec_metadata import BufferSpec
from spec_metadata.buffers import ONE, Dim, Producer
from spec_metadata.capacity import ceil_div
from spec_metadata.plans.csr import CsrPlan, csr_rows
from spec_metadata.visibility import HostLens

KNOWN_VERSIONS = frozenset({"0.7.0", "0.7.1", "0.7.2", "0.7.2.post1"})
"""Versions of flashinfer-python whose kernels read lists in the form that we write."""

RANK, ROPE = 512, 64
FP8 = torch.float8_e4m3fn

# FlashInfer's scheduler (`MLAPlan` in scheduler.cuh) lays out nine lists of 16384 words and five with one for each
# streaming multiprocessor, and two partial results, in the query's type with a float32 log-sum-exp, of each of the 64
# rows that a multiprocessor works on. No GPU has 256 multiprocessors yet; on one that has more, planning is refused.
_INT_BYTES = 4 * NUM_WORDS
_PARTIAL_ROWS = 2 * MAX_PROCESSORS * BLOCK_ROWS
_FLOAT_BYTES = _PARTIAL_ROWS * (2 * RANK + 4)

INT_WORKSPACE = BufferSpec(
    "flashinfer_work",
    torch.uint8,
    (ONE, Dim(str(_INT_BYTES), lambda e: _INT_BYTES)),
    "FlashInfer's list of work, of all forwards alike",
)
VENDOR_INT_WORKSPACE = replace(INT_WORKSPACE, producer=Producer.HOST)
FLOAT_WORKSPACE = BufferSpec(
    "flashinfer_partial",
    torch.uint8,
    (Dim(str(_FLOAT_BYTES), lambda e: _FLOAT_BYTES),),
    "FlashInfer's partial outputs of requests that several blocks share",
)


class MLASchedule(Schedule):
    """The work list for one plan and shape of layers.

    backend: "fa2" or "fa3", whose module is compiled when it is first used (20 s; FlashInfer keeps it on disk).
    """

    def __init__(self, backend: str, plan: CsrPlan, shape: LayerShape, buffers: Mapping[str, Tensor]) -> None:
        self._work, self._partial = buffers[INT_WORKSPACE.name], buffers[FLOAT_WORKSPACE.name]
        refuse(f"flashinfer_{backend}", _type_reasons(shape, self._work.device))
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
        self._layout: Any = self._prepare()

    def _prepare(self) -> Any:
        """Where the lists are to be written; returns what `run` needs to find them."""
        self.lists = _lists_in(self._work, self._csr, self._shape)
        return layout_of(self.lists, self._work)

    def refresh(self) -> None:
        """List the work again by the plan's lengths."""
        csr, num_heads = self._csr, self._shape.num_heads
        rows = csr.qo_indptr, csr.kv_indptr, csr.kv_len
        list_work(*rows, self.lists, num_tokens=csr.num_tokens, num_heads=num_heads, causal=csr.causal)

    def run(
        self, q: Tensor, latent: Tensor, out: Tensor, lse: Tensor, softmax_scale: float, latent_scale: float
    ) -> None:
        """Write attention into out, [num_tokens, num_heads, rank], and lse, [num_tokens, num_heads] float32.

        q: [num_tokens, num_heads, rank + rope]. latent: [num_pages, page_size, rank + rope]. latent_scale: of an fp8
        cache's entries; of others it is not read.
        """
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


class VendorMLASchedule(MLASchedule):
    """FlashInfer's own work list: what a version of unknown format gets."""

    def _prepare(self) -> Any:
        """Nothing: FlashInfer lays the workspace out."""
        return None

    def plan_host(self, lens: HostLens) -> None:
        """Plan from exact lengths and copy the work list to the device, on the current stream, without waiting.

        The host may be ahead of the stream: PyTorch does not give out the page-locked memory again before it was read.
        """
        assert lens.causal == self._csr.causal, "the host and the device planned different steps"
        refuse("FlashInfer's MLA scheduler", work_reasons(lens, self._shape.num_heads))
        rows = csr_rows(_on_host(lens.query_lens), _on_host(lens.kv_lens), self._csr.max_kv_len // self._csr.page_size)
        staging = torch.empty(self._work.shape, dtype=torch.uint8, pin_memory=self._work.is_cuda)
        buffers = (self._partial, self._work, staging)
        layout, _ = self._module.plan(*buffers, *rows, self._shape.num_heads, self._shape.v_head_dim, lens.causal)
        self._work.copy_(staging, non_blocking=True)
        self._take(layout)

    def refresh(self) -> None:
        """Nothing: the host planned."""

    def _take(self, layout: Any) -> None:
        """Attend by a layout from now on. Asking FlashInfer's own lists whether they are equal saves reading them."""
        known = self._layout
        if known is not None and layout != known and list(layout) != list(known):
            raise CaptureError(
                f"FlashInfer's grid and workspace were laid out as {list(known)} and are {list(layout)} for other "
                "lengths; a graph keeps the first, so run this step eagerly"
            )
        self._layout = layout


def cluster_size(num_tokens: int, num_heads: int, num_requests: int) -> int:
    """Thread blocks of a cluster, each for 64 rows of a tile: 2 where a request has more in the mean.

    A token whose heads are more rows than a tile has is never alone in it, as FlashInfer's kernels end the keys of a
    tile at its last whole token.
    """
    return 2 if max(num_tokens * num_heads // num_requests, num_heads) > BLOCK_ROWS else 1


def _lists_in(work: Tensor, csr: CsrPlan, shape: LayerShape) -> WorkLists:
    """The lists of a plan in an integer workspace; refuses a plan of more tiles than they have room for."""
    num_tokens, num_heads, num_requests = csr.num_tokens, shape.num_heads, csr.kv_len.shape[0]
    num_blocks = gpu_of(work.device).num_processors
    size = cluster_size(num_tokens, num_heads, num_requests)
    tiles = num_slots(num_tokens, num_heads, num_requests, size * BLOCK_ROWS)
    refuse("FlashInfer's MLA lists of work", _room_reasons(num_tokens, num_heads, tiles, num_blocks))
    return WorkLists.of(work.view(torch.int32), max(num_blocks // size, 1), size)


def listed_along(planner: object, csr: CsrPlan, shape: LayerShape, buffers: Mapping[str, Tensor]) -> bool:
    """Have a fused planner write the lists by the launch that plans a captured step."""
    if not isinstance(planner, PagePlanner):
        return False
    lists = _lists_in(buffers[INT_WORKSPACE.name][0], csr, shape)
    return planner.list_work(lists, csr.num_tokens, shape.num_heads, csr.causal)


def layout_of(lists: WorkLists, work: Tensor) -> list[int]:
    """Offsets of lists in the integer workspace, as FlashInfer's `MLAPlanInfo`: its grid, then offsets in bytes from
    the begin of either workspace.
    """
    q_indptr, kv_indptr, partial_indptr, *others = (row.data_ptr() - work.data_ptr() for row in lists.items)
    merges = [row.data_ptr() - work.data_ptr() for row in lists.merges]
    num_clusters = lists.work_indptr.shape[0] - 1
    partial_lse = _PARTIAL_ROWS * 2 * RANK
    first = [lists.merges.shape[1] // num_clusters, num_clusters, q_indptr, kv_indptr, partial_indptr]
    return [*first, *merges, *others, lists.work_indptr.data_ptr() - work.data_ptr(), 0, partial_lse]


def refuse(what: str, reasons: list[str]) -> None:
    """Raise UnsupportedStepError if there are reasons."""
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


def _room_reasons(num_tokens: int, num_heads: int, tiles: int, num_blocks: int) -> list[str]:
    """Why the lists are too short for the most tiles that a step may have; empty if they are not."""
    reasons = []
    if tiles > max_tiles():
        reasons.append(_too_many(num_tokens, num_heads, tiles))
    if num_blocks > MAX_PROCESSORS:
        reasons.append(f"a GPU of {num_blocks} multiprocessors (at most {MAX_PROCESSORS})")
    return reasons


def work_reasons(lens: HostLens, num_heads: int) -> list[str]:
    """Reasons why FlashInfer's work list is too short for a batch; empty if it is not.

    It holds an item for each tile of query rows, and at most one more for each multiprocessor where a tile's keys are
    divided. The parts are at least as long as an even share of all keys. FlashInfer itself would write past the end.
    """
    num_tokens, bs = sum(lens.query_lens), len(lens.query_lens)
    tile = BLOCK_ROWS * (2 if num_tokens * num_heads // bs > BLOCK_ROWS else 1)
    if num_slots(num_tokens, num_heads, bs, tile) <= max_tiles():  # most batches end here
        return []
    num_tiles = sum(ceil_div(length * num_heads, tile) for length in lens.query_lens)
    return [] if num_tiles <= max_tiles() else [_too_many(num_tokens, num_heads, num_tiles)]


def _too_many(num_tokens: int, num_heads: int, tiles: int) -> str:
    return (
        f"{num_tokens} query rows of {num_heads} heads, {tiles} tiles (it has room for {max_tiles()}; prefill in "
        "smaller chunks)"
    )


def _on_host(lens: Sequence[int]) -> Tensor:
    """[bs] int32, in a third of the time that `torch.tensor` takes."""
    return torch.frombuffer(array("i", lens), dtype=torch.int32)
