"""Random changes of one token of planner, backend and kernel code: what share of them the conformance suite kills.

    python -m tests.random_tokens [--changes 200] [--seed 0] [--seconds 300]

draws changes from a seed: an operator, a comparison, a number, a truth value or a name for its opposite. Each is put
into a copy of the packages in a process of its own, where the suite runs on the backends that use the file, a few cases
of each check first, until one fails. Nothing is drawn from annotations, decorators, texts and what is raised.

Dropped are changes that change nothing, of which it is known how: the compiled code is the same; a capability is not
declared any more, which leaves a correct backend that can do less; or `EQUIVALENT` says why. A change that outlives
`--seconds` of cases has survived, and is printed with the number of cases that it passed.
"""

from __future__ import annotations

import argparse
import ast
import io
import marshal
import multiprocessing
import multiprocessing.connection
import shutil
import sys
import tempfile
import time
import tokenize
from argparse import RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch  # once for all processes, which are forked from this one

ROOT = Path(__file__).parent.parent
PACKAGES = ("spec_metadata", "attn_backends")
DENSE = ("fa3", "trtllm_mla", "flashinfer_mla")
FILES: dict[str, tuple[str, ...]] = {
    "spec_metadata/plans/ragged.py": ("fa3", "trtllm_mla"),
    "spec_metadata/plans/block_table.py": ("trtllm_mla",),
    "spec_metadata/plans/csr.py": ("flashinfer_mla",),
    "spec_metadata/plans/slots.py": ("reference",),
    "spec_metadata/plans/compressed.py": ("dsv4",),
    "spec_metadata/visibility.py": (*DENSE, "dsv4", "tests.mutants.hosted:HostedBackend"),
    "attn_backends/backends/fa3.py": ("fa3",),
    "attn_backends/backends/trtllm_mla.py": ("trtllm_mla",),
    "attn_backends/backends/flashinfer_mla.py": ("flashinfer_mla",),
    "attn_backends/backends/dsv4.py": ("dsv4",),
    "attn_backends/kernels/torch_attention.py": (*DENSE, "reference"),
    "attn_backends/kernels/torch_compressed.py": ("dsv4",),
}
"""Each with the backends that the suite is run on."""

SWAPS = {
    "+": "-", "-": "+", "*": "+", "//": "*", "/": "*", "%": "//", "<": "<=", "<=": "<", ">": ">=", ">=": ">",
    "==": "!=", "!=": "==", "and": "or", "or": "and", "is": "is not", "&": "|", "|": "&", "True": "False",
    "False": "True", "min": "max", "max": "min", "clamp_min": "clamp_max", "amax": "amin", "zeros": "ones",
}  # fmt: skip
EQUIVALENT: Mapping[tuple[str, str, str], str] = {
    (
        "attn_backends/kernels/torch_attention.py",
        "max_pages = max_kv_len // k_pages.shape[1]",
        "2",
    ): "latents have one head: more pages are looked at, and all past the visible keys are hidden",
    (
        "attn_backends/kernels/torch_attention.py",
        "k, v = torch.where(seen, k, 0), torch.where(seen, v, 0)",
        "1",
    ): "what no row sees has no weight, and 1 is as finite as 0",
    (
        "attn_backends/backends/trtllm_mla.py",
        "_UNIFORM = replace(TORCH, page_sizes=frozenset({32, 64}), window=False, tree_window=False, sinks=False)",
        "33",
    ): "another page size is declared, which the torch kernel takes",
    (
        "attn_backends/backends/trtllm_mla.py",
        "StepKind.PREFILL: replace(_UNIFORM, packed=True, packed_graph=True, non_causal=False, graph=False),",
        "True",
    ): "no prompt is a tree or of one width, which is what these would let in",
    (
        "attn_backends/kernels/torch_compressed.py",
        "angles = angles.view(x.shape[0], *[1] * (x.ndim - 2), -1)",
        "3",
    ): "what a backend rotates has two dimensions, and a list times 0 or -1 is empty",
    (
        "attn_backends/kernels/torch_compressed.py",
        'return torch.where(known, values, 0), torch.where(known, gates, float("-inf"))',
        "1",
    ): "a gate of -inf gives it no weight",
    (
        "spec_metadata/plans/compressed.py",
        'made = Dim(f"min(num_tokens, num_tokens / {ratio} + bs)", '
        "lambda e: min(e.num_tokens, e.num_tokens // ratio + e.bs))",
        "*",
    ): "buffers have room for an entry of every token, which is more than a step makes",
    (
        "spec_metadata/plans/csr.py",
        '"kv_indptr", torch.int32, (BS + 1,), "first entry of each request, max_pages apart", high=BS * MAX_PAGES + 1',
        "2",
    ): "a bound that no entry reaches is looser by one",
    (
        "attn_backends/backends/dsv4.py",
        "architectures=frozenset({8, 9, 10, 11, 12}),",
        "",
    ): "of a kernel for a GPU, which the suite does not run on a CPU",
    (
        "attn_backends/backends/dsv4.py",
        "nearest = max(whole, (geometry.page_size + whole // 2) // whole * whole)",
        "-",
    ): "it says which page size a refusal recommends",
    (
        "attn_backends/kernels/torch_compressed.py",
        "_ATTENDED = 256  # query rows whose keys are gathered at a time",
        "257",
    ): "rows are attended apart, however many at a time",
    (
        "spec_metadata/plans/slots.py",
        "drafted: Drafted = 0",
        "1",
    ): "a plan is always made with it",
    (
        "attn_backends/kernels/torch_attention.py",
        'share = torch.where(lse == float("-inf"), 0, torch.sigmoid(lse - sinks))',
        "1",
    ): "a row that sees no key is zeros, whatever its share",
    (
        "spec_metadata/visibility.py",
        "if window is None or window >= (most := num_keys if num_keys == width else num_keys // width):",
        ">",
    ): "a window as long as the tree hides nothing of it",
    (
        "attn_backends/kernels/torch_attention.py",
        "pages = torch.where(first_key < kv_lens.unsqueeze(1), pages, 0)  # ids past the visible keys may be anything",
        "1",
    ): "the keys of those pages are hidden, whichever page is read",
    (
        "attn_backends/backends/flashinfer_mla.py",
        'mla_kernel("fa3", frozenset({9}), _VERSION),',
        "",
    ): "of a kernel for a GPU, which the suite does not run on a CPU",
    (
        "attn_backends/backends/flashinfer_mla.py",
        'mla_kernel("fa2", frozenset({8, 9, 10, 11, 12}), _VERSION),',
        "",
    ): "of a kernel for a GPU, which the suite does not run on a CPU",
    (
        "attn_backends/backends/trtllm_mla.py",
        "return (bind_ragged if step.kind is StepKind.PREFILL else bind_block_table)(step, buffers, bound)",
        "is not",
    ): "the fused planner runs on a GPU, and is held to its definition by tests of its own",
    (
        "spec_metadata/plans/ragged.py",
        "shared=True,",
        "False",
    ): "each phase then has a table of its own, with the same contents",
    (
        "spec_metadata/plans/ragged.py",
        'BufferSpec("cu_seqlens_q", torch.int32, (BS + 1,), "first query row of each request", high=NUM_TOKENS + 1),',
        "NUM_TOKENS + 2",
    ): "a bound that no entry reaches is looser by one",
    (
        "spec_metadata/plans/compressed.py",
        'BufferSpec("qo_indptr", torch.int32, (BS + 1,), "first query row of each request", high=NUM_TOKENS + 1),',
        "NUM_TOKENS + 2",
    ): "a bound that no entry reaches is looser by one",
    (
        "spec_metadata/plans/compressed.py",
        'spec("num_entries", rows, "entries that a row may see", entries + 1, pad=0),',
        "2",
    ): "a bound that no entry reaches is looser by one",
    (
        "spec_metadata/plans/compressed.py",
        "first = torch.where(live, index * ratio, 0)",
        "1",
    ): "the position of an entry that is not made, and is written nowhere",
    (
        "spec_metadata/plans/compressed.py",
        "return read_window + max(num_draft_tokens - 2, num_draft_forwards - 1)",
        "+",
    ): "a larger ring holds as much, and what a cache allows is told by its own",
    (
        "spec_metadata/plans/compressed.py",
        "return self.pages[request, position.clamp_min(0) // self.page_size]",
        "1",
    ): "a page holds whole blocks, of two tokens at least, so both are on the first",
    (
        "spec_metadata/plans/csr.py",
        "shared=True,",
        "False",
    ): "each phase then has a list of its own, with the same contents",
    (
        "spec_metadata/plans/ragged.py",
        "drafted: Drafted = 0",
        "1",
    ): "a plan is always made with it",
    (
        "attn_backends/kernels/torch_compressed.py",
        "return torch.where(best < num_visible.unsqueeze(-1), best, -1)",
        "best, -2",
    ): "whoever reads it asks for the sign",
    (
        "attn_backends/kernels/torch_compressed.py",
        "return torch.where(best < num_visible.unsqueeze(-1), best, -1)",
        "<=",
    ): "the one more stands behind those that the length lets attention read",
    (
        "attn_backends/kernels/torch_compressed.py",
        "best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :topk]",
        "stable=False",
    ): "on a CPU torch's sort is stable, whether asked or not",
    (
        "attn_backends/kernels/torch_compressed.py",
        "angles = angles.view(x.shape[0], *[1] * (x.ndim - 2), -1)",
        "[2]",
    ): "what a backend rotates has two dimensions, and a list times 0 is empty",
    (
        "attn_backends/kernels/torch_compressed.py",
        "if missing > 0:",
        ">=",
    ): "nothing is added to what misses nothing",
    (
        "attn_backends/kernels/torch_compressed.py",
        "_SCORED = 64  # query rows of a request that are scored at a time",
        "65",
    ): "rows are scored apart, however many at a time",
    (
        "attn_backends/kernels/torch_attention.py",
        "pages = kv_indices[entries.clamp(max=max(kv_indices.shape[0] - 1, 0))].long()",
        "1",
    ): "entries lie in the list, which is of one entry or has another last one",
    (
        "attn_backends/kernels/torch_attention.py",
        "pages = block_table[:, : max_kv_len // k_pages.shape[1]].long()",
        "*",
    ): "more pages are looked at, and all past the visible keys are hidden",
    (
        "attn_backends/backends/trtllm_mla.py",
        "_UNIFORM = replace(TORCH, page_sizes=frozenset({32, 64}), window=False, tree_window=False, sinks=False)",
        "65",
    ): "another page size is declared, which the torch kernel takes",
    (
        "attn_backends/backends/dsv4.py",
        "window: ClassVar[int] = 128",
        "129",
    ): "another window is declared, and planned",
    (
        "attn_backends/backends/dsv4.py",
        "compressions: ClassVar[tuple[Compression, ...]] = "
        "(Compression(4, overlap=True, indexed=True), Compression(128))",
        "129",
    ): "another compression is declared, and planned",
    (
        "attn_backends/backends/dsv4.py",
        "if given is not None and compressor is not None and pools is not None:",
        "or",
    ): "all three are there or none is: other inputs and caches were refused",
    (
        "attn_backends/backends/dsv4.py",
        "if cache.compressor is None or layer.compression is None or selected.entry_slots is None:",
        "and",
    ): "all three are there or none is: another cache or query was refused",
    (
        "attn_backends/backends/dsv4.py",
        "compression.read_window, self.capacity.num_draft_tokens, self.capacity.num_steps - 1",
        "+",
    ): "a larger ring holds as much, and what a cache allows is told by its own",
    (
        "attn_backends/backends/dsv4.py",
        "return 0 if layer.compression is None else self.rings[layer.compression]",
        "1",
    ): "a layer without a compression has no states, however long their ring",
}
"""(file, line without its indent, new token, or as much of the changed line as tells which; "" for any) -> why nothing
changes."""

RECORDS = ("Capabilities", "replace")  # what makes records of capabilities
_SILENT = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Change:
    """One token of a file. line, column: from 1 and 0."""

    file: str
    line: int
    column: int
    old: str
    new: str

    def source(self) -> str:
        """The line as it is."""
        return _text(self.file).splitlines()[self.line - 1].strip()

    def applied(self) -> str:
        """The file with the change."""
        lines = _text(self.file).splitlines(keepends=True)
        line = lines[self.line - 1]
        assert line[self.column :].startswith(self.old), (self, line)
        lines[self.line - 1] = line[: self.column] + self.new + line[self.column + len(self.old) :]
        return "".join(lines)

    def equivalence(self) -> str:
        """How it is known that it changes nothing; empty if it is not."""
        if _code(self.applied()) == _code(_text(self.file)):
            return "the compiled code is the same"
        if self.new == "False" and (self.line, self.column) in set(_declared(ast.parse(_text(self.file)))):
            return "it declares less, and what is not declared is refused"
        return next((why for known, why in EQUIVALENT.items() if self.is_known_as(known)), "")

    def is_known_as(self, known: tuple[str, str, str]) -> bool:
        """Whether a key of `EQUIVALENT` means it."""
        file, source, told = known
        if (file, source) != (self.file, self.source()):
            return False
        changed = self.applied().splitlines()[self.line - 1]
        return told in ("", self.new) or (self.new in told and told in changed and told not in source)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.old} -> {self.new} in: {self.source()}"


def changes(file: str) -> list[Change]:
    """All changes of a file that can be drawn."""
    text = _text(file)
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    negated = {one.start for one, two in pairwise(tokens) if (one.string, two.string) == ("is", "not")}
    spoken = {place for node in _walk(ast.parse(text)) for place in _places(node)}
    found = []
    for (line, column), old in ((token.start, token.string) for token in tokens):
        if (line, column) in negated & spoken:
            found.append(Change(file, line, column, "is not", "is"))
            continue
        number = old.isdigit() and (line, column) in spoken
        if (old in SWAPS or number) and (line, column) in spoken:
            found.append(Change(file, line, column, old, str(int(old) + 1) if number else SWAPS[old]))
    return found


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one that say what is computed."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, _SILENT):
                yield child
                yield from _walk(child)


def _declared(module: ast.Module) -> Iterator[tuple[int, int]]:
    """Where the values stand that records of capabilities are given by name."""
    for node in (each for top in module.body if isinstance(top, ast.Assign) for each in ast.walk(top)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("Capabilities", "replace")
        ):
            yield from ((keyword.value.lineno, keyword.value.col_offset) for keyword in node.keywords)


def _places(node: ast.AST) -> Iterator[tuple[int, int]]:
    """Where the tokens of a node stand that may be changed: all between two operands, a number, and names."""
    match node:
        case ast.BinOp(left=left, right=right):
            yield from _between(left, right)
        case ast.BoolOp(values=values):
            yield from (place for pair in pairwise(values) for place in _between(*pair))
        case ast.Compare(left=left, comparators=others):
            yield from (place for pair in pairwise([left, *others]) for place in _between(*pair))
        case ast.Constant(value=bool() | int()) | ast.Name():
            yield node.lineno, node.col_offset
        case ast.Attribute(end_lineno=int(line), end_col_offset=int(column), attr=attr):
            yield line, column - len(attr)
        case ast.keyword(arg=str()):
            yield node.lineno, node.col_offset


def _between(left: ast.expr, right: ast.expr) -> Iterator[tuple[int, int]]:
    """Places on the line of an operator, behind its left operand and before its right one."""
    assert left.end_lineno is not None
    assert left.end_col_offset is not None
    if left.end_lineno == right.lineno:
        yield from ((right.lineno, column) for column in range(left.end_col_offset, right.col_offset))


def _text(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def _code(text: str) -> bytes:
    """Compiled code without its places."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if "lineno" in node._attributes:
            vars(node).update(lineno=1, end_lineno=1, col_offset=0, end_col_offset=0)
    return marshal.dumps(compile(tree, "", "exec", optimize=0))


def drawn(number: int, seed: int) -> list[Change]:
    """So many changes of all files, any token as likely as any other."""
    every = [change for file in FILES for change in changes(file)]
    return Random(seed).sample(every, min(number, len(every)))


@dataclass(frozen=True)
class Verdict:
    """What came of a change. outcome: killed, survived, or equivalent. by: what killed it, how it is known, or how many
    cases it passed.
    """

    change: Change
    outcome: str
    by: str


def judge(change: Change, seconds: float) -> Verdict:
    """Run the suite on a change, in a process of its own."""
    if how := change.equivalence():
        return Verdict(change, "equivalent", how)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=_run, args=(change, folder, seconds, theirs))
        process.start()
        process.join(seconds * 2 + 60)
        if process.is_alive():
            process.kill()
            return Verdict(change, "killed", "it does not end")
    return Verdict(change, *(ours.recv() if ours.poll() else ("killed", f"exit code {process.exitcode}")))


def _run(change: Change, folder: str, seconds: float, answer: multiprocessing.connection.Connection) -> None:
    """Send (outcome, by) of a change that is put into a copy of the packages."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, Path(folder) / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "configs", Path(folder) / "configs")
    (Path(folder) / change.file).write_text(change.applied(), encoding="utf-8")
    sys.path[:0] = [folder]
    assert not set(PACKAGES) & sys.modules.keys(), "the packages are imported from the copy"
    try:
        answer.send(_first_failure(FILES[change.file], time.monotonic() + seconds))
    except Exception as error:
        answer.send(("killed", f"{type(error).__name__}: {error}"))


def _first_failure(names: tuple[str, ...], end: float) -> tuple[str, str]:
    from attn_backends.conformance import Outcome, Selection, Subject, run_case
    from attn_backends.registry import get_backend

    subjects = [Subject(get_backend(name), "torch") for name in names]
    few = [Selection(quick=True, select=select) for select in ("plan.*", "math.*", "compressed.*", "[!pmsc]*")]
    passed = 0
    for cases in (*(_mixed(subjects, each) for each in few), _mixed(subjects, Selection())):
        for subject, case in cases:
            row = run_case(subject, case)
            if row.status in (Outcome.FAIL, Outcome.ERROR):
                return "killed", f"{case.check} ({row.status})"
            passed += 1
            if time.monotonic() > end:
                return "survived", f"{passed} cases"
    return "survived", f"all {passed} cases"


def _mixed(subjects: Sequence[Any], selection: Any) -> list[tuple[Any, Any]]:
    """Subjects with the cases of a selection, mixed, so that no backend and no check has to wait for another."""
    found = [(subject, case) for subject in subjects for case in selection.cases(subject)]
    Random(0).shuffle(found)
    return found


def main() -> int:
    """Draw, judge and print; 0 if at least 97 % are killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300, help="of cases a change (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("fork")) as pool:
        judged = pool.map(judge, *zip(*((c, args.seconds) for c in drawn(args.changes, args.seed)), strict=True))
        for verdict in judged:
            counts[verdict.outcome] += 1
            print(f"{verdict.outcome:10} {verdict.change} ({verdict.by})", flush=True)
    lasting = counts["killed"] + counts["survived"]
    print(f"{counts['killed']} of {lasting} killed; {counts['equivalent']} change nothing; seed {args.seed}")
    return int(counts["killed"] < 0.97 * lasting)


if __name__ == "__main__":
    raise SystemExit(main())
