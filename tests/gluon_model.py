"""Runs the Gluon kernels' own source on a CPU, on a model of what warp groups, shared memory and barriers do on Hopper.

Tensors are torch's, pointers are offsets into a storage, and each warp group is a thread; one runs at a time. Wherever
a group touches shared memory or a barrier, a seeded draw says who goes on. Copies (`cp.async`) destroy the memory that
they write when they begin, and land in their order when a draw says so, as late as when no group can go on. Products
read their operands when they begin or when they are waited for. A barrier counts arrivals and has a parity.

So it reports: groups that wait for one another for ever, an arrival too many, a read of memory that is not there yet or
that is written anew (NaN), access outside of a tensor, a result that is used before it was waited for.

It does not see: fences, layouts and swizzles, alignment, registers, races between threads of a group (`thread_barrier`
does nothing), launch bounds, rounding of sums, and times.
"""

from __future__ import annotations

import ast
import math
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

KERNELS = Path(__file__).parent.parent / "attn_backends" / "kernels"
MODULES = ("gluon_groups", "gluon_pieces", "gluon_mla", "gluon_sparse", "gluon_prefill_groups", "gluon_prefill")
LAUNCHED = {"gluon_mla": "_attend", "gluon_sparse": "_attend", "gluon_prefill": "_paged_attention"}
_GLUON = "triton.experimental.gluon"


class Deadlock(Exception):
    """No group can go on."""


class _Stopped(BaseException):
    """Another group failed."""


@dataclass(eq=False)
class _Group:
    """until: what it waits for, described by `what`. landing: copies and arrivals under way, in their order. products:
    those that were begun and not waited for.
    """

    name: str
    weight: float
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    until: Callable[[], bool] | None = None
    what: str = ""
    done: bool = False
    landing: deque[Callable[[], None]] = field(default_factory=deque)
    products: list[_Product] = field(default_factory=list)


@dataclass(eq=False)
class _Product:
    """A product under way, which has no value before it was waited for."""

    a: Any
    b: Memory
    acc: Any
    product: Tensor | None = None
    value: Tensor | None = None

    def read(self) -> None:
        """Read the operands, which may be at any time until it is finished."""
        a = self.a.data if isinstance(self.a, Memory) else self.a
        assert a.dtype is self.b.dtype, f"operands of {a.dtype} and {self.b.dtype}"
        self.product = a.float() @ self.b.data.float()

    def finish(self) -> None:
        """Read the operands if that was not done."""
        if self.product is None:
            self.read()
        acc = self.acc.value if isinstance(self.acc, _Product) else self.acc
        self.value = self.product + acc


@dataclass(eq=False)
class _Barrier:
    name: str
    count: int = 0
    pending: int = 0
    phase: int = 0

    def arrive(self, count: int) -> None:
        self.pending -= count
        assert self.pending >= 0, f"an arrival too many at barrier {self.name}, which counts {self.count}"
        if self.pending == 0:
            self.pending, self.phase = self.count, self.phase ^ 1


@dataclass(frozen=True)
class _Barriers:
    all: tuple[_Barrier, ...]

    def index(self, i: Any) -> _Barrier:
        return self.all[int(i)]


@dataclass(frozen=True)
class _Type:
    element_ty: torch.dtype


class Pointer:
    """Addresses of elements of a tensor's storage."""

    def __init__(self, tensor: Tensor, offset: Any = None) -> None:
        self.tensor, self.offset = tensor, torch.tensor(tensor.storage_offset()) if offset is None else offset
        self.dtype = _Type(tensor.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + other)

    def __getitem__(self, places: Any) -> Pointer:
        return Pointer(self.tensor, self.offset[places])

    def to(self, dtype: torch.dtype) -> Pointer:
        """The same addresses of elements of another type."""
        raw = self._flat().view(torch.uint8)
        place = self.offset * self.tensor.itemsize
        assert not (place % dtype.itemsize).any(), f"addresses of {dtype} that are no multiples of its size"
        return Pointer(raw[: len(raw) // dtype.itemsize * dtype.itemsize].view(dtype), place // dtype.itemsize)

    def load(self, mask: Any = None, other: float = 0) -> Tensor:
        """Elements, `other` where masked; those that are not masked must be of the storage."""
        place, live = self._inside(mask)
        flat = self._flat()
        raw = flat.view(torch.uint8) if flat.itemsize == 1 else flat
        found = raw[torch.where(live, place, 0)]
        return torch.where(live, found, torch.tensor(other, dtype=raw.dtype)).view(flat.dtype)

    def store(self, value: Tensor, mask: Any = None) -> None:
        """Write elements that are not masked."""
        place, live = self._inside(mask)
        value = torch.as_tensor(value).expand(place.shape)
        assert value.dtype is self.tensor.dtype, f"{value.dtype} stored to {self.tensor.dtype}"
        self._flat()[place[live]] = value[live]

    def _flat(self) -> Tensor:
        return torch.tensor([], dtype=self.tensor.dtype).set_(self.tensor.untyped_storage())

    def _inside(self, mask: Any) -> tuple[Tensor, Tensor]:
        place = self.offset.long()
        live = torch.as_tensor(True if mask is None else mask)
        place, live = torch.broadcast_tensors(place, live)
        outside = live & ((place < 0) | (place >= self._flat().numel()))
        assert not outside.any(), f"access outside of a tensor {list(self.tensor.shape)}: {place[outside][:3].tolist()}"
        return place, live


class Memory:
    """Shared memory, or a view of it."""

    def __init__(self, model: Model, data: Tensor) -> None:
        self.model, self.data, self.dtype, self.shape = model, data, data.dtype, data.shape

    def index(self, i: Any) -> Memory:
        return Memory(self.model, self.data[int(i)])

    def permute(self, order: Sequence[int]) -> Memory:
        return Memory(self.model, self.data.permute(*order))

    def slice(self, start: int, length: int, dim: int = 0) -> Memory:
        return Memory(self.model, self.data.narrow(dim, start, length))

    def load(self, layout: Any) -> Tensor:
        self.model.pause()
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        self.model.pause()
        assert (value.shape, value.dtype) == (self.data.shape, self.dtype), f"{value.dtype} {list(value.shape)} stored"
        self.data.copy_(value)


class _Layout:
    """Nothing but that it is one."""

    def __init__(self, *given: Any) -> None:
        self.value = self


class _BarrierLayout(_Layout):
    pass


class Model:
    """One seed's run of kernels. changes: text of their source -> what stands there instead."""

    def __init__(self, seed: int, changes: Mapping[str, str] | None = None) -> None:
        self._random = random.Random(seed)
        self._haste = self._random.choice((0.0, 0.2, 0.9))  # 0: copies land when nothing else can go on
        self._groups: list[_Group] = []
        self._error: BaseException | None = None
        self._program: tuple[Sequence[int], Sequence[int]] = ((), ())
        self._modules = self._load(dict(changes or {}))
        for name, kernel in LAUNCHED.items():
            self._modules[name].__dict__["_launch"] = self._launch(self._modules[name], kernel)
        self.latent_attention = self._modules["gluon_mla"].latent_attention
        self.paged_attention = self._modules["gluon_prefill"].paged_attention
        self.sparse_attention = self._modules["gluon_sparse"].sparse_attention

    def pause(self, until: Callable[[], bool] | None = None, what: str = "") -> None:
        """Let others go on, and go on when a condition holds."""
        me = self._current
        me.until, me.what = until, what
        self._hand_on(me)
        me.until = None

    def _hand_on(self, me: _Group) -> None:
        self._current = self._draw()
        if self._current is not me:
            self._current.turn.release()
            if me.done:
                return
            me.turn.acquire()
        if self._error is not None:
            raise _Stopped

    def _draw(self) -> _Group:
        while True:
            ready = [each for each in self._groups if not each.done and (each.until is None or each.until())]
            landing = [each for each in self._groups if each.landing]
            if landing and (not ready or self._random.random() < self._haste):
                self._random.choice(landing).landing.popleft()()
            elif ready:
                return self._random.choices(ready, [each.weight for each in ready])[0]
            else:
                waiting = [f"{each.name} for {each.what}" for each in self._groups if not each.done]
                raise Deadlock(f"groups wait for ever: {', '.join(waiting)}")

    def _new_group(self, name: str) -> _Group:
        group = _Group(name, self._random.choice((1, 5, 50)))
        self._groups.append(group)
        return group

    def _specialize(self, functions: Sequence[tuple[Any, tuple[Any, ...]]], *sizes: Any) -> None:
        (first, given), *others = functions
        self._current.name = first.__name__
        for i, (function, arguments) in enumerate(others):
            group = self._new_group(f"{function.__name__} {i}")
            threading.Thread(target=self._run_group, args=(group, function, arguments), daemon=True).start()
        first(*given)
        rest = self._groups[1:]
        self.pause(lambda: all(each.done for each in rest), "the other groups")

    def _run_group(self, group: _Group, function: Any, arguments: tuple[Any, ...]) -> None:
        group.turn.acquire()
        try:
            if self._error is None:
                function(*arguments)
                group.done = True
                self._hand_on(group)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        for group in self._groups:
            group.turn.release()

    def _launch(self, module: ModuleType, kernel: str) -> Callable[..., None]:
        """What runs a kernel's programs in some order; of those that take work from a counter there are two."""

        def launch(tensors: Sequence[Any], *numbers: Any) -> None:
            call = module._call(tensors, *numbers)
            constants = {name: value for name, value in call.options.items() if name.isupper()}
            grid = (min(2, *call.grid),) if kernel == "_paged_attention" else call.grid
            programs = list(product(*map(range, grid)))
            self._random.shuffle(programs)
            for program in programs:
                self._groups, self._program = [], (program, grid)
                self._current = self._new_group("the program")
                try:
                    getattr(module, kernel)(*map(_argument, call.arguments), **constants)
                except BaseException as error:
                    self._fail(error)
                    raise self._error from None  # type: ignore[misc]

        return launch

    def _load(self, changes: dict[str, str]) -> dict[str, ModuleType]:
        """The kernels' modules, on this model."""
        modules = {name: ModuleType(f"attn_backends.kernels.{name}") for name in MODULES}
        gluon, gl = ModuleType(_GLUON), ModuleType(f"{_GLUON}.language")
        gluon.__dict__.update(jit=_jit, language=gl)
        gl.__dict__.update(_LANGUAGE, **self._language())
        fakes = {_GLUON: gluon, gl.__name__: gl, "triton.experimental": ModuleType("triton.experimental")}
        fakes["triton.experimental"].__dict__["gluon"] = gluon
        for name, functions in self._nvidia().items():
            fakes[f"{gl.__name__}.nvidia{name}"] = fake = ModuleType(name)
            fake.__dict__.update(functions)
        used = set()
        for merging in ("triton_merge", "triton_sparse"):
            import_module(f"attn_backends.kernels.{merging}")  # with Triton itself, which has to stay
        with patch.dict(sys.modules, fakes | {module.__name__: module for module in modules.values()}):
            for name, module in modules.items():
                text = (KERNELS / f"{name}.py").read_text()
                for old in changes:
                    used |= {old} if old in text else set()
                    text = text.replace(old, changes[old])
                tree = ast.fix_missing_locations(_Values().visit(ast.parse(text)))
                exec(compile(tree, f"{name}.py", "exec"), module.__dict__)
        assert used == set(changes), f"no kernel has {set(changes) - used}"
        return modules

    def _language(self) -> dict[str, Any]:
        """`gl`, as far as it is of a program's own."""

        def allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
            if isinstance(layout, _BarrierLayout):
                return _Barriers(tuple(_Barrier(f"{i} of {shape[0]}") for i in range(shape[0])))
            return Memory(self, torch.full(tuple(shape), math.nan if dtype.is_floating_point else -77, dtype=dtype))

        def atomic_add(pointer: Pointer, value: int) -> Tensor:
            old = pointer.load()
            pointer.store(old + value)
            return old

        return {
            "allocate_shared_memory": allocate,
            "atomic_add": atomic_add,
            "program_id": lambda axis: torch.tensor(self._program[0][axis], dtype=torch.int32),
            "num_programs": lambda axis: self._program[1][axis],
            "warp_specialize": self._specialize,
        }

    def _nvidia(self) -> dict[str, dict[str, Any]]:
        """Modules of `gl.nvidia`."""

        def copy(place: Memory, pointer: Pointer, mask: Any = None) -> None:
            self.pause()
            value = pointer.load(mask)
            assert (value.shape, value.dtype) == (place.data.shape, place.dtype), f"{value.dtype} copied"
            place.data.fill_(math.nan)
            self._current.landing.append(lambda: place.data.copy_(value))

        def arrive_of_copies(bar: _Barrier, increment_count: bool) -> None:
            assert not increment_count
            self._current.landing.append(lambda: bar.arrive(128))

        def init(bar: _Barrier, count: int) -> None:
            bar.count = bar.pending = count

        def arrive(bar: _Barrier, count: int) -> None:
            self.pause()
            bar.arrive(count)

        def wait(bar: _Barrier, parity: Any) -> None:
            self.pause(lambda: bar.phase != parity, f"barrier {bar.name} to leave parity {int(parity)}")

        def multiply(a: Any, b: Memory, acc: Any, use_acc: bool = True, is_async: bool = False) -> _Product:
            assert is_async
            self.pause()
            begun = _Product(a, b, acc if use_acc else torch.zeros(()))
            if self._random.random() < 0.3:
                begun.read()
            self._current.products.append(begun)
            return begun

        def wait_for_products(num: int, deps: Sequence[Any]) -> Any:
            self.pause()
            products = self._current.products
            while len(products) > num:
                products.pop(0).finish()
            assert all(each not in products for each in deps), "a product is used that was not waited for"
            found = tuple(each.value if isinstance(each, _Product) else each for each in deps)
            return found if len(found) > 1 else found[0]

        barriers = ModuleType("mbarrier")
        barriers.__dict__.update(init=init, arrive=arrive, wait=wait, MBarrierLayout=_BarrierLayout)
        copies = ModuleType("async_copy")
        copies.__dict__.update(async_copy_global_to_shared=copy, mbarrier_arrive=arrive_of_copies)
        products = {"warpgroup_mma": multiply, "warpgroup_mma_wait": wait_for_products}
        fences = {"fence_async_shared": lambda: None}
        return {"": {}, ".ampere": {"async_copy": copies}, ".hopper": {"mbarrier": barriers, **products, **fences}}


class _Values(ast.NodeTransformer):
    """`a += b` is `a = a + b`, as a kernel's tensors are values. `a.to(type, bitcast=True)` is `a.view(type)`."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and [each.arg for each in node.keywords] == ["bitcast"]:
            view = ast.Attribute(node.func.value, "view", ast.Load())
            return ast.copy_location(ast.Call(view, node.args, []), node)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.Assign:
        assert isinstance(node.target, ast.Name)
        before = ast.Name(node.target.id, ast.Load())
        return ast.copy_location(ast.Assign([node.target], ast.BinOp(before, node.op, node.value)), node)


def _argument(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_argument, value))
    return Pointer(value) if isinstance(value, Tensor) else value


def _jit(kernel: Any = None, **options: Any) -> Any:
    return kernel or _jit


def _of_two(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    """Of a tensor and a number, the number has the tensor's type."""

    def of_two(a: Any, b: Any) -> Tensor:
        dtypes = [each.dtype for each in (a, b) if isinstance(each, Tensor)]
        return function(*[torch.as_tensor(each, dtype=dtypes[0] if len(dtypes) == 1 else None) for each in (a, b)])

    return of_two


def _where(condition: Any, a: Any, b: Any) -> Any:
    """Of pointers, one or the other for all elements."""
    return (a if condition else b) if isinstance(a, Pointer) else torch.where(condition, a, b)


_PAIR = "cvt.rn.{}.f32 $0, $2, $1;"  # the first element in the lower half
_ASM = {"mov.u32 $0, 0;": lambda given, dtype: 0}
_ASM |= {_PAIR.format(pair): lambda given, dtype: given.to(dtype) for pair in ("bf16x2", "f16x2")}
_TYPES = ("uint8", "int32", "int64", "bfloat16", "float16", "float32")
_LANGUAGE: dict[str, Any] = {
    **{name: getattr(torch, name) for name in (*_TYPES, "exp2", "log2")},
    "float8e4nv": torch.float8_e4m3fn,
    "pointer_type": lambda dtype: dtype,
    "where": _where,
    "join": lambda a, b: torch.stack((a, b), dim=-1),
    **dict.fromkeys(("BlockedLayout", "NVMMADistributedLayout", "DotOperandLayout", "SliceLayout"), _Layout),
    **dict.fromkeys(("NVMMASharedLayout", "SwizzledSharedLayout"), _Layout),
    "constexpr": lambda value: value,
    "static_range": range,
    "thread_barrier": lambda: None,
    "inline_asm_elementwise": lambda asm, constraints, given, dtype, **_: _ASM[asm](given[0], dtype),
    "arange": lambda start, end, layout: torch.arange(start, end, dtype=torch.int32),
    "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
    "full": lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
    "convert_layout": lambda value, layout: value,
    "maximum": _of_two(torch.maximum),
    "minimum": _of_two(torch.minimum),
    "max": lambda value, axis: value.amax(axis),
    "sum": lambda value, axis: value.sum(axis, dtype=value.dtype),
    "cdiv": lambda a, b: -(-a // b),
    "associative_scan": lambda value, axis, function: value.cumsum(axis, dtype=value.dtype),
    "load": lambda pointer, mask=None, other=0: pointer.load(mask, other),
    "store": lambda pointer, value, mask=None: pointer.store(value, mask),
}
