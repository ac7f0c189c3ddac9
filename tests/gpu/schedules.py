"""FlashMLA on schedules that we plan beside FlashMLA's own: what planning takes, and what attention takes on each.

A row is one problem: dense MLA decode of some requests, in CUDA graphs that take turns. Both schedules are looked at:
every block of keys belongs to one part (`tests/share_outs.py`). It fails if a schedule is no partition, outputs
differ by more than rounding, or equal schedules give other bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from attn_backends.cache import PagedLatent
from attn_backends.contract.kernel import LayerShape, Scheduled
from attn_backends.graphs import CudaGraph
from attn_backends.layer import AttentionLayer
from attn_backends.vendors import flashmla
from benchmarks.timing import CudaClock, take_turns
from spec_metadata.plans.block_table import BlockTablePlan
from tests.share_outs import shared_out

DEVICE = torch.device("cuda")
HEADS, WIDTHS, BATCH_SIZES = (16, 128), (1, 4, 8), (1, 32, 128)
CONTEXT, LONG, SHORT = 4096, 131072, 1024
PAGE, REPEATS, ROUNDS = 64, 10, 7
TOLERANCE = 2e-2  # of bfloat16 outputs of unit scale


def problems() -> list[tuple[str, list[int]]]:
    """Lengths, by name: even ones, and one long request among short ones."""
    even = [(f"{n} x {CONTEXT}", [CONTEXT] * n) for n in BATCH_SIZES]
    return [*even, ("1 x 131072, 127 x 1024", [LONG] + [SHORT] * 127), ("32 random", _random_lens(32))]


def _random_lens(n: int) -> list[int]:
    rng = torch.Generator().manual_seed(0)
    return torch.randint(1, 2 * CONTEXT, (n,), generator=rng).tolist()


def repeated(work: Callable[[], object]) -> Callable[[], None]:
    """The replay of a graph of `REPEATS` times some work."""
    graph = CudaGraph()
    graph.capture(lambda: [work() for _ in range(REPEATS)])
    return graph.replay


def measured(name: str, lens: list[int], num_heads: int, width: int) -> dict[str, Any]:
    """One problem's row. Lengths are of what the last row of a request sees."""
    bs, ints = len(lens), {"dtype": torch.int32, "device": DEVICE}
    kv_lens = torch.tensor([length + width for length in lens], **ints)
    pages = [-(-(length + width) // PAGE) for length in lens]
    table = torch.zeros(bs, max(pages), **ints)
    ids = torch.randperm(sum(pages), device=DEVICE, dtype=torch.int32) + 1
    for request, (first, count) in enumerate(zip([sum(pages[:i]) for i in range(bs)], pages, strict=True)):
        table[request, :count] = ids[first : first + count]
    cache = PagedLatent(torch.randn(sum(pages) + 1, PAGE, 576, device=DEVICE, dtype=torch.bfloat16), rank=512)
    q = torch.randn(bs * width, num_heads, 576, device=DEVICE, dtype=torch.bfloat16)
    layer = AttentionLayer(0, num_heads, 1, 576, 512, 576**-0.5)
    shape = LayerShape.of(layer, torch.bfloat16, torch.bfloat16)
    plan = BlockTablePlan(table, kv_lens, PAGE, width, causal=True, max_kv_len=max(pages) * PAGE)
    made: dict[str, flashmla.PartSchedule] = {}
    for way, schedule in (("ours", flashmla.PartSchedule), ("vendor", flashmla.VendorPartSchedule)):
        buffers: dict[str, Tensor] = {
            "tile_scheduler_metadata": torch.zeros(144, 8, **ints),
            "num_splits": torch.zeros(bs + 1, **ints),
            "marks": torch.zeros(bs, 2, **ints),
            "fence": torch.zeros(1, **ints),
        }
        made[way] = schedule(plan, shape, buffers)
        made[way].refresh()

    def launch(way: str) -> Callable[[], Tensor]:
        return lambda: flashmla.KERNEL.launch(q, cache, Scheduled(plan, made[way]), layer).out

    outputs = {way: launch(way)().clone() for way in made}
    equal = torch.equal(made["ours"].parts[:, :7], made["vendor"].parts[:, :7])
    error = float((outputs["ours"].float() - outputs["vendor"].float()).abs().max())
    scale = float(outputs["vendor"].float().abs().max())
    blocks = [-(-int(length) // PAGE) for length in kv_lens.tolist()]
    is_partition = all(
        [total if end < 0 else end for end, total in zip(shared_out(*found), blocks, strict=True)] == blocks
        for found in ((schedule.parts.cpu(), schedule.splits.cpu()) for schedule in made.values())
    )
    turns = {way: repeated(launch(way)) for way in made} | {f"plan {way}": repeated(made[way].refresh) for way in made}
    times = take_turns(list(turns.values()), ROUNDS, CudaClock())
    us = {way: time / REPEATS for way, time in zip(turns, times, strict=True)}
    same_bits = not equal or torch.equal(outputs["ours"], outputs["vendor"])
    return {
        "problem": name,
        "heads": num_heads,
        "width": width,
        "attention_us": round(us["ours"], 1),
        "attention_on_vendors_us": round(us["vendor"], 1),
        "speed": round(us["vendor"] / us["ours"], 3),
        "plan_us": round(us["plan ours"], 2),
        "vendors_plan_us": round(us["plan vendor"], 2),
        "splits": int(made["ours"].splits[-1]),
        "vendors_splits": int(made["vendor"].splits[-1]),
        "is_partition": is_partition,
        "max_err": error,
        "status": "pass" if is_partition and error <= TOLERANCE * scale and same_bits else "fail",
    }


def rows(_device: str = "cuda") -> Iterator[dict[str, Any]]:
    """Every problem."""
    for num_heads, width, (name, lens) in product(HEADS, WIDTHS, problems()):
        yield measured(name, lens, num_heads, width)
