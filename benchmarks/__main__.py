"""`python -m benchmarks`: what layers, their metadata and whole cycles cost, beside vendors and SGLang."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from attn_backends.cli import Command, add_threads, guarded, run_command
from benchmarks import cli_attention, cli_cycles, eager


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark; returns its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    return guarded(lambda: run_command("python -m benchmarks", COMMAND, words))


def _run(args: argparse.Namespace) -> int:
    return {"attention": cli_attention, "eager": eager}.get(args.what, cli_cycles).run(args)


def _add_arguments(bench: argparse.ArgumentParser) -> None:
    bench.add_argument(
        "what",
        choices=("attention", "eager", "metadata", "memory", "cycle"),
        help="attention: a layer's forward, under graphs. eager: the host's time of layers and metadata without one. "
        "metadata: preparing each phase of a cycle. memory: bytes of static buffers. cycle: whole cycles of the worker",
    )
    bench.add_argument(
        "--set",
        choices=("layer", "kernels", "prefill", "trees", "ragged", "mixed"),
        help="of attention. layer: beside the vendor's raw call (the default). kernels: vendors' and ours, beside each "
        "other and the device's ceilings, in decodes and verifies. prefill: likewise. trees: the verify of a tree "
        "beside that of a chain. ragged: verifies of widths that the device decides, beside the best uniform one. "
        "mixed: a chunk with decodes or verifies as one step, beside two",
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
    add_threads(bench)


COMMAND = Command(
    "What layers, their metadata and whole cycles cost. All but memory needs a GPU. A comparison that failed "
    "makes the exit code 1, nothing to measure 2.",
    _add_arguments,
    _run,
    "python -m benchmarks memory --backend fa3 --json rows.json",
)

if __name__ == "__main__":
    sys.exit(main())
