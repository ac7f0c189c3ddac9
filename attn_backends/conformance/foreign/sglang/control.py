"""A right backend behind SGLang's interface: it reads the batch object and the pools, and plans nothing.

The driver is compared with it (`blame`). Dense attention over each request's whole row of `req_to_token`, masked by
what a row must see; slow, and the same eagerly and in a graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_backends.kernels.torch_attention import page_table_attention
from attn_backends.kernels.torch_compressed import Keys, attend_rows, write_rows


class RightBackend:
    """One backend. draft: of the forwards of a draft, which one, else None."""

    def __init__(self, model_runner: Any, draft: int | None = None) -> None:
        self.runner, self.draft = model_runner, draft

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing to allocate."""

    def init_forward_metadata(self, batch: Any) -> None:
        """Nothing to plan."""

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        """Nothing to plan."""

    def init_forward_metadata_in_graph(self, batch: Any) -> None:
        """Nothing to plan."""

    def forward(
        self,
        q: Tensor,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        q_rope: Tensor,
        k_rope: Any = None,
    ) -> Tensor:
        """Attention of the batch's rows, each over what its mode says."""
        batch, pool = forward_batch, self.runner.token_to_kv_pool
        if save_kv_cache:
            _store(pool, layer, batch.out_cache_loc, k, k_rope)
        bs, mode = batch.batch_size, batch.forward_mode
        lens = batch.seq_lens[:bs].to(torch.int32)
        widths = torch.full_like(lens, q.shape[0] // bs)
        if self.draft is not None:
            lens = lens + self.draft + 1
        elif mode.is_target_verify():
            lens = lens + widths
        elif not mode.is_decode():
            widths = batch.extend_seq_lens[:bs].to(torch.int32)
        starts = torch.cat((widths.new_zeros(1), widths.cumsum(0, dtype=torch.int32)))
        tokens = self.runner.req_to_token_pool.req_to_token[batch.req_pool_indices[:bs].long()]
        keys = pool.get_key_buffer(layer.layer_id).unsqueeze(1)
        max_query = q.shape[0] // bs if mode.is_decode() or mode.is_target_verify() else q.shape[0]
        out, _ = page_table_attention(
            torch.cat((q.view(q_rope.shape[0], q_rope.shape[1], -1), q_rope), dim=-1),
            keys,
            keys[..., : layer.v_head_dim],
            starts,
            tokens.clamp(0, keys.shape[0] - 1),
            lens,
            max_seqlen_q=max_query,
            causal=True,
            scale=layer.scaling,
        )
        return out.flatten(1)


class RightWindowBackend(RightBackend):
    """One backend of layers of a window, over DeepSeek-V4's pages of 8-bit rows."""

    def positions(self, batch: Any, num_rows: int) -> Tensor:
        """[num_rows] int64 the position of each row."""
        bs, mode = batch.batch_size, batch.forward_mode
        width, last = num_rows // bs, batch.seq_lens[:bs].long() - 1
        if self.draft is not None:
            last = last + self.draft + 1
        elif mode.is_target_verify():
            last = last + width
        return (last.unsqueeze(1) + torch.arange(1 - width, 1, device=last.device)).flatten()

    def forward(  # type: ignore[override]
        self,
        q: Tensor,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        compress_ratio: int,
        save_kv_cache: bool,
        attn_sink: Tensor,
    ) -> Tensor:
        """Attention of the batch's rows, each over the last tokens up to its own."""
        batch, pool, size = forward_batch, self.runner.token_to_kv_pool, self.runner.page_size
        pages, bs = pool.get_swa_raw_buffer(layer.layer_id), forward_batch.batch_size
        if save_kv_cache:
            write_rows(pages, size, batch.out_cache_loc, k, 0)
        width = q.shape[0] // bs
        behind = torch.arange(-self.runner.sliding_window_size + 1, 1, device=q.device)
        seen = self.positions(batch, q.shape[0]).unsqueeze(1) + behind
        requests = batch.req_pool_indices[:bs].long().unsqueeze(1).expand(-1, width).reshape(-1, 1)
        slots = self.runner.req_to_token_pool.req_to_token[requests, seen.clamp_min(0)]
        slots = torch.where(seen >= 0, slots, -1).to(torch.int32)
        keys = Keys(pages, size, slots, torch.full_like(slots[:, 0], slots.shape[1]))
        return attend_rows(q, [keys], layer.scaling, attn_sink)[0]


class RightDraftBackend:
    """The backends of a draft's forwards."""

    def __init__(self, model_runner: Any, num_steps: int, right: type[RightBackend] = RightBackend) -> None:
        self.attn_backends = [right(model_runner, draft) for draft in range(num_steps - 1)]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing to allocate."""

    def init_forward_metadata(self, batch: Any) -> None:
        """Nothing to plan."""

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        """Nothing to plan."""

    def init_forward_metadata_in_graph(self, batch: Any) -> None:
        """Nothing to plan."""


def _store(pool: Any, layer: Any, slots: Tensor, nope: Tensor, rope: Tensor) -> None:
    """Write latents to slots, whatever their stride."""
    rows = torch.cat((nope.flatten(1), rope.flatten(1)), dim=1)
    pool.kv_buffer[layer.layer_id].view(-1, rows.shape[1])[slots.long()] = rows
