"""The torch kernels of backends, which tests run and rebuild."""

from __future__ import annotations

from attn_backends.backend import AttentionBackend
from attn_backends.contract.kernel import Kernel


def torch_kernel(backend: type[AttentionBackend]) -> Kernel:
    """A backend's kernel that runs anywhere."""
    return next(kernel for kernel in backend.kernels if kernel.name == "torch")
