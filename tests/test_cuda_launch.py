"""Launches by the CUDA driver: the parameters that it would be given, by a driver that writes them down."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from attn_backends.kernels import cuda_launch

DEVICE = torch.device("cuda", 0)
GRID = (5, 2, 1)
SIGNATURE = {"lens": "*i32", "stride": "i32", "mask": "constexpr", "into": "*i64", "sizes": ("i32", ("i64", "*i8"))}
PLACES = [(0, 8), (8, 4), (16, 8), (24, 4), (32, 8), (40, 8)]  # offset and bytes of the signature's parameters
SCRATCH = [(48, 8), (56, 8)]
PLAIN = {
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
    "launch_cooperative_grid": False,
    "launch_pdl": False,
}
FIXED = (None, 4000, (-7, (2**40, 5000)))  # from `mask` on


class Driver:
    """libcuda as far as it is called; keeps what was launched. places: of each parameter that a kernel has."""

    def __init__(self, places: list[tuple[int, int]]) -> None:
        self.places, self.errors, self.has_context, self.launched = places, [], True, []

    def cuFuncGetParamInfo(self, function, index, offset, size) -> int:
        assert function.value == 77
        if not self.has_context:
            return 201
        if index.value >= len(self.places):
            return 1
        offset._obj.value, size._obj.value = self.places[index.value]
        return 0

    def cuLaunchKernel(self, function, *sizes_stream_and_parameters) -> int:
        *sizes, stream, pointers, extra = sizes_stream_and_parameters
        assert (function.value, pointers, len(sizes)) == (77, None, 7)
        assert [extra[0], extra[2], extra[4]] == [1, 2, None]
        assert ctypes.c_size_t.from_address(extra[3]).value == sum(self.places[-1])
        types = {4: ctypes.c_int32, 8: ctypes.c_int64}
        values = [types[size].from_address(extra[1] + offset).value for offset, size in self.places]
        self.launched.append((sizes, stream.value, values))
        return self.errors.pop(0) if self.errors else 0

    def cuGetErrorName(self, error, name) -> int:
        name._obj.value = b"CUDA_ERROR_ILLEGAL_ADDRESS"
        return 0


class Kernel:
    """A compiled kernel; keeps what Triton launched itself."""

    def __init__(self, **metadata: object) -> None:
        self.src = SimpleNamespace(signature=SIGNATURE)
        given = {"num_ctas": 1, "num_warps": 4, "shared": 512, **PLAIN, **metadata}
        self.metadata = SimpleNamespace(**{name: value for name, value in given.items() if value is not None})
        self.function, self.name, self.launched = 77, "kernel", []

    def __getitem__(self, grid):
        return lambda *arguments: self.launched.append((grid, arguments))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """One device with a stream 9, and its driver."""
    found = SimpleNamespace(driver=Driver(PLACES + SCRATCH), stream=9, device=0)
    active = SimpleNamespace(get_current_stream=lambda index: found.stream, get_current_device=lambda: found.device)
    monkeypatch.setattr(cuda_launch.triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(cuda_launch, "_driver", lambda: found.driver)
    cuda_launch._parameter_places.cache_clear()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return found


def test_a_launch_gives_the_driver_every_parameter(machine: SimpleNamespace) -> None:
    """Tuples are flat, constants none, scratch is null, and only what moves is written again."""
    launch = cuda_launch.bind_launch(Kernel(), DEVICE, GRID, FIXED)
    launch(1000, 3)
    machine.stream = 0
    launch(2**47 + 8, 4)
    rest = [4000, -7, 2**40, 5000, 0, 0]
    assert machine.driver.launched == [
        ([*GRID, 128, 1, 1, 512], 9, [1000, 3, *rest]),
        ([*GRID, 128, 1, 1, 512], None, [2**47 + 8, 4, *rest]),
    ]


def test_a_launch_on_other_arguments_gives_the_driver_all_of_them(machine: SimpleNamespace) -> None:
    """Of tensors their addresses; the same kernel is launched by Triton where the driver tells no parameters."""
    kernel, (lens, into) = Kernel(), torch.zeros(2, 4, dtype=torch.int32)
    kernel.src.signature = {**SIGNATURE, "sizes": ("i32", ("i64", "*i8")), "counts": ("i32", "i32")}
    machine.driver.places = [*PLACES, (48, 4), (52, 4)]
    calls = [(lens, 3, None, into, (-7, (2**40, lens)), (1, 2)), (into, 4, None, lens, (8, (0, into)), (5, 6))]
    launch = cuda_launch.bind_arguments(kernel, DEVICE, GRID, calls[0])
    for call in calls:
        launch(*call)
    a, b = lens.data_ptr(), into.data_ptr()
    assert [values for *_, values in machine.driver.launched] == [
        [a, 3, b, -7, 2**40, a, 1, 2],
        [b, 4, a, 8, 0, b, 5, 6],
    ]
    machine.driver = Driver([])
    cuda_launch._parameter_places.cache_clear()
    cuda_launch.bind_arguments(kernel, DEVICE, GRID, calls[0])(*calls[1])
    assert kernel.launched == [(GRID, calls[1])]


OTHER_PLACES = {
    "none are told": [],
    "fewer": PLACES[:-1],
    "a smaller one": [*PLACES[:-1], (40, 4), *SCRATCH],
    "an integer behind": [*PLACES, (48, 4)],
    "three scratch pointers": [*PLACES, *SCRATCH, (64, 8)],
    "packed more closely": [(0, 8), (8, 4), (12, 8), (20, 4), (24, 8), (32, 8)],
}


@pytest.mark.parametrize("places", OTHER_PLACES.values(), ids=OTHER_PLACES)
def test_a_kernel_of_other_parameters_is_launched_by_triton(
    machine: SimpleNamespace, places: list[tuple[int, int]]
) -> None:
    machine.driver, kernel = Driver(places), Kernel()
    cuda_launch.bind_launch(kernel, DEVICE, GRID, FIXED)(1000, 3)
    assert (kernel.launched, machine.driver.launched) == ([(GRID, (1000, 3, *FIXED))], [])


@pytest.mark.parametrize("needs", [{"num_ctas": 2}, *({name: 1} for name in PLAIN), *({name: None} for name in PLAIN)])
def test_a_kernel_that_needs_more_is_launched_by_triton(machine: SimpleNamespace, needs: dict[str, object]) -> None:
    """None: a Triton that calls it otherwise."""
    kernel = Kernel(**needs)
    cuda_launch.bind_launch(kernel, DEVICE, GRID, FIXED)(1000, 3)
    assert (kernel.launched, machine.driver.launched) == ([(GRID, (1000, 3, *FIXED))], [])


def test_a_type_that_is_not_known_leaves_launches_to_triton(machine: SimpleNamespace) -> None:
    """Though the driver says that it takes as many bytes as a truth value, which it would be written as."""
    machine.driver, kernel = Driver([*PLACES[:2], (12, 1), (16, 4), (24, 8), (32, 8)]), Kernel()
    kernel.src.signature = {**SIGNATURE, "into": "i8"}
    cuda_launch.bind_launch(kernel, DEVICE, GRID, FIXED)(1000, 3)
    assert (kernel.launched, machine.driver.launched) == ([(GRID, (1000, 3, *FIXED))], [])


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1])
def test_an_integer_that_is_too_large_is_refused(machine: SimpleNamespace, number: int) -> None:
    with pytest.raises(OverflowError, match=f"integers of 32 bits, and one is {number}"):
        cuda_launch.bind_launch(Kernel(), DEVICE, GRID, (None, 4000, (number, (0, 5000))))


def test_a_driver_that_can_not_tell_parameters_leaves_launches_to_triton(machine: SimpleNamespace) -> None:
    machine.driver, kernel = SimpleNamespace(), Kernel()
    cuda_launch.bind_launch(kernel, DEVICE, GRID, FIXED)(1000, 3)
    assert kernel.launched == [(GRID, (1000, 3, *FIXED))]


def test_an_error_of_the_driver_is_raised(machine: SimpleNamespace) -> None:
    machine.driver.errors = [700]
    launch = cuda_launch.bind_launch(Kernel(), DEVICE, GRID, FIXED)
    with pytest.raises(RuntimeError, match=r"kernel in a grid of \(5, 2, 1\): CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"):
        launch(1000, 3)


def test_a_new_thread_gets_the_context_of_the_device(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def mem_get_info(device: torch.device) -> None:
        asked.append(device)
        machine.driver.has_context = True

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    machine.driver.errors = [201]
    launch = cuda_launch.bind_launch(Kernel(), DEVICE, GRID, FIXED)
    launch(1000, 3)
    assert asked == [DEVICE]
    assert machine.driver.launched[0] == machine.driver.launched[1]
    machine.driver.errors = [201, 201]
    with pytest.raises(RuntimeError, match="201"):
        launch(1000, 3)
    cuda_launch._parameter_places.cache_clear()
    machine.driver.has_context = False
    cuda_launch.bind_launch(Kernel(), DEVICE, GRID, FIXED)(1000, 3)
    assert len(machine.driver.launched) == 5


def test_a_launch_makes_its_device_the_current_one(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        entered.append((device, len(machine.driver.launched)))
        yield

    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    launch = cuda_launch.bind_launch(Kernel(), DEVICE, GRID, FIXED)
    launch(1000, 3)
    machine.device = 1
    launch(1000, 3)
    assert entered == [(DEVICE, 1)]
    assert len(machine.driver.launched) == 2


COMPILED = """
import re, struct
from attn_backends.kernels import cuda_launch
from attn_backends.kernels.triton_launch import Launch
from tests.triton_compile import PLANNERS, for_hopper

for_hopper(assemble=False)
bits = dict(u64=8, b64=8, u32=4, b32=4)

def compare(launch, variant, *arguments):
    compiled = launch.kernel.warmup(*arguments, grid=(1, 1, 1), num_warps=4)
    entry = compiled.asm["ptx"].split(".entry")[1].split(")")[0]
    found = [bits[each] for each in re.findall(r"\\.param \\.(\\w+)", entry)]
    codes = [code for _, code in cuda_launch._flattened(compiled.src.signature.values(), arguments)]
    ours = [struct.calcsize(code) for code in codes]
    assert found[:len(ours)] == ours and set(found[len(ours):]) <= {8}, (found, ours)
    assert cuda_launch._is_plain(compiled.metadata)
    print(len(found) - len(ours))

Launch.compile = Launch.__call__ = compare
for launch in PLANNERS.values():
    launch()
"""


def test_a_compiled_kernel_has_the_parameters_that_its_signature_says(pytestconfig: pytest.Config) -> None:
    """As PTX declares them, of the kernels that are launched so; scratch pointers behind."""
    cache = str(pytestconfig.cache.mkdir("triton"))
    environment = {"PATH": "", "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["2"] * 29, "scratch pointers, of each launch"
