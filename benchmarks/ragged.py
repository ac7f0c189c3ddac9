"""Verifies whose widths the device decides, beside the best kernel of one width; and mixed steps beside their halves.

A ragged verify is captured at the bound of `BOUND` rows per request. Every replay brings other widths, of `MEAN` rows
in the mean, and plans again; so does the uniform verify of `BOUND` rows that it is compared with, on whichever kernel
of any backend is fastest. A mixed step and its halves are planned outside of their graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.layer import AttentionLayer
from attn_backends.selection.choose import Workload
from benchmarks.attention import check_same
from benchmarks.kernels import Runnable
from benchmarks.rows import Missing, Row, Stage, missing
from benchmarks.shapes import DTYPE, LAYERS, PAGE_SIZE, Pool, fill_pool
from benchmarks.timing import take_turns
from spec_metadata import BlockTable, BoundedQuery, PackedQuery, Step, StepKind, mixed_step
from spec_metadata.layout import HostBounds

BOUND, MEAN, NUM_WIDTHS = 8, 2.5, 4
BUDGET = 0.6  # of the uniform verify's time, on the kernel that `auto` takes
CHUNKS, VERIFIED = (512, 2048), 4


@dataclass(frozen=True, slots=True, eq=False)
class Verify:
    """A verify that is captured once and planned again for each replay. output: what the graph writes."""

    output: Tensor
    replay: Callable[[], None]


def measure_ragged(
    kernels: Runnable, batch_sizes: Sequence[int], contexts: Sequence[int], stage: Stage
) -> Iterator[Row | Missing]:
    """Every kernel that captures packed verifies, on every dense layer, beside the best uniform one."""
    for format, layers in LAYERS.items():
        takers = [(b, k.name) for b, own in kernels.items() if format in b.formats for k in own]
        for context, batch_size in ((context, bs) for context in contexts for bs in batch_sizes if takers):
            pool = fill_pool(format, batch_size, context, stage.device, [BOUND])
            for layer in layers:
                yield from _compare(pool, layer, takers, stage)


def _compare(
    pool: Pool, layer: AttentionLayer, takers: Sequence[tuple[type[AttentionBackend], str]], stage: Stage
) -> Iterator[Row | Missing]:
    case = f"batch {pool.batch_size}, context {pool.context}, {layer.num_heads} heads"
    made: dict[tuple[str, str, bool], Verify] = {}
    kinds = {}
    for backend, kernel in takers:
        kinds[backend.name] = backend
        for ragged in (False, True):
            try:
                made[backend.name, kernel, ragged] = captured(pool, layer, backend, kernel, stage, ragged=ragged)
            except Exception as error:  # of a vendor, which may raise anything; the others are measured all the same
                yield missing(backend, kernel, f"{'ragged' if ragged else 'uniform'}, {case}", error)
    times = dict(zip(made, take_turns([each.replay for each in made.values()], stage.rounds, stage.clock), strict=True))
    uniform = {key: us for key, us in times.items() if not key[2]}
    if not uniform:
        return
    best = min(uniform, key=uniform.__getitem__)
    first = widths_of(pool.batch_size)[(1 + stage.rounds) % NUM_WIDTHS]  # those of the last replay
    for key, us in times.items():
        if not key[2]:
            continue
        try:
            check_same(made[key].output[: int(first.sum())], rows_of(made[best].output, first))
        except Exception as error:
            yield missing(kinds[key[0]], key[1], f"ragged, {case}", error)
            continue
        peer = f"{best[0]} {best[1]}, {BOUND} rows"
        yield _row(
            "ragged", key[0], key[1], pool, layer, BOUND, us / len(pool.caches), peer, times[best] / len(pool.caches)
        )


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


def captured(
    pool: Pool, layer: AttentionLayer, backend: type[AttentionBackend], kernel: str, stage: Stage, *, ragged: bool
) -> Verify:
    """A verify of the last rows of a pool's requests. Queries of a row are the same, ragged or not."""
    made = backend(pool.capacity, pool.geometry, stage.device, kernel={StepKind.TARGET_VERIFY: kernel})
    bs, num_tokens = pool.batch_size, pool.batch_size * BOUND
    bucket = pool.capacity.verify_bucket(bs, num_tokens)
    meta = made.capture(bucket if ragged else pool.capacity.bucket(StepKind.TARGET_VERIFY, bs), pool.table)
    generator = torch.Generator(stage.device).manual_seed(layer.num_heads)
    shape = (num_tokens, layer.num_heads, layer.head_dim)
    rows = torch.randn(shape, dtype=DTYPE, device=stage.device, generator=generator)
    every = [each.to(stage.device) for each in widths_of(bs)]
    queries = [_packed(rows, each) for each in widths_of(bs)] if ragged else [rows]
    steps = cycle([_step(pool, BoundedQuery(each, num_tokens, BOUND) if ragged else BOUND) for each in every])
    q, packed, graph = queries[0].clone(), cycle(queries), stage.make_graph()
    made.replay(meta, next(steps))
    q.copy_(next(packed))
    output = graph.capture(lambda: [made.forward(q, cache, meta.at(), layer).out for cache in pool.caches][-1])

    def replay() -> None:
        made.replay(meta, next(steps))
        q.copy_(next(packed))
        graph.replay()

    return Verify(output, replay)


def _packed(rows: Tensor, widths: Tensor) -> Tensor:
    """Those rows first that a ragged verify has, then others."""
    kept = rows_of(rows, widths)
    return torch.cat((kept, rows[: rows.shape[0] - kept.shape[0]]))


def _step(pool: Pool, query: int | BoundedQuery) -> Step:
    committed = pool.context - BOUND
    lens = torch.full((pool.batch_size,), committed, dtype=torch.int32, device=pool.pages.device)
    host: HostBounds = {"max_committed": committed, "seq_lens_cpu": [committed] * pool.batch_size}
    return Step.target_verify(query, lens, pool.table, **host)


def measure_mixed(
    backends: Sequence[type[AttentionBackend]], batch_sizes: Sequence[int], contexts: Sequence[int], stage: Stage
) -> Iterator[Row | Missing]:
    """A chunk of a prompt with decodes, or verifies, as one step and as two, on the kernels that `auto` takes."""
    for format, layers in LAYERS.items():
        for context, batch_size in ((context, bs) for context in contexts for bs in batch_sizes):
            pool = fill_pool(format, 1 + batch_size, context, stage.device, [BOUND])
            for backend in (each for each in backends if format in each.formats):
                for layer in layers:
                    for width, chunk in ((width, chunk) for width in (1, VERIFIED) for chunk in CHUNKS):
                        case = f"chunk {chunk}, batch {batch_size}, {layer.num_heads} heads, width {width}"
                        try:
                            yield _mixed(pool, layer, backend, width, chunk, stage)
                        except Exception as error:  # of a vendor
                            yield missing(backend, "auto", case, error)


def _mixed(
    pool: Pool, layer: AttentionLayer, backend: type[AttentionBackend], width: int, chunk: int, stage: Stage
) -> Row:
    workload = Workload(PAGE_SIZE, (layer,), DTYPE)
    made = backend(pool.capacity, pool.geometry, stage.device, workload=workload)
    halves = [_part(pool, slice(0, 1), chunk), _part(pool, slice(1, None), width)]
    num_rows, outputs, graphs = chunk + width * (pool.batch_size - 1), [], []
    q = torch.randn(num_rows, layer.num_heads, layer.head_dim, dtype=DTYPE, device=stage.device)
    for steps in ([mixed_step(halves)], halves):
        metas = [made.init_forward_metadata(step) for step in steps]
        sizes = [step.num_tokens for step in steps]

        def attend(metas: list = metas, sizes: list[int] = sizes) -> Tensor:
            return [
                torch.cat(
                    [
                        made.forward(own, cache, meta.at(), layer).out
                        for own, meta in zip(q.split(sizes), metas, strict=True)
                    ]
                )
                if len(metas) > 1
                else made.forward(q, cache, metas[0].at(), layer).out
                for cache in pool.caches
            ][-1]

        graphs.append(stage.make_graph())
        outputs.append(graphs[-1].capture(attend))
    us, peer_us = (
        each / len(pool.caches) for each in take_turns([g.replay for g in graphs], stage.rounds, stage.clock)
    )
    check_same(*outputs)
    names = [made.kernel_of(step.kind).name for step in halves]
    return _row(
        "mixed",
        backend.name,
        names[0],
        pool,
        layer,
        width,
        us,
        f"chunk {chunk}, two steps: {', '.join(names)}",
        peer_us,
    )


def _part(pool: Pool, requests: slice, width: int) -> Step:
    """The last rows of some requests: a chunk, decodes or verifies."""
    pages = pool.pages[requests]
    committed, table = pool.context - width, BlockTable(pages, pool.geometry)
    lens = torch.full((len(pages),), committed, dtype=torch.int32, device=pages.device)
    host: HostBounds = {"max_committed": committed, "seq_lens_cpu": [committed] * len(pages)}
    if width == 1:
        return Step.decode(lens, table, **host)
    if width > VERIFIED:
        return Step.prefill(PackedQuery.of([width] * len(pages), pages.device), lens, table, **host)
    return Step.target_verify(width, lens, table, **host)


def _row(
    bench: str,
    backend: str,
    kernel: str,
    pool: Pool,
    layer: AttentionLayer,
    width: int,
    us: float,
    peer: str,
    peer_us: float,
) -> Row:
    return Row(
        bench=bench,
        backend=backend,
        kernel=kernel,
        batch_size=pool.batch_size,
        context=pool.context,
        heads=layer.num_heads,
        width=width,
        us=round(us, 2),
        peer=peer,
        peer_us=round(peer_us, 2),
        ratio=round(us / peer_us, 4),
    )
