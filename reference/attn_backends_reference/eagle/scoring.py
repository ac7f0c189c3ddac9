"""Teacher-forced logits: a text is fed through the target's own steps, and every token's scores are kept.

What speculative decoding accepted can be checked with them: verify rows must match width-1 decode of the same prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends_reference.eagle.phases import Model
from attn_backends_reference.eagle.protocol import Chunk
from attn_backends_reference.eagle.worker import TargetWorker
from spec_metadata import RequestTable, Step, token_positions
from spec_metadata.layout import HostBounds

MakeStep = Callable[[Tensor, RequestTable, HostBounds], Step]


def decode_logits(worker: TargetWorker, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """[len(tokens) - 1, vocab]: scores of tokens[1:], each from a decode step of width 1 after the tokens before it."""

    def step(lens: Tensor, paging: RequestTable, host: HostBounds) -> Step:
        return Step.decode(lens, paging, **host)

    return _teacher_forced(worker, prompt, tokens, worker.backends.decode, step)


def verify_logits(worker: TargetWorker, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """[len(tokens) - 1, vocab]: the same scores from verify steps over runs of the text.

    A worker that drafts trees verifies each run as a tree of one path, so that the kernels compared are those it uses.
    """
    width = worker.capacity.num_draft_tokens
    path = torch.ones(1, width, width, dtype=torch.bool, device=worker.device).tril()

    def step(lens: Tensor, paging: RequestTable, host: HostBounds) -> Step:
        return Step.target_verify(width, lens, paging, tree_mask=path if worker.capacity.topk > 1 else None, **host)

    return _teacher_forced(worker, prompt, tokens, worker.backends.verify, step)


@torch.no_grad()
def _teacher_forced(
    worker: TargetWorker, prompt: Sequence[int], tokens: Sequence[int], backend: AttentionBackend, make_step: MakeStep
) -> Tensor:
    """Prefill the prompt, then feed tokens[:-1] through eager steps of one width; the last is filled with zeros."""
    row, size = worker.slots.admit(), worker.chunk
    worker.slots.reserve(row, len(prompt) + len(tokens) + worker.capacity.draft_room)
    for start in range(0, len(prompt), size):
        worker.target_prefill([Chunk(row, prompt, start, min(start + size, len(prompt)))])
    model = Model(worker.target, worker.target_caches, backend)
    paging = worker.slots.paging(torch.tensor([row], device=worker.device))
    given, rows = list(tokens[:-1]), list[Tensor]()
    while given:
        committed = len(prompt) + sum(row.shape[0] for row in rows)
        lens = torch.tensor([committed], dtype=torch.int32, device=worker.device)
        step = make_step(lens, paging, HostBounds(seq_lens_cpu=[committed]))
        run, given = given[: step.width], given[step.width :]
        inputs = torch.tensor(run + [0] * (step.width - len(run)), device=worker.device)
        meta = backend.init_forward_metadata(step)
        hidden = worker.target.forward(inputs, token_positions(step), model.attention(meta.at()))
        rows.append(worker.target.logits(hidden)[: len(run)])
    worker.slots.release(row)
    return torch.cat(rows)
