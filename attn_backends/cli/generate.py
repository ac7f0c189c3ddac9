"""`generate`: continue prompts by EAGLE."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.rule import Rule

from attn_backends.cli.options import load_config, token_progress
from attn_backends.config import PHASES
from attn_backends.eagle.engine import build_engine
from attn_backends.eagle.report import tokens_per_cycle
from attn_backends.errors import ConfigError


def run(args: argparse.Namespace) -> int:
    """Print each prompt with its continuation, then how it was made."""
    prompts = [*args.prompt, *map(_read, args.prompt_file)]
    if not prompts or "" in prompts:
        raise ConfigError("generate needs at least one --prompt TEXT or --prompt-file FILE, and none of them empty")
    config = load_config(args, args.config, args.backend)
    engine = build_engine(config)
    encoded = [engine.tokenizer.encode(prompt) for prompt in prompts]
    max_new_tokens = config.runtime.max_new_tokens
    with token_progress("generating", len(prompts) * max_new_tokens) as advance:
        completions = engine.generate(encoded, max_new_tokens, advance)
    console = Console(highlight=False)
    for prompt, completion in zip(prompts, completions, strict=True):
        console.print(prompt + engine.tokenizer.decode(completion.tokens), markup=False, soft_wrap=True)
        console.print(Rule(style="dim"))
    console.print(f"{tokens_per_cycle(completions):.2f} tokens a cycle")
    for backend in config.backends.distinct:
        phases = [phase for phase in PHASES if config.backends.of(phase) == backend]
        console.print(f"{backend}, kernel {engine.kernels[phases[0]]}: {', '.join(phases)}")
    for phase, counts in engine.ran.items():
        console.print(f"{phase}: {counts['graph']} steps through graphs, {counts['eager']} eagerly")
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt-file {path} can't be read: {error}") from error
