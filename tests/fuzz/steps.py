"""Worlds, and random legal steps in them. What is legal is written down here again, from the documents.

A world is an engine's configuration with some captured slots; a chunk of it is a sequence of steps while the table of
the engine's requests stays as it is. `SIZES` is the distribution that all sizes are drawn from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tests.fuzz.model import Bools, Group, Ints, Truth

BACKENDS = ("flashinfer_mla", "trtllm_mla", "fa3", "reference", "dsv4")
PLANNERS = ("torch", "fused")
PATHS = ("eager", "replay")
CELLS = [(b, p, w) for b in BACKENDS for p in PLANNERS for w in PATHS if (b, p) != ("reference", "fused")]
KINDS = ("prefill", "decode", "draft", "block", "verify", "ragged verify", "extend", "packed extend", "ragged extend")
RAGGED = ("ragged verify", "ragged extend")

SIZES = {  # name: what is drawn, and how often
    "batch": ([(1, 1), (2, 2), (3, 5), (6, 9), (10, 17), (18, 33)], [0.2, 0.2, 0.3, 0.15, 0.1, 0.05]),
    "pages of a request": ([(1, 2), (3, 5), (6, 8)], [0.4, 0.4, 0.2]),
    "topk and steps": (
        [(1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (2, 3), (3, 3), (4, 3)],
        [0.05, 0.1, 0.25, 0.1, 0.2, 0.15, 0.1, 0.05],
    ),
    "context": (["none", "page end", "full", "any"], [0.1, 0.25, 0.25, 0.4]),
}  # fmt: skip
PAGE_SIZES = {"trtllm_mla": (32, 64), "dsv4": (8, 16, 24, 128, 256)}
ANY_PAGE_SIZE = (1, 2, 3, 4, 8, 16, 32, 64)
MIN_CONTEXT = 24  # tokens at the least that a request of the smallest pages may have
ATTENDED_WORLDS, ATTENDED_STEPS = 0.25, 8  # a share of the worlds is attended, at most so many steps of each chunk


@dataclass(frozen=True)
class World:
    """An engine. The fields are those of `Capacity` and `CacheGeometry`, and: num_rows of its table, the reserved one
    among them; row_tokens of each; is_block_table: the form of its tables; attends: whether kernels run on the plans.
    """

    backend: str
    planner: str
    path: str
    max_bs: int
    max_context: int
    page_size: int
    topk: int
    num_steps: int
    num_draft_tokens: int
    num_rerun: int
    num_pages: int
    reserved_page: int
    reserved_row: int
    num_rows: int
    row_tokens: int
    is_block_table: bool
    attends: bool

    @property
    def extend_width(self) -> int:
        """Rows of a uniform draft extend."""
        return self.num_rerun + min(self.num_steps + 1, self.num_draft_tokens)

    @property
    def draft_room(self) -> int:
        """Tokens that are written past the committed ones."""
        return max(self.num_draft_tokens, self.topk * self.num_steps, self.extend_width - 1)

    @property
    def max_pages(self) -> int:
        """Pages of a request."""
        return -(-(self.max_context + self.draft_room) // self.page_size)


@dataclass(eq=False)
class Drawn:
    """Steps of one layout as a worker would hand them over.

    columns: pages of a row of the block tables. tables: [number, bs, columns]. max_committed, gives_lens: what the host
    says. gives_slots: whether write slots are named. wide: the tensors that are int64, by name. is_strided: tensors
    have strides. order: [number] place of each step in its chunk. room: [number, bs * width] of a ragged step, the
    slots that its requests have for the longest, which it is handed.
    """

    group: Group
    tables: Ints
    max_committed: int | None
    gives_lens: bool
    gives_slots: bool
    wide: frozenset[str]
    is_strided: bool
    order: Ints
    room: Ints | None = None


def draw(rng: np.random.Generator, name: str) -> tuple[int, int] | str:
    """One of `SIZES`."""
    choices, weights = SIZES[name]
    return choices[rng.choice(len(choices), p=weights)]


def between(rng: np.random.Generator, name: str) -> int:
    """A whole number of a range of `SIZES`."""
    low, high = draw(rng, name)
    return int(rng.integers(low, high + 1))


def world(rng: np.random.Generator, backend: str, planner: str, path: str) -> World:
    """A random world."""
    page_size = int(rng.choice(PAGE_SIZES.get(backend, ANY_PAGE_SIZE)))
    topk, num_steps = draw(rng, "topk and steps")
    topk, num_rerun = (1, 0) if backend == "dsv4" else (topk, int(rng.choice((0, 0, 2))))
    most_nodes = 1 + topk + (num_steps - 1) * topk**2
    num_draft_tokens = int(rng.integers(2, most_nodes + 1))
    tokens = max(between(rng, "pages of a request") * page_size, MIN_CONTEXT)
    attends, max_bs = bool(rng.random() < ATTENDED_WORLDS), between(rng, "batch")
    max_bs = min(max_bs, 8) if attends else max_bs
    num_rows = max_bs + 2 + int(rng.integers(0, 8))
    made = World(
        backend, planner, path, max_bs, 1, page_size, topk, num_steps, num_draft_tokens, num_rerun,
        1, 0, int(rng.integers(0, num_rows)), num_rows, 0, bool(rng.random() < 0.5), attends,
    )  # fmt: skip
    made = replace(made, max_context=max(tokens - made.draft_room + int(rng.choice((0, 0, -1, 1, -3))), 8))
    exact, rounded = made.max_context + made.draft_room, made.max_pages * page_size
    row_tokens = (exact, rounded, rounded + int(rng.integers(1, 2 * page_size + 1)))[rng.integers(0, 3)]
    num_pages = num_rows * -(-max(row_tokens, rounded) // page_size) + made.max_bs * 4 + int(rng.integers(0, 5))
    return replace(made, row_tokens=row_tokens, num_pages=num_pages, reserved_page=int(rng.integers(0, num_pages)))


def truth(rng: np.random.Generator, world: World) -> Truth:
    """Random owners of all pages; some requests share whole leading pages with the one before."""
    page_size, columns = (
        world.page_size,
        -(-max(world.row_tokens, world.max_pages * world.page_size) // world.page_size),
    )
    free = rng.permutation(np.delete(np.arange(world.num_pages), world.reserved_page))
    pages = free[: world.num_rows * columns].reshape(world.num_rows, columns)
    pages[world.reserved_row] = world.reserved_page
    floor = np.zeros(world.num_rows, dtype=np.int64)
    for row in range(1, world.num_rows):
        most = (world.max_context - max(world.extend_width, _most_rows(world)) - 1) // page_size
        if most > 0 and rng.random() < 0.15 and world.reserved_row not in (row, row - 1) and floor[row - 1] == 0:
            shared = int(rng.integers(1, most + 1))
            pages[row, :shared] = pages[row - 1, :shared]
            floor[row - 1 : row + 1] = shared * page_size
    offsets = np.arange(page_size)
    owned = (pages[..., None] * page_size + offsets).reshape(world.num_rows, -1)
    spare = (free[world.num_rows * columns :, None] * page_size + offsets).reshape(-1)
    return Truth(
        owned, spare, page_size, world.num_pages, world.reserved_page, world.reserved_row, floor, rng.spawn(1)[0]
    )


@dataclass(frozen=True)
class Slot:
    """A captured slot, or the layout of eager steps. num_tokens: rows of a packed one."""

    kind: str
    bs: int
    width: int
    num_steps: int
    is_tree: bool
    num_tokens: int

    @property
    def is_packed(self) -> bool:
        """Whether requests have rows of differing numbers."""
        return self.kind in ("prefill", "packed extend", *RAGGED)


def slot(rng: np.random.Generator, world: World) -> Slot:
    """A random layout that the backend takes: that of a bucket of the capacity, or of eager steps a smaller one too."""
    refused = {"packed extend", *RAGGED} if world.backend == "trtllm_mla" else set()
    refused |= {"block"} if world.backend == "dsv4" else set()
    refused |= {"draft"} if world.num_steps == 1 else set()
    kind = str(rng.choice([kind for kind in KINDS if kind not in refused]))
    bs, is_eager = int(rng.integers(1, world.max_bs + 1)), world.path == "eager" and rng.random() < 0.4
    topk, num_steps = world.topk, world.num_steps if kind == "draft" else 1
    if kind == "draft" and is_eager:
        topk, num_steps = int(rng.integers(1, topk + 1)), int(rng.integers(2, num_steps + 1))
    most = world.num_draft_tokens if kind in ("verify", "block") else world.extend_width
    uniform = {"decode": 1, "draft": topk, "verify": most, "block": most, "extend": most}.get(kind, 0)
    if kind in ("verify", "extend") and is_eager:
        uniform = int(rng.integers(2, most + 1))
    is_tree = topk > 1 and (kind == "draft" or (kind == "verify" and not (is_eager and rng.random() < 0.5)))
    if uniform:
        return Slot(kind, bs, uniform, num_steps, is_tree, bs * uniform)
    most = world.num_draft_tokens if kind == "ragged verify" else world.extend_width
    most = _most_rows(world) if kind == "prefill" else most
    return Slot(kind, bs, most, 1, False, bs + int(rng.integers(0, bs * (most - 1) + 1)))


def _most_rows(world: World) -> int:
    """Rows of a request in a prefill."""
    return min(3 * world.page_size, world.max_context // 2, 40)


def steps(rng: np.random.Generator, world: World, truth: Truth, slot: Slot, order: Ints) -> Drawn:
    """Random steps of a layout; `order` says how many. Eager ones are of one size, without padding."""
    number, bs = len(order), slot.bs
    num_real = np.full(number, bs)
    if world.path == "replay":
        num_real = np.where(rng.random(number) < 0.06, 0, rng.integers(1, bs + 1, number))
    real = np.arange(bs) < num_real[:, None]
    rows = np.delete(np.arange(world.num_rows), world.reserved_row)
    requests = np.where(real, rows[rng.random((number, len(rows))).argsort(1)[:, :bs]], world.reserved_row)
    widths = _widths(rng, world, slot, real)
    lens = np.where(real, _lens(rng, world, truth, slot, requests, widths), 0)
    gives_slots, mask, ancestors = bool(rng.random() < 0.7), None, ()
    is_closed = world.path == "eager" and slot.kind not in RAGGED  # whose rows are padded to the bound
    num_tokens = int(widths[0].sum()) if is_closed else slot.num_tokens
    slots = _own_slots(truth, slot, requests, lens, widths, num_tokens)
    if slot.is_tree:
        if gives_slots and rng.random() < 0.5 and len(truth.spare) >= slots.shape[1]:
            slots = truth.spare[rng.random((number, len(truth.spare))).argsort(1)[:, : slots.shape[1]]]
        mask = _masks(rng, number, slot) if slot.kind == "verify" else None
        ancestors = _paths(rng, number, slot) if slot.kind == "draft" else ()
    group = Group(
        slot.kind, bs, slot.width, slot.num_steps, num_tokens, slot.is_packed, slot.is_tree, num_real, requests, lens,
        widths, slots, mask, ancestors,
    )  # fmt: skip
    bound = (None, int(lens.max(initial=0)), int(rng.integers(lens.max(initial=0), world.max_context + 1)))
    max_committed, columns = bound[rng.integers(0, 3)], world.max_pages + int(rng.integers(0, 3))
    if max_committed is not None and rng.random() < 0.5:
        room = max(world.draft_room, slot.width if slot.kind in RAGGED else int(widths.max(initial=1)))
        columns = min(columns, -(-(max_committed + room) // world.page_size))
    wide = frozenset(name for name in ("seq_lens", "slots", "paging") if rng.random() < 0.5)
    return Drawn(
        group, _tables(rng, world, truth, group, columns), max_committed, bool(rng.random() < 0.4), gives_slots, wide,
        bool(rng.random() < 0.3), order, _room(truth, slot, requests, lens),
    )  # fmt: skip


def _room(truth: Truth, slot: Slot, requests: Ints, lens: Ints) -> Ints | None:
    """The slots that each request of a ragged step has for the most rows."""
    if slot.kind not in RAGGED:
        return None
    positions = (lens[..., None] + np.arange(slot.width)).clip(0, truth.owned.shape[1] - 1)
    return truth.owned[requests[..., None], positions].reshape(len(requests), -1)


def _widths(rng: np.random.Generator, world: World, slot: Slot, real: Bools) -> Ints:
    if not slot.is_packed:
        return np.where(real, slot.width, 0)
    number, bs = real.shape
    widths = np.zeros((number, bs), dtype=np.int64)
    for step in range(1 if world.path == "eager" else number):
        n = int(real[step].sum())
        more = int(rng.integers(0, min(slot.num_tokens, n * slot.width) - n + 1)) if n else 0
        for request in rng.permutation(n):
            widths[step, request] = 1 + (taken := int(rng.integers(0, min(more, slot.width - 1) + 1)))
            more -= taken
    return rng.permuted(np.repeat(widths[:1], number, 0), axis=1) if world.path == "eager" else widths


def _lens(rng: np.random.Generator, world: World, truth: Truth, slot: Slot, requests: Ints, widths: Ints) -> Ints:
    """Committed tokens, none too many for what is written behind them."""
    behind = 1 if slot.kind in ("extend", "packed extend", "ragged extend") else 0
    most = world.max_context - (widths if slot.kind == "prefill" else behind)
    most = np.broadcast_to(most, requests.shape)
    how, weights = SIZES["context"]
    way = rng.choice(len(how), requests.shape, p=weights)
    near = rng.integers(0, world.max_pages + 1, requests.shape) * world.page_size + rng.integers(-2, 3, requests.shape)
    lens = np.choose(way, (np.zeros_like(near), near, most, rng.integers(0, most + 1)))
    return lens.clip(truth.floor[requests], most)


def _own_slots(truth: Truth, slot: Slot, requests: Ints, lens: Ints, widths: Ints, num_tokens: int) -> Ints:
    """The slots behind the committed tokens, flat as a step has them; what is behind packed rows is not handed over."""
    number, bs = requests.shape
    if not slot.is_packed:
        positions = lens[..., None] + np.arange(slot.width * slot.num_steps)
        return truth.owned[requests[..., None], positions].reshape(number, -1)
    row, starts = np.arange(num_tokens), np.pad(widths.cumsum(1), ((0, 0), (1, 0)))
    place = (row[:, None] >= starts[:, None, 1:]).sum(2).clip(max=bs - 1)
    positions = np.take_along_axis(lens - starts[:, :-1], place, 1) + row
    return truth.owned[np.take_along_axis(requests, place, 1), positions.clip(0, truth.owned.shape[1] - 1)]


def _masks(rng: np.random.Generator, number: int, slot: Slot) -> Bools:
    """The ancestors of random trees whose root is node 0; padding sees itself."""
    width = slot.width
    seen = np.broadcast_to(np.eye(width, dtype=bool), (number * slot.bs, width, width)).copy()
    every = np.arange(len(seen))
    for node in range(1, width):
        seen[:, node] |= seen[every, rng.integers(0, node, len(seen))]
    return seen.reshape(number, slot.bs, width, width)


def _paths(rng: np.random.Generator, number: int, slot: Slot) -> tuple[Ints, ...]:
    """The branch of each path at each depth of random drafts."""
    shape = (number, slot.bs, slot.width, 1)
    own = np.broadcast_to(np.arange(slot.width)[:, None], shape).copy()
    paths = [own]
    for _ in range(slot.num_steps - 2):
        grew_from = rng.integers(0, slot.width, shape)
        paths.append(np.concatenate((np.take_along_axis(paths[-1], grew_from, 2), own), 3))
    return tuple(paths)


def _tables(rng: np.random.Generator, world: World, truth: Truth, group: Group, columns: int) -> Ints:
    """Block tables, with anything behind a request's pages."""
    if not world.is_block_table:
        return np.zeros((group.number, group.bs, 0), dtype=np.int64)
    pages = np.pad(truth.owned[:, :: world.page_size] // world.page_size, ((0, 0), (0, columns)))[:, :columns]
    tables = pages[group.requests]
    added = group.slots.shape[1] // group.bs if not group.is_packed else group.widths
    added = group.width if group.kind in RAGGED else added
    live = -(-(group.lens + added) // world.page_size)
    garbage = rng.choice((-1, world.num_pages, 2**31 - 1, 0), tables.shape)
    return np.where(np.arange(columns) < live[..., None], tables, garbage)
