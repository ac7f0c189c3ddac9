"""Failures as text: the most basic group of checks first, and of each all that is needed to debug it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from attn_backends.backend import AttentionBackend
from attn_backends.conformance.catalogue import CATALOGUE, GROUPS, Subject, group_of
from attn_backends.conformance.outcomes import Outcome, Row

SHOWN = 3  # cases of a group that are told in full
REFUSING = ("init_forward_metadata", "capture", "store", "forward")  # what refuses, in `AttentionBackend`


@dataclass(frozen=True)
class FailedGroup:
    """Failures of a group of checks on one kernel. shown: the first rows to look at, of different checks if there are.
    counts: how many cases of each check failed.
    """

    name: str
    shown: tuple[Row, ...]
    counts: dict[str, int]

    @property
    def num_more(self) -> int:
        """Failures that are not shown."""
        return sum(self.counts.values()) - len(self.shown)


def has_failed(row: Row) -> bool:
    """Whether a row needs a person."""
    return row.status in (Outcome.FAIL, Outcome.ERROR)


def failed_groups(rows: Iterable[Row]) -> list[FailedGroup]:
    """The groups in which rows of one kernel failed, the most basic first: what fails there makes the others fail."""
    groups: dict[str, dict[str, list[Row]]] = {name: {} for name in GROUPS}
    for row in filter(has_failed, rows):
        groups[group_of(row.check)].setdefault(row.check, []).append(row)
    found = []
    for name, by_check in groups.items():
        if by_check:
            counts = {check: len(failed) for check, failed in by_check.items()}
            found.append(FailedGroup(name, _first_of_each(list(by_check.values())), counts))
    return found


def only_replays(rows: Iterable[Row]) -> Iterator[str]:
    """A sentence for each kernel whose failures are all replays, while eager cases pass."""
    by_kernel: dict[str, list[Row]] = {}
    for row in rows:
        by_kernel.setdefault(f"{row.backend} ({row.kernel})", []).append(row)
    for kernel, own in by_kernel.items():
        failed = list(filter(has_failed, own))
        passed = sum(row.path == "eager" and row.status is Outcome.PASS for row in own)
        if passed and failed and all(row.path == "graph" for row in failed):
            yield f"{kernel}: all failures ({len(failed)}) are replays; eager cases ({passed}) pass"


def _first_of_each(by_check: Sequence[Sequence[Row]]) -> tuple[Row, ...]:
    """The first row of each check, then the second of each, as far as `SHOWN`."""
    turns = range(max(map(len, by_check)))
    return tuple(rows[turn] for turn in turns for rows in by_check if turn < len(rows))[:SHOWN]


def explained(row: Row, again: str, picture: str = "") -> str:
    """A failure as text: the check, the case, the difference, and the command that repeats it. again, picture: commands
    (`conformance.commands`).
    """
    lines = [f"{row.status}: {row.check} on {row.backend} ({row.kernel})", row.reason]
    lines.append(f"check: {CATALOGUE[row.check].about}")
    if row.case is not None:
        lines += [f"case: {row.case.in_words()}", f"again: {again}"]
    if picture:
        lines.append(f"picture: {picture}")
    return "\n".join(lines)


def lost_refusals(subject: Subject) -> str:
    """The reason why a refusal that the base class makes may be missing: the methods that make it and that a backend
    replaces.
    """
    replaced = [name for name in REFUSING if getattr(subject.backend, name) is not getattr(AttentionBackend, name)]
    if not replaced:
        return ""
    names = " and ".join(replaced)
    calls = " and ".join(f"super().{name}" for name in replaced)
    return (
        f". {subject.backend.__name__} overrides {names}, and AttentionBackend's own {names} is what refuses: call "
        f"{calls}, or refuse there too"
    )
