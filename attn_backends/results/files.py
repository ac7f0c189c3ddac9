"""Results as JSON, in one shape for every command: what ran, where, when and on which code, and a compact row a line.

    {"device": ..., "versions": {...}, "date": ..., "commit": ..., "command": ..., "rows": [...]}

A command may add keys of its own before the rows. Rows may be lists (`Results.in_columns`), in half the room or less.
Before them `"every": {...}` has the values of all rows, and `"columns": [...]` names the others; a row that ends early
lacks the columns that follow. Rows are written as they
come (`Recording`): the file of a run that was interrupted or killed holds what was done, and `"incomplete": true`
before it. Nothing in a result names a path of the machine that it came from.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from attn_backends.errors import ConfigError
from attn_backends.results.heads import Head

INCOMPLETE = "incomplete"  # the key of a result whose run has not come to its end
COLUMNS, EVERY = "columns", "every"  # keys of the names of rows' values, for rows that are lists, and of equal ones


@dataclass(frozen=True, slots=True)
class Results:
    """Rows as plain values, with their head. own: what else the command had to say."""

    head: Head
    rows: tuple[Mapping[str, Any], ...]
    own: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether the run that wrote them came to its end."""
        return INCOMPLETE not in self.own

    def as_incomplete(self) -> Results:
        """The document, marked incomplete."""
        return replace(self, own={**self.own, INCOMPLETE: True})

    def to_json(self) -> str:
        """A key, then a row, on each line."""
        return _as_json(self.head, self.own, map(_line, self.rows))

    def in_columns(self) -> str:
        """`to_json` with rows as lists, if their keys are the first columns; those that most rows have come first. What
        all rows have is written once.
        """
        first, *others = self.rows or ({},)
        every = {
            name: value for name, value in first.items() if others and all(_has(row, name, value) for row in others)
        }
        rows = [{name: value for name, value in row.items() if name not in every} for row in self.rows]
        names = [name for name, _ in Counter(name for row in rows for name in row).most_common()]
        lines = (
            _line([row[n] for n in names[: len(row)]] if row.keys() == {*names[: len(row)]} else row) for row in rows
        )
        return _as_json(self.head, {**self.own, **({EVERY: every} if every else {}), COLUMNS: names}, lines)

    @classmethod
    def from_json(cls, text: str) -> Results:
        """Results as `to_json` or `in_columns` wrote them; without a commit if they are older than its record.

        Raises `ConfigError` for other text.
        """
        try:
            own = dict(json.loads(text))
            if COLUMNS in own:
                names, every, rows = own.pop(COLUMNS), own.pop(EVERY, {}), own["rows"]
                listed = (
                    dict(zip(names[: len(row)], row, strict=True)) if isinstance(row, list) else row for row in rows
                )
                own["rows"] = [{**every, **row} for row in listed]
            rows, device, versions = (own.pop(name) for name in ("rows", "device", "versions"))
            head = Head(device, dict(versions), *(own.pop(name, "") for name in ("date", "commit", "command")))
            return cls(head, tuple(map(dict, rows)), own)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"not a result: {error!r}") from None


class Recording:
    """The rows of a run under way, in a file as they come.

        with Recording(path, head) as recording:
            for row in measured:
                recording.add(row)
            recording.finish()

    Until `finish` the file says that it is incomplete. It is always whole: each version replaces the one before. path:
    None keeps nothing; one that is not a regular file, such as a pipe, is written by `finish` alone. own: further keys
    of the object. Raises `ConfigError` where the file can't be written, at once if it never can.
    """

    def __init__(self, path: Path | None, head: Head, **own: Any) -> None:
        self._path, self._head, self._own = path, head, own
        self._lines: list[str] = []
        self._start, self._writing = time.monotonic(), 0.0
        self._num_written = -1
        self._write_what_came()

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a row. It is written at once, unless writing has taken more than a second and a twentieth of the time;
        then it is written with the next.
        """
        self._lines.append(_line(row))
        if self._writing <= 1 + (time.monotonic() - self._start) / 20:
            self._write_what_came()

    def finish(self, **own: Any) -> None:
        """Write the complete result. own: further keys that are known only now."""
        if self._path is not None:
            write_text(self._path, _as_json(self._head, self._own | own, self._lines))
        self._path = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Write what an error or an interrupt left unwritten, and tell it where that is."""
        if self._path is None or error is None or not _is_replaceable(self._path):
            return
        with suppress(ConfigError):  # the error that is under way is the one to tell
            self._write_what_came()
        if self._num_written >= 0:
            error.add_note(f"{self._path} holds the {self._num_written} rows that were done, and says it is incomplete")

    def _write_what_came(self) -> None:
        if self._path is None or self._num_written == len(self._lines) or not _is_replaceable(self._path):
            return
        start = time.monotonic()
        write_text(self._path, _as_json(self._head, self._own | {INCOMPLETE: True}, self._lines))
        self._num_written = len(self._lines)
        self._writing += time.monotonic() - start


def write(path: Path, head: Head, rows: Iterable[Mapping[str, Any]], **own: Any) -> None:
    """Write rows to a file. own: further keys of the object."""
    write_text(path, Results(head, tuple(rows), own).to_json())


def write_text(path: Path, text: str) -> None:
    """Write a file whole or leave it as it was; `ConfigError` names one that can't be written, as on a full disk."""
    try:
        if not _is_replaceable(path):
            path.write_text(text, encoding="utf-8")
            return
        whole = path.resolve()
        part = whole.with_name(f"{whole.name}.part")
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(whole)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from error


def read(path: Path) -> Results:
    """The results of a file; `ConfigError` names it if it holds none."""
    try:
        return Results.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error


def check_output(option: str, path: Path | None) -> None:
    """Refuse, before anything is computed, a file that can't be written afterwards. option: that names it."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}")
    if path is not None and path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; name a file in it")


def _has(row: Mapping[str, Any], name: str, value: Any) -> bool:
    return name in row and _line(row[name]) == _line(value)  # 1, 1.0 and True are equal


def _is_replaceable(path: Path) -> bool:
    """Whether another file can take its place: a regular file, or none yet."""
    return path.is_file() or not path.exists()


def _as_json(head: Head, own: Mapping[str, Any], lines: Iterable[str]) -> str:
    keys = [f"{json.dumps(name)}: {_line(value)}" for name, value in {**asdict(head), **own}.items()]
    rows = ",\n".join(lines)
    return "{\n" + ",\n".join([*keys, f'"rows": [\n{rows}\n]']) + "\n}\n"


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
