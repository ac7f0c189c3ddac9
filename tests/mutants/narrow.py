"""A correct backend that declares little, so that there is much for it to refuse."""

from __future__ import annotations

import torch

from attn_backends.backends.fa3 import FA3Backend
from attn_backends.cache import CacheFormat
from attn_backends.contract.capabilities import Capabilities
from attn_backends.contract.kernel import Kernel
from attn_backends.selection.providers import runs_anywhere
from spec_metadata.capacity import UNIFORM_KINDS
from tests.torch_kernels import torch_kernel

_FEW = Capabilities(
    page_sizes=frozenset({16}),
    dtypes=frozenset({torch.float64}),
    head_sizes=frozenset({(6, 6)}),
    query_heads=frozenset({4}),
    max_width=2,
    graph=False,
)


class NarrowBackend(FA3Backend):
    """FA3's metadata on one page size, head size and type; no prefill, packing, trees, wide steps or graphs."""

    name = "narrow"
    formats = frozenset({CacheFormat.KV})
    kernels = (
        Kernel(
            "torch",
            torch_kernel(FA3Backend).launch,
            dict.fromkeys(UNIFORM_KINDS, _FEW),
            runs_anywhere,
        ),
    )
