"""Mutants of serving: requests that join, leave, share, end and wait."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from attn_backends.runner import PhaseRunner
from attn_backends_reference.eagle import phases, worker
from attn_backends_reference.eagle.launches import Timings
from attn_backends_reference.eagle.options import PhaseBackends
from attn_backends_reference.eagle.phases import DraftState
from attn_backends_reference.eagle.protocol import Chunk
from attn_backends_reference.eagle.requests import Request, RequestOptions, Statistics
from attn_backends_reference.eagle.serving import Server
from attn_backends_reference.eagle.slots import SlotAllocator
from attn_backends_reference.eagle.text import GrowingText
from tests.mutants.mutant import mutant


@mutant("a request samples as the one that had its row before", "serving.random")
def sampling_of_the_last_tenant(patch: pytest.MonkeyPatch) -> None:
    """A table row keeps the sampling parameters of the request that it was given to first."""
    admit, seen = worker.TargetWorker.admit, set()

    def once(self, row, sampling):
        if (id(self), row) not in seen:
            admit(self, row, sampling)
        seen.add((id(self), row))

    patch.setattr(worker.TargetWorker, "admit", once)


@mutant("batch state kept by place in the batch, which shifts when a request leaves", "serving.random")
def draft_state_by_place_in_the_batch(patch: pytest.MonkeyPatch) -> None:
    """The draft's state is read at the request's place in the batch, not at its row."""
    kept = phases.kept

    def by_place(table, rows):
        places = torch.arange(1, len(rows) + 1, device=rows.device)
        return kept(table, places if isinstance(table, DraftState) else rows)

    patch.setattr(phases, "kept", by_place)


@mutant("index tensors cached by batch size: requests change and the size stays", "serving.random")
def rows_cached_by_batch_size(patch: pytest.MonkeyPatch) -> None:
    """The rows of a cycle are those of the last batch of the same size."""
    cycle, rows_of = worker.EagleWorker.cycle, {}

    def cached(self, rows, most):
        return cycle(self, rows_of.setdefault((id(self), len(rows)), rows), most)

    patch.setattr(worker.EagleWorker, "cycle", cached)


@mutant("a run that is accepted past the end of a request is emitted whole", "serving.ends")
def tokens_after_the_end(patch: pytest.MonkeyPatch) -> None:
    """Accepted tokens after a request's end are emitted, too."""
    emit = Request.emit

    def whole(self, tokens, eos_tokens):
        taken = emit(self, tokens, eos_tokens)
        self.output += tokens[len(taken) :] if taken else []
        return tokens if taken else taken

    patch.setattr(Request, "emit", whole)


@mutant("a stop string across tokens is not seen", "serving.ends", "serving.text")
def stop_string_within_a_token(patch: pytest.MonkeyPatch) -> None:
    """Only the text of the newest token is searched for stop strings."""
    cut = GrowingText._cut

    def of_the_newest(self, searched):
        longest = max(map(len, self._stop), default=1)
        return cut(self, searched + longest - 1)

    patch.setattr(GrowingText, "_cut", of_the_newest)


@mutant("pages of a request that was cancelled in prefill are never freed", "serving.cancel")
def cancelled_requests_keep_their_slots(patch: pytest.MonkeyPatch) -> None:
    """A request that is cancelled in prefill leaves the batch without giving back its row and pages."""
    cancel = Server.cancel

    def forget(self, request):
        lost = request.finish is None and request.in_prefill and request.row >= 0
        cancel(self, request)
        self._running = [other for other in self._running if not (lost and other is request)]

    patch.setattr(Server, "cancel", forget)


@mutant("pages given to the next request while a cycle still writes to them", "serving.lag")
def released_while_in_flight(patch: pytest.MonkeyPatch) -> None:
    """The slots of a request that ended go back while its next cycle is on its way."""
    patch.setattr(Request, "is_unread", False)


@mutant("the host waits for every cycle, and is never late", "serving.lag")
def lag_that_is_none(patch: pytest.MonkeyPatch) -> None:
    """A round is read before the next one is launched, even with lag."""
    round_of = Server.round

    def read_at_once(self):
        emitted = round_of(self)
        while self._unread:
            emitted += [new for step in self._unread.popleft() for new in self._read(step)]
        return emitted

    patch.setattr(Server, "round", read_at_once)


@mutant("the last token of the context, with a cycle on its way", "serving.lag_context")
def unread_cycles_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Lengths of a batch are bounded by what the host has read, without the cycle that it has not."""
    patch.setattr(Server, "_max_committed", lambda self, request: request.num_committed)


@mutant("a cycle past the end of the table row", "serving.lag_context")
def nobody_sits_out(patch: pytest.MonkeyPatch) -> None:
    """A request whose unread cycle may have filled its context is launched all the same."""
    bound = Server._max_committed
    patch.setattr(Server, "_max_committed", lambda self, request: min(bound(self, request), self.worker.max_context))


@mutant("prefix caches keyed by the page's own tokens: the draft's last entry is another's", "serving.sharing")
def page_keyed_without_the_next_token(patch: pytest.MonkeyPatch) -> None:
    """A page is shared whatever token follows it, on which the draft's last entry depends."""
    keys = SlotAllocator.prefix_keys

    def of_its_own(self, prompt, digests):
        lookahead, self.lookahead = self.lookahead, 0
        found, self.lookahead = keys(self, prompt[: len(prompt) - lookahead], digests), lookahead
        return found

    patch.setattr(SlotAllocator, "prefix_keys", of_its_own)


@mutant("a shared prompt is computed again, into the pages that others read", "serving.sharing")
def shared_pages_are_written(patch: pytest.MonkeyPatch) -> None:
    """A request that shares pages prefills its prompt from the beginning, with the same values at best."""
    admit = Server._admit

    def from_the_beginning(self):
        waiting = list(self._waiting)
        admit(self)
        for request in set(waiting) - set(self._waiting):
            request.num_prefilled = 0

    patch.setattr(Server, "_admit", from_the_beginning)


@mutant("a page is freed with the first of those that hold it", "serving.sharing")
def shared_pages_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    """Taking a row back frees its pages though other rows hold them."""
    release = SlotAllocator.release

    def of_one(self, row):
        for page in self._pages[row]:
            self._refcounts[page] = 1
        release(self, row)

    patch.setattr(SlotAllocator, "release", of_one)


@mutant("requests of one prompt that come together compute it each", "serving.sharing_together")
def nobody_waits_for_a_prefix(patch: pytest.MonkeyPatch) -> None:
    """A request is admitted though another is about to commit its prompt."""
    patch.setattr(Server, "_can_share_soon", lambda self, request: False)


@mutant("schedulers that run prefill first: decoding stands still", "serving.rounds")
def prefill_stalls_decoding(patch: pytest.MonkeyPatch) -> None:
    """While a prompt is in prefill, no cycle is launched."""
    launch = Server._launch_cycle

    def unless_prefill(self):
        return iter(()) if any(request.in_prefill for request in self._running) else launch(self)

    patch.setattr(Server, "_launch_cycle", unless_prefill)


@mutant("EAGLE's shift by one, at the edge of a chunk", "serving.rounds")
def chunk_edges_not_shifted(patch: pytest.MonkeyPatch) -> None:
    """The draft's last row of a chunk reads token 0, not the first of the next chunk."""
    patch.setattr(Chunk, "following", property(lambda self: [*self.tokens[1:], 0]))


@mutant("a stream that is a list", "serving.stream")
def stream_waits_for_the_end(patch: pytest.MonkeyPatch) -> None:
    """Tokens are handed out when everything is through."""
    stream = Server.stream
    patch.setattr(Server, "stream", lambda self: iter(list(stream(self))))


@mutant("half a character is shown, or what becomes a stop string", "serving.text")
def text_that_changes(patch: pytest.MonkeyPatch) -> None:
    """Text is shown with incomplete characters and beginnings of stop strings."""
    patch.setattr(GrowingText, "shown", property(lambda self: self._settled + self._tail))


@mutant("acceptance counted with the target's own token", "serving.statistics")
def bonus_counted_as_drafted(patch: pytest.MonkeyPatch) -> None:
    """The token that the target adds to an accepted run counts as one that was drafted."""
    count = Statistics.count_cycle
    patch.setattr(Statistics, "count_cycle", lambda self, emitted, num_drafted: count(self, emitted, num_drafted + 1))


@mutant("time since the step began, not since the phase did", "serving.statistics")
def phases_timed_from_the_start(patch: pytest.MonkeyPatch) -> None:
    """The seconds of a phase include those of the phases before it."""

    def since_start(self):
        (_, start), *ends = self._marks
        return {phase: end - start for phase, end in ends}

    patch.setattr(Timings, "seconds", since_start)


@mutant("phases that share a backend by accident", "serving.phase_backends", backend="flashinfer_mla")
def one_backend_for_all_phases(patch: pytest.MonkeyPatch) -> None:
    """Every phase runs on the backend of prefill."""
    init = worker.EagleWorker.__init__

    def on_prefill(self, target, draft, backends, *args):
        init(self, target, draft, PhaseBackends(*[backends.prefill] * 5), *args)

    patch.setattr(worker.EagleWorker, "__init__", on_prefill)


@mutant("requests of several draft shapes in one batch", "serving.refusals")
def draft_settings_ignored(patch: pytest.MonkeyPatch) -> None:
    """A request that asks for drafts of another shape is served with the worker's."""
    check = Server._check
    patch.setattr(Server, "_check", lambda self, prompt, o: check(self, prompt, RequestOptions(1, o.sampling, o.stop)))


@mutant("a queue as long as the batch", "serving.queue")
def requests_past_capacity_dropped(patch: pytest.MonkeyPatch) -> None:
    """A request that comes when no row is free is dropped."""
    admit = Server._admit

    def drop(self):
        admit(self)
        self._waiting.clear()

    patch.setattr(Server, "_admit", drop)


@mutant("buckets padded to the largest: a batch that shrinks keeps its graph", "serving.buckets", graph=True)
def batch_never_shrinks(patch: pytest.MonkeyPatch) -> None:
    """A phase stays in the largest bucket that it has used."""
    run, reached = PhaseRunner.run, cache(lambda runner: [0])

    def stay(self, step, inputs):
        reached(self)[0] = max(reached(self)[0], step.bs)
        kept, self._captured = self._captured, {b: c for b, c in self._captured.items() if b >= reached(self)[0]}
        result, self._captured = run(self, step, inputs), kept
        return result

    patch.setattr(PhaseRunner, "run", stay)
