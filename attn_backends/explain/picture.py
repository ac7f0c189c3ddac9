"""The model of a picture: requests and their slots, rows with what they see beside what they must, and buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from attn_backends.explain.law import Owned, RowLaw, law_of, name_of, requests_of
from attn_backends.explain.probes import ROWS
from attn_backends.explain.reading import ForwardReading, Reader
from attn_backends.explain.stored import defined, faults_of
from attn_backends.explain.tables import Table, Wrong, table_of, tree_tables
from attn_backends.planning.metadata import WRITE_SLOTS, Metadata, parts_of
from spec_metadata import CacheGeometry, Step
from spec_metadata.static_inputs import closed
from spec_metadata.visibility import query_starts

TOLD = 6  # slots of a fault
Faults = tuple[list[str], list[str]]  # of seeing and of writing, in words


@dataclass(frozen=True)
class RowPicture:
    """A row of a forward. number: in the batch. law: what it must do; None for a padded row. seen, writes: what its
    kernel got, as in `ForwardReading`. seeing, writing: a description of what is wrong with either.
    """

    number: int
    name: str
    law: RowLaw | None
    seen: Mapping[int, Counter[int]]
    writes: int
    seeing: tuple[str, ...]
    writing: tuple[str, ...]

    @property
    def faults(self) -> tuple[str, ...]:
        """All that is wrong with it."""
        return self.seeing + self.writing

    @property
    def misses_last_key(self) -> bool:
        """Whether this is all that is wrong."""
        asked = self.law.sees[ROWS] if self.law else ()
        missing = Counter(asked) - self.seen[ROWS]
        return len(self.faults) == 1 and bool(asked) and missing == Counter(asked[-1:])


@dataclass(frozen=True)
class Picture:
    """A step as a backend's kernel got it.

    backend, kernel, planner, path: what made and read it. step: a description. geometry: of the cache. requests: the
    real ones. forwards: rows of each; none if a buffer holds what no kernel may read. buffers: the declared ones and
    the tree's. problems: values outside of what buffers declare. apart: tensors of plans in no declared buffer. stored:
    wrong values that only a store reads.
    """

    backend: str
    kernel: str
    planner: str
    path: str
    step: str
    geometry: CacheGeometry
    requests: tuple[Owned, ...]
    forwards: tuple[tuple[RowPicture, ...], ...]
    buffers: tuple[Table, ...]
    problems: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()

    @property
    def wrong_rows(self) -> list[tuple[int, RowPicture]]:
        """Wrong rows, with their forward."""
        return [(forward, row) for forward, rows in enumerate(self.forwards) for row in rows if row.faults]

    @property
    def misses_last_keys(self) -> bool:
        """Whether several rows miss their last key and nothing else is wrong."""
        return len(self.wrong_rows) > 1 and all(row.misses_last_key for _, row in self.wrong_rows)

    @property
    def is_right(self) -> bool:
        """Whether every row sees and writes what it must, and a store reads what it must."""
        return not (self.wrong_rows or self.problems or self.stored)

    @property
    def verdict(self) -> str:
        """A sentence with the result."""
        if self.problems:
            return "; ".join((*self.problems, *self.stored))
        if not self.wrong_rows:
            told = "every row sees and writes what it must"
            return f"{told}, but a store reads {'; '.join(self.stored)}" if self.stored else told
        total = sum(map(len, self.forwards))
        told = f"{len(self.wrong_rows)} of {total} rows {'is' if len(self.wrong_rows) == 1 else 'are'} wrong"
        if self.misses_last_keys:
            told += ": each misses its own last key, as where a length is one short"
        if self.apart:
            told += f"; its kernel reads {', '.join(self.apart)}, in no declared buffer: those may hold what is right"
        return told


def explain(given: Metadata | Reader, step: Step, ancestors: Sequence[Tensor] = ()) -> Picture:
    """The picture of metadata beside the step that it should describe.

    given: metadata that was planned for the step, or a reader of captured metadata that was made before the replay.
    step: what a worker asked for, without the padding of a graph. ancestors: of each forward of a draft of topk > 1,
    as `Metadata.at` takes them. Raises `ConfigError` for a cache that is too large for a picture.
    """
    reader = given if isinstance(given, Reader) else Reader(given)
    step = closed(step, reader.backend.capacity)
    problems, readings = _read(reader, ancestors)
    forwards = tuple(
        _rows(reader, step, forward, reading, ancestors[forward] if ancestors else None)
        for forward, reading in enumerate(readings)
    )
    backend, right = reader.backend, defined(reader, step)
    return Picture(
        backend=backend.name,
        kernel=backend.kernel_of(reader.meta.step.kind).name,
        planner=backend.planner.name,
        path=reader.path,
        step=_in_words(step),
        geometry=backend.geometry,
        requests=tuple(requests_of(step)),
        forwards=forwards,
        buffers=_tables(reader, readings, forwards, right),
        problems=problems,
        apart=_apart(reader.meta),
        stored=faults_of(reader, right),
    )


def _apart(meta: Metadata) -> tuple[str, ...]:
    """Tensors of plans, by name, that are views of no declared buffer, and of none of the step's own tensors."""
    own = {t.untyped_storage().data_ptr() for _, t in (*_tensors(meta.buffers), *_tensors(meta.step))}
    found = (each for plan in meta.plans for each in _tensors(plan, type(plan).__name__))
    return tuple(dict.fromkeys(name for name, t in found if t.untyped_storage().data_ptr() not in own))


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif is_dataclass(value) or isinstance(value, Mapping | tuple | list):
        for own, part in parts_of(value).items():
            yield from _tensors(part, f"{name}.{own}")


def _read(reader: Reader, ancestors: Sequence[Tensor]) -> tuple[tuple[str, ...], tuple[ForwardReading, ...]]:
    """What is wrong with the buffers as such, and if nothing is, what the kernel reads of them."""
    if problems := reader.problems():
        return tuple(problems), ()
    try:
        return (), reader.read(ancestors)
    except (IndexError, RuntimeError) as error:
        return (f"the kernel can't read its buffers: {error}",), ()


def _rows(
    reader: Reader, step: Step, forward: int, reading: ForwardReading, ancestors: Tensor | None
) -> tuple[RowPicture, ...]:
    layers = [probe.layer for probe in reader.probes]
    ratios = tuple(ratio for probe in reader.probes for ratio in probe.pools if ratio != ROWS)
    laws = law_of(step, forward, ancestors, layers[0].window, ratios)
    rows = []
    for number, (seen, writes) in enumerate(zip(reading.seen, reading.write_slots, strict=True)):
        law = laws[number] if number < len(laws) else None
        seeing, writing = _padded_faults(seen, writes, step) if law is None else _faults(seen, writes, law)
        name = "padding" if law is None else name_of(step, law)
        rows.append(RowPicture(number, name, law, seen, writes, tuple(seeing), tuple(writing)))
    return tuple(rows)


def _faults(seen: Mapping[int, Counter[int]], writes: int, law: RowLaw) -> Faults:
    """What a row of a real request sees and writes wrongly."""
    faults = []
    for ratio, slots in law.sees.items():
        what = "slot" if ratio == ROWS else f"entry of {ratio} tokens in slot"
        asked, got = Counter(slots), seen[ratio]
        if missing := asked - got:
            faults.append(f"does not see {what} {_listed(missing)}")
        if strange := [slot for slot in got if slot not in asked]:
            faults.append(f"sees {what} {_listed(strange)}, which it must not")
        if repeated := [slot for slot in got - asked if slot in asked]:
            faults.append(f"sees {what} {_listed(repeated)} more than once")
    return faults, [] if writes == law.writes else [f"writes slot {writes}, not {law.writes}"]


def _padded_faults(seen: Mapping[int, Counter[int]], writes: int, step: Step) -> Faults:
    """What a padded row sees and writes outside of the reserved page."""
    geometry, faults = step.paging.geometry, []
    where = f"outside of the reserved page {geometry.reserved_page}"
    for ratio, slots in seen.items():
        num_rows = geometry.page_size // max(ratio, 1)
        if outside := [slot for slot in slots if slot // num_rows != geometry.reserved_page]:
            faults.append(f"sees slot {_listed(outside)} {where}")
    is_inside = writes // geometry.page_size == geometry.reserved_page
    return faults, [] if is_inside else [f"writes slot {writes} {where}"]


def _listed(slots: Counter[int] | list[int]) -> str:
    """Slots in words, of many the first."""
    known = sorted(slots)
    return ", ".join(map(str, known[:TOLD])) + (f" and {len(known) - TOLD} more" if len(known) > TOLD else "")


def _tables(
    reader: Reader,
    readings: Sequence[ForwardReading],
    forwards: Sequence[Sequence[RowPicture]],
    right: Mapping[str, Tensor],
) -> tuple[Table, ...]:
    """Declared buffers: where rows write, and what they are read from, with the values of wrong rows marked, and those
    that differ from what is `right`, by the buffer's name.
    """
    meta, rows = reader.meta, [(forward, row) for forward, rows in enumerate(forwards) for row in rows]
    writing = {(forward, row.number) for forward, row in rows if row.writing}
    seeing = {(forward, row.number) for forward, row in rows if row.seeing}
    request_of = _request_of_rows(reader)
    requests = {(forward, request_of[number]) for forward, number in seeing if number in request_of}
    strange = {value for _, row in rows if row.seeing for value in _strange(row, reader.backend.geometry)}
    wrong = Wrong(seeing, requests, strange)
    extent = meta.buffers.extent
    tables = [table_of(WRITE_SLOTS, meta.buffers[WRITE_SLOTS.name], extent, Wrong(writing))]
    specs = reader.backend.buffers(meta.step.kind)
    tables += [table_of(spec, meta.buffers[spec.name], extent, wrong, right.get(spec.name)) for spec in specs]
    return (*tables, *tree_tables([reading.tree for reading in readings], wrong))


def _strange(row: RowPicture, geometry: CacheGeometry) -> Iterator[int]:
    """Slots that a row must not see, or sees too often, and their pages."""
    for ratio, got in row.seen.items():
        for slot in got - Counter(row.law.sees[ratio] if row.law else ()):
            page = slot // (geometry.page_size // max(ratio, 1))
            if row.law or page != geometry.reserved_page:
                yield from (slot, page)


def _request_of_rows(reader: Reader) -> dict[int, int]:
    """The request, real or padded, of each row of uniform or packed metadata."""
    starts = query_starts(reader.meta.step).tolist()
    return {row: request for request, ends in enumerate(pairwise(starts)) for row in range(*ends)}


def _in_words(step: Step) -> str:
    """A step as a person would say it."""
    lens = ", ".join(map(str, step.seq_lens.tolist()[: int(step.num_real)])) or "none"
    words = [str(step.kind).replace("_", " "), f"{int(step.num_real)} requests of {lens} committed tokens"]
    words.append(f"at most {step.width} query rows a request")
    if step.num_forwards > 1:
        words.append(f"{step.num_forwards} forwards")
    return ", ".join([*words, "a tree" if step.is_tree else "a chain"])
