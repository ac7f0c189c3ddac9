"""Laws of any acceptance, any draft beams and any tree of them: walks over Python lists, which share no code
with them. A law raises `CheckFailure`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from attn_backends.conformance.catalogue import CheckFailure
from attn_backends.conformance.comparisons import compare_identical
from spec_metadata import Acceptance, DraftBeams, DraftTree

Node = tuple[int, ...]  # the tokens from the root's child down to it
VOCAB = 50
NOBODYS = 2**18  # added to a node's token: one that no node holds


def token_ids(numbers: Tensor) -> Tensor:
    """Ids of a large vocabulary, some of which differ in the lowest bits and some in the 17th alone."""
    return 100_000 + numbers // 2 + numbers % 2 * 2**16


def draw_tree(rng: Random, num_requests: int, num_nodes: int, max_depth: int, topk: int) -> DraftTree:
    """A batch of trees, of nodes with up to topk children: siblings hold different tokens of a tiny vocabulary."""
    parents, tokens = [], []
    for _ in range(num_requests):
        parent, token, depth = [0], [rng.randrange(4)], [0]
        while len(parent) < num_nodes:
            siblings = {n: [m for m in range(1, len(parent)) if parent[m] == n] for n in range(len(parent))}
            p = rng.choice([n for n in siblings if depth[n] < max_depth and len(siblings[n]) < topk])
            taken = {token[n] for n in siblings[p]}
            parent.append(p)
            depth.append(depth[p] + 1)
            token.append(rng.choice([t for t in range(num_nodes + 4) if t not in taken][:3]))
        parents.append(parent)
        tokens.append(token)
    return DraftTree.from_parents(token_ids(torch.tensor(tokens)), torch.tensor(parents), max_depth)


def draw_choices(rng: Random, tree: DraftTree) -> Tensor:
    """[bs, num_nodes] int64, the target's choice at each node: often a child's token, in the first request always, else
    one that no node holds.
    """
    chosen = list[list[int]]()
    for tokens, parents in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        row = []
        for node in range(len(tokens)):
            children = [tokens[n] for n in range(1, len(tokens)) if parents[n] == node]
            likely = 0.8 if chosen else 1
            row.append(rng.choice(children) if children and rng.random() < likely else NOBODYS + tokens[node])
        chosen.append(row)
    return torch.tensor(chosen)


def walk(tokens: Sequence[int], parents: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The accepted nodes of a request, root first."""
    path = [0]
    while True:
        children = [n for n in range(1, len(tokens)) if parents[n] == path[-1] and tokens[n] == chosen[path[-1]]]
        if not children:
            return path
        path.append(children[0])


def walked(tree: DraftTree, choices: Tensor, max_accepted: int) -> Acceptance:
    """The expected result of `spec_metadata.accept`, on the CPU."""
    paths, emitted, lengths = [], [], []
    for tokens, parents, chosen in zip(tree.tokens.tolist(), tree.parents.tolist(), choices.tolist(), strict=True):
        path = walk(tokens, parents, chosen)
        lengths.append(len(path))
        paths.append(path + list(range(len(path), max_accepted)))
        emitted.append([tokens[node] for node in path[1:]] + [chosen[path[-1]]] * (max_accepted - len(path) + 1))
    return Acceptance(torch.tensor(lengths, dtype=torch.int32), torch.tensor(paths), torch.tensor(emitted))


def check_acceptance(got: Acceptance, tree: DraftTree, choices: Tensor) -> None:
    """Raise `CheckFailure` unless got is what a walk accepts. choices: [bs, num_nodes] int64."""
    expected = walked(tree, choices, got.path.shape[1])
    for name in ("num_accepted", "path", "tokens", "bonus"):
        compare_identical(f"accepted {name}", getattr(got, name).cpu(), getattr(expected, name))


def check_widths(got: Tensor, scores: Tensor, threshold: float, num_tokens: int, num_real: int) -> None:
    """The most probable drafted tokens of real requests stay, if they are probable enough; of equal ones those less
    deep, then those of earlier requests.
    """
    least = math.log(threshold) if threshold else -math.inf
    rows = enumerate(scores[:num_real].nan_to_num(nan=-math.inf, neginf=-math.inf).tolist())
    probable = [(-score, depth, i) for i, row in rows for depth, score in enumerate(row) if score >= least]
    kept = Counter(i for _, _, i in sorted(probable)[: num_tokens - num_real])
    widths = [1 + kept[i] for i in range(len(scores))]
    compare_identical("widths", got.cpu(), torch.tensor(widths, dtype=torch.int32))


class Draft:
    """A draft that scores every path: children(node) -> its best topk tokens with log-probabilities, best first.

    levels: how many values a log-probability can take; None for a continuum. Few levels make exact ties.
    """

    def __init__(self, topk: int, levels: int | None, seed: int) -> None:
        self.topk, self.levels = topk, levels
        self.rng = torch.Generator().manual_seed(seed)
        self.known: dict[Node, list[tuple[int, float]]] = {}

    def children(self, node: Node) -> list[tuple[int, float]]:
        """The children of a node, best first: token and log-probability."""
        if node not in self.known:
            tokens = token_ids(torch.randperm(VOCAB, generator=self.rng)[: self.topk]).tolist()
            if self.levels is None:
                scores = -torch.rand(self.topk, generator=self.rng)
            else:
                scores = -0.25 * torch.randint(self.levels, (self.topk,), generator=self.rng)
            self.known[node] = list(zip(tokens, scores.sort(descending=True).values.tolist(), strict=True))
        return self.known[node]

    def score(self, node: Node) -> float:
        """Cumulative log-probability, added up in float32 as on the device."""
        total = torch.tensor(0.0)
        for i, token in enumerate(node):
            total = total + torch.tensor(dict(self.children(node[:i]))[token])
        return float(total)


@dataclass(frozen=True)
class Growth:
    """Beams that were grown. given: (tokens, log_probs) of each level. branches: of each request and level, by path."""

    beams: DraftBeams
    given: list[tuple[Tensor, Tensor]]
    branches: list[list[list[Node]]]


def grow(drafts: Sequence[Draft], num_steps: int, device: torch.device | None = None) -> Growth:
    """Beams after num_steps levels of a draft for each request. `check_branches` runs at every level."""
    branches: list[list[list[Node]]] = [[[()]] for _ in drafts]
    given: list[tuple[Tensor, Tensor]] = []
    beams: DraftBeams | None = None
    for _ in range(num_steps):
        asked = [[draft.children(node) for node in own[-1]] for draft, own in zip(drafts, branches, strict=True)]
        children = torch.tensor(asked if beams else [one for (one,) in asked], dtype=torch.float64, device=device)
        given.append((children[..., 0].long(), children[..., 1].float()))
        beams = beams.advance(*given[-1]) if beams else DraftBeams.start(*given[-1])
        for own, parents, tokens in zip(branches, beams.parent_branches.tolist(), beams.tokens.tolist(), strict=True):
            own.append([(*own[-1][parent], token) for parent, token in zip(parents, tokens, strict=True)])
        _check_branches(beams, drafts, branches)
    assert beams is not None, "a draft has a level"
    return Growth(beams, given, [own[1:] for own in branches])


def grown_again(given: Sequence[tuple[Tensor, Tensor]]) -> DraftBeams:
    """The beams of the same tokens and log-probabilities: what a graph can record."""
    beams = DraftBeams.start(*given[0])
    for tokens, log_probs in given[1:]:
        beams = beams.advance(tokens, log_probs)
    return beams


def _check_branches(beams: DraftBeams, drafts: Sequence[Draft], branches: Sequence[Sequence[list[Node]]]) -> None:
    """The newest branches are the best children of those before, as cumulative scores rank them, with the branch of
    each level above them.
    """
    for i, (draft, levels) in enumerate(zip(drafts, branches, strict=True)):
        newest = levels[-1]
        children = [(*node, token) for node in levels[-2] for token, _ in draft.children(node)]
        if len(set(newest)) < len(newest) or not set(newest) <= set(children):
            raise CheckFailure("branches", "they are not distinct children of the last level's", i, "", str(newest))
        best = sorted((draft.score(node) for node in children), reverse=True)[: len(newest)]
        scores = [draft.score(node) for node in newest]
        _equal("scores of the branches", scores, best, i)
        _equal("the scores that beams hold", beams.scores[i].tolist(), best, i)
        above = [[levels[d].index(node[:d]) for d in range(1, len(levels))] for node in newest]
        _equal("ancestors", beams.ancestors[i].tolist(), above, i)


def check_tree(tree: DraftTree, roots: Tensor, drafts: Sequence[Draft], growth: Growth) -> None:
    """The tree holds the root and the best of all nodes that were proposed; of equals the earlier ones."""
    for i, (draft, levels) in enumerate(zip(drafts, growth.branches, strict=True)):
        above = [(), *(node for branches in levels[:-1] for node in branches)]
        nodes = [(*node, token) for node in above for token, _ in draft.children(node)]
        best = sorted(range(len(nodes)), key=[(-draft.score(node), n) for n, node in enumerate(nodes)].__getitem__)
        chosen: list[Node] = [(), *(nodes[n] for n in sorted(best[: tree.tokens.shape[1] - 1]))]
        _equal("tokens of the tree", tree.tokens[i].tolist(), [int(roots[i]), *(node[-1] for node in chosen[1:])], i)
        _equal("parents", tree.parents[i].tolist(), [0, *(chosen.index(node[:-1]) for node in chosen[1:])], i)
        _equal("depths", tree.depths[i].tolist(), [len(node) for node in chosen], i)
        _equal("mask", tree.mask[i].tolist(), [[node[: len(seen)] == seen for seen in chosen] for node in chosen], i)


def _equal(field: str, got: object, expected: object, row: int) -> None:
    if got != expected:
        raise CheckFailure(field, "differs from the walk over lists", row, str(expected), str(got))
