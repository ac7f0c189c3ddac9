"""The suite sees limits: a backend that is right for few requests, pages, heads and elements alone is not."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest

from attn_backends.conformance import Outcome, Subject, run_case, selected_cases
from attn_backends.conformance.cases import Case
from attn_backends.conformance.checks_edges import BATCHES, CONTEXTS, HEADS, MOST_CROSSED, TOGETHER, TREES, WIDTHS
from attn_backends.conformance.selection import QUICK_CASES
from attn_backends.conformance.situations import TREE_KINDS
from attn_backends.conformance.sizes import size_of
from attn_backends.conformance.worlds import capacity_of
from attn_backends.layer import AttentionOutput
from attn_backends.registry import get_backend
from spec_metadata import StepKind
from tests.mutants import MUTANTS
from tests.unusual_backends import KV, launching

DENSE = ("fa3", "flashinfer_mla", "trtllm_mla")
LIMITS = [
    *(("pages_past_the_second_not_read", name) for name in DENSE),
    *(("requests_past_the_fourth_zeroed", name) for name in DENSE),
    *(("heads_past_the_fourth_zeroed", name) for name in (*DENSE, "dsv4")),
    *(("elements_past_the_32nd_zeroed", name) for name in (*DENSE, "dsv4")),
    ("entries_past_two_pages_not_seen", "dsv4"),
    ("compressed_requests_past_the_fourth_zeroed", "dsv4"),
]


def quick_cases(name: str) -> tuple[Subject, list[Case]]:
    subject = Subject(get_backend(name), "torch")
    return subject, of_kinds(selected_cases(subject, "scale.*", QUICK_CASES))


def of_kinds(cases: list[Case]) -> list[Case]:
    """The cases of checks of one kind of step each, whose batches are wide in all dimensions at once."""
    return [case for case in cases if case.check == f"scale.{case.kind}"]


# The suite makes the other dense backends' cases of the same numbers. Of compressed keys, what no dense one has.
QUICK = [each for each in LIMITS if each[1] == "fa3" or each[0].startswith(("entries", "compressed"))]


@pytest.mark.parametrize(
    ("mutant", "name"),
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.full) for each in LIMITS],
)
def test_a_limit_fails_every_quick_case_that_meets_it(mutant: str, name: str) -> None:
    subject, cases = quick_cases(name)
    if mutant.startswith("entries"):
        cases = [case for case in cases if case.layer != "window"]
    survived, failed = [], []
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS[mutant].plant(patch)
        for case in cases:
            (failed if run_case(subject, case).status is Outcome.FAIL else survived).append(case)
    assert survived == []
    drafting_windows = {StepKind.DRAFT_BLOCK} if mutant.startswith("entries") else set()
    assert {case.kind for case in failed} == {str(kind) for kind in subject.capabilities.keys() - drafting_windows}


@pytest.mark.parametrize("name", [*DENSE, "dsv4"])
def test_quick_cases_run_every_declared_kind_eagerly_and_through_a_graph(name: str) -> None:
    subject, cases = quick_cases(name)
    assert {(case.kind, case.path) for case in cases} == {
        (str(kind), path) for kind in subject.capabilities for path in ("eager", "graph")
    }


@pytest.mark.parametrize("name", [*DENSE, "dsv4", "reference"])
def test_cases_of_scale_share_no_number_that_could_hide_another(name: str) -> None:
    for case in of_kinds(selected_cases(Subject(get_backend(name), "torch"), "scale.*")):
        size, capacity = size_of(case.size), capacity_of(case.page_size, case.topk, case.size)
        assert max(case.lens[:4]) > 2 * case.page_size or max(case.widths[:4]) > 2 * case.page_size
        assert max(case.lens[4:]) == capacity.max_context
        assert case.topk not in (capacity.num_steps, capacity.num_steps - 1)
        assert _longest_is_not_widest(case)
        assert case.bs in (0, size.max_bs)
        assert len(case.lens) < size.max_bs


def _longest_is_not_widest(case: Case) -> bool:
    widest = {r for r, width in enumerate(case.widths) if width == max(case.widths)}
    return case.lens.index(max(case.lens)) not in widest


@pytest.mark.parametrize("name", [*DENSE, "reference", "dsv4"])
def test_every_edge_is_met_in_every_kind(name: str) -> None:
    """Contexts, as keys of a row where rows are packed, batches and heads; at the longest, two kinds alone."""
    subject = Subject(get_backend(name), "torch")
    cases = selected_cases(subject, "scale.edges")
    for kind in subject.capabilities:
        of_kind = [case for case in cases if case.kind == kind]
        lens = {length + w for case in of_kind for length in case.lens for w in (0, *case.widths)}
        longest = kind in (StepKind.DECODE, StepKind.TARGET_VERIFY)
        assert {n for group in CONTEXTS for n in group if n <= 32_768 or longest} <= lens
        assert set(BATCHES) <= {len(case.lens) for case in of_kind}
        assert set(HEADS) <= {size_of(case.size).heads[0] for case in of_kind}
        assert {case.path for case in of_kind} == {"eager", "graph"}


@pytest.mark.parametrize("name", ["fa3", "flashinfer_mla", "dsv4"])
def test_bound_ragged_lengths_and_slots_come_in_every_form_in_every_transition(name: str) -> None:
    cases = selected_cases(Subject(get_backend(name), "torch"), "graph.bound_ragged")
    forms = {(case.bs, len(case.captured_lens), case.seed % 4) for case in cases}
    assert len(forms) == 12, "three transitions, slots given or found, lengths with rows or without"


@pytest.mark.parametrize("name", [*DENSE, "dsv4"])
def test_batches_heads_and_rows_meet_in_pairs(name: str) -> None:
    """Any two values, in each kind with more rows than one, behind a prefix of more than 512 tokens."""
    subject = Subject(get_backend(name), "torch")
    cases = selected_cases(subject, "scale.crossed")
    assert all(max(case.lens) > 512 - size_of(case.size).num_steps for case in cases)
    for kind in subject.capabilities.keys() - {StepKind.DECODE}:
        found = [case for case in cases if case.kind == kind]
        sized = {(len(case.lens), size_of(case.size).heads[0], _rows(case)) for case in found}
        rows = (2, 5, 16 if kind is StepKind.DRAFT_DECODE else 17)
        if kind is StepKind.DRAFT_DECODE and not subject.capabilities[kind].tree:
            rows = ()
        for pairs, wanted in (
            ({(bs, heads) for bs, heads, _ in sized}, product(TOGETHER, HEADS)),
            ({(bs, each) for bs, _, each in sized}, product(TOGETHER, rows)),
            ({(heads, each) for _, heads, each in sized}, product(HEADS, rows)),
        ):
            assert set(wanted) <= pairs, kind
        if kind is StepKind.TARGET_VERIFY and subject.capabilities[kind].tree:
            assert {8, 64, 128} <= {size_of(case.size).heads[0] for case in found if case.topk > 1}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", DENSE)
def test_a_draft_has_never_as_many_branches_as_steps_or_forwards(name: str, device: str) -> None:
    """Else a transposed list of drafted tokens reads as a right one."""
    cases = selected_cases(Subject(get_backend(name), "torch", device), "scale.edges,scale.crossed,scale.widths")
    drafts = [case for case in cases if case.kind == StepKind.DRAFT_DECODE and case.topk > 1]
    assert len(drafts) > 10
    assert [case for case in drafts if 0 <= size_of(case.size).num_steps - case.topk <= 1] == []


@pytest.mark.parametrize("name", DENSE)
def test_batches_heads_and_rows_meet_in_all_ways_on_a_gpu(name: str) -> None:
    """But for the largest, whose queries alone would take seconds to draw."""
    subject = Subject(get_backend(name), "torch", "cuda")
    found = [case for case in selected_cases(subject, "scale.crossed") if case.kind == StepKind.TARGET_VERIFY]
    sized = {(len(case.lens), size_of(case.size).heads[0], _rows(case)) for case in found}
    assert sized == {each for each in product(BATCHES, HEADS, WIDTHS) if prod(each) <= MOST_CROSSED}
    assert {case.path for case in found} == {"eager", "graph"}


def _rows(case: Case) -> int:
    """Query rows of a request, of packed ones the most; of a draft its branches, of which 3 stand for 2 in a draft of
    two steps.
    """
    if case.kind == StepKind.DRAFT_DECODE:
        return 2 if (case.topk, size_of(case.size).num_steps) == (3, 2) else case.topk
    size = size_of(case.size)
    return max(case.widths) if case.widths else size.nodes or size.num_steps + 1


@pytest.mark.parametrize("name", [*DENSE, "reference", "dsv4"])
def test_every_width_and_tree_is_met_in_every_kind_that_declares_it(name: str) -> None:
    """Each behind a prefix of more than 512 tokens."""
    subject = Subject(get_backend(name), "torch")
    cases = selected_cases(subject, "scale.widths")
    assert all(max(case.lens) > 512 for case in cases)
    for kind in subject.capabilities.keys() - {StepKind.DECODE}:
        declared, of_kind = subject.capabilities[kind], [case for case in cases if case.kind == kind]
        if kind is not StepKind.DRAFT_DECODE:
            met = {_width(case) for case in of_kind if case.topk == 1}
            assert {width for width in WIDTHS if width <= (declared.max_width or width)} <= met, kind
        else:
            chains = [(size_of(case.size).num_steps, case.path) for case in of_kind if case.topk == 1]
            assert {*product((8, 16, 21), ("eager", "graph"))} <= {*chains}
            assert 63 in dict(chains)
        if kind is StepKind.DRAFT_DECODE and declared.tree:
            assert {width for width in WIDTHS if width <= 16} <= {case.topk for case in of_kind}
        if kind in TREE_KINDS and declared.tree:
            sizes = {(case.topk, size_of(case.size).num_steps, size_of(case.size).nodes) for case in of_kind}
            assert set(TREES) <= sizes, kind


def _width(case: Case) -> int:
    """Most query rows of a request."""
    bucket = StepKind(case.kind), 1
    return max(case.widths) if case.widths else capacity_of(case.page_size, case.topk, case.size).bucket(*bucket).width


@pytest.mark.parametrize("name", [*DENSE, "reference", "dsv4"])
def test_an_empty_prefix_stands_beside_a_context_of_4_100_tokens(name: str) -> None:
    cases = selected_cases(Subject(get_backend(name), "torch"), "scale.edges")
    prompts = [case for case in cases if case.kind == StepKind.PREFILL]
    keys = [max(n + w for n, w in zip(case.lens, case.widths, strict=True)) for case in prompts if 0 in case.lens]
    assert 4100 in keys


def test_a_head_size_between_the_least_and_the_most_is_met_in_every_kind() -> None:
    """As 128 of FlashAttention-3's 64, 128 and 256: a kernel that is wrong there alone passes everything else."""

    def without_12(output: AttentionOutput) -> AttentionOutput:
        return AttentionOutput(output.out * (output.out.shape[-1] != 12), output.lse)

    backend = launching(without_12, head_sizes=frozenset({(6, 6), (12, 12), (24, 24)}))
    backend.formats = KV
    subject = Subject(backend, "torch")
    cases = selected_cases(subject, "scale.edges")
    others = [case for case in cases if size_of(case.size).declared]
    assert {case.kind for case in others} == {str(kind) for kind in subject.capabilities}
    assert {run_case(subject, case).status for case in others} == {Outcome.FAIL}
    most = next(case for case in cases if case.kind == StepKind.DECODE and not size_of(case.size).declared)
    assert run_case(subject, most).status is Outcome.PASS
