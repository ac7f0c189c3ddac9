"""FlashMLA on schedules that we plan beside FlashMLA's own: what planning takes, and what attention takes on each.

A row is one problem of its dense or its sparse kernel, in CUDA graphs that take turns. Both schedules are looked at:
every block of keys belongs to one part (`tests/share_outs.py`). It fails if a schedule is no partition, outputs
differ by more than rounding, or equal schedules give other bits. It is missed if attention on ours runs at less than
`LEAST_SPEED` of its speed on theirs. A sparse row of more than 2,048 tokens reads 128 of them and 512 entries, however
many more there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_backends.backends.dsv4 import DSV4Backend, Selected
from attn_backends.cache import PagedLatent
from attn_backends.contract.kernel import LayerShape, Scheduled
from attn_backends.graphs import CudaGraph
from attn_backends.layer import AttentionLayer
from attn_backends.vendors import flashmla, flashmla_sparse
from benchmarks.compressed import COMPRESSION, TOPK, compressed_problems
from benchmarks.rows import Stage
from benchmarks.timing import CudaClock, take_turns
from spec_metadata import Step
from spec_metadata.plans.block_table import BlockTablePlan
from tests.share_outs import is_whole

CONTEXT, LONG, SHORT, MANY, SOME = 4096, 131072, 1024, 128, 32
PAGE, REPEATS, ROUNDS = 64, 10, 7
TOLERANCE = 2e-2  # of bfloat16 outputs of unit scale
LEAST_SPEED = {True: 0.95, False: 0.97}  # of one request, of more


class Problem(NamedTuple):
    """plan, shape: what a schedule is made of. lens: [n] keys of each list that a request, or a row, reads. attend:
    attention on a schedule, [rows, num_heads, 512].
    """

    plan: Any
    shape: LayerShape
    lens: tuple[Tensor, ...]
    attend: Callable[[Any], Tensor]


def dense(lens: Sequence[int], num_heads: int, width: int, device: torch.device) -> Problem:
    """Latents in shuffled pages. lens: of what the last row of a request sees, less the step's rows."""
    kv_lens = torch.tensor([length + width for length in lens], dtype=torch.int32, device=device)
    pages = [-(-(length + width) // PAGE) for length in lens]
    lists = (1 + torch.randperm(sum(pages), device=device).int()).split(pages)
    table = torch.nn.utils.rnn.pad_sequence(lists, batch_first=True)
    cache = PagedLatent(torch.randn(sum(pages) + 1, PAGE, 576, device=device).bfloat16(), rank=512)
    q = torch.randn(len(lens) * width, num_heads, 576, device=device).bfloat16()
    layer = AttentionLayer(0, num_heads, 1, 576, 512, 576**-0.5)
    plan = BlockTablePlan(table, kv_lens, PAGE, width, causal=True, max_kv_len=max(pages) * PAGE)
    shape = LayerShape.of(layer, torch.bfloat16, torch.bfloat16)
    return Problem(plan, shape, (kv_lens,), lambda s: flashmla.KERNEL.launch(q, cache, Scheduled(plan, s), layer).out)


def sparse(lens: Sequence[int], num_heads: int, width: int, device: torch.device) -> Problem:
    """Windows and the entries that an indexer selects, in 8-bit pages."""
    problem = next(compressed_problems([width], len(lens), max(lens) + width, device))
    pool, (cache, *_) = problem.pool, problem.pool.caches
    layer = replace(problem.layer, num_heads=num_heads, sinks=None)
    q = torch.randn(problem.q.shape[0], num_heads, 512, device=device).bfloat16()
    step = Step.target_verify(width, torch.tensor(lens, dtype=torch.int32, device=device), pool.table)
    plan = DSV4Backend(pool.capacity, pool.geometry, device).init_forward_metadata(step).plans[0]
    shape = LayerShape.of(layer, torch.bfloat16, cache.dtype)._replace(variant=(COMPRESSION, TOPK))
    entries = plan.entries[COMPRESSION.ratio].num_visible.clamp(max=TOPK)
    selected = torch.arange(TOPK, device=device) < entries.unsqueeze(1)
    slots = torch.where(selected, problem.entry_slots.clamp_min(0), -1)
    launch = flashmla_sparse.KERNEL.launch
    attend = lambda s: launch(q, cache, Selected(Scheduled(plan, s), slots), layer).out  # noqa: E731
    return Problem(plan, shape, (plan.window_lens, entries), attend)


KERNELS: dict[str, Any] = {
    "flashmla": (dense, (flashmla.PartSchedule, flashmla.VendorPartSchedule), (16, 128), (1, 4, 8), LONG),
    "flashmla_sparse": (sparse, (flashmla_sparse.RowSchedule, flashmla_sparse.VendorRowSchedule), (64, 128), (1, 4), 0),
}  # problems, schedules of ours and the vendor's, heads, widths, and how long a long request is; 0: as others


def batches(long: int) -> dict[str, list[int]]:
    """Lengths, by name: even ones, one long request among short ones, and random ones."""
    even = {f"{n} x {CONTEXT}": [CONTEXT] * n for n in (1, SOME, MANY)}
    skewed = {f"1 x {long or CONTEXT}, {MANY - 1} x {SHORT}": [long or CONTEXT] + [SHORT] * (MANY - 1)}
    lens = torch.randint(1, 2 * CONTEXT, (SOME,), generator=torch.Generator().manual_seed(0)).tolist()
    return even | skewed | {f"{SOME} random": lens}


def repeated(work: Callable[[], object], stage: Stage) -> Callable[[], None]:
    """The replay of a graph of `REPEATS` times some work."""
    graph = stage.make_graph()
    graph.capture(lambda: [work() for _ in range(REPEATS)])
    return graph.replay


def measured(schedules: Sequence[Callable[..., Any]], problem: Problem, stage: Stage) -> dict[str, Any]:
    """What is found on one problem. schedules: ours, then the vendor's."""
    made, n = [], len(problem.lens[0])
    sizes = {"tile_scheduler_metadata": (144, 8), "num_splits": (n + 1,), "marks": (n, 2), "fence": (1,)}
    sizes["entry_lens"] = (n,)
    for make in schedules:
        buffers = {name: torch.zeros(size, device=stage.device).int() for name, size in sizes.items()}
        made.append(make(problem.plan, problem.shape, buffers))
        made[-1].refresh()
    ours, theirs = (problem.attend(each).float() for each in made)
    blocks = [sum(-(-each // 64) for each in both) for both in zip(*(x.tolist() for x in problem.lens), strict=True)]
    is_partition = all(is_whole(each.parts.cpu(), each.splits.cpu(), blocks) for each in made)
    works = [*(partial(problem.attend, each) for each in made), *(each.refresh for each in made)]
    times = take_turns([repeated(work, stage) for work in works], stage.rounds, stage.clock)
    names = ("attention_us", "attention_on_vendors_us", "plan_us", "vendors_plan_us")
    found = {name: round(time / REPEATS, 2) for name, time in zip(names, times, strict=True)}
    splits, vendors_splits = (int(each.splits[-1]) for each in made)
    error, equal = float((ours - theirs).abs().max()), torch.equal(*(each.parts[:, :7] for each in made))
    is_right = is_partition and error <= TOLERANCE * float(theirs.abs().max()) and (not equal or error == 0)
    found |= {"speed": round(times[1] / times[0], 3), "splits": splits, "vendors_splits": vendors_splits}
    return found | {"is_partition": is_partition, "max_err": error, "status": "pass" if is_right else "fail"}


def rows(device: str = "cuda", stage: Stage | None = None) -> Iterator[dict[str, Any]]:
    """Every problem of both kernels."""
    stage = stage or Stage(torch.device(device), CudaGraph, CudaClock(), ROUNDS)
    for kernel, (make, schedules, heads, widths, long) in KERNELS.items():
        for num_heads, width, (name, lens) in product(heads, widths, batches(long).items()):
            row = {"kernel": kernel, "problem": name, "heads": num_heads, "width": width}
            row |= measured(schedules, make(lens, num_heads, width, stage.device), stage)
            is_slow = row["speed"] < LEAST_SPEED[len(lens) == 1]
            yield row | ({"status": "missed"} if is_slow and row["status"] == "pass" else {})
