"""FlashInfer's MLA kernels by our lists of work and by FlashInfer's own: errors, speed, and what a plan takes on a GPU.

A row is a batch on `fa2` or `fa3`. Our launch must write what its torch definition writes. Attention by it may be off
from float32 by twice what it is by FlashInfer's own plan and a rounding step, over the longest request and a few more,
and from FlashInfer's by eight rounding steps of the largest output anywhere. Its speed must be at least 0.95 of that
by FlashInfer's plan: the median of five rounds in turn, each of a graph of ten launches. First, a graph that holds our
plan and a launch is replayed on other lengths. Cases that `SECONDS` do not suffice for are left out, the least telling.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_backends.contract.kernel import LayerShape
from attn_backends.graphs import CudaGraph
from attn_backends.kernels.work_operators import ITEM_FIELDS, NUM_WORDS, WorkLists, list_work
from attn_backends.vendors.flashinfer_work import FLOAT_WORKSPACE, INT_WORKSPACE, MLASchedule, VendorMLASchedule
from benchmarks.timing import CudaClock, take_turns
from spec_metadata.capacity import ceil_div
from spec_metadata.plans.csr import CsrPlan, csr_rows
from spec_metadata.visibility import HostLens

DEVICE = torch.device("cuda")
PAGE_SIZE, RANK, HEAD_DIM, SCALE = 64, 512, 576, 192**-0.5
LONGEST, MOST_TOKENS = 131072, 131072 + 128 * 4096
ROUNDS, LAUNCHES, LEAST_SPEED, ROUNDING = 5, 10, 0.95, 2**-9
MODULES = ("fa3", "fa2")
SECONDS = 220.0  # no case begins later


class Case(NamedTuple):
    """A batch. name: "even_" and the keys of each request, or "skewed": one of 131,072 keys, the others of 1,024."""

    backend: str
    name: str
    batch_size: int
    num_heads: int
    width: int
    causal: bool = True

    @property
    def lens(self) -> list[int]:
        if self.name == "skewed":
            return [LONGEST, *[1024] * (self.batch_size - 1)]
        return [int(self.name.removeprefix("even_"))] * self.batch_size

    @property
    def num_pages(self) -> list[int]:
        """Pages of each request."""
        return [ceil_div(length, PAGE_SIZE) for length in self.lens]


def cases() -> Iterator[Case]:
    """The most telling first: what runs out of time is left out."""
    names = ("skewed", "even_1024", "even_4096")
    for bs, width, name, heads, backend in product((128, 32, 1), (1, 4, 8), names, (128, 16), MODULES):
        yield Case(backend, name, bs, heads, width)
    for heads, backend in product((128, 16), MODULES):
        yield Case(backend, "skewed", 32, heads, 8, causal=False)


def plan_of(case: Case, lens: list[int]) -> CsrPlan:
    """A batch in shuffled pages."""
    widths = torch.full((len(lens),), case.width, device=DEVICE)
    pages = torch.randperm(sum(case.num_pages), device=DEVICE).int().split(case.num_pages)
    lists = torch.nn.utils.rnn.pad_sequence(pages, batch_first=True)
    rows = csr_rows(widths, torch.tensor(lens, device=DEVICE), lists.shape[1])
    sizes = (len(lens) * case.width, case.width, max(case.lens))
    return CsrPlan(rows.qo_indptr, rows.kv_indptr, lists.flatten(), rows.kv_len, PAGE_SIZE, case.causal, *sizes)


class Planned:
    """A schedule with workspaces of its own, and where its launches write."""

    def __init__(self, make: type[MLASchedule], case: Case, plan: CsrPlan, q: Tensor) -> None:
        specs = (INT_WORKSPACE, FLOAT_WORKSPACE)
        buffers = {spec.name: torch.zeros(int(str(spec.shape[-1])), dtype=torch.uint8, device=DEVICE) for spec in specs}
        shape = LayerShape(case.num_heads, 1, HEAD_DIM, RANK, SCALE, q.dtype, q.dtype)
        self.schedule, self.q = make(case.backend, plan, shape, buffers), q
        self.out = q.new_full((q.shape[0], case.num_heads, RANK), math.nan)
        self.lse = torch.full(q.shape[:2], math.nan, device=DEVICE)

    def run(self, latent: Tensor) -> None:
        self.schedule.run(self.q, latent, self.out, self.lse, SCALE, 1.0)


def exact(case: Case, plan: CsrPlan, q: Tensor, latent: Tensor, request: int) -> tuple[Tensor, Tensor]:
    """Attention of a request in float32."""
    begin, length, width = int(plan.kv_indptr[request]), case.lens[request], case.width
    pages = plan.kv_indices[begin : begin + ceil_div(length, PAGE_SIZE)].long()
    keys = latent[pages].flatten(0, 1)[:length].float()
    scores = torch.einsum("qhd,kd->qhk", q[request * width : (request + 1) * width].float(), keys) * SCALE
    if case.causal:
        row, key = torch.arange(width, device=DEVICE), torch.arange(length, device=DEVICE)
        scores.masked_fill_((key > length - width + row[:, None])[:, None], -math.inf)
    lse = scores.logsumexp(2)
    return torch.einsum("qhk,kd->qhd", scores.sub_(lse.unsqueeze(2)).exp_(), keys[:, :RANK]), lse


def accuracy(case: Case, plan: CsrPlan, ours: Planned, theirs: Planned, latent: Tensor) -> dict[str, Any]:
    """Errors of both, and how far they are apart."""
    found: dict[str, Any] = dict.fromkeys(("out", "vendor_out", "lse", "vendor_lse", "peak"), 0.0)
    for request in sorted({0, 1, case.batch_size // 2, case.batch_size - 1} & set(range(case.batch_size))):
        out, lse = exact(case, plan, ours.q, latent, request)
        rows = slice(request * case.width, (request + 1) * case.width)
        found["peak"] = max(found["peak"], float(out.abs().amax()))
        for prefix, each in (("", ours), ("vendor_", theirs)):
            for name, one, two in (("out", each.out, out), ("lse", each.lse, lse)):
                error = (one[rows].float() - two).abs().nan_to_num(math.inf).amax()
                found[prefix + name] = max(found[prefix + name], float(error))
    peak = float(theirs.out.float().abs().amax())
    found["apart"] = float((ours.out.float() - theirs.out.float()).abs().nan_to_num(math.inf).amax()) / peak
    within = (
        found["out"] <= 2 * found["vendor_out"] + ROUNDING * found["peak"],
        found["lse"] <= 2 * found["vendor_lse"] + 2 * ROUNDING,
        found["apart"] <= 8 * ROUNDING,
    )
    return {**found, "accurate": all(within)}


def is_defined(case: Case, plan: CsrPlan, lists: WorkLists) -> bool:
    """Whether the GPU's lists are those of the torch definition."""
    num_clusters = lists.work_indptr.shape[0] - 1
    words = torch.zeros(NUM_WORDS, dtype=torch.int32)
    expected = WorkLists.of(words, num_clusters, lists.merges.shape[1] // num_clusters)
    rows = (each.cpu() for each in (plan.qo_indptr, plan.kv_indptr, plan.kv_len))
    list_work(*rows, expected, num_tokens=plan.num_tokens, num_heads=case.num_heads, causal=case.causal)
    end = int(expected.work_indptr[-1])
    pairs = [(lists.work_indptr, expected.work_indptr), (lists.merges, expected.merges)]
    pairs += [(lists.items[i, :end], expected.items[i, :end]) for i in range(len(ITEM_FIELDS))]
    return all(torch.equal(one.cpu(), two) for one, two in pairs)


def recorded(launch: Callable[[], None], times: int) -> CudaGraph:
    """A graph of so many launches."""
    graph = CudaGraph()
    graph.capture(lambda: [launch() for _ in range(times)])
    return graph


def row_of(case: Case, latents: Tensor) -> dict[str, Any]:
    """Errors and times of a case."""
    plan = plan_of(case, case.lens)
    latent = latents[: sum(case.num_pages)]
    q = torch.randn(plan.num_tokens, case.num_heads, HEAD_DIM, device=DEVICE).bfloat16()
    ours, theirs = (Planned(make, case, plan, q) for make in (MLASchedule, VendorMLASchedule))
    host = HostLens((case.width,) * case.batch_size, tuple(case.lens), case.causal)
    ours.schedule.refresh()
    theirs.schedule.plan_host(host)
    for each in (ours, theirs):
        each.run(latent)
    found = {**accuracy(case, plan, ours, theirs, latent), "defined": is_defined(case, plan, ours.schedule.lists)}
    launches = [lambda each=each: each.run(latent) for each in (ours, theirs)]
    replays = [recorded(launch, LAUNCHES).replay for launch in (*launches, ours.schedule.refresh)]
    us, vendor_us, us_plan = (each / LAUNCHES for each in take_turns(replays, ROUNDS, CudaClock()))
    start = time.perf_counter()
    theirs.schedule.plan_host(host)
    vendor_plan_us = (time.perf_counter() - start) * 1e6
    torch.cuda.synchronize()
    speed = vendor_us / us
    times = {"us": us, "vendor_us": vendor_us, "speed": speed, "us_plan": us_plan, "vendor_host_us": vendor_plan_us}
    is_right = found["accurate"] and found["defined"] and speed >= LEAST_SPEED
    return {**found, **times, "status": "pass" if is_right else "fail"}


def replay_row(backend: str, latents: Tensor) -> dict[str, Any]:
    """A graph of our plan and a launch, replayed on other lengths: what a plan and a launch give there, bit for bit."""
    case = Case(backend, "even_4096", 32, 16, 4)
    plan = plan_of(case, case.lens)
    latent = latents[: sum(case.num_pages)]
    q = torch.randn(plan.num_tokens, case.num_heads, HEAD_DIM, device=DEVICE).bfloat16()
    planned = Planned(MLASchedule, case, plan, q)

    def launch() -> None:
        planned.schedule.refresh()
        planned.run(latent)

    graph = recorded(launch, 1)
    other = plan_of(case, [4 + 97 * i for i in range(case.batch_size)])
    for one, two in ((plan.kv_indptr, other.kv_indptr), (plan.kv_len, other.kv_len)):
        one.copy_(two)
    for each in (planned.out, planned.lse):
        each.fill_(math.nan)
    graph.replay()
    replayed = [planned.out.clone(), planned.lse.clone()]
    launch()
    same = all(torch.equal(*pair) for pair in zip(replayed, (planned.out, planned.lse), strict=True))
    is_right = same and bool(planned.out.isfinite().all())
    return {"backend": backend, "name": "replay", "status": "pass" if is_right else "fail"}


def rows(_device: str = "cuda") -> Iterator[dict[str, Any]]:
    """A replay on each module, then every case that there is time for."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    begun = time.perf_counter()
    latents = torch.randn(MOST_TOKENS // PAGE_SIZE, PAGE_SIZE, HEAD_DIM, device=DEVICE).bfloat16()
    for backend in MODULES:
        yield _row({}, lambda backend=backend: replay_row(backend, latents))
    for case in cases():
        if time.perf_counter() - begun <= SECONDS:
            yield _row(case._asdict(), lambda case=case: row_of(case, latents))


def _row(about: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        found = measure()
    except Exception as error:  # one case that can't run must not hide the others
        found = {"status": "fail", "error": f"{type(error).__name__}: {str(error)[:300]}"}
    return {**about, **{k: float(f"{v:.4g}") if type(v) is float else v for k, v in found.items()}}
