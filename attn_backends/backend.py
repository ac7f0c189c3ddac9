"""The interface that engines call: metadata, stores and forwards, derived from a backend's definition.

Eager, capture and replay all run the one `write` of the definition (rule R1) and differ only in the destination:

    meta = backend.init_forward_metadata(step)      # eager: fresh buffers
    meta = backend.capture(bucket, paging, inputs)  # static buffers; inputs: an engine's own, else safe contents
    backend.replay(meta, step)                      # copies the raw inputs, then refresh(meta)
    backend.refresh(meta)                           # device only and recordable: may be a graph's first node instead
    backend.store(inputs, cache, meta.at(i), layer)
    out = backend.forward(q, cache, meta.at(i), layer)

Metadata is returned and passed in (rule R7); a backend keeps only its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from attn_backends.cache import CacheInputs, PagedCache, check_cache
from attn_backends.contract.capabilities import listed
from attn_backends.contract.checked_layers import CheckedLayers, Use
from attn_backends.contract.definition import BackendDefinition
from attn_backends.contract.kernel import Kernel, LayerShape, Plan, Schedules
from attn_backends.errors import CaptureError, UnsupportedStepError
from attn_backends.kernels.kept_plans import MOST_KEPT, KeptPlans
from attn_backends.kernels.operators import MAX_TREE_KEYS, tree_join
from attn_backends.layer import AttentionLayer, AttentionOutput, LatentQuery, joined, query_reasons
from attn_backends.memory.phase_sets import PhaseSet
from attn_backends.memory.phases import BackendMemory
from attn_backends.memory.static_memory import StaticMemory
from attn_backends.planning.captured import Captured
from attn_backends.planning.metadata import (
    WRITE_SLOTS,
    ForwardMetadata,
    Metadata,
    all_rows,
    check_forward,
    check_frozen,
    check_ranges,
    own_drafted,
    refuse_metadata,
    slots_to_write,
)
from attn_backends.planning.planners import Alike, bind_inputs, bind_torch, choose_planner
from attn_backends.selection.choose import Workload, choose_kernels, missing_reason
from spec_metadata import (
    AnyBucket,
    BoundInputs,
    Buffers,
    BufferSpec,
    CacheGeometry,
    Capacity,
    Paging,
    Step,
    StepKind,
    UniformQuery,
    input_specs,
    misfit,
    static_step,
)
from spec_metadata.admission import check_capture, check_table_room, check_values, is_on, most_committed
from spec_metadata.bound_inputs import BoundStep, check_bound
from spec_metadata.layout import check_is_step
from spec_metadata.static_inputs import closed, padding_step
from spec_metadata.visibility import HostLens, chain_parts


class AttentionBackend(BackendDefinition[Plan]):
    """An attention backend bound to one engine's capacity, cache geometry and device.

    A backend derives from it and defines what `BackendDefinition` lists; all else is here.

    capacity: the largest step. geometry: of the cache. kernel: "auto" for the best one of each step kind; a kernel's
    name for every kind that it has, the others as "auto"; or a name for each kind to support. workload: layers and
    dtypes that "auto" must support (default: the geometry only). planner: "torch", the definition; "fused", one launch
    a phase; or "auto" for that where it runs. memory: tables that captured phases share, one for all backends of a
    worker (None: its own). phases: its buffers. checking: tests' and debuggers' mode, which reads the device back
    (docs/adapters.md).
    """

    def __init__(
        self,
        capacity: Capacity,
        geometry: CacheGeometry,
        device: torch.device | str = "cpu",
        *,
        kernel: str | Mapping[StepKind, str] = "auto",
        workload: Workload | None = None,
        planner: str = "auto",
        memory: StaticMemory | None = None,
        checking: bool = False,
    ) -> None:
        self.capacity, self.geometry = capacity, geometry
        self.device, self.checking = torch.device(device), checking
        workload = replace(workload or Workload(geometry.page_size), capacity=capacity)
        self.choices = choose_kernels(self.name, self.kernels, kernel, self.device, workload)
        self.planner = choose_planner(self.name, planner, self.device, has_fused=self.has_fused())
        self.memory = memory or StaticMemory()
        place = capacity, geometry, self.device, self._static_specs, tuple(self.choices), self.memory, checking
        self.phases, self._layers = BackendMemory(self.name, *place), CheckedLayers()
        self._alike, self._kept = lru_cache(MOST_KEPT)(lambda *layout: Alike()), KeptPlans()
        if capacity.page_size != geometry.page_size:
            reason = f"capacity says page size {capacity.page_size}, the cache {geometry.page_size}"
            raise UnsupportedStepError(self.name, [reason])

    def kernel_of(self, kind: StepKind) -> Kernel[Plan]:
        """The kernel of a step kind that the backend has; of an idle step, which launches none, any."""
        return (next(iter(self.choices.values())) if kind is StepKind.IDLE else self.choices[kind]).kernel

    def init_forward_metadata(self, step: Step) -> Metadata[Plan]:
        """Metadata of an eager step, in fresh buffers. Raises `UnsupportedStepError` for what is not declared, and
        `InvalidStepError` for what is no step or too long for its table or the capacity.
        """
        check_is_step(step)
        like = self._admit(step)
        step = closed(step, self.capacity)
        specs = (WRITE_SLOTS, *self.buffers(step.kind))
        buffers = self.phases.fresh(step.kind, specs, step.extent(self.capacity))
        return self._metadata(step, buffers, self._kept.bind(step, buffers, self._bind, like))

    def capture(
        self,
        bucket: AnyBucket,
        paging: Paging,
        inputs: BoundInputs | None = None,
        within: PhaseSet | None = None,
        layers: Iterable[LayerShape] = (),
    ) -> Metadata[Plan]:
        """Static metadata of a bucket for a graph. paging: the engine's table, read in place.

        Every row is padding until `replay` copies a step. inputs: buffers of the engine's own that `refresh` reads
        instead, with the rows or pages of `paging`, so that a graph that begins with it needs no replay. Phases stay
        planned side by side, those that read one table in place for the same requests; buckets of a phase take turns.
        within: a set of phases that takes turns with others, as a whole (`PhaseSets`). layers: shapes to plan schedules
        for at once; others are refused. Where none is named, a shape is planned for once a layer of it attends. Raises
        as `init_forward_metadata` does, and `CaptureError` for more requests than the capacity's.
        """
        check_capture(bucket, paging, self.capacity)
        check_bound(inputs, bucket, paging, self.capacity)
        padding = padding_step(replace(bucket, bs=1), paging, self.capacity)
        reasons = self.unsupported_reasons(padding) or self.capture_reasons(bucket)
        if reasons := reasons or (self.kernel_of(bucket.kind).bound_reasons(bucket.kind) if inputs else []):
            raise UnsupportedStepError(f"{self.name} can't capture ({bucket})", reasons)
        phase = self.phases.phase(bucket, paging, bound=inputs is not None, within=within)
        phase.reads.wait()
        phase.take(None)  # until all is written, which may fail; memory of a set is alive before
        buffers = phase.view(self.phases.extent(bucket))
        step = static_step(bucket, paging, buffers)
        bound = None if inputs is None else BoundStep(step, inputs, paging, self.capacity)
        captured = Captured(bucket, step, self.capacity, phase, paging.table, bind_inputs(self.planner, step), bound)
        meta = self._metadata(step, buffers, self._bind(step, buffers, bound), captured)
        captured.take_phase()
        meta.schedules.name(layers)
        return meta

    def replay(self, meta: Metadata[Plan], step: Step) -> None:
        """Make captured metadata describe another step: copy its raw inputs, padded, and plan again. step: of the
        caller's own tensors, no view of the static inputs (`meta.step`), which are overwritten. Raises as
        `init_forward_metadata` does, for steps of other buckets too, and `CaptureError` for eager or bound metadata.
        """
        self.copy_inputs(meta, step)
        self.refresh(meta)

    def copy_inputs(self, meta: Metadata[Plan], step: Step) -> None:
        """Copy a step's inputs and run host planners: half of `replay`, for a graph that records `refresh`."""
        if not isinstance(meta, Metadata) or meta.owner is not self:
            refuse_metadata(self, meta)
        if (captured := meta.captured) is None:
            raise CaptureError("this metadata is eager; replay takes what capture() returned")
        if captured.phase.reads.ended:
            captured.phase.reads.wait()
        if not isinstance(step, Step) or self.checking or meta.schedules.needs_lens or not captured.load(step):
            self._copy_anew(meta, captured, step)

    def _copy_anew(self, meta: Metadata[Plan], captured: Captured, step: Step) -> None:
        """Copy a step that is to be checked, or that the host plans for."""
        check_is_step(step)
        if not captured.admits(step) or self.checking:
            if reasons := misfit(meta.step, step):
                raise UnsupportedStepError(f"a graph of {self.name}", reasons, "run the step eagerly")
            self._admit(step)
            captured.admit(step)
        known = replace(meta.step, seq_lens_cpu=()) if step.kind is StepKind.IDLE else step
        lens = self._host_lens(known, meta.step.bs) if meta.schedules.needs_lens else None
        captured.phase.take(None)  # until all is written, which may fail
        if self.checking:
            self.phases.check()
            captured.phase.reset()
        captured.copy_inputs(step)
        if lens is not None:
            meta.schedules.plan_host(lens)
        captured.take_phase()

    def refresh(self, meta: Metadata[Plan]) -> None:
        """Plan captured metadata again from its static inputs, or the engine's buffers if it is bound to those. In
        checking mode it reads the device, so it can't be recorded then.
        """
        if not isinstance(meta, Metadata) or meta.owner is not self:
            refuse_metadata(self, meta)
        if (captured := meta.captured) is not None:
            if captured.bound is not None:
                captured.phase.reads.wait()
            captured.begin()
            captured.phase.planned = None  # until all is written, which may fail
        meta.write()
        meta.schedules.refresh()
        if self.checking:
            if captured is not None:
                captured.check_bound()
            check_ranges(meta, self.buffers(meta.step.kind))
            check_frozen(meta.plans, self.plans(meta.step, meta.buffers))
        if captured is not None:
            captured.phase.planned = captured

    def store(self, inputs: CacheInputs, cache: PagedCache, meta: ForwardMetadata[Plan], layer: AttentionLayer) -> None:
        """Write the keys and values of this forward's rows to their slots. Raises as `forward` does."""
        self._shape_of(cache, meta, layer, inputs.dtype)
        cache.store(inputs, slots_to_write(self, meta), layer.k_scale, layer.v_scale)

    def forward(
        self, q: Tensor | LatentQuery, cache: PagedCache, meta: ForwardMetadata[Plan], layer: AttentionLayer
    ) -> AttentionOutput:
        """Attention of this forward's rows, in the shapes of `AttentionOutput`. q: [num_tokens, num_heads, head_dim],
        or a `LatentQuery`. Raises `UnsupportedStepError` for what is not declared, `CaptureError` for stale metadata.
        """
        shape = self._shape_of(cache, meta, layer, q.dtype)
        if reasons := query_reasons(q, all_rows(self, meta), layer):
            raise UnsupportedStepError(f"{self.name} layer {layer.id}", reasons)
        if q.shape[0] == 0:
            return AttentionOutput.of_no_rows(joined(q), layer.v_head_dim)
        planned = meta.schedules.planned(meta.forward, shape)
        kernel, tree = self.kernel_of(meta.kind), meta.tree
        if tree is None:
            return kernel.attend(q if kernel.takes_parts else joined(q), cache, planned, layer)
        q = joined(q)
        # The join of the tree counts the sinks, once.
        dense = kernel.attend(q, cache, planned, layer if layer.sinks is None else replace(layer, sinks=None))
        mask, scales = tree.within(layer.window), (layer.scale, layer.k_scale, layer.v_scale)
        return AttentionOutput(*tree_join(q, *cache.pages, tree.slots, mask, *dense, *scales, layer.sinks))

    def unsupported_reasons(self, step: Step) -> list[str]:
        """Reasons why this backend and kernel can't take a step; empty if it can. Reads no values on the device."""
        if step.kind is StepKind.IDLE:
            return []
        if step.kind not in self.choices:
            return [missing_reason(step.kind, self.kernels)]
        reasons = self.kernel_of(step.kind).capabilities[step.kind].step_reasons(step)
        num_keys = step.width * step.num_steps
        if step.is_tree and self.device.type == "cuda" and num_keys > MAX_TREE_KEYS:
            reasons.append(f"a draft tree of {num_keys} tokens per request (on a GPU at most {MAX_TREE_KEYS})")
        if step.max_real > self.capacity.max_bs:
            reasons.append(f"{step.max_real} requests (the capacity says max_bs={self.capacity.max_bs})")
        if step.paging.geometry != self.geometry:
            reasons.append(f"a table over {step.paging.geometry} (the backend was built for {self.geometry})")
        if not is_on(step, self.device):
            reasons.append(f"tensors on {step.device} (the backend was built for {self.device})")
        return reasons

    def capture_reasons(self, bucket: AnyBucket) -> list[str]:
        """Reasons why the kernel of a bucket's kind can't be captured in it; empty if it can."""
        kernel = self.kernel_of(bucket.kind)
        reasons = kernel.capabilities[bucket.kind].capture_reasons(bucket)
        return [f"kernel {kernel.name} {reason}" for reason in reasons]

    def static_bytes(self, paging: Paging) -> dict[str, dict[str, int]]:
        """Bytes of static buffers, by phase and name (`BackendMemory.sizes`). paging: a table of the engine's form."""
        return self.phases.sizes(paging)

    def _admit(self, step: Step) -> Alike | None:
        """What is known of eager steps like this one, of packed rows nothing. Refuses a step that can't be taken. One
        that is no longer than was found to fit is not checked again.
        """
        if self.checking or not isinstance(step.query, UniformQuery):
            self._check_step(step)
            return None
        table, is_known = step.paging.table, step.seq_lens_cpu is not None or step.max_committed is not None
        alike = self._alike(step.layout, table.shape, table.stride(), table.dtype, is_known)
        if step.longest(self.capacity) > alike.most:
            self._check_step(step)
            alike.most = most_committed(step, self.capacity)
        return alike

    def _check_step(self, step: Step) -> None:
        if reasons := self.unsupported_reasons(step):
            kernel = f" ({self.kernel_of(step.kind).name})" if step.kind in self.choices else ""
            raise UnsupportedStepError(f"{self.name}{kernel} can't take a {step.kind} step", reasons)
        check_table_room(step, self.capacity)
        if self.checking:
            check_values(step, self.capacity)

    def _bind(self, step: Step, buffers: Buffers, bound: BoundStep | None) -> Callable[[], None]:
        """What plans a step by the backend's planner."""
        place = step, buffers, bound
        return self.bind_fused(*place) if self.planner.is_fused else bind_torch(self.write, *place)

    def _metadata(
        self, step: Step, buffers: Buffers, write: Callable[[], None], captured: Captured | None = None
    ) -> Metadata[Plan]:
        """Write a step's metadata for the first time."""
        known = replace(step, seq_lens_cpu=()) if captured else step  # no request of a fresh capture is real
        write()
        if captured is None and step.is_tree:
            step = own_drafted(step, buffers[WRITE_SLOTS.name])
        plans, lens, kernel = self.plans(step, buffers), self._host_lens(known, step.bs), self.kernel_of(step.kind)
        phase = None if captured is None else captured.phase
        allocate = partial(self.phases.of_kernel, kernel, buffers.extent, phase)
        schedules = Schedules(kernel, plans, lens, allocate, write if captured else None)
        chains = chain_parts(step, None if captured else buffers[WRITE_SLOTS.name]) if self.prefix_only else ()
        meta = Metadata(self, step, buffers, plans, schedules, write, chains, captured, self.checking)
        if self.checking:
            self.phases.check()
            check_ranges(meta, self.buffers(meta.step.kind))
        return meta

    def _host_lens(self, step: Step, bs: int) -> tuple[HostLens, ...] | None:
        forwards = (None,) if self.prefix_only else range(step.num_forwards)
        return self.kernel_of(step.kind).host_lens(self.name, step, bs, forwards)

    def _static_specs(self, bucket: AnyBucket, paging: Paging) -> tuple[BufferSpec, ...]:
        return (*input_specs(bucket, paging), WRITE_SLOTS, *self.buffers(bucket.kind))

    def _shape_of(
        self, cache: PagedCache, meta: ForwardMetadata[Plan], layer: AttentionLayer, dtype: torch.dtype
    ) -> LayerShape:
        """The shape of a layer, checked with every new cache and use. dtype: of queries, or of rows to store."""
        check_forward(self, meta)
        use = Use(meta.kind, dtype, meta.tree is not None)
        if shape := self._layers.shape_of(layer, cache, use):
            return shape
        self._check_layer(cache, meta, layer, dtype)
        return self._layers.take(layer, cache, use, LayerShape.of(layer, dtype, cache.dtype))

    def _check_layer(
        self, cache: PagedCache, meta: ForwardMetadata[Plan], layer: AttentionLayer, dtype: torch.dtype
    ) -> None:
        """Refuse a cache or a layer. dtype: of queries, or of rows to store."""
        if cache.format not in self.formats:
            reason = f"a cache of {cache.format} (it takes {listed(self.formats)})"
            raise UnsupportedStepError(f"{self.name} layer {layer.id}", [reason])
        check_cache(cache, self.geometry, layer)
        if meta.kind is StepKind.IDLE:
            return
        kernel, place = self.kernel_of(meta.kind), (dtype, cache.dtype, cache.format)
        if reasons := kernel.layer_reasons(meta.kind, layer, *place, is_tree=meta.tree is not None):
            raise UnsupportedStepError(f"{self.name} ({kernel.name}) layer {layer.id}", reasons)
