"""The suite on compressed keys: its oracle, and the vendor's kernel with a stand-in for the vendor's call."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.backends.dsv4 import DSV4Backend
from attn_backends.conformance import Outcome, Report, comparisons, compressed_oracle, exercise, run_conformance
from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import CheckFailure, Subject
from attn_backends.conformance.comparisons import compare_memory
from attn_backends.conformance.compressed_scenes import CompressedScene
from attn_backends.conformance.compressed_worlds import CompressedWorld
from attn_backends.conformance.exercise import Ran
from attn_backends.kernels import fp8_pages
from attn_backends.vendors import flashmla_sparse
from tests.flashmla_sparse_stand_in import CALLS
from tests.vendor_stand_ins import install

AT_8_BITS = Case(
    check="scale.edges",
    kind="target_verify",
    format="compressed",
    page_size=128,
    dtype="bfloat16",
    lens=(1, 2, 3, 4),
    cache_dtype="float8_e4m3fn",
    layer="selected",
)
GOOD = {Outcome.PASS, Outcome.REFUSED}


def test_the_oracle_writes_the_8_bit_format() -> None:
    rows = torch.randn(40, 512, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 4, 40).unsqueeze(1)
    rows[0], rows[1, :64] = 0, 448.0
    for row in rows:
        elements, scales = compressed_oracle.quantised(row)
        assert torch.equal(torch.cat((elements, scales)), fp8_pages.quantise(row))
        assert torch.equal(
            compressed_oracle.dequantised(elements, scales), fp8_pages.dequantise(fp8_pages.quantise(row))
        )


def test_a_selection_is_clear_or_all() -> None:
    scores = [0.5, 2.0, -1.0, 1.9]
    assert compressed_oracle.best(scores, 2) == [1, 3]
    assert compressed_oracle.gap(scores, 2) == pytest.approx(1.4)
    assert compressed_oracle.best(scores, 4) == [0, 1, 2, 3]
    assert compressed_oracle.gap(scores, 4) == float("inf")


def ran_at_8_bits() -> tuple[Ran, Tensor]:
    """A verify over 8-bit pages, and the bytes of the last entry that it made: a view of the memory."""
    world = exercise.world_of(exercise.setup_of(Subject(DSV4Backend, "torch"), AT_8_BITS))
    ran = exercise.run_eagerly(exercise.scene_of(world, exercise.batch_of(AT_8_BITS)), AT_8_BITS)
    scene, row = ran.scene, ran.scene.rows[0][-1]
    assert isinstance(scene, CompressedScene)
    (block,) = scene._closed_by(scene._position(row))
    slot = scene._entry_slot(scene.requests[row.request], block)
    return ran, scene._bytes("compressor entries", scene.world.pools(scene.world.memory)["compressor entries"], slot)[0]


def test_outputs_are_held_against_the_entries_that_a_step_made() -> None:
    """Where an entry lies between two numbers, processors store either: the rows that see it differ by that."""
    ran, entry = ran_at_8_bits()
    exact = ran.scene.expected_output(ran.inputs, 0)[1][-1]
    compare_memory(ran.scene, ran.before)
    assert torch.equal(ran.scene.expected_output(ran.inputs, 0)[1][-1], exact)
    entry[0] ^= 1  # the neighbour of an element
    compare_memory(ran.scene, ran.before)
    other = ran.scene.expected_output(ran.inputs, 0)[1][-1]
    assert 1e-5 < float((other - exact).abs().max()) < 0.1


def test_checks_compare_memory_before_outputs() -> None:
    folder = Path(comparisons.__file__).parent
    for path in folder.glob("checks_*.py"):
        late = re.findall(r"compare_outputs\([^\n]*\n +compare_memory\(", path.read_text(encoding="utf-8"))
        assert not late, f"{path.name}: {late}"


def test_a_writer_may_leave_the_byte_that_pads_scales() -> None:
    ran, _ = ran_at_8_bits()
    world = ran.scene.world
    assert isinstance(world, CompressedWorld)
    rows, per_page = world.pools(world.memory)["rows"], world.places["rows"].shape[0]
    owned = ran.scene.slots_of(0)[0]
    scales = rows[owned // per_page, per_page * compressed_oracle.DATA :]
    place = owned % per_page * compressed_oracle.SCALES
    before = world.tokens_in(world.memory)[owned]
    scales[place + 7] ^= 0xFF
    compare_memory(ran.scene, ran.before)
    assert torch.equal(world.tokens_in(world.memory)[owned], before)
    scales[place + 6] ^= 0x01
    with pytest.raises(CheckFailure, match="rows"):
        compare_memory(ran.scene, ran.before)


def test_an_entry_that_is_no_neighbour_is_wrong() -> None:
    ran, entry = ran_at_8_bits()
    entry[0] ^= 0x30
    with pytest.raises(CheckFailure, match="over the budget"):
        compare_memory(ran.scene, ran.before)


def on_cpu() -> type[AttentionBackend]:
    """The backend with FlashMLA's kernel alone, which its stand-in lets run here."""
    kernel = replace(flashmla_sparse.KERNEL, unavailable_reasons=lambda device: [], architectures=frozenset())
    return type("FlashMLAOnCPU", (DSV4Backend,), {"kernels": (kernel,)})


def check_stand_in(monkeypatch: pytest.MonkeyPatch, **options: object) -> Report:
    """Every selected case is right."""
    install(monkeypatch, CALLS)
    report = run_conformance(on_cpu(), kernel=flashmla_sparse.NAME, **options)
    assert [(row.check, row.case, row.reason) for row in report.rows if row.status not in GOOD] == []
    assert {row.case.cache_dtype for row in report.rows if row.check.startswith("math.")} == {"float8_e4m3fn"}
    return report


def test_flashmla_conforms_over_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_stand_in(monkeypatch, quick=True, select="math.*").executed > 15


@pytest.mark.full
def test_flashmla_conforms_over_a_stand_in_in_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_stand_in(monkeypatch, quick=True).executed > 150
