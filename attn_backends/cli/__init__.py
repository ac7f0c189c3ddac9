"""The command line `attn-backends`: what there is, whether it is right, and speculative decoding through it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from attn_backends.errors import AttnBackendsError
from spec_metadata import InvalidStepError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code, 1 if a comparison failed and 2 if something can't be used."""
    words = sys.argv[1:] if arguments is None else arguments
    args = _parser().parse_args(words, argparse.Namespace(words=("attn-backends", *words)))
    sys.path.append(os.getcwd())  # a command does not look for module:Class here, as `python -m` does
    try:
        return _run(args)
    except (AttnBackendsError, InvalidStepError) as error:
        console = Console(stderr=True, highlight=False, emoji=False)
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        return 2


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
    parser = argparse.ArgumentParser(prog="attn-backends", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="backends, their kernels, and what runs here")
    listing.add_argument("--json", action="store_true", help="print JSON")
    info = commands.add_parser("info", help="one backend: kernels, capabilities, declared buffers")
    info.add_argument("name", help="a backend's name, or module:Class")
    info.add_argument("--json", action="store_true", help="print JSON")
    generate = commands.add_parser("generate", help="continue prompts, by EAGLE if the configuration has a draft")
    generate.add_argument("--config", default="chain", help="a file, or a preset's name (default: %(default)s)")
    generate.add_argument("--backend", help="run every phase on this backend instead of the file's")
    generate.add_argument("--prompt", action="append", default=[], help="a prompt; may be repeated")
    generate.add_argument("--prompt-file", type=Path, action="append", default=[], help="a text file; may be repeated")
    generate.add_argument("--max-new-tokens", type=int, metavar="N", help="tokens to generate (default: the file's)")
    generate.add_argument(
        "--stream", action="store_true", help="show text as it grows, as on a terminal, in a pipe too"
    )
    _add_sampling(generate)
    demo = commands.add_parser(
        "demo",
        help="plain and speculative decoding compared, on every vendor's backend",
        description="Exit code 0: every row is what its precision promises. 1: one is not. 2: bad input.",
    )
    demo.add_argument("--backend", action="append", default=[], metavar="NAME", help="may be repeated (default: all)")
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    _add_conformance(commands)
    _add_bench(commands)
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


def _add_conformance(commands: Any) -> None:
    suite = commands.add_parser(
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


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
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


def _version() -> str:
    try:
        return version("attn-backends")
    except PackageNotFoundError:
        return "without package metadata"
