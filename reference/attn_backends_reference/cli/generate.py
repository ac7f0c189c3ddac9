"""`generate`: continue prompts by EAGLE, and show the text as it comes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.rule import Rule

from attn_backends.cli import Command
from attn_backends.cli.options import output_console
from attn_backends.errors import ConfigError
from attn_backends_reference.cli.options import add_runtime, load_config
from attn_backends_reference.eagle.engine import build_engine
from attn_backends_reference.eagle.requests import Request, RequestOptions
from spec_metadata import Sampling


def run(args: argparse.Namespace) -> int:
    """Print each prompt with its continuation, then how it was made."""
    prompts = [*args.prompt, *map(_read, args.prompt_file)]
    if not prompts or "" in prompts:
        raise ConfigError("generate needs at least one --prompt TEXT or --prompt-file FILE, and none of them empty")
    sampling = Sampling(args.temperature, args.top_p, args.top_k, args.seed)
    config = load_config(args, args.config, args.backend)
    options = RequestOptions(config.runtime.max_new_tokens, sampling, tuple(args.stop))
    engine, console = build_engine(config), output_console()
    server = engine.server()
    requests = [server.submit(engine.tokenizer.encode(prompt), options) for prompt in prompts]
    view = _InOrder(console, prompts, requests)
    for _ in server.stream():
        view.update()
    emitted = sum(len(request.output) - 1 for request in requests)
    cycles = sum(request.statistics.num_cycles for request in requests)
    console.print(f"{emitted / max(cycles, 1):.2f} tokens a cycle")
    for backend in config.backends.distinct:
        phases = [phase for phase in config.phases if config.backends.of(phase) == backend]
        console.print(f"{backend}, kernel {engine.kernels[phases[0]]}: {', '.join(phases)}")
    for phase, counts in engine.ran.items():
        console.print(f"{phase}: {counts['graph']} steps through graphs, {counts['eager']} eagerly")
    return 0


class _InOrder:
    """Prints texts that grow at the same time one after the other: the first that is not through, as it grows."""

    def __init__(self, console: Console, prompts: Sequence[str], requests: Sequence[Request]) -> None:
        self._console = console
        self._left = list(zip(prompts, requests, strict=True))
        self._shown = ""

    def update(self) -> None:
        """Print what has come since the last time."""
        while self._left:
            prompt, request = self._left[0]
            text = prompt + request.text
            self._console.print(text[len(self._shown) :], markup=False, soft_wrap=True, end="")
            self._shown = text
            if request.finish is None:
                return
            self._console.print("", Rule(style="dim"), sep="\n")
            self._left.pop(0)
            self._shown = ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt-file {path} can't be read: {error}") from error


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="chain", help="a file, or a preset's name (default: %(default)s)")
    parser.add_argument("--backend", help="run every phase on this backend instead of the file's")
    parser.add_argument("--prompt", action="append", default=[], help="a prompt; may be repeated")
    parser.add_argument("--prompt-file", type=Path, action="append", default=[], help="a text file; may be repeated")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="tokens to generate (default: the file's)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (the default)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="choose among the best, which hold P")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="choose among the best K tokens; 0: all")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the choices (default: %(default)s)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before it; may be repeated")
    add_runtime(parser)


COMMAND = Command("Continue prompts by EAGLE.", _add_arguments, run)
