"""Batches placed in a hostile paged cache by the suite's own code, and what every row of them must see and write.

A `Scene` is one batch in a `World`. It keeps each request's tokens by name, an int for a token position and a tuple for
a drafted tree node, with their vectors and slots. It shares no code with the plans that it is used to test.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from attn_backends.cache import CacheFormat, KeyValues, Latents
from attn_backends.conformance import oracle
from attn_backends.conformance.inputs import ForwardInputs, strided
from attn_backends.conformance.requests import Batch, Name, Request, Row
from attn_backends.conformance.worlds import World
from spec_metadata import BlockTable, BoundedQuery, PackedQuery, Paging, Step, StepKind, UniformQuery
from spec_metadata.layout import HostBounds


class Scene:
    """A batch in a world: pages assigned at random, rows with what they see, and the step that describes it.

    Making a scene rewrites the world's table; `reset_memory` writes the cache.
    """

    def __init__(self, world: World, batch: Batch, seed: int = 0, placement: int | None = None, room: int = 0) -> None:
        """placement: seed of the pages alone, `seed` if not given. room: more tokens that requests have pages for."""
        self.world, self.batch, self.room = world, batch, room
        self.rng = torch.Generator().manual_seed(seed)
        self.page_rng = torch.Generator().manual_seed(seed if placement is None else placement)
        self._shape()
        self.requests = [Request(length) for length in batch.lens]
        self._place()
        self.paths = [self._paths() if self.is_tree else [] for _ in self.requests]
        self.rows = [self._rows(forward) for forward in range(self.num_forwards)]

    def _shape(self) -> None:
        """How many rows and forwards the batch has."""
        batch, capacity = self.batch, self.world.capacity
        is_idle = batch.kind is StepKind.IDLE
        self.width = max(batch.widths) if batch.widths else 1 if is_idle else capacity.bucket(batch.kind, 1).width
        self.drafts = batch.kind is StepKind.DRAFT_DECODE
        self.is_tree = capacity.topk > 1 and batch.kind in (StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY)
        self.widths = batch.widths or (self.width,) * len(batch.lens)
        self.num_steps = capacity.num_steps
        self.num_forwards = self.num_steps - 1 if self.drafts else 1

    def _int(self, high: int) -> int:
        return int(torch.randint(high, (), generator=self.rng))

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng, dtype=torch.float64).to(self.world.setup.dtype)

    def _place(self) -> None:
        """Give every request shuffled pages, and its committed and drafted tokens slots and vectors."""
        world, page_size = self.world, self.world.geometry.page_size
        free = [p for p in torch.randperm(world.geometry.num_pages, generator=self.page_rng).tolist() if p != 2]
        rows = [r for r in torch.randperm(len(world.table), generator=self.page_rng).tolist() if r != 1]
        self.table_rows = rows[: len(self.requests)]
        per_row = world.max_pages
        self.pages = torch.tensor(free)[torch.randint(len(free), (len(world.table), per_row), generator=self.page_rng)]
        for request, row, width in zip(self.requests, self.table_rows, self.widths, strict=True):
            num_tokens = request.length + (width * self.num_steps if self.drafts else width)
            num_pages = min(-(-(num_tokens + self.room) // page_size), per_row)
            owned, free = free[:num_pages], free[num_pages:]
            self.pages[row, :num_pages] = torch.tensor(owned, dtype=torch.int64)
            slots = [owned[t // page_size] * page_size + t % page_size for t in range(num_tokens)]
            names = [*range(request.length), *self._drafted_names(request.length, width)]
            if self.is_tree:
                order = torch.randperm(num_tokens - request.length, generator=self.page_rng).tolist()
                slots[request.length :] = [slots[request.length + i] for i in order]
            request.slots = dict(zip(names, slots, strict=True))
            request.vectors = {name: self._randn(*world.token_shape) for name in names}
        self.pages[1] = 2
        offsets = torch.arange(page_size)
        world.table.copy_((self.pages.unsqueeze(2) * page_size + offsets).flatten(1))

    def poison_table_tails(self) -> None:
        """Make table entries past the requests' tokens point nowhere."""
        nowhere = 10**6
        for row, request in zip(self.table_rows, self.requests, strict=True):
            num_tokens = len(request.slots)
            self.world.table[row, num_tokens:] = nowhere
            self.pages[row, -(-num_tokens // self.world.geometry.page_size) :] = nowhere

    def _drafted_names(self, length: int, width: int) -> list[Name]:
        """Tokens that the step adds, in out_cache_loc order."""
        if not self.is_tree:
            return list(range(length, length + (width * self.num_steps if self.drafts else width)))
        return [(k, i) for k in range(width) for i in range(self.num_steps if self.drafts else 1)]

    def _paths(self) -> list[list[list[int]]]:
        """Random trees: of forward i and row k, the branch at each depth of a draft, or the node's path of a verify."""
        if self.drafts:
            paths = [[[k] for k in range(self.width)]]
            for _ in range(self.num_steps - 2):
                paths.append([[*paths[-1][self._int(self.width)], k] for k in range(self.width)])
            return paths
        nodes = [[0]]
        for node in range(1, self.width):
            nodes.append([*nodes[self._int(node)], node])
        return [nodes]

    def _rows(self, forward: int) -> list[Row]:
        """The rows of one forward, request after request."""
        rows = []
        for index, (request, width) in enumerate(zip(self.requests, self.widths, strict=True)):
            committed = list(range(request.length))
            for j in range(width):
                if not self.is_tree:
                    token = request.length + (forward if self.drafts else j)
                    end = request.length + width if self.batch.kind is StepKind.DRAFT_BLOCK else token + 1
                    rows.append(Row(index, token, list(range(end))))
                    continue
                path = self.paths[index][forward][j]
                drafted = [(k, i) for i, k in enumerate(path)] if self.drafts else [(node, 0) for node in path]
                rows.append(Row(index, drafted[-1], [*committed, *drafted]))
        return rows

    def step(self) -> Step:
        """The step, from strided int32 and int64 tensors."""
        known = self.batch.lens
        host = HostBounds(max_committed=max(known) if self.batch.bounded else None, seq_lens_cpu=known)
        device, index = self.world.device, self.world.setup.index
        other = torch.int64 if index is torch.int32 else torch.int32
        lens = strided(torch.tensor(known, dtype=index, device=device))
        query = PackedQuery.of(self.batch.widths, device) if self.batch.widths else UniformQuery(self.width)
        slots = strided(torch.tensor(self.write_order(), dtype=other, device=device))
        match self.batch.kind:
            case StepKind.IDLE:
                return Step.idle(self.paging())
            case StepKind.PREFILL:
                assert isinstance(query, PackedQuery), "a prefill has a length for each request"
                return Step.prefill(query, lens, self.paging(), slots, **host)
            case StepKind.DECODE:
                return Step.decode(lens, self.paging(), slots, **host)
            case StepKind.DRAFT_DECODE:
                return Step.draft_decode(self.width, self.num_steps, lens, self.paging(), slots, **host)
            case StepKind.DRAFT_BLOCK:
                return Step.draft_block(self.width, lens, self.paging(), slots, **host)
            case kind if self.batch.is_ragged:
                room = strided(torch.tensor(self._room(), dtype=other, device=device))
                make = Step.target_verify if kind is StepKind.TARGET_VERIFY else Step.draft_extend
                step = make(self._ragged_query(other), lens, self.paging(), room, **host)
                return step if all(self.widths) else replace(step, num_real=self._num_real())
            case StepKind.TARGET_VERIFY:
                mask = self.tree_mask() if self.is_tree else None
                return Step.target_verify(self.width, lens, self.paging(), slots, tree_mask=mask, **host)
            case _:
                return Step.draft_extend(query, lens, self.paging(), slots, **host)

    @property
    def most_rows(self) -> int:
        """Query rows of a request of a ragged step, at most."""
        return self.world.capacity.bucket(self.batch.kind, 1).width

    def _ragged_query(self, index: torch.dtype) -> BoundedQuery:
        """Widths that the device alone knows."""
        asked = torch.tensor(self.batch.asked or self.batch.widths, dtype=index, device=self.world.device)
        return BoundedQuery(strided(asked), self.batch.bound, self.most_rows)

    def _num_real(self) -> Tensor:
        """Requests that have a row; those after them are padding of the step's own."""
        return torch.tensor([sum(map(bool, self.widths))], dtype=torch.int32, device=self.world.device)

    def _room(self) -> list[int]:
        """Slots of each request for the most rows; after those that it has, places that no row of it may write."""
        width, found = self.most_rows, []
        for request in self.requests:
            own = [slot for name, slot in request.slots.items() if not self._is_committed(request, name)]
            others = request.slots[0] if request.length else self.world.geometry.reserved_slot
            found += own + [others] * (width - len(own))
        return found

    def paging(self) -> Paging:
        """The paging of the requests."""
        if self.world.setup.block_table:
            pages = self.pages[self.table_rows].to(self.world.device, self.world.setup.index)
            return BlockTable(pages, self.world.geometry)
        rows = strided(torch.tensor(self.table_rows, dtype=torch.int64, device=self.world.device))
        return self.world.paging(rows)

    def write_order(self) -> list[int]:
        """Slots of all drafted tokens, flat."""
        return [slot for r in self.requests for name, slot in r.slots.items() if not self._is_committed(r, name)]

    def tree_mask(self) -> Tensor:
        """[bs, width, width] bool: node sees node."""
        mask = torch.zeros(len(self.requests), self.width, self.width, dtype=torch.bool)
        for index, paths in enumerate(self.paths):
            for node, path in enumerate(paths[0]):
                mask[index, node, path] = True
        return mask.to(self.world.device)

    def inputs(self, bs: int | None = None, num_tokens: int = 0) -> list[ForwardInputs]:
        """A model's inputs to each forward, padded with random rows to `bs` requests or `num_tokens` packed rows."""
        bs = len(self.requests) if bs is None else bs
        num_rows = max(num_tokens, sum(self.widths), self.batch.bound) if self.batch.widths else bs * self.width
        return [self._inputs(forward, bs, num_rows) for forward in range(self.num_forwards)]

    def _inputs(self, forward: int, bs: int, num_rows: int) -> ForwardInputs:
        rows, rng = self.rows[forward], torch.Generator().manual_seed(10_000 + forward)  # not the tokens' numbers
        vectors = torch.randn(num_rows, *self.world.token_shape, generator=rng, dtype=torch.float64)
        vectors = vectors.to(self.world.setup.dtype)
        for i, row in enumerate(rows):
            vectors[i] = self.requests[row.request].vectors[row.token]
        kv, layer = self.world.setup.format is CacheFormat.KV, self.world.layer
        vectors = vectors.to(self.world.device)
        values = vectors[:, 1, :, : layer.v_head_dim]
        stored = KeyValues(vectors[:, 0], values) if kv else Latents(vectors[:, 0, 0])
        q = torch.randn(num_rows, layer.num_heads, layer.head_dim, generator=rng, dtype=torch.float64)
        q = q.to(self.world.device, self.world.setup.dtype)
        return ForwardInputs(q, stored, self._ancestors(forward, bs))

    def _ancestors(self, forward: int, bs: int) -> Tensor | None:
        if not (self.drafts and self.is_tree):
            return None
        ancestors = torch.zeros(bs, self.width, forward + 1, dtype=torch.int64)
        for index, paths in enumerate(self.paths):
            ancestors[index] = torch.tensor(paths[forward])
        return ancestors.to(self.world.device)

    def reset_memory(self, poison: float = float("nan"), reserved: float = 77.0) -> Tensor:
        """Write the committed tokens, in a sliding window those that a row sees, `reserved` into the reserved page and
        poison elsewhere. Returns a copy.
        """
        memory = self.world.memory
        memory.fill_(poison)
        memory[self.world.geometry.reserved_page] = reserved
        rows = [row for rows in self.rows for row in rows] if self.world.layer.window else []
        for index, request in enumerate(self.requests):
            seen = {name for row in rows if row.request == index for name in self.in_window(row)}
            self._write(memory, request, [name for name in range(request.length) if name in seen or not rows])
        return memory.clone()

    def in_window(self, row: Row) -> list[Name]:
        """Names of tokens that a row attends to; in a sliding window the last ones up to its own, and all after it."""
        window = self.world.layer.window
        return row.visible[max(row.visible.index(row.token) + 1 - window, 0) :] if window else row.visible

    def expected_memory(self, before: Tensor, forwards: int | None = None) -> Tensor:
        """The memory after the first forwards (default: all) have stored their rows, reserved page aside."""
        memory = before.clone()
        for index, request in enumerate(self.requests):
            self._write(memory, request, [r.token for rows in self.rows[:forwards] for r in rows if r.request == index])
        return memory

    def _write(self, memory: Tensor, request: Request, names: list[Name]) -> None:
        """Put tokens where they belong."""
        if not names:
            return
        slots = torch.tensor([request.slots[name] for name in names])
        self.world.write(memory, slots, torch.stack([request.vectors[name] for name in names]))

    def _tokens(self, request: Request, weights: torch.dtype | None) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens of a request, in the order of its vectors. weights: as in `expected_output`."""
        if weights not in request.seen:
            vectors = torch.stack(list(request.vectors.values()))
            request.seen[weights] = self.world.read(*self.world.entries(vectors), weights)
        return request.seen[weights]

    def _attended(
        self, given: ForwardInputs, number: int, row: Row, weights: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values that a row attends to. given: inputs of its forward, of which it is that number."""
        request = self.requests[row.request]
        keys, values = self._tokens(request, weights)
        index = torch.tensor([request.places[name] for name in self.in_window(row)])
        return keys[index], values[index]

    def longest_key(self) -> float:
        """The largest norm of a key that a row attended to in float64."""
        keys = [request.seen[None][0] for request in self.requests if None in request.seen]
        return max((float(key.norm(dim=-1).max()) for key in keys), default=0.0)

    def compared(self, memory: Tensor) -> dict[str, Tensor]:
        """The parts of a memory that are compared, slots first."""
        return {"cache": memory.flatten(0, 1)}

    def settle(self, actual: Tensor, expected: Tensor) -> None:
        """Make `expected` what a right memory is, where it may differ in rounding."""

    def place_of(self, part: str, row: int) -> str:
        """A description of a row of a part of `compared`: its place and its owner."""
        page, offset = divmod(row, self.world.geometry.page_size)
        return f"slot {row} (page {page}, offset {offset}) must not hold this: {self.owner(row)}"

    @staticmethod
    def _is_committed(request: Request, name: Name) -> bool:
        return isinstance(name, int) and name < request.length

    def slots_of(self, forward: int) -> list[int]:
        """The slots that the rows of a forward write."""
        return [self.requests[row.request].slots[row.token] for row in self.rows[forward]]

    def owner(self, slot: int) -> str:
        """A description of a slot's owner."""
        for index, request in enumerate(self.requests):
            for name, owned in request.slots.items():
                if owned == slot:
                    what = "committed token" if self._is_committed(request, name) else "drafted token"
                    return f"it is {what} {name} of request {index}"
        return "no request of this step owns it"

    def select(self, order: list[int]) -> tuple[Scene, list[list[int]]]:
        """The scene of some of the requests, in an order, and its rows' numbers here, of each forward."""
        scene = copy(self)
        for name in ("requests", "table_rows", "paths", "widths"):
            setattr(scene, name, type(getattr(self, name))(getattr(self, name)[i] for i in order))
        lens = tuple(self.batch.lens[i] for i in order)
        scene.batch = replace(self.batch, lens=lens, widths=scene.widths if self.batch.widths else ())
        scene.rows = [scene._rows(forward) for forward in range(self.num_forwards)]
        numbers = [[n for i in order for n, row in enumerate(rows) if row.request == i] for rows in self.rows]
        return scene, numbers

    def expected_output(
        self, inputs: list[ForwardInputs], forward: int, weights: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output and LSE of every real row of a forward, by definition, on the CPU.

        weights: None for float64; else the low-precision reference, which rounds the softmax weights to this type.
        """
        layer = self.world.layer
        dtype = torch.float64 if weights in (None, torch.float64) else torch.float32
        outs, lses = (
            [torch.empty(0, layer.num_heads, layer.v_head_dim, dtype=dtype)],
            [torch.empty(0, layer.num_heads, dtype=dtype)],
        )
        for number, (q, row) in enumerate(zip(inputs[forward].q.cpu(), self.rows[forward], strict=False)):
            keys, values = self._attended(inputs[forward], number, row, weights)
            out, lse = oracle.attend(q.to(dtype), keys, values, layer.scale, weights)
            if weights is not None and self.world.declared(self.batch.kind).rounded_lse:
                lse = oracle.rounded_lse(q.to(dtype), keys, layer.scale, weights)
            if layer.sinks is not None:
                out = oracle.with_sinks(out, lse, layer.sinks.cpu())
            outs.append(out.unsqueeze(0))
            lses.append(lse.unsqueeze(0))
        return torch.cat(outs), torch.cat(lses)
