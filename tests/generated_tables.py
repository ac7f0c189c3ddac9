"""Tables in pages that a command writes and a test compares, each between two comments that name it."""

from __future__ import annotations

import re
from collections.abc import Mapping


def page_with(made: Mapping[str, list[str]], page: str) -> str:
    """The page with tables, by name the lines of each, in the place of its own."""
    for name, lines in made.items():
        block = "\n".join([f"<!-- {name} -->", *lines, f"<!-- end of {name} -->"])
        page = re.sub(rf"<!-- {name} -->.*?<!-- end of {name} -->", lambda _, block=block: block, page, flags=re.DOTALL)
    return page
