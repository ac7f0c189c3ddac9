"""What a mutant is, and how one is registered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutant:
    """A known bug, put into correct code.

    plant: puts it in, in at most 10 lines; its docstring says what is wrong. origin: where the bug was found. backend:
    the registered backend that carries it. killed_by: ids of the checks that must fail. graph: a replay shows it, so it
    runs through recorded and CUDA graphs alike. needs: what the machine must have, such as "cuda".
    """

    name: str
    plant: Plant
    origin: str
    killed_by: tuple[str, ...]
    backend: str
    graph: bool
    needs: tuple[str, ...]

    @property
    def about(self) -> str:
        """What is wrong, in words."""
        return " ".join((self.plant.__doc__ or "").split())


MUTANTS: dict[str, Mutant] = {}


def mutant(
    origin: str, *killed_by: str, backend: str = "fa3", graph: bool = False, needs: tuple[str, ...] = ()
) -> Callable[[Plant], Plant]:
    """Register a plant under its function's name."""

    def register(plant: Plant) -> Plant:
        name = plant.__name__
        assert name not in MUTANTS, f"two mutants are called {name}"
        MUTANTS[name] = Mutant(name, plant, origin, killed_by, backend, graph, needs)
        return plant

    return register
