"""Mutants of what vendors plan: on the host, from exact lengths, or on the device; and of 8-bit caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends import backend as base
from attn_backends import cache
from attn_backends.backend import AttentionBackend
from attn_backends.contract import kernel
from attn_backends.contract.capabilities import Capabilities
from attn_backends.contract.kernel import Schedules
from attn_backends.kernels import torch_attention
from spec_metadata import Step
from spec_metadata.visibility import HostLens
from tests.mutants import hosted
from tests.mutants.mutant import mutant

HOSTED, SCHEDULED = "tests.mutants.hosted:HostedBackend", "tests.mutants.hosted:ScheduledBackend"


@mutant(
    "SGLang #39825: a replay whose wrapper was not planned again",
    "math.decode",
    "graph.shrinking",
    backend=HOSTED,
    graph=True,
)
def replay_skips_the_host_plan(patch: pytest.MonkeyPatch) -> None:
    """A replay leaves the host's plan of the batch before."""
    patch.setattr(Schedules, "plan_host", lambda self, lens: None)


@mutant("a workspace that buckets of a phase plan into in turn", "graph.two_buckets", backend=HOSTED, graph=True)
def own_last_plan_taken_for_the_workspaces(patch: pytest.MonkeyPatch) -> None:
    """Lengths that a schedule planned last are not planned again, though another bucket has planned since."""
    plan = hosted.OnHost.plan_host

    def once(self: hosted.OnHost, lens: HostLens) -> None:
        if lens != getattr(self, "last", None):
            plan(self, lens)
        self.last = lens

    patch.setattr(hosted.OnHost, "plan_host", once)


@mutant("FlashInfer's `plan` bakes exact lengths, here into the launch", "math.decode", backend=HOSTED, graph=True)
def planned_lengths_are_host_numbers(patch: pytest.MonkeyPatch) -> None:
    """The launch takes the planned lengths as Python numbers, which a graph keeps."""

    def numbers(self: hosted.OnHost, lens: HostLens) -> None:
        self.host = lens.kv_lens

    def baked(self: hosted.OnHost) -> Tensor:
        full = [torch.full((), length, dtype=torch.int32, device=self.plan.seqused_k.device) for length in self.host]
        return torch.stack(full)

    patch.setattr(hosted.Planned, "__init__", lambda self, plan, shape, buffers: setattr(self, "plan", plan))
    patch.setattr(hosted.OnHost, "plan_host", numbers)
    patch.setattr(hosted.OnHost, "lens", property(baked), raising=False)


@mutant("a plan from a bound where exact lengths are needed", "refusals.host_lens", backend=HOSTED)
def missing_host_lengths_guessed(patch: pytest.MonkeyPatch) -> None:
    """Without exact lengths on the host, the capacity's longest is planned for."""
    exact = AttentionBackend._host_lens

    def guessed(self: AttentionBackend, step: Step, bs: int) -> Sequence[HostLens] | None:
        if step.seq_lens_cpu is None:
            object.__setattr__(step, "seq_lens_cpu", (self.capacity.max_context,) * step.bs)
        return exact(self, step, bs)

    patch.setattr(AttentionBackend, "_host_lens", guessed)


@mutant("SGLang #39825: a host-fed plan recorded into a graph", "graph.host_plan_stays_outside", backend=HOSTED)
def host_plan_recorded(patch: pytest.MonkeyPatch) -> None:
    """A schedule is made from the host inside a graph, which keeps its lengths."""
    patch.setattr(kernel, "is_capturing", lambda: False)


@mutant(
    "FlashMLA's scheduler metadata, made at capture alone",
    "math.decode",
    "graph.refresh_recorded",
    backend=SCHEDULED,
    graph=True,
)
def device_schedule_not_refreshed(patch: pytest.MonkeyPatch) -> None:
    """A replay plans again, and the vendor's schedule on the device stays that of the capture."""
    patch.setattr(Schedules, "refresh", lambda self: None)


@mutant("an fp8 store by a cast that does not saturate", "math.cache_types")
def overflow_not_clamped(patch: pytest.MonkeyPatch) -> None:
    """A value past the range of the cache's type becomes NaN."""

    def cast(k_pages, v_pages, k, v, slots, k_scale, v_scale) -> None:
        place = slots // k_pages.shape[1], slots % k_pages.shape[1]
        for pages, rows, scale in ((k_pages, k, k_scale), (v_pages, v, v_scale)):
            exact = rows.to(torch.promote_types(rows.dtype, torch.float32)) / scale
            inside = exact.abs() <= torch.finfo(pages.dtype).max
            pages[place] = torch.where(inside, exact, float("nan")).to(pages.dtype)

    patch.setattr(cache, "store_kv", cast)


@mutant("vLLM's fp8 path: drafted tokens read without their scale", "math.cache_types", "math.kv_scales")
def scales_forgotten_in_trees(patch: pytest.MonkeyPatch) -> None:
    """The drafted tokens of a tree are read as they are stored, not multiplied by their scales."""
    join = base.tree_join
    patch.setattr(base, "tree_join", lambda *arguments: join(*arguments[:8]))


@mutant("one scale for keys and values", "math.cache_types", "math.kv_scales")
def value_scale_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Values are multiplied by the scale of keys."""
    over_pages = torch_attention._over_pages

    def one_scale(*arguments: Any) -> tuple[Tensor, Tensor]:
        *given, extras = arguments
        return over_pages(*given, extras._replace(v_scale=extras.k_scale))

    patch.setattr(torch_attention, "_over_pages", one_scale)


@mutant(
    "a layer that needs what two parts of a tree can't give",
    "refusals.combined_extras",
    backend="tests.mutants.wide:WideBackend",
)
def windows_over_trees_taken(patch: pytest.MonkeyPatch) -> None:
    """A window is applied to the committed tokens alone, and the drafted ones are added to it."""
    patch.setattr(Capabilities, "tree_reasons", lambda self, layer: [])
