"""FlashAttention-3 and FlashMLA as the backends launch them, on a GPU, against attention in float64.

    python -m tests.gpu.vendors --json docs/results/vendors_h200.json

Needs a Hopper GPU, FlashMLA (`flash_mla`) and FA3 (`vllm.vllm_flash_attn`). Every case runs a kind of step eagerly, in
a CUDA graph captured on another batch and planned again before it runs, and in one that holds its own planning. Caches
are strided views with NaN in every entry that no request owns, or large numbers if the kernel declares over-reading,
and trees have a request with nothing committed. The budget is twice the error of a reference that rounds its softmax
weights, plus one rounding step; with a planted defect a case must fail.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.backends.trtllm_mla import TrtllmMLABackend
from attn_backends.cache import PagedKV, PagedLatent
from attn_backends.graphs import CudaGraph
from attn_backends.layer import AttentionLayer, AttentionOutput
from spec_metadata import CacheGeometry, Capacity, DraftTree, PackedQuery, RequestTable, Step, UniformQuery

DEVICE = torch.device("cuda")
PARENTS = [0, 0, 0, 1, 1, 2, 3, 5]  # a tree of 8 nodes, depth 3
WIDTH, TOPK, NUM_STEPS = len(PARENTS), 3, 4
FIRST, SECOND = ([4, 1, 2], [900, 16, 333]), ([3, 1, 2], [63, 700, 129])  # rows and lengths of capture and replay
Seen = list[list[list[int]]]  # the positions that each row of each request sees


@dataclass(frozen=True)
class Case:
    """A kernel on one layer. defect: planted, "" or "one length frozen"."""

    backend: type[AttentionBackend]
    kernel: str
    layer: AttentionLayer
    page_size: int
    dtype: torch.dtype = torch.bfloat16
    defect: str = ""

    def __str__(self) -> str:
        layer, dtype = self.layer, str(self.dtype).removeprefix("torch.")
        window = "" if layer.window is None else f" window {layer.window}"
        heads = f"{layer.num_heads}/{layer.num_kv_heads} heads of {layer.head_dim}/{layer.v_head_dim}"
        return f"{self.backend.name}.{self.kernel} {heads} page {self.page_size} {dtype}{window} {self.defect}".strip()


class Scene:
    """Requests with random tokens, kept by position and written to shuffled pages by this script's own code."""

    def __init__(self, case: Case, poison: float, seed: int) -> None:
        layer, self.layer, self.poison = case.layer, case.layer, poison
        self.generator = torch.Generator(DEVICE).manual_seed(seed)
        self.capacity = Capacity(4, 1000, case.page_size, TOPK, NUM_STEPS, num_draft_tokens=WIDTH)
        per_row, rows = self.capacity.max_pages, self.capacity.max_bs + 1
        self.geometry = CacheGeometry(1 + self.capacity.max_bs * per_row, case.page_size)
        order = 1 + torch.randperm(self.geometry.num_pages - 1, generator=self.generator, device=DEVICE)
        pages = torch.cat((torch.zeros(per_row, dtype=torch.int64, device=DEVICE), order)).view(-1, per_row)
        offsets = torch.arange(case.page_size, device=DEVICE)
        self.table = (pages.unsqueeze(2) * case.page_size + offsets).flatten(1).int()
        shape = (rows, self.capacity.max_kv_len, layer.num_kv_heads)
        self.k = self.randn(*shape, layer.head_dim).to(case.dtype)
        is_latent = layer.num_kv_heads == 1
        self.v = self.k[..., : layer.v_head_dim] if is_latent else self.randn(*shape, layer.v_head_dim).to(case.dtype)
        entries = (*self.geometry_shape(), 2, layer.num_kv_heads, layer.head_dim)
        self.memory = torch.zeros(entries, dtype=case.dtype, device=DEVICE)
        k, v = self.memory[:, :, 0], self.memory[:, :, 1, :, : layer.v_head_dim]
        self.cache = PagedLatent(k.squeeze(2), layer.v_head_dim) if is_latent else PagedKV(k, v)

    def geometry_shape(self) -> tuple[int, int]:
        return self.geometry.num_pages, self.geometry.page_size

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=DEVICE)

    def write(self, rows: Sequence[int], seen: Seen) -> None:
        """Put the tokens that these rows see, and those before a window, into the cache, poison everywhere else but in
        the reserved page.
        """
        self.memory[1:] = self.poison
        flat = self.memory.flatten(0, 1)
        for row, of_request in zip(rows, seen, strict=True):
            owned = {p for visible in of_request for p in visible}
            owned |= set(range(max(owned))) if self.layer.window else set()
            positions = torch.tensor(sorted(owned), device=DEVICE)
            slots = self.table[row, positions].long()
            flat[slots, 0] = self.k[row, positions]
            flat[slots, 1, :, : self.layer.v_head_dim] = self.v[row, positions]

    def paging(self, rows: Sequence[int]) -> RequestTable:
        return RequestTable(self.table, torch.tensor(rows, device=DEVICE), self.geometry)


def attention(scene: Scene, row: int, q: Tensor, positions: list[int], weights: torch.dtype) -> AttentionOutput:
    """Attention of one query row [num_heads, head_dim] over the tokens at these positions.

    weights: float64 for the oracle; else the low-precision reference, which works in float32 and rounds the softmax
    weights to this type, before it sums them, and the output.
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


def chain(lens: Sequence[int], widths: Sequence[int], window: int | None) -> Seen:
    """Rows that see what is committed and the rows before them, as far back as a window reaches."""
    ends = [[n + j + 1 for j in range(width)] for n, width in zip(lens, widths, strict=True)]
    return [[list(range(max(0, end - window) if window else 0, end)) for end in of_request] for of_request in ends]


def step_of(kind: str, scene: Scene, rows: list[int], lens: list[int]) -> tuple[Step, int, Tensor | None, Seen]:
    """A step, the forward to run, the ancestors of a draft tree, and what each row must see."""
    bs, window = len(lens), scene.layer.window
    lens = [*lens[:-1], 0] if "tree" in kind else lens
    seq_lens, paging = torch.tensor(lens, dtype=torch.int32, device=DEVICE), scene.paging(rows)
    widths = [5, 1, 70]
    match kind:
        case "prefill":
            query = PackedQuery.of(widths, DEVICE)
            return Step.prefill(query, seq_lens, paging), 0, None, chain(lens, widths, window)
        case "decode":
            return Step.decode(seq_lens, paging), 0, None, chain(lens, [1] * bs, window)
        case "draft chain":
            step = Step.draft_decode(1, NUM_STEPS, seq_lens, paging)
            return step, 2, None, chain([n + 2 for n in lens], [1] * bs, window)
        case "draft tree":
            step = Step.draft_decode(TOPK, NUM_STEPS, seq_lens, paging)
            branches = [[1, 0], [1, 1], [0, 2]]  # of the two depths so far
            drafted = [[k * NUM_STEPS + depth for depth, k in enumerate(path)] for path in branches]
            seen = [[list(range(n)) + [n + node for node in path] for path in drafted] for n in lens]
            return step, 1, torch.tensor([branches] * bs, device=DEVICE), seen
        case "verify chain":
            return Step.target_verify(WIDTH, seq_lens, paging), 0, None, chain(lens, [WIDTH] * bs, window)
        case "verify tree":
            parents = torch.tensor([PARENTS] * bs, device=DEVICE)
            mask = DraftTree.from_parents(parents, parents, max_depth=3).mask
            step = Step.target_verify(WIDTH, seq_lens, paging, tree_mask=mask)
            return step, 0, None, [[list(range(n)) + [n + node for node in path] for path in paths()] for n in lens]
        case "packed extend":
            widths = [2, 5, 1]
            query = PackedQuery.of(widths, DEVICE)
            return Step.draft_extend(query, seq_lens, paging), 0, None, chain(lens, widths, window)
        case _:
            step = Step.draft_extend(UniformQuery(NUM_STEPS + 1), seq_lens, paging)
            return step, 0, None, chain(lens, [NUM_STEPS + 1] * bs, window)


def compare(scene: Scene, q: Tensor, out: AttentionOutput, rows: list[int], seen: Seen) -> list[float]:
    """Largest errors of output and log-sum-exp over the real rows, and their budgets; NaN counts as infinite."""
    worst = torch.zeros(2, 2, dtype=torch.float64, device=DEVICE)
    largest = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    token = 0
    for row, of_request in zip(rows, seen, strict=True):
        for positions in of_request:
            exact = attention(scene, row, q[token], positions, torch.float64)
            low = attention(scene, row, q[token], positions, q.dtype)
            kernel = AttentionOutput(out.out[token], out.lse[token])
            found = [[(x - y).abs().max().double() for x, y in zip(z, exact, strict=True)] for z in (kernel, low)]
            worst = torch.maximum(worst, torch.stack([torch.stack(both) for both in found]).nan_to_num(math.inf))
            largest = torch.maximum(largest, torch.stack([x.abs().max() for x in exact]))
            token += 1
    steps = largest * torch.tensor([torch.finfo(q.dtype).eps, 2**-20], dtype=torch.float64, device=DEVICE)
    return [*worst[0].tolist(), *(2 * worst[1] + steps).tolist()]


def run(case: Case, kind: str, path: str) -> dict:
    """Run the second batch eagerly, or in a graph captured on the first; compare."""
    declared = next(k for k in case.backend.kernels if k.name == case.kernel).capabilities
    over_reads = any(able.over_read for able in declared.values())
    scene = Scene(case, 1e3 if over_reads else math.nan, seed=7)
    kernels = dict.fromkeys(declared, case.kernel)
    backend = case.backend(scene.capacity, scene.geometry, DEVICE, kernel=kernels)
    first, forward, old_ancestors, old_seen = step_of(kind, scene, *FIRST)
    rows = SECOND[0]
    step, _, ancestors, seen = step_of(kind, scene, *SECOND)
    bs = step.bs if path == "eager" else scene.capacity.max_bs
    num_tokens = step.num_tokens if path == "eager" else bs * step.width
    q = scene.randn(num_tokens, case.layer.num_heads, case.layer.head_dim).to(case.dtype)
    if path == "eager":
        scene.write(rows, seen)
        out = backend.forward(q, scene.cache, backend.init_forward_metadata(step).at(forward, ancestors), case.layer)
    else:
        scene.write(FIRST[0], old_seen)
        bucket = first.bucket(bs)
        meta = backend.capture(bucket, first.paging)
        backend.replay(meta, first)
        static = None if old_ancestors is None else old_ancestors[:1].repeat(bs, 1, 1)

        def region() -> AttentionOutput:
            if path == "graph that plans":
                backend.refresh(meta)
            return backend.forward(q, scene.cache, meta.at(forward, static), case.layer)

        region()
        graph = CudaGraph()
        out = graph.capture(region)
        q.copy_(scene.randn(*q.shape).to(case.dtype))
        scene.write(rows, seen)
        (backend.copy_inputs if path == "graph that plans" else backend.replay)(meta, step)
        if case.defect:
            plan = meta.plans[forward]
            getattr(plan, "seqused_k" if case.backend is FA3Backend else "cache_seqlens")[1] = 900
        graph.replay()
    err, err_lse, budget, budget_lse = compare(scene, q, out, rows, seen)
    passed = err <= budget and err_lse <= budget_lse
    return {
        "case": str(case),
        "step": kind,
        "path": path,
        "max_err_out": err if math.isfinite(err) else "not finite",
        "budget_out": budget,
        "max_err_lse": err_lse if math.isfinite(err_lse) else "not finite",
        "budget_lse": budget_lse,
        "status": "pass" if passed else "fail",
    }


def kinds_of(case: Case) -> list[tuple[str, str]]:
    """Kinds of steps and paths of a case."""
    if case.backend is TrtllmMLABackend and case.kernel != "flashmla":
        return [("prefill", "eager")]
    uniform = ["decode", "draft chain", "verify chain", "extend"]
    if case.layer.window is None:
        uniform += ["draft tree", "verify tree"]
    found = [(kind, path) for kind in uniform for path in ("eager", "graph", "graph that plans")]
    if case.defect:
        return [("verify chain", "graph"), ("draft chain", "graph")]
    return found if case.kernel == "flashmla" else [*found, ("prefill", "eager"), ("packed extend", "eager")]


def cases() -> list[Case]:
    """Kernels on layers and page sizes."""
    gqa = AttentionLayer(0, 32, 8, 128, 128, 128**-0.5)
    small = replace(gqa, head_dim=64, v_head_dim=64, scale=0.125)
    wide = replace(gqa, num_heads=16, num_kv_heads=4, head_dim=256, v_head_dim=256, scale=0.0625)
    mla = AttentionLayer(0, 16, 1, 576, 512, 192**-0.5)
    fa3 = [Case(FA3Backend, "vllm_flash_attn", gqa, page_size) for page_size in (1, 4, 16, 64, 128)]
    fa3 += [Case(FA3Backend, "vllm_flash_attn", layer, 16) for layer in (small, wide, replace(gqa, num_heads=64))]
    fa3 += [Case(FA3Backend, "vllm_flash_attn", mla, page_size) for page_size in (1, 16, 64)]
    fa3 += [Case(FA3Backend, "vllm_flash_attn", replace(mla, num_heads=128), page_size) for page_size in (16, 64)]
    fa3 += [Case(FA3Backend, "vllm_flash_attn", layer, 64, torch.float16) for layer in (gqa, mla)]
    extras = [replace(layer, window=window) for layer in (gqa, small) for window in (5, 100)]
    extras += [replace(mla, window=100)]
    fa3 += [Case(FA3Backend, "vllm_flash_attn", layer, 16) for layer in extras]
    dense = [Case(TrtllmMLABackend, "flashmla", replace(mla, num_heads=heads), 64) for heads in (3, 16, 128)]
    dense += [Case(TrtllmMLABackend, "flashmla", mla, 64, torch.float16)]
    dense += [Case(TrtllmMLABackend, "vllm_flash_attn", mla, page_size) for page_size in (32, 64)]
    planted = [replace(case, defect="one length frozen") for case in (fa3[2], fa3[9], dense[1])]
    return [*fa3, *dense, *planted]


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
    found = []
    for case in cases():
        for kind, way in kinds_of(case):
            try:
                row = run(case, kind, way)
            except Exception as error:  # a vendor's kernel may raise anything; the other cases go on
                text = f"{type(error).__name__}: {error}"
                row = {"case": str(case), "step": kind, "path": way, "status": "error", "error": text[:300]}
            found.append(row)
    head = {
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
        "command": "python -m tests.gpu.vendors --json FILE",
    }
    lines = ",\n".join("  " + json.dumps(row) for row in found)
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(head)[:-1] + ', "rows": [\n' + lines + "\n]}\n")
    wrong = [row for row in found if (row["status"] == "pass") == ("frozen" in row["case"])]
    print("\n".join(json.dumps(row) for row in wrong))
    print(f"{len(found)} ran, {len(wrong)} not as they must be")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
