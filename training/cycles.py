"""Cycles of drafting and verifying along recorded files, by an EAGLE or EAGLE-3 draft or by MTP modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from attn_backends_reference.models.draft import EagleDraft
from attn_backends_reference.models.eagle1 import Eagle1Draft
from attn_backends_reference.models.eagle3 import Eagle3Draft
from attn_backends_reference.models.mtp import MtpModule
from training import eagle3, models


@dataclass(frozen=True)
class Shape:
    """A draft tree: ``topk`` branches, ``steps`` levels, ``nodes`` kept including the root."""

    topk: int
    steps: int
    nodes: int


@dataclass
class Tree:
    """Kept nodes of ``B`` trees, the root first and parents before children.

    ``tokens``, ``parent`` and ``depth`` are ``[B, N]``; ``sees`` is ``[B, N, N]``, each node's
    ancestors and itself.
    """

    tokens: Tensor
    parent: Tensor
    depth: Tensor
    sees: Tensor


def pick(x: Tensor, index: Tensor) -> Tensor:
    """``x[b, index[b, i]]`` for ``x`` ``[B, M, ...]`` and ``index`` ``[B, I]``."""
    return x[torch.arange(len(x), device=x.device)[:, None], index]


def narrowed(kv: dict[int, Any], keep: Tensor) -> dict[int, Any]:
    """Recorded keys and values by layer, of the windows of the index ``keep``."""
    return {layer: tuple(x[keep] for x in kept) for layer, kept in kv.items()}


class Window:
    """The recorded rows of a batch of windows and the cycles that start in them.

    Args:
        target: a frozen target on the training attention function.
        draft: its draft, or None if only ``logits`` is wanted.
        ids: ``[B, W]`` tokens.
    """

    def __init__(
        self, target: transformers.PreTrainedModel, draft: EagleDraft | Eagle1Draft | None, ids: Tensor
    ) -> None:
        self.target, self.draft, self.ids = target, draft, ids
        self.positions = torch.arange(ids.shape[1], device=ids.device)[None]
        record = models.plans_of(target).Recorder()
        self.hidden = models.target_hidden(target, ids, self.positions, record)
        self.target_kv = record.kv
        self.logits = target.lm_head(self.hidden)
        if draft is not None:
            record = models.plans_of(target).Recorder()
            embeds = target.model.embed_tokens(ids[:, 1:])
            self.rows = draft(embeds, self.hidden[:, :-1], self.positions[:, :-1], plan=record)
            self.draft_kv = record.kv

    def narrow(self, keep: Tensor) -> None:
        """Keeps the windows of the index ``keep``."""
        self.ids, self.rows = self.ids[keep], self.rows[keep]
        self.target_kv, self.draft_kv = narrowed(self.target_kv, keep), narrowed(self.draft_kv, keep)

    def log_probs(self, rows: Tensor) -> Tensor:
        """The draft's log-probabilities ``[B, N, V]`` of rows ``[B, N, H]``."""
        return self.target.lm_head(rows).float().log_softmax(-1)

    def draft_tree(self, root: Tensor, shape: Shape) -> Tree:
        """Drafts behind the root tokens at positions ``root`` ``[B]``."""
        k = shape.topk
        # Row root-1 holds the root token's embedding; it drafts the first level.
        row = pick(self.rows, root[:, None] - 1)
        seen = self.positions[:, :-1] < root[:, None]
        scores, tokens = self.log_probs(row)[:, 0].topk(k)
        parent = torch.zeros_like(tokens)
        all_tokens, all_scores, all_parents = [tokens], [scores], [parent]
        beam_node = torch.arange(1, k + 1, device=root.device).expand(len(root), k)
        beam_tokens, beam_scores, beam_rows = tokens, scores, row.expand(-1, k, -1)
        beam_sees = torch.zeros(len(root), k, 0, dtype=torch.bool, device=root.device)
        own = torch.eye(k, dtype=torch.bool, device=root.device).expand(len(root), k, k)
        earlier = None
        count = 1 + k
        for step in range(1, shape.steps):
            mask = torch.cat((beam_sees, own), -1)
            plan = models.plans_of(self.target).Nodes(self.draft_kv, seen, mask, earlier)
            embeds = self.target.model.embed_tokens(beam_tokens)
            positions = (root[:, None] + step - 1).expand(-1, k)
            rows = self.draft(embeds, beam_rows, positions, plan=plan)
            earlier = plan.nodes
            gain, tokens = self.log_probs(rows).topk(k)
            scores = (beam_scores[..., None] + gain).flatten(1)
            tokens = tokens.flatten(1)
            all_tokens.append(tokens)
            all_scores.append(scores)
            all_parents.append(beam_node.repeat_interleave(k, 1))
            beam_scores, best = scores.topk(k)
            beam_tokens, beam_node = tokens.gather(1, best), count + best
            beam_rows, beam_sees = pick(rows, best // k), pick(mask, best // k)
            count += k * k
        return self.rank(root, all_tokens, all_scores, all_parents, shape.nodes)

    def rank(
        self,
        root: Tensor,
        tokens: list[Tensor],
        scores: list[Tensor],
        parents: list[Tensor],
        nodes: int,
    ) -> Tree:
        """Keeps the ``nodes - 1`` best candidates; ties go to the earlier one."""
        order = torch.cat(scores, 1).sort(dim=1, descending=True, stable=True).indices[:, : nodes - 1]
        order = order.sort(1).values
        parent = torch.cat(parents, 1).gather(1, order)
        place = torch.zeros(len(root), 1 + sum(t.shape[1] for t in tokens), dtype=torch.long)
        place = place.to(root.device)
        number = torch.arange(1, nodes, device=root.device).expand_as(order)
        place.scatter_(1, order + 1, number)
        zero = torch.zeros_like(root[:, None])
        parent = torch.cat((zero, place.gather(1, parent)), 1)
        kept = torch.cat((pick(self.ids, root[:, None]), torch.cat(tokens, 1).gather(1, order)), 1)
        sees = torch.eye(nodes, dtype=torch.bool, device=root.device).repeat(len(root), 1, 1)
        depth = torch.zeros_like(parent)
        for node in range(1, nodes):
            above = parent[:, node, None]
            sees[:, node] |= pick(sees, above)[:, 0]
            depth[:, node] = depth.gather(1, above)[:, 0] + 1
        return Tree(kept, parent, depth, sees)

    def verify(self, root: Tensor, tree: Tree, steps: int) -> Tensor:
        """The accepted drafts ``[B]`` of each tree under greedy verification."""
        seen = self.positions < root[:, None]
        plan = models.plans_of(self.target).Nodes(self.target_kv, seen, tree.sees)
        hidden = models.target_hidden(self.target, tree.tokens, root[:, None] + tree.depth, plan=plan)
        choice = self.target.lm_head(hidden).argmax(-1)
        at = torch.zeros_like(root)
        accepted = torch.zeros_like(root)
        for _ in range(steps):
            wanted = choice.gather(1, at[:, None])
            match = (tree.parent == at[:, None]) & (tree.tokens == wanted) & (tree.depth > 0)
            found = match.any(1) & (accepted == tree.depth.gather(1, at[:, None])[:, 0])
            at = torch.where(found, match.int().argmax(1), at)
            accepted = accepted + found
        return accepted


class Eagle3Window(Window):
    """A window whose cycles draft by an EAGLE-3 draft.

    Args:
        target: a frozen target on the training attention.
        draft: its draft.
        ids: ``[B, W]`` tokens.
    """

    def __init__(self, target: transformers.PreTrainedModel, draft: Eagle3Draft, ids: Tensor) -> None:
        super().__init__(target, None, ids)
        self.draft = draft
        _, features = models.target_features(target, ids, self.positions, eagle3.layers_of(draft))
        record = models.plans_of(target).Recorder()
        embeds = target.model.embed_tokens(ids[:, 1:])
        self.rows = draft(embeds, draft.fc(features[:, :-1]), self.positions[:, :-1], plan=record)
        self.draft_kv = record.kv

    def log_probs(self, rows: Tensor) -> Tensor:
        """As ``Window.log_probs``, in the target's vocabulary: -inf for the tokens that the draft lacks."""
        own = eagle3.score(self.draft, rows).float().log_softmax(-1)
        whole = own.new_full((*rows.shape[:-1], len(self.draft.t2d)), -torch.inf)
        return whole.index_copy(-1, self.draft.target_ids, own)


class MtpWindow(Window):
    """A window whose cycles draft a chain by MTP modules, one module a drafted token.

    Of root ``r``, module ``k`` drafts token ``r + k + 1`` in its row ``r - 1``. Its rows from ``r - k`` on take drafted
    tokens and run anew; those before took the file's and are the recorded ones.

    Args:
        target: a frozen target on the training attention.
        modules: its MTP modules.
        ids: ``[B, W]`` tokens.
    """

    def __init__(self, target: transformers.PreTrainedModel, modules: Sequence[MtpModule], ids: Tensor) -> None:
        super().__init__(target, None, ids)
        self.modules = modules
        records = [models.plans_of(target).Recorder() for _ in modules]
        embeds = target.model.embed_tokens(ids[:, 1:])
        self.outputs = models.run_modules(modules, embeds, self.hidden[:, :-1], records)
        self.module_kv = [record.kv for record in records]

    def narrow(self, keep: Tensor) -> None:
        """Keeps the windows of the index ``keep``."""
        self.ids, self.target_kv = self.ids[keep], narrowed(self.target_kv, keep)
        self.outputs = [rows[keep] for rows in self.outputs]
        self.module_kv = [narrowed(kv, keep) for kv in self.module_kv]

    def draft_tree(self, root: Tensor, shape: Shape) -> Tree:
        """Drafts a chain behind the root tokens at positions ``root`` ``[B]``; ``shape.topk`` is 1."""
        tokens = pick(self.ids, root[:, None])
        last = pick(self.outputs[0], root[:, None] - 1)
        fresh = last[:, :0]  # the outputs of the module before in rows that took drafted tokens
        for depth in range(1, shape.steps + 1):
            tokens = torch.cat((tokens, self.log_probs(last)[:, -1:].argmax(-1)), 1)
            if depth < shape.steps:
                known = pick(self.outputs[depth - 1], (root[:, None] - depth).clamp(min=0))
                last = fresh = self.run_again(depth, root, tokens[:, 1:], torch.cat((known, fresh), 1))
        number = torch.arange(shape.nodes, device=root.device).expand(len(root), -1)
        sees = torch.ones(shape.nodes, shape.nodes, dtype=torch.bool, device=root.device).tril()
        return Tree(tokens, (number - 1).clamp(min=0), number, sees.expand(len(root), -1, -1))

    def run_again(self, index: int, root: Tensor, drafted: Tensor, hidden: Tensor) -> Tensor:
        """Module ``index``'s outputs ``[B, index, H]`` in the rows ``root - index`` to ``root - 1``.

        Args:
            index: of the module, at least 1.
            root: ``[B]``.
            drafted: ``[B, index]``, the drafted tokens, which these rows take.
            hidden: ``[B, index, H]``, the outputs of the module before in these rows.
        """
        rows = root[:, None] + torch.arange(-index, 0, device=root.device)
        own = torch.ones(index, index, dtype=torch.bool, device=root.device).tril()
        # a root near the start of the file has fewer rows before it; what is no row sees itself and is seen by none
        mask = own & (rows >= 0)[:, None] | torch.eye(index, dtype=torch.bool, device=root.device)
        seen = self.positions[:, :-1] < rows[:, :1]
        plan = models.plans_of(self.target).Nodes(self.module_kv[index], seen, mask)
        embeds = self.target.model.embed_tokens(drafted)
        return self.modules[index](embeds, hidden, rows.clamp(min=0), plan=plan)


def walk(window: Window, first: Tensor, end: Tensor, shape: Shape) -> Tensor:
    """Runs cycles from each window's ``first`` to its ``end``; counts ``[steps + 1]`` by depth."""
    counts = torch.zeros(shape.steps + 1, dtype=torch.long)
    root = first.clone()
    while len(root):
        accepted = window.verify(root, window.draft_tree(root, shape), shape.steps)
        counts += torch.bincount(accepted.cpu(), minlength=shape.steps + 1)
        root = root + accepted + 1
        keep = (root < end).nonzero()[:, 0]
        if len(keep) < len(root):
            window.narrow(keep)
            root, end = root[keep], end[keep]
    return counts
