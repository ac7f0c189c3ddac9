"""A correct backend whose kernel multiplies what no row sees of a visible page by zero, and says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attn_backends.backends.fa3 import FA3Backend
from attn_backends.cache import CacheFormat, PagedCache
from attn_backends.layer import AttentionLayer, AttentionOutput
from spec_metadata.plans.ragged import RaggedPlan
from tests.mutants.mutant import mutant
from tests.torch_kernels import torch_kernel

TORCH = torch_kernel(FA3Backend)


def touched(plan: RaggedPlan, page_size: int) -> Tensor:
    """[n] int64: the pages of the requests' tokens."""
    num_pages = (plan.seqused_k + page_size - 1) // page_size
    column = torch.arange(plan.page_table.shape[1], device=plan.page_table.device)
    pages = torch.where(column < num_pages.unsqueeze(1), plan.page_table, plan.page_table[:, :1])
    return pages.flatten().long()


def launch(q: Tensor, cache: PagedCache, plan: RaggedPlan, layer: AttentionLayer) -> AttentionOutput:
    """Attention that reads whole pages."""
    out, lse = TORCH.launch(q, cache, plan, layer)
    values = cache.pages[1]
    unseen = values[touched(plan, values.shape[1])].to(out.dtype) * 0
    return AttentionOutput(out + unseen.sum(), lse)


class OverReadingBackend(FA3Backend):
    """FA3's metadata under a kernel that reads whole pages."""

    name = "over_reading"
    formats = frozenset({CacheFormat.KV})
    kernels = (
        replace(
            TORCH,
            launch=launch,
            capabilities={kind: replace(known, over_read=True) for kind, known in TORCH.capabilities.items()},
        ),
    )


@mutant(
    "an over-read that was declared and never checked",
    "poison.pages_that_no_row_sees",
    backend=f"{__name__}:{OverReadingBackend.__name__}",
)
def page_behind_read_too(patch: pytest.MonkeyPatch) -> None:
    """The kernel loads the page that lies after each of its own in memory."""
    right = touched

    def one_more(plan: RaggedPlan, page_size: int) -> Tensor:
        return (right(plan, page_size) + 1).clamp(max=plan.page_table.max())

    patch.setitem(globals(), "touched", one_more)
