"""Attention sinks on FlashAttention-3: which package takes them, and that each row's softmax counts its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.backends.fa3 import FA3Backend
from attn_backends.backends.trtllm_mla import TrtllmMLABackend
from attn_backends.conformance.catalogue import CheckFailure
from attn_backends.conformance.comparisons import compare_outputs
from attn_backends.conformance.scenes import Batch, Scene
from attn_backends.conformance.worlds import World
from attn_backends.contract.capabilities import Capabilities
from attn_backends.layer import AttentionLayer, AttentionOutput
from attn_backends.selection.choose import Workload, choose_kernels
from attn_backends.vendors import flash_attention
from spec_metadata import Capacity, StepKind
from tests.flash_attention_stand_in import CALLS, KINDS, KV, NAMES, kernel_of, with_sinks
from tests.vendor_stand_ins import batches, check_replay_after_warmup, install, world_of


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, CALLS)


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
