"""`docs/kernels.md`, `docs/cycles.md` and their pictures, from the results of `python -m benchmarks` on a GPU.

python -m docs.pages [FOLDER] [--output docs]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attn_backends.errors import AttnBackendsError, ConfigError
from attn_backends.results import Results, read
from benchmarks.memory import ALL
from benchmarks.plans import BLOCK, INSTANCES, RAGGED
from benchmarks.rows import Row
from benchmarks.shapes import MAX_VERIFIED
from benchmarks.speculation import CYCLE
from benchmarks.targets import by_target, check_targets
from docs.pages import plot

COMMAND = "python -m docs.pages"
OUT, FOLDER = Path("docs"), Path("docs/results")
COPY, OTHERS = "copy", (BLOCK, *RAGGED.values(), INSTANCES)
_DECODES = ((1, 4096), (8, 4096), (32, 4096), (128, 4096), (1, 32768), (32, 32768), (128, 32768), (128, 131072))
_PREFILLS = ((1, 1024), (8, 1024), (1, 8192), (8, 8192), (1, 32768), (8, 32768))
_VERDICTS = {True: "met", False: "**missed**", None: ""}
_SIZES = ("backend", "kernel", "heads", "width")
_KERNELS = """Times are medians of replays of CUDA graphs; kernels take turns. Columns are requests x context; width is
the query rows of a request. A cell is our kernel's time divided by the peer's: below 1 ours is faster. Targets are of
speed: higher is better. Least and most are over all sizes that were measured, not only those shown.

Roof is the largest share, at any size, of what the device's copy bandwidth and matrix products allow, measured in the
same run. A kernel that mostly reads can beat a copy, which writes as much as it reads. Empty rows: no vendor
kernel to compare, or a second vendor kernel.

The docstring of each kernel says what limits it: [decode and
verify](../attn_backends/kernels/triton_decode.py), [MLA on Hopper](../attn_backends/kernels/gluon_mla.py),
[prefill](../attn_backends/kernels/triton_prefill.py), [prefill on
Hopper](../attn_backends/kernels/gluon_prefill.py), [sparse](../attn_backends/kernels/triton_sparse.py),
[sparse on Hopper](../attn_backends/kernels/gluon_sparse.py),
[trees](../attn_backends/kernels/triton_tree.py).
Layers with a [sliding window or attention sinks](design.md#sliding-windows-and-sinks) have not been measured.
vLLM's FlashAttention-3 takes both, sinks in bfloat16. SGLang's build takes sinks, too, and declares none here: it never
ran."""
_MISSED = """## What misses its bound

Profiles are of ncu on an H100: of [six shapes](results/h100/profiles.json) and of [two forms of
prompts](results/h100/profiles_forms.json). A summary is in the docstrings of [prompts on
Hopper](../attn_backends/kernels/gluon_prefill.py) and of [sparse rows](../attn_backends/kernels/gluon_sparse.py). Of
[other prompts](results/h200/prompt_forms.json) one misses 0.75 of FlashAttention-3's speed: 32,768 tokens whose heads
have 256 elements, at 0.73. Tensor cores are busy 0.73 of the time there, FlashAttention-3's 0.93. Warps wait longest
for global memory (`long_scoreboard`), 1.91 cycles an instruction. That is not among FlashAttention-3's four longest
waits. Heads of 64 elements miss 0.75 by less, and were not profiled:
[0.744 and 0.748](results/h200/prompts_64.json) of its speed in 8 prompts of 8,192 and in one of 32,768.

Queries of 192 and values of 128 elements reach [0.951, 0.932 and 1.037](results/h200/prompts_192.json) of its speed, in
8 prompts of 8,192, one of 32,768, and the last 1,024 tokens of 32,768.

MLA of 16 heads and one row runs on `triton_decode` under every name of ours. It is to reach 0.9 of a copy's bandwidth
at 128 requests, and to be no slower at 8 and 32 than on 24 November. Since then long requests are divided into pieces,
and a launch, `deal_out`, writes down who takes what. Microseconds at 4,096 tokens on an H200: whole calls
[today](results/h200/kernels_gluon.json) under `trtllm_mla`, then whole calls in
[replays](results/h200/profiles_latents.json), ours and FlashMLA's, each with its launches:

| requests | 24 Nov. | today | replayed | no pieces | `deal_out` | attention | merge | FlashMLA | attention | merge |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
| 8 | 24.1 | 26.9 | 26.9 | 24.5 | 1.7 | 19.0 | 4.8 | 23.8 | 17.2 | 5.2 |
| 32 | 52.6 | 55.4 | 55.4 | 52.4 | 1.5 | 46.2 | 3.5 | 51.3 | 43.6 | 3.5 |
| 128 | 156.7 | 164.5 | 164.1 | 160.1 | 1.6 | 151.9 | 4.3 | 156.7 | 146.9 | 1.6 |

At 128 requests no name reaches 0.9 of a copy: 0.86 under [`trtllm_mla`](results/h200/kernels_gluon.json), 0.89 under
[`fa3`](results/h200/kernels_fa3_mla.json) and 0.89 under
[`flashinfer_mla`](results/h200/kernels_flashinfer_mla.json). FlashMLA reaches 0.91, FlashAttention-3 0.90 and
FlashInfer 0.94 there.

Most of what FlashMLA is faster by lies in attention, whose launch takes 4.9 us more than its own. By ncu memory is at
0.80 of what it can, in FlashMLA's at 0.81, and no unit is full. L2 is at 0.88. Warps wait longest for their own last
instruction (`wait`), 2.17 cycles an instruction, then for shared memory (`short_scoreboard`), 1.79. FlashMLA's wait for
global memory (`long_scoreboard`), 5.23 cycles, and FlashAttention-3's for barriers, 4.25. Under `fa3` attention takes
153.9 us, and FlashAttention-3's 148.3, with memory at 0.81 and 0.84. The merge is not what is missing there: it takes
4.5 us, and FlashAttention-3's 5.9. Nor are pieces: without them a call takes 163.3 us, with them 160.8.

Names differ, although they launch the same kernels: under `fa3` one run has 159.7 us by `gluon_mla` and 164.3 by
`triton`. No profile says why. Before `deal_out` a call under `trtllm_mla` took 159.2 us, in a run that is not kept
(6ba1b69). Those over 32,768 tokens took 4 % less there, too, FlashMLA's at most 2 % less. Under `fa3` and
`flashinfer_mla` calls are slower than in a run before by 2 % at most, vendors' by 3 %: the card is another one.

Of the 2.8 us that 8 requests miss by in replays, pieces cost 2.4. At 32 requests the miss is 2.8, and pieces cost 3.0.
They buy much: with one request of 131,072 tokens among 127 of 1,024,
[32 heads over 8](results/h200/skewed.json) take 348 us, FlashAttention-3 256. Undivided they took ten times as long as
it, on an H100 in a run that is not kept. Lengths are known to the device alone, so the host can't leave the launch
out."""
_NOTHING_MISSED = "Of the targets above none is missed."
_CYCLES = """A cycle: three drafted tokens, a verify of four, a draft extend. Each is planned by graph nodes that read
an engine's own buffers, and nothing else is in the graph: the host launches nothing more. Elapsed is the time of a
replay less that of an empty graph; kernels is the sum of what its kernels take. A graph holds ten plans, and elapsed is
a tenth of its time. A second table has a draft block of four tokens, and ragged phases of at most four rows per
request. Its `instances` are the three phases, each planned alone by a backend of its own; these share one memory for
their tables."""


class Page(NamedTuple):
    """A page of results. shown: patterns of its files. parts: its text below the targets, from the files' results."""

    title: str
    about: str
    shown: Sequence[str]
    parts: Callable[[Mapping[str, Results], Mapping[str, Path]], Iterator[str]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages and the pictures; 2 if a result is missing or can't be read."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=FOLDER, help="of results, and what lies in it; default: %(default)s"
    )
    parser.add_argument("--output", type=Path, default=OUT, metavar="FOLDER", help="default: %(default)s")
    args = parser.parse_args(arguments)
    try:
        for path, text in written(args.folder, args.output).items():
            path.write_text(text, encoding="utf-8")
    except (AttnBackendsError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def written(folder: Path, output: Path) -> dict[Path, str]:
    """Every file and its text. folder: of results, beside which pictures lie. output: of the pages."""
    files = {}
    for page_name, page in PAGES.items():
        paths = [path for form in page.shown for path in sorted(folder.rglob(form), key=lambda path: path.stem)]
        if not paths:
            raise ConfigError(f"{folder} holds none of {', '.join(page.shown)}; run `make gpu-results` on a GPU")
        files_of = {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}
        found = {name: read(path) for name, path in files_of.items()}
        if empty := [name for name, result in found.items() if not result.rows]:
            raise ConfigError(f"{folder} has no rows of {', '.join(empty)}; run `make gpu-results` on a GPU")
        links = {name: Path(os.path.relpath(path, output)) for name, path in files_of.items()}
        devices = sorted({result.head.device for result in found.values() if result.rows[0].get("bench") != "memory"})
        blocks = [
            f"# {page.title}",
            f"Written by `{COMMAND}` from what `python -m benchmarks` measured on {', '.join(devices)}; the method is "
            "in [benchmarks.md](benchmarks.md).",
            page.about,
            "## Targets",
            _table(("target", "device", "backend", "kernel", "met", "at worst", "case", ""), _targets(found.values())),
            *page.parts(found, links),
        ]
        files[output / page_name] = "\n\n".join(blocks) + "\n"
        for name, path in files_of.items():
            spans = plot.spans(found[name].rows, without=COPY)
            if spans:
                files[path.with_suffix(".svg")] = plot.to_svg(_question(name, found[name]), spans)
    return files


def _targets(results: Iterable[Results]) -> Iterator[tuple[Any, ...]]:
    """A line for each target and kernel: how many cases met it, and the worst."""
    for result in results:
        for worst, num_met, num in by_target(check_targets(result.rows, result.own.get("ceilings", {}))):
            share = "" if worst.met is None else f"{num_met} of {num}"
            place = result.head.device, worst.backend, worst.kernel
            yield worst.target, *place, share, worst.value, worst.case, _VERDICTS[worst.met]


def _question(name: str, result: Results) -> str:
    """What a picture answers."""
    if name.endswith("trees"):
        return f"What does a tree cost beside a chain of as many tokens, on {result.head.device}?"
    peers = sorted({row["peer"] for row in result.rows if row["peer"] != COPY})
    return f"Are our kernels faster than {' and '.join(peers)}, on {result.head.device}?"


def _head(name: str, result: Results, link: Path) -> str:
    head = result.head
    cut = "" if result.is_complete else " The run was cut short; these rows were done."
    of_run = f"{head.device}, {head.date}, commit {head.commit[:7]}, `{head.command}`"
    return f"## {name}\n\n{of_run}: [all rows]({link.as_posix()}).{cut}"


def _missed(results: Mapping[str, Results]) -> Iterator[tuple[Any, ...]]:
    """A line for each shape that misses its target. The shape of a median is among them, if it misses what each is to
    reach.
    """
    for result in results.values():
        for each in check_targets(result.rows, result.own.get("ceilings", {})):
            if each.met is False and not each.target.endswith("median"):
                yield each.target, result.head.device, each.backend, each.kernel, each.case, each.value


def _of_kernels(results: Mapping[str, Results], links: Mapping[str, Path]) -> Iterator[str]:
    yield _MISSED
    missed = list(_missed(results))
    yield _table(("target", "device", "backend", "kernel", "case", "reached"), missed) if missed else _NOTHING_MISSED
    for name, result in results.items():
        ceilings = result.own.get("ceilings", {})
        yield _head(name, result, links[name])
        if ceilings:
            copy, product = ceilings["copy_tb_per_s"], ceilings["matmul_tflop_per_s"]
            yield f"A copy moves {copy:.2f} TB/s, a matrix product {product:.0f} TFLOP/s."
        if any(row["peer"] != COPY for row in result.rows):
            yield f"![{_question(name, result)}]({links[name].with_suffix('.svg').as_posix()})"
        yield _compared(result.rows, ceilings)
        absent = [
            f"- {each['backend']}/{each['kernel']}: {each['reason']}"
            + (f" ({len(each['cases'])} cases)" if each["cases"] else "")
            for each in result.own.get("missing", ())
        ]
        if absent:
            yield "Not measured:\n\n" + "\n".join(absent)


def _compared(rows: Sequence[Row], ceilings: Mapping[str, float]) -> str:
    """A line for each kernel, number of heads, width and peer; a peer of another one's has its roof there."""
    is_prefill = any(row["width"] > MAX_VERIFIED for row in rows)
    measured = {(row["batch_size"], row["context"]) for row in rows}
    shapes = [shape for shape in (_PREFILLS if is_prefill else _DECODES) if shape in measured]
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((*(row[name] for name in _SIZES), row["peer"]), []).append(row)
    roofs = {group: f"{_roof(own, ceilings):.2f}" for group, own in groups.items()} if ceilings else {}
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


def _of_cycles(results: Mapping[str, Results], links: Mapping[str, Path]) -> Iterator[str]:
    for name, result in results.items():
        yield _head(name, result, links[name])
        if result.rows[0].get("bench") == "memory":
            whole = [row for row in result.rows if row["phase"] == ALL]
            columns = ("backend", "page_size", "topk", "paging")
            lines = ((*(row[name] for name in columns), f"{row['bytes'] / 1e6:.1f}") for row in whole)
            yield _table((*columns, "static buffers of all phases, MB"), lines)
        else:
            shortest = min(row["context"] for row in result.rows)
            yield _planned([row for row in result.rows if row["phase"] == CYCLE])
            others = [row for row in result.rows if row["phase"] in OTHERS and row["context"] == shortest]
            if others:
                yield _planned(others)


def _planned(rows: Sequence[Row]) -> str:
    names = ("phase", "backend", "kernel", "page_size", "heads", "batch_size", "context", "us", "kernel_us", "nodes")
    lines = [[*(row.get(name, "") for name in names), _megabytes(row)] for row in rows]
    return _table((*names[:-3], "elapsed, us", "kernels, us", "nodes", "static buffers, MB"), lines)


def _megabytes(row: Row) -> str:
    return f"{row['bytes'] / 1e6:.1f}" if "bytes" in row else ""


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [[column.replace("_", " ") for column in columns], ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


PAGES = {
    "kernels.md": Page("Kernels beside each other", _KERNELS, ("kernels_*.json", "trees.json"), _of_kernels),
    "cycles.md": Page(
        "What planning a cycle costs",
        _CYCLES,
        ("plan_graphs*.json", "bench_memory.json"),
        _of_cycles,
    ),
}

if __name__ == "__main__":
    sys.exit(main())
