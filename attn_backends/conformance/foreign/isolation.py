"""Cases in a process of their own: another project's code may take its process down, and wants its own environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from signal import Signals
from types import TracebackType
from typing import Self

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import Subject
from attn_backends.conformance.foreign.blame import run_foreign_case
from attn_backends.conformance.foreign.driver import ForeignBackend
from attn_backends.conformance.outcomes import Outcome, Row
from attn_backends.conformance.running import run_case


@contextmanager
def running(subject: Subject) -> Iterator[Callable[[Case], Row]]:
    """A function that runs a subject's cases: here, or those of a foreign backend in a process of their own."""
    if not issubclass(subject.backend, ForeignBackend):
        yield partial(run_case, subject)
        return
    with Isolated(subject) as isolated:
        yield isolated.run


class Isolated:
    """Runs a foreign backend's cases in a process, and in a fresh one after a case that ended it."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._forget()

    def run(self, case: Case) -> Row:
        """The row of a case; an error if its process ended."""
        connection = self._connection or self._start()
        try:
            connection.send(case)
            row: Row = connection.recv()
        except (EOFError, OSError):
            return self._ended(case)
        return row

    def _start(self) -> Connection:
        context, subject = get_context("spawn"), self._subject
        assert issubclass(subject.backend, ForeignBackend), "only these have a process of their own"
        ours, theirs = context.Pipe()
        arguments = (theirs, subject.backend, subject.kernel, subject.device)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        with _environment(subject.backend.environment(subject.device)):
            self._process.start()
        theirs.close()
        self._connection = ours
        return ours

    def _ended(self, case: Case) -> Row:
        assert self._process is not None, "it was started"
        self._process.join()
        code = self._process.exitcode or 0
        how = f"signal {Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._forget()
        subject, reason = self._subject, f"its process ended by {how}; the next case runs in a fresh one"
        return Row(subject.backend.name, subject.kernel, case.check, case, case.path, Outcome.ERROR, reason)

    def _forget(self) -> None:
        if self._process is not None:
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


@contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    """Environment variables that a process started inside has."""
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(connection: Connection, backend: type[ForeignBackend], kernel: str, device: str) -> None:
    """The process: cases in, rows out, until the other end is closed."""
    subject = Subject(backend, kernel, device)
    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        connection.send(run_foreign_case(subject, case))
