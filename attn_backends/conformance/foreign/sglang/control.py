"""A right backend behind SGLang's interface: it reads the batch object and the pools, and plans nothing.

It is what the driver is held to (`blame`). Dense attention over each request's whole row of `req_to_token`, masked by
what a row must see; slow, and the same eagerly and in a graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_backends.kernels.torch_attention import page_table_attention


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


class RightDraftBackend:
    """The backends of a draft's forwards."""

    def __init__(self, model_runner: Any, num_steps: int) -> None:
        self.attn_backends = [RightBackend(model_runner, draft) for draft in range(num_steps - 1)]

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
