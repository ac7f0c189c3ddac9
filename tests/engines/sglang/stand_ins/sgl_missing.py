"""Names that have no stand-in: they can be imported, and raise when they are called."""

from __future__ import annotations

from typing import NoReturn


class Missing:
    """An attribute of a package, or of an attribute of it, that isn't there."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = self._name = name

    def __call__(self, *arguments: object, **named: object) -> NoReturn:
        raise NotImplementedError(f"{self._name} has no stand-in on the CPU")

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return (object,)

    def __or__(self, other: object) -> Missing:
        return self

    __ror__ = __or__
