"""Compare fused planners, copies of inputs and loads of states with their definitions on a GPU, on random batches.

Every batch must be equal in every integer that a planner must write, and hold in all others what it held. A row counts
the batches of a planner and kind of step, those that differ, and those that the driver launched too (`cuda_launch`).
It fails if one differs, or was launched by Triton alone though its launch is bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch

from attn_backends.kernels import cuda_launch
from spec_metadata import BlockTable, RequestTable
from tests.plan_batches import COMPRESSED_KINDS, KINDS, PACKED_KINDS, Case
from tests.planner_laws import BLOCKS, FORMS, RINGS, Form, check_equal, check_inputs
from tests.state_laws import check_loads

DEVICE = torch.device("cuda")
PAGE_SIZES = (1, 16, 64, 256)
TABLES = (RequestTable, BlockTable)
NOT_BOUND = {("inputs", kind) for kind in PACKED_KINDS}  # their layout is another with every step


def sizes_of(seed: int) -> dict[str, Any]:
    """Requests and context of a batch: small ones, and now and then a large one."""
    if seed % 25 == 24:
        return {"sizes": (128, 300, 512), "context": 700}
    return {"sizes": (1, 2, 3, 5, 9, 33), "context": (None, 2500)[seed % 20 == 9]}


def comparisons(seeds: range) -> Iterator[tuple[tuple[str, str], Callable[[], None]]]:
    """What is compared, by planner and kind of step."""
    for name, form in FORMS.items():
        kinds = [kind for kind in KINDS if name != "block_table" or kind not in PACKED_KINDS]
        yield from _planned(name, form, kinds, PAGE_SIZES, seeds)
    for name in ("small", "real"):
        page_size, rings = RINGS[name]
        yield from _planned(f"compressed {name}", rings.form, COMPRESSED_KINDS, (page_size,), seeds)
    for name, (page_size, rings) in BLOCKS.items():
        yield from _planned(f"blocks {name}", rings.form, ["block"], (page_size,), seeds)
    for seed in seeds:
        kind = KINDS[seed % len(KINDS)]
        pad = 0 if kind in PACKED_KINDS else seed % 3
        options = {"form": TABLES[seed // len(KINDS) % 2], "pad": pad, "device": DEVICE, **sizes_of(seed)}
        yield ("inputs", kind), lambda k=kind, s=seed, o=options: _copied(k, s, o)
        table = TABLES[seed % 2]
        yield ("loads", table.__name__), lambda t=table, s=seed: check_loads(t, s, DEVICE)


def _planned(
    name: str, form: Form, kinds: list[str], page_sizes: tuple[int, ...], seeds: range
) -> Iterator[tuple[tuple[str, str], Callable[[], None]]]:
    for seed in seeds:
        kind, page_size = kinds[seed % len(kinds)], page_sizes[seed // len(kinds) % len(page_sizes)]
        options = {"form": TABLES[seed // 2 % 2], "pad": (0, 2, 1)[seed % 3], "device": DEVICE, **sizes_of(seed)}
        yield (name, kind), lambda k=kind, p=page_size, s=seed, o=options: check_equal(form, Case(k, p, s, **o))


def _copied(kind: str, seed: int, options: dict[str, Any]) -> None:
    rng = Random(f"{kind} {seed}")
    check_inputs(Case(kind, rng.choice(PAGE_SIZES), seed, **options), rng.choice((0, 1, 3, 40)))


class CountedStart:
    """Takes the place of the driver's launch, and counts."""

    def __init__(self) -> None:
        driver = cuda_launch._driver()
        self.number, self._start = 0, driver.cuLaunchKernel
        driver.cuLaunchKernel = self

    def __call__(self, *arguments: object) -> int:
        """Launch."""
        self.number += 1
        error: int = self._start(*arguments)
        return error


def rows(_device: str = "cuda", batches: int = 500) -> Iterator[dict[str, Any]]:
    """A row of each planner and kind of step, over as many random batches of each planner, once that one is done."""
    start, in_turns = CountedStart(), list(comparisons(range(batches)))
    Random(0).shuffle(in_turns)  # small after large, as memory of many sizes is used again
    for planner in sorted({what[0] for what, _ in in_turns}):
        compared, differ, by_driver = (Counter[tuple[str, str]]() for _ in range(3))
        for what, compare in (each for each in in_turns if each[0][0] == planner):
            before = start.number
            try:
                compare()
            except Exception as error:  # the other batches are of interest all the same
                differ[what] += 1
                print(*what, type(error).__name__, str(error)[:500], flush=True)
            compared[what] += 1
            by_driver[what] += start.number > before
        for what, number in sorted(compared.items()):
            about = {"planner": planner, "kind": what[1], "batches": number, "differ": differ[what]}
            failed = differ[what] > 0 or (by_driver[what] < number and what not in NOT_BOUND)
            yield about | {"by_driver": by_driver[what], "status": "fail" if failed else "pass"}
