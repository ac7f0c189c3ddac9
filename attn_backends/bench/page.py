"""`docs/kernels.md`: what kernels reach on a GPU, from the results of `bench attention --set kernels|prefill|trees`.

python -m attn_backends.bench.page [FOLDER] [--output docs/kernels.md]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from attn_backends.errors import AttnBackendsError, ConfigError
from attn_backends.results import Results, read

COMMAND = "python -m attn_backends.bench.page"
PAGE, FOLDER = Path("docs/kernels.md"), Path("docs/results/h200")
SHOWN = ("kernels_*.json", "trees.json")
_VERDICTS = {True: "met", False: "**missed**", None: ""}
_SIZES = ("backend", "kernel", "heads", "width")

Row = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; 2 if a result is missing or can't be read."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="of results; default: %(default)s")
    parser.add_argument("--output", type=Path, default=PAGE, metavar="FILE", help="default: %(default)s")
    args = parser.parse_args(arguments)
    try:
        paths = [path for form in SHOWN for path in sorted(args.folder.glob(form))]
        if not paths:
            raise ConfigError(f"{args.folder} holds none of {', '.join(SHOWN)}; run `make gpu-results` on a GPU")
        args.output.write_text(page({path.stem: read(path) for path in paths}), encoding="utf-8")
    except (AttnBackendsError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def page(results: Mapping[str, Results]) -> str:
    """The page. results: by the names of their parts."""
    devices = sorted({result.head.device for result in results.values()})
    blocks = [
        "# Kernels beside each other",
        f"Written by `{COMMAND}` from what `make gpu-results` measured on {', '.join(devices)}; how, is said in "
        "[benchmarks.md](benchmarks.md). Times are medians of replays of CUDA graphs, of kernels in turn.",
        "## Targets",
        _table(("target", "backend", "kernel", "case", "value", ""), _targets(results.values())),
        *(block for name, result in results.items() for block in _part(name, result)),
    ]
    return "\n\n".join(blocks) + "\n"


def _targets(results: Iterable[Results]) -> Iterator[tuple[Any, ...]]:
    for reached in (reached for result in results for reached in result.own.get("targets", ())):
        yield *(reached[name] for name in ("target", "backend", "kernel", "case", "value")), _VERDICTS[reached["met"]]


def _part(name: str, result: Results) -> Iterator[str]:
    """What a file of results says."""
    yield f"## {name}"
    head, ceilings = result.head, result.own.get("ceilings")
    said = f"{head.device}, {head.date}, `{head.command}`."
    if ceilings is not None:
        copy, product = ceilings["copy_tb_per_s"], ceilings["matmul_tflop_per_s"]
        said += f" A copy moves {copy:.2f} TB/s, a matrix product {product:.0f} TFLOP/s."
    yield said
    yield _table(
        (*_SIZES, "cases", "beside", "ratio: median", "least", "most", "TB/s", "TFLOP/s"), _summary(result.rows)
    )
    absent = [
        f"- {each['backend']}/{each['kernel']}: {each['reason']}"
        + (f" ({len(each['cases'])} cases)" if each["cases"] else "")
        for each in result.own.get("missing", ())
    ]
    if absent:
        yield "Not measured:"
        yield "\n".join(absent)


def _summary(rows: Iterable[Row]) -> Iterator[tuple[Any, ...]]:
    """A line for each kernel, number of heads, width and peer: over all batch sizes and contexts."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((*(row[name] for name in _SIZES), row["peer"]), []).append(row)
    for (*sizes, peer), own in groups.items():
        ratios = [row["ratio"] for row in own]
        best = [max((row[rate] for row in own if rate in row), default="") for rate in ("tb_per_s", "tflop_per_s")]
        yield *sizes, len(own), peer, *(f"{find(ratios):.2f}" for find in (median, min, max)), *best


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
