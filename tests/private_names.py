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


def read_of(tree: ast.AST, objects: Iterable[str]) -> Iterator[str]:
    """The attributes that a source file reads of objects by their variables' names, of what these attributes are, and
    of variables that take one. A `getattr` of a computed name is told as it is written.
    """
    pairs = list(_assigned(tree))
    known = set(objects)
    while more := {name for name, value in pairs if name not in known and _variable(value) in known}:
        known |= more
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if _variable(node) in known:
                yield name
            case ast.Call(func=ast.Name(id="getattr"), args=[given, name, *_]) if _variable(given) in known:
                yield str(name.value) if isinstance(name, ast.Constant) else ast.unparse(node)


def _assigned(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Variables, and the attributes that they are assigned."""
    for node in (each for each in ast.walk(tree) if isinstance(each, ast.Assign)):
        for target in node.targets:
            both = [target], [node.value]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                both = target.elts, node.value.elts
            for name, value in zip(*both, strict=True):
                if isinstance(name, ast.Name) and isinstance(value, ast.Attribute):
                    yield name.id, value


def _variable(node: ast.AST) -> str:
    """The variable that a path of attributes begins with; "" of another expression."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


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
