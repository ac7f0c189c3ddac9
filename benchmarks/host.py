"""Host times: of the layers of an eager step and its metadata, and of making the steps of a cycle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle, islice, product
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheInputs, KeyValues, Latents, PagedCache, PagedKV, PagedLatent
from attn_backends.contract.kernel import LayerShape
from benchmarks.peers import PEERS
from benchmarks.rows import Asked, Missing, Row, Size, each
from benchmarks.shapes import LAYERS, Problem, fill_pool, problem
from benchmarks.speculation import NUM_STEPS, Tables, speculative
from benchmarks.timing import CALIBRATION, Work, take_host_turns
from spec_metadata import BlockTable, Paging, Step, UniformQuery, write_slots
from spec_metadata.layout import HostBounds

KERNELS = {"fa3": ("vllm_flash_attn", "triton"), "trtllm_mla": ("flashmla", "triton")}
NUM_LAYERS, WIDTH, PAGE_SIZE = 80, 4, 64
TABLES, SLOTS, BOUNDS = ("request", "block"), ("given", "left out"), ("none", "max_committed", "seq_lens_cpu")

RawCall = Callable[[Problem, Any], tuple[str, Callable[[PagedCache], object]]]  # of a problem and its metadata


def eager(asked: Asked) -> Iterator[Row | Missing]:
    """A loop of layers, each a store and a forward, on one metadata and without a wait, beside the same loop of a raw
    scatter and the vendor's raw call. Our own kernels are compared with the function that launches them.
    """
    takers = [backend for backend in asked.backends if backend.name in KERNELS]
    absent = [backend for backend in asked.backends if backend not in takers]
    yield from (Missing(each.name, "", "", "no raw call to measure eager layers beside", False) for each in absent)
    cases = ((backend, kernel, size) for backend in takers for kernel in KERNELS[backend.name] for size in asked.sizes)
    yield from each(cases, lambda backend, kernel, size: eager_row(backend, kernel, raw_call(kernel), size, asked))


def raw_call(kernel: str) -> RawCall:
    """The vendor's own call, or our launcher's, to compare a kernel's layers with."""

    def vendor(asked: Problem, meta: Any) -> tuple[str, Callable[[PagedCache], object]]:
        peer = PEERS[kernel](asked)
        return peer.name, peer.call

    def launcher(asked: Problem, meta: Any) -> tuple[str, Callable[[PagedCache], object]]:
        from attn_backends.kernels import triton_decode

        layer, q = asked.layer, asked.q
        scratch = meta.schedules.planned(0, LayerShape.of(layer, q.dtype, q.dtype)).schedule
        rest = (*scratch.keys, layer.scale, 1.0, 1.0, *scratch.partial)
        return "launch", lambda cache: triton_decode.paged_attention(q, *cache.pages, *rest)

    return launcher if kernel == "triton" else vendor


def eager_row(backend: type[AttentionBackend], kernel: str, raw: RawCall, size: Size, asked: Asked) -> Row:
    """One kernel of a backend. layer_us: of store and forward of a layer. over_us: beyond its peer. metadata_us: of
    `init_forward_metadata`. loop_us: of the calibration loop.
    """
    format = next(each for each in LAYERS if each in backend.formats)
    pool = fill_pool(LAYERS[format][0], size.batch_size, size.context, asked.stage.device)
    given = problem(pool, LAYERS[format][0], WIDTH)
    step, layers = given.step, [replace(given.layer, id=index) for index in range(NUM_LAYERS)]
    made = backend(pool.capacity, pool.geometry, asked.stage.device, kernel={step.kind: kernel})
    caches = list(islice(cycle(pool.caches), NUM_LAYERS))
    inputs, meta, slots = _inputs(given, pool.caches[0]), made.init_forward_metadata(step), write_slots(step)

    def attend() -> None:
        at = meta.at()
        for layer, cache in zip(layers, caches, strict=True):
            made.store(inputs, cache, at, layer)
            made.forward(given.q, cache, at, layer)

    name, call = raw(given, meta)

    def attend_raw() -> None:
        for cache in caches:
            _scatter(cache, inputs, slots)
            call(cache)

    works = [Work.of(attend), Work.of(attend_raw), Work.of(lambda: made.init_forward_metadata(step)), CALIBRATION]
    layers_us, raw_us, metadata_us, loop_us = take_host_turns(works, asked.stage.rounds, asked.stage.device)
    place = {"bench": "eager", "backend": backend.name, "kernel": kernel, "layers": NUM_LAYERS}
    place |= {"batch_size": size.batch_size, "width": WIDTH}
    us = {"layer_us": layers_us, "peer_us": raw_us, "over_us": layers_us - raw_us}
    us = {of: time / NUM_LAYERS for of, time in us.items()} | {"metadata_us": metadata_us, "loop_us": loop_us}
    return place | {"peer": f"scatter and {name}"} | {of: round(time, 1) for of, time in us.items()}


def _inputs(asked: Problem, cache: PagedCache) -> CacheInputs:
    """Rows of a step to store."""
    num_tokens = asked.q.shape[0]
    if isinstance(cache, PagedKV):
        k, v = (asked.q.new_zeros(num_tokens, *pages.shape[2:]) for pages in cache.pages)
        return KeyValues(k, v)
    return Latents(asked.q.new_zeros(num_tokens, cache.latent.shape[2]))


def _scatter(cache: PagedCache, inputs: CacheInputs, slots: Tensor) -> None:
    """Write rows to slots as torch does."""
    if isinstance(inputs, KeyValues):
        for pages, rows in zip(cache.pages, (inputs.k, inputs.v), strict=True):
            pages.view(-1, *pages.shape[2:])[slots] = rows
    elif isinstance(cache, PagedLatent):
        cache.latent.view(-1, cache.latent.shape[2])[slots] = inputs.latent


def steps(asked: Asked) -> Iterator[Row]:
    """Making the three steps of a cycle from tensors that an engine has. operators: that torch was asked for, as every
    launch and allocation is one.
    """
    for context, batch_size in asked.sizes:
        named = dict(cycles(batch_size, context, asked.stage.device))
        works = [*map(Work.of, named.values()), CALIBRATION]
        *times, loop_us = take_host_turns(works, asked.stage.rounds, asked.stage.device)
        for (table, slots, bounds), us in zip(named, times, strict=True):
            with Operators() as operators:
                named[table, slots, bounds]()
            row = {"bench": "steps", "table": table, "slots": slots, "bounds": bounds, "batch_size": batch_size}
            yield row | {"us": round(us, 2), "operators": operators.num, "loop_us": round(loop_us, 1)}


class Operators(TorchDispatchMode):
    """Counts what torch is asked for."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def cycles(
    batch_size: int, context: int, device: torch.device
) -> Iterator[tuple[tuple[str, str, str], Callable[[], list[Step]]]]:
    """Functions that make the steps of a cycle, by their inputs."""
    tables = Tables.of(speculative(batch_size, context, PAGE_SIZE, 1, NUM_STEPS), device)
    request = tables.paging(batch_size)
    block = BlockTable(request.pages(tables.capacity.max_pages).int(), tables.geometry)
    lens = torch.full((batch_size,), context, dtype=torch.int32, device=device)
    given = [torch.arange(batch_size * num, device=device) for num in (NUM_STEPS, NUM_STEPS + 1)]
    bounds: dict[str, HostBounds] = {
        "none": {},
        "max_committed": {"max_committed": context},
        "seq_lens_cpu": {"max_committed": context, "seq_lens_cpu": [context] * batch_size},
    }
    for table, slots, bound in product(TABLES, SLOTS, BOUNDS):
        paging = request if table == "request" else block
        own = given if slots == "given" else [None, None]
        yield (table, slots, bound), partial(make_steps, lens, paging, own, bounds[bound])


def make_steps(lens: Tensor, paging: Paging, slots: list[Any], host: HostBounds) -> list[Step]:
    """The three steps of a cycle. slots: of the draft, and of the verify and the extend; None where left out."""
    return [
        Step.draft_decode(1, NUM_STEPS, lens, paging, slots[0], **host),
        Step.target_verify(NUM_STEPS + 1, lens, paging, slots[1], **host),
        Step.draft_extend(UniformQuery(NUM_STEPS + 1), lens, paging, slots[1], **host),
    ]
