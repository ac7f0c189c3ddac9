"""Larger worlds: more requests, pages, heads and elements of a head than the small ones have, so that limits show."""

from __future__ import annotations

from dataclasses import replace

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import Measured, Subject, check
from attn_backends.conformance.comparisons import compare_memory, compare_outputs
from attn_backends.conformance.exercise import run_case
from attn_backends.conformance.situations import TREE_KINDS, Cases, joined, one_page_size, situations
from attn_backends.conformance.sizes import size_of
from attn_backends.conformance.worlds import capacity_of
from spec_metadata import StepKind

TREE_TOPKS = {"wide": 2, "many": 3}  # not the number of steps, five, nor that of a draft's forwards, four


def large(kind: StepKind, *, packed: bool) -> Cases:
    """Chains and trees of a kind in both sizes, where it is declared, every other one through a graph."""

    def cases(subject: Subject) -> list[Case]:
        declared = subject.capabilities.get(kind)
        if declared is None or (packed and not declared.packed):
            return []
        can_capture = declared.captures_packed if packed else declared.graph
        found = []
        for turn, (size, tree_topk) in enumerate(TREE_TOPKS.items()):
            topks = (1, tree_topk) if kind in TREE_KINDS else (1,)
            for case in situations(subject, kind, topks, size):
                batch = replace(case, lens=_lens(case))
                batch = _in_rows(batch) if packed else batch
                in_turn = (turn + (case.topk > 1 or packed)) % 2 == 1
                found.append(_captured(batch) if in_turn and can_capture else batch)
        return found

    return one_page_size(cases)


def _lens(case: Case) -> tuple[int, ...]:
    """Committed lengths; requests of more than two pages are among the first 4 and among the others."""
    page, context = case.page_size, capacity_of(case.page_size, case.topk, case.size).max_context
    if case.size == "wide":
        return 1, 2 * page + 2, 2, page, 5, max(page - 1, 1), context, 3, 3 * page + 1
    lens = [1 + 5 * request % (min(page, 16) + 3) for request in range(33)]
    lens[2], lens[17], lens[31] = 3 * page + 1, context, 2 * page + 5
    return tuple(lens)


def _in_rows(case: Case) -> Case:
    """The case in packed rows. Of a prefill, every third request is a prompt of which nothing is cached."""
    if case.kind == StepKind.PREFILL:
        prompts = [length if request % 3 == 1 else 0 for request, length in enumerate(case.lens)]
        lens = tuple(length - prompt for length, prompt in zip(case.lens, prompts, strict=True))
        return replace(case, lens=lens, widths=tuple(prompt or 1 + r % 3 for r, prompt in enumerate(prompts)))
    most = size_of(case.size).num_steps + 1
    return replace(case, widths=tuple(1 + 5 * request % most for request in range(len(case.lens))))


def _captured(case: Case) -> Case:
    """The case through a graph of more requests, and of more packed rows, captured on two short ones."""
    case = replace(case, path="graph", captured_lens=(1, max(case.page_size - 1, 1)), bs=size_of(case.size).max_bs)
    return replace(case, captured_widths=(2, 4), num_tokens=sum(case.widths) + 3) if case.widths else case


def _measure(subject: Subject, case: Case) -> Measured:
    ran = run_case(subject, case)
    compare_memory(ran.scene, ran.before, padded=case.path == "graph")
    return compare_outputs(ran.scene, ran.inputs, ran.outputs)


@check("scale.decode", large(StepKind.DECODE, packed=False))
def decode(subject: Subject, case: Case) -> Measured:
    """A decode of 9 and of 33 requests, some of more than three pages, with many heads of many elements."""
    return _measure(subject, case)


@check("scale.draft_decode", large(StepKind.DRAFT_DECODE, packed=False))
def draft_decode(subject: Subject, case: Case) -> Measured:
    """Four forwards of a draft of 9 and of 33 requests, chains and trees whose topk is not the number of steps."""
    return _measure(subject, case)


@check("scale.draft_block", large(StepKind.DRAFT_BLOCK, packed=False))
def draft_block(subject: Subject, case: Case) -> Measured:
    """A draft block of 6 rows of 9 and of 33 requests."""
    return _measure(subject, case)


@check("scale.target_verify", large(StepKind.TARGET_VERIFY, packed=False))
def target_verify(subject: Subject, case: Case) -> Measured:
    """A verify of 9 and of 33 requests, chains of 6 and trees of 10 and 15 nodes."""
    return _measure(subject, case)


@check(
    "scale.draft_extend",
    joined(large(StepKind.DRAFT_EXTEND, packed=False), large(StepKind.DRAFT_EXTEND, packed=True)),
)
def draft_extend(subject: Subject, case: Case) -> Measured:
    """A draft extend of 9 and of 33 requests, of uniform width, and packed where that is declared."""
    return _measure(subject, case)


@check("scale.prefill", large(StepKind.PREFILL, packed=True))
def prefill(subject: Subject, case: Case) -> Measured:
    """Prompts of more than two pages, among others that go on behind a prefix of more than three."""
    return _measure(subject, case)
