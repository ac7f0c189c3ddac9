"""The environment of vLLM's engine in one process without a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "",  # Triton counts as there without a driver
    "TRITON_INTERPRET": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",  # pieces without torch.compile
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    "HF_HUB_OFFLINE": "1",
    "ATTN_BACKENDS_COUNT": "1",
}

ENTRY_POINTS = """
[vllm.platform_plugins]
attn_backends_tests = tests.engines.vllm.platform:plugin

[vllm.general_plugins]
attn_backends_tests = tests.engines.vllm.plain:register
attn_backends_tests_bugs = tests.engines.vllm.defects:register
attn_backends_tests_given = tests.engines.vllm.given:register
"""


def prepare() -> TemporaryDirectory[str]:
    """Set the variables, and give vLLM the plug-ins of these tests, as an installed package gives it its own; before
    vLLM is imported. Returns the folder that they are in.
    """
    os.environ |= VARIABLES
    made = TemporaryDirectory()
    folder = Path(made.name) / "attn_backends_tests-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: attn-backends-tests\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(ENTRY_POINTS)
    sys.path.append(str(folder.parent))
    return made
