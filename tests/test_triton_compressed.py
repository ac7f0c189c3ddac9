"""The Triton kernels of compressed layers, run by the interpreter, and their operators, against the torch definitions.

The interpreter multiplies no bfloat16 and truncates where a GPU rounds to it, so queries are float32 here and what is
written as bfloat16 holds exactly; the rest is compared on a GPU (`attn-backends conformance dsv4 --device cuda`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.backends.dsv4 import DSV4Backend
from attn_backends.conformance import Outcome, Report, run_conformance
from attn_backends.errors import BackendUnavailableError
from attn_backends.kernels import compressor_operators, sparse_operators, torch_compressed
from spec_metadata import CacheGeometry, Capacity
from tests.compressed_arguments import attention_scene, entry_scene, index_scene, poisoned
from tests.triton_interpreter import interpreted

pytestmark = [  # of rows that see nothing, and of operators that are given another implementation
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning"),
]


@pytest.fixture(scope="module")
def triton() -> SimpleNamespace:
    """The modules of Triton kernels."""
    return SimpleNamespace(
        sparse=interpreted("triton_sparse", "_sparse_attention"),
        indexer=interpreted("triton_indexer", "_select_top"),
        compressor=interpreted("triton_compressor", "_write_entries"),
    )


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("sinks", [False, True], ids=["no_sinks", "sinks"])
@pytest.mark.parametrize(("num_heads", "dim", "bytes"), [(3, 40, False), (17, 16, False), (20, 512, True)])
@pytest.mark.one_in(5)
def test_attention(triton, monkeypatch, num_heads: int, dim: int, bytes: bool, sinks: bool, splits: int) -> None:
    monkeypatch.setattr(triton.sparse, "num_splits", lambda *_: splits)
    q, sources = attention_scene(num_heads, dim, bytes=bytes, gaps=splits == 3)
    logits = torch.randn(num_heads) if sinks else None
    for given in (sources, sources[:1]):
        out, lse = triton.sparse.sparse_attention(q, given, dim**-0.5, logits)
        expected = torch_compressed.attend_rows(q, given, dim**-0.5, logits)
        torch.testing.assert_close((out, lse), expected, rtol=1e-5, atol=1e-4 if bytes else 1e-5)
        assert bool((lse[-1] == -float("inf")).all())


def test_products_hold_what_the_pools_hold(triton) -> None:
    q, sources = attention_scene(3, 40, bytes=False)
    _, lse = triton.sparse.sparse_attention(q.half(), sources, 0.1, None)
    _, expected = torch_compressed.attend_rows(q.half(), sources, 0.1, None)
    torch.testing.assert_close(lse, expected, rtol=1e-6, atol=1e-6)


def test_16_bits(triton) -> None:
    q, sources = attention_scene(3, 40, bytes=False)
    q, sources = q.half(), [source._replace(pages=source.pages.half()) for source in sources]
    out, lse = triton.sparse.sparse_attention(q, sources, 0.1, None)
    expected = torch_compressed.attend_rows(q, sources, 0.1, None)
    assert out.dtype is torch.float16
    torch.testing.assert_close((out, lse), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("topk", [1, 5, 16])
@pytest.mark.parametrize("scratch", [2**20, 4 * 3 * 32 * 2], ids=["one_chunk", "chunks"])
def test_selection(triton, monkeypatch, ties: bool, topk: int, scratch: int) -> None:
    monkeypatch.setattr(triton.indexer, "SCRATCH_BYTES", scratch)
    arguments = index_scene([5, 1, 3], [30, 32, 4], 5, ties=ties)
    found = triton.indexer.select_entries(*arguments, 5, topk)
    expected = torch_compressed.select_entries(*arguments, 5, topk)
    assert torch.equal(found.sort().values, expected.sort().values)
    padding = (found < 0).int()
    assert bool((padding.diff(dim=1) >= 0).all()), "what is selected comes first"


def test_selection_among_more_entries_than_a_block(triton, monkeypatch) -> None:
    monkeypatch.setattr(triton.indexer, "MAX_BLOCK", 16)
    arguments = index_scene([2, 1], [32, 18], 5, ties=True)
    found = triton.indexer.select_entries(*arguments, 2, 9)
    expected = torch_compressed.select_entries(*arguments, 2, 9)
    assert torch.equal(found.sort().values, expected.sort().values)


def test_of_equal_scores_the_lowest_entries_are_taken(triton) -> None:
    arguments = index_scene([1], [9], 2)
    arguments[1].copy_(torch.tensor([[-1.0, -1.0]]))  # all scores are 0 times a negative weight
    arguments[0].zero_()
    found = triton.indexer.select_entries(*arguments, 1, 6)
    pages = arguments[3][0].tolist()
    assert found[0].tolist() == [pages[entry // 4] * 4 + entry % 4 for entry in range(6)]


def test_selection_in_16_bits_and_of_more_heads_than_a_block(triton) -> None:
    arguments = index_scene([2, 2], [30, 17], 70)
    arguments[0], arguments[2] = arguments[0].half(), arguments[2].half()
    found = triton.indexer.select_entries(*arguments, 2, 7)
    assert torch.equal(found.sort().values, torch_compressed.select_entries(*arguments, 2, 7).sort().values)


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.nan_to_num(7.5), expected.nan_to_num(7.5))


@pytest.mark.parametrize(("dim", "bytes"), [(40, False), (512, True)])
def test_rows_are_written(triton, dim: int, bytes: bool) -> None:
    rows = torch.randn(60, 2 * dim)[:, ::2] * torch.logspace(-7, 5, 60).unsqueeze(1)
    rows = rows * torch.randn(rows.shape).exp2()
    rows[:3] = torch.tensor([0.0, 448.0, -1e-9]).unsqueeze(1)
    rows[3] = torch.tensor([448.0, 17.0, 19.0, 2.5 * 2.0**-9, 3.5 * 2.0**-9]).repeat(103)[:dim]  # ties
    slots = torch.randperm(80)[:60]
    slots[5:9] = -1
    found, expected = poisoned(10, 8, dim, bytes), poisoned(10, 8, dim, bytes)
    triton.compressor.write_rows(found, 8, slots, rows)
    torch_compressed.write_rows(expected, 8, slots, rows, 9)
    assert same(found.float(), expected.float())


def test_states_are_written(triton) -> None:
    values, gates = torch.randn(6, 2 * 24)[:, ::2].half(), torch.randn(24, 6).T.half()
    slots = torch.tensor([3, -1, 0, 7, 5, -1]).int()
    found, expected = poisoned(2, 4, 48, False), poisoned(2, 4, 48, False)
    triton.compressor.write_states(found, slots, values, gates)
    torch_compressed.write_rows(expected, 4, slots, torch.cat((values, gates), dim=1), 1)
    assert same(found, expected)


@pytest.mark.parametrize("position", [40, 1_000_000])
@pytest.mark.parametrize("overlap", [False, True], ids=["own", "overlap"])
@pytest.mark.parametrize(("dim", "ratio"), [(24, 3), (64, 16)])
def test_entries_are_written(triton, dim: int, ratio: int, overlap: bool, position: int) -> None:
    arguments = entry_scene(ratio, dim, overlap=overlap, position=position)
    found, expected = poisoned(3, 4, dim, False), poisoned(3, 4, dim, False)
    triton.compressor.write_entries(found, 4, *arguments)
    torch_compressed.write_rows(expected, 4, arguments[0], torch_compressed.make_entries(*arguments[1:]), 2)
    tolerance = 1e-5 if position < 1000 else 2e-2  # the interpreter rounds twice where a GPU does once
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_entries_are_written_in_8_bits(triton) -> None:
    arguments = entry_scene(4, 512, overlap=True)
    found, expected = poisoned(3, 4, 512, True), poisoned(3, 4, 512, True)
    triton.compressor.write_entries(found, 4, *arguments)
    torch_compressed.write_rows(expected, 4, arguments[0], torch_compressed.make_entries(*arguments[1:]), 2)
    live = torch.tensor([3, 11, 0, 6])
    rows = [torch_compressed.read_rows(pages, 4, live) for pages in (found, expected)]
    torch.testing.assert_close(*rows, rtol=2**-3, atol=2**-8)
    assert int((found != expected).sum()) < 0.02 * 4 * 584 + 4 * 64, "of rotated elements one bit may differ"


def operator_calls() -> dict[str, tuple[Any, list[Any]]]:
    """Each operator with arguments of a call."""
    ops = torch.ops.attn_backends
    q, (rows, entries) = attention_scene(3, 40, bytes=False)
    rows, entries = (source._replace(pages=source.pages.nan_to_num()) for source in (rows, entries))
    pages, states = torch.zeros(3, 4, 24), torch.zeros(2, 4, 48)
    slots = torch.tensor([3, -1, 0])
    return {
        "sparse_attention": (ops.sparse_attention.default, [q, *rows, *entries, 0.1, torch.randn(3)]),
        "sparse_attention of rows": (ops.sparse_attention.default, [q, *rows, None, 0, None, None, 0.1, None]),
        "select_entries": (ops.select_entries.default, [*index_scene([5, 1], [30, 9], 5), 5, 7]),
        "write_rows": (ops.write_rows.default, [pages, 4, slots, torch.randn(3, 24), 1]),
        "write_entries": (ops.write_entries.default, [pages, 4, *entry_scene(3, 24, overlap=True), 1]),
        "write_states": (ops.write_states.default, [states, slots, torch.randn(3, 24), torch.randn(3, 24), 1]),
    }


@pytest.mark.parametrize("name", operator_calls())
def test_opcheck(name: str) -> None:
    operator, arguments = operator_calls()[name]
    if name == "write_entries":  # NaN in memory that nobody reads is not equal to itself
        arguments[5] = arguments[5].nan_to_num()
    assert set(torch.library.opcheck(operator, tuple(arguments)).values()) == {"SUCCESS"}


def test_the_schemas_say_what_is_written() -> None:
    written = {
        name: [argument.name for argument in operator._schema.arguments if argument.is_write]
        for name, (operator, _) in operator_calls().items()
    }
    assert {name: names for name, names in written.items() if names} == {
        "write_rows": ["pages"],
        "write_entries": ["pages"],
        "write_states": ["states"],
    }


@pytest.mark.parametrize(
    ("name", "position", "needed"),
    [
        ("sparse_attention", 0, "do not fit together; needed are q"),
        ("sparse_attention", 1, "are no pool"),
        ("sparse_attention", 3, "do not fit together; needed are q"),
        ("sparse_attention", 8, "do not fit together; needed are q"),
        ("sparse_attention", 10, "do not fit together; needed are q"),
        ("select_entries", 1, "do not fit together; needed are q"),
        ("select_entries", 4, "do not fit together; needed are q"),
        ("select_entries", 6, "do not fit together; needed are q"),
        ("write_rows", 2, "needed are rows"),
        ("write_rows", 3, "needed are rows"),
        *(("write_entries", position, "do not fit together or to rows of 24") for position in (4, 6, 7, 8, 10)),
        *(("write_states", position, "needed are as many of each as slots") for position in (1, 2, 3)),
    ],
)
def test_what_does_not_fit_together_is_refused(name: str, position: int, needed: str) -> None:
    operator, arguments = operator_calls()[name]
    given = arguments[position]
    arguments[position] = given[:, 1:] if (name, position) == ("sparse_attention", 1) else given[1:]
    with pytest.raises(ValueError, match=needed):
        operator(*arguments)


def test_pools_of_two_types_are_refused() -> None:
    q, (rows, entries) = attention_scene(3, 40, bytes=False)
    with pytest.raises(ValueError, match="of one type and one stride"):
        sparse_operators.sparse_attention(q, rows, entries._replace(pages=entries.pages.half()), 0.1, None)


@pytest.mark.parametrize("attend", [sparse_operators.sparse_attention, sparse_operators.sparse_attention_sm90])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float8_e4m3fn], ids=str)
def test_sinks_of_other_types_are_refused(attend: Any, dtype: torch.dtype) -> None:
    """As dense attention and layers refuse them."""
    q, (rows, entries) = attention_scene(3, 40, bytes=False)
    message = rf"sinks \[3\] {dtype} do not fit together; .* of float32, bfloat16 or float16"
    with pytest.raises(ValueError, match=message):
        attend(q, rows, entries, 0.1, torch.zeros(3).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sinks_of_16_bits_are_the_same_numbers(triton, monkeypatch, dtype: torch.dtype) -> None:
    q, sources = attention_scene(3, 40, bytes=False)
    sinks = torch.randn(3).to(dtype)
    expected = sparse_operators.sparse_attention(q, *sources, 0.1, sinks.float())
    torch.testing.assert_close(sparse_operators.sparse_attention(q, *sources, 0.1, sinks), expected, rtol=0, atol=0)
    for splits in (1, 3):
        monkeypatch.setattr(triton.sparse, "num_splits", lambda *_, splits=splits: splits)
        torch.testing.assert_close(
            triton.sparse.sparse_attention(q, sources, 0.1, sinks), expected, rtol=1e-5, atol=1e-5
        )


def test_rows_of_more_elements_than_the_kernel_takes_are_refused(triton) -> None:
    q, sources = attention_scene(1, 1032, bytes=False)
    with pytest.raises(ValueError, match="rows of 1032 elements, the kernel takes at most 1024"):
        triton.sparse.sparse_attention(q, sources, 0.1, None)


def test_index_keys_of_more_elements_than_the_kernel_takes_are_refused(triton) -> None:
    arguments = index_scene([1], [4], 2, ties=False)
    arguments[0], arguments[2] = torch.randn(1, 2, 264), torch.randn(4, 2, 264)
    with pytest.raises(ValueError, match="index keys of 264 elements, the kernel takes at most 256"):
        triton.indexer.select_entries(*arguments, 1, 2)


def test_splits_fill_the_gpu_and_none_is_without_keys(triton) -> None:
    many, few = triton.sparse.Blocks(64, 128, 8, 1), triton.sparse.Blocks(16, 32, 4, 3)
    assert [triton.sparse.num_splits(rows, many, 640, 132) for rows in (0, 1, 32, 64, 128, 4096)] == [5, 5, 3, 2, 1, 1]
    assert [triton.sparse.num_splits(rows, few, 640, 132) for rows in (1, 32, 128, 4096)] == [10, 7, 2, 1]
    for num_rows, blocks, num_keys in product(range(300), (many, few), (1, 128, 640, 1152, 2176)):
        splits, num_blocks = triton.sparse.num_splits(num_rows, blocks, num_keys, 132), -(-num_keys // blocks.keys)
        assert (splits - 1) * -(-num_blocks // splits) < num_blocks, (num_rows, blocks, num_keys)


def test_blocks_fit_into_shared_memory(triton) -> None:
    choose, bf16 = triton.sparse.choose_blocks, torch.bfloat16
    assert [choose(64, bf16, size).heads for size in (99 * 2**10, 163 * 2**10, 227 * 2**10)] == [16, 64, 64]
    assert choose(16, bf16, 227 * 2**10).heads == choose(64, torch.float32, 227 * 2**10).heads == 16


def test_on_a_cpu_the_kernel_is_refused_with_the_reason() -> None:
    capacity = Capacity(2, 512, 256, 1, 2, num_draft_tokens=3)
    with pytest.raises(BackendUnavailableError, match="triton: runs on CUDA devices, not on cpu"):
        DSV4Backend(capacity, CacheGeometry(8, 256), kernel="triton")


@contextmanager
def cuda_implementations_on_cpu() -> Iterator[None]:
    """Inside, the operators run their CUDA implementations, which the interpreter takes, on a CPU too."""
    library = torch.library.Library("attn_backends", "IMPL")  # its implementations go before those of the library
    cuda = {
        "sparse_attention": sparse_operators._attention_cuda,
        "select_entries": sparse_operators._select_cuda,
        "write_rows": compressor_operators._write_rows_cuda,
        "write_entries": compressor_operators._write_entries_cuda,
        "write_states": compressor_operators._write_states_cuda,
    }
    for name, implementation in cuda.items():
        library.impl(name, implementation, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def on_cpu() -> type[DSV4Backend]:
    """The backend with its Triton kernel alone, which the interpreter lets run here."""
    (kernel,) = [kernel for kernel in DSV4Backend.kernels if kernel.name == "triton"]
    kernel = replace(kernel, unavailable_reasons=lambda device: [], architectures=frozenset())
    return type("TritonOnCPU", (DSV4Backend,), {"kernels": (kernel,)})


def conform(**options: object) -> Report:
    with cuda_implementations_on_cpu():
        report = run_conformance(on_cpu(), kernel="triton", **options)
    good = {Outcome.PASS, Outcome.REFUSED}
    assert [(row.check, row.case, row.reason) for row in report.rows if row.status not in good] == []
    return report


@pytest.mark.parametrize(
    "check",
    [
        "math.draft_decode",
        "cache.writes_owned_slots",
        pytest.param("cache.far_pages", marks=pytest.mark.full),
        pytest.param("compressed.chunks", marks=pytest.mark.full),
        pytest.param("graph.equals_eager", marks=pytest.mark.full),
    ],
)
def test_the_kernel_conforms(triton, check: str) -> None:
    assert conform(quick=True, select=check).executed == 3
