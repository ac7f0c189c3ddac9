"""FlashInfer's MLA kernels on a GPU: every step kind, eager and through CUDA graphs, against float64.

    python -m tests.gpu.flashinfer --json docs/results/flashinfer_h200.json

A case captures a step with one batch and replays it with another, longer, shorter and padded, on a strided cache that
holds NaN wherever no request has a token. Float64 is the torch kernel's on the same metadata. A replay must equal the
eager step on the same padded layout bit for bit, and one on the plan of the capture must be wrong. Last come times, and
how far the documented wrapper's output is from ours, which it plans on the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

import torch
from torch import Tensor

from attn_backends import results
from attn_backends.backend import AttentionBackend
from attn_backends.backends.flashinfer_mla import FlashInferMLABackend
from attn_backends.cache import PagedLatent
from attn_backends.graphs import CudaGraph
from attn_backends.layer import AttentionLayer, AttentionOutput
from attn_backends.planning.metadata import Metadata
from attn_backends.vendors.flashinfer import FP8
from spec_metadata import (
    CacheGeometry,
    Capacity,
    DraftTree,
    PackedQuery,
    RequestTable,
    Step,
    StepKind,
    UniformQuery,
    copy_step,
    pad_step,
)

DEVICE = torch.device("cuda")
PARENTS = [0, 0, 0, 1, 1, 2, 3, 5]  # a tree of 8 nodes, depth 3
NUM_STEPS, BUCKET = 4, 4
FIRST, SECOND = [900, 16, 333], [63, 2900, 129]
KINDS = [StepKind.DECODE, StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND]
PACKED = [StepKind.PREFILL, StepKind.DRAFT_EXTEND]


class Scene:
    """Requests in shuffled pages of a strided cache, NaN where no request of a batch has a token."""

    def __init__(self, page_size: int, topk: int, heads: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
        nodes = len(PARENTS) if topk > 1 else NUM_STEPS + 1
        self.capacity = Capacity(BUCKET, 3000, page_size, topk, NUM_STEPS, num_draft_tokens=nodes)
        per_row = self.capacity.max_pages
        self.geometry = CacheGeometry(1 + BUCKET * per_row, page_size)
        order = 1 + torch.randperm(BUCKET * per_row, device=DEVICE)
        pages = torch.cat((torch.zeros(per_row, dtype=torch.int64, device=DEVICE), order)).view(-1, per_row)
        self.table = (pages.unsqueeze(2) * page_size + torch.arange(page_size, device=DEVICE)).flatten(1).int()
        scale = 0.3 if cache_dtype is FP8 else 1.0
        self.layer = AttentionLayer(0, heads, 1, 576, 512, 192**-0.5, k_scale=scale, v_scale=scale)
        self.dtype, self.cache_dtype, self.topk = dtype, cache_dtype, topk
        self.memory = torch.zeros(self.geometry.num_pages, page_size, 2, 576, device=DEVICE, dtype=cache_dtype)
        self.cache = PagedLatent(self.memory[:, :, 0], 512)

    def fill(self, rows: list[int], lens: list[int], added: int) -> None:
        """Random entries of the tokens of a batch; NaN elsewhere, zeros in the reserved page."""
        size = self.geometry.page_size
        entries = torch.full((self.geometry.num_slots, 576), float("nan"), device=DEVICE)
        entries[:size] = 0
        for row, length in zip(rows, lens, strict=True):
            slots = self.table[row, : length + added].long()
            entries[slots] = torch.randn(len(slots), 576, device=DEVICE)
        self.cache.latent.copy_(entries.view(-1, size, 576).to(self.cache_dtype))
        self.memory[:, :, 1] = float("nan")

    def step(self, kind: StepKind, rows: list[int], lens: list[int], widths: list[int] | None = None) -> Step:
        seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        paging = RequestTable(self.table, torch.tensor(rows, device=DEVICE), self.geometry)
        if widths is not None:
            make = Step.prefill if kind is StepKind.PREFILL else Step.draft_extend
            return make(PackedQuery.of(widths, DEVICE), seq_lens, paging, seq_lens_cpu=lens)
        if kind is StepKind.DECODE:
            return Step.decode(seq_lens, paging, seq_lens_cpu=lens)
        if kind is StepKind.DRAFT_DECODE:
            return Step.draft_decode(self.topk, NUM_STEPS, seq_lens, paging, seq_lens_cpu=lens)
        if kind is StepKind.DRAFT_EXTEND:
            return Step.draft_extend(UniformQuery(NUM_STEPS + 1), seq_lens, paging, seq_lens_cpu=lens)
        mask = None
        if self.topk > 1:
            parents = torch.tensor([PARENTS] * len(lens), device=DEVICE)
            mask = DraftTree.from_parents(parents, parents, max_depth=3).mask
        return Step.target_verify(self.capacity.num_draft_tokens, seq_lens, paging, tree_mask=mask, seq_lens_cpu=lens)

    def queries(self, step: Step, bs: int) -> list[Tensor]:
        rows = step.num_tokens * bs // step.bs
        shape = (rows, self.layer.num_heads, 576)
        return [torch.randn(shape, device=DEVICE).to(self.dtype) for _ in range(step.num_forwards)]

    def ancestors(self, bs: int) -> list[Tensor]:
        """Of each draft forward, paths that end in their own branch."""
        paths = torch.randint(self.topk, (bs, self.topk, NUM_STEPS), device=DEVICE)
        last = torch.arange(self.topk, device=DEVICE).expand(bs, -1).unsqueeze(2)
        return [torch.cat((paths[..., :forward], last), 2) for forward in range(NUM_STEPS - 1)]


def attend(
    backend: AttentionBackend, meta: Metadata, scene: Scene, queries: list[Tensor], paths: list[Tensor]
) -> list[AttentionOutput]:
    needs_paths = scene.topk > 1 and meta.step.kind is StepKind.DRAFT_DECODE
    return [
        backend.forward(q, scene.cache, meta.at(i, paths[i] if needs_paths else None), scene.layer)
        for i, q in enumerate(queries)
    ]


def errors(scene: Scene, step: Step, queries: list[Tensor], paths: list[Tensor], found: list[AttentionOutput]) -> dict:
    """Errors from float64 over the real rows; of the torch kernel on the same tensors for comparison."""
    torch_backend = FlashInferMLABackend(scene.capacity, scene.geometry, DEVICE, kernel="torch")
    meta = torch_backend.init_forward_metadata(step)
    latent = scene.cache.latent.double() * scene.layer.k_scale
    plain = replace(scene.layer, k_scale=1.0, v_scale=1.0)
    real, real_paths = [q[: step.num_tokens] for q in queries], [p[: step.bs] for p in paths]
    exact_scene, low_scene = (_with(scene, latent.to(dtype), plain) for dtype in (torch.float64, scene.dtype))
    exact = attend(torch_backend, meta, exact_scene, [q.double() for q in real], real_paths)
    low = attend(torch_backend, meta, low_scene, real, real_paths)
    worst = {"out": 0.0, "ref_out": 0.0, "lse": 0.0, "ref_lse": 0.0, "peak": 0.0}
    for truth, kernel, reference in zip(exact, found, low, strict=True):
        for name, output in (("", kernel), ("ref_", reference)):
            for part, value, expected in zip(("out", "lse"), output, truth, strict=True):
                error = (value[: step.num_tokens].double() - expected).abs()
                worst[name + part] = max(worst[name + part], float(error.nan_to_num(float("inf")).max()))
        worst["peak"] = max(worst["peak"], float(truth.out.abs().max()))
    return worst


def _with(scene: Scene, latent: Tensor, layer: AttentionLayer) -> Scene:
    other = object.__new__(Scene)
    other.__dict__.update(scene.__dict__, cache=PagedLatent(latent, 512), layer=layer)
    return other


def verdict(scene: Scene, worst: dict) -> bool:
    """Twice the torch kernel's error and a rounding step or two; the softmax's weights are rounded in the sums too."""
    steps = 4 if scene.cache_dtype is FP8 else 2
    low = scene.dtype is torch.bfloat16
    rounding = 2**-9 if low else 2**-12
    return worst["out"] <= 2 * worst["ref_out"] + steps * rounding * worst["peak"] and worst["lse"] <= (
        2 * worst["ref_lse"] + steps * 2**-9
    )


def run_eager(name: str, scene: Scene, kind: StepKind) -> dict:
    rows, lens, widths = [2, 4, 1], [0, 700, 63] if kind is StepKind.PREFILL else [5, 700, 63], [37, 5, 130]
    backend = FlashInferMLABackend(scene.capacity, scene.geometry, DEVICE, kernel=name)
    scene.fill(rows, lens, max(widths))
    step = scene.step(kind, rows, lens, widths)
    queries = scene.queries(step, step.bs)
    found = attend(backend, backend.init_forward_metadata(step), scene, queries, [])
    worst = errors(scene, step, queries, [], found)
    return {**worst, "pass": verdict(scene, worst)}


def run_graph(name: str, scene: Scene, kind: StepKind) -> dict:
    """Capture on one batch, replay on another."""
    backend = FlashInferMLABackend(scene.capacity, scene.geometry, DEVICE, kernel=name)
    tree = scene.topk > 1 and kind is not StepKind.DECODE and kind is not StepKind.DRAFT_EXTEND
    rows, lens = [3, 1, 2], [0, *SECOND[1:]] if tree else SECOND
    first, second = scene.step(kind, [4, 1, 2], FIRST), scene.step(kind, rows, lens)
    meta = backend.capture(first.bucket(BUCKET), first.paging)
    scene.fill([4, 1, 2], FIRST, scene.capacity.draft_room)
    backend.replay(meta, first)
    queries, paths = scene.queries(first, BUCKET), scene.ancestors(BUCKET)
    graph = CudaGraph()
    outputs = graph.capture(lambda: attend(backend, meta, scene, queries, paths))
    scene.fill(rows, lens, scene.capacity.draft_room)
    for q in queries:
        q.copy_(torch.randn(q.shape, device=DEVICE))
    copy_step(meta.step, second)
    graph.replay()
    unplanned = errors(scene, second, queries, paths, outputs)
    torch.cuda.set_sync_debug_mode("error")
    backend.replay(meta, second)
    torch.cuda.set_sync_debug_mode("default")
    graph.replay()
    found = [AttentionOutput(out.clone(), lse.clone()) for out, lse in outputs]
    worst = errors(scene, second, queries, paths, found)
    padded = backend.init_forward_metadata(pad_step(second, second.bucket(BUCKET), scene.capacity))
    eager = attend(backend, padded, scene, queries, paths)
    real = second.num_tokens
    same = all(
        torch.equal(a[:real], b[:real]) for x, y in zip(found, eager, strict=True) for a, b in zip(x, y, strict=True)
    )
    passed = verdict(scene, worst) and same and not verdict(scene, unplanned)
    return {**worst, "equals_eager": same, "seen_unplanned": not verdict(scene, unplanned), "pass": passed}


def cases(quick: bool) -> Iterator[tuple[str, Scene, StepKind, Callable, dict]]:
    kernels = ("flashinfer_fa3", "flashinfer_fa2")
    types = ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, FP8), (torch.float16, torch.float16))
    pages = (16,) if quick else (1, 16, 64)
    whole = list(product(types[:2], (16, 128), pages, (1, 3)))
    few = [((torch.bfloat16, torch.bfloat16), heads, 16, 1) for heads in (1, 2, 4, 8, 32, 64)]
    for name, (dtypes, heads, page_size, topk) in product(kernels, [*whole, *few, (types[2], 16, 64, 3)]):
        scene = Scene(page_size, topk, heads, *dtypes)
        about = {
            "kernel": name,
            "cache": str(dtypes[1]).removeprefix("torch."),
            "heads": heads,
            "page": page_size,
            "topk": topk,
        }
        for kind in KINDS:
            if topk == 1 or kind in (StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY):
                yield name, scene, kind, run_graph, {**about, "kind": str(kind), "how": "graph"}
        if topk == 1:
            for kind in PACKED:
                yield name, scene, kind, run_eager, {**about, "kind": str(kind), "how": "packed"}


def microseconds(action: Callable[[], object], times: int = 20) -> float:
    """Host time of an action that only queues work, the median."""
    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        found.append((time.perf_counter() - start) * 1e6)
    return round(statistics.median(found), 1)


def wrapper_row(backend_name: str, bs: int, width: int, heads: int) -> dict:
    """The documented wrapper beside ours on one batch: its output, and host time of a plan for a graph."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

    capacity = Capacity(bs, 4096, 64, 1, NUM_STEPS, num_draft_tokens=max(width, 2))
    geometry = CacheGeometry(1 + bs * capacity.max_pages, 64)
    layer = AttentionLayer(0, heads, 1, 576, 512, 192**-0.5)
    pages = torch.arange(bs * capacity.max_pages, device=DEVICE).view(bs, -1) + 1
    table = (pages.unsqueeze(2) * 64 + torch.arange(64, device=DEVICE)).flatten(1).int()
    lens = [4096 - width - i % 512 for i in range(bs)]
    paging = RequestTable(table, torch.arange(bs, device=DEVICE), geometry)
    steps = [
        Step.target_verify(width, torch.tensor(given, device=DEVICE), paging, seq_lens_cpu=given)
        for given in (lens, [length - 1 for length in lens])
    ]
    step, in_turn = steps[0], cycle(steps)
    cache = PagedLatent(torch.randn(geometry.num_pages, 64, 576, device=DEVICE).bfloat16(), 512)
    q = torch.randn(bs * width, heads, 576, device=DEVICE).bfloat16()
    backend = FlashInferMLABackend(capacity, geometry, DEVICE, kernel=f"flashinfer_{backend_name}")
    meta = backend.capture(step.bucket(), paging)
    backend.replay(meta, step)
    ours = backend.forward(q, cache, meta.at(), layer)
    plan, (schedule,) = meta.plans[0], meta.schedules._made.values()
    num_pages = -(-plan.kv_len // 64)
    ends = torch.nn.functional.pad(num_pages, (1, 0)).cumsum(0, dtype=torch.int32)  # the wrapper wants compact lists
    compact = torch.cat([row[:n] for row, n in zip(plan.kv_indices.view(bs, -1), num_pages.tolist(), strict=True)])
    sources = [t.cpu() for t in (plan.qo_indptr, ends, plan.kv_len)]
    reserved = [t.clone() for t in (plan.qo_indptr, ends, compact, plan.kv_len)]
    wrapper = BatchMLAPagedAttentionWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE), True, *reserved, backend=backend_name
    )

    def documented() -> None:
        wrapper.plan(
            metadata=MLAPlanMetadata.csr(sources[0], sources[1], reserved[2], sources[2]),
            num_heads=heads,
            head_dim_ckv=512,
            head_dim_kpe=64,
            page_size=64,
            causal=True,
            sm_scale=layer.scale,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
            lse_mode="basee",
        )

    documented()
    theirs = wrapper.run(query=q, kv_cache=cache.latent, return_lse=True, return_lse_base_on_e=True)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(20):
        backend.forward(q, cache, meta.at(), layer)
    end.record()
    torch.cuda.synchronize()
    return {
        "kernel": f"flashinfer_{backend_name}",
        "bs": bs,
        "width": width,
        "heads": heads,
        "us_attention": round(start.elapsed_time(end) * 50, 1),
        "us_plan": microseconds(schedule.refresh),
        "us_wrapper_plan": microseconds(documented),
        "us_copy_inputs": microseconds(lambda: backend.copy_inputs(meta, next(in_turn))),
        "from_wrapper": float((ours.out.float() - theirs[0].float()).abs().amax() / theirs[0].float().abs().amax()),
    }


def main() -> int:
    """Run every case and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--quick", action="store_true", help="page size 16 only")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows, failed = [], 0
    for name, scene, kind, run, about in cases(arguments.quick):
        try:
            found = run(name, scene, kind)
        except Exception as error:  # one case that can't run must not hide the others
            found = {"pass": False, "error": f"{type(error).__name__}: {str(error)[:300]}"}
        finally:
            torch.cuda.set_sync_debug_mode("default")
        rows.append({**about, **{k: float(f"{v:.3g}") if type(v) is float else v for k, v in found.items()}})
        if not found["pass"]:
            failed += 1
            print(json.dumps(rows[-1]))
    for name in ("flashinfer_fa3", "flashinfer_fa2"):
        for cache in ("bfloat16", "float8_e4m3fn", "float16"):
            own = [r for r in rows if r["kernel"] == name and r["cache"] == cache]
            most = {k: max(r.get(k, 0.0) for r in own) for k in ("out", "ref_out", "lse", "ref_lse")}
            print(name, cache, f"{sum(r['pass'] for r in own)}/{len(own)} pass, largest errors", most)
    shapes = [(128, 1, 128), (128, 4, 128), (128, 4, 16), (8, 4, 16)]
    for name, shape in product(("fa3", "fa2"), shapes):
        rows.append(wrapper_row(name, *shape))
        failed += not rows[-1]["from_wrapper"] <= 2**-6
        print(json.dumps(rows[-1]))
    if arguments.json:
        results.write(
            arguments.json, results.head(["python", "-m", "tests.gpu.flashinfer", *sys.argv[1:]], "cuda"), rows
        )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
