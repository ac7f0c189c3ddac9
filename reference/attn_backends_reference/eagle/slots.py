"""The reference worker's slot allocator: pages for requests, and the request-to-token table that steps read.

Requests whose prompts begin alike share the pages of the common beginning. A page is shared once all of it is
committed, and is read only from then on: every request writes after its own prompt, in pages of its own.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import takewhile
from types import MappingProxyType

import torch
from torch import Tensor

from attn_backends.errors import AttnBackendsError
from spec_metadata import CacheGeometry, Capacity, RequestTable
from spec_metadata.capacity import ceil_div
from spec_metadata.upload import upload

NO_DIGESTS: Mapping[int, bytes] = MappingProxyType({})


class OutOfSlotsError(AttnBackendsError):
    """No free page or table row is left."""


class SlotAllocator:
    """Gives pages to table rows and takes them back.

    Row `geometry.reserved_row` and page `geometry.reserved_page` belong to padding and are never given. Unowned entries
    of the table point into the reserved page. A draft's entry at a position depends on `lookahead` tokens after it, so
    a page is shared where these are the same, too. seed: order in which pages are given, shuffled so that no kernel can
    rely on neighbouring pages.
    """

    def __init__(self, geometry: CacheGeometry, capacity: Capacity, device: torch.device, seed: int = 0) -> None:
        self.geometry = geometry
        self.max_tokens = capacity.max_kv_len
        self.lookahead = capacity.num_rerun + 1
        self._reserved = geometry.reserved_slots(capacity.max_kv_len, device).to(torch.int32)
        self.table = self._reserved.repeat(capacity.max_bs + 1, 1)
        self._pages: dict[int, list[int]] = {}
        self._free_rows = [row for row in range(capacity.max_bs + 1) if row != geometry.reserved_row]
        self._free_pages = [page for page in range(geometry.num_pages) if page != geometry.reserved_page]
        random.Random(seed).shuffle(self._free_pages)
        self._refcounts: Counter[int] = Counter()
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free_pages(self) -> int:
        """Pages that belong to no request."""
        return len(self._free_pages)

    @property
    def in_use(self) -> bool:
        """Whether some row or page is in use."""
        return bool(self._pages) or self.num_free_pages < self.geometry.num_pages - 1

    def pages(self, row: int) -> tuple[int, ...]:
        """The pages that a row holds, in the order of its positions."""
        return tuple(self._pages[row])

    def prefix_keys(self, prompt: Sequence[int], digests: Mapping[int, bytes] = NO_DIGESTS) -> list[bytes]:
        """The key of each whole page of a prompt: a digest of all tokens up to its end and the `lookahead` ones after
        them, made from the digest of the page before.

        digests: by position, of tokens that stand for something else, such as an embedding; of one length. The last
        tokens of a prompt lie in no page that can be shared, so every request computes them.
        """
        page_size, ids = self.geometry.page_size, array("q", prompt)
        keys, key = list[bytes](), b""
        for start in range(0, len(ids) - self.lookahead - page_size + 1, page_size):
            end = start + page_size + self.lookahead
            further = b"".join(digests[place] for place in range(start, end) if place in digests)
            key = blake2b(key + ids[start:end].tobytes() + further, digest_size=16).digest()
            keys.append(key)
        return keys

    def can_admit(self, num_tokens: int, keys: Sequence[bytes] = ()) -> bool:
        """Whether a row and the pages for num_tokens positions are free, those counted that can be shared.

        keys: of the prompt, `prefix_keys`, here and below.
        """
        num_missing = ceil_div(num_tokens, self.geometry.page_size) - len(self._shared_pages(keys))
        return bool(self._free_rows) and num_missing <= self.num_free_pages

    def admit(self, keys: Sequence[bytes] = ()) -> int:
        """A row for a new request, which holds the pages of its prompt's beginning that others have committed."""
        if not self._free_rows:
            raise OutOfSlotsError(f"all {len(self._pages)} rows of the table are taken")
        row = self._free_rows.pop()
        self._pages[row] = []
        self._give(row, self._shared_pages(keys))
        return row

    def num_held_tokens(self, row: int) -> int:
        """Positions that a row has pages for; of a row that was just admitted, those that it shares."""
        return len(self._pages[row]) * self.geometry.page_size

    def num_shared_tokens(self, keys: Sequence[bytes]) -> int:
        """Tokens of a prompt's beginning that another request has committed in pages which can be shared."""
        return len(self._shared_pages(keys)) * self.geometry.page_size

    def num_common_tokens(self, keys: Sequence[bytes], other: Sequence[bytes]) -> int:
        """Tokens of the pages that two prompts can share."""
        return sum(a == b for a, b in zip(keys, other, strict=False)) * self.geometry.page_size

    def reserve(self, row: int, num_tokens: int) -> None:
        """Give a row pages for its first num_tokens positions, if it lacks any."""
        num_missing = ceil_div(num_tokens, self.geometry.page_size) - len(self._pages[row])
        if num_tokens > self.max_tokens:
            raise OutOfSlotsError(f"row {row} asks for {num_tokens} tokens; a table row holds {self.max_tokens}")
        if num_missing > len(self._free_pages):
            raise OutOfSlotsError(
                f"row {row} needs {num_missing} more pages of {self.geometry.page_size} tokens, "
                f"{len(self._free_pages)} are free"
            )
        self._give(row, [self._free_pages.pop() for _ in range(num_missing)])

    def share(self, row: int, keys: Sequence[bytes], num_committed: int) -> None:
        """Let others share the pages of a row's prompt that lie wholly within its first num_committed tokens."""
        for page, key in zip(self._pages[row], keys[: num_committed // self.geometry.page_size], strict=False):
            if key not in self._page_of:
                self._page_of[key], self._key_of[page] = page, key

    def release(self, row: int) -> None:
        """Take a row back, and those of its pages that no other row holds."""
        for page in self._pages.pop(row):
            self._refcounts[page] -= 1
            if not self._refcounts[page]:
                del self._refcounts[page]
                self._page_of.pop(self._key_of.pop(page, b""), None)
                self._free_pages.append(page)
        self._free_rows.append(row)
        self.table[row] = self._reserved

    def paging(self, rows: Tensor) -> RequestTable:
        """The table for a batch. rows: [bs] int64."""
        return RequestTable(self.table, rows, self.geometry)

    def _shared_pages(self, keys: Sequence[bytes]) -> list[int]:
        """The pages that hold the prompt's beginning, as far as somebody has committed them."""
        return [self._page_of[key] for key in takewhile(self._page_of.__contains__, keys)]

    def _give(self, row: int, pages: Sequence[int]) -> None:
        """Append pages to a row."""
        start, page_size = self.num_held_tokens(row), self.geometry.page_size
        self._pages[row] += pages
        self._refcounts.update(pages)
        first_slots = torch.tensor(pages, dtype=torch.int32).mul_(page_size).unsqueeze(1)
        slots = (first_slots + torch.arange(page_size, dtype=torch.int32)).reshape(-1)
        self.table[row, start : start + len(slots)] = upload(slots, self.table.device)
