"""Operators launch on the device of their tensors, which need not be the current one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from inspect import signature
from types import ModuleType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_backends.graphs import RecordedGraph
from attn_backends.kernels import compressor_operators, devices, operators, paged_operators, sparse_operators


@pytest.mark.parametrize(
    "module", [operators, paged_operators, sparse_operators, compressor_operators], ids=lambda module: module.__name__
)
def test_every_operator_launches_on_the_device_of_its_tensors(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = []
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: (entered.append(tensor), nullcontext())[1])
    launches = [value for name, value in vars(module).items() if name.endswith("_cuda")]
    assert launches
    for launch in launches:
        first = torch.zeros(1)
        with pytest.raises((TypeError, ImportError)):  # of all that is missing: only where it runs matters here
            launch(first)
        assert [entry is first for entry in entered] == [True], launch.__name__
        entered.clear()


class OnCuda(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """An operator that says which way it was called, with a plain tensor on a pretended GPU unless another is given."""
    monkeypatch.setattr(devices, "_PLAIN", (OnCuda,))
    made = devices.undispatched(lambda *_: "dispatched", lambda *_: "direct")
    return lambda first=None: made(torch.zeros(1).as_subclass(OnCuda) if first is None else first)


def test_an_operator_is_called_directly_on_a_gpu(call: Callable[..., str]) -> None:
    class Other(OnCuda):
        """A class of its own may dispatch by itself."""

    assert call() == "direct"
    assert call(torch.zeros(1)) == "dispatched"
    assert call(torch.zeros(1).as_subclass(Other)) == "dispatched"


def test_who_watches_sees_operators(call: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording, a mode of anybody's, and a compiler that traces."""
    assert RecordedGraph().capture(call) == "dispatched"
    with FakeTensorMode():
        assert devices.is_watched()
    assert call() == "direct"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert call() == "dispatched"


def test_every_layers_operator_can_be_called_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the arguments that its CUDA implementation takes."""
    for module, name in [(operators, "tree_join"), (operators, "store_kv"), (operators, "store_rows")]:
        given = []
        monkeypatch.setattr(module, f"_call_{name}", lambda *arguments, given=given: given.append(arguments))
        public, on_cuda = getattr(module, name), getattr(module, f"_{name}_cuda")
        wanted = signature(public).parameters
        public(*range(len(wanted)))
        assert given == [tuple(range(len(wanted)))]
        assert list(signature(on_cuda).parameters) == list(wanted)
