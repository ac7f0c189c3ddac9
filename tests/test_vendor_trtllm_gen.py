"""The launch of TensorRT-LLM's MLA decode: every argument and all metadata, without the GPU that it is made for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.backends.trtllm_mla import TrtllmMLABackend
from attn_backends.cache import CacheFormat
from attn_backends.conformance.catalogue import CheckFailure
from attn_backends.conformance.scenes import Batch
from attn_backends.selection import providers
from attn_backends.vendors import trtllm_gen
from spec_metadata import StepKind
from tests.checks import check_eager, check_replay
from tests.vendor_stand_ins import (
    batches,
    check_replay_after_warmup,
    install,
    paged_attention,
    pretend_hopper,
    recorder,
    world_of,
)

PATH = "flashinfer.decode:trtllm_batch_decode_with_kv_cache_mla"
KINDS = list(trtllm_gen.KERNEL.capabilities)
CHAIN, TREE = (CacheFormat.LATENT, 32, 1), (CacheFormat.LATENT, 64, 3)


def decode(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: Tensor | None = None,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    sinks: list[Tensor] | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    return_lse_base: str | None = None,
) -> tuple[Tensor, Tensor]:
    """What FlashInfer 0.7.2 documents of dense decode with backend="trtllm-gen"; always causal. A batch that holds a
    request without keys, of which it says nothing, comes out as NaN.
    """
    bs, width, num_heads, head_dim = query.shape
    num_pages, page_size, entry = kv_cache.shape
    assert (qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim) == (128, 512, 64)
    assert head_dim == entry == kv_lora_rank + qk_rope_head_dim
    assert query.dtype == kv_cache.dtype == torch.bfloat16
    assert page_size in (32, 64)
    assert num_pages > 0
    assert block_tables.dtype == seq_lens.dtype == torch.int32
    assert block_tables.shape[0] == bs
    assert block_tables.shape[1] % (128 // page_size) == 0
    assert seq_lens.shape == (bs,)
    assert max_seq_len <= block_tables.shape[1] * page_size
    assert workspace_buffer.shape == (128 << 20,)
    assert workspace_buffer.dtype is torch.uint8
    assert isinstance(bmm1_scale, float)
    assert bmm2_scale == 1.0
    assert (backend, return_lse, return_lse_base) == ("trtllm-gen", True, "basee")
    latents = kv_cache.unsqueeze(2)
    result, lse = paged_attention(
        query.flatten(0, 1),
        latents,
        latents[..., :kv_lora_rank],
        torch.arange(bs + 1, dtype=torch.int32) * width,
        seq_lens,
        block_tables[:, : max_seq_len // page_size],
        causal=True,
        scale=bmm1_scale,
    )
    undefined = (seq_lens < 1).any()
    result, lse = torch.where(undefined, float("nan"), result), torch.where(undefined, float("nan"), lse)
    return result.view(bs, width, num_heads, kv_lora_rank), lse


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {PATH: decode})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setup", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.one_in(3)
def test_steps(setup: tuple[CacheFormat, int, int], kind: StepKind) -> None:
    world = world_of(TrtllmMLABackend, "trtllm_gen", setup)
    captured, replayed = batches(kind, setup[2], setup[1])
    check_eager(world, replayed)
    check_replay(world, captured, replayed, 4)
    for plans_itself in (False, True):
        check_replay_after_warmup(world, captured, replayed, plans_itself=plans_itself)


def test_the_workspace_starts_as_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def looking(**given: Any) -> tuple[Tensor, Tensor]:
        seen.append(int(given["workspace_buffer"].count_nonzero()))
        return decode(**given)

    install(monkeypatch, {PATH: looking})
    check_eager(world_of(TrtllmMLABackend, "trtllm_gen", CHAIN), Batch(StepKind.DECODE, (3, 9)))
    assert seen == [0]


def test_rows_over_a_tree_that_are_not_planned_again_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    refresh, refreshed = trtllm_gen.RowSchedule.refresh, set()

    def once(self: trtllm_gen.RowSchedule) -> None:
        if id(self) not in refreshed:
            refreshed.add(id(self))
            refresh(self)

    monkeypatch.setattr(trtllm_gen.RowSchedule, "refresh", once)
    world = world_of(TrtllmMLABackend, "trtllm_gen", TREE)
    with pytest.raises(CheckFailure, match="rows are wrong"):
        check_replay_after_warmup(world, *batches(StepKind.TARGET_VERIFY, 3, 64), plans_itself=False)


def changed(name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """The call with one of its arguments changed."""
    return lambda **given: decode(**{**given, name: change(given[name])})


@pytest.mark.parametrize(
    ("setup", "call"),
    [
        (CHAIN, changed("seq_lens", lambda given: given - 1)),
        (CHAIN, changed("bmm1_scale", lambda given: given / 2)),
        (CHAIN, changed("block_tables", lambda given: given.flip(0))),
        (TREE, changed("seq_lens", lambda given: given + 1)),
        (TREE, lambda **given: (decode(**given)[0], decode(**given)[1] / 0.6931471805599453)),
    ],
    ids=["lengths", "scale", "table", "tree lengths", "base two"],
)
def test_a_wrong_launch_is_seen(
    setup: tuple[CacheFormat, int, int], call: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, {PATH: call})
    world = world_of(TrtllmMLABackend, "trtllm_gen", setup)
    with pytest.raises(CheckFailure, match="rows are wrong"):
        check_eager(world, batches(StepKind.TARGET_VERIFY, setup[2], 64)[1])


def test_what_is_passed_is_what_the_version_check_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: set[str] = set()
    install(monkeypatch, {PATH: recorder(decode, passed)})
    check_eager(world_of(TrtllmMLABackend, "trtllm_gen", CHAIN), Batch(StepKind.DECODE, (3, 9)))
    (call,) = providers.VENDOR_KERNELS["trtllm_gen"].calls
    assert (call.path, set(call.parameters)) == (PATH, passed)


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trtllm_gen.KERNEL.unavailable_reasons(pretend_hopper(monkeypatch)) == []

    def older(query: Tensor, kv_cache: Tensor, workspace_buffer: Tensor, block_tables: Tensor) -> None:
        """A version without the log-sum-exp."""

    install(monkeypatch, {PATH: older})
    (reason,) = trtllm_gen.KERNEL.unavailable_reasons(pretend_hopper(monkeypatch))
    assert "flashinfer-python" in reason
    assert "return_lse_base" in reason


def test_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    capabilities = {0: (10, 0), 1: (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capabilities[device.index])
    assert providers.device_reasons("trtllm_gen", torch.device("cuda", 0)) == []
    assert providers.device_reasons("trtllm_gen", torch.device("cuda", 1)) == ["needs SM100 to SM103; this GPU is SM90"]
