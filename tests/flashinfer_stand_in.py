"""A stand-in for the module that FlashInfer compiles, and its backend on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_backends.backends.flashinfer_mla import FlashInferMLABackend
from attn_backends.cache import CacheFormat
from attn_backends.conformance.worlds import Setup
from attn_backends.contract.kernel import Kernel
from attn_backends.graphs import RecordedGraph
from attn_backends.kernels.torch_attention import csr_attention
from attn_backends.vendors import flashinfer
from spec_metadata.plans import csr

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
        words = torch.cat(self.spoil(rows))
        if len(self.plans) == 1 or not self.keeps_first:
            staging.fill_(0xFF)
            staging.view(torch.int32)[: words.numel()] = words
        else:
            staging.copy_(work)
        if self.fails:
            raise RuntimeError("Failed to plan MLA")
        return [1, self.grid, kv_len.numel()], words.numel() * words.itemsize

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
        bs, words = layout[2], work.view(torch.int32)
        qo_indptr, kv_indptr, kv_len = words[: bs + 1], words[bs + 1 : 2 * bs + 2], words[2 * bs + 2 : 3 * bs + 2]
        if ckv.dtype is flashinfer.FP8:
            ckv, kpe = ckv.float() * ckv_scale, kpe.float() * kpe_scale
        latent = torch.cat((ckv, kpe), dim=2).unsqueeze(2)
        result, natural = csr_attention(
            torch.cat((q_nope, q_pe), dim=2),
            latent,
            latent[..., : ckv.shape[2]],
            qo_indptr,
            kv_indptr,
            kv_indices,
            kv_len,
            max_query=q_nope.shape[0],
            max_kv_len=kv_indices.shape[0] * page_size,
            causal=bool(mask_mode),
            scale=sm_scale,
        )
        assert q_nope.shape[1] == num_heads
        assert ckv_scale_arr is None
        out.copy_(result)
        lse.copy_(natural if return_lse_base_on_e and not self.reads_base_two else natural * LOG2_E)


def on_cpu(kernel: Kernel) -> Kernel:
    """A kernel that takes the suite's layers, of three heads, and runs here."""
    capabilities = {kind: replace(known, query_heads=None) for kind, known in kernel.capabilities.items()}
    return replace(kernel, capabilities=capabilities, unavailable_reasons=lambda device: [])


class OnCpu(FlashInferMLABackend):
    """The backend with FlashInfer's kernels on a CPU."""

    kernels = tuple(map(on_cpu, FlashInferMLABackend.kernels[:2]))


def setup_of(page_size: int, topk: int = 1) -> Setup:
    return Setup(OnCpu, CacheFormat.LATENT, page_size, topk, torch.bfloat16, kernel="flashinfer_fa3")


class WarmedUp(RecordedGraph):
    """A graph whose region runs once before it is recorded, as a CUDA graph's does."""

    def capture(self, region: Callable[[], Any], sharing: RecordedGraph | None = None) -> Any:
        with torch.no_grad():
            region()
        return super().capture(region, sharing)
