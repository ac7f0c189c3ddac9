"""Request and results of a set of measurements: rows as they are written, and the reasons why others are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from attn_backends.backend import AttentionBackend
from attn_backends.contract.kernel import Kernel
from attn_backends.errors import AttnBackendsError, BackendUnavailableError, UnsupportedStepError
from attn_backends.graphs import Graph
from attn_backends.results import without_folders
from benchmarks.timing import Clock

TORCH = "torch"  # a kernel that no engine runs on a GPU

Row = Mapping[str, Any]
Runnable = Mapping[type[AttentionBackend], Sequence[Kernel]]


class Missing(NamedTuple):
    """A missing row, and its reason. case: a description; empty where the whole kernel is missing. failed: it could run
    here and was neither refused nor too large.
    """

    backend: str
    kernel: str
    case: str
    reason: str
    failed: bool


class Size(NamedTuple):
    """Requests, and tokens of each."""

    context: int
    batch_size: int

    def __str__(self) -> str:
        return f"batch {self.batch_size}, context {self.context}"


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """The place of a measurement. rounds: timed replays of each graph."""

    device: torch.device
    make_graph: Callable[[], Graph]
    clock: Clock
    rounds: int


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A request for measurements. own: further results of a set, by key of the result."""

    stage: Stage
    backends: Sequence[type[AttentionBackend]]
    batch_sizes: Sequence[int]
    contexts: Sequence[int]
    page_size: int | None = None
    topk: int | None = None
    own: dict[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> list[Size]:
        """All sizes, those of a context one after another."""
        return [Size(context, batch_size) for context in self.contexts for batch_size in self.batch_sizes]

    def runnable(self, reasons: Callable[[Kernel], list[str]] = lambda kernel: []) -> tuple[Runnable, list[Missing]]:
        """The kernels of each backend but torch that run here, and those that don't. reasons: further ones."""
        found: dict[type[AttentionBackend], list[Kernel]] = {}
        absent = []
        for backend in self.backends:
            for kernel in (kernel for kernel in backend.kernels if kernel.name != TORCH):
                why = reasons(kernel) or kernel.unavailable_reasons(self.stage.device)
                if why:
                    absent.append(Missing(backend.name, kernel.name, "", "; ".join(why), failed=False))
                else:
                    found.setdefault(backend, []).append(kernel)
        return found, absent


def compared(bench: str, backend: str, kernel: str, problem: Any, us: float, peer: str, peer_us: float) -> Row:
    """One comparison on a problem. us: device time of one call. peer: what it is compared with, peer_us: its time."""
    pool = problem.pool
    place = {"bench": bench, "backend": backend, "kernel": kernel, "batch_size": pool.batch_size}
    place |= {"context": pool.context, "heads": problem.layer.num_heads, "width": problem.width}
    beside = {"peer": peer, "peer_us": round(peer_us, 2), "ratio": round(us / peer_us, 4)}
    return place | {"us": round(us, 2)} | beside


def missing(backend: type[AttentionBackend], kernel: str, case: object, error: Exception) -> Missing:
    """The missing row of an error. A refusal, a kernel that has no such step, and too little memory are no failures."""
    reason = str(error) if isinstance(error, AttnBackendsError) else f"{type(error).__name__}: {error}"
    is_full = any(isinstance(x, torch.OutOfMemoryError) for x in (error, error.__cause__))
    if is_full:
        reason = "it does not fit into the device's memory"
    failed = not is_full and not isinstance(error, UnsupportedStepError | BackendUnavailableError)
    return Missing(backend.name, kernel, str(case), without_folders(reason), failed)


def each(
    cases: Iterable[tuple[type[AttentionBackend], str, object]], measure: Callable[..., Row]
) -> Iterator[Row | Missing]:
    """A row of each (backend, kernel, case). A vendor may raise anything; the others are measured all the same."""
    for backend, kernel, case in cases:
        try:
            yield measure(backend, kernel, case)
        except Exception as error:
            yield missing(backend, kernel, case, error)


def by_reason(absent: Iterable[Missing]) -> list[dict[str, Any]]:
    """Missing rows by kernel and reason, in the order of the first of each, with all its cases."""
    found: dict[tuple[str, str, str, bool], list[str]] = {}
    for one in absent:
        cases = found.setdefault((one.backend, one.kernel, one.reason, one.failed), [])
        cases += [one.case] if one.case else []
    return [
        {"backend": backend, "kernel": kernel, "reason": reason, "failed": failed, "cases": cases}
        for (backend, kernel, reason, failed), cases in found.items()
    ]
