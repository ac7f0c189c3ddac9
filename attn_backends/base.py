"""The contract of an attention backend, and the metadata interface that follows from it.

A backend declares its buffers and turns a step into metadata in one function, `plan` (rule R1). Eager, capture and
replay all run it and differ only in the destination:

    meta = backend.init_forward_metadata(step)      # eager: fresh buffers
    meta = backend.capture(bucket, paging)          # static buffers with safe contents
    backend.replay(meta, step)                      # copies the raw inputs, then refresh(meta)
    backend.refresh(meta)                           # device only and recordable: may be a graph's first node instead
    backend.store(inputs, cache, meta.at(i), layer)
    out = backend.forward(q, cache, meta.at(i), layer)

Metadata is returned and passed in (rule R7); a backend keeps only its arenas.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from attn_backends.cache import CacheFormat, CacheInputs, PagedCache, check_cache
from attn_backends.capabilities import extras_reasons, listed
from attn_backends.errors import CaptureError, PlanError, UnsupportedStepError
from attn_backends.graphs import is_capturing
from attn_backends.kernel import Kernel, LayerShape, Schedules
from attn_backends.kernels.operators import MAX_TREE_KEYS, tree_join
from attn_backends.layer import AttentionLayer, AttentionOutput
from attn_backends.metadata import WRITE_SLOTS, ForwardMetadata, Metadata, check_frozen
from attn_backends.selection import Workload, choose_kernels
from spec_metadata import (
    Arena,
    Bucket,
    Buffers,
    BufferSpec,
    CacheGeometry,
    Capacity,
    Extent,
    Paging,
    Step,
    StepKind,
    TokenBucket,
    copy_step,
    input_specs,
    misfit,
    static_step,
    write_slots,
)
from spec_metadata.admission import check_capture_room, check_table_room, check_values
from spec_metadata.buffers import out_of_range
from spec_metadata.visibility import HostLens, host_lens

Plan = TypeVar("Plan")


class AttentionBackend(ABC, Generic[Plan]):
    """An attention backend bound to one engine's capacity, cache geometry and device.

    A subclass gives `name`, `formats`, `kernels` (best first), `buffers` and `plan`.

    capacity: the largest step. geometry: of the cache. kernel: "auto" for the best one of each step kind; a kernel's
    name to run every kind that it has, the others as "auto"; or a name for each kind, and then there are no others.
    workload: what "auto" shall suit beside the geometry. checking: guard words around plans and static buffers,
    ranges and step values checked on the device; reads it back, so it is for tests and debugging.
    """

    name: ClassVar[str]
    formats: ClassVar[frozenset[CacheFormat]]
    kernels: ClassVar[tuple[Kernel, ...]]

    def __init__(
        self,
        capacity: Capacity,
        geometry: CacheGeometry,
        device: torch.device | str = "cpu",
        *,
        kernel: str | Mapping[StepKind, str] = "auto",
        workload: Workload | None = None,
        checking: bool = False,
    ) -> None:
        self.capacity = capacity
        self.geometry = geometry
        self.device = torch.device(device)
        self.checking = checking
        workload = replace(workload or Workload(geometry.page_size), capacity=capacity)
        self.choices = choose_kernels(self.name, self.kernels, kernel, self.device, workload)
        self._arenas: dict[tuple, Arena] = {}
        self._scratch: dict[str, Arena] = {}
        if capacity.page_size != geometry.page_size:
            raise UnsupportedStepError(
                self.name, [f"capacity says page size {capacity.page_size}, the cache {geometry.page_size}"]
            )

    def kernel_of(self, kind: StepKind) -> Kernel[Plan]:
        """The kernel of a step kind that the backend has; of an idle step, which launches none, any."""
        choice = next(iter(self.choices.values())) if kind is StepKind.IDLE else self.choices[kind]
        return choice.kernel

    @classmethod
    @abstractmethod
    def buffers(cls, kind: StepKind) -> tuple[BufferSpec, ...]:
        """The declared buffers of a step kind, one leading row per forward."""

    @classmethod
    def page_multiple(cls) -> int:
        """What every page size must be a multiple of, in tokens, whatever the kernel."""
        return 1

    @abstractmethod
    def plan(self, step: Step, forward: int, buffers: Buffers) -> Plan:
        """Write the metadata of one forward into buffers and return it. Device only, fixed shapes, no host reads."""

    def init_forward_metadata(self, step: Step) -> Metadata[Plan]:
        """Metadata of an eager step, in fresh buffers."""
        self._admit(step)
        extent = step.extent(self.capacity)
        arena = Arena((WRITE_SLOTS, *self.buffers(step.kind)), extent, self.device, checking=self.checking)
        buffers = arena.view(extent)
        plans = self._plan_all(step, buffers)
        self._check_guards([arena])
        lens = self._host_lens(step, step.bs)
        return Metadata(step, buffers, plans, self._schedules(step.kind, plans, lens, extent))

    def capture(self, bucket: Bucket | TokenBucket, paging: Paging) -> Metadata[Plan]:
        """Static metadata of a bucket for a graph, every row padding. paging: the engine's table, read in place."""
        if bucket.bs > self.capacity.max_bs:
            raise CaptureError(f"bucket ({bucket}) is larger than max_bs={self.capacity.max_bs} of the capacity")
        check_capture_room(paging, self.capacity)
        specs = (*input_specs(bucket, paging), WRITE_SLOTS, *self.buffers(bucket.kind))
        buffers = self._static_buffers(specs, bucket, type(paging))
        step = static_step(bucket, paging, buffers)
        reasons = self.unsupported_reasons(step) or self.capture_reasons(bucket)
        if reasons:
            raise UnsupportedStepError(f"{self.name} can't capture ({bucket})", reasons)
        plans = self._plan_all(step, buffers)
        lens = self._host_lens(replace(step, seq_lens_cpu=()), step.bs)
        schedules = self._schedules(bucket.kind, plans, lens, buffers.extent, (bucket, type(paging)))
        return Metadata(step, buffers, plans, schedules, bucket)

    def replay(self, meta: Metadata[Plan], step: Step) -> None:
        """Make captured metadata describe another step: copy its raw inputs, padded, and plan again."""
        self.copy_inputs(meta, step)
        self.refresh(meta)

    def copy_inputs(self, meta: Metadata[Plan], step: Step) -> None:
        """The first half of `replay`, for a graph that records `refresh` itself: raw inputs, and the host's plans."""
        if meta.bucket is None:
            raise CaptureError("this metadata is eager; replay takes what capture() returned")
        reasons = misfit(meta.step, step)
        if reasons:
            raise UnsupportedStepError(f"a graph of {self.name}", reasons, "run the step eagerly")
        self._admit(step)
        lens = self._host_lens(replace(meta.step, seq_lens_cpu=step.seq_lens_cpu), meta.step.bs)
        copy_step(meta.step, step)
        if lens is not None:
            meta.schedules.plan_host(lens)

    def refresh(self, meta: Metadata[Plan]) -> None:
        """Plan captured metadata again from its static inputs. In checking mode it reads the device, so it can't be
        recorded then.
        """
        plans = self._plan_all(meta.step, meta.buffers)
        meta.schedules.refresh()
        if self.checking:
            check_frozen(meta.plans, plans)

    def store(self, inputs: CacheInputs, cache: PagedCache, meta: ForwardMetadata[Plan], layer: AttentionLayer) -> None:
        """Write the keys and values of this forward's rows to their slots."""
        self._check_layer(cache, meta, layer, inputs.dtype)
        cache.store(inputs, meta.write_slots, layer.k_scale, layer.v_scale)

    def forward(
        self, q: Tensor, cache: PagedCache, meta: ForwardMetadata[Plan], layer: AttentionLayer
    ) -> AttentionOutput:
        """Attention of this forward's rows. q: [num_tokens, num_heads, head_dim]; absorbed MLA is (latent, rope)."""
        self._check_layer(cache, meta, layer, q.dtype)
        expected = (meta.write_slots.shape[0], layer.num_heads, layer.head_dim)
        if q.shape != expected:
            raise UnsupportedStepError(f"{self.name} layer {layer.id}", [f"q is {list(q.shape)}, not {list(expected)}"])
        if q.shape[0] == 0:
            lse_dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
            empty = q.new_empty(0, layer.num_heads, layer.v_head_dim)
            return AttentionOutput(empty, empty.new_empty(empty.shape[:2], dtype=lse_dtype))
        planned = meta.schedules.planned(meta.forward, LayerShape.of(layer, q.dtype, cache.dtype))
        dense: AttentionOutput = self.kernel_of(meta.kind).launch(q, cache, planned, layer)
        if meta.tree is None:
            return dense
        scales = (layer.scale, layer.k_scale, layer.v_scale)
        return AttentionOutput(*tree_join(q, *cache.pages, meta.tree.slots, meta.tree.mask, *dense, *scales))

    def unsupported_reasons(self, step: Step) -> list[str]:
        """Why this backend and kernel can't take a step; empty if it can. Reads no values on the device."""
        if step.kind is StepKind.IDLE:
            return []
        if step.kind not in self.choices:
            able = [kernel.name for kernel in self.kernels if step.kind in kernel.capabilities]
            return [f"no kernel for {step.kind} was asked for ({', '.join(able) or 'none'} has it)"]
        reasons = self.kernel_of(step.kind).capabilities[step.kind].step_reasons(step)
        num_keys = step.width * step.num_steps
        if step.is_tree and self.device.type == "cuda" and num_keys > MAX_TREE_KEYS:
            reasons.append(f"a draft tree of {num_keys} tokens a request (on a GPU at most {MAX_TREE_KEYS})")
        if step.max_real > self.capacity.max_bs:
            reasons.append(f"{step.max_real} requests (the capacity says max_bs={self.capacity.max_bs})")
        if step.paging.geometry != self.geometry:
            reasons.append(f"a table over {step.paging.geometry} (the backend was built for {self.geometry})")
        if step.device.type != self.device.type:
            reasons.append(f"tensors on {step.device} (the backend was built for {self.device})")
        return reasons

    def capture_reasons(self, bucket: Bucket | TokenBucket) -> list[str]:
        """Why the kernel of a bucket's kind can't be captured in it; empty if it can."""
        kernel = self.kernel_of(bucket.kind)
        reasons = kernel.capabilities[bucket.kind].capture_reasons(bucket)
        return [f"kernel {kernel.name} {reason}" for reason in reasons]

    def check_buffers(self) -> None:
        """In checking mode: raise if anybody wrote next to a static buffer."""
        self._check_guards(self._arenas.values())

    def _check_guards(self, arenas: Iterable[Arena]) -> None:
        broken = [name for arena in arenas for name in arena.check_guards()] if self.checking else []
        if broken:
            raise CaptureError(f"{self.name}: guard words next to {broken} were overwritten")

    def _admit(self, step: Step) -> None:
        reasons = self.unsupported_reasons(step)
        if reasons:
            kernel = f" ({self.kernel_of(step.kind).name})" if step.kind in self.choices else ""
            raise UnsupportedStepError(f"{self.name}{kernel} can't take a {step.kind} step", reasons)
        check_table_room(step, self.capacity)
        if self.checking:
            check_values(step, self.capacity)

    def _plan_all(self, step: Step, buffers: Buffers) -> tuple[Plan, ...]:
        plans = []
        for forward in range(step.num_forwards):
            buffers[WRITE_SLOTS.name][forward].copy_(write_slots(step, forward))
            plans.append(self.plan(step, forward, buffers))
        if self.checking:
            problems = out_of_range(self.buffers(step.kind), buffers)
            if problems:
                raise PlanError(f"{self.name} planned outside its declaration: {'; '.join(problems)}")
        return tuple(plans)

    def _host_lens(self, step: Step, bs: int) -> tuple[HostLens, ...] | None:
        """What the kernel's host half needs, None if it has none."""
        if step.kind is StepKind.IDLE:
            return None
        kernel = self.kernel_of(step.kind)
        if not kernel.capabilities[step.kind].needs_host_lens:
            return None
        if is_capturing():
            raise CaptureError(f"{self.name} ({kernel.name}) plans {step.kind} on the host: do that before the capture")
        if step.seq_lens_cpu is None:
            raise UnsupportedStepError(
                f"{self.name} ({kernel.name}) can't take a {step.kind} step",
                ["it plans on the host and needs exact lengths there"],
                "pass seq_lens_cpu to the step, or choose a kernel without needs_host_lens",
            )
        return tuple(host_lens(step, bs, forward) for forward in range(step.num_forwards))

    def _schedules(
        self,
        kind: StepKind,
        plans: tuple[Plan, ...],
        lens: tuple[HostLens, ...] | None,
        extent: Extent,
        captured: tuple[Bucket | TokenBucket, type] | None = None,
    ) -> Schedules[Plan]:
        """The schedules of a metadata. captured: of which bucket and paging, None for an eager one."""
        kernel = self.kernel_of(kind)

        def allocate(shape: LayerShape) -> Buffers:
            if captured is None:
                own = Arena(kernel.workspaces, extent, self.device).view(extent)
            else:
                own = self._static_buffers(kernel.workspaces, *captured, shape)
            if kernel.name not in self._scratch:
                self._scratch[kernel.name] = Arena(kernel.scratch, extent, self.device)
            return Buffers({**own, **self._scratch[kernel.name].view(extent)}, extent)

        return Schedules(kernel, plans, lens, allocate)

    def _static_buffers(
        self,
        specs: tuple[BufferSpec, ...],
        bucket: Bucket | TokenBucket,
        paging: type,
        shape: LayerShape | None = None,
    ) -> Buffers:
        """A bucket's view of the arena that it shares: all of a uniform kind one, each number of packed rows its own,
        because of these there is no largest.
        """
        largest = replace(bucket, bs=self.capacity.max_bs)
        key = (largest, paging, shape)
        if key not in self._arenas:
            extent = Extent.of_bucket(largest, self.capacity, self.geometry.num_pages)
            try:
                self._arenas[key] = Arena(specs, extent, self.device, checking=self.checking)
            except torch.OutOfMemoryError as error:
                needed = sum(spec.num_bytes(extent) for spec in specs)
                raise CaptureError(
                    f"{self.name}: static buffers for ({largest}) need {needed:,} bytes, more than the device "
                    "has; lower max_bs or max_context, or run these steps eagerly"
                ) from error
        return self._arenas[key].view(Extent.of_bucket(bucket, self.capacity, self.geometry.num_pages))

    def _check_layer(
        self,
        cache: PagedCache,
        meta: ForwardMetadata[Plan],
        layer: AttentionLayer,
        dtype: torch.dtype,
    ) -> None:
        """Refuse metadata, a cache or a layer. dtype: of queries, or of rows to store."""
        self._check_metadata(meta)
        if cache.format not in self.formats:
            raise UnsupportedStepError(
                f"{self.name} layer {layer.id}", [f"a cache of {cache.format} (it takes {listed(self.formats)})"]
            )
        check_cache(cache, self.geometry, layer)
        if meta.kind is StepKind.IDLE:
            return
        kernel = self.kernel_of(meta.kind)
        reasons = kernel.capabilities[meta.kind].layer_reasons(layer, dtype, cache.dtype)
        reasons += extras_reasons(layer, cache.format, meta.tree is not None)
        if reasons:
            raise UnsupportedStepError(f"{self.name} ({kernel.name}) layer {layer.id}", reasons)

    def _check_metadata(self, meta: ForwardMetadata[Plan]) -> None:
        """Refuse what is not the metadata of one forward, or what another backend planned."""
        if not isinstance(meta, ForwardMetadata):
            raise UnsupportedStepError(
                self.name, [f"a {type(meta).__name__} where one forward's metadata belongs"], "pass meta.at(i)"
            )
        chosen = self.choices.get(meta.kind)
        if meta.kind is not StepKind.IDLE and (chosen is None or chosen.kernel is not meta.schedules.kernel):
            raise UnsupportedStepError(
                self.name,
                [f"metadata of a {meta.kind} step that another backend planned, for its {meta.schedules.kernel.name}"],
                "plan the step with the backend that attends",
            )
