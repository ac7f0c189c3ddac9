"""What a worker does to a cache between steps: accepted tokens are moved to the slots that their positions have."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_backends.conformance.cases import CACHE_DTYPES, Case
from attn_backends.conformance.catalogue import Measured, Subject, check
from attn_backends.conformance.comparisons import compare_identical
from attn_backends.conformance.exercise import batch_of, prepare_memory, scene_of, setup_of, world_of
from attn_backends.conformance.situations import eager
from spec_metadata import StepKind


def _dense(subject: Subject) -> list[Case]:
    """A verify of every page size and dense format, and of every declared type of an 8-bit cache."""
    kind = StepKind.TARGET_VERIFY
    found = [case for case in eager((kind,), poison="finite")(subject) if not case.layer]
    declared = subject.capabilities[kind].cache_dtypes if found else ()
    eight_bit = [name for name, dtype in CACHE_DTYPES.items() if dtype in declared]
    return found + [replace(case, cache_dtype=name) for case in found if not case.cache_dtype for name in eight_bit]


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
    tokens = before.flatten(0, 1).contiguous().view(torch.uint8)
    expected = tokens.clone()
    expected[destinations] = tokens[sources]
    planes = 2 if case.format == "kv" else 1
    actual = world.memory.flatten(0, 1).view(torch.uint8)
    compare_identical("cache", actual[:, :planes], expected[:, :planes])
    return Measured()
