"""A stand-in for the module that FlashInfer compiles, and its backend on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.backends.flashinfer_mla import FlashInferMLABackend
from attn_backends.cache import CacheFormat
from attn_backends.conformance.worlds import Setup
from attn_backends.contract.kernel import Kernel
from attn_backends.graphs import RecordedGraph
from attn_backends.kernels.work_operators import WorkLists
from attn_backends.selection import providers
from attn_backends.vendors import flashinfer
from attn_backends.vendors.flashinfer_work import layout_of
from spec_metadata.plans import csr
from tests import checks
from tests.listed_attention import attend

LOG2_E = math.log2(math.e)


class Module:
    """Plans and runs as FlashInfer's compiled module does: a plan writes page-locked memory alone, and a run reads the
    workspace, never a plan's arguments.

    spoil: changes (qo_indptr, kv_indptr, kv_len) before they are planned; a defect to put in. fails: a plan raises when
    it has written.
    """

    def __init__(self) -> None:
        self.plans: list[csr.CsrRows] = []
        self.in_flight: list[Tensor] = []  # as if the device never came to copy them
        self.spoil: Callable[[csr.CsrRows], csr.CsrRows] = lambda rows: rows
        self.reads_base_two = self.keeps_first = self.fails = False
        self.grid = 132

    def plan(
        self,
        partial: Tensor,
        work: Tensor,
        staging: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_len: Tensor,
        num_heads: int,
        head_dim: int,
        causal: bool,
    ) -> tuple[list[int], int]:
        rows = csr.CsrRows(qo_indptr, kv_indptr, kv_len)
        assert all(t.device.type == "cpu" and t.dtype is torch.int32 for t in rows)
        assert work.dtype is staging.dtype is torch.uint8
        assert work.shape == staging.shape
        assert all(staging.data_ptr() != known.data_ptr() for known in self.in_flight), "its copy is under way"
        self.in_flight.append(staging)
        self.plans.append(rows)
        if len(self.plans) == 1 or not self.keeps_first:
            staging.fill_(0xFF)
            lists = _whole_requests(staging, self.spoil(rows), num_heads, self.grid)
        else:
            staging.copy_(work)
            lists = WorkLists.of(staging.view(torch.int32), self.grid, 1)
        if self.fails:
            raise RuntimeError("Failed to plan MLA")
        return layout_of(lists, staging), staging.numel()

    def run(
        self,
        partial: Tensor,
        work: Tensor,
        layout: list[int],
        q_nope: Tensor,
        q_pe: Tensor,
        ckv: Tensor,
        kpe: Tensor,
        kv_indices: Tensor,
        out: Tensor,
        lse: Tensor,
        mask_mode: int,
        num_heads: int,
        page_size: int,
        sm_scale: float,
        return_lse_base_on_e: bool,
        ckv_scale: float,
        kpe_scale: float,
        ckv_scale_arr: Tensor | None,
    ) -> None:
        if ckv.dtype is flashinfer.FP8:
            ckv, kpe = ckv.float() * ckv_scale, kpe.float() * kpe_scale
        assert q_nope.shape[1] == num_heads
        assert ckv_scale_arr is None
        latents = torch.cat((ckv, kpe), dim=2)
        queries = torch.cat((q_nope, q_pe), dim=2)
        lse_scale = 1.0 if return_lse_base_on_e and not self.reads_base_two else LOG2_E
        attend(partial, work, layout, queries, latents, kv_indices, out, lse, mask_mode == 1, sm_scale, lse_scale)


def install(monkeypatch: pytest.MonkeyPatch) -> Module:
    """The stand-in, as what FlashInfer compiles; graphs of `tests.checks` warm up, as CUDA's do."""
    made = Module()

    def get_batch_mla_module(backend: str, **types: Any) -> SimpleNamespace:
        assert (types["head_dim_ckv"], types["head_dim_kpe"]) == (512, 64)
        assert types["dtype_idx"] is torch.int32
        assert types["use_profiler"] is False
        return SimpleNamespace(_module=made)  # the proxy

    monkeypatch.setattr(checks, "RecordedGraph", WarmedUp)
    monkeypatch.setattr(providers, "load", {"flashinfer.mla:get_batch_mla_module": get_batch_mla_module}.get)
    return made


def _whole_requests(staging: Tensor, rows: csr.CsrRows, num_heads: int, num_blocks: int) -> WorkLists:
    """A list of work that gives whole tiles of 64 rows to blocks in turn, and merges nothing."""
    lists = WorkLists.of(staging.view(torch.int32), num_blocks, 1)
    lists.merges.zero_()
    requests = zip(rows.qo_indptr[:-1], rows.qo_indptr.diff(), rows.kv_indptr[:-1], rows.kv_len, strict=True)
    columns = [
        [begin, pages, -1, q_len, keys, row, 0, keys]
        for begin, q_len, pages, keys in requests
        for row in range(0, int(q_len) * num_heads, 64)
    ]
    if columns:
        lists.items[:, : len(columns)] = torch.tensor(columns, dtype=torch.int32).T
    shares = torch.arange(num_blocks + 1) * len(columns) // num_blocks
    lists.work_indptr.copy_(shares)
    return lists


def on_cpu(kernel: Kernel) -> Kernel:
    """A kernel that takes the suite's layers, of three heads, and runs here."""
    capabilities = {kind: replace(known, query_heads=None) for kind, known in kernel.capabilities.items()}
    return replace(kernel, capabilities=capabilities, unavailable_reasons=lambda device: [])


class OnCpu(FlashInferMLABackend):
    """The backend with FlashInfer's kernels on a CPU, their work listed by us."""

    kernels = tuple(map(on_cpu, FlashInferMLABackend.kernels[:2]))


class OnCpuByVendor(FlashInferMLABackend):
    """The same with FlashInfer's own plans on the host."""

    kernels = tuple(flashinfer.planned_by_vendor(kernel, kernel.name[-3:]) for kernel in OnCpu.kernels)


def setup_of(page_size: int, topk: int = 1, backend: type[FlashInferMLABackend] = OnCpu) -> Setup:
    return Setup(backend, CacheFormat.LATENT, page_size, topk, torch.bfloat16, kernel="flashinfer_fa3")


class WarmedUp(RecordedGraph):
    """A graph whose region runs once before it is recorded, as a CUDA graph's does."""

    def capture(self, region: Callable[[], Any], sharing: RecordedGraph | None = None) -> Any:
        with torch.no_grad():
            region()
        return super().capture(region, sharing)
