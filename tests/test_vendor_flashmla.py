"""FlashMLA's launch, held to the documented call on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attn_backends.backends.trtllm_mla import TrtllmMLABackend
from attn_backends.cache import CacheFormat
from attn_backends.conformance import worlds
from attn_backends.conformance.catalogue import CheckFailure
from attn_backends.conformance.scenes import Batch
from attn_backends.contract.kernel import LayerShape
from attn_backends.errors import CaptureError
from attn_backends.selection import providers
from attn_backends.vendors import flashmla
from spec_metadata import StepKind
from tests.checks import check_eager, check_replay
from tests.share_outs import one_part_each, reach
from tests.triton_interpreter import interpreted
from tests.vendor_stand_ins import (
    batches,
    check_replay_after_warmup,
    install,
    paged_attention,
    planned_once,
    pretend_hopper,
    recorder,
    world_of,
)

KINDS = list(flashmla.KERNEL.capabilities)
CHAIN, TREE = (CacheFormat.LATENT, 64, 1), (CacheFormat.LATENT, 64, 3)
NUM_SMS = 132


@dataclass
class FlashMLASchedMeta:
    """The documented fields that a caller may fill."""

    have_initialized: bool = False
    config: object = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None


def num_parts(num_rows: int) -> int:
    """Parts of a schedule for so many query rows of a key head, all heads counted."""
    return max(NUM_SMS // -(-num_rows // 64), 1)


def get_mla_decoding_metadata(
    seqlens_k: Tensor, num_q_tokens_per_head_k: int, h_k: int, h_q: int | None = None, use_legacy: bool = False
) -> tuple[Tensor, Tensor]:
    """The schedule of dense bfloat16 decode: a part for each request, as far as there are parts."""
    assert use_legacy
    assert h_k == 1
    assert seqlens_k.is_contiguous()
    return one_part_each(seqlens_k, num_parts(num_q_tokens_per_head_k))


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    use_legacy: bool = False,
) -> tuple[Tensor, Tensor]:
    """The checks of csrc/api/dense_decode.h, and its log-sum-exp of a row without keys, +inf."""
    bs, width, num_heads, head_dim = q.shape
    parts, splits = tile_scheduler_metadata.tile_scheduler_metadata, tile_scheduler_metadata.num_splits
    assert use_legacy
    assert softmax_scale is not None
    assert parts is not None
    assert splits is not None
    assert parts.shape == (num_parts(width * num_heads), 8)
    assert splits.shape == (bs + 1,)
    assert all(x.is_contiguous() for x in (parts, splits, cache_seqlens))
    assert {x.dtype for x in (parts, splits, cache_seqlens, block_table)} == {torch.int32}
    assert k_cache.shape[1:] == (64, 1, head_dim) == (64, 1, 576)
    assert head_dim_v == 512
    assert q.dtype == k_cache.dtype
    assert all(x.stride(-1) == 1 for x in (q, k_cache, block_table))
    out, lse = paged_attention(
        q.flatten(0, 1),
        k_cache,
        k_cache[..., :head_dim_v],
        torch.arange(bs + 1, dtype=torch.int32) * width,
        cache_seqlens,
        block_table,
        causal=causal and width > 1,
        scale=softmax_scale,
        reach=reach(parts, splits, cache_seqlens),
    )
    lse = torch.where(lse == float("-inf"), float("inf"), lse)
    return out.view(bs, width, num_heads, head_dim_v), lse.view(bs, width, num_heads).transpose(1, 2).contiguous()


CALLS = {
    "flash_mla:flash_mla_with_kvcache": flash_mla_with_kvcache,
    "flash_mla:get_mla_decoding_metadata": get_mla_decoding_metadata,
    "flash_mla.flash_mla_interface:FlashMLASchedMeta": FlashMLASchedMeta,
    "flash_mla:has_legacy": lambda: True,
}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, CALLS)
    monkeypatch.setattr(providers, "version_of", lambda distribution: "1.0.0")


@pytest.mark.parametrize("version", ["1.0.0", "2.0.0"], ids=["ours", "by_the_vendor"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setup", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.one_in(3)
def test_steps(
    setup: tuple[CacheFormat, int, int], kind: StepKind, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers, "version_of", lambda distribution: version)
    world = world_of(TrtllmMLABackend, "flashmla", setup)
    captured, replayed = batches(kind, setup[2], setup[1])
    check_eager(world, replayed)
    check_replay(world, captured, replayed, 4)
    for plans_itself in (False, True):
        check_replay_after_warmup(world, captured, replayed, plans_itself=plans_itself)


def test_a_schedule_of_another_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    planned_once(monkeypatch, flashmla.PartSchedule)
    world = world_of(TrtllmMLABackend, "flashmla", CHAIN)
    short, long = Batch(StepKind.DECODE, (3, 9)), Batch(StepKind.DECODE, (70, 9))
    with pytest.raises(CheckFailure, match="rows are wrong"):
        check_replay_after_warmup(world, short, long, plans_itself=False)


@pytest.mark.parametrize("kind", [StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY])
def test_a_captured_step_is_planned_and_shared_out_by_one_launch(
    kind: StepKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreted("triton_plan", "_plan_pages")
    monkeypatch.setattr(worlds, "planner_of", lambda kernel: "fused")
    monkeypatch.setattr(providers, "runs_on_triton", lambda device: [])
    planned_once(monkeypatch, flashmla.PartSchedule)
    world = world_of(TrtllmMLABackend, "flashmla", CHAIN)
    captured, replayed = batches(kind, 1, 64)
    for plans_itself in (False, True):
        check_replay_after_warmup(world, captured, replayed, plans_itself=plans_itself)


def test_a_layer_whose_shape_was_not_named_at_capture_is_refused() -> None:
    world = world_of(TrtllmMLABackend, "flashmla", CHAIN)
    shape = LayerShape.of(world.layer, torch.bfloat16, torch.bfloat16)
    meta = world.backend.capture(world.capacity.bucket(StepKind.DECODE, 1), world.paging(), layers=[shape])
    q = torch.zeros(1, world.layer.num_heads, world.layer.head_dim, dtype=torch.bfloat16)
    world.backend.forward(q, world.cache, meta.at(), world.layer)
    other = replace(world.layer, scale=0.5)
    with pytest.raises(CaptureError, match=r"scale=0.5.* was not named at capture"):
        world.backend.forward(q, world.cache, meta.at(), other)


def changed(name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """The call with one of its arguments changed."""
    return lambda **given: flash_mla_with_kvcache(**{**given, name: change(given[name])})


def transposed(**given: Any) -> tuple[Tensor, Tensor]:
    """A log-sum-exp of [bs, width, num_heads]."""
    out, lse = flash_mla_with_kvcache(**given)
    return out, lse.transpose(1, 2).reshape(lse.shape)


def positive(**given: Any) -> tuple[Tensor, Tensor]:
    """A row without keys that claims some."""
    out, lse = flash_mla_with_kvcache(**given)
    return out, torch.where(lse == float("inf"), 0.0, lse)


@pytest.mark.parametrize(
    ("setup", "call"),
    [
        (CHAIN, changed("causal", lambda given: not given)),
        (TREE, changed("causal", lambda given: not given)),
        (CHAIN, changed("cache_seqlens", lambda given: given - 1)),
        (CHAIN, changed("softmax_scale", lambda given: given / 2)),
        (CHAIN, transposed),
        (TREE, positive),
    ],
    ids=["causal", "tree causal", "lengths", "scale", "lse transposed", "lse of no key"],
)
def test_a_wrong_launch_is_seen(
    setup: tuple[CacheFormat, int, int], call: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, {**CALLS, "flash_mla:flash_mla_with_kvcache": call})
    world = world_of(TrtllmMLABackend, "flashmla", setup)
    with pytest.raises(CheckFailure, match="rows are wrong"):
        check_eager(world, batches(StepKind.TARGET_VERIFY, setup[2], 64)[1])


def test_a_chain_takes_no_launch_to_turn_the_lse_round(monkeypatch: pytest.MonkeyPatch) -> None:
    turned = []
    monkeypatch.setattr(torch, "nan_to_num", lambda *given, **named: turned.append(given))
    world = world_of(TrtllmMLABackend, "flashmla", CHAIN)
    check_eager(world, Batch(StepKind.TARGET_VERIFY, (3, 9)))
    assert not turned


class Launches(TorchDispatchMode):
    """Notes what is launched, with the first tensor that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if args and isinstance(args[0], Tensor) and func._schema.is_mutable:
            self.seen.append((func.name(), args[0]))
        return func(*args, **(kwargs or {}))


def test_a_launch_goes_between_the_store_and_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashMLA's kernel may begin before the writes of the launch in front of it can be seen."""
    before: list[tuple[str, Tensor]] = []

    def call(**given: Any) -> tuple[Tensor, Tensor]:
        before.append(launches.seen[-1])
        return flash_mla_with_kvcache(**given)

    install(monkeypatch, {**CALLS, "flash_mla:flash_mla_with_kvcache": call})
    with Launches() as launches:
        check_eager(world_of(TrtllmMLABackend, "flashmla", CHAIN), Batch(StepKind.TARGET_VERIFY, (3, 9)))
    assert {name for name, _ in before} == {"aten::zero_"}
    assert {tuple(tensor.shape) for _, tensor in before} == {(1,)}


def test_what_is_passed_is_what_the_version_check_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {call.path: call.parameters for call in providers.VENDOR_KERNELS["flashmla"].calls}
    passed: dict[str, set[str]] = {path: set() for path in asked}
    found: Any = {path: recorder(CALLS[path], passed[path]) for path in asked}
    install(monkeypatch, {**CALLS, **found})
    monkeypatch.setattr(providers, "version_of", lambda distribution: "2.0.0")  # so that it plans, too
    check_eager(world_of(TrtllmMLABackend, "flashmla", CHAIN), Batch(StepKind.DECODE, (3, 9)))
    assert passed == {path: set(parameters) for path, parameters in asked.items()}


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    device = pretend_hopper(monkeypatch)
    assert flashmla.unavailable_reasons(device) == []

    def upstream(q: Tensor, k_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor, head_dim_v: int) -> None:
        """A package that has no legacy kernels to choose."""

    install(monkeypatch, {**CALLS, "flash_mla:flash_mla_with_kvcache": upstream})
    (reason,) = flashmla.unavailable_reasons(pretend_hopper(monkeypatch))
    assert "takes no" in reason
    assert "use_legacy" in reason
    assert "pip install 'attn-backends[flashmla]'" in reason

    missing = {"flash_mla:has_legacy": lambda: False, "flash_mla._loader:_LEGACY_UNAVAILABLE": "built without"}
    install(monkeypatch, {**CALLS, **missing})
    (reason,) = flashmla.unavailable_reasons(pretend_hopper(monkeypatch))
    assert reason == "sgl-flash-mla has no legacy kernels: built without"
