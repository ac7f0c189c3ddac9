"""The reference workers on compressed keys: EAGLE equals plain greedy decoding across blocks, pages and rejections."""

from __future__ import annotations

import pytest
import torch

from attn_backends.cli import main
from attn_backends.graphs import RecordedGraph
from attn_backends.runner import Runner
from attn_backends_reference.eagle.options import WorkerOptions
from attn_backends_reference.eagle.requests import FinishReason, RequestError, RequestOptions
from attn_backends_reference.eagle.serving import Server, serve
from attn_backends_reference.eagle.worker import EagleWorker
from spec_metadata import Capacity
from tests.mutants.compressed import states_of_the_last_rows_only
from tests.serving_scenes import (
    CHAIN,
    EAGER,
    GRAPH,
    check_nothing_kept,
    eagle,
    eagle_worker,
    engine_parts,
    heldout,
    plain,
    prompts,
    tokens,
)

CAPACITY = Capacity(3, 320, 256, **CHAIN)
NUM_NEW = 24


def texts(*lens: int) -> list[list[int]]:
    """Passages of the held-out files of these lengths."""
    return [[0, *heldout()[i % 4][700 * i :].encode()][:length] for i, length in enumerate(lens)]


# With what is generated they cross tokens 128 and 256, which close a block of 128 and a page, and many blocks of 4.
GIVEN = (118, 246, 60, 127, 3)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What plain decoding makes of the passages."""
    completions, _ = plain("v4", "dsv4", CAPACITY, texts(*GIVEN), NUM_NEW)
    return tokens(completions)


@pytest.mark.parametrize("path", [EAGER, GRAPH], ids=["eager", "graph"])
def test_eagle_equals_plain_decoding(path, expected):
    """Five requests of which three run at once; a chunk of 50 tokens ends inside blocks."""
    found, worker = eagle("v4", "dsv4", CAPACITY, texts(*GIVEN), NUM_NEW, chunk=50, seed=3, **path)
    assert tokens(found) == expected
    assert bool(worker.num_graph_steps) == bool(path)
    cycles = sum(completion.num_cycles for completion in found)
    assert 1.3 < len(GIVEN) * NUM_NEW / cycles < 3.8, "drafts are accepted, and rejected"


def test_states_that_a_rejection_needs_are_missed(expected, monkeypatch):
    """The comparison can fail: a verify that keeps too few states changes what is generated."""
    states_of_the_last_rows_only(monkeypatch)
    found, _ = eagle("v4", "dsv4", CAPACITY, texts(*GIVEN), NUM_NEW)
    assert tokens(found) != expected


@pytest.mark.full
def test_a_shared_beginning_brings_its_states_along():
    """Whole pages of a prompt that was committed before are not computed again; the states are found in them."""
    (text,) = texts(300)
    given = [text, [*text[:280], *b"def other(self):"], [*text[:256], *b"\n\n"]]
    found, _ = plain("v4", "dsv4", Capacity(1, 360, 256, **CHAIN), given, 16)
    worker = eagle_worker("v4", "dsv4", Capacity(3, 360, 256, **CHAIN))
    shared: list[int] = []
    admit = worker.slots.admit
    worker.slots.admit = lambda keys=(): (shared.append(worker.slots.num_shared_tokens(keys)), admit(keys))[1]
    assert tokens(serve(worker, given, 16)) == tokens(found)
    assert 256 in shared


def test_a_worker_can_be_used_again_and_repeats_itself():
    """What requests before have left in pages changes nothing."""
    target, draft, backends, geometry = engine_parts("v4", "dsv4", CAPACITY)
    worker = EagleWorker(target, draft, backends, CAPACITY, geometry, WorkerOptions((1, 2, 3), RecordedGraph))
    given = texts(126, 40)
    assert serve(worker, given, 12) == serve(worker, given, 12)


FAILURES = [("prefill", 1), ("draft_prefill", 0), ("verify", 1), ("draft_extend", 0)]
WITH_THE_OTHER_LAG = [pytest.param(phase, 1 - lag, marks=pytest.mark.full) for phase, lag in FAILURES]


@pytest.mark.parametrize(("phase", "lag"), FAILURES + WITH_THE_OTHER_LAG)
@pytest.mark.one_in(3)
def test_a_step_that_fails_loses_its_requests(phase, lag, expected, monkeypatch):
    """It has overwritten states that it would begin with again. What came before is right, and others go on."""
    worker, run, ran = eagle_worker("v4", "dsv4", CAPACITY, chunk=50, seed=3, host_lag=lag), Runner.run, []
    server = Server(worker)
    requests = [server.submit(text, RequestOptions(NUM_NEW)) for text in texts(*GIVEN)]

    def failing(runner, step, inputs):
        result = run(runner, step, inputs)
        ran.extend([runner.phase.name] * (runner.phase.name == phase))
        if len(ran) == 3:
            ran.append("failed")
            raise torch.OutOfMemoryError("no memory")
        return result

    monkeypatch.setattr(Runner, "run", failing)
    with pytest.raises(torch.OutOfMemoryError):
        list(server.stream())
    lost = [request for request in requests if request.finish is FinishReason.FAILED]
    assert lost
    with pytest.raises(RequestError, match=r"it has ended \(failed\) already"):
        server.cancel(lost[0])
    list(server.stream())
    check_nothing_kept(worker)
    for request, text in zip(requests, expected, strict=True):
        assert request.output == text[: len(request.output) if request in lost else None]
        assert request.finish == ("failed" if request in lost else "length")


def test_an_engine_is_built_from_a_configuration(capsys):
    assert main(["generate", "--backend", "dsv4", "--prompt", "import os", "--max-new-tokens", "12"]) == 0
    printed = capsys.readouterr()
    assert "import os" in printed.out
    assert "dsv4, kernel torch" in printed.out + printed.err


@pytest.mark.full
@pytest.mark.parametrize("path", [EAGER, GRAPH], ids=["eager", "graph"])
def test_many_long_requests(path):
    """16 prompts and 160 tokens of each: every request crosses a block of 128, and some a page."""
    capacity, given = Capacity(4, 384, 256, **CHAIN), prompts(16, 200)
    expected, _ = plain("v4", "dsv4", capacity, given, 160, checking=False)
    found, _ = eagle("v4", "dsv4", capacity, given, 160, checking=False, **path)
    assert tokens(found) == tokens(expected)
