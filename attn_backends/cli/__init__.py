"""The command line `attn-backends`: what there is, whether it is right, and speculative decoding through it."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

from attn_backends.cli.consoles import error_console
from attn_backends.errors import AttnBackendsError
from spec_metadata import InvalidStepError

INTERRUPTED, CLOSED = 130, 141  # as a shell has it for a process that SIGINT or SIGPIPE ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 0, 1 if a comparison failed, 2 if something can't be used or written,
    `INTERRUPTED`, or `CLOSED` if the reader of its output went away. The `--json` file has what was done all the same.
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        try:
            args = _parser().parse_args(words, argparse.Namespace(words=("attn-backends", *words)))
            sys.path.append(os.getcwd())  # a command does not look for module:Class here, as `python -m` does
            _set_threads(args)
            return _run(args)
        finally:
            sys.stdout.flush()  # or the interpreter does, when nobody is left to say what went wrong
    except KeyboardInterrupt as interrupt:
        _tell("[bold yellow]interrupted[/]", interrupt)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return CLOSED
    except (AttnBackendsError, InvalidStepError) as error:
        _tell("[bold red]error[/]", error)
        return 2
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        _tell(
            "[bold red]error[/]", OSError(f"{error.filename or 'standard output'} can't be written: no space is left")
        )
        return 2


def _tell(what: str, error: BaseException) -> None:
    """One line on standard error: what happened, and what was noted on the way."""
    words = "; ".join(filter(None, [str(error), *getattr(error, "__notes__", ())]))
    with suppress(OSError):
        error_console().print(": ".join(filter(None, (what, escape(words)))), soft_wrap=True)


def _drop_output() -> None:
    """Let what is still to be written to standard output go nowhere."""
    with suppress(OSError):  # it has no descriptor where it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _set_threads(args: argparse.Namespace) -> None:
    """One thread unless somebody says otherwise: commands beside each other would fight for the processors, and what
    runs on the host is too small to gain from more.
    """
    asked = getattr(args, "threads", None)
    if asked is not None:
        torch.set_num_threads(asked)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _run(args: argparse.Namespace) -> int:
    """Imports the command only, so that `list` and `info` need no model library."""
    if args.command in ("list", "info"):
        from attn_backends.cli import describe

        if args.command == "list":
            return describe.show_list(as_json=args.json)
        return describe.show_info(args.name, as_json=args.json)
    if args.command == "generate":
        from attn_backends.cli import generate

        return generate.run(args)
    if args.command == "conformance":
        from attn_backends.cli import conformance

        return conformance.run(args)
    if args.command == "bench":
        from attn_backends.cli import bench, bench_cycles

        return bench.run(args) if args.what == "attention" else bench_cycles.run(args)
    from attn_backends.cli import demo

    return demo.run(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attn-backends",
        description=__doc__,
        epilog="Exit code 0: right. 1: a comparison failed. 2: it could not be run or written. 130: interrupted. 141: "
        "the reader of its output went away.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="backends, their kernels, and what runs here")
    listing.add_argument("--json", action="store_true", help="print JSON")
    info = commands.add_parser("info", help="one backend: kernels, capabilities, declared buffers")
    info.add_argument("name", help="a backend's name, or module:Class")
    info.add_argument("--json", action="store_true", help="print JSON")
    generate = commands.add_parser("generate", help="continue prompts by EAGLE")
    generate.add_argument("--config", default="chain", help="a file, or a preset's name (default: %(default)s)")
    generate.add_argument("--backend", help="run every phase on this backend instead of the file's")
    generate.add_argument("--prompt", action="append", default=[], help="a prompt; may be repeated")
    generate.add_argument("--prompt-file", type=Path, action="append", default=[], help="a text file; may be repeated")
    generate.add_argument("--max-new-tokens", type=int, metavar="N", help="tokens to generate (default: the file's)")
    _add_sampling(generate)
    demo = commands.add_parser(
        "demo",
        help="plain and speculative decoding compared, on every vendor's backend",
        description="Exit code 0: every row is what its precision promises. 1: one is not. 2: bad input.",
    )
    demo.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="NAME",
        help="a name, or module:Class; may be repeated (default: every vendor's)",
    )
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    suite, bench = _add_conformance(commands), _add_bench(commands)
    for command in (generate, demo, suite, bench):
        command.add_argument(
            "--threads",
            type=_at_least_one,
            metavar="N",
            help="threads of torch on the host (default: OMP_NUM_THREADS if it is set, else 1)",
        )
    for command in (generate, demo):
        command.add_argument("--kernel", help="a kernel's name, or auto (default: the file's)")
        command.add_argument(
            "--dtype",
            choices=("float32", "bfloat16", "float16", "float64"),
            help="of the weights (default: the file's)",
        )
        command.add_argument("--cache-dtype", choices=("float8_e4m3fn",), help="of the cache (default: the weights')")
        command.add_argument("--device", help="cpu, cuda or one such as cuda:1 (default: the file's)")
    return parser


def _add_sampling(generate: argparse.ArgumentParser) -> None:
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (the default)")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P", help="choose among the best, which hold P")
    generate.add_argument("--top-k", type=int, default=0, metavar="K", help="choose among the best K tokens; 0: all")
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="of the choices (default: %(default)s)")
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before it; may be repeated")


def _add_conformance(commands: Any) -> argparse.ArgumentParser:
    suite: argparse.ArgumentParser = commands.add_parser(
        "conformance",
        help="whether backends are right: every check, eagerly and through graphs",
        description="Exit code 0: nothing failed. 1: a check failed. 2: a check broke, nothing ran, or bad input.",
    )
    suite.add_argument("backends", nargs="*", metavar="NAME", help="names, or module:Class (default: all known)")
    suite.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    suite.add_argument("--kernel", default="auto", help="one of its kernels (default: auto, every one that runs)")
    suite.add_argument("--quick", action="store_true", help="a few cases of each check, spread evenly")
    suite.add_argument("--select", default="*", metavar="PATTERN", help="ids of checks, such as 'graph.*'")
    suite.add_argument("--require-run", action="store_true", help="fail if something could not be run here")
    suite.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    suite.add_argument("--report", type=Path, metavar="FILE", help="write the report as an HTML page")
    suite.add_argument("--case", type=Path, metavar="FILE", help="run the one case of a JSON file")
    suite.add_argument("--config", type=Path, metavar="FILE", help="TOML with [[expected_failures]]")
    return suite


def _add_bench(commands: Any) -> argparse.ArgumentParser:
    bench: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="what layers, their metadata and whole cycles cost, beside vendors and SGLang",
        description="All but memory needs a GPU. Exit code 0: all was measured. 1: a comparison failed. 2: nothing can "
        "be measured, or bad input.",
    )
    bench.add_argument(
        "what",
        choices=("attention", "metadata", "memory", "cycle"),
        help="attention: a layer's forward, under graphs. metadata: preparing each phase of a cycle. memory: bytes of "
        "static buffers. cycle: whole cycles of the worker",
    )
    bench.add_argument(
        "--set",
        choices=("layer", "kernels", "prefill", "trees"),
        help="of attention. layer: beside the vendor's raw call (the default). kernels: vendors' and ours, beside each "
        "other and the device's ceilings, in decodes and verifies. prefill: likewise. trees: the verify of a tree "
        "beside that of a chain",
    )
    bench.add_argument(
        "--backend", action="append", default=[], metavar="NAME", help="may be repeated (default: all that suit)"
    )
    bench.add_argument(
        "--batch-size", type=int, nargs="+", metavar="N", help="requests, of memory the most (default: several)"
    )
    bench.add_argument(
        "--context", type=int, nargs="+", metavar="N", help="tokens of each, of memory the most (default: several)"
    )
    bench.add_argument("--page-size", type=int, metavar="N", help="of metadata and memory (default: the backend's)")
    bench.add_argument("--topk", type=int, metavar="N", help="of metadata and memory: branches of a draft level")
    bench.add_argument("--quick", action="store_true", help="few rounds and sizes")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    bench.add_argument("--plot", type=Path, metavar="FILE", help="draw them as PNG or SVG; of attention, --set kernels")
    return bench


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _version() -> str:
    try:
        return version("attn-backends")
    except PackageNotFoundError:
        return "without package metadata"
