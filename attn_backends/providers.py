"""Where kernels come from, and why one can't run here. The only module that looks for vendor packages."""

from __future__ import annotations

import torch


def runs_anywhere(device: torch.device) -> list[str]:
    """Reasons against a torch kernel: only a device that this torch lacks."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return ["torch sees no CUDA device"]
    return []
