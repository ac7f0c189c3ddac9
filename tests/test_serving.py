"""Serving on the shipped models: whatever requests do to the batch, each gets what plain decoding would give it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from attn_backends.cli import main
from attn_backends.errors import ConfigError, UnsupportedStepError
from attn_backends.graphs import RecordedGraph
from attn_backends_reference.config import load_run_config
from attn_backends_reference.eagle.engine import build_engine
from attn_backends_reference.eagle.launches import HostCopy
from attn_backends_reference.eagle.options import WorkerOptions
from attn_backends_reference.eagle.requests import RequestError, RequestOptions
from attn_backends_reference.eagle.serving import Server, serve
from spec_metadata import Capacity, InvalidStepError, Sampling, StepKind
from tests import request_laws
from tests import serving_laws as laws
from tests.serving_scenes import CHAIN, NEWLINE, TREE, Arrival, arrivals, eagle_worker, endless, plain_worker

GRAPH = {"buckets": (1, 2, 4), "make_graph": RecordedGraph}

# Every backend, draft, path and lag, each pair of them at least once; in the quick tests each of them. `make test-full`
# runs the whole cross.
RANDOM = [
    ("mla", "flashinfer_mla", 16, TREE, {}, 1),
    ("mla", "trtllm_mla", 32, CHAIN, GRAPH, 1),
    pytest.param("mla", "fa3", 8, CHAIN, {}, 0, marks=pytest.mark.full),
    ("gqa", "fa3", 16, TREE, GRAPH, 0),
    ("gqa", "reference", 4, CHAIN, GRAPH, 1),
    pytest.param("gqa", "reference", 1, TREE, {}, 0, marks=pytest.mark.full),
]


@cache
def scene_of(model: str) -> tuple[list[Arrival], list[list[int]]]:
    """Requests, and what plain decoding makes of them."""
    scene = arrivals(20, 25, 80, 20, seed=3)
    return scene, endless(model, scene, 20)


@pytest.mark.parametrize(("model", "backend", "page_size", "draft", "path", "lag"), RANDOM)
@pytest.mark.one_in(2)
def test_requests_join_and_leave_at_random(model, backend, page_size, draft, path, lag):
    capacity = Capacity(6, 112, page_size, **draft)
    worker = eagle_worker(model, backend, capacity, chunk=24, eos_tokens=(NEWLINE,), seed=2, host_lag=lag, **path)
    figures = laws.check_scene(worker, *scene_of(model))
    assert figures["largest_batch"] > 4, "more than the largest bucket"
    assert figures["shared_tokens"] > 60
    assert figures["most_rows_of_a_page"] > 1
    assert {"eos", "stop", "length", "cancelled"} <= figures.keys()
    assert bool(worker.num_graph_steps) == bool(path)


@pytest.mark.parametrize("lag", [0, 1])
def test_the_host_learns_in_time_or_a_cycle_late(lag):
    laws.check_lag(lag)


def test_lag_at_the_end_of_the_context():
    laws.check_lag_at_the_end_of_the_context()


@pytest.mark.parametrize("lag", [0, 1])
def test_a_request_that_ends_inside_an_accepted_run_emits_nothing_more(lag):
    request_laws.check_ends(lag)


def test_the_batch_walks_through_the_buckets_to_idle_and_back():
    laws.check_buckets()


def test_requests_share_the_pages_of_a_common_beginning():
    laws.check_sharing()


def test_requests_that_come_together_share_too():
    laws.check_sharing_together()


def test_chunks_of_a_prompt_go_beside_decoding():
    laws.check_rounds()


def test_the_stream_yields_tokens_as_they_come():
    request_laws.check_stream()


def test_statistics_of_a_request():
    request_laws.check_statistics()


def test_a_stream_that_is_left_goes_on_with_what_was_not_taken():
    server = Server(eagle_worker("gqa", "fa3", Capacity(3, 64, 16, **CHAIN)))
    requests = [server.submit(laws.a_prompt(9, file), RequestOptions(limit)) for file, limit in enumerate((12, 1, 9))]
    came: dict[int, list[int]] = {request.number: [] for request in requests}
    for _ in range(40):
        for request, tokens in server.stream():
            came[request.number] += tokens
            break
    assert server.is_idle
    assert list(came.values()) == [request.output for request in requests]


def test_a_cancelled_request_is_left_out_of_a_stream_that_goes_on():
    server = Server(eagle_worker("gqa", "fa3", Capacity(3, 64, 16, **CHAIN)))
    requests = [server.submit(laws.a_prompt(9, file), RequestOptions(9)) for file in range(2)]
    next(server.stream())
    server.cancel(requests[1])
    assert {request.number for request, _ in server.stream()} == {0}


def test_two_servers_do_not_run_on_one_worker_at_a_time():
    worker = eagle_worker("gqa", "fa3", Capacity(3, 64, 16, **CHAIN))
    first, second = Server(worker), Server(worker)
    mine, unwanted, yours = first.submit([5, 6, 7]), second.submit([1, 2]), second.submit([1, 2, 3], RequestOptions(8))
    first.round()
    with pytest.raises(RequestError, match=r"worker holds requests of another server.*a worker of its own"):
        second.round()
    second.cancel(unwanted)
    laws.finish(first)
    laws.finish(second)
    assert [mine.finish, yours.finish, len(yours.output)] == ["length", "length", 8]


@pytest.mark.parametrize("phase", ["cycle", "prefill"])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_step_that_fails_loses_nothing_of_what_ran_before_it(phase, lag, monkeypatch):
    """Such as one that is out of memory beside a cycle that was launched; the next round tries again."""
    capacity, given = Capacity(3, 96, 16, **CHAIN), [laws.a_prompt(length) for length in (9, 30)]
    expected = serve(plain_worker("gqa", "fa3", capacity), given, 20)
    worker = eagle_worker("gqa", "fa3", capacity, chunk=6, host_lag=lag)
    server, run, calls = Server(worker), getattr(worker, phase), []
    requests = [server.submit(prompt, RequestOptions(20)) for prompt in given]

    def failing(*step):
        calls.append(step)
        if len(calls) in (3, 4):
            raise torch.OutOfMemoryError("no memory")
        return run(*step)

    monkeypatch.setattr(worker, phase, failing)
    came = [0, 0]
    for _ in range(60):
        with suppress(torch.OutOfMemoryError):
            for request, tokens in server.round():
                came[request.number] += len(tokens)
    assert [request.output for request in requests] == [completion.tokens for completion in expected]
    assert came == [20, 20]
    assert server.is_idle


@pytest.mark.parametrize("failing", ["reserve", "admit"])
def test_an_admission_that_fails_leaves_the_request_waiting(failing, monkeypatch):
    worker, prompt = eagle_worker("gqa", "fa3", Capacity(1, 96, 16, **CHAIN)), laws.a_prompt(9)
    server, owner = laws.server_of(worker), worker.slots if failing == "reserve" else worker
    request, run, calls = server.submit(prompt, RequestOptions(12)), getattr(owner, failing), []

    def once(*given):
        run(*given)
        calls.append(given)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(owner, failing, once)
    with pytest.raises(torch.OutOfMemoryError):
        server.round()
    assert (server.is_idle, request.row, worker.slots.in_use) == (False, -1, False)
    laws.finish(server)
    assert [request.output] == laws.plainly([prompt], 12)


@pytest.mark.parametrize("make", [plain_worker, eagle_worker])
def test_a_copy_to_the_host_that_fails_loses_no_token(make, monkeypatch):
    """Such as one for which the host has no pinned memory: the cycle is tried again."""
    capacity, given, copy, calls = Capacity(2, 96, 16, **CHAIN), [laws.a_prompt(9)], HostCopy.__init__, []
    expected = serve(plain_worker("gqa", "fa3", capacity), given, 20)

    def failing(self, *tensors):
        calls.append(tensors)
        if len(calls) % 3 == 0:
            raise torch.OutOfMemoryError("no memory")
        copy(self, *tensors)

    monkeypatch.setattr(HostCopy, "__init__", failing)
    server = Server(make("gqa", "fa3", capacity))
    request = server.submit(given[0], RequestOptions(20))
    while not server.is_idle:
        with suppress(torch.OutOfMemoryError):
            server.round()
    assert request.output == expected[0].tokens
    assert len(calls) > 6


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("text", "a prompt is a str; it must be a sequence of token ids"),
        (torch.tensor([1, 2]), "a prompt is a Tensor; .* `.tolist\\(\\)` of a tensor"),
        (None, "a prompt is a NoneType"),
        (["a"], "a prompt holds 'a'; token ids are whole numbers"),
        ([1, 2.5], "a prompt holds 2.5"),
        ([1, None], "a prompt holds None"),
    ],
)
def test_a_prompt_of_anything_but_token_ids_is_refused(prompt, message):
    server = Server(eagle_worker("gqa", "fa3", Capacity(2, 64, 16, **CHAIN)))
    with pytest.raises(RequestError, match=message):
        server.submit(prompt)
    assert server.is_idle


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": "8"}, "max_new_tokens must be a whole number, got '8'"),
        ({"max_new_tokens": 8.0}, "max_new_tokens must be a whole number, got 8.0"),
        ({"sampling": 0.8}, "sampling must be a Sampling, got 0.8"),
        ({"stop": None}, "stop must be a tuple of strings, got None"),
        ({"stop": (1,)}, "stop must be a tuple of strings, got \\(1,\\)"),
        ({"draft": 3}, "draft must be a DraftShape or None, got 3"),
    ],
)
def test_options_of_another_type_are_refused(values, message):
    with pytest.raises(RequestError, match=message):
        RequestOptions(**values)


def test_whole_numbers_of_numpy_are_whole_numbers():
    assert RequestOptions(np.int64(8)).max_new_tokens == 8
    assert WorkerOptions(tuple(np.array([1, 4]))).buckets == (1, 4)
    assert Capacity(np.int32(2), 64, 16).max_pages == 5


def test_options_that_are_none_are_refused():
    server = Server(eagle_worker("gqa", "fa3", Capacity(2, 64, 16, **CHAIN)))
    with pytest.raises(RequestError, match="options are 60; they must be RequestOptions"):
        server.submit([1], 60)


def test_bad_requests_are_refused_and_others_go_on():
    request_laws.check_refusals()


def test_cancelling():
    request_laws.check_cancel()


@pytest.mark.parametrize("num_pages", [None, 4], ids=["rows", "pages"])
def test_more_requests_than_capacity_wait_in_order(num_pages):
    laws.check_queue(num_pages)


def test_a_request_that_no_cache_could_hold_is_refused():
    server = Server(eagle_worker("gqa", "fa3", Capacity(2, 64, 16, **CHAIN), num_pages=3))
    with pytest.raises(RequestError, match=r"can come to need 3 pages of 16 tokens; the cache has 2"):
        server.submit([1] * 20, RequestOptions(13))
    server.submit([1] * 20, RequestOptions(10))
    laws.finish(server)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature must be in"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"top_p": 1.5}, "top_p must be in"),
        ({"top_k": -1}, "top_k must be in"),
    ],
)
def test_sampling_out_of_range_is_refused(values, message):
    with pytest.raises(InvalidStepError, match=message):
        RequestOptions(8, Sampling(**values))


def test_plain_decoding_serves_with_lag_too():
    scene = arrivals(8, 6, 40, 12, seed=4)
    found = []
    for lag in (0, 1):
        server = laws.server_of(plain_worker("gqa", "fa3", Capacity(3, 64, 16), host_lag=lag, chunk=10))
        requests = [server.submit(arrival.prompt, arrival.options) for arrival in scene]
        for _ in server.stream():
            pass
        found.append([request.output for request in requests])
        assert set(requests[0].statistics.seconds) <= {"prefill", "decode"}
    assert found[0] == found[1] == [t[: len(f)] for t, f in zip(endless("gqa", scene, 12), found[0], strict=True)]


def test_a_kernel_that_plans_from_exact_lengths_is_refused_with_lag(monkeypatch):
    kernel = eagle_worker("gqa", "fa3", Capacity(2, 64, 16, **CHAIN)).backends.verify.kernel_of(StepKind.TARGET_VERIFY)
    needy = replace(kernel.capabilities[StepKind.TARGET_VERIFY], needs_host_lens=True)
    monkeypatch.setitem(kernel.capabilities, StepKind.TARGET_VERIFY, needy)
    eagle_worker("gqa", "fa3", Capacity(2, 64, 16, **CHAIN))
    with pytest.raises(
        UnsupportedStepError, match=r"host_lag=1: kernel torch plans target_verify on the host.*host_lag=0"
    ):
        eagle_worker("gqa", "fa3", Capacity(2, 64, 16, **CHAIN), host_lag=1)


def test_a_lag_of_two_rounds_is_refused():
    with pytest.raises(InvalidStepError, match="host_lag must be 0 or 1 rounds, got 2"):
        eagle_worker("gqa", "fa3", Capacity(2, 64, 16, **CHAIN), host_lag=2)


@pytest.fixture
def write_run(tmp_path):
    """Writes a short run's file."""
    return lambda **runtime: str(laws.write_run(tmp_path / "run.toml", **runtime))


def test_a_config_names_one_backend_per_phase():
    laws.check_phase_backends()


def test_a_config_sets_the_lag(write_run):
    assert build_engine(load_run_config(write_run(host_lag=1))).eagle.host_lag == 1
    with pytest.raises(ConfigError, match=r"runtime.host_lag: .* got 2"):
        load_run_config(write_run(host_lag=2))


def test_generate_samples_stops_and_prints_in_order(write_run, capsys):
    engine = build_engine(load_run_config(write_run()))
    prompts, options = ["import os\n", "class A:\n"], RequestOptions(24, Sampling(0.9, 0.8, 30, 7), stop=(" ",))
    server = engine.server()
    requests = [server.submit(engine.tokenizer.encode(prompt), options) for prompt in prompts]
    laws.finish(server)
    flags = ["--temperature", "0.9", "--top-p", "0.8", "--top-k", "30", "--seed", "7", "--stop"]
    given = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert main(["generate", "--config", write_run(), *given, *flags, " "]) == 0
    output = capsys.readouterr().out
    texts = [prompt + request.text for prompt, request in zip(prompts, requests, strict=True)]
    assert output.startswith(texts[0] + "\n─")
    assert output.find(texts[1] + "\n─") > 0
    assert any(request.finish == "stop" for request in requests)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "-1"], "temperature must be in"),
        (["--top-p", "2"], "top_p must be in"),
        (["--top-k", "-2"], "top_k must be in"),
        (["--stop", ""], "a stop string is empty"),
    ],
)
def test_generate_refuses_what_is_out_of_range(flags, message, capsys):
    assert main(["generate", "--prompt", "a", *flags]) == 2
    assert message in capsys.readouterr().err
