"""Attention over divided keys: the Triton kernels, interpreted, against the torch kernel of each metadata format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.backends.flashinfer_mla import FlashInferMLABackend
from attn_backends.backends.trtllm_mla import TrtllmMLABackend
from attn_backends.conformance import Subject, run_case, selected_cases
from attn_backends.contract.kernel import Kernel
from attn_backends.errors import UnsupportedStepError
from attn_backends.graphs import RecordedGraph
from attn_backends.kernels import paged_operators
from attn_backends.kernels.paged_operators import paged_attention
from attn_backends.selection import providers
from attn_backends.vendors import ours as paged_kernel
from tests.paged_arguments import FORMS, Sizes, arguments
from tests.triton_interpreter import interpreted, last_program_first

BACKENDS = (FA3Backend, FlashInferMLABackend, TrtllmMLABackend)


GROUPED, LATENT = Sizes(), Sizes(num_heads=6, num_kv_heads=1, latent=True)
SIZES = {
    "grouped-query": GROUPED,
    "MLA": LATENT,
    "decode": replace(LATENT, widths=(1, 1, 1)),
    "as many heads as KV heads": replace(GROUPED, num_heads=2),
    "more rows than a tile": replace(LATENT, widths=(5, 5), lens=(40, 6), num_heads=4),
    "packed": replace(GROUPED, widths=(1, 4, 2)),
    "packed latents": replace(LATENT, widths=(2, 5, 1)),
    "pages of one token": replace(GROUPED, page_size=1),
    "whole pages": replace(LATENT, page_size=64, lens=(130, 64, 63)),
    "no keys": replace(GROUPED, lens=(0, 9, 0)),
    "fewer keys than rows": replace(LATENT, lens=(2, 1, 12)),
}


@pytest.fixture(scope="module")
def decode():
    """The module of the Triton kernels, interpreted; several programs merge a row, and read many parts in turn."""
    merging = interpreted("triton_merge", "_merge")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_BLOCK": 32, "_SLICE": 8, "_MERGED": (2, 4)}.items():
            patch.setattr(merging, name, value)
        yield interpreted("triton_decode", "_attend")


def check(decode, given: list, tolerance: float = 3e-6) -> None:
    out, lse = decode.paged_attention(*given)
    expected_out, expected_lse = paged_attention(*given)
    assert (out.dtype, lse.dtype) == (given[0].dtype, torch.float32)
    torch.testing.assert_close(out, expected_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=tolerance, atol=tolerance)


pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log")  # rows that see nothing


def cases() -> Iterator[tuple[Sizes, str, bool]]:
    """Every batch in every form that holds it, causal and not in turn."""
    for number, sizes in enumerate(SIZES.values()):
        for turn, form in enumerate(FORMS):
            if form != "block table" or len(set(sizes.widths)) == 1:
                yield sizes, form, (number + turn) % 2 == 0 or "packed" in sizes.widths


def name_of(value: object) -> str:
    names = {sizes: name for name, sizes in SIZES.items()}
    return names[value] if isinstance(value, Sizes) else {True: "causal", False: "whole"}.get(value, str(value))


@pytest.mark.parametrize(("sizes", "form", "causal"), list(cases()), ids=name_of)
@pytest.mark.one_in(3)
def test_rows_attend_to_the_keys_in_their_pages(decode, sizes, form, causal):
    check(decode, arguments(sizes, form, causal))


@pytest.mark.parametrize("num_parts", [1, 2, 20])
@pytest.mark.parametrize("lens", [(53, 3, 20), (2, 37, 0)], ids=str)
@pytest.mark.parametrize("sizes", [GROUPED, LATENT], ids=["grouped-query", "MLA"])
def test_keys_may_be_divided_into_any_number_of_parts(decode, monkeypatch, num_parts, lens, sizes):
    monkeypatch.setattr(decode, "choose_num_splits", lambda programs, slots, most: num_parts)
    check(decode, arguments(replace(sizes, lens=lens), "csr", True))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [GROUPED, LATENT], ids=["grouped-query", "MLA"])
@pytest.mark.parametrize(
    ("lens", "room", "num_parts", "num_pieces"),
    [((9, 420, 20), 5, 1, 4), ((9, 420, 20), 5, 2, 4), ((9, 420, 20), 5, 9, 0), ((400, 9, 400), 10, 2, 8)],
)
def test_long_requests_have_pieces_instead_of_parts(
    decode, monkeypatch, lens, room, num_parts, num_pieces, sizes, form
):
    """They come after the parts of all requests, and no more of them than there is room for; sinks count once."""
    monkeypatch.setattr(decode, "choose_num_splits", lambda programs, slots, most: num_parts)
    monkeypatch.setattr(decode, "is_crowded", lambda programs, slots, held: True)
    given = arguments(replace(sizes, lens=lens), form, form != "csr")
    num_tokens, num_heads, _ = given[0].shape
    width, v_dim, num_splits = given[7], given[2].shape[3], num_parts if num_parts > 1 else 0
    rows = num_splits * num_tokens * num_heads, room * width * num_heads
    given[13:] = [torch.full((sum(rows) * size,), torch.nan) for size in (v_dim, 1)]
    given += [None, None, torch.randn(num_heads)]
    check(decode, given)
    last_program_first(monkeypatch)
    check(decode, given)
    written = ~given[14][rows[0] :].view(room, -1).isnan()
    assert written.all(1).tolist() == [True] * num_pieces + [False] * (room - num_pieces)
    assert not written[num_pieces:].any()


@pytest.mark.parametrize("registers", [0, 255])
def test_a_tile_says_how_many_registers_a_thread_may_have(decode, monkeypatch, registers):
    tiles, made = decode.Tiles(16, 32, 4, 3, registers), []
    monkeypatch.setattr(decode, "_shares", lambda *given: (tiles, 1, 264, 264))
    monkeypatch.setattr(decode, "_launch", lambda *given: made.append(decode._call(*given)))
    given = arguments(GROUPED, "page table", True)
    decode.paged_attention(*given)
    assert [call.options.get("maxnreg", 0) for call in made] == [registers]


@pytest.mark.parametrize(("bs", "has_pieces"), [(32, False), (65, False), (66, True)])
def test_a_batch_that_leaves_the_gpu_room_has_no_pieces(decode, monkeypatch, bs, has_pieces):
    """Of 4 programs that a multiprocessor holds, and 8 KV heads."""
    shares, asked = decode.Tiles(16, 32, 4, 4), []
    monkeypatch.setattr(decode, "_shares", lambda *given: (shares, 1, 264, 528))
    monkeypatch.setattr(decode, "choose_num_splits", lambda programs, slots, most: 1)
    monkeypatch.setattr(decode, "_launch", lambda tensors, programs, *given: asked.append(programs))
    monkeypatch.setattr(decode, "merge", lambda *given: asked.append("merge"))
    q, k = torch.zeros(bs, 32, 128), torch.zeros(4, 16, 8, 128)
    lists = (None, None, torch.zeros(bs, 64, dtype=torch.int32), torch.zeros(bs, dtype=torch.int32))
    decode.paged_attention(
        q, k, k.clone(), *lists, 1, 1024, True, 1.0, 1.0, 1.0, torch.empty(2**18), torch.empty(2**11)
    )
    assert asked == ([8 * (33 + bs), "merge"] if has_pieces else [8 * bs])


@pytest.mark.parametrize("sizes", [GROUPED, LATENT], ids=["grouped-query", "MLA"])
@pytest.mark.parametrize("cache", [torch.float16, torch.float8_e4m3fn, torch.float32], ids=str)
def test_queries_and_cache_may_differ_in_type(decode, sizes, cache):
    given = arguments(sizes, "page table", True, torch.float16, cache)
    given[11:13] = 0.25, 2.0
    check(decode, given, tolerance=4e-3)


@pytest.mark.parametrize("form", FORMS[:2])
def test_rows_that_no_request_has_may_follow_keys_in_parts(decode, monkeypatch, form):
    """As of a batch that is padded to a number of tokens: parts lie as far apart as there are rows, not requests'."""
    monkeypatch.setattr(decode, "choose_num_splits", lambda programs, slots, most: 3)
    given = arguments(replace(GROUPED, widths=(1, 1, 1)), form, True)
    expected = paged_attention(*given)
    given[0] = torch.cat((given[0], given[0].new_full((5, *given[0].shape[1:]), torch.nan)))
    found = [result[:3] for result in decode.paged_attention(*given)]
    torch.testing.assert_close(found, list(expected), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("num_parts", [1, 9])
def test_a_large_scale_of_values_makes_no_nan_of_rows_that_see_nothing(decode, monkeypatch, num_parts):
    """Also of rows that see nothing in their last part alone."""
    monkeypatch.setattr(decode, "choose_num_splits", lambda programs, slots, most: num_parts)
    given = arguments(replace(LATENT, lens=(0, 130, 129)), "csr", True)
    given[12] = 8.0
    check(decode, given, tolerance=3e-5)


def test_no_part_is_written_past_the_scratch(decode, monkeypatch):
    monkeypatch.setattr(decode, "choose_num_splits", lambda programs, slots, most: most)
    for room_out, room_lse in ((2, 9), (9, 2)):
        given = arguments(GROUPED, "csr", True)
        whole = given[13:]
        rows = 9 * GROUPED.num_heads
        given[13:] = whole[0][: room_out * rows * GROUPED.v_dim + 19], whole[1][: room_lse * rows]
        check(decode, given)
        assert [int((~partial.isnan()).nonzero().max()) for partial in whole] == [
            2 * rows * GROUPED.v_dim - 1,
            2 * rows - 1,
        ]


def test_an_empty_batch(decode):
    out, lse = decode.paged_attention(*arguments(replace(GROUPED, widths=(0, 0), lens=(0, 0)), "csr", True))
    assert (out.shape, lse.shape) == ((0, 4, 20), (0, 4))


def test_the_same_batch_gives_the_same_bits(decode):
    given = arguments(GROUPED, "csr", True)
    first, second = (decode.paged_attention(*given) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_the_operator_is_one_node_of_a_graph():
    """A replay reads and writes the memory that it was captured with."""
    given = arguments(LATENT, "csr", True)
    graph = RecordedGraph()
    out, lse = graph.capture(lambda: paged_attention(*given))
    assert [call.func.__name__ for call in graph._calls] == ["paged_attention.default"]
    given[0].copy_(torch.randn(given[0].shape))
    given[6].copy_(torch.tensor([50, 4, 37]))
    graph.replay()
    torch.testing.assert_close((out, lse), paged_attention(*given), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("form", FORMS)
def test_opcheck(form):
    given = arguments(GROUPED, form, True)
    given = [x.nan_to_num() if isinstance(x, Tensor) and x.is_floating_point() else x for x in given]
    operator = torch.ops.attn_backends.paged_attention.default
    assert set(torch.library.opcheck(operator, tuple(given)).values()) == {"SUCCESS"}
    written = [argument.name for argument in operator._schema.arguments if argument.is_write]
    assert written == ["partial_out", "partial_lse"]


@pytest.mark.parametrize("form", FORMS)
def test_float64_queries_get_float64(form):
    given = arguments(GROUPED, form, True, torch.float64)
    assert {found.dtype for found in paged_operators._paged_attention_cuda(*given)} == {torch.float64}


UNFIT = {
    "dim": ("csr", 0, lambda q: q[..., 1:]),
    "type of values": ("csr", 2, lambda v: v.half()),
    "64-bit indptr": ("csr", 3, lambda starts: starts.long()),
    "short query_indptr": ("csr", 3, lambda starts: starts[1:]),
    "short page_indptr": ("csr", 4, lambda starts: starts[1:]),
    "CSR of one stride": ("csr", 3, lambda starts: None),
    "strided page_ids": ("csr", 5, lambda ids: ids.repeat_interleave(2)[::2]),
    "flat table": ("page table", 5, lambda table: table.flatten()),
    "short table": ("page table", 5, lambda table: table[1:]),
    "rows that are not uniform": ("block table", 0, lambda q: q[1:]),
    "64-bit lengths": ("csr", 6, lambda lens: lens.long()),
    "scratch of two dimensions": ("csr", 13, lambda partial: partial.view(2, -1)),
    "scratch of 16 bits": ("csr", 14, lambda partial: partial.half()),
}


@pytest.mark.parametrize(("form", "position", "wrong"), UNFIT.values(), ids=UNFIT)
def test_what_does_not_fit_is_refused(form, position, wrong):
    given = arguments(GROUPED, form, True)
    given[position] = wrong(given[position])
    with pytest.raises(ValueError, match=r"do not fit together. Needed are q \[num_tokens, num_heads, dim\]"):
        paged_attention(*given)


def test_what_runs_by_the_rows_of_a_request(monkeypatch, decode):
    """The kernel that divides keys, or the one for many rows."""
    prefill, ran = interpreted("triton_prefill", "_paged_attention"), []
    monkeypatch.setattr(decode, "paged_attention", lambda *given, **extras: ran.append("decode"))
    monkeypatch.setattr(prefill, "paged_attention", lambda *given, **extras: ran.append("prefill"))
    for width in (paged_operators.MAX_DIVIDED_WIDTH, paged_operators.MAX_DIVIDED_WIDTH + 1):
        given = arguments(replace(GROUPED, widths=(1, width), lens=(9, 80)), "csr", True)
        paged_operators._paged_attention_cuda(*given)
    assert ran == ["decode", "prefill"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_kernel_comes_after_the_vendors(backend, monkeypatch):
    assert [kernel.name for kernel in backend.kernels][-2:] == ["triton", "torch"]
    kernel = triton_kernel_of(backend)
    assert kernel.unavailable_reasons(torch.device("cpu")) == ["runs on CUDA devices, not on cpu"]
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert kernel.unavailable_reasons(cuda) == ["needs SM80 or newer; this GPU is SM75"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    assert kernel.unavailable_reasons(cuda) == []
    monkeypatch.setattr(providers, "is_installed", lambda module: False)
    assert kernel.unavailable_reasons(cuda) == ["triton is not installed (pip install 'attn-backends[triton]')"]


def test_8_bits_are_refused_where_triton_does_not_read_them():
    paged_kernel._refuse_8_bits(torch.float8_e4m3fn, (8, 9))
    with pytest.raises(UnsupportedStepError, match=r"float8_e4m3fn on SM80 \(Triton reads it"):
        paged_kernel._refuse_8_bits(torch.float8_e4m3fn, (8, 0))


def triton_kernel_of(backend: type[AttentionBackend]) -> Kernel:
    return next(kernel for kernel in backend.kernels if kernel.name == "triton")


@pytest.fixture
def on_triton(decode) -> Iterator[None]:
    """The operator's CPU implementation in Triton."""

    library = torch.library.Library("attn_backends", "IMPL")
    library.impl("paged_attention", paged_operators._paged_attention_cuda, "CPU", allow_override=True)
    yield
    library._destroy()


@pytest.mark.usefixtures("on_triton")
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize(
    "check_id",
    [
        "math.draft_decode",
        "math.draft_extend",
        "graph.padded",
        "graph.shrinking",
        "poison.unowned_nan",
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.one_in(3)
def test_conformance(backend, check_id):
    """One case of a check; the whole suite runs on a GPU."""
    on_cpu = replace(triton_kernel_of(backend), unavailable_reasons=lambda device: [])
    subject = Subject(type(backend.__name__, (backend,), {"kernels": (on_cpu,)}), "triton")
    row = run_case(subject, selected_cases(subject, check_id)[-1])
    assert row.status == "pass", row.reason
