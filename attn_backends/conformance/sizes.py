"""Sizes of the suite's worlds: named ones, and changes to them that a case can spell out."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from attn_backends.errors import ConfigError

NUM_STEPS, MAX_BS = 3, 5
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 6
MLA_HEADS, RANK, ROPE = 3, 5, 2


@dataclass(frozen=True)
class Size:
    """The size of a world.

    pages, tokens: that a request may commit, at least. spare_pages: of a table row, past what a request may have.
    heads: of queries, (over keys and values, over latents). kv: key-value heads and elements of a head. latent: (rank,
    rope). dim: elements of a compressed row. Where a kernel declares heads or elements of its own, a world has the next
    larger number of heads. It has the kernel's least elements if it is small, the most if not, or those of declared:
    elements of a query-key head (0: none named). nodes: that a verify takes, of a tree or
    a chain (0: all that may be drafted). full: requests that may be of full length at once, the others being shorter
    than a page and a draft (0: all). cache: pages of the cache, at least.
    """

    max_bs: int
    num_steps: int
    pages: int
    spare_pages: int
    heads: tuple[int, int]
    kv: tuple[int, int]
    latent: tuple[int, int]
    dim: int
    tokens: int = 14
    nodes: int = 0
    full: int = 0
    cache: int = 0
    declared: int = 0

    def room(self, topk: int) -> int:
        """Tokens that a step may add: branches at all depths or all nodes, or a chain of all steps with its root."""
        return max(topk * self.num_steps, self.nodes) if topk > 1 else self.num_steps + 1

    def row_pages(self, page_size: int, topk: int) -> int:
        """Pages that a request may have."""
        committed = max(self.tokens, self.pages * page_size)
        return max(2, -(-(committed + self.room(topk)) // page_size))

    def cache_pages(self, page_size: int, topk: int) -> int:
        """Pages of the cache: those of all requests, a reserved one and some that no request owns."""
        most = self.row_pages(page_size, topk) + self.spare_pages
        least = min(most, 2 + self.room(topk) * max(self.num_steps, 1) // page_size)
        num_full = min(self.full or self.max_bs, self.max_bs)
        return max(num_full * most + (self.max_bs - num_full) * least + 4, self.cache)


SMALL = Size(MAX_BS, NUM_STEPS, 0, 0, (HEADS, MLA_HEADS), (KV_HEADS, HEAD_DIM), (RANK, ROPE), dim=8)
SIZES = {
    "": SMALL,
    "wide": Size(10, 5, 4, 1, (64, 8), (8, 128), (512, 64), dim=128),
    "many": Size(36, 5, 4, 0, (8, 8), (2, 64), (56, 8), dim=64),
    "long": Size(4, 4, 0, 0, (8, 8), (2, 8), (10, 6), dim=8),
}
CHANGES = {
    "bs": "max_bs",
    "steps": "num_steps",
    "tokens": "tokens",
    "nodes": "nodes",
    "full": "full",
    "cache": "cache",
    "spare": "spare_pages",
    "dims": "declared",
}
"""What a size's name may change, by the words that it is said with; and `heads`, of queries."""


@cache
def size_of(name: str) -> Size:
    """A size of `SIZES`, perhaps changed: "long.steps7.tokens4100" is "long" of 7 steps and 4,100 tokens. A name that
    begins with a change is of the small size. Raises `ConfigError` for another.
    """
    base, *changes = name.split(".")
    if base not in SIZES:
        base, changes = "", name.split(".")
    size = SIZES[base]
    for change in changes:
        found = re.fullmatch(r"([a-z]+)(\d+)", change)
        if found is None or found[1] not in (*CHANGES, "heads"):
            raise ConfigError(
                f"size {name!r}: {change!r} is neither a size ({', '.join(filter(None, SIZES))}) nor a change to one, "
                f"a number after {', '.join(CHANGES)} or heads"
            )
        value = int(found[2])
        changed: Any = {"heads": (value, value)} if found[1] == "heads" else {CHANGES[found[1]]: value}
        size = replace(size, **changed)
    return size
