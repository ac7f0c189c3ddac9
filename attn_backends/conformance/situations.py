"""The cases that a subject's capabilities call for: cache forms, page sizes and trees, lengths around page edges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from attn_backends.compressed_cache import CompressedFormat
from attn_backends.conformance.cases import CACHE_DTYPES, Case
from attn_backends.conformance.catalogue import Subject
from attn_backends.conformance.compressed_worlds import BLOCK_LAYER, COMPRESSIONS, LAYERS, is_compressed
from attn_backends.conformance.sizes import MAX_BS
from attn_backends.conformance.worlds import AnyFormat, capacity_of, sizes_of
from attn_backends.contract.capabilities import DTYPES
from spec_metadata import StepKind
from spec_metadata.capacity import UNIFORM_KINDS

Cases = Callable[[Subject], list[Case]]

PAGE_SIZES = (1, 4, 16, 64)  # of a kernel that takes any
TREE_TOPK = 4  # neither the steps of a draft, three, nor its forwards, two
SPARE = 2  # rows of a graph that no ragged batch fills
LONG = "long.bs3.steps3.tokens4100"  # of windows and caches that meet several tiles and splits
PACKED_KINDS = (StepKind.PREFILL, StepKind.DRAFT_EXTEND)
RAGGED_KINDS = (StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND)
TREE_KINDS = (StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY)
CHAIN_KINDS = (StepKind.PREFILL, StepKind.DECODE, StepKind.DRAFT_BLOCK)  # which branches change nothing of


def page_sizes(subject: Subject, kind: StepKind) -> list[int]:
    """The page sizes to run a step kind at."""
    declared = subject.capabilities[kind].page_sizes
    whole = subject.backend.page_multiple()
    taken = {-(-size // whole) * whole for size in PAGE_SIZES} if declared is None else declared
    sizes = sorted(size for size in taken if size % whole == 0)
    if is_compressed(subject.backend):
        return [size for size in sizes if all(size % compression.ratio == 0 for compression in COMPRESSIONS)]
    return sizes


def main_dtype(subject: Subject, kind: StepKind) -> str:
    """The finest declared type."""
    return dtypes(subject, kind)[0]


def dtypes(subject: Subject, kind: StepKind) -> list[str]:
    """The declared types, finest first."""
    fine = ("float64", "float32", "bfloat16", "float16")
    found = [name for name in fine if DTYPES[name] in subject.capabilities[kind].dtypes]
    assert found, f"{subject.chosen.name} declares none of {fine} for {kind}"
    return found


def cache_dtype(subject: Subject, kind: StepKind) -> str:
    """The type of a cache to run a step kind on where the kernel takes none of the query's own, "" where it does."""
    declared = subject.capabilities[kind]
    return "" if declared.own_cache else str(min(declared.cache_dtypes, key=str)).removeprefix("torch.")


def formats_of(subject: Subject) -> list[AnyFormat]:
    """The cache formats that the kernel has head sizes for."""
    declared = {format: sizes_of(subject.backend, subject.chosen, format) for format in subject.backend.formats}
    return sorted(format for format, sizes in declared.items() if sizes is None or sizes)


def situations(subject: Subject, kind: StepKind, topks: Iterable[int] = (1, TREE_TOPK), size: str = "") -> list[Case]:
    """An eager case for every declared cache form, page size and number of branches, lengths around a page edge."""
    if kind not in subject.capabilities:
        return []
    asked = (kind, tuple(topks), size)
    if asked not in subject.situations:
        subject.situations[asked] = tuple(_situations(subject, *asked))
    return list(subject.situations[asked])


def _situations(subject: Subject, kind: StepKind, topks: tuple[int, ...], size: str) -> Iterator[Case]:
    common = Case(
        "",
        kind,
        dtype=main_dtype(subject, kind),
        cache_dtype=cache_dtype(subject, kind),
        poison="finite" if subject.capabilities[kind].over_read else "nan",
        size=size,
    )
    forms = [(form, layer) for form in formats_of(subject) for layer in layers_of(subject, form)]
    for (form, layer), (index, page_size) in product(forms, enumerate(page_sizes(subject, kind))):
        turn = index + layers_of(subject, form).index(layer)
        for topk in topks:
            case = replace(common, format=form, layer=layer, page_size=page_size, topk=topk, seed=index)
            if is_declared(subject, case):
                table = "block" if (turn % 2) ^ (topk > 1) else "request"
                integers = "int64" if turn % 2 else "int32"
                yield replace(case, table=table, index=integers, lens=around_pages(case))


def layers_of(subject: Subject, format: AnyFormat) -> tuple[str, ...]:
    """The kinds of layers of a format; of a backend without compressions those of a window alone."""
    if format is not CompressedFormat.COMPRESSED:
        return ("",)
    backend: Any = subject.backend
    return LAYERS if backend.compressions else LAYERS[:1]


def is_declared(subject: Subject, case: Case) -> bool:
    """Whether the width and trees of a case's step are declared."""
    kind = StepKind(case.kind)
    declared = subject.capabilities[kind]
    if declared.kind_reasons(kind) or (kind is StepKind.DRAFT_BLOCK and case.layer not in ("", BLOCK_LAYER)):
        return False
    if case.topk > 1 and (kind in CHAIN_KINDS or (kind in TREE_KINDS and not declared.tree)):
        return False
    if kind is StepKind.PREFILL:
        return True
    width = capacity_of(case.page_size, case.topk, case.size).bucket(kind, 1).width
    return declared.max_width is None or width <= declared.max_width


def around_pages(case: Case) -> tuple[int, ...]:
    """Committed lengths at, below and above a page edge, and a full context."""
    edge = case.page_size * max(1, 8 // case.page_size)
    return (edge, max(edge - 1, 1), edge + 1, capacity_of(case.page_size, case.topk, case.size).max_context)


def growing(case: Case) -> Case:
    """Captured on two short requests, replayed on three longer ones."""
    edge, less, more, context = around_pages(case)
    return replace(case, path="graph", captured_lens=(1, less), lens=(more, context, edge), bs=3)


def shrinking(case: Case) -> Case:
    """Captured on three long requests, replayed on two shorter ones."""
    edge, less, more, context = around_pages(case)
    return replace(case, path="graph", captured_lens=(context, more, edge), lens=(less, 1), bs=3)


def padded(case: Case) -> Case:
    """Two requests in the largest graph."""
    edge, less, more, _ = around_pages(case)
    return replace(case, path="graph", captured_lens=(edge, 2), lens=(more, less), bs=MAX_BS)


def idle(case: Case) -> Case:
    """Captured on two requests, replayed on none."""
    edge, _, _, context = around_pages(case)
    return replace(case, path="graph", captured_lens=(edge, context), lens=(), bs=2)


def graphable(subject: Subject, kind: StepKind) -> bool:
    """Whether a kind can be captured."""
    return kind in subject.capabilities and kind in UNIFORM_KINDS and subject.capabilities[kind].graph


def in_rows(case: Case) -> Case:
    """A transition of packed steps: the requests have one to four rows, the first prompt of a prefill many. The graph
    has as many rows as either batch needs.
    """
    lens, widths = case.lens, (3, 1, 4)[: len(case.lens)]
    if case.kind == StepKind.PREFILL and lens:
        lens, widths = (0, *lens[1:]), (max(lens[0], 5), *widths[1:])
    captured = (2, 4, 1)[: len(case.captured_lens)]
    num_tokens = max(sum(widths), sum(captured))
    return replace(case, lens=lens, widths=widths, captured_widths=captured, num_tokens=num_tokens)


def spacious(case: Case) -> Case:
    """The same in a graph of more rows than a request may have tokens."""
    most = capacity_of(case.page_size, case.topk).max_kv_len
    return replace(case, num_tokens=case.num_tokens + most + 1)


def packed_graph(transition: Callable[[Case], Case] = growing, **changes: object) -> Cases:
    """Every situation of the kinds whose packed rows can be captured, on one batch, and replayed on another."""
    return lambda subject: [
        replace(in_rows(transition(case)), **changes)  # type: ignore[arg-type]
        for kind in PACKED_KINDS
        if kind in subject.capabilities and subject.capabilities[kind].captures_packed
        for case in situations(subject, kind, topks=(1,))
    ]


def any_graph(transition: Callable[[Case], Case] = growing, **changes: object) -> Cases:
    """Every situation through graphs of uniform widths, and at one page size through graphs of packed rows."""
    packed = packed_graph(transition, **changes)
    return joined(graph(transition, **changes), one_page_size(packed))  # type: ignore[arg-type]


def eager(kinds: Iterable[StepKind] = UNIFORM_KINDS, **changes: object) -> Cases:
    """Every situation of some kinds, eagerly, with changes to the case."""
    return lambda subject: [
        replace(case, **changes)  # type: ignore[arg-type]
        for kind in kinds
        for case in situations(subject, kind)
    ]


def graph(
    transition: Callable[[Case], Case] = growing, kinds: Iterable[StepKind] = UNIFORM_KINDS, **changes: object
) -> Cases:
    """Every situation of some kinds, captured on one batch and replayed on another, with changes to the case."""
    return lambda subject: [
        replace(transition(case), **changes)  # type: ignore[arg-type]
        for kind in kinds
        if graphable(subject, kind)
        for case in situations(subject, kind)
    ]


def both(**changes: object) -> Cases:
    """Every situation, eagerly and through a growing graph."""
    return joined(eager(**changes), graph(**changes))  # type: ignore[arg-type]


def joined(*parts: Cases) -> Cases:
    """The cases of all parts."""
    return lambda subject: [case for part in parts for case in part(subject)]


def one_page_size(cases: Cases) -> Cases:
    """The cases at one page size in the middle, for checks that do not depend on it."""

    def middle(subject: Subject) -> list[Case]:
        found = cases(subject)
        sizes = sorted({case.page_size for case in found})
        return [case for case in found if case.page_size == sizes[len(sizes) // 2]]

    return middle


def long_contexts(turn: int) -> Cases:
    """Chains and trees of each kind, prompts and packed extends over 1 to 4,100 tokens, at one page size. Every other
    one, the even or the odd by turn, goes through a graph.
    """

    def found(subject: Subject) -> list[Case]:
        cases = []
        for kind, declared in subject.capabilities.items():
            rows: list[tuple[int, ...]] = [()] if kind is not StepKind.PREFILL else []
            rows += [(2, 4, 1)] if kind in PACKED_KINDS and declared.packed else []
            for case, widths in product(situations(subject, kind, size=LONG), rows):
                is_twice = case.topk > 1 and kind not in TREE_KINDS  # branches change nothing of its rows
                is_slow = case.layer == "selected" and kind is not StepKind.DECODE  # 1 to 3 s each
                if not is_twice and not is_slow:
                    cases.append(replace(case, lens=(4100, 300, 1), widths=widths))
        return [
            _replayed(subject, case) if (number + turn) % 2 else case
            for number, case in enumerate(one_page_size(lambda _: cases)(subject))
        ]

    return found


def _replayed(subject: Subject, case: Case) -> Case:
    """The case through a graph that was captured on two short requests, where that is declared."""
    declared = subject.capabilities[StepKind(case.kind)]
    if not (declared.captures_packed if case.widths else declared.graph):
        return case
    captured = (1, 1) if case.widths else ()
    case = replace(case, path="graph", captured_lens=(1, 2), captured_widths=captured, bs=len(case.lens))
    return replace(case, num_tokens=sum(case.widths))


def in_every_dtype(cases: Cases) -> Cases:
    """The cases in the declared types but the finest."""
    return lambda subject: [
        replace(case, dtype=dtype) for case in cases(subject) for dtype in dtypes(subject, StepKind(case.kind))[1:]
    ]


def in_8_bits(cases: Cases) -> Cases:
    """The cases of one page size over a cache of 8-bit floats and, apart, with scales of keys and values, where these
    are declared. Eager ones have the finest type of queries, graphs bfloat16.
    """

    def found(subject: Subject) -> list[Case]:
        chosen = []
        for case in one_page_size(cases)(subject):
            kind = StepKind(case.kind)
            declared = subject.capabilities[kind]
            types = dtypes(subject, kind)
            graphs = "bfloat16" if "bfloat16" in types else types[0]
            of_path = replace(case, dtype=graphs if case.path == "graph" else types[0])
            names = [name for name, dtype in CACHE_DTYPES.items() if dtype in declared.cache_dtypes]
            chosen += [replace(of_path, cache_dtype=name) for name in names[:1] if not case.cache_dtype]
            chosen += [replace(of_path, feature="kv_scales")] if declared.kv_scales and not case.feature else []
        return chosen

    return found


def ragged_kinds(subject: Subject) -> list[Case]:
    """Verifies of chains and draft extends at every page size, where packed rows of them can be captured."""
    found = []
    for kind in RAGGED_KINDS:
        declared = subject.capabilities.get(kind)
        if declared is not None and declared.captures_packed and declared.max_width is None:
            chains = situations(subject, kind, topks=(1,))
            found += [replace(case, ragged=kind is StepKind.DRAFT_EXTEND) for case in chains]
    return found


def ragged_steps(*kinds: StepKind) -> Cases:
    """Ragged ones of some kinds, eagerly and through graphs that were captured on other widths."""

    def of_kinds(subject: Subject) -> list[Case]:
        found = []
        for case in ragged_kinds(subject):
            if case.kind in kinds:
                through = [in_rows(transition(case)) for transition in (growing, shrinking, padded)]
                shortest = 0 if case.kind == StepKind.TARGET_VERIFY else case.lens[0]
                found.append(replace(case, lens=(shortest, *case.lens[1:]), widths=(3, 1, 4, 2)))
                found += [replace(each, num_tokens=each.num_tokens + SPARE) for each in through]
        return found

    return of_kinds
