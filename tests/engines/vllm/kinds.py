"""How a batch must be planned, told by vLLM's query lengths alone; without vLLM, and without our planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def kind_of(lens: Sequence[int], *num_drafted: int) -> str:
    """The kind of step that a layer counts for a batch.

    lens: query rows of each request. num_drafted: tokens that may be drafted, one number or several. A mixed batch is a
    prefill. Where its first requests all decode, or all verify, they may be planned apart; then the kind is that of the
    others, so that two answers are right: "prefill or decode".
    """
    uniform = {**{number + 1: "target_verify" for number in num_drafted}, 1: "decode"}
    if len(set(lens)) == 1:
        return uniform.get(lens[0], "prefill")
    num_first = next(i for i, length in enumerate(lens) if length != lens[0])
    apart = kind_of(lens[num_first:], *num_drafted).split()[0] if lens[0] in uniform else "prefill"
    return "prefill" if apart == "prefill" else f"prefill or {apart}"


def draft_steps(steps: Mapping[str, int], loops: int) -> Counter[str]:
    """Forwards of a draft layer by kind. steps: of the target, by kind. loops: forwards in draft loops."""
    return Counter(steps) + Counter(decode=loops)


def wrong_layers(attended: Mapping[str, Any], asked: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Layers that counted other forwards than were asked. attended: as of `attn_backends.engines.vllm.attended`. asked:
    by layer, then by kind.
    """
    wrong = []
    for name in sorted({*attended, *asked}):
        found = {kind: each["forwards"] for kind, each in attended.get(name, {}).items()}
        wrong += [f"{name}: {reason}" for reason in wrong_kinds(found, asked.get(name, {}))]
    return wrong


def wrong_kinds(found: Mapping[str, int], asked: Mapping[str, int]) -> list[str]:
    """Kinds of which a layer counted fewer or more forwards than were asked. found: by kind, of one layer."""
    wrong = []
    for kind in sorted({*found, *(each for kinds in asked for each in kinds.split(" or "))}):
        least = asked.get(kind, 0)
        most = sum(number for kinds, number in asked.items() if kind in kinds.split(" or "))
        number = found.get(kind, 0)
        if not least <= number <= most:
            wrong.append(f"{number} of {least if least == most else f'{least} to {most}'} {kind}")
    if not wrong and sum(found.values()) != sum(asked.values()):
        wrong.append(f"{sum(found.values())} of {sum(asked.values())} forwards")
    return wrong
