"""What sampling promises, on a Markov chain in place of a target: laws, choices and texts that are known exactly."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from attn_backends.backends.reference import ReferenceBackend
from attn_backends.graphs import RecordedGraph
from attn_backends.runner import PhaseRunner
from attn_backends_reference.eagle import phases
from attn_backends_reference.eagle.tables import keep
from spec_metadata import (
    CacheGeometry,
    Capacity,
    DraftTree,
    InvalidStepError,
    RequestTable,
    Sampling,
    SamplingParams,
    Step,
)
from spec_metadata import sampling as sampler

VOCAB, ALPHA = 7, 1e-4
LOGITS = 1.2 * torch.randn(VOCAB, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
TOP = LOGITS.argsort(dim=1, descending=True).tolist()
ROOT = 3
# Parents of the nodes, and which of its parent's most likely tokens a node holds.
CHAIN = ((0, 0, 1, 2), (0, 0, 0, 0))
TREE = ((0, 0, 0, 0, 1, 1, 2, 4), (0, 0, 1, 2, 0, 1, 0, 0))
SHAPES = {"chain": CHAIN, "tree": TREE}
PLAIN, FILTERED = Sampling(temperature=1.0), Sampling(temperature=0.8, top_p=0.9, top_k=5)
Shape = tuple[tuple[int, ...], tuple[int, ...]]


class MarkovTarget:
    """A target whose next token depends on the last one alone; its hidden states are its logits."""

    device, dtype, layers, hidden_size = torch.device("cpu"), torch.float64, (), VOCAB

    def forward(self, tokens: Tensor, positions: Tensor, attention: object) -> Tensor:
        """[rows, VOCAB]."""
        return LOGITS[tokens]

    def forward_features(
        self, tokens: Tensor, positions: Tensor, attention: object, multimodal: None = None
    ) -> tuple[Tensor, Tensor]:
        """[rows, VOCAB] twice."""
        hidden = self.forward(tokens, positions, attention)
        return hidden, hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, VOCAB]."""
        return hidden


def drafted(shape: Shape, roots: Tensor) -> DraftTree:
    """The trees of a shape on roots [bs]."""
    tokens, top = [roots], torch.tensor(TOP)
    for parent, branch in list(zip(*shape, strict=True))[1:]:
        tokens.append(top[tokens[parent], branch])
    parents = torch.tensor(shape[0]).expand(len(roots), -1)
    return DraftTree.from_parents(torch.stack(tokens, 1), parents, 3)


class Served:
    """Plain decoding or cycles of the Markov target through a phase runner, on requests told by number."""

    def __init__(self, shape: Shape | None, max_bs: int, buckets: Sequence[int] = ()) -> None:
        self.shape = shape
        topk = 1 if shape is None or shape is CHAIN else 4
        self.capacity = Capacity(max_bs, 128, 1, topk, 3, 4 if shape is None else len(shape[0]))
        geometry = CacheGeometry(2, 1)
        self.table, self.geometry = torch.zeros(max_bs + 1, self.capacity.max_kv_len, dtype=torch.int32), geometry
        backend = ReferenceBackend(self.capacity, geometry)
        make = phases.decode_phase if shape is None else phases.verify_phase
        self.params, self.last = SamplingParams.greedy(max_bs + 1), torch.zeros(max_bs + 1, dtype=torch.int64)
        tables = (self.params, self.last) if shape is None else (self.params,)
        phase = make(phases.Model(MarkovTarget(), [], backend), self.capacity, *tables)
        self.runner = PhaseRunner(phase, backend, self.paging(0), buckets, RecordedGraph)

    def paging(self, bs: int) -> RequestTable:
        """Every request on the reserved page: nothing attends."""
        return RequestTable(self.table, torch.arange(1, bs + 1), self.geometry)

    def step(self, roots: Tensor, lens: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """One step: tokens [bs, A] and how many of them were emitted [bs]."""
        paging = self.paging(len(roots))
        keep(self.params, paging.rows, params)
        self.last[paging.rows] = roots
        if self.shape is None:
            out = self.runner.run(Step.decode(lens, paging), phases.Nothing()).value
            return out.tokens.unsqueeze(1), torch.ones_like(lens)
        tree = drafted(self.shape, roots)
        mask = tree.mask if self.capacity.topk > 1 else None
        step = Step.target_verify(len(self.shape[0]), lens, paging, tree_mask=mask)
        fields = phases.TreeFields(tree.tokens, tree.parents, tree.depths, tree.mask)
        out = self.runner.run(step, fields).value
        return out.tokens, out.num_accepted

    def texts(self, requests: Sequence[int], num_tokens: int) -> dict[int, list[int]]:
        """What each request emits; request r has its own length, root, seed and filters."""
        params = SamplingParams.of([sampling_of(r) for r in requests])
        found: dict[int, list[int]] = {r: [] for r in requests}
        while min(map(len, found.values())) < num_tokens:
            roots = torch.tensor([found[r][-1] if found[r] else r % VOCAB for r in requests])
            lens = torch.tensor([5 + r + len(found[r]) for r in requests], dtype=torch.int32)
            tokens, counts = self.step(roots, lens, params)
            for r, row, count in zip(requests, tokens.tolist(), counts.tolist(), strict=True):
                found[r] += row[:count]
        return {r: text[:num_tokens] for r, text in found.items()}


def sampling_of(request: int) -> Sampling:
    """Greedy, plain and filtered requests, no two of one seed."""
    temperature, top_p, top_k = [(0.0, 1.0, 0), (1.0, 1.0, 0), (0.7, 0.8, 0), (1.5, 1.0, 3)][request % 4]
    return Sampling(temperature, top_p, top_k, seed=-11 * request)


def kept(logits: Sequence[float], sampling: Sampling) -> dict[int, float]:
    """The filters said simply, in float64: the tokens that may be chosen and their log-weights."""
    single = SamplingParams.of([sampling])
    temperature, top_p = float(single.temperature), float(single.top_p)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if temperature == 0:
        return {order[0]: 0.0}
    order = order[: sampling.top_k or None]
    scores = {token: (logits[token] - logits[order[0]]) / temperature for token in order}
    total, before, found = sum(map(math.exp, scores.values())), 0.0, dict[int, float]()
    for token, score in scores.items():
        if before >= top_p * total and top_p < 1:
            break
        found[token] = score
        before += math.exp(score)
    return found


def probabilities(logits: Sequence[float], sampling: Sampling) -> dict[int, float]:
    """Of the tokens that may be chosen."""
    scores = kept(logits, sampling)
    total = sum(map(math.exp, scores.values()))
    return {token: math.exp(score) / total for token, score in scores.items()}


def simple_choice(logits: Sequence[float], sampling: Sampling, position: int) -> int:
    """The whole of `choose` for one row, in Python's integers and float64."""
    key, scores = splitmix64(sampling.seed, position), kept(logits, sampling)
    times = {token: -math.log1p(-((splitmix64(key, token) >> 11) + 0.5) / 2**53) for token in scores}
    return max(scores, key=lambda token: scores[token] - math.log(times[token]))


def splitmix64(state: int, index: int) -> int:
    """Number `index` of a stream, as its authors write it."""
    z = (state + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def law(shape: Shape, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Probabilities of what one cycle emits: the target's own, down to the first token that no child holds."""
    tree = drafted(shape, torch.tensor([ROOT]))
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()

    def below(node: int) -> dict[tuple[int, ...], float]:
        children = {tokens[n]: n for n in range(1, len(tokens)) if parents[n] == node}
        found: dict[tuple[int, ...], float] = {}
        for token, p in probabilities(LOGITS[tokens[node]].tolist(), sampling).items():
            rest = below(children[token]) if token in children else {(): 1.0}
            found |= {(token, *tail): p * q for tail, q in rest.items()}
        return found

    return below(0)


def check_fit(tokens: Tensor, counts: Tensor, expected: dict[tuple[int, ...], float]) -> None:
    """Chi-square of emitted runs, tokens [n, A] of which counts [n], against their law; the rarest share a cell."""
    seen: dict[tuple[int, ...], int] = {}
    for row, count in zip(tokens.tolist(), counts.tolist(), strict=True):
        seen[tuple(row[:count])] = seen.get(tuple(row[:count]), 0) + 1
    assert seen.keys() <= expected.keys(), f"impossible runs: {sorted(seen.keys() - expected.keys())[:5]}"
    n, cells, rest = len(counts), [], [0.0, 0.0]
    for run, p in expected.items():
        cell = [float(seen.get(run, 0)), n * p]
        if n * p >= 8:
            cells.append(cell)
        else:
            rest = [rest[0] + cell[0], rest[1] + cell[1]]
    check_cells(torch.tensor(cells if rest[1] < 1 else [*cells, rest], dtype=torch.float64))


def check_cells(cells: Tensor) -> None:
    """Chi-square of cells [n, 2], observed and expected."""
    assert len(cells) > 1
    statistic = ((cells[:, 0] - cells[:, 1]) ** 2 / cells[:, 1]).sum()
    p = float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2, dtype=torch.float64), statistic / 2))
    assert p > ALPHA, f"chi-square {float(statistic):.1f} in {len(cells)} cells has probability {p:.2g}"


def check_law(shape: Shape, sampling: Sampling, n: int = 10000) -> None:
    """A verify of n requests that differ in their seed and length emits runs of the target's own distribution."""
    params = SamplingParams.of([Sampling(sampling.temperature, sampling.top_p, sampling.top_k, s) for s in range(n)])
    lens = (torch.arange(n) % 40).int()
    tokens, counts = Served(shape, n).step(torch.full((n,), ROOT), lens, params)
    check_fit(tokens, counts, law(shape, sampling))


def check_reproducible() -> None:
    """A request's text is its own: in any batch, bucket and order, eager or replayed, plain, by chains or by trees."""
    requests, num_tokens = list(range(9)), 20
    expected = Served(None, 9).texts(requests, num_tokens)
    assert len({tuple(text) for text in expected.values()}) > 6, "requests with seeds of their own repeat each other"
    for shape in (None, CHAIN, TREE):
        graphs = Served(shape, 9, buckets=(2, 5, 9))
        assert graphs.texts(requests, num_tokens) == expected
        for few in ([4], [8, 2, 5], requests[::-1]):
            wanted = {r: expected[r] for r in few}
            assert graphs.texts(few, num_tokens) == wanted
            assert Served(shape, 9).texts(few, num_tokens) == wanted


def filter_cases() -> list[Sampling]:
    """Every filter alone and together, and their ends."""
    ends = product((0.0, 1e-30, 0.3, 1.0, 4.0), (1e-9, 0.25, 0.5, 0.9, 1.0), (0, 1, 3, 7, 500))
    return [Sampling(*filters, seed=1000003 * (i - 60)) for i, filters in enumerate(ends)]


def check_filters(width: int = 24) -> None:
    """Choices are those of a float64 reference that filters a sorted list, ties and all, and mix in one batch."""
    cases, vocab = filter_cases(), 12
    logits = 2 * torch.randn(len(cases), width, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits[:, ::3] = logits[:, ::3].round()  # ties
    logits[:, 5] = 0.0
    logits[:, 7, 1:] = -math.inf
    positions = torch.arange(len(cases) * width).view(-1, width)
    found = phases.choose(logits, SamplingParams.of(cases), positions).tolist()
    for sampling, rows, places, got in zip(cases, logits.tolist(), positions.tolist(), found, strict=True):
        wanted = [simple_choice(row, sampling, position) for row, position in zip(rows, places, strict=True)]
        assert got == wanted, sampling


def check_lossless(draft: dict[str, int], path: dict[str, object], num_tokens: int = 24) -> None:
    """Sampled EAGLE emits the tokens of sampled plain decoding with the same seeds, on a trained model."""
    from attn_backends_reference.eagle.options import WorkerOptions
    from attn_backends_reference.eagle.serving import serve  # needs the models' packages
    from attn_backends_reference.eagle.worker import EagleWorker, PlainWorker
    from tests.serving_scenes import engine_parts, prompts, tokens

    capacity, given = Capacity(3, 96, 16, **draft), prompts(6, 60)
    sampling = [Sampling(t, p, k, seed=s) for s, (t, p, k) in enumerate(WAYS)]
    target, model, backends, geometry = engine_parts("gqa", "fa3", capacity)
    plain = PlainWorker(target, backends, capacity, geometry)
    eagle = EagleWorker(target, model, backends, capacity, geometry, WorkerOptions(**path))
    expected = serve(plain, given, num_tokens, sampling=sampling)
    found = serve(eagle, given, num_tokens, sampling=sampling)
    assert tokens(found) == tokens(expected)
    assert tokens(serve(eagle, given[2:3], num_tokens, sampling=sampling[2:3])) == tokens(expected)[2:3], "alone"
    greedy = serve(plain, given, num_tokens)
    assert [a.tokens == b.tokens for a, b in zip(expected, greedy, strict=True)].count(True) <= 2, "nothing was sampled"
    assert sum(c.num_cycles for c in found) < 0.9 * sum(len(c.tokens) for c in found), "drafts are accepted"


WAYS = [(0.0, 1.0, 0), (1.0, 1.0, 0), (0.8, 0.9, 0), (1.0, 1.0, 20), (1.2, 0.95, 40), (0.6, 1.0, 0)]


OUT_OF_RANGE: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, r"temperature must be in \[0, .*\] \(0 is greedy\), got -0.1"),
    ({"temperature": 1e39}, r"temperature must be in \[0, 3.4e\+38\]"),
    ({"temperature": math.nan}, "temperature must be a finite number, got nan"),
    ({"temperature": math.inf}, "temperature must be a finite number, got inf"),
    ({"temperature": 10**400}, r"temperature must be in \[0, "),
    ({"temperature": "1"}, "temperature must be a finite number, got '1'"),
    ({"temperature": True}, "temperature must be a finite number, got True"),
    ({"top_p": 0.0}, r"top_p must be in \(0, 1\] .*, got 0.0"),
    ({"top_p": 1.01}, r"top_p must be in \(0, 1\] .*, got 1.01"),
    ({"top_p": math.nan}, "top_p must be a finite number, got nan"),
    ({"top_k": -1}, r"top_k must be in \[0, 2147483647\] \(0 keeps every token\), got -1"),
    ({"top_k": 2**31}, r"top_k must be in \[0, 2147483647\]"),
    ({"top_k": 2.0}, "top_k must be an integer, got 2.0"),
    ({"top_k": True}, "top_k must be an integer, got True"),
    ({"seed": 2**63}, r"seed must be in \[-9223372036854775808, 9223372036854775807\] \(int64\)"),
    ({"seed": 0.5}, "seed must be an integer, got 0.5"),
]


def refusal_of(values: dict[str, Any]) -> str:
    """What is said against values of a request; nothing if they are taken."""
    try:
        Sampling(**values)
    except InvalidStepError as refusal:
        return str(refusal)
    return ""


def check_ranges() -> None:
    """Every value out of range is refused, with the value and the range."""
    for values, message in OUT_OF_RANGE:
        assert re.search(message, refusal_of(values)), f"{values}: {refusal_of(values) or 'was taken'}"


def check_noise() -> None:
    """The bits of every pair of neighbours, in seed, position and token, are uniform and independent."""
    seeds, positions, tokens = torch.arange(-20, 20), torch.arange(40), torch.arange(40)
    keys = sampler._draw(seeds.unsqueeze(1), positions)
    bits = sampler._draw(keys.unsqueeze(2), tokens)
    for low in (0, 11, 30, 58):
        parts = (bits >> low) & 31
        check_uniform(parts, 32)
        for axis in range(3):
            one, two = parts.narrow(axis, 0, 39), parts.narrow(axis, 1, 39)
            check_uniform(one * 32 + two, 1024)
    times = sampler._race_times(bits, torch.float32)
    check_uniform(((-times.double()).exp() * 64).long().clamp_max(63), 64)
    assert bool((times > 0).all() and times.isfinite().all())


def check_uniform(values: Tensor, num_values: int) -> None:
    """Chi-square of integers against equal frequencies."""
    observed = torch.bincount(values.reshape(-1), minlength=num_values).double()
    check_cells(torch.stack((observed, torch.full_like(observed, values.numel() / num_values)), 1))
