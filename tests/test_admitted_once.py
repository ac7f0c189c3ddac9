"""An eager step like an earlier one is admitted without another look; whatever may differ is looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn_backends.backends.fa3 import FA3Backend
from spec_metadata import BlockTable, CacheGeometry, Capacity, InvalidStepError, RequestTable, Step


def counting(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The steps that a backend looks at."""
    looked: list[Step] = []
    known = FA3Backend.unsupported_reasons

    def reasons(self: FA3Backend, step: Step) -> list[str]:
        looked.append(step)
        return known(self, step)

    monkeypatch.setattr(FA3Backend, "unsupported_reasons", reasons)
    return looked


GEOMETRY = CacheGeometry(64, 4)


def eager(num_pages: int, lens: list[int], **host: Any) -> Step:
    pages = torch.arange(1, 1 + len(lens) * num_pages, dtype=torch.int32).view(len(lens), -1)
    return Step.decode(torch.tensor(lens), BlockTable(pages, GEOMETRY), **host)


def of_slots(num_tokens: int, **host: Any) -> Step:
    """Of a table of slots, which is as wide as it is, whatever the layout."""
    table = torch.arange(4, 4 + 2 * num_tokens).view(2, -1)
    return Step.decode(torch.tensor([3, 4]), RequestTable(table, torch.tensor([0, 1]), GEOMETRY), **host)


@pytest.mark.parametrize("checking", [False, True])
def test_an_eager_step_like_the_last_one_is_looked_at_once(monkeypatch: pytest.MonkeyPatch, checking: bool) -> None:
    looked, capacity = counting(monkeypatch), Capacity(4, 24, 4)
    backend = FA3Backend(capacity, GEOMETRY, kernel="torch", checking=checking)

    def num_looks(*steps: Step) -> int:
        looked.clear()
        for step in steps:
            backend.init_forward_metadata(step)
        return len(looked)

    like = eager(8, [3, 4]), eager(8, [9, 1]), eager(8, [0, 0])
    assert num_looks(*like) == (3 if checking else 1)
    assert num_looks(eager(8, [3, 4, 5]), eager(8, [3, 4])) == (2 if checking else 1), "layouts are remembered"
    bounded = [eager(8, [3, 4], max_committed=most) for most in (4, 9, 20)]
    assert num_looks(*bounded) == (3 if checking else 1), "the table holds them all"
    exact = [eager(8, [3, longest], seq_lens_cpu=[3, longest]) for longest in (4, 9, 20)]
    assert num_looks(*exact) == (3 if checking else 0), "a length is a bound"


@pytest.mark.parametrize("form", [lambda tokens, **host: eager(tokens // 4, [3, 4], **host), of_slots])
@pytest.mark.parametrize(
    ("last", "refused", "reason"),
    [
        ((40, 4), (40, 39), "the capacity holds"),
        ((40, (3, 4)), (40, (3, 39)), "39 committed tokens and adds 1, together 40; the capacity holds"),
        ((8, (3, 6)), (8, (3, 8)), "a table row holds 8 tokens; 9 are needed"),
        ((8, 6), (8, (3, 8)), "a table row holds 8 tokens; 9 are needed"),
        ((40, None), (8, None), "Make the table wider, or pass max_committed"),
        ((8, 4), (8, None), "Make the table wider, or pass max_committed"),
        ((8, (3, 7)), (8, None), "Make the table wider, or pass max_committed"),
    ],
)
def test_what_the_last_step_was_admitted_for_does_not_admit_more(
    form: Callable[..., Step], last: tuple, refused: tuple, reason: str
) -> None:
    def given(num_tokens: int, bound: int | tuple[int, ...] | None) -> Step:
        host = {"seq_lens_cpu": bound} if isinstance(bound, tuple) else {"max_committed": bound}
        return form(num_tokens, out_cache_loc=torch.tensor([4, 5]), **host)

    backend = FA3Backend(Capacity(4, 7, 4), GEOMETRY, kernel="torch")
    backend.init_forward_metadata(given(*last))
    step = given(*refused)
    with pytest.raises(InvalidStepError, match=reason):
        backend.init_forward_metadata(step)
