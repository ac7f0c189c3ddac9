"""Mutants of what vendors plan: on the host, from exact lengths, or on the device; and of 8-bit caches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends import backend as base
from attn_backends import cache
from attn_backends.backend import AttentionBackend
from attn_backends.contract import kernel
from attn_backends.contract.capabilities import Capabilities
from attn_backends.contract.kernel import Kernel, LayerShape, Schedule, Scheduled, Schedules
from attn_backends.kernels import torch_attention
from attn_backends.memory.phases import BackendMemory, PhaseMemory
from attn_backends.planning.captured import Captured
from attn_backends.planning.metadata import Metadata
from spec_metadata import Buffers, Extent, Step
from spec_metadata.visibility import HostLens
from tests.mutants import hosted
from tests.mutants.mutant import mutant

HOSTED, SCHEDULED = "tests.mutants.hosted:HostedBackend", "tests.mutants.hosted:ScheduledBackend"
UNITS = "tests.mutants.hosted:UnitsBackend"
FAILED, PACKED = "graph.host_plan_failed", ("math.prefill", "math.packed_draft_extend")
LAYERS = "api.layers_of_one_step", "graph.layers_of_one_step"


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


@mutant(
    "a workspace that buckets of a phase plan into in turn", "graph.two_buckets", FAILED, backend=HOSTED, graph=True
)
def own_last_plan_taken_for_the_workspaces(patch: pytest.MonkeyPatch) -> None:
    """Lengths that a schedule planned last are not planned again, though another bucket, or a plan that failed, has
    written since.
    """
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


@mutant("an exception of a vendor's `plan`, caught and forgotten", FAILED, backend=HOSTED, graph=True)
def failed_host_plan_swallowed(patch: pytest.MonkeyPatch) -> None:
    """Where a plan fails, the graph runs on the plan of the batch before."""
    plan_host = Schedules.plan_host

    def swallowed(self: Schedules, lens: Sequence[HostLens]) -> None:
        with suppress(Exception):
            plan_host(self, lens)

    patch.setattr(Schedules, "plan_host", swallowed)


@mutant("our own: found when plans were made to fail", FAILED, backend=HOSTED, graph=True)
def metadata_of_a_failed_host_plan_taken(patch: pytest.MonkeyPatch) -> None:
    """A replay marks its metadata as planned, and it stays so when the host's plan fails."""
    copy_anew = AttentionBackend._copy_anew

    def marked(self: AttentionBackend, meta: Metadata, captured: Captured, step: Step) -> None:
        try:
            copy_anew(self, meta, captured, step)
        finally:
            captured.take_phase()

    patch.setattr(AttentionBackend, "_copy_anew", marked)


@mutant("a plan that is kept by what was asked for", FAILED, backend=HOSTED, graph=True)
def failed_host_plan_taken_for_made(patch: pytest.MonkeyPatch) -> None:
    """Lengths are noted as planned before they are: a replay that is tried again finds the plan of the batch before."""
    plan = hosted.OnHost.plan_host

    def noted_first(self: hosted.OnHost, lens: HostLens) -> None:
        if lens != getattr(self, "last", None):
            self.last = lens
            plan(self, lens)

    patch.setattr(hosted.OnHost, "plan_host", noted_first)


@mutant("our own: found when plans were made to fail", "api.host_plan_failed", backend=HOSTED)
def failed_schedule_kept(patch: pytest.MonkeyPatch) -> None:
    """A schedule is kept before the host has planned it: a forward that is tried again attends by what lay there."""

    def kept(self: Schedules, plan: Any, place: int, shape: LayerShape) -> Schedule:
        workspaces = {name: tensor[place] for name, tensor in self._allocate(shape).items()}
        schedule = self.kernel.schedule(plan, shape, workspaces)
        self._made[place, shape] = Scheduled(plan, schedule)
        schedule.plan_host(self._lens[place])
        return schedule

    patch.setattr(Schedules, "_make", kept)


def change_rows(patch: pytest.MonkeyPatch, change: Callable[[tuple[int, ...]], Sequence[int]]) -> None:
    """Let the host plan other numbers of query rows. change: those of a step -> those that are planned."""
    plan = hosted.UnitsOnHost.plan_host

    def changed(self: hosted.UnitsOnHost, lens: HostLens) -> None:
        plan(self, replace(lens, query_lens=tuple(change(lens.query_lens))))

    patch.setattr(hosted.UnitsOnHost, "plan_host", changed)


@mutant(
    "a plan of decodes, taken for verifies and extends",
    "math.target_verify",
    "math.draft_extend",
    "math.prefill",
    backend=UNITS,
    graph=True,
)
def host_plans_one_row_a_request(patch: pytest.MonkeyPatch) -> None:
    """Every request is planned on the host with one query row."""
    change_rows(patch, lambda lens: (1,) * len(lens))


@mutant("the padded width for the active one, on the host", *PACKED, backend=UNITS)
def host_plans_the_most_rows(patch: pytest.MonkeyPatch) -> None:
    """Every request is planned on the host with as many query rows as the longest has."""
    change_rows(patch, lambda lens: (max(lens),) * len(lens))


@mutant("a uniform stride over packed rows, on the host", *PACKED, backend=UNITS)
def host_plans_the_mean_of_rows(patch: pytest.MonkeyPatch) -> None:
    """The step's rows are planned on the host as if all requests had equally many."""
    change_rows(patch, lambda lens: (sum(lens) // len(lens),) * len(lens))


@mutant("a plan that is kept by lengths of keys", "api.kinds_in_turn", backend=UNITS)
def host_plan_kept_by_keys(patch: pytest.MonkeyPatch) -> None:
    """A step whose requests see as many keys as those of the step before gets its query rows, too."""
    plan, last = hosted.UnitsOnHost.plan_host, [HostLens((), (), True)]

    def kept(self: hosted.UnitsOnHost, lens: HostLens) -> None:
        if last[0].kv_lens != lens.kv_lens:
            last[0] = lens
        plan(self, replace(lens, query_lens=last[0].query_lens))

    patch.setattr(hosted.UnitsOnHost, "plan_host", kept)


@mutant("one workspace for wrappers of two sizes", *LAYERS, backend=UNITS, graph=True)
def layers_share_a_workspace(patch: pytest.MonkeyPatch) -> None:
    """Layers of other numbers of heads plan into one workspace, and all attend by the last one's plan."""
    make = Schedules._make

    def shared(self: Schedules, plan: Any, place: int, shape: LayerShape) -> Schedule:
        for known in list(self._workspaces.values()):
            self._workspaces.setdefault(shape, known)
        return make(self, plan, place, shape)

    patch.setattr(Schedules, "_make", shared)


def share_workspaces(patch: pytest.MonkeyPatch, which: Callable[[PhaseMemory | None], bool]) -> None:
    """Let the workspaces of one shape of layers lie in the same memory, whatever their sizes. which: of a phase (None:
    of an eager step), whether its own do.
    """
    of_kernel, kept = BackendMemory.of_kernel, dict[Hashable, Tensor]()

    def shared(self: BackendMemory, kernel: Kernel, extent: Extent, phase: Any, shape: LayerShape) -> Buffers:
        own = of_kernel(self, kernel, extent, phase, shape)
        if not which(phase):
            return own
        whole = {name: kept.setdefault((id(self), shape, name), t.new_zeros(4096)) for name, t in own.items()}
        return Buffers({name: whole[name][: t.numel()].view(t.shape) for name, t in own.items()}, extent)

    patch.setattr(BackendMemory, "of_kernel", shared)


@mutant("one workspace for phases of two sizes", "graph.planned_ahead", backend=UNITS, graph=True)
def phases_share_a_workspace(patch: pytest.MonkeyPatch) -> None:
    """Phases that are planned ahead plan into one workspace: the later plan lies over the earlier one."""
    share_workspaces(patch, lambda phase: phase is not None)


@mutant("one workspace for steps of two sizes", "api.kinds_in_turn", "api.keeps_no_state", backend=UNITS)
def steps_share_a_workspace(patch: pytest.MonkeyPatch) -> None:
    """Eager steps plan into one workspace: that of a step which is planned later lies over the earlier one."""
    share_workspaces(patch, lambda phase: phase is None)


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
