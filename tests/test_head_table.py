"""The tables of docs/heads.md are what the loader and the workers do."""

from __future__ import annotations

import pytest

from tests.generated_tables import page_with
from tests.head_catalogue import FORMATS
from tests.head_names import HEADS
from tests.head_table import PAGE, dflash_loads, format_table, head_table, said

AGAIN = "write it anew: python -m tests.head_table"


def test_the_page_says_which_formats_load() -> None:
    lines, page = format_table(), PAGE.read_text(encoding="utf-8")
    assert page_with({"formats": lines}, page) == page, AGAIN
    assert all("| yes | yes |" in line for line in lines[2:])
    assert {head.format for head in HEADS} - FORMATS.keys() == {"block draft", "DFlash"}
    rows = [line for line in page.splitlines() if line.endswith("| yes | yes |")]
    assert len(rows) >= 40
    assert sum(not head.why_not for head in HEADS) == len(rows)
    assert len(HEADS) == 76 == sum(f"| {head.name} |" in page for head in HEADS)


def test_the_page_says_of_dflash_drafts_that_their_format_loads() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if ".dflash |" in line]
    assert len(rows) == sum(head.format == "DFlash" for head in HEADS) == 7
    assert all(f"| DFlash | `of a block draft` | {said(dflash_loads())} | no:" in row for row in rows)


@pytest.mark.full
def test_the_page_says_which_heads_run() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page_with({"heads": head_table()}, page) == page, AGAIN
