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
from attn_backends.errors import UnsupportedStepError
from attn_backends.layer import AttentionLayer, LatentQuery, joined
from attn_backends.selection import providers
from attn_backends.vendors import flash_attention, flash_attention_tiles
from spec_metadata import StepKind
from tests.checks import check_eager, check_replay
from tests.flash_attention_stand_in import (
    CALLS,
    KINDS,
    KV,
    LATENT,
    NAMES,
    SGLANG,
    VLLM,
    get_scheduler_metadata,
    tiles_of,
    with_sinks,
)
from tests.triton_interpreter import interpreted
from tests.vendor_stand_ins import (
    batches,
    check_replay_after_warmup,
    install,
    pretend_hopper,
    recorder,
    world_of,
)

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
