"""Random changes of one token of planner, backend and kernel code: what share of them the conformance suite kills.

    python -m tests.random_tokens [--changes 200] [--seed 0] [--seconds 300]

draws changes from a seed: an operator, a comparison, a number, a truth value or a name for its opposite. Each is put
into a copy of the packages in a process of its own, where the suite runs on the backends that use the file, a few cases
of each check first, until one fails. Nothing is drawn from annotations, decorators, texts and what is raised.

Dropped are changes that change nothing, of which it is known how: the compiled code is the same; a capability is not
declared any more, which leaves a correct backend that can do less; a kernel for a GPU is declared otherwise, which no
case on a CPU runs; `strict` only raises; or `EQUIVALENT` says why. A change that outlives
`--seconds` of CPU time has survived, and is printed with the number of cases that it passed.

With `--known FILE`, verdicts are appended to a file; a change that was killed there, or passed all cases, is not run
again. `--share 2/4` takes the second of every four cases, so that four runs share the suite out over processes. A
change survives if it passes all four.
"""

from __future__ import annotations

import argparse
import ast
import io
import marshal
import multiprocessing
import multiprocessing.connection
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import tokenize
import tomllib
from argparse import RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch  # once for all processes, which are forked from this one

ROOT = Path(__file__).parent.parent
PACKAGES = ("spec_metadata", "attn_backends")
DENSE = ("fa3", "trtllm_mla", "flashinfer_mla")
FILES: dict[str, tuple[str, ...]] = {
    "spec_metadata/plans/declared.py": DENSE,
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

REPLAYS: dict[str, tuple[str, ...]] = {
    "attn_backends/planning/metadata.py": ("fa3", "dsv4", "flashinfer_mla"),
    "attn_backends/planning/captured.py": ("fa3", "dsv4"),
    "attn_backends/planning/planners.py": ("fa3", "dsv4"),
    "attn_backends/memory/static_memory.py": ("flashinfer_mla", "fa3"),
    "attn_backends/memory/phases.py": ("fa3", "tests.mutants.hosted:HostedBackend"),
    "attn_backends/memory/phase_sets.py": ("fa3", "dsv4"),
    "spec_metadata/static_inputs.py": ("fa3", "dsv4"),
    "spec_metadata/bound_inputs.py": ("fa3", "dsv4"),
    "spec_metadata/widths.py": ("fa3",),
    "spec_metadata/mixed.py": ("fa3", "tests.mutants.hosted:HostedBackend"),
}
"""Likewise, of what a replay reads: cases of graphs run first."""

FILES |= REPLAYS

SWAPS = {
    "+": "-", "-": "+", "*": "+", "//": "*", "/": "*", "%": "//", "<": "<=", "<=": "<", ">": ">=", ">=": ">",
    "==": "!=", "!=": "==", "and": "or", "or": "and", "is": "is not", "&": "|", "|": "&", "True": "False",
    "False": "True", "min": "max", "max": "min", "clamp_min": "clamp_max", "amax": "amin", "zeros": "ones",
}  # fmt: skip
EQUIVALENT: Mapping[tuple[str, str, str], str] = {
    (file, line, token): why
    for file, known in tomllib.loads((ROOT / "tests/equivalent_changes.toml").read_text(encoding="utf-8")).items()
    for line, token, why in known
}
"""(file, begin of a line without its indent, new token, or as much of the changed line as tells which; "" for any) ->
why nothing changes."""

RECORDS = ("Capabilities", "replace")  # what makes records of capabilities
KERNELS = ("Kernel", "mla_kernel")  # what declares a kernel, its name first
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
        if (self.line, self.column) in set(_of_gpu_kernels(ast.parse(_text(self.file)))):
            return "of a kernel for a GPU, which the suite does not run on a CPU"
        if self.is_argument("strict"):
            return "strict only raises"
        return next((why for known, why in EQUIVALENT.items() if self.is_known_as(known)), "")

    def is_argument(self, name: str) -> bool:
        """Whether it changes the value of an argument of a name."""
        calls = (node for node in ast.walk(ast.parse(_text(self.file))) if isinstance(node, ast.keyword))
        return any(node.arg == name and _starts(node.value) == (self.line, self.column) for node in calls)

    def is_known_as(self, known: tuple[str, str, str]) -> bool:
        """Whether a key of `EQUIVALENT` means it."""
        file, begin, told = known
        if file != self.file or not (source := self.source()).startswith(begin):
            return False
        changed = self.applied().splitlines()[self.line - 1]
        return told in ("", self.new) or (self.new in told and told in changed and told not in source)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column} {self.old} -> {self.new} in: {self.source()}"


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
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RECORDS:
            yield from (_starts(keyword.value) for keyword in node.keywords)


def _of_gpu_kernels(module: ast.Module) -> Iterator[tuple[int, int]]:
    """Where anything stands of what declares a kernel by name that is not the torch kernel."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KERNELS and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and name.value != "torch":
                yield from (_starts(each) for each in ast.walk(node) if isinstance(each, ast.expr))


def _starts(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


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


def drawn(number: int, seed: int, patterns: Sequence[str] = ("*",)) -> list[Change]:
    """So many changes of all files of these patterns, any token as likely as any other."""
    files = [file for file in FILES if any(fnmatch(file, pattern) for pattern in patterns)]
    every = [change for file in files for change in changes(file)]
    return Random(seed).sample(every, min(number, len(every)))


@dataclass(frozen=True)
class Verdict:
    """What came of a change. outcome: killed, survived, or equivalent. by: what killed it, how it is known, or how many
    cases it passed.
    """

    change: Change
    outcome: str
    by: str

    def __str__(self) -> str:
        return f"{self.outcome:10} {self.change} ({self.by})"


def known(file: Path, change: Change, share: str = "") -> Verdict | None:
    """The verdict of earlier runs, if a line of their file says that the change was killed, or that it passed all cases
    of a share.
    """
    every = _all(r"\d+", share)
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        outcome, _, rest = line.partition(" ")
        if rest.lstrip().startswith(f"{change} ("):
            by = rest.lstrip()[len(f"{change} (") : -1]
            if outcome == "killed" or (outcome == "survived" and re.fullmatch(every, by)):
                return Verdict(change, outcome, by)
    return None


def _all(number: object, share: str) -> str:
    return f"all {number} cases" + (f" of {share}" if share else "")


def judge(change: Change, seconds: float, share: str = "") -> Verdict:
    """Run the suite on a change, in a process of its own."""
    if how := change.equivalence():
        return Verdict(change, "equivalent", how)
    return Verdict(change, *_apart(change, seconds, share))


def check_unchanged(seconds: float = 20) -> None:
    """Raises `SystemExit` where a case fails, or the suite can't be imported, without a change: all would be killed."""
    outcome, by = _apart(Change("spec_metadata/visibility.py", 1, 0, "", ""), seconds, "")
    if outcome == "killed":
        raise SystemExit(f"without a change the suite says: {by}")


def _apart(change: Change, seconds: float, share: str) -> tuple[str, str]:
    """Outcome, and what by, of `_run` in a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=_run, args=(change, folder, seconds, share, theirs))
        process.start()
        process.join(seconds * 100 + 600)  # other processes may have the cores
        if process.is_alive():
            process.kill()
            process.join()
    if process.exitcode in (-signal.SIGKILL, -signal.SIGXCPU):
        return "killed", "it does not end"
    outcome: tuple[str, str] = ours.recv() if ours.poll() else ("killed", f"exit code {process.exitcode}")
    return outcome


def _run(
    change: Change, folder: str, seconds: float, share: str, answer: multiprocessing.connection.Connection
) -> None:
    """Send (outcome, by) of a change that is put into a copy of the packages."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds * 2 + 60),) * 2)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, Path(folder) / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "configs", Path(folder) / "configs")
    (Path(folder) / change.file).write_text(change.applied(), encoding="utf-8")
    sys.path[:0] = [folder]
    assert not set(PACKAGES) & sys.modules.keys(), "the packages are imported from the copy"
    try:
        answer.send(_first_failure(change.file, share, time.process_time() + seconds))
    except Exception as error:
        answer.send(("killed", f"{type(error).__name__}: {error}"))


def _first_failure(file: str, share: str, end: float) -> tuple[str, str]:
    from attn_backends.conformance import Outcome, Selection, Subject, run_case
    from attn_backends.registry import get_backend

    subjects = [Subject(get_backend(name), "torch") for name in FILES[file]]
    groups = ("plan.*", "math.*", "compressed.*", "[!pmsc]*")
    few = [Selection(quick=True, select=select, share=share) for select in groups[:: -1 if file in REPLAYS else 1]]
    passed = 0
    for cases in (*(_mixed(subjects, each) for each in few), _mixed(subjects, Selection(share=share))):
        for subject, case in cases:
            row = run_case(subject, case)
            if row.status in (Outcome.FAIL, Outcome.ERROR):
                return "killed", f"{case.check} ({row.status})"
            passed += 1
            if time.process_time() > end:
                return "survived", f"{passed} cases"
    return "survived", _all(passed, share)


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
    parser.add_argument("--files", nargs="+", default=["*"], help="patterns of the files to draw from (default: all)")
    parser.add_argument(
        "--seconds", type=float, default=300, help="of CPU time for the cases of a change (default: %(default)s)"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--known", type=Path, help="file of verdicts: read first, and appended to")
    parser.add_argument("--share", default="", help="such as 2/4: the second of every four cases (default: all)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    check_unchanged()
    counts: Counter[str] = Counter()
    every = drawn(args.changes, args.seed, args.files)
    earlier = [verdict for change in every if args.known and (verdict := known(args.known, change, args.share))]
    counts.update(verdict.outcome for verdict in earlier)
    left = sorted(set(every) - {verdict.change for verdict in earlier}, key=every.index)
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("fork")) as pool:
        for task in as_completed([pool.submit(judge, change, args.seconds, args.share) for change in left]):
            verdict = task.result()
            counts[verdict.outcome] += 1
            print(verdict, flush=True)
            if args.known:
                with args.known.open("a", encoding="utf-8") as file:
                    print(verdict, file=file)
    lasting = counts["killed"] + counts["survived"]
    print(f"{counts['killed']} of {lasting} killed; {counts['equivalent']} change nothing; seed {args.seed}")
    return int(counts["killed"] < 0.97 * lasting)


if __name__ == "__main__":
    raise SystemExit(main())
