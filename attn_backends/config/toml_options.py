"""Forms that TOML files follow, and errors that name file and key."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from attn_backends.errors import ConfigError


class Options(BaseModel):
    """A table of a file: unknown keys are refused, nothing is converted, nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


ALLOWED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "tuple_type": "a list",
    "model_type": "a table",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "too_short": "a list of {min_length} or more",
}
"""What a value may be, in words, by the kind of pydantic's error; every kind that a form here can give."""
Checked = TypeVar("Checked", bound=Options)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file. Raises `ConfigError` if it is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def validated(
    form: type[Checked], raw: Mapping[str, object], path: Path, given: Mapping[str, str] = MappingProxyType({})
) -> Checked:
    """Tables as a form. Raises `ConfigError` that names the file and every key that is wrong.

    given: keys such as "runtime.seed" whose values are not the file's, and what they are called where they come from.
    """
    try:
        return form.model_validate(raw)
    except ValidationError as error:
        ours, of_file = list[str](), list[str]()
        for problem in error.errors():
            key = ".".join(map(str, problem["loc"]))
            name = next((name for start, name in given.items() if f"{key}.".startswith(f"{start}.")), None)
            (of_file if name is None else ours).append(_explain(form, name or key, problem))
        lines = ours + ([f"{path}: {'; '.join(of_file)}"] if of_file else [])
        raise ConfigError("; ".join(lines)) from None


def _explain(form: type[Options], key: str, problem: Mapping[str, Any]) -> str:
    location = problem["loc"]
    if problem["type"] == "missing":
        return f"{key} is missing"
    if problem["type"] == "extra_forbidden":
        known = _keys_beside(form, location)
        return f"unknown key {key}; there are {', '.join(known)}{closest_to(str(location[-1]), known)}"
    if problem["type"] == "value_error":
        return f"{key}: {problem['ctx']['error']}"
    allowed = ALLOWED[problem["type"]].format(**problem.get("ctx", {}))
    return f"{key}: must be {allowed}, got {problem['input']!r}"


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
