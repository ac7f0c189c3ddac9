"""The suite on compressed keys: its oracle, and the vendor's kernel with a stand-in for the vendor's call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_backends.backend import AttentionBackend
from attn_backends.backends.dsv4 import DSV4Backend
from attn_backends.conformance import Outcome, Report, compressed_oracle, run_conformance
from attn_backends.kernels import fp8_pages
from attn_backends.vendors import flashmla_sparse
from tests.flashmla_sparse_stand_in import CALLS
from tests.vendor_stand_ins import install

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
