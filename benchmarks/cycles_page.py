"""`docs/cycles.md`: what a speculative cycle costs around attention, from `benchmarks memory`, `metadata` and `cycle`.

python -m benchmarks.cycles_page [FOLDER] [--output docs/cycles.md]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_backends.results import Results, device_name, read
from benchmarks.memory import ALL, TOTAL
from benchmarks.page import results_of, write_page
from benchmarks.speculation import CYCLE
from benchmarks.targets import Reached, by_target

COMMAND = "python -m benchmarks.cycles_page"
PAGE = Path("docs/cycles.md")
SHOWN = ("bench_memory.json", "bench_metadata_*.json", "bench_cycle.json")
CONTEXTS = (4096, 131072)  # of times that the page shows
APART = "SGLang 0.5.23, measured apart on an H200"
_WAYS = ("torch", "fused", "in_graph", "vendor", "sglang")

Row = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; 2 if results are missing or can't be read."""
    return write_page(COMMAND, __doc__, PAGE, summed_up, arguments)


def summed_up(folder: Path, _page: Path) -> str:
    """The page of a folder of results."""
    return page([read(path) for path in results_of(folder, SHOWN)])


def page(results: Sequence[Results]) -> str:
    """The page of some results."""
    devices = sorted({result.head.device for result in results} - {device_name("cpu")})
    rows = [row for result in results for row in result.rows]
    cycles = [row for row in rows if row["bench"] == "metadata" and row["phase"] == CYCLE]
    timed = [row for row in cycles if row["context"] in CONTEXTS]
    blocks = [
        "# What a cycle costs around attention",
        f"Written by `{COMMAND}` from what `make gpu-results` measured on {', '.join(devices)}; the method is in "
        "[benchmarks.md](benchmarks.md). Of our kernel (`triton`) all metadata is of our making; a vendor's kernel "
        "adds its scheduler and its copies, which `vendor` shows alone. `sglang` are SGLang's classes in the same run"
        f"{_versions(results)}. A cycle: three drafted tokens, a verify of four, a draft extend. Times at "
        "further contexts are in the JSON files.",
        "## Targets",
        _table(("target", "backend", "kernel", "met", "at worst", "case", ""), _targets(results)),
        *_hosts(results),
        "## Host time of a cycle's metadata, us",
        _table(("backend", "page", "kernel", "batch", "context", *_WAYS), _times(timed, "host_us")),
        "## Device time of a cycle's metadata, us",
        _table(("backend", "page", "kernel", "batch", "context", *_WAYS), _times(timed, "gpu_us")),
        "## Launches, copies and synchronisations of a cycle's metadata",
        _table(("backend", "page", "kernel", "mode", "launches", "copies", "to the host", "syncs"), _counts(cycles)),
        "## Static buffers of all phases, MB",
        _table(("backend", "page", "topk", "table", "MB", APART), _memory(rows)),
        "## Whole cycles",
        _table(
            ("backend", "kernel", "model", "batch", "context", "mode", "us", "without planning", "ratio"), _whole(rows)
        ),
    ]
    return "\n\n".join(blocks) + "\n"


def _versions(results: Iterable[Results]) -> str:
    found = {result.head.versions["sglang"] for result in results if "sglang" in result.head.versions}
    return f" ({', '.join(sorted(found))})" if found else ""


def _targets(results: Iterable[Results]) -> Iterator[tuple[Any, ...]]:
    reached = [Reached(**each) for result in results for each in result.own.get("targets", ())]
    for worst, num_met, num in by_target(reached):
        share = "" if worst.met is None else f"{num_met} of {num}"
        verdict = "**missed**" if worst.met is False else worst.verdict
        yield worst.target, worst.backend, worst.kernel, share, worst.value, worst.case, verdict


def _hosts(results: Iterable[Results]) -> Iterator[str]:
    """How fast the hosts were."""
    for result in results:
        loop = result.own.get("calibration")
        if loop is not None:
            yield (
                f"`{result.head.command}`, {result.head.date}: {loop['additions']} additions in Python took "
                f"{loop['least_us']} to {loop['most_us']} us, {loop['median_us']} in the middle."
            )


def _times(cycles: Sequence[Row], field: str) -> Iterator[tuple[Any, ...]]:
    """A line for each kernel and size, a column for each way; SGLang's, which has kernels of its own, on every line."""
    sizes = ("backend", "page_size", "batch_size", "context")
    lines: dict[tuple[Any, ...], dict[str, dict[str, float]]] = {}
    for row in cycles:
        kernels = lines.setdefault(tuple(row[name] for name in sizes), {})
        kernels.setdefault(row["kernel"], {})[row["mode"]] = row[field]
    for (backend, page_size, *size), kernels in lines.items():
        peer = kernels.pop("", {})
        for kernel, own in kernels.items():
            times = own | peer
            yield backend, page_size, kernel, *size, *(f"{times[way]:.1f}" if way in times else "" for way in _WAYS)


def _counts(cycles: Iterable[Row]) -> Iterator[tuple[Any, ...]]:
    """The most over all sizes, for each kernel and mode."""
    most: dict[tuple[Any, ...], list[int]] = {}
    names = ("launches", "copies", "to_host", "syncs")
    for row in cycles:
        place = (row["backend"], row["page_size"], row["kernel"], row["mode"])
        own = [row[name] for name in names]
        most[place] = [max(pair) for pair in zip(own, most.get(place, own), strict=True)]
    yield from ((*place, *counts) for place, counts in most.items())


def _memory(rows: Iterable[Row]) -> Iterator[tuple[Any, ...]]:
    for row in rows:
        if row["bench"] == "memory" and (row["phase"], row["buffer"]) == (ALL, TOTAL):
            peer = "" if row["peer_bytes"] is None else f"{row['peer_bytes'] / 1e6:.1f}"
            yield row["backend"], row["page_size"], row["topk"], row["paging"], f"{row['bytes'] / 1e6:.1f}", peer


def _whole(rows: Iterable[Row]) -> Iterator[tuple[Any, ...]]:
    names = ("backend", "kernel", "model", "batch_size", "context", "mode")
    for row in rows:
        if row["bench"] == "cycle":
            yield *(row[name] for name in names), f"{row['us']:.0f}", f"{row['peer_us']:.0f}", f"{row['ratio']:.3f}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
