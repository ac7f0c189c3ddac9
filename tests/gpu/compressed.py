"""The operators of compressed layers on a GPU, in Triton, against their definitions on the CPU; and their times.

    python -m tests.gpu.compressed --json docs/results/h200/compressed.json

Needs a GPU with Triton. Bytes, states and selections of scores with ties must be the definition's; entries are compared
with it within a rounding step. Timed are a captured launch of each, `tests.gpu.sparse.timings` has FlashMLA's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_backends import results
from attn_backends.kernels import compressor_operators, fp8_pages, sparse_operators, torch_compressed
from attn_backends.kernels.torch_compressed import Keys
from benchmarks.timing import CudaClock, take_turns
from tests.compressed_arguments import attention_scene, entry_scene, index_scene, poisoned
from tests.gpu.sparse import REPEATS, many

DEVICE = torch.device("cuda")


def on_gpu(arguments: list[Any]) -> list[Any]:
    """Arguments on the GPU, with the strides that they have."""

    def moved(x: Any) -> Any:
        if isinstance(x, Keys):
            return Keys(*(moved(part) for part in x))
        if not isinstance(x, Tensor):
            return x
        copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)
        return copy.copy_(x)

    return [moved(x) for x in arguments]


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether every element is within a relative and absolute error, NaN where it must be."""
    return torch.allclose(found.cpu().float(), expected.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


def rows_are_written() -> Iterator[tuple[str, bool]]:
    for bytes, dtype in ((True, torch.float32), (True, torch.bfloat16), (False, torch.bfloat16)):
        rows = torch.randn(2000, 512) * torch.randn(2000, 512).exp2() * torch.logspace(-7, 5, 2000).unsqueeze(1)
        rows, slots = rows.to(dtype), torch.randperm(2400)[:2000]
        slots[5:9] = -1
        pages = [poisoned(10, 240, 512, bytes) for _ in range(2)]
        (found,) = on_gpu(pages[:1])
        compressor_operators._write_rows_cuda(found, 240, *on_gpu([slots, rows]), 0)
        torch_compressed.write_rows(pages[1], 240, slots, rows, 9)
        yield f"rows of {dtype} in {'bytes' if bytes else 'float32'}", close(found, pages[1], 0)


def states_are_written() -> Iterator[tuple[str, bool]]:
    values, gates = torch.randn(700, 1024).bfloat16(), torch.randn(1024, 700).T
    slots, pages = torch.randperm(720)[:700].int(), [poisoned(3, 240, 2048, False) for _ in range(2)]
    (found,) = on_gpu(pages[:1])
    compressor_operators._write_states_cuda(found, *on_gpu([slots, values, gates]), 0)
    torch_compressed.write_rows(pages[1], 240, slots, torch.cat((values, gates), dim=1), 0)
    yield "states", close(found, pages[1], 0)


def entries_are_written() -> Iterator[tuple[str, bool]]:
    for ratio, dim, overlap, bytes in (
        (4, 512, True, True),
        (128, 512, False, True),
        (4, 128, True, False),
        (3, 24, True, False),
    ):
        for position in (40, 1_000_000):
            arguments = entry_scene(ratio, dim, overlap=overlap, position=position)
            pages = [poisoned(3, 4, dim, bytes) for _ in range(2)]
            (found,) = on_gpu(pages[:1])
            compressor_operators._write_entries_cuda(found, 4, *on_gpu(arguments), 0)
            entries = torch_compressed.make_entries(*arguments[1:])
            torch_compressed.write_rows(pages[1], 4, arguments[0], entries, 2)
            if bytes:
                live = arguments[0][arguments[0] >= 0]
                right = close(*(torch_compressed.read_rows(p.cpu(), 4, live) for p in (found, pages[1])), 2**-3)
                right = right and int((found.cpu() != pages[1]).sum()) < 0.05 * 584 * len(live)
            else:
                right = close(found, pages[1], 1e-5)
            yield f"entries of ratio {ratio}, {dim} elements, at {position}", right


def entries_are_selected() -> Iterator[tuple[str, bool]]:
    for ties, dtype in ((True, torch.float32), (True, torch.bfloat16), (False, torch.float32)):
        for topk in (1, 5, 16):
            arguments = index_scene([5, 1, 3, 2], [30, 32, 4, 17], 5, ties=ties)
            arguments[0], arguments[2] = arguments[0].to(dtype), arguments[2].to(dtype)
            found = sparse_operators._select_cuda(*on_gpu(arguments), 5, topk).cpu()
            expected = torch_compressed.select_entries(*arguments, 5, topk)
            same = torch.equal(found.sort().values, expected.sort().values)
            yield f"selection of {topk}, {dtype}{', ties' if ties else ''}", same
    arguments = long_selection(4, 9000, ties=True)
    found = sparse_operators._select_cuda(*arguments, 2, 512).cpu()
    expected = torch_compressed.select_entries(*(x.cpu() for x in arguments), 2, 512)
    yield "selection of 512 of 9000, ties", torch.equal(found.sort().values, expected.sort().values)


def rows_attend() -> Iterator[tuple[str, bool]]:
    for heads, dim, bytes, dtype, tolerance in (
        (3, 40, False, torch.float32, 1e-5),
        (20, 512, True, torch.float32, 1e-4),
        (70, 512, True, torch.bfloat16, 3e-2),
        (70, 512, False, torch.bfloat16, 3e-2),
        (5, 96, False, torch.float16, 4e-3),
        (5, 512, True, torch.float16, 4e-3),
    ):
        q, sources = attention_scene(heads, dim, bytes=bytes)
        q = q.to(dtype)
        if not bytes:
            sources = [source._replace(pages=source.pages.to(dtype)) for source in sources]
        logits = torch.randn(heads)
        gpu_q, gpu_sinks, *gpu_sources = on_gpu([q, logits, *sources])
        out, lse = sparse_operators.sparse_attention(gpu_q, *gpu_sources, dim**-0.5, gpu_sinks)
        again, _ = sparse_operators.sparse_attention(gpu_q, *gpu_sources, dim**-0.5, gpu_sinks)
        expected, expected_lse = torch_compressed.attend_rows(q, sources, dim**-0.5, logits)
        right = close(out, expected, tolerance) and close(lse, expected_lse, tolerance)
        name = f"attention of {heads} heads of {dim}, {dtype}{', bytes' if bytes else ''}"
        yield name, right and torch.equal(out, again)


def long_selection(bs: int, num_entries: int, *, ties: bool = False, rows: int = 2) -> list[Tensor]:
    """Arguments of `select_entries` as of a served model: 64 heads of 128, pages of 64 entries."""
    per_page, heads, dim = 64, 64, 128
    max_pages = -(-num_entries // per_page)
    keys, q = torch.randn(bs * max_pages, per_page, dim), torch.randn(bs * rows, heads, dim)
    if ties:  # whole numbers, whose sums are exact in any order
        keys, q = keys.round() * (torch.rand(keys.shape[:2]) < 0.3).unsqueeze(2), q.round()
    weights = torch.randn(bs * rows, heads).mul(4).round() / 4
    starts, request = torch.arange(bs + 1) * rows, torch.arange(bs).repeat_interleave(rows)
    visible = (num_entries - rows + 1 + torch.arange(rows)).repeat(bs)
    table = torch.randperm(bs * max_pages).view(bs, max_pages)
    given = [q.bfloat16(), weights, keys.bfloat16(), *(x.int() for x in (table, starts, request, visible))]
    return [x.to(DEVICE) for x in given]


def timings() -> Iterator[dict]:
    """Device time of launches as of a served model at batch 128, of the indexer at batch 32 over 32k tokens."""
    runs: dict[str, Callable[[], object]] = {}
    for rows in (1, 4):
        arguments = long_selection(32, 8192, rows=rows)
        runs[f"select 512 of 8192, 32 requests of {rows}"] = lambda a=arguments, n=rows: sparse_operators._select_cuda(
            *a, n, 512
        )
    for ratio, dim, overlap in ((4, 512, True), (4, 128, True), (128, 512, False)):
        runs[f"entries of ratio {ratio}, {dim} elements, 128 rows"] = closing(ratio, dim, overlap)
    values, slots = torch.randn(128, 1024, device=DEVICE).bfloat16(), torch.arange(128, device=DEVICE).int()
    states, pages = torch.zeros(64, 10, 2048, device=DEVICE), poisoned(4, 64, 512, True).to(DEVICE)
    runs["states of 1024 channels, 128 rows"] = lambda: compressor_operators._write_states_cuda(
        states, slots, values, values, 0
    )
    runs["rows in bytes, 128 rows"] = lambda: compressor_operators._write_rows_cuda(
        pages, 64, slots, values[:, :512], 0
    )
    graphs = [many(run) for run in runs.values()]
    for name, time in zip(runs, take_turns(graphs, 10, CudaClock()), strict=True):
        yield {"launch": name, "us": round(time / REPEATS, 1)}


def closing(ratio: int, dim: int, overlap: bool) -> Callable[[], object]:
    """A decode of 128 rows, of which one in `ratio` closes an entry."""
    made, channels = max(1, 128 // ratio), dim * (1 + overlap)
    window, num_entries = ratio * (1 + overlap), 128
    slots = torch.where(torch.arange(num_entries) < made, torch.arange(num_entries), -1)
    states = torch.randn(256, ratio * 2 + 4, 2 * channels)
    reads = torch.randint(0, 256 * states.shape[1], (num_entries, window))
    inputs = torch.full((num_entries, window), -1)
    inputs[:, -1], reads[:, -1] = torch.arange(num_entries), -1
    values = torch.randn(128, channels).bfloat16()
    made_of = [torch.randn(ratio, channels), torch.rand(dim), 1e-6, torch.rand(32), overlap]
    integers = [x.int() for x in (inputs, reads, torch.zeros(num_entries))]
    arguments = on_gpu([slots.int(), values, values, states, *integers, *made_of])
    bytes = dim == fp8_pages.ROW_DIM
    pages = poisoned(4, 64, dim, bytes).to(DEVICE)
    return lambda: compressor_operators._write_entries_cuda(pages, 64, *arguments, 0)


def main() -> int:
    """Run every check and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="file to write")
    path = parser.parse_args().json
    torch.manual_seed(0)
    head = results.head(["python", "-m", "tests.gpu.compressed", "--json", str(path)], "cuda")
    checks = (rows_are_written, states_are_written, entries_are_written, entries_are_selected, rows_attend)
    rows = [{"case": name, "status": "pass" if right else "fail"} for check in checks for name, right in check()]
    times = list(timings())
    results.write(path, head, rows, timings=times)
    wrong = [row for row in rows if row["status"] != "pass"]
    print(*wrong, *times, sep="\n")
    print(f"{len(rows)} ran, {len(wrong)} not as they must be")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
