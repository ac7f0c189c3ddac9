"""Random batches of every kind in either form of table, and what their rows see by definition."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spec_metadata import (
    BlockTable,
    Bucket,
    CacheGeometry,
    Capacity,
    PackedQuery,
    Paging,
    RequestTable,
    Step,
    TokenBucket,
    UniformQuery,
    pad_step,
)

RESERVED = 3
KINDS = [
    "prefill",
    "decode",
    "draft chain",
    "draft tree",
    "block",
    "verify chain",
    "verify tree",
    "extend",
    "packed extend",
]
PACKED_KINDS = ("prefill", "packed extend")
COMPRESSED_KINDS = [kind for kind in KINDS if kind != "block" and "tree" not in kind]


class Case:
    """A random batch of a kind, in either form of table, and what its rows see by definition.

    sizes: requests to choose from. context: committed tokens that a request may have. pad: rows of padding behind them.
    has_slots: whether the step brings its write slots.
    """

    def __init__(
        self,
        kind: str,
        page_size: int,
        seed: int,
        *,
        form: type = RequestTable,
        pad: int = 0,
        sizes: Sequence[int] = (2, 3, 5),
        context: int | None = None,
        device: torch.device | str = "cpu",
        has_slots: bool = True,
    ) -> None:
        rng = self.rng = random.Random(f"{kind} {page_size} {seed}")
        self.kind, self.page_size, self.pad, self.device = kind, page_size, pad, device
        self.dtype, self.other = rng.choice([(torch.int32, torch.int64), (torch.int64, torch.int32)])
        topk = rng.choice([2, 3, 5]) if kind == "draft tree" else 1
        self.num_steps = rng.choice([1, 2, 3, 5])
        width = {"decode": 1, "draft chain": 1, "draft tree": topk}.get(kind) or rng.randint(2, 7)
        num_nodes = min(1 + topk * self.num_steps, 2) if "draft" in kind else width
        self.capacity = Capacity(
            max_bs=max(sizes) + pad,
            max_context=3 * page_size + 11 if context is None else context,
            page_size=page_size,
            topk=max(topk, 8),
            num_steps=self.num_steps,
            num_draft_tokens=max(num_nodes, 2),
            num_rerun=4 if kind == "packed extend" else 0,
        )
        self.bs = rng.choice(sizes)
        self.lens = [self._length() for _ in range(self.bs)]
        packed = kind in PACKED_KINDS
        self.widths = [rng.randint(1, 5) for _ in range(self.bs)] if packed else [width] * self.bs
        columns = self.capacity.max_pages + 2
        self.geometry = CacheGeometry(400 + self.bs * columns, page_size, RESERVED, reserved_row=0)
        shuffled = torch.randperm(self.geometry.num_pages - 4, generator=torch.Generator().manual_seed(seed)) + 4
        self.pages = shuffled[: self.bs * columns].view(self.bs, columns).tolist()
        self.paging = self._paging(form)
        self.step = self._step()
        if has_slots:
            self.step = replace(self.step, out_cache_loc=self._tensor(self.step.flat_slots(), self.other))
        if pad:
            self.step = pad_step(self.step, self.bucket(pad), self.capacity)

    def _length(self) -> int:
        """Committed tokens, often around an edge."""
        page, most = self.page_size, self.capacity.max_context
        edges = [0, 1, page - 1, page, page + 1, most, self.rng.randint(0, most)]
        return min(self.rng.choice(edges), most)

    def _tensor(self, values: Sequence[int] | Tensor, dtype: torch.dtype) -> Tensor:
        """Integers in a tensor of which no dimension is dense, with others between them."""
        given = torch.as_tensor(values, dtype=dtype).to(self.device)
        return torch.stack((given, given + 1), dim=-1)[..., 0]

    def _paging(self, form: type) -> Paging:
        pages = torch.tensor(self.pages)
        if form is BlockTable:
            return BlockTable(self._tensor(pages, self.dtype), self.geometry)
        rows = self.rng.sample(range(1, self.bs + 4), self.bs)
        table = torch.full((self.bs + 4, pages.shape[1]), RESERVED)
        table[rows] = pages
        slots = table.unsqueeze(2) * self.page_size + torch.arange(self.page_size)
        return RequestTable(self._tensor(slots.flatten(1), self.dtype), self._tensor(rows, self.other), self.geometry)

    def _step(self) -> Step:
        lens, width = self._tensor(self.lens, self.dtype), self.widths[0]
        query = PackedQuery.of(self.widths)
        query = replace(query, cu_seqlens=self._tensor(query.cu_seqlens, torch.int32))
        sees = [[[i == j or self.rng.random() < 0.5 for i in range(width)] for j in range(width)] for _ in self.lens]
        mask = torch.tensor(sees, device=self.device).transpose(1, 2)
        match self.kind:
            case "prefill":
                return Step.prefill(query, lens, self.paging)
            case "decode":
                return Step.decode(lens, self.paging)
            case "draft chain" | "draft tree":
                return Step.draft_decode(width, self.num_steps, lens, self.paging)
            case "block":
                return Step.draft_block(width, lens, self.paging)
            case "verify chain":
                return Step.target_verify(width, lens, self.paging)
            case "verify tree":
                return Step.target_verify(width, lens, self.paging, tree_mask=mask)
            case "extend":
                return Step.draft_extend(UniformQuery(width), lens, self.paging)
            case _:
                return Step.draft_extend(query, lens, self.paging)

    def bucket(self, num_more: int) -> Bucket | TokenBucket:
        """One with room for more requests than the step has, and for three packed rows of each of them."""
        if self.kind in PACKED_KINDS:
            return TokenBucket(self.step.kind, self.step.bs + num_more, self.step.num_tokens + 3 * num_more)
        return self.step.bucket(self.step.bs + num_more)

    @property
    def causal(self) -> bool:
        return "tree" not in self.kind and self.kind != "block"

    def kv_lens(self, forward: int | None) -> list[int]:
        """Keys that the last row of each request sees in the dense part; padding sees its own width."""
        drafted = 0 if forward is None else forward + 1
        new = [drafted] * self.bs if self.kind == "draft chain" else self.widths
        real = [length + (0 if "tree" in self.kind else n) for length, n in zip(self.lens, new, strict=True)]
        return real + [self.widths[0]] * self.pad

    def visible_pages(self, forward: int | None) -> list[list[int]]:
        """Pages of the visible keys of each request."""
        counts = [-(-length // self.page_size) for length in self.kv_lens(forward)]
        owned = self.pages + [[RESERVED] * len(self.pages[0])] * self.pad
        return [pages[:count] for pages, count in zip(owned, counts, strict=True)]

    def starts(self) -> list[int]:
        """First query row of each request, and the end."""
        widths = self.widths + [self.widths[0]] * self.pad
        return [sum(widths[:i]) for i in range(len(widths) + 1)]


def elsewhere(step: Step) -> Step:
    """The same step, its tensors in other memory."""
    names = [name for name in ("seq_lens", "out_cache_loc", "num_real", "tree_mask") if getattr(step, name) is not None]
    moved = {name: _moved(getattr(step, name)) for name in names}
    paging = step.paging
    if isinstance(paging, RequestTable):
        paging = replace(paging, table=_moved(paging.table), rows=_moved(paging.rows))
    else:
        paging = replace(paging, table=_moved(paging.table))
    return replace(step, paging=paging, **moved)


def _moved(given: Any) -> Any:
    if not isinstance(given, Tensor):
        return given
    return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype).copy_(given)
