"""Kernels against the device's measured ceilings, as a picture."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from attn_backends.bench.ceilings import Ceilings
from attn_backends.bench.rows import KernelRow
from attn_backends.errors import BackendUnavailableError, ConfigError

SUFFIXES = (".png", ".svg")


def check_plot(path: Path | None) -> None:
    """Refuse, before anything is measured, a picture that can't be drawn afterwards."""
    if path is None:
        return
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot {path}: a picture ends in {' or '.join(SUFFIXES)}")
    if find_spec("matplotlib") is None:
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
    figure = import_module("matplotlib.figure").Figure(figsize=(8, 2.2 * len(all_heads) + 1), layout="constrained")
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
        axes.legend(fontsize="small")
    panels[-1].set_xlabel("operations a byte")
    figure.savefig(path, dpi=72)
