"""Launches of all layers alike: Triton looks at the first, the driver launches the others on their own tensors."""

from __future__ import annotations

import struct
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.kernels import triton_launch
from attn_backends.kernels.triton_launch import Call, DirectLaunch
from tests.test_cuda_launch import Kernel, machine

__all__ = ["machine"]  # a fixture
SIGNATURE = {"q": ("*bf16", ("i32", "constexpr")), "lens": "*i64", "scale": "fp32", "CAUSAL": "constexpr"}


class Compiling:
    """A `triton.jit` kernel, which keeps what Triton was given. compiled: what it compiles, None in the interpreter."""

    def __init__(self, compiled: Kernel | None) -> None:
        self.compiled, self.given = compiled, []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: object, **options: object) -> Kernel | None:
            self.given.append((grid, arguments, options))
            if self.compiled is not None:
                lens = "constexpr" if arguments[1] is None else "*i64"
                self.compiled.src.signature = {**SIGNATURE, "lens": lens}
            return self.compiled

        return launch


def prepare(tensors: tuple[Tensor, Tensor], num_rows: int, scale: float) -> Call:
    q, lens = tensors
    return Call((num_rows, 2), ((q, q.stride()), lens, scale), {"CAUSAL": True, "num_warps": 4})


@pytest.fixture
def kernel(machine: SimpleNamespace) -> Compiling:
    """Its parameters are a pointer, a stride, a pointer, and a float."""
    machine.driver.places = [(0, 8), (8, 4), (16, 8), (24, 4)]
    return Compiling(Kernel())


def tensors() -> tuple[Tensor, Tensor]:
    return torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)


def test_the_driver_launches_what_triton_launched_before(machine: SimpleNamespace, kernel: Compiling) -> None:
    launch, (first, second) = DirectLaunch(kernel, prepare), (tensors(), tensors())
    launch(first, 4, 0.5)
    assert [(grid, options) for grid, _, options in kernel.given] == [((4, 2), {"CAUSAL": True, "num_warps": 4})]
    assert machine.driver.launched == []
    machine.stream = 5
    launch(second, 4, 0.5)
    (scale,) = struct.unpack("i", struct.pack("f", 0.5))
    addresses = [each.data_ptr() for each in second]
    assert machine.driver.launched == [([4, 2, 1, 128, 1, 1, 512], 5, [addresses[0], 8, addresses[1], scale])]
    assert len(kernel.given) == 1


OTHERS = {
    "another number": lambda q, lens: ((q, lens), 3, 0.5),
    "another scale": lambda q, lens: ((q, lens), 4, 0.25),
    "another type": lambda q, lens: ((q.half(), lens), 4, 0.5),
    "another stride": lambda q, lens: ((q.repeat(1, 2)[:, :8], lens), 4, 0.5),
    "another alignment": lambda q, lens: ((torch.zeros(33, dtype=torch.bfloat16)[1:].view(4, 8), lens), 4, 0.5),
    "no second tensor": lambda q, lens: ((q, None), 4, 0.5),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_triton_looks_at_every_launch_that_differs(machine: SimpleNamespace, kernel: Compiling, other: Any) -> None:
    """What it compiles for may differ: also the place of a tensor to 16 bytes."""
    launch = DirectLaunch(kernel, prepare)
    launch(tensors(), 4, 0.5)
    launch(*other(*tensors()))
    assert (len(kernel.given), machine.driver.launched) == (2, [])


def test_a_launch_belongs_to_its_thread(
    machine: SimpleNamespace, kernel: Compiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver reads parameters from one place while another thread may write there."""
    launch = DirectLaunch(kernel, prepare)
    launch(tensors(), 4, 0.5)
    monkeypatch.setattr(triton_launch, "get_ident", lambda: -1)
    launch(tensors(), 4, 0.5)
    assert (len(kernel.given), machine.driver.launched) == (2, [])


@pytest.mark.parametrize("places", [[], [(0, 8), (8, 8), (16, 8), (24, 4)]], ids=["not told", "others"])
def test_triton_launches_where_the_driver_can_not(
    machine: SimpleNamespace, kernel: Compiling, places: list[tuple[int, int]]
) -> None:
    machine.driver.places = places
    launch = DirectLaunch(kernel, prepare)
    for _ in range(3):
        launch(tensors(), 4, 0.5)
    assert (len(kernel.given), machine.driver.launched) == (3, [])


def test_the_interpreter_runs_every_launch() -> None:
    kernel = Compiling(None)
    launch = DirectLaunch(kernel, prepare)
    for _ in range(3):
        launch(tensors(), 4, 0.5)
    assert len(kernel.given) == 3


def test_few_launches_are_kept(machine: SimpleNamespace, kernel: Compiling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of ever other sizes take no memory for ever."""
    monkeypatch.setattr(triton_launch, "MOST_KEPT", 3)
    launch = DirectLaunch(kernel, prepare)
    for num_rows in range(10):
        launch(tensors(), num_rows, 0.5)
        assert len(launch._kept) <= 3
    launch(tensors(), 9, 0.5)
    assert len(machine.driver.launched) == 1


COMPILED = r"""
import re, struct
from attn_backends.kernels import cuda_launch, triton_ring
from attn_backends.kernels.triton_launch import DirectLaunch
from tests.triton_compile import LAUNCHES, for_hopper

for_hopper(assemble=False)
bits = dict(u64=8, b64=8, u32=4, b32=4, f32=4)
codes, done = [], set()

def by_driver(compiled, device, grid, parameters, places):
    codes[:] = [code for _, code in parameters]
    assert [codes[place] for place in places] == len(places) * ["Q"] and codes.count("Q") == len(places)

def compare(launch, tensors, *numbers):
    if launch in done:
        return
    done.add(launch)
    call = launch._prepare(tensors, *numbers)
    compiled = launch._kernel.warmup(*call.arguments, grid=(1, 1, 1), **call.options)
    cuda_launch.bind_tensors(compiled, None, call.grid, call.arguments)
    found = re.findall(r"\.param \.(\w+)", compiled.asm["ptx"].split(".entry")[1].split(")")[0])
    ours = [struct.calcsize(code) for code in codes]
    sizes = [bits[each] for each in found]
    assert sizes[:len(ours)] == ours and set(sizes[len(ours):]) <= {8}, (found, codes)
    assert codes.count("Q") == sum(each is not None for each in tensors), codes
    assert cuda_launch._is_plain(compiled.metadata)
    print(len(sizes) - len(ours))

cuda_launch._by_driver, DirectLaunch.__call__ = by_driver, compare
triton_ring.store_ring = lambda *given: None  # which Triton launches
for name in ("keys", "latents", "store", "trees"):
    done.clear()
    LAUNCHES[name]()
"""


def test_compiled_kernels_have_the_parameters_that_the_driver_is_given(pytestconfig: pytest.Config) -> None:
    """As PTX declares them: numbers in tuples, floats, and pointers wherever they stand; scratch pointers behind."""
    cache = str(pytestconfig.cache.mkdir("triton"))
    environment = {"PATH": "", "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache, "PYTHONPATH": ":".join(sys.path)}
    script = [sys.executable, "-c", COMPILED]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["2"] * 10, "scratch pointers, of each launch: batches are dealt out and merged"
