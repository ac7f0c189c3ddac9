"""Results as pictures: kernels against the device's measured ceilings, metadata by batch size, cycles by mode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from attn_backends.errors import BackendUnavailableError, ConfigError
from attn_backends.selection.packages import is_installed
from benchmarks.ceilings import Ceilings
from benchmarks.rows import CycleRow, KernelRow, MetadataRow
from benchmarks.speculation import CYCLE

SUFFIXES = (".png", ".svg")
_STYLES = ("-", "--", ":")  # by kernel


def check_plot(path: Path | None) -> None:
    """Refuse, before anything is measured, a picture that can't be drawn afterwards."""
    if path is None:
        return
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot {path}: a picture ends in {' or '.join(SUFFIXES)}")
    if not is_installed("matplotlib"):
        raise BackendUnavailableError(
            "--plot", ["matplotlib is not installed"], "Get it by pip install 'attn-backends[bench]'."
        )


def draw(path: Path, rows: Iterable[KernelRow], ceilings: Ceilings, device: str) -> None:
    """Draw each row under the roofline (Williams, Waterman and Patterson, 2009): a panel for each number of heads, a
    colour for each kernel; to the right more operations a byte, so by width.
    """
    rows = [row for row in rows if row.tb_per_s > 0 and row.tflop_per_s > 0]
    all_heads, kernels = sorted({row.heads for row in rows}), sorted({(row.backend, row.kernel) for row in rows})
    copy, product = ceilings.copy_tb_per_s, ceilings.matmul_tflop_per_s
    figure = import_module("matplotlib.figure").Figure(figsize=(10, 2.6 * len(all_heads) + 1), layout="constrained")
    figure.suptitle(f"attention on {device}: copies {copy:.3g} TB/s, multiplies {product:.3g} TFLOP/s")
    intensities = [row.tflop_per_s / row.tb_per_s for row in rows] or [1.0]
    roof = sorted({min(intensities) / 2, product / copy, max(intensities) * 2})
    panels = figure.subplots(len(all_heads) or 1, 1, squeeze=False, sharex=True)[:, 0]
    for axes, heads in zip(panels, all_heads, strict=False):
        axes.plot(roof, [min(x * copy, product) for x in roof], color="black", label="copy and matrix product")
        for number, kernel in enumerate(kernels):
            own = [row for row in rows if row.heads == heads and (row.backend, row.kernel) == kernel]
            intensity = [row.tflop_per_s / row.tb_per_s for row in own]
            reached = [row.tflop_per_s for row in own]
            if own:
                axes.scatter(intensity, reached, s=14, alpha=0.6, color=f"C{number}", label=" ".join(kernel))
        axes.set(xscale="log", yscale="log", ylabel="TFLOP/s", title=f"{heads} query heads")
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))  # beside it, where no point lies
    panels[-1].set_xlabel("operations a byte")
    figure.savefig(path, dpi=90)


def draw_metadata(path: Path, rows: Iterable[MetadataRow], device: str) -> None:
    """Draw what the metadata of whole cycles costs by batch size, at the largest context. It shows host time on the
    left, time on the device on the right, a row of panels for each backend and page size, a colour for each mode,
    dashes for the second kernel.
    """
    cycles = [row for row in rows if row.phase == CYCLE]
    places = list(dict.fromkeys((row.backend, row.page_size) for row in cycles))
    figure, panels = _panels(f"metadata of a cycle on {device}", len(places), 2)
    for (backend, page_size), pair in zip(places, panels, strict=False):
        own = [row for row in cycles if (row.backend, row.page_size) == (backend, page_size)]
        own = [row for row in own if row.context == max(row.context for row in own)]
        for axes, field, what in zip(pair, ("host_us", "gpu_us"), ("host", "device"), strict=True):
            ways = list(dict.fromkeys((row.mode, row.kernel) for row in own))
            kernels, modes = (list(dict.fromkeys(names)) for names in ([k for _, k in ways], [m for m, _ in ways]))
            for mode, kernel in ways:
                line = sorted((r.batch_size, getattr(r, field)) for r in own if (r.mode, r.kernel) == (mode, kernel))
                style = {"color": f"C{modes.index(mode)}", "linestyle": _STYLES[kernels.index(kernel) % len(_STYLES)]}
                xs, ys = [x for x, _ in line], [y for _, y in line]
                axes.plot(xs, ys, marker="o", label=f"{mode} {kernel}".rstrip(), **style)
            sizes = sorted({row.batch_size for row in own})
            title = f"{backend}, page size {page_size}, context {own[0].context}: {what}"
            axes.set(xscale="log", yscale="log", ylabel="us a cycle", title=title)
            axes.set_xticks(sizes, map(str, sizes))
            axes.set_xticks([], minor=True)
            axes.set_xlabel("requests")
        pair[1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=120)


def draw_cycles(path: Path, rows: Sequence[CycleRow], device: str) -> None:
    """Draw times of whole cycles, a panel for each backend and model. Each size has a bar of every mode, under it in
    black the time of its graphs without planning, and the ratio of the two. The eager mode, many times as long, is left
    out.
    """
    rows = [row for row in rows if row.mode != "eager"]
    places = list(dict.fromkeys((row.backend, row.model) for row in rows))
    figure, panels = _panels(f"cycles on {device}; black: without planning", len(places), 1)
    for (backend, model), (axes,) in zip(places, panels, strict=False):
        own = [row for row in rows if (row.backend, row.model) == (backend, model)]
        names = [f"{row.mode}\n{row.batch_size} x {row.context}" for row in own]
        bars = axes.bar(names, [row.us for row in own], color=[f"C{_number(row, own)}" for row in own])
        axes.scatter(names, [row.peer_us for row in own], color="black", marker="_", s=400)
        axes.bar_label(bars, [f"{row.ratio:.3f}" for row in own], label_type="center")
        axes.set(ylabel="us a cycle", title=f"{backend}: {model}")
    figure.savefig(path, dpi=120)


def _panels(title: str, num_rows: int, num_columns: int) -> tuple[Any, Any]:
    size = (12, 4 * max(num_rows, 1) + 1)
    figure = import_module("matplotlib.figure").Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(max(num_rows, 1), num_columns, squeeze=False)


def _number(row: CycleRow, rows: Sequence[CycleRow]) -> int:
    """Of a row's mode among those that are drawn."""
    return list(dict.fromkeys(each.mode for each in rows)).index(row.mode)
