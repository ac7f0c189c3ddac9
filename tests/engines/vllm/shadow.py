"""Every attention call compared with float64, and every write to the cache with vLLM's slots, in graph replays too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.cache import PagedLatent
from attn_backends.engines.vllm.builder import Builder, GroupMetadata
from attn_backends.engines.vllm.impls import GroupedQueryImpl, LatentImpl
from attn_backends.graphs import is_capturing, run_at_replays
from spec_metadata import Step
from tests.engines.vllm.engine import Row
from tests.engines.vllm.plain import exact_attention


class Mismatch(AssertionError):
    """A call that is not what vLLM's own metadata says."""


class Shadow:
    """compared: calls by what they were of, "draft layer, eagerly" and so on. seen: types of cache, windows, and
    whether there are sinks. compares: not while an engine is built, whose dummy batches show nothing.
    """

    def __init__(self) -> None:
        self.compared: Counter[str] = Counter()
        self.seen: set[tuple[torch.dtype, int | None, bool]] = set()
        self.compares = False
        self._known: dict[int, Tensor] = {}

    def begin(self) -> None:
        """The engine is built: compare, and count from here."""
        self.compares = True
        self.compared.clear()

    def check(self, layer: Any, cache: Any, kv_cache: Tensor, given: Any, q: Tensor, out: Tensor, rows: Any) -> None:
        """Compare one call now, and in each replay of a graph that is being recorded. rows: keys and values that were
        stored, [num_rows, KV heads, sizes]; None where vLLM stores them.
        """
        self.check_stored(layer, kv_cache, given.common.slot_mapping, rows)
        where = _where(layer)
        run_at_replays(lambda: self._check_attention(layer, cache, given.common, q, out, where))

    def check_stored(self, layer: Any, kv_cache: Tensor, slots: Tensor, rows: Any) -> None:
        """Compare what one call stored. slots: [num_rows], -1 for rows that are not stored. rows: as of `check`."""
        where = _where(layer)
        run_at_replays(lambda: self._check_writes(layer.layer_name, kv_cache, slots, rows, where))

    def _check_attention(self, layer: Any, cache: Any, common: Any, q: Tensor, out: Tensor, where: str) -> None:
        if not self.compares:
            return
        self.compared[where] += 1
        if common.max_query_len > common.block_table_tensor.shape[1] * cache.pages[0].shape[1]:
            return  # more rows than a table has pages for: padding of a rank without requests, which sees nothing
        window, sinks = getattr(layer, "sliding_window", None), getattr(layer.impl, "_sinks", None)
        scales = (
            layer._k_scale_float,
            layer._k_scale_float if isinstance(cache, PagedLatent) else layer._v_scale_float,
        )
        k, v = (pages.float() * scale for pages, scale in zip(cache.pages, scales, strict=True))
        chunk = getattr(layer, "attention_chunk_size", None)
        wanted = exact_attention(q, k, v, common, layer.impl.scale, window, sinks, chunk)
        self.seen.add((cache.dtype, window, sinks is not None))
        real = int(common.query_start_loc[common.num_reqs])
        told = ~_unwritten(q, common)[:real]
        actual, wanted = out[:real].double()[told], wanted[:real][told]
        if not torch.allclose(actual, wanted, atol=1e-4, rtol=1e-4):
            off = (actual - wanted).abs().max()
            raise Mismatch(
                f"attention of a {where}: {layer.layer_name} is off by {off:.3g}; seq_lens {common.seq_lens.tolist()}, "
                f"rows {common.query_start_loc.tolist()}"
            )

    def _check_writes(self, name: str, kv_cache: Tensor, slot_mapping: Tensor, rows: Any, where: str) -> None:
        """Since the call before, nothing changed in the cache but the null block and the slots of this one."""
        entries = kv_cache.transpose(1, 2) if kv_cache.ndim == 4 else kv_cache
        place = kv_cache.data_ptr()  # layers with and without a window share one
        before = self._known.get(place)
        first = entries.shape[1]  # behind the null block
        slots = [(row, slot) for row, slot in enumerate(slot_mapping.tolist()) if slot >= first]
        if before is not None and before.shape == entries.shape:
            changed = (entries != before).flatten(2).any(-1).flatten()
            changed[:first] = False
            changed[[slot for _, slot in slots]] = False
            if changed.any() and self.compares:
                raise Mismatch(f"writes of a {where}: {name} wrote slots {changed.nonzero().flatten().tolist()}")
        if rows is not None and self.compares and not self._stored(entries.flatten(0, 1), rows, slots):
            raise Mismatch(f"writes of a {where}: {name} did not store what it was given")
        self._known[place] = entries.clone()

    def _stored(self, flat: Tensor, rows: Tensor, slots: list[tuple[int, int]]) -> bool:
        """Whether each slot holds its row. An 8-bit cache is bytes to vLLM."""
        typed = flat.view(rows.dtype)
        return all(torch.equal(typed[slot].float(), rows[row].float()) for row, slot in slots)


def _rows(impl: Any, layer: Any, k: Tensor, v: Tensor) -> Tensor:
    """What a layer is to store: of 8 bits, divided by vLLM's scales."""
    if impl.cache_dtype is torch.float8_e4m3fn:
        k, v = k / layer._k_scale_float, v / layer._v_scale_float
    return torch.cat((k, v), -1).to(impl.cache_dtype)


def _where(layer: Any) -> str:
    """Of a call, in words."""
    return f"{'draft' if layer.is_draft_layer else 'target'} layer, {'in a graph' if is_capturing() else 'eagerly'}"


def _unwritten(q: Tensor, common: Any) -> Tensor:
    """[num_rows] bool: rows that vLLM gives no slot, of queries from memory that nobody wrote. Between pieces of graphs
    its MTP modules have a row of NaN for a token that they do not know yet, and read nothing of its output.
    """
    return ~q.flatten(1).isfinite().all(dim=1) & (common.slot_mapping[: len(q)] < 0)


@contextmanager
def stepwise(row: Row) -> Iterator[None]:
    """The draft loop as the row has it: vLLM fuses it wherever a builder can plan in the graph."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Builder, "supports_draft_decode_metadata_update", row.fused)
        yield


@contextmanager
def compared() -> Iterator[Shadow]:
    """Engines that are built and run inside compare every call of our backends, and the host's bounds of lengths with
    the device's lengths.
    """
    shadow, patch = Shadow(), pytest.MonkeyPatch()
    given_of, forward, forward_mqa = Builder._given, GroupedQueryImpl.forward, LatentImpl.forward_mqa
    store, plan = GroupedQueryImpl.do_kv_cache_update, AttentionBackend.init_forward_metadata

    def with_common(self: Any, plan: Any, common: Any) -> GroupMetadata:
        given = given_of(self, plan, common)
        given.common = getattr(common, "whole", common)  # of the requests, where `common` has their chunks
        return given

    def compared_forward(self: Any, layer: Any, q: Any, k: Any, v: Any, kv_cache: Any, given: Any, **rest: Any) -> Any:
        result = forward(self, layer, q, k, v, kv_cache, given, **rest)
        if given is not None:
            rows = _rows(self, layer, k, v)
            shadow.check(layer, self.pages(layer), kv_cache, given, q, rest["output"], rows)
        return result

    def compared_store(self: Any, layer: Any, k: Any, v: Any, kv_cache: Any, slots: Any) -> None:
        store(self, layer, k, v, kv_cache, slots)
        shadow.check_stored(layer, kv_cache, slots, _rows(self, layer, k, v))

    def compared_mqa(self: Any, q: Any, kv_cache: Any, given: Any, layer: Any) -> Any:
        result = forward_mqa(self, q, kv_cache, given, layer)
        shadow.check(layer, self.pages(layer), kv_cache, given, torch.cat(q, dim=-1), result[0], None)
        return result

    def checked_plan(self: Any, step: Step) -> Any:
        lens, bound = step.seq_lens[: int(step.num_real)].tolist(), step.max_committed
        if shadow.compares and bound is not None and max(lens, default=0) > bound:
            raise Mismatch(f"a {step.kind} step is planned for {bound} committed tokens at most, and has {lens}")
        return plan(self, step)

    patch.setattr(AttentionBackend, "init_forward_metadata", checked_plan)
    patch.setattr(Builder, "_given", with_common)
    patch.setattr(GroupedQueryImpl, "forward", compared_forward)
    patch.setattr(GroupedQueryImpl, "do_kv_cache_update", compared_store)
    patch.setattr(LatentImpl, "forward_mqa", compared_mqa)
    try:
        yield shadow
    finally:
        patch.undo()
