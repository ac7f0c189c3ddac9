"""Lines of code by room, without blanks, comments and docstrings.

    python -m tests.code_lines

prints each room of `BUDGETS` with its ceiling, then what has none.
"""

from __future__ import annotations

import ast
import io
import subprocess
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUDGETS: dict[str, tuple[int, tuple[str, ...]]] = {
    "what came since: bound inputs, ragged and mixed steps, sets, our schedules of vendors": (
        580,
        (
            "spec_metadata/bound_inputs.py",
            "spec_metadata/mixed.py",
            "spec_metadata/widths.py",
            "attn_backends/memory/phase_sets.py",
            "attn_backends/vendors/flash_attention_tiles.py",
            "attn_backends/vendors/flashinfer_work.py",
        ),
    ),
    "contract, machinery, backends, vendors, adapters": (
        6500,
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
"""A room's ceiling, and where it lies. A file is of the first room that it lies in."""
UNBOUNDED = {
    "results": ("attn_backends/results/",),
    "explain": ("attn_backends/explain/",),
    "kernels": ("attn_backends/kernels/",),
    "conformance": ("attn_backends/conformance/", "attn_backends_pytest/"),
    "engines": ("attn_backends/engines/",),
    "the reference's command line": ("reference/attn_backends_reference/cli/",),
    "the reference": ("reference/",),
    "scripts of pages": ("docs/",),
    "tests of engines": ("tests/engines/",),
    "tests": ("tests/",),
    "examples, training": ("examples/", "training/"),
}
"""Rooms without a ceiling, after those of `BUDGETS`."""
_SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text: str) -> int:
    """How many lines of a source file hold a token of code."""
    return len(numbers_of_code(text))


def numbers_of_code(text: str) -> set[int]:
    """The numbers of those lines."""
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
    return held - told


def sources() -> list[str]:
    """Every source file that git knows, from the root."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.split() if (ROOT / path).exists()]


def by_room() -> dict[str, int]:
    """Code lines of each room, of which every source file has one."""
    places = {room: where for room, (_, where) in BUDGETS.items()} | UNBOUNDED
    counts = dict.fromkeys(places, 0)
    for path in sources():
        room = next(room for room, where in places.items() if any(_lies_in(path, place) for place in where))
        counts[room] += code_lines((ROOT / path).read_text(encoding="utf-8"))
    return counts


def _lies_in(path: str, place: str) -> bool:
    """Whether a file lies in a place, which is a file, a folder, or a folder's own files where it ends in *.py."""
    folder, _, pattern = place.rpartition("/")
    return path.rpartition("/")[0] == folder if pattern == "*.py" else path.startswith(place)


def main() -> None:
    """Print the table."""
    for room, count in by_room().items():
        ceiling = f"of {BUDGETS[room][0]:5}" if room in BUDGETS else ""
        print(f"{count:6} {ceiling:8}  {room}")


if __name__ == "__main__":
    main()
