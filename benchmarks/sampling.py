"""Cost of the choice at every row on a GPU, beside an argmax, and whether it is the definition's in float64.

Times are of CUDA graphs of one call that take turns, median; memory is the peak beyond the logits of an eager call. A
choice that is not the definition's is a tie in float32: of two races (`close_races`), or of the mass of top_p
(`boundaries`). One that has no such reason is `wrong`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from attn_backends.kernels.sampling_operators import choose
from benchmarks.rows import Asked, Row
from benchmarks.timing import take_turns
from spec_metadata import Sampling, SamplingParams, sampling

WIDTH, VOCAB = 4, 129280
MIXES = {
    "greedy": [Sampling()],
    "temperature": [Sampling(0.8)],
    "top_k": [Sampling(0.8, 1.0, 50)],
    "top_p": [Sampling(0.8, 0.95)],
    "top_k, top_p": [Sampling(0.8, 0.95, 50)],
    "wide top_k, top_p": [Sampling(1.0, 0.9, 20000)],
    "mixed": [Sampling(), Sampling(1.0), Sampling(0.8, 0.95), Sampling(0.7, 1.0, 20), Sampling(0.6, 0.9, 100)],
}
LOGITS = {"flat": 1.0, "peaked": 3.0}  # and the deviation of each
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CLOSE = 1e-5  # of two times in float32; and of a mass, over the row's


def batch(mix: str, requests: int) -> SamplingParams:
    """The requests of a mix in turn, each with its own seed."""
    ways = MIXES[mix]
    given = [ways[i % len(ways)] for i in range(requests)]
    return SamplingParams.of([Sampling(x.temperature, x.top_p, x.top_k, i) for i, x in enumerate(given)], "cuda")


def peak(region: Callable[[], Tensor]) -> int:
    """Bytes that a call takes at its peak."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    region()
    return torch.cuda.max_memory_allocated() - before


def compared(logits: Tensor, params: SamplingParams, positions: Tensor, tokens: Tensor) -> dict[str, int]:
    """Reasons of the choices that the definition in float64 does not make, request by request."""
    found = {"boundaries": 0, "close_races": 0, "wrong": 0}
    for i in range(len(logits)):
        one = SamplingParams(*(x[i : i + 1] for x in (params.temperature, params.top_p, params.top_k, params.seed)))
        given = (logits[i : i + 1].double(), one, positions[i : i + 1])
        expected = sampling.choose(*given)
        for column in (expected != tokens[i : i + 1])[0].nonzero().flatten().tolist():
            at = (given[0][0, column], one, given[2][0, column])
            found[reason(*at, [int(tokens[i, column]), int(expected[0, column])])] += 1
    return found


def reason(logits: Tensor, params: SamplingParams, position: Tensor, pair: list[int]) -> str:
    """The reason why one token of a pair was chosen, and the other by the definition. logits: [vocab] float64."""
    if float(params.temperature) == 0:
        return "wrong"
    best_first, order = logits.sort(descending=True, stable=True)
    scores = (best_first - best_first[0]) / params.temperature
    weights = scores.exp()
    if 0 < int(params.top_k) < len(weights):
        weights[int(params.top_k) :] = 0
    before = (weights.cumsum(0) - weights) / weights.sum()
    ranks = [int((order == token).nonzero()) for token in pair]
    if any(abs(float(before[rank]) - float(params.top_p)) < CLOSE for rank in ranks) and float(params.top_p) < 1:
        return "boundaries"
    kept = sampling._kept(scores.view(1, 1, -1), params).flatten()
    bits = sampling._draw(sampling._draw(params.seed, position), order)
    noisy = scores - sampling._race_times(bits, torch.float64).log()
    is_close = abs(float(noisy[ranks[0]] - noisy[ranks[1]])) < CLOSE
    return "close_races" if is_close and all(bool(kept[rank]) for rank in ranks) else "wrong"


def choices(asked: Asked) -> Iterator[Row]:
    """Every mix of requests, on every tensor of logits. over_argmax: us over an argmax's in the same turns. rows:
    choices compared, and how many of them differ why.
    """
    for requests, name, dtype in product(asked.batch_sizes, LOGITS, DTYPES):
        logits = random_logits(requests, name, dtype)
        positions = torch.arange(requests * WIDTH, device="cuda").view(requests, WIDTH) + 4096
        regions: dict[str, Callable[[], Tensor]] = {"argmax": partial(logits.argmax, dim=-1)}
        regions |= {mix: partial(choose, logits, batch(mix, requests), positions) for mix in MIXES}
        graphs = [asked.stage.make_graph() for _ in regions]
        for graph, region in zip(graphs, regions.values(), strict=True):
            graph.capture(region)
        argmax_us, *times = take_turns([graph.replay for graph in graphs], asked.stage.rounds, asked.stage.clock)
        for mix, us in zip(MIXES, times, strict=True):
            region = regions[mix]
            about = {"bench": "sampling", "mix": mix, "logits": name, "dtype": dtype, "requests": requests}
            cost = {"us": round(us, 1), "over_argmax": round(us / argmax_us, 3), "peak_bytes": peak(region)}
            reasons = compared(logits, batch(mix, requests), positions, region())
            yield {**about, **cost, "rows": requests * WIDTH, **reasons}


def random_logits(requests: int, name: str, dtype: str) -> Tensor:
    """[requests, WIDTH, VOCAB], made request by request: float32 of all of them beside them would be the peak."""
    generator = torch.Generator("cuda").manual_seed(requests)
    logits = torch.empty(requests, WIDTH, VOCAB, dtype=DTYPES[dtype], device="cuda")
    for each in logits:
        each.copy_(LOGITS[name] * torch.randn(WIDTH, VOCAB, device="cuda", generator=generator))
    return logits
