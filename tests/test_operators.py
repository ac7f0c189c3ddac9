"""The registered operators: their definition in torch, their schemas and fakes, and the Triton kernels, interpreted.

The interpreter multiplies no bfloat16, truncates where a GPU rounds to it, and knows neither NaN nor subnormals of
8-bit floats: stores of these types are compared on values that they hold exactly, and the rest on a GPU
(`attn-backends conformance --device cuda`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from attn_backends.graphs import RecordedGraph
from attn_backends.kernels import operators
from tests.test_ring_operator import ring_arguments
from tests.triton_interpreter import BOTH, interpreted

NAN, EMPTY = float("nan"), float("-inf")


@dataclass(frozen=True)
class Sizes:
    """A tree part's sizes. latent: keys and values are overlapping views of one tensor, as in MLA."""

    bs: int
    width: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    dim: int
    v_dim: int
    page_size: int = 4
    latent: bool = False


SIZES = {
    "one request": Sizes(1, 4, 4, 4, 4, 16, 16),
    "odd sizes": Sizes(5, 5, 7, 6, 2, 24, 20, page_size=3),
    "one row, one key": Sizes(2, 1, 1, 3, 1, 40, 8, page_size=1),
    "draft, topk 4, 3 steps": Sizes(3, 4, 12, 8, 2, 32, 32),
    "MLA": Sizes(2, 9, 9, 16, 1, 72, 64, latent=True),
    "MLA of several chunks": Sizes(1, 3, 3, 4, 1, 576, 512, latent=True),
    "more keys than 64": Sizes(2, 3, 70, 2, 1, 16, 16, page_size=16),
}


def tree_arguments(sizes: Sizes, dtype: torch.dtype = torch.float32, cache: torch.dtype | None = None) -> list:
    """The arguments of `tree_join`, all of them strided views; the cache is NaN but for the drafted tokens."""
    s, rows = sizes, sizes.bs * sizes.width
    num_pages = 2 + s.bs * s.num_keys // s.page_size
    slots = torch.randperm(num_pages * s.page_size)[: s.bs * s.num_keys].view(s.bs, s.num_keys)
    entry = s.dim if s.latent else s.dim + s.v_dim
    entries = torch.full((num_pages * s.page_size, s.num_kv_heads, 2 * entry), NAN)
    entries[slots.flatten()] = torch.randn(s.bs * s.num_keys, s.num_kv_heads, 2 * entry)
    pages = entries.to(cache or dtype).unflatten(0, (num_pages, s.page_size))[..., ::2]
    k, v = pages[..., : s.dim], pages[..., : s.v_dim] if s.latent else pages[..., s.dim :]
    mask = torch.rand(s.bs, s.num_keys, s.width).mT < 0.4
    mask[:, :, 0] = True
    q = torch.randn(s.num_heads, rows, s.dim + 1, dtype=dtype).transpose(0, 1)[..., 1:]
    prefix_out = torch.randn(rows, s.v_dim, s.num_heads, dtype=dtype).mT
    prefix_lse = torch.randn(s.num_heads, rows).T
    return [q, k, v, slots, mask, prefix_out, prefix_lse, s.dim**-0.5, 1.0, 1.0]


def expected_join(arguments: list) -> tuple[Tensor, Tensor]:
    """`tree_join` in float64, row by row and key by key seen."""
    q, k, v, slots, mask, prefix_out, prefix_lse, scale, k_scale, v_scale = arguments
    bs, width, _ = mask.shape
    out, lse = torch.zeros(prefix_out.shape, dtype=torch.float64), torch.zeros(q.shape[:2], dtype=torch.float64)
    for request, j, head in ((b, j, h) for b in range(bs) for j in range(width) for h in range(q.shape[1])):
        row, kv_head = request * width + j, head // (q.shape[1] // k.shape[2])
        places = [divmod(int(slot), k.shape[1]) for slot in slots[request][mask[request, j]]]
        keys = [k[page, offset, kv_head].double() * k_scale for page, offset in places]
        values = [v[page, offset, kv_head].double() * v_scale for page, offset in places]
        scores = [q[row, head].double() @ key * scale for key in keys]
        if prefix_lse[row, head] > EMPTY:
            scores.append(prefix_lse[row, head].double())
            values.append(prefix_out[row, head].double())
        if scores:
            out[row, head] = torch.stack(scores).softmax(0) @ torch.stack(values)
        lse[row, head] = torch.stack(scores).logsumexp(0) if scores else EMPTY
    return out, lse


@pytest.fixture(params=BOTH)
def tree_join(request):
    """The torch definition as a registered operator, and the Triton kernel."""
    return operators.tree_join if request.param == "operator" else interpreted("triton_tree", "_tree_join").tree_join


@pytest.fixture(params=BOTH)
def stores(request):
    """A module with `store_kv` and `store_rows`: the registered operators, and the Triton kernels."""
    return operators if request.param == "operator" else interpreted("triton_store", "_store_kv")


def check_join(tree_join, arguments: list, tolerance: float = 3e-6) -> None:
    out, lse = tree_join(*arguments)
    expected_out, expected_lse = expected_join(arguments)
    assert out.dtype is arguments[0].dtype
    assert lse.dtype is torch.float32
    torch.testing.assert_close(out.double(), expected_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=tolerance, atol=tolerance)


pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log")  # rows that pad a block


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_tree_part_joins_the_prefix(tree_join, sizes):
    check_join(tree_join, tree_arguments(sizes))


def test_a_key_that_no_row_sees_is_not_read(tree_join):
    arguments = tree_arguments(SIZES["odd sizes"])
    slots, mask = arguments[3:5]
    mask[1:, :, 3] = False
    slots[1:, 3] = torch.tensor([slot for slot in range(36) if slot not in slots])[:1]
    assert arguments[1][slots[1, 3] // 3, slots[1, 3] % 3].isnan().all()
    check_join(tree_join, arguments)


def test_a_row_without_prefix_sees_its_tree_alone(tree_join):
    arguments = tree_arguments(SIZES["odd sizes"])
    arguments[5][::2] = NAN
    arguments[6][::2] = EMPTY
    check_join(tree_join, arguments)


def test_a_row_may_see_the_prefix_alone_or_nothing(tree_join):
    arguments = tree_arguments(SIZES["odd sizes"])
    arguments[4][:, 1:3] = False
    arguments[6].unflatten(0, (5, 5))[:, 2] = EMPTY
    check_join(tree_join, arguments)


@pytest.mark.parametrize("shift", [-300.0, 300.0])
def test_a_part_may_outweigh_the_other(tree_join, shift):
    arguments = tree_arguments(SIZES["odd sizes"])
    arguments[6] += shift
    check_join(tree_join, arguments, tolerance=3e-5)


def test_an_entry_times_its_scale_is_the_value(tree_join):
    arguments = tree_arguments(SIZES["odd sizes"])
    check_join(tree_join, [*arguments[:8], 0.5, 3.0])


@pytest.mark.parametrize("cache", [torch.float16, torch.float32, torch.float8_e4m3fn])
def test_queries_and_cache_may_differ_in_type(tree_join, cache):
    arguments = tree_arguments(replace(SIZES["odd sizes"], page_size=4), torch.float16, cache)
    check_join(tree_join, [*arguments[:8], 0.25, 2.0], tolerance=4e-3)


def test_bfloat16():
    check_join(operators.tree_join, tree_arguments(SIZES["MLA"], torch.bfloat16), tolerance=3e-2)


def test_an_empty_batch(tree_join):
    out, lse = tree_join(*tree_arguments(replace(SIZES["MLA"], bs=0)))
    assert (out.shape, lse.shape) == ((0, 16, 64), (0, 16))


if "triton" in BOTH:

    def test_more_keys_than_the_kernel_takes_are_refused():
        with pytest.raises(ValueError, match="513 drafted tokens per request, the kernel at most 512"):
            interpreted("triton_tree", "_tree_join").tree_join(*tree_arguments(Sizes(1, 1, 513, 1, 1, 16, 16)))


def in_float64(arguments: list) -> list:
    return [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]


def test_float64_queries_get_float64():
    arguments = in_float64(tree_arguments(SIZES["odd sizes"]))
    out, lse = operators.tree_join(*arguments)
    expected = expected_join(arguments)
    torch.testing.assert_close((out, lse), expected, rtol=1e-12, atol=1e-12)


CACHE_TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def exact_values(shape: tuple[int, ...], cache: torch.dtype, rows: torch.dtype) -> Tensor:
    """Values of at least 1/4 that the types of rows and cache both hold, in the type of rows."""
    noise = torch.randn(shape)
    return (noise + noise.sign() / 4).to(cache).to(torch.bfloat16).to(cache).to(rows)


def store_arguments(cache: torch.dtype, rows: torch.dtype = torch.float32) -> list[Tensor]:
    """Pages and rows of keys and of values, all of them strided views, and slots."""
    both = torch.zeros(10, 4, 7, 24).to(cache)  # keys of 10, values of 14 elements, and room between the heads
    k_pages, v_pages = both[:, :, 1::2, :10], both[:, :, 1::2, 10:]
    k, v = exact_values((10, 9, 3), cache, rows).permute(1, 2, 0), exact_values((9, 6, 14), cache, rows)[:, ::2]
    return [k_pages, v_pages, k, v, torch.randperm(40).repeat_interleave(2)[:18:2]]


def stored(pages: Tensor, rows: Tensor, slots: Tensor, scale: float) -> Tensor:
    """What pages must be after a store, token by token."""
    expected = pages.clone()
    for row, slot in zip(rows, slots.tolist(), strict=True):
        expected[slot // 4, slot % 4] = (row.float() / scale).to(pages.dtype)
    return expected.float()


@pytest.mark.parametrize("cache", CACHE_TYPES, ids=str)
@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_stored_to_their_slots(stores, cache, rows):
    k_pages, v_pages, k, v, slots = store_arguments(cache, rows)
    expected = stored(k_pages, k, slots, 0.5), stored(v_pages, v, slots, 2.0)
    stores.store_kv(k_pages, v_pages, k, v, slots, 0.5, 2.0)
    assert torch.equal(k_pages.float(), expected[0])
    assert torch.equal(v_pages.float(), expected[1])


@pytest.mark.parametrize("cache", CACHE_TYPES, ids=str)
def test_latents_are_stored_to_their_slots(stores, cache):
    whole = torch.zeros(10, 4, 2, 1100).to(cache)
    pages, slots = whole[:, :, 1], torch.randperm(40)[:9]
    rows = exact_values((9, 1100), cache, torch.float32)
    expected = stored(pages, rows, slots, 1.0)
    stores.store_rows(pages, rows, slots, 1.0)
    assert torch.equal(pages.float(), expected)
    assert not whole[:, :, 0].float().any()


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_8_bits_saturate(stores, cache):
    pages, most = torch.zeros(1, 2, 4).to(cache), torch.finfo(cache).max
    stores.store_rows(pages, torch.tensor([[1.1 * most, -1e9, 1.01 * most, -most]]), torch.tensor([1]), 1.0)
    assert torch.equal(pages.float(), torch.tensor([[[0.0] * 4, [most, -most, most, -most]]]))


def test_other_types_keep_infinity_and_nan(stores):
    pages = torch.zeros(1, 2, 4)
    stores.store_rows(pages, torch.tensor([[500.0, -1e9, NAN, EMPTY]]), torch.tensor([1]), 1.0)
    assert torch.equal(pages[0, 1].nan_to_num(7.0, neginf=8.0), torch.tensor([500.0, -1e9, 7.0, 8.0]))


def test_nan_stays_nan_in_8_bits():
    pages = torch.zeros(1, 1, 2).to(torch.float8_e4m3fn)
    operators.store_rows(pages, torch.tensor([[NAN, 1.0]]), torch.tensor([0]))
    assert pages.float().isnan().flatten().tolist() == [True, False]


def test_storing_nothing_writes_nothing(stores):
    pages, none = torch.zeros(2, 2, 1, 4), torch.zeros(0, 1, 4)
    stores.store_kv(pages, pages.clone(), none, none, torch.zeros(0, dtype=torch.int64), 1.0, 1.0)
    stores.store_rows(pages[:, :, 0], none[:, 0], torch.zeros(0, dtype=torch.int64), 1.0)
    assert not pages.any()


def test_float64_is_stored_exactly():
    pages, row = torch.zeros(1, 1, 2, dtype=torch.float64), torch.tensor([[1 + 2.0**-50, 3.0]], dtype=torch.float64)
    operators.store_rows(pages, row, torch.tensor([0]))
    assert torch.equal(pages[0], row)


@pytest.mark.parametrize("positions", [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (0, 5, 6), (3, 4)], ids=str)
def test_a_tree_part_that_does_not_fit_is_refused(positions):
    arguments = tree_arguments(SIZES["odd sizes"])
    for position in positions:
        arguments[position] = arguments[position][:-1] if position not in (1, 2) else arguments[position][..., :1, :]
    with pytest.raises(ValueError, match=r"do not fit together; needed are q \[bs \* width, num_heads, dim\]"):
        operators.tree_join(*arguments)


@pytest.mark.parametrize(("position", "wrong"), [(2, torch.float16), (3, torch.int32), (4, torch.uint8)])
def test_a_tree_part_of_wrong_types_is_refused(position, wrong):
    arguments = tree_arguments(SIZES["odd sizes"])
    arguments[position] = arguments[position].to(wrong)
    with pytest.raises(ValueError, match=f"{wrong}.* do not fit together"):
        operators.tree_join(*arguments)


def test_a_store_that_does_not_fit_is_refused():
    k_pages, v_pages, k, v, slots = store_arguments(torch.float32)
    for wrong in ((k[1:], v, slots), (k, v[..., 1:], slots), (k, v, slots.int())):
        with pytest.raises(ValueError, match=r"needed are rows \[num_tokens, \*entry\]"):
            operators.store_kv(k_pages, v_pages, *wrong)
    assert not k_pages.any()


def operator_calls() -> dict:
    k_pages, v_pages, k, v, slots = store_arguments(torch.float32)
    slots = slots.unique()[:1].expand(1)
    ops = torch.ops.attn_backends
    return {
        "tree_join": (ops.tree_join.default, tree_arguments(SIZES["odd sizes"])),
        "tree_join of float64": (ops.tree_join.default, in_float64(tree_arguments(SIZES["MLA"]))),
        "store_kv": (ops.store_kv.default, [k_pages, v_pages, k[:1], v[:1], slots, 1.0, 2.0]),
        "store_rows": (ops.store_rows.default, [torch.zeros(3, 2, 5), torch.randn(2, 5), torch.tensor([5, 0]), 0.5]),
        "store_ring": (ops.store_ring.default, ring_arguments([(0, 2), (7, 11)])),
    }


@pytest.mark.parametrize("name", ["tree_join", "tree_join of float64", "store_kv", "store_rows", "store_ring"])
def test_opcheck(name):
    operator, arguments = operator_calls()[name]
    if name.startswith("tree_join"):  # NaN in the cache is not equal to itself, which opcheck asks of unmutated inputs
        arguments[1:3] = [pages.nan_to_num() for pages in arguments[1:3]]
    assert set(torch.library.opcheck(operator, tuple(arguments)).values()) == {"SUCCESS"}


def test_the_schemas_say_what_is_written():
    written = {
        name: [argument.name for argument in operator._schema.arguments if argument.is_write]
        for name, (operator, _) in operator_calls().items()
    }
    assert written == {
        "tree_join": [],
        "tree_join of float64": [],
        "store_kv": ["k_pages", "v_pages"],
        "store_rows": ["pages"],
        "store_ring": ["hidden_rings", "token_rings"],
    }


def test_a_recorded_graph_replays_the_operators():
    """Each is one node; a replay reads and writes the memory that it was captured with."""
    tree = tree_arguments(SIZES["odd sizes"])
    store = store_arguments(torch.float32)
    store[4] = torch.arange(9)
    graph = RecordedGraph()
    out, lse = graph.capture(lambda: (operators.store_kv(*store), operators.tree_join(*tree))[1])
    assert [call.func.__name__ for call in graph._calls] == ["store_kv.default", "tree_join.default"]
    for tensor in (tree[0], tree[5], store[2], store[3]):
        tensor.copy_(torch.randn(tensor.shape))
    store[4].copy_(torch.arange(20, 29))
    store[0].zero_()
    expected = expected_join(tree), stored(store[0], store[2], store[4], 1.0)
    graph.replay()
    torch.testing.assert_close((out.double(), lse.double()), expected[0], rtol=3e-6, atol=3e-6)
    assert torch.equal(store[0], expected[1])


def test_fakes_run_nothing():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        arguments = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in tree_arguments(SIZES["MLA"])]
        out, lse = operators.tree_join(*arguments)
    assert (out.shape, lse.shape, lse.dtype) == ((18, 16, 64), (18, 16), torch.float32)
