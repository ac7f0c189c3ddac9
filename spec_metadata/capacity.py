"""Size limits of steps: capacities, graph buckets and the extent of a buffer set.

`Capacity` is what an engine configures once, `Bucket` and `TokenBucket` name one captured graph, and `Extent` holds the
numbers that buffer sizes are expressions of (`spec_metadata.buffers`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cached_property
from numbers import Integral
from typing import ClassVar, NamedTuple

from spec_metadata.errors import InvalidStepError, describe


class StepKind(StrEnum):
    """The situations in which an engine calls attention."""

    PREFILL = "prefill"
    DECODE = "decode"
    DRAFT_DECODE = "draft_decode"
    DRAFT_BLOCK = "draft_block"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND = "draft_extend"
    IDLE = "idle"


UNIFORM_KINDS = tuple(kind for kind in StepKind if kind not in (StepKind.PREFILL, StepKind.IDLE))
"""Kinds whose requests may have one width, for which there is a `Bucket`."""

PACKED_KINDS = (StepKind.PREFILL, StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND)
"""Kinds whose rows may be packed, for which there is a `TokenBucket`."""


def ceil_div(a: int, b: int) -> int:
    """Smallest integer that is at least a / b."""
    return -(-a // b)


@dataclass(frozen=True)
class Capacity:
    """The largest step that an engine will ever build.

    max_bs: requests in one step. max_context: tokens that a request may commit. page_size: tokens in a page.
    topk: branches of a draft level. num_steps: drafted depth. num_draft_tokens: nodes of the draft tree, the root
    (the last sampled token) included. num_rerun: committed positions that a draft extend runs again before the accepted
    ones, num_steps - 1 for one MTP module per step (`docs/mtp.md`). num_extended: rows of a draft extend after those,
    at least the longest accepted path, which None stands for. An engine that extends by every verified node, as SGLang
    does, says num_draft_tokens, one with P-EAGLE's mask rows 2 * num_steps. block_size: query rows of a draft block,
    num_draft_tokens for None: the root and a mask token for each drafted one, as DFlash has it; DSpark's has no row for
    the root. A uniform step may be wider where its tokens fit into `max_kv_len` with the committed ones; a ragged one
    may not.
    """

    max_bs: int
    max_context: int
    page_size: int
    topk: int = 1
    num_steps: int = 1
    num_draft_tokens: int = 2
    num_rerun: int = 0
    num_extended: int | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, Integral) and not (value is None and field.default is None):
                raise InvalidStepError(f"{field.name} must be a whole number, got {value!r}")
        for name in ("max_bs", "max_context", "page_size", "topk", "num_steps", "block_width"):
            if getattr(self, name) < 1:
                raise InvalidStepError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 2 <= self.num_draft_tokens <= self.max_tree_nodes:
            raise InvalidStepError(
                f"num_draft_tokens counts the root and must be in [2, {self.max_tree_nodes}], the nodes of a tree of "
                f"topk={self.topk} and num_steps={self.num_steps}; got {self.num_draft_tokens}"
            )
        if self.num_rerun < 0:
            raise InvalidStepError(f"num_rerun must be at least 0, got {self.num_rerun}")
        if self.num_extended is not None and self.num_extended < self.max_accepted:
            raise InvalidStepError(
                f"num_extended must be at least {self.max_accepted}, the longest accepted path; got {self.num_extended}"
            )

    def with_draft(self, topk: int, num_steps: int, num_draft_tokens: int) -> Capacity:
        """The capacity of a set of steps within this one: its buckets are captured by backends that were built for this
        one. Raises `InvalidStepError` for a larger draft.
        """
        found = replace(
            self, topk=topk, num_steps=num_steps, num_draft_tokens=num_draft_tokens, num_extended=None, block_size=None
        )
        sizes = ("topk", "num_steps", "num_draft_tokens", "draft_room")
        larger = [
            f"{n}={getattr(found, n)} > {getattr(self, n)}" for n in sizes if getattr(found, n) > getattr(self, n)
        ]
        if larger:
            raise InvalidStepError(
                f"a set of topk={topk}, num_steps={num_steps}, num_draft_tokens={num_draft_tokens} is larger than the "
                f"capacity: {', '.join(larger)}. Build the capacity for the largest of each, or drop the set"
            )
        return found

    @property
    def max_tree_nodes(self) -> int:
        """Nodes that topk and num_steps can propose: the root, topk at depth 1, topk² at each further depth."""
        return 1 + self.topk + (self.num_steps - 1) * self.topk**2

    @cached_property
    def max_accepted(self) -> int:
        """Longest accepted path, the root included."""
        return min(self.num_steps + 1, self.num_draft_tokens)

    @cached_property
    def extend_width(self) -> int:
        """Query rows of a uniform draft extend: the positions that it runs again, and the accepted ones or more."""
        return self.num_rerun + (self.max_accepted if self.num_extended is None else self.num_extended)

    @property
    def block_width(self) -> int:
        """Query rows of a draft block."""
        return self.num_draft_tokens if self.block_size is None else self.block_size

    @cached_property
    def draft_room(self) -> int:
        """Tokens past the committed ones that a verify, the draft loop or a draft extend may write.

        A draft extend starts at position 0 where fewer than num_rerun tokens are committed, and one token always is.
        """
        extended = max(self.extend_width - 1, self.num_extended or 0)
        return max(self.num_draft_tokens, self.topk * self.num_steps, extended, self.block_width)

    @cached_property
    def max_tokens(self) -> int:
        """Tokens of a request: context plus draft room, never context alone. A table row must hold so many."""
        return self.max_context + self.draft_room

    @cached_property
    def max_pages(self) -> int:
        """Pages of a request."""
        return ceil_div(self.max_tokens, self.page_size)

    @cached_property
    def max_kv_len(self) -> int:
        """Tokens of a request's pages: `max_tokens`, rounded up to pages."""
        return self.max_pages * self.page_size

    def bucket(self, kind: StepKind, bs: int) -> Bucket:
        """The bucket in which a uniform step of this kind and batch size is captured."""
        widths = {
            StepKind.DECODE: 1,
            StepKind.DRAFT_DECODE: self.topk,
            StepKind.DRAFT_BLOCK: self.block_width,
            StepKind.TARGET_VERIFY: self.num_draft_tokens,
            StepKind.DRAFT_EXTEND: self.extend_width,
        }
        if not isinstance(kind, StepKind) or kind not in widths:
            raise InvalidStepError(
                f"kind must be a StepKind of steps of one width ({', '.join(widths)}), got {kind!r}; prefills have a "
                "prefill_bucket, and what is captured for any kind takes idle steps"
            )
        if not isinstance(bs, Integral) or bs < 1:
            raise InvalidStepError(f"a bucket holds at least 1 request, got bs={bs!r}")
        tree = self.topk > 1 and kind in (StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY)
        num_steps = self.num_steps if kind is StepKind.DRAFT_DECODE else 1
        return Bucket(kind, bs, widths[kind], num_steps, tree)

    def prefill_bucket(self, num_tokens: int) -> TokenBucket:
        """The bucket in which prefills of at most so many tokens are captured, whatever their number of requests."""
        if not isinstance(num_tokens, Integral) or num_tokens < 1:
            raise InvalidStepError(f"a bucket of prefill holds at least 1 token, got num_tokens={num_tokens!r}")
        return TokenBucket(StepKind.PREFILL, self.max_bs, num_tokens)

    def ragged_bucket(self, kind: StepKind, bs: int, num_tokens: int) -> TokenBucket:
        """The bucket in which ragged verifies of chains or draft extends are captured: of at most bs requests, with
        num_tokens rows of all. A request has at least one row, at most as many as in a uniform step.
        """
        bucket = TokenBucket(kind, bs, num_tokens)
        check_bucket(bucket)
        if kind not in (StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND):
            raise InvalidStepError(f"no {kind} step is ragged; verifies of chains and draft extends are")
        return bucket


@dataclass(frozen=True, slots=True)
class Bucket:
    """The key of a captured graph: a uniform step of one kind, padded batch size and width.

    width: query rows of a request. num_steps: drafted depth of a draft-decode step, else 1. tree: whether the step
    has a tree part (draft branches or a verify mask) beside the committed prefix.
    """

    kind: StepKind
    bs: int
    width: int
    num_steps: int = 1
    tree: bool = False

    @property
    def num_tokens(self) -> int:
        """Query rows."""
        return self.bs * self.width

    def holds(self, bs: int, num_tokens: int) -> bool:
        """Whether it is large enough. A graph has one width and refuses another, so requests count alone."""
        return bs <= self.bs

    def max_query(self, capacity: Capacity) -> int:
        """Rows of one request."""
        return self.width

    def __str__(self) -> str:
        tree = " tree" if self.tree else ""
        steps = f" num_steps={self.num_steps}" if self.kind is StepKind.DRAFT_DECODE else ""
        return f"{self.kind}{tree} bs={self.bs} width={self.width}{steps}"


@dataclass(frozen=True, slots=True)
class TokenBucket:
    """The key of a captured region over packed rows: at most `num_tokens` of them, of at most `bs` requests."""

    kind: StepKind
    bs: int
    num_tokens: int
    num_steps: ClassVar[int] = 1
    tree: ClassVar[bool] = False

    def holds(self, bs: int, num_tokens: int) -> bool:
        """Whether it is large enough."""
        return bs <= self.bs and num_tokens <= self.num_tokens

    def max_query(self, capacity: Capacity) -> int:
        """Bound on the rows of one request."""
        is_prefill = self.kind is StepKind.PREFILL
        return min(self.num_tokens, capacity.max_kv_len if is_prefill else capacity.bucket(self.kind, 1).width)

    def __str__(self) -> str:
        return f"{self.kind} bs={self.bs} num_tokens={self.num_tokens}"


AnyBucket = Bucket | TokenBucket


def check_bucket(bucket: AnyBucket) -> None:
    """Refuse what is no bucket, or one without requests or rows."""
    if not isinstance(bucket, Bucket | TokenBucket) or not isinstance(bucket.kind, StepKind):
        raise InvalidStepError(
            f"a bucket is what Capacity.bucket, prefill_bucket or ragged_bucket returns, got {describe(bucket)}"
        )
    rows = bucket.width if isinstance(bucket, Bucket) else bucket.num_tokens
    if not all(isinstance(size, Integral) for size in (bucket.bs, rows, bucket.num_steps)):
        raise InvalidStepError(f"the sizes of a bucket are whole numbers, got ({bucket})")
    if bucket.bs < 1 or bucket.num_tokens < 1:
        raise InvalidStepError(f"a bucket holds at least 1 request and 1 query row, got ({bucket})")
    if bucket.kind is not StepKind.PREFILL and bucket.num_tokens < bucket.bs:
        raise InvalidStepError(f"a bucket of {bucket.kind} steps holds a row of each request, got ({bucket})")


class Extent(NamedTuple):
    """The sizes that buffer declarations are expressions of; made from a bucket (captured) or a step (eager).

    max_pages: of one request. num_pages: of the cache, the range of page ids.
    """

    bs: int
    width: int
    num_tokens: int
    num_forwards: int
    num_writes: int
    page_size: int
    max_pages: int
    num_pages: int

    @property
    def max_kv_len(self) -> int:
        """Keys of one request that a buffer of this extent can address."""
        return self.max_pages * self.page_size

    @classmethod
    def of_bucket(cls, bucket: AnyBucket, capacity: Capacity, num_pages: int = 2**31 - 1) -> Extent:
        """Extent of a captured step: everything at the bucket's size and the whole capacity of context. Behind packed
        rows there are requests that own padded ones: one is enough, unless those can exceed what one request holds.

        num_pages: of the cache; int32's own range where it is not known.
        """
        width = bucket.max_query(capacity)
        return cls(
            bs=bucket.bs + (ceil_div(bucket.num_tokens, width) if isinstance(bucket, TokenBucket) else 0),
            width=width,
            num_tokens=bucket.num_tokens,
            num_forwards=bucket.num_steps - 1 if bucket.kind is StepKind.DRAFT_DECODE else 1,
            num_writes=bucket.num_tokens * bucket.num_steps,
            page_size=capacity.page_size,
            max_pages=capacity.max_pages,
            num_pages=num_pages,
        )
