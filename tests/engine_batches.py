"""Batch objects of the engines' shapes, made from a scene's tokens by each engine's own conventions.

Which lengths count the new tokens, what padding looks like, where a tree is kept: SGLang 0.5.23, vLLM 0.33.0 and
TensorRT-LLM's main branch, as docs/adapters.md has them.
"""

from __future__ import annotations

from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_backends.adapters import sglang, tensorrt_llm, vllm
from attn_backends.adapters.batch import BlockTableBatch
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.backends.reference import ReferenceBackend
from attn_backends.cache import CacheFormat
from attn_backends.conformance.scenes import Batch, Scene
from attn_backends.conformance.sizes import NUM_STEPS
from attn_backends.conformance.worlds import Setup, World
from spec_metadata import StepKind

LENS = (5, 8, 3)
BATCHES = {
    StepKind.PREFILL: Batch(StepKind.PREFILL, (0, 5, 8), widths=(6, 1, 3)),
    StepKind.DECODE: Batch(StepKind.DECODE, LENS),
    StepKind.DRAFT_DECODE: Batch(StepKind.DRAFT_DECODE, LENS),
    StepKind.TARGET_VERIFY: Batch(StepKind.TARGET_VERIFY, LENS),
    StepKind.DRAFT_EXTEND: Batch(StepKind.DRAFT_EXTEND, LENS),
}
KINDS = list(BATCHES)
BLOCK = Batch(StepKind.DRAFT_BLOCK, LENS)


class Mode(IntEnum):
    """SGLang's forward modes, in its order."""

    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    TARGET_VERIFY = 5
    DRAFT_EXTEND_V2 = 6
    PREBUILT = 7


MODES = dict(zip(KINDS, (Mode.EXTEND, Mode.DECODE, Mode.DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND_V2), strict=True))
MODES[StepKind.DRAFT_BLOCK] = Mode.TARGET_VERIFY


def sglang_scene(kind: StepKind, page_size: int = 4, topk: int = 1) -> Scene:
    batch = BLOCK if kind is StepKind.DRAFT_BLOCK else BATCHES[kind]
    return Scene(World(Setup(FA3Backend, CacheFormat.KV, page_size, topk)), batch, seed=4)


def paged_scene(batch: Batch, page_size: int = 4) -> Scene:
    return Scene(World(Setup(ReferenceBackend, CacheFormat.KV, page_size, block_table=True)), batch, seed=5)


def forward_batch(scene: Scene, dtype: torch.dtype = torch.int64, **fields: Any) -> SimpleNamespace:
    """A ForwardBatch of the scene."""
    kind, lens = scene.batch.kind, torch.tensor(scene.batch.lens, dtype=dtype)
    widths = torch.tensor(scene.widths, dtype=dtype)
    extends = kind in (StepKind.PREFILL, StepKind.DRAFT_EXTEND)
    seq_lens = lens + widths if extends or kind is StepKind.DECODE else lens
    given: dict[str, Any] = {
        "forward_mode": MODES[kind],
        "batch_size": len(lens),
        "req_pool_indices": torch.tensor(scene.table_rows, dtype=dtype),
        "seq_lens": seq_lens,
        "seq_lens_cpu": seq_lens.clone(),
        "out_cache_loc": torch.tensor(scene.write_order()),
        "extend_prefix_lens": lens.int() if extends else None,
        "extend_seq_lens_cpu": list(scene.widths) if extends else None,
        "spec_info": None,
        "_original_batch_size": None,
        "_original_forward_mode": None,
    }
    if kind is StepKind.DRAFT_DECODE:
        given["spec_info"] = SimpleNamespace(num_tokens_per_req=scene.width)
    if kind is StepKind.TARGET_VERIFY:
        given["spec_info"] = verify_input(scene)
    if kind is StepKind.DRAFT_BLOCK:
        given |= {"seq_lens_cpu": seq_lens + widths, "spec_info": dflash_input(scene.width)}
    return SimpleNamespace(**{**dict.fromkeys(sglang.REFUSED), **given, **fields})


def verify_input(scene: Scene) -> SimpleNamespace:
    """Children and siblings as SGLang links them: the later of two siblings is reached from the earlier."""
    bs, width = len(scene.requests), scene.width
    next_token, next_sibling = torch.full((2, bs, width), -1).unbind()
    for index in range(bs):
        for node in range(width - 1, 0, -1):
            parent = scene.paths[index][0][node][-2] if scene.is_tree else node - 1
            next_sibling[index, node] = next_token[index, parent]
            next_token[index, parent] = node
    return SimpleNamespace(
        draft_token=torch.arange(bs * width),
        draft_token_num=width,
        topk=scene.world.setup.topk,
        spec_steps=width - 1,
        retrieve_next_token=next_token,
        retrieve_next_sibling=next_sibling,
        custom_mask=torch.ones(1000, dtype=torch.bool),
        ragged_verify_layout=None,
    )


def dflash_input(width: int, **fields: Any) -> SimpleNamespace:
    """As DFLASH's worker makes it, for its draft's block and for the target's verify."""
    given = {"draft_token_num": width, "topk": 1, "ragged_verify_layout": None, "live_seq_lens_cpu": None}
    return SimpleNamespace(**(given | fields))


def data_parallel_padded(batch: SimpleNamespace) -> SimpleNamespace:
    """The batch after SGLang has added one row to match another rank."""
    padded = SimpleNamespace(**vars(batch))
    padded._original_batch_size, padded.batch_size = batch.batch_size, batch.batch_size + 1
    padded.req_pool_indices = pad(batch.req_pool_indices, (0, 1))
    padded.seq_lens, padded.seq_lens_cpu = (
        pad(lens, (0, 1), value=999) for lens in (batch.seq_lens, batch.seq_lens_cpu)
    )
    padded.out_cache_loc = pad(batch.out_cache_loc, (0, 7))
    if batch.extend_seq_lens_cpu is not None:
        padded.extend_prefix_lens = pad(batch.extend_prefix_lens, (0, 1))
        padded.extend_seq_lens_cpu = [*batch.extend_seq_lens_cpu, 0]
    return padded


def sglang_steps(scene: Scene) -> sglang.ForwardBatches:
    builder = sglang.BlockDraftBatches if scene.batch.kind is StepKind.DRAFT_BLOCK else sglang.ForwardBatches
    return builder(scene.world.table, scene.world.geometry, scene.world.setup.topk, NUM_STEPS)


def common_metadata(scene: Scene, dtype: torch.dtype = torch.int32, num_padded: int = 2) -> SimpleNamespace:
    """A CommonAttentionMetadata of the scene, padded at the end; of a draft loop, that of its first forward."""
    widths = [1] * len(scene.widths) if scene.drafts else list(scene.widths)
    slots = scene.write_order()[:: NUM_STEPS if scene.drafts else 1]
    starts = torch.tensor([0, *widths]).cumsum(0)
    seq_lens = torch.tensor(scene.batch.lens) + torch.tensor(widths)
    return SimpleNamespace(
        query_start_loc=pad(starts, (0, num_padded), value=sum(widths)).to(dtype),
        query_start_loc_cpu=pad(starts, (0, num_padded), value=sum(widths)).int(),
        seq_lens=pad(seq_lens, (0, num_padded)).to(dtype),
        num_reqs=len(widths) + num_padded,
        num_actual_tokens=sum(widths) + 5,
        max_query_len=max(widths),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=pad(scene.pages[scene.table_rows], (0, 0, 0, num_padded)).to(dtype),
        slot_mapping=pad(torch.tensor(slots), (0, 5), value=-1),
        causal=True,
        **dict.fromkeys(vllm.REFUSED),
    )


def trtllm_metadata(scene: Scene, dtype: torch.dtype = torch.int32, num_contexts: int = 0) -> SimpleNamespace:
    """A TrtllmAttentionMetadata of the scene; the host believes that two more drafts were accepted than were."""
    widths = [1] * len(scene.widths) if scene.drafts else list(scene.widths)
    query_lens = torch.tensor(widths, dtype=dtype)
    lens = torch.tensor(scene.batch.lens, dtype=dtype)
    return SimpleNamespace(
        seq_lens=query_lens.int(),
        seq_lens_cuda=pad(query_lens, (0, 3), value=77),
        kv_lens_cuda=pad(lens + query_lens, (0, 3), value=88),
        request_ids=[100 + row for row in scene.table_rows],
        num_contexts=num_contexts,
        kv_cache_params=SimpleNamespace(use_cache=True, num_cached_tokens_per_seq=[n + 2 for n in scene.batch.lens]),
        beam_width=1,
        is_cross=False,
        **dict.fromkeys(tensorrt_llm.REFUSED),
    )


def cache_manager(scene: Scene) -> SimpleNamespace:
    """A KVCacheManager whose requests own the blocks that the scene gave them."""
    page_size = scene.world.geometry.page_size

    def get_block_ids_per_seq(request_ids: list[int]) -> Tensor:
        requests = [scene.requests[scene.table_rows.index(request_id - 100)] for request_id in request_ids]
        rows = [list(dict.fromkeys(slot // page_size for slot in request.slots.values())) for request in requests]
        width = max(map(len, rows))
        return torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int32)

    return SimpleNamespace(tokens_per_block=page_size, get_block_ids_per_seq=get_block_ids_per_seq)


def read_vllm(scene: Scene, dtype: torch.dtype = torch.int32) -> BlockTableBatch:
    return vllm.read(common_metadata(scene, dtype), scene.world.geometry)


def read_trtllm(scene: Scene, dtype: torch.dtype = torch.int32) -> BlockTableBatch:
    world = scene.world
    return tensorrt_llm.read(trtllm_metadata(scene, dtype), cache_manager(scene), world.geometry, world.capacity)


READERS = {"vllm": read_vllm, "tensorrt_llm": read_trtllm}
