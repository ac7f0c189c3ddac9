"""A compressed layer's requests in 8-bit pages, filled by position, and attention over them in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_backends.backends.dsv4 import DSV4Backend
from attn_backends.compressed_layer import CompressedLayer, Compressor, IndexQuery
from attn_backends.kernels import fp8_pages
from attn_backends.layer import AttentionOutput
from attn_backends.vendors import flashmla_sparse
from spec_metadata import CacheGeometry, Capacity, RequestTable
from spec_metadata.plans.compressed import Compression

DEVICE = torch.device("cuda")
INDEX_DIM, RANKS = 16, 32  # an index key is its entry's rank, in digits to this base, which bfloat16 holds exactly
NUM_STEPS, MAX_CONTEXT = 4, 2300


@dataclass(frozen=True)
class Case:
    """A layer on a kernel. ratio: 0 without compression. kept: a schedule of another batch is planted."""

    ratio: int
    num_heads: int
    index_topk: int = 512
    window: int = 128
    page_size: int = 256
    sinks: bool = True
    kept: bool = False
    kernel: str = flashmla_sparse.NAME

    def __str__(self) -> str:
        topk = f" topk {self.index_topk}" if self.ratio == 4 else ""
        window = f" window {self.window}" if self.window != 128 else ""
        page = f" page {self.page_size}" if self.page_size != 256 else ""
        rest = ("" if self.sinks else " no sinks") + (" schedule kept" if self.kept else "")
        rest += "" if self.kernel == flashmla_sparse.NAME else f" {self.kernel}"
        return f"ratio {self.ratio} heads {self.num_heads}{topk}{window}{page}{rest}"


class Scene:
    """Requests with random tokens and entries, kept by position, in shuffled pages that this script itself fills."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.rng = case, torch.Generator(DEVICE).manual_seed(seed)
        capacity = Capacity(4, MAX_CONTEXT, case.page_size, 1, NUM_STEPS, num_draft_tokens=NUM_STEPS + 1)
        num_rows, per_row = capacity.max_bs + 1, capacity.max_pages
        self.geometry = CacheGeometry(1 + capacity.max_bs * per_row, case.page_size)
        order = 1 + torch.randperm(self.geometry.num_pages - 1, generator=self.rng, device=DEVICE)
        self.pages = torch.cat((torch.zeros(per_row, dtype=torch.int64, device=DEVICE), order)).view(-1, per_row)
        offsets = torch.arange(case.page_size, device=DEVICE)
        self.table = (self.pages.unsqueeze(2) * case.page_size + offsets).flatten(1).int()
        kind = type("SparseDSV4Backend", (DSV4Backend,), {"window": case.window})
        self.backend: DSV4Backend = kind(
            capacity,
            self.geometry,
            DEVICE,
            kernel=dict.fromkeys(flashmla_sparse.KERNEL.capabilities, case.kernel),
        )
        self.layer = self.make_layer()
        self.cache = self.backend.allocate_cache(self.layer, torch.float8_e4m3fn)
        self.num_tokens = self.table.shape[1]
        self.num_entries = self.num_tokens // case.ratio if case.ratio else 0
        stored = self.randn(num_rows, self.num_tokens + self.num_entries, fp8_pages.ROW_DIM)
        self.keys = fp8_pages.dequantise(fp8_pages.quantise(stored))
        self.ranks = torch.stack(
            [torch.randperm(max(self.num_entries, 1), generator=self.rng, device=DEVICE) + 1 for _ in range(num_rows)]
        )

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng, device=DEVICE)

    def make_layer(self) -> CompressedLayer:
        """The case's layer; what its compressors are does not matter here, for nothing is stored through it."""
        case, found = self.case, {c.ratio: c for c in self.backend.compressions}.get(self.case.ratio)
        sinks = self.randn(case.num_heads) if case.sinks else None

        def compressor(compression: Compression, dim: int) -> Compressor:
            channels = dim * (2 if compression.overlap else 1)
            zeros = torch.zeros(compression.ratio, channels, device=DEVICE)
            return Compressor(zeros, torch.ones(dim, device=DEVICE), 1e-6, torch.zeros(4, device=DEVICE))

        return CompressedLayer(
            id=0,
            num_heads=case.num_heads,
            num_kv_heads=1,
            head_dim=fp8_pages.ROW_DIM,
            v_head_dim=fp8_pages.ROW_DIM,
            scale=fp8_pages.ROW_DIM**-0.5,
            window=case.window,
            sinks=sinks,
            compression=found,
            compressor=None if found is None else compressor(found, fp8_pages.ROW_DIM),
            indexer=compressor(found, INDEX_DIM) if found is not None and found.indexed else None,
            index_topk=case.index_topk if found is not None and found.indexed else 0,
        )

    def index_query(self, num_tokens: int) -> IndexQuery | None:
        """What scores an entry by its rank."""
        if self.layer.indexer is None:
            return None
        q = torch.zeros(num_tokens, 1, INDEX_DIM, dtype=torch.bfloat16, device=DEVICE)
        q[:, 0, 0], q[:, 0, 1] = RANKS, 1
        return IndexQuery(q, torch.ones(num_tokens, 1, device=DEVICE))

    def seen(self, row: int, end: int) -> list[int]:
        """Places in `keys[row]` that the token before `end` sees, itself included."""
        tokens = list(range(max(0, end - self.case.window), end))
        visible = range(end // self.case.ratio) if self.case.ratio else range(0)
        if self.layer.indexer is not None:
            ranks = self.ranks[row].tolist()
            visible = sorted(visible, key=lambda entry: -ranks[entry])[: self.case.index_topk]
        return tokens + [self.num_tokens + entry for entry in visible]

    def write(self, rows: Sequence[int], ends: Sequence[Sequence[int]], poison: int) -> None:
        """Put what these requests' rows see into the pools, poison everywhere else but in the reserved page."""
        pools = [self.cache.rows]
        if self.cache.compressor is not None:
            pools.append(self.cache.compressor.entries)
        for pool in pools:
            pool.data[1:] = poison
        if self.cache.indexer is not None:
            self.cache.indexer.entries.data[1:] = math.nan
        for row, of_request in zip(rows, ends, strict=True):
            first = max(0, min(of_request) - self.case.window)
            tokens = torch.arange(first, max(of_request), device=DEVICE)
            self.cache.rows.write(self.table[row, tokens], self.keys[row, tokens], 0)
            if self.case.ratio:
                entries = torch.arange(max(of_request) // self.case.ratio, device=DEVICE)
                slots = self.table[row, entries * self.case.ratio] // self.case.ratio
                pools[1].write(slots, self.keys[row, self.num_tokens + entries], 0)
                self.write_ranks(row, entries, slots)

    def write_ranks(self, row: int, entries: Tensor, slots: Tensor) -> None:
        if self.cache.indexer is not None:
            ranks = self.ranks[row, entries]
            keys = torch.zeros(len(entries), INDEX_DIM, device=DEVICE)
            keys[:, 0], keys[:, 1] = ranks // RANKS, ranks % RANKS
            self.cache.indexer.entries.write(slots, keys, 0)

    def paging(self, rows: Sequence[int]) -> RequestTable:
        return RequestTable(self.table, torch.tensor(rows, device=DEVICE), self.geometry)


def attention(scene: Scene, q: Tensor, rows: Tensor, seen: Tensor, weights: torch.dtype) -> AttentionOutput:
    """Attention of q [n, heads, 512] over `keys[rows]` at `seen` [n, most], filled up with -1.

    weights: float64 for the oracle; else the low-precision reference, which works in float32 and rounds the softmax
    weights to this type, before it sums them, and the output; the log-sum-exp is that of the weights before.
    """
    dtype = torch.float64 if weights is torch.float64 else torch.float32
    keys = scene.keys[rows.unsqueeze(1), seen.clamp_min(0)].to(dtype)
    scores = torch.einsum("thd,tkd->thk", q.to(dtype), keys) * scene.layer.scale
    scores = scores.masked_fill((seen < 0).unsqueeze(1), -math.inf)
    peak = scores.amax(-1, keepdim=True)
    unnormalised = (scores - peak).exp()
    lse = (peak + unnormalised.sum(-1, keepdim=True).log()).squeeze(-1)
    rounded = unnormalised.to(weights).to(dtype)
    out = torch.einsum("thk,tkd->thd", rounded, keys) / rounded.sum(-1, keepdim=True)
    if scene.layer.sinks is not None:
        out = out * torch.sigmoid(lse - scene.layer.sinks.to(dtype)).unsqueeze(-1)
    return AttentionOutput(out.to(weights), lse)
