"""Rewrite results with rows as lists, as they are committed: ``python -m attn_backends.results FILE …``."""

from __future__ import annotations

import sys
from pathlib import Path

from attn_backends.errors import ConfigError
from attn_backends.results import read, write_text


def main(files: list[str]) -> None:
    """Rewrite each file. Ends with a message where one can't be read or written, or none is named."""
    if not files:
        sys.exit("name the files to rewrite")
    try:
        for path in map(Path, files):
            write_text(path, read(path).in_columns())
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
