"""What making a step costs: nothing on the device, and on the host no more than a look at what it is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spec_metadata import BlockTable, InvalidStepError, PackedQuery, RequestTable, Step, UniformQuery, real_rows
from spec_metadata import layout as layouts
from tests.test_layout import LENS, MAKERS, PAGING, SEQ_LENS, SLOTS, paging_of

FORMS = [RequestTable, BlockTable]
MASK, ONE = torch.ones(3, 4, 4, dtype=torch.bool), torch.ones(1, dtype=torch.int32)
BLOCKS = paging_of(BlockTable)
FROM_TENSORS: dict[str, Callable[[], Step]] = {
    "decode": lambda: Step.decode(SEQ_LENS, PAGING, SLOTS[:3]),
    "draft": lambda: Step.draft_decode(2, 2, SEQ_LENS, PAGING, SLOTS, max_committed=12),
    "verify": lambda: Step.target_verify(4, SEQ_LENS, BLOCKS, SLOTS, tree_mask=MASK, seq_lens_cpu=LENS),
    "extend": lambda: Step.draft_extend(UniformQuery(3), SEQ_LENS, BLOCKS),
    "extend, bounded": lambda: Step.draft_extend(UniformQuery(3), SEQ_LENS, PAGING, max_committed=31),
    "extend, exact": lambda: Step.draft_extend(UniformQuery(3), SEQ_LENS, PAGING, seq_lens_cpu=LENS),
    "extend, both": lambda: Step.draft_extend(UniformQuery(3), SEQ_LENS, PAGING, max_committed=31, seq_lens_cpu=LENS),
    "count of the device": lambda: replace(Step.decode(SEQ_LENS, PAGING), num_real=ONE),
}


class NoOperators(TorchDispatchMode):
    """Nothing is allocated, copied or computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MAKERS)
def test_making_a_step_calls_no_operator(name: str, form: type) -> None:
    paging = paging_of(form)
    with NoOperators():
        step = MAKERS[name](SEQ_LENS, paging)
    assert (step.out_cache_loc, step.num_real) == (None, 3)


@pytest.mark.parametrize("name", FROM_TENSORS)
def test_what_engines_have_is_looked_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The long check, which words refusals, is for what they don't have."""

    def check(step: Step) -> None:
        raise AssertionError("looked at again")

    monkeypatch.setattr(layouts, "check_step", check)
    FROM_TENSORS[name]()


def test_lengths_are_compared_once_where_their_bound_fits_too() -> None:
    """Every comparison of each length is a tenth of what making a step costs."""

    class Counted(int):
        def __gt__(self, other: object) -> bool:
            compared.append(self)
            return int(self) > int(other)  # type: ignore[call-overload]

        __lt__ = __le__ = __ge__ = None  # type: ignore[assignment]

    compared: list[int] = []
    Step.draft_extend(UniformQuery(3), SEQ_LENS, PAGING, max_committed=20, seq_lens_cpu=[Counted(n) for n in LENS])
    assert len(compared) == len(LENS), "the longest was found once, and compared with the bound"


def test_a_layout_is_made_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Step, "layout", property(lambda step: pytest.fail("asked for")))
    FROM_TENSORS["decode"]()


def test_a_step_is_frozen() -> None:
    step: Any = FROM_TENSORS["decode"]()
    with pytest.raises(FrozenInstanceError):
        step.num_real = 2


def test_layouts_tell_what_the_host_knows_from_what_the_device_does() -> None:
    step = Step.decode(SEQ_LENS, PAGING, SLOTS[:3])
    layouts = [
        step.layout,
        Step.decode(SEQ_LENS, PAGING).layout,
        replace(step, num_real=2).layout,
        replace(step, num_real=ONE).layout,
    ]
    assert len(set(layouts)) == len(layouts)
    assert replace(step, num_real=ONE + 1).layout == replace(step, num_real=ONE).layout


def test_the_host_may_say_how_many_are_real() -> None:
    step = replace(Step.decode(SEQ_LENS, PAGING), num_real=2)
    assert real_rows(step).tolist() == [True, True, False]


@pytest.mark.parametrize("num_real", [-1, 4, 2.0, None, "all"])
def test_a_count_of_the_host_is_one_of_the_requests(num_real: Any) -> None:
    with pytest.raises(InvalidStepError, match=r"num_real must be an integer in \[0, 3\], or \[1\] int32 .* got"):
        replace(Step.decode(SEQ_LENS, PAGING), num_real=num_real)


def test_integers_of_other_libraries_are_integers() -> None:
    two: Any = np.int64(2)
    lens = list(np.array(LENS))
    step = Step.draft_decode(two, two, SEQ_LENS, PAGING, SLOTS, seq_lens_cpu=lens, max_committed=np.int32(12))
    assert (step.num_writes, step.seq_lens_cpu) == (12, tuple(LENS))
    assert replace(step, num_real=two).num_real == 2
    assert PackedQuery.of([two, 3]).width == 3


@pytest.mark.parametrize("form", FORMS)
def test_slots_that_are_left_out_need_a_place(form: type) -> None:
    """As far as the host knows, whoever makes the step."""
    step, paging = Step.target_verify(4, SEQ_LENS, paging_of(form)), paging_of(form)
    with pytest.raises(InvalidStepError, match="a table row holds 32 tokens: 32 committed ones leave no place for 1"):
        replace(step, max_committed=32)
    with pytest.raises(InvalidStepError, match="29 committed ones leave no place for 4 more"):
        Step.target_verify(4, SEQ_LENS, paging, seq_lens_cpu=[7, 0, 29])
    assert Step.target_verify(4, SEQ_LENS, paging, seq_lens_cpu=[7, 0, 28]).out_cache_loc is None
    assert Step.target_verify(4, SEQ_LENS, paging, SLOTS, seq_lens_cpu=[7, 0, 29]).max_committed is None
