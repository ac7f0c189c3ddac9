"""Determinism: one thread, a fixed seed before every test. Where no GPU is, Triton's interpreter runs its kernels."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it when it is imported, which no test may do before


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
