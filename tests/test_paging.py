"""Both forms of table against plain arithmetic on pages."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from attn_backends.conformance.inputs import strided
from spec_metadata import BlockTable, CacheGeometry, InvalidStepError, RequestTable

PAGE_SIZES = [1, 4, 16, 64]
TYPES = [torch.int32, torch.int64]


def tables(page_size: int, dtype: torch.dtype, seed: int = 0) -> tuple[RequestTable, BlockTable, list[list[int]]]:
    """The same four requests in both forms, strided, and their pages."""
    rng = random.Random(seed)
    geometry = CacheGeometry(30, page_size, reserved_page=7, reserved_row=2)
    pages = [rng.sample([p for p in range(30) if p != 7], 5) for _ in range(6)]
    pages[2] = [7] * 5
    rows = [4, 0, 5, 1]
    slots = torch.tensor([[page * page_size + i for page in row for i in range(page_size)] for row in pages])
    by_token = RequestTable(strided(slots.to(dtype)), strided(torch.tensor(rows, dtype=dtype)), geometry)
    mine = [pages[row] for row in rows]
    return by_token, BlockTable(strided(torch.tensor(mine, dtype=dtype)), geometry), mine


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_slots_and_pages(page_size: int, dtype: torch.dtype) -> None:
    by_token, by_page, pages = tables(page_size, dtype)
    positions = torch.stack([torch.randperm(5 * page_size)[:5] for _ in pages]).to(dtype)
    expected = [
        [mine[p // page_size] * page_size + p % page_size for p in row]
        for mine, row in zip(pages, positions.tolist(), strict=True)
    ]
    for paging in (by_token, by_page):
        assert paging.bs == 4
        assert paging.row_tokens == 5 * page_size
        slots = paging.slots(strided(positions.flatten()).view(4, 5))
        assert slots.dtype is torch.int64
        assert slots.tolist() == expected
        for num_pages in (1, 3, 5):
            found = paging.pages(num_pages)
            assert found.dtype is torch.int64
            assert found.tolist() == [row[:num_pages] for row in pages]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_static_form_reads_another_buffer(dtype: torch.dtype) -> None:
    by_token, by_page, pages = tables(4, dtype)
    swapped = [pages[1], pages[0]]
    for paging in (by_token, by_page):
        buffer = paging.static_input()[:2].flip(0).to(torch.int64)
        static = paging.on_static(buffer)
        assert static.bs == 2
        assert static.pages(5).tolist() == swapped
        assert static.static_input() is buffer
    assert by_token.on_static(buffer[:, 0]).table.data_ptr() == by_token.table.data_ptr()  # read in place


def test_reserved_slots_walk_the_reserved_page() -> None:
    geometry = CacheGeometry(9, 4, reserved_page=3)
    assert geometry.num_slots == 36
    assert geometry.reserved_slots(6, torch.device("cpu")).tolist() == [12, 13, 14, 15, 12, 13]
    assert geometry.reserved_slots(0, torch.device("cpu")).tolist() == []


@pytest.mark.parametrize("bad", [(0, 4), (4, 0), (4, 4, 4), (4, 4, -1)], ids=str)
def test_impossible_geometry(bad: tuple[int, ...]) -> None:
    with pytest.raises(InvalidStepError, match=r"at least 1|is not a page of \[0, 4\)"):
        CacheGeometry(*bad)


GOOD_TABLE, GOOD_ROWS = torch.zeros(3, 8, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize("table", [GOOD_TABLE.float(), GOOD_TABLE[0], GOOD_TABLE.short()], ids=["float", "1d", "int16"])
def test_tables_are_two_dimensional_integers(table: Tensor) -> None:
    geometry = CacheGeometry(9, 4)
    with pytest.raises(InvalidStepError, match=r"RequestTable\.table must be a 2-dimensional int32 or int64"):
        RequestTable(table, GOOD_ROWS, geometry)
    with pytest.raises(InvalidStepError, match=r"BlockTable\.table must be a 2-dimensional int32 or int64"):
        BlockTable(table, geometry)


@pytest.mark.parametrize("rows", [GOOD_ROWS.float(), GOOD_ROWS.view(1, 2)], ids=["float", "2d"])
def test_rows_are_one_dimensional_integers(rows: Tensor) -> None:
    with pytest.raises(InvalidStepError, match=r"RequestTable\.rows must be a 1-dimensional int32 or int64"):
        RequestTable(GOOD_TABLE, rows, CacheGeometry(9, 4))
