"""The compressed cache: 8-bit pages bit for bit, attention over them, exact writes, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

from attn_backends.backends.dsv4 import DSV4Backend
from attn_backends.cache import PagedLatent
from attn_backends.compressed_cache import Fp8Pages, allocate_compressed
from attn_backends.compressed_layer import CompressedLayer
from attn_backends.errors import UnsupportedStepError
from attn_backends.kernels import fp8_pages
from attn_backends.kernels.torch_compressed import index_scores
from attn_backends.layer import AttentionLayer
from spec_metadata import BoundInputs, CacheGeometry, Capacity, PackedQuery, Step, StepKind, UniformQuery
from spec_metadata.plans.compressed import Compression
from tests.dsv4_model import SMALL, Sizes, tiny_model
from tests.dsv4_scenes import Engine, LayerInputs, chains, check_outputs, pools_of, random_inputs

WIDE = replace(SMALL, head_dim=512, rope=64, num_heads=2, index_topk=64)
MODEL = tiny_model(SMALL)


def encoded(row: Tensor) -> tuple[bytes, bytes]:
    """576 bytes of elements and 8 of scales of a row of 512, group by group."""
    data, scales = b"", b""
    for group in row[:448].split(64):
        exponent = math.ceil(math.log2(max(float(group.abs().max()), 1e-4) / 448))
        data += bytes((group / 2.0**exponent).to(torch.float8_e4m3fn).view(torch.uint8).tolist())
        scales += bytes([exponent + 127])
    return data + bytes(row[448:].bfloat16().view(torch.uint8).tolist()), scales + b"\0"


def rows_of_all_sizes() -> Tensor:
    """Rows whose groups are of very different sizes, one of them zero."""
    rows = torch.randn(20, 512) * torch.logspace(-6, 4, 20).unsqueeze(1)
    rows[3, :64] = 0
    rows[5, 64:128] = 448.0  # a power of two as scale fits exactly
    return rows


@pytest.mark.parametrize("num_rows", [2, 64, 256])
def test_bytes_of_a_page(num_rows: int) -> None:
    assert {2: 1728, 64: 37440, 256: 149760}[num_rows] == fp8_pages.page_bytes(num_rows)
    pool = Fp8Pages(torch.full((12, fp8_pages.page_bytes(num_rows)), 0xEE, dtype=torch.uint8), num_rows)
    rows, slots = rows_of_all_sizes(), torch.randperm(10 * num_rows)[:20] + 2 * num_rows
    pool.write(slots, rows, 0)
    expected = torch.full_like(pool.data, 0xEE)
    for row, slot in zip(rows, slots.tolist(), strict=True):
        page, offset = slot // num_rows, slot % num_rows
        data, scales = encoded(row)
        expected[page, offset * 576 : offset * 576 + 576] = torch.tensor(list(data), dtype=torch.uint8)
        start = num_rows * 576 + offset * 8
        expected[page, start : start + 8] = torch.tensor(list(scales), dtype=torch.uint8)
    assert torch.equal(pool.data, expected)
    pool.write(torch.full((20,), -1), rows, 0)
    assert torch.equal(pool.data, expected)
    assert pool.rows_view.shape == (12, num_rows, 1, 584)
    assert pool.rows_view.stride()[:2] == (fp8_pages.page_bytes(num_rows), 584)


def test_pages_round_trip_within_the_formats_rounding() -> None:
    pool = Fp8Pages(torch.zeros(3, fp8_pages.page_bytes(16), dtype=torch.uint8), 16)
    rows, slots = rows_of_all_sizes(), torch.arange(16, 36)
    pool.write(slots, rows, 0)
    back = pool.read(slots)
    groups, read = rows[:, :448].unflatten(1, (7, 64)), back[:, :448].unflatten(1, (7, 64))
    largest = groups.abs().amax(dim=-1, keepdim=True).clamp_min(1e-4)
    bound = groups.abs() * 2.0**-4 + largest / 448 * 2 * 2.0**-10
    assert bool(((groups - read).abs() <= bound).all())
    assert torch.equal(back[:, 448:], rows[:, 448:].bfloat16().float())
    pool.write(slots, back, 0)
    assert torch.equal(pool.read(slots)[:, 448:], back[:, 448:])
    torch.testing.assert_close(pool.read(slots), back, rtol=0, atol=0)


def rounded_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """transformers' attention over rows and entries that were rounded as a page rounds them."""
    rounded = fp8_pages.dequantise(fp8_pages.quantise(key))
    return _EAGER(module, query, rounded, rounded, *args, **kwargs)


_EAGER = modeling.eager_attention_forward


@pytest.mark.parametrize("poison", [float("nan"), 0.0], ids=["nan", "finite"])
def test_attention_over_pages_agrees_with_an_oracle_that_rounds(poison: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(WIDE)
    engine = Engine(model, WIDE, max_context=50, cache_dtype=torch.float8_e4m3fn, poison=poison)
    requests = [engine.add(chain) for chain in chains(50, 50)]
    engine.prefill(requests, (9, 18))
    for accepted in ((1, 4), (2, 1), (3, 2), (1, 1)):
        engine.draft(requests, 3, [1, 0])
        engine.verify(requests, 4, accepted)
    with pytest.raises(AssertionError):
        check_outputs(model, requests[0], tolerance=5e-3)
    monkeypatch.setattr(modeling, "eager_attention_forward", rounded_attention)
    for request in requests:
        check_outputs(model, request, tolerance=5e-3)


def test_half_precision_stays_near_single() -> None:
    engine = Engine(MODEL, SMALL, max_context=40)
    for layer in engine.layers:
        given = random_inputs(layer, 20, torch.Generator().manual_seed(layer.id))
        outputs = []
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            request = engine.add(chains(40)[0])
            engine.free += engine.pages[request.row].tolist()
            engine.requests.remove(request)
            step = Step.prefill(PackedQuery.of((20,)), engine.lens([request]), engine.paging([request]))
            at = engine.backend.init_forward_metadata(step).at()
            cache = allocate_compressed(engine.geometry, layer, engine.backend.ring(layer), dtype, "cpu")
            typed = given.map(lambda x, dtype=dtype: x.to(dtype))
            engine.backend.store(typed.stored, cache, at, layer)
            outputs.append(engine.backend.forward(typed.q, cache, at, layer, typed.index))
            assert outputs[-1].out.dtype is dtype
        torch.testing.assert_close(outputs[1].out.double(), outputs[0].out, rtol=1e-4, atol=1e-5)
        if layer.indexer is None:
            torch.testing.assert_close(outputs[2].out.double(), outputs[0].out, rtol=5e-2, atol=5e-2)


def test_half_precision_queries_over_8_bit_pages() -> None:
    engine = Engine(tiny_model(WIDE), WIDE, max_context=40)
    request = engine.add(chains(40)[0])
    step = Step.prefill(PackedQuery.of((20,)), engine.lens([request]), engine.paging([request]))
    at = engine.backend.init_forward_metadata(step).at()
    for layer in engine.layers[1:3]:
        given = random_inputs(layer, 20, torch.Generator().manual_seed(1)).map(lambda x: x.bfloat16())
        outs = []
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            cache = engine.backend.allocate_cache(layer, dtype)
            engine.backend.store(given.stored, cache, at, layer)
            outs.append(engine.backend.forward(given.q, cache, at, layer, given.index).out)
            assert outs[-1].dtype is torch.bfloat16
        difference = (outs[0] - outs[1]).float()
        assert 0 < float(difference.norm()) < 0.05 * float(outs[0].float().norm())


def test_idle_stores_and_returns_nothing() -> None:
    engine, _, _ = ready(1)
    meta = engine.backend.init_forward_metadata(Step.idle(engine.paging([])))
    for layer, cache in zip(engine.layers, engine.caches, strict=True):
        given = random_inputs(layer, 0, torch.Generator())
        before = [pool.data.clone() for pool in pools_of(cache)]
        engine.backend.store(given.stored, cache, meta.at(), layer)
        out, lse = engine.backend.forward(given.q, cache, meta.at(), layer, given.index)
        assert (out.shape, lse.shape) == ((0, 4, 32), (0, 4))
        for old, pool in zip(before, pools_of(cache), strict=True):
            assert torch.equal(old.view(torch.int32), pool.data.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_types_of_an_idle_step_are_those_of_every_other(dtype: torch.dtype) -> None:
    engine, step, _ = ready(1)
    layer = engine.layers[1]
    cache, found = engine.backend.allocate_cache(layer, dtype), []
    for each in (step, Step.idle(engine.paging([]))):
        meta = engine.backend.init_forward_metadata(each)
        given = random_inputs(layer, each.num_tokens, torch.Generator().manual_seed(1)).map(lambda x: x.to(dtype))
        engine.backend.store(given.stored, cache, meta.at(), layer)
        out, lse = engine.backend.forward(given.q, cache, meta.at(), layer, given.index)
        found.append((out.dtype, lse.dtype, out.shape[1:], lse.shape[1:]))
    assert found[0] == found[1]


@pytest.mark.parametrize("index", [1, 2])
def test_autocast_changes_nothing(index: int) -> None:
    engine, step, given = ready(index)
    layer, found = engine.layers[index], []
    for enabled in (False, True):
        cache, at = engine.backend.allocate_cache(layer, torch.float32), engine.backend.init_forward_metadata(step).at()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            engine.backend.store(given.stored, cache, at, layer)
            found.append(engine.backend.forward(given.q, cache, at, layer, given.index))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_scores_of_entries_are_the_same_under_autocast() -> None:
    q, weights, keys = torch.randn(2, 3, 4, 16), torch.rand(2, 3, 4), torch.randn(2, 9, 16)
    num_visible = torch.tensor([[9, 4, 0], [1, 9, 3]])
    expected = index_scores(q, weights, keys, num_visible)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(index_scores(q, weights, keys, num_visible), expected)


def test_lse_is_of_window_and_entries_without_the_sink() -> None:
    engine, step, given = ready(2)
    layer, cache = engine.layers[2], engine.caches[2]
    at = engine.backend.init_forward_metadata(step).at()
    engine.backend.store(given.stored, cache, at, layer)
    out, lse = engine.backend.forward(given.q, cache, at, layer)
    bare = replace(layer, sinks=None)
    bare_out, bare_lse = engine.backend.forward(given.q, cache, at, bare)
    assert torch.equal(lse, bare_lse)
    torch.testing.assert_close(out, bare_out * torch.sigmoid(lse - layer.sinks).unsqueeze(-1))


PREFILL_WIDTHS = (25, 20)


def ready(index: int, kind: StepKind = StepKind.TARGET_VERIFY) -> tuple[Engine, Step, LayerInputs]:
    """An engine with two requests, a step of them, and inputs for a layer."""
    engine = Engine(MODEL, SMALL, max_context=64)
    requests = [engine.add(chain) for chain in chains(64, 64)]
    engine.prefill(requests, (18, 31))
    lens, paging = engine.lens(requests), engine.paging(requests)
    if kind is StepKind.PREFILL:
        step = Step.prefill(PackedQuery.of(PREFILL_WIDTHS), lens, paging)
    else:
        step = Step.target_verify(4, lens, paging)
    return engine, step, random_inputs(engine.layers[index], step.num_tokens, torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", [StepKind.TARGET_VERIFY, StepKind.PREFILL])
@pytest.mark.parametrize("index", range(4))
def test_exactly_the_owned_slots_change(index: int, kind: StepKind) -> None:
    engine, step, given = ready(index, kind)
    layer, cache = engine.layers[index], engine.caches[index]
    before = [pool.data.clone() for pool in pools_of(cache)]
    at = engine.backend.init_forward_metadata(step).at()
    engine.backend.store(given.stored, cache, at, layer)
    rows = step.flat_slots().tolist()
    assert changed(before[0], cache.rows.data) == set(rows)
    assert torch.equal(cache.rows.read(step.flat_slots()), given.stored.rows)
    if layer.compression is None:
        return
    ratio, ring = layer.compression.ratio, engine.backend.ring(layer)
    widths = (4, 4) if kind is StepKind.TARGET_VERIFY else PREFILL_WIDTHS
    places = [start + j for start, width in zip((18, 31), widths, strict=True) for j in range(width)]
    entries = {slot // ratio for slot, p in zip(rows, places, strict=True) if (p + 1) % ratio == 0}
    last_rows = {slot // 16 * ring + p % ring: row for row, (slot, p) in enumerate(zip(rows, places, strict=True))}
    pairs = [(cache.compressor, given.stored.compressor), (cache.indexer, given.stored.indexer)]
    for old, (pools, stored) in zip((before[1:3], before[3:5]), pairs, strict=True):
        if pools is not None:
            assert changed(old[0], pools.entries.data) == entries
            assert changed(old[1], pools.states.data) == last_rows.keys()
            kept = torch.cat((stored.values, stored.gates), dim=1)[list(last_rows.values())]
            assert torch.equal(pools.states.read(torch.tensor(list(last_rows))), kept)


def changed(before: Tensor, after: Tensor) -> set[int]:
    """Rows of a pool whose bits differ."""
    differ = (before.view(torch.int32) != after.view(torch.int32)).any(dim=-1).flatten()
    return set(differ.nonzero().flatten().tolist())


def refused(engine: Engine, index: int, call: Callable[[], Any], reason: str) -> None:
    """A call raises with a reason and writes nothing."""
    before = [pool.data.clone() for pool in pools_of(engine.caches[index])]
    with pytest.raises(UnsupportedStepError, match=reason):
        call()
    for old, pool in zip(before, pools_of(engine.caches[index]), strict=True):
        assert torch.equal(old.view(torch.int32), pool.data.view(torch.int32))


def test_metadata_of_a_whole_step() -> None:
    engine, step, given = ready(1)
    layer, cache = engine.layers[1], engine.caches[1]
    whole: Any = engine.backend.init_forward_metadata(step)
    refused(engine, 1, lambda: engine.backend.store(given.stored, cache, whole, layer), r"pass meta\.at\(i\)")
    refused(engine, 1, lambda: engine.backend.forward(given.q, cache, whole, layer, given.index), r"pass meta\.at\(i\)")


def test_caches_and_layers_of_another_kind() -> None:
    engine, step, given = ready(1)
    layer, cache, backend = engine.layers[1], engine.caches[1], engine.backend
    at = backend.init_forward_metadata(step).at()
    latent = PagedLatent(torch.zeros(engine.geometry.num_pages, 16, 32), 32)
    plain = AttentionLayer(1, 4, 1, 32, 32, 0.1)
    odd = Compression(4, overlap=True)
    bare = replace(layer, compression=odd, indexer=None, index_topk=0)
    small = allocate_compressed(replace(engine.geometry, num_pages=5), layer, 10, torch.float32, "cpu")
    short = allocate_compressed(engine.geometry, layer, 9, torch.float32, "cpu")
    half = allocate_compressed(engine.geometry, layer, 10, torch.bfloat16, "cpu")
    cases: list[tuple[Any, CompressedLayer | AttentionLayer, str]] = [
        (latent, layer, "a cache of latent .it takes compressed."),
        (cache, plain, "a plain AttentionLayer .it takes a CompressedLayer"),
        (cache, replace(layer, window=9), "a window of 9 tokens .it plans one of 8"),
        (cache, bare, "ratio=4, overlap=True, indexed=False. .it plans"),
        (engine.caches[2], layer, r"a cache of rows, compressor entries, compressor states .its layer has"),
        (small, layer, "rows of .pages, rows of a page, elements. .5, 16, 32., not"),
        (short, layer, "a ring of 9 would allow 3 draft tokens"),
        (half, layer, "a cache of torch.bfloat16 under queries of torch.float32"),
        (cache, replace(layer, k_scale=0.5), "scaled keys or values"),
    ]
    for wrong_cache, wrong_layer, reason in cases:
        refused(engine, 1, lambda c=wrong_cache, x=wrong_layer: backend.store(given.stored, c, at, x), reason)
        refused(engine, 1, lambda c=wrong_cache, x=wrong_layer: backend.forward(given.q, c, at, x, given.index), reason)


def test_layers_with_entries_draft_no_blocks() -> None:
    engine, step, given = ready(1)
    at = engine.backend.init_forward_metadata(Step.draft_block(step.width, step.seq_lens, step.paging)).at()
    with pytest.raises(UnsupportedStepError, match=r"ratio=4.* in a draft block .layers of a window alone"):
        engine.backend.forward(given.q, engine.caches[1], at, engine.layers[1], given.index)


def test_inputs_that_do_not_fit_the_layer() -> None:
    engine, step, given = ready(1)
    layer, cache, backend = engine.layers[1], engine.caches[1], engine.backend
    at = backend.init_forward_metadata(step).at()
    stored = given.stored
    wrong = replace(stored.compressor, gates=stored.compressor.gates[:, 1:])
    for inputs, reason in (
        (replace(stored, rows=stored.rows[1:]), r"rows are \[7, 32\], not \[8, 32\]"),
        (replace(stored, indexer=None), "no projections of the indexer"),
        (replace(stored, compressor=wrong), r"of the compressor are \[8, 64\] and \[8, 63\], not \[8, 64\]"),
    ):
        refused(engine, 1, lambda i=inputs: backend.store(i, cache, at, layer), reason)
    refused(engine, 1, lambda: backend.forward(given.q, cache, at, layer), "an index query goes with an indexed layer")
    q = given.q[:, :3]
    refused(
        engine, 1, lambda: backend.forward(q, cache, at, layer, given.index), r"q is \[8, 3, 32\], not \[8, 4, 32\]"
    )
    index = replace(given.index, weights=given.index.weights[:, 1:])
    refused(engine, 1, lambda: backend.forward(given.q, cache, at, layer, index), "index q and weights are")


def test_trees() -> None:
    engine, step, _ = ready(1)
    lens, paging = step.seq_lens, step.paging
    mask = torch.eye(4, dtype=torch.bool).expand(2, -1, -1)
    trees = [Step.target_verify(4, lens, paging, tree_mask=mask), Step.draft_decode(2, 2, lens, paging)]
    for tree in trees:
        with pytest.raises(UnsupportedStepError, match="draft with topk = 1"):
            engine.backend.init_forward_metadata(tree)
    capacity = Capacity(2, 40, 16, topk=3, num_steps=3, num_draft_tokens=4)
    backend = SMALL.backend(capacity, engine.geometry)
    for kind in (StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY):
        with pytest.raises(UnsupportedStepError, match="draft with topk = 1"):
            backend.capture(capacity.bucket(kind, 2), paging)


def test_more_draft_tokens_than_the_ring_allows() -> None:
    engine, step, _ = ready(1)
    lens, paging = step.seq_lens, step.paging
    for wide, reason in (
        (Step.target_verify(5, lens, paging), "5 query rows per request .the 10 state rows of ratio 4 allow 4"),
        (Step.draft_extend(UniformQuery(6), lens, paging), "6 query rows per request"),
        (Step.draft_extend(PackedQuery.of((1, 5)), lens, paging), "5 query rows per request"),
        (Step.draft_decode(1, 5, lens, paging), "4 draft forwards .the 10 state rows of ratio 4 allow 3"),
    ):
        with pytest.raises(UnsupportedStepError, match=reason):
            engine.backend.init_forward_metadata(wide)


def test_a_graph_of_ragged_extends_asks_the_ring_for_its_bound() -> None:
    """Nothing asks later where the graph reads widths of the engine's own buffers."""
    engine, step, _ = ready(1)
    capacity = Capacity(2, 40, 16, num_steps=3, num_draft_tokens=4, num_rerun=2)
    one, bucket = torch.ones(step.bs, dtype=torch.int32), capacity.ragged_bucket(StepKind.DRAFT_EXTEND, step.bs, 8)
    inputs = BoundInputs(step.seq_lens, num_real=one[:1], widths=one)
    backend = SMALL.backend(capacity, engine.geometry)
    with pytest.raises(UnsupportedStepError, match=r"6 query rows per request .the 10 state rows of ratio 4 allow 4"):
        backend.capture(bucket, step.paging, inputs)


def test_a_prefix_that_ends_inside_a_page() -> None:
    engine, _, _ = ready(1)
    engine.backend.check_prefix(48)
    with pytest.raises(UnsupportedStepError, match=r"a prefix of 37 tokens ends inside a page.*reuse 32 tokens"):
        engine.backend.check_prefix(37)


def test_head_sizes_that_the_page_format_lacks() -> None:
    engine, _, _ = ready(1)
    with pytest.raises(UnsupportedStepError, match=r"rows of 32 .*a head size of 512, or a cache of bfloat16"):
        allocate_compressed(engine.geometry, engine.layers[1], 10, torch.float8_e4m3fn, "cpu")


def test_layers_that_are_none() -> None:
    engine, _, _ = ready(1)
    layer = engine.layers[1]
    for changes, reason in (
        ({"window": None}, "it has no window"),
        ({"num_kv_heads": 2}, "2 KV heads"),
        ({"v_head_dim": 16}, r"sizes \(32, 16\)"),
        ({"compressor": None}, "come together"),
        ({"index_topk": 0}, "an indexed compression has an indexer and an index_topk"),
        ({"compression": Compression(8, overlap=True, indexed=True)}, r"position_bias of its compressor is \[4, 64\]"),
        ({"compressor": layer.indexer}, "its compressor makes entries of 16, rows are 32"),
    ):
        with pytest.raises(UnsupportedStepError, match=reason):
            replace(layer, **changes)


def test_the_backend_of_the_real_ratios_is_the_default() -> None:
    backend = DSV4Backend(Capacity(2, 1000, 256, num_steps=3, num_draft_tokens=4), CacheGeometry(20, 256))
    assert {compression.ratio: ring for compression, ring in backend.rings.items()} == {4: 10, 128: 130}
    assert (Sizes(ratio=4, long_ratio=128).backend.compressions, 128) == (DSV4Backend.compressions, DSV4Backend.window)
