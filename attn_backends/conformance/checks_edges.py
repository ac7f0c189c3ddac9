"""Contexts, batches, widths and heads at which real kernels change their tiles and splits, in worlds that are cheap.

Every value is met in each declared kind; the cases rotate through cache formats, page sizes, tables, eager steps and
graphs, so that two values that are right apart are met together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, product
from math import prod

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import Measured, Subject, check
from attn_backends.conformance.comparisons import compare_memory, compare_outputs
from attn_backends.conformance.exercise import run_case
from attn_backends.conformance.situations import PACKED_KINDS, TREE_KINDS, formats_of, is_declared, situations
from attn_backends.conformance.sizes import size_of
from attn_backends.conformance.worlds import AnyFormat, capacity_of, sizes_of
from spec_metadata import StepKind

CONTEXTS: tuple[tuple[int, ...], ...] = (
    (63, 64, 65, 1),
    (127, 128, 129, 2),
    (255, 256, 257, 1),
    (258, 259, 260, 3),
    (511, 512, 513, 1),
    (1023, 1024, 1025, 5),
    (4095, 4096, 1, 4097),
    (4098, 2, 4100, 4099),
    (1, 32_768),
    (131_072, 1),
)
BATCHES = (8, 9, 33, 128, 257)
WIDTHS = (2, 3, 5, 8, 16, 21, 33, 64)
DRAFTED = (8, 16, 21, 8, 16, 21, 63)  # steps of chains: each but the last also through a graph
TREES = ((2, 5, 0), (4, 3, 21), (8, 2, 33), (4, 8, 64))
"""topk, steps and nodes (0: as many as topk times steps)."""
PROMPTS = ((2, 129, 200), (520, 1))
"""Query rows of each request of a batch: over a tile of 128, and over several."""
HEADS = (8, 64, 128)
TOGETHER = {9: (5, 2, 17), 33: (2, 17, 5), 128: (17, 5, 2), 257: (17, 5, 2)}
"""Query rows of a request by the batch and, in the order of `HEADS`, the heads: any two values of the three meet."""
MOST_CROSSED = 2**18  # requests times heads times rows of a case on a GPU, whose queries are drawn on the CPU
MOST_PACKED = 384  # requests times heads of a graph of packed rows, whose torch kernels pad each request to all rows
MOST_REPLAYED = 128  # requests of several heads of a graph on a CPU, where more take 5 s and 3 GB
LONGEST_SELECTED = 32_768  # tokens: over four times as many an oracle that selects entries takes 4 s on a CPU


def _with(
    subject: Subject, kind: StepKind, turn: int, size: str, topk: int = 1, format: AnyFormat | None = None
) -> Case | None:
    """A situation of a kind in a size, of the turn's page size, table and path, and of a format (None: the turn's);
    None if it is not declared. Layers of selected entries have no context over `LONGEST_SELECTED`.
    """
    found = [case for case in situations(subject, kind, (topk,), size) if format in (None, case.format)]
    if size_of(size).tokens > LONGEST_SELECTED:
        found = [case for case in found if case.layer != "selected"]
    if not found:
        return None
    case = replace(found[(turn * 5 + turn // len(found)) % len(found)], size=size, topk=topk, seed=turn)
    return case if is_declared(subject, case) else None


def _filled(subject: Subject, case: Case | None, lens: tuple[int, ...], turn: int) -> Iterator[Case]:
    """The case on lengths, every other one through a graph that was captured on two short requests."""
    if case is None:
        return
    kind = StepKind(case.kind)
    context = capacity_of(case.page_size, case.topk, case.size).max_context
    case, declared = replace(case, lens=tuple(min(n, context) for n in lens)), subject.capabilities[kind]
    heads = size_of(case.size).heads[0]
    packed = kind is StepKind.PREFILL or (kind is StepKind.DRAFT_EXTEND and declared.packed and turn % 3 == 0)
    if packed:
        most = size_of(case.size).num_steps + 1
        widths = tuple(1 + (most - 1) * (request % 2) for request in range(len(lens)))
        prefixes = (max(n - w, 0 if kind is StepKind.PREFILL else 1) for n, w in zip(case.lens, widths, strict=True))
        case = replace(case, lens=tuple(prefixes), widths=widths)
    if (
        turn % 2
        and not (packed and len(lens) * heads > MOST_PACKED)
        and not (subject.device == "cpu" and len(lens) > MOST_REPLAYED and heads >= min(HEADS))
        and (declared.captures_packed if packed else declared.graph)
    ):
        bs = max(size_of(case.size).max_bs, len(lens))
        case = replace(case, path="graph", captured_lens=(1, 2), bs=bs)
        case = replace(case, captured_widths=(1, 1), num_tokens=sum(case.widths)) if packed else case
    yield case


def _longest(kind: StepKind) -> int:
    """Tokens of the longest context of a kind."""
    return max(map(max, CONTEXTS)) if kind in (StepKind.DECODE, StepKind.TARGET_VERIFY) else 32_768


def _other_sizes(subject: Subject) -> list[tuple[AnyFormat, int]]:
    """Formats and elements of query-key heads that a kernel declares, but for the least and the most."""
    declared = {each: sizes_of(subject.backend, subject.chosen, each) for each in formats_of(subject)}
    return [(each, dim) for each, sizes in declared.items() for dim, _ in sorted(sizes or ())[1:-1]]


def _steps(topk: int, least: int) -> int:
    """Steps of a draft, some or a few more: neither they nor its forwards are as many as its branches."""
    return next(steps for steps in count(least) if topk == 1 or topk not in (steps, steps - 1))


def _one_long(bs: int) -> tuple[int, ...]:
    """Lengths of one long request among short ones."""
    return *(1 + request % 7 for request in range(bs - 2)), 520, 3


def _together(subject: Subject, kind: StepKind, turn: int, bs: int, heads: int, rows: int) -> Case | None:
    """Requests, heads and rows at once: of a draft its branches, of every other verify a tree."""
    size = f"long.bs{bs + turn % 2}.{{}}.tokens520.full2.spare1.heads{heads}"
    if kind is StepKind.DRAFT_DECODE:
        topk, least = min(rows, 16), 3 if bs <= 33 else 2
        if subject.device == "cpu" and bs > 33:
            topk += topk == least  # another step would take 5 s and 3.5 GB
        tree = _with(subject, kind, turn, size.format(f"steps{_steps(topk, least)}"), topk)
        return tree or _with(subject, kind, turn, size.format(f"steps{least}"))
    tree = None
    if kind is StepKind.TARGET_VERIFY and turn % 2 and rows > 2:
        tree = _with(subject, kind, turn, size.format(f"steps5.nodes{rows}"), 2 if rows <= 17 else 4)
    return tree or _with(subject, kind, turn, size.format(f"steps{rows - 1}"))


def _edges(subject: Subject) -> Iterator[Case]:
    """Contexts, batches of one long request among short ones, heads and their elements, of each kind."""
    for kind in subject.capabilities:
        turns = count(list(subject.capabilities).index(kind))
        for lens in CONTEXTS:
            longest = max(lens)
            if longest > _longest(kind):
                continue
            turn = next(turns)
            steps = 3 if kind is StepKind.DRAFT_DECODE or longest > 8192 else 4 + 3 * (turn % 2)
            size = f"long.bs{len(lens)}.steps{steps}.tokens{longest}"
            yield from _filled(subject, _with(subject, kind, turn, size), lens, turn)
        for bs in BATCHES:
            turn = next(turns)
            size = f"long.bs{bs + turn % 2}.steps{3 if bs <= 33 else 2}.tokens520.full2.spare1"
            yield from _filled(subject, _with(subject, kind, turn, size), _one_long(bs), turn)
        for heads in HEADS:
            turn = next(turns)
            size = f"long.bs3.steps3.tokens700.heads{heads}"
            yield from _filled(subject, _with(subject, kind, turn, size), (130, 600, 1), turn)
        for format, dim in _other_sizes(subject):
            turn, size = next(turns), f"long.bs3.steps3.tokens700.dims{dim}"
            yield from _filled(subject, _with(subject, kind, turn, size, format=format), (130, 600, 1), turn)


def _triples(subject: Subject, kind: StepKind) -> list[tuple[int, int, int]]:
    """Requests, heads and rows of a kind that meet in one case: in pairs on a CPU, in all ways on a GPU."""
    if subject.device == "cpu":
        return [(bs, *each) for bs, rows in TOGETHER.items() for each in zip(HEADS, rows, strict=True)]
    most = {StepKind.DECODE: 2, StepKind.DRAFT_DECODE: 16}.get(kind, max(WIDTHS))
    rows = [width for width in WIDTHS if width <= most]
    return [each for each in product(BATCHES, HEADS, rows) if prod(each) <= MOST_CROSSED]


def _crossed(subject: Subject) -> Iterator[Case]:
    """Batches of one long request among short ones, heads and rows together, of each kind."""
    for first, kind in enumerate(subject.capabilities):
        for turn, (bs, heads, rows) in enumerate(_triples(subject, kind), first):
            case = _together(subject, kind, turn, bs, heads, rows)
            yield from _filled(subject, case, _one_long(bs), turn)


def _widths(subject: Subject) -> Iterator[Case]:
    """Widths of chains and of branches, and trees, after prefixes of 0 to 1,030 tokens, the longest not the widest."""
    for kind in (kind for kind in subject.capabilities if kind is not StepKind.DECODE):
        turns = count(list(subject.capabilities).index(kind))
        first = 1 if kind in (StepKind.DRAFT_DECODE, StepKind.DRAFT_EXTEND) else 0
        for width in WIDTHS:
            turn = next(turns)
            if kind is StepKind.DRAFT_DECODE:
                size, topk = f"long.steps{_steps(width, 3)}.tokens600", width
            else:
                size, topk = f"long.steps{width - 1}.tokens1030", 1
            if topk <= 16 or kind is not StepKind.DRAFT_DECODE:
                yield from _filled(subject, _with(subject, kind, turn, size, topk), (513, first, 1025, 9), turn)
        for topk, steps, nodes in TREES if kind in TREE_KINDS else ():
            turn = next(turns)
            size = f"long.steps{steps}.nodes{nodes}.tokens600"
            yield from _filled(subject, _with(subject, kind, turn, size, topk), (513, first, 70, 255), turn)
        for steps in DRAFTED if kind is StepKind.DRAFT_DECODE else ():
            turn, size = next(turns), f"long.steps{steps}.tokens600"
            yield from _filled(subject, _with(subject, kind, turn, size), (513, first, 570, 9), turn)


def _prompts(subject: Subject) -> Iterator[Case]:
    """A batch of prompts and one of packed extends of many rows, eagerly and through a graph in turn."""
    for first, kind in enumerate(PACKED_KINDS):
        for turn, widths in enumerate(PROMPTS, first):
            case = _with(subject, kind, turn, f"long.bs3.steps{max(widths) - 1}.tokens600.heads4")
            if case is None or not (declared := subject.capabilities[kind]).packed:
                continue
            case = replace(case, lens=(600, 513, 9)[: len(widths)], widths=widths)
            if turn % 2 and declared.captures_packed:
                case = replace(case, path="graph", bs=len(widths), num_tokens=sum(widths))
                case = replace(case, captured_lens=(1, 2), captured_widths=(1, 1))
            yield case


def _measure(subject: Subject, case: Case) -> Measured:
    ran = run_case(subject, case)
    compare_memory(ran.scene, ran.before, padded=case.path == "graph")
    return compare_outputs(ran.scene, ran.inputs, ran.outputs)


@check("scale.edges", lambda subject: list(_edges(subject)))
def edges(subject: Subject, case: Case) -> Measured:
    """Contexts around tile and split edges up to 131,072 tokens, one long request among up to 256 short ones, up to 128
    heads, every declared head size.
    """
    return _measure(subject, case)


@check("scale.crossed", lambda subject: list(_crossed(subject)))
def crossed(subject: Subject, case: Case) -> Measured:
    """Batches, heads and rows of a request at once: any two values of the three on a CPU, all three on a GPU."""
    return _measure(subject, case)


@check("scale.widths", lambda subject: [*_widths(subject), *_prompts(subject)])
def widths(subject: Subject, case: Case) -> Measured:
    """Chains of 2 to 64 rows, drafts of 2 to 16 branches, trees of up to 64 nodes and prompts of up to 520 rows, after
    prefixes of many tiles.
    """
    return _measure(subject, case)
