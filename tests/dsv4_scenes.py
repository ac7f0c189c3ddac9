"""An engine in small that serves a tiny DeepSeek-V4 from hostile memory, and the oracle that it is held to.

The oracle is transformers' own full forward, without a cache, on the committed tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from attn_backends.backends import dsv4
from attn_backends.compressed_cache import CompressedCache, EntryPools, Fp8Pages, Pages
from attn_backends.compressed_layer import CompressedInputs, CompressedLayer, Compressor, IndexQuery, Projections
from attn_backends.layer import AttentionOutput
from attn_backends.planning.metadata import Metadata
from spec_metadata import BlockTable, CacheGeometry, Capacity, PackedQuery, Paging, RequestTable, Step, UniformQuery
from tests.dsv4_model import CompressedAttention, CompressedForward, Sizes


@dataclass
class Request:
    """A request of the engine: its row of the table, what it will commit, and how many tokens of that are committed.

    first: the first token that it computed itself. outputs: (position, logits) of every row that was right, in order.
    selected: entries that our backend selected, by layer and position, when it last processed the position.
    """

    row: int
    chain: Tensor
    committed: int = 0
    first: int = 0
    outputs: list[tuple[int, Tensor]] = field(default_factory=list)
    selected: dict[tuple[int, int], set[int]] = field(default_factory=dict)


@contextmanager
def recorded_selections() -> Iterator[list[list[set[int]]]]:
    """Inside, every selection of the backend is kept: of each row, the entries by their number."""
    original, seen = dsv4.select_entries, []

    def record(q: Tensor, weights: Tensor, keys: Tensor, page_table: Tensor, *rest: Any) -> Tensor:
        slots = original(q, weights, keys, page_table, *rest)
        per_page, (_, request, *_) = keys.shape[1], rest
        pages = [{page: index for index, page in reversed(list(enumerate(row)))} for row in page_table.tolist()]
        seen.append(
            [
                {pages[owner][slot // per_page] * per_page + slot % per_page for slot in row if slot >= 0}
                for owner, row in zip(request.tolist(), slots.tolist(), strict=True)
            ]
        )
        return slots

    dsv4.select_entries = record
    try:
        yield seen
    finally:
        dsv4.select_entries = original


class Engine:
    """A model, a backend, caches and a table in hostile memory: pages shuffled, everything else poisoned."""

    def __init__(
        self,
        model: DeepseekV4ForCausalLM,
        sizes: Sizes,
        *,
        num_draft_tokens: int = 4,
        num_steps: int = 3,
        max_context: int = 128,
        block_table: bool = False,
        poison: float = float("nan"),
        cache_dtype: torch.dtype | None = None,
        rings: dict[int, int] | None = None,
        checking: bool = True,
        max_bs: int = 4,
        device: str = "cpu",
        kernel: str = "torch",
    ) -> None:
        self.sizes, self.block_table, self.device = sizes, block_table, torch.device(device)
        capacity = Capacity(max_bs, max_context, sizes.page_size, 1, num_steps, num_draft_tokens)
        self.max_pages = capacity.max_pages
        num_pages = max_bs * self.max_pages + 3
        self.geometry = CacheGeometry(num_pages, sizes.page_size, reserved_page=2, reserved_row=1)
        self.backend = sizes.backend(capacity, self.geometry, device, kernel=kernel, checking=checking)
        for ratio, ring in (rings or {}).items():
            (compression,) = [c for c in self.backend.rings if c.ratio == ratio]
            self.backend.rings[compression] = ring
        self.model = copy.deepcopy(model).to(device)
        for block in self.model.model.layers:
            block.self_attn = CompressedAttention(block.self_attn, self.backend.compressions)
        self.layers = [block.self_attn.layer for block in self.model.model.layers]
        dtype = cache_dtype or torch.float32
        self.caches = [self.backend.allocate_cache(layer, dtype) for layer in self.layers]
        for cache in self.caches:
            poison_cache(cache, poison)
        self.rng = torch.Generator().manual_seed(7)
        self.free = [p for p in torch.randperm(num_pages, generator=self.rng).tolist() if p != 2]
        self.pages = torch.full((max_bs + 2, self.max_pages), 2, dtype=torch.int64)
        self.table = torch.zeros(max_bs + 2, self.max_pages * sizes.page_size, dtype=torch.int32, device=device)
        self._write_table()
        self.requests: list[Request] = []

    def _write_table(self) -> None:
        offsets = torch.arange(self.sizes.page_size)
        self.table.copy_((self.pages.unsqueeze(2) * self.sizes.page_size + offsets).flatten(1))

    def add(self, chain: Tensor, shared: Request | None = None, num_shared: int = 0) -> Request:
        """A request that will commit a chain of tokens. shared: whose first whole pages it starts with."""
        row = next(r for r in range(len(self.pages)) if r != 1 and r not in {q.row for q in self.requests})
        own, self.free = self.free[: self.max_pages], self.free[self.max_pages :]
        self.pages[row] = torch.tensor(own)
        if shared is not None:
            num_pages = num_shared // self.sizes.page_size
            self.pages[row, :num_pages] = self.pages[shared.row, :num_pages]
        self._write_table()
        self.requests.append(Request(row, chain, num_shared, num_shared))
        return self.requests[-1]

    def paging(self, requests: Sequence[Request]) -> Paging:
        """Where some requests live."""
        rows = torch.tensor([request.row for request in requests], dtype=torch.int64)
        if self.block_table:
            return BlockTable(self.pages[rows].int().to(self.device), self.geometry)
        return RequestTable(self.table, rows.to(self.device), self.geometry)

    def lens(self, requests: Sequence[Request]) -> Tensor:
        """Committed tokens of each."""
        return torch.tensor([request.committed for request in requests], dtype=torch.int32, device=self.device)

    def forward(
        self, meta: Metadata, requests: Sequence[Request], rows: Sequence[Tensor], right: Sequence[int], index: int = 0
    ) -> None:
        """One forward of a step, which keeps what it gives for the first `right` rows of each request.

        rows: tokens of each request, at the positions after its committed ones, `index` further on.
        """
        attention = CompressedForward(self.backend, self.caches, meta.at(index), self.layers)
        positions = [r.committed + index + torch.arange(len(given)) for r, given in zip(requests, rows, strict=True)]
        with recorded_selections() as selections:
            out = self.model.model(
                input_ids=torch.cat(list(rows)).unsqueeze(0).to(self.device),
                position_ids=torch.cat(positions).unsqueeze(0).to(self.device),
                attention_mask={"window": None},
                use_cache=False,
                attention=attention,
            )
        logits = self.model.lm_head(out.last_hidden_state).squeeze(0).cpu()
        indexed = [layer.id for layer in self.layers if layer.indexer is not None]
        row = 0
        for request, places, number in zip(requests, positions, right, strict=True):
            for offset, position in enumerate(places.tolist()):
                if offset < number:
                    request.outputs.append((position, logits[row]))
                for layer, best in zip(indexed, selections, strict=True):
                    request.selected[layer, position] = best[row]
                row += 1

    def _run(self, step: Step, requests: Sequence[Request], rows: Sequence[Tensor], right: Sequence[int]) -> None:
        """An eager step of one forward, of which the right rows commit."""
        self.forward(self.backend.init_forward_metadata(step), requests, rows, right)
        for request, number in zip(requests, right, strict=True):
            request.committed += number

    def prefill(self, requests: Sequence[Request], lens: Sequence[int]) -> None:
        """The next tokens of each request's chain."""
        step = Step.prefill(PackedQuery.of(tuple(lens), self.device), self.lens(requests), self.paging(requests))
        self._run(step, requests, [self.drafted(r, n, n) for r, n in zip(requests, lens, strict=True)], lens)

    def decode(self, requests: Sequence[Request]) -> None:
        """One token each."""
        step = Step.decode(self.lens(requests), self.paging(requests))
        self._run(step, requests, [self.drafted(r, 1, 1) for r in requests], [1] * len(requests))

    def verify(self, requests: Sequence[Request], width: int, accepted: Sequence[int]) -> None:
        """A verify of `width` rows each, of which the first `accepted` are right and commit."""
        step = Step.target_verify(width, self.lens(requests), self.paging(requests))
        self._run(
            step, requests, [self.drafted(r, width, a) for r, a in zip(requests, accepted, strict=True)], accepted
        )

    def extend(self, requests: Sequence[Request], width: int, accepted: Sequence[int]) -> None:
        """A uniform draft extend; as `verify`."""
        step = Step.draft_extend(UniformQuery(width), self.lens(requests), self.paging(requests))
        self._run(
            step, requests, [self.drafted(r, width, a) for r, a in zip(requests, accepted, strict=True)], accepted
        )

    def draft(self, requests: Sequence[Request], num_steps: int, right: Sequence[int]) -> None:
        """The forwards of a draft loop, which commit nothing. right: leading drafted tokens that are the chain's."""
        step = Step.draft_decode(1, num_steps, self.lens(requests), self.paging(requests))
        meta = self.backend.init_forward_metadata(step)
        rows = [self.drafted(r, num_steps - 1, a) for r, a in zip(requests, right, strict=True)]
        for index in range(step.num_forwards):
            tokens = [given[index : index + 1] for given in rows]
            self.forward(meta, requests, tokens, [int(index < a) for a in right], index)

    def drafted(self, request: Request, width: int, right: int) -> Tensor:
        """The next tokens of a chain, the first `right` of them as they are and the others wrong."""
        tokens = request.chain[request.committed : request.committed + width].clone()
        assert len(tokens) == width, "the chain is too short"
        tokens[right:] = (tokens[right:] + 1 + torch.randint(60, (width - right,), generator=self.rng)) % 64
        return tokens


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """What a model hands to one layer of one forward."""

    q: Tensor
    stored: CompressedInputs
    index: IndexQuery | None

    def tensors(self) -> list[Tensor]:
        """All tensors, in a fixed order."""
        parts = [part for part in (self.stored.compressor, self.stored.indexer) if part is not None]
        index = [] if self.index is None else [self.index.q, self.index.weights]
        return [self.q, self.stored.rows, *(t for part in parts for t in (part.values, part.gates)), *index]

    def map(self, change: Callable[[Tensor], Tensor]) -> LayerInputs:
        """The same of changed tensors."""

        def projected(part: Projections | None) -> Projections | None:
            return part and Projections(change(part.values), change(part.gates))

        stored = self.stored
        changed = CompressedInputs(change(stored.rows), projected(stored.compressor), projected(stored.indexer))
        index = self.index and IndexQuery(change(self.index.q), change(self.index.weights))
        return LayerInputs(change(self.q), changed, index)


def random_inputs(layer: CompressedLayer, num_tokens: int, rng: torch.Generator) -> LayerInputs:
    """Random inputs of a layer; 16 index heads."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(num_tokens, *shape, generator=rng)

    def projected(compressor: Compressor | None) -> Projections | None:
        return compressor and Projections(draw(compressor.channels), draw(compressor.channels))

    stored = CompressedInputs(draw(layer.head_dim), projected(layer.compressor), projected(layer.indexer))
    index = None if layer.indexer is None else IndexQuery(draw(16, layer.indexer.dim), draw(16))
    return LayerInputs(draw(layer.num_heads, layer.head_dim), stored, index)


def run_layers(engine: Engine, meta: Metadata, inputs: Sequence[Sequence[LayerInputs]]) -> list[AttentionOutput]:
    """Store and attend in every forward and layer. inputs: of each forward, of each layer."""
    outputs = []
    for forward, of_layers in enumerate(inputs):
        at = meta.at(forward)
        for layer, cache, given in zip(engine.layers, engine.caches, of_layers, strict=True):
            engine.backend.store(given.stored, cache, at, layer)
            outputs.append(engine.backend.forward(given.q, cache, at, layer, given.index))
    return outputs


def pools_of(cache: CompressedCache) -> list[Pages]:
    """All pools of a layer's cache."""
    pairs = [pools for pools in (cache.compressor, cache.indexer) if isinstance(pools, EntryPools)]
    return [cache.rows, *(pool for pair in pairs for pool in (pair.entries, pair.states))]


def poison_cache(cache: CompressedCache, value: float) -> None:
    """Fill every pool; 8-bit pages with bytes that are NaN, or finite garbage."""
    for pool in pools_of(cache):
        if isinstance(pool, Fp8Pages):
            pool.data.fill_(0xFF if value != value else 0x42)
        else:
            pool.data.fill_(value)


def check_outputs(model: DeepseekV4ForCausalLM, request: Request, tolerance: float = 5e-5) -> float:
    """Every right row of a request against transformers' forward on what is committed; returns the largest error.

    Selections are compared as sets first (`oracle`).
    """
    expected, differing, rows = oracle(model, request)
    assert differing <= 0.01 * rows, f"{differing} of {rows} selections differ"
    assert {position for position, _ in request.outputs} >= set(range(request.first, request.committed))
    worst = 0.0
    for position, logits in request.outputs:
        error = float((logits - expected[position]).abs().max()) if bool(logits.isfinite().all()) else float("inf")
        assert error <= tolerance, f"position {position}: {error}"
        worst = max(worst, error)
    return worst


def oracle(model: DeepseekV4ForCausalLM, request: Request) -> tuple[Tensor, int, int]:
    """Logits [T, vocab] of transformers' forward on the committed chain, and how many selections of how many differ.

    Where our selection is another set, each entry that only one of them has must score as the last selected one does,
    within float32's error; then transformers is given ours.
    """
    length = max(position for position, _ in request.outputs) + 1
    counts = [0, 0]

    def compare(layer: int, scores: Tensor, theirs: Tensor) -> Tensor:
        for position in range(length):
            kept = {entry for entry in theirs[0, position].tolist() if entry >= 0}
            ours = request.selected.get((layer, position), kept)
            counts[1] += 1
            if ours == kept:
                continue
            counts[0] += 1
            assert len(ours) == len(kept), f"layer {layer}, position {position}: {ours} selected, not {kept}"
            cut = min(float(scores[0, position, entry]) for entry in kept)
            for entry in ours ^ kept:
                gap = abs(float(scores[0, position, entry]) - cut)
                assert gap < 1e-5, f"layer {layer}, position {position}: entry {entry} is {gap} from the cut"
            theirs[0, position, : len(ours)] = torch.tensor(sorted(ours))
        return theirs

    watched = copy.deepcopy(model)
    for index, block in enumerate(watched.model.layers):
        indexer = getattr(block.self_attn.compressor, "indexer", None)
        if indexer is not None:
            _watch(indexer, index, compare)
    logits = watched(request.chain[:length].unsqueeze(0), use_cache=False).logits.squeeze(0)
    return logits, counts[0], counts[1]


def _watch(indexer: Any, layer: int, compare: Callable[[int, Tensor, Tensor], Tensor]) -> None:
    """Put a comparison between transformers' selection and those that attend to it."""
    scores: list[Tensor] = []
    indexer.scorer.register_forward_hook(lambda module, inputs, output: scores.append(output))
    indexer.register_forward_hook(lambda module, inputs, output: compare(layer, scores.pop(), output.clone()))


def chains(*lens: int, seed: int = 5) -> list[Tensor]:
    """Random tokens."""
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(64, (length,), generator=rng) for length in lens]
