"""Tests inside vLLM's engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.vllm.environment import prepare

pytest.register_assert_rewrite("tests.engines.vllm.laws")


def pytest_configure(config: pytest.Config) -> None:
    """Before tests are collected, which import vLLM."""
    config.add_cleanup(prepare().cleanup)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shipped models as vLLM reads them."""
    from tests.engines.vllm.models import write_models

    return write_models(tmp_path_factory.mktemp("models"))
