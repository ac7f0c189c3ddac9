"""Launches of a compiled Triton kernel by the CUDA driver itself, with parameters that were written down beforehand.

Triton parses every argument of every launch, and with forty of them that takes about as long as the launch. Here they
stand in memory as `cuLaunchKernelEx` takes them, and a launch writes the few that move. The driver says how large the
parameters of a kernel are (`cuFuncGetParamInfo`, CUDA 12.4). They must be those of its signature, and behind them at
most two pointers to scratch memory, which Triton 3.6 adds and a kernel that needs none never reads; else Triton
launches it. Triton's launch hooks see nothing of such a launch; CUPTI, and so torch's profiler, does.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

_NUM_BYTES = {"i32": 4, "i64": 8}  # of a parameter; of a pointer 8
_NO_CONTEXT = 201  # what the driver answers a thread that has not called CUDA's runtime yet

Parameter = tuple[int, int]
"""A value, an address or an integer, and its bytes."""


class _Config(ctypes.Structure):
    """`CUlaunchConfig` of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("num_shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


def bind_launch(
    compiled: Any, device: torch.device, grid: tuple[int, int, int], fixed: Sequence[Any]
) -> Callable[..., None]:
    """What launches a kernel on the current stream of its device, in one thread at a time; it takes the arguments
    before the fixed ones, addresses of tensors.

    compiled: what the kernel's first launch returned. fixed: the last arguments of every launch, which are read now, of
    tensors the addresses; the caller keeps them. Raises OverflowError for an integer that its parameter can't hold.
    """
    types = list(compiled.src.signature.values())
    num_moving = len(types) - len(fixed)
    moving = list(_flattened(types[:num_moving], [0] * num_moving))
    assert len(moving) == num_moving, "a constant is among the arguments that move"
    parameters = [*moving, *_flattened(types[num_moving:], fixed)]
    found = _parameter_sizes(compiled.function, device)
    own, scratch = found[: len(parameters)], found[len(parameters) :]
    if _is_plain(compiled.metadata) and own == tuple(size for _, size in parameters) and scratch in ((), (8,), (8, 8)):
        values = [_fitting(value, size, compiled.name) for value, size in parameters]
        launch = _by_driver(compiled, device, grid, [*values, *(0 for _ in scratch)], num_moving)
    else:
        by_triton = compiled[grid]

        def launch(*moving: int) -> None:
            by_triton(*moving, *fixed)

    return launch if torch.cuda.device_count() == 1 else _guarded(launch, device)


def _by_driver(
    compiled: Any, device: torch.device, grid: tuple[int, int, int], values: Sequence[int], num_moving: int
) -> Callable[..., None]:
    """Launches with these values, of which the first move."""
    slots = (ctypes.c_uint64 * len(values))(*values)
    places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(slots) + 8 * i for i in range(len(values))))
    threads = 32 * compiled.metadata.num_warps
    config = _Config(grid=grid, block=(threads, 1, 1), num_shared_bytes=compiled.metadata.shared)
    given = (ctypes.byref(config), ctypes.c_void_p(compiled.function), places, None)
    start, index = _driver().cuLaunchKernelEx, device.index
    get_stream, write = triton.runtime.driver.active.get_current_stream, struct.Struct(f"{num_moving}Q").pack_into

    def launch(*moving: int) -> None:
        write(slots, 0, *moving)
        config.stream = get_stream(index)
        error = start(*given)
        if error == _NO_CONTEXT:
            _make_context(device)
            error = start(*given)
        if error:
            raise RuntimeError(f"the CUDA driver did not launch {compiled.name} in a grid of {grid}: {_reason(error)}")

    return launch


def _guarded(launch: Callable[..., None], device: torch.device) -> Callable[..., None]:
    """The same where another device may be the current one."""
    get_device = triton.runtime.driver.active.get_current_device

    def guarded(*moving: int) -> None:
        if get_device() == device.index:
            launch(*moving)
        else:
            with torch.cuda.device(device):
                launch(*moving)

    return guarded


def _flattened(types: Any, arguments: Any) -> Iterator[Parameter]:
    """Parameters of a kernel, one after the other: what stands in tuples too, and no constants."""
    for type_, argument in zip(types, arguments, strict=True):
        if isinstance(type_, tuple):
            yield from _flattened(type_, argument)
        elif type_ != "constexpr":
            value = argument.data_ptr() if isinstance(argument, Tensor) else argument
            yield value, 8 if type_.startswith("*") else _NUM_BYTES.get(type_, 0)


def _fitting(value: int, num_bytes: int, kernel: str) -> int:
    """A value as the eight bytes of its slot, of which an integer of four takes the first."""
    if num_bytes == 4 and not -(2**31) <= value < 2**31:
        raise OverflowError(f"{kernel} was compiled for integers of 32 bits, and one is {value}")
    return value % 2**64


def _is_plain(metadata: Any) -> bool:
    """Whether a kernel takes nothing but its parameters and a stream, as far as this is known."""
    needs = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    return metadata.num_ctas == 1 and all(getattr(metadata, name, None) in (0, False) for name in needs)


@cache
def _parameter_sizes(function: int, device: torch.device) -> tuple[int, ...]:
    """Bytes of each parameter; none where no driver tells: one before CUDA 12.4, or another vendor's."""
    try:
        ask = _driver().cuFuncGetParamInfo
    except (OSError, AttributeError):
        return ()
    offset, size, sizes = ctypes.c_size_t(), ctypes.c_size_t(), list[int]()
    place = ctypes.c_void_p(function), ctypes.c_size_t(0), ctypes.byref(offset), ctypes.byref(size)
    if ask(*place) == _NO_CONTEXT:
        _make_context(device)
    while not ask(*place):  # until there is no such parameter
        sizes.append(size.value)
        place[1].value += 1
    return tuple(sizes)


def _make_context(device: torch.device) -> None:
    """Any call of CUDA's runtime gives its thread the device's context."""
    torch.cuda.mem_get_info(device)


def _reason(error: int) -> str:
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(error, ctypes.byref(name))
    return f"{(name.value or b'error').decode()} ({error}), which may be of a kernel before it"


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
