"""Triton compiles every kernel of ours for Hopper, and no later batch compiles one anew: each is compiled for types and
constants, not for sizes of a batch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attn_backends.selection.providers import GLUON_TRITON
from tests.gluon_compile import fetch

pytest.importorskip("triton", reason="Triton is not installed here")

_ROOT = Path(__file__).parent.parent
# Two tiles of rows, dealt out or not; two sizes of blocks and two, few or many parts, of keys and values all but one.
DIVIDED = {"_attend": 4, "_deal_out": 2, "_merge": 6, "_paged_attention": 1}
WHOLE = {"_attend": 2, "_paged_attention": 1}
COMPRESSED = {"_sparse_attention": 2, "_merge": 1, "_index_scores": 1, "_select_top": 1}  # attention whole and in parts
WRITTEN = dict.fromkeys(("_write_rows", "_write_states", "_pool_tokens", "_write_entries"), 1)
OTHERS = {
    "windows": WHOLE,
    "store": dict.fromkeys(("_store_kv", "_store_rows", "_store_ring"), 1),
    "trees": {"_tree_join": 1},
    "compressed": {**COMPRESSED, **WRITTEN},
}


def test_kernels_are_compiled_for_no_size_of_a_batch() -> None:
    environment = {"PATH": os.environ["PATH"], "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.launch_keys"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, cwd=_ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(map(json.loads, done.stdout.splitlines()))
    assert len(found) == 16
    for name, kernels in found.items():
        divided = DIVIDED | ({"_merge": 5} if name.startswith("keys") else {})
        expected = OTHERS.get(name) or (divided if name.endswith("parts") else WHOLE)
        assert {kernel: len(keys) for kernel, keys in kernels.items()} == expected, f"{name}: {kernels}"


@pytest.mark.parametrize(
    ("version", "words"),
    [
        pytest.param("installed", ["ptx"], id="installed, to PTX"),
        pytest.param(GLUON_TRITON, [], id=GLUON_TRITON),
        pytest.param("installed", [], marks=pytest.mark.full, id="installed"),
    ],
)
def test_every_kernel_compiles_for_hopper(version: str, words: list[str], pytestconfig: pytest.Config) -> None:
    """With the triton that is here, and with the one that Gluon is for, which GPUs have: no function is left out."""
    place = [] if version == "installed" else [str(fetch(pytestconfig.cache.mkdir("gluon")))]
    path = os.pathsep.join([*place, str(_ROOT), *sys.path])
    cache = str(pytestconfig.cache.mkdir("triton"))
    environment = {"PATH": "", "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache, "PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.triton_compile", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, cwd=_ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    *kernels, (used, left) = map(json.loads, done.stdout.splitlines())
    print(*kernels, sep="\n")  # with seconds, which depend on the machine
    assert version == "installed" or used.startswith(f"{GLUON_TRITON}.")
    assert left == [], "these functions no launch compiles"
