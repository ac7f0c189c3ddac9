"""A case: one small situation that a check runs, as plain data that survives JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from attn_backends.cache import CacheFormat
from attn_backends.compressed_cache import CompressedFormat
from attn_backends.conformance.sizes import size_of
from attn_backends.contract.capabilities import DTYPES
from attn_backends.errors import ConfigError
from spec_metadata import StepKind

CACHE_DTYPES = {name: getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2")}
SHOWN_LENS = 10  # of a case's name
_CHOICES: dict[str, tuple[str, ...]] = {
    "kind": tuple(StepKind),
    "path": ("eager", "graph"),
    "format": (*CacheFormat, *CompressedFormat),
    "layer": ("", "window", "selected", "entries", "tokens", "pairs"),
    "table": ("request", "block"),
    "dtype": tuple(DTYPES),
    "cache_dtype": ("", *CACHE_DTYPES),
    "poison": ("nan", "finite"),
    "reserved": ("nan", "finite"),
    "index": ("int32", "int64"),
    "after": ("", *StepKind),
}


@dataclass(frozen=True)
class Case:
    """One situation.

    kind: of the step. path: eager, or captured and replayed. format, page_size: of the cache. topk: above 1, drafts
    are trees. table: request-to-token table or block table. dtype: of queries and cache. lens: committed tokens of
    each request, none for idle. widths: query rows of each request of a packed step. captured_lens, captured_widths: of
    the batch that a graph is captured on. bs: the graph's batch size; rows past the requests are padding. num_tokens:
    query rows of a graph of packed ones, 0 for a uniform width. poison, reserved: what
    unowned memory and the reserved page hold. index: type of lengths, rows and pages. bounded: the step promises its
    longest length. refresh: the plan is recorded as the graph's first node. feature: what a refused case asks for.
    seed: of pages, vectors and queries. far: half of the pages lie past 2**31 elements of the cache. cache_dtype: of
    the cache where it is not the query's own; it comes with scales. layer: of compressed keys, what it attends to.
    size: of the world, as `sizes.size_of` takes it. after: the kind of a step that the same backend has planned before.
    drawn: at random (`random_cases`). ragged: the device alone knows the widths of a draft extend, as it does those of
    a verify.
    """

    check: str
    kind: str
    path: str = "eager"
    format: str = "kv"
    page_size: int = 16
    topk: int = 1
    table: str = "request"
    dtype: str = "float64"
    lens: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    captured_lens: tuple[int, ...] = ()
    bs: int = 0
    poison: str = "nan"
    reserved: str = "finite"
    index: str = "int32"
    bounded: bool = False
    refresh: bool = False
    feature: str = ""
    seed: int = 0
    far: bool = False
    cache_dtype: str = ""
    layer: str = ""
    captured_widths: tuple[int, ...] = ()
    num_tokens: int = 0
    size: str = ""
    after: str = ""
    drawn: bool = False
    ragged: bool = False

    @property
    def name(self) -> str:
        """A short id, unique among a check's cases of one backend."""
        parts = [
            self.kind,
            self.path,
            self.format,
            self.layer,
            self.size,
            f"page{self.page_size}",
            f"topk{self.topk}",
            self.dtype,
        ]
        digest = hashlib.sha256(self.to_json().encode()).hexdigest()[:6]
        return "-".join(filter(None, [*parts, self.cache_dtype, self._short_lens, self.after, self.feature, digest]))

    @property
    def _short_lens(self) -> str:
        """The lengths; of many, the first and how many there are."""
        shown = "_".join(map(str, self.lens[:SHOWN_LENS])) or "idle"
        return shown if len(self.lens) <= SHOWN_LENS else f"{shown}_of{len(self.lens)}"

    def of(self, check: str) -> Case:
        """The same situation for another check."""
        return replace(self, check=check)

    def in_words(self) -> str:
        """The case as a person would say it."""
        batch = (
            f"{len(self.lens)} requests of {', '.join(map(str, self.lens))} committed tokens" if self.lens else "idle"
        )
        words = [f"{self.kind}, {batch}"]
        if self.widths:
            known = ", which the device alone knows" if self.ragged else ""
            words.append(f"{', '.join(map(str, self.widths))} query rows{known}")
        if self.path == "graph":
            captured = ", ".join(map(str, self.captured_lens))
            size = f"{self.bs} requests" + (f" and {self.num_tokens} packed rows" if self.num_tokens else "")
            words.append(f"replayed by a graph of {size} that was captured on lengths {captured}")
            if self.captured_widths:
                words.append(f"with {', '.join(map(str, self.captured_widths))} query rows there")
        layer = f" of {_LAYERS[self.layer]}" if self.layer else ""
        words.append(f"pages of {self.page_size} tokens ({self.format}{layer}, {self.table} table, {self.index})")
        words += [
            f"topk {self.topk}",
            self.dtype + (f" over a cache of {self.cache_dtype}" if self.cache_dtype else ""),
        ]
        words.append(f"unowned memory holds {_CONTENTS[self.poison]}, the reserved page {_CONTENTS[self.reserved]}")
        flags = {
            "lengths bounded by the step": self.bounded,
            "the plan recorded as the first node": self.refresh,
            "half of the pages past 2**31 elements": self.far,
            f"a world of the size {self.size!r}": bool(self.size),
            f"after a {self.after} step on the same backend": bool(self.after),
        }
        words += [text for text, is_set in flags.items() if is_set]
        return "; ".join(words + ([f"asks for {self.feature}"] if self.feature else []))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without those that are the default."""
        given = {name: value for name, value in asdict(self).items() if value != _DEFAULTS.get(name)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, values: object) -> Case:
        """The case of `to_dict`'s values; says all that is wrong."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"a case is a JSON object, got {values!r}")
        problems = [problem for name, value in values.items() for problem in _problems(name, value)]
        problems += [f"{name} is missing" for name in ("check", "kind") if name not in values]
        if problems:
            raise ConfigError(f"malformed case: {'; '.join(problems)}")
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**given)

    @classmethod
    def from_json(cls, text: str) -> Case:
        """The case that `to_json` wrote."""
        try:
            return cls.from_dict(json.loads(text))
        except json.JSONDecodeError as error:
            raise ConfigError(f"malformed case: not JSON: {error}") from None


_LAYERS = {
    "window": "a window alone",
    "selected": "a window and selected entries",
    "entries": "a window and all entries",
    "tokens": "a window and selected entries of one token",
    "pairs": "a window and selected entries of two tokens",
}
_CONTENTS = {"nan": "NaN", "finite": "finite garbage"}
_DEFAULTS = {field.name: field.default for field in fields(Case)}
_TYPES = {field.name: field.type for field in fields(Case)}


def _problems(name: str, value: object) -> list[str]:
    """What is wrong with one entry of a case."""
    if name not in _TYPES:
        return [f"unknown key {name!r}; there are {', '.join(_TYPES)}"]
    if name in _CHOICES and value not in _CHOICES[name]:
        return [f"{name} is {value!r}, not one of {', '.join(_CHOICES[name])}"]
    if name == "size" and isinstance(value, str):
        return _size_problems(value)
    match _TYPES[name]:
        case "str":
            good, wanted = isinstance(value, str), "a string"
        case "bool":
            good, wanted = isinstance(value, bool), "true or false"
        case "int":
            least = 1 if name in ("page_size", "topk") else 0
            good = isinstance(value, int) and not isinstance(value, bool) and value >= least
            wanted = f"an integer of at least {least}"
        case _:
            good = isinstance(value, list | tuple) and all(isinstance(x, int) and x >= 0 for x in value)
            wanted = "a list of integers of at least 0"
    return [] if good else [f"{name} is {value!r}, not {wanted}"]


def _size_problems(name: str) -> list[str]:
    try:
        size_of(name)
    except ConfigError as error:
        return [str(error)]
    return []
