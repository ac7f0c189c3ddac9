"""SGLang's attention layers and KV pools, as the library sees them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_backends.cache import CacheFormat, CacheInputs, KeyValues, Latents, PagedCache, PagedKV, PagedLatent
from attn_backends.errors import UnsupportedStepError
from attn_backends.layer import AttentionLayer

_READ = frozenset({"q_rope", "k_rope", "sinks"})


class Layers:
    """The layers of one model over one KV pool.

    pool: MHATokenToKVPool or MLATokenToKVPool of SGLang, [slots, heads, dim] for each layer.
    """

    def __init__(self, pool: Any, page_size: int, format: CacheFormat) -> None:
        self._pool, self._page_size, self._is_mla = pool, page_size, format is CacheFormat.LATENT
        self._known: dict[int, tuple[AttentionLayer, PagedCache]] = {}

    def of(self, layer: Any, sinks: Tensor | None = None) -> tuple[AttentionLayer, PagedCache]:
        """A layer and its cache, made when it first attends. layer: SGLang's RadixAttention. The pool is asked each
        time, because it waits there for layers that are still loaded from the host.
        """
        buffers = self._buffers(layer)
        known = self._known.get(layer.layer_id)
        if known is None or known[1].pages[0].data_ptr() != buffers[0].data_ptr():
            known = self._known[layer.layer_id] = layer_of(layer, sinks), self._cache(layer, buffers)
        return known

    def _buffers(self, layer: Any) -> tuple[Tensor, ...]:
        if self._is_mla:
            return (self._pool.get_key_buffer(layer.layer_id),)
        return tuple(self._pool.get_kv_buffer(layer.layer_id))

    def _cache(self, layer: Any, buffers: tuple[Tensor, ...]) -> PagedCache:
        pages = [buffer.view(-1, self._page_size, *buffer.shape[1:]) for buffer in buffers]
        if self._is_mla:
            return PagedLatent(pages[0].squeeze(2), rank=layer.v_head_dim)
        return PagedKV(*pages)

    def queries(self, q: Tensor, layer: Any, extras: dict[str, Any]) -> Tensor:
        """[rows, heads, head_dim]; of MLA (latent, rope), however SGLang hands them over."""
        heads, q_rope = layer.tp_q_head_num, extras.get("q_rope")
        if q_rope is None:
            return q.reshape(-1, heads, layer.head_dim)
        rope = layer.head_dim - layer.v_head_dim
        return torch.cat((q.reshape(-1, heads, layer.v_head_dim), q_rope.reshape(-1, heads, rope)), -1)

    def entries(self, k: Tensor, v: Tensor, layer: Any, extras: dict[str, Any], rows: slice) -> CacheInputs:
        """The cache inputs of some rows of k and v."""
        if not self._is_mla:
            keys = k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim)
            return KeyValues(keys[rows], v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim)[rows])
        latent, k_rope = k.reshape(k.shape[0], -1)[rows], extras.get("k_rope")
        return Latents(latent if k_rope is None else torch.cat((latent, k_rope.reshape(k.shape[0], -1)[rows]), -1))


def layer_of(layer: Any, sinks: Tensor | None = None) -> AttentionLayer:
    """A RadixAttention. Its sliding_window_size leaves out the row itself, and is negative for none."""
    window = layer.sliding_window_size
    return AttentionLayer(
        id=layer.layer_id,
        num_heads=layer.tp_q_head_num,
        num_kv_heads=layer.tp_k_head_num,
        head_dim=layer.head_dim,
        v_head_dim=layer.v_head_dim,
        scale=layer.scaling,
        window=None if window is None or window < 0 else window + 1,
        sinks=sinks,
        k_scale=layer.k_scale_float or 1.0,
        v_scale=layer.v_scale_float or 1.0,
    )


def check_extras(layer: Any, extras: dict[str, Any]) -> None:
    """Refuse what a model passes to its attention that nothing here reads, but for values that ask for nothing."""
    given = sorted(
        name for name, value in extras.items() if name not in _READ and value is not None and value is not False
    )
    if given:
        raise UnsupportedStepError(
            f"SGLang's layer {layer.layer_id}",
            [f"arguments {', '.join(given)}"],
            "serve this model with SGLang's backend",
        )
