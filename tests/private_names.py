"""Private names of other packages that a source file uses: what starts with one underscore and is not ours."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

OURS = {
    "spec_metadata": "spec_metadata",
    "attn_backends": "attn_backends",
    "attn_backends_pytest": "attn_backends_pytest",
    "attn_backends_reference": "reference/attn_backends_reference",
    "benchmarks": "benchmarks",
}
"""Our packages, and where they lie."""
PATH = re.compile(r"[\w.]*:[\w.]+")  # as `providers.load` takes them, or its end
PROMISED = {"_replace", "_asdict", "_fields", "_make"}  # of named tuples


def is_private(name: str) -> bool:
    """Whether a name says of itself that it is no part of an interface."""
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != "" and name not in PROMISED


def defined(trees: Iterable[ast.AST]) -> set[str]:
    """The private names that source files define: functions, classes, variables, arguments and attributes."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
    return set(filter(is_private, found))


def foreign(tree: ast.AST, ours: set[str]) -> Iterator[str]:
    """The private names that a source file imports, loads by a path, or reads or sets as attributes, but for ours."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=module, names=names) if module.split(".")[0] not in OURS:
                yield from filter(is_private, [*module.split("."), *(alias.name for alias in names)])
            case ast.Import(names=names):
                yield from (part for alias in names for part in alias.name.split(".") if is_private(part))
            case ast.Attribute(attr=name) if is_private(name) and name not in ours:
                yield name
            case ast.Constant(value=str(text)) if PATH.fullmatch(text) and text.split(".")[0] not in OURS:
                yield from (part for part in re.split(r"[.:]", text) if is_private(part))
