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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from attn_backends.cache import CacheFormat, CacheInputs, PagedCache, check_cache
from attn_backends.capabilities import Capabilities
from attn_backends.errors import BackendUnavailableError, CaptureError, UnsupportedStepError
from attn_backends.kernels.torch_attention import tree_attention
from attn_backends.layer import AttentionLayer, AttentionOutput
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
    TreePart,
    copy_step,
    input_specs,
    misfit,
    static_step,
    tree_part,
    write_slots,
)
from spec_metadata.admission import check_capture_room, check_table_room, check_values
from spec_metadata.buffers import NUM_FORWARDS, NUM_TOKENS, out_of_range

Plan = TypeVar("Plan")

WRITE_SLOTS = BufferSpec("write_slots", torch.int64, (NUM_FORWARDS, NUM_TOKENS), "where the rows of a forward write")


@dataclass(frozen=True, slots=True)
class Kernel(Generic[Plan]):
    """One implementation of a backend's attention.

    launch: (q, cache, plan, layer) -> AttentionOutput of the dense part. capabilities: per step kind; a kind that is
    missing is not supported. unavailable_reasons: why it can't run on a device, empty if it can. architectures: major
    CUDA compute capabilities that it is built for, none if it runs on any device. source: what other kernels of the
    backend are further sources of, such as FlashAttention-3 from another package; its name if it stands alone.
    """

    name: str
    launch: Callable[[Tensor, PagedCache, Plan, AttentionLayer], AttentionOutput]
    capabilities: Mapping[StepKind, Capabilities]
    unavailable_reasons: Callable[[torch.device], list[str]]
    architectures: frozenset[int] = frozenset()
    source: str = ""

    def is_built_for(self, device: torch.device) -> bool:
        """Whether a device is of an architecture that it was built for, present or not."""
        if not self.architectures:
            return True
        if device.type != "cuda" or not torch.cuda.is_available():
            return False
        return torch.cuda.get_device_capability(device)[0] in self.architectures


@dataclass(frozen=True, slots=True, eq=False)
class ForwardMetadata(Generic[Plan]):
    """What one forward of a step needs.

    plan: the backend's own format. write_slots: [num_tokens] int64, dense. tree: the drafted tokens, None for a chain.
    kind: of the step.
    """

    plan: Plan
    write_slots: Tensor
    tree: TreePart | None
    kind: StepKind


@dataclass(frozen=True, slots=True, eq=False)
class Metadata(Generic[Plan]):
    """The metadata of a step: one plan per forward over named buffers. bucket: None if eager, else what it was captured
    for, and then step and buffers are static.
    """

    step: Step
    buffers: Buffers
    plans: tuple[Plan, ...]
    bucket: Bucket | None = None

    def at(self, forward: int = 0, ancestors: Tensor | None = None) -> ForwardMetadata[Plan]:
        """The metadata of one forward. ancestors: the paths of a draft of topk > 1 (`spec_metadata.tree_part`)."""
        forward = 0 if self.step.kind is StepKind.IDLE else forward
        return ForwardMetadata(
            plan=self.plans[forward],
            write_slots=self.buffers[WRITE_SLOTS.name][forward],
            tree=tree_part(self.step, forward, ancestors),
            kind=self.step.kind,
        )


class AttentionBackend(ABC, Generic[Plan]):
    """An attention backend bound to one engine's capacity, cache geometry and device.

    A subclass gives `name`, `formats`, `kernels` (best first), `buffers` and `plan`.

    capacity: the largest step. geometry: of the cache. kernel: a kernel's name, or "auto" for the first that runs on
    the device. checking: guard words around every buffer, ranges and step values checked on the device; reads it back,
    so it is for tests and debugging.
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
        kernel: str = "auto",
        checking: bool = False,
    ) -> None:
        self.capacity = capacity
        self.geometry = geometry
        self.device = torch.device(device)
        self.checking = checking
        self.kernel: Kernel[Plan] = self.choose_kernel(self.device, kernel)
        self._arenas: dict[tuple, Arena] = {}
        if capacity.page_size != geometry.page_size:
            raise UnsupportedStepError(
                self.name, [f"capacity says page size {capacity.page_size}, the cache {geometry.page_size}"]
            )

    @classmethod
    def choose_kernel(cls, device: torch.device, name: str = "auto") -> Kernel[Plan]:
        """The named kernel, or the first that runs on the device; raises with everyone's reasons."""
        known = {kernel.name: kernel for kernel in cls.kernels}
        if name != "auto" and name not in known:
            raise BackendUnavailableError(f"{cls.name} kernel {name!r}", ["unknown name"], f"It has {list(known)}.")
        rejected = []
        for kernel in cls.kernels if name == "auto" else (known[name],):
            reasons = kernel.unavailable_reasons(device)
            if not reasons:
                return kernel
            rejected += [f"{kernel.name}: {reason}" for reason in reasons]
        raise BackendUnavailableError(f"{cls.name} on {device}", rejected)

    @classmethod
    @abstractmethod
    def buffers(cls, kind: StepKind) -> tuple[BufferSpec, ...]:
        """The declared buffers of a step kind, one leading row per forward."""

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
        return Metadata(step, buffers, plans)

    def capture(self, bucket: Bucket, paging: Paging) -> Metadata[Plan]:
        """Static metadata of a bucket for a graph, every row padding. paging: the engine's table, read in place."""
        specs = (*input_specs(bucket, paging), WRITE_SLOTS, *self.buffers(bucket.kind))
        largest = Bucket(bucket.kind, self.capacity.max_bs, bucket.width, bucket.num_steps, bucket.tree)
        if bucket.bs > largest.bs:
            raise CaptureError(f"bucket ({bucket}) is larger than max_bs={largest.bs} of the capacity")
        key = (largest, type(paging))
        if key not in self._arenas:
            extent = Extent.of_bucket(largest, self.capacity, self.geometry.num_pages)
            self._arenas[key] = Arena(specs, extent, self.device, checking=self.checking)
        buffers = self._arenas[key].view(Extent.of_bucket(bucket, self.capacity, self.geometry.num_pages))
        check_capture_room(paging, self.capacity)
        step = static_step(bucket, paging, buffers)
        reasons = self.unsupported_reasons(step)
        if not reasons and not self.kernel.capabilities[bucket.kind].graph:
            reasons = [f"kernel {self.kernel.name} can't be captured"]
        if reasons:
            raise UnsupportedStepError(f"{self.name} can't capture ({bucket})", reasons)
        return Metadata(step, buffers, self._plan_all(step, buffers), bucket)

    def replay(self, meta: Metadata[Plan], step: Step) -> None:
        """Make captured metadata describe another step: copy its raw inputs, padded, and plan again."""
        self.copy_inputs(meta, step)
        self.refresh(meta)

    def copy_inputs(self, meta: Metadata[Plan], step: Step) -> None:
        """The first half of `replay`, for a graph that records `refresh` itself."""
        if meta.bucket is None:
            raise CaptureError("this metadata is eager; replay takes what capture() returned")
        reasons = misfit(meta.step, step)
        if reasons:
            raise UnsupportedStepError(f"a graph of {self.name}", reasons, "run the step eagerly")
        self._admit(step)
        copy_step(meta.step, step)

    def refresh(self, meta: Metadata[Plan]) -> None:
        """Plan captured metadata again from its static inputs. In checking mode it reads the device, so it can't be
        recorded then.
        """
        plans = self._plan_all(meta.step, meta.buffers)
        if self.checking:
            _check_frozen(meta.plans, plans)

    def store(self, inputs: CacheInputs, cache: PagedCache, meta: ForwardMetadata[Plan], layer: AttentionLayer) -> None:
        """Write the keys and values of this forward's rows to their slots."""
        self._check_layer(cache, meta, layer, cache.dtype)
        cache.store(inputs, meta.write_slots)

    def forward(
        self, q: Tensor, cache: PagedCache, meta: ForwardMetadata[Plan], layer: AttentionLayer
    ) -> AttentionOutput:
        """Attention of this forward's rows. q: [num_tokens, num_heads, head_dim]; absorbed MLA is (latent, rope)."""
        self._check_layer(cache, meta, layer, q.dtype)
        expected = (meta.write_slots.shape[0], layer.num_heads, layer.head_dim)
        if q.shape != expected:
            raise UnsupportedStepError(f"{self.name} layer {layer.id}", [f"q is {list(q.shape)}, not {list(expected)}"])
        if q.shape[0] == 0:
            return AttentionOutput(q.new_empty(0, layer.num_heads, layer.v_head_dim), q.new_empty(0, layer.num_heads))
        dense = self.kernel.launch(q, cache, meta.plan, layer)
        if meta.tree is None:
            return dense
        k, v = cache.read(meta.tree.slots)
        return AttentionOutput(*tree_attention(q, k, v, meta.tree.mask, dense.out, dense.lse, layer.scale))

    def unsupported_reasons(self, step: Step) -> list[str]:
        """Why this backend and kernel can't take a step; empty if it can. Reads no values on the device."""
        if step.kind is StepKind.IDLE:
            return []
        if step.kind not in self.kernel.capabilities:
            return [f"kernel {self.kernel.name} has no {step.kind} step"]
        reasons = self.kernel.capabilities[step.kind].step_reasons(step)
        if step.bs > self.capacity.max_bs:
            reasons.append(f"{step.bs} requests (the capacity says max_bs={self.capacity.max_bs})")
        if step.paging.geometry != self.geometry:
            reasons.append(f"a table over {step.paging.geometry} (the backend was built for {self.geometry})")
        if step.device.type != self.device.type:
            reasons.append(f"tensors on {step.device} (the backend was built for {self.device})")
        return reasons

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
            raise UnsupportedStepError(f"{self.name} ({self.kernel.name}) can't take a {step.kind} step", reasons)
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
            assert not problems, f"{self.name} planned outside its declaration: {problems}"
        return tuple(plans)

    def _check_layer(
        self, cache: PagedCache, meta: ForwardMetadata[Plan], layer: AttentionLayer, dtype: torch.dtype
    ) -> None:
        if cache.format not in self.formats:
            raise UnsupportedStepError(
                f"{self.name} layer {layer.id}", [f"a cache of {cache.format} (it takes {sorted(self.formats)})"]
            )
        check_cache(cache, self.geometry, layer)
        if meta.kind is StepKind.IDLE:
            return
        reasons = self.kernel.capabilities[meta.kind].layer_reasons(layer, dtype)
        if reasons:
            raise UnsupportedStepError(f"{self.name} ({self.kernel.name}) layer {layer.id}", reasons)


def _check_frozen(captured: Sequence[Any], planned: Sequence[Any]) -> None:
    """Refuse a plan of a graph that moved a tensor or changed a Python value since the capture: no kernel sees it."""
    for old, new in zip(captured, planned, strict=True):
        for field in fields(old) if is_dataclass(old) else ():
            before, after = getattr(old, field.name), getattr(new, field.name)
            if isinstance(before, Tensor):
                before, after = _place(before), _place(after)
            if before != after:
                raise CaptureError(
                    f"{type(old).__name__}.{field.name} was {before} at capture and is {after} now; a graph keeps what "
                    "it was captured with, so write into the declared buffers and take sizes from their extent"
                )


def _place(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
