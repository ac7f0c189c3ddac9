"""SGLang's engine on our backends: cached prefixes, chunks of prompts, requests that come and go."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.engines.sglang.cases import ADAPTIVE, FA3, NUM_STEPS, PLAIN, SPECULATIVE, Case
from tests.engines.sglang.engine import LENGTHS, PROMPTS, run

ALL = [*PLAIN, *SPECULATIVE]


@pytest.mark.parametrize("case", ALL, ids=str)
def test_every_layer_of_every_forward_attended_by_our_backend(runs, case):
    run = runs(case)
    assert run.error == ""
    assert case.wrong_counts(run) == []
    modes = {(forward["draft"], forward["forward"]) for forward in run.forwards}
    drafts = {"TARGET_VERIFY"} if case.in_blocks else {"EXTEND", "DECODE", "DRAFT_EXTEND_V2"}
    speculative = {(False, "TARGET_VERIFY"), *((True, mode) for mode in drafts)}
    assert modes == {(False, "EXTEND"), *(speculative if case.topk else {(False, "DECODE"), (False, "MIXED")})}


@pytest.mark.parametrize("case", ALL, ids=str)
def test_the_engine_came_into_the_situations(runs, case):
    run, num_prompts = runs(case), len(PROMPTS)
    assert [len(tokens) for tokens in run.tokens] == LENGTHS * 2
    assert max(run.cached[num_prompts:]) >= case.chunk
    steps = [forward for forward in run.forwards if not forward["draft"]]
    prefills = [forward["rows"] for forward in steps if forward["forward"] in ("EXTEND", "MIXED")]
    assert case.page_size < max(prefills) <= case.chunk < max(map(len, PROMPTS))
    decodes = {forward["bs"] for forward in steps if forward["forward"] in ("DECODE", "TARGET_VERIFY")}
    assert len(decodes) >= 3
    apart = [forward for forward in steps if forward["forward"] == "MIXED" and case.is_apart(forward)]
    assert bool(apart) is not bool(case.topk)


@pytest.mark.parametrize("case", SPECULATIVE, ids=str)
def test_tokens_are_those_of_plain_decoding_on_the_same_backend(runs, case):
    run, num_prompts = runs(case), len(PROMPTS)
    assert run.tokens == runs(case.plain).tokens
    assert run.tokens[:num_prompts] == run.tokens[num_prompts:]


@pytest.mark.parametrize("case", SPECULATIVE, ids=str)
def test_drafted_ids_of_every_cycle_are_those_of_a_recompute_in_float64(runs, models, case):
    run = runs(case)
    assert len(run.cycles) > 2 * len(PROMPTS)
    assert case.wrong_drafts(run, models) == []


@pytest.mark.parametrize(("in_blocks", "who"), [(False, {False, True}), (True, {False})], ids=["chain", "block"])
def test_a_target_and_its_draft_take_mixed_batches(runs, models, in_blocks, who):
    """A block draft runs over blocks alone."""
    case = Case("gqa", FA3, 1, mixes=True, in_blocks=in_blocks)
    run = runs(case)
    apart = {step["draft"] for step in run.forwards if step["forward"] == "MIXED" and case.is_apart(step)}
    assert apart == who
    assert case.wrong_counts(run) == case.wrong_drafts(run, models) == []
    assert run.tokens == runs(case.plain).tokens


@pytest.mark.parametrize("case", [case for case in SPECULATIVE if case.adapts], ids=str)
def test_a_draft_adapts_its_length_to_the_batch(runs, case):
    """From the one that the server starts with to none at all."""
    verifies = [forward for forward in runs(case).forwards if forward["forward"] == "TARGET_VERIFY"]
    found = {forward["bs"]: forward["rows"] // forward["bs"] - 1 for forward in verifies}
    assert {0, 1, NUM_STEPS} <= set(found.values())
    assert all([steps] == ADAPTIVE[str(bs)] for bs, steps in found.items())


def test_a_block_draft_runs_with_the_overlap_schedule(runs, models, tmp_path):
    """Where SGLang has bounds on lengths instead of lengths on the host; with EAGLE it does not do so on a CPU."""
    case = Case("gqa", FA3, 1, in_blocks=True)
    overlapped = run(tmp_path / "engine", **(case.options(models) | {"disable_overlap_schedule": False}))
    assert overlapped.error == ""
    assert overlapped.tokens == runs(case.plain).tokens
    assert case.wrong_counts(overlapped) == []


def test_blocks_are_accepted_in_part_and_whole(runs):
    """None of the proposed tokens, one and all three, so that the context of as many is stored."""
    lens: dict[str, list[int]] = {}
    for cycle in runs(Case("gqa", FA3, 1, in_blocks=True)).cycles:
        lens.setdefault(cycle["cycle"], []).append(len(cycle["text"]))
    accepted = {after - before - 1 for each in lens.values() for before, after in pairwise(each)}
    assert accepted >= {0, 1, 3}
