"""`benchmarks eager`: how long the host is kept by the layers of an eager step, and by its metadata.

A loop of layers, each a store and a forward, on one metadata and without a wait, beside the same loop of a raw scatter
and the vendor's raw call; for our own kernels, beside the functions that launch them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from attn_backends import results
from attn_backends.cache import CacheInputs, KeyValues, Latents, PagedCache, PagedKV
from attn_backends.cli.consoles import output_console
from attn_backends.contract.kernel import LayerShape
from attn_backends.errors import BackendUnavailableError
from attn_backends.registry import get_backend
from benchmarks.cli_options import recorded, refuse_options
from benchmarks.host import HostClock, WallClock, Work, calibration, take_host_turns
from benchmarks.peers import PEERS
from benchmarks.rows import Missing, missing
from benchmarks.shapes import LAYERS, Problem, fill_pool, problem
from spec_metadata import StepKind, write_slots

KERNELS = (("fa3", "vllm_flash_attn"), ("fa3", "triton"), ("trtllm_mla", "flashmla"), ("trtllm_mla", "triton"))
NUM_LAYERS, BATCH_SIZE, CONTEXT, WIDTH = 80, 8, 4096, 4
ROUNDS, QUICK_ROUNDS = 20, 5
LAYER_TARGET, METADATA_TARGET = 60.0, 80.0  # microseconds, of a layer over its peer, and of a step's metadata


@dataclass(frozen=True, slots=True)
class EagerRow:
    """Host time in microseconds. layer_us: of store and forward of a layer. peer_us: of what it is compared with,
    over_us: the difference. metadata_us: of `init_forward_metadata`. loop_us: of the calibration loop.
    """

    bench: str
    backend: str
    kernel: str
    layers: int
    batch_size: int
    width: int
    layer_us: float
    peer: str
    peer_us: float
    over_us: float
    metadata_us: float
    loop_us: float

    @property
    def misses(self) -> bool:
        """It misses a target, on a host as fast as that of the targets or slower."""
        return self.over_us > LAYER_TARGET or self.metadata_us > METADATA_TARGET


Peer = Callable[[Problem, Any], tuple[str, Callable[[PagedCache], object]]]
"""A problem and its metadata -> the name of what a layer's forward is compared with, and its call."""


def raw_call(kernel: str) -> Peer:
    """The vendor's own call; of our kernel, the function that launches it."""

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


def measure(
    backend: str, kernel: str, peer: Peer, device: torch.device, clock: HostClock, rounds: int, num_layers: int
) -> EagerRow:
    """One kernel of a backend."""
    made_by = get_backend(backend)
    format = next(each for each in LAYERS if each in made_by.formats)
    pool = fill_pool(format, BATCH_SIZE, CONTEXT, device)
    asked = problem(pool, LAYERS[format][0], WIDTH)
    step, layers = asked.step, [replace(asked.layer, id=index) for index in range(num_layers)]
    made = made_by(pool.capacity, pool.geometry, device, kernel={step.kind: kernel})
    caches = list(islice(cycle(pool.caches), num_layers))
    inputs, meta, slots = _inputs(asked, pool.caches[0]), made.init_forward_metadata(step), write_slots(step)

    def attend() -> None:
        at = meta.at()
        for layer, cache in zip(layers, caches, strict=True):
            made.store(inputs, cache, at, layer)
            made.forward(asked.q, cache, at, layer)

    name, call = peer(asked, meta)

    def attend_raw() -> None:
        for cache in caches:
            _scatter(cache, inputs, slots)
            call(cache)

    works = [Work(lambda: attend), Work(lambda: attend_raw), Work(lambda: lambda: made.init_forward_metadata(step))]
    times = take_host_turns([*works, calibration()], [rounds] * 4, clock)
    layer_us, peer_us, metadata_us, loop_us = times[0] / num_layers, times[1] / num_layers, *times[2:]
    return EagerRow(
        bench="eager",
        backend=backend,
        kernel=kernel,
        layers=num_layers,
        batch_size=BATCH_SIZE,
        width=WIDTH,
        layer_us=round(layer_us, 1),
        peer=f"scatter and {name}",
        peer_us=round(peer_us, 1),
        over_us=round(layer_us - peer_us, 1),
        metadata_us=round(metadata_us, 1),
        loop_us=round(loop_us, 1),
    )


def _inputs(asked: Problem, cache: PagedCache) -> CacheInputs:
    """Rows of a step to store."""
    num_tokens = asked.q.shape[0]
    if isinstance(cache, PagedKV):
        k, v = (asked.q.new_zeros(num_tokens, *pages.shape[2:]) for pages in cache.pages)
        return KeyValues(k, v)
    return Latents(asked.q.new_zeros(num_tokens, cache.latent.shape[2]))


def _scatter(cache: PagedCache, inputs: CacheInputs, slots: Tensor) -> None:
    """Write rows to slots as torch does."""
    if isinstance(cache, PagedKV):
        assert isinstance(inputs, KeyValues)
        cache.k.view(-1, *cache.k.shape[2:])[slots] = inputs.k
        cache.v.view(-1, *cache.v.shape[2:])[slots] = inputs.v
    else:
        assert isinstance(inputs, Latents)
        cache.latent.view(-1, cache.latent.shape[2])[slots] = inputs.latent


def rows(rounds: int, backends: Collection[str]) -> Iterator[EagerRow | Missing]:
    """Every kernel that runs here, of some backends or all."""
    device = torch.device("cuda", torch.cuda.current_device())
    for backend, kernel in (each for each in KERNELS if not backends or each[0] in backends):
        try:
            yield measure(backend, kernel, raw_call(kernel), device, WallClock(), rounds, NUM_LAYERS)
        except Exception as error:  # of a vendor, which may raise anything; the others are measured all the same
            yield missing(get_backend(backend), kernel, str(StepKind.TARGET_VERIFY), error)


def run(args: argparse.Namespace) -> int:
    """Measure, print rows as they come, write the JSON; 1 if something failed or misses its target."""
    results.check_output("--json", args.json)
    refuse_options(args, "set", "batch_size", "context", "page_size", "topk")
    if not torch.cuda.is_available():
        raise BackendUnavailableError("benchmarks eager", ["torch sees no CUDA device"], "It times a GPU's host.")
    console, absent, is_bad = output_console(), list[Missing](), False
    with (
        results.Recording(args.json, results.head(args.words, "cuda")) as recording,
        recorded(recording, "bench eager") as on_row,
    ):
        for row in rows(QUICK_ROUNDS if args.quick else ROUNDS, args.backend):
            if isinstance(row, Missing):
                absent.append(row)
                is_bad |= row.failed
            else:
                on_row(row)
                is_bad |= row.misses
            console.print(row, soft_wrap=True)
        recording.finish(missing=[asdict(each) for each in absent])
    return int(is_bad)
