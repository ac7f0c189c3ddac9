"""A first look at vendor kernels on the library's own metadata: FA3 and FlashMLA inside CUDA graphs, against an oracle.

    python -m tests.gpu.smoke --json docs/results/smoke_h200.json

Needs a Hopper GPU, FlashMLA (`flash_mla`) and FA3 (`vllm.vllm_flash_attn`). Each case captures a step with one batch,
replays it with another, and compares every row with float64 attention over the tokens that the row must see. The budget
is twice the error of a low-precision reference, plus one rounding step. Each case also runs with a planted defect, a
length that the replay does not update, and must then fail.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from attn_backends.backends.fa3 import FA3Backend
from attn_backends.backends.trtllm_mla import TrtllmMLABackend
from attn_backends.base import AttentionBackend, Kernel
from attn_backends.cache import KeyValues, Latents, PagedCache, PagedKV, PagedLatent, allocate_kv, allocate_latent
from attn_backends.graphs import CudaGraph
from attn_backends.layer import AttentionLayer, AttentionOutput
from spec_metadata import CacheGeometry, Capacity, DraftTree, RequestTable, Step
from spec_metadata.plans.block_table import BlockTablePlan
from spec_metadata.plans.ragged import RaggedPlan

DEVICE = torch.device("cuda")
PARENTS = [0, 0, 0, 1, 1, 2, 3, 5]  # a tree of 8 nodes, depth 3


def launch_fa3(q: Tensor, cache: PagedCache, plan: RaggedPlan, layer: AttentionLayer) -> AttentionOutput:
    """FlashAttention-3 on the ragged plan; log-sum-exp comes as [heads, tokens], natural."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    if isinstance(cache, PagedKV):
        k, v, q_v = cache.k, cache.v, None
    else:
        rank = cache.rank
        k, v = cache.latent[..., rank:].unsqueeze(2), cache.latent[..., :rank].unsqueeze(2)
        q, q_v = q[..., rank:], q[..., :rank]
    out, lse = flash_attn_varlen_func(
        q,
        k,
        v,
        plan.max_seqlen_q,
        plan.cu_seqlens_q,
        plan.max_seqlen_k,
        seqused_k=plan.seqused_k,
        q_v=q_v,
        softmax_scale=layer.scale,
        causal=plan.causal,
        block_table=plan.page_table,
        return_softmax_lse=True,
        fa_version=3,
    )
    return AttentionOutput(out, lse.transpose(0, 1))


def launch_flashmla(q: Tensor, cache: PagedCache, plan: BlockTablePlan, layer: AttentionLayer) -> AttentionOutput:
    """FlashMLA dense decode on the block table; its scheduler plans afresh, so inside the graph."""
    from flash_mla import flash_mla_with_kvcache
    from flash_mla.flash_mla_interface import FlashMLASchedMeta

    assert isinstance(cache, PagedLatent)
    out, lse = flash_mla_with_kvcache(
        q.unflatten(0, (-1, plan.width)),
        cache.latent.unsqueeze(2),
        plan.block_table,
        plan.cache_seqlens,
        cache.rank,
        FlashMLASchedMeta(),
        softmax_scale=layer.scale,
        causal=plan.causal,
        use_legacy=True,
    )
    return AttentionOutput(out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1))


class FA3Vendor(FA3Backend):
    """fa3 on the vendor's kernel."""

    kernels = (Kernel("vllm_flash_attn", launch_fa3, FA3Backend.kernels[0].capabilities, lambda device: []),)


class FlashMLAVendor(TrtllmMLABackend):
    """trtllm_mla on FlashMLA."""

    kernels = (Kernel("flashmla", launch_flashmla, TrtllmMLABackend.kernels[0].capabilities, lambda device: []),)


@dataclass(frozen=True)
class Case:
    """A vendor on one cache format."""

    name: str
    vendor: type[AttentionBackend]
    layer: AttentionLayer
    page_size: int


GQA = AttentionLayer(0, 32, 8, 128, 128, 128**-0.5)
MLA = AttentionLayer(0, 16, 1, 576, 512, 192**-0.5)
CASES = (
    Case("fa3 grouped-query", FA3Vendor, GQA, 16),
    Case("fa3 MLA by q_v", FA3Vendor, MLA, 16),
    Case("trtllm_mla", FlashMLAVendor, MLA, 64),
)


class Scene:
    """Requests with random tokens, kept by position and written to shuffled pages by this script's own code."""

    def __init__(self, layer: AttentionLayer, capacity: Capacity, seed: int) -> None:
        self.generator = torch.Generator(DEVICE).manual_seed(seed)
        self.layer, self.capacity = layer, capacity
        per_row = capacity.max_pages
        self.geometry = CacheGeometry(1 + capacity.max_bs * per_row, capacity.page_size)
        order = 1 + torch.randperm(self.geometry.num_pages - 1, generator=self.generator, device=DEVICE)
        pages = torch.cat((torch.zeros(per_row, dtype=torch.int64, device=DEVICE), order)).view(-1, per_row)
        offsets = torch.arange(capacity.page_size, device=DEVICE)
        self.table = (pages.unsqueeze(2) * capacity.page_size + offsets).flatten(1).int()
        shape = (capacity.max_bs + 1, capacity.max_kv_len, layer.num_kv_heads)
        self.k = self.randn(*shape, layer.head_dim)
        latent = layer.num_kv_heads == 1
        self.v = self.k[..., : layer.v_head_dim] if latent else self.randn(*shape, layer.v_head_dim)
        make = allocate_latent if latent else allocate_kv
        sizes = (
            (layer.v_head_dim, layer.head_dim - layer.v_head_dim) if latent else (layer.num_kv_heads, layer.head_dim)
        )
        self.cache = make(self.geometry, *sizes, torch.bfloat16, DEVICE)
        for row in range(1, capacity.max_bs + 1):
            slots = self.table[row].long()
            self.cache.store(self.entries(row, slice(None)), slots)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=DEVICE).bfloat16()

    def entries(self, row: int, positions: slice) -> KeyValues | Latents:
        k, v = self.k[row, positions], self.v[row, positions]
        return KeyValues(k, v) if self.layer.num_kv_heads > 1 else Latents(k.squeeze(1))

    def paging(self, rows: list[int]) -> RequestTable:
        return RequestTable(self.table, torch.tensor(rows, device=DEVICE), self.geometry)


def attention(scene: Scene, row: int, q: Tensor, positions: list[int], weights: torch.dtype) -> AttentionOutput:
    """Attention of one query row [num_heads, head_dim] over the tokens at these positions.

    weights: float64 for the oracle; bfloat16 for the low-precision reference, which works in float32 and rounds the
    softmax weights, before it sums them, and the output.
    """
    layer, group = scene.layer, scene.layer.num_heads // scene.layer.num_kv_heads
    dtype = torch.float64 if weights is torch.float64 else torch.float32
    k = scene.k[row, positions].to(dtype).repeat_interleave(group, 1)
    v = scene.v[row, positions].to(dtype).repeat_interleave(group, 1)
    scores = torch.einsum("hd,nhd->hn", q.to(dtype), k) * layer.scale
    peak = scores.amax(1, keepdim=True)
    unnormalised = (scores - peak).exp().to(weights).to(dtype)
    total = unnormalised.sum(1, keepdim=True)
    out = torch.einsum("hn,nhd->hd", unnormalised, v) / total
    return AttentionOutput(out.to(weights), (peak + total.log()).squeeze(1))


def paths() -> list[list[int]]:
    """The nodes that each tree node sees."""
    seen: list[list[int]] = []
    for node, parent in enumerate(PARENTS):
        seen.append([node] if node == 0 else [*seen[parent], node])
    return seen


def step_of(kind: str, scene: Scene, rows: list[int], lens: list[int]) -> tuple[Step, int, list[list[list[int]]]]:
    """A step, the forward to run, and for each request and row the positions that the row must see."""
    seq_lens, paging = torch.tensor(lens, dtype=torch.int32, device=DEVICE), scene.paging(rows)
    if kind == "draft":
        step = Step.draft_decode(1, 4, seq_lens, paging)
        return step, 2, [[list(range(n + 3))] for n in lens]
    if kind == "verify chain":
        width = len(PARENTS)
        step = Step.target_verify(width, seq_lens, paging)
        return step, 0, [[list(range(n + j + 1)) for j in range(width)] for n in lens]
    parents = torch.tensor([PARENTS] * len(lens), device=DEVICE)
    tree = DraftTree.from_parents(parents, parents, max_depth=3)
    step = Step.target_verify(len(PARENTS), seq_lens, paging, tree_mask=tree.mask)
    return step, 0, [[list(range(n)) + [n + node for node in path] for path in paths()] for n in lens]


def compare(scene: Scene, q: Tensor, out: AttentionOutput, rows: list[int], seen: list[list[list[int]]]) -> Tensor:
    """[2, 2]: largest absolute error of (kernel, low-precision reference) x (output, log-sum-exp) over the real rows.

    q: [num_tokens, num_heads, head_dim] of the padded step.
    """
    worst = torch.zeros(2, 2, dtype=torch.float64, device=DEVICE)
    width = len(seen[0])
    for request, (row, of_request) in enumerate(zip(rows, seen, strict=True)):
        for j, positions in enumerate(of_request):
            token = request * width + j
            exact = attention(scene, row, q[token], positions, torch.float64)
            low = attention(scene, row, q[token], positions, torch.bfloat16)
            kernel = AttentionOutput(out.out[token], out.lse[token])
            found = [[(x - y).abs().max().double() for x, y in zip(z, exact, strict=True)] for z in (kernel, low)]
            worst = torch.maximum(worst, torch.stack([torch.stack(row_) for row_ in found]))
    return worst


def run(case: Case, kind: str, planted: str = "") -> dict:
    """Capture on one batch, replay on another, compare. planted: a defect to put in, "" or "one length frozen"."""
    capacity = Capacity(4, 1000, case.page_size, topk=3, num_steps=4, num_draft_tokens=len(PARENTS))
    scene = Scene(case.layer, capacity, seed=7)
    backend = case.vendor(capacity, scene.geometry, DEVICE)
    first, _, _ = step_of(kind, scene, [4, 1, 2], [900, 16, 333])
    rows, lens = [3, 1, 2], [63, 700, 129]
    step, forward, seen = step_of(kind, scene, rows, lens)
    bucket = first.bucket(capacity.max_bs)
    meta = backend.capture(bucket, first.paging)
    backend.replay(meta, first)
    q = scene.randn(bucket.bs * bucket.width, case.layer.num_heads, case.layer.head_dim)
    graph = CudaGraph()
    out = graph.capture(lambda: backend.forward(q, scene.cache, meta.at(forward), case.layer))
    q.copy_(scene.randn(*q.shape))
    backend.replay(meta, step)
    if planted:
        lengths = meta.plans[forward].seqused_k if case.vendor is FA3Vendor else meta.plans[forward].cache_seqlens
        lengths[1] = 900
    graph.replay()
    worst, reference = compare(scene, q, out, rows, seen)
    rounding = [2**-8 * float(out.out.abs().max()), 2**-23 * float(out.lse.abs().max())]
    budget = 2 * reference + torch.tensor(rounding, dtype=torch.float64, device=DEVICE)
    return {
        "case": case.name,
        "kernel": backend.kernel.name,
        "step": kind,
        "planted": planted,
        "captured_lens": [900, 16, 333],
        "replayed_lens": lens,
        "max_err_out": float(worst[0]),
        "budget_out": float(budget[0]),
        "max_err_lse": float(worst[1]),
        "budget_lse": float(budget[1]),
        "status": "pass" if bool((worst <= budget).all()) else "fail",
    }


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for name in ("sgl-flash-mla", "vllm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "without package metadata"
    return found


def main() -> int:
    """Run every case and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, help="file to write")
    path = parser.parse_args().json
    kinds = ("draft", "verify chain", "verify tree")
    rows = [run(case, kind, planted) for case in CASES for kind in kinds for planted in ("", "one length frozen")]
    head = {
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
        "command": "python -m tests.gpu.smoke --json FILE",
    }
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(head)[:-1] + ', "rows": [\n' + lines + "\n]}\n")
    print(lines)
    return int(any((row["status"] == "pass") == bool(row["planted"]) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
