"""Operators of `torch.library`, namespace `attn_backends`: a CPU implementation in torch, a CUDA one in Triton.

    tree_join    the drafted tokens of a tree, joined to attention over the prefix
    store_kv     write keys and values to the slots of a paged cache
    store_rows   write rows of one kind, such as MLA latents
    store_ring   keep the last positions of requests in rings

Each is one node of a graph, recorded or CUDA, and has a fake for tracing. The CPU implementations are the definition;
float64 goes to them on a GPU too. Triton is imported by the first call that needs it. They are for inference: no
gradient is defined. Defined through `Library` and not `custom_op`, whose Python wrapping costs more on every call.

A slot is page * page_size + offset. All tensors may be views with any strides, as long as the elements of one head span
less than 2**31. Pages are of float32, bfloat16, float16 or an 8-bit float type. An entry of a cache is value / scale,
so entry * scale is the value (vLLM's and SGLang's `k_scale` and `v_scale`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_backends.kernels.devices import on_its_device, undispatched
from attn_backends.kernels.torch_attention import SINK_TYPES, tree_attention

MAX_TREE_KEYS = 512
"""Drafted tokens of a request that `tree_join` reads at most on a GPU, where they are one block."""

_library = torch.library.Library("attn_backends", "DEF")
_library.define(
    "tree_join(Tensor q, Tensor k_pages, Tensor v_pages, Tensor slots, Tensor mask, Tensor prefix_out, "
    "Tensor prefix_lse, float scale, float k_scale, float v_scale, Tensor? sinks=None) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "store_kv(Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor k, Tensor v, Tensor slots, float k_scale, "
    "float v_scale) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "store_rows(Tensor(a!) pages, Tensor rows, Tensor slots, float scale) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "store_ring(Tensor(a!) hidden_rings, Tensor(b!) token_rings, Tensor hidden, Tensor tokens, Tensor rows, "
    "Tensor starts, Tensor ends, Tensor offsets) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def tree_join(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    mask: Tensor,
    prefix_out: Tensor,
    prefix_lse: Tensor,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over a tree's drafted tokens, joined to attention over the prefix by their log-sum-exp.

    q: [bs * width, num_heads, dim]. k_pages: [num_pages, page_size, num_kv_heads, dim]. v_pages: [..., v_dim]; for MLA
    both are views of the latents, with one KV head. slots: [bs, num_keys] int64, the drafted tokens of each request.
    mask: [bs, width, num_keys] bool, row sees key; a key that no row sees is not multiplied, its memory may hold NaN.
    prefix_out: [bs * width, num_heads, v_dim]. prefix_lse: [bs * width, num_heads], natural logarithm; where it is
    -inf, the row sees no prefix and prefix_out may hold anything. scale: multiplies query·key. sinks: [num_heads]
    float32, the logit of a key without value, which the prefix has not counted.

    Returns out [bs * width, num_heads, v_dim] in q's dtype and natural lse [bs * width, num_heads] in float32, or
    float64 for float64 queries, of the keys alone; a row that sees nothing gets 0 and -inf. Raises ValueError where
    shapes or types do not fit together.
    """
    return _call_tree_join(q, k_pages, v_pages, slots, mask, prefix_out, prefix_lse, scale, k_scale, v_scale, sinks)


def store_kv(
    k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, slots: Tensor, k_scale: float = 1.0, v_scale: float = 1.0
) -> None:
    """Write a row of keys and one of values to each slot, in one launch.

    k_pages: [num_pages, page_size, num_kv_heads, dim]; v_pages: [..., v_dim], of the same dtype and not overlapping. k:
    [num_tokens, num_kv_heads, dim]; v: [num_tokens, num_kv_heads, v_dim]. slots: [num_tokens] int64; of rows for one
    slot, which only padding has, any may win. A value is divided by its scale in float32, or float64 where rows or
    pages are, then rounded to the pages' dtype; 8-bit floats saturate. Raises ValueError as `tree_join`.
    """
    _call_store_kv(k_pages, v_pages, k, v, slots, k_scale, v_scale)


def store_rows(pages: Tensor, rows: Tensor, slots: Tensor, scale: float = 1.0) -> None:
    """Write a row to each slot. pages: [num_pages, page_size, dim]. rows: [num_tokens, dim]. Else as `store_kv`."""
    _call_store_rows(pages, rows, slots, scale)


def store_ring(
    hidden_rings: Tensor,
    token_rings: Tensor,
    hidden: Tensor,
    tokens: Tensor,
    rows: Tensor,
    starts: Tensor,
    ends: Tensor,
    offsets: Tensor,
) -> None:
    """Keep the last positions of requests, each with a hidden state and a token, in rings that positions address.

    hidden_rings: [num_rows, size, H] and token_rings: [num_rows, size] int64; position p lies at p % size, and a size
    of 0 keeps nothing. hidden: [num_tokens, H] of the rings' dtype; tokens: [num_tokens] int64. rows: [bs] int64, the
    ring of each request, no two alike. starts, ends: [bs] int32 or int64; request b brings positions starts[b] to
    ends[b] - 1, of which the last `size` are written. offsets: [bs] int32 or int64, where its first one lies in hidden
    and tokens. Raises ValueError where shapes or types do not fit together.
    """
    torch.ops.attn_backends.store_ring.default(hidden_rings, token_rings, hidden, tokens, rows, starts, ends, offsets)


def _tree_join_torch(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    mask: Tensor,
    prefix_out: Tensor,
    prefix_lse: Tensor,
    scale: float,
    k_scale: float,
    v_scale: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    _check_tree_join(q, k_pages, v_pages, slots, mask, prefix_out, prefix_lse, sinks)
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    place = _place(slots, k_pages)
    k, v = k_pages[place].to(dtype) * k_scale, v_pages[place].to(dtype) * v_scale
    out, lse = tree_attention(q, k, v, mask, prefix_out, prefix_lse, scale, sinks)
    return out.contiguous(), lse.contiguous()


@on_its_device
def _tree_join_cuda(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    mask: Tensor,
    prefix_out: Tensor,
    prefix_lse: Tensor,
    scale: float,
    k_scale: float,
    v_scale: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    arguments = (q, k_pages, v_pages, slots, mask, prefix_out, prefix_lse, scale, k_scale, v_scale, sinks)
    if torch.float64 in (q.dtype, k_pages.dtype):
        return _tree_join_torch(*arguments)
    from attn_backends.kernels import triton_tree

    _check_tree_join(*arguments[:7], sinks)
    return triton_tree.tree_join(*arguments)


def _tree_join_fake(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, mask: Tensor, prefix_out: Tensor, *rest: object
) -> tuple[Tensor, Tensor]:
    shape = (*q.shape[:2], v_pages.shape[3])
    lse_dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    return q.new_empty(shape), q.new_empty(shape[:2], dtype=lse_dtype)


def _store_kv_torch(
    k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, slots: Tensor, k_scale: float, v_scale: float
) -> None:
    _check_store(v_pages, v, slots)
    _store_rows_torch(k_pages, k, slots, k_scale)
    _store_rows_torch(v_pages, v, slots, v_scale)


@on_its_device
def _store_kv_cuda(
    k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, slots: Tensor, k_scale: float, v_scale: float
) -> None:
    if torch.float64 in (k_pages.dtype, k.dtype, v.dtype):
        _store_kv_torch(k_pages, v_pages, k, v, slots, k_scale, v_scale)
        return
    from attn_backends.kernels import triton_store

    _check_store(k_pages, k, slots)
    _check_store(v_pages, v, slots)
    triton_store.store_kv(k_pages, v_pages, k, v, slots, k_scale, v_scale)


def _store_rows_torch(pages: Tensor, rows: Tensor, slots: Tensor, scale: float) -> None:
    _check_store(pages, rows, slots)
    if rows.dtype is not pages.dtype or scale != 1.0:
        dtype = torch.float64 if torch.float64 in (pages.dtype, rows.dtype) else torch.float32
        limit = torch.finfo(pages.dtype).max if pages.dtype.itemsize == 1 else float("inf")
        rows = (rows.to(dtype) / scale).clamp(-limit, limit).to(pages.dtype)
    pages[_place(slots, pages)] = rows


@on_its_device
def _store_rows_cuda(pages: Tensor, rows: Tensor, slots: Tensor, scale: float) -> None:
    if torch.float64 in (pages.dtype, rows.dtype):
        _store_rows_torch(pages, rows, slots, scale)
        return
    from attn_backends.kernels import triton_store

    _check_store(pages, rows, slots)
    triton_store.store_rows(pages, rows, slots, scale)


def _store_ring_torch(
    hidden_rings: Tensor,
    token_rings: Tensor,
    hidden: Tensor,
    tokens: Tensor,
    rows: Tensor,
    starts: Tensor,
    ends: Tensor,
    offsets: Tensor,
) -> None:
    _check_store_ring(hidden_rings, token_rings, hidden, tokens, rows, starts, ends, offsets)
    size, num_tokens = token_rings.shape[1], tokens.shape[0]
    if num_tokens == 0:
        return
    first = starts.long().unsqueeze(1)
    position = ends.long().unsqueeze(1) - 1 - torch.arange(size, device=rows.device)
    source = (offsets.long().unsqueeze(1) + position - first).clamp(0, num_tokens - 1)
    place, is_given = (rows.unsqueeze(1), position % size), position >= first
    hidden_rings[place] = torch.where(is_given.unsqueeze(2), hidden[source], hidden_rings[place])
    token_rings[place] = torch.where(is_given, tokens[source], token_rings[place])


@on_its_device
def _store_ring_cuda(
    hidden_rings: Tensor,
    token_rings: Tensor,
    hidden: Tensor,
    tokens: Tensor,
    rows: Tensor,
    starts: Tensor,
    ends: Tensor,
    offsets: Tensor,
) -> None:
    from attn_backends.kernels import triton_ring

    _check_store_ring(hidden_rings, token_rings, hidden, tokens, rows, starts, ends, offsets)
    triton_ring.store_ring(hidden_rings, token_rings, hidden, tokens, rows, starts, ends, offsets)


def _nothing_fake(*arguments: object) -> None:
    """A store returns nothing."""


def _place(slots: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
    page_size = pages.shape[1]
    return torch.div(slots, page_size, rounding_mode="floor"), slots % page_size


def _check_tree_join(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    mask: Tensor,
    prefix_out: Tensor,
    prefix_lse: Tensor,
    sinks: Tensor | None,
) -> None:
    """Refuse what a kernel would read out of bounds or misread."""
    bs, width, num_keys = mask.shape
    num_rows, num_heads, dim = q.shape
    num_kv_heads, v_dim = v_pages.shape[2:]
    if (
        num_rows != bs * width
        or num_heads % num_kv_heads
        or slots.shape != (bs, num_keys)
        or k_pages.shape != (*v_pages.shape[:3], dim)
        or prefix_out.shape != (num_rows, num_heads, v_dim)
        or prefix_lse.shape != (num_rows, num_heads)
        or slots.dtype is not torch.int64
        or mask.dtype is not torch.bool
        or v_pages.dtype is not k_pages.dtype
        or (sinks is not None and (sinks.shape != (num_heads,) or sinks.dtype not in SINK_TYPES))
    ):
        names = ("q", "k_pages", "v_pages", "slots", "mask", "prefix_out", "prefix_lse")
        given = [*zip(names, (q, k_pages, v_pages, slots, mask, prefix_out, prefix_lse), strict=True)]
        given += [] if sinks is None else [("sinks", sinks)]
        raise ValueError(
            f"tree_join: {', '.join(f'{name} {list(t.shape)} {t.dtype}' for name, t in given)} do not fit together; "
            "needed are q [bs * width, num_heads, dim], pages [num_pages, page_size, num_kv_heads, dim or v_dim] of "
            "one dtype, slots [bs, num_keys] int64, mask [bs, width, num_keys] bool, prefix_out [bs * width, "
            "num_heads, v_dim], prefix_lse [bs * width, num_heads], sinks [num_heads] of 32 or 16 bits or none"
        )


def _check_store(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    if rows.shape != (*slots.shape, *pages.shape[2:]) or slots.dtype is not torch.int64:
        raise ValueError(
            f"a store of rows {list(rows.shape)} to slots {list(slots.shape)} {slots.dtype} of pages "
            f"{list(pages.shape)}; needed are rows [num_tokens, *entry], slots [num_tokens] int64 and pages "
            "[num_pages, page_size, *entry]"
        )


def _check_store_ring(
    hidden_rings: Tensor,
    token_rings: Tensor,
    hidden: Tensor,
    tokens: Tensor,
    rows: Tensor,
    starts: Tensor,
    ends: Tensor,
    offsets: Tensor,
) -> None:
    counts = (starts, ends, offsets)
    if (
        token_rings.shape != hidden_rings.shape[:2]
        or hidden.shape != (*tokens.shape, *hidden_rings.shape[2:])
        or hidden.dtype is not hidden_rings.dtype
        or any(count.shape != rows.shape or count.dtype not in (torch.int32, torch.int64) for count in counts)
        or any(tensor.dtype is not torch.int64 for tensor in (token_rings, tokens, rows))
    ):
        names = ("hidden_rings", "token_rings", "hidden", "tokens", "rows", "starts", "ends", "offsets")
        given = zip(names, (hidden_rings, token_rings, hidden, tokens, rows, *counts), strict=True)
        raise ValueError(
            f"store_ring: {', '.join(f'{name} {list(t.shape)} {t.dtype}' for name, t in given)} do not fit together; "
            "needed are hidden_rings [num_rows, size, H] and hidden [num_tokens, H] of one dtype, token_rings "
            "[num_rows, size], tokens [num_tokens] and rows [bs] int64, and starts, ends, offsets [bs] int32 or int64"
        )


_library.impl("tree_join", _tree_join_torch, "CPU")
_library.impl("tree_join", _tree_join_cuda, "CUDA")
_library.impl("store_kv", _store_kv_torch, "CPU")
_library.impl("store_kv", _store_kv_cuda, "CUDA")
_library.impl("store_rows", _store_rows_torch, "CPU")
_library.impl("store_rows", _store_rows_cuda, "CUDA")
_library.impl("store_ring", _store_ring_torch, "CPU")
_library.impl("store_ring", _store_ring_cuda, "CUDA")
torch.library.register_fake("attn_backends::tree_join", _tree_join_fake, lib=_library)
torch.library.register_fake("attn_backends::store_kv", _nothing_fake, lib=_library)
torch.library.register_fake("attn_backends::store_rows", _nothing_fake, lib=_library)
torch.library.register_fake("attn_backends::store_ring", _nothing_fake, lib=_library)
_call_tree_join = undispatched(torch.ops.attn_backends.tree_join.default, _tree_join_cuda)
_call_store_kv = undispatched(torch.ops.attn_backends.store_kv.default, _store_kv_cuda)
_call_store_rows = undispatched(torch.ops.attn_backends.store_rows.default, _store_rows_cuda)
