"""Choice of the set of steps to draft with next: the one that promises most tokens per second.

What a cycle costs is measured once and given. How much of a draft is accepted is learnt from the cycles that the host
has read: nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

from attn_backends_reference.eagle.requests import DraftShape
from spec_metadata import InvalidStepError

PRIOR = 0.5  # acceptance of a draft token before anything was seen
WEIGHT = 6.0  # drafts that the rate of the depth before is worth, where a depth was seen seldom


@dataclass(frozen=True, slots=True)
class AdaptiveSteps:
    """The sets of steps of which a worker takes one each cycle, and what it decides by.

    sets: each within the worker's capacity. cycle_ms: by batch size, the milliseconds of a cycle of each set; between
    two batch sizes it is interpolated, beyond them the nearest holds. window: cycles of a request for which acceptance
    is remembered. margin: how much more another set must promise than the one in use.
    """

    sets: tuple[DraftShape, ...]
    cycle_ms: Mapping[int, Sequence[float]]
    window: int = 32
    margin: float = 0.05

    def __post_init__(self) -> None:
        if not self.sets or len(set(self.sets)) < len(self.sets):
            raise InvalidStepError(
                f"adaptive steps need sets that differ, one or more; got {list(map(str, self.sets))}"
            )
        if not self.cycle_ms or min(self.cycle_ms) < 1:
            raise InvalidStepError("cycle_ms needs the milliseconds of each set at one batch size or more")
        for bs, costs in self.cycle_ms.items():
            if len(costs) != len(self.sets) or min(costs) <= 0:
                raise InvalidStepError(
                    f"cycle_ms of {bs} requests is {list(costs)}; it needs a positive number for each of the "
                    f"{len(self.sets)} sets"
                )
        if self.window < 1 or self.margin < 0:
            raise InvalidStepError(
                f"window must be at least 1 cycle and margin at least 0, got {self.window} and {self.margin}"
            )

    def costs(self, bs: int) -> list[float]:
        """Milliseconds of a cycle of each set."""
        known = sorted(self.cycle_ms)
        bs = min(max(bs, known[0]), known[-1])
        for low, high in pairwise(known):
            if low <= bs <= high:
                share = (bs - low) / (high - low)
                both = zip(self.cycle_ms[low], self.cycle_ms[high], strict=True)
                return [(1 - share) * less + share * more for less, more in both]
        return list(self.cycle_ms[known[0]])


class StepPolicy:
    """Chooses a set for each cycle. current: the number of the one in use.

    A chain's rate of a depth is the same in every set. A tree's is not: with more nodes a verify holds more candidates
    of a depth. So a tree learns its own rates, and what all trees of its topk have shown stands in until it has.
    """

    def __init__(self, adaptive: AdaptiveSteps) -> None:
        self.adaptive, self.current = adaptive, 0
        depth = max(map(_depth, adaptive.sets))
        self._seen = {key: Rates(depth) for each in adaptive.sets for key in _keys(each)}

    def choose(self, bs: int) -> int:
        """The number of the set for a cycle of so many requests."""
        both = zip(self.adaptive.sets, self.adaptive.costs(bs), strict=True)
        promised = [self.expected_tokens(each) / cost for each, cost in both]
        best = max(range(len(promised)), key=promised.__getitem__)
        if promised[best] > (1 + self.adaptive.margin) * promised[self.current]:
            self.current = best
        return self.current

    def observe(self, number: int, counts: Sequence[int]) -> None:
        """Learn from a cycle that the host has read. counts: tokens that each request accepted, the root included."""
        of, decay = self.adaptive.sets[number], (1 - 1 / self.adaptive.window) ** len(counts)
        for key in _keys(of):
            self._seen[key].add(counts, _depth(of), decay)

    def rates(self, shape: DraftShape) -> list[float]:
        """Acceptance rate of drafts at each depth, where the one before was accepted."""
        found, before = list[float](), PRIOR
        for tried, accepted in self._seen[shape.topk].pairs:
            before = (accepted + WEIGHT * before) / (tried + WEIGHT)
            found.append(before)
        if shape in self._seen:
            own = zip(self._seen[shape].pairs, found, strict=True)
            found = [(accepted + WEIGHT * known) / (tried + WEIGHT) for (tried, accepted), known in own]
        return found[: _depth(shape)]

    def expected_tokens(self, shape: DraftShape) -> float:
        """Tokens that a request emits in a cycle of a set."""
        return 1 + sum(accumulate(self.rates(shape), mul))


class Rates:
    """Drafts of each depth whose predecessors were accepted, and how many of them were; older ones count less."""

    def __init__(self, depth: int) -> None:
        self.pairs = [(0.0, 0.0)] * depth

    def add(self, counts: Sequence[int], depth: int, decay: float) -> None:
        """A cycle. counts: tokens that each request accepted, the root included. depth: of its drafts."""
        for i, (tried, accepted) in enumerate(self.pairs):
            new = (0, 0) if i >= depth else (sum(n > i for n in counts), sum(n > i + 1 for n in counts))
            self.pairs[i] = (decay * tried + new[0], decay * accepted + new[1])


def _keys(shape: DraftShape) -> list[int | DraftShape]:
    """What learns from a cycle of a set: all sets of its topk, and a tree of its own."""
    return [shape.topk] if shape.topk == 1 else [shape.topk, shape]


def _depth(shape: DraftShape) -> int:
    """The deepest draft that a verify can accept: a draft tree may have fewer nodes than steps."""
    return min(shape.num_steps, shape.num_draft_tokens - 1)
