"""The Triton kernel of prefill, interpreted, against the torch kernels. The interpreter multiplies no bfloat16."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module

import pytest
import torch
from torch import Tensor

from attn_backends.kernels import torch_attention
from tests.triton_interpreter import interpreted

NAN = float("nan")
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")  # rows that pad a block


@dataclass(frozen=True)
class Case:
    """Requests in pages of their own: query rows and keys of each, heads, sizes, types. latent: values are the first
    elements of keys.
    """

    widths: tuple[int, ...] = (5, 1, 37, 16)
    kv_lens: tuple[int, ...] = (5, 70, 37, 90)
    num_heads: int = 4
    num_kv_heads: int = 2
    dim: int = 24
    v_dim: int = 16
    latent: bool = False
    page_size: int = 16
    causal: bool = True
    dtype: torch.dtype = torch.float32
    cache: torch.dtype | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def uniform(self) -> bool:
        return len(set(self.widths)) == 1


@dataclass(frozen=True)
class Inputs:
    """What both kernels take. table: [bs, pages] int32, the reserved page 0 past a request's own; all tensors strided,
    the cache NaN but for the keys of requests.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    starts: Tensor
    table: Tensor
    kv_lens: Tensor


def make_inputs(case: Case) -> Inputs:
    counts = [-(-n // case.page_size) for n in case.kv_lens]
    ids = torch.randperm(sum(counts)) + 1
    table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
    entry = case.dim if case.latent else case.dim + case.v_dim
    pages = torch.full((sum(counts) + 1, case.page_size, case.num_kv_heads, 2 * entry), NAN)
    for request, own in enumerate(ids.split(counts)):
        table[request, : len(own)] = own
        for place in range(case.kv_lens[request]):
            pages[own[place // case.page_size], place % case.page_size] = torch.randn(case.num_kv_heads, 2 * entry)
    if case.cache is torch.float8_e4m3fn:  # the interpreter knows no subnormals and no NaN of 8-bit floats
        pages = torch.where(pages.abs() < 0.25, 0.25, pages).nan_to_num(2.0)
    pages = pages.to(case.cache or case.dtype)[..., ::2]
    v = pages[..., : case.v_dim] if case.latent else pages[..., case.dim :]
    q = torch.randn(case.num_heads, sum(case.widths), case.dim + 1, dtype=case.dtype).transpose(0, 1)[..., 1:]
    starts = torch.tensor([0, *case.widths]).cumsum(0).int()
    return Inputs(q, pages[..., : case.dim], v, starts, table, torch.tensor(case.kv_lens, dtype=torch.int32))


def expected(case: Case, inputs: Inputs) -> tuple[Tensor, Tensor]:
    return torch_attention.page_table_attention(
        inputs.q.double(),
        inputs.k.double(),
        inputs.v.double(),
        inputs.starts,
        inputs.table,
        inputs.kv_lens,
        max_seqlen_q=max(case.widths),
        causal=case.causal,
        scale=case.dim**-0.5,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
    )


def attend(case: Case, inputs: Inputs, *, csr: bool = False) -> tuple[Tensor, Tensor]:
    """The kernel's answer. csr: by page lists instead of a table."""
    kernels = interpreted("triton_prefill", "_paged_attention")
    page_indptr, page_ids = None, inputs.table
    if csr:
        counts = (inputs.kv_lens + case.page_size - 1) // case.page_size
        page_indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        page_ids = torch.cat([row[:count] for row, count in zip(inputs.table, counts, strict=True)])
    return kernels.paged_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        None if case.uniform else inputs.starts,
        page_indptr,
        page_ids,
        inputs.kv_lens,
        max(case.widths),
        case.causal,
        case.dim**-0.5,
        case.k_scale,
        case.v_scale,
    )


def check(case: Case, *, csr: bool = False, tolerance: float = 3e-6) -> None:
    inputs = make_inputs(case)
    out, lse = attend(case, inputs, csr=csr)
    expected_out, expected_lse = expected(case, inputs)
    assert (out.dtype, lse.dtype) == (case.dtype, torch.float32)
    torch.testing.assert_close(out.double(), expected_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=tolerance, atol=tolerance)


MLA = Case(num_heads=8, num_kv_heads=1, dim=40, v_dim=32, latent=True)
CASES = {
    "grouped queries in chunks": Case(),
    "all queries fresh": Case(widths=(40, 3), kv_lens=(40, 3)),
    "MLA in chunks": MLA,
    "MLA of whole size": replace(MLA, widths=(3, 2), kv_lens=(3, 20), num_heads=16, dim=576, v_dim=512),
    "more heads than a block has rows": replace(MLA, widths=(2, 1), kv_lens=(20, 7), num_heads=80),
    "a request without rows": Case(widths=(0, 4, 0, 33), kv_lens=(9, 4, 0, 50)),
    "one width": Case(widths=(9, 9, 9), kv_lens=(9, 50, 33)),
    "one width that fills blocks": Case(widths=(16, 16), kv_lens=(40, 16)),
    "a KV head for each query head": Case(widths=(40, 33), kv_lens=(41, 65), num_heads=2),
    "one width, every row sees all": Case(widths=(17, 17), kv_lens=(50, 3), causal=False),
    "every row sees all": Case(causal=False),
    "rows that see nothing": Case(widths=(6, 40), kv_lens=(2, 0)),
    "one request": Case(widths=(33,), kv_lens=(64,)),
    "many requests": Case(widths=tuple(range(1, 12)), kv_lens=tuple(range(20, 31))),
}


@pytest.mark.parametrize("csr", [False, True], ids=["table", "csr"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_prefill_is_that_of_torch(case, csr):
    check(case, csr=csr)


@pytest.mark.parametrize("csr", [False, True], ids=["table", "csr"])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("case", [Case(), MLA], ids=["grouped", "MLA"])
def test_pages_of_any_size(case, page_size, csr):
    check(replace(case, page_size=page_size), csr=csr)


@pytest.mark.parametrize("cache", [None, torch.float8_e4m3fn], ids=["float16", "e4m3"])
@pytest.mark.parametrize("case", [Case(), MLA], ids=["grouped", "MLA"])
def test_an_entry_times_its_scale_is_the_value(case, cache):
    v_scale = 0.5 if case.latent else 3.0
    case = replace(case, dtype=torch.float16, cache=cache, k_scale=0.5, v_scale=v_scale)
    check(case, tolerance=6e-3 if cache is None else 2e-2)


def test_no_output_depends_on_the_batch():
    case = Case()
    inputs = make_inputs(case)
    out, lse = attend(case, inputs)
    alone = replace(case, widths=case.widths[2:3], kv_lens=case.kv_lens[2:3])
    rows = slice(*inputs.starts[2:4].tolist())
    part = replace(inputs, q=inputs.q[rows], table=inputs.table[2:3], kv_lens=inputs.kv_lens[2:3])
    assert all(map(torch.equal, attend(alone, part), (out[rows], lse[rows])))


@pytest.mark.parametrize("sizes", [(576, 512, True), (128, 128, False), (256, 256, False), (64, 64, False)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kib", [99, 163, 227])
def test_a_tile_fits_the_shared_memory_of_every_generation(sizes, dtype, kib):
    kernels = interpreted("triton_prefill", "_paged_attention")
    triton_tiles = import_module("attn_backends.kernels.triton_tiles")
    sizes = triton_tiles.sizes_of(*sizes)
    tiles = kernels.choose_tiles(sizes, dtype, kib * 1024)
    assert kernels.tile_bytes(tiles, sizes, dtype) <= kib * 1024
