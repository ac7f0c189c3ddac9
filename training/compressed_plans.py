"""What DeepSeek-V4's queries see: whole windows, the draft's unrolled training steps, a chain behind a prefix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from training import compressed
from training.compressed import best, closed_blocks, entries_of, index_scores, slots

EVERY = 7
"""The indexer learns from every seventh query: coprime to the ratio, so that each phase of a block occurs."""
FIRST = 10
"""The first of them, late enough to see two entries."""


class Whole:
    """Whole windows. With ``record``, keeps what ``Nodes`` needs of each layer (``self.kv[layer]``).

    Args:
        selected: whether a query sees the indexer's choice of entries; else it sees all closed blocks'.
        record: whether to keep rows.
    """

    def __init__(self, selected: bool = True, record: bool = False) -> None:
        self.selected, self.record = selected, record
        self.kv: dict[int, tuple[Tensor, ...]] = {}

    def attend(self, module: Any, x: Tensor, residual: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """See ``Plan``."""
        compressor = module.compressor
        kept: tuple[Tensor, ...] = (kv,)
        if compressor is None:
            out, _ = compressed.band(q, kv, module.sliding_window, module.sinks)
        else:
            entries, *projected = entries_of(compressor, x)
            positions = torch.arange(x.shape[1], device=x.device)[None]
            closed = closed_blocks(positions, entries.shape[1], compressor.compress_rate)
            visible, index = self.choose(compressor, x, residual, closed, positions)
            out, weights = compressed.band(q, kv, module.sliding_window, module.sinks, entries, visible)
            self.learn(compressor, x, residual, weights, visible, positions)
            kept += (entries, *projected, *index)
        if self.record:
            self.kv[module.layer_idx] = kept
        return out

    def choose(
        self, compressor: Any, x: Tensor, residual: Tensor, closed: Tensor, positions: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What each query sees of the closed blocks, and the indexer's keys and projections if it was asked."""
        if not (self.selected and hasattr(compressor, "indexer")):
            return closed, ()
        with torch.no_grad():
            index = entries_of(compressor.indexer, x)
            scores = index_scores(compressor.indexer, x, residual, index[0], positions)
            return best(scores, closed, compressor.indexer.index_topk), index

    def learn(
        self, compressor: Any, x: Tensor, residual: Tensor, weights: Tensor, visible: Tensor, positions: Tensor
    ) -> None:
        """Nothing to learn here."""

    def routed(self, scores: Tensor, chosen: Tensor) -> None:
        """Nothing to learn here."""


class Training(Whole):
    """Whole windows that also collect ``losses``: the indexer's and the router's own."""

    def __init__(self, selected: bool) -> None:
        super().__init__(selected)
        self.losses: list[Tensor] = []

    def learn(
        self, compressor: Any, x: Tensor, residual: Tensor, weights: Tensor, visible: Tensor, positions: Tensor
    ) -> None:
        """The indexer's softmax should be the attention's mass on the entries, all heads together."""
        if not hasattr(compressor, "indexer"):
            return
        indexer, some = compressor.indexer, slice(FIRST, None, EVERY)
        keys, _, _ = entries_of(indexer, x.detach())
        scores = index_scores(
            indexer, x[:, some].detach(), residual[:, some].detach(), keys, positions[:, some].contiguous()
        )
        mass = weights[:, some].detach().float().sum(2)
        goal = mass / mass.sum(-1, keepdim=True).clamp(min=1e-9)
        logs = scores.masked_fill(~visible[:, some], -1e9).log_softmax(-1)
        self.losses.append(0.1 * -(goal * logs).sum(-1).mean())

    def routed(self, scores: Tensor, chosen: Tensor) -> None:
        """The experts' shares should be even (Switch Transformer's loss)."""
        share = (scores / scores.sum(-1, keepdim=True)).mean((0, 1))
        self.losses.append(0.01 * scores.shape[-1] * (share * chosen.mean((0, 1))).sum())


class Unrolled(Whole):
    """The draft's unrolled training steps over one window, as ``training.attention.Unrolled``, within its window."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Tensor] = []

    def attend(self, module: Any, x: Tensor, residual: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """See ``Plan``; row ``i`` of step ``s`` is at position ``i + s`` of the window."""
        self.steps.append(kv)
        depth = len(self.steps) - 1
        own = [step[:, : q.shape[1]] for step in self.steps]
        return compressed.band(q, own[0], module.sliding_window - depth, module.sinks, own=own[1:])[0]


class Recorder(Whole):
    """``Whole`` that records."""

    def __init__(self) -> None:
        super().__init__(record=True)


class Nodes(Whole):
    """A chain of nodes behind a recorded prefix; arguments as ``training.attention.Nodes``.

    Node ``j``, counting the earlier ones, is at position ``prefix + j``, where ``prefix`` is the number of prefix rows.
    """

    def __init__(
        self,
        kv: dict[int, tuple[Tensor, ...]],
        seen: Tensor,
        mask: Tensor,
        earlier: dict[int, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.prefix, self.seen, self.mask, self.saved = seen.sum(1), seen, mask, kv
        self.nodes = dict(earlier or {})

    def attend(self, module: Any, x: Tensor, residual: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """See ``Plan``."""
        layer = module.layer_idx
        chain = torch.cat((self.nodes[layer], kv), 1) if layer in self.nodes else kv
        self.nodes[layer] = chain
        saved, *compressed = self.saved[layer]
        at = self.prefix[:, None] + torch.arange(chain.shape[1] - q.shape[1], chain.shape[1], device=q.device)
        row = torch.arange(saved.shape[1], device=q.device)
        visible = [self.seen[:, None] & (row > at[..., None] - module.sliding_window), self.mask]
        keys = [saved, chain]
        if module.compressor is not None:
            entries, seen = self.compressed(module.compressor, x, residual, at, compressed)
            keys.append(entries)
            visible.append(seen)
        bank = torch.cat(keys, 1)
        scores = torch.einsum("bthd,bnd->bthn", q, bank).float() * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~torch.cat(visible, -1).unsqueeze(2), -torch.inf)
        sinks = module.sinks.float()[None, None, :, None].expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1].to(bank.dtype)
        return torch.einsum("bthn,bnd->bthd", weights, bank)

    def compressed(
        self, compressor: Any, x: Tensor, residual: Tensor, at: Tensor, saved: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The entries that the nodes see, with the block that the chain may close, and which of them, ``[B, N, n]``."""
        entries = self.renewed(compressor, x, at, *saved[:3])
        closed = closed_blocks(at, entries.shape[1], compressor.compress_rate)
        if not hasattr(compressor, "indexer"):
            return entries, closed
        keys = self.renewed(compressor.indexer, x, at, *saved[3:])
        scores = index_scores(compressor.indexer, x, residual, keys, at)
        return entries, best(scores, closed, compressor.indexer.index_topk)

    def renewed(self, compressor: Any, x: Tensor, at: Tensor, entries: Tensor, kv: Tensor, gate: Tensor) -> Tensor:
        """Entries with the nodes' open block pooled anew, from the prefix's and the nodes' projections."""
        ratio = compressor.compress_rate
        batch = torch.arange(len(x), device=x.device)[:, None]
        block = at[:, :1] // ratio
        entries = F.pad(entries, (0, 0, 0, 1))  # the nodes may reach past the recorded rows
        kv, gate = (F.pad(p, (0, 0, 0, ratio)) for p in (kv, gate))
        rows = ((block - 1) * ratio + torch.arange(2 * ratio, device=x.device)).clamp(min=0)
        pairs = ((kv, compressor.kv_proj(x)), (gate, compressor.gate_proj(x)))
        both = [old.index_put((batch, at), new) for old, new in pairs]
        parts = slots(compressor, *(p[batch, rows] for p in both))
        fresh = [p[:, 1:] for p in parts]
        if kv.shape[-1] != compressor.head_dim:  # the first block has none before it
            empty = (torch.arange(2 * ratio, device=x.device) < ratio) & (block == 0)
            fresh[1] = fresh[1].masked_fill(empty[:, None, :, None], -torch.inf)
        return entries.index_put((batch, block), compressed.pool(compressor, *fresh, block * ratio))
