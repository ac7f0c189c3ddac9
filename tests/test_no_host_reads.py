"""Planning reads nothing back from the device (rule R10), eagerly too: a recorded graph refuses every such read. Nor do
the prefill and the cycles of a worker whose host lags.
"""

from __future__ import annotations

import pytest
import torch

from attn_backends.backend import AttentionBackend
from attn_backends.conformance.compressed_worlds import is_compressed, small
from attn_backends.errors import CaptureError
from attn_backends.graphs import RecordedGraph
from attn_backends.registry import BUILT_IN, get_backend
from attn_backends_reference.eagle.protocol import Chunk
from spec_metadata import CacheGeometry, Capacity, PackedQuery, RequestTable, Sampling, Step, UniformQuery, pad_step
from tests.no_host_reads import NoHostReads
from tests.serving_scenes import CHAIN, GRAPH, TREE, eagle_worker

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


PATHS = {
    "eager": {},
    "planned before": {**GRAPH, "planning": "before"},
    "planned in the graph": {**GRAPH, "planning": "in_graph"},
}
WORKERS = [
    ("mla", "flashinfer_mla", 16, CHAIN),
    ("mla", "flashinfer_mla", 1, TREE),
    ("mla", "trtllm_mla", 32, TREE),
    ("gqa", "fa3", 16, CHAIN),
    ("gqa", "reference", 16, TREE),
    ("v4", "dsv4", 256, CHAIN),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("model", "backend", "page_size", "draft"), WORKERS)
def test_a_worker_whose_host_lags_reads_nothing(model, backend, page_size, draft, path):
    capacity, prompts = Capacity(2, 64, page_size, **draft), ([1, 2, 3, 4, 5], [8, 9])
    worker = eagle_worker(model, backend, capacity, checking=False, host_lag=1, **PATHS[path])
    rows = [worker.slots.admit() for _ in prompts]
    for row in rows:
        worker.slots.reserve(row, 32)
        worker.admit(row, Sampling(0.7, 0.9, 20, seed=row))
    with NoHostReads():
        worker.prefill([Chunk(row, prompt, 0, 2) for row, prompt in zip(rows, prompts, strict=True)])
        worker.prefill([Chunk(rows[0], prompts[0], 2, 5)])
        for committed in ([5, 2], [9, 6]):
            worker.cycle(rows, committed)
    counts = worker.num_graph_steps if PATHS[path] else worker.num_eager_steps
    assert [counts.get(phase) for phase in ("draft", "verify", "draft_extend")] == [2, 2, 2]


READS = {
    "item": lambda lens: lens[0].item(),
    "tolist": lambda lens: lens.tolist(),
    "numpy": lambda lens: lens.numpy(),
    "mask": lambda lens: lens[lens > 9],
}


@pytest.mark.parametrize("way", READS)
def test_every_way_to_read_is_refused(way):
    with pytest.raises((AssertionError, CaptureError), match="host"), NoHostReads():
        READS[way](LENS)
