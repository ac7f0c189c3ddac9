"""What steps that adapt are worth, by a cost model: measured times of forwards, and measured acceptance.

    python -m training.adaptive --times FILE             # on a GPU: an 8B-shaped target and its draft
    python -m training.adaptive --traces FILE            # on a CPU: what a trained draft has accepted
    python -m training.adaptive --json FILE TIMES TRACES # what both files say; exits with 1 if a target is missed

A cycle of n steps costs n - 1 draft forwards, a verify of n + 1 rows and a draft extend of as many. A trace says for
every place of a text how many drafts in a row the target accepts there, so any number of steps can be played on it.
The policy is the worker's own (`StepPolicy`). Weights of the target's layers are one layer's, which no L2 holds.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from attn_backends import results
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.cache import KeyValues, PagedKV
from attn_backends.cli.consoles import output_console
from attn_backends.graphs import CudaGraph
from attn_backends.layer import AttentionLayer
from attn_backends.selection.choose import Workload
from attn_backends_reference.eagle.adaptive import AdaptiveSteps, StepPolicy
from attn_backends_reference.eagle.options import PhaseBackends, WorkerOptions
from attn_backends_reference.eagle.requests import DraftShape, RequestOptions
from attn_backends_reference.eagle.serving import Server
from attn_backends_reference.eagle.worker import EagleWorker
from attn_backends_reference.models import load_draft, load_target
from benchmarks.timing import CudaClock, take_turns
from spec_metadata import BlockTable, CacheGeometry, Capacity, Step

BATCH_SIZES = (1, 8, 32, 128)
STEPS = (1, 3, 5, 7)
CONTEXT, PAGE_SIZE, ROUNDS = 1024, 64, 10
HIDDEN, INNER, NUM_LAYERS, VOCABULARY, DRAFT_VOCABULARY = 4096, 14336, 32, 128256, 32000
LAYER = AttentionLayer(0, 32, 8, 128, 128, 128**-0.5)
LEAST, GAIN = 0.95, 1.05  # of the best fixed set at each batch; of the best single one over the workload
LENGTH = 400  # tokens of each request in a stretch of the workload
PROMPT, PLACES = 32, 256  # tokens before the first place of a trace, and places


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """Device time of one forward of each model under a graph, in milliseconds. width: query rows of a request."""

    batch_size: int
    width: int
    target_ms: float
    draft_ms: float


@dataclass(frozen=True, slots=True)
class PlayedRow:
    """A workload: tokens per second of each fixed number of steps and of the adaptive one; its ratio to the best."""

    workload: str
    fixed: dict[int, float]
    adaptive: float
    ratio: float


class Weights:
    """A layer of Llama-3-8B and two heads, random."""

    def __init__(self, device: torch.device) -> None:
        def made(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, dtype=torch.bfloat16, device=device) * columns**-0.5

        self.qkv, self.out = made(6144, HIDDEN), made(HIDDEN, HIDDEN)
        self.gate_up, self.down = made(2 * INNER, HIDDEN), made(HIDDEN, INNER)
        self.head, self.draft_head = made(VOCABULARY, HIDDEN), made(DRAFT_VOCABULARY, HIDDEN)

    def layer(self, x: Tensor, attend: Callable[[Tensor, KeyValues], Tensor]) -> Tensor:
        """One layer over rows. x: [num_rows, HIDDEN]."""
        q, k, v = linear(rms_norm(x, (HIDDEN,)), self.qkv).split((4096, 1024, 1024), dim=1)
        heads = (each.unflatten(1, (-1, 128)) for each in (q, k, v))
        q, k, v = (each.contiguous() for each in heads)
        x = x + linear(attend(q, KeyValues(k, v)).flatten(1), self.out)
        gate, up = linear(rms_norm(x, (HIDDEN,)), self.gate_up).chunk(2, dim=1)
        return x + linear(silu(gate) * up, self.down)


def measure_forwards(device: torch.device) -> Iterator[ForwardRow]:
    """Target and draft at every batch size and width."""
    weights, clock = Weights(device), CudaClock()
    for bs in BATCH_SIZES:
        capacity = Capacity(bs, CONTEXT, PAGE_SIZE, 1, max(STEPS), max(STEPS) + 1)
        geometry = CacheGeometry(1 + bs * capacity.max_pages, PAGE_SIZE)
        memory = torch.zeros(2, geometry.num_pages, PAGE_SIZE, 8, 128, dtype=torch.bfloat16, device=device)
        cache, pages = PagedKV(memory[0], memory[1]), 1 + torch.arange(geometry.num_pages - 1, device=device)
        table = BlockTable(pages.view(bs, -1), geometry)
        backend = FA3Backend(capacity, geometry, device, workload=Workload(PAGE_SIZE, (LAYER,), torch.bfloat16))
        lens = torch.full((bs,), CONTEXT - max(STEPS) - 1, dtype=torch.int32, device=device)
        for width in (1, *(steps + 1 for steps in STEPS)):
            step = Step.target_verify(width, lens, table) if width > 1 else Step.decode(lens, table)
            meta = backend.capture(step.bucket(), table)
            backend.replay(meta, step)
            x = torch.randn(bs * width, HIDDEN, dtype=torch.bfloat16, device=device)

            def attend(
                q: Tensor, kv: KeyValues, meta: Any = meta, backend: Any = backend, cache: Any = cache
            ) -> Tensor:
                backend.store(kv, cache, meta.at(), LAYER)
                return backend.forward(q, cache, meta.at(), LAYER).out

            def target(x: Tensor = x, attend: Any = attend) -> Tensor:
                for _ in range(NUM_LAYERS):
                    x = weights.layer(x, attend)
                return linear(x, weights.head).argmax(dim=1)

            def draft(x: Tensor = x, attend: Any = attend) -> Tensor:
                return linear(weights.layer(x, attend), weights.draft_head).float().log_softmax(dim=1).max(dim=1).values

            graphs = [CudaGraph(), CudaGraph()]
            for graph, region in zip(graphs, (target, draft), strict=True):
                graph.capture(region)
            times = take_turns([graph.replay for graph in graphs], ROUNDS, clock)
            yield ForwardRow(bs, width, *(round(us / 1e3, 4) for us in times))


def cycle_ms(rows: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> dict[int, tuple[float, ...]]:
    """Milliseconds of a cycle of each number of steps, by batch size."""
    of = {(row["batch_size"], row["width"]): row for row in rows}

    def cost(bs: int, n: int) -> float:
        wide = of[bs, n + 1]
        return (n - 1) * of[bs, 1]["draft_ms"] + wide["target_ms"] + wide["draft_ms"]

    return {bs: tuple(cost(bs, n) for n in steps) for bs in sorted({bs for bs, _ in of})}


def measure_traces() -> Iterator[dict[str, str]]:
    """Accepted drafts at each place of a held-out text and of random bytes, by the shipped GQA target and its draft: a
    digit for each place.
    """
    n, longest = max(STEPS), PROMPT + PLACES
    capacity = Capacity(32, longest + 2 * n + 4, 8, 1, n, n + 1)
    target = load_target("gqa", torch.float32, torch.device("cpu"))
    geometry = CacheGeometry(1 + capacity.max_bs * capacity.max_pages, capacity.page_size)
    backend = FA3Backend(capacity, geometry)
    place = PhaseBackends(*[backend] * 5), capacity, geometry, WorkerOptions(chunk=longest)
    worker = EagleWorker(target, load_draft("gqa", target), *place)
    files = sorted(resources.files("attn_backends_reference.models").joinpath("heldout").iterdir(), key=str)
    text = next(file for file in files if file.name.endswith(".py.txt")).read_text(encoding="utf-8")
    rng = random.Random(7)
    noise = [rng.randrange(32, 127) for _ in range(longest)]
    for name, tokens in (("predictable", list(text[2000 : 2000 + longest].encode())), ("random", noise)):
        with Server(worker) as server:
            options = RequestOptions(n + 2, ignore_eos=True)
            requests = [server.submit([0, *tokens[: PROMPT + i]], options) for i in range(PLACES)]
            emitted: dict[int, list[int]] = {}
            for request, new in server.stream():
                emitted.setdefault(request.number, []).append(len(new))
        yield {"text": name, "accepted": "".join(str(emitted[request.number][1] - 1) for request in requests)}


def play(
    costs: Mapping[int, Sequence[float]],
    traces: Mapping[str, Sequence[int]],
    stretches: Sequence[tuple[int, str, int]],
    choose: StepPolicy | int,
) -> float:
    """Tokens per second over stretches of (batch size, trace, tokens of each request). What a cycle accepted is
    observed once the next one is chosen, as in the worker, which reads it a cycle late.
    """
    seconds, tokens, rng = 0.0, 0, random.Random(1)
    late: list[tuple[int, list[int]]] = []
    for bs, name, length in stretches:
        trace = traces[name]
        places, emitted = [rng.randrange(len(trace)) for _ in range(bs)], 0
        while emitted < length * bs:
            number = choose if isinstance(choose, int) else choose.choose(bs)
            counts = [1 + min(trace[place % len(trace)], STEPS[number]) for place in places]
            places = [place + count for place, count in zip(places, counts, strict=True)]
            emitted += sum(counts)
            seconds += costs[bs][number] / 1e3
            if not isinstance(choose, int):
                for before in late:
                    choose.observe(*before)
                late = [(number, counts)]
        tokens += emitted
    return tokens / seconds


def simulate(rows: Sequence[Mapping[str, Any]], traces: Mapping[str, Sequence[int]]) -> list[PlayedRow]:
    """Each batch size on each text alone, then a workload that changes both."""
    costs = cycle_ms(rows, STEPS)
    sets = tuple(DraftShape(1, n, n + 1) for n in STEPS)
    changing = [(bs, name, LENGTH) for name in traces for bs in (1, 8, 32, 128, 32, 8, 1)]
    workloads = {f"batch {bs}, {name}": [(bs, name, LENGTH)] for bs in costs for name in traces}
    played = []
    for label, stretches in (*workloads.items(), ("1 to 128 to 1, predictable, then random", changing)):
        fixed = {n: round(play(costs, traces, stretches, i), 1) for i, n in enumerate(STEPS)}
        adaptive = play(costs, traces, stretches, StepPolicy(AdaptiveSteps(sets, costs)))
        played.append(PlayedRow(label, fixed, round(adaptive, 1), round(adaptive / max(fixed.values()), 4)))
    return played


def missed(played: Sequence[PlayedRow]) -> list[str]:
    """Workloads on which the adaptive worker is not as fast as it should be."""
    *alone, changing = played
    wrong = [f"{row.workload}: {row.ratio}, not {LEAST}" for row in alone if row.ratio < LEAST]
    return wrong + ([f"{changing.workload}: {changing.ratio}, not {GAIN}"] if changing.ratio < GAIN else [])


def main() -> int:
    """Measure or simulate, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=Path, metavar="FILE", help="measure forwards on a GPU")
    parser.add_argument("--traces", type=Path, metavar="FILE", help="measure acceptance on a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="simulate")
    parser.add_argument("measured", type=Path, nargs="*", metavar="MEASURED", help="times and traces to simulate with")
    args = parser.parse_args()
    if args.times:
        with torch.no_grad():
            rows = [asdict(row) for row in measure_forwards(torch.device("cuda"))]
        results.write(args.times, results.head(sys.argv, "cuda"), rows, layers=NUM_LAYERS, context=CONTEXT)
    if args.traces:
        results.write(args.traces, results.head(sys.argv, "cpu"), measure_traces())
    if not args.json:
        return 0
    times, traces = (results.read(path).rows for path in args.measured)
    played = simulate(times, {row["text"]: [int(digit) for digit in row["accepted"]] for row in traces})
    results.write(args.json, results.head(sys.argv, "cpu"), [asdict(row) for row in played])
    for reason in (wrong := missed(played)):
        output_console().print(reason)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
