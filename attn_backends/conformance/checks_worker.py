"""What a worker does to a cache between steps: accepted tokens are moved to the slots that their positions have."""

from __future__ import annotations

import torch

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import Measured, Subject, check
from attn_backends.conformance.comparisons import compare_identical
from attn_backends.conformance.exercise import batch_of, prepare_memory, scene_of, setup_of, world_of
from attn_backends.conformance.situations import eager
from spec_metadata import StepKind


def _dense(subject: Subject) -> list[Case]:
    """A verify of every page size and dense format."""
    return [case for case in eager((StepKind.TARGET_VERIFY,), poison="finite")(subject) if not case.layer]


@check("worker.moves", _dense)
def moves(subject: Subject, case: Case) -> Measured:
    """`cache.move` copies whole tokens, keys and values alike, inside pages and across them, as if all were read before
    any is written: onto each other's places too. Nothing else changes.
    """
    world = world_of(setup_of(subject, case))
    scene = scene_of(world, batch_of(case), case.seed)
    before = prepare_memory(scene, case)
    slots = [slot for request in scene.requests for slot in request.slots.values()]
    order = torch.randperm(len(slots), generator=torch.Generator().manual_seed(case.seed)).tolist()
    sources = torch.tensor(slots, device=world.device)
    destinations = torch.tensor([slots[place] for place in order], device=world.device)
    world.cache.move(sources, destinations)
    expected = before.clone()
    expected.flatten(0, 1)[destinations] = before.flatten(0, 1)[sources]
    planes = 2 if case.format == "kv" else 1
    compare_identical("cache", world.memory[:, :, :planes].flatten(0, 1), expected[:, :, :planes].flatten(0, 1))
    return Measured()
