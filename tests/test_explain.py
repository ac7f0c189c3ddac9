"""Pictures of metadata: examples are right on every backend, and a wrong value of a buffer is marked where it lies."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch

from attn_backends.backends.fa3 import FA3Backend
from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import Subject
from attn_backends.errors import ConfigError, UnsupportedStepError
from attn_backends.explain import Reader, examples, explain, to_html, to_svg, to_text
from attn_backends.explain.examples import EXAMPLES, example_picture
from attn_backends.explain.from_case import case_picture
from attn_backends.explain.tables import Line, Wrong, _shortened
from attn_backends.registry import get_backend
from spec_metadata import BlockTable, CacheGeometry, Capacity, Step, StepKind
from tests.test_report import OneKeyShort
from tests.torch_kernels import torch_kernel

RIGHT = torch_kernel(FA3Backend)
BACKENDS = ["dsv4", "fa3", "flashinfer_mla", "reference", "trtllm_mla"]
REFUSED = {("dsv4", "tree"), ("dsv4", "draft-tree"), ("trtllm_mla", "packed")}
LENS = (7, 40)
PLANTS = [  # a buffer, the index of a value in it, what is added to it, and the rows that are wrong by it
    ("flashinfer_mla", "kv_len", (1,), -1, {4, 5, 6, 7}),
    ("flashinfer_mla", "kv_indices", (4,), 1, {4, 5, 6, 7}),
    ("trtllm_mla", "cache_seqlens", (0, 1), 1, {4, 5, 6, 7}),
    ("trtllm_mla", "block_table", (0, 0), 1, {0, 1, 2, 3}),
    ("fa3", "seqused_k", (0, 0), -1, {0, 1, 2, 3}),
    ("fa3", "page_table", (1, 1), 1, {4, 5, 6, 7}),
    ("dsv4", "window_slots", (0, 5, 2), 9, {5}),
    ("dsv4", "window_lens", (0, 6), -1, {6}),
    ("dsv4", "num_entries_4", (0, 7), -1, {7}),
    ("reference", "num_visible", (0, 4), 1, {4}),
    ("reference", "slots", (1, 3), 64, {4, 5, 6, 7}),
    *((backend, "write_slots", (0, 2), 1, {2}) for backend in BACKENDS),
]


def verify(backend: str | type, *, tree: bool = False) -> tuple[object, Step]:
    """A backend, and a verify of 4 tokens of two requests."""
    made = get_backend(backend) if isinstance(backend, str) else backend
    page_size = max(32, made.page_multiple())
    capacity = Capacity(max_bs=3, max_context=64, page_size=page_size, topk=2 if tree else 1, num_steps=3,
                        num_draft_tokens=4)  # fmt: skip
    geometry = CacheGeometry(2 * capacity.max_pages + 3, page_size)
    pages = torch.arange(1, 1 + 2 * capacity.max_pages).view(2, -1)
    mask = torch.ones(2, 4, 4, dtype=torch.bool).tril() if tree else None
    step = Step.target_verify(4, torch.tensor(LENS), BlockTable(pages, geometry), tree_mask=mask)
    return made(capacity, geometry, kernel="torch"), step


def reader_of(backend, step, path):
    """A reader of the step's metadata."""
    if path == "eager":
        return Reader(backend.init_forward_metadata(step))
    meta = backend.capture(step.bucket(3), step.paging)
    reader = Reader(meta)
    backend.replay(meta, step)
    return reader


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("example", sorted(EXAMPLES))
@pytest.mark.parametrize("backend", BACKENDS)
def test_examples_are_right_on_every_backend_that_takes_them(backend, example, captured):
    if (backend, example) in REFUSED:
        with pytest.raises(UnsupportedStepError):
            example_picture(get_backend(backend), example, captured=captured)
        return
    picture = example_picture(get_backend(backend), example, captured=captured)
    assert picture.is_right, picture.verdict
    assert [owned.committed for owned in picture.requests] == list(examples.LENS)
    padded = [row for rows in picture.forwards for row in rows if row.law is None]
    assert bool(padded) is captured
    assert not any(table.is_marked for table in picture.buffers)
    assert not picture.apart


@pytest.mark.parametrize("path", ["eager", "graph"])
@pytest.mark.parametrize(("name", "buffer", "index", "added", "rows"), PLANTS, ids=[f"{p[0]}-{p[1]}" for p in PLANTS])
def test_a_wrong_value_in_a_buffer_is_marked_where_it_lies(name, buffer, index, added, rows, path):
    backend, step = verify(name)
    reader = reader_of(backend, step, path)
    assert explain(reader, step).is_right
    reader.meta.buffers[buffer][index] += added
    picture = explain(reader, step)
    assert {row.number for _, row in picture.wrong_rows} == rows
    (table,) = (table for table in picture.buffers if table.name == buffer)
    assert table.is_marked
    assert all(
        (other.name == "write_slots") is (buffer == "write_slots") for other in picture.buffers if other.is_marked
    )
    value = str(int(reader.meta.buffers[buffer][index]))
    marked = [v for line in table.lines for v, is_marked in zip(line.values, line.marked, strict=True) if is_marked]
    assert value in marked
    assert len(marked) < sum(len(line.values) for line in table.lines), "the other request's values are not marked"
    text = to_text([picture])
    assert f">{value}<" in text
    assert all(f"! row {number}" in text for number in rows)
    assert text.count("\n! row ") == len(rows)


@pytest.mark.parametrize("path", ["eager", "graph"])
@pytest.mark.parametrize(("buffer", "index"), [
    ("qo_indptr", (2,)),
    ("entry_writes_4", (0, 1)),
    ("entry_positions_4", (0, 0)),
    ("input_rows_4", (0, 0, 7)),
    ("state_reads_4", (0, 0, 4)),
    ("state_writes_4", (0, 5)),
])  # fmt: skip
def test_a_wrong_value_that_only_a_store_reads_is_marked(buffer, index, path):
    backend, step = verify("dsv4")
    reader = reader_of(backend, step, path)
    assert not explain(reader, step).stored
    right = int(reader.meta.buffers[buffer][index])
    reader.meta.buffers[buffer][index] -= 1 if right else -1
    picture = explain(reader, step)
    assert not picture.is_right
    wrong = int(reader.meta.buffers[buffer][index])
    assert picture.stored == (f"{buffer} {list(index)} is {wrong}, not {right}",)
    assert [table.name for table in picture.buffers if table.is_marked] == [buffer]
    assert f">{wrong}<" in to_text([picture])
    assert picture.verdict.endswith(picture.stored[0])


def test_what_a_store_reads_is_told_of_an_idle_replay_too():
    backend, step = verify("dsv4")
    meta = backend.capture(step.bucket(3), step.paging)
    backend.replay(meta, step)
    stale = {name: meta.buffers[name].clone() for name in ("entry_writes_4", "state_writes_4")}
    reader, idle = Reader(meta), Step.idle(BlockTable(step.paging.table[:0], step.paging.geometry))
    backend.replay(meta, idle)
    assert explain(reader, idle).is_right
    for name, values in stale.items():
        meta.buffers[name].copy_(values)
    told = explain(reader, idle).stored
    assert [each.split()[0] for each in told] == list(stale)


@pytest.mark.parametrize("path", ["eager", "graph"])
def test_a_step_of_another_layout_is_drawn_by_its_rows_alone(path):
    backend, step = verify("dsv4")
    reader = reader_of(backend, step, path)
    other = Step.target_verify(4, torch.tensor([9]), BlockTable(step.paging.table[:1], step.paging.geometry))
    assert explain(reader, other).wrong_rows


@pytest.mark.parametrize("path", ["eager", "graph"])
def test_a_wrong_tree_mask_is_marked(path):
    backend, step = verify("fa3", tree=True)
    reader = reader_of(backend, step, path)
    reader.meta.at(0).tree.mask[1, 2, 0] = False
    picture = explain(reader, step)
    assert [(row.number, len(row.faults)) for _, row in picture.wrong_rows] == [(6, 1)]
    (table,) = (table for table in picture.buffers if table.name == "tree.mask")
    assert [line.label for line in table.lines if any(line.marked)] == ["request 1"]


@pytest.mark.parametrize(("name", "buffer", "index", "wrong"), [
    ("reference", "slots", (5, 30), 77),
    ("fa3", "page_table", (1, 30), 77),
    ("fa3", "write_slots", (0, 30), 77),
])  # fmt: skip
def test_a_wrong_value_behind_the_first_ones_is_shown_with_its_position(name, buffer, index, wrong):
    capacity = Capacity(max_bs=12, max_context=64, page_size=1, topk=1, num_steps=3, num_draft_tokens=4)
    geometry = CacheGeometry(12 * capacity.max_pages + 3, 1)
    pages = torch.arange(1, 1 + 12 * capacity.max_pages).view(12, -1)
    step = Step.target_verify(4, torch.tensor([40] * 12), BlockTable(pages, geometry))
    reader = reader_of(get_backend(name)(capacity, geometry, kernel="torch"), step, "eager")
    reader.meta.buffers[buffer][index] = wrong
    picture = explain(reader, step)
    assert f"… [30] >{wrong}< " in to_text([picture])
    for drawn in (to_svg([picture]), to_html([picture])):
        assert re.search(rf"… \[30\] <[^>]*>{wrong}</", drawn)


def test_of_many_marked_lines_the_one_with_a_wrong_value_is_shown_and_others_are_counted():
    lines = [Line(f"row {n}", ("1", "77" if n == 40 else "2"), (True, True)) for n in range(50)]
    shown = _shortened(lines, Wrong(values={77}))
    assert [line.label for line in shown[7:9]] == ["row 7", "row 8"]
    assert shown[15].label == "row 40"
    assert shown[-1].label == "34 lines more, 34 of them marked"


class KeepsOldLengths(FA3Backend):
    """A kernel gets the lengths of the capture, whatever a replay writes into the declared buffers."""

    def plans(self, step, buffers):
        """Plans with lengths of their own."""
        return tuple(replace(plan, seqused_k=plan.seqused_k.clone()) for plan in super().plans(step, buffers))


def test_what_a_kernel_gets_is_read_and_not_what_the_buffers_hold():
    backend, step = verify(KeepsOldLengths)
    assert explain(reader_of(backend, step, "eager"), step).is_right
    picture = explain(reader_of(backend, step, "graph"), step)
    assert {row.number for _, row in picture.wrong_rows} == set(range(8)), "all see what the padding of a capture sees"
    lengths = next(table for table in picture.buffers if table.name == "seqused_k")
    assert lengths.lines[0].values == ("11", "44", "4"), "they are right in the buffer"
    assert "wrong; its kernel reads RaggedPlan.seqused_k, in no declared buffer: those may" in to_text([picture])


LONGEST = {"tokens": 0}


def cut_launch(q, cache, plan, layer):
    """Attention over as many tokens as the host says, which a graph keeps from its capture."""
    return RIGHT.launch(q, cache, replace(plan, seqused_k=plan.seqused_k.clamp(max=LONGEST["tokens"])), layer)


class FreezesANumber(FA3Backend):
    """The host tells its kernel the longest request, anew with every step."""

    kernels = (replace(RIGHT, launch=cut_launch),)

    def copy_inputs(self, meta, step):
        """As ever, and the number."""
        super().copy_inputs(meta, step)
        LONGEST["tokens"] = int(step.seq_lens.max()) + step.width


def test_captured_metadata_is_read_through_a_graph():
    backend, step = verify(FreezesANumber)
    LONGEST["tokens"] = 4
    picture = explain(reader_of(backend, step, "graph"), step)
    assert {row.number for _, row in picture.wrong_rows} == set(range(8))


def test_a_padded_row_outside_of_the_reserved_page_is_wrong():
    backend, step = verify("fa3")
    reader = reader_of(backend, step, "graph")
    reader.meta.buffers["page_table"][2, 0] = 1
    reader.meta.buffers["write_slots"][0, 10] = 99
    picture = explain(reader, step)
    assert {row.number for _, row in picture.wrong_rows} == {8, 9, 10, 11}
    faults = {row.number: row.faults for _, row in picture.wrong_rows}
    assert faults[8] == ("sees slot 32 outside of the reserved page 0",)
    assert faults[10][1] == "writes slot 99 outside of the reserved page 0"


def test_a_slot_that_is_read_twice_is_told():
    backend, step = verify("dsv4")
    reader = reader_of(backend, step, "eager")
    reader.meta.buffers["window_slots"][0, 0, 1] = reader.meta.buffers["window_slots"][0, 0, 2]
    ((_, row),) = explain(reader, step).wrong_rows
    assert row.faults == ("does not see slot 134", "sees slot 133 more than once")


def test_a_value_that_no_kernel_may_read_is_told_and_not_read():
    backend, step = verify("fa3")
    reader = reader_of(backend, step, "eager")
    reader.meta.buffers["page_table"][0, 0] = 10**6
    picture = explain(reader, step)
    assert not picture.is_right
    assert not picture.forwards
    assert "page_table holds [0, 1000000], declared [0, " in picture.verdict
    marked = [value for table in picture.buffers for line in table.lines for value, is_marked
              in zip(line.values, line.marked, strict=True) if is_marked]  # fmt: skip
    assert marked == ["1000000"]
    assert "page_table" in to_svg([picture])


def test_buffers_that_break_a_kernel_are_told():
    """Of 4 query rows a request at most, one has 5."""
    backend, step = verify("flashinfer_mla")
    reader = reader_of(backend, step, "eager")
    reader.meta.buffers["qo_indptr"][1] += 1
    assert explain(reader, step).verdict.startswith("the kernel can't read its buffers: index 4 is out of bounds")


def test_a_cache_too_large_for_a_picture_is_refused():
    capacity = Capacity(1, 64, 64)
    backend = get_backend("fa3")(capacity, CacheGeometry(1024, 64))
    step = Step.decode(torch.tensor([3]), BlockTable(torch.ones(1, 3, dtype=torch.int64), backend.geometry))
    with pytest.raises(ConfigError, match="65536 slots is too large for a picture"):
        explain(backend.init_forward_metadata(step), step)


CASES = [
    Case("math.target_verify", "target_verify", lens=(17, 3)),
    Case("math.draft_decode", "draft_decode", topk=2, lens=(17, 3)),
    Case("math.packed_draft_extend", "draft_extend", widths=(2, 1), lens=(17, 3), table="block"),
    Case("math.ragged_verify", "target_verify", widths=(2, 1), lens=(17, 3)),
    Case(
        "graph.bound_ragged",
        "draft_extend",
        "graph",
        lens=(17, 3),
        widths=(2, 1),
        captured_lens=(3,),
        captured_widths=(4,),
        bs=3,
        num_tokens=8,
        ragged=True,
    ),
    Case("graph.padded", "target_verify", "graph", lens=(17,), captured_lens=(3, 4), bs=3, topk=2),
    Case("graph.padded", "target_verify", "graph", lens=(), captured_lens=(3, 4), bs=3),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_conformance_case_has_a_picture(case):
    assert case_picture(Subject(FA3Backend, "torch"), case).is_right


def test_a_case_that_its_world_can_not_hold_is_refused():
    with pytest.raises(ConfigError, match="requests of 300 committed tokens, and its world holds"):
        case_picture(Subject(FA3Backend, "torch"), replace(CASES[0], lens=(300,)))


def test_the_wrong_rows_of_a_conformance_case_are_marked():
    picture = case_picture(Subject(OneKeyShort, "torch"), CASES[0])
    wrong = [row for _, row in picture.wrong_rows]
    assert {row.law.request for row in wrong} == {0, 1}
    assert all("does not see slot" in row.faults[0] for row in wrong)
    text = to_text([picture])
    assert "WRONG: 8 of 8 rows are wrong: each misses its own last key, as where a length is one short\n" in text
    assert "does not see slot" not in text, "a line for all"


class TailPlanned(FA3Backend):
    """Takes the engine's page table as it is, with what lies past the requests' pages."""

    kernels = (RIGHT,)

    def write(self, step, buffers):
        super().write(step, buffers)
        buffers["page_table"].copy_(step.paging.pages(buffers["page_table"].shape[1]))


@pytest.mark.parametrize(
    "case",
    [Case("poison.table_tail", "decode", lens=(17, 3)), replace(CASES[5], check="poison.planned_tails", lens=(3,))],
)
def test_pages_past_those_of_a_request_are_in_the_picture_of_their_check(case):
    picture = case_picture(Subject(TailPlanned, "torch"), case)
    assert not picture.is_right
    assert re.match(r"page_table holds \[\d+, \d+\], declared \[0, \d+\)", picture.verdict)
    assert [table.name for table in picture.buffers if table.is_marked] == ["page_table"]
    assert case_picture(Subject(FA3Backend, "torch"), case).is_right


def test_the_picture_of_a_compressed_case_has_its_entries():
    case = Case("compressed.edges", "target_verify", format="compressed", page_size=16, lens=(17, 3), layer="entries")
    picture = case_picture(Subject(get_backend("dsv4"), "torch"), case)
    assert picture.is_right, picture.verdict
    assert picture.step.startswith("target verify")
    assert sum(picture.forwards[0][0].seen[4].values()) == 18 // 4


def test_backends_that_read_the_same_share_the_grids():
    pictures = [example_picture(get_backend(name), "chain") for name in ("fa3", "trtllm_mla", "dsv4")]
    text = to_text(pictures)
    assert text.count("request 0: 30 committed tokens") == 2
    assert [text.count(f"buffers of {name}") for name in ("fa3", "trtllm_mla", "dsv4")] == [1, 1, 1]


def test_svg_and_html_are_well_formed_and_say_what_is_wrong():
    backend, step = verify("fa3")
    reader = reader_of(backend, step, "eager")
    right = explain(reader, step)
    reader.meta.buffers["seqused_k"][0, 1] -= 1
    wrong = explain(reader, step)
    for picture, told in ((right, False), (wrong, True)):
        root = ElementTree.fromstring(to_svg([picture]))
        words = [element.text for element in root.iter() if element.get("class", "").startswith("wrong")]
        assert ("✗ row 4 · pos 40" in words) is told
        assert ("<mark>43</mark>" in to_html([picture])) is told
    assert {row.law.position for _, row in wrong.wrong_rows} == {40, 41, 42, 43}


def test_a_draft_of_several_forwards_shows_each():
    picture = example_picture(get_backend("fa3"), "draft-tree")
    assert len(picture.forwards) == 2
    sees = [sum(row.seen[0].values()) for row in picture.forwards[1]]
    assert sees == [32, 32, 142, 142]
    assert picture.step.startswith(str(StepKind.DRAFT_DECODE).replace("_", " "))
