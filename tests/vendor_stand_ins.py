"""Vendors' calls as they are documented, in torch on the CPU: they check what they are given and attend from it alone.

A stand-in's schedule holds the lengths that it was made from, and a launch attends over no more keys than these, so
that a schedule of another step shows. What a kernel leaves undefined is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheFormat
from attn_backends.conformance.comparisons import compare_outputs
from attn_backends.conformance.scenes import Batch, Scene
from attn_backends.conformance.worlds import Setup, World
from attn_backends.contract.kernel import Schedule
from attn_backends.graphs import RecordedGraph
from attn_backends.layer import AttentionOutput
from attn_backends.selection import providers
from spec_metadata import StepKind


def install(monkeypatch: pytest.MonkeyPatch, calls: Mapping[str, object]) -> None:
    """Make `providers.load` find these, by path, and nothing else."""

    def load(path: str) -> object:
        if path not in calls:
            raise ModuleNotFoundError(f"No module named {path.partition(':')[0]!r}")
        return calls[path]

    monkeypatch.setattr(providers, "load", load)


def pretend_hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU that any vendor's kernel runs on, with every package installed. Returns the device to ask about."""
    monkeypatch.setattr(providers, "device_reasons", lambda kernel, device: [])
    monkeypatch.setattr(providers, "is_installed", lambda module: True)
    providers._vendor_reasons.cache_clear()
    return torch.device("cuda", 7)


def world_of(backend: type[AttentionBackend], kernel: str, setup: tuple[CacheFormat, int, int]) -> World:
    """A world on a vendor's kernel that runs on the CPU. setup: cache format, page size, topk."""
    able = next(found for found in backend.kernels if found.name == kernel)
    sizes = frozenset({(576, 512)} if setup[0] is CacheFormat.LATENT else {(64, 64)})
    declared = {kind: replace(each, head_sizes=sizes) for kind, each in able.capabilities.items()}
    on_cpu = replace(able, capabilities=declared, unavailable_reasons=lambda device: [])
    stand_in = type(f"{backend.__name__}OnCPU", (backend,), {"kernels": (on_cpu,)})
    format, page_size, topk = setup
    return World(Setup(stand_in, format, page_size, topk, dtype=torch.bfloat16, kernel=kernel))


def check_replay_after_warmup(world: World, captured: Batch, replayed: Batch, *, plans_itself: bool) -> None:
    """As on a GPU, a region runs once before it is captured, so its schedules are older than the graph.

    plans_itself: the graph holds its planning.
    """
    backend, bs = world.backend, len(replayed.lens) + 1
    backend.checking = not plans_itself  # checks of values can't be captured
    first = Scene(world, captured, seed=2)
    first.reset_memory()
    meta = backend.capture(world.capacity.bucket(captured.kind, bs), world.paging())
    backend.replay(meta, first.step())
    static = first.inputs(bs)

    def region() -> list[AttentionOutput]:
        if plans_itself:
            backend.refresh(meta)
        found = []
        for forward, given in enumerate(static):
            at = meta.at(forward, given.ancestors)
            backend.store(given.stored, world.cache, at, world.layer)
            found.append(backend.forward(given.q, world.cache, at, world.layer))
        return found

    region()
    graph = RecordedGraph()
    outputs = graph.capture(region)
    compare_outputs(first, static, outputs)
    second = Scene(world, replayed, seed=3)
    second.reset_memory()
    for old, new in zip(static, second.inputs(bs), strict=True):
        for destination, source in zip(old.tensors(), new.tensors(), strict=True):
            destination.copy_(source)
    (backend.copy_inputs if plans_itself else backend.replay)(meta, second.step())
    graph.replay()
    compare_outputs(second, static, outputs)
    backend.phases.check()


def batches(kind: StepKind, topk: int, page_size: int) -> tuple[Batch, Batch]:
    """A batch to capture and one to replay; over a tree, nothing may be committed."""
    least = 0 if topk > 1 and kind in (StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY) else 1
    return Batch(kind, (3, 9)), Batch(kind, (14, least, min(page_size, 13)))


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    page_table: Tensor,
    *,
    causal: bool,
    scale: float,
    window: tuple[int, int] = (-1, -1),
    reach: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q [num_tokens, heads, dim], pages [num_pages, page_size, kv_heads, dim]. reach: [bs] keys that a schedule knows.

    Returns out in q's dtype and natural lse, float32.
    """
    token = torch.arange(q.shape[0])
    request = torch.searchsorted(cu_seqlens_q[1:].contiguous(), token, right=True).clamp(max=seqused_k.shape[0] - 1)
    rows_after = cu_seqlens_q[1:].long()[request] - 1 - token
    end = seqused_k.long()[request] - (rows_after if causal else 0)
    key = torch.arange(page_table.shape[1] * k_pages.shape[1])
    visible = key < end.unsqueeze(1)
    own = seqused_k.long()[request] - 1 - rows_after
    if window[0] >= 0:
        visible &= key >= (own - window[0]).unsqueeze(1)
        visible &= (key <= (own + window[1]).unsqueeze(1)) | (window[1] < 0)
    if reach is not None:
        visible &= key < reach[request].unsqueeze(1)
    group = q.shape[1] // k_pages.shape[2]
    k, v = (pages[page_table.long()].flatten(1, 2)[request].float() for pages in (k_pages, v_pages))
    k, v = (torch.where(visible[..., None, None], x, 0).repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("thd,tkhd->thk", q.float(), k) * scale
    scores = scores.masked_fill(~visible.unsqueeze(1), float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.clamp_min(-1e30).unsqueeze(-1)).exp()
    return torch.einsum("thk,tkhd->thd", weights, v).to(q.dtype), lse


def planned_once(monkeypatch: pytest.MonkeyPatch, schedule: type[Schedule]) -> None:
    """Make a vendor's schedules be planned when they are made, and never again."""
    refresh, planned = schedule.refresh, set[Schedule]()

    def once(self: Schedule) -> None:
        if self not in planned:
            planned.add(self)
            refresh(self)

    monkeypatch.setattr(schedule, "refresh", once)


def recorder(function: Callable, passed: set[str]) -> Callable:
    """The function, with the names of the arguments that it is ever given put into `passed`."""

    def recorded(**arguments: object) -> object:
        passed.update(arguments)
        return function(**arguments)

    return recorded
