"""What a benchmark has to say: a row for each comparison, a reason for each that is missing; and where it measures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from attn_backends.backend import AttentionBackend
from attn_backends.contract.kernel import Kernel
from attn_backends.errors import AttnBackendsError, BackendUnavailableError, UnsupportedStepError
from attn_backends.graphs import Graph
from attn_backends.results import without_folders
from benchmarks.timing import Clock


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. context: keys of a request. heads: query heads. width: query rows of a request. us: device time
    of one call. peer: what it is compared with, peer_us: its time, ratio: us / peer_us.
    """

    bench: str
    backend: str
    kernel: str
    batch_size: int
    context: int
    heads: int
    width: int
    us: float
    peer: str
    peer_us: float
    ratio: float


@dataclass(frozen=True, slots=True)
class KernelRow(Row):
    """One kernel on one problem. tb_per_s: bytes that it must read and write, by its time. tflop_per_s: operations of
    the two products, by its time.
    """

    tb_per_s: float
    tflop_per_s: float


@dataclass(frozen=True, slots=True)
class MetadataRow:
    """What preparing the metadata of one step costs in one way.

    phase: draft, verify or draft_extend, or the whole cycle of the three. mode: torch and fused plan before a replay,
    in_graph as a part of it; vendor is what the kernel's vendor plans, by its own call; sglang is what SGLang does.
    context: committed tokens of each request. host_us: until the call returns. gpu_us: of all that runs on the device.
    launches: kernels on the device, those of graphs too. copies: between host and device, or on the device. syncs: how
    often the host waits for the device. to_host: copies into the host's memory.
    """

    bench: str
    backend: str
    kernel: str
    phase: str
    mode: str
    batch_size: int
    context: int
    page_size: int
    topk: int
    host_us: float
    gpu_us: float
    launches: int
    copies: int
    syncs: int
    to_host: int


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes of one static buffer of a captured phase at the whole capacity: of batch_size requests, of context tokens.

    phase: draft, verify or draft_extend; all, the memory that they share; or workspace, of a kernel. buffer: its name,
    or total. paging: the form of the engine's table, none for a workspace. peer_bytes: what SGLang 0.5.23 allocates for
    the same, measured on an H200 by `torch.cuda.memory_allocated` around its `init_cuda_graph_state`; None where it was
    not.
    """

    bench: str
    backend: str
    batch_size: int
    context: int
    page_size: int
    topk: int
    paging: str
    phase: str
    buffer: str
    bytes: int
    peer_bytes: int | None


@dataclass(frozen=True, slots=True)
class CycleRow:
    """One whole cycle of the worker. model: whose attention it is. kernel: of the verify. mode: eager; graph_before and
    graph, one graph a phase, planned before it or in it; loop, one graph for the whole cycle. context: committed tokens
    of each request. peer: what it is compared with, peer_us: its time, ratio: us / peer_us.
    """

    bench: str
    backend: str
    kernel: str
    model: str
    batch_size: int
    context: int
    mode: str
    us: float
    peer: str
    peer_us: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Missing:
    """What has no row, and why. case: a description; empty where the whole kernel is missing. failed: neither not here,
    refused nor too large.
    """

    backend: str
    kernel: str
    case: str
    reason: str
    failed: bool


@dataclass(frozen=True, slots=True)
class Absent:
    """All cases of a kernel that have no row for one reason; none where the whole kernel is missing."""

    backend: str
    kernel: str
    reason: str
    failed: bool
    cases: tuple[str, ...]


def by_reason(missing: Iterable[Missing]) -> list[Absent]:
    """What has no row, in the order of the first of each kernel and reason."""
    found: dict[tuple[str, str, str, bool], list[str]] = {}
    for each in missing:
        cases = found.setdefault((each.backend, each.kernel, each.reason, each.failed), [])
        cases += [each.case] if each.case else []
    return [Absent(*same, tuple(cases)) for same, cases in found.items()]


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """Where to measure. rounds: timed replays of each graph."""

    device: torch.device
    make_graph: Callable[[], Graph]
    clock: Clock
    rounds: int


Contender = tuple[type[AttentionBackend], Kernel]


def missing(backend: type[AttentionBackend], kernel: str, case: str, error: Exception) -> Missing:
    """What an error says. A refusal, a kernel that has no such step, and too little memory are no failures."""
    reason = str(error) if isinstance(error, AttnBackendsError) else f"{type(error).__name__}: {error}"
    is_full = any(isinstance(x, torch.OutOfMemoryError) for x in (error, error.__cause__))
    if is_full:
        reason = "it does not fit into the device's memory"
    failed = not is_full and not isinstance(error, UnsupportedStepError | BackendUnavailableError)
    return Missing(backend.name, kernel, case, without_folders(reason), failed)
