"""Sliding windows and attention sinks in the Triton kernels, interpreted, against the torch kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_backends.kernels import operators, torch_attention
from attn_backends.kernels.paged_operators import paged_attention
from tests.paged_arguments import Sizes, arguments, forget
from tests.triton_interpreter import interpreted

pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log"),  # rows that see nothing
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # a sink beside them
]
GROUPED = Sizes(lens=(70, 5, 37))  # a block has 16 keys, or 32 in a prefill
PACKED = replace(GROUPED, widths=(1, 4, 2))
LATENT = Sizes(lens=(53, 5, 37), num_heads=6, num_kv_heads=1, latent=True, page_size=16)
WINDOWS = (1, 5, 16, 17, 33, 1000)


@pytest.fixture(scope="module")
def decode():
    """The module of the kernel that divides keys, interpreted."""
    interpreted("triton_merge", "_merge")
    return interpreted("triton_decode", "_attend")


@pytest.fixture(scope="module")
def prefill():
    """The module of the kernel for many rows, interpreted."""
    interpreted("triton_merge", "_merge")
    return interpreted("triton_prefill", "_paged_attention")


def sinks_of(sizes: Sizes) -> torch.Tensor:
    """One far below the scores, one far above, others among them."""
    return torch.cat((torch.tensor([-90.0, 90.0]), torch.randn(sizes.num_heads - 2)))


def windowed(sizes: Sizes, window: int, causal: bool = True, dtype: torch.dtype = torch.float32) -> list:
    """Arguments of a page table whose memory before all windows of a request is NaN."""
    firsts = [length - (width - 1) * causal - window for length, width in zip(sizes.lens, sizes.widths, strict=True)]
    return forget(arguments(sizes, "page table", causal, dtype), sizes, tuple(max(first, 0) for first in firsts))


def check(module, given: list, extras: tuple, tolerance: float = 3e-6) -> None:
    """Against the definition, which takes a bound of keys and scratch, as the kernel that divides keys does."""
    found = module.paged_attention(*(given if "decode" in module.__name__ else [*given[:8], *given[9:13]]), *extras)
    torch.testing.assert_close(found, paged_attention(*given, *extras), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("num_parts", [1, 2, 20])
@pytest.mark.parametrize("sizes", [PACKED, LATENT], ids=["packed", "MLA"])
@pytest.mark.one_in(5)
def test_divided_keys_in_a_window(decode, monkeypatch, sizes, num_parts, window):
    monkeypatch.setattr(decode, "choose_num_splits", lambda programs, slots, most: num_parts)
    check(decode, windowed(sizes, window), (window, None, sinks_of(sizes) if window % 2 else None))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("sizes", [replace(PACKED, widths=(40, 5, 33)), LATENT], ids=["packed", "MLA"])
def test_prompts_in_a_window(prefill, sizes, window):
    check(prefill, windowed(sizes, window), (window, None, sinks_of(sizes) if window % 2 else None))


@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_sink_is_counted_once(decode, prefill, monkeypatch, num_parts):
    """However keys are divided, and beside rows that see nothing."""
    monkeypatch.setattr(decode, "choose_num_splits", lambda programs, slots, most: num_parts)
    sizes = replace(PACKED, lens=(53, 2, 37))
    for module in (decode, prefill):
        check(module, arguments(sizes, "page table", True), (None, None, sinks_of(sizes)))


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sinks_of_16_bits_are_the_same_numbers(decode, prefill, monkeypatch, dtype, num_parts):
    monkeypatch.setattr(decode, "choose_num_splits", lambda programs, slots, most: num_parts)
    given, sinks = arguments(PACKED, "page table", True), sinks_of(PACKED).to(dtype)
    for module in (decode, prefill):
        check(module, given, (None, None, sinks))
    torch.testing.assert_close(
        paged_attention(*given, sinks=sinks), paged_attention(*given, sinks=sinks.float()), rtol=0, atol=0
    )


@pytest.mark.parametrize("window", [1, 3, 17, 24])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_rows_of_a_tree_have_windows_by_their_depth(decode, prefill, monkeypatch, num_parts, window):
    monkeypatch.setattr(decode, "choose_num_splits", lambda programs, slots, most: num_parts)
    depths = torch.tensor([1, 2, 2, 1, 2, 3, 1, 2, 20], dtype=torch.int32)
    for module in (decode, prefill):
        check(module, windowed(replace(GROUPED, lens=(70, 5, 37)), window - 1, False), (window, depths, None))


@pytest.mark.parametrize("window", [1, 6, 21])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_rows_of_a_block_have_windows_by_their_position_and_see_its_end(
    decode, prefill, monkeypatch, num_parts, window
):
    monkeypatch.setattr(decode, "choose_num_splits", lambda programs, slots, most: num_parts)
    behind = torch.arange(-2, 1, dtype=torch.int32).repeat(3)
    for module in (decode, prefill):
        given = forget(
            arguments(GROUPED, "page table", False), GROUPED, tuple(max(n - 2 - window, 0) for n in GROUPED.lens)
        )
        check(module, given, (window, behind, None))


@pytest.mark.parametrize("window", [0, 16])
def test_a_window_that_drafted_tokens_fill_leaves_no_key(decode, prefill, window):
    for module in (decode, prefill):
        check(module, windowed(GROUPED, window, False), (window, None, None))


@pytest.mark.parametrize("cache", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_windows_and_sinks_over_scaled_caches(decode, prefill, cache):
    for module in (decode, prefill):
        given = arguments(GROUPED, "page table", True, torch.float16, cache)
        given[11:13] = 0.25, 2.0
        if cache.itemsize == 1:  # the interpreter knows no subnormals of 8-bit floats
            for entries in given[1:3]:
                entries.copy_(torch.where(entries.float().abs() < 0.25, 0.25, entries.float()).nan_to_num(2.0))
        check(module, given, (17, None, sinks_of(GROUPED)), tolerance=4e-3)


def blocks(kernels, name: str, monkeypatch, run) -> int:
    """Blocks of keys that the programs of a launch pass over."""
    seen, function = [], getattr(kernels, name)
    monkeypatch.setattr(kernels, name, lambda *given: (seen.append(name), function(*given))[1])
    run()
    return len(seen)


def test_blocks_before_a_window_are_skipped(decode, prefill, monkeypatch):
    """Not masked: one request of 600 keys, in parts that no key before the window makes; of a prompt, 40 rows."""
    one = Sizes(widths=(2,), lens=(600,), num_heads=2)
    asked = []
    monkeypatch.setattr(decode, "choose_num_splits", lambda programs, slots, most: asked.append(most) or 2)
    given = arguments(one, "page table", True)
    run = lambda: decode.paged_attention(*given, 20)  # noqa: E731
    assert blocks(decode, "_softmax_step", monkeypatch, run) <= 2 * 3
    assert max(asked) <= 3
    given = arguments(replace(one, widths=(40,)), "page table", True)
    run = lambda: prefill.paged_attention(*given[:8], *given[9:13], 64)  # noqa: E731
    assert blocks(prefill, "_places", monkeypatch, run) <= 2 * 2 * 4


def test_every_part_has_keys_of_the_window(decode, monkeypatch):
    monkeypatch.setattr(decode, "choose_num_splits", lambda programs, slots, most: 2)
    given = arguments(Sizes(widths=(2,), lens=(600,), num_heads=2), "page table", True)
    decode.paged_attention(*given, 100)
    assert given[14][: 2 * 2 * 2].isfinite().all(), "the log-sum-exps of two parts"


def tree_arguments() -> list:
    """The arguments of `tree_join`, of a tree of five nodes for each of two requests."""
    mask = torch.eye(5, dtype=torch.bool).repeat(2, 1, 1)
    mask[:, 1:, 0] = mask[:, 3, 1] = True
    q, pages = torch.randn(10, 4, 24), torch.randn(6, 4, 2, 44)
    slots = torch.randperm(24)[:10].view(2, 5)
    prefix = (torch.randn(10, 4, 20), torch.randn(10, 4))
    return [q, pages[..., :24], pages[..., 24:], slots, mask, *prefix, 0.2, 0.5, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tree_is_joined_under_its_sinks(dtype):
    kernels, given = interpreted("triton_tree", "_tree_join"), tree_arguments()
    given[6][3] = float("-inf")
    given[5][3] = float("nan")
    sinks = sinks_of(GROUPED).to(dtype)
    expected = operators.tree_join(*given, sinks)
    torch.testing.assert_close(kernels.tree_join(*given, sinks), expected, rtol=3e-6, atol=3e-6)
    bare, lse = operators.tree_join(*given)
    torch.testing.assert_close(expected[0], torch_attention.with_sinks(bare, lse, sinks))
    assert torch.equal(expected[1], lse), "it is of the keys alone"


def test_no_sink_beside_no_key_is_a_row_of_zeros():
    lse = torch.tensor([[float("-inf"), 0.0]])
    out = torch_attention.with_sinks(torch.ones(1, 2, 3), lse, torch.tensor([float("-inf"), float("-inf")]))
    assert out[0, :, 0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("extras", "reason"),
    [
        ((5, torch.zeros(9, dtype=torch.int32), None), r"drafted \[9\] torch.int32 for 9 rows"),
        ((None, None, torch.zeros(3)), r"sinks \[3\] torch.float32; needed are \[4\] of float32"),
        ((None, None, torch.zeros(4).double()), r"sinks \[4\] torch.float64; needed"),
    ],
    ids=["causal", "heads", "type"],
)
def test_extras_that_do_not_fit_are_refused(extras, reason):
    with pytest.raises(ValueError, match=reason):
        paged_attention(*arguments(GROUPED, "page table", True), *extras)


def test_sinks_that_do_not_fit_a_tree_are_refused():
    with pytest.raises(ValueError, match=r"sinks \[3\] torch.float32 do not fit"):
        operators.tree_join(*tree_arguments(), torch.zeros(3))
