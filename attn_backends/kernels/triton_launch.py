"""Launching small Triton kernels at little more than the cost of the launch itself.

Before each launch Triton looks at every argument for what its compiler could use, such as a pointer's alignment, which
takes several times as long as the launch. An `unspecialized` kernel uses none of it and is the same for all arguments
of the same types, so that what was compiled first is launched directly ever after. What is launched with the same
arguments again and again, except a few, is bound to them once (`cuda_launch`). A `DirectLaunch` does so
with a kernel that uses all that it can, and that every layer of a step launches, on tensors of its own.

Triton specialises on every element of a tuple, even if it is declared otherwise. So numbers are `opaque` there, and the
alignment of pointers belongs to the variant of a `Launch`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from inspect import signature
from threading import get_ident
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor

from attn_backends.kernels.cuda_launch import bind_arguments, bind_launch, bind_tensors

LISTS = ("query_indptr", "page_indptr", "page_ids", "kv_lens", "table_stride", "drafted")
"""Arguments of attention that differ from batch to batch in what Triton specialises on: an address or a number that is
a multiple of 16, or 1. Kernels declare so, and no later batch is compiled for anew.
"""

MOST_KEPT = 1024
"""Launches that a `DirectLaunch` keeps; with one more it begins anew."""


def unspecialized(kernel: Callable[..., Any]) -> Any:
    """`triton.jit` that compiles for types and constants alone."""
    parameters = signature(kernel).parameters.values()
    names = [each.name for each in parameters if "constexpr" not in str(each.annotation)]
    return triton.jit(kernel, do_not_specialize=names)


Numbers = TypeVar("Numbers", bound=tuple[int, ...])


@lru_cache(maxsize=1024, typed=True)
def opaque(numbers: Numbers) -> Numbers:
    """A named tuple of numbers below 30 bits, encoded so that none is 1 or a multiple of 16, on which Triton
    specialises; kernels decode each with `triton_requests.number`.
    """
    make: Callable[..., Numbers] = type(numbers)
    return make(*[2 * each + 3 for each in numbers])


class Launch:
    """Launches of an `unspecialized` kernel on one device in one grid, on the current stream. Who calls it makes the
    device the current one; what was bound does so itself.
    """

    def __init__(self, kernel: Any, device: torch.device, grid: tuple[int, int, int], num_warps: int = 4) -> None:
        self.kernel, self._device, self._grid, self._num_warps = kernel, device, grid, num_warps
        self._compiled: dict[Hashable, Any] = {}
        self._direct: dict[Hashable, Callable[..., None]] = {}

    def __call__(self, variant: Hashable, *arguments: Any) -> None:
        """Launch. variant: what compilation depends on: types, which arguments are None, and constants, which are the
        last arguments. Integers must fit 32 bits. What launches it after that is a thread's own (`bind_arguments`).
        """
        key = (get_ident(), variant)
        direct = self._direct.get(key)
        if direct is not None:
            direct(*arguments)
        elif variant not in self._compiled:
            self.compile(variant, *arguments)
        else:
            compiled = self._compiled[variant]
            direct = self._direct[key] = bind_arguments(compiled, self._device, self._grid, arguments)
            direct(*arguments)

    def compile(self, variant: Hashable, *arguments: Any) -> None:
        """The first launch of a variant, which compiles it."""
        with torch.cuda.device(self._device if self._device.type == "cuda" else -1):
            compiled = self.kernel[self._grid](*arguments, num_warps=self._num_warps)
        if compiled is not None:  # the interpreter compiles nothing
            self._compiled[variant] = compiled

    def bind(self, variant: Hashable, fixed: Sequence[Any]) -> Callable[..., None] | None:
        """A function that launches a compiled variant, given the arguments before the fixed ones (`bind_launch`); None
        if it is not compiled.
        """
        compiled = self._compiled.get(variant)
        return None if compiled is None else bind_launch(compiled, self._device, self._grid, fixed)

    def bind_tensors(self, variant: Hashable, arguments: Sequence[Any]) -> Callable[..., None] | None:
        """The same, given the addresses of all tensors among the arguments (`bind_tensors`); None also where Triton
        must launch.
        """
        compiled = self._compiled.get(variant)
        return None if compiled is None else bind_tensors(compiled, self._device, self._grid, arguments)


class Prepared(NamedTuple):
    """A launch with its arguments."""

    launch: Launch
    variant: Hashable
    arguments: tuple[Any, ...]

    def __call__(self) -> None:
        """Launch."""
        self.launch(self.variant, *self.arguments)

    def bind(self) -> Callable[[], None] | None:
        """A function that repeats a launch, on tensors that the caller keeps; None on the interpreter."""
        return self.launch.bind(self.variant, self.arguments)

    def bind_tensors(self) -> Callable[..., None] | None:
        """A function that repeats a launch on other tensors, given their addresses; None where Triton must launch."""
        return self.launch.bind_tensors(self.variant, self.arguments)


Tensors = tuple[Tensor, *tuple[Tensor | None, ...]]


class Call(NamedTuple):
    """A launch as Triton takes it. options: constants, which are a kernel's last parameters, num_warps, num_stages."""

    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def strided(tensors: Sequence[Tensor]) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Tensors as kernels take those of any strides."""
    return [(tensor, tensor.stride()) for tensor in tensors]


class DirectLaunch:
    """Launches of a `triton.jit` kernel by the layers of a step, alike but for where their tensors lie: Triton compiles
    for the first and launches it, and the driver launches the others. Who calls it makes the device the current one.

    prepare: tensors and numbers -> the call, with the tensors in their order, None among them left as they are. Beside
    numbers it reads types and strides of tensors, and no sizes.
    """

    def __init__(self, kernel: Any, prepare: Callable[..., Call]) -> None:
        self._kernel, self._prepare = kernel, prepare
        self._kept: dict[Hashable, Callable[..., None]] = {}

    def __call__(self, tensors: Tensors, *numbers: Hashable) -> None:
        """Launch. What was kept is a thread's own, because it has one place for its parameters."""
        looks = [each if each is None else (each.dtype, each.stride(), each.data_ptr() % 16) for each in tensors]
        key = (get_ident(), tensors[0].device, numbers, *looks)
        launch = self._kept.get(key)
        if launch is None:
            self._first(key, tensors, numbers)
        else:
            launch(*[each.data_ptr() for each in tensors if each is not None])

    def _first(self, key: Hashable, tensors: Tensors, numbers: Sequence[Hashable]) -> None:
        call = self._prepare(tensors, *numbers)
        compiled = self._kernel[call.grid](*call.arguments, **call.options)
        if compiled is None:  # the interpreter compiles nothing
            return
        x, y, z = (*call.grid, 1, 1)[:3]
        launch = bind_tensors(compiled, tensors[0].device, (x, y, z), call.arguments)
        if launch is not None:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[key] = launch
