"""Triton's interpreter, which runs kernels where no GPU is (`conftest.py` asks for it)."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

# Where Triton compiles for a GPU, or is not installed, the kernels can't be run here.
_INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
BOTH = ["operator", *(["triton"] if _INTERPRETS else [])]  # the implementations of an operator


def interpreted(name: str, kernel: str) -> ModuleType:
    """A module of Triton kernels, run by the interpreter. kernel: one of them, to make sure of that."""
    pytest.importorskip("triton", reason="Triton's interpreter is not installed here")
    from triton.runtime import interpreter

    prepare(interpreter)
    module = import_module(f"attn_backends.kernels.{name}")
    found = getattr(module, kernel)
    assert isinstance(found, interpreter.InterpretedFunction), "triton was imported before TRITON_INTERPRET was set"
    return module


def last_program_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the programs of a launch from the last one: on a GPU none may need what another one writes."""
    from triton.runtime.interpreter import interpreter_builder

    in_turn = interpreter_builder.set_grid_idx

    def from_the_end(*program: int) -> None:
        in_turn(*(size - 1 - at for size, at in zip(interpreter_builder.grid_dim, program, strict=True)))

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", from_the_end)


@cache
def prepare(interpreter: ModuleType) -> None:
    """Once a process. The interpreter makes Triton's language its own again at every call of a function, and computes
    what overflows only to drop it, as nothing asserts without `debug`: together, most of a kernel's time. Of the rest,
    much is a table of types and the objects of a shape, made anew for every value.
    """
    _mend_loop_bounds(interpreter)
    _keep_types_and_shapes(interpreter)
    patch, patched = interpreter._patch_lang, set()

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))
            patch(function)
        return interpreter._LangPatchScope()  # of no changes, so none is undone

    interpreter._patch_lang = patch_once
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _keep_types_and_shapes(interpreter: ModuleType) -> None:
    """Make each once."""
    from triton.language import core

    dtype_of, made, kept, shapes = interpreter._get_np_dtype, core.tensor.__init__, {}, {}

    def kept_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in kept:
            kept[scalar.name] = dtype_of(scalar)
        return kept[scalar.name]

    def kept_shape(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else ()
        if shape not in shapes:
            made(self, handle, type)
            shapes[shape] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[shape]

    interpreter._get_np_dtype = kept_dtype
    core.tensor.__init__ = kept_shape


def _mend_loop_bounds(interpreter: ModuleType) -> None:
    """Triton 3.6 makes a loop's bound by `int` of an array of one element, which NumPy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = mended
