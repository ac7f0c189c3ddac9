"""Mutants that read uninitialised memory: of an allocation, of a plan, of a vendor's workspace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.kernels import torch_attention
from tests.mutants.hosted import Tiles
from tests.mutants.mutant import mutant


@mutant(
    "flashinfer #4430, #4794, SGLang #31349, #31387",
    "poison.workspaces",
    backend="tests.mutants.hosted:TiledBackend",
    graph=True,
)
def blocks_past_the_schedule_run(patch: pytest.MonkeyPatch) -> None:
    """A graph launches as many blocks of threads as there may be tiles, and none asks whether its tile was planned."""
    patch.setattr(Tiles, "runs", lambda self: torch.ones_like(self.tiles, dtype=torch.bool))


@mutant("uninitialised memory: a kernel adds to its output", "poison.unwritten")
def output_begins_with_what_is_there(patch: pytest.MonkeyPatch) -> None:
    """Outputs are added to what their memory holds, which is zeros where nothing else lay there before."""
    attend = torch_attention.attend

    def added(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        out, lse = attend(q, k, *rest)
        there = torch.empty_like(out)
        return torch.where(there.isnan(), there, out), lse

    patch.setattr(torch_attention, "attend", added)


@mutant("uninitialised memory: a part without keys", "poison.unwritten", graph=True)
def parts_without_keys_multiplied_by_zero(patch: pytest.MonkeyPatch) -> None:
    """Keys are attended to in two parts; the second has none and writes nothing, and is joined with a weight of 0."""
    attend = torch_attention.attend

    def in_parts(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        out, lse = attend(q, k, *rest)
        return out + 0 * torch.empty_like(out), lse

    patch.setattr(torch_attention, "attend", in_parts)
