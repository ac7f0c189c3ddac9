"""The out-of-tree example installs with pip, and its backend is then known by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import run_module

ROOT = Path(__file__).parent.parent
OFFLINE = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]


@pytest.mark.install
def test_pip_installs_the_example(tmp_path):
    package = str(ROOT / "examples" / "out_of_tree_backend")
    subprocess.run([sys.executable, "-m", "pip", "install", *OFFLINE, "--target", tmp_path, package], check=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    words = ["attn_backends.cli", "conformance", "seqmajor", "--quick", "--select", "math.*,graph.*,laws.*"]
    code, output = run_module(words, tmp_path, environment)
    assert code == 0, output
    assert "seqmajor (torch) on CPU" in output
