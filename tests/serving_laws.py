"""What serving promises, each as a function that raises if it does not hold; for the tests and for the mutants."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import pytest

from attn_backends.base import AttentionBackend
from attn_backends.config import load_run_config
from attn_backends.eagle.engine import build_engine
from attn_backends.eagle.launches import Launch
from attn_backends.eagle.requests import DraftShape, FinishReason, Request, RequestError, RequestOptions
from attn_backends.eagle.serving import Server, serve
from attn_backends.eagle.text import GrowingText
from attn_backends.eagle.worker import EagleWorker
from attn_backends.graphs import RecordedGraph
from attn_backends.models import load_tokenizer
from attn_backends.runner import PhaseRunner
from spec_metadata import Capacity, Sampling
from tests.serving_scenes import (
    CHAIN,
    NEWLINE,
    TREE,
    Arrival,
    arrivals,
    check_nothing_kept,
    eagle_worker,
    endless,
    ends,
    heldout,
    plain_worker,
    play,
    shared_pages_are_read_only,
    tokens,
)

DECODE = load_tokenizer("gqa", 256).decode


def server_of(worker: EagleWorker) -> Server:
    """A server that makes text."""
    return Server(worker, DECODE)


def a_prompt(length: int, file: int = 0) -> list[int]:
    """The beginning of a held-out file."""
    return list(heldout()[file][:length].encode())


def alone(prompt: Sequence[int], new_tokens: int, page_size: int = 8) -> Request:
    """A request served by a worker of its own, in one chunk."""
    server = server_of(eagle_worker("gqa", "fa3", Capacity(2, 128, page_size, **CHAIN)))
    request = server.submit(prompt, RequestOptions(new_tokens))
    finish(server)
    return request


def plainly(prompts: Sequence[Sequence[int]], new_tokens: int, max_context: int = 128) -> list[list[int]]:
    """What plain decoding makes of prompts."""
    return tokens(serve(plain_worker("gqa", "reference", Capacity(4, max_context, 16)), prompts, new_tokens))


def finish(server: Server) -> dict[Request, list[int]]:
    """Serve to the end; returns what came for each request."""
    emitted: dict[Request, list[int]] = {}
    for request, new in server.stream():
        emitted.setdefault(request, []).extend(new)
    check_nothing_kept(server.worker)
    return emitted


def check_scene(worker: EagleWorker, scene: Sequence[Arrival], endless: Sequence[list[int]]) -> dict[str, float]:
    """Requests that join, leave, share prompts, sample and stop at random emit what plain decoding does, and the same
    again; no page that is shared is written to, and nothing is kept. Returns figures of the first run.

    endless: what plain decoding makes of each request, without an end.
    """
    with shared_pages_are_read_only(worker.slots) as refcounts, verifies() as ran:
        requests, sizes = play(server_of(worker), scene)
    check_nothing_kept(worker)
    for request, arrival, text in zip(requests, scene, endless, strict=True):
        whole = ends(text, arrival, NEWLINE)
        if request.finish is FinishReason.CANCELLED:
            assert request.output == whole[: len(request.output)], f"request {request.number}, cancelled"
        else:
            assert request.output == whole, f"request {request.number} {arrival.options}, {request.finish}"
    again, _ = play(server_of(worker), scene)
    assert [request.output for request in again] == [request.output for request in requests], "another run differs"
    return {
        "rounds": len(sizes),
        "idle_rounds": sizes.count(0),
        "cycles": len(ran),
        "largest_batch": max(bs for bs, _ in ran),
        "smallest_batch": min(bs for bs, _ in ran),
        "buckets": len({bucket for _, bucket in ran} - {0}),
        "tokens": sum(len(request.output) for request in requests),
        "tokens_per_cycle": round(tokens_per_cycle(requests), 3),
        "shared_tokens": sum(request.statistics.num_shared_tokens for request in requests),
        "most_rows_of_a_page": max(refcounts),
        **Counter(str(request.finish) for request in requests),
    }


def tokens_per_cycle(requests: Sequence[Request]) -> float:
    """Tokens that a cycle emitted of a request on average."""
    begun = [request for request in requests if request.output]
    return sum(len(r.output) - 1 for r in begun) / sum(r.statistics.num_cycles for r in begun)


@contextmanager
def verifies() -> Iterator[list[tuple[int, int]]]:
    """Yields the batch size of each verify and the bucket that it ran in, 0 if it ran eagerly."""
    ran, run = list[tuple[int, int]](), PhaseRunner.run

    def logged(runner, step, inputs):
        result = run(runner, step, inputs)
        if runner.phase.name == "verify":
            ran.append((step.bs, result.bucket.bs if result.bucket else 0))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PhaseRunner, "run", logged)
        yield ran


def check_random(host_lag: int = 0) -> None:
    """A small scene on one backend."""
    worker = eagle_worker("gqa", "fa3", Capacity(6, 112, 16, **TREE), chunk=24, eos_token=NEWLINE, host_lag=host_lag)
    scene = arrivals(20, 25, 80, 20, seed=3)
    check_scene(worker, scene, endless("gqa", scene, 20))


@contextmanager
def launches(worker: EagleWorker) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Records in order what a worker launches, what of it is read, and which rows are released."""
    log: list[tuple[str, tuple[int, ...]]] = []
    rows_of: dict[Launch, tuple[int, ...]] = {}
    read, release, cycle, prefill = Launch.read, worker.slots.release, worker.cycle, worker.prefill

    def launched(name, rows, launch):
        rows_of[launch] = tuple(rows)
        log.append((name, rows_of[launch]))
        return launch

    def read_logged(launch):
        log.append(("read", rows_of[launch]))
        return read(launch)

    def release_logged(row):
        log.append(("release", (row,)))
        release(row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "cycle", lambda rows, most: launched("cycle", rows, cycle(rows, most)))
        patch.setattr(worker, "prefill", lambda c: launched("prefill", [x.row for x in c], prefill(c)))
        patch.setattr(Launch, "read", read_logged)
        patch.setattr(worker.slots, "release", release_logged)
        yield log


def check_lag(host_lag: int) -> None:
    """With lag a cycle is launched before the last one is read; rows go back once nothing of theirs is on its way."""
    worker = eagle_worker("gqa", "fa3", Capacity(3, 96, 16, **TREE), chunk=24, host_lag=host_lag, eos_token=NEWLINE)
    prompts = [a_prompt(length, file) for file, length in enumerate((5, 40, 60, 20))]
    with launches(worker) as log:
        server = server_of(worker)
        requests = [server.submit(prompt, RequestOptions(24)) for prompt in prompts]
        finish(server)
    cut = [text[: text.index(NEWLINE) + 1] if NEWLINE in text else text for text in plainly(prompts, 24)]
    assert [request.output for request in requests] == cut
    assert any(request.finish is FinishReason.EOS for request in requests), "the host can't know that end before"
    unread: Counter[int] = Counter()
    most = 0
    for event, rows in log:
        if event == "release":
            assert not unread[rows[0]], "a row goes back while a step of its request is on its way"
        unread.update(dict.fromkeys(rows, {"read": -1, "release": 0}.get(event, 1)))
        most = max(most, *unread.values())
    assert most == 1 + host_lag, f"{most} steps of a request were on their way at once"


def check_lag_at_the_end_of_the_context() -> None:
    """With lag, a request near its context's end writes no further than its table row, and emits what it would."""
    worker = eagle_worker("gqa", "fa3", Capacity(3, 48, 16, **TREE), host_lag=1)
    prompts = [a_prompt(length) for length in (20, 33, 42, 43, 44, 45, 46, 47)]
    server = server_of(worker)
    requests = [server.submit(prompt, RequestOptions(1000)) for prompt in prompts]
    finish(server)
    assert [len(request.prompt) + len(request.output) for request in requests] == [48] * len(prompts)
    for request in requests:
        assert [request.output] == plainly([request.prompt], 48 - len(request.prompt))


@contextmanager
def runs_cut() -> Iterator[list[Request]]:
    """Yields the requests that ended before the last token of what a step gave them."""
    cut, emit = list[Request](), Request.emit

    def logged(request, given, eos_token):
        is_open, taken = request.finish is None, emit(request, given, eos_token)
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
        worker = eagle_worker("gqa", "fa3", Capacity(2, 128, 16, **TREE), eos_token=end, host_lag=host_lag)
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


def check_buckets() -> None:
    """The batch grows through buckets and past the largest, shrinks to idle, and grows again."""
    worker = eagle_worker("gqa", "fa3", Capacity(6, 96, 16, **CHAIN), buckets=(1, 2, 4), make_graph=RecordedGraph)
    server = server_of(worker)
    prompts = [a_prompt(12 + 5 * file, file) for file in range(6)]
    expected = plainly(prompts, 32)
    with verifies() as ran:
        for turn in range(2):
            requests = []
            for joining in ((0,), (1,), (2,), (3, 4, 5)):
                requests += [server.submit(prompts[i], RequestOptions(12 + 4 * i)) for i in joining]
                server.round()
            finish(server)
            for request, text in zip(requests, expected, strict=True):
                assert request.output == text[: len(request.output)], f"turn {turn}, request {request.number}"
                assert len(request.output) == request.options.max_new_tokens
    assert set(ran) == {(1, 1), (2, 2), (3, 4), (4, 4), (5, 0), (6, 0)}
    sizes = [bs for bs, _ in ran]
    assert any(sizes[i] == 1 and sizes[i - 1] > 1 for i in range(1, len(sizes))), "it shrinks"


def check_sharing() -> None:
    """Requests on the same beginning read the same pages; what they draft and emit is what they would alone."""
    server = server_of(eagle_worker("gqa", "fa3", Capacity(4, 128, 8, **CHAIN), seed=5))
    slots, whole = server.worker.slots, a_prompt(60)
    forked = [*whole[:16], whole[16] ^ 1, *whole[17:40]]  # the first 16 tokens are the same, the one after is not
    with shared_pages_are_read_only(slots) as refcounts:
        first = server.submit(whole, RequestOptions(4))
        server.round()
        others = [server.submit(prompt, RequestOptions(24)) for prompt in (whole, whole[:33], forked, whole[:32])]
        server.round()
        pages = {request: slots.pages(request.row) for request in (first, *others[:3])}
        assert [request.statistics.num_shared_tokens for request in others[:3]] == [56, 32, 8]
        for request in others[:3]:
            num = request.statistics.num_shared_tokens // 8
            assert pages[request][:num] == pages[first][:num]
            assert not set(pages[request][num:]) & set(pages[first])
        assert slots.refcount(pages[first][0]) == 4
        finish(server)
    assert max(refcounts) == 4
    assert others[3].statistics.num_shared_tokens == 24, "its last token is computed"
    for request in others:
        apart = alone(request.prompt, 24)
        assert request.output == apart.output
        assert request.statistics.num_cycles == apart.statistics.num_cycles, "it drafts otherwise than alone"


def check_sharing_together() -> None:
    """Of requests that come at once with one prompt, one computes it."""
    server = server_of(eagle_worker("gqa", "fa3", Capacity(4, 128, 8, **CHAIN), chunk=16))
    prompt = a_prompt(50)
    requests = [server.submit(prompt, RequestOptions(12, Sampling(0.8, seed=i))) for i in range(4)]
    other = server.submit(a_prompt(20, 1), RequestOptions(12))
    server.round()
    assert other.row == -1 or other.statistics.num_shared_tokens == 0
    finish(server)
    assert [request.statistics.num_shared_tokens for request in requests] == [0, 48, 48, 48]


def check_rounds() -> None:
    """A prompt in chunks does not stall who decodes, and is committed as in one chunk."""
    server = server_of(eagle_worker("gqa", "fa3", Capacity(2, 128, 16, **CHAIN), chunk=5))
    decoding = server.submit(a_prompt(5, 1), RequestOptions(100))
    server.round()
    long = server.submit(a_prompt(43), RequestOptions(20))
    for turn in range(9):
        emitted = dict(server.round())
        assert len(emitted.get(decoding, [])) > 0, f"the decoding request stood still in round {turn}"
        assert (long in emitted) == (turn == 8), "a prompt of 43 tokens takes 9 chunks of 5"
    finish(server)
    apart = alone(a_prompt(43), 20)
    assert long.output == apart.output
    assert long.statistics.num_cycles == apart.statistics.num_cycles, "in chunks it drafts otherwise than in one"


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


PER_PHASE = {
    "prefill": "fa3",
    "decode": "flashinfer_mla",
    "draft": "fa3",
    "verify": "flashinfer_mla",
    "draft_extend": "flashinfer_mla",
}


def write_run(path: Path, **runtime: object) -> Path:
    """Writes the file of a short run that has one backend per phase."""
    given = {"max_bs": 2, "buckets": [2], "max_context": 96, "max_new_tokens": 24, "page_size": 16} | runtime
    lines = ["[backend]", *(f'{phase} = "{name}"' for phase, name in PER_PHASE.items())]
    lines += ["[eagle]", "topk = 1", "num_steps = 2", "num_draft_tokens = 3"]
    lines += ["[model]", 'target = "mla"', 'draft = "mla"', "[runtime]"]
    path.write_text("\n".join([*lines, *(f"{key} = {value}" for key, value in given.items())]))
    return path


def check_phase_backends() -> None:
    """A config of one backend per phase runs each phase on its own, and emits what plain decoding does."""
    with TemporaryDirectory() as folder:
        engine = build_engine(load_run_config(str(write_run(Path(folder) / "run.toml"))))
    ran: set[tuple[str, str]] = set()
    admit = AttentionBackend._admit

    def logged(backend, step):
        ran.add((str(step.kind), backend.name))
        admit(backend, step)

    prompts = [a_prompt(length, length) for length in (5, 11)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionBackend, "_admit", logged)
        found = [tokens(made) for made in (engine.generate(prompts, 20), engine.generate_plain(prompts, 20))]
    kinds = {"draft": "draft_decode", "verify": "target_verify"}
    assert {(kinds.get(phase, phase), name) for phase, name in PER_PHASE.items()} == ran
    assert found[0] == found[1]


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
    for message, submit in bad:
        server.round()
        before = server.num_waiting, server.num_running
        with refused(message):
            submit()
        assert (server.num_waiting, server.num_running) == before
    server.submit(prompt, RequestOptions(8, draft=DraftShape(1, 3, 4)))
    finish(server)
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


def check_queue(num_pages: int | None) -> None:
    """More requests than the rows or pages hold wait in order, and none is dropped."""
    capacity = Capacity(2, 64, 16, **CHAIN)
    server = server_of(eagle_worker("gqa", "fa3", capacity, num_pages=num_pages))
    requests = [server.submit(a_prompt(20, file), RequestOptions(8 + file)) for file in range(7)]
    begun: list[Request] = []
    while not server.is_idle:
        server.round()
        assert server.num_running <= (2 if num_pages is None else 1)
        begun += [request for request in requests if request.output and request not in begun]
    assert begun == requests, "in another order than they came in"
    assert [len(request.output) for request in requests] == [8 + file for file in range(7)]
    check_nothing_kept(server.worker)
