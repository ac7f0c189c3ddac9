"""Determinism: one thread, a fixed seed before every test."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
