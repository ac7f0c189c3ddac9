"""`RecordedGraph` as a model of a CUDA graph: what it refuses, what it replays right, what it gets wrong on purpose."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor

from attn_backends.errors import CaptureError
from attn_backends.graphs import CudaGraph, RecordedGraph, run_at_replays

HOST_READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda t: t[0].item(),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "np.asarray": np.asarray,
    "bool": lambda t: bool(t[0]),
    "if": lambda t: 1 if (t > 0).any() else 2,
    "int": lambda t: int(t[0]),
    "float": lambda t: float(t[0]),
    "range": lambda t: range(t[0]),
    "slice by tensor": lambda t: t[: t[0]],
    "comparison of whole tensors": lambda t: torch.equal(t, t),
    "boolean indexing": lambda t: t[t > 1],
    "boolean assignment": lambda t: t.__setitem__(t > 1, 0),
    "masked_select": lambda t: t.masked_select(t > 1),
    "nonzero": lambda t: t.nonzero(),
    "where without values": lambda t: torch.where(t > 1),
    "unique": lambda t: t.unique(),
    "bincount": lambda t: t.bincount(),
    "tensor of a list": lambda t: torch.tensor([1, 2, 3]),
    "repeat_interleave of tensor repeats": lambda t: torch.arange(3).repeat_interleave(t),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("read", HOST_READS.values(), ids=HOST_READS)
def test_host_reads_are_refused(read: Callable[[Tensor], object], mode: Callable[[], AbstractContextManager]) -> None:
    given = torch.tensor([2, 1, 3])
    with mode(), pytest.raises(CaptureError):
        RecordedGraph().capture(lambda: read(given))
    read(given.clone())  # outside a capture it is fine


def test_modes_are_left_after_a_refusal() -> None:
    given = torch.tensor([2])
    with pytest.raises(CaptureError):
        RecordedGraph().capture(lambda: given.item())
    assert given.item() == 2
    assert given.tolist() == [2]


def rotate(x: Tensor) -> Tensor:
    return x.roll(1, 0)


def accumulate(x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for i in range(3):
        total += x * i
        total[:2].mul_(2)
    return total


def scatter(x: Tensor) -> Tensor:
    out = torch.full_like(x, -1.0)
    rows = x.argsort(stable=True)
    out[rows] = x * 2
    out.index_put_((rows[:1],), x[:1], accumulate=True)
    return out


def search(x: Tensor) -> Tensor:
    ordered, order = x.sort()
    best = x.topk(2)
    return torch.searchsorted(ordered, best.values).to(x.dtype) + best.indices + order[:2]


def views(x: Tensor) -> Tensor:
    square = x[:4].view(2, 2).t()
    square = square.expand(3, 2, 2).contiguous()
    square[1] += 1
    return square.select(0, 1).reshape(-1) + square.flatten()[4:8]


def written_through_a_view(x: Tensor) -> Tensor:
    out = torch.empty(2, x.shape[0], dtype=x.dtype)
    out[0].copy_(x)
    out[1] = x.flip(0)
    return out


def out_argument(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.add(x, 1, out=out)
    return out


def repeated(x: Tensor) -> Tensor:
    return x.repeat_interleave(torch.full((5,), 2), output_size=10)


def several_outputs(x: Tensor) -> Tensor:
    low, high = x.split(2)[0], x.chunk(2)[1]
    return torch.cat((low, high.cumsum(0), x.max().view(1)))


REGIONS = [rotate, accumulate, scatter, search, views, written_through_a_view, out_argument, repeated, several_outputs]


@pytest.mark.parametrize("region", REGIONS)
def test_replays_new_inputs_right(region: Callable[[Tensor], Tensor]) -> None:
    static = torch.randn(5)
    graph = RecordedGraph()
    out = graph.capture(lambda: region(static))
    assert torch.equal(out, region(static.clone()))
    address = out.data_ptr()
    for _ in range(3):
        fresh = torch.randn(5)
        static.copy_(fresh)
        graph.replay()
        assert torch.equal(out, region(fresh))
        assert out.data_ptr() == address


def test_a_replay_runs_device_code_only() -> None:
    calls, static = [], torch.ones(2)
    graph = RecordedGraph()
    out = graph.capture(lambda: (calls.append(1), static * 2)[1])
    graph.replay()
    assert calls == [1]
    assert torch.equal(out, torch.full((2,), 2.0))


def test_in_place_work_on_outside_memory_is_done_again() -> None:
    counter, graph = torch.zeros(1), RecordedGraph()
    graph.capture(lambda: counter.add_(1))
    graph.replay()
    graph.replay()
    assert counter.item() == 3


def test_a_python_scalar_is_frozen() -> None:
    static, length, graph = torch.ones(4), [2], RecordedGraph()
    out = graph.capture(lambda: static * length[0])
    length[0] = 3
    graph.replay()
    assert torch.equal(out, torch.full((4,), 2.0))


def test_a_rebound_buffer_is_not_seen() -> None:
    holder, graph = {"static": torch.ones(4)}, RecordedGraph()
    out = graph.capture(lambda: holder["static"] * 2)
    holder["static"] = torch.full((4,), 5.0)
    graph.replay()
    assert torch.equal(out, torch.full((4,), 2.0))


def test_a_value_kept_from_capture_is_overwritten_by_a_replay() -> None:
    static, graph, stash = torch.ones(4), RecordedGraph(), []
    graph.capture(lambda: stash.append(static + 1))
    kept = stash[0]
    static.fill_(7.0)
    graph.replay()
    assert torch.equal(kept, torch.full((4,), 8.0))


def test_a_value_computed_before_the_capture_is_stale() -> None:
    lens, graph = torch.tensor([2, 3]), RecordedGraph()
    ends = lens.cumsum(0)
    out = graph.capture(lambda: ends + 0)
    lens.copy_(torch.tensor([5, 6]))
    graph.replay()
    assert out.tolist() == [2, 5] != lens.cumsum(0).tolist()


def test_intermediates_are_poisoned() -> None:
    """Memory that a replay does not write again holds nothing of the capture."""
    static, made, graph = torch.ones(3), {}, RecordedGraph()

    def region() -> Tensor:
        made["float"] = torch.empty(3)
        made["int"] = torch.empty(3, dtype=torch.int32)
        made["bool"] = torch.empty(3, dtype=torch.bool)
        made["partly"] = torch.empty(3)
        made["partly"][:1] = static[:1]
        return made["float"] + static

    out = graph.capture(region)
    made["float"].fill_(1.0)
    made["int"].fill_(1)
    made["bool"].fill_(False)
    made["partly"].fill_(1.0)
    graph.replay()
    assert made["float"].isnan().all()
    assert out.isnan().all()
    assert (made["int"] == torch.iinfo(torch.int32).max).all()
    assert made["bool"].all()
    assert made["partly"].isnan().tolist() == [False, True, True]


def test_inputs_are_not_poisoned() -> None:
    static, untouched, graph = torch.ones(3), torch.ones(3), RecordedGraph()
    graph.capture(lambda: static.view(3, 1) + untouched)
    graph.replay()
    assert torch.equal(static, torch.ones(3))
    assert torch.equal(untouched, torch.ones(3))


def test_a_custom_operator_is_one_node() -> None:
    runs = []

    @torch.library.custom_op("tests_graphs::triple", mutates_args=("out",))
    def triple(x: Tensor, out: Tensor) -> None:
        runs.append(x.tolist())  # a kernel may do what it likes inside
        out.copy_(x * 3)

    static, out, graph = torch.ones(2), torch.zeros(2), RecordedGraph()
    graph.capture(lambda: triple(static, out))
    static.fill_(2.0)
    graph.replay()
    assert runs == [[1.0, 1.0], [2.0, 2.0]]
    assert torch.equal(out, torch.full((2,), 6.0))


def test_an_operator_without_results_is_done_again() -> None:
    static, graph = torch.tensor(True), RecordedGraph()
    graph.capture(lambda: torch._assert_async(static))
    graph.replay()
    static.fill_(False)
    with pytest.raises(RuntimeError):
        graph.replay()


def test_a_call_of_the_host_is_made_at_its_place_of_each_replay() -> None:
    x, seen = torch.tensor([1.0]), []

    def region() -> Tensor:
        doubled = x * 2
        run_at_replays(lambda: seen.append(doubled.tolist()))
        run_at_replays(lambda: doubled.numpy().__iadd__(1))  # past the dispatcher
        return doubled * 10

    graph = RecordedGraph()
    out = graph.capture(region)
    x.fill_(3)
    graph.replay()
    assert seen == [[2.0], [6.0]]
    assert out.tolist() == [70.0]


def test_a_call_of_the_host_is_made_once_outside_of_a_recording() -> None:
    seen: list[int] = []
    run_at_replays(lambda: seen.append(1))
    assert seen == [1]


def test_a_call_of_the_host_that_fails_leaves_the_recording() -> None:
    x = torch.tensor([1.0])
    with pytest.raises(CaptureError):
        RecordedGraph().capture(lambda: (run_at_replays(lambda: x.item()), x.item()))


@pytest.mark.parametrize("error", [ValueError, torch.OutOfMemoryError])
def test_a_warm_up_that_fails_is_waited_for(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    waits = []

    class Stream:
        def wait_stream(self, other: object) -> None:
            waits.append((self, other))

    def region() -> None:
        waits.append("region")
        raise error("a launch after others")

    current, side = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: side)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    with pytest.raises((ValueError, CaptureError), match="a launch after others"):
        CudaGraph().warm_up(region)
    assert waits == [(side, current), "region", (current, side)]


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_in_a_capture(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """A dropped worker's graphs may be garbage; CUDA refuses to free them during a capture, which is lost then."""
    for name in ("CUDAGraph", "graph", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, **options: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    with pytest.raises(ValueError, match="in the region") if fails else nullcontext(), CudaGraph().recording():
        assert not gc.isenabled()
        if fails:
            raise ValueError("in the region")
    assert gc.isenabled()
