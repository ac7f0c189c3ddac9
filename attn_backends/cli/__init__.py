"""The command line `attn-backends`: what there is, whether it is right, and what other packages add.

A package adds a command by an entry point of the group `attn_backends.commands`, whose value is a `Command`. Nothing of
it is imported before the command is called.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from textwrap import indent

from attn_backends.errors import AttnBackendsError, ConfigError
from spec_metadata import InvalidStepError

ENTRY_POINT_GROUP = "attn_backends.commands"
OWN = {
    "list": "attn_backends.cli.describe:LIST",
    "info": "attn_backends.cli.describe:INFO",
    "conformance": "attn_backends.cli.conformance:COMMAND",
}
HELP = {
    "list": "backends, their kernels, and what runs here",
    "info": "one backend: kernels, capabilities, declared buffers",
    "conformance": "whether backends are right: every check, eagerly and through graphs",
    "generate": "continue prompts, by EAGLE if the configuration has a draft",
    "demo": "plain and speculative decoding compared, on every vendor's backend",
}
REFERENCE = "attn-backends-reference"


@dataclass(frozen=True, slots=True)
class Command:
    """A command. description: of its help. add_arguments: to its parser. run: its exit code."""

    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code, 1 if a comparison failed and 2 if something can't be used."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    given = _parser().parse_args(words)
    return guarded(lambda: run_command(f"attn-backends {given.command}", find(given.command), given.rest))


def run_command(program: str, command: Command, words: Sequence[str]) -> int:
    """Run a command with its arguments. program: what its help calls it."""
    parser = argparse.ArgumentParser(prog=program, description=command.description)
    command.add_arguments(parser)
    args = parser.parse_args(words, argparse.Namespace(words=(*program.split(), *words)))
    return command.run(args)


def guarded(run: Callable[[], int]) -> int:
    """The exit code of what runs; an error of the library is printed, and is 2."""
    from rich.console import Console
    from rich.markup import escape

    try:
        return run()
    except (AttnBackendsError, InvalidStepError) as error:
        console = Console(stderr=True, highlight=False, emoji=False)
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        return 2


def find(name: str) -> Command:
    """The command of a name. Raises `ConfigError` if there is none, or its package is not installed."""
    if name in OWN:
        module, _, attribute = OWN[name].partition(":")
        found = getattr(import_module(module), attribute)
    else:
        added = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
        if name not in added and name in HELP:
            raise ConfigError(f"{name} is a command of {REFERENCE}. Install it: pip install ./reference (in a clone)")
        if name not in added:
            raise ConfigError(f"there is no command {name!r}; there are {', '.join({**HELP, **added})}")
        found = added[name].load()
    assert isinstance(found, Command)
    return found


def _parser() -> argparse.ArgumentParser:
    added = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    lines = [f"{name:12} {text}" for name, text in HELP.items()]
    lines += [f"{name:12} of {entry.value.partition(':')[0]}" for name, entry in added.items() if name not in HELP]
    parser = argparse.ArgumentParser(
        prog="attn-backends",
        description="Attention backends for EAGLE speculative decoding.",
        epilog="commands:\n" + indent("\n".join(lines), "  "),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    parser.add_argument("command", metavar="COMMAND", help="attn-backends COMMAND --help shows its options")
    parser.add_argument("rest", metavar="...", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _version() -> str:
    try:
        return version("attn-backends")
    except PackageNotFoundError:
        return "without package metadata"
