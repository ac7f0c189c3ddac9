"""Arguments of `paged_attention`: requests in pages of their own, among memory that nobody owns."""

from __future__ import annotations

from dataclasses import dataclass

import torch

NAN = float("nan")
FORMS = ("csr", "page table", "block table")


@dataclass(frozen=True)
class Sizes:
    """A batch. widths: query rows of each request. lens: keys of each. latent: values are the keys' first elements."""

    widths: tuple[int, ...] = (3, 3, 3)
    lens: tuple[int, ...] = (53, 5, 37)
    num_heads: int = 4
    num_kv_heads: int = 2
    dim: int = 24
    v_dim: int = 20
    page_size: int = 4
    latent: bool = False


def arguments(sizes: Sizes, form: str, causal: bool, dtype: torch.dtype = torch.float32, cache: object = None) -> list:
    """The arguments of `paged_attention`, strided views; memory that no request owns is NaN, and so is the scratch."""
    s, bs, page = sizes, len(sizes.lens), sizes.page_size
    counts = [-(-length // page) for length in s.lens]
    num_pages, most = sum(counts) + 2, max(counts) + 1
    order = torch.randperm(num_pages).int()
    owned = order[2:].split(counts)
    entry = s.dim if s.latent else s.dim + s.v_dim
    entries = torch.full((num_pages, page, s.num_kv_heads, 2 * entry), NAN)
    for pages, length in zip(owned, s.lens, strict=True):
        for key in range(length):
            entries[pages[key // page], key % page] = torch.randn(s.num_kv_heads, 2 * entry)
    entries = entries.to(cache or dtype)[..., ::2]
    k, v = entries[..., : s.dim], entries[..., : s.v_dim] if s.latent else entries[..., s.dim :]
    table = order[:1].repeat(bs, most + 1)  # past its pages a request's row holds a page of NaN
    for row, pages in zip(table, owned, strict=True):
        row[: len(pages)] = pages
    starts = torch.tensor([0, *s.widths]).cumsum(0).int()
    lists = {
        "csr": (starts, torch.tensor([0, *counts]).cumsum(0).int(), torch.cat((order[2:], order[:1].repeat(9)))),
        "page table": (starts, None, table[:, :most]),
        "block table": (None, None, table[:, :most]),
    }[form]
    q = torch.randn(s.num_heads, sum(s.widths), 2 * s.dim, dtype=dtype).transpose(0, 1)[..., 1::2]
    lens = torch.tensor(s.lens, dtype=torch.int32)
    scratch = (torch.full((2**16,), NAN), torch.full((2**12,), NAN))
    return [q, k, v, *lists, lens, max(s.widths), most * page, causal, s.dim**-0.5, 1.0, 1.0, *scratch]


def forget(given: list, sizes: Sizes, first_keys: tuple[int, ...]) -> list:
    """The arguments, of a page table, when memory before each request's first key is no longer its own: it is NaN."""
    for row, first in zip(given[5], first_keys, strict=True):
        for key in range(first):
            for pages in given[1:3]:
                pages[row[key // sizes.page_size], key % sizes.page_size] = NAN
    return given
