"""FlashMLA's sparse decode, and Triton's, under the backend of compressed layers, on a GPU, against float64.

    python -m tests.gpu.sparse --json docs/results/h200/sparse.json

Needs a Hopper GPU and FlashMLA (`flash_mla`). Every case runs a kind of step eagerly, in a CUDA graph captured on
another batch and planned again before it runs, and in one that holds its own planning; graphs run on two batches. The
oracle reads nothing of a plan: it knows by position which tokens and entries a row sees, and rounds both as a page
rounds them. All bytes that no request owns are 0xff or 0x7f, which are NaN as elements. The budget is twice the error
of a reference that rounds its softmax weights, plus one rounding step. With a schedule kept from the captured batch a
case must fail.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from attn_backends import results
from attn_backends.contract.kernel import LayerShape, Scheduled
from attn_backends.graphs import CudaGraph
from attn_backends.kernels import fp8_pages
from attn_backends.layer import AttentionOutput
from attn_backends.selection import providers
from attn_backends.vendors import flashmla_sparse
from attn_backends.vendors.flashmla_sparse import RowSchedule, VendorRowSchedule
from benchmarks.timing import CudaClock, take_turns
from spec_metadata import PackedQuery, Step, UniformQuery
from tests.gpu.sparse_scene import DEVICE, MAX_CONTEXT, NUM_STEPS, Case, Scene, attention

FIRST = ([4, 1, 2], [900, 16, 333])  # rows of the table and committed tokens; captured, and then replayed:
SHORT = ([4, 1, 2], [1, 2, 1])  # captured for a schedule that is kept, which must not have more keys than there are
LATER = (([3, 1, 2, 4], [2, 126, 2200, 255]), ([1, 2, 3], [1, 383, 1000]))
PREFILLED = [70, 1, 5, 133]  # rows of a prefill
SCHED_META = "flash_mla.flash_mla_interface:FlashMLASchedMeta"
GRAPHS = {"graph": CudaGraph, "graph that plans": CudaGraph}


def step_of(kind: str, scene: Scene, rows: list[int], lens: list[int]) -> tuple[Step, int, list[list[int]]]:
    """A step, the forward to run, and for each request the positions after its rows'."""
    paging, seq_lens = scene.paging(rows), torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    match kind:
        case "prefill":
            widths, lens = PREFILLED[: len(rows)], [n if n > 2 else 0 for n in lens]
            seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
            step, index = Step.prefill(PackedQuery.of(widths, DEVICE), seq_lens, paging), 0
        case "decode":
            widths, step, index = [1] * len(rows), Step.decode(seq_lens, paging), 0
        case "draft":
            widths, step, index = [1] * len(rows), Step.draft_decode(1, NUM_STEPS, seq_lens, paging), 2
        case "verify":
            width = scene.backend.capacity.num_draft_tokens
            widths, step, index = [width] * len(rows), Step.target_verify(width, seq_lens, paging), 0
        case "packed extend":
            widths = [2, 5, 1, 3][: len(rows)]
            step, index = Step.draft_extend(PackedQuery.of(widths, DEVICE), seq_lens, paging), 0
        case _:
            widths, index = [NUM_STEPS + 1] * len(rows), 0
            step = Step.draft_extend(UniformQuery(NUM_STEPS + 1), seq_lens, paging)
    ends = [[n + index + j + 1 for j in range(width)] for n, width in zip(lens, widths, strict=True)]
    return step, index, ends


def compare(scene: Scene, q: Tensor, out: AttentionOutput, rows: list[int], ends: list[list[int]]) -> list[float]:
    """Largest errors of output and log-sum-exp over the real rows, and their budgets; NaN counts as infinite."""
    seen = [scene.seen(row, end) for row, of_request in zip(rows, ends, strict=True) for end in of_request]
    most, owner = max(map(len, seen)), [row for row, of_request in zip(rows, ends, strict=True) for _ in of_request]
    places = torch.tensor([each + [-1] * (most - len(each)) for each in seen], device=DEVICE)
    q, given = q[: len(seen)], (scene, q[: len(seen)], torch.tensor(owner, device=DEVICE), places)
    exact, low = attention(*given, torch.float64), attention(*given, q.dtype)
    kernel = AttentionOutput(out.out[: len(seen)], out.lse[: len(seen)])
    errors = [
        [float((x.double() - y).abs().max().nan_to_num(math.inf)) for x, y in zip(z, exact, strict=True)]
        for z in (kernel, low)
    ]
    steps = [float(x.abs().max()) * eps for x, eps in zip(exact, (torch.finfo(q.dtype).eps, 2**-20), strict=True)]
    return errors[0] + [2 * error + step for error, step in zip(errors[1], steps, strict=True)]


@contextmanager
def schedule_kept() -> Iterator[None]:
    """Inside, a schedule is made once and never again."""
    refresh, planned = RowSchedule.refresh, set[RowSchedule]()

    def once(self: RowSchedule) -> None:
        if self not in planned:
            planned.add(self)
            refresh(self)

    with patch.object(RowSchedule, "refresh", once):
        yield


@contextmanager
def planned_in_the_launch() -> Iterator[list[Any]]:
    """Inside, each launch plans for itself, as it does when it is given nothing. Yields what they planned."""
    load, made = providers.load, []

    def empty(**_: Tensor) -> Any:
        made.append(load(SCHED_META)())
        return made[-1]

    with patch.object(providers, "load", lambda path: empty if path == SCHED_META else load(path)):
        yield made


def run(case: Case, kind: str, path: str) -> dict:
    """Run the later batches eagerly, or in a graph captured on the first; compare the worst."""
    scene = Scene(case, seed=7)
    backend, worst = scene.backend, [0.0, 0.0, 0.0, 0.0]

    def forward(meta: Any, q: Tensor, index: int) -> AttentionOutput:
        return backend.forward(q, scene.cache, meta.at(index), scene.layer, scene.index_query(len(q)))

    def judge(out: AttentionOutput, q: Tensor, rows: list[int], ends: list[list[int]]) -> None:
        found = compare(scene, q, out, rows, ends)
        if found[0] / found[2] + found[1] / found[3] > (worst[0] / worst[2] + worst[1] / worst[3] if worst[2] else -1):
            worst[:] = found

    if path == "eager":
        for poison, (rows, lens) in zip((0xFF, 0x7F), LATER, strict=True):
            step, index, ends = step_of(kind, scene, rows, lens)
            scene.write(rows, ends, poison)
            q = scene.randn(step.num_tokens, case.num_heads, fp8_pages.ROW_DIM).bfloat16()
            judge(forward(backend.init_forward_metadata(step), q, index), q, rows, ends)
    else:
        with schedule_kept() if case.kept else nullcontext():
            in_a_graph(scene, kind, path, forward, judge)
    passed = worst[0] <= worst[2] and worst[1] <= worst[3]
    names = ("max_err_out", "max_err_lse", "budget_out", "budget_lse")
    numbers = {
        name: float(f"{x:.3g}") if math.isfinite(x) else "not finite" for name, x in zip(names, worst, strict=True)
    }
    return {"case": str(case), "step": kind, "path": path, **numbers, "status": "pass" if passed else "fail"}


def in_a_graph(scene: Scene, kind: str, path: str, forward: Callable, judge: Callable) -> None:
    """Capture on the first batch, run and judge the later ones."""
    backend, plans_itself = scene.backend, path == "graph that plans"
    captured, later = (SHORT, LATER[1:]) if scene.case.kept else (FIRST, LATER)
    first, index, ends = step_of(kind, scene, *captured)
    scene.write(captured[0], ends, 0xFF)
    meta = backend.capture(first.bucket(backend.capacity.max_bs), first.paging)
    backend.replay(meta, first)
    q = scene.randn(meta.step.num_tokens, scene.case.num_heads, fp8_pages.ROW_DIM).bfloat16()

    def region() -> AttentionOutput:
        if plans_itself:
            backend.refresh(meta)
        return forward(meta, q, index)

    region()
    graph = GRAPHS[path]()
    out = graph.capture(region)
    for poison, (rows, lens) in zip((0x7F, 0xFF), later, strict=False):
        step, _, ends = step_of(kind, scene, rows, lens)
        scene.write(rows, ends, poison)
        q.copy_(scene.randn(*q.shape))
        (backend.copy_inputs if plans_itself else backend.replay)(meta, step)
        graph.replay()
        judge(out, q, rows, ends)


def cases() -> list[tuple[Case, list[str], list[str]]]:
    """Cases with the kinds of steps and the paths of each."""
    uniform, ways = ["decode", "draft", "verify", "extend"], ["eager", *GRAPHS]
    found = []
    kernels = (flashmla_sparse.NAME, "triton")
    for case in [Case(r, h, kernel=k) for k in kernels for r in (0, 4, 128) for h in (4, 16, 64, 80, 128)]:
        found.append((case, uniform, ways))
        found.append((case, ["prefill", "packed extend"], ["eager"]))
    for odd in (
        Case(4, 16, index_topk=100),
        Case(4, 16, window=100),
        Case(128, 64, sinks=False),
        Case(4, 8, page_size=512),
        Case(4, 16, index_topk=100, kernel="triton"),
        Case(128, 200, sinks=False, page_size=512, kernel="triton"),
    ):
        found.append((odd, ["verify", "decode"], ["eager", "graph"]))
    return found


def planted() -> list[tuple[Case, list[str], list[str]]]:
    """Cases that must fail."""
    return [(Case(ratio, 16, kept=True), ["verify"], ["graph", "graph that plans"]) for ratio in (0, 4, 128)]


def timings() -> Iterator[dict]:
    """Device time of a launch, of planning for it, of a launch that plans for itself, and of FlashMLA's bfloat16
    prefill kernel over as many keys that were gathered before.
    """
    for num_tokens, num_heads, ratio in [(t, h, r) for t in (8, 64, 4096) for h in (64, 128) for r in (0, 4, 128)]:
        launch, schedule = launch_of(num_tokens, num_heads, ratio)
        runs = {"us": many(launch), "us_planning": many(schedule.refresh)}
        with planned_in_the_launch():
            runs["us_with_planning_of_its_own"] = many(launch)
        if num_tokens == 4096 and ratio == 4:
            prefill = prefill_of(num_tokens, num_heads)  # named: a graph does not keep what it reads
            runs["us_bfloat16_prefill_kernel_alone"] = many(prefill)
        times = take_turns(list(runs.values()), 10 if num_tokens < 4096 else 4, CudaClock())
        shape = {"query_rows": num_tokens, "heads": num_heads, "ratio": ratio}
        yield shape | {name: round(time / REPEATS, 1) for name, time in zip(runs, times, strict=True)}


REPEATS = 4


def many(launch: Callable[[], object]) -> Callable[[], None]:
    """A graph of several launches."""
    graph = CudaGraph()
    graph.capture(lambda: [launch() for _ in range(REPEATS)] and None)
    return graph.replay


def launch_of(
    num_tokens: int, num_heads: int, ratio: int, varied: bool = False, planner: type[RowSchedule] = RowSchedule
) -> tuple[Callable, RowSchedule]:
    """The kernel's launch on random slots, and its schedule. varied: rows of random lengths, not of the greatest."""
    case = Case(ratio, num_heads)
    scene, ints = Scene(case, seed=1), {"dtype": torch.int32, "device": DEVICE}

    def lens(least: int, most: int) -> Tensor:
        return torch.randint(least if varied else most, most + 1, (num_tokens,), generator=scene.rng, **ints)

    def slots(width: int, most: int) -> Tensor:
        return torch.randint(most, (num_tokens, width), generator=scene.rng, **ints)

    entries = {ratio: SimpleNamespace(num_visible=lens(0, case.index_topk))}
    plan: Any = SimpleNamespace(
        window_slots=slots(case.window, MAX_CONTEXT), window_lens=lens(1, case.window), entries=entries
    )
    layer, fp8 = scene.layer, torch.float8_e4m3fn
    variant = (layer.compression, layer.index_topk)
    extent = SimpleNamespace(num_forwards=1, num_tokens=num_tokens)
    buffers = {spec.name: torch.zeros(spec.sizes(extent)[1:], **ints) for spec in flashmla_sparse.KERNEL.workspaces}
    schedule = planner(plan, LayerShape.of(layer, torch.bfloat16, fp8)._replace(variant=variant), buffers)
    schedule.refresh()
    entry_slots = slots(case.index_topk, MAX_CONTEXT // ratio) if ratio else None
    selected: Any = SimpleNamespace(planned=Scheduled(plan, schedule), entry_slots=entry_slots)
    q = scene.randn(num_tokens, num_heads, fp8_pages.ROW_DIM).bfloat16()
    return (lambda: flashmla_sparse.KERNEL.launch(q, scene.cache, selected, layer)), schedule


def schedules() -> Iterator[dict]:
    """Whether what FlashMLA's planner gives us is what a launch plans for itself, number for number."""
    for num_tokens, num_heads, ratio in [(t, h, r) for t in (1, 7, 300) for h in (64, 128) for r in (0, 4, 128)]:
        launch, ours = launch_of(num_tokens, num_heads, ratio, varied=True, planner=VendorRowSchedule)
        with planned_in_the_launch() as made:
            launch()
        (theirs,) = made
        same = torch.equal(ours.parts[:, :7], theirs.tile_scheduler_metadata[:, :7])  # the eighth word is padding
        same = same and torch.equal(ours.splits, theirs.num_splits)
        case = f"schedule of {num_tokens} rows, heads {num_heads}, ratio {ratio}"
        yield {"case": case, "step": "", "path": "", "status": "pass" if same else "fail"}


def prefill_of(num_tokens: int, num_heads: int) -> Callable[[], object]:
    """`flash_mla_sparse_fwd` over as many keys, gathered and in bfloat16 already."""
    q = torch.randn(num_tokens, num_heads, fp8_pages.ROW_DIM, device=DEVICE).bfloat16()
    kv = torch.randn(MAX_CONTEXT * 2, 1, fp8_pages.ROW_DIM, device=DEVICE).bfloat16()
    indices = torch.randint(len(kv), (num_tokens, 1, 640), device=DEVICE).int()
    prefill = providers.load("flash_mla:flash_mla_sparse_fwd")
    return lambda: prefill(q, kv, indices, fp8_pages.ROW_DIM**-0.5, use_legacy=True)


def pages() -> dict:
    """Whether the GPU writes the bytes that a CPU does, which the tests hold to the format one by one."""
    rows = torch.randn(20000, fp8_pages.ROW_DIM) * torch.logspace(-7, 5, 20000).unsqueeze(1)
    same = torch.equal(fp8_pages.quantise(rows.to(DEVICE)).cpu(), fp8_pages.quantise(rows))
    bytes = fp8_pages.quantise(rows)
    same = same and torch.equal(fp8_pages.dequantise(bytes.to(DEVICE)).cpu(), fp8_pages.dequantise(bytes))
    return {"case": "20000 rows as bytes and back", "step": "", "path": "", "status": "pass" if same else "fail"}


def run_all(plan: list[tuple[Case, list[str], list[str]]]) -> list[dict]:
    """A row for each case, kind and path."""
    found = []
    for case, kinds, paths in plan:
        for kind, path in [(kind, path) for kind in kinds for path in paths]:
            try:
                row = run(case, kind, path)
            except Exception as error:  # a vendor's kernel may raise anything; the other cases go on
                text = results.without_folders(f"{type(error).__name__}: {error}")
                row = {"case": str(case), "step": kind, "path": path, "status": "error", "error": text[:300]}
            found.append(row)
    return found


def main() -> int:
    """Run every case and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="file to write")
    path = parser.parse_args().json
    head = results.head(["python", "-m", "tests.gpu.sparse", "--json", str(path)], "cuda")
    rows = [pages(), *schedules(), *run_all(cases())]
    results.write(path, head, rows)
    times = list(timings())
    wrong = [row for row in rows if row["status"] != "pass"]
    found = run_all(planted())  # last: what a kernel does by a schedule of another batch is undefined
    wrong += [row for row in found if row["status"] != "fail"]
    results.write(path, head, [*rows, *found], timings=times)
    print(*wrong, *times, sep="\n")
    print(f"{len(rows) + len(found)} ran, {len(wrong)} not as they must be")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
