"""The benchmark of sampling tells choices that float32 excuses from wrong ones."""

from __future__ import annotations

import torch

from benchmarks import sampling as bench
from spec_metadata import Sampling, SamplingParams, choose, sampling

POSITIONS = torch.arange(200_000)


def counted(logits: torch.Tensor, given: Sampling, token: int, position: int) -> list[str]:
    """Reasons found for a token chosen from one row."""
    params, positions = SamplingParams.of([given]), torch.tensor([[position]])
    found = bench.compared(logits.view(1, 1, -1), params, positions, torch.tensor([[token]]))
    return [reason for reason, count in found.items() if count]


def test_a_choice_that_is_the_definitions_needs_no_reason():
    logits = torch.randn(50)
    given = Sampling(1.0, 0.9, 20, 3)
    expected = choose(logits.double().view(1, 1, -1), SamplingParams.of([given]), torch.tensor([[7]]))
    assert counted(logits, given, int(expected), 7) == []


def test_another_choice_is_wrong():
    assert counted(torch.tensor([0.0, 3.0]), Sampling(), 0, 5) == ["wrong"]
    assert counted(torch.tensor([0.0, 30.0]), Sampling(1.0, seed=1), 0, 5) == ["wrong"]
    assert counted(torch.tensor([0.0, 9.0, 9.0]), Sampling(1.0, 1.0, 2, 1), 0, 5) == ["wrong"]


def test_a_token_where_top_p_ends_is_a_boundary():
    given = Sampling(1.0, 0.5, 0, 1)
    assert counted(torch.zeros(2), given, 1, 5) == ["boundaries"]
    assert counted(torch.tensor([0.001, 0.0]), given, 1, 5) == ["wrong"]


def test_two_races_that_end_together_are_close():
    bits = sampling._draw(sampling._draw(torch.tensor(5), POSITIONS).unsqueeze(1), torch.arange(2))
    times = sampling._race_times(bits, torch.float64).log()
    position = int((times[:, 0] - times[:, 1]).abs().argmin())
    expected = int(times[position].argmin())
    assert counted(torch.zeros(2), Sampling(1.0, seed=5), 1 - expected, position) == ["close_races"]
