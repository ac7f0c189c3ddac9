"""Selection of the suite's cases: by check, number and profile, with more random ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from attn_backends.config.toml_options import closest_to
from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import CATALOGUE, GROUPS, Subject, group_of
from attn_backends.conformance.foreign.driver import exemptions
from attn_backends.conformance.profiles import PROFILES
from attn_backends.conformance.random_cases import random_cases
from attn_backends.contract import CONTRACT
from attn_backends.errors import ConfigError

QUICK_CASES = 3  # of each check


@dataclass(frozen=True)
class Selection:
    """Cases of a run. select: pattern of check ids. quick: three cases of each check, one of which `seed`
    picks. profile: the name of one ("" for all cases). effort: random cases more of each group of checks, drawn from
    `seed`. contract: the version that is asked for. share: of "2/5", the second of every five cases ("": all). Raises
    `ConfigError` for what is not there.
    """

    select: str = "*"
    quick: bool = False
    profile: str = ""
    effort: int = 0
    seed: int = 0
    contract: str = CONTRACT
    share: str = ""

    def __post_init__(self) -> None:
        if self.profile and self.profile not in PROFILES:
            meant = closest_to(self.profile, [*PROFILES])
            raise ConfigError(f"there is no profile {self.profile!r}{meant or '.'} There are {', '.join(PROFILES)}")
        if self.effort < 0:
            raise ConfigError(f"effort is a number of random cases of each group of checks, got {self.effort}")
        if self.contract != CONTRACT:
            raise ConfigError(
                f"this suite checks contract {CONTRACT}, not {self.contract!r}; docs/contract.md lists what changed "
                "between them, and an earlier attn-backends checks an earlier one"
            )
        number, of = self._share
        if not 1 <= number <= of:
            raise ConfigError(f"a share is such as 2/5, the second of five, got {self.share!r}")

    def cases(self, subject: Subject) -> list[Case]:
        """The cases of a subject in this share, those of the suite and the random ones after them."""
        number, of = self._share
        return self._cases(subject)[number - 1 :: of]

    @property
    def _share(self) -> tuple[int, int]:
        """Which of how many runs it is, from 1; (0, 0) of what is no share."""
        if not self.share:
            return 1, 1
        number, _, of = self.share.partition("/")
        return (int(number), int(of)) if number.isdecimal() and of.isdecimal() else (0, 0)

    def _cases(self, subject: Subject) -> list[Case]:
        holds = PROFILES[self.profile].holds if self.profile else _any
        known = selected_cases(subject, self.select, QUICK_CASES if self.quick else None, holds, self.seed)
        if not self.effort:
            return known
        drawn_from = selected_cases(subject, self.select, None, holds) if self.quick else known
        return known + random_cases(subject, drawn_from, self.effort, self.seed)

    @property
    def is_whole(self) -> bool:
        """Whether no check and no case is left out."""
        return self.select == "*" and not self.profile and not self.quick and not self.share

    @property
    def complete_profiles(self) -> tuple[str, ...]:
        """The profiles of which a run has all cases."""
        if self.quick or self.share or self.select != "*":
            return ()
        return (self.profile,) if self.profile else tuple(PROFILES)


def selected_cases(
    subject: Subject,
    select: str = "*",
    most: int | None = None,
    holds: Callable[[Case], bool] | None = None,
    seed: int = 0,
) -> list[Case]:
    """The cases of all checks whose id a pattern selects, in the order of `GROUPS`. select: patterns, with commas
    between. most: of each check, spread evenly; those between the first and the last move on by a case for each `seed`,
    and of two the second does.
    holds: whether a case is wanted. Of another project's backend, those that its driver runs.
    """
    patterns = [pattern.strip() for pattern in select.split(",")]
    unknown = [pattern for pattern in patterns if not any(fnmatchcase(id, pattern) for id in CATALOGUE)]
    if unknown:
        groups = [f"{group}.*" for group in GROUPS]
        meant = closest_to(unknown[0], [*groups, *CATALOGUE])
        raise ConfigError(f"no check's id matches {unknown[0]!r}{meant or '.'} The groups are {', '.join(groups)}")
    chosen = [check for id, check in CATALOGUE.items() if any(fnmatchcase(id, pattern) for pattern in patterns)]
    chosen.sort(key=lambda check: GROUPS.index(group_of(check.id)))
    exempt = [pattern for each in exemptions(subject.backend) for pattern in each.checks]
    chosen = [check for check in chosen if not any(fnmatchcase(check.id, pattern) for pattern in exempt)]
    return [
        case for check in chosen for case in _thinned(list(filter(holds or _any, check.cases(subject))), most, seed)
    ]


def _any(case: Case) -> bool:
    return True


def _thinned(cases: list[Case], most: int | None, seed: int) -> list[Case]:
    if most is None or len(cases) <= most:
        return cases
    if most == 2:
        return [cases[0], cases[-1 - seed % (len(cases) - 1)]]
    between, inner = cases[1:-1], [index * (len(cases) - 1) // (most - 1) - 1 for index in range(1, most - 1)]
    return [cases[0], *(between[index] for index in sorted((each + seed) % len(between) for each in inner)), cases[-1]]
