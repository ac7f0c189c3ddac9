"""FlashAttention-3's launches from each of its packages, held to the documented calls on the CPU."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends import backend
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.backends.trtllm_mla import TrtllmMLABackend
from attn_backends.cache import CacheFormat
from attn_backends.conformance import worlds
from attn_backends.conformance.catalogue import CheckFailure
from attn_backends.conformance.comparisons import compare_outputs
from attn_backends.conformance.scenes import Batch, Scene
from attn_backends.conformance.worlds import World
from attn_backends.contract.capabilities import Capabilities
from attn_backends.contract.kernel import Kernel
from attn_backends.errors import UnsupportedStepError
from attn_backends.kernels.tile_sizes import TileSizes
from attn_backends.layer import AttentionLayer, AttentionOutput, LatentQuery, joined
from attn_backends.selection import providers
from attn_backends.selection.choose import Workload, choose_kernels
from attn_backends.vendors import flash_attention, flash_attention_tiles
from spec_metadata import Capacity, StepKind
from spec_metadata.capacity import ceil_div
from tests.checks import check_eager, check_replay
from tests.triton_interpreter import interpreted
from tests.vendor_stand_ins import (
    batches,
    check_replay_after_warmup,
    install,
    paged_attention,
    pretend_hopper,
    recorder,
    world_of,
)

KV, LATENT = CacheFormat.KV, CacheFormat.LATENT
NAMES = [source.name for source in flash_attention.SOURCES]
KINDS = [kind for kind in flash_attention.CAPABILITIES if kind is not StepKind.PREFILL]
HOPPER, SGLANG = "flash_attn_interface", "sgl_kernel.flash_attn"
VLLM = "vllm.vllm_flash_attn.flash_attn_interface"


def tiles_of(bs: int, max_seqlen_q: int, causal: bool, window_size: tuple[int, int]) -> TileSizes:
    """Tiles of one key, and as many splits as there are: splits tell lengths, so that those of another step show."""
    masks = window_size[0] >= 0 or (causal and max_seqlen_q > 1)
    return TileSizes(1, 1, 1, 1, 1, 10**6, 10**6, 1, 1, int(masks), ceil_div(bs, 4) * 4)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    page_size: int | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Of the hopper folder and of vLLM."""
    assert cache_seqlens.shape == (batch_size,)
    assert (headdim, headdim_v) in {(64, 64), (64, 512)}
    assert num_heads_q % num_heads_kv == 0
    assert qkv_dtype is torch.bfloat16
    assert cu_seqlens_q is not None
    assert page_size is not None
    assert max_seqlen_k % page_size == 0
    tiles = tiles_of(batch_size, max_seqlen_q, causal, window_size)
    kinds = [cu_seqlens_q.diff(), cache_seqlens.clamp(min=1), torch.ones_like(cache_seqlens)]
    words = torch.zeros(tiles.stride * (2 + tiles.has_heads) + 1, dtype=torch.int32)
    for place, kind in enumerate(kinds[: 2 + tiles.has_heads]):
        words[place * tiles.stride :][:batch_size] = kind
    return words


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    page_table: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    scheduler_metadata: Tensor | None,
    s_aux: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The checks and the result of hopper/flash_api.cpp. With a sink, `finalize_aux` of hopper/softmax.h: its weight is
    in the sum that the output is divided by, and in the log-sum-exp, also of a row that sees no key.
    """
    bs = seqused_k.shape[0]
    assert q.dtype == k.dtype == v.dtype
    assert all(x.stride(-1) == 1 for x in (q, k, v, page_table))
    assert cu_seqlens_q.dtype == seqused_k.dtype == page_table.dtype == torch.int32
    assert cu_seqlens_q.is_contiguous()
    assert seqused_k.is_contiguous()
    assert cu_seqlens_q.shape == (bs + 1,)
    assert page_table.shape[0] == bs
    assert (q.shape[-1], v.shape[-1]) in {(64, 64), (64, 512)}
    reach = None
    if scheduler_metadata is not None:
        tiles = tiles_of(bs, max_seqlen_q, causal, window_size)
        assert scheduler_metadata.shape == (tiles.stride * (2 + tiles.has_heads) + 1,)
        assert scheduler_metadata.storage_offset() % 4 == 0
        is_right = (scheduler_metadata[:bs] == cu_seqlens_q.diff()) & (scheduler_metadata[-1] == 0)
        reach = scheduler_metadata[tiles.stride : tiles.stride + bs] * is_right
    if qv is not None:
        q, k = torch.cat((qv, q), -1), torch.cat((v, k), -1)
    out, lse = paged_attention(
        q,
        k,
        v,
        cu_seqlens_q,
        seqused_k,
        page_table,
        causal=causal,
        scale=softmax_scale,
        window=window_size,
        reach=reach,
    )
    if s_aux is not None:
        assert s_aux.dtype is torch.bfloat16
        assert s_aux.is_contiguous()
        assert s_aux.shape == (q.shape[1],)
        assert q.shape[1] <= 64
        assert qv is None
        keys, lse = lse, torch.logaddexp(lse, s_aux.float())
        out = (out.float() * (keys - lse).exp().unsqueeze(-1)).to(out.dtype)
    return out, lse.T.contiguous()


def sglang_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> tuple[Tensor, ...]:
    """`flash_attn_with_kvcache`, of SGLang and of the hopper folder: what we may pass of it."""
    assert k is None
    assert v is None
    assert return_softmax_lse
    assert num_splits == 0
    plan: tuple[Any, ...] = (cu_seqlens_q, cache_seqlens, page_table, max_seqlen_q, softmax_scale)
    out, lse = forward(q, k_cache, v_cache, qv, *plan, causal, window_size, scheduler_metadata)
    return out, lse, torch.empty(0), torch.empty(0)


def vllm_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_v: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = None,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    fa_version: int = 2,
    s_aux: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`flash_attn_varlen_func`: what we may pass of it."""
    assert cu_seqlens_k is None
    assert block_table is not None
    assert max_seqlen_k == block_table.shape[1] * k.shape[1]
    assert return_softmax_lse
    assert num_splits == 0
    assert fa_version == 3
    plan: tuple[Any, ...] = (cu_seqlens_q, seqused_k, block_table, max_seqlen_q, softmax_scale)
    return forward(q, k, v, q_v, *plan, causal, window_size or (-1, -1), scheduler_metadata, s_aux)


CALLS = {
    f"{HOPPER}:flash_attn_with_kvcache": sglang_with_kvcache,
    f"{HOPPER}:get_scheduler_metadata": get_scheduler_metadata,
    f"{SGLANG}:flash_attn_with_kvcache": sglang_with_kvcache,
    f"{VLLM}:flash_attn_varlen_func": vllm_varlen,
    f"{VLLM}:get_scheduler_metadata": get_scheduler_metadata,
    f"{VLLM}:FA3_UNAVAILABLE_REASON": None,
}
SETUPS = [(KV, 1, 1), (KV, 16, 3), (KV, 64, 1), (LATENT, 4, 1), (LATENT, 64, 3)]


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, CALLS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setup", SETUPS, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.one_in(3)
def test_uniform_steps(name: str, setup: tuple[CacheFormat, int, int], kind: StepKind) -> None:
    world = world_of(FA3Backend, name, setup)
    captured, replayed = batches(kind, setup[2], setup[1])
    check_eager(world, replayed)
    check_replay(world, captured, replayed, 4)
    for plans_itself in (False, True):
        check_replay_after_warmup(world, captured, replayed, plans_itself=plans_itself)


@pytest.mark.parametrize("kind", [StepKind.PREFILL, StepKind.DRAFT_EXTEND])
@pytest.mark.parametrize("setup", [(KV, 16, 1), (LATENT, 64, 1)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_packed_steps(name: str, setup: tuple[CacheFormat, int, int], kind: StepKind) -> None:
    check_eager(world_of(FA3Backend, name, setup), Batch(kind, (3, 9, 14), (4, 1, 2)))


@pytest.mark.parametrize("page_size", [32, 64])
def test_prefill_of_trtllm_mla(page_size: int) -> None:
    world = world_of(TrtllmMLABackend, "vllm_flash_attn", (LATENT, page_size, 1))
    check_eager(world, Batch(StepKind.PREFILL, (0, 9, 14), (4, 1, 2)))


@pytest.mark.parametrize(("kernel", "joins"), [("vllm_flash_attn", 0), ("torch", 1)])
def test_a_query_in_parts_is_joined_for_kernels_that_do_not_take_it(
    kernel: str, joins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(FA3Backend, kernel, (LATENT, 64, 1))
    scene = Scene(world, Batch(StepKind.TARGET_VERIFY, (3, 9, 14)), seed=1)
    meta, (given,) = world.backend.init_forward_metadata(scene.step()).at(), scene.inputs()
    world.backend.store(given.stored, world.cache, meta, world.layer)
    whole = world.backend.forward(given.q, world.cache, meta, world.layer)
    seen: list[LatentQuery] = []
    monkeypatch.setattr(backend, "joined", lambda q: seen.append(q) or joined(q))
    rank = world.layer.v_head_dim
    parts = LatentQuery(given.q[..., :rank].clone(), given.q[..., rank:])
    assert all(map(torch.equal, whole, world.backend.forward(parts, world.cache, meta, world.layer)))
    assert seen == [parts] * joins
    assert (parts.shape, parts.dtype) == (given.q.shape, given.q.dtype)
    latent = parts.latent
    for wrong in (latent[:-1], latent[:, :1], latent.double(), torch.cat((latent, parts.rope), dim=-1)):
        with pytest.raises(UnsupportedStepError, match=r"layer 0.*q(\.latent)? is "):
            world.backend.forward(parts._replace(latent=wrong), world.cache, meta, world.layer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_is_its_own_shape_of_layers(kind: StepKind) -> None:
    """Layers with and without a window run under one metadata, each on a schedule of its own."""
    world = world_of(FA3Backend, "vllm_flash_attn", (KV, 16, 1))
    scene = Scene(world, Batch(kind, (3, 9, 14)), seed=1)
    meta, full = world.backend.init_forward_metadata(scene.step()), world.layer
    inputs = scene.inputs()
    for layer in (full, replace(full, window=5), replace(full, window=2)):
        world.layer = layer
        scene.reset_memory()
        outputs = []
        for number, given in enumerate(inputs):
            world.backend.store(given.stored, world.cache, meta.at(number), layer)
            outputs.append(world.backend.forward(given.q, world.cache, meta.at(number), layer))
        compare_outputs(scene, inputs, outputs)


def with_sinks(world: World, **changes: Any) -> AttentionLayer:
    """The world's layer with sinks that outweigh some rows and are outweighed by others."""
    return replace(worlds.with_extra(world.layer, "sinks", world.setup), **changes)


SINK_BATCHES = [
    *((kind, 1, Batch(kind, (14, 1, 9))) for kind in KINDS),
    *((kind, 3, Batch(kind, (14, 1, 9))) for kind in (StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY)),
    (StepKind.PREFILL, 1, Batch(StepKind.PREFILL, (3, 9, 14), (4, 1, 2))),
    (StepKind.DRAFT_EXTEND, 1, Batch(StepKind.DRAFT_EXTEND, (3, 9, 14), (4, 1, 2))),
]
"""Every kind of step, trees and packed rows too: kind, topk, batch."""


def attended(world: World, batch: Batch) -> tuple[Scene, list[Any], list[AttentionOutput]]:
    """A scene's inputs and what the kernel gives for them, the log-sum-exp as it is handed out."""
    scene = Scene(world, batch, seed=1)
    scene.reset_memory()
    meta, inputs, outputs = world.backend.init_forward_metadata(scene.step()), scene.inputs(), []
    for number, given in enumerate(inputs):
        at = meta.at(number, given.ancestors)
        world.backend.store(given.stored, world.cache, at, world.layer)
        outputs.append(world.backend.forward(given.q, world.cache, at, world.layer))
    return scene, inputs, outputs


@pytest.mark.parametrize(
    ("kind", "topk", "batch", "window"),
    [(*each, window) for window in (None, 2, 5) for each in SINK_BATCHES if window is None or each[1] == 1],
)  # a window over a tree is refused
def test_sinks_take_their_share_in_every_kind_of_step(
    kind: StepKind, topk: int, batch: Batch, window: int | None
) -> None:
    world = world_of(FA3Backend, "vllm_flash_attn", (KV, 16, topk))
    world.layer = with_sinks(world, window=window)
    scene, inputs, outputs = attended(world, batch)
    compare_outputs(scene, inputs, outputs)
    plain, declared = replace(world.layer, sinks=None), world.declared(kind)
    assert declared.lse_of(plain, is_tree=topk > 1) == declared.lse
    assert (declared.lse_of(world.layer, is_tree=topk > 1) is None) == (topk == 1), "over a tree it is of the keys"


@pytest.mark.parametrize("kind", KINDS)
def test_sinks_in_a_graph(kind: StepKind) -> None:
    world = world_of(FA3Backend, "vllm_flash_attn", (KV, 16, 1))
    world.layer = with_sinks(world, window=5)
    for plans_itself in (False, True):
        check_replay_after_warmup(world, *batches(kind, 1, 16), plans_itself=plans_itself)


def lost_of_the_keys(gap: float) -> Tensor:
    """[4096] errors of the keys' log-sum-exp, taken out of one that counts a sink `gap` above it, in float32."""
    keys = torch.linspace(-6, 12, 4096, dtype=torch.float64)
    sink = (keys + gap).bfloat16().double()
    counted = torch.logaddexp(keys, sink).float()
    found = counted + torch.log1p(-torch.exp(sink.float() - counted))
    return (found.double() - keys).abs().nan_to_num(posinf=float("inf"))


def test_a_log_sum_exp_that_counts_the_sink_can_not_be_undone() -> None:
    """Why the kernel declares none beside sinks. What float32 keeps of the keys falls with the sink's share."""
    assert lost_of_the_keys(0.0).max() < 2e-6
    assert 1e-5 < lost_of_the_keys(4.0).max() < 1e-4
    assert lost_of_the_keys(10.0).max() > 1e-2
    assert lost_of_the_keys(16.0).isinf().all(), "the sink's own weight is all that is left"


def test_a_log_sum_exp_beside_sinks_would_fail_if_it_were_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Capabilities, "lse_of", lambda self, layer, is_tree: self.lse)
    world = world_of(FA3Backend, "vllm_flash_attn", (KV, 16, 1))
    world.layer = with_sinks(world)
    with pytest.raises(CheckFailure, match=r"LSE of forward 0.*rows are wrong"):
        compare_outputs(*attended(world, Batch(StepKind.TARGET_VERIFY, (14, 1, 9))))


@pytest.mark.parametrize("topk", [1, 3])
def test_sinks_that_are_left_out_or_counted_twice_are_seen(topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain's launch without them; in a tree, a part that counts them beside the join."""
    call, layer = flash_attention.Source.call, None

    def broken(self: flash_attention.Source, index: int, arguments: dict[str, Any]) -> Any:
        sinks = None if topk == 1 else layer.sinks
        return call(self, index, {**arguments, "sinks": sinks})

    monkeypatch.setattr(flash_attention.Source, "call", broken)
    world = world_of(FA3Backend, "vllm_flash_attn", (KV, 16, topk))
    world.layer = layer = with_sinks(world)
    with pytest.raises(CheckFailure, match=r"output of forward 0.*rows are wrong"):
        compare_outputs(*attended(world, Batch(StepKind.TARGET_VERIFY, (14, 1, 9))))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sinks": torch.zeros(4)}, "attention sinks of torch.float32 (it takes torch.bfloat16)"),
        ({"sinks": torch.zeros(4).half()}, "attention sinks of torch.float16 (it takes torch.bfloat16)"),
        (
            {"num_heads": 66, "sinks": torch.zeros(66).bfloat16()},
            "attention sinks of 66 query heads (it takes at most 64)",
        ),
    ],
    ids=str,
)
def test_sinks_that_it_would_round_or_can_not_hold_are_refused(changes: dict[str, Any], reason: str) -> None:
    world = world_of(FA3Backend, "vllm_flash_attn", (KV, 16, 1))
    declared, layer = world.declared(StepKind.DECODE), replace(world.layer, **changes)
    assert declared.layer_reasons(layer, torch.bfloat16, torch.bfloat16) == [reason]
    fp8 = torch.float8_e4m3fn
    (refused,) = declared.layer_reasons(with_sinks(world), torch.bfloat16, fp8)
    assert refused.startswith(f"a cache of {fp8} under queries of torch.bfloat16 (it takes torch.bfloat16")


@pytest.mark.parametrize("backend", [FA3Backend, TrtllmMLABackend])
def test_sinks_are_of_the_package_that_is_known_to_take_them(backend: Any) -> None:
    """Over keys and values alone: latents have none."""
    found = {
        kernel.name
        for kernel in backend.kernels
        for able in kernel.capabilities.values()
        if able.most_sinks is not None
    }
    assert found == ({"vllm_flash_attn"} if backend is FA3Backend else set())
    assert not any(able.sinks for name in NAMES[:2] for able in kernel_of(backend, name).capabilities.values())


@pytest.mark.parametrize(
    ("topk", "dtype", "verify"),
    [(1, torch.bfloat16, "vllm_flash_attn"), (3, torch.bfloat16, "triton"), (1, torch.float32, "triton")],
    ids=["chain", "tree", "float32 sinks"],
)
def test_auto_takes_it_for_the_layers_of_gpt_oss(topk: int, dtype: torch.dtype, verify: str) -> None:
    """But over trees, for the windows, and for sinks that it would round."""
    full = AttentionLayer(0, 64, 8, 64, 64, 0.125, sinks=torch.zeros(64, dtype=dtype))
    kernels = [
        replace(kernel_of(FA3Backend, name), unavailable_reasons=lambda device: [])
        for name in ("vllm_flash_attn", "triton")
    ]
    capacity = Capacity(4, 1000, 64, topk=topk, num_steps=3, num_draft_tokens=4 if topk == 1 else 8)
    workload = Workload(64, (full, replace(full, window=128)), torch.bfloat16, capacity=capacity)
    chosen = choose_kernels("fa3", kernels, "auto", torch.device("cuda"), workload)
    assert chosen[StepKind.TARGET_VERIFY].kernel.name == verify
    assert chosen[StepKind.PREFILL].kernel.name == ("triton" if dtype is torch.float32 else "vllm_flash_attn")
    assert bool(chosen[StepKind.TARGET_VERIFY].passed_over) == (verify == "triton")


def kernel_of(backend: Any, name: str) -> Kernel[Any]:
    """A backend's kernel by name."""
    return next(kernel for kernel in backend.kernels if kernel.name == name)


@pytest.mark.parametrize(
    ("kind", "window", "masks"),
    [(StepKind.DECODE, None, False), (StepKind.DECODE, 5, True), (StepKind.TARGET_VERIFY, None, True)],
)
def test_launch_and_schedule_mask_only_where_a_row_may_not_see_all(
    kind: StepKind, window: int | None, masks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is slower with a mask; `compare_outputs` sees one that lacks."""
    call, seen = flash_attention.Source.call, []

    def noted(self: flash_attention.Source, index: int, arguments: dict[str, Any]) -> Any:
        seen.append(arguments["causal"])
        return call(self, index, arguments)

    def prepare(**given: Any) -> Tensor:
        seen.append(given["causal"])
        return get_scheduler_metadata(**given)

    install(monkeypatch, {**CALLS, f"{VLLM}:get_scheduler_metadata": prepare})
    monkeypatch.setattr(flash_attention.Source, "call", noted)
    world = world_of(FA3Backend, "vllm_flash_attn", (KV, 16, 1))
    world.layer = replace(world.layer, window=window)
    check_eager(world, Batch(kind, (3, 9, 14)))
    assert len(seen) >= 2
    assert set(seen) == {masks}


@pytest.mark.parametrize("name", ["flash_attn_interface", "vllm_flash_attn"])
def test_a_schedule_of_another_step_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refresh = flash_attention.TileSchedule.refresh
    monkeypatch.setattr(
        flash_attention.TileSchedule, "refresh", lambda self: None if len(self.metadata) else refresh(self)
    )
    world = world_of(FA3Backend, name, (KV, 16, 1))
    with pytest.raises(CheckFailure, match="rows are wrong"):
        check_replay_after_warmup(world, *batches(StepKind.DECODE, 1, 16), plans_itself=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_is_planned_with_its_tiles_by_one_launch(
    kind: StepKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package makes them once, at capture; no replay asks it again."""
    interpreted("triton_plan_tiles", "_plan_and_split")
    monkeypatch.setattr(worlds, "planner_of", lambda kernel: "fused")
    monkeypatch.setattr(providers, "runs_on_triton", lambda device: [])
    monkeypatch.setattr(providers, "version_of", lambda distribution: "0.33.1")
    named = ("batch_size", "max_seqlen_q", "causal", "window_size")
    monkeypatch.setattr(
        flash_attention_tiles, "tile_sizes", lambda words, given, num: tiles_of(*[given[name] for name in named])
    )
    refresh = flash_attention.TileSchedule.refresh
    monkeypatch.setattr(
        flash_attention.TileSchedule, "refresh", lambda self: None if len(self.metadata) else refresh(self)
    )
    world = world_of(FA3Backend, "vllm_flash_attn", (KV, 16, 1))
    for plans_itself in (False, True):
        check_replay_after_warmup(world, *batches(kind, 1, 16), plans_itself=plans_itself)


@pytest.mark.parametrize(("name", "version", "is_known"), [("vllm", "0.33.0", True), ("vllm", "0.34.0", False)])
def test_words_are_written_for_versions_that_are_known_alone(
    name: str, version: str, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers, "version_of", lambda distribution: version if distribution == name else None)
    monkeypatch.setattr(flash_attention_tiles, "split_along", lambda *given: True)
    found = {source.name: source.split_along(None, None, None, {}) for source in flash_attention.SOURCES}
    assert found == {"flash_attn_interface": False, "sgl_kernel": False, "vllm_flash_attn": is_known}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("argument", "other"), [("causal", lambda given: not given), ("seqused_k", torch.clone), ("k", torch.zeros_like)]
)
def test_a_wrong_argument_is_seen(name: str, argument: str, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a length that the graph's launch does not read from where the replay writes it."""
    call, frozen = flash_attention.Source.call, {}

    def changed(self: flash_attention.Source, index: int, arguments: dict[str, Any]) -> Any:
        if argument == "seqused_k":
            given = frozen.setdefault(arguments[argument].data_ptr(), other(arguments[argument]))
        else:
            given = other(arguments[argument])
        return call(self, index, {**arguments, argument: given})

    monkeypatch.setattr(flash_attention.Source, "call", changed)
    world = world_of(FA3Backend, name, (KV, 16, 1))
    with pytest.raises(AssertionError, match=r"rows are wrong|assert torch\.Size"):
        check_replay_after_warmup(world, *batches(StepKind.TARGET_VERIFY, 1, 16), plans_itself=True)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_passed_is_what_the_version_check_asks_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {call.path: call.parameters for call in providers.VENDOR_KERNELS[name].calls}
    passed: dict[str, set[str]] = {path: set() for path in asked}
    install(monkeypatch, {**CALLS, **{path: recorder(CALLS[path], passed[path]) for path in asked}})
    for setup in ((KV, 16, 1), (LATENT, 16, 1)):
        world = world_of(FA3Backend, name, setup)
        if setup[0] is KV and name == "vllm_flash_attn":
            world.layer = with_sinks(world)
        check_eager(world, Batch(StepKind.DECODE, (3, 9)))
    assert passed == {path: set(parameters) for path, parameters in asked.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_package_that_takes_what_we_pass_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = pretend_hopper(monkeypatch)
    source = next(source for source in flash_attention.SOURCES if source.name == name)
    assert source.unavailable_reasons(device) == []


def test_a_package_that_is_too_old_says_which_argument_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def old(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, page_table: Tensor) -> None:
        """A call without MLA."""

    install(monkeypatch, {**CALLS, f"{SGLANG}:flash_attn_with_kvcache": old})
    (reason,) = flash_attention.SOURCES[1].unavailable_reasons(pretend_hopper(monkeypatch))
    assert "sgl-kernel" in reason
    assert "qv" in reason
    assert "comes with SGLang" in reason


def test_a_vllm_without_the_kernel_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {**CALLS, f"{VLLM}:FA3_UNAVAILABLE_REASON": "libcudart.so.13: cannot open shared object"})
    (reason,) = flash_attention.SOURCES[2].unavailable_reasons(pretend_hopper(monkeypatch))
    assert reason == "vllm has no FlashAttention-3: libcudart.so.13: cannot open shared object"


def test_a_broken_package_says_what_its_import_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {})
    (reason, *_) = flash_attention.SOURCES[0].unavailable_reasons(pretend_hopper(monkeypatch))
    assert "importing flash_attn_interface:flash_attn_with_kvcache failed: ModuleNotFoundError" in reason
    assert "hopper folder" in reason


def test_sizes_of_the_other_cache_format_are_refused() -> None:
    world = world_of(FA3Backend, "sgl_kernel", (KV, 16, 1))
    launch = world.backend.kernel_of(StepKind.DECODE).launch
    mla = AttentionLayer(0, 4, 1, 576, 512, 1.0)
    with pytest.raises(UnsupportedStepError, match=r"head sizes \(576, 512\) in a cache of kv entries"):
        launch(torch.empty(0, 4, 576), world.cache, None, mla)


def test_the_stand_ins_take_what_the_packages_document() -> None:
    for name in NAMES:
        for call in providers.VENDOR_KERNELS[name].calls:
            assert call.parameters <= inspect.signature(CALLS[call.path]).parameters.keys()
