"""Known bugs of engines, put into correct code one at a time: the proof that the conformance suite can fail."""

from tests.mutants import (
    bound,
    compressed,
    eagle3,
    hosts,
    mtp,
    multimodal,
    outputs,
    packed,
    prefill,
    replays,
    sampling,
    scale,
    serving,
    visibility,
    windows,
    workers,
    writes,
)
from tests.mutants.mutant import MUTANTS, Mutant

__all__ = [
    "MUTANTS",
    "Mutant",
    "bound",
    "compressed",
    "eagle3",
    "hosts",
    "mtp",
    "multimodal",
    "outputs",
    "packed",
    "prefill",
    "replays",
    "sampling",
    "scale",
    "serving",
    "visibility",
    "windows",
    "workers",
    "writes",
]
