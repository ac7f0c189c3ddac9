"""Refusals that a backend of compressed keys must give: pages that cut blocks, and steps that lose states."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import CheckFailure, Measured, Subject, check
from attn_backends.conformance.checks_refusals import refused
from attn_backends.conformance.compressed_worlds import CompressedWorld, is_compressed
from attn_backends.conformance.exercise import batch_of, prepare_memory, scene_of, setup_of, world_of
from attn_backends.conformance.situations import Cases, eager, one_page_size
from attn_backends.errors import UnsupportedStepError
from spec_metadata import Step, StepKind


def _asked(feature: str, **changes: Any) -> Cases:
    """A verify of a layer with all entries, at one page size."""
    verifies = one_page_size(eager((StepKind.TARGET_VERIFY,), lens=(5, 3), feature=feature, **changes))

    def cases(subject: Subject) -> list[Case]:
        found = verifies(subject) if is_compressed(subject.backend) else []
        return [case for case in found if case.layer == "entries"]

    return cases


def _refusal(subject: Subject, case: Case) -> UnsupportedStepError | None:
    """Why a case's backend is not made, if it is refused."""
    try:
        world_of(setup_of(subject, case))
    except UnsupportedStepError as refusal:
        return refusal
    return None


@check("compressed.refuses_cut_blocks", _asked("a page that cuts a block", page_size=18))
def refuses_cut_blocks(subject: Subject, case: Case) -> Measured:
    """A page that is no whole number of blocks, also one of a single token, is refused before anything is planned. A
    size that the refusal recommends is taken.
    """
    reasons: list[str] = []
    for page_size in (case.page_size, 1):
        refusal = _refusal(subject, replace(case, page_size=page_size))
        if refusal is None:
            raise CheckFailure(case.feature, f"pages of {page_size} tokens were taken")
        for size in map(int, re.findall(r"page size (\d+)", refusal.nearest)):
            if again := _refusal(subject, replace(case, page_size=size)):
                raise CheckFailure(case.feature, f"recommended instead, and refused: {'; '.join(again.reasons)}")
        reasons += refusal.reasons
    return Measured(refusal="; ".join(reasons))


@check("compressed.refuses_lost_states", _asked("more rows than states are kept for"))
def refuses_lost_states(subject: Subject, case: Case) -> Measured:
    """A verify of one row more than a rejection could take back, a draft of a forward more than its extend could, and a
    prefix that ends inside a page.
    """
    world = world_of(setup_of(subject, case))
    assert isinstance(world, CompressedWorld)
    assert world.layer.compression is not None
    scene, backend = scene_of(world, batch_of(case), case.seed), world.backend
    prepare_memory(scene, case)
    lens, page_size = torch.tensor(case.lens, device=world.device), world.geometry.page_size
    most = world.ring - world.layer.compression.read_window + 2
    wide = Step.target_verify(most + 1, lens, scene.paging(), seq_lens_cpu=case.lens)
    long = Step.draft_decode(1, most + 1, lens, scene.paging(), seq_lens_cpu=case.lens)  # of as many forwards as most
    check_prefix = backend.check_prefix  # type: ignore[attr-defined]
    check_prefix(2 * page_size)
    return refused(
        case.feature,
        scene,
        lambda: backend.init_forward_metadata(wide),
        lambda: backend.init_forward_metadata(long),
        lambda: check_prefix(page_size + 1),
    )
