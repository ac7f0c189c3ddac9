"""How often the host waits for a busy GPU while it makes steps from lengths that it knows: never (`host_uploads`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.counts import count_on_cuda
from tests.host_uploads import counted


def rows(_device: str = "cuda") -> Iterator[dict[str, Any]]:
    """A row of each maker."""
    return counted(torch.device("cuda"), count_on_cuda)
