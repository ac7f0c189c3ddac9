"""DeepSeek-V4's attention over a window of tokens and compressed entries, one softmax and one sink over both.

    keys[t] = rows[last `window` tokens up to t] + entries[visible(t)], of an indexed layer the index_topk best of those
    out[t]  = softmax(scale * q[t] @ keys[t].T, with the sink) @ keys[t]

A row is key and value at once. Storing writes rows, then the entries that close in this forward, then their index keys,
and last the compressors' states, which entries of later forwards read. What a rejected token leaves behind is never
seen, so rolling back is nothing but the committed length (`spec_metadata.plans.compressed`).

See DeepSeek-V4 (DeepSeek-AI, 2026), sections 2.3.1 and 2.3.2. The variant of ratio 128 that keeps a running sum instead
of states is left out: a sum can't be rolled back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheInputs, PagedCache
from attn_backends.compressed_cache import (
    CompressedCache,
    CompressedFormat,
    EntryPools,
    allocate_compressed,
    cache_reasons,
)
from attn_backends.compressed_layer import CompressedInputs, CompressedLayer, Compressor, IndexQuery, Projections
from attn_backends.contract.capabilities import FLOAT_TYPES, Capabilities, LseBase, of_listed
from attn_backends.contract.checked_layers import Use
from attn_backends.contract.kernel import Kernel, LayerShape, Scheduled
from attn_backends.errors import UnsupportedStepError
from attn_backends.kernels.compressor_operators import write_entries, write_states
from attn_backends.kernels.fp8_pages import ROW_DIM
from attn_backends.kernels.plan_operators import bind_compressed
from attn_backends.kernels.sparse_operators import select_entries, sparse_attention, sparse_attention_sm90
from attn_backends.kernels.torch_compressed import Keys, attend_rows
from attn_backends.layer import AttentionLayer, AttentionOutput, LatentQuery, joined
from attn_backends.planning.metadata import ForwardMetadata, all_rows, check_forward, slots_to_write
from attn_backends.selection.providers import runs_anywhere, runs_on_gluon, runs_on_triton
from attn_backends.vendors import flashmla_sparse
from spec_metadata import BoundStep, Buffers, BufferSpec, CacheGeometry, Capacity, Step, StepKind
from spec_metadata.plans import compressed
from spec_metadata.plans.compressed import CompressedPlan, Compression, EntryPlan

_TORCH = Capabilities(
    page_sizes=None,
    dtypes=FLOAT_TYPES,
    packed=True,
    packed_graph=True,
    lse=LseBase.NATURAL,
    window=True,
    sinks=True,
    cache_dtypes=frozenset({torch.float8_e4m3fn}),
)
_SIZES = frozenset({(ROW_DIM, ROW_DIM)})
_TRITON = replace(_TORCH, dtypes=FLOAT_TYPES - {torch.float64})
_GLUON = replace(_TORCH, dtypes=frozenset({torch.bfloat16}), head_sizes=_SIZES)


@dataclass(frozen=True, slots=True, eq=False)
class Selected:
    """The arguments of a kernel's launch in this backend.

    planned: the plan, or a vendor's `Scheduled`. entry_slots: [num_tokens, num_entries] int32, the entries that a row
    attends to and then -1; None for a layer without compression.
    """

    planned: CompressedPlan | Scheduled[CompressedPlan]
    entry_slots: Tensor | None

    @property
    def plan(self) -> CompressedPlan:
        """The plan."""
        return self.planned.plan if isinstance(self.planned, Scheduled) else self.planned


def _sources(cache: Any, selected: Selected, layer: AttentionLayer) -> tuple[Keys, Keys | None]:
    """The rows and entries that a forward attends to."""
    assert isinstance(cache, CompressedCache)
    assert isinstance(layer, CompressedLayer)
    plan = selected.plan
    rows = Keys(cache.rows.data, cache.rows.num_rows, plan.window_slots, plan.window_lens)
    if cache.compressor is None or layer.compression is None or selected.entry_slots is None:
        return rows, None
    pages, num_visible = cache.compressor.entries, plan.entries[layer.compression.ratio].num_visible
    return rows, Keys(pages.data, pages.num_rows, selected.entry_slots, num_visible)


def _launch(
    attend: Callable[..., tuple[Tensor, Tensor]], q: Tensor, cache: Any, selected: Selected, layer: AttentionLayer
) -> AttentionOutput:
    return AttentionOutput(*attend(q, *_sources(cache, selected, layer), layer.scale, layer.sinks))


def _launch_torch(q: Tensor, cache: Any, selected: Selected, layer: AttentionLayer) -> AttentionOutput:
    sources = [keys for keys in _sources(cache, selected, layer) if keys is not None]
    return AttentionOutput(*attend_rows(q, sources, layer.scale, layer.sinks))


class DSV4Backend(AttentionBackend[CompressedPlan]):
    """DeepSeek-V4's compressed attention.

    window, compressions: of its layers, which the class names because buffers are declared from them; `of` makes the
    class of others. Layers without a compression are served too. A page must be a whole number of each compression's
    blocks. The LSE that it returns is over window and entries, without the sink.
    """

    name = "dsv4"
    formats: ClassVar[frozenset[Any]] = frozenset({CompressedFormat.COMPRESSED})
    kernels = (
        flashmla_sparse.KERNEL,
        Kernel(
            "gluon",
            partial(_launch, sparse_attention_sm90),
            of_listed(_GLUON),
            runs_on_gluon,
            architectures=frozenset({9}),
            needs_layers=True,
        ),
        Kernel(
            "triton",
            partial(_launch, sparse_attention),
            of_listed(_TRITON),
            runs_on_triton,
            architectures=frozenset({8, 9, 10, 11, 12}),
        ),
        Kernel("torch", _launch_torch, of_listed(_TORCH), runs_anywhere),
    )
    window: ClassVar[int] = 128
    compressions: ClassVar[tuple[Compression, ...]] = (Compression(4, overlap=True, indexed=True), Compression(128))

    def __init__(
        self, capacity: Capacity, geometry: CacheGeometry, device: torch.device | str = "cpu", **options: Any
    ) -> None:
        super().__init__(capacity, geometry, device, **options)
        whole = self.page_multiple()
        if geometry.page_size % whole:
            nearest = max(whole, (geometry.page_size + whole // 2) // whole * whole)
            ratios = " and ".join(str(compression.ratio) for compression in self.compressions)
            raise UnsupportedStepError(
                self.name,
                [f"page size {geometry.page_size}: blocks of {ratios} tokens must not cross pages"],
                f"page size {nearest}",
            )
        self.rings = {compression: self._smallest_ring(compression) for compression in self.compressions}

    @classmethod
    def of(cls, compressions: Iterable[Compression | None], window: int | None = None) -> type[Self]:
        """The backend for layers of these compressions, None of one without, and a window (None: this class's)."""
        own: dict[int, Compression] = {}
        for each in filter(None, compressions):
            if own.setdefault(each.ratio, each) != each:
                raise UnsupportedStepError(cls.name, [f"{each} beside {own[each.ratio]}: a ratio has one form"])
        return type(cls.__name__, (cls,), {"window": window or cls.window, "compressions": tuple(own.values())})

    @classmethod
    def page_multiple(cls) -> int:
        """A page is a whole number of each compression's blocks."""
        return lcm(*(compression.ratio for compression in cls.compressions))

    @classmethod
    def buffers(cls, kind: StepKind) -> tuple[BufferSpec, ...]:
        """Windows, entries and compressor rows; of a draft block the former alone."""
        is_block = kind is StepKind.DRAFT_BLOCK
        return compressed.buffer_specs(cls.window, () if is_block else cls.compressions, is_block=is_block)

    def plans(self, step: Step, buffers: Buffers) -> tuple[CompressedPlan, ...]:
        """The windows, entries and compressor rows of each forward."""
        return compressed.view_compressed(step, buffers, self._rings_of(step.kind))

    def write(self, step: Step, buffers: Buffers) -> None:
        """Write the windows, entries and compressor rows of all forwards."""
        compressed.write_compressed(step, buffers, self.window, self._rings_of(step.kind))

    def bind_fused(self, step: Step, buffers: Buffers, bound: BoundStep | None) -> Callable[[], None]:
        """The same in one launch."""
        return bind_compressed(step, buffers, self.window, self._rings_of(step.kind), bound)

    def store(
        self,
        inputs: CacheInputs | CompressedInputs,
        cache: PagedCache | CompressedCache,
        meta: ForwardMetadata[CompressedPlan],
        layer: AttentionLayer,
    ) -> None:
        """Write this forward's rows to their slots, then the entries that close, their index keys, and the states."""
        cache, layer, shape = self._checked(cache, meta, layer, inputs.dtype)
        if layer.compression is not None:
            all_rows(self, meta)  # an entry is made of all that a forward processes
        inputs = layer.checked_inputs(inputs, slots_to_write(self, meta).shape[0])
        if meta.write_slots.shape[0] == 0:
            return
        reserved = self.geometry.reserved_page
        cache.rows.write(meta.write_slots, inputs.rows, reserved)
        if layer.compression is None:
            return
        planned = meta.schedules.planned(meta.forward, shape)
        made = Selected(planned, None).plan.entries[layer.compression.ratio]
        both = [(inputs.compressor, layer.compressor, cache.compressor), (inputs.indexer, layer.indexer, cache.indexer)]
        states = []
        for given, compressor, pools in both:
            if given is not None and compressor is not None and pools is not None:
                _store_entries(pools, given, compressor, made, layer.compression, reserved)
                states.append((pools.states.data, given))
        for into, given in states:  # after all entries: a row may take the place of one that they are made of
            write_states(into, made.state_writes, given.values, given.gates, reserved)

    def forward(
        self,
        q: Tensor | LatentQuery,
        cache: PagedCache | CompressedCache,
        meta: ForwardMetadata[CompressedPlan],
        layer: AttentionLayer,
        index: IndexQuery | None = None,
    ) -> AttentionOutput:
        """Attention of this forward's rows. q: [num_tokens, num_heads, head_dim], normed and rotated. index: what
        selects entries, for an indexed layer. The output is still rotated by its keys' angles: the model turns the
        tail of it back by the query's own.
        """
        q = joined(q)
        cache, layer, shape = self._checked(cache, meta, layer, q.dtype)
        num_tokens = all_rows(self, meta)
        layer.check_query(q, index, num_tokens)
        if num_tokens == 0:
            return AttentionOutput.of_no_rows(q, layer.v_head_dim)
        selected = Selected(meta.schedules.planned(meta.forward, shape), None)
        if layer.compression is not None:
            entries = selected.plan.entries[layer.compression.ratio]
            slots = entries.slots if index is None else _select(index, cache, selected.plan, layer)
            selected = Selected(selected.planned, slots)
        attend: Callable[..., AttentionOutput] = self.kernel_of(meta.kind).attend
        return attend(q, cache, selected, layer)

    def unsupported_reasons(self, step: Step) -> list[str]:
        """Reasons why this backend and kernel can't take a step; empty if it can. Reads no values on the device."""
        reasons = super().unsupported_reasons(step)
        if step.is_tree:
            reasons.append("topk > 1: a compressor's states are those of one chain; draft with topk = 1")
        return reasons + [reason for ring in self.rings.items() for reason in _ring_reasons(step, *ring)]

    def ring(self, layer: CompressedLayer) -> int:
        """State rows of a page in the cache of a layer; 0 if it has no compression."""
        return 0 if layer.compression is None else self.rings[layer.compression]

    def allocate_cache(self, layer: CompressedLayer, dtype: torch.dtype) -> CompressedCache:
        """A zeroed cache for a layer; `dtype` as in `allocate_compressed`."""
        return allocate_compressed(self.geometry, layer, self.ring(layer), dtype, self.device)

    def check_prefix(self, num_tokens: int) -> None:
        """Refuse to start a request on this many tokens of another one's cache if states would be missing there.

        States of the tokens before are found in the pages that hold them, so only whole pages can be shared. The ring
        of a page that is shared in part holds the states of the other request's later tokens.
        """
        page_size = self.geometry.page_size
        if num_tokens % page_size:
            raise UnsupportedStepError(
                self.name,
                [f"a prefix of {num_tokens} tokens ends inside a page of {page_size}, where its states are lost"],
                f"reuse {num_tokens // page_size * page_size} tokens",
            )

    def _rings_of(self, kind: StepKind) -> Mapping[Compression, int]:
        """State rows of a page of each compression that steps of a kind plan: a draft block's layers have none."""
        return {} if kind is StepKind.DRAFT_BLOCK else self.rings

    def _smallest_ring(self, compression: Compression) -> int:
        drafted, forwards = self.capacity.num_draft_tokens, self.capacity.num_steps - 1
        return min(compressed.min_ring(compression.read_window, drafted, forwards), self.geometry.page_size)

    def _checked(
        self,
        cache: PagedCache | CompressedCache,
        meta: ForwardMetadata[CompressedPlan],
        layer: AttentionLayer,
        dtype: torch.dtype,
    ) -> tuple[CompressedCache, CompressedLayer, LayerShape]:
        """The cache and layer as what they are, and the layer's shape, or a refusal. dtype: as of `_shape_of`."""
        check_forward(self, meta)
        what = f"{self.name} layer {layer.id}"
        if not isinstance(cache, CompressedCache):
            raise UnsupportedStepError(what, [f"a cache of {cache.format} (it takes {', '.join(self.formats)})"])
        if not isinstance(layer, CompressedLayer):
            raise UnsupportedStepError(what, [f"a plain {type(layer).__name__} (it takes a CompressedLayer)"])
        use = Use(meta.kind, dtype, is_tree=False)
        shape = self._layers.shape_of(layer, cache, use)
        if shape is None:
            reasons = self._layer_reasons(cache, layer, meta.kind)
            if meta.kind is not StepKind.IDLE:
                capabilities = self.kernel_of(meta.kind).capabilities[meta.kind]
                reasons += capabilities.layer_reasons(layer, dtype, cache.dtype)
            if reasons:
                raise UnsupportedStepError(what, reasons)
            shape = LayerShape.of(layer, dtype, cache.dtype)._replace(variant=(layer.compression, layer.index_topk))
            self._layers.take(layer, cache, use, shape)
        return cache, layer, shape

    def _layer_reasons(self, cache: CompressedCache, layer: CompressedLayer, kind: StepKind) -> list[str]:
        """Why metadata of a step kind does not describe a layer or its cache; empty if it does."""
        if layer.window != self.window:
            return [f"a window of {layer.window} tokens (it plans one of {self.window})"]
        if kind is StepKind.DRAFT_BLOCK and layer.compression is not None:
            return [f"{layer.compression} in a draft block (layers of a window alone draft them)"]
        if layer.compression not in (None, *self.compressions):
            return [f"{layer.compression} (it plans {', '.join(map(str, self.compressions))})"]
        return cache_reasons(cache, self.geometry, layer, self.ring(layer))


def _store_entries(
    pools: EntryPools,
    given: Projections,
    compressor: Compressor,
    made: EntryPlan,
    compression: Compression,
    reserved_page: int,
) -> None:
    """Write the entries of one compressor that close in a forward."""
    into = (pools.entries.data, pools.entries.num_rows, made.write_slots)
    tokens = (given.values, given.gates, pools.states.data, made.input_rows, made.state_reads, made.first_positions)
    weights, eps = (compressor.position_bias, compressor.norm_weight), compressor.norm_eps
    write_entries(*into, *tokens, *weights, eps, compressor.inv_freq, compression.overlap, reserved_page)


def _select(index: IndexQuery, cache: CompressedCache, plan: CompressedPlan, layer: CompressedLayer) -> Tensor:
    """[num_tokens, index_topk] int32: slots of the entries that each row attends to, then -1."""
    assert cache.indexer is not None
    assert layer.compression is not None
    num_visible = plan.entries[layer.compression.ratio].num_visible
    keys = (cache.indexer.entries.data, plan.page_table, plan.qo_indptr, plan.request, num_visible)
    return select_entries(index.q, index.weights, *keys, plan.max_query, layer.index_topk)


def _ring_reasons(step: Step, compression: Compression, ring: int) -> list[str]:
    """Why a ring of states can't take a step back after it; empty if it can."""
    page_size, window = step.paging.geometry.page_size, compression.read_window
    if step.kind in (StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND):
        most, asked, unit = compressed.max_rows(window, ring, page_size), step.width, "query rows per request"
    elif step.kind is StepKind.DRAFT_DECODE:
        most, asked, unit = compressed.max_draft_forwards(window, ring, page_size), step.num_forwards, "draft forwards"
    else:
        return []
    reason = f"{asked} {unit} (the {ring} state rows of ratio {compression.ratio} allow {most})"
    return [] if most is None or asked <= most else [reason]
