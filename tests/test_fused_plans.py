"""Fused planners and input copies against their definitions in torch, on Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from attn_backends.graphs import RecordedGraph
from attn_backends.kernels.plan_operators import bind_block_table
from spec_metadata import BlockTable, InvalidStepError, RequestTable, Step, pad_step
from spec_metadata.plans import block_table
from spec_metadata.plans.compressed import Compression
from tests.bound_batches import engine, statics
from tests.plan_batches import COMPRESSED_KINDS, KINDS, PACKED_KINDS, RESERVED, Case, elsewhere
from tests.planner_laws import (
    BLOCKS,
    FORMS,
    GARBAGE,
    RINGS,
    Form,
    Rings,
    check_equal,
    check_inputs,
    garbage,
    written_along,
)
from tests.triton_interpreter import interpreted, last_program_first

PAGE_SIZES = (1, 16, 64, 256)
UNIFORM_KINDS = [kind for kind in KINDS if kind not in PACKED_KINDS]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels run on the interpreter, or the test not at all: from the last program, where other tests begin with
    the first.
    """
    interpreted("triton_plan", "_plan_pages")
    interpreted("triton_plan_compressed", "_plan_compressed")
    interpreted("triton_inputs", "_copy_inputs")
    last_program_first(monkeypatch)


QUICK_TABLES = ((RequestTable, 2), (BlockTable, 0))
TABLES = [
    pytest.param(table, pad, marks=() if (table, pad) in QUICK_TABLES else pytest.mark.full)
    for table, pad in product((RequestTable, BlockTable), (0, 2))
]


def compressed_case(kind: str, rings: str, table: type, pad: int) -> Any:
    """A case and its tier: in the quick tests kinds and rings take turns in tables and padding. Padded prefills of long
    rings take up to 10 s each on the interpreter.
    """
    turn = (KINDS.index(kind) + list(RINGS).index(rings)) % 2
    if kind == "prefill" and rings in ("small", "real"):
        turn = 1
    quick = (table, pad) == QUICK_TABLES[turn]
    marks = pytest.mark.full if not quick else pytest.mark.smoke if (kind, rings) == ("decode", "odd") else ()
    return pytest.param(kind, rings, table, pad, marks=marks)


COMPRESSED = [
    compressed_case(kind, rings, table, pad)
    for kind, rings, table, pad in product(COMPRESSED_KINDS, RINGS, (RequestTable, BlockTable), (0, 2))
]


@pytest.mark.parametrize(("kind", "rings", "table", "pad"), COMPRESSED)
def test_fused_compressed(kind: str, rings: str, table: type, pad: int) -> None:
    page_size, form = RINGS[rings]
    check_equal(form.form, Case(kind, page_size, list(RINGS).index(rings), form=table, pad=pad))


@pytest.mark.parametrize("kind", ["draft chain", "verify chain"])
def test_fused_entries_of_every_ratio(kind: str) -> None:
    """DeepSeek-V4.1's blocks of one and two tokens beside overlapping and longer ones, of one plan."""
    short = {Compression(1, indexed=True): 3, Compression(2, indexed=True): 4}
    rings = Rings(5, short | {Compression(4, overlap=True, indexed=True): 10, Compression(16): 16})
    check_equal(rings.form, Case(kind, 16, 1))


@pytest.mark.parametrize(("name", "table", "pad"), [*product(BLOCKS, (RequestTable, BlockTable), (0, 2))])
def test_fused_windows_of_draft_blocks(name: str, table: type, pad: int) -> None:
    page_size, rings = BLOCKS[name]
    check_equal(rings.form, Case("block", page_size, pad, form=table, pad=pad))


@pytest.mark.full
def test_fused_compressed_in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests, keys, pages and entries than a block, and more rows than programs."""
    module = interpreted("triton_plan_compressed", "_plan_compressed")
    monkeypatch.setattr(module, "_BLOCK", 4)
    page_size, rings = RINGS["small"]
    check_equal(rings.form, Case("verify chain", page_size, 0, sizes=(9,), context=200))
    monkeypatch.setattr(module, "_MOST_PROGRAMS", 12)
    check_equal(rings.form, Case("draft chain", page_size, 3, sizes=(5,), context=200))
    check_equal(rings.form, Case("prefill", page_size, 3, sizes=(9,), context=90))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("table", "pad"), TABLES)
@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in FORMS for kind in (UNIFORM_KINDS if name == "block_table" else KINDS)]
)
def test_fused_pages(name: str, kind: str, table: type, pad: int) -> None:
    for seed, page_size in enumerate(PAGE_SIZES):
        check_equal(FORMS[name], Case(kind, page_size, seed, form=table, pad=pad))


def test_fused_block_table_refuses_a_packed_query() -> None:
    case = Case("prefill", 4, 0)
    with pytest.raises(InvalidStepError, match="one query stride"):
        bind_block_table(case.step, garbage(block_table.BUFFERS, case))


@pytest.mark.parametrize("name", FORMS)
def test_many_requests_and_long_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests than a block of lengths, and more pages, and rows, than a block of them."""
    monkeypatch.setattr(interpreted("triton_plan", "_plan_pages"), "BLOCK_PAGES", 8)
    check_equal(FORMS[name], Case("verify chain", 64, 0, sizes=(20,), context=200))
    check_equal(FORMS[name], Case("draft chain", 1, 0, sizes=(3,), context=90))
    check_equal(FORMS[name], Case("draft tree", 1, 2, sizes=(3,), context=90))
    if name != "block_table":
        check_equal(FORMS[name], Case("prefill", 16, 3, sizes=(20,), context=500))


@pytest.mark.parametrize("name", FORMS)
def test_what_is_specified_is_what_is_visible(name: str) -> None:
    for kind in UNIFORM_KINDS:
        case = Case(kind, 16, 1, pad=2)
        form, last = FORMS[name], None if name == "csr" else case.step.num_forwards - 1
        counts = [len(pages) for pages in case.visible_pages(last)]
        (mask,) = form.specified(case.step, garbage(form.specs, case)).values()
        assert mask.view(len(counts), -1).sum(1).tolist() == counts


@pytest.mark.parametrize("form", [*FORMS.values(), RINGS["small"][1].form], ids=[*FORMS, "compressed"])
def test_an_idle_step_has_ends_alone(form: Form) -> None:
    case = Case("decode", 16, 0)
    case.step = Step.idle(case.paging.on_static(case.paging.static_input()[:0]))
    check_equal(form, case)


@pytest.mark.parametrize("table", [RequestTable, BlockTable])
@pytest.mark.parametrize(("kind", "pad"), [*((kind, 0) for kind in KINDS), *((kind, 1) for kind in UNIFORM_KINDS)])
def test_copied_inputs(kind: str, table: type, pad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """pad: whether the step brings padding of its own; a packed one has none."""
    for seed, page_size in enumerate(PAGE_SIZES):
        monkeypatch.setattr(interpreted("triton_inputs", "_copy_inputs"), "_BLOCK", (4, 256)[seed % 2])
        case = Case(kind, page_size, seed, form=table, pad=pad, context=40)
        for num_more in (0, 3):
            check_inputs(case, num_more)


@pytest.mark.parametrize("table", [RequestTable, BlockTable])
@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_packed_rows_of_which_more_are_padding_than_a_request_can_have(kind: str, table: type) -> None:
    check_inputs(Case(kind, 16, 0, form=table, context=40), 40)


@pytest.mark.parametrize("table", [RequestTable, BlockTable])
@pytest.mark.parametrize("kind", ["verify tree", "packed extend"])
def test_inputs_of_an_idle_step_are_padding(kind: str, table: type) -> None:
    case, other = Case(kind, 16, 0, form=table), Case("decode", 4, 0)
    idle = Step.idle(other.paging.on_static(other.paging.static_input()[:0]))
    check_inputs(case, 0, idle)


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("kind", ["verify chain", "verify tree"])
@pytest.mark.parametrize("table", [RequestTable, BlockTable])
def test_a_bound_copy_is_launched_as_a_compiled_one(
    kind: str, table: type, idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another step of the same layout, argument by argument."""
    from attn_backends.kernels.triton_inputs import bind_inputs
    from attn_backends.kernels.triton_launch import Launch

    launches: list[list[object]] = []

    def launch(*arguments: object) -> None:
        launches.append([each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments])

    def bound(launch_: Launch, variant: object, fixed: tuple[object, ...]) -> object:
        return (lambda *moving: launch(*moving, *fixed)) if launches else None

    monkeypatch.setattr(Launch, "compile", lambda self, variant, *arguments: launch(*arguments))
    monkeypatch.setattr(Launch, "bind", bound)
    case = Case(kind, 16, 0, form=table)
    first = Step.idle(case.paging.on_static(case.paging.static_input()[:0])) if idle else case.step
    first = replace(first, num_real=torch.zeros(1, dtype=torch.int32))
    static = pad_step(case.step, case.step.bucket(case.bs), case.capacity)
    second = elsewhere(first)
    assert second.layout == first.layout
    fill = bind_inputs(static)(first)
    fill(first)
    fill(second)
    monkeypatch.setattr(Launch, "bind", lambda self, variant, fixed: None)
    bind_inputs(static)(second)(second)
    assert len(launches) == 3
    assert launches[1] == launches[2]
    assert (launches[0] == launches[1]) is idle, "of an idle step nothing is read"


def test_a_plan_is_repeated_as_it_was_bound_but_where_a_graph_records_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_backends.kernels.triton_launch import Launch

    bound: list[tuple[object, ...]] = []
    monkeypatch.setattr(Launch, "bind", lambda self, variant, fixed: lambda: bound.append(fixed))
    case, form = Case("verify chain", 16, 0), FORMS["ragged"]
    buffers = garbage(form.specs, case)
    plan = form.bind(case.step, buffers)
    plan()
    assert not bound, "a plan that is launched once is not bound"
    planned = {name: buffer.clone() for name, buffer in buffers.items()}
    plan()
    plan()
    assert len(bound) == 2
    assert {id(buffer) for buffer in buffers.values()} <= {id(given) for given in bound[0]}
    graph = RecordedGraph()
    graph.capture(plan)
    for buffer in buffers.values():
        buffer.fill_(GARBAGE)
    graph.replay()
    assert len(bound) == 2
    assert all(torch.equal(buffer, planned[name]) for name, buffer in buffers.items())


def test_one_compilation_serves_every_batch_of_its_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton would compile for, on a GPU, follows from what a `Launch` keeps compilations by."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    from attn_backends.kernels.triton_inputs import bind_inputs
    from attn_backends.kernels.triton_launch import Launch

    backend, compiled = CUDABackend(GPUTarget("cuda", 90, 32)), {}

    def look(launch: Launch, variant: object, *arguments: object) -> None:
        kernel = JITFunction(launch.kernel.fn, **launch.kernel.kwargs)
        _, found, _ = create_function_from_signature(kernel.signature, kernel.params, backend)(*arguments)
        key = (kernel.__name__, variant, *((each is None, each is True) for each in arguments))
        assert compiled.setdefault(key, repr(found)) == repr(found), key

    monkeypatch.setattr(Launch, "__call__", look)
    monkeypatch.setattr(Launch, "compile", look)
    num_launches = 0
    for seed in range(40):
        kind, table = [*UNIFORM_KINDS[:3], "packed extend"][seed % 4], (RequestTable, BlockTable)[seed // 4 % 2]
        case = Case(kind, PAGE_SIZES[seed // 8 % 4], seed, form=table, sizes=(1, 2, 16))
        forms = [FORMS["ragged"], FORMS["csr"]]
        forms += [FORMS["block_table"]] * (kind not in PACKED_KINDS) + [RINGS["small"][1].form] * (
            kind in COMPRESSED_KINDS
        )
        for form in forms:
            for is_along in (False, True):
                buffers = garbage(form.specs, case)
                plan = form.bind(case.step, buffers)
                if is_along:
                    written_along(plan, buffers)
                plan()
            num_launches += 1
            if kind not in PACKED_KINDS:
                own = seed % 3 == 0
                given = engine(case, 0, counted=own or kind == "draft chain", with_slots=own)
                static, *_ = statics(case, 0)
                form.bind(static, garbage(form.specs, case), given.bind(static, case))()
                num_launches += 1
        bind_inputs(pad_step(case.step, case.bucket(0), case.capacity))(case.step)(case.step)
    assert len(compiled) < num_launches


NO_SLOTS_KINDS = ["decode", "draft chain", "draft tree", "verify tree", "packed extend"]


@pytest.mark.parametrize("table", [RequestTable, BlockTable])
@pytest.mark.parametrize("kind", NO_SLOTS_KINDS)
def test_slots_that_were_left_out_are_looked_up_by_the_launch(kind: str, table: type) -> None:
    """Of the plan, and of the copy of inputs; the number of requests is the host's."""
    for seed, page_size in enumerate((1, 16)):
        case = Case(kind, page_size, seed, form=table, context=40, has_slots=False)
        assert case.step.out_cache_loc is None
        assert case.step.num_real == case.bs
        for name, form in FORMS.items():
            if name != "block_table" or kind not in PACKED_KINDS:
                check_equal(form, case)
        check_inputs(case, 3)
    if kind in COMPRESSED_KINDS:
        page_size, rings = RINGS["small"]
        check_equal(rings.form, Case(kind, page_size, 1, form=table, has_slots=False))


@pytest.mark.parametrize("table", [RequestTable, BlockTable])
def test_no_slot_is_looked_up_outside_of_a_row(table: type) -> None:
    """Where there are more tokens than the table has room for, or fewer than none, slots are the reserved page's."""
    case = Case("verify chain", 16, 0, form=table, has_slots=False)
    for length in (case.paging.row_tokens - 1, 10**6, -3):
        lens = case.step.seq_lens.clone().fill_(length)
        case.step = replace(case.step, seq_lens=lens)
        assert RESERVED * 16 in case.step.flat_slots().tolist()
        buffers = garbage(FORMS["ragged"].specs, case)
        FORMS["ragged"].bind(case.step, buffers)()
        assert buffers["write_slots"][0].tolist() == case.step.flat_slots().tolist()
        check_inputs(case, 1)


@pytest.mark.parametrize("num_real", [0, 1])
def test_rows_behind_those_that_the_host_says_are_real_are_padding(num_real: int) -> None:
    case = Case("verify chain", 16, 0, form=BlockTable)
    case.step = replace(case.step, num_real=num_real)
    check_equal(FORMS["csr"], case)
    check_inputs(case, 1)


@pytest.mark.parametrize("name", ["ragged", "csr"])
def test_packed_padding_has_the_lengths_that_it_is_given(name: str) -> None:
    case = Case("packed extend", 16, 0, form=BlockTable)
    case.step = replace(case.step, num_real=1)
    check_equal(FORMS[name], case)
