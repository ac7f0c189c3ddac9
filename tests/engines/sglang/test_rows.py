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


MIXED = {
    "chain": (Case("gqa", FA3, 1, mixes=True), {False, True}),
    "block": (Case("gqa", FA3, 1, mixes=True, in_blocks=True), {False}),
    "dspark": (Case("gqa", FA3, 1, mixes=True, in_blocks=True, dspark="compact"), {False}),
}


@pytest.mark.parametrize("draft", MIXED)
def test_a_target_and_its_draft_take_mixed_batches(runs, models, draft):
    """A block draft runs over blocks alone."""
    case, who = MIXED[draft]
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


@pytest.mark.parametrize("dspark", [None, "static", "compact"])
def test_a_block_draft_runs_with_the_overlap_schedule(runs, models, tmp_path, dspark):
    """Where SGLang has bounds on lengths instead of lengths on the host; with EAGLE it does not do so on a CPU."""
    case = Case("gqa", FA3, 1, in_blocks=True, dspark=dspark)
    overlapped = run(tmp_path / "engine", **(case.options(models) | {"disable_overlap_schedule": False}))
    assert overlapped.error == ""
    assert overlapped.tokens == runs(case.plain).tokens
    assert case.wrong_counts(overlapped) == []


DSPARK = [case for case in SPECULATIVE if case.dspark]


@pytest.mark.parametrize("case", DSPARK, ids=str)
def test_dspark_verifies_rows_of_another_number_for_each_request_where_it_is_compact(runs, case):
    """And a row for each drafted token else; its blocks have one row less, none of which drafts the root."""
    steps = [forward for forward in runs(case).forwards if forward["forward"] == "TARGET_VERIFY"]
    drafts, verifies = ([step for step in steps if step["draft"] is is_draft] for is_draft in (True, False))
    assert {step["rows"] / step["bs"] for step in drafts} == {NUM_STEPS}
    if case.dspark != "compact":
        assert {(step["rows"] / step["bs"], *step["widths"]) for step in verifies} == {(case.num_nodes,)}
        return
    assert all(sum(step["widths"]) == step["rows"] and len(step["widths"]) == step["bs"] for step in verifies)
    assert {width for step in verifies for width in step["widths"]} >= {1, 2, case.num_nodes}
    assert len([step for step in verifies if len({*step["widths"]}) > 1]) > 5


@pytest.mark.parametrize("page_size", [1, 64])
def test_ragged_verifies_reach_the_end_of_the_context(models, tmp_path, page_size):
    """A row of SGLang's table has room there for as many rows as a request may have."""
    case = Case("gqa", FA3, 1, page_size=page_size, in_blocks=True, dspark="compact")
    longest = max(range(len(PROMPTS)), key=lambda i: len(PROMPTS[i]))
    end = {"context_length": 1 + len(PROMPTS[longest]) + LENGTHS[longest]}
    ran, plain = (run(tmp_path / str(each), **(each.options(models) | end)) for each in (case, case.plain))
    assert (len(ran.tokens), len(plain.tokens)) == (2 * len(PROMPTS),) * 2
    assert ran.tokens == plain.tokens
    ends = [len(cycle["text"]) for cycle in ran.cycles]
    assert max(ends) > end["context_length"] - case.num_nodes
    assert case.wrong_counts(ran) == case.wrong_drafts(ran, models) == []


def test_blocks_are_accepted_in_part_and_whole(runs):
    """None of the proposed tokens, one and all three, so that the context of as many is stored."""
    lens: dict[str, list[int]] = {}
    for cycle in runs(Case("gqa", FA3, 1, in_blocks=True)).cycles:
        lens.setdefault(cycle["cycle"], []).append(len(cycle["text"]))
    accepted = {after - before - 1 for each in lens.values() for before, after in pairwise(each)}
    assert accepted >= {0, 1, 3}
