"""The shape of the repository: which part imports which, who prints, how large things are, what guides point to."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.code_lines import BUDGETS, by_room

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "spec_metadata": ROOT,
    "attn_backends": ROOT,
    "attn_backends_reference": ROOT / "reference",
    "benchmarks": ROOT,
    "attn_backends_command": ROOT,
    "attn_backends_pytest": ROOT,
    "docs/pages": ROOT,
    "examples": ROOT,
    "training": ROOT,
}
PROGRAMS = {"cli", "examples", "pages", "training"}  # what prints
SOURCES = sorted(path for package, folder in PACKAGES.items() for path in (folder / package).rglob("*.py"))
MAX_MODULE, MAX_FUNCTION = 350, 60
MAX_TREE, MAX_RESULTS = 32 << 20, 3 << 20  # bytes

# A module imports its own layer and those above it in this list.
LAYERS = [
    ["spec_metadata"],
    ["attn_backends.kernels", "attn_backends.errors"],
    ["attn_backends.layer", "attn_backends.cache", "attn_backends.compressed_cache", "attn_backends.compressed_layer"],
    ["attn_backends.graphs"],
    ["attn_backends.contract"],
    ["attn_backends.selection"],
    ["attn_backends.results"],
    ["attn_backends.memory"],
    ["attn_backends.planning"],
    ["attn_backends.backend"],
    ["attn_backends.vendors"],
    ["attn_backends.runner", "attn_backends.backends"],
    ["attn_backends.registry", "attn_backends", "attn_backends.config"],
    ["attn_backends.adapters"],
    ["attn_backends.engines"],
    ["attn_backends.conformance"],
    ["attn_backends.explain"],
    ["attn_backends.cli"],
    ["attn_backends_reference", "attn_backends_reference.models"],
    ["attn_backends_reference.config", "attn_backends_reference.run_options"],
    ["attn_backends_reference.eagle"],
    ["attn_backends_reference.cli", "attn_backends_reference.__main__"],
    ["benchmarks", "attn_backends_command", "attn_backends_pytest", "examples", "training"],
    ["docs.pages"],
]
ENGINES = "attn_backends.engines"  # nothing of the library imports these
RANKS = {prefix: rank for rank, prefixes in enumerate(LAYERS) for prefix in prefixes}


def module_name(path: Path) -> str:
    """The dotted name of a source file."""
    folder = next(folder for package, folder in PACKAGES.items() if path.is_relative_to(folder / package))
    return ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")


def imports(tree: ast.AST) -> Iterator[str]:
    """The modules, or names of modules, that a source file imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rank(name: str) -> int | None:
    """The layer of a module; None of another project's, or of a name in `attn_backends` that has no layer."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((RANKS[prefix] for prefix in prefixes if prefix in RANKS), None)


def wrong_directions(name: str, source: str) -> list[str]:
    """Imports of a module that go against the layers, from one backend to another, or of an engine's plug-in."""
    own, wrong = rank(name), []
    for imported in imports(ast.parse(source)):
        target = rank(imported)
        sideways = name.startswith("attn_backends.backends.") and imported.startswith("attn_backends.backends.")
        sideways |= imported.startswith(ENGINES) and not name.startswith(ENGINES)
        if target is not None and own is not None and (target > own or sideways):
            wrong.append(imported)
    return wrong


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_go_one_way(path):
    assert wrong_directions(module_name(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("spec_metadata.tree", "import attn_backends.errors"),
        ("attn_backends.kernels.torch_attention", "from attn_backends.backend import Kernel"),
        ("attn_backends.kernels.torch_attention", "from attn_backends import backends"),
        ("attn_backends.backend", "def f():\n    from attn_backends.backends.fa3 import FA3Backend"),
        ("attn_backends.backends.fa3", "from attn_backends.backends import reference"),
        ("attn_backends.backends.fa3", "from attn_backends_reference.eagle.worker import EagleWorker"),
        ("attn_backends_reference.eagle.worker", "from attn_backends_reference.cli import demo"),
        ("attn_backends.cli", "from attn_backends_reference.cli import demo"),
        ("attn_backends.adapters.vllm", "from attn_backends.engines.vllm import plans"),
        ("attn_backends.cli", "import attn_backends.engines.vllm"),
        ("attn_backends.cli", "from attn_backends.engines.sglang import register"),
        ("attn_backends.adapters.sglang", "import attn_backends.engines.sglang"),
        ("attn_backends.engines.sglang.plans", "from attn_backends.conformance import cases"),
        ("attn_backends_reference.cli", "from benchmarks import metadata"),
        ("benchmarks.metadata", "from docs.pages import plot"),
    ],
)
def test_a_wrong_direction_is_seen(name, source):
    assert wrong_directions(name, source)


def reached(start: str, graph: dict[str, set[str]]) -> set[str]:
    """The modules that a module imports, and those that these import, and so on."""
    found, ahead = set[str](), [start]
    while ahead:
        new = graph[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def crossing_cycles(graph: dict[str, set[str]], room_of: dict[str, str]) -> set[tuple[str, str]]:
    """Modules of two rooms that import each other, by whatever others."""
    all_of = {name: reached(name, graph) for name in graph}
    pairs = {(one, other) for one in graph for other in all_of[one] if one in all_of[other]}
    return {(one, other) for one, other in pairs if room_of[one] != room_of[other]}


def test_no_cycle_of_imports_crosses_rooms():
    """A room is a folder; a file of a package's root is a room of its own."""
    files = {module_name(path): path for path in SOURCES}
    roots = {folder / package for package, folder in PACKAGES.items()}
    room_of = {name: name if path.parent in roots else str(path.parent) for name, path in files.items()}
    room_of |= {name: str(path.parent) for name, path in files.items() if name.startswith("spec_metadata.")}
    graph = {}
    for name, path in files.items():
        parts = (imported.split(".") for imported in imports(ast.parse(path.read_text())))
        names = [[".".join(part[:length]) for length in range(len(part), 0, -1)] for part in parts]
        graph[name] = {next((each for each in prefixes if each in files), name) for prefixes in names} - {name}
    assert len(graph) > 250
    assert crossing_cycles(graph, room_of) == set()
    graph["attn_backends.contract.kernel"].add("attn_backends.backend")
    assert ("attn_backends.contract.kernel", "attn_backends.backend") in crossing_cycles(graph, room_of)


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_an_engine_is_imported_in_one_place(path):
    """That place, `api.py`, looks at the version; a package registers names before, whatever the version."""
    engines = {each.split(".")[0] for each in imports(ast.parse(path.read_text()))} & {"sglang", "vllm"}
    places = ("engines/*/api.py", "engines/*/__init__.py", "conformance/foreign/*/api.py")
    may = any(path.match(f"attn_backends/{place}") for place in places)
    assert engines <= ({path.parent.name} if may else set())


def test_every_module_has_a_layer():
    assert {module_name(path) for path in SOURCES if rank(module_name(path)) is None} == set()
    files = {module_name(path) for path in SOURCES if path.parent.name == "attn_backends"}
    assert files <= RANKS.keys(), "name the module's layer in LAYERS"


@pytest.mark.parametrize("path", [path for path in SOURCES if not PROGRAMS & {*path.parts}], ids=module_name)
def test_the_library_prints_nothing(path):
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert [call.id for call in calls if isinstance(call, ast.Name) and call.id == "print"] == []


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_modules_and_functions_are_small(path):
    source = path.read_text()
    assert len(source.splitlines()) <= MAX_MODULE
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    sizes = {node.name: node.end_lineno - node.lineno + 1 for node in functions}
    assert {name: size for name, size in sizes.items() if size > MAX_FUNCTION} == {}


def tracked_bytes(folder: str) -> int:
    """Bytes of the files below a folder that git tracks, as they are here."""
    listing = subprocess.run(["git", "ls-files", "-z", folder], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listing.stdout.split("\0") if name]
    return sum(path.stat().st_size for path in files if path.is_file())


def test_what_travels_is_small():
    """A report of conformance is committed as its summary, and a picture only if a page shows it."""
    assert 0 < tracked_bytes("docs/results") <= MAX_RESULTS
    assert 0 < tracked_bytes(".") <= MAX_TREE


def test_every_committed_picture_is_shown():
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    pictures = [path for form in ("*.png", "*.svg") for path in (ROOT / "docs").rglob(form)]
    assert [path.name for path in pictures if path.name not in pages] == []


def test_the_table_of_places_to_open_names_files_and_what_they_define():
    table = re.findall(
        r"^\| .* \| `([^`]+)` \| `([^`]+)` \|$", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE
    )
    assert len(table) == 21
    for path, name in table:
        defined = [getattr(node, "name", None) for node in ast.parse((ROOT / path).read_text()).body]
        assert name in defined, f"{path} defines no {name}"


def test_there_are_two_commands_to_set_up():
    commands = re.findall(r"^make [a-z-]+", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert commands == ["make demo", "make test"]


def test_the_example_of_the_readme_is_short():
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(example.splitlines()) <= 18
    assert len([line for line in example.splitlines() if line.strip()]) <= 15


def test_rooms_keep_to_their_budgets_of_code_lines():
    counts = by_room()
    assert min(counts.values()) > 0
    assert {room: count for room, count in counts.items() if room in BUDGETS and count > BUDGETS[room][0]} == {}, (
        "python -m tests.code_lines"
    )
