"""Metadata of a step, and the part of it for one forward. Callers pass it on; a backend never keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, NoReturn

import torch
from torch import Tensor

from attn_backends.contract.definition import BackendDefinition
from attn_backends.contract.kernel import Plan, Schedules
from attn_backends.errors import CaptureError, PlanError, UnsupportedStepError
from attn_backends.graphs import is_capturing
from attn_backends.planning.captured import Captured
from spec_metadata import AnyBucket, Buffers, BufferSpec, InvalidStepError, Step, StepKind, TreePart, tree_part
from spec_metadata.admission import check_ancestors, check_kept, check_num_kept
from spec_metadata.buffers import NUM_FORWARDS, NUM_TOKENS, out_of_range
from spec_metadata.visibility import kept_rows

WRITE_SLOTS = BufferSpec("write_slots", torch.int64, (NUM_FORWARDS, NUM_TOKENS), "where the rows of a forward write")


@dataclass(frozen=True, slots=True, eq=False)
class ForwardMetadata(Generic[Plan]):
    """Metadata of one forward of a step.

    owner: the backend that planned it. schedules, forward: its plan of the forward, and the vendor's. write_slots:
    [num_tokens] int64, dense. tree: the drafted tokens, None for a chain. kind: of the step. captured: as of the step's
    metadata. kept: [num_rows] int64, the query rows that are stored, which write_slots are of; None for all of them,
    which attend, too. reads_alone: whether they attend and are not stored.
    """

    owner: BackendDefinition
    schedules: Schedules[Plan]
    forward: int
    write_slots: Tensor
    tree: TreePart | None
    kind: StepKind
    captured: Captured | None
    kept: Tensor | None = None
    reads_alone: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Metadata(Generic[Plan]):
    """The metadata of a step: one plan per forward over named buffers, and what the kernel's vendor makes of each.

    owner: the backend that planned it, and the only one that takes it. step: an eager tree step has its own drafted
    tokens. plans: views of the buffers, one a forward. write: launches the planning kernels; no host sync, so a graph
    may capture it. chains: the drafted tokens of each forward of a chain whose plans have the prefix alone. captured:
    the bucket and memory of captured metadata; None if eager. checking: whether `at` reads ancestors.
    """

    owner: BackendDefinition
    step: Step
    buffers: Buffers
    plans: tuple[Plan, ...]
    schedules: Schedules[Plan]
    write: Callable[[], None]
    chains: tuple[TreePart, ...] = ()
    captured: Captured | None = None
    checking: bool = False

    @property
    def bucket(self) -> AnyBucket | None:
        """The bucket that it was captured for; None if eager."""
        return None if self.captured is None else self.captured.bucket

    def reads_end(self) -> None:
        """Record the phase's "reads done" event: nothing launched later on the current stream reads captured metadata
        or its bound inputs. A host call that plans the phase again waits for the last event of each stream; a graph
        that plans it does not. The event does not cover a table that phases share: plan other requests on it after the
        graphs of all these phases. Does nothing for eager metadata, which is never planned again. Raises `CaptureError`
        in a capture.
        """
        if self.captured is not None:
            self.captured.phase.reads.end()

    def wait_for_reads(self) -> None:
        """Have the current stream wait for the event of `reads_end`, if there is one: before it overwrites bound
        inputs, or replays a graph that plans the phase.
        """
        if self.captured is not None:
            self.captured.phase.reads.wait()

    def at(self, forward: int = 0, ancestors: Tensor | None = None) -> ForwardMetadata[Plan]:
        """The metadata of one forward, counted from 0; of an idle step, any number. ancestors: the paths of a draft of
        topk > 1 (`spec_metadata.tree_part`); their values are checked in checking mode, outside of a capture. Refuses
        captured metadata that another bucket of its phase has overwritten.
        """
        if self.captured is not None:
            self.captured.check_phase()
        forward = 0 if self.step.kind is StepKind.IDLE else forward
        if not 0 <= forward < self.step.num_forwards:
            raise InvalidStepError(f"forward {forward} of a {self.step.kind} step that plans {self.step.num_forwards}")
        tree = self.chains[forward] if self.chains else tree_part(self.step, forward, ancestors)
        if self.checking and tree is not None and ancestors is not None and not is_capturing():
            check_ancestors(self.step, ancestors)
        return ForwardMetadata(
            owner=self.owner,
            schedules=self.schedules,
            forward=forward,
            write_slots=self.buffers[WRITE_SLOTS.name][forward],
            tree=tree,
            kind=self.step.kind,
            captured=self.captured,
            reads_alone=self.step.reads_alone,
        )

    def keeping(self, num_kept: Tensor, num_rows: int | None = None) -> ForwardMetadata[Plan]:
        """The metadata to store the first rows of each request by, without attention: of a draft's context the tokens
        that were accepted. `store` takes their keys and values packed, those of the step's rows `kept` in this order,
        of which the ones after the last go to the reserved page.

        num_kept: [bs] int32 or int64, on the device; of padded requests anything. num_rows: bound on the sum of real
        ones, all rows of the step for None. Device only and recordable; counts beyond the step's width are clamped and
        rows beyond the bound left out, or in checking mode refused, outside of a capture. Refuses a step whose rows are
        not positions one after the other.
        """
        step = self.step
        check_kept(step, num_kept)
        forward, num_rows = self.at(), step.num_tokens if num_rows is None else min(num_rows, step.num_tokens)
        if self.checking and not is_capturing():
            check_num_kept(step, num_kept, num_rows)
        found = kept_rows(step, forward.write_slots, num_kept, num_rows)
        return replace(forward, write_slots=found.slots, kept=found.rows)

    def reading(self, forward: int = 0, ancestors: Tensor | None = None) -> ForwardMetadata[Plan]:
        """The metadata to attend by, without a store, in a cache that another model filled: what rows see is there
        already, their own tokens too. All forwards of a `Step.frozen_draft` share it, in a graph of decodes. Arguments
        as of `at`.
        """
        return replace(self.at(forward, ancestors), reads_alone=True)


def slots_to_write(backend: BackendDefinition, meta: ForwardMetadata) -> Tensor:
    """[num_rows] int64, where the rows of a forward are stored; refuses metadata of those that read alone."""
    if meta.reads_alone:
        reason = "metadata of rows that read alone: the cache is another model's"
        raise UnsupportedStepError(f"{backend.name} can't store", [reason], "pass meta.at(i)")
    return meta.write_slots


def all_rows(backend: BackendDefinition, meta: ForwardMetadata) -> int:
    """Query rows of a forward; refuses metadata of those that are kept, which does not say what they see."""
    if meta.kept is not None:
        reason = "metadata of kept rows, which are stored alone, in a layer without compressed entries"
        raise UnsupportedStepError(backend.name, [reason], "pass meta.at(i)")
    return meta.write_slots.shape[0]


def refuse_metadata(backend: BackendDefinition, meta: Metadata) -> NoReturn:
    """Refuse what is not the metadata of a step, or was planned by another backend."""
    if not isinstance(meta, Metadata):
        reason = f"a {type(meta).__name__} where a step's metadata belongs"
        raise UnsupportedStepError(backend.name, [reason], "pass what capture() returned")
    _refuse_owner(backend, meta.owner, meta.step.kind)


def _refuse_owner(backend: BackendDefinition, owner: BackendDefinition, kind: StepKind) -> NoReturn:
    """Refuse metadata that another backend planned: also one of the same class has tables and memory of its own."""
    mine, its = backend.capacity, owner.capacity
    sizes = f"max_bs={its.max_bs} and max_context={its.max_context} (here {mine.max_bs} and {mine.max_context})"
    reason = f"metadata of a {kind} step that another {owner.name} planned, for {sizes}"
    raise UnsupportedStepError(backend.name, [reason], "plan the step with the backend that attends")


def check_forward(backend: BackendDefinition, meta: ForwardMetadata) -> None:
    """Refuse what is not the metadata of one forward, was planned by another backend, or is stale."""
    if not isinstance(meta, ForwardMetadata):
        reason = f"a {type(meta).__name__} where one forward's metadata belongs"
        raise UnsupportedStepError(backend.name, [reason], "pass meta.at(i)")
    if meta.owner is not backend:
        _refuse_owner(backend, meta.owner, meta.kind)
    if meta.captured is not None:
        meta.captured.check_phase()


def check_ranges(meta: Metadata[Any], specs: Iterable[BufferSpec]) -> None:
    """Refuse values outside of what a backend declares of its buffers; reads the device: checking mode only."""
    if problems := out_of_range(specs, meta.buffers):
        raise PlanError(f"{meta.owner.name} planned outside its declaration: {'; '.join(problems)}")


def own_drafted(step: Step, write_slots: Tensor) -> Step:
    """An eager step with its own copy of the drafted tokens: forwards read them by slot, when a worker may have
    overwritten its buffers for the next step. write_slots: [num_forwards, num_tokens] int64, the metadata's.
    """
    if step.kind is StepKind.DRAFT_DECODE:
        given = step.out_cache_loc is not None
        return replace(step, out_cache_loc=step.flat_slots().to(torch.int64, copy=given))
    if step.tree_mask is None:
        return step
    return replace(step, out_cache_loc=write_slots[0], tree_mask=step.tree_mask.clone())


def check_frozen(captured: Sequence[Any], planned: Sequence[Any]) -> None:
    """Refuse plans of a graph that would be of other tensors or Python values now: no kernel would see these."""
    for old, new in zip(captured, planned, strict=True):
        before, after = ({name: _frozen(part) for name, part in parts_of(plan).items()} for plan in (old, new))
        for name in {**before, **after}:
            if before.get(name) != after.get(name):
                raise CaptureError(
                    f"{type(old).__name__}.{name} was {before.get(name)} at capture and is {after.get(name)} now; a "
                    "graph keeps what it was captured with, so write into the declared buffers and take sizes from "
                    "their extent"
                )


def _frozen(value: Any) -> Any:
    """What a graph keeps of a value: of a tensor its place, of a record or collection what it keeps of each part."""
    if isinstance(value, Tensor):
        return value.data_ptr(), tuple(value.shape), value.stride()
    if is_dataclass(value) or isinstance(value, (Mapping, tuple, list)):
        return {name: _frozen(part) for name, part in parts_of(value).items()}
    return value


def parts_of(value: Any) -> Mapping[Any, Any]:
    """The parts of a record or collection by name or place; anything else is its own only part."""
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, (tuple, list)):
        return dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    return value if isinstance(value, Mapping) else {"value": value}
