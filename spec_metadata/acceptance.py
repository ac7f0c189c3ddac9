"""Acceptance of a draft tree by the target, and moves of the accepted KV: fixed shapes on the device, no host read."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from spec_metadata.capacity import StepKind
from spec_metadata.errors import INTEGERS, InvalidStepError, check_tensor
from spec_metadata.layout import Step
from spec_metadata.tree import DraftTree


@dataclass(frozen=True, slots=True, eq=False)
class Acceptance:
    """The accepted path of each request.

    num_accepted: [bs] int32, at least 1: the root is always accepted. path: [bs, max_accepted] int64, the node at each
    depth; past the path, the node whose number is the depth. tokens: [bs, max_accepted] int64, what the cycle emits,
    which draft extend reads too: the accepted drafts, then the target's own token (bonus), repeated to the end.
    """

    num_accepted: Tensor
    path: Tensor
    tokens: Tensor

    @property
    def bonus(self) -> Tensor:
        """[bs] int64: the target's token after the accepted path, the root of the next tree."""
        return self.tokens[:, -1]


def accept(tree: DraftTree, target_tokens: Tensor, max_accepted: int) -> Acceptance:
    """Accept the path that the target's own choices take.

    target_tokens: [bs, num_nodes] int64, what the target chose at each node, its argmax or its sample
    (`spec_metadata.choose`, which says why a walk along samples preserves the target's distribution). A node is
    accepted if every node on its path is what the target chose at that node's parent. Siblings must hold different
    tokens. max_accepted: the longest path, the root included
    (`Capacity.max_accepted`). Raises `InvalidStepError` if tree and choices disagree on the nodes, or it has fewer.
    """
    num_nodes = tree.tokens.shape[1]
    check_tensor("target_tokens", target_tokens, tuple(tree.tokens.shape), INTEGERS)
    if not isinstance(max_accepted, Integral) or not 1 <= max_accepted <= num_nodes:
        raise InvalidStepError(
            f"max_accepted must be in [1, {num_nodes}], as a path has no more nodes than its tree; got {max_accepted!r}"
        )
    taken = tree.tokens == target_tokens.gather(1, tree.parents)
    taken = taken | (torch.arange(num_nodes, device=taken.device) == 0)
    accepted = (taken.unsqueeze(1) | ~tree.mask).all(dim=2)
    depths = torch.arange(max_accepted, device=taken.device)
    at_depth = accepted.unsqueeze(1) & (tree.depths.unsqueeze(1) == depths.view(1, -1, 1))
    num_accepted = at_depth.any(dim=2).sum(1)
    on_path = depths < num_accepted.unsqueeze(1)
    path = torch.where(on_path, at_depth.int().argmax(dim=2), depths)
    last = path.gather(1, num_accepted.unsqueeze(1) - 1)
    bonus = target_tokens.gather(1, last)
    drafted = tree.tokens.gather(1, path.roll(-1, dims=1))
    tokens = torch.where(depths < num_accepted.unsqueeze(1) - 1, drafted, bonus)
    return Acceptance(num_accepted.int(), path, tokens)


def compaction_moves(acceptance: Acceptance, step: Step) -> tuple[Tensor, Tensor]:
    """Slots (sources, destinations), each [bs * max_accepted] int64, that bring accepted KV after the committed.

    step: the verify. An accepted node moves from where out_cache_loc put it to the table's slot of the position at
    which it is committed, so that row of the table must hold slots of the request's own there. Past the path the root's
    move is repeated, so that no other slot is touched. All sources must be read before any destination is written.
    Raises `InvalidStepError` for a step that is no verify of these requests.
    """
    bs, max_accepted = acceptance.path.shape
    if step.kind is not StepKind.TARGET_VERIFY or step.bs != bs:
        raise InvalidStepError(f"{bs} requests were verified; the step is a {step.kind} of {step.bs}")
    if max_accepted > step.width:
        raise InvalidStepError(f"paths of up to {max_accepted} nodes; the verify has {step.width}")
    depths = torch.arange(max_accepted, device=step.device)
    on_path = depths < acceptance.num_accepted.unsqueeze(1)
    sources = step.flat_slots().long().reshape(bs, -1).gather(1, torch.where(on_path, acceptance.path, 0))
    destinations = step.paging.slots(step.seq_lens.long().unsqueeze(1) + torch.where(on_path, depths, 0))
    return sources.reshape(-1), destinations.reshape(-1)
