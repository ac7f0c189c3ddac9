"""Readers of committed results and of pages, for tests of what the pages quote."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from attn_backends import results

ROOT = Path(__file__).parent.parent
README = "README.md"


def rows(pattern: str, **values: Any) -> list[Any]:
    """The rows with certain values, of every result below docs/results whose name fits."""
    files = sorted((ROOT / "docs" / "results").glob(f"{pattern}.json"))
    assert files, pattern
    return [
        row
        for file in files
        for row in results.read(file).rows
        if all(row[name] == value for name, value in values.items())
    ]


def text_of(document: str) -> str:
    return re.sub(r"\s+", " ", (ROOT / document).read_text())
