"""Steps of speculative decoding: layouts, trees, paging, acceptance, declared buffers and plans.

Needs torch only. How attention is computed is `attn_backends`' part.
"""

from spec_metadata.acceptance import Acceptance, accept, compaction_moves
from spec_metadata.bound_inputs import BoundInputs, BoundStep
from spec_metadata.buffers import (
    BS,
    MAX_KV_LEN,
    MAX_PAGES,
    NOTHING,
    NUM_FORWARDS,
    NUM_PAGES,
    NUM_TOKENS,
    NUM_WRITES,
    ONE,
    WIDTH,
    Arena,
    Buffers,
    BufferSpec,
    Dim,
    Producer,
    allocate,
)
from spec_metadata.capacity import AnyBucket, Bucket, Capacity, Extent, StepKind, TokenBucket
from spec_metadata.errors import InvalidStepError
from spec_metadata.layout import HostBounds, Step, next_slots
from spec_metadata.mixed import mixed_reasons, mixed_step
from spec_metadata.paging import BlockTable, CacheGeometry, Paging, RequestTable
from spec_metadata.query import BoundedQuery, PackedQuery, PaddedQuery, UniformQuery, packed_rows
from spec_metadata.sampling import Sampling, SamplingParams, choose
from spec_metadata.state import CommittedState
from spec_metadata.static_inputs import copy_step, idle_step, input_specs, misfit, pad_step, padding_step, static_step
from spec_metadata.tree import DraftBeams, DraftTree
from spec_metadata.visibility import (
    DensePart,
    HostLens,
    TreePart,
    dense_part,
    query_starts,
    real_rows,
    token_positions,
    tree_part,
    visible_pages,
    write_pages,
    write_slots,
)
from spec_metadata.widths import confident_widths, fit_widths

__all__ = [
    "BS",
    "MAX_KV_LEN",
    "MAX_PAGES",
    "NOTHING",
    "NUM_FORWARDS",
    "NUM_PAGES",
    "NUM_TOKENS",
    "NUM_WRITES",
    "ONE",
    "WIDTH",
    "Acceptance",
    "AnyBucket",
    "Arena",
    "BlockTable",
    "BoundInputs",
    "BoundStep",
    "BoundedQuery",
    "Bucket",
    "BufferSpec",
    "Buffers",
    "CacheGeometry",
    "Capacity",
    "CommittedState",
    "DensePart",
    "Dim",
    "DraftBeams",
    "DraftTree",
    "Extent",
    "HostBounds",
    "HostLens",
    "InvalidStepError",
    "PackedQuery",
    "PaddedQuery",
    "Paging",
    "Producer",
    "RequestTable",
    "Sampling",
    "SamplingParams",
    "Step",
    "StepKind",
    "TokenBucket",
    "TreePart",
    "UniformQuery",
    "accept",
    "allocate",
    "choose",
    "compaction_moves",
    "confident_widths",
    "copy_step",
    "dense_part",
    "fit_widths",
    "idle_step",
    "input_specs",
    "misfit",
    "mixed_reasons",
    "mixed_step",
    "next_slots",
    "packed_rows",
    "pad_step",
    "padding_step",
    "query_starts",
    "real_rows",
    "static_step",
    "token_positions",
    "tree_part",
    "visible_pages",
    "write_pages",
    "write_slots",
]
