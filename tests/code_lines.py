"""Lines of code by room, without blanks, comments and docstrings.

    python -m tests.code_lines

prints each room of `BUDGETS` with its ceiling.
"""

from __future__ import annotations

import ast
import io
import subprocess
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUDGETS: dict[str, tuple[int, tuple[str, ...]]] = {
    "contract, machinery, backends, vendors, adapters": (
        6902,
        (
            "spec_metadata/",
            "attn_backends/adapters/",
            "attn_backends/backends/",
            "attn_backends/config/",
            "attn_backends/contract/",
            "attn_backends/memory/",
            "attn_backends/planning/",
            "attn_backends/selection/",
            "attn_backends/vendors/",
            "attn_backends/*.py",
        ),
    ),
    "command line": (800, ("attn_backends/cli/", "attn_backends_command/")),
    "benchmarks": (1500, ("benchmarks/",)),
    "tests of benchmarks": (500, ("tests/test_benchmarks.py",)),
    "tests/gpu": (800, ("tests/gpu/",)),
}
"""A room's ceiling, and where it lies."""
_SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text: str) -> int:
    """Lines of a source file that hold a token of code."""
    told = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    held = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SILENT:
            held |= set(range(token.start[0], token.end[0] + 1))
    return len(held - told)


def sources() -> list[str]:
    """Every source file that git knows, from the root."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.split() if (ROOT / path).exists()]


def of_room(places: tuple[str, ...], files: list[str]) -> int:
    """Code lines of a room. A place that ends in *.py is of its folder alone."""
    found = [
        path
        for path in files
        if any(
            Path(path).match(place) and path.count("/") == 1 if "*" in place else path.startswith(place)
            for place in places
        )
    ]
    return sum(code_lines((ROOT / path).read_text(encoding="utf-8")) for path in found)


def main() -> None:
    """Print the table."""
    files = sources()
    for room, (most, places) in BUDGETS.items():
        print(f"{of_room(places, files):6} of {most:5}  {room}")


if __name__ == "__main__":
    main()
