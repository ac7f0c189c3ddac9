"""Times the forms of our Gluon kernels (`gluon_forms`) beside the default one: for the table that they are taken from.

    python -m tests.gluon_sweep --json docs/results/h100/gluon_forms.json

All forms are compiled first, in as many processes as there are cores, and launched there once. What spills or does not
run is a row that says so. The others take turns on each shape, under CUDA graphs. A shape that begins later than the
limit is left to the same command's next run, which keeps FILE's rows. At the end FILE has the forms that are at least
5 % faster than the default on a shape of their key, and on none slower.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from attn_backends import results
from attn_backends.cache import CacheFormat
from attn_backends.errors import AttnBackendsError
from attn_backends.graphs import CudaGraph
from attn_backends.kernels.devices import gpu_of
from attn_backends.kernels.gluon_forms import DEFAULTS, LATENT, Form, Key, key_of
from attn_backends.layer import AttentionLayer
from attn_backends.registry import get_backend
from benchmarks.layers import Captured, capture, check_same
from benchmarks.rows import Stage
from benchmarks.shapes import DTYPE, LAYERS, MAX_VERIFIED, PAGE_SIZE, fill_pool, problem
from benchmarks.timing import CudaClock, fewer_rounds, take_turns
from tests.prompt_forms import Lengths, pool_of

GAIN, NOISE = 1.05, 1.01  # a form that wins; medians of the same kernel differ by less
ROUNDS, TURNS_US = 10, 3e5  # of each form; of all forms on a shape together, but three rounds
COMPILE_S = 150  # the most that compiling may take
TOLD = "task and reason: "  # before what a process that compiles says, among the lines of others


class Shape(NamedTuple):
    """One attention call. dim: elements of a key. heads: of queries, over 8 of keys. width: query rows of a request."""

    dim: int
    page_size: int
    heads: int
    width: int
    requests: int
    context: int

    @property
    def compiled(self) -> tuple[int, int, int]:
        """What a kernel is compiled for, beside its form: elements, page size, and kind of step by width."""
        return self.dim, self.page_size, (self.width > 1) + (self.width > MAX_VERIFIED)

    @property
    def small(self) -> Shape:
        """A shape for which the same is compiled."""
        return self._replace(width=min(self.width, 128), requests=1, context=4096 if self.dim == LATENT else 128)


_PROMPTS = ((8192, 1, 8192), (8192, 8, 8192), (32768, 1, 32768), (1024, 1, 32768), (1024, 8, 1024))
_LATENTS = ((128, 1), (16, 4), (128, 4), (16, 8), (128, 8))  # heads, width; fewer rows are Triton's
SHAPES = (
    *(Shape(LATENT, PAGE_SIZE, *one, *size) for one, size in product(_LATENTS, ((32, 4096), (128, 4096), (8, 32768)))),
    *(Shape(LATENT, PAGE_SIZE, heads, 1024, 1, 8192) for heads in (16, 128)),
    *(Shape(dim, page, 32, *each) for page, dim, each in product((64, 1, 16), (64, 128, 192, 256), _PROMPTS)),
    *(Shape(128, 64, 64, *each) for each in _PROMPTS),
)
FORMS = {
    LATENT: [Form(128, registers) for registers in (200, 208, 224)],
    64: [Form(128, 208), Form(128, 192), Form(64, 208)],
    128: [Form(64, 208), Form(64, 200)],
    192: [Form(128, 216), Form(64, 216), Form(64, 208)],
    256: [Form(64, 224), Form(32, 208)],
}
"""Forms beside the default one, by elements of a key; further ones take columns in other turns."""
for _dim in (64, 128, 192, 256):
    FORMS[_dim] += [DEFAULTS[_dim]._replace(turn=turn) for turn in (1, 4)]

Reasons = Mapping[tuple[Any, Form], str]  # why a form does not run, by what is compiled


def tasks() -> list[tuple[Shape, Form]]:
    """Everything that is compiled, with a small shape of it. Turns are no part of it."""
    shapes = {shape.compiled: shape.small for shape in SHAPES}
    forms = {dim: dict.fromkeys(each._replace(turn=2) for each in (DEFAULTS[dim], *FORMS[dim])) for dim in FORMS}
    return [(shape, form) for shape in shapes.values() for form in forms[shape.dim]]


def compile_all(asked: Sequence[int]) -> dict[int, str]:
    """Compile tasks by number in processes of their own: an empty text of each, or why it does not run."""
    num = min(os.cpu_count() or 1, len(asked))
    command = [sys.executable, "-m", "tests.gluon_sweep", "--compile"]
    made = [
        subprocess.Popen(
            [*command, *map(str, asked[i::num])], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(num)
    ]
    end, found = time.monotonic() + COMPILE_S, dict[int, str]()
    for i, process in enumerate(made):
        try:
            said, error = process.communicate(timeout=max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            said, error = process.communicate()
        found |= dict(json.loads(line.removeprefix(TOLD)) for line in said.splitlines() if line.startswith(TOLD))
        last = results.without_folders((error.strip().splitlines() or [""])[-1])[-200:]
        missing = [number for number in asked[i::num] if number not in found]
        found |= dict.fromkeys(missing, f"its process came to no end in {COMPILE_S} s, or failed: {last}")
    return found


def compile_here(numbers: Iterable[int], device: torch.device) -> Iterator[tuple[int, str]]:
    """Compile and launch tasks, one after another."""
    listed = tasks()
    for number in numbers:
        shape, form = listed[number]
        try:
            module, call, caches = attention(shape, device)
            yield number, _spilled(module, form, partial(call, caches[0]))
        except Exception as error:  # too much shared memory, say: others run all the same
            yield number, _said(error)


def _spilled(module: Any, form: Form, launch: Callable[[], object]) -> str:
    """Launch with a form. Says how much its kernel spills, or nothing."""
    watched = _Watched(module._launch._kernel)
    with patch.object(module._launch, "_kernel", watched), taken(module, form):
        launch()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if watched.compiled is None:
        return "another kernel takes this shape"
    return f"it spills {4 * watched.compiled.n_spills} bytes" if watched.compiled.n_spills else ""


class _Watched:
    """A kernel that keeps what Triton compiled."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.compiled: Any = None

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*given: Any, **options: Any) -> Any:
            self.compiled = self._kernel[grid](*given, **options)
            return self.compiled

        return launch


def taken(module: Any, form: Form) -> Any:
    """While this is entered, a kernel's launches have a form."""
    return patch.object(module, "form_of", lambda *given: form)


def _said(error: Exception) -> str:
    kind = "" if isinstance(error, AttnBackendsError) else f"{type(error).__name__}: "
    return results.without_folders(f"{kind}{error}")[:300]


def attention(shape: Shape, device: torch.device) -> tuple[Any, Callable[..., Any], Sequence[Any]]:
    """The module of a shape's kernel, a call of it, cache -> output, and caches."""
    from attn_backends.kernels import gluon_mla, gluon_prefill

    dim, page_size, heads, width, requests, context = shape
    if dim == LATENT:
        layer = next(each for each in LAYERS[CacheFormat.LATENT] if each.num_heads == heads)
        pool = fill_pool(layer, requests, context, device, [width])
        return gluon_mla, problem(pool, layer, width).call(get_backend("trtllm_mla"), "gluon"), pool.caches
    layer = AttentionLayer(0, heads, 8, dim, 128 if dim == 192 else dim, dim**-0.5)
    pool = pool_of(layer, page_size, Lengths("", [width] * requests, context - width), device)
    return gluon_prefill, problem(pool, layer, width).call(get_backend("fa3"), "gluon"), pool.caches


def rows(done: Sequence[Mapping[str, Any]], end: float, stage: Stage) -> Iterator[dict[str, Any]]:
    """A row of each shape and form that is not done. end: of the monotonic clock; no shape begins later."""
    left = {shape: forms for shape in SHAPES if (forms := _forms_left(shape, done))}
    needed = {(shape.compiled, form._replace(turn=2)) for shape in left for form in (DEFAULTS[shape.dim], *left[shape])}
    listed = tasks()
    numbers = [i for i, (small, form) in enumerate(listed) if (small.compiled, form) in needed]
    found = compile_all(numbers) if numbers else {}
    reasons = {(listed[i][0].compiled, listed[i][1]): found[i] for i in numbers}
    for shape, forms in left.items():
        if time.monotonic() > end:
            return
        stage.clock.wait()  # of a device that was lost this ends the run: the next begins after the rows so far
        yield from measured(shape, forms, reasons, stage)


def _forms_left(shape: Shape, done: Sequence[Mapping[str, Any]]) -> list[Form]:
    had = {Form(*row["form"]) for row in done if all(row[name] == value for name, value in shape._asdict().items())}
    return [form for form in (DEFAULTS[shape.dim], *FORMS[shape.dim]) if form not in had]


def measured(shape: Shape, forms: Sequence[Form], reasons: Reasons, stage: Stage) -> Iterator[dict[str, Any]]:
    """Rows of a shape's forms: microseconds, and the speed as a multiple of the default form's. First come those that
    do not run, so that no later run meets what ended this one.
    """
    default, captured, num_calls = DEFAULTS[shape.dim], dict[Form, Captured](), 1
    made = None
    for form in dict.fromkeys((default, *forms)):
        try:
            if reason := reasons[shape.compiled, form._replace(turn=2)]:
                raise AttnBackendsError(reason)
            module, call, caches = made = made or attention(shape, stage.device)
            with taken(module, form):
                captured[form], num_calls = capture(call, caches, stage), len(caches)
        except Exception as error:
            if form in forms:
                yield _row(shape, form, status="not_run", reason=_said(error))
    if default in captured:
        times = _times(captured, num_calls, stage)
    for form in captured:
        if form not in forms:
            continue
        if default not in captured:
            yield _row(shape, form, status="not_run", reason="the default form does not run here")
            continue
        row = _row(shape, form, us=round(times[form], 2), speed=round(times[default] / times[form], 4))
        try:
            check_same(captured[form].output, captured[default].output)
            yield {**row, "status": "pass"}
        except AttnBackendsError as error:
            yield {**row, "status": "fail", "reason": str(error)}


def _row(shape: Shape, form: Form, **found: Any) -> dict[str, Any]:
    return {**shape._asdict(), "form": list(form), **found}


def _times(captured: Mapping[Form, Captured], num_calls: int, stage: Stage) -> dict[Form, float]:
    """Microseconds of a call of each form, in turn."""
    replays = [each.graph.replay for each in captured.values()]
    rounds = fewer_rounds(replays, ROUNDS, TURNS_US, stage.clock)
    us = take_turns(replays, rounds, stage.clock)
    return {form: each / num_calls for form, each in zip(captured, us, strict=True)}


def winners(found: Iterable[Mapping[str, Any]], processors: int) -> Iterator[tuple[Key, Form, float, float]]:
    """The form of each key that is to be in the table: its best and its worst speed, as multiples of the default's. Of
    several it is the one that is fastest in the mean.
    """
    speeds: dict[Key, dict[Form, list[float]]] = {}
    for row in found:
        key = key_of(row["dim"], DTYPE.itemsize, row["page_size"], row["heads"], row["width"], processors)
        own = speeds.setdefault(key, {}).setdefault(Form(*row["form"]), [])
        own.append(row["speed"] if row["status"] == "pass" else 0.0)
    for key, forms in speeds.items():
        good = {form: own for form, own in forms.items() if max(own) >= GAIN and min(own) * NOISE >= 1.0}
        if good:
            best = max(good, key=lambda form: prod(good[form]))
            yield key, best, max(good[best]), min(good[best])


def main() -> int:
    """Measure what is missing, and say which forms win."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to write, or to go on with")
    parser.add_argument("--limit", type=float, default=270.0, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument("--compile", nargs="+", type=int, metavar="N", help="compile these tasks alone, here")
    args = parser.parse_args()
    end, device = time.monotonic() + args.limit, torch.device("cuda")
    if args.compile:
        for number, reason in compile_here(args.compile, device):
            print(f"{TOLD}{json.dumps([number, reason])}", flush=True)
    elif args.json:
        sweep(args.json, end, Stage(device, CudaGraph, CudaClock(), ROUNDS))
    else:
        parser.error("name a file: --json FILE")
    return 0


def sweep(path: Path, end: float, stage: Stage) -> None:
    """Complete a file, as far as there is time."""
    done = list(results.read(path).rows) if path.exists() else []
    head = results.head(("python", "-m", "tests.gluon_sweep", *sys.argv[1:]), stage.device.type)
    with results.Recording(path, head) as recording:
        for row in done:
            recording.add(row)
        for row in rows(list(done), end, stage):
            done.append(row)
            recording.add(row)
            print(*row.values(), flush=True)
        processors = gpu_of(stage.device).num_processors
        won = [[list(key), list(form), *speeds] for key, form, *speeds in winners(done, processors)]
        for each in won:
            print("faster:", *each)
        left = sum(bool(_forms_left(shape, done)) for shape in SHAPES)
        print(f"{left} shapes are left; the same command goes on" if left else "all shapes were timed")
        if not left:
            recording.finish(faster=won)


if __name__ == "__main__":
    sys.exit(main())
