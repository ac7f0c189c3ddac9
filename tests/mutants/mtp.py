"""Mutants of multi-layer MTP: what is kept of a cycle for the next, and which token and state a module takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_backends_reference.eagle import mtp, mtp_phases, prefill_phases
from attn_backends_reference.eagle.mtp import MtpWorker
from attn_backends_reference.eagle.pool import InputPool
from attn_backends_reference.eagle.prefill_phases import ModulesPrefillInputs
from attn_backends_reference.eagle.slots import SlotAllocator
from attn_backends_reference.models.decoder import DraftModel
from spec_metadata import Capacity
from tests.mutants.mutant import mutant


def keep_rows(worker: MtpWorker, index, lens, ends, accepted) -> None:
    """Put positions up to `ends` of a verify's rows into the pool."""
    offsets = torch.arange(len(index), device=index.device) * worker.max_accepted
    worker.pool.keep(index, lens, ends, accepted.hidden.flatten(0, 1), accepted.tokens.flatten(), offsets)


def over_modules(patch: pytest.MonkeyPatch, *, tokens=None, hidden=None, row=None, early: int = 0) -> None:
    """Run modules on something else. tokens: (k, tokens) -> what module k reads. hidden: (its own, the target's) -> the
    state that it takes. row: (rows, root) -> the row that is scored. early: entries by which a further draft is.
    """
    over = mtp_phases.draft_over

    def one_by_one(modules, forward, rows, known, state, root, first=0, **further):
        target, scored = state, row(rows, root) if row else root
        for k, module in enumerate(modules, first):
            given = tokens(k, known) if tokens else known, hidden(state, target) if hidden else state
            made, state = over([module], forward, rows, *given, scored, k, **further)
            draft = made.gather(1, (scored + 1 + k).unsqueeze(1))
            known = known.scatter(1, (root + 1 + k - early * min(k, 1)).unsqueeze(1), draft)
        return known, state

    for module in (prefill_phases, mtp_phases):
        patch.setattr(module, "draft_over", one_by_one)


@mutant("SGLang #22832: a pool fed from runner buffers although no graph ran", "mtp.batches", graph=True)
def pool_fed_from_graph_buffers(patch: pytest.MonkeyPatch) -> None:
    """Hidden states are kept from the outputs of the verify's graph, also where the batch is above the buckets."""
    commit = MtpWorker._commit

    def from_buffers(self, index, lens, accepted, chains):
        captured, hidden = self._verify._captured, accepted.hidden
        if captured and len(index) > max(captured):
            hidden = torch.cat((captured[max(captured)].outputs.hidden, hidden[max(captured) :]))
        commit(self, index, lens, replace(accepted, hidden=hidden), chains)

    patch.setattr(MtpWorker, "_commit", from_buffers)


@mutant("rows of rejected drafts are kept: nothing looked at how many were accepted", "mtp.random")
def rejected_rows_kept(patch: pytest.MonkeyPatch) -> None:
    """The pool keeps the last rows of a verify, accepted or not."""
    commit = MtpWorker._commit

    def all_of_them(self, index, lens, accepted, chains):
        commit(self, index, lens, accepted, chains)
        keep_rows(self, index, lens, lens + self.max_accepted, accepted)

    patch.setattr(MtpWorker, "_commit", all_of_them)


@mutant("what is kept replaces what the same cycle needs", "mtp.random")
def kept_before_it_is_read(patch: pytest.MonkeyPatch) -> None:
    """The pool takes the new positions before the window reads the old ones from it."""
    inputs = MtpWorker._window_inputs

    def too_early(self, index, lens, accepted):
        keep_rows(self, index, lens, lens + accepted.num_accepted, accepted)
        return inputs(self, index, lens, accepted)

    patch.setattr(MtpWorker, "_window_inputs", too_early)


@mutant("what a failed step had kept is read when it is tried again", "mtp.failures")
def kept_before_the_cycle_has_run(patch: pytest.MonkeyPatch) -> None:
    """The pool takes the new positions once the old ones are read, while the modules have yet to run."""
    inputs = MtpWorker._window_inputs

    def early(self, index, lens, accepted):
        made = inputs(self, index, lens, accepted)
        keep_rows(self, index, lens, lens + accepted.num_accepted, accepted)
        return made

    patch.setattr(MtpWorker, "_window_inputs", early)


@mutant("a ring's index counted from the position after", "mtp.random")
def ring_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """The pool is read one position further than it was written."""
    read = InputPool.read
    patch.setattr(InputPool, "read", lambda self, rows, positions: read(self, rows, positions + 1))


@mutant("batch state kept by place in the batch, which shifts when a request leaves", "mtp.random")
def pool_by_place_in_the_batch(patch: pytest.MonkeyPatch) -> None:
    """A cycle reads and keeps inputs at the request's place in the batch, not at its row."""
    read = InputPool.read

    def by_place(self, rows, positions):
        places = torch.arange(1, len(rows) + 1, device=rows.device).unsqueeze(1)
        return read(self, places if rows.ndim == 2 else rows, positions)

    patch.setattr(InputPool, "read", by_place)


@mutant("one state for all steps: every module gets the target's", "mtp.random")
def one_state_for_all_modules(patch: pytest.MonkeyPatch) -> None:
    """Modules take the target's hidden state, not that of the module before."""
    over_modules(patch, hidden=lambda own, target: target)


@mutant("token ids rotated by one too few", "mtp.random")
def tokens_rotated_by_one_too_few(patch: pytest.MonkeyPatch) -> None:
    """Every module but the first takes the tokens of the module before."""
    over_modules(patch, tokens=lambda k, tokens: tokens.roll(min(k, 1), dims=1))


@mutant("the state at the last row of a uniform layout, which is padding", "mtp.random")
def state_at_the_padded_row(patch: pytest.MonkeyPatch) -> None:
    """A cycle scores drafts at the last row of the window, whatever was accepted."""

    def last(rows, root):
        return root if isinstance(rows, ModulesPrefillInputs) else rows.last - rows.first

    over_modules(patch, row=last)


@mutant("a draft written over the token before it", "mtp.random")
def draft_written_one_early(patch: pytest.MonkeyPatch) -> None:
    """The draft of every module but the first replaces the one before, so the next module takes no new token."""
    over_modules(patch, early=1)


@mutant("one draft cache for all layers of drafting", "mtp.random")
def modules_share_a_cache(patch: pytest.MonkeyPatch) -> None:
    """All modules write their KV to the same cache."""
    allocate, made = DraftModel.allocate_caches, {}

    def shared(self, backend, dtype):
        return made.setdefault(backend, allocate(self, backend, dtype))

    patch.setattr(DraftModel, "allocate_caches", shared)


@mutant("a window as long as the accepted run and K - 2 more", "mtp.random")
def window_one_position_short(patch: pytest.MonkeyPatch) -> None:
    """One position fewer is run again: an entry that was made of a drafted token stays."""
    init = MtpWorker.__init__

    def short(self, target, modules, backends, capacity, *rest):
        init(self, target, modules, backends, replace(capacity, num_rerun=max(capacity.num_rerun - 1, 0)), *rest)
        self.slots.lookahead = capacity.num_rerun + 1

    patch.setattr(mtp, "_check", lambda *given: None)
    patch.setattr(MtpWorker, "__init__", short)


@mutant("a window that begins before position 0", "mtp.short_prompts")
def short_prompts_not_shifted(patch: pytest.MonkeyPatch) -> None:
    """Of a text shorter than what is run again, the inputs at negative positions are taken for the first ones."""
    made = mtp.WindowInputs

    def unshifted(*, lens, kept_tokens, **given):
        return made(**given, lens=lens.clamp_min(kept_tokens.shape[1]), kept_tokens=kept_tokens)

    patch.setattr(mtp, "WindowInputs", unshifted)


@mutant("EAGLE's shift by one at the edge of a chunk, K times", "mtp.chunks")
def chunks_begin_where_the_last_ended(patch: pytest.MonkeyPatch) -> None:
    """Positions that took tokens not known before are not run again by the next chunk of a prompt."""
    patch.setattr(mtp, "replace", lambda chunk, start: chunk)


@mutant("prefix caching keyed as for EAGLE", "mtp.sharing")
def pages_shared_with_one_token_ahead(patch: pytest.MonkeyPatch) -> None:
    """A page is shared with requests that agree on one token after it, though deeper modules saw K."""
    init = SlotAllocator.__init__

    def one_ahead(self, *given):
        init(self, *given)
        self.lookahead = 1

    patch.setattr(SlotAllocator, "__init__", one_ahead)


@mutant("graphs a module, captured on one hidden state", "mtp.paths", graph=True)
def graphs_of_modules_fed_the_first_state(patch: pytest.MonkeyPatch) -> None:
    """Every module that has a graph of its own gets the hidden state that the first one left."""
    run, first = MtpWorker._run, {}

    def fed(self, runner, step, inputs):
        if runner in self._further and runner._captured:
            inputs = replace(inputs, hidden=first[self].hidden)
        result = run(self, runner, step, inputs)
        first.update({self: result} if runner is self._window else {})
        return result

    patch.setattr(MtpWorker, "_run", fed)


@mutant("draft room for the verify alone", "mtp.room")
def no_room_for_the_window(patch: pytest.MonkeyPatch) -> None:
    """A request's table row has no room for the window's rows past the accepted ones."""
    patch.setattr(Capacity, "draft_room", property(lambda self: self.num_draft_tokens))


@mutant("what does not fit is run", "mtp.refusals")
def drafting_not_checked(patch: pytest.MonkeyPatch) -> None:
    """A window shorter than what must be run again is taken."""
    patch.setattr(mtp, "_check", lambda *given: None)


@mutant("a chunk begun K - 1 positions earlier, whoever computed those", "mtp.sharing")
def first_own_position_ignored(patch: pytest.MonkeyPatch) -> None:
    """A prompt's first chunk runs positions again that lie in pages which it shares, on states that it never had."""
    earlier = mtp.replace
    patch.setattr(mtp, "replace", lambda chunk, start: earlier(chunk, start=max(min(start, chunk.start - 2), 0)))
