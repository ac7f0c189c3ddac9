"""Sampling keeps the target's distribution, repeats itself for a seed in any batch, and refuses what it can't mean."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import Tensor

from attn_backends.graphs import RecordedGraph
from spec_metadata import InvalidStepError, Sampling, SamplingParams, choose, sampling
from tests import sampling_laws as laws
from tests.sampling_laws import FILTERED, PLAIN, SHAPES, VOCAB, Shape
from tests.serving_scenes import CHAIN, EAGER, GRAPH, TREE

FLAWS = ("always accepting", "residual not renormalised", "siblings not removed", "one number for two positions")


def speculative_sampling(shape: Shape, filters: Sampling, n: int, flaw: str = "") -> tuple[Tensor, Tensor]:
    """The rule as it is published, in float64, on n cycles: runs [n, 4] and how long they are [n].

    Child k is accepted with p(c_k) / (1 - sum of p(c_j), j < k); if none is, a token of the renormalised residual is
    emitted. A flaw leaves a part of it out.
    """
    tree = laws.drafted(shape, torch.tensor([laws.ROOT]))
    tokens, parents = tree.tokens[0], tree.parents[0].tolist()
    children = [[c for c in range(1, len(parents)) if parents[c] == node] for node in range(len(parents))]
    p = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for last in range(VOCAB):
        for token, probability in laws.probabilities(laws.LOGITS[last].tolist(), filters).items():
            p[last, token] = probability
    numbers = torch.rand(4, 4, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    runs, counts, nodes = torch.zeros(n, 4, dtype=torch.int64), torch.zeros(n, dtype=torch.int64), [0] * n
    for i in range(n):
        for depth in range(4):
            number = numbers[0 if flaw == "one number for two positions" else depth, :, i].tolist()
            at = p[tokens[nodes[i]]]
            token, child = one_position(at, [(int(tokens[c]), c) for c in children[nodes[i]]], number, flaw)
            runs[i, depth], counts[i] = token, depth + 1
            if child is None:
                break
            nodes[i] = child
    return runs, counts


def one_position(p: Tensor, children: list[tuple[int, int]], numbers: list[float], flaw: str) -> tuple[int, int | None]:
    """The token of one position, and the child that holds it if one was accepted. numbers: uniform, one a try."""
    residual, probabilities = p.tolist(), p.tolist()
    for (token, child), number in zip(children, numbers, strict=False):
        threshold = probabilities[token] if flaw == "siblings not removed" else residual[token]
        if number < threshold or flaw == "always accepting":
            return token, child
        residual[token] = 0.0
        if flaw != "residual not renormalised":
            total = sum(residual)
            residual = [x / total for x in residual]
    drawn, number = 0, numbers[-1]
    while drawn < VOCAB - 1 and number >= residual[drawn]:
        number -= residual[drawn]
        drawn += 1
    return drawn, None


@pytest.mark.parametrize("filters", [PLAIN, FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_targets_distribution_is_preserved(shape, filters):
    laws.check_law(shape, filters)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_published_rule_passes_the_same_test(shape):
    laws.check_fit(*speculative_sampling(shape, PLAIN, 5000), laws.law(shape, PLAIN))


@pytest.mark.parametrize(
    ("shape", "flaw"),
    [("tree", flaw) for flaw in FLAWS] + [("chain", flaw) for flaw in FLAWS if flaw != "siblings not removed"],
)
def test_the_same_test_rejects_a_flawed_rule(shape, flaw):
    shape = SHAPES[shape]
    with pytest.raises(AssertionError, match=r"chi-square|impossible"):
        laws.check_fit(*speculative_sampling(shape, PLAIN, 5000, flaw), laws.law(shape, PLAIN))


def test_a_text_is_the_requests_own():
    laws.check_reproducible()


def test_filters_are_those_of_a_simple_reference():
    laws.check_filters()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_other_types_are_computed_in_float32(dtype):
    """Choices are those of the same values in float64, but where two scores nearly tie."""
    logits = torch.randn(100, 200, 40, generator=torch.Generator().manual_seed(2)).to(dtype)
    params = SamplingParams.of([Sampling(1.0, seed=i) for i in range(100)])
    positions = torch.arange(200).expand(100, -1)
    different = choose(logits, params, positions) != choose(logits.double(), params, positions)
    assert int(different.sum()) <= 1


@pytest.mark.parametrize(
    ("draft", "path"), [(CHAIN, GRAPH), (TREE, EAGER), pytest.param(TREE, GRAPH, marks=pytest.mark.full)]
)
def test_sampled_eagle_equals_sampled_plain_decoding(draft, path):
    laws.check_lossless(draft, path)


def test_noise_is_uniform_and_independent():
    laws.check_noise()


def test_noise_is_splitmix64():
    """The first numbers of a stream as other implementations print them."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [laws.splitmix64(1234567, index) for index in range(4)] == published


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_times_that_decide_have_the_finest_resolution(dtype):
    """A token of tiny probability wins by a tiny time, so there the 53 bits must not be rounded to the type's."""
    fewest, most = torch.tensor([0, 1 << 11, 2 << 11]), torch.tensor([-1, 2**63 - 1])
    assert sampling._race_times(fewest, dtype).tolist() == pytest.approx([x * 2**-53 for x in (0.5, 1.5, 2.5)])
    longest, middle = sampling._race_times(most, dtype).tolist()
    assert 15 < longest < 40
    assert middle == pytest.approx(math.log(2))


def test_choosing_is_capturable_and_follows_its_inputs():
    logits, positions = torch.randn(3, 4, 30, generator=torch.Generator().manual_seed(3)), torch.arange(12).view(3, 4)
    params = SamplingParams.of([Sampling(), Sampling(1.0, 0.9, 5, 1), Sampling(2.0, seed=2)])
    graph = RecordedGraph()
    out = graph.capture(lambda: choose(logits, params, positions))
    changes = (lambda: None, lambda: positions.add_(4), lambda: params.seed.mul_(3), lambda: logits.neg_())
    seen = []
    for change in changes:
        change()
        graph.replay()
        assert torch.equal(out, choose(logits, params, positions))
        assert not any(torch.equal(out, earlier) for earlier in seen)
        seen.append(out.clone())
    assert torch.equal(seen[0][0], seen[2][0]), "a greedy request has no noise"


def test_top_p_of_one_keeps_even_what_has_no_weight():
    scores = torch.tensor([[[0.0, -1.0, -60.0]]]).expand(2, -1, -1)
    kept = sampling._kept(scores, SamplingParams.of([Sampling(1.0, 1.0), Sampling(1.0, 0.999999)]))
    assert kept.tolist() == [[[True, True, True]], [[True, True, False]]]


def test_padding_of_zeros_is_greedy():
    zeros = torch.zeros(2)
    params = SamplingParams(zeros, zeros, zeros.int(), zeros.long())
    logits = torch.randn(2, 3, 9)
    assert torch.equal(choose(logits, params, torch.zeros(2, 3, dtype=torch.int64)), logits.argmax(-1))


def test_values_out_of_range_are_refused():
    laws.check_ranges()


def test_the_ends_of_the_ranges_are_taken():
    ends = [Sampling(0, 1, 0, -(2**63)), Sampling(3.4e38, 1e-60, 2**31 - 1, 2**63 - 1)]
    params = SamplingParams.of(ends)
    assert params.seed.tolist() == [-(2**63), 2**63 - 1]
    assert params.top_k.tolist() == [0, 2**31 - 1]
    logits = torch.tensor([[[1.0, 5.0, 5.0, -math.inf]]] * 2)
    assert choose(logits, params, torch.tensor([[2**40], [0]])).tolist() == [[1], [1]]
    with pytest.raises(FrozenInstanceError):
        ends[0].seed = 3


def test_tensors_that_do_not_fit_are_refused():
    good = SamplingParams.greedy(2)
    with pytest.raises(InvalidStepError, match=r"top_k, one entry a request, must be \[2\] int32, got \[2\] torch"):
        SamplingParams(good.temperature, good.top_p, good.top_k.long(), good.seed)
    with pytest.raises(InvalidStepError, match=r"top_p.* must be \[2\] float32, got \[3\]"):
        SamplingParams(good.temperature, torch.ones(3), good.top_k, good.seed)
    with pytest.raises(InvalidStepError, match=r"logits must be \[bs, width, vocab\].*got \[2, 5\] and \[2\]"):
        choose(torch.zeros(2, 5), good, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(InvalidStepError, match=r"got \[2, 3, 5\] and \[2, 4\]"):
        choose(torch.zeros(2, 3, 5), good, torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(InvalidStepError, match=r"for the 2 requests.*got \[3, 1, 5\] and \[3, 1\]"):
        choose(torch.zeros(3, 1, 5), good, torch.zeros(3, 1, dtype=torch.int64))
