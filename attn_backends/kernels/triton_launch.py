"""Launching small Triton kernels at little more than the cost of the launch itself.

Before each launch Triton looks at every argument for what its compiler could use, such as a pointer's alignment, which
takes several times as long as the launch. An `unspecialized` kernel uses none of it and is the same for all arguments
of the same types, so that what was compiled first is launched directly ever after. What is launched with the same
arguments again and again, but for a few, is bound to them once (`cuda_launch`).

Of what stands in a tuple Triton uses all, whatever it is told. So numbers are `opaque` there, and the alignment of
pointers belongs to the variant of a `Launch`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from inspect import signature
from typing import Any, NamedTuple, TypeVar

import torch
import triton

from attn_backends.kernels.cuda_launch import bind_launch


def unspecialized(kernel: Callable[..., Any]) -> Any:
    """`triton.jit` that compiles for types and constants alone."""
    parameters = signature(kernel).parameters.values()
    names = [each.name for each in parameters if "constexpr" not in str(each.annotation)]
    return triton.jit(kernel, do_not_specialize=names)


Numbers = TypeVar("Numbers", bound=tuple[int, ...])


def opaque(numbers: Numbers) -> Numbers:
    """A named tuple of numbers of less than 30 bits as others, of which none is 1 or a multiple of 16; kernels read
    `triton_plan.number` of each.
    """
    make: Callable[..., Numbers] = type(numbers)
    return make(*(2 * each + 3 for each in numbers))


class Launch:
    """Launches of an `unspecialized` kernel on one device in one grid, on the current stream. Who calls it makes the
    device the current one; what was bound does so itself.
    """

    def __init__(self, kernel: Any, device: torch.device, grid: tuple[int, int, int], num_warps: int = 4) -> None:
        self.kernel, self._device, self._grid, self._num_warps = kernel, device, grid, num_warps
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, variant: Hashable, *arguments: Any) -> None:
        """Launch. variant: what compilation depends on: types, which arguments are None, and constants, which are the
        last arguments. Integers must fit 32 bits.
        """
        compiled = self._compiled.get(variant)
        if compiled is None:
            self.compile(variant, *arguments)
        else:
            compiled[self._grid](*arguments)

    def compile(self, variant: Hashable, *arguments: Any) -> None:
        """The first launch of a variant, which compiles it."""
        with torch.cuda.device(self._device if self._device.type == "cuda" else -1):
            compiled = self.kernel[self._grid](*arguments, num_warps=self._num_warps)
        if compiled is not None:  # the interpreter compiles nothing
            self._compiled[variant] = compiled

    def bind(self, variant: Hashable, fixed: Sequence[Any]) -> Callable[..., None] | None:
        """What launches a variant that was compiled, given the arguments before the fixed ones (`bind_launch`); None of
        any other.
        """
        compiled = self._compiled.get(variant)
        return None if compiled is None else bind_launch(compiled, self._device, self._grid, fixed)


class Prepared(NamedTuple):
    """A launch with its arguments."""

    launch: Launch
    variant: Hashable
    arguments: tuple[Any, ...]

    def __call__(self) -> None:
        """Launch."""
        self.launch(self.variant, *self.arguments)

    def bind(self) -> Callable[[], None] | None:
        """What repeats it, once it was launched, on tensors that the caller keeps; None on the interpreter."""
        return self.launch.bind(self.variant, self.arguments)
