"""Bits per byte and drafting acceptance of the shipped models on the held-out files.

A file is the stream ``[0] + bytes``, cut into windows of 1024 tokens every 512. Each prediction
and each cycle's start counts once, in the window that gives it at least 512 tokens of context
(except in a file's first 512 tokens). A cycle starts from the file's bytes up to a root token,
drafts a tree, verifies it greedily against the target's own choices and advances along the file
by the accepted drafts plus one. The prefix is always the file, so that the target's and draft's
rows of a window are computed once.

Run ``python -m training.evaluate --model gqa``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from attn_backends.models.draft import EagleDraft
from training import models
from training.corpus import load_heldout

WINDOW, STRIDE = 1024, 512


@dataclass(frozen=True)
class Shape:
    """A draft tree: ``topk`` branches, ``steps`` levels, ``nodes`` kept including the root."""

    topk: int
    steps: int
    nodes: int


SHAPES = {"chain": Shape(1, 3, 4), "tree": Shape(4, 3, 16)}


@dataclass
class Spans:
    """Windows ``ids`` ``[S, WINDOW]`` and the range ``first..end`` of each that counts."""

    ids: Tensor
    first: Tensor
    end: Tensor


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


def cut(files: dict[str, bytes]) -> Spans:
    """Cuts files into spans of at most ``STRIDE`` counted positions."""
    rows, first, end = [], [], []
    for data in files.values():
        stream = b"\0" + data
        for low in range(0, len(stream), STRIDE):
            start = max(0, low - STRIDE)
            rows.append(stream[start : start + WINDOW].ljust(WINDOW, b"\0"))
            first.append(max(1, low - start))
            end.append(min(low + STRIDE, len(stream)) - start)
    ids = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
    return Spans(ids.view(-1, WINDOW).long(), torch.tensor(first), torch.tensor(end))


def pick(x: Tensor, index: Tensor) -> Tensor:
    """``x[b, index[b, i]]`` for ``x`` ``[B, M, ...]`` and ``index`` ``[B, I]``."""
    return x[torch.arange(len(x), device=x.device)[:, None], index]


class Window:
    """The recorded rows of a batch of windows and the cycles that start in them.

    Args:
        target: a frozen target on the training attention function.
        draft: its draft, or None if only ``logits`` is wanted.
        ids: ``[B, W]`` tokens.
    """

    def __init__(self, target: transformers.PreTrainedModel, draft: EagleDraft | None, ids: Tensor) -> None:
        self.target, self.draft, self.ids = target, draft, ids
        self.positions = torch.arange(ids.shape[1], device=ids.device)[None]
        record = models.plans_of(target).Recorder()
        hidden = models.target_hidden(target, ids, self.positions, record)
        self.target_kv = record.kv
        self.logits = target.lm_head(hidden)
        if draft is not None:
            record = models.plans_of(target).Recorder()
            embeds = target.model.embed_tokens(ids[:, 1:])
            self.rows = draft(embeds, hidden[:, :-1], self.positions[:, :-1], plan=record)
            self.draft_kv = record.kv

    def narrow(self, keep: Tensor) -> None:
        """Keeps the windows of the index ``keep``."""
        self.ids, self.rows = self.ids[keep], self.rows[keep]
        self.target_kv = {i: tuple(x[keep] for x in kv) for i, kv in self.target_kv.items()}
        self.draft_kv = {i: tuple(x[keep] for x in kv) for i, kv in self.draft_kv.items()}

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


def summary(counts: Tensor) -> dict[str, Any]:
    """Tokens a cycle and the acceptance at each depth given the one before."""
    reached = counts.flip(0).cumsum(0).flip(0).double()
    return {
        "tokens_per_cycle": round((reached.sum() / reached[0]).item(), 4),
        "acceptance_by_depth": [round(x, 4) for x in (reached[1:] / reached[:-1]).tolist()],
        "cycles": int(reached[0]),
    }


@torch.no_grad()
def evaluate(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    batch: int = 64,
    limit: int | None = None,
    acceptance: bool = True,
) -> dict[str, Any]:
    """Measures one family.

    Args:
        folder: holds ``target`` and ``draft``.
        device: where to run.
        dtype: the arithmetic; the stored weights are bfloat16 in any case.
        batch: windows at a time.
        limit: measure only this many windows, spread evenly.
        acceptance: measure the drafts, too.

    Returns:
        ``bits_per_byte``, ``bytes`` and for each of ``SHAPES`` that the family can draft its summary.
    """
    target = models.load_target(folder / "target", dtype, device)
    draft = models.load_draft(folder / "draft", dtype, device) if acceptance else None
    spans = cut(load_heldout())
    # DeepSeek-V4 compresses one chain of tokens: it can't hold a tree's branches
    shapes = {k: v for k, v in SHAPES.items() if v.topk == 1 or not models.is_v4(target)}
    chosen = torch.arange(len(spans.ids))
    if limit and limit < len(chosen):
        chosen = torch.linspace(0, len(chosen) - 1, limit).long()
    nats, total = 0.0, 0
    counts: dict[str, Tensor] = {}
    for part in chosen.split(batch):
        ids, first, end = (x[part].to(device) for x in (spans.ids, spans.first, spans.end))
        window = Window(target, draft, ids)
        loss = F.cross_entropy(window.logits[:, :-1].mT.float(), ids[:, 1:], reduction="none")
        place = window.positions[:, 1:]
        counted = (place >= first[:, None]) & (place < end[:, None])
        nats += loss[counted].double().sum().item()
        total += int(counted.sum())
        for name, shape in shapes.items() if acceptance else ():
            window = Window(target, draft, ids)
            found = walk(window, first, end, shape)
            counts[name] = counts.get(name, torch.zeros_like(found)) + found
    result: dict[str, Any] = {"bits_per_byte": round(nats / total / math.log(2), 4), "bytes": total}
    return result | {name: summary(count) for name, count in counts.items()}


def main() -> None:
    """Prints one JSON line for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=models.NAMES, action="append")
    parser.add_argument("--checkpoints", type=Path, default=models.CHECKPOINTS)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--limit", type=int, help="only this many windows of 512 counted bytes")
    parser.add_argument("--no-acceptance", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in args.model or models.NAMES:
        began = time.perf_counter()
        result = evaluate(
            args.checkpoints / name,
            device,
            getattr(torch, args.dtype),
            args.batch,
            args.limit,
            not args.no_acceptance,
        )
        place = {"model": name, "dtype": args.dtype, "device": device.type}
        seconds = round(time.perf_counter() - began, 1)
        print(json.dumps(place | result | {"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
