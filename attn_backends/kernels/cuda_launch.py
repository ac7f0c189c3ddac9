"""Launches of a compiled Triton kernel by the CUDA driver itself, with parameters that were written down beforehand.

Triton parses every argument of every launch, and with forty of them that takes about as long as the launch. Here they
stand in memory as the kernel reads them, which the driver copies whole, and a launch writes the few that move. The
driver says where the parameters of a kernel lie (`cuFuncGetParamInfo`, CUDA 12.4). They must be those of its signature,
and after them at most two pointers to scratch memory, which Triton 3.6 adds and a kernel that needs none never reads;
else Triton launches it. Triton's launch hooks see nothing of such a launch; CUPTI, and so torch's profiler, does.
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

_CODES = {"i32": "i", "i64": "q", "fp32": "f"}  # of a parameter, as `struct` calls it; of a pointer "Q"
_AT, _OF_SIZE, _END = 1, 2, 0  # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END
_NO_CONTEXT = 201  # what the driver answers a thread that has not called CUDA's runtime yet

Parameter = tuple[float, str]
"""A value, an address or a number, and the code of its type; "?" of one that is not known."""


def bind_launch(
    compiled: Any, device: torch.device, grid: tuple[int, int, int], fixed: Sequence[Any]
) -> Callable[..., None]:
    """A function that launches a kernel on the current stream of its device, in one thread at a time. It takes the
    arguments before the fixed ones, addresses of tensors.

    compiled: what the kernel's first launch returned. fixed: the last arguments of every launch, which are read now, of
    tensors the addresses; the caller keeps them. Raises OverflowError for an integer that its parameter can't hold.
    """
    types = list(compiled.src.signature.values())
    num_moving = len(types) - len(fixed)
    moving = list(_flattened(types[:num_moving], [0] * num_moving))
    assert len(moving) == num_moving, "a constant is among the arguments that move"
    parameters = [*moving, *_flattened(types[num_moving:], fixed)]
    launch = _by_driver(compiled, device, grid, parameters, range(num_moving))
    if launch is None:
        by_triton = compiled[grid]

        def launch(*moving: int) -> None:
            by_triton(*moving, *fixed)

    return launch if torch.cuda.device_count() == 1 else _guarded(launch, device)


def bind_tensors(
    compiled: Any, device: torch.device, grid: tuple[int, int, int], arguments: Sequence[Any]
) -> Callable[..., None] | None:
    """The same for launches whose tensors move, wherever they stand among the arguments: it takes their addresses, in
    that order. None where Triton must launch. arguments: of one launch, constants left out, which are the last; what is
    no tensor, all others have too.
    """
    types = list(compiled.src.signature.values())
    constants = [None] * (len(types) - len(arguments))
    parameters = list(_flattened(types, (*arguments, *constants)))
    places = [place for place, (_, code) in enumerate(parameters) if code == "Q"]
    launch = _by_driver(compiled, device, grid, parameters, places)
    return launch if launch is None or torch.cuda.device_count() == 1 else _guarded(launch, device)


def bind_arguments(
    compiled: Any, device: torch.device, grid: tuple[int, int, int], arguments: Sequence[Any]
) -> Callable[..., None]:
    """The same for launches all of whose arguments move: it takes them as Triton does. arguments: of one launch."""
    types = list(compiled.src.signature.values())
    parameters = list(_flattened(types, arguments))
    launch = _by_driver(compiled, device, grid, parameters, range(len(parameters)))
    if launch is None:
        return compiled[grid]
    start, read = launch if torch.cuda.device_count() == 1 else _guarded(launch, device), _reader(types)
    return lambda *given: start(*read(given))


def _reader(types: Sequence[Any]) -> Callable[[Sequence[Any]], list[Any]]:
    """What lists the parameters of a launch as `_flattened` does, at a third of its cost."""
    kinds = [
        (place, None if not isinstance(type_, tuple) else all(each in _CODES for each in type_) or _reader(type_))
        for place, type_ in enumerate(types)
        if type_ != "constexpr"
    ]

    def read(given: Sequence[Any]) -> list[Any]:
        values = []
        for place, kind in kinds:
            value = given[place]
            if kind is None:
                values.append(value.data_ptr() if isinstance(value, Tensor) else value)
            else:
                values += value if kind is True else kind(value)
        return values

    return read


def _by_driver(
    compiled: Any,
    device: torch.device,
    grid: tuple[int, int, int],
    parameters: Sequence[Parameter],
    places: Sequence[int],
) -> Callable[..., None] | None:
    """Launches with these parameters, of which those at some places move; None where they are not as the driver says,
    or the kernel needs more than parameters.
    """
    codes = "".join(code for _, code in parameters)
    found = _parameter_places(compiled.function, device)
    num_scratch = next((n for n in range(3) if _places(codes + n * "Q") == found), None)
    if not _is_plain(compiled.metadata) or "?" in codes or num_scratch is None:
        return None
    values = [*(_fitting(value, code, compiled.name) for value, code in parameters), *num_scratch * [0]]
    layout = struct.Struct(codes + num_scratch * "Q")
    memory = ctypes.create_string_buffer(8 + layout.size)  # their size, then the parameters
    struct.pack_into("N", memory, 0, layout.size)
    layout.pack_into(memory, 8, *values)
    write = _writer(layout, values, places)
    extra = (ctypes.c_void_p * 5)(_AT, ctypes.addressof(memory) + 8, _OF_SIZE, ctypes.addressof(memory), _END)
    block, stream = (32 * compiled.metadata.num_warps, 1, 1), ctypes.c_void_p()
    given = (ctypes.c_void_p(compiled.function), *grid, *block, compiled.metadata.shared, stream, None, extra)
    start, index = _driver().cuLaunchKernel, device.index
    get_stream = triton.runtime.driver.active.get_current_stream

    def launch(*moving: int) -> None:
        write(memory, 8, *moving)
        stream.value = get_stream(index)
        error = start(*given)
        if error == _NO_CONTEXT:
            _make_context(device)
            error = start(*given)
        if error:
            raise RuntimeError(f"the CUDA driver did not launch {compiled.name} in a grid of {grid}: {_reason(error)}")

    return launch


def _writer(layout: struct.Struct, values: list[float], places: Sequence[int]) -> Callable[..., None]:
    """What writes the parameters that move, given memory, an offset and them."""
    if list(places) == list(range(len(places))):
        return struct.Struct(layout.format[: len(places)]).pack_into

    def write(memory: Any, offset: int, *moving: int) -> None:
        for place, value in zip(places, moving, strict=True):
            values[place] = value
        layout.pack_into(memory, offset, *values)

    return write


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
            yield value, "Q" if type_.startswith("*") else _CODES.get(type_, "?")


def _fitting(value: float, code: str, kernel: str) -> float:
    if code == "i" and not -(2**31) <= value < 2**31:
        raise OverflowError(f"{kernel} was compiled for integers of 32 bits, and one is {value}")
    return value


def _places(codes: str) -> tuple[tuple[int, int], ...]:
    """Where parameters of these types lie: the offset of each, and its bytes."""
    sizes = [struct.calcsize(code) for code in codes]
    return tuple((struct.calcsize(codes[: i + 1]) - size, size) for i, size in enumerate(sizes))


def _is_plain(metadata: Any) -> bool:
    """Whether a kernel takes nothing but its parameters and a stream, as far as this is known."""
    needs = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    return metadata.num_ctas == 1 and all(getattr(metadata, name, None) in (0, False) for name in needs)


@cache
def _parameter_places(function: int, device: torch.device) -> tuple[tuple[int, int], ...]:
    """Offset and bytes of each parameter; none where no driver tells: one before CUDA 12.4, or another vendor's."""
    try:
        ask = _driver().cuFuncGetParamInfo
    except (OSError, AttributeError):
        return ()
    offset, size, places = ctypes.c_size_t(), ctypes.c_size_t(), list[tuple[int, int]]()
    place = ctypes.c_void_p(function), ctypes.c_size_t(0), ctypes.byref(offset), ctypes.byref(size)
    if ask(*place) == _NO_CONTEXT:
        _make_context(device)
    while not ask(*place):  # until there is no such parameter
        places.append((offset.value, size.value))
        place[1].value += 1
    return tuple(places)


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
