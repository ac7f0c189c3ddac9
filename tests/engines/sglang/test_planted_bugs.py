"""Bugs that an adapter could have, planted into ours: which check of the engine's runs tells each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engines.sglang.cases import FA3, Case
from tests.engines.sglang.engine import run

CHAIN, TREE, BLOCK = Case("gqa", FA3, 1), Case("gqa", FA3, 4), Case("gqa", FA3, 1, in_blocks=True)
COMPACT = Case("gqa", FA3, 1, in_blocks=True, dspark="compact")


def _after(owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Change what a method returns. change: of the result and the method's arguments."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **named: change(original(*arguments, **named), *arguments))


def verify_one_short() -> None:
    """Rows of a verify see one committed token less."""
    from attn_backends.adapters.sglang import ForwardBatches

    _after(ForwardBatches, "_verify", lambda step, *_: _shorter(step, 1))


def draft_extend_two_short() -> None:
    """Rows of a draft extend see two tokens less."""
    from attn_backends.adapters.sglang import ForwardBatches

    _after(ForwardBatches, "_draft_extend", lambda step, *_: _shorter(step, 2))


def block_one_short() -> None:
    """Rows of a draft block see one token less: the last row of the block."""
    from attn_backends.adapters.sglang import BlockDraftBatches

    _after(BlockDraftBatches, "_verify", lambda step, *_: _shorter(step, 1))


def rows_shared_evenly() -> None:
    """A ragged verify has as many rows of each request, and the rest of the last."""
    from attn_backends.adapters.sglang import ForwardBatches

    def even(step: Any, *_: Any) -> Any:
        if not hasattr(step.query, "widths"):
            return step
        share, rest = divmod(step.query.num_tokens, step.bs)
        widths = torch.full_like(step.query.widths, share)
        widths[-1] += rest
        return replace(step, query=replace(step.query, widths=widths))

    _after(ForwardBatches, "_verify", even)


def _shorter(step: Any, by: int) -> Any:
    return replace(step, seq_lens=step.seq_lens - by, seq_lens_cpu=None, max_committed=None)


def forward_1_on_the_metadata_of_forward_0() -> None:
    """All forwards of a draft are handed the first one's."""
    from attn_backends.engines.sglang import backends

    _after(backends, "forwards_of", lambda forwards, _: forwards[:1] * len(forwards))


def the_mask_of_the_step_before() -> None:
    """A verify over a tree takes the mask of the last one, where that was of as many requests."""
    from attn_backends.adapters import sglang

    last: list[Any] = []

    def stale(mask: Any, _: Any) -> Any:
        last.append(mask)
        before = last[-2] if len(last) > 1 else mask
        return before if before.shape == mask.shape else mask

    _after(sglang, "tree_mask", stale)


def slots_in_step_major_order() -> None:
    """The slots of a draft are read as (step, batch), as SGLang lays them out for its own forwards."""
    from attn_backends.adapters.sglang import ForwardBatches

    def strided(step: Any, *_: Any) -> Any:
        slots = step.out_cache_loc.view(step.num_steps, -1).T.reshape(-1)
        return replace(step, out_cache_loc=slots)

    _after(ForwardBatches, "_draft_decode", strided)


BUGS = {
    verify_one_short: (CHAIN, {"tokens", "drafts"}),
    draft_extend_two_short: (CHAIN, {"drafts"}),
    block_one_short: (BLOCK, {"drafts"}),
    rows_shared_evenly: (COMPACT, {"tokens", "drafts"}),
    forward_1_on_the_metadata_of_forward_0: (TREE, {"drafts"}),
    the_mask_of_the_step_before: (TREE, {"tokens", "drafts"}),
    slots_in_step_major_order: (CHAIN, {"drafts"}),
}
"""The case in which it shows, and what differs: tokens from plain decoding's, drafted ids from the recompute's."""


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_is_told(runs, models, tmp_path, bug):
    case, expected = BUGS[bug]
    broken = run(tmp_path / "engine", bug, **case.options(models))
    assert broken.error == ""
    told = set()
    if broken.tokens != runs(case.plain).tokens:
        told.add("tokens")
    if case.wrong_drafts(broken, models):
        told.add("drafts")
    assert told == expected
    assert case.wrong_counts(broken) == []


def test_an_engine_on_its_own_backend_is_told(models, tmp_path):
    case = Case("gqa", "torch_native", 0)
    run_of_sglang = run(tmp_path / "engine", **case.options(models))
    assert run_of_sglang.error == ""
    assert len(case.wrong_counts(run_of_sglang)) == len(run_of_sglang.forwards) > 0
