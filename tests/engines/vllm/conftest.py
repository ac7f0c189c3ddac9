"""The environment of vLLM's engine in one process without a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

pytest.register_assert_rewrite("tests.engines.vllm.laws")

os.environ |= {
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
"""


def pytest_configure(config: pytest.Config) -> None:
    """Give vLLM the plug-ins of these tests, as an installed package gives it its own."""
    made = TemporaryDirectory()
    config.add_cleanup(made.cleanup)
    folder = Path(made.name) / "attn_backends_tests-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: attn-backends-tests\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(ENTRY_POINTS)
    sys.path.append(str(folder.parent))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shipped models as vLLM reads them."""
    from tests.engines.vllm.models import write_models

    return write_models(tmp_path_factory.mktemp("models"))
