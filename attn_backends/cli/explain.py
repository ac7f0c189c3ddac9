"""`explain`: a picture of a step's metadata, as the kernels of backends read it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape

from attn_backends import results
from attn_backends.backend import AttentionBackend
from attn_backends.cli import Command, add_threads
from attn_backends.cli.conformance import check_device, read_case
from attn_backends.cli.consoles import output_console, progress
from attn_backends.conformance import Case, Row, resolve_subjects
from attn_backends.conformance.subjects import resolve
from attn_backends.errors import BackendUnavailableError, ConfigError, UnsupportedStepError
from attn_backends.explain import Picture, to_html, to_svg, to_text
from attn_backends.explain.examples import EXAMPLES, example_picture
from attn_backends.explain.from_case import case_picture
from attn_backends.registry import list_backends

WRITERS = {".svg": to_svg, ".html": to_html, ".txt": to_text}
DEFAULT = "tree"


@dataclass(frozen=True)
class Refused:
    """A backend without a picture, and why."""

    backend: str
    reason: str


def run(args: argparse.Namespace) -> int:
    """Read each backend's metadata, print or write the pictures; 1 if a row is wrong."""
    check_device(args.device)
    for option, path in (("--json", args.json), ("--output", args.output)):
        results.check_output(option, path)
    if args.output is not None and args.output.suffix not in WRITERS:
        raise ConfigError(f"--output {args.output}: a picture ends in {', '.join(WRITERS)}")
    case = read_case(args.case) if args.case else None
    names = args.backends or list(list_backends())
    if case is not None and len(args.backends) != 1:
        raise ConfigError("--case is of one backend: name it")
    found: list[Picture | Refused] = []
    head = results.head(args.words, args.device)
    with results.Recording(args.json, head) as recording, progress("reading", "backends", len(names)) as bar:
        for name in names:
            bar.describe(name)
            for each in _pictures(name, case, args):
                found.append(each)
                recording.add(_as_row(each))
            bar.advance()
        recording.finish()
    return _show(found, args)


def _pictures(name: str, case: Case | None, args: argparse.Namespace) -> Iterator[Picture | Refused]:
    try:
        backend = resolve(name)
        if case is None:
            yield _of_example(backend, args)
            return
        subjects, absent = resolve_subjects(backend, args.kernel, args.device)
    except (UnsupportedStepError, BackendUnavailableError) as refusal:
        if args.backends:
            raise
        yield Refused(name, str(refusal))
        return
    if not subjects:
        raise ConfigError(_absence(name, absent))
    yield from (case_picture(subject, case) for subject in subjects)


def _of_example(backend: type[AttentionBackend], args: argparse.Namespace) -> Picture:
    options = {"kernel": args.kernel, "device": args.device, "captured": args.graph}
    return example_picture(backend, args.example or DEFAULT, **options)


def _absence(name: str, absent: Sequence[Row]) -> str:
    reasons = "; ".join(f"{row.kernel}: {row.reason}" for row in absent)
    return f"no kernel of {name} runs here ({reasons})"


def _show(found: Sequence[Picture | Refused], args: argparse.Namespace) -> int:
    """Print or write the pictures; the exit code."""
    pictures = [each for each in found if isinstance(each, Picture)]
    console = output_console()
    for each in found:
        if isinstance(each, Refused):
            console.print(f"no picture of {escape(each.backend)}: {escape(each.reason)}", soft_wrap=True)
    if args.output is None:
        console.print(to_text(pictures), markup=False, soft_wrap=True, end="")
    else:
        results.write_text(args.output, WRITERS[args.output.suffix](pictures))
        for picture in pictures:
            console.print(f"{picture.backend} ({picture.kernel}): {picture.verdict}", markup=False, soft_wrap=True)
    return 0 if all(picture.is_right for picture in pictures) else 1


def _as_row(each: Picture | Refused) -> dict[str, Any]:
    """A picture as JSON values: what is wrong, and the slots that each row sees and writes."""
    if isinstance(each, Refused):
        return {"backend": each.backend, "reason": each.reason}
    rows = [
        {
            "forward": forward,
            "row": row.number,
            "request": None if row.law is None else row.law.request,
            "sees": {str(pool): sorted(slots.elements()) for pool, slots in row.seen.items()},
            "writes": row.writes,
            "faults": list(row.faults),
        }
        for forward, of_forward in enumerate(each.forwards)
        for row in of_forward
    ]
    own = {name: getattr(each, name) for name in ("backend", "kernel", "planner", "path", "step")}
    return {**own, "right": each.is_right, "problems": list(each.problems), "rows": rows}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("backends", nargs="*", metavar="NAME", help="names, or module:Class (default: all known)")
    what = parser.add_mutually_exclusive_group()
    told = "; ".join(f"{name}: {example.about}" for name, example in EXAMPLES.items())
    what.add_argument("--example", choices=EXAMPLES, help=f"a small step (default: {DEFAULT}). {told}")
    what.add_argument("--case", metavar="FILE|JSON", help="a conformance case, of a file or as it is printed")
    parser.add_argument("--graph", action="store_true", help="an example's metadata captured, replayed and padded")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"write a picture: {', '.join(WRITERS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what each row sees and writes")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--kernel", default="auto", help="whose reading is shown (default: %(default)s)")
    add_threads(parser)


COMMAND = Command(
    "What each row of a step sees and writes, as the kernel reads its metadata, beside the buffers. A wrong row is "
    "marked, and makes the exit code 1.",
    _add_arguments,
    run,
    "attn-backends explain fa3 trtllm_mla --example tree --output step.html",
)
