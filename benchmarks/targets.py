"""What kernels, metadata and cycles are meant to reach, and whether measured rows do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.ceilings import Ceilings
from benchmarks.memory import ALL, MAX_BS, MAX_CONTEXT, TOTAL
from benchmarks.speculation import CYCLE, PHASES

OURS = "triton"
Measured = Mapping[str, Any]  # a row as written: any of `rows`


@dataclass(frozen=True, slots=True)
class Reached:
    """A target on one row. value: what was measured. met: None where nothing was promised."""

    target: str
    backend: str
    kernel: str
    case: str
    value: float
    met: bool | None

    @property
    def verdict(self) -> str:
        """ "met", "missed" or "no target"."""
        return {True: "met", False: "missed", None: "no target"}[self.met]


class Beside(NamedTuple):
    """What a row is compared with: all rows of the run, and the device's ceilings if they were measured."""

    rows: Sequence[Measured]
    ceilings: Ceilings | None

    def like(self, row: Measured, **other: Any) -> Measured | None:
        """The row that differs from one in these fields alone, as far as fields that are not measured go."""
        wanted = {**{name: row[name] for name in _SAME if name in row}, **other}
        return next((each for each in self.rows if all(each.get(name) == x for name, x in wanted.items())), None)


_SAME = ("bench", "backend", "kernel", "phase", "mode", "batch_size", "context", "page_size", "topk")


class Target(NamedTuple):
    """What a row must be to count (bench, and other fields), the value of it, and its bounds."""

    name: str
    bench: str
    fields: Mapping[str, tuple[Any, ...]]
    value: Callable[[Measured, Beside], float | None]
    least: float = -math.inf
    most: float = math.inf

    def counts(self, row: Measured) -> bool:
        """Whether a row is one that the target speaks of."""
        return row["bench"] == self.bench and all(row[name] in allowed for name, allowed in self.fields.items())


def of_the_copy(row: Measured, beside: Beside) -> float | None:
    """Share of the bandwidth of a copy."""
    return None if beside.ceilings is None else row["tb_per_s"] / beside.ceilings.copy_tb_per_s


def of_the_vendor(row: Measured, beside: Beside) -> float | None:
    """Speed as a share of the vendor's kernel; None where none ran."""
    return None if row["peer"] == "copy" else row["peer_us"] / row["us"]


def of_the_chain(row: Measured, beside: Beside) -> float:
    """Time of the tree by that of the chain."""
    return row["us"] / row["peer_us"]


def field(name: str) -> Callable[[Measured, Beside], float]:
    """A field as it is."""
    return lambda row, beside: row[name]


def launches_and_copies(row: Measured, beside: Beside) -> float:
    """All that is started on the device."""
    return row["launches"] + row["copies"]


def megabytes(row: Measured, beside: Beside) -> float:
    """10^6 bytes."""
    return row["bytes"] / 1e6


def growth(**smaller: Any) -> Callable[[Measured, Beside], float | None]:
    """Host time by that of the smaller size."""

    def value(row: Measured, beside: Beside) -> float | None:
        base = beside.like(row, **smaller)
        return None if base is None else row["host_us"] / base["host_us"]

    return value


def of_the_vendors_kernel(row: Measured, beside: Beside) -> float | None:
    """Device time beyond that of our kernel, whose metadata is all of our making: the vendor's scheduler and copies."""
    own = None if row["kernel"] == OURS else beside.like(row, kernel=OURS)
    return None if own is None else row["gpu_us"] - own["gpu_us"]


def of_sglangs_host(row: Measured, beside: Beside) -> float | None:
    """Host time as a share of SGLang's beside it; None where SGLang is not installed."""
    peer = beside.like(row, mode="sglang", kernel="")
    return None if peer is None else row["host_us"] / peer["host_us"]


def phases(row: Measured, beside: Beside) -> float:
    """Phases of the cycle that were captured, and so have a row."""
    return sum(beside.like(row, phase=phase) is not None for phase in PHASES)


_DECODE = {"kernel": (OURS,), "width": (1,)}
_CYCLE = {"phase": (CYCLE,), "mode": ("in_graph",), "topk": (1,)}
_IN_GRAPH = {**_CYCLE, "backend": ("trtllm_mla", "fa3", "dsv4")}
_OURS = {**_IN_GRAPH, "kernel": (OURS,)}
_PAGES = {"page_size": (64, 256)}
# The aim of a cycle whose kernel plans on the host: FlashInfer's did, and does where its version is unknown to us.
_FLASHINFER = {**_CYCLE, "backend": ("flashinfer_mla",), "kernel": ("flashinfer_fa2", "flashinfer_fa3")}
_STATIC = {"phase": (ALL,), "buffer": (TOTAL,), "batch_size": (MAX_BS,), "context": (MAX_CONTEXT,)}
_WORDS = {
    "model": "{}",
    "mode": "{}",
    "batch_size": "batch {}",
    "context": "context {}",
    "heads": "{} heads",
    "width": "width {}",
    "page_size": "page size {}",
    "topk": "topk {}",
    "paging": "{}",
}  # of a case


def _at(batch_size: int, context: int = 4096) -> dict[str, tuple[int, ...]]:
    return {"batch_size": (batch_size,), "context": (context,)}


_LATENTS = {"kernel": (OURS, "gluon"), "width": (1,), "backend": ("flashinfer_mla", "trtllm_mla", "fa3")}
TARGETS = (
    Target(
        "MLA of 16 heads, of a copy's bandwidth",
        "kernels",
        {**_LATENTS, "heads": (16,), "batch_size": (128,), "context": (4096,)},
        of_the_copy,
        least=0.75,
    ),
    Target(
        "32 heads over 8, of FlashAttention-3's speed",
        "kernels",
        {**_DECODE, "heads": (32,), "batch_size": (64,), "context": (8192,)},
        of_the_vendor,
        least=0.75,
    ),
    Target(
        "128 rows over 128 keys and 512 selected entries, of FlashMLA's speed",
        "kernels",
        {**_DECODE, "backend": ("dsv4",), "batch_size": (128,)},
        of_the_vendor,
        least=0.6,
    ),
    Target(
        "a tree's verify, times the chain's",
        "trees",
        {"batch_size": (32, 128), "context": (4096,)},
        of_the_chain,
        most=1.25,
    ),
    Target(
        "MLA of 128 heads, of the vendor's speed",
        "kernels",
        {**_LATENTS, "heads": (128,), "batch_size": (128,), "context": (4096,)},
        of_the_vendor,
    ),
    Target("launches and copies of a cycle, at most 6", "metadata", _OURS, launches_and_copies, most=6),
    Target("synchronisations of a cycle", "metadata", _OURS, field("syncs"), most=0),
    Target("copies to the host in a cycle", "metadata", _OURS, field("to_host"), most=0),
    Target("host time of a cycle, us, at most 25", "metadata", _IN_GRAPH, field("host_us"), most=25),
    Target(
        "device time of a cycle of 32 requests, us, at most 15",
        "metadata",
        {**_OURS, **_PAGES, **_at(32)},
        field("gpu_us"),
        most=15,
    ),
    Target(
        "device time of a cycle of 128 requests, us, at most 25",
        "metadata",
        {**_OURS, **_PAGES, **_at(128)},
        field("gpu_us"),
        most=25,
    ),
    Target(
        "device time of 128 requests at page size 1, us, at most 60",
        "metadata",
        {**_OURS, "backend": ("fa3",), "page_size": (1,), **_at(128)},
        field("gpu_us"),
        most=60,
    ),
    Target("device time that the vendor's kernel adds, us", "metadata", {**_CYCLE, **_at(32)}, of_the_vendors_kernel),
    Target("device time that the vendor's kernel adds, us", "metadata", {**_CYCLE, **_at(128)}, of_the_vendors_kernel),
    Target("host time, of SGLang's, at most a third", "metadata", _FLASHINFER, of_sglangs_host, most=1 / 3),
    Target("phases that are captured", "metadata", _FLASHINFER, phases, least=3),
    Target(
        "host time at context 131072, times that at 4096, at most 1.1",
        "metadata",
        {**_IN_GRAPH, **_at(32, 131072)},
        growth(context=4096),
        most=1.1,
    ),
    Target(
        "host time of 512 requests, times that of one, at most 1.2",
        "metadata",
        {**_IN_GRAPH, "batch_size": (512,)},
        growth(batch_size=1),
        most=1.2,
    ),
    Target(
        "static buffers, MB, at most 4",
        "memory",
        {**_STATIC, "backend": ("trtllm_mla", "fa3"), "page_size": (64,)},
        megabytes,
        most=4,
    ),
    Target(
        "static buffers, MB, at most 140",
        "memory",
        {**_STATIC, "backend": ("flashinfer_mla", "fa3"), "page_size": (1,)},
        megabytes,
        most=140,
    ),
    Target(
        "a cycle, times one without planning, at most 1.05",
        "cycle",
        {"backend": ("trtllm_mla", "fa3"), "mode": ("graph_before", "graph", "loop"), "context": (4096,)},
        field("ratio"),
        most=1.05,
    ),
)  # on an H200; those without a bound promise nothing


def check_targets(rows: Iterable[Measured], ceilings: Ceilings | None = None) -> Iterator[Reached]:
    """Each target on each row that it speaks of."""
    rows = list(rows)
    beside = Beside(rows, ceilings)
    for target in TARGETS:
        promised = not (math.isinf(target.least) and math.isinf(target.most))
        for row in filter(target.counts, rows):
            value = target.value(row, beside)
            if value is not None:
                met = target.least <= value <= target.most if promised else None
                yield Reached(target.name, row["backend"], row.get("kernel", ""), _case(row), round(value, 3), met)


def _case(row: Measured) -> str:
    """The sizes of a row in words."""
    said = {name: words.format(row[name]) for name, words in _WORDS.items() if row.get(name) is not None}
    return ", ".join(said.values())


def by_target(reached: Iterable[Reached]) -> Iterator[tuple[Reached, int, int]]:
    """For each target, backend and kernel: the case furthest from what was promised, how many met it, of how many."""
    groups: dict[tuple[str, str, str], list[Reached]] = {}
    for each in reached:
        groups.setdefault((each.target, each.backend, each.kernel), []).append(each)
    least = {target.name for target in TARGETS if not math.isinf(target.least)}
    for (target, *_), own in groups.items():
        find = min if target in least else max
        candidates = [each for each in own if each.met is False] or own
        yield find(candidates, key=lambda each: each.value), sum(each.met is True for each in own), len(own)
