"""SGLang's DFLASH without SGLang: draft blocks and their verifies as steps, what a runner of it is, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_backends import get_backend
from attn_backends.adapters.sglang import BlockDraftBatches, ForwardBatches
from attn_backends.conformance.comparisons import compare_memory, compare_outputs
from attn_backends.conformance.exercise import run_forwards
from attn_backends.engines.sglang.facts import RunnerFacts
from attn_backends.engines.sglang.refusals import model_reasons, server_reasons
from attn_backends.selection.choose import Choice
from spec_metadata import Step, StepKind
from tests.engine_batches import (
    LENS,
    Mode,
    data_parallel_padded,
    dflash_input,
    forward_batch,
    sglang_scene,
    sglang_steps,
)
from tests.test_sglang_refusals import execution, layer, parallel, runner, spec

BIDIRECTIONAL = type("AttentionType", (), {"value": "encoder_only"})


def verify_of(width: int, **fields: Any) -> Step:
    """A DFlash verify's step, on the target's runner."""
    kind = StepKind.DECODE if width == 1 else StepKind.TARGET_VERIFY
    scene, lens = sglang_scene(kind), torch.tensor(LENS)
    given = {"spec_info": dflash_input(width, **fields), "seq_lens": lens, "seq_lens_cpu": lens + width}
    return sglang_steps(scene).step(forward_batch(scene, forward_mode=Mode.TARGET_VERIFY, **given))


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("padded", [False, True], ids=["alone", "data_parallel"])
def test_a_verify_of_the_drafts_runner_is_a_block_whose_rows_see_one_another(page_size: int, padded: bool) -> None:
    scene = sglang_scene(StepKind.DRAFT_BLOCK, page_size)
    batch = forward_batch(scene)
    step = sglang_steps(scene).step(data_parallel_padded(batch) if padded else batch)
    assert (step.kind, step.width, step.seq_lens.tolist()) == (StepKind.DRAFT_BLOCK, scene.width, list(LENS))
    assert step.flat_slots().tolist() == scene.write_order()
    before, inputs = scene.reset_memory(), scene.inputs()
    outputs = run_forwards(scene.world, scene.world.backend.init_forward_metadata(step), inputs)
    compare_memory(scene, before, padded=True)
    compare_outputs(scene, inputs, outputs)


def test_of_a_block_and_its_verify_the_host_has_a_bound() -> None:
    """SGLang's lengths count the rows; with its overlap schedule they count reserved slots, and may be left out."""
    scene = sglang_scene(StepKind.DRAFT_BLOCK)
    batch = forward_batch(scene)
    for lens, bound in ((batch.seq_lens_cpu, max(LENS)), (batch.seq_lens_cpu + 5, max(LENS) + 5), (None, None)):
        batch.seq_lens_cpu = lens
        for builder in (BlockDraftBatches, ForwardBatches):
            step = builder(scene.world.table, scene.world.geometry).step(batch)
            assert (step.max_committed, step.seq_lens_cpu) == (bound, None)


@pytest.mark.parametrize("width", [1, 4])
def test_lengths_that_dspark_says_are_exact(width: int) -> None:
    step = verify_of(width, live_seq_lens_cpu=torch.tensor(LENS))
    assert (step.kind is StepKind.DECODE) is (width == 1)
    assert (step.max_committed, step.seq_lens_cpu) == (max(LENS), LENS)
    assert (verify_of(width).max_committed, verify_of(width).seq_lens_cpu) == (max(LENS), None)


def facts_of(layers: list[Any], **fields: Any) -> RunnerFacts:
    options = spec("DFLASH", speculative_num_steps=1)
    return RunnerFacts.of(runner(page_size=1, **fields), options, layers, mixes=False)


def reasons_of(layers: list[Any], **fields: Any) -> list[str]:
    facts = facts_of(layers, **fields)
    backend = get_backend("fa3")(facts.capacity, facts.batches.geometry, kernel="torch")
    return list(model_reasons(facts, backend))


def test_a_draft_runs_over_blocks_alone_and_its_target_as_with_a_chain() -> None:
    target, draft = (facts_of([layer()], is_draft_worker=is_draft) for is_draft in (False, True))
    assert target.kinds == (StepKind.PREFILL, StepKind.TARGET_VERIFY)
    assert draft.kinds == (StepKind.DRAFT_BLOCK,)
    assert (type(target.batches), type(draft.batches)) == (ForwardBatches, BlockDraftBatches)
    for facts in (target, draft):
        widths = [facts.capacity.bucket(kind, 2).width for kind in (StepKind.TARGET_VERIFY, StepKind.DRAFT_BLOCK)]
        assert widths == [4, 4]
        assert facts.capacity.max_tokens == 256, "a row of the table, with room for one block"


def test_layers_see_those_behind_them_in_a_draft_and_in_a_draft_alone() -> None:
    blocks, causal = layer(attn_type=BIDIRECTIONAL, sliding_window_size=8), layer()
    assert reasons_of([blocks], is_draft_worker=True) == reasons_of([causal]) == []
    (found,) = reasons_of([causal], is_draft_worker=True)
    assert "layer 0 has attention of type decoder, cross False (it takes encoder_only)" in found
    (found,) = reasons_of([blocks])
    assert "layer 0 has attention of type encoder_only, cross False (it takes decoder)" in found


@pytest.mark.parametrize("is_draft", [False, True])
def test_a_server_with_block_drafts_is_served(is_draft: bool) -> None:
    given = runner(is_draft_worker=is_draft)
    assert list(server_reasons(given, spec("DFLASH"), execution(), parallel())) == []


def test_servers_that_are_not() -> None:
    """A window of the server's is a table of its own, whose lengths on the host count otherwise."""
    draft = runner(is_draft_worker=True, sliding_window_size=64)
    window = spec("DFLASH", speculative_draft_window_size=64)
    (found,) = server_reasons(draft, window, execution(), parallel())
    assert "--speculative-draft-window-size 64 with a draft" in found
    (found,) = server_reasons(draft, spec("DFLASH", nodes=1), execution(), parallel())
    assert "a block of 1 token (it has the root and one mask at least)" in found


def test_a_kernel_that_plans_on_the_host_is_refused_when_the_server_starts() -> None:
    for is_draft, kind in ((False, StepKind.TARGET_VERIFY), (True, StepKind.DRAFT_BLOCK)):
        given = layer(attn_type=BIDIRECTIONAL) if is_draft else layer()
        facts = facts_of([given], is_draft_worker=is_draft)
        backend = get_backend("fa3")(facts.capacity, facts.batches.geometry, kernel="torch")
        kernel = backend.kernel_of(kind)
        able = {each: replace(found, needs_host_lens=True) for each, found in kernel.capabilities.items()}
        backend.choices |= dict.fromkeys(backend.choices, Choice(replace(kernel, capabilities=able)))
        (found,) = model_reasons(facts, backend)
        assert found.startswith(f"{kind} by kernel torch: it plans on the host from exact lengths")


def test_a_backend_without_grouped_queries_is_refused_for_the_draft_of_an_mla_model() -> None:
    """The draft of such a model has grouped queries, and takes another backend."""
    facts = facts_of([layer(attn_type=BIDIRECTIONAL)], is_draft_worker=True)
    backend = get_backend("flashinfer_mla")(facts.capacity, facts.batches.geometry, kernel="torch")
    (found,) = model_reasons(facts, backend)
    assert "a model whose cache is of kv (it takes latent)" in found
