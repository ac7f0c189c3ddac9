"""Forms that TOML files follow, and errors that name file and key."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from attn_backends.errors import ConfigError


class Options(BaseModel):
    """A table of a file: unknown keys are refused, nothing is converted, nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Checked = TypeVar("Checked", bound=Options)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file. Raises `ConfigError` if it is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def validated(form: type[Checked], raw: Mapping[str, object], path: Path) -> Checked:
    """Tables as a form. Raises `ConfigError` that names the file and every key that is wrong."""
    try:
        return form.model_validate(raw)
    except ValidationError as error:
        lines = [_explain(form, problem["loc"], problem) for problem in error.errors()]
        raise ConfigError(f"{path}: " + "; ".join(lines)) from None


def _explain(form: type[Options], location: tuple[int | str, ...], problem: Mapping[str, Any]) -> str:
    key = ".".join(map(str, location))
    if problem["type"] == "missing":
        return f"{key} is missing"
    if problem["type"] == "extra_forbidden":
        known = _keys_beside(form, location)
        return f"unknown key {key}; there are {', '.join(known)}{closest_to(str(location[-1]), known)}"
    if problem["type"] == "value_error":
        return f"{key}: {problem['ctx']['error']}"
    return f"{key}: {problem['msg']}, got {problem['input']!r}"


def _keys_beside(form: type[Options], location: tuple[int | str, ...]) -> list[str]:
    """The keys of the table that a location is in."""
    for key in (key for key in location[:-1] if isinstance(key, str)):
        annotation = form.model_fields[key].annotation
        choices = getattr(annotation, "__args__", (annotation,))
        form = next(choice for choice in choices if isinstance(choice, type) and issubclass(choice, Options))
    return list(form.model_fields)


def closest_to(word: str, known: list[str]) -> str:
    """The end of an error's sentence: the known word that was meant, if one is close."""
    closest = get_close_matches(word, known, n=1)
    return f". Did you mean {closest[0]!r}?" if closest else ""
