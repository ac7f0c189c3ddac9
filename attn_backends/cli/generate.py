"""`generate`: continue prompts by EAGLE, and show the text as it comes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.rule import Rule

from attn_backends.cli.consoles import output_console, progress
from attn_backends.cli.options import load_config
from attn_backends.eagle.engine import build_engine
from attn_backends.eagle.requests import Request, RequestOptions
from attn_backends.errors import ConfigError
from spec_metadata import Sampling


def run(args: argparse.Namespace) -> int:
    """Print each prompt with its continuation, then how it was made."""
    prompts = [*args.prompt, *map(_read, args.prompt_file)]
    if not prompts or "" in prompts:
        raise ConfigError("generate needs at least one --prompt TEXT or --prompt-file FILE, and none of them empty")
    sampling = Sampling(args.temperature, args.top_p, args.top_k, args.seed)
    config = load_config(args, args.config, args.backend)
    options = RequestOptions(config.runtime.max_new_tokens, sampling, tuple(args.stop))
    console = output_console()
    with progress("loading models", "tokens") as bar:
        engine = build_engine(config)
        server = engine.server()
        requests = [server.submit(engine.tokenizer.encode(prompt), options) for prompt in prompts]
        bar.describe("first tokens; the first step of each kind makes its kernels and graphs")
        stream = server.stream()
        next(stream, None)
    view = _InOrder(console, prompts, requests)
    view.update()
    for _ in stream:
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
