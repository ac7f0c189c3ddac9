"""The catalogue of checks: plain functions with an id, what they are about, and the cases that they run on.

A check is called with a subject and a case. It returns what it measured, or raises `CheckFailure`. A backend cannot
override one; known failures are data (`expected_failures`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from attn_backends.backend import AttentionBackend
from attn_backends.conformance.cases import Case
from attn_backends.contract.capabilities import Capabilities
from attn_backends.contract.kernel import Kernel
from spec_metadata import StepKind


class CheckFailure(AssertionError):
    """A backend is wrong. field: what differs. row: the first row that does, if rows are compared. expected, got: its
    contents.
    """

    def __init__(self, field: str, message: str, row: int | None = None, expected: str = "", got: str = "") -> None:
        self.field, self.row, self.expected, self.got = field, row, expected, got
        where = f"{field}, row {row}" if row is not None else field
        values = f" (expected {expected}, got {got})" if expected or got else ""
        super().__init__(f"{where}: {message}{values}")


@dataclass(frozen=True)
class Measured:
    """The result of a check that passed.

    max_err, budget: of the field that came nearest to its budget, where numbers are compared. refusal: the reasons,
    where an undeclared capability was fed in and refused.
    """

    max_err: float | None = None
    budget: float | None = None
    refusal: str = ""


@dataclass(frozen=True)
class Subject:
    """A backend under test: its class, the name of one of its kernels, and the device.

    situations: those that `situations.situations` has made for it, which most checks ask for.
    """

    backend: type[AttentionBackend]
    kernel: str
    device: str = "cpu"
    situations: dict[Hashable, tuple[Case, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def chosen(self) -> Kernel:
        """The kernel."""
        return next(kernel for kernel in self.backend.kernels if kernel.name == self.kernel)

    @property
    def capabilities(self) -> Mapping[StepKind, Capabilities]:
        """The kernel's capabilities, by step kind."""
        return self.chosen.capabilities


@dataclass(frozen=True)
class Check:
    """A check. about: what it holds, in a sentence. cases: those that a subject's capabilities call for. fixed_lens:
    whether it is about the lengths of its cases, which random ones therefore keep.
    """

    id: str
    about: str
    run: Callable[[Subject, Case], Measured]
    cases: Callable[[Subject], list[Case]]
    fixed_lens: bool = False


CATALOGUE: dict[str, Check] = {}

GROUPS = (
    "plan",
    "math",
    "compressed",
    "scale",
    "cache",
    "poison",
    "laws",
    "graph",
    "streams",
    "worker",
    "refusals",
    "api",
)
"""The groups of checks, what an id begins with, the most basic first: checks run, and failures are told, in this order.
A plan that is wrong makes every output wrong, a wrong output fails all that compares outputs, and what fails eagerly
fails through a graph.
"""

Run = Callable[[Subject, Case], Measured]


def check(id: str, cases: Callable[[Subject], list[Case]], *, fixed_lens: bool = False) -> Callable[[Run], Run]:
    """Put a function into the catalogue; the first line of its docstring says what it is about. fixed_lens: as of
    `Check`.
    """

    def register(run: Run) -> Run:
        assert id not in CATALOGUE, f"two checks share the id {id}"
        assert group_of(id) in GROUPS, f"check {id} is of no group"
        assert run.__doc__, f"check {id} says nothing about itself"
        about = " ".join(run.__doc__.split("\n\n")[0].split())
        CATALOGUE[id] = Check(id, about, run, lambda subject: [_of(id, case) for case in cases(subject)], fixed_lens)
        return run

    return register


def group_of(id: str) -> str:
    """The group of a check."""
    return id.partition(".")[0]


def _of(id: str, case: Case) -> Case:
    return case if case.check == id else case.of(id)
