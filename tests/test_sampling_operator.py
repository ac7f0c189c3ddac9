"""`attn_backends::choose` makes the definition's choices: greedy rows by argmax, sampled rows without a sort."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import spec_metadata
from attn_backends.graphs import RecordedGraph
from attn_backends.kernels import sampling_operators
from spec_metadata import InvalidStepError, Sampling, SamplingParams, choose, sampling
from tests.triton_interpreter import interpreted

NAN, INF = math.nan, math.inf
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIX = [Sampling(), Sampling(1.0, seed=1), Sampling(0.7, 0.8, 0, 2), Sampling(), Sampling(1.5, 1.0, 3, 4)]

# NumPy tells of the infinities that the ends of the ranges are meant to give.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.fixture(params=["operator", "triton"])
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Both implementations: the operator's on the CPU, and the Triton kernel interpreted, in small blocks."""
    if request.param == "operator":
        return sampling_operators.choose
    kernel = interpreted("triton_sampling", "_choose")
    monkeypatch.setattr(kernel, "_VECTORS", 256)
    monkeypatch.setattr(kernel, "_DRAWN", 256)

    def by_triton(logits: Tensor, params: SamplingParams, positions: Tensor) -> Tensor:
        tokens = logits.argmax(dim=-1)
        kernel.sample(logits, params, positions, tokens)
        return tokens

    return by_triton


def positions_of(logits: Tensor) -> Tensor:
    """Positions of rows, no two the same."""
    return torch.arange(logits.shape[0] * logits.shape[1]).view(logits.shape[:2]) + 1000


def random_sampling(rng: random.Random, vocab: int) -> Sampling:
    """Each filter alone and together, at its ends and between."""
    temperature = rng.choice((0.0, 1e-45, 0.3, 1.0, 1.0, 4.0))
    top_p, top_k = rng.choice((1e-30, 0.1, 0.5, 0.9, 0.999, 1.0)), rng.choice((0, 0, 1, 3, 20, vocab, 2**31 - 1))
    return Sampling(temperature, top_p, top_k, rng.randint(-(2**63), 2**63 - 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 5, 300, 1000])
@pytest.mark.one_in(5)
def test_choices_are_the_definitions_in_float64(chosen, vocab, dtype):
    """Rows of few values have ties where the filters cut them."""
    rng = random.Random(vocab)
    for scale, few_values in ((0.1, False), (3.0, True), (10.0, False)):
        logits = scale * torch.randn(6, 2, vocab, generator=torch.Generator().manual_seed(vocab))
        logits = (logits.round() if few_values else logits).to(dtype)
        params = SamplingParams.of([random_sampling(rng, vocab) for _ in range(6)])
        positions = positions_of(logits)
        assert torch.equal(chosen(logits, params, positions), choose(logits.double(), params, positions))


def test_rows_without_a_distribution_take_their_argmax(chosen):
    """A largest logit of NaN or +inf, or none above -inf; greedy or sampled."""
    rows = [[0.0, NAN, 2.0, NAN], [1.0, INF, -INF, INF], [-INF] * 4, [NAN, INF, 0.0, 0.0], [-INF, -INF, -INF, 1.0]]
    logits = torch.tensor([rows] * 4)
    params = SamplingParams.of([Sampling(), Sampling(1.0), Sampling(1.0, 0.5, 3), Sampling(2.0, 1.0, 2)])
    expected = [[1, 1, 0, 0, 3]] * 4
    assert chosen(logits, params, positions_of(logits)).tolist() == expected
    assert choose(logits, params, positions_of(logits)).tolist() == expected


def test_of_tied_logits_the_first_are_kept(chosen):
    """Of 100 equal logits, and of both zeros, which are equal, exactly the first tokens can win."""
    logits = torch.zeros(3, 8, 100)
    logits[:, :, ::2] = -0.0
    logits[:, :, 7] = -1.0
    params = SamplingParams.of([Sampling(1.0, 1.0, 3, 1), Sampling(1.0, 2.5 / 99.37, 0, 2), Sampling(1.0, 0.5, 6, 3)])
    positions = positions_of(logits)
    tokens = chosen(logits, params, positions)
    assert torch.equal(tokens, choose(logits.double(), params, positions))
    assert set(tokens.flatten().tolist()) == {0, 1, 2}


def test_ties_are_counted_over_the_whole_row(chosen):
    """Of four equal logits far from each other the first three are kept, by either filter and by both."""
    logits = torch.full((3, 8, 600), -40.0)
    logits[:, :, [100, 300, 500, 590]] = 2.0
    params = SamplingParams.of([Sampling(1.0, 1.0, 3, 1), Sampling(1.0, 0.7, 0, 2), Sampling(1.0, 0.99, 3, 3)])
    positions = positions_of(logits)
    tokens = chosen(logits, params, positions)
    assert torch.equal(tokens, choose(logits.double(), params, positions))
    assert set(tokens.flatten().tolist()) == {100, 300, 500}


def test_of_close_logits_not_one_too_many_is_kept(chosen):
    """100 logits of almost one weight: the first one to five remain, by either filter."""
    logits = 1 + 6e-4 * torch.rand(100, generator=torch.Generator().manual_seed(1))
    kept = (1, 2, 3, 4, 5) * 2
    filters = [(1.0, k) if i < 5 else ((k - 0.5) / 100, 0) for i, k in enumerate(kept)]
    params = SamplingParams.of([Sampling(1.0, *each, seed) for seed, each in enumerate(filters)])
    rows = logits.expand(10, 4, 100)
    ranks = logits.argsort(descending=True, stable=True).argsort()[chosen(rows, params, positions_of(rows))]
    assert [max(row) < k for row, k in zip(ranks.tolist(), kept, strict=True)] == [True] * 10


def test_many_tokens_of_little_weight_hold_much_together(chosen):
    logits = torch.zeros(2, 4, 3000)
    logits[:, :, 17] = 7.0
    params = SamplingParams.of([Sampling(1.0, 0.9, 0, 1), Sampling(1.0, 0.8, 1500, 1)])
    positions = positions_of(logits)
    tokens = chosen(logits, params, positions)
    assert torch.equal(tokens, choose(logits.double(), params, positions))
    assert len(tokens.unique()) > 3


def test_close_races_end_as_in_float64(chosen):
    """Rows of two tokens, of unequal times, that end 1e-5 to 1e-4 from each other; of 200,000."""
    positions = torch.arange(200_000)
    bits = sampling._draw(sampling._draw(torch.tensor(5), positions).unsqueeze(1), torch.arange(2))
    times = sampling._race_times(bits, torch.float64).log()
    gaps = (times[:, 0] - times[:, 1] - 1.5).abs()
    close = positions[(gaps > 1e-5) & (gaps < 1e-4)].unsqueeze(0)
    logits, params = torch.tensor([0.0, -1.5]).expand(1, close.shape[1], 2), SamplingParams.of([Sampling(1.0, seed=5)])
    assert close.shape[1] > 5
    assert torch.equal(chosen(logits, params, close), choose(logits.double(), params, close))


def test_the_ends_of_the_ranges(chosen):
    """The smallest temperature and top_p choose as greedy does, the greatest temperature keeps top-k's order."""
    logits = torch.tensor([3e38, 1.0, -3e38, 3.1e38, -INF, 0.0]).expand(4, 12, -1)
    ends = [Sampling(1e-45, seed=1), Sampling(1.0, 1e-30), Sampling(1.0, 1e-60), Sampling(3.4e38, 1.0, 2, 5)]
    winners = [set(row) for row in chosen(logits, SamplingParams.of(ends), positions_of(logits)).tolist()]
    assert winners == [{3}, {3}, {3}, {0, 3}]


def test_logits_are_read_where_they_lie(chosen):
    logits = torch.randn(5, 3, 40, generator=torch.Generator().manual_seed(1))
    wide = torch.full((5, 4, 50), NAN)
    wide[:, 1:, 3:43] = logits
    params, positions = SamplingParams.of(MIX), positions_of(logits)
    for each in (wide[:, 1:, 3:43], logits.transpose(1, 2).contiguous().transpose(1, 2)):
        assert torch.equal(chosen(each, params, positions), choose(logits, params, positions))


def test_a_choice_depends_on_no_other_row(chosen):
    logits = torch.randn(5, 2, 90, generator=torch.Generator().manual_seed(2))
    positions = positions_of(logits)
    together = chosen(logits, SamplingParams.of(MIX), positions)
    alone = [chosen(logits[i : i + 1], SamplingParams.of([MIX[i]]), positions[i : i + 1]) for i in (4, 2, 0, 1, 3)]
    assert torch.equal(torch.cat(alone), together[[4, 2, 0, 1, 3]])


def test_greedy_batches_sort_nothing(monkeypatch):
    def sorting(*arguments: object) -> Tensor:
        raise AssertionError("greedy rows took the definition, which sorts")

    monkeypatch.setattr(spec_metadata, "choose", sorting)
    logits = torch.randn(3, 4, 50)
    positions = positions_of(logits)
    assert torch.equal(sampling_operators.choose(logits, SamplingParams.greedy(3), positions), logits.argmax(-1))
    with pytest.raises(AssertionError, match="took the definition"):
        sampling_operators.choose(logits, SamplingParams.of([Sampling(), Sampling(1.0), Sampling()]), positions)


def test_one_recorded_graph_serves_greedy_sampled_and_mixed_batches():
    logits = torch.randn(5, 2, 60, generator=torch.Generator().manual_seed(3))
    positions, params = positions_of(logits), SamplingParams.greedy(5)
    graph = RecordedGraph()
    out = graph.capture(lambda: sampling_operators.choose(logits, params, positions))
    for batch in (MIX, [Sampling()] * 5, [Sampling(1.0, seed=i) for i in range(5)], MIX[::-1]):
        given = SamplingParams.of(batch)
        for name in ("temperature", "top_p", "top_k", "seed"):
            getattr(params, name).copy_(getattr(given, name))
        positions.add_(2)
        graph.replay()
        assert torch.equal(out, choose(logits, given, positions))


def test_the_operator_is_well_formed():
    logits = torch.randn(5, 2, 30)
    params = SamplingParams.of(MIX)
    given = (logits, positions_of(logits), params.temperature, params.top_p, params.top_k, params.seed)
    torch.library.opcheck(torch.ops.attn_backends.choose, given)


def test_what_does_not_fit_is_refused():
    zeros = torch.zeros(3, 1, dtype=torch.int64)
    with pytest.raises(InvalidStepError, match=r"for the 2 requests.*got \[3, 1, 5\] and \[3, 1\]"):
        sampling_operators.choose(torch.zeros(3, 1, 5), SamplingParams.greedy(2), zeros)
