"""No later batch compiles a kernel anew: each is compiled for types and constants, not for sizes of a batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

_ROOT = Path(__file__).parent.parent
# Two tiles of rows, one of them also for parts; two sizes of blocks and few or many parts.
DIVIDED = {"_attend": 3, "_merge": 4, "_paged_attention": 1}
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
        expected = OTHERS.get(name) or (DIVIDED if name.endswith("parts") else WHOLE)
        assert {kernel: len(keys) for kernel, keys in kernels.items()} == expected, f"{name}: {kernels}"
