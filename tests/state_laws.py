"""What a launch that loads a committed state must do: equal its definition in torch, and write nothing else."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from spec_metadata import BlockTable, CacheGeometry, CommittedState, RequestTable
from spec_metadata.errors import INTEGERS
from spec_metadata.state import copy_requests

GARBAGE, WIDEST = 12345, 2**40
SIZES = (1, 2, 5, 33, 1500)
"""Requests that a state holds; of the last more than one program of a launch."""


def check_loads(form: type, seed: int, device: torch.device | str = "cpu") -> None:
    """Batch after batch, each loaded twice; garbage stays behind them, and in the engine's table of any strides."""
    rng = Random(f"{form.__name__} {seed}")
    most, memory = rng.choice(SIZES), torch.full((3100, 9), GARBAGE, dtype=rng.choice(INTEGERS), device=device)
    table = rng.choice((memory, memory[::2, 1:], memory[:, ::3], memory.view(9, 3100).T))
    geometry = CacheGeometry(4, 16)
    paging = BlockTable(table, geometry) if form is BlockTable else RequestTable(table, table[:0, 0].int(), geometry)
    ours, theirs = CommittedState.of(paging, most), CommittedState.of(paging, most)
    assert ours._load is not copy_requests, "it would be loaded by copies"
    for state in (ours, theirs):
        for own in held(state).values():
            own.fill_(GARBAGE)
    for _ in range(6):
        bs = rng.choice((0, 1, most // 2, most - 1, most))
        lens, rows = values(rng, bs, device), values(rng, bs, device) if form is RequestTable else None
        copy_requests(theirs, lens, rows)
        for _turn in ("like none before, perhaps", "like the one before"):
            ours.load(lens, rows)
            for name, own in held(ours).items():
                assert torch.equal(own, held(theirs)[name]), f"{name} of {bs} of {most} requests"
    assert bool((memory == GARBAGE).all()), "a page was written"


def held(state: CommittedState) -> dict[str, Tensor]:
    """What is loaded."""
    found = {"seq_lens": state.seq_lens, "num_real": state.num_real}
    return found | {"rows": state.paging.rows} if isinstance(state.paging, RequestTable) else found


def values(rng: Random, bs: int, device: torch.device | str) -> Tensor:
    """[bs] integers of either type, some beyond 32 bits, and any stride."""
    given = torch.tensor(
        [rng.randint(-WIDEST, WIDEST) if rng.random() < 0.2 else rng.randint(0, 999) for _ in range(bs)]
    )
    of_type = given.to(rng.choice(INTEGERS)).to(device)
    spread = torch.stack((of_type + 1, of_type, of_type - 1))
    return rng.choice((of_type, spread[1], spread.T.contiguous()[:, 1], of_type[:1].expand(bs) if bs else of_type))
