"""Launching small Triton kernels at little more than the cost of the launch itself.

Before each launch Triton looks at every argument for what its compiler could use, such as a pointer's alignment, which
takes several times as long as the launch. An `unspecialized` kernel uses none of it and is the same for all arguments
of the same types, so that what was compiled first is launched directly ever after.

Of what stands in a tuple Triton uses all, whatever it is told. So numbers are `opaque` there, and the alignment of
pointers belongs to the variant of a `Launch`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from inspect import signature
from typing import Any, TypeVar

import torch
import triton

_KNOWN = triton.__version__.startswith("3.6.")  # whose launchers take the arguments that `_direct` gives them


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
    """Launches of an `unspecialized` kernel on one device in one grid, on the current stream.

    direct: by variant, launches of what was compiled before; they take the address of a tensor for the tensor.
    """

    def __init__(self, kernel: Any, device: torch.device, grid: tuple[int, int, int], num_warps: int = 4) -> None:
        self.kernel, self._device, self._grid, self._num_warps = kernel, device, grid, num_warps
        self.direct: dict[Hashable, Callable[..., None]] = {}

    def __call__(self, variant: Hashable, *arguments: Any) -> None:
        """Launch. variant: what compilation depends on: types, which arguments are None, and constants, which are the
        last arguments. Integers must fit 32 bits.
        """
        direct = self.direct.get(variant)
        if direct is None:
            self.compile(variant, *arguments)
        else:
            direct(*arguments)

    def compile(self, variant: Hashable, *arguments: Any) -> None:
        """The first launch of a variant, which compiles it."""
        with torch.cuda.device(self._device if self._device.type == "cuda" else -1):
            compiled = self.kernel[self._grid](*arguments, num_warps=self._num_warps)
        if compiled is not None:  # the interpreter compiles nothing
            self.direct[variant] = _direct(compiled, self._device, self._grid)


def _direct(compiled: Any, device: torch.device, grid: tuple[int, int, int]) -> Callable[..., None]:
    """What launches a compiled kernel on a device."""
    driver, launcher = triton.runtime.driver.active, compiled.run
    get_device, get_stream, index = driver.get_current_device, driver.get_current_stream, device.index
    launch, options, is_alone = compiled[grid], None, torch.cuda.device_count() == 1
    if _KNOWN and not launcher.global_scratch_size and not launcher.profile_scratch_size:
        how, launch = (launcher.launch_cooperative_grid, launcher.launch_pdl), launcher.launch
        options = (compiled.function, *how, None, None, compiled.packed_metadata, None, None, None)

    def direct(*arguments: Any) -> None:
        if not is_alone and get_device() != index:
            with torch.cuda.device(index):
                direct(*arguments)
        elif options is None:
            launch(*arguments)
        else:
            launch(*grid, get_stream(index), *options, *arguments)

    return direct
