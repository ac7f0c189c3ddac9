"""Operators launch on the device of their tensors, which need not be the current one."""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType

import pytest
import torch

from attn_backends.kernels import compressor_operators, operators, paged_operators, sparse_operators


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
