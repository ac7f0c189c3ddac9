"""Views of a paged cache: what they refuse to be made of."""

from __future__ import annotations

import pytest
import torch

from attn_backends import PagedKV, PagedLatent, UnsupportedStepError


@pytest.mark.parametrize(
    ("k", "v", "dtype", "reason"),
    [
        ((8, 4, 2, 16), (7, 4, 2, 16), torch.float32, r"k is \[8, 4, 2, 16\] and v \[7, 4, 2, 16\]; they may differ"),
        ((8, 4, 2, 16), (8, 2, 2, 16), torch.float32, r"v \[8, 2, 2, 16\]"),
        ((8, 4, 2, 16), (8, 4, 1, 16), torch.float32, r"v \[8, 4, 1, 16\]"),
        ((8, 4, 2, 16), (8, 4, 2, 16), torch.float16, r"k is torch.float32 on cpu and v torch.float16 on cpu"),
        (
            (8, 4, 16),
            (8, 4, 2, 16),
            torch.float32,
            r"k is \[8, 4, 16\], not \[num_pages, page_size, num_kv_heads, dim\]",
        ),
        ((8, 4, 2, 16), (1, 8, 4, 2, 16), torch.float32, r"v is \[1, 8, 4, 2, 16\], not"),
    ],
    ids=["pages", "page size", "heads", "type", "rank of k", "rank of v"],
)
def test_keys_and_values_that_do_not_agree(k, v, dtype, reason):
    with pytest.raises(UnsupportedStepError, match=reason):
        PagedKV(torch.zeros(k), torch.zeros(v, dtype=dtype))


def test_values_may_have_a_size_of_their_own():
    assert PagedKV(torch.zeros(8, 4, 2, 16), torch.zeros(8, 4, 2, 12)).entry_sizes == (2, 16, 12)


@pytest.mark.parametrize(
    ("shape", "rank", "reason"),
    [
        ((8, 4, 1, 20), 16, r"it is \[8, 4, 1, 20\], not \[num_pages, page_size, rank \+ rope\]"),
        ((8, 4, 20), 24, "rank 24 of entries of 20 elements"),
        ((8, 4, 20), 0, "rank 0 of entries"),
    ],
)
def test_latents_of_another_form(shape, rank, reason):
    with pytest.raises(UnsupportedStepError, match=reason):
        PagedLatent(torch.zeros(shape), rank)
