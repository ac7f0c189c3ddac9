"""Random cases: cases of the suite on other lengths, in worlds of other sizes, with other pages, tables and contents.

A case is drawn from a seed, its group and the suite's cases for the kernel, and is complete in itself: `--case` repeats
it alone, even if the suite has changed since.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import CATALOGUE, Subject, group_of
from attn_backends.conformance.situations import is_declared
from attn_backends.conformance.sizes import MAX_BS, size_of
from attn_backends.conformance.worlds import capacity_of
from spec_metadata import Capacity, StepKind

MOST_TOKENS = 3000  # of a case's requests together; with more it is not cheap
SIZED = 0.5  # part of the cases of small worlds that get a world of another size
ATTEMPTS = 20  # to draw a case that the kernel declares


def random_cases(subject: Subject, cases: Sequence[Case], effort: int, seed: int) -> list[Case]:
    """So many cases more of each group of checks. cases: of the suite, which they are drawn from."""
    found = []
    for group in dict.fromkeys(group_of(case.check) for case in cases):
        able = [case for case in cases if group_of(case.check) == group and _is_cheap(case)]
        checks = list(dict.fromkeys(case.check for case in able))
        rng = Random(f"{seed} {group} {subject.kernel}")
        for check in (rng.choice(checks) for _ in range(effort if checks else 0)):
            found.append(_drawn(subject, rng, [case for case in able if case.check == check]))
    return list(dict.fromkeys(found))


def _is_cheap(case: Case) -> bool:
    return not case.far and "cache" not in case.size and sum(case.lens) + sum(case.captured_lens) <= MOST_TOKENS


def _drawn(subject: Subject, rng: Random, cases: Sequence[Case]) -> Case:
    """A change of one of a check's cases, that the kernel declares."""
    for _ in range(ATTEMPTS):
        case = rng.choice(cases)
        changed = _changed(case, rng)
        if not is_declared(subject, case) or is_declared(subject, changed):
            return changed
    return replace(case, seed=rng.randrange(2**31), drawn=True)


def _changed(case: Case, rng: Random) -> Case:
    """A case with another seed, and what else it is free in."""
    case = replace(case, seed=rng.randrange(2**31), index=rng.choice(("int32", "int64")), drawn=True)
    if CATALOGUE[case.check].fixed_lens or size_of(case.size).full:
        return case
    if not case.size and rng.random() < SIZED:
        case = _sized(case, rng)
    capacity = capacity_of(case.page_size, case.topk, case.size)
    return replace(
        case,
        lens=tuple(_lens(case.lens, case.widths, capacity, rng)),
        captured_lens=tuple(_lens(case.captured_lens, case.captured_widths, capacity, rng)),
    )


def _sized(case: Case, rng: Random) -> Case:
    """The case in a world of other steps, contexts, table widths and, of trees, branches and nodes."""
    most = max(case.widths + case.captured_widths, default=1) if case.kind != StepKind.PREFILL else 1
    steps = rng.randint(max(2, most - 1), 7)
    topk = rng.choice((2, 3, 4, 8)) if case.topk > 1 else 1
    largest = min(20, 1 + topk + topk * topk * (steps - 1))
    nodes = f".nodes{rng.randint(topk + 1, largest)}" if topk > 1 and case.kind == StepKind.TARGET_VERIFY else ""
    tokens = int(2 ** rng.uniform(4, 9.3))
    spare = f".spare{rng.randint(1, 2)}" if rng.random() < 0.3 else ""
    return replace(case, topk=topk, size=f"bs{MAX_BS}.steps{steps}.tokens{tokens}{nodes}{spare}")


def _lens(lens: Sequence[int], widths: Sequence[int], capacity: Capacity, rng: Random) -> Iterator[int]:
    """As many lengths, short and long ones alike, at page edges often; a prompt's stays 0."""
    for number, length in enumerate(lens):
        most = capacity.max_context - (widths[number] if widths else 0)
        if length == 0 or most < 1:
            yield min(length, max(most, 0))
            continue
        drawn = int(2 ** rng.uniform(0, most.bit_length()))
        if rng.random() < 0.3:
            drawn = drawn // capacity.page_size * capacity.page_size + rng.randint(-1, 1)
        yield min(max(drawn, 1), most)
