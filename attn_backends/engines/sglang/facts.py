"""Facts about one model runner of SGLang, read once when the server starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from attn_backends.adapters.sglang import BlockDraftBatches, ForwardBatches, geometry
from attn_backends.cache import CacheFormat
from spec_metadata import Capacity, StepKind

BLOCKS = ("DFLASH", "DSPARK")
"""Algorithms whose draft proposes a block in one forward. They have no steps: SGLang sets their number to 1."""
RAGGED = "DSPARK"
"""The one of them whose verifies may have another number of rows for each request."""


@dataclass(frozen=True, slots=True, eq=False)
class RunnerFacts:
    """Facts about a target's or a draft's model runner.

    batches: makes steps of its batches. capacity: the largest step. pool: its KV pool. layers: its model's attention
    layers (RadixAttention). kinds: of steps that it will run. in_blocks: whether the draft proposes blocks, of whose
    steps SGLang has no exact lengths on the host. is_ragged: whether the device divides a verify's rows among requests
    (SGLANG_RAGGED_VERIFY_MODE=compact). mixes: whether SGLang puts prompts and running requests into one
    batch (--enable-mixed-chunk). max_context: its model's context length, in tokens.
    """

    batches: ForwardBatches
    capacity: Capacity
    device: torch.device
    pool: Any
    layers: Sequence[Any]
    format: CacheFormat
    kinds: tuple[StepKind, ...]
    in_blocks: bool
    is_ragged: bool
    mixes: bool
    dtype: torch.dtype
    cache_dtype: torch.dtype
    max_context: int

    @classmethod
    def of(cls, runner: Any, spec: Any, layers: Sequence[Any], *, mixes: bool, compact: bool = False) -> Self:
        """The facts of a runner with its pools. spec: SGLang's speculative options, whose values are None without
        speculation, and of no step where it adapts and drafts nothing. compact: its mode of verifies
        (SGLANG_RAGGED_VERIFY_MODE).
        """
        table, page_size = runner.req_to_token_pool.req_to_token, runner.page_size
        num_nodes, in_blocks = max(spec.speculative_num_draft_tokens or 0, 2), spec.speculative_algorithm in BLOCKS
        num_drafted = num_nodes - 1 if in_blocks else spec.speculative_num_steps or 0
        topk, num_steps = spec.speculative_eagle_topk or 1, max(num_drafted, 1)
        sizes = {"page_size": page_size, "topk": topk, "num_steps": num_steps, "num_draft_tokens": num_nodes}
        room = Capacity(max_bs=1, max_context=1, num_extended=num_nodes, **sizes).draft_room
        pool = geometry(runner.token_to_kv_pool.size, page_size)
        drafts_blocks = in_blocks and runner.is_draft_worker
        if drafts_blocks:  # DSpark's are shorter by a row where the root's drafts, too
            sizes["block_size"] = runner.decode_num_tokens_per_req()
        batches, kinds = ForwardBatches, kinds_of(is_draft=runner.is_draft_worker, num_steps=num_drafted, mixes=mixes)
        if drafts_blocks:  # it never runs over prompts: SGLang writes their keys to its pool
            batches, kinds = BlockDraftBatches, (StepKind.DRAFT_BLOCK,)
        return cls(
            batches=batches(table, pool, topk, num_steps),
            capacity=Capacity(
                max_bs=table.shape[0], max_context=table.shape[1] - room, num_extended=num_nodes, **sizes
            ),
            device=torch.device(runner.device),
            pool=runner.token_to_kv_pool,
            layers=tuple(layers),
            format=CacheFormat.LATENT if runner.use_mla_backend else CacheFormat.KV,
            kinds=kinds,
            in_blocks=in_blocks,
            is_ragged=compact and spec.speculative_algorithm == RAGGED,
            mixes=mixes,
            dtype=runner.dtype,
            cache_dtype=runner.kv_cache_dtype,
            max_context=runner.model_config.context_len,
        )


def kinds_of(*, is_draft: bool, num_steps: int, mixes: bool) -> tuple[StepKind, ...]:
    """The kinds of steps that a runner runs. Beside prompts a request decodes one token, with a draft too. num_steps: 0
    for no draft.
    """
    if num_steps == 0:
        return StepKind.PREFILL, StepKind.DECODE
    decodes = (StepKind.DECODE,) if mixes else ()
    if not is_draft:
        return StepKind.PREFILL, StepKind.TARGET_VERIFY, *decodes
    drafts = (StepKind.DRAFT_DECODE,) if num_steps > 1 else ()
    return StepKind.PREFILL, *drafts, StepKind.DRAFT_EXTEND, *decodes
