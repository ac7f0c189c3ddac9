"""Compare the operators' Triton kernels with their torch definition on a GPU, through CUDA graphs, and time them.

    python -m tests.gpu.operators [--only TEXT]

Each row is captured on one set of inputs and replayed on another. `tree_join` is held to its torch definition in
float64, the stores to the bits of theirs on the CPU. The cache is NaN but for the drafted tokens, and
an eighth of the query rows has no prefix. Times are of one call among many in a graph, median; the floor is what the
call must read and write at 4 TB/s. Exits with 1 if a row fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from attn_backends.graphs import CudaGraph
from attn_backends.kernels import operators

DEVICE = torch.device("cuda")
BANDWIDTH = 4e12
CALLS, REPLAYS = 20, 15
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer; one KV head is MLA, whose values are the first elements of its keys."""

    name: str
    num_heads: int
    num_kv_heads: int
    dim: int
    v_dim: int


LAYERS = [
    Layer("MLA 16", 16, 1, 576, 512),
    Layer("MLA 128", 128, 1, 576, 512),
    Layer("GQA 32/8", 32, 8, 128, 128),
    Layer("GQA 4/2", 4, 2, 64, 64),
]
SHAPES = {"verify 4": (4, 4), "verify 16": (16, 16), "verify 64": (64, 64), "draft 4x3": (4, 12)}  # width, num_keys
TYPES = [(BF16, BF16), (BF16, FP8), (FP16, FP16), (FP16, FP8), (FP32, FP32), (BF16, FP32)]  # queries, cache


@dataclass
class Row:
    """One comparison: largest error against what is allowed, and microseconds of a call."""

    name: str
    error: float
    budget: float
    microseconds: float
    floor: float

    def __str__(self) -> str:
        status = "ok  " if self.error <= self.budget else "FAIL"
        times = f"{self.microseconds:8.1f} us  floor {self.floor:7.1f}"
        return f"{status} {self.name:<58} error {self.error:.1e} of {self.budget:.1e}  {times}"


def microseconds(call: Callable[[], object]) -> float:
    """Time of one call among CALLS in a graph."""

    def region() -> None:
        for _ in range(CALLS):
            call()

    graph, times = CudaGraph(), []
    graph.capture(region)
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / CALLS)
    return median(times)


def tree_inputs(
    layer: Layer, bs: int, width: int, num_keys: int, q_type: torch.dtype, cache: torch.dtype, num_pages: int
) -> list[Tensor]:
    """Tensors of `tree_join`, the log-sum-exp a transposed view as vendors return it."""
    page_size, rows = 64, bs * width
    slots = torch.randperm(num_pages * page_size, device=DEVICE)[: bs * num_keys].view(bs, num_keys)
    latent = layer.num_kv_heads == 1
    entry = layer.dim + (0 if latent else layer.v_dim)
    entries = torch.full((num_pages * page_size, layer.num_kv_heads, entry), float("nan"), device=DEVICE)
    entries[slots.flatten()] = torch.randn(bs * num_keys, layer.num_kv_heads, entry, device=DEVICE)
    pages = entries.to(cache).unflatten(0, (num_pages, page_size))
    k, v = pages[..., : layer.dim], pages[..., : layer.v_dim] if latent else pages[..., layer.dim :]
    mask = torch.rand(bs, width, num_keys, device=DEVICE) < 0.4
    mask |= torch.arange(num_keys, device=DEVICE) == torch.arange(width, device=DEVICE).unsqueeze(1)
    q = torch.randn(rows, layer.num_heads, layer.dim, device=DEVICE, dtype=q_type)
    prefix_out = torch.randn(rows, layer.num_heads, layer.v_dim, device=DEVICE, dtype=q_type)
    prefix_lse = torch.randn(layer.num_heads, rows, device=DEVICE).T
    prefix_out[::8], prefix_lse[::8] = float("nan"), float("-inf")
    return [q, k, v, slots, mask, prefix_out, prefix_lse]


def overwrite(old: list[Tensor], new: list[Tensor]) -> None:
    """Put new values into the memory that a graph was captured with. An overlap is written twice with the same."""
    for before, after in zip(old, new, strict=True):
        before.copy_(after)


def tree_row(
    layer: Layer, shape: str, bs: int, q_type: torch.dtype, cache: torch.dtype, num_pages: int | None = None
) -> Row:
    """Capture on one tree, replay on another, compare with float64. num_pages: None for twice those needed."""
    width, num_keys = SHAPES[shape]
    num_pages = num_pages or bs * num_keys // 32 + 1
    tensors, others = (tree_inputs(layer, bs, width, num_keys, q_type, cache, num_pages) for _ in range(2))
    scales = (layer.dim**-0.5, 0.5, 2.0) if cache is FP8 else (layer.dim**-0.5, 1.0, 1.0)
    graph = CudaGraph()
    out, lse = graph.capture(lambda: operators.tree_join(*tensors, *scales))
    overwrite(tensors, others)
    graph.replay()
    exact = [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]
    expected, expected_lse = operators.tree_join(*exact, *scales)
    step = torch.finfo(q_type).eps * (1 if q_type.itemsize == 2 else 32)
    allowed = step * float(expected.abs().max().clamp_min(1))
    allowed_lse = 1e-5 * float(expected_lse.abs().max().clamp_min(1))
    error, error_lse = float((out - expected).abs().max()), float((lse - expected_lse).abs().max())
    if not error_lse <= allowed_lse:  # also if it is NaN
        error = float("inf")
    time = microseconds(lambda: operators.tree_join(*tensors, *scales))
    moved = sum(tensor.numel() * tensor.element_size() for tensor in (tensors[0], tensors[5], tensors[6], out, lse))
    moved += bs * num_keys * layer.num_kv_heads * (layer.dim + layer.v_dim) * cache.itemsize
    name = f"tree_join  {layer.name}  {shape}  bs {bs}  {_short(q_type)}, cache {_short(cache)}"
    return Row(name, error, allowed, time, moved / BANDWIDTH * 1e6)


def store_row(layer: Layer, num_tokens: int, rows_type: torch.dtype, cache: torch.dtype, num_pages: int = 64) -> Row:
    """Capture on some slots, replay on others and other rows, compare bits with the CPU. A large pool keeps both its
    ends: addresses past 2**31 elements.
    """
    page_size, scales = 64, (0.3, 1.7) if cache is FP8 else (1.0, 1.0)
    sizes = [layer.dim] if layer.num_kv_heads == 1 else [layer.dim, layer.v_dim]
    heads = [] if layer.num_kv_heads == 1 else [layer.num_kv_heads]
    pages = [torch.zeros(num_pages, page_size, *heads, size, device=DEVICE, dtype=cache) for size in sizes]
    rows = [torch.zeros(num_tokens, *heads, size, device=DEVICE, dtype=rows_type) for size in sizes]
    slots = torch.arange(num_tokens, device=DEVICE)
    arguments = [*pages, *rows, slots, *scales[: len(sizes)]]
    store = operators.store_kv if heads else operators.store_rows
    graph = CudaGraph()
    graph.capture(lambda: store(*arguments))
    for x in rows:
        x.copy_(torch.randn(x.shape, device=DEVICE) * 10.0 ** torch.randint(-5, 4, x.shape, device=DEVICE))
        x[0] = float("nan")
    slots.copy_(num_pages * page_size - 1 - torch.randperm(2 * num_tokens, device=DEVICE)[:num_tokens])
    graph.replay()
    first = num_pages - -(-2 * num_tokens // page_size)  # the page from which on anything is written
    expected = [torch.zeros_like(x[first:], device="cpu") for x in pages]
    on_cpu = [x.cpu() for x in rows]
    store(*expected, *on_cpu, slots.cpu() - first * page_size, *scales[: len(sizes)])
    same = [_bits(x[first:].cpu(), y) for x, y in zip(pages, expected, strict=True)]
    same += [not x[:first].view(torch.uint8).any() for x in pages]
    time = microseconds(lambda: store(*arguments))
    moved = sum(x.numel() * (x.element_size() + cache.itemsize) for x in rows)
    name = f"{store.__name__}  {layer.name}  {num_tokens} tokens, {num_pages} pages  {_short(rows_type)}"
    return Row(f"{name}, cache {_short(cache)}", 0.0 if all(same) else 1.0, 0.0, time, moved / BANDWIDTH * 1e6)


def ring_row(bs: int, width: int, size: int, dim: int, dtype: torch.dtype) -> Row:
    """Capture on positions that bring nothing, replay on some, compare bits with the CPU."""
    rings = torch.randn(bs + 1, size, dim, device=DEVICE, dtype=dtype)
    token_rings = torch.zeros(bs + 1, size, device=DEVICE, dtype=torch.int64)
    hidden = torch.randn(bs * width, dim, device=DEVICE, dtype=dtype)
    tokens = torch.arange(1, bs * width + 1, device=DEVICE)
    rows = torch.randperm(bs + 1, device=DEVICE)[:bs]
    starts, ends = torch.zeros(2, bs, device=DEVICE, dtype=torch.int32)
    arguments = [rings, token_rings, hidden, tokens, rows, starts, ends, torch.arange(bs, device=DEVICE) * width]
    graph = CudaGraph()
    graph.capture(lambda: operators.store_ring(*arguments))
    starts.copy_(torch.randint(10**6, (bs,), device=DEVICE))
    ends.copy_(starts + torch.randint(1, width + 1, (bs,), device=DEVICE))
    hidden[0] = float("nan")
    expected = [x.cpu() for x in arguments]
    operators.store_ring(*expected)
    graph.replay()
    same = [_bits(x.cpu(), y) for x, y in zip(arguments[:2], expected, strict=False)]
    time = microseconds(lambda: operators.store_ring(*arguments))
    moved = 2 * bs * min(size, width) * dim * dtype.itemsize
    name = f"store_ring  bs {bs}, {width} positions, ring of {size}, {dim} wide  {_short(dtype)}"
    return Row(name, 0.0 if all(same) else 1.0, 0.0, time, moved / BANDWIDTH * 1e6)


def _bits(given: Tensor, expected: Tensor) -> bool:
    return torch.equal(given.float().nan_to_num(12345.0), expected.float().nan_to_num(12345.0))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def calls() -> Iterator[tuple[str, Callable[[], Row]]]:
    """Every comparison, by what it compares."""
    for layer in LAYERS:
        for shape in SHAPES:
            for bs in (1, 32, 128):
                yield f"tree {layer.name} {shape}", lambda a=(layer, shape, bs, BF16, BF16): tree_row(*a)
        for types in TYPES[1:]:
            for shape in ("verify 16", "draft 4x3"):
                yield f"tree {layer.name} {shape}", lambda a=(layer, shape, 32, *types): tree_row(*a)
    for layer in LAYERS[1:]:
        for types in ((BF16, BF16), (BF16, FP8), (FP16, FP16), (FP16, FP8), (FP32, FP32), (FP32, BF16)):
            yield f"store {layer.name}", lambda a=(layer, 512, *types): store_row(*a)
        for num_tokens in (1, 128, 8192):
            yield f"store {layer.name}", lambda a=(layer, num_tokens, BF16, BF16, 512): store_row(*a)
    for bs in (1, 128):
        for dim, dtype in ((7168, BF16), (4096, FP16), (256, FP32), (256, torch.float64)):
            yield f"ring {dim}", lambda a=(bs, 4, 2, dim, dtype): ring_row(*a)
    yield "tree far", lambda: tree_row(LAYERS[0], "verify 16", 32, BF16, BF16, num_pages=2**16)
    yield "store far", lambda: store_row(LAYERS[1], 512, BF16, BF16, num_pages=2**16)


def main() -> int:
    """Run the comparisons and print a row of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the rows whose name has this text")
    only = parser.parse_args().only
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    failed = num_rows = 0
    for name, call in calls():
        if only in name:
            row = call()
            print(row, flush=True)
            num_rows += 1
            failed += not row.error <= row.budget
    print(f"{num_rows} rows, {failed} failed")
    return int(failed > 0 or num_rows == 0)


if __name__ == "__main__":
    sys.exit(main())
