"""`generate`: continue prompts, and show the text as it comes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.rule import Rule

from attn_backends import results
from attn_backends.cli import Command
from attn_backends.cli.consoles import output_console, progress
from attn_backends.errors import ConfigError
from attn_backends_reference.cli.options import add_run, add_runtime, in_bytes, load_config
from attn_backends_reference.config import RunConfig
from attn_backends_reference.eagle.engine import Engine, build_engine
from attn_backends_reference.eagle.requests import FinishReason, Request, RequestOptions
from attn_backends_reference.models import open_target
from attn_backends_reference.run_options import RuntimeOptions
from spec_metadata import Sampling

MB = 10**6


def run(args: argparse.Namespace) -> int:
    """Print each prompt with its continuation and why it ended, then how it was made."""
    results.check_output("--json", args.json)
    prompts = [*args.prompt, *map(_read, args.prompt_file)]
    if not prompts or "" in prompts:
        raise ConfigError("generate needs at least one --prompt TEXT or --prompt-file FILE, and none of them empty")
    sampling = Sampling(args.temperature, args.top_p, args.top_k, args.seed)
    config = load_config(args, args.config, args.backend)
    options = RequestOptions(config.runtime.max_new_tokens, sampling, tuple(args.stop))
    engine, console = _load(config), output_console()
    encode = engine.tokenizer.encode_chat if args.chat else engine.tokenizer.encode
    with progress("first tokens; the first step of each kind makes its kernels and graphs", "tokens"):
        server = engine.server()
        requests = [server.submit(encode(prompt), options) for prompt in prompts]
        stream = server.stream()
        begun = list(islice(stream, 1))
    streamed, num_tokens = args.stream or console.is_terminal, len(prompts) * options.max_new_tokens
    view = _InOrder(console, prompts, requests, config.runtime)
    bar = nullcontext() if streamed else progress("decoding", "tokens", num_tokens)
    with (
        results.Recording(args.json, results.head(args.words, str(config.device))) as recording,
        server,
        bar as decoding,
    ):
        for request, tokens in chain(begun, stream):
            if decoding is not None:
                decoding.advance(len(tokens))
            if streamed or request.finish is not None:
                view.update()
            if request.finish is not None:
                recording.add(_as_row(prompts[requests.index(request)], request))
        recording.finish(
            model=config.model.target,
            draft=config.model.draft,
            backends={phase: config.backends.of(phase) for phase in config.phases},
            ran=engine.ran,
            kernels=engine.kernels,
        )
    _tell(console, engine, requests)
    return 0


def _tell(console: Console, engine: Engine, requests: Sequence[Request]) -> None:
    """How the texts were made."""
    config = engine.config
    emitted = sum(len(request.output) - 1 for request in requests)
    cycles = sum(request.statistics.num_cycles for request in requests)
    console.print(f"{emitted / max(cycles, 1):.2f} tokens a cycle")
    for backend in config.backends.distinct:
        phases = [phase for phase in config.phases if config.backends.of(phase) == backend]
        console.print(f"{backend}, kernel {engine.kernels[phases[0]]}: {', '.join(phases)}")
    for phase, counts in engine.ran.items():
        console.print(f"{phase}: {counts['graph']} steps through graphs, {counts['eager']} eagerly")
    for note in config.notes:
        console.print(note, markup=False, soft_wrap=True)


def _as_row(prompt: str, request: Request) -> dict[str, Any]:
    """A finished request as JSON values."""
    return {
        "prompt": prompt,
        "text": request.text,
        "tokens": request.output,
        "finish": str(request.finish),
        "cycles": request.statistics.num_cycles,
    }


def _load(config: RunConfig) -> Engine:
    """The models on their backends; the bytes of the target's files are counted as they are read."""
    found = open_target(config.model.target)
    needed = found.num_bytes(config.dtype)
    what = f"loading {config.model.target}, {in_bytes(needed)} in memory as {config.runtime.dtype}"
    with progress(what, "MB read", -(-found.weights.num_bytes // MB)) as bar:
        return build_engine(config, lambda number: bar.advance(number / MB))


class _InOrder:
    """Prints texts that grow at the same time one after the other: the first that is not through, as it grows."""

    def __init__(
        self, console: Console, prompts: Sequence[str], requests: Sequence[Request], runtime: RuntimeOptions
    ) -> None:
        self._console, self._runtime = console, runtime
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
            self._console.print("", Rule(escape(_ending(request, self._runtime)), style="dim"), sep="\n")
            self._left.pop(0)
            self._shown = ""


def _ending(request: Request, runtime: RuntimeOptions) -> str:
    """How long a text became, and why it ended."""
    reasons: dict[FinishReason | None, str] = {
        FinishReason.EOS: f"end-of-text token {request.output[-1]}",
        FinishReason.STOP: "a stop string",
        FinishReason.LENGTH: f"max_new_tokens = {runtime.max_new_tokens}",
    }
    reason = reasons.get(request.finish, request.finish)
    if request.finish is FinishReason.LENGTH and len(request.output) < runtime.max_new_tokens:
        reason = f"the context is full, max_context = {runtime.max_context}"
    return f"{len(request.output)} token{'s' * (len(request.output) != 1)}, ended by: {reason}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt-file {path} can't be read: {error}") from error


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="FOLDER", help="the target's folder, or an embedded one's name")
    add_run(parser)
    parser.add_argument("--prompt", action="append", default=[], help="a prompt; may be repeated")
    parser.add_argument("--prompt-file", type=Path, action="append", default=[], help="a text file; may be repeated")
    parser.add_argument("--chat", action="store_true", help="prompts are messages: apply the tokenizer's template")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="tokens to generate (default: the file's)")
    parser.add_argument("--stream", action="store_true", help="show text as it grows, as on a terminal, in a pipe too")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (the default)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="choose among the best, which hold P")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="choose among the best K tokens; 0: all")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the choices (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each text, its tokens and cycles")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before it; may be repeated")
    add_runtime(parser)


COMMAND = Command(
    "Continue prompts, by EAGLE if the configuration has a draft.",
    _add_arguments,
    run,
    'attn-backends generate --model gqa --draft gqa --prompt "import os"',
)
