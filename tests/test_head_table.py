"""The tables of docs/heads.md are what the loader and the workers do."""

from __future__ import annotations

import pytest

from tests.generated_tables import page_with
from tests.head_catalogue import FORMATS
from tests.head_names import HEADS
from tests.head_table import BLOCK_FORMATS, PAGE, PARALLEL, all_load, format_table, head_table, said

AGAIN = "write it anew: python -m tests.head_table"


def test_the_page_says_which_formats_load() -> None:
    lines, page = format_table(), PAGE.read_text(encoding="utf-8")
    assert page_with({"formats": lines}, page) == page, AGAIN
    assert all("| yes | yes |" in line for line in lines[2:])
    assert {head.format for head in HEADS} - FORMATS.keys() == {"block draft", PARALLEL, *BLOCK_FORMATS}
    rows = [line for line in page.splitlines() if line.endswith("| yes | yes |")]
    assert len(rows) >= 40
    assert sum(not head.why_not for head in HEADS) == len(rows)
    assert len(HEADS) == 76 == sum(f"| {head.name} |" in page for head in HEADS)


@pytest.mark.parametrize(("name", "count"), [("DFlash", 7), ("DSpark", 3)])
def test_the_page_says_of_block_drafts_whether_their_format_loads(name: str, count: int) -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if f"| {name} | `of a block draft`" in line]
    assert len(rows) == sum(head.format == name for head in HEADS) == count
    loads = said(all_load(BLOCK_FORMATS[name]))
    assert all(f"| {name} | `of a block draft` | {loads} | no:" in row for row in rows)


@pytest.mark.full
def test_the_page_says_which_heads_run() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page_with({"heads": head_table()}, page) == page, AGAIN
