"""What each row of a step sees and where it writes, as sets of slots; plain numpy, with no code of the library.

A set is a pair: how many slots, and the sum of a random 64-bit number for each of them, modulo 2^64. Two sets that are
equal in both are the same but for a chance of 2^-64, so that thousands of rows are compared at once. The slots of the
reserved page have the number 0: a padded row sees and writes nothing else exactly if its sum is 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Sums = NDArray[np.uint64]
Bools = NDArray[np.bool_]

OUTSIDE = np.uint64(0x9E3779B97F4A7C15)  # what a slot counts that the cache does not have


@dataclass(eq=False)
class Truth:
    """Who owns which slots. owned: [num_rows, num_positions], the slot of each token position of each request; row
    `reserved_row` walks the reserved page round and round. spare: slots of nobody, which drafted tokens may take.
    """

    owned: Ints
    spare: Ints
    page_size: int
    num_pages: int
    reserved_page: int
    reserved_row: int
    floor: Ints  # [num_rows] tokens of a prefix that a request shares with another one, and never writes
    rng: np.random.Generator = field(repr=False)

    @cached_property
    def numbers(self) -> Sums:
        """[num_slots + 1] the random number of each slot; the last stands for slots outside the cache."""
        numbers = self.rng.integers(1, 2**63, self.num_pages * self.page_size + 1).astype(np.uint64)
        numbers[self.reserved_page * self.page_size : (self.reserved_page + 1) * self.page_size] = 0
        numbers[-1] = OUTSIDE
        return numbers

    @cached_property
    def prefixes(self) -> Sums:
        """[num_rows, num_positions + 1] the sum of each request's leading tokens."""
        return prefix_sums(self.numbers[self.owned])

    def sums(self, slots: Ints) -> Sums:
        """The number of each slot, whatever it holds."""
        return lookup(self.numbers, slots)


@dataclass(eq=False)
class Group:
    """Steps of one layout and size, one behind the other in all fields; `number` of them.

    kind: as `steps.KINDS`. bs, width, num_tokens: padded, of one step. num_real: [number] real requests, 0 for an idle
    step. requests, lens, widths: [number, bs] rows of `owned`, committed tokens and query rows; padding is behind.
    slots: [number, num_writes] what is written, of packed rows one after the other. mask: [number, bs, width, width]
    of a tree. ancestors: of a drafted tree, [number, bs, topk, forward + 1] for each forward.
    """

    kind: str
    bs: int
    width: int
    num_steps: int
    num_tokens: int
    is_packed: bool
    is_tree: bool
    num_real: Ints
    requests: Ints
    lens: Ints
    widths: Ints
    slots: Ints
    mask: Bools | None = None
    ancestors: tuple[Ints, ...] = ()

    @property
    def number(self) -> int:
        """Steps."""
        return len(self.num_real)

    def take(self, places: Ints) -> Group:
        """Some of the steps."""
        arrays = {each.name: getattr(self, each.name) for each in fields(self)}
        taken = {name: each[places] for name, each in arrays.items() if isinstance(each, np.ndarray)}
        return replace(self, **taken, ancestors=tuple(each[places] for each in self.ancestors))

    @property
    def num_forwards(self) -> int:
        """Forwards of each step."""
        return self.num_steps - 1 if self.kind == "draft" else 1

    @cached_property
    def starts(self) -> Ints:
        """[number, bs + 1] first query row of each request, of real ones."""
        return np.pad(self.widths.cumsum(1), ((0, 0), (1, 0)))

    @cached_property
    def owner(self) -> Ints:
        """[number, num_tokens] the place of the request of each row; of padded rows, of any."""
        rows = np.arange(self.num_tokens)
        if not self.is_packed:
            return np.broadcast_to(rows // self.width, (self.number, self.num_tokens))
        places = (rows[None, :, None] >= self.starts[:, None, 1:]).sum(2)
        return places.clip(max=self.bs - 1)

    @cached_property
    def is_real(self) -> Bools:
        """[number, num_tokens] rows of real requests."""
        return np.arange(self.num_tokens) < np.take_along_axis(self.starts, self.num_real[:, None], 1)

    def of_rows(self, per_request: Ints) -> Ints:
        """[number, num_tokens] of [number, bs]."""
        return np.take_along_axis(per_request, self.owner, 1)

    @cached_property
    def depth(self) -> Ints:
        """[number, num_tokens] number of a row in its request."""
        return np.arange(self.num_tokens) - self.of_rows(self.starts[:, :-1])

    def first(self, forward: int) -> Ints:
        """[number, num_tokens] position of the first row of a row's request in a chain."""
        return self.of_rows(self.lens) + forward

    def position(self, forward: int) -> Ints:
        """[number, num_tokens] position of each row of a chain."""
        return self.first(forward) + self.depth


@dataclass(eq=False)
class Rows:
    """What the rows of a forward see, and the slots that they write. All [number, num_tokens]."""

    count: Ints
    sums: Sums
    writes: Ints


def expected(truth: Truth, group: Group, forward: int) -> Rows:
    """What the rows of a forward must see and write; of padded rows, anything."""
    request, lens = group.of_rows(group.requests), group.of_rows(group.lens)
    writes = group.slots
    if group.kind == "draft":
        per_step = group.slots.reshape(group.number, group.bs * group.width, group.num_steps)
        writes = per_step[:, :, forward]
    if not group.is_tree:
        count = group.position(forward) + 1 if group.kind != "block" else lens + group.width
        return Rows(count, truth.prefixes[request, count.clip(max=truth.owned.shape[1])], writes)
    seen, slots = drafted(group, forward)
    tree_sums = np.where(seen, truth.sums(slots), np.uint64(0)).sum(2, dtype=np.uint64)
    return Rows(lens + seen.sum(2), truth.prefixes[request, lens] + tree_sums, writes)


def drafted(group: Group, forward: int) -> tuple[Bools, Ints]:
    """The drafted tokens of each row of a tree: which it sees, and their slots, both [number, num_tokens, num_keys]."""
    number, bs, width = group.number, group.bs, group.width
    if group.kind == "verify":
        assert group.mask is not None
        slots = np.repeat(group.slots.reshape(number, bs, width), width, 1)
        return group.mask.reshape(number, bs * width, width), slots
    path = group.ancestors[forward].reshape(number, bs * width, forward + 1)
    at = group.owner[..., None] * width * group.num_steps + path * group.num_steps + np.arange(forward + 1)
    slots = np.take_along_axis(group.slots, at.reshape(number, -1), 1).reshape(path.shape)
    return np.ones_like(path, dtype=bool), slots


def visible_slots(truth: Truth, group: Group, forward: int, step: int) -> list[Ints]:
    """The slots that each real row of one step sees, spelled out."""
    seen, slots = drafted(group, forward) if group.is_tree else (None, None)
    rows = []
    for row in range(int(group.is_real[step].sum())):
        place = group.owner[step, row]
        owned = truth.owned[group.requests[step, place]]
        if seen is None or slots is None:
            is_block = group.kind == "block"
            rows.append(
                owned[: group.lens[step, place] + group.width if is_block else group.position(forward)[step, row] + 1]
            )
        else:
            rows.append(np.concatenate((owned[: group.lens[step, place]], slots[step, row][seen[step, row]])))
    return rows


def lookup(numbers: Sums, at: Ints) -> Sums:
    """numbers[at], and the last of them for what lies outside."""
    last = len(numbers) - 1
    return numbers[np.where((at >= 0) & (at < last), at, last)]


def prefix_sums(numbers: Sums) -> Sums:
    """[..., n + 1] sums of the leading elements of [..., n]."""
    return np.pad(numbers.cumsum(-1, dtype=np.uint64), [*((0, 0),) * (numbers.ndim - 1), (1, 0)])
