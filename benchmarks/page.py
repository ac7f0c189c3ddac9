"""`docs/kernels.md`: what kernels reach on a GPU, from the results of `benchmarks attention --set kernels` and others.

python -m benchmarks.page [FOLDER] [--output docs/kernels.md]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_backends.errors import AttnBackendsError, ConfigError
from attn_backends.results import Results, read
from benchmarks import plot
from benchmarks.shapes import MAX_VERIFIED

COMMAND = "python -m benchmarks.page"
PAGE, FOLDER = Path("docs/kernels.md"), Path("docs/results/h200")
SHOWN = ("kernels_*.json", "trees.json")
COPY = "copy"
_DECODES = ((1, 4096), (8, 4096), (32, 4096), (128, 4096), (1, 32768), (32, 32768), (128, 32768), (128, 131072))
_PREFILLS = ((1, 1024), (8, 1024), (1, 8192), (8, 8192), (1, 32768), (8, 32768))
_VERDICTS = {True: "met", False: "**missed**", None: ""}
_SIZES = ("backend", "kernel", "heads", "width")
_READ = """Times are medians of replays of CUDA graphs, of kernels in turn. Columns are requests x context; width is the
query rows of a request. Cells are times the peer's time: below 1 our kernel is the faster. Least and most are over all
sizes that were measured, not only those shown.

Roof is the largest share, at any size, of what the device's copy bandwidth and matrix products, measured in the same
run, allow at the most; what mostly reads can beat a copy, which writes as much. A line without cells had no vendor's
kernel beside it, or is a second one of a vendor.

Where our kernels stop, and why, is said at the head of each: [decode and
verify](../attn_backends/kernels/triton_decode.py), [MLA on Hopper](../attn_backends/kernels/gluon_mla.py),
[prefill](../attn_backends/kernels/triton_prefill.py), [sparse](../attn_backends/kernels/triton_sparse.py),
[trees](../attn_backends/kernels/triton_tree.py).
Layers with a [sliding window or attention sinks](design.md#sliding-windows-and-sinks) have not been measured."""

Row = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and its pictures; 2 if a result is missing or can't be read."""
    return write_page(COMMAND, __doc__, PAGE, _with_pictures, arguments)


def write_page(
    command: str,
    about: str | None,
    page: Path,
    make: Callable[[Path, Path], str],
    arguments: Sequence[str] | None,
) -> int:
    """The command line of a page of results; 2 if it can't be made. page: where it lies. make: (folder of results, file
    of the page) -> its text.
    """
    parser = argparse.ArgumentParser(prog=command, description=about)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="of results; default: %(default)s")
    parser.add_argument("--output", type=Path, default=page, metavar="FILE", help="default: %(default)s")
    args = parser.parse_args(arguments)
    try:
        args.output.write_text(make(args.folder, args.output), encoding="utf-8")
    except (AttnBackendsError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def results_of(folder: Path, shown: Sequence[str]) -> list[Path]:
    """The files of results that a page sums up. shown: their names, as patterns."""
    paths = [path for form in shown for path in sorted(folder.glob(form))]
    if not paths:
        raise ConfigError(f"{folder} holds none of {', '.join(shown)}; run `make gpu-results` on a GPU")
    return paths


def summed_up(folder: Path, beside: Path) -> str:
    """The page of a folder of results. beside: the folder of the page, which its links start from."""
    paths = results_of(folder, SHOWN)
    links = {path.stem: Path(os.path.relpath(path, beside)) for path in paths}
    return page({path.stem: read(path) for path in paths}, links)


def pictures(folder: Path) -> dict[Path, str]:
    """The pictures of a folder of results, each with the file beside its rows where it belongs."""
    found = {}
    for path in results_of(folder, SHOWN):
        result = read(path)
        if spans := plot.spans(result.rows, without=COPY):
            found[path.with_suffix(".svg")] = plot.to_svg(_question(path.stem, result), spans)
    return found


def _question(name: str, result: Results) -> str:
    """What a picture answers."""
    if name == "trees":
        return f"A verify of a tree, times that of a chain of as many tokens, on {result.head.device}"
    peers = sorted({row["peer"] for row in result.rows if row["peer"] != COPY})
    return f"Our kernels, times the time of {' and '.join(peers)}, on {result.head.device}"


def _with_pictures(folder: Path, written: Path) -> str:
    """The page, after its pictures were written."""
    for path, svg in pictures(folder).items():
        path.write_text(svg, encoding="utf-8")
    return summed_up(folder, written.parent)


def page(results: Mapping[str, Results], links: Mapping[str, Path]) -> str:
    """The page. results: by the names of their parts. links: to their files, beside which their pictures are."""
    devices = sorted({result.head.device for result in results.values()})
    blocks = [
        "# Kernels beside each other",
        f"Written by `{COMMAND}` from what `make gpu-results` measured on {', '.join(devices)}; how, is said in "
        "[benchmarks.md](benchmarks.md).",
        _READ,
        "## Targets",
        _table(("target", "backend", "kernel", "cases", "least", "most", ""), _targets(results.values())),
    ]
    for name, result in results.items():
        blocks += _part(name, result, links[name])
    return "\n\n".join(blocks) + "\n"


def _targets(results: Iterable[Results]) -> Iterator[tuple[Any, ...]]:
    """A line for each target, kernel and verdict, over its cases."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for reached in (reached for result in results for reached in result.own.get("targets", ())):
        same = tuple(reached[name] for name in ("target", "backend", "kernel", "met"))
        groups.setdefault(same, []).append(reached["value"])
    for (*names, met), values in groups.items():
        yield *names, len(values), f"{min(values):.2f}", f"{max(values):.2f}", _VERDICTS[met]


def _part(name: str, result: Results, link: Path) -> Iterator[str]:
    """What a file of results says."""
    yield f"## {name}"
    head, ceilings = result.head, result.own.get("ceilings")
    said = f"{head.device}, {head.date}, `{head.command}`: [all rows]({link.as_posix()})."
    said += "" if result.is_complete else " The run was cut short; these rows were done."
    if ceilings is not None:
        copy, product = ceilings["copy_tb_per_s"], ceilings["matmul_tflop_per_s"]
        said += f" A copy moves {copy:.2f} TB/s, a matrix product {product:.0f} TFLOP/s."
    yield said
    if any(row["peer"] != COPY for row in result.rows):
        yield f"![{_question(name, result)}]({link.with_suffix('.svg').as_posix()})"
    yield _compared(result.rows, ceilings)
    absent = [
        f"- {each['backend']}/{each['kernel']}: {each['reason']}"
        + (f" ({len(each['cases'])} cases)" if each["cases"] else "")
        for each in result.own.get("missing", ())
    ]
    if absent:
        yield "Not measured:"
        yield "\n".join(absent)


def _compared(rows: Sequence[Row], ceilings: Mapping[str, float] | None) -> str:
    """A line for each kernel, number of heads, width and peer; a peer of another one's has its roof there."""
    is_prefill = any(row["width"] > MAX_VERIFIED for row in rows)
    measured = {(row["batch_size"], row["context"]) for row in rows}
    shapes = [shape for shape in (_PREFILLS if is_prefill else _DECODES) if shape in measured]
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((*(row[name] for name in _SIZES), row["peer"]), []).append(row)
    roofs = {} if ceilings is None else {group: f"{_roof(own, ceilings):.2f}" for group, own in groups.items()}
    peers = {(backend, peer) for backend, *_, peer in groups}
    columns = [*_SIZES, "peer", *(f"{batch} x {context}" for batch, context in shapes), "least", "most"]
    lines = []
    for group, own in sorted(groups.items()):
        backend, kernel, heads, width, peer = group
        if (backend, kernel) not in peers or peer != COPY:
            of_peer = roofs.get((backend, peer, heads, width, COPY), "")
            lines.append((*group, *_ratios(own, shapes), *((roofs[group], of_peer) if roofs else ())))
    return _table([*columns, *(("roof", "peer's roof") if roofs else ())], lines)


def _ratios(rows: Iterable[Row], shapes: Sequence[tuple[int, int]]) -> list[str]:
    """At each of the shapes, and the least and most at any; nothing beside a copy, which says nothing of products."""
    found = {(row["batch_size"], row["context"]): row["ratio"] for row in rows if row["peer"] != COPY}
    if not found:
        return [""] * (len(shapes) + 2)
    most = max(found, key=found.__getitem__)
    cells = [f"{found[shape]:.2f}" if shape in found else "" for shape in shapes]
    return [*cells, f"{min(found.values()):.2f}", f"{found[most]:.2f} at {most[0]} x {most[1]}"]


def _roof(rows: Iterable[Row], ceilings: Mapping[str, float]) -> float:
    copy, product = ceilings["copy_tb_per_s"], ceilings["matmul_tflop_per_s"]
    return max(max(row["tb_per_s"] / copy, row["tflop_per_s"] / product) for row in rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
