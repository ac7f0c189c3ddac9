"""What ends early: a server that is closed, and a step or a callback that raises; the worker can be used again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attn_backends.graphs import RecordedGraph
from attn_backends_reference.config import load_run_config
from attn_backends_reference.eagle.engine import Engine, build_engine
from attn_backends_reference.eagle.requests import RequestOptions
from attn_backends_reference.eagle.serving import Server, serve
from spec_metadata import Capacity
from tests import serving_laws as laws
from tests.serving_scenes import CHAIN, check_nothing_kept, eagle_worker

CAPACITY = Capacity(2, 96, 16, **CHAIN)


def no_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("no memory")


@pytest.mark.parametrize("phase", ["prefill", "cycle"])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.one_in(3)
def test_a_step_that_raises_leaves_the_worker_usable(phase, lag, monkeypatch):
    """More prompts than rows, so that some wait and some are in prefill when it happens."""
    given = [laws.a_prompt(length, file) for file, length in enumerate((9, 30, 12, 20))]
    worker = eagle_worker("gqa", "fa3", CAPACITY, chunk=8, host_lag=lag, buckets=(1, 2), make_graph=RecordedGraph)
    expected = [completion.tokens for completion in serve(worker, given, 12)]
    run: Callable[..., object] = getattr(worker, phase)
    for fails_at in (1, 2, 4):
        steps = iter([run] * (fails_at - 1))
        with monkeypatch.context() as patch:
            patch.setattr(worker, phase, lambda *step, steps=steps: next(steps, no_memory)(*step))
            with pytest.raises(torch.OutOfMemoryError):
                serve(worker, given, 12)
        check_nothing_kept(worker)
        assert [completion.tokens for completion in serve(worker, given, 12)] == expected


@pytest.mark.parametrize("generate", [Engine.generate, Engine.generate_plain])
def test_progress_that_raises_leaves_the_engine_usable(generate, tmp_path):
    engine = build_engine(load_run_config(str(laws.write_run(tmp_path / "run.toml"))))
    given = [laws.a_prompt(9), laws.a_prompt(14, 1)]
    expected = generate(engine, given, 8)
    with pytest.raises(torch.OutOfMemoryError):
        generate(engine, given, 8, no_memory)
    assert generate(engine, given, 8) == expected


@pytest.mark.parametrize("lag", [0, 1])
def test_a_server_that_is_closed_cancels_what_is_left(lag):
    worker = eagle_worker("gqa", "fa3", CAPACITY, host_lag=lag)
    with Server(worker) as server:
        ended = server.submit(laws.a_prompt(9), RequestOptions(1))
        running, waiting = (server.submit(laws.a_prompt(9, file), RequestOptions(40)) for file in (1, 2))
        for _ in range(1 + lag):
            server.round()
        assert (ended.finish, running.finish, waiting.finish) == ("length", None, None)
    assert [request.finish for request in (ended, running, waiting)] == ["length", "cancelled", "cancelled"]
    assert server.is_idle
    assert list(server.stream()) == []
    check_nothing_kept(worker)
