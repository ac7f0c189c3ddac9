"""Workers that draft and verify in other ways, through a device's graphs: tokens are those of plain decoding.

Ragged verifies, steps that adapt, windowed drafts, draft blocks, and gpt-oss's sinks and windows. Drafts of EAGLE-3 are
also those of a full recompute, over a window too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

from tests import device_laws, eagle3_laws
from tests.gpu.workers import PAGED, SHAPES, Law, judged


def rows(device: str = "cuda") -> Iterator[dict[str, Any]]:
    """A row of each law in its places."""
    return judged(laws(device))


def laws(device: str) -> Iterator[Law]:
    """Every law, and of what."""
    for name, place, lag in product(device_laws.DRAFTS, PAGED, (0, 1)):
        if name != "ragged verify" or place[1] != "trtllm_mla":  # its torch kernel takes no packed rows
            about = {"law": name, "backend": place[1], "host_lag": lag}
            yield about, partial(device_laws.check_drafts, name, place, lag, device)
    for lag in (0, 1):
        about = {"law": "draft blocks", "backend": "fa3", "host_lag": lag}
        yield about, partial(device_laws.check_blocks, lag, device)
    for name in ("chain", "tree", "window"):
        yield {"law": f"eagle3 {name}"}, partial(getattr(eagle3_laws, f"check_{name}"), device)
    for shape, draft in SHAPES.items():
        yield {"law": "gpt-oss", "backend": "fa3", "draft": shape}, partial(device_laws.check_gpt_oss, draft, device)
