"""Planning reads nothing back from the device (rule R10), eagerly too: a recorded graph refuses every such read."""

from __future__ import annotations

import pytest
import torch

from attn_backends.base import AttentionBackend
from attn_backends.conformance.compressed_worlds import is_compressed, small
from attn_backends.errors import CaptureError
from attn_backends.graphs import RecordedGraph
from attn_backends.registry import BUILT_IN, get_backend
from spec_metadata import CacheGeometry, Capacity, PackedQuery, RequestTable, Step, UniformQuery, pad_step

CAPACITY = Capacity(max_bs=4, max_context=80, page_size=32, topk=2, num_steps=3, num_draft_tokens=6)
GEOMETRY = CacheGeometry(num_pages=20, page_size=32)
TABLE = (torch.arange(1, 4 * CAPACITY.max_kv_len + 1) % GEOMETRY.num_slots).int().view(4, -1)
PAGING = RequestTable(TABLE, torch.tensor([2, 3]), GEOMETRY)
LENS = torch.tensor([5, 70])
MASK = torch.ones(2, 6, 6, dtype=torch.bool).tril()
STEPS = {
    "prefill": Step.prefill(PackedQuery.of([3, 2]), LENS, PAGING, max_committed=70),
    "decode": Step.decode(LENS, PAGING),
    "draft chain": Step.draft_decode(1, 3, LENS, PAGING),
    "draft tree": Step.draft_decode(2, 3, LENS, PAGING),
    "verify chain": Step.target_verify(6, LENS, PAGING),
    "verify tree": Step.target_verify(6, LENS, PAGING, tree_mask=MASK),
    "extend": Step.draft_extend(UniformQuery(4), LENS, PAGING),
}


def backend_of(name: str) -> AttentionBackend:
    """A backend, with small ratios where it compresses: its own need larger pages."""
    found = get_backend(name)
    return (small(found) if is_compressed(found) else found)(CAPACITY, GEOMETRY)


CASES = [(name, what) for name in BUILT_IN for what, step in STEPS.items()
         if not (step.is_tree and is_compressed(get_backend(name)))]  # fmt: skip


@pytest.mark.parametrize(("name", "what"), CASES)
def test_planning_an_eager_step_reads_nothing(name, what):
    backend = backend_of(name)
    RecordedGraph().capture(lambda: backend.init_forward_metadata(STEPS[what]))


@pytest.mark.parametrize(("name", "what"), [case for case in CASES if case[1] != "prefill"])
def test_a_replay_reads_nothing(name, what):
    backend, step = backend_of(name), STEPS[what]
    meta = backend.capture(step.bucket(3), PAGING)
    padded = pad_step(step, step.bucket(3), CAPACITY)
    RecordedGraph().capture(lambda: backend.replay(meta, step))
    RecordedGraph().capture(lambda: backend.replay(meta, padded))


def test_checking_mode_does_read():
    backend = get_backend("fa3")(CAPACITY, GEOMETRY, checking=True)
    with pytest.raises(CaptureError):
        RecordedGraph().capture(lambda: backend.init_forward_metadata(STEPS["decode"]))
