"""What the kernels are meant to reach, and whether measured rows do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from attn_backends.bench.ceilings import Ceilings

OURS = "triton"
Measured = Mapping[str, Any]  # a row as written: `rows.Row` or `rows.KernelRow`


@dataclass(frozen=True, slots=True)
class Reached:
    """A target on one row. value: what was measured. met: None where nothing was promised."""

    target: str
    backend: str
    kernel: str
    case: str
    value: float
    met: bool | None


class Target(NamedTuple):
    """What a row must be to count (bench, and other fields), the value of it, and its bounds."""

    name: str
    bench: str
    fields: Mapping[str, tuple[Any, ...]]
    value: Callable[[Measured, Ceilings | None], float | None]
    least: float = -math.inf
    most: float = math.inf

    def counts(self, row: Measured) -> bool:
        """Whether a row is one that the target speaks of."""
        return row["bench"] == self.bench and all(row[name] in allowed for name, allowed in self.fields.items())


def of_the_copy(row: Measured, ceilings: Ceilings | None) -> float | None:
    """Share of the bandwidth of a copy."""
    return None if ceilings is None else row["tb_per_s"] / ceilings.copy_tb_per_s


def of_the_vendor(row: Measured, ceilings: Ceilings | None) -> float | None:
    """Speed as a share of the vendor's kernel; None where none ran."""
    return None if row["peer"] == "copy" else row["peer_us"] / row["us"]


def of_the_chain(row: Measured, ceilings: Ceilings | None) -> float:
    """Time of the tree by that of the chain."""
    return row["us"] / row["peer_us"]


_DECODE = {"kernel": (OURS,), "width": (1,)}
_OF_LATENTS = ("flashinfer_mla", "trtllm_mla", "fa3")
TARGETS = (
    Target(
        "MLA of 16 heads, of a copy's bandwidth",
        "kernels",
        {**_DECODE, "backend": _OF_LATENTS, "heads": (16,), "batch_size": (128,), "context": (4096,)},
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
        {**_DECODE, "heads": (128,), "batch_size": (128,), "context": (4096,)},
        of_the_vendor,
    ),
)  # on an H200; the last promises nothing


def check_targets(rows: Iterable[Measured], ceilings: Ceilings | None) -> Iterator[Reached]:
    """Each target on each row that it speaks of."""
    rows = list(rows)
    for target in TARGETS:
        promised = not (math.isinf(target.least) and math.isinf(target.most))
        for row in filter(target.counts, rows):
            value = target.value(row, ceilings)
            if value is not None:
                case = (
                    f"batch {row['batch_size']}, context {row['context']}, {row['heads']} heads, width {row['width']}"
                )
                met = target.least <= value <= target.most if promised else None
                yield Reached(target.name, row["backend"], row["kernel"], case, round(value, 3), met)
