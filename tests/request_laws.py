"""What serving promises a request, in the form of `serving_laws`: where it ends, its text as it grows, its statistics,
that it can be cancelled, and that what can't be served is refused.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from time import perf_counter

import pytest

from attn_backends_reference.eagle.requests import DraftShape, FinishReason, Request, RequestError, RequestOptions
from attn_backends_reference.eagle.serving import Server
from attn_backends_reference.eagle.text import GrowingText
from spec_metadata import Capacity
from tests.serving_laws import DECODE, a_prompt, finish, launches, plainly, server_of
from tests.serving_scenes import CHAIN, TREE, check_nothing_kept, eagle_worker


@contextmanager
def runs_cut() -> Iterator[list[Request]]:
    """Yields the requests that ended before the last token of what a step gave them."""
    cut, emit = list[Request](), Request.emit

    def logged(request, given, eos_tokens):
        is_open, taken = request.finish is None, emit(request, given, eos_tokens)
        cut.extend([request] * (is_open and request.finish is not None and request.output[-1:] != given[-1:]))
        return taken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Request, "emit", logged)
        yield cut


def check_ends(host_lag: int) -> None:
    """A request that ends inside an accepted run emits nothing after its end, whatever ends it, and frees its slots."""
    prompt, stop, end = a_prompt(80, 2), "port im", ord("q")
    (text,) = plainly([prompt], 40)
    choices = {
        FinishReason.LENGTH: (6, RequestOptions(6, ignore_eos=True)),
        FinishReason.STOP: (
            bytes(text).index(stop.encode()) + len(stop),
            RequestOptions(40, stop=("not there", stop), ignore_eos=True),
        ),
        FinishReason.EOS: (text.index(end) + 1, RequestOptions(40)),
    }
    for reason, (length, options) in choices.items():
        worker = eagle_worker("gqa", "fa3", Capacity(2, 128, 16, **TREE), eos_tokens=(end,), host_lag=host_lag)
        server = server_of(worker)
        request, emitted, rounds_after = server.submit(prompt, options), list[int](), 0
        with runs_cut() as cut:
            while not server.is_idle:
                rounds_after += request.finish is not None
                emitted += [token for _, new in server.round() for token in new]
        assert request.finish is reason
        assert emitted == request.output == text[:length]
        assert cut == [request], f"{reason} came at the end of a run by chance"
        assert rounds_after <= host_lag, "its slots were kept"
        assert request.text == bytes(emitted).decode().removesuffix(stop if reason is FinishReason.STOP else "")
        check_nothing_kept(worker)


PIECES = ("a", "b", "ab", "é", "日本", "🙂", " ", "</s>", "<", "\n", "\ufffd")

STOPS = ("ab", "</s>", "ba", "é", "本", "🙂 ", "aab")


def grow(text: GrowingText, ids: Sequence[int]) -> list[str]:
    """What is shown after each token, up to the end of the text, and in the end."""
    shown = []
    for i in ids:
        ended = text.append(i)
        shown.append(text.shown)
        if ended:
            break
    text.end()
    return [*shown, text.shown]


def check_text() -> None:
    """Text only grows, by whole characters, and ends before the first stop string, at the token that completes it."""
    for seed in range(60):
        rng = random.Random(seed)
        whole = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 40)))
        stops = tuple(rng.choice(STOPS) for _ in range(rng.randint(0, 2)))
        ids = list(whole.encode())
        shown = grow(GrowingText(DECODE, stops), ids)
        assert all(later.startswith(earlier) for earlier, later in pairwise(shown)), "text that was shown has changed"
        assert "\ufffd" in whole or not any("\ufffd" in text for text in shown), "half a character was shown"
        reached = [i for i in range(1, len(ids) + 1) if any(stop.encode() in bytes(ids[:i]) for stop in stops)]
        assert len(shown) - 1 == (reached[0] if reached else len(ids)), "it ended at another token"
        starts = [whole.find(stop) for stop in stops if stop.encode() in bytes(ids[: len(shown) - 1])]
        assert shown[-1] == (whole[: min(starts)] if starts else whole)


def check_stream() -> None:
    """The stream yields (request, tokens) as they come; requests may be submitted and cancelled while it runs."""
    server = server_of(eagle_worker("gqa", "fa3", Capacity(2, 128, 16, **CHAIN)))
    first, unwanted = server.submit(a_prompt(30), RequestOptions(30)), server.submit(a_prompt(9, 1), RequestOptions(90))
    came: dict[Request, list[int]] = {first: [], unwanted: []}
    shown: dict[Request, str] = {}
    late = None
    for request, new in server.stream():
        assert new
        assert request.finish is not FinishReason.CANCELLED, "a cancelled request emits nothing"
        came.setdefault(request, []).extend(new)
        assert came[request] == request.output
        assert request.text.startswith(shown.get(request, "")), "text that was shown has changed"
        shown[request] = request.text
        if late is None and len(first.output) > 8:
            assert first.finish is None, "tokens came at the end only"
            late = server.submit(a_prompt(20, 2), RequestOptions(10))
            server.cancel(unwanted)
    assert [request.finish for request in (first, unwanted, late)] == ["length", "cancelled", "length"]
    assert [came[first], came[late]] == [plainly([first.prompt], 30)[0], plainly([late.prompt], 10)[0]]
    assert shown[first] == bytes(came[first]).decode()
    check_nothing_kept(server.worker)


def check_statistics() -> None:
    """A request knows its cycles, what was accepted at each depth, and its seconds in each phase."""
    worker = eagle_worker("gqa", "fa3", Capacity(2, 128, 16, **TREE))
    server, before = server_of(worker), perf_counter()
    with launches(worker) as log:
        requests = [server.submit(a_prompt(40, file), RequestOptions(30 - 11 * file)) for file in range(2)]
        rows = {}
        while not server.is_idle:
            server.round()
            rows |= {request: request.row for request in requests if request.row >= 0}
    wall = perf_counter() - before
    for request in requests:
        took = request.statistics
        assert took.num_cycles == sum(event == "cycle" and rows[request] in given for event, given in log)
        by_depth = [took.accepted_by_depth[depth] for depth in range(1, 5)]
        assert sorted(by_depth, reverse=True) == by_depth, "a depth is accepted only after the one before"
        assert by_depth[0] <= took.num_cycles
        assert by_depth[3] == 0
        inside = took.num_cycles + sum(by_depth) - (len(request.output) - 1)
        assert inside in (0, 1), "every token after the first is a drafted one, or a cycle's own"
        assert set(took.seconds) == {"prefill", "draft", "verify", "draft_extend"}
        assert min(took.seconds.values()) > 0
        assert took.seconds.total() < wall
    assert sum(requests[0].statistics.accepted_by_depth.values()) > 5


@contextmanager
def refused(message: str) -> Iterator[None]:
    """What is done inside must be refused with this message. A law fails by an assertion, which pytest's own is not."""
    reason = ""
    try:
        yield
    except RequestError as error:
        reason = str(error)
    assert re.search(message, reason), f"expected {message!r}; {reason or 'nothing was refused'}"


def check_refusals() -> None:
    """What can't be served is refused with the reason; other requests go on undisturbed."""
    server = server_of(eagle_worker("gqa", "fa3", Capacity(2, 64, 16, **CHAIN), num_pages=6))
    undisturbed, expected = server.submit(a_prompt(30), RequestOptions(20)), plainly([a_prompt(30)], 20)
    prompt, drafts = a_prompt(10), DraftShape(4, 3, 16)
    bad = [
        ("a prompt is empty", lambda: server.submit([])),
        ("a prompt has 64 tokens", lambda: server.submit([1] * 64)),
        ("holds token 256; the model knows 0 to 255", lambda: server.submit([1, 256])),
        ("holds token -1", lambda: server.submit([-1])),
        ("max_new_tokens must be at least 1, got 0", lambda: RequestOptions(0)),
        ("a stop string is empty", lambda: RequestOptions(stop=("a", ""))),
        ("write \\('end',\\)", lambda: RequestOptions(stop="end")),
        ("drafts with topk=1, num_steps=3, num", lambda: server.submit(prompt, RequestOptions(8, draft=drafts))),
        ("give the server `decode`", lambda: Server(server.worker).submit(prompt, RequestOptions(stop=("a",)))),
        ("give it `decode`", lambda: Server(server.worker).submit(prompt).text),
        ("to another server", lambda: server.cancel(Server(server.worker).submit(prompt))),
    ]
    served = set[Request]()
    for message, submit in bad:
        served |= {request for request, _ in server.round()}
        with refused(message):
            submit()
    accepted = server.submit(prompt, RequestOptions(8, draft=DraftShape(1, 3, 4)))
    served |= set(finish(server))
    assert served == {undisturbed, accepted}, "a refused request is served"
    assert [undisturbed.output] == expected


def check_cancel() -> None:
    """A request is cancelled once, waiting, in prefill or decoding; others go on undisturbed."""
    worker = eagle_worker("gqa", "fa3", Capacity(3, 96, 16, **CHAIN), chunk=8, host_lag=1)
    server = server_of(worker)
    prompts = [a_prompt(length, file) for file, length in enumerate((10, 60, 30, 20))]
    staying, in_prefill, decoding, waiting = (server.submit(prompt, RequestOptions(20)) for prompt in prompts)
    for _ in range(6):
        server.round()
    assert in_prefill.in_prefill
    assert decoding.output
    assert waiting.row == -1
    for request in (in_prefill, decoding, waiting):
        had = list(request.output)
        server.cancel(request)
        with refused(f"request {request.number} can't be cancelled: it has been cancelled"):
            server.cancel(request)
        server.round()
        assert request.output == had
    finish(server)
    assert [staying.output] == plainly([staying.prompt], 20)
    with refused(r"it has ended \(length\) already"):
        server.cancel(staying)
