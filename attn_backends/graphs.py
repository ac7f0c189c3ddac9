"""Graphs with one interface: `CudaGraph` on a GPU, `RecordedGraph` anywhere.

A recorded graph is a model of a CUDA graph that needs no GPU. It records the operator calls of a region with their
tensors' addresses and Python values frozen, and refuses host reads as CUDA capture does. It replays the calls into the
same memory, with every intermediate poisoned first. What a CUDA graph would get wrong, a stale scalar, a moved buffer,
a value kept from capture, it gets wrong too. One thing it refuses that a CUDA graph would get wrong: to run on memory
that holds the step of another bucket by then. It does not model memory reuse inside the graph's pool.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attn_backends.errors import CaptureError

T = TypeVar("T")
_recording: ContextVar[RecordedGraph | None] = ContextVar("recording", default=None)
being_recorded = _recording.get  # the graph that is being recorded now, or None
_paused: ContextVar[bool] = ContextVar("paused", default=False)


def is_capturing() -> bool:
    """Whether what runs now goes into a graph: a CUDA graph's capture on the current stream, or a recording."""
    return bool(being_recorded()) or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def repeat_at_replays(call: Callable[[], None]) -> None:
    """Make the graph that is being recorded, if any, call a host function before each of its replays. An example is a
    check that its memory still holds its step, which a CUDA graph does not check.
    """
    graph = being_recorded()
    if graph is not None and graph.host_calls[-1:] != [call]:
        graph.host_calls.append(call)


def run_at_replays(call: Callable[[], object]) -> None:
    """Run a call of the host's now, and at this place of each replay of the graph that is being recorded, if one is.

    For what torch's dispatcher does not see, such as a launch of a Triton kernel in its interpreter, or what no graph
    may do, such as looking at values in a test. The call finds its tensors where they were, and holds them.
    """
    graph = being_recorded()
    if graph is None:
        call()
        return
    graph._calls.append(_HostCall(call))
    recording, paused = _recording.set(None), _paused.set(True)
    try:
        call()
    finally:
        _recording.reset(recording)
        _paused.reset(paused)


class Graph(Protocol):
    """A region that was captured once and can be replayed."""

    def capture(self, region: Callable[[], T], sharing: Self | None = None) -> T:
        """Capture a region of device work; returns its outputs, whose memory every replay overwrites. sharing: as in
        `recording`.
        """

    def warm_up(self, region: Callable[[], object]) -> None:
        """Run a region as often as it must have run before it is captured."""

    def recording(self, sharing: Self | None = None) -> AbstractContextManager[None]:
        """A context whose operations become the graph, as in `capture`, after a warm-up and without gradients. sharing:
        another graph, whose unreferenced memory this one may reuse. The two never run at once.
        """

    def replay(self) -> None:
        """Run the region again on the current contents of the memory that it was captured with."""


class CudaGraph:
    """A CUDA graph. The region runs a few times before the capture (kernels are compiled and handles made there)."""

    num_warm_ups = 2

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, region: Callable[[], T], sharing: Self | None = None) -> T:
        """Capture a region of device work; see `Graph`. Out of memory, it leaves nothing behind."""
        self.warm_up(region)
        with torch.no_grad(), self.recording(sharing):
            return region()

    def warm_up(self, region: Callable[[], object]) -> None:
        """Run a region on a stream of its own, `num_warm_ups` times; see `Graph`."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with self._out_of_memory_told(), torch.cuda.stream(stream), torch.no_grad():
                for _ in range(self.num_warm_ups):
                    region()
        finally:  # launches before an error still read what the caller will free or write next
            torch.cuda.current_stream().wait_stream(stream)

    @contextmanager
    def recording(self, sharing: Self | None = None) -> Iterator[None]:
        """Capture what runs inside, into the memory pool of `sharing`; see `Graph`."""
        pool = None if sharing is None else sharing._graph.pool()
        own_stream = torch.cuda.stream(torch.cuda.current_stream())  # torch stays on its own if it can't end a capture
        with self._out_of_memory_told(), _no_collection(), own_stream, torch.cuda.graph(self._graph, pool=pool):
            yield

    def replay(self) -> None:
        """Replay on the current stream."""
        self._graph.replay()

    @contextmanager
    def _out_of_memory_told(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            self._graph = torch.cuda.CUDAGraph()
            needed = ". ".join(str(error).split(". ")[:2])  # torch says how much more it tried to get
            raise CaptureError(
                f"no memory to capture: {needed}. A graph keeps its intermediates for as long as it lives; capture "
                "smaller or fewer buckets, or run eagerly"
            ) from error


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected inside: old graphs, of a worker that was dropped, can't be freed during a capture, and
    trying to breaks it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class RecordedGraph:
    """The operator calls of a region, replayed with frozen addresses and values.

    host_calls: made before each replay, in order, and each may refuse it (`repeat_at_replays`).
    """

    def __init__(self) -> None:
        self._calls: list[_Call | _HostCall] = []
        self.host_calls: list[Callable[[], None]] = []

    def capture(self, region: Callable[[], T], sharing: Self | None = None) -> T:
        """Record a region; see `Graph`."""
        with torch.no_grad(), self.recording(sharing):
            return region()

    def warm_up(self, region: Callable[[], object]) -> None:
        """A recording needs none."""

    @contextmanager
    def recording(self, sharing: Self | None = None) -> Iterator[None]:
        """Record what runs inside; see `Graph`. Every recording has memory of its own."""
        self._calls, self.host_calls = [], []
        token = _recording.set(self)
        try:
            with _RefuseHostReads(), _Recorder(self._calls):
                yield
        finally:
            _recording.reset(token)

    def replay(self) -> None:
        """Poison every intermediate, then run the calls again in order. Raises `CaptureError`, and runs nothing, if the
        static memory that it reads holds the step of another bucket.
        """
        for call_host in self.host_calls:
            call_host()
        with torch.no_grad():
            for call in self._calls:
                for tensor in call.made:
                    _poison(tensor)
            for call in self._calls:
                call.run()


class _Call:
    """One operator call with frozen arguments. made: outputs in memory of their own, which a replay writes again."""

    def __init__(self, func: Any, args: tuple, kwargs: dict, outputs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.outputs = list(leaves(outputs))
        inputs = {_storage(t) for t in _tensors((args, kwargs))}
        self.made = [t for t in _tensors(outputs) if _storage(t) not in inputs]
        has_results = any(isinstance(output, Tensor) for output in self.outputs)
        self._is_view = has_results and not self.made and not func._schema.is_mutable
        self._is_empty = func.overloadpacket in _UNINITIALISED

    def run(self) -> None:
        if self._is_view or self._is_empty:
            return
        again = leaves(self.func(*self.args, **self.kwargs))
        for output, value in zip(self.outputs, again, strict=True):
            if any(output is tensor for tensor in self.made):
                output.copy_(value)


class _HostCall:
    """A call of the host's between operator calls."""

    made: tuple[Tensor, ...] = ()

    def __init__(self, call: Callable[[], object]) -> None:
        self.run = call


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list[_Call | _HostCall]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if being_recorded() is None:  # inside of `run_at_replays`
            return func(*args, **kwargs)
        reason = _refusal(func, args, kwargs)
        if reason:
            raise CaptureError(f"{func} can't be captured: {reason}")
        outputs = func(*args, **kwargs)
        self._calls.append(_Call(func, args, kwargs, outputs))
        return outputs


class _RefuseHostReads(TorchFunctionMode):
    """Refuses the conversions to Python that never reach the dispatcher."""

    _READS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in self._READS and not _paused.get():
            raise CaptureError(f"Tensor.{func.__name__} reads the device from the host and can't be captured")
        return func(*args, **(kwargs or {}))


_aten = torch.ops.aten
_UNINITIALISED = frozenset(
    {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
)
_INDEXING = frozenset({_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_})
# Inference mode hands these over whole, elsewhere they come as the operators below them.
_DYNAMIC_IN_INFERENCE_MODE = frozenset({_aten.where.default, _aten.repeat_interleave.self_Tensor})


def _refusal(func: Any, args: tuple, kwargs: dict) -> str:
    """Why CUDA capture would refuse an operator call; empty if it would not."""
    packet = func.overloadpacket
    if packet in _INDEXING:
        masks = [t for t in _tensors(args[1]) if t.dtype in (torch.bool, torch.uint8)]
        return "a boolean index has as many results as the mask has ones, which the host must read" if masks else ""
    if packet is _aten.repeat_interleave and kwargs.get("output_size") is not None:
        return ""
    if torch.Tag.data_dependent_output in func.tags or func is _aten.is_nonzero.default:
        return "it reads a value of the device on the host"
    if torch.Tag.dynamic_output_shape in func.tags or func in _DYNAMIC_IN_INFERENCE_MODE:
        return "the shape of its result depends on values, which the host must read"
    if packet in (_aten.lift_fresh, _aten.lift_fresh_copy) and args[0].ndim > 0:
        return "it makes a tensor from Python values, a copy from host memory; make it before the region"
    return ""


def _poison(tensor: Tensor) -> None:
    if tensor.dtype is torch.bool:
        tensor.fill_(True)
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def leaves(tree: Any) -> Iterator[Any]:
    """The values in an operator's arguments or results, out of tuples, lists and dictionaries."""
    if isinstance(tree, (tuple, list)):
        for each in tree:
            yield from leaves(each)
    elif isinstance(tree, dict):
        yield from leaves(list(tree.values()))
    else:
        yield tree


def _tensors(tree: Any) -> Iterable[Tensor]:
    return (leaf for leaf in leaves(tree) if isinstance(leaf, Tensor))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
