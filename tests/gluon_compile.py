"""Compiles our Gluon kernels for Hopper without a GPU: `python -m tests.gluon_compile CASE ...` prints a line of JSON
for each case. It runs in a process of its own, whose triton is the one that the kernels are written for (`fetch`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from attn_backends.kernels.fp8_pages import page_bytes
from attn_backends.kernels.gluon_forms import SWEPT, Key
from attn_backends.kernels.torch_compressed import Keys
from attn_backends.selection.providers import GLUON_TRITON


@dataclass(frozen=True)
class Case:
    """What a kernel is compiled for. form: as of `paged_arguments.FORMS`; "slots" of sparse attention. dim: elements of
    a query's head; 576 are of latents. cache: type of these, if it is not the queries'. heads: of queries.
    """

    dtype: torch.dtype
    page_size: int
    form: str
    causal: bool
    dim: int = 576
    cache: torch.dtype | None = None
    heads: int = 64

    @classmethod
    def of(cls, key: Key) -> Case:
        """The case of an entry of `gluon_forms.SWEPT`."""
        cache = torch.float8_e4m3fn if key.itemsize == 1 else None
        return cls(torch.bfloat16, key.page_size, "page table", key.width > 0, key.dim, cache, key.heads or 64)


CASES = {
    "latents": Case(torch.bfloat16, 64, "block table", False),
    "causal latents": Case(torch.bfloat16, 64, "block table", True),
    "packed latents": Case(torch.float16, 1, "csr", True),
    "8-bit latents": Case(torch.bfloat16, 64, "page table", True, cache=torch.float8_e4m3fn),
    "8-bit latents of halves": Case(torch.float16, 1, "csr", False, cache=torch.float8_e4m3fn),
    "sparse rows": Case(torch.bfloat16, 64, "slots", False, 512),
    "sparse rows of 8 bits": Case(torch.bfloat16, 64, "slots", False, 512, torch.uint8),
    "prompts": Case(torch.bfloat16, 64, "page table", True, 128),
    "uniform prompts": Case(torch.bfloat16, 16, "block table", False, 128),
    "prompts of small heads": Case(torch.float16, 1, "csr", True, 64),
    "prompts of small heads in large pages": Case(torch.bfloat16, 64, "page table", True, 64),
    "prompts of two sizes": Case(torch.bfloat16, 64, "page table", True, 192),
    "prompts of large heads": Case(torch.bfloat16, 64, "page table", True, 256),
    "8-bit prompts": Case(torch.bfloat16, 64, "page table", True, 128, torch.float8_e4m3fn),
    "8-bit prompts of small heads": Case(torch.float16, 1, "csr", False, 64, torch.float8_e4m3fn),
    "8-bit prompts of two sizes": Case(torch.bfloat16, 64, "page table", True, 192, torch.float8_e4m3fn),
    "8-bit prompts of large heads": Case(torch.float16, 1, "csr", False, 256, torch.float8_e4m3fn),
    **{f"swept {tuple(key)}": Case.of(key) for key in SWEPT},
}
QUICK = ("latents", "sparse rows of 8 bits", "prompts")
SIZES = tuple(product((2, 1, 16), (300, 1, 16, 304)))  # requests, query rows of each
_ROOT = Path(__file__).parent.parent


def fetch(folder: Path) -> Path:
    """A folder to import the triton of `GLUON_TRITON` from, in a folder that keeps it. Raises RuntimeError where the
    package registry does not give it.
    """
    place = folder / f"triton-{GLUON_TRITON}-cp{sys.version_info.major}{sys.version_info.minor}"
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=folder) as made:
            options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--target", f"{made}/triton"]
            install = [sys.executable, "-m", "pip", "install", *options, f"triton=={GLUON_TRITON}.*"]
            done = subprocess.run(install, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(
                    f"pip could not fetch triton {GLUON_TRITON}, which our Gluon kernels are compiled with; is the "
                    f"package registry reached? It said:\n{done.stderr[-2000:]}"
                )
            if not place.exists():  # another worker's is as good
                os.rename(f"{made}/triton", place)
    return place


def compiled(names: Sequence[str], triton: Path, cache: Path) -> dict[str, dict[str, Any]]:
    """What `python -m tests.gluon_compile` says of each case. triton: as `fetch` gave it. cache: an empty folder."""
    path = os.pathsep.join([str(triton), str(_ROOT), *sys.path])
    environment = {"PATH": "", "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.gluon_compile", *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, cwd=_ROOT)
    if done.returncode:
        raise RuntimeError(f"a Gluon kernel does not compile for sm_90a:\n{done.stderr[-3000:]}")
    return dict(zip(names, map(json.loads, done.stdout.splitlines()), strict=True))


def _calls(case: Case) -> Iterator[tuple[Any, ...]]:
    """Arguments of the operators' launches, of every size: lists at odd addresses among them, one head a group, and
    more or no room for parts.
    """
    for i, (bs, width) in enumerate(SIZES):
        odd, num_heads = i % 2, 8 if i % 3 == 1 else case.heads
        shape = (9, case.page_size) if case.dim == 576 else (2, 9, case.page_size, 8)
        pages = torch.empty(*shape, case.dim, dtype=case.cache or case.dtype)
        q = torch.empty(bs * width, num_heads, case.dim, dtype=case.dtype)
        starts = torch.empty(bs + 2, dtype=torch.int32)[odd:][: bs + 1]
        table = torch.empty(bs, (4, 1, 16)[i % 3] + odd, dtype=torch.int32)[:, odd:]
        table_form = (None if case.form == "block table" else starts, None, table)
        lists = (starts, starts, table[0]) if case.form == "csr" else table_form
        lens, room = torch.empty(bs + 1, dtype=torch.int32)[odd:][:bs], 2**23 * (i % 4 < 3)
        if case.dim == 576:
            yield q, pages, *lists, lens, width, 4096, case.causal, 0.1, 1.0, 1.0, torch.empty(room), torch.empty(2**18)
        else:
            k, v = pages[0], pages[1][..., : 128 if case.dim == 192 else None].contiguous()
            yield q, k, v, *lists, lens, width, case.causal, 0.1, 1.0, 1.0


def _sparse_calls(case: Case) -> Iterator[tuple[Any, ...]]:
    """The same of sparse attention, with layers of a window alone among them, and entries of several ratios."""

    def keys(num_tokens: int, odd: int, num_rows: int, width: int) -> Keys:
        shape: tuple[int, ...] = (9, num_rows, case.dim)
        if case.cache:
            shape = (9, page_bytes(num_rows))
        slots = torch.empty(num_tokens, width + 2 * odd, dtype=torch.int32)[:, odd : width + odd]
        lens = torch.empty(num_tokens + 1, dtype=torch.int32)[odd:][:num_tokens]
        return Keys(torch.empty(shape, dtype=case.cache or case.dtype), num_rows, slots, lens)

    for i, (bs, width) in enumerate(SIZES):
        odd, num_heads = i % 2, (64, 1, 128, 16)[i % 4]
        q = torch.empty(bs * width, num_heads, case.dim, dtype=case.dtype)
        sinks = torch.empty(num_heads + odd)[odd:]
        sources = [keys(len(q), odd, 256, 128), keys(len(q), odd, (64, 2, 1)[i % 3], (512, 128, 1)[i % 3])]
        yield q, sources[: 1 if i % 5 == 1 else 2], 0.1, sinks


def _resources(compiled: Any, tool: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cubin"
        file.write_bytes(compiled.asm["cubin"])
        said = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    return {name: int(re.search(rf" {name}:(\d+)", said)[1]) for name in ("REG", "STACK", "LOCAL")}  # type: ignore[index]


def _compile(module: ModuleType, kernel: Any, attend: Any, case: Case) -> dict[str, Any]:
    """Of the first size what the compiler says, how often it compiles for all, and how many forms these have."""
    import triton

    from attn_backends.kernels.cuda_launch import _is_plain

    made, merges, forms = list[Any](), list[Any](), set[Hashable]()

    def launch(tensors: Sequence[Any], *numbers: Any) -> None:
        call = module._call(tensors, *numbers)
        made.append(kernel.warmup(*call.arguments, grid=(1, 1, 1), **call.options))
        forms.add(tuple(call.options.items()))

    module.__dict__.update(_launch=launch, merge=lambda *given: merges.append(given))
    calls = (_sparse_calls if case.form == "slots" else _calls)(case)
    start = time.perf_counter()
    attend(*next(calls))
    seconds = time.perf_counter() - start
    for given in calls:
        attend(*given)
    first, tool = made[0], Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    products = set(re.findall(r"wgmma.mma_async.sync.aligned.(m\w+)", first.asm["ptx"]))
    return {
        **_resources(first, tool),
        "triton": triton.__version__,
        "shared": first.metadata.shared,
        "num_warps": first.metadata.num_warps,
        "products": sorted(products),
        "plain": _is_plain(first.metadata),
        "variants": len({id(each) for each in made}),
        "forms": len(forms),
        "merges": len(merges),
        "seconds": round(seconds, 1),
    }


def main(names: Sequence[str]) -> None:
    """Compile cases by name, and print what is said of each."""
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", 90, 32)
    here = {"get_current_target": lambda: target, "get_current_device": lambda: 0}
    triton.runtime.driver.set_active(SimpleNamespace(**here, get_current_stream=lambda device: 0))
    from attn_backends.kernels import gluon_mla, gluon_prefill, gluon_sparse

    for name in names:
        case = CASES[name]
        kernel: tuple[ModuleType, Any, Any]
        if case.dim == 576:
            kernel = gluon_mla, gluon_mla._attend, gluon_mla.latent_attention
        elif case.form == "slots":
            kernel = gluon_sparse, gluon_sparse._attend, gluon_sparse.sparse_attention
        else:
            kernel = gluon_prefill, gluon_prefill._paged_attention, gluon_prefill.paged_attention
        print(json.dumps(_compile(*kernel, case)))


if __name__ == "__main__":
    main(sys.argv[1:])
