"""Small steps that show what there is to see: chains, trees, drafts, packed rows and a prefill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.errors import UnsupportedStepError
from attn_backends.explain.picture import Picture, explain
from attn_backends.explain.reading import Reader
from spec_metadata import (
    BlockTable,
    Bucket,
    CacheGeometry,
    Capacity,
    PackedQuery,
    Paging,
    Step,
    TokenBucket,
)

LENS = (30, 140)  # the first crosses a page of 32 with what it drafts, the second a window of 128
WIDTHS = (2, 4)
TOPK, NUM_STEPS = 2, 3
NUM_NODES = 6
PARENTS = (-1, 0, 0, 1, 1, 2)  # of each node of the tree that is verified
PAGE_SIZE = 32
OTHER_LENS = (5, 1)  # what a graph is captured on


@dataclass(frozen=True)
class Example:
    """about: what it shows. make: (committed tokens, their paging) -> the step. ancestors: of a drafted tree."""

    about: str
    make: Callable[[Tensor, Paging], Step]
    topk: int = 1
    ancestors: tuple[tuple[tuple[int, ...], ...], ...] = ()


def _tree_mask(bs: int) -> Tensor:
    mask = torch.eye(NUM_NODES, dtype=torch.bool)
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask.expand(bs, -1, -1).clone()


EXAMPLES = {
    "chain": Example("a verify of 4 drafted tokens in a chain", lambda lens, p: Step.target_verify(4, lens, p)),
    "tree": Example(
        "a verify over a tree of 6 drafted tokens",
        lambda lens, p: Step.target_verify(NUM_NODES, lens, p, tree_mask=_tree_mask(len(lens))),
        TOPK,
    ),
    "draft": Example("the forwards of a drafted chain", lambda lens, p: Step.draft_decode(1, NUM_STEPS, lens, p)),
    "draft-tree": Example(
        "the forwards of a draft with 2 branches",
        lambda lens, p: Step.draft_decode(TOPK, NUM_STEPS, lens, p),
        TOPK,
        (((0,), (1,)), ((1, 0), (1, 1))),
    ),
    "packed": Example(
        "a draft extend over 2 and 4 accepted tokens, packed",
        lambda lens, p: Step.draft_extend(PackedQuery.of(WIDTHS[: len(lens)]), lens, p),
    ),
    "prefill": Example(
        "chunks of 2 and 4 prompt tokens after cached ones",
        lambda lens, p: Step.prefill(PackedQuery.of(WIDTHS[: len(lens)]), lens, p),
    ),
    "decode": Example("plain decoding, a token a request", lambda lens, p: Step.decode(lens, p)),
}


def example_picture(
    backend: type[AttentionBackend], name: str, *, kernel: str = "auto", device: str = "cpu", captured: bool = False
) -> Picture:
    """The picture of an example. captured: metadata captured for one request more, on other lengths, and replayed.

    Raises `UnsupportedStepError` where the backend takes no such step.
    """
    example, page_size = EXAMPLES[name], _page_size(backend)
    capacity = Capacity(
        max_bs=len(LENS) + 1,
        max_context=max(LENS) + 1,
        page_size=page_size,
        topk=example.topk,
        num_steps=NUM_STEPS,
        num_draft_tokens=NUM_NODES if example.topk > 1 else 4,
    )
    geometry = CacheGeometry(1 + 2 * capacity.max_pages + 1, page_size)
    made = backend(capacity, geometry, device, kernel=kernel)
    step = example.make(torch.tensor(LENS, device=device), _paging(capacity, geometry, device))
    ancestors = [torch.tensor([paths] * len(LENS), device=device) for paths in example.ancestors]
    if not captured:
        return explain(made.init_forward_metadata(step), step, ancestors)
    meta = made.capture(_bucket(step), step.paging)
    made.replay(meta, example.make(torch.tensor(OTHER_LENS, device=device), step.paging))
    reader = Reader(meta)
    made.replay(meta, step)
    return explain(reader, step, ancestors)


def _paging(capacity: Capacity, geometry: CacheGeometry, device: str) -> BlockTable:
    """A block table of pages out of order."""
    pages = torch.arange(1, 1 + 2 * capacity.max_pages, device=device)
    return BlockTable(pages.flip(0).view(capacity.max_pages, 2).T.contiguous(), geometry)


def _bucket(step: Step) -> Bucket | TokenBucket:
    """One with room for a request more."""
    if isinstance(step.query, PackedQuery):
        return TokenBucket(step.kind, step.bs + 1, step.num_tokens + 2)
    return step.bucket(step.bs + 1)


def _page_size(backend: type[AttentionBackend]) -> int:
    """The example's page size, or the least above that the backend takes."""
    multiple = backend.page_multiple()
    size = -(-PAGE_SIZE // multiple) * multiple
    limits = [c.page_sizes for kernel in backend.kernels for c in kernel.capabilities.values() if c.page_sizes]
    if not limits or any(size in limit for limit in limits):
        return size
    least = min((each for limit in limits for each in limit if each % multiple == 0), default=0)
    if not least:
        raise UnsupportedStepError(backend.name, [f"no page size is a multiple of {multiple}"])
    return least
