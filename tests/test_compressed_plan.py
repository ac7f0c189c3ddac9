"""The compressed plan against plain loops over requests and tokens; its ring bound against a ring in small."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.errors import CaptureError, UnsupportedStepError
from attn_backends.graphs import RecordedGraph
from spec_metadata import BlockTable, CacheGeometry, Capacity, PackedQuery, RequestTable, Step, StepKind, UniformQuery
from spec_metadata.plans import compressed
from spec_metadata.plans.compressed import CompressedPlan, Compression, min_ring
from spec_metadata.static_inputs import pad_step
from tests.dsv4_model import REAL, SMALL, Sizes

NUM_STEPS, NUM_DRAFT_TOKENS, MAX_BS = 3, 4, 4
KINDS = [k for k in StepKind if k not in (StepKind.IDLE, StepKind.DRAFT_BLOCK)]
SHARED = ("qo_indptr", "request", "page_table")  # by all forwards
ODD = Sizes(ratio=2, long_ratio=6, window=5, page_size=12)


@dataclass
class Batch:
    """Requests with shuffled pages, a backend for them, and its step."""

    sizes: Sizes
    kind: StepKind
    lens: tuple[int, ...]
    widths: tuple[int, ...] = ()
    block_table: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        page_size = self.sizes.page_size
        context = max(3 * page_size, 64)
        capacity = Capacity(MAX_BS, context, page_size, 1, NUM_STEPS, NUM_DRAFT_TOKENS)
        self.max_pages = capacity.max_pages
        num_pages = (MAX_BS + 1) * self.max_pages + 2
        self.geometry = CacheGeometry(num_pages, page_size, reserved_page=3, reserved_row=1)
        self.backend = self.sizes.backend(capacity, self.geometry, checking=True)
        self.table = torch.zeros(MAX_BS + 2, self.max_pages * page_size, dtype=torch.int64)
        self.place(self.seed)

    def place(self, seed: int) -> None:
        """Give the requests other pages and rows."""
        rng = torch.Generator().manual_seed(seed)
        free = [p for p in torch.randperm(self.geometry.num_pages, generator=rng).tolist() if p != 3]
        self.rows = [r for r in torch.randperm(MAX_BS + 2, generator=rng).tolist() if r != 1][: len(self.lens)]
        self.pages = {row: [free.pop() for _ in range(self.max_pages)] for row in self.rows}
        self.table.fill_(3 * self.sizes.page_size)
        offsets = torch.arange(self.sizes.page_size)
        for row, pages in self.pages.items():
            self.table[row] = (torch.tensor(pages).unsqueeze(1) * self.sizes.page_size + offsets).flatten()

    def step(self) -> Step:
        """The step."""
        lens = torch.tensor(self.lens, dtype=torch.int32)
        if self.block_table:
            pages = torch.tensor([self.pages[row] for row in self.rows], dtype=torch.int32).reshape(-1, self.max_pages)
            paging: Any = BlockTable(pages, self.geometry)
        else:
            paging = RequestTable(self.table, torch.tensor(self.rows, dtype=torch.int64), self.geometry)
        query = PackedQuery.of(self.widths) if self.widths else UniformQuery(NUM_DRAFT_TOKENS)
        match self.kind:
            case StepKind.PREFILL:
                return Step.prefill(PackedQuery.of(self.widths), lens, paging)
            case StepKind.DECODE:
                return Step.decode(lens, paging)
            case StepKind.DRAFT_DECODE:
                return Step.draft_decode(1, NUM_STEPS, lens, paging)
            case StepKind.TARGET_VERIFY:
                return Step.target_verify(NUM_DRAFT_TOKENS, lens, paging)
            case _:
                return Step.draft_extend(query, lens, paging)

    def expected(self, forward: int) -> dict[str, Any]:
        """Every tensor of the plan of a forward, by loops; of those that forwards share, what it sees of them."""
        drafts, page_size, window = self.kind is StepKind.DRAFT_DECODE, self.sizes.page_size, self.sizes.window
        default = 1 if drafts or self.kind is StepKind.DECODE else NUM_DRAFT_TOKENS
        widths = self.widths or (default,) * len(self.lens)
        starts = [length + (forward if drafts else 0) for length in self.lens]
        tokens = [(b, starts[b] + j) for b, width in enumerate(widths) for j in range(width)]
        slot = lambda b, p: self.pages[self.rows[b]][p // page_size] * page_size + p % page_size  # noqa: E731
        found: dict[str, Any] = {
            "qo_indptr": [sum(widths[:b]) for b in range(len(widths) + 1)],
            "request": [b for b, _ in tokens],
            "window_slots": [[slot(b, p - k) if k <= p else -1 for k in range(window)] for b, p in tokens],
            "window_lens": [min(p + 1, window) for _, p in tokens],
            "page_table": [
                [page for k, page in enumerate(self.pages[row]) if k * page_size < start + width]
                for row, start, width in zip(self.rows, starts, widths, strict=True)
            ],
        }
        for compression, ring in self.backend.rings.items():
            ratio, width = compression.ratio, compression.read_window
            state = lambda b, p: slot(b, p) // page_size * ring + p % ring  # noqa: B023, E731
            made = [(b, p) for b, p in tokens if (p + 1) % ratio == 0]
            reads = [[p - width + 1 + j for j in range(width)] for _, p in made]
            last = {state(b, p): (b, p) for b, p in tokens}
            found[f"num_entries_{ratio}"] = [(p + 1) // ratio for _, p in tokens]
            found[f"entry_writes_{ratio}"] = [slot(b, p) // ratio for b, p in made]
            found[f"entry_positions_{ratio}"] = [p - ratio + 1 for _, p in made]
            found[f"input_rows_{ratio}"] = [
                [tokens.index((b, q)) if q >= starts[b] else -1 for q in row]
                for (b, _), row in zip(made, reads, strict=True)
            ]
            found[f"state_reads_{ratio}"] = [
                [state(b, q) if 0 <= q < starts[b] else -1 for q in row]
                for (b, _), row in zip(made, reads, strict=True)
            ]
            found[f"state_writes_{ratio}"] = [state(b, p) if last[state(b, p)] == (b, p) else -1 for b, p in tokens]
            if not compression.indexed:
                found[f"entry_slots_{ratio}"] = [
                    [slot(b, w * ratio) // ratio for w in range((p + 1) // ratio)] for b, p in tokens
                ]
        return found


def check_plan(batch: Batch) -> None:
    """Every forward's buffers against loops; what lies behind the live part must be the declared padding."""
    step = batch.step()
    meta = batch.backend.init_forward_metadata(step)
    pads = {spec.name: spec.pad for spec in batch.backend.buffers(step.kind)}
    assert pads.keys() <= meta.buffers.keys()
    for forward in range(step.num_forwards):
        expected = batch.expected(forward)
        assert expected.keys() == pads.keys()
        for name, values in expected.items():
            shared = name in SHARED
            if name == "page_table":
                values = batch.expected(step.num_forwards - 1)[name]
            tensor = meta.buffers[name] if shared else meta.buffers[name][forward]
            check_buffer(f"{name} of forward {forward}", tensor, values, pads[name])
        slots = meta.buffers["write_slots"][forward]
        for compression in batch.backend.rings:
            made, ratio = expected[f"entry_writes_{compression.ratio}"], compression.ratio
            closing = [slot // ratio for slot, p in zip(slots.tolist(), positions(batch, forward), strict=True)
                       if (p + 1) % ratio == 0]  # fmt: skip
            assert made == closing


def positions(batch: Batch, forward: int) -> list[int]:
    """Position of each row of a forward."""
    drafts = batch.kind is StepKind.DRAFT_DECODE
    default = 1 if drafts or batch.kind is StepKind.DECODE else NUM_DRAFT_TOKENS
    widths = batch.widths or (default,) * len(batch.lens)
    return [n + j + (forward if drafts else 0) for n, w in zip(batch.lens, widths, strict=True) for j in range(w)]


def check_buffer(what: str, tensor: Tensor, values: list, pad: int) -> None:
    """A tensor holds ragged nested lists, and padding around them."""
    full = torch.full_like(tensor, pad)
    for index, value in enumerate(values):
        if isinstance(value, list):
            full[index, : len(value)] = torch.tensor(value, dtype=tensor.dtype)
        else:
            full[index] = value
    assert torch.equal(tensor, full), f"{what}:\n{tensor}\n{full}"


def around(sizes: Sizes) -> list[tuple[int, ...]]:
    """Committed lengths around blocks, the window and pages."""
    page, window, ratio = sizes.page_size, sizes.window, sizes.long_ratio
    return [(page - 1, page, page + 1, 1), (window - 1, window, window + 1, ratio), (2 * ratio - 3, 3, 2, page - 3)]


@pytest.mark.parametrize("block_table", [False, True], ids=["request_table", "block_table"])
@pytest.mark.parametrize("sizes", [SMALL, ODD, REAL], ids=["small", "odd", "real"])
@pytest.mark.parametrize("kind", KINDS)
def test_plan(kind: StepKind, sizes: Sizes, block_table: bool) -> None:
    for seed, lens in enumerate(around(sizes)):
        widths = (1, 2 * sizes.page_size, 3, sizes.long_ratio + 1) if kind is StepKind.PREFILL else ()
        check_plan(Batch(sizes, kind, lens, widths, block_table, seed))


def test_plan_of_prompts_without_prefix_and_of_packed_draft_extend() -> None:
    check_plan(Batch(SMALL, StepKind.PREFILL, (0, 0, 5), (1, 40, 7)))
    check_plan(Batch(SMALL, StepKind.DRAFT_EXTEND, (6, 15, 1), (2, 4, 1)))


def test_every_length_of_a_small_model() -> None:
    for length in range(1, 40):
        for kind in (StepKind.TARGET_VERIFY, StepKind.DRAFT_DECODE, StepKind.DECODE):
            check_plan(Batch(SMALL, kind, (length, length + 7)))


def test_idle() -> None:
    batch = Batch(SMALL, StepKind.DECODE, ())
    paging = RequestTable(batch.table, torch.zeros(0, dtype=torch.int64), batch.geometry)
    meta = batch.backend.init_forward_metadata(Step.idle(paging))
    assert meta.buffers["qo_indptr"].tolist() == [0]
    assert all(tensor.numel() == 0 for name, tensor in meta.buffers.items() if name != "qo_indptr")


GRAPH_KINDS = [k for k in KINDS if k is not StepKind.PREFILL]


@pytest.mark.parametrize("block_table", [False, True], ids=["request_table", "block_table"])
@pytest.mark.parametrize("bs", [2, 3], ids=["full", "padded"])
@pytest.mark.parametrize("kind", GRAPH_KINDS)
def test_a_recorded_plan_equals_the_eager_one_of_the_same_layout(kind: StepKind, bs: int, block_table: bool) -> None:
    batch = Batch(SMALL, kind, (5, 18), block_table=block_table)
    backend = batch.sizes.backend(batch.backend.capacity, batch.geometry)
    meta = backend.capture(backend.capacity.bucket(kind, bs), batch.step().paging)
    backend.replay(meta, batch.step())
    graph = RecordedGraph()
    graph.capture(lambda: backend.refresh(meta))
    for seed, lens in ((5, (31, 2)), (6, (7, 15))):
        batch.lens = lens
        batch.place(seed)
        meta.captured.phase.reset()
        backend.copy_inputs(meta, batch.step())
        graph.replay()
        eager = backend.init_forward_metadata(pad_step(batch.step(), batch.step().bucket(bs), backend.capacity))
        for name in ("write_slots", *(spec.name for spec in backend.buffers(kind))):
            assert torch.equal(meta.buffers[name], eager.buffers[name]), name


def test_padded_rows_name_the_reserved_page_only() -> None:
    batch = Batch(SMALL, StepKind.TARGET_VERIFY, (5, 18))
    meta = batch.backend.init_forward_metadata(pad_step(batch.step(), batch.step().bucket(4), batch.backend.capacity))
    per_page = {"window_slots": 16, "write_slots": 16, "state_writes_4": 10, "state_writes_8": 10}
    for name, rows in per_page.items():
        padding = meta.buffers[name][0][8:]
        assert set((padding[padding >= 0] // rows).tolist()) == {3}, name
    for ratio, made in ((4, 3), (8, 1)):
        writes = meta.buffers[f"entry_writes_{ratio}"][0]
        padding = writes[made:][writes[made:] >= 0]
        assert set((padding // (16 // ratio)).tolist()) <= {3}, ratio


def test_checking_mode_sees_a_plan_that_left_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(SMALL, StepKind.DECODE, (5, 18))
    meta = batch.backend.capture(batch.backend.capacity.bucket(StepKind.DECODE, 2), batch.step().paging)
    batch.backend.replay(meta, batch.step())
    view = compressed.view_compressed

    def elsewhere(*args: Any) -> tuple[CompressedPlan, ...]:
        plans = view(*args)
        object.__setattr__(plans[0].entries[8], "write_slots", plans[0].entries[8].write_slots.clone())
        return plans

    monkeypatch.setattr(compressed, "view_compressed", elsewhere)
    with pytest.raises(CaptureError, match=r"entries was"):
        batch.backend.replay(meta, batch.step())


def rolls_back(read_window: int, ratio: int, ring: int, rows: int, forwards: int, length: int = 40) -> bool:
    """Whether a ring without pages keeps what every entry is made of, one token committing a cycle.

    A cycle runs `forwards` draft forwards and an extend of `rows`, all but its first wrong; with no forwards, a verify.
    """
    ring_rows: dict[int, Any] = {}
    for start in range(length):
        for first, last in [(start + i, start + i) for i in range(forwards)] + [(start, start + rows - 1)]:
            is_last = first == start and last == start + rows - 1
            for closing in range(first, last + 1):
                if (closing + 1) % ratio == 0 and is_last and closing == start:
                    needed = range(max(0, closing - read_window + 1), first)
                    if any(ring_rows.get(p % ring) != (p, "right") for p in needed):
                        return False
            for p in range(first, last + 1):
                ring_rows[p % ring] = (p, "right" if is_last and p == start else "wrong")
    return True


@pytest.mark.parametrize("forwards", [0, 1, 2, 5])
@pytest.mark.parametrize("rows", [2, 3, 4, 6, 9])
@pytest.mark.parametrize("compression", [Compression(4, overlap=True), Compression(8), Compression(2, overlap=True)])
def test_the_ring_bound_is_tight(compression: Compression, rows: int, forwards: int) -> None:
    window, ratio = compression.read_window, compression.ratio
    ring = min_ring(window, rows, forwards)
    assert rolls_back(window, ratio, ring, rows, forwards)
    assert not rolls_back(window, ratio, ring - 1, rows, forwards)
    assert compressed.max_rows(window, ring, 10**6) >= rows
    assert compressed.max_draft_forwards(window, ring, 10**6) >= forwards
    assert min(
        compressed.max_rows(window, ring - 1, 10**6) - rows,
        compressed.max_draft_forwards(window, ring - 1, 10**6) - forwards,
    ) < 0  # fmt: skip


def test_page_size_that_a_ratio_does_not_divide() -> None:
    for page_size, nearest in ((12, 16), (4, 8), (17, 16), (20, 24)):
        sizes = Sizes(page_size=page_size)
        capacity = Capacity(2, 64, page_size)
        with pytest.raises(UnsupportedStepError, match=rf"page size {page_size}: blocks.* page size {nearest}$"):
            sizes.backend(capacity, CacheGeometry(20, page_size))
