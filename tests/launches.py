"""A mode that counts what a GPU would launch."""

from __future__ import annotations

from typing import Any, Self

from torch.utils._python_dispatch import TorchDispatchMode


class CountsLaunches(TorchDispatchMode):
    """Counts the operators that are neither views nor allocations. num: of them so far."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.num += not func.is_view and "empty" not in func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))
