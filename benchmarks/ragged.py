"""Verifies whose widths the device decides, beside the best kernel of one width; and mixed steps beside their halves.

A ragged verify is captured at the bound of `BOUND` rows per request. Every replay brings other widths, of `MEAN` rows
in the mean, and plans again; so does the uniform verify of `BOUND` rows that it is compared with, on whichever kernel
of any backend is fastest. A mixed step and its halves are planned outside of their graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheFormat
from attn_backends.errors import UnsupportedStepError
from attn_backends.layer import AttentionLayer
from attn_backends.selection.choose import Workload
from benchmarks.layers import capture, check_same
from benchmarks.rows import Asked, Missing, Row, Stage, compared, each, missing
from benchmarks.shapes import DTYPE, LAYERS, LLAMA_8_GPUS, PAGE_SIZE, Pool, fill_pool, one_step
from benchmarks.timing import take_turns
from spec_metadata import BoundedQuery, Step, StepKind, mixed_step

BOUND, MEAN, NUM_WIDTHS = 8, 2.5, 4
CHUNKS, VERIFIED = (512, 2048), 4


class Place(NamedTuple):
    """The batch and layer of rows. width: query rows of a request."""

    pool: Pool
    layer: AttentionLayer
    width: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f", beside a chunk of {self.chunk}" if self.chunk else ""
        return f"batch {self.pool.batch_size}, {self.layer.num_heads} heads, width {self.width}{chunk}"


@dataclass(frozen=True, slots=True, eq=False)
class Verify:
    """A verify that is captured once and planned again for each replay. output: what the graph writes."""

    backend: type[AttentionBackend]
    kernel: str
    output: Tensor
    replay: Callable[[], None]


def ragged(asked: Asked) -> Iterator[Row | Missing]:
    """Every kernel that captures packed verifies, on every dense layer, beside the best uniform one."""
    found, absent = asked.runnable()
    yield from absent
    for format, layers in LAYERS.items():
        takers = [(b, k.name) for b, own in found.items() if format in b.formats for k in own]
        for context, batch_size in asked.sizes if takers else ():
            pool = fill_pool(layers[0], batch_size, context, asked.stage.device, [BOUND])
            for layer in layers:
                yield from _beside_uniform(Place(pool, layer, BOUND), takers, asked.stage)


def _beside_uniform(
    place: Place, takers: Sequence[tuple[type[AttentionBackend], str]], stage: Stage
) -> Iterator[Row | Missing]:
    made: dict[bool, list[Verify]] = {False: [], True: []}
    for backend, kernel in takers:
        for is_ragged, own in made.items():
            try:
                own.append(verify_of(place, backend, kernel, stage, is_ragged=is_ragged))
            except Exception as error:  # of a vendor, which may raise anything; the others are measured all the same
                yield missing(backend, kernel, f"{'ragged' if is_ragged else 'uniform'}, {place}", error)
    every = [*made[False], *made[True]]
    times = dict(zip(every, take_turns([one.replay for one in every], stage.rounds, stage.clock), strict=True))
    if not made[False]:
        why = "no kernel ran the uniform verify that it is compared with"
        yield from (missing(one.backend, one.kernel, place, UnsupportedStepError(one.kernel, [why])) for one in every)
        return
    best = min(made[False], key=times.__getitem__)
    last = widths_of(place.pool.batch_size)[(1 + stage.rounds) % NUM_WIDTHS]  # of the last replay
    num_calls = len(place.pool.caches)
    for one in made[True]:
        try:
            check_same(one.output[: int(last.sum())], rows_of(best.output, last))
        except Exception as error:
            yield missing(one.backend, one.kernel, f"ragged, {place}", error)
            continue
        peer = f"{best.backend.name} {best.kernel}, {BOUND} rows"
        us = times[one] / num_calls
        yield compared("ragged", one.backend.name, one.kernel, place, us, peer, times[best] / num_calls)


def widths_of(batch_size: int) -> list[Tensor]:
    """Widths of several cycles, of `MEAN` rows in the mean: [batch_size] int32 on the host, the same every time."""
    generator, found = torch.Generator().manual_seed(batch_size), []
    for _ in range(NUM_WIDTHS):
        widths = torch.ones(batch_size, dtype=torch.int32)
        for _ in range(int(batch_size * MEAN) - batch_size):
            open_ones = (widths < BOUND).nonzero().flatten()
            widths[open_ones[int(torch.randint(len(open_ones), (), generator=generator))]] += 1
        found.append(widths)
    return found


def rows_of(uniform: Tensor, widths: Tensor) -> Tensor:
    """The rows of a uniform output that a ragged verify has. uniform: [batch_size * BOUND, ...]."""
    kept = torch.arange(BOUND) < widths.unsqueeze(1)
    return uniform[kept.flatten().nonzero().flatten().to(uniform.device)]


def verify_of(place: Place, backend: type[AttentionBackend], kernel: str, stage: Stage, *, is_ragged: bool) -> Verify:
    """A verify of the last rows of a pool's requests. Queries of a row are the same, ragged or not."""
    pool, layer, device = place.pool, place.layer, stage.device
    made = backend(pool.capacity, pool.geometry, device, kernel={StepKind.TARGET_VERIFY: kernel})
    bs, num_tokens = pool.batch_size, pool.batch_size * BOUND
    uniform = pool.capacity.bucket(StepKind.TARGET_VERIFY, bs)
    meta = made.capture(
        pool.capacity.ragged_bucket(StepKind.TARGET_VERIFY, bs, num_tokens) if is_ragged else uniform, pool.table
    )
    generator = torch.Generator(device).manual_seed(layer.num_heads)
    shape = (num_tokens, layer.num_heads, layer.head_dim)
    rows = torch.randn(shape, dtype=DTYPE, device=device, generator=generator)
    widths = widths_of(bs)
    queries = [_packed(rows, own) for own in widths] if is_ragged else [rows]
    verify = one_step(pool, BOUND)
    bounded = [replace(verify, query=BoundedQuery(own.to(device), num_tokens, BOUND)) for own in widths]
    steps = cycle(bounded if is_ragged else [verify])
    q, packed, graph = queries[0].clone(), cycle(queries), stage.make_graph()

    def plan() -> None:
        made.replay(meta, next(steps))
        q.copy_(next(packed))

    plan()
    output = graph.capture(lambda: [made.forward(q, cache, meta.at(), layer).out for cache in pool.caches][-1])

    def replay() -> None:
        plan()
        graph.replay()

    return Verify(backend, kernel, output, replay)


def _packed(rows: Tensor, widths: Tensor) -> Tensor:
    """Those rows first that a ragged verify has, then others."""
    kept = rows_of(rows, widths)
    return torch.cat((kept, rows[: rows.shape[0] - kept.shape[0]]))


def mixed(asked: Asked) -> Iterator[Row | Missing]:
    """A chunk of a prompt with decodes, or verifies, as one step and as two, on the kernels that `auto` takes."""
    for format, layers in (*LAYERS.items(), (CacheFormat.KV, (LLAMA_8_GPUS,))):
        takers = [backend for backend in asked.backends if format in backend.formats]
        for context, batch_size in asked.sizes if takers else ():
            pool = fill_pool(layers[0], 1 + batch_size, context, asked.stage.device, [BOUND])
            places = [
                Place(pool, layer, width, chunk) for layer in layers for width in (1, VERIFIED) for chunk in CHUNKS
            ]
            cases = ((backend, "auto", place) for backend in takers for place in places)
            yield from each(cases, lambda backend, _, place: _beside_halves(place, backend, asked.stage))


def _beside_halves(place: Place, backend: type[AttentionBackend], stage: Stage) -> Row:
    pool, layer = place.pool, place.layer
    workload = Workload(PAGE_SIZE, (layer,), DTYPE)
    made = backend(pool.capacity, pool.geometry, stage.device, workload=workload)
    halves = [
        one_step(pool, place.chunk, requests=slice(0, 1)),
        one_step(pool, place.width, requests=slice(1, None)),
    ]
    num_rows = place.chunk + place.width * (pool.batch_size - 1)
    q = torch.randn(num_rows, layer.num_heads, layer.head_dim, dtype=DTYPE, device=stage.device)

    def attend(steps: Sequence[Step]) -> Callable[..., Tensor]:
        planned = [made.init_forward_metadata(step) for step in steps]
        queries = q.split([step.num_tokens for step in steps])

        def call(cache: Any) -> Tensor:
            out = [made.forward(own, cache, meta.at(), layer).out for own, meta in zip(queries, planned, strict=True)]
            return out[0] if len(out) == 1 else torch.cat(out)

        return call

    both = [capture(attend(steps), pool.caches, stage) for steps in ([mixed_step(halves)], halves)]
    times = take_turns([one.graph.replay for one in both], stage.rounds, stage.clock)
    us, peer_us = (time / len(pool.caches) for time in times)
    check_same(both[0].output, both[1].output)
    names = [made.kernel_of(step.kind).name for step in halves]
    peer = f"chunk {place.chunk}, two steps: {', '.join(names)}"
    return compared("mixed", backend.name, names[0], place, us, peer, peer_us)
