"""Replays of the compressed backend against the eager step on the same padded layout, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from attn_backends.graphs import CudaGraph, RecordedGraph
from attn_backends.layer import AttentionOutput
from spec_metadata import Step, StepKind, UniformQuery
from spec_metadata.static_inputs import pad_step
from tests.dsv4_model import SMALL, tiny_model
from tests.dsv4_scenes import Engine, LayerInputs, Request, chains, pools_of, random_inputs, run_layers

MODEL = tiny_model(SMALL)
KINDS = [StepKind.DECODE, StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND]
NUM_STEPS, WIDTH, BS = 3, 4, 3


def step_of(engine: Engine, kind: StepKind, requests: Sequence[Request]) -> Step:
    """The step of some requests."""
    lens, paging = engine.lens(requests), engine.paging(requests)
    match kind:
        case StepKind.DECODE:
            return Step.decode(lens, paging)
        case StepKind.DRAFT_DECODE:
            return Step.draft_decode(1, NUM_STEPS, lens, paging)
        case StepKind.TARGET_VERIFY:
            return Step.target_verify(WIDTH, lens, paging)
        case _:
            return Step.draft_extend(UniformQuery(WIDTH), lens, paging)


def inputs_of(engine: Engine, step: Step, seed: int) -> list[list[LayerInputs]]:
    """Random inputs of every forward and layer."""
    rng = torch.Generator().manual_seed(seed)
    return [
        [random_inputs(layer, step.num_tokens, rng).map(lambda x: x.to(engine.device)) for layer in engine.layers]
        for _ in range(step.num_forwards)
    ]


def memory(engine: Engine) -> list[Tensor]:
    """The bytes of every pool."""
    return [pool.data.clone().view(torch.uint8) for cache in engine.caches for pool in pools_of(cache)]


def restore(engine: Engine, saved: Sequence[Tensor]) -> None:
    """Put the bytes of every pool back."""
    pools = [pool for cache in engine.caches for pool in pools_of(cache)]
    for pool, old in zip(pools, saved, strict=True):
        pool.data.view(torch.uint8).copy_(old)


def check_replays(kind: StepKind, *, block_table: bool, record_refresh: bool, device: str = "cpu") -> None:
    """Capture on some requests, replay on others: fewer, in another order, longer, and none."""
    engine = Engine(MODEL, SMALL, max_context=64, block_table=block_table, checking=not record_refresh, device=device)
    requests = [engine.add(chain) for chain in chains(64, 64, 64)]
    engine.prefill(requests, (5, 17, 31))
    backend = engine.backend
    first = step_of(engine, kind, requests[:2])
    meta = backend.capture(backend.capacity.bucket(kind, BS), first.paging)
    backend.replay(meta, first)
    static = inputs_of(engine, meta.step, 0)

    def region() -> list[AttentionOutput]:
        if record_refresh:
            backend.refresh(meta)
        return run_layers(engine, meta, static)

    graph = RecordedGraph() if device == "cpu" else CudaGraph()
    outputs = graph.capture(region)
    for seed, chosen in enumerate(([0], [2, 0], [1, 2, 0], [0, 1])):
        engine.prefill([requests[chosen[0]]], (5,))
        step = step_of(engine, kind, [requests[index] for index in chosen])
        for into, given in zip(flat(static), flat(inputs_of(engine, meta.step, seed + 1)), strict=True):
            into.copy_(given)
        before = memory(engine)
        (backend.copy_inputs if record_refresh else backend.replay)(meta, step)
        graph.replay()
        replayed, after = [AttentionOutput(*map(torch.clone, output)) for output in outputs], memory(engine)
        restore(engine, before)
        eager = backend.init_forward_metadata(pad_step(step, step.bucket(BS), backend.capacity))
        expected = run_layers(engine, eager, static)
        check_rows(replayed, expected, step.num_tokens)
        for one, two in zip(after, memory(engine), strict=True):
            assert torch.equal(outside_reserved(one), outside_reserved(two))
    backend.phases.check()


def check_rows(one: Sequence[AttentionOutput], two: Sequence[AttentionOutput], num_tokens: int) -> None:
    """The real rows of outputs and LSEs are finite and the same bit for bit."""
    for left, right in zip(one, two, strict=True):
        for mine, other in zip(left, right, strict=True):
            assert bool(mine[:num_tokens].isfinite().all())
            assert torch.equal(mine[:num_tokens], other[:num_tokens])


def outside_reserved(pages: Tensor) -> Tensor:
    """Every page but the reserved one."""
    return torch.cat((pages[:2], pages[3:]))


def flat(inputs: Sequence[Sequence[LayerInputs]]) -> list[Tensor]:
    """All tensors of all forwards and layers."""
    return [tensor for of_layers in inputs for given in of_layers for tensor in given.tensors()]


@pytest.mark.parametrize("record_refresh", [False, True], ids=["planned_before", "planned_inside"])
@pytest.mark.parametrize("block_table", [False, True], ids=["request_table", "block_table"])
@pytest.mark.parametrize("kind", KINDS)
def test_replay(kind: StepKind, block_table: bool, record_refresh: bool) -> None:
    check_replays(kind, block_table=block_table, record_refresh=record_refresh)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_no_real_row_and_writes_only_the_reserved_page(kind: StepKind) -> None:
    engine = Engine(MODEL, SMALL, max_context=64, poison=7.0)
    requests = [engine.add(chain) for chain in chains(64, 64)]
    engine.prefill(requests, (17, 31))
    step = step_of(engine, kind, requests)
    before, runs = memory(engine), []
    padded = pad_step(step, step.bucket(BS), engine.backend.capacity)
    inputs = inputs_of(engine, padded, 1)
    trimmed = [[given.map(lambda x: x[: step.num_tokens]) for given in of_layers] for of_layers in inputs]
    for given_step, given in ((step, trimmed), (padded, inputs)):
        restore(engine, before)
        outputs = run_layers(engine, engine.backend.init_forward_metadata(given_step), given)
        runs.append((outputs, memory(engine)))
    for one, two in zip(runs[0][0], runs[1][0], strict=True):
        torch.testing.assert_close(one.out, two.out[: step.num_tokens])
    for old, one, two in zip(before, runs[0][1], runs[1][1], strict=True):
        assert torch.equal(outside_reserved(one), outside_reserved(two))
        assert torch.equal(one[2], old[2]), "an eager step wrote the reserved page"


def test_a_frozen_input_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_backends.planning.planners.copy_step", lambda static, step: None)
    with pytest.raises(AssertionError):
        check_replays(StepKind.TARGET_VERIFY, block_table=False, record_refresh=False)


if torch.cuda.is_available():

    @pytest.mark.parametrize("record_refresh", [False, True], ids=["planned_before", "planned_inside"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_replay_of_a_cuda_graph(kind: StepKind, record_refresh: bool) -> None:
        check_replays(kind, block_table=False, record_refresh=record_refresh, device="cuda")
