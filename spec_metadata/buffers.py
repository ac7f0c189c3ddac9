"""Declared buffers (rule R3): every metadata tensor is declared once, and the declaration does the rest.

A `BufferSpec` says what a buffer is: name, dtype, size as an expression of an `Extent`, pad value, valid range,
producer, and what a kernel may read past the live end. The declaration allocates the buffer, checks it, and prints
itself. An `Arena` holds one allocation at the largest extent of a phase; smaller buckets are prefix views of it with
the same strides and addresses, so a graph captured on any bucket stays valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from math import prod
from typing import NoReturn

import torch
from torch import Tensor

from spec_metadata.capacity import Extent
from spec_metadata.errors import InvalidStepError


@dataclass(frozen=True, slots=True)
class Dim:
    """A size: a number or an expression of an extent that can print itself, such as `bs * width + 1`.

    Those of a step: BS, WIDTH, NUM_TOKENS, NUM_FORWARDS, NUM_WRITES, MAX_PAGES, NUM_PAGES, MAX_KV_LEN, ONE. They take
    `*` with another and `+` with a number.
    """

    text: str
    of: Callable[[Extent], int]

    def __str__(self) -> str:
        return self.text

    def __mul__(self, other: Dim) -> Dim:
        return Dim(f"{self.text} * {other.text}", lambda e: self.of(e) * other.of(e))

    def __add__(self, other: int) -> Dim:
        return Dim(f"{self.text} + {other}", lambda e: self.of(e) + other)


BS = Dim("bs", lambda e: e.bs)
WIDTH = Dim("width", lambda e: e.width)
NUM_TOKENS = Dim("num_tokens", lambda e: e.num_tokens)
NUM_FORWARDS = Dim("num_forwards", lambda e: e.num_forwards)
NUM_WRITES = Dim("num_writes", lambda e: e.num_writes)
MAX_PAGES = Dim("max_pages", lambda e: e.max_pages)
NUM_PAGES = Dim("num_pages", lambda e: e.num_pages)
MAX_KV_LEN = Dim("max_kv_len", lambda e: e.max_kv_len)
ONE = Dim("1", lambda e: 1)
NOTHING = Dim("0", lambda e: 0)


class Producer(StrEnum):
    """The writer of a buffer: recordable device code, or a host half that can't be part of a graph (rule R9)."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """The declaration of one buffer.

    shape: sizes, outermost first. doc: what an element is. pad: value of elements that no request owns; also the
    contents after allocation. low, high: the valid range of a device value, `high` exclusive and an expression (None:
    unchecked). over_read: number of elements past a row's live end that a kernel may load; the planner writes `pad`
    there. Later elements of a format's own buffers are undefined, except those that its `specified` names. shared:
    whether all phases of the same requests hold the same values, whatever their lengths. Planners then write nothing
    after what rows see, because another phase may see more.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[Dim, ...]
    doc: str
    pad: int = 0
    low: int | None = None
    high: Dim | None = None
    producer: Producer = Producer.DEVICE
    over_read: Dim = NOTHING
    shared: bool = False

    def sizes(self, extent: Extent) -> tuple[int, ...]:
        """The shape at an extent, in elements."""
        return tuple(dim.of(extent) for dim in self.shape)

    def num_bytes(self, extent: Extent) -> int:
        """Bytes at an extent."""
        return int(torch.Size(self.sizes(extent)).numel()) * self.dtype.itemsize

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        over_read = "" if self.over_read is NOTHING else f"; over-read: {self.over_read}"
        return f"{self.name} [{shape}] {str(self.dtype).removeprefix('torch.')}, {self.producer}: {self.doc}{over_read}"


class Buffers(dict[str, Tensor]):
    """Named tensors that follow a declaration, at an extent; a plan writes into them."""

    def __init__(self, tensors: Mapping[str, Tensor], extent: Extent) -> None:
        super().__init__(tensors)
        self.extent = extent

    def __setitem__(self, name: str, tensor: Tensor) -> NoReturn:
        raise TypeError(f"write into the buffer, which a graph reads: buffers[{name!r}].copy_(...)")


GUARD_ELEMENTS = 32  # words before and after each buffer in checking mode


def _guard_word(dtype: torch.dtype) -> int:
    return {torch.bool: 1, torch.uint8: 0xA5}.get(dtype, 0x5AFE)


def _pad_byte(spec: BufferSpec) -> int | None:
    """The byte that padding consists of; None where bytes of an element differ."""
    return {0: 0, -1: 0xFF}.get(spec.pad) if spec.pad == 0 or spec.dtype in (torch.int32, torch.int64) else None


ALIGNMENT = 256  # bytes, as torch aligns what it allocates at the least


def aligned(num_bytes: int) -> int:
    """num_bytes rounded up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Layout:
    """Offsets of declared buffers in one allocation at one extent. Steps of that extent have fresh buffers made by it.

    guard: words before and after each buffer. num_bytes: of the allocation, each buffer aligned, guard words included.
    """

    def __init__(self, specs: Iterable[BufferSpec], extent: Extent, *, guard: int = 0) -> None:
        self.specs, self.extent, self.guard = tuple(specs), extent, guard
        names = [spec.name for spec in self.specs]
        if len(set(names)) != len(names):
            raise InvalidStepError(f"two declared buffers share a name: {sorted(names)}")
        self.num_bytes = 0
        self._views: list[tuple[str, torch.dtype, int, tuple[int, ...], tuple[int, ...], int]] = []
        places = []
        alike = sorted(self.specs, key=lambda spec: str(_pad_byte(spec)))
        for spec in alike:
            start, sizes, size = self.num_bytes, spec.sizes(extent), spec.dtype.itemsize
            end = start + spec.num_bytes(extent) + 2 * guard * size
            places.append((start, end))
            self._views.append((spec.name, spec.dtype, size, sizes, _strides(sizes), start // size + guard))
            self.num_bytes = aligned(end)
        self._dtypes = {spec.dtype for spec in self.specs}
        self._fills = [] if guard else list(_joint_fills(alike, places))
        self._not_zeros = [fill for fill in self._fills if fill[1]]

    def fresh(self, device: torch.device) -> Buffers:
        """Buffers of the extent, filled with padding. Most is zeros, which the allocation is made of."""
        memory = torch.zeros(self.num_bytes // 4, dtype=torch.int32, device=device)  # the type that most buffers have
        views = self.views(memory)
        for place, value in self._not_zeros:
            _part(memory, views, place).fill_(value)
        return Buffers(views, self.extent)

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The buffers, by name, in a memory of num_bytes: 1-D, of any dtype."""
        begin, own = memory.storage_offset() * memory.itemsize, memory.dtype
        typed = {dtype: memory if dtype is own else memory.view(dtype) for dtype in self._dtypes}
        return {
            name: typed[dtype].as_strided(sizes, strides, begin // size + first)
            for name, dtype, size, sizes, strides, first in self._views
        }

    def guarded(self, memory: Tensor) -> dict[str, Tensor]:
        """The buffers with the guard words around them, 1-D. memory: as of `views`."""
        views, more = self.views(memory), self.guard
        return {
            name: each.as_strided((each.numel() + 2 * more,), (1,), each.storage_offset() - more)
            for name, each in views.items()
        }

    def fill(self, memory: Tensor, views: Mapping[str, Tensor]) -> None:
        """Write padding, and guard words around it. memory, views: as of `views` and from it."""
        if self.guard:
            for storage in self.guarded(memory).values():
                storage.fill_(_guard_word(storage.dtype))
            for spec in self.specs:
                views[spec.name].fill_(spec.pad)
        for place, value in self._fills:
            _part(memory, views, place).fill_(value)


def _part(memory: Tensor, views: Mapping[str, Tensor], place: slice | str) -> Tensor:
    return memory.view(torch.uint8)[place] if isinstance(place, slice) else views[place]


def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def _joint_fills(specs: Sequence[BufferSpec], places: Sequence[tuple[int, int]]) -> Iterator[tuple[slice | str, int]]:
    """One fill of bytes for all whose padding is of one byte, a launch less for each; the others by name."""
    for byte, group in groupby(zip(specs, places, strict=True), lambda each: _pad_byte(each[0])):
        members = list(group)
        if byte is None:
            yield from ((spec.name, spec.pad) for spec, _ in members)
        else:
            yield slice(members[0][1][0], members[-1][1][1]), byte


def allocation_size(specs: Iterable[BufferSpec], extent: Extent, *, checking: bool = False) -> int:
    """Bytes that an `Arena` takes."""
    return Layout(specs, extent, guard=GUARD_ELEMENTS * checking).num_bytes


class Arena:
    """One allocation of declared buffers at the largest extent; buckets are prefix views of it.

    checking: surround every buffer with guard words, which `check_guards` compares. memory: [num_bytes] uint8 to lie
    in, `allocation_size` of them (None: its own).
    """

    def __init__(
        self,
        specs: Iterable[BufferSpec],
        largest: Extent,
        device: torch.device,
        *,
        checking: bool = False,
        memory: Tensor | None = None,
    ) -> None:
        self._layout = layout = Layout(specs, largest, guard=GUARD_ELEMENTS * checking)
        self._memory = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device) if memory is None else memory
        self.specs, self.largest, self._full = layout.specs, largest, layout.views(self._memory)
        self.reset()

    def reset(self) -> None:
        """Make the contents those of a fresh arena: pad values, and the guard words around them."""
        self._layout.fill(self._memory, self._full)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers, guard words left out."""
        return sum(t.numel() * t.element_size() for t in self._full.values())

    def view(self, extent: Extent) -> Buffers:
        """Prefix views at a smaller extent, at the same addresses and strides."""
        views = {}
        for spec in self.specs:
            sizes, full = spec.sizes(extent), self._full[spec.name]
            if any(size > most for size, most in zip(sizes, full.shape, strict=True)):
                raise InvalidStepError(
                    f"buffer {spec.name} [{', '.join(map(str, spec.shape))}] needs {sizes} but was allocated "
                    f"{tuple(full.shape)}: the step is larger than the declared capacity"
                )
            views[spec.name] = full if full.shape == sizes else full[tuple(slice(0, size) for size in sizes)]
        return Buffers(views, extent)

    def check_guards(self) -> list[str]:
        """Names of the buffers whose guard words were overwritten (reads the device: checking mode only)."""
        broken, guard = [], self._layout.guard
        for name, storage in self._layout.guarded(self._memory).items():
            word = _guard_word(storage.dtype)
            edges = torch.cat((storage[:guard], storage[storage.numel() - guard :]))
            if not bool((edges == word).all()):
                broken.append(name)
        return broken


def allocate(specs: Iterable[BufferSpec], extent: Extent, device: torch.device) -> Buffers:
    """Fresh buffers of exactly one extent."""
    return Layout(specs, extent).fresh(device)


def out_of_range(specs: Iterable[BufferSpec], buffers: Buffers) -> list[str]:
    """Descriptions of buffers with a value outside their declared range (reads the device: checking mode only)."""
    problems = []
    for spec in specs:
        if spec.high is None or buffers[spec.name].numel() == 0:
            continue
        low, high = spec.low or 0, spec.high.of(buffers.extent)
        least, most = int(buffers[spec.name].min()), int(buffers[spec.name].max())
        if least < low or most >= high:
            problems.append(f"{spec.name} holds [{least}, {most}], declared [{low}, {high})")
    return problems
