"""The command line `attn-backends`: what there is, whether it is right, and what other packages add.

A package adds a command by an entry point of the group `attn_backends.commands`, whose value is a `Command`. Nothing of
it is imported before the command is called.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from textwrap import fill, indent
from typing import NoReturn

import torch

from attn_backends.errors import AttnBackendsError, ConfigError
from spec_metadata import InvalidStepError

ENTRY_POINT_GROUP = "attn_backends.commands"
OWN = {
    "list": "attn_backends.cli.describe:LIST",
    "info": "attn_backends.cli.describe:INFO",
    "conformance": "attn_backends.cli.conformance:COMMAND",
    "explain": "attn_backends.cli.explain:COMMAND",
}
HELP = {
    "list": "backends, their kernels, and what runs here",
    "info": "one backend: kernels, capabilities, declared buffers",
    "conformance": "whether backends are right: every check, eagerly and through graphs",
    "explain": "a picture of a step's metadata: what each row sees and writes, as the kernel reads it",
    "inspect": "a model's folder: what would run it here, in how much memory, and what is refused",
    "export": "an MTP draft and its target, as SGLang or vLLM loads them",
    "generate": "continue prompts, by EAGLE if the configuration has a draft",
    "demo": "plain and speculative decoding compared, on every backend but the reference",
}
REFERENCE = "attn-backends-reference"
INTERRUPTED, CLOSED = 130, 141  # as a shell has it for a process that SIGINT or SIGPIPE ended
HELP_WIDTH = 100
EXIT_CODES = (
    "Exit code 0: right. 1: a comparison failed. 2: it could not be run or written. 130: interrupted. 141: the reader "
    "of its output went away."
)


@dataclass(frozen=True, slots=True)
class Command:
    """A command. description: of its help. add_arguments: to its parser. run: its exit code. example: a line that can
    be typed, with the name of the program.
    """

    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    example: str


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all errors of commands are, and lead to its help."""

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError`; argparse would print the usage of every option and exit."""
        raise ConfigError(f"{message}; {self.prog} --help shows what there is, with an example")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 0, 1 if a comparison failed, 2 if something can't be used or written,
    `INTERRUPTED`, or `CLOSED` if the reader of its output went away. The `--json` file has what was done all the same.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)

    def run() -> int:
        given = _parser().parse_args(words or ["--help"])
        return run_command(f"attn-backends {given.command}", find(given.command), given.rest)

    return guarded(run)


def run_command(program: str, command: Command, words: Sequence[str]) -> int:
    """Run a command with its arguments. program: what its help calls it."""
    parser = OneLineParser(
        prog=program,
        description=fill(command.description, HELP_WIDTH),
        epilog=f"example:\n  {command.example}\n\n{fill(EXIT_CODES, HELP_WIDTH)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    args = parser.parse_args(words, argparse.Namespace(words=(*program.split(), *words)))
    _set_threads(args)
    return command.run(args)


def guarded(run: Callable[[], int]) -> int:
    """The exit code of what runs, as `main` has it; an error that ends it is reported in one line, with the place that
    raised it if it is none of the library's own.
    """
    try:
        try:
            return run()
        finally:
            if sys.stdout is not None:  # as it is where the shell closed it
                sys.stdout.flush()  # or the interpreter does, when nobody is left to say what went wrong
    except KeyboardInterrupt as interrupt:
        _tell("[bold yellow]interrupted[/]", interrupt)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return CLOSED
    except Exception as error:
        what, told = "[bold red]error[/]", error
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            _drop_output()
            told = OSError(f"{error.filename or 'standard output'} can't be written: no space is left")
        elif not isinstance(error, (AttnBackendsError, InvalidStepError)):
            from attn_backends.conformance.running import place

            what = f"{what}: {type(error).__name__}"
            told.add_note(f"raised at {place(error)}")
        _tell(what, told)
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


def add_threads(parser: argparse.ArgumentParser) -> None:
    """The option of commands that compute on the host."""
    parser.add_argument(
        "--threads",
        type=_at_least_one,
        metavar="N",
        help="threads of torch on the host (default: OMP_NUM_THREADS if it is set, else 1)",
    )


def _set_threads(args: argparse.Namespace) -> None:
    """One thread unless somebody says otherwise: commands beside each other would fight for the processors, and what
    runs on the host is too small to gain from more.
    """
    asked = getattr(args, "threads", None)
    if asked is not None:
        torch.set_num_threads(asked)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _tell(what: str, error: BaseException) -> None:
    """One line on standard error: what happened, and what was noted on the way."""
    from rich.markup import escape

    from attn_backends.cli.consoles import error_console

    words = " ".join("; ".join(filter(None, [str(error), *getattr(error, "__notes__", ())])).splitlines())
    with suppress(OSError):
        error_console().print(": ".join(filter(None, (what, escape(words)))), soft_wrap=True)


def _drop_output() -> None:
    """Let what is still to be written to standard output go nowhere."""
    with suppress(OSError):  # it has no descriptor where it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    added = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    lines = [f"{name:12} {text}" for name, text in HELP.items()]
    lines += [f"{name:12} of {entry.value.partition(':')[0]}" for name, entry in added.items() if name not in HELP]
    parser = OneLineParser(
        prog="attn-backends",
        description="Attention backends for EAGLE speculative decoding.",
        epilog="commands:\n" + indent("\n".join(lines), "  ") + f"\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    parser.add_argument("command", metavar="COMMAND", help="attn-backends COMMAND --help shows its options")
    parser.add_argument("rest", metavar="...", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _version() -> str:
    try:
        return version("attn-backends")
    except PackageNotFoundError:
        return "without package metadata"
