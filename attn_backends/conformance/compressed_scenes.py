"""Batches over compressed keys: what every row sees, which rows, entries and states a step writes, and nothing else.

Memory before a step holds what it must: the committed tokens' rows of a window, the entries of closed blocks, and the
states of those tokens that the next entry may still be made of. All else is poison, also what an earlier step has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_backends.compressed_layer import CompressedInputs, Compressor, IndexQuery, Projections
from attn_backends.conformance import compressed_oracle, oracle
from attn_backends.conformance.catalogue import CheckFailure
from attn_backends.conformance.compressed_worlds import INDEX_HEADS, CompressedWorld
from attn_backends.conformance.inputs import ForwardInputs
from attn_backends.conformance.requests import Name, Request, Row
from attn_backends.conformance.scenes import Scene
from spec_metadata import StepKind

CLEAR = 0.05  # of a selection's cut: no rounding moves an entry over it
NAN_BYTE, FINITE_BYTE = 0xFF, 0x42


@dataclass(frozen=True)
class CompressedForwardInputs(ForwardInputs):
    """A model's inputs to one forward of a compressed layer."""

    stored: CompressedInputs  # type: ignore[assignment]
    index: IndexQuery | None

    def tensors(self) -> list[Tensor]:
        """All tensors, in a fixed order."""
        parts = [part for part in (self.stored.compressor, self.stored.indexer) if part is not None]
        index = [] if self.index is None else [self.index.q, self.index.weights]
        return [self.q, self.stored.rows, *(x for part in parts for x in (part.values, part.gates)), *index]

    def as_type(self, dtype: torch.dtype) -> ForwardInputs:
        """Queries and what is stored in another type."""
        return self._rebuilt([x.to(dtype) for x in self.tensors()])

    def take(self, rows: Tensor, requests: Tensor) -> ForwardInputs:
        """The inputs of some query rows."""
        return self._rebuilt([x[rows] for x in self.tensors()])

    def _rebuilt(self, tensors: list[Tensor]) -> CompressedForwardInputs:
        given = iter(tensors)
        q, rows = next(given), next(given)
        parts = [
            None if part is None else Projections(next(given), next(given))
            for part in (self.stored.compressor, self.stored.indexer)
        ]
        index = None if self.index is None else IndexQuery(next(given), next(given))
        return CompressedForwardInputs(q, CompressedInputs(rows, *parts), None, index)


class CompressedScene(Scene):
    """A batch in a compressed world."""

    world: CompressedWorld

    def continued(self, kind: StepKind, accepted: Sequence[int], widths: tuple[int, ...] = ()) -> CompressedScene:
        """The next step of the same requests, of which so many more tokens have committed: those of this scene's.

        All that the step writes is drawn anew. The requests need pages for it (`room`).
        """
        scene, page_size = copy(self), self.world.geometry.page_size
        lens = tuple(request.length + number for request, number in zip(self.requests, accepted, strict=True))
        scene.batch = replace(self.batch, kind=kind, lens=lens, widths=widths)
        scene._shape()
        scene.requests = []
        for old, row, length, width in zip(self.requests, self.table_rows, lens, scene.widths, strict=True):
            names = range(length + (width * scene.num_steps if scene.drafts else width))
            pages = self.pages[row].tolist()
            slots: dict[Name, int] = {p: pages[p // page_size] * page_size + p % page_size for p in range(len(names))}
            vectors: dict[Name, Tensor] = {
                p: old.vectors[p] if p < length else self._randn(*self.world.token_shape) for p in names
            }
            scene.requests.append(Request(length, slots, vectors))
        scene.rows = [scene._rows(forward) for forward in range(scene.num_forwards)]
        return scene

    def reset_memory(self, poison: float = float("nan"), reserved: float = 77.0) -> Tensor:
        """Write what the step may read, `reserved` into the reserved page and poison elsewhere. Returns a copy."""
        memory = torch.zeros(self.world.memory.shape, dtype=torch.uint8)
        pools = self.world.pools(memory)
        for pool in pools.values():
            for part, value in ((pool, poison), (pool[self.world.geometry.reserved_page], reserved)):
                is_bytes = part.dtype is torch.uint8
                part.fill_((NAN_BYTE if value != value else FINITE_BYTE) if is_bytes else value)
        window, compression = self.world.layer.window, self.world.layer.compression
        assert window is not None
        sees_itself = self.batch.kind is not StepKind.DRAFT_BLOCK
        for request in self.requests:
            for position in range(max(request.length + sees_itself - window, 0), request.length):
                self._write_row(pools, request, position)
            if compression is not None:
                for position in range(max(request.length + 1 - compression.read_window, 0), request.length):
                    self._write_states(pools, request, position)
                for block in range(request.length // compression.ratio):
                    self._write_entries(pools, request, block)
        self.world.memory.copy_(memory)
        return self.world.memory.clone()

    def expected_memory(self, before: Tensor, forwards: int | None = None) -> Tensor:
        """The memory after the first forwards (default: all) have stored their rows, reserved page aside."""
        memory = before.cpu().clone()
        pools = self.world.pools(memory)
        for row in (row for rows in self.rows[:forwards] for row in rows):
            request, position = self.requests[row.request], self._position(row)
            self._write_row(pools, request, position)
            self._write_states(pools, request, position)
            for block in self._closed_by(position):
                self._write_entries(pools, request, block)
        return memory.to(self.world.device)

    def settle(self, actual: Tensor, expected: Tensor) -> None:
        """Take over the entries that a step made, where they are right: they are computed, so they are rounded.

        Expected outputs are of these entries. Halfway between two numbers of an entry's type the last bit of float32
        decides. Processors differ in it.
        """
        pools = self.world.pools(actual), self.world.pools(expected)
        closed = [
            (self.requests[row.request], block)
            for rows in self.rows
            for row in rows
            for block in self._closed_by(self._position(row))
        ]
        for name in (name for name in pools[0] if name.endswith("entries")):
            which = name.removesuffix(" entries")
            exact = [self._entries(which, request, None)[block] for request, block in closed]
            rounded = [
                self._stored(name, self._entries(which, request, torch.float32)[block]) for request, block in closed
            ]
            if not exact:
                continue
            budget = oracle.budget(torch.stack(exact), torch.stack(rounded), self._precision_of(name))
            for (request, block), true in zip(closed, exact, strict=True):
                ours, theirs = (self._bytes(name, pool[name], self._entry_slot(request, block)) for pool in pools)
                if not torch.equal(self._read(name, theirs).cpu(), self._stored(name, true)):
                    continue  # it is the entry of a forward that is still to come
                error = float((self._read(name, ours).cpu().double() - true.double()).abs().max())
                if not error <= budget:
                    message = f"the entry of block {block} is off by {error:.3g}, over the budget of {budget:.3g}"
                    raise CheckFailure(name, message, self._entry_slot(request, block))
                for one, two in zip(ours, theirs, strict=True):
                    two.copy_(one)
                if which == "compressor":
                    request.made[block] = self._read(name, ours).cpu().clone()
                    request.seen.clear()

    def compared(self, memory: Tensor) -> dict[str, Tensor]:
        """The pools, their slots flat; in the 8-bit format a row is a page, without what pads its scales."""
        places, pools = self.world.places, self.world.pools(memory)
        return {
            name: compressed_oracle.unpadded(pool, places[name].shape[0])
            if pool.dtype is torch.uint8
            else pool.flatten(0, 1)
            for name, pool in pools.items()
        }

    def place_of(self, pool: str, row: int) -> str:
        """A description of a row of `compared`: its place and its owner."""
        per_page = self.world.places[pool].shape[0]
        if self.world.places[pool].dtype is None:
            return f"page {row} must not hold this"
        where = f"slot {row} (page {row // per_page}, offset {row % per_page}) of the {pool} must not hold this"
        return f"{where}: {self.owner(row)}" if pool == "rows" else where

    def _inputs(self, forward: int, bs: int, num_rows: int) -> CompressedForwardInputs:
        rows, rng = self.rows[forward], torch.Generator().manual_seed(10_000 + forward)  # not the tokens' numbers
        layer, setup = self.world.layer, self.world.setup

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64).to(setup.dtype)

        vectors = draw(num_rows, *self.world.token_shape)
        for i, row in enumerate(rows):
            vectors[i] = self.requests[row.request].vectors[row.token]
        parts = self.world.split(vectors.to(self.world.device))
        pairs = [
            Projections(parts[f"{name} values"], parts[f"{name} gates"]) if f"{name} gates" in parts else None
            for name in ("compressor", "indexer")
        ]
        q = draw(num_rows, layer.num_heads, layer.head_dim).to(self.world.device)
        index = None
        if layer.indexer is not None:
            heads, weights = draw(num_rows, INDEX_HEADS, layer.indexer.dim), draw(num_rows, INDEX_HEADS)
            for i, row in enumerate(rows):
                while compressed_oracle.gap(self.scores(row, heads[i], weights[i]), layer.index_topk) < CLEAR:
                    heads[i], weights[i] = draw(*heads.shape[1:]), draw(*weights.shape[1:])
            index = IndexQuery(heads.to(self.world.device), weights.to(self.world.device))
        return CompressedForwardInputs(q, CompressedInputs(parts["row"], *pairs), None, index)

    def _attended(
        self, given: ForwardInputs, number: int, row: Row, weights: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        """The rows of the window and the entries that a row attends to, which are key and value at once."""
        assert isinstance(given, CompressedForwardInputs)
        request = self.requests[row.request]
        rows, entries = self._tokens(request, weights)
        places = [request.places[name] for name in self.in_window(row)]
        keys = torch.cat((rows[places], entries[self._blocks(given, number, row)]))
        return keys, keys

    def in_window(self, row: Row) -> list[Name]:
        """As `Scene.in_window`; of a draft block the window before it, and all of it (DSpark, of DeepSeek-V4.1)."""
        if self.batch.kind is not StepKind.DRAFT_BLOCK:
            return super().in_window(row)
        assert self.world.layer.window is not None
        return row.visible[max(self.requests[row.request].length - self.world.layer.window, 0) :]

    def _tokens(self, request: Request, weights: torch.dtype | None) -> tuple[Tensor, Tensor]:
        """Rows of all tokens and entries of all blocks, [number, 1, dim] each. weights: as in `expected_output`."""
        if weights not in request.seen:
            rows = self._stored("rows", self.world.split(torch.stack(list(request.vectors.values())))["row"])
            entries = rows[:0]
            if self.world.layer.compression is not None:
                entries = self._stored("compressor entries", self._entries("compressor", request, weights)).clone()
                for block, made in request.made.items():
                    entries[block] = made
            dtype = _computed_in(weights)
            request.seen[weights] = rows.to(dtype).unsqueeze(1), entries.to(dtype).unsqueeze(1)
        return request.seen[weights]

    def longest_key(self) -> float:
        """As `Scene.longest_key`."""
        keys = [key for request in self.requests for key in request.seen.get(None, ()) if len(key)]
        return max((float(key.norm(dim=-1).max()) for key in keys), default=0.0)

    def _blocks(self, given: CompressedForwardInputs, number: int, row: Row) -> list[int]:
        """The blocks whose entries a row attends to."""
        layer = self.world.layer
        if layer.compression is None:
            return []
        if given.index is None:
            return list(range((self._position(row) + 1) // layer.compression.ratio))
        q, weights = given.index.q[number].cpu(), given.index.weights[number].cpu()
        return compressed_oracle.best(self.scores(row, q, weights), layer.index_topk)

    def scores(self, row: Row, q: Tensor, weights: Tensor) -> list[float]:
        """The score of each entry that a row may see."""
        compression, request = self.world.layer.compression, self.requests[row.request]
        assert compression is not None
        keys = self._entries("indexer", request, None)[: (self._position(row) + 1) // compression.ratio]
        return compressed_oracle.index_scores(q, weights, self._stored("indexer entries", keys))

    def _entries(self, which: str, request: Request, weights: torch.dtype | None) -> Tensor:
        """[num_blocks, dim]: a request's entries of the compressor or the indexer, not yet as the cache holds them."""
        compression, layer, dtype = self.world.layer.compression, self.world.layer, _computed_in(weights)
        compressor: Compressor | None = layer.compressor if which == "compressor" else layer.indexer
        assert compression is not None
        assert compressor is not None
        if (which, dtype) not in request.entries:
            positions = sum(isinstance(name, int) for name in request.vectors)  # first of all names: a tree is refused
            whole = positions // compression.ratio * compression.ratio
            vectors = torch.stack(list(request.vectors.values()))[:whole]
            parts = self.world.split(vectors.to(self.world.state_dtype))
            values, gates = parts[f"{which} values"].to(dtype), parts[f"{which} gates"].to(dtype)
            request.entries[which, dtype] = compressed_oracle.entries(
                values, gates, compressor, compression.ratio, compression.overlap
            )
        return request.entries[which, dtype]

    def _position(self, row: Row) -> int:
        assert isinstance(row.token, int), "compressed keys are those of one chain"
        return row.token

    def _closed_by(self, position: int) -> list[int]:
        """The block that a token closes, if it closes one."""
        compression = self.world.layer.compression
        closes = compression is not None and (position + 1) % compression.ratio == 0
        return [position // compression.ratio] if compression is not None and closes else []

    def _entry_slot(self, request: Request, block: int) -> int:
        compression = self.world.layer.compression
        assert compression is not None
        return request.slots[block * compression.ratio] // compression.ratio

    def _write_row(self, pools: dict[str, Tensor], request: Request, position: int) -> None:
        row = self.world.split(request.vectors[position])["row"]
        self._write_to("rows", pools["rows"], request.slots[position], row)

    def _write_states(self, pools: dict[str, Tensor], request: Request, position: int) -> None:
        parts, page = (
            self.world.split(request.vectors[position]),
            request.slots[position] // self.world.geometry.page_size,
        )
        for which in ("compressor", "indexer"):
            if f"{which} states" in pools:
                state = torch.cat((parts[f"{which} values"], parts[f"{which} gates"]))
                pools[f"{which} states"][page, position % self.world.ring] = state.to(self.world.state_dtype)

    def _write_entries(self, pools: dict[str, Tensor], request: Request, block: int) -> None:
        for name in (name for name in pools if name.endswith("entries")):
            entries = self._entries(name.removesuffix(" entries"), request, None)
            self._write_to(name, pools[name], self._entry_slot(request, block), entries[block])

    def _write_to(self, name: str, pool: Tensor, slot: int, row: Tensor) -> None:
        place = self._bytes(name, pool, slot)
        found = compressed_oracle.quantised(row) if len(place) == 2 else (row.to(pool.dtype),)
        for destination, source in zip(place, found, strict=True):
            destination.copy_(source)

    def _bytes(self, name: str, pool: Tensor, slot: int) -> tuple[Tensor, ...]:
        """Where a slot's row lies in a pool: a view, or those of its elements and scales in the 8-bit format."""
        per_page, data, scales = self.world.places[name].shape[0], compressed_oracle.DATA, compressed_oracle.SCALES
        page, offset = divmod(slot, per_page)
        if self.world.places[name].dtype is not None:
            return (pool[page, offset],)
        behind = per_page * data + offset * scales
        return pool[page, offset * data : (offset + 1) * data], pool[page, behind : behind + scales]

    def _read(self, name: str, place: tuple[Tensor, ...]) -> Tensor:
        return compressed_oracle.dequantised(*place) if len(place) == 2 else place[0]

    def _stored(self, name: str, row: Tensor) -> Tensor:
        """A row, entry or index key as its pool holds it."""
        dtype = self.world.places[name].dtype
        if dtype is None:
            return compressed_oracle.dequantised(*compressed_oracle.quantised(row))
        return row.to(dtype)

    def _precision_of(self, name: str) -> torch.dtype:
        return self.world.places[name].dtype or torch.bfloat16


def _computed_in(weights: torch.dtype | None) -> torch.dtype:
    """The arithmetic of a reference. weights: as in `expected_output`."""
    return torch.float64 if weights in (None, torch.float64) else torch.float32
