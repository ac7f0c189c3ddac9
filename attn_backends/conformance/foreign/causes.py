"""Causes of a foreign backend's failed cases: its metadata and its writes, compared with the scene's rows.

The case's batch is run once more. What the metadata says that a row reads, and where its token was found afterwards,
are compared with the scene's own lists. The first difference of each sort is described: rows that see other keys, lists
that begin elsewhere, and tokens that were written elsewhere.

What is wrong in the metadata and shows in no output is latent (`latent`): slots of layers that are not driven.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import Subject
from attn_backends.conformance.exercise import Ran, run_case
from attn_backends.conformance.foreign.driver import NOWHERE, ForeignPlan, ForeignStep, Handed, LatentSlots
from attn_backends.conformance.scenes import Scene

SHOWN = 4
SHIFTED = "its list begins at entry"
LATENT = "latent, because all that is written here is right, and other layers write by it"
COMMITTED_ALONE = ", what was drafted since, its own token last: the length is that of the committed tokens"


def causes(subject: Subject, case: Case) -> list[str]:
    """Descriptions of what is wrong with the metadata and the writes of a case's batch; empty if nothing is found."""
    ran = run_case(subject, case)
    plans: Sequence[ForeignPlan] = ran.meta.plans
    if not ran.scene.rows or not ran.scene.rows[0]:
        return []
    step = plans[0].step
    reads = list(_wrong_reads(ran.scene, step))
    shifted = [text for text in reads if SHIFTED in text]
    found = [*reads[:1], *shifted[:1], *islice(_wrong_writes(ran, step), 1)]
    return list(dict.fromkeys(found))


def latent(subject: Subject, case: Case) -> str:
    """A description of slots that a case's step owes and the metadata has wrong, though no layer here writes by them:
    the first of each field. Empty if there are none.
    """
    ran, told = run_case(subject, case), dict[str, str]()
    plans: Sequence[ForeignPlan] = ran.meta.plans
    forwards = range(len(ran.scene.rows)) if ran.scene.rows and ran.scene.rows[0] else ()
    for forward in forwards:
        for given in plans[0].step.latent_slots(forward):
            owed = _owed(ran.scene, forward, given.block)
            if given.name not in told and given.slots[: len(owed)] != owed:
                tell = _told_cut if given.block == 1 else _told_entries
                told[given.name] = f"{given.name} of forward {forward} {tell(ran.scene, forward, given, owed)}"
    return f"{LATENT}: {'; and '.join(told.values())}" if told else ""


def _owed(scene: Scene, forward: int, block: int) -> list[int]:
    """What `LatentSlots.slots` must be. No block crosses a page."""
    rows, slots = scene.rows[forward], scene.slots_of(forward)
    ends = [block == 1 or (isinstance(row.token, int) and (row.token + 1) % block == 0) for row in rows]
    return [slot - block + 1 if end else NOWHERE for slot, end in zip(slots, ends, strict=True)]


def _told_cut(scene: Scene, forward: int, given: LatentSlots, owed: list[int]) -> str:
    """What a field of rows' slots has wrong."""
    got, flat = given.slots[: len(owed)], scene.write_order()
    told = f"is slots {_shown(got)} and must be {_shown(owed)}"
    if got == flat[: len(got)]:
        told += (
            f". These are the first {len(got)} of the step's {len(flat)} slots, those of the first request's forwards: "
            "the slots of all forwards were cut off at the batch size, not sliced for this forward"
        )
    return told


def _told_entries(scene: Scene, forward: int, given: LatentSlots, owed: list[int]) -> str:
    """What a field of entries' slots has wrong."""
    number = next(n for n, (one, two) in enumerate(zip(owed, given.slots, strict=False)) if one != two)
    must, got, block = owed[number], given.slots[number], given.block
    must_be = f"ends no block of {block} tokens" if must == NOWHERE else f"ends the block of slot {must}"
    told = f"has {'no entry' if got == NOWHERE else f'the entry of slot {got}'} for row {number}, which {must_be}"
    committed = [scene.requests[row.request].length % block == 0 for row in scene.rows[forward]]
    if committed == [slot != NOWHERE for slot in given.slots[: len(owed)]]:
        told += ": blocks end as if the committed tokens were all"
    return told


def _wrong_reads(scene: Scene, step: ForeignStep) -> Iterator[str]:
    """Rows whose metadata lists other slots than they must see, in order."""
    for forward, rows in enumerate(scene.rows):
        read = step.read_slots(forward)
        if read is None:
            return
        wanted = _wanted(scene, forward)
        for number, (expected, got) in enumerate(zip(wanted, read, strict=False)):
            if got != expected:
                request, row = rows[number].request, rows[number]
                drafted = len(row.visible) - scene.requests[request].length
                told = told_list(expected, got, wanted[:number], drafted)
                yield f"metadata of forward {forward}, row {number} (request {request}): {told}"


def _wanted(scene: Scene, forward: int) -> list[list[int]]:
    """The slots that each row of a forward must see."""
    return [[scene.requests[row.request].slots[name] for name in scene.in_window(row)] for row in scene.rows[forward]]


def told_list(expected: list[int], got: list[int], before: list[list[int]], drafted: int) -> str:
    """The cause of a wrong list of slots. before: those of the rows before it. drafted: tokens that it must have which
    are not committed.
    """
    missing = len(expected) - len(got)
    if NOWHERE in got:
        return f"its length is {len(got)}, and its table ends after {got.index(NOWHERE)} keys: a kernel reads past it"
    if missing > 0 and got == expected[: len(got)]:
        told = (
            f"it attends to {len(got)} keys and must to {len(expected)}, without slots {_shown(expected[len(got) :])}"
        )
        return told + (COMMITTED_ALONE if missing == drafted else "")
    packed, start = [slot for row in [*before, expected] for slot in row], sum(map(len, before))
    at = _place(packed, got)
    if at is not None and at != start:
        return (
            f"{SHIFTED} {at} of the packed index list, in which its own tokens begin at entry {start}: "
            "the offsets were made from other lengths than the list"
        )
    early = _early(expected, got)
    if early:
        told = f"its window of {len(got)} keys ends {early} too early, without slots {_shown(expected[-early:])}"
        return told + (COMMITTED_ALONE if early == drafted else "")
    differ = (i for i, (x, y) in enumerate(zip(expected, got, strict=False)) if x != y)
    place = next(differ, min(len(expected), len(got)))
    return (
        f"it lists {len(got)} keys and must list {len(expected)}; key {place} is slot "
        f"{_shown(got[place : place + 1]) or 'none'} and must be {_shown(expected[place : place + 1]) or 'none'}"
    )


def _early(expected: list[int], got: list[int]) -> int:
    """How many keys before its own token a window ends that is else right; 0 if that is not what is wrong."""
    overlaps = (n for n in range(1, len(expected)) if 0 < len(expected) - n <= len(got))
    return next((n for n in overlaps if got[n - len(expected) :] == expected[:-n]), 0)


def _place(packed: list[int], part: list[int]) -> int | None:
    """Where a list lies inside another, or as much of it as that has."""
    for start in range(len(packed)):
        overlap = min(len(part), len(packed) - start)
        if overlap and packed[start : start + overlap] == part[:overlap]:
            return start
    return None


def _wrong_writes(ran: Ran, step: ForeignStep) -> Iterator[str]:
    """Forwards of which a row's token is not where it belongs."""
    scene = ran.scene
    memory, before = scene.world.tokens_in(scene.world.memory.cpu()), scene.world.tokens_in(ran.before.cpu())
    changed = (memory.view(torch.uint8) != before.view(torch.uint8)).flatten(1).any(dim=1).nonzero().flatten().tolist()
    for forward, rows in enumerate(scene.rows):
        lost = []
        for number, row in enumerate(rows):
            request = scene.requests[row.request]
            wanted = request.slots[row.token]
            key = scene.world.token_of(request.vectors[row.token]).cpu()
            if not _is(memory[wanted], key):
                lost.append((number, wanted, [slot for slot in changed if _is(memory[slot], key)]))
        if lost:
            yield _told_writes(forward, lost, step.handed_slots(forward), changed)


def _is(entry: Tensor, key: Tensor) -> bool:
    return torch.equal(entry, key)


def _told_writes(forward: int, lost: list[tuple[int, int, list[int]]], handed: Handed, changed: list[int]) -> str:
    """Where rows of a forward are, and why, if the slots that were handed over say it. lost: (row, its slot, where it
    is) of each row that is not where it belongs. changed: slots that anything was written to.
    """
    found = [f"row {n} belongs to slot {slot} and is at slot {_shown(at)}" for n, slot, at in lost if at]
    gone = [f"row {n} belongs to slot {slot} and is nowhere" for n, slot, at in lost if not at]
    places = (found + gone)[:SHOWN]
    told = f"writes of forward {forward}: {'; '.join(places)}"
    if wrong := [(n, slot) for n, slot, _ in lost if handed.slots[n] != slot]:
        number, slot = wrong[0]
        return f"{told}. The pool was told to write row {number} to slot {handed.slots[number]}, not to {slot}"
    if handed.stride != 1 and all(handed.dense[n] in changed for n, _, _ in lost):
        told += (
            f". The pool was handed the right slots as a view of stride {handed.stride}, and read them as if they were "
            "dense: row i went to entry i of the buffer behind the view"
        )
    return told


def _shown(slots: Sequence[int]) -> str:
    more = ", …" if len(slots) > SHOWN else ""
    return ", ".join(map(str, slots[:SHOWN])) + more
