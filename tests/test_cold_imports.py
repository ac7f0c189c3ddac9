"""Importing the library and looking at it needs no vendor package, no model library and no GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

VENDORS = ["flash_attn", "flash_attn_interface", "flashinfer", "flash_mla", "sgl_kernel", "triton", "vllm"]
MODELS = ["safetensors", "transformers"]
FRONT_END = ["pydantic", "rich"]

BLOCK = """
import sys
sys.modules.update(dict.fromkeys({blocked}))  # importing any of them fails
import torch
def touched(*args):
    raise AssertionError("the GPU was initialized")
torch.cuda._lazy_init = touched
"""


def run_cold(blocked: list[str], code: str) -> str:
    """The output of code in a fresh process in which some packages can't be imported."""
    script = BLOCK.format(blocked=blocked) + code
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.smoke
def test_packages_and_every_backend_class_import_with_torch_alone():
    code = "import attn_backends, spec_metadata\nassert not torch.cuda.is_initialized()\n"
    code += "from attn_backends import get_backend, list_backends\nprint(*map(get_backend, list_backends()))"
    assert "FA3Backend" in run_cold(VENDORS + MODELS + FRONT_END, code)


def test_list_and_info_need_no_vendor_and_no_model_library():
    commands = [["list"], ["info", "fa3"], ["info", "flashinfer_mla", "--json"]]
    code = "from attn_backends.cli import main\n"
    code += "".join(f"assert main({words}) == 0\nprint('=====')\n" for words in commands)
    _, *known, _ = run_cold(VENDORS + MODELS, code).split("=====")
    assert ["runs on CUDA devices" in each for each in known] == [True, True]


def test_the_plug_in_of_an_engine_imports_without_it():
    run_cold(VENDORS + MODELS + FRONT_END, "from attn_backends.engines.vllm import attended, register")


def test_what_is_blocked_fails():
    with pytest.raises(AssertionError, match="transformers"):
        run_cold(MODELS, "import transformers")
    with pytest.raises(AssertionError, match="the GPU was initialized"):
        run_cold([], "torch.cuda.init()")
