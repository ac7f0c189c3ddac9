"""Compressions that are given as data: all of DeepSeek-V4's and V4.1's ratios in one model, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_backends.backends.dsv4 import DSV4Backend
from attn_backends.compressed_cache import CompressedFormat
from attn_backends.conformance.cases import Case
from attn_backends.conformance.checks_compressed import measure_together
from attn_backends.conformance.compressed_worlds import LAYERS, SHORT, SHORT_LAYERS, CompressedWorld
from attn_backends.conformance.worlds import Setup, World
from attn_backends.errors import UnsupportedStepError
from spec_metadata import CacheGeometry, Capacity, InvalidStepError, StepKind
from spec_metadata.plans.compressed import Compression, buffer_specs

PAGE_SIZE = 256
ALL = (*SHORT, *DSV4Backend.compressions)
KINDS = (StepKind.DECODE, StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND)


def check_together(case: Case, device: str = "cpu", kernel: str = "torch") -> None:
    """Layers of ratios 0, 1, 2, 4 and 128 store and attend as the oracle does, on one plan of one backend."""
    setup = Setup(
        DSV4Backend.of((None, *ALL)),
        CompressedFormat.COMPRESSED,
        PAGE_SIZE,
        dtype=torch.float64 if kernel == "torch" else torch.bfloat16,
        block_table=case.table == "block",
        checking=False,
        kernel=kernel,
        device=device,
    )
    worlds: list[World] = [CompressedWorld(replace(setup, layer=layer)) for layer in (*LAYERS, *SHORT_LAYERS)]
    ratios = [0 if world.layer.compression is None else world.layer.compression.ratio for world in worlds]
    assert sorted(ratios) == [0, 1, 2, 4, 128]
    measure_together(worlds, case)


def cases() -> list[Case]:
    """Each kind eagerly and through a graph that was captured on other requests, and a packed prompt."""
    common = Case("compressed.layers_of_one_model", "", format="compressed", page_size=PAGE_SIZE, lens=(250, 126, 383))
    graph = {"path": "graph", "captured_lens": (1, 130), "bs": 4}
    found = [replace(common, kind=kind, **path) for kind in KINDS for path in ({}, graph)]
    return [*found, replace(common, kind=StepKind.PREFILL, lens=(0, 125, 255), widths=(131, 4, 2), table="block")]


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.kind}-{case.path}")
def test_layers_of_every_ratio_share_a_step(case: Case) -> None:
    check_together(case)


def test_an_entry_of_one_token_may_be_made_of_the_one_before_too() -> None:
    """Blocks of one token that overlap: the first of a step reads the state of the last one of the step before."""
    backend = DSV4Backend.of([Compression(1, overlap=True)], window=3)
    setup = Setup(backend, CompressedFormat.COMPRESSED, 4, checking=False, layer="entries")
    case = Case("compressed.layers_of_one_model", "target_verify", format="compressed", page_size=4, lens=(1, 7, 8))
    measure_together([CompressedWorld(setup)], case)


def test_a_backend_of_the_compressions_that_layers_have() -> None:
    backend = DSV4Backend.of([None, ALL[3], ALL[1], None, ALL[1], ALL[0]])
    assert (backend.compressions, backend.window, backend.name) == ((ALL[3], ALL[1], ALL[0]), 128, "dsv4")
    assert backend.page_multiple() == 128
    names = [spec.name for spec in backend.buffers(StepKind.DECODE)]
    assert names == [spec.name for spec in buffer_specs(128, (ALL[3], ALL[1], ALL[0]))]
    windows = DSV4Backend.of([None], window=7).buffers(StepKind.DECODE)[2]
    assert str(windows).startswith("window_slots [num_forwards, num_tokens, 7]")
    assert DSV4Backend.compressions == (Compression(4, overlap=True, indexed=True), Compression(128)), "the default"
    assert DSV4Backend.of(ALL).of([ALL[0]]).window == 128


def test_what_is_refused() -> None:
    with pytest.raises(InvalidStepError, match=r"1 or more, got 0; for none say None"):
        Compression(0)
    clash = r"dsv4.*Compression\(ratio=4, overlap=False.* beside Compression\(ratio=4, overlap=True.*has one form"
    with pytest.raises(UnsupportedStepError, match=clash):
        DSV4Backend.of([*ALL, Compression(4)])
    with pytest.raises(UnsupportedStepError, match=r"blocks of 1 and 2 and 4 and 128 tokens must not cross pages"):
        DSV4Backend.of(ALL)(Capacity(2, 100, 192), CacheGeometry(9, 192))
    setup = Setup(DSV4Backend.of(ALL), CompressedFormat.COMPRESSED, PAGE_SIZE, checking=False, layer="pairs")
    world = CompressedWorld(setup)
    world.backend = DSV4Backend(world.capacity, world.geometry)
    case = Case("compressed.layers_of_one_model", "decode", format="compressed", page_size=PAGE_SIZE, lens=(5,))
    with pytest.raises(
        UnsupportedStepError, match=r"layer 0: .*Compression\(ratio=2.* \(it plans Compression\(ratio=4"
    ):
        measure_together([world], case)


if torch.cuda.is_available():

    @pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.kind}-{case.path}")
    def test_layers_of_every_ratio_share_a_step_on_a_gpu(case: Case) -> None:
        check_together(replace(case, dtype="bfloat16"), "cuda", "triton")
