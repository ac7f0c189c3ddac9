"""What serving promises, each as a function that raises if it does not hold; for the tests and for the mutants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from attn_backends.backend import AttentionBackend
from attn_backends.graphs import RecordedGraph
from attn_backends.runner import PhaseRunner
from attn_backends_reference.config import load_run_config
from attn_backends_reference.eagle.engine import build_engine
from attn_backends_reference.eagle.launches import Launch
from attn_backends_reference.eagle.requests import FinishReason, Request, RequestOptions
from attn_backends_reference.eagle.serving import Server, serve
from attn_backends_reference.eagle.worker import EagleWorker
from attn_backends_reference.models import load_tokenizer
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
    holders,
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
    worker = eagle_worker(
        "gqa", "fa3", Capacity(6, 112, 16, **TREE), chunk=24, eos_tokens=(NEWLINE,), host_lag=host_lag
    )
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
    worker = eagle_worker("gqa", "fa3", Capacity(3, 96, 16, **TREE), chunk=24, host_lag=host_lag, eos_tokens=(NEWLINE,))
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
        first = server.submit(whole, RequestOptions(12))
        server.round()
        others = [server.submit(prompt, RequestOptions(24)) for prompt in (whole, whole[:33], forked, whole[:32])]
        server.round()
        pages = {request: slots.pages(request.row) for request in (first, *others[:3])}
        assert [request.statistics.num_shared_tokens for request in others[:3]] == [56, 32, 8]
        for request in others[:3]:
            num = request.statistics.num_shared_tokens // 8
            assert pages[request][:num] == pages[first][:num]
            assert not set(pages[request][num:]) & set(pages[first])
        assert holders(slots)[pages[first][0]] == 4
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
    plan = AttentionBackend._metadata, AttentionBackend.refresh

    def planned(backend, step, *given):
        ran.add((str(step.kind), backend.name))
        return plan[0](backend, step, *given)

    def planned_again(backend, meta):
        ran.add((str(meta.step.kind), backend.name))
        plan[1](backend, meta)

    prompts = [a_prompt(length, length) for length in (5, 11)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionBackend, "_metadata", planned)
        patch.setattr(AttentionBackend, "refresh", planned_again)
        found = [tokens(made) for made in (engine.generate(prompts, 20), engine.generate_plain(prompts, 20))]
    kinds = {"draft": "draft_decode", "verify": "target_verify"}
    assert {(kinds.get(phase, phase), name) for phase, name in PER_PHASE.items()} == ran
    assert found[0] == found[1]


def check_queue(num_pages: int | None) -> None:
    """More requests than the rows or pages hold wait in order, and none is dropped."""
    capacity = Capacity(2, 64, 16, **CHAIN)
    server = server_of(eagle_worker("gqa", "fa3", capacity, num_pages=num_pages))
    requests = [server.submit(a_prompt(20, file), RequestOptions(8 + file)) for file in range(7)]
    begun: list[Request] = []
    while not server.is_idle:
        server.round()
        assert sum(request.row >= 0 for request in requests) <= (2 if num_pages is None else 1)
        begun += [request for request in requests if request.output and request not in begun]
    assert begun == requests, "in another order than they came in"
    assert [len(request.output) for request in requests] == [8 + file for file in range(7)]
    check_nothing_kept(server.worker)
