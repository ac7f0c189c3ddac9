"""SGLang's engine on our backends: cached prefixes, chunks of prompts, requests that come and go."""

from __future__ import annotations

import pytest

from tests.engines.sglang.cases import ADAPTIVE, FA3, NUM_STEPS, PLAIN, SPECULATIVE, Case
from tests.engines.sglang.engine import LENGTHS, PROMPTS

ALL = [*PLAIN, *SPECULATIVE]


@pytest.mark.parametrize("case", ALL, ids=str)
def test_every_layer_of_every_forward_attended_by_our_backend(runs, case):
    run = runs(case)
    assert run.error == ""
    assert case.wrong_counts(run) == []
    modes = {(forward["draft"], forward["forward"]) for forward in run.forwards}
    speculative = {(False, "TARGET_VERIFY"), (True, "EXTEND"), (True, "DECODE"), (True, "DRAFT_EXTEND_V2")}
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


def test_a_target_and_its_draft_take_mixed_batches(runs, models):
    case = Case("gqa", FA3, 1, mixes=True)
    run = runs(case)
    apart = {step["draft"] for step in run.forwards if step["forward"] == "MIXED" and case.is_apart(step)}
    assert apart == {False, True}
    assert case.wrong_counts(run) == case.wrong_drafts(run, models) == []
    assert run.tokens == runs(case.plain).tokens


@pytest.mark.parametrize("case", [case for case in SPECULATIVE if case.adapts], ids=str)
def test_a_draft_adapts_its_length_to_the_batch(runs, case):
    """From the one that the server starts with to none at all."""
    verifies = [forward for forward in runs(case).forwards if forward["forward"] == "TARGET_VERIFY"]
    found = {forward["bs"]: forward["rows"] // forward["bs"] - 1 for forward in verifies}
    assert {0, 1, NUM_STEPS} <= set(found.values())
    assert all([steps] == ADAPTIVE[str(bs)] for bs, steps in found.items())
