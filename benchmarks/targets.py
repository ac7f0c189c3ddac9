"""Targets for measured rows on an H200, and whether they reach them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks.memory import ALL, MAX_BS, MAX_CONTEXT
from benchmarks.plans import BLOCK, INSTANCES, RAGGED
from benchmarks.rows import Row
from benchmarks.speculation import CYCLE, PHASES

Value = Callable[[Row, Mapping[str, float]], float | None]  # of a row and the device's ceilings


class Reached(NamedTuple):
    """A target on one row. value: what was measured. met: None where nothing was promised."""

    target: str
    backend: str
    kernel: str
    case: str
    value: float
    met: bool | None


class Target(NamedTuple):
    """A target. fields: allowed values in the fields of a row that counts. value: its value, with bounds. of_median: of
    the rows of a kernel, that with the median value alone counts.
    """

    name: str
    fields: Mapping[str, Any]
    value: Value
    least: float = -math.inf
    most: float = math.inf
    of_median: bool = False

    def counts(self, row: Row) -> bool:
        """Whether a row is one that the target speaks of."""
        allowed = ((row.get(name), value) for name, value in self.fields.items())
        return all(found in value if isinstance(value, tuple) else found == value for found, value in allowed)


def field(name: str, unit: float = 1) -> Value:
    """A field in some unit; None where a row leaves it out."""
    return lambda row, ceilings: None if row.get(name) is None else row[name] / unit


def _of_the_copy(row: Row, ceilings: Mapping[str, float]) -> float | None:
    """Share of the bandwidth of a copy."""
    return row["tb_per_s"] / ceilings["copy_tb_per_s"] if ceilings else None


def _of_the_vendor(row: Row, ceilings: Mapping[str, float]) -> float | None:
    """Speed as a share of the vendor's kernel; None where none ran."""
    return None if row["peer"] == "copy" else row["peer_us"] / row["us"]


def _of_the_cycle(row: Row, ceilings: Mapping[str, float]) -> float | None:
    """Time of phases that are planned alone, as a multiple of that in one graph."""
    return row["us"] / row["cycle_us"] if row["cycle_us"] > 0 else None


_GLUON = ("gluon", "gluon_mla")
_LATENTS: dict[str, Any] = {"bench": "kernels", "backend": ("flashinfer_mla", "trtllm_mla", "fa3")}
_LATENTS |= {"kernel": ("triton", *_GLUON), "width": 1, "batch_size": 128, "context": 4096}
_STATIC = {"bench": "memory", "phase": ALL, "batch_size": MAX_BS, "context": MAX_CONTEXT}
_DECODE = {"bench": "kernels", "kernel": "triton", "width": 1}
_CYCLE = {"phase": (CYCLE, RAGGED[CYCLE]), "context": 4096}
_ALONE = {"bench": "plans", "phase": (*PHASES, BLOCK, *map(RAGGED.get, PHASES)), "context": 4096}
_INSTANCES = {"phase": INSTANCES, "context": 4096, "page_size": (64, 256), "batch_size": (1, 32, 128)}
_SAMPLED = {"bench": "sampling", "requests": 128}
_PLANNING = {"flashmla": (14, 20), "vllm_flash_attn": (10, 14), "flashmla_sparse": (30, 40), "flashinfer_fa3": (18, 30)}
_MIXES = ("temperature", "top_k", "top_p", "top_k, top_p", "wide top_k, top_p", "mixed")


def _planned(kernel: str, most: tuple[float, float]) -> Iterator[Target]:
    place = {**_CYCLE, "kernel": kernel, "page_size": (1,) if kernel == "flashinfer_fa3" else (64, 256)}
    for batch_size, us in zip((32, 128), most, strict=True):
        yield Target("planning of a cycle, us of the device", {**place, "batch_size": batch_size}, field("us"), most=us)
    yield Target("nodes of a cycle", place, field("nodes"), most=8 if kernel == "flashmla_sparse" else 4)


def _hopper(what: str, median: float, each: float, **place: Any) -> Iterator[Target]:
    place = {"bench": "kernels", "kernel": _GLUON, **place}
    yield Target(f"{what}, of the vendor's speed, median", place, _of_the_vendor, median, of_median=True)
    yield Target(f"{what}, of the vendor's speed, each", place, _of_the_vendor, each)


_FULL: dict[str, Any] = {"backend": _LATENTS["backend"], "batch_size": (32, 128), "context": (4096, 32768)}
_TREES = {"bench": "trees", "batch_size": (32, 128), "context": 4096}
_GROUPED = {**_DECODE, "heads": 32, "batch_size": 64, "context": 8192}
_SPARSE = {**_DECODE, "kernel": "gluon", "backend": "dsv4", "batch_size": 128}
_STEPS = {"bench": "steps", "bounds": ("none", "max_committed")}
_PAGES_OF_64 = {**_STATIC, "backend": ("trtllm_mla", "fa3"), "page_size": 64}
_PAGES_OF_1 = {**_STATIC, "backend": ("flashinfer_mla", "fa3"), "page_size": 1}
TARGETS = (
    Target("a layer, times the raw call", {"bench": "attention"}, field("ratio"), most=1.03),
    Target("MLA of 16 heads, of a copy's bandwidth", {**_LATENTS, "kernel": "triton", "heads": 16}, _of_the_copy, 0.75),
    Target("MLA of 128 heads, of the vendor's speed", {**_LATENTS, "heads": 128}, _of_the_vendor),
    Target("32 heads over 8, of FlashAttention-3's speed", _GROUPED, _of_the_vendor, least=0.75),
    Target("128 keys and 512 selected entries, of FlashMLA's speed", _SPARSE, _of_the_vendor, least=0.6),
    Target("a tree's verify, times the chain's", _TREES, field("ratio"), most=1.25),
    Target("a ragged verify, times a uniform one", {"bench": "ragged", "heads": 128}, field("ratio"), most=0.6),
    Target("a mixed step, times its halves", {"bench": "mixed"}, field("ratio"), most=1.0),
    Target("nodes of a phase alone", {**_ALONE, "page_size": 64}, field("nodes"), most=2),
    Target("nodes of a phase alone, compressed", {**_ALONE, "page_size": 256}, field("nodes"), most=3),
    Target("planning of three instances, times the cycle", _INSTANCES, _of_the_cycle, most=1.3),
    Target("Gluon: 16 heads, of a copy's bandwidth", {**_LATENTS, "kernel": _GLUON, "heads": 16}, _of_the_copy, 0.9),
    *_hopper("Gluon: MLA of 128 heads", 0.8, 0.7, **_FULL, heads=128, width=(1, 4, 8, 16)),
    *_hopper("Gluon: MLA of 16 heads", 0.8, 0.7, **_FULL, heads=16, width=(4, 8, 16)),
    *_hopper("Gluon: sizes that no tile was chosen for", 0.65, 0.65, batch_size=(20, 100), context=5003),
    *_hopper("Gluon: whole prompts", 0.85, 0.85, heads=32, width=(8192, 32768)),
    *_hopper("Gluon: prompts", 0.75, 0.75, width=(1024, 8192, 32768)),
    *_hopper("64 heads of dsv4", 0.85, 0.75, kernel="gluon", backend="dsv4", heads=64, batch_size=(1, 32, 128)),
    *(target for kernel, most in _PLANNING.items() for target in _planned(kernel, most)),
    Target("copying a cycle's inputs, us of the host", _CYCLE, field("host_us"), most=20),
    Target("an eager layer over its raw calls, us of the host", {"bench": "eager"}, field("over_us"), most=60),
    Target("an eager step's metadata, us of the host", {"bench": "eager"}, field("metadata_us"), most=80),
    Target("operators that making steps asks for", {"bench": "steps"}, field("operators"), most=0),
    Target("making a cycle's steps, us", _STEPS, field("us"), most=15),
    Target("choices that are wrong", {"bench": "sampling"}, field("wrong"), most=0),
    Target("a greedy choice, times an argmax", {**_SAMPLED, "mix": "greedy"}, field("over_argmax"), most=1.2),
    Target("a sampled choice, us", {**_SAMPLED, "mix": _MIXES}, field("us"), most=3000),
    Target("memory of a choice, MB", _SAMPLED, field("peak_bytes", 1e6), most=300),
    Target("static buffers, MB, at most 4", _PAGES_OF_64, field("bytes", 1e6), most=4),
    Target("static buffers, MB, at most 140", _PAGES_OF_1, field("bytes", 1e6), most=140),
)  # those without a bound promise nothing
_CASE: tuple[str, ...] = ("mix", "logits", "table", "slots", "bounds", "batch_size", "requests", "context", "heads")
_CASE += ("width", "page_size", "topk", "paging")


def check_targets(rows: Iterable[Row], ceilings: Mapping[str, float]) -> list[Reached]:
    """Each target on each row that it speaks of. ceilings: of the device; empty where they were not measured."""
    rows, found = list(rows), []
    for target in TARGETS:
        promised = not (math.isinf(target.least) and math.isinf(target.most))
        groups: dict[tuple[str, ...], list[Reached]] = {}
        for row in filter(target.counts, rows):
            value = target.value(row, ceilings)
            if value is not None:
                met = target.least <= value <= target.most if promised else None
                names = (row.get("backend", ""), row.get("kernel", ""))
                reached = Reached(target.name, *names, case_of(row), round(value, 3), met)
                groups.setdefault(names, []).append(reached)
        for own in groups.values():
            found += sorted(own, key=lambda each: each.value)[(len(own) - 1) // 2 :][:1] if target.of_median else own
    return found


def case_of(row: Row) -> str:
    """The sizes of a row, for a reader."""
    return ", ".join(f"{name.replace('_', ' ')} {row[name]}" for name in _CASE if row.get(name) not in (None, ""))


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
