"""Compiles our Triton kernels for Hopper without a GPU: `python -m tests.triton_compile` prints a line of JSON each.
It runs in a process of its own, because in that of the tests Triton interprets, which takes what a compiler refuses.
With the word `ptx` it stops there, and finds in Triton's cache what tests of parameters compiled.
"""

from __future__ import annotations

import json
import re
import sys
import time
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from attn_backends.kernels.work_operators import NUM_WORDS, WorkLists
from attn_backends.planning.metadata import WRITE_SLOTS
from spec_metadata import (
    BlockTable,
    BoundStep,
    CacheGeometry,
    CommittedState,
    RequestTable,
    SamplingParams,
    allocate,
    pad_step,
)
from tests import launch_keys
from tests.bound_batches import engine, statics
from tests.plan_batches import Case
from tests.planner_laws import FORMS, RAGGED_RINGS, RINGS, garbage, written_along
from tests.ragged_steps import CAPACITY, Ragged, static_of

KERNELS = Path(__file__).parent.parent / "attn_backends" / "kernels"


def ints(*shape: int) -> torch.Tensor:
    """Zeros."""
    return torch.zeros(shape, dtype=torch.int32)


def plan() -> None:
    """Plans of packed and uniform steps."""
    for kind in ("verify chain", "packed extend"):
        for form in (FORMS["ragged"], FORMS["csr"], RINGS["real"][1].form):
            case = Case(kind, 256, 0)
            form.bind(case.step, garbage(form.specs, case))()


def plan_bound() -> None:
    """Plans of steps that are bound to an engine's buffers."""
    bound = ("csr", "verify tree"), ("block_table", "verify chain"), ("real", "verify chain")
    for (name, kind), table in product(bound, (RequestTable, BlockTable)):
        form, own = RINGS[name][1].form if name in RINGS else FORMS[name], table is BlockTable
        case = Case(kind, 256, 0, form=table)
        given, (static, *_) = engine(case, 0, counted=own, with_slots=own), statics(case, 0)
        form.bind(static, garbage(form.specs, case), given.bind(static, case))()


def plan_ragged(form: type) -> None:
    """Plans of ragged steps that are bound to an engine's buffers, with a vendor's schedule and without."""
    case = Ragged(0, form, has_slots=form is RequestTable)
    static, buffers = static_of(case, case.bucket(0))
    bound = BoundStep(static, case.inputs(counted=form is RequestTable), case.paging, CAPACITY)
    for plan, is_along in (
        (FORMS["ragged"], True),
        (FORMS["csr"], True),
        (FORMS["csr"], False),
        (RAGGED_RINGS.form, False),
    ):
        made = allocate((WRITE_SLOTS, *plan.specs), buffers.extent, static.device)
        planned = plan.bind(static, made, bound)
        if is_along:
            written_along(planned, made)
        planned()


def plan_along() -> None:
    """Plans with a vendor's schedule."""
    for name in FORMS:
        case, form = Case("verify chain", 64, 1), FORMS[name]
        buffers = garbage(form.specs, case)
        planned = form.bind(case.step, buffers)
        written_along(planned, buffers)
        planned()


def share_out() -> None:
    """Vendors' schedules on their own."""
    from attn_backends.kernels import triton_share_out, triton_work

    triton_share_out.share_out(ints(3), ints(3), ints(132, 8), ints(4), ints(3, 2), ints(3), 512)
    triton_work.list_work(ints(4), ints(4), ints(3), WorkLists.of(ints(NUM_WORDS), 66, 2), 12, 16, True)


def copy_inputs(form: type, kind: str) -> None:
    """Copies of steps into captured ones."""
    from attn_backends.kernels import triton_inputs

    case = Case(kind, 16, 0, form=form)
    triton_inputs.bind_inputs(pad_step(case.step, case.step.bucket(case.bs), case.capacity))(case.step)(case.step)
    ragged = Ragged(0, form, has_slots=form is RequestTable)
    static, _ = static_of(ragged, ragged.bucket(0))
    triton_inputs.bind_inputs(static)(ragged.step)(ragged.step)


def load() -> None:
    """Requests into committed states."""
    from attn_backends.kernels import triton_state

    geometry = CacheGeometry(4, 16)
    tables = (RequestTable(ints(3, 16), ints(1), geometry), ints(2).long()), (BlockTable(ints(3, 4), geometry), None)
    for paging, rows in tables:
        state = CommittedState.of(paging, 3)
        triton_state.bind_load(state)(state, ints(2), rows)


def sample() -> None:
    """Two rows of a vocabulary."""
    from attn_backends.kernels import triton_sampling

    floats, longs = torch.ones(2), torch.ones(2, dtype=torch.int64)
    params = SamplingParams(floats, floats, longs.int(), longs)
    triton_sampling.sample(torch.zeros(2, 1, 32000), params, longs.view(2, 1), longs.view(2, 1))


PLANNERS = {
    **{each.__name__: each for each in (plan, plan_bound, plan_along, load)},
    "ragged plans of slots": lambda: plan_ragged(RequestTable),
    "ragged plans of pages": lambda: plan_ragged(BlockTable),
    "copies of slots": lambda: copy_inputs(RequestTable, "verify tree"),
    "copies of pages": lambda: copy_inputs(BlockTable, "verify chain"),
}
LAUNCHES = {
    "keys": lambda: launch_keys.attend("page table", False, torch.empty(32), 2**26),
    "latents": lambda: launch_keys.attend("csr", True, None, 2**26),
    **{each.__name__: each for each in (launch_keys.store, launch_keys.trees, launch_keys.compressed)},
    **{each.__name__: each for each in (share_out, sample)},
    **PLANNERS,
}


def jitted() -> set[str]:
    """The names of all functions that Triton compiles, with their modules."""
    import triton

    modules = [import_module(f"attn_backends.kernels.{path.stem}") for path in KERNELS.glob("triton_*.py")]
    found = [each for module in modules for each in vars(module).values() if isinstance(each, triton.JITFunction)]
    return {f"{each.__module__}.{each.__name__}" for each in found}


def for_hopper(*, assemble: bool) -> Any:
    """Triton's target from now on. assemble: whether ptxas runs."""
    import triton
    from triton.backends.compiler import GPUTarget

    def to_ptx(backend: Any = None, stages: Any = None, *given: Any) -> tuple[str, str]:
        if stages is not None:
            stages["cubin"] = lambda ptx, metadata: b""
        return "ptx", "ptx"  # a part of the cache's key

    target = GPUTarget("cuda", 90, 32)
    here = {"get_current_target": lambda: target, "get_current_device": lambda: 0}
    triton.runtime.driver.set_active(SimpleNamespace(**here, get_current_stream=lambda device: 0))
    triton.knobs.runtime.add_stages_inspection_hook = None if assemble else to_ptx
    return target


def main(words: list[str]) -> None:
    """Compile each launch's kernels, once each form, and print what came of it; last what none of them calls."""
    import triton

    target, left, done = for_hopper(assemble="ptx" not in words), jitted(), set[tuple[Any, ...]]()

    def compile_it(*, fn: Any, compile: dict[str, Any], **given: Any) -> bool:
        name = f"{fn.jit_function.__module__}.{fn.jit_function.__name__}"
        form = (name, *(value for value in compile["constants"].values() if isinstance(value, bool)))
        if form not in done:
            done.add(form)
            (attributes,), start = compile["configs"], time.perf_counter()
            source = triton.compiler.ASTSource(fn.jit_function, compile["signature"], compile["constants"], attributes)
            options = {key: compile[key] for key in ("num_warps", "num_stages")}
            text = triton.compile(source, target=target, options=options).asm["source"]
            left.difference_update({name}, re.findall(r'tt.func private @"?([\w.]+?)__', text))
            print(json.dumps([name, round(time.perf_counter() - start, 2)]), flush=True)
        return True  # and nothing is launched

    triton.knobs.runtime.jit_cache_hook = compile_it
    for launch in LAUNCHES.values():
        done.clear()
        launch()
    print(json.dumps([triton.__version__, sorted(left)]))


if __name__ == "__main__":
    main(sys.argv[1:])
