"""Speed of a kernel beside its device's limits: floors, which stand in a report and never fail a run.

Roofs are measured in the same run: a copy of memory, and a product of matrices in the queries' type. What they allow a
step is the longer of its bytes and its operations. Times are medians of replays of CUDA graphs that hold one call each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheFormat, PagedCache, PagedKV, PagedLatent
from attn_backends.conformance.catalogue import Subject
from attn_backends.conformance.worlds import planner_of, query_heads, sizes_of
from attn_backends.contract.kernel import LayerShape
from attn_backends.errors import AttnBackendsError
from attn_backends.graphs import CudaGraph
from attn_backends.layer import AttentionLayer
from attn_backends.results import without_folders
from spec_metadata import BlockTable, BoundInputs, CacheGeometry, Capacity, Step, StepKind, UniformQuery
from spec_metadata.layout import HostBounds

WIDTH, NUM_NODES, TOPK = 4, 16, 4
OVER_ROOF, OVER_CHAIN, OVER_LAYER = 1.3, 1.25, 1.0
UNSPLIT = 1.3  # times a batch's own: more requests than a device has room for need no split
REPLAYS = 20
PHASES = (StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND)
NO_SPLIT = "as of a kernel that does not split its keys over the device where a request has more than one query row"


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of timed work. requests, context: of a batch. long: keys of a request that is alone. copied: bytes of a
    copy. product: rows of a matrix.
    """

    requests: int = 32
    context: int = 4096
    long: int = 131072
    copied: int = 2**30
    product: int = 8192


@dataclass(frozen=True, slots=True)
class Floor:
    """One floor of a kernel. value: what was measured, at most of it met; None where it was not, and why."""

    backend: str
    kernel: str
    floor: str
    most: float
    value: float | None
    reason: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the value is at most `most`; None where nothing was measured."""
        return None if self.value is None else self.value <= self.most

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        said = "not measured" if self.value is None else f"{self.value:.2f}, at most {self.most:g}"
        return f"{self.backend} ({self.kernel}) {self.floor}: {said}" + (f"; {self.reason}" if self.reason else "")


def floors(subject: Subject, scale: Scale | None = None) -> Iterator[Floor]:
    """The floors of a kernel on the device of its subject. One that can't be measured says why."""
    scale = scale or Scale()
    bench = _Bench(subject, scale)
    for name, most, measure in (
        (f"a verify of {WIDTH} rows, times what the roofs allow beside a decode", OVER_ROOF, bench.verify),
        (f"the same of one request of {scale.long} keys", OVER_ROOF, bench.split),
        (f"a tree of {NUM_NODES}, times a chain of as many", OVER_CHAIN, bench.tree),
        ("planning a cycle, times one layer's verify", OVER_LAYER, bench.planning),
    ):
        about = partial(Floor, subject.backend.name, subject.kernel, name, most)
        try:
            value = round(measure(), 3)
            is_unsplit = measure == bench.split and value > max(most, UNSPLIT * bench.verify())
        except Exception as error:  # a kernel's may be anything, and a floor fails no run
            reason = str(error) if isinstance(error, AttnBackendsError) else f"{type(error).__name__}: {error}"
            yield about(None, without_folders(reason))
            continue
        yield about(value, NO_SPLIT if is_unsplit else "")


class _Bench:
    """A kernel with requests to attend to."""

    def __init__(self, subject: Subject, scale: Scale) -> None:
        self.subject, self.scale, self.device = subject, scale, torch.device(subject.device)
        self._times: dict[tuple[int, int, int, bool], float] = {}

    def verify(self) -> float:
        """Of a batch."""
        return self._over_roof(self.scale.requests, self.scale.context)

    def split(self) -> float:
        """Of one long request, which leaves a device idle unless its keys are shared out."""
        return self._over_roof(1, self.scale.long)

    def tree(self) -> float:
        """Of a batch."""
        sizes = (self.scale.requests, self.scale.context, NUM_NODES)
        return self._time(*sizes, is_tree=True) / self._time(*sizes)

    def planning(self) -> float:
        """Of a batch whose phases are captured on the engine's own buffers, as graphs that hold nothing else."""
        sizes = (self.scale.requests, self.scale.context)
        requests = Requests.of(self.subject, *sizes, NUM_NODES, self.device)
        steps = [requests.step(kind) for kind in PHASES]
        inputs = [BoundInputs(step.seq_lens, num_real=requests.num_real) for step in steps]
        layers = [LayerShape.of(requests.layer, requests.dtype, requests.dtype)]  # whose schedules are planned, too
        metas = [
            requests.backend.capture(step.bucket(), step.paging, bound, layers=layers)
            for step, bound in zip(steps, inputs, strict=True)
        ]

        def plan() -> None:
            for meta in metas:
                requests.backend.refresh(meta)

        return _timed(plan, self.device) / self._time(*sizes, WIDTH)

    def _over_roof(self, requests: int, context: int) -> float:
        taken = [self._time(requests, context, width) for width in (WIDTH, 1)]
        allowed = [self._allowed(requests, context, width) for width in (WIDTH, 1)]
        return (taken[0] / taken[1]) / (allowed[0] / allowed[1])

    def _time(self, requests: int, context: int, width: int, *, is_tree: bool = False) -> float:
        """Microseconds of a forward."""
        key = (requests, context, width, is_tree)
        if key not in self._times:
            made = Requests.of(self.subject, requests, context, width, self.device)
            self._times[key] = _timed(made.forward(width, is_tree=is_tree), self.device)
        return self._times[key]

    def _allowed(self, requests: int, context: int, width: int) -> float:
        """Microseconds that the roofs allow a forward: keys and values read once, and two products."""
        layer, dtype = layer_of(self.subject), _dtype_of(self.subject)
        copy_us, product_us = roofs(self.device, dtype, self.scale)
        values = 0 if is_latent(self.subject) else layer.v_head_dim
        entry = layer.num_kv_heads * (layer.head_dim + values)
        rows = requests * width * layer.num_heads * (layer.head_dim + layer.v_head_dim)
        num_bytes = (requests * context * entry + rows) * dtype.itemsize
        return max(num_bytes * copy_us, 2 * rows * context * product_us)


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Requests of one length in pages of their own, a backend with room for them, and a layer's cache."""

    backend: AttentionBackend
    layer: AttentionLayer
    cache: PagedCache
    pages: Tensor
    geometry: CacheGeometry
    context: int
    dtype: torch.dtype

    @classmethod
    def of(cls, subject: Subject, requests: int, context: int, width: int, device: torch.device) -> Requests:
        """width: of the widest step. Contexts are of keys, a step's rows included."""
        layer, dtype = layer_of(subject), _dtype_of(subject)
        page_size = max(subject.capabilities[StepKind.DECODE].page_sizes or {64})
        topk = TOPK if width == NUM_NODES else 1
        num_steps = (NUM_NODES // TOPK if topk > 1 else max(width, 2)) - 1
        capacity = Capacity(requests, context, page_size, topk, num_steps, max(width, 2))
        geometry = CacheGeometry(1 + requests * capacity.max_pages, page_size)
        planner = planner_of(subject.kernel)
        kernels = dict.fromkeys(subject.capabilities, subject.kernel)
        backend = subject.backend(capacity, geometry, device, kernel=kernels, planner=planner)
        cache = cache_of(layer, geometry, dtype, device, is_latent=is_latent(subject))
        order = 1 + torch.randperm(geometry.num_pages - 1, device=device)
        return cls(backend, layer, cache, order.view(requests, -1), geometry, context, dtype)

    @property
    def num_real(self) -> Tensor:
        """[1] int32: all of them."""
        return torch.tensor([len(self.pages)], dtype=torch.int32, device=self.pages.device)

    def step(self, kind: StepKind, width: int = WIDTH, tree_mask: Tensor | None = None) -> Step:
        """The last rows of every request."""
        committed, capacity = self.context - width, self.backend.capacity
        lens = torch.full((len(self.pages),), committed, dtype=torch.int32, device=self.pages.device)
        table = BlockTable(self.pages, self.geometry)
        host: HostBounds = {"max_committed": committed, "seq_lens_cpu": [committed] * len(lens)}
        if kind is StepKind.DECODE:
            return Step.decode(lens, table, **host)
        if kind is StepKind.DRAFT_DECODE:
            return Step.draft_decode(capacity.topk, capacity.num_steps, lens, table, **host)
        if kind is StepKind.DRAFT_EXTEND:
            return Step.draft_extend(UniformQuery(capacity.extend_width), lens, table, **host)
        return Step.target_verify(width, lens, table, tree_mask=tree_mask, **host)

    def forward(self, width: int, *, is_tree: bool) -> Callable[[], object]:
        """A layer's attention on metadata that is planned before."""
        mask = tree_mask(self.pages.device).expand(len(self.pages), -1, -1) if is_tree else None
        step = self.step(StepKind.TARGET_VERIFY if width > 1 else StepKind.DECODE, width, mask)
        meta = self.backend.capture(step.bucket(), step.paging)
        self.backend.replay(meta, step)
        shape = (step.num_tokens, self.layer.num_heads, self.layer.head_dim)
        q = torch.randn(shape, device=self.pages.device).to(self.dtype)
        return lambda: self.backend.forward(q, self.cache, meta.at(), self.layer).out


def layer_of(subject: Subject) -> AttentionLayer:
    """A layer of DeepSeek-V3's sizes on 8 GPUs, or of Llama-3-8B's, or of the nearest that are declared. Refuses a
    kernel without the steps that floors are about.
    """
    lacking = [kind for kind in (StepKind.DECODE, StepKind.TARGET_VERIFY) if kind not in subject.capabilities]
    if lacking:
        raise AttnBackendsError(f"the kernel has no step of kind {' or '.join(lacking)}")
    kernel = next(each for each in subject.backend.kernels if each.name == subject.kernel)
    formats: Sequence[Any] = [format for format in CacheFormat if format in subject.backend.formats]
    if not formats:
        raise AttnBackendsError(
            "compressed layers have no floors: what they read depends on what their indexer selects"
        )
    format = CacheFormat.LATENT if is_latent(subject) else CacheFormat.KV
    dims, heads, num_kv_heads = ((576, 512), 16, 1) if is_latent(subject) else ((128, 128), 32, 8)
    sizes = sizes_of(subject.backend, kernel, format)
    if sizes and dims not in sizes:
        dims = max(sizes)
    declared = query_heads(kernel)
    if declared and heads not in declared:
        heads = next((each for each in sorted(declared) if each >= heads), max(declared))
    return AttentionLayer(0, heads, math.gcd(heads, num_kv_heads), *dims, dims[0] ** -0.5)


def _dtype_of(subject: Subject) -> torch.dtype:
    """bfloat16 where the kernel takes it."""
    declared = subject.capabilities[StepKind.DECODE].dtypes
    return torch.bfloat16 if torch.bfloat16 in declared else next(iter(sorted(declared, key=str)))


def is_latent(subject: Subject) -> bool:
    """Whether floors are about latents: where a backend reads them, else about keys and values."""
    return CacheFormat.LATENT in subject.backend.formats


def cache_of(
    layer: AttentionLayer, geometry: CacheGeometry, dtype: torch.dtype, device: torch.device, *, is_latent: bool
) -> PagedCache:
    """Random entries."""
    shape = (geometry.num_pages, geometry.page_size)
    if is_latent:
        return PagedLatent(torch.randn(*shape, layer.head_dim, device=device).to(dtype), layer.v_head_dim)
    dims = (layer.head_dim, layer.v_head_dim)
    k, v = (torch.randn(*shape, layer.num_kv_heads, dim, device=device).to(dtype) for dim in dims)
    return PagedKV(k, v)


def tree_mask(device: torch.device) -> Tensor:
    """[nodes, nodes] bool: row sees itself and its ancestors; nodes have `TOPK` children, in breadth first."""
    mask = torch.eye(NUM_NODES, dtype=torch.bool)
    for node in range(1, NUM_NODES):
        mask[node] |= mask[(node - 1) // TOPK]
    return mask.to(device)


def roofs(device: torch.device, dtype: torch.dtype, scale: Scale) -> tuple[float, float]:
    """Microseconds of a byte that is copied, read or written, and of an operation of a product."""
    key = (str(device), dtype, scale)
    if key not in _ROOFS:
        source = torch.ones(scale.copied, dtype=torch.uint8, device=device).view(torch.int32)
        target = torch.empty_like(source)
        a, b = (torch.randn(scale.product, scale.product, device=device).to(dtype) for _ in range(2))
        copy_us = _timed(lambda: torch.neg(source, out=target), device)
        product_us = _timed(lambda: a @ b, device)
        _ROOFS[key] = copy_us / (2 * scale.copied), product_us / (2 * scale.product**3)
    return _ROOFS[key]


_ROOFS: dict[Any, tuple[float, float]] = {}


def _timed(call: Callable[[], object], device: torch.device) -> float:
    """Median time of a call in microseconds: of graph replays between events; on a CPU, of calls."""
    if device.type != "cuda":
        call()
        return median(_called(call) for _ in range(REPLAYS))
    graph, pairs = CudaGraph(), []
    graph.capture(call)
    graph.replay()
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) * 1e3 for start, end in pairs)


def _called(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def of_report(found: Sequence[Mapping[str, Any]]) -> list[Floor]:
    """The floors that a report holds."""
    return [Floor(**each) for each in found]
