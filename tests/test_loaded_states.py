"""A committed state that is loaded by one launch, on Triton's interpreter; on a CPU states are loaded by copies."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch

from attn_backends.graphs import RecordedGraph
from attn_backends.planning import planners
from attn_backends.selection import providers
from spec_metadata import BlockTable, CommittedState, InvalidStepError, RequestTable
from spec_metadata.state import LOADS, copy_requests
from tests.state_laws import GARBAGE, check_loads, held
from tests.test_committed_state import BATCHES, FORMS, MAX_BS, UNIFORM_KINDS, Engine, check_cycles
from tests.triton_interpreter import interpreted, last_program_first

TWO = torch.tensor([1, 2])


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of a CPU are loaded as those of a GPU, from the last program of a launch."""
    monkeypatch.setitem(LOADS, "cpu", interpreted("triton_state", "_load_requests").bind_load)
    last_program_first(monkeypatch)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("launched")
def test_a_launch_loads_what_copies_do(form: type, seed: int) -> None:
    check_loads(form, seed)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("launched")
def test_phases_are_planned_from_what_a_launch_loaded(form: type) -> None:
    """On a table of other strides and more columns than the capacity has pages, too."""
    engine = Engine("fa3", form)
    check_cycles(engine, UNIFORM_KINDS, MAX_BS, BATCHES)
    wide = torch.ones(MAX_BS, 2 * engine.blocks.table.shape[1] + 3, dtype=torch.int64)[:, ::2]
    engine.blocks = BlockTable(wide, engine.rows.geometry)
    if form is BlockTable:
        engine.paging = engine.blocks
        engine.state = CommittedState.of(engine.paging, MAX_BS)
        engine.pages = torch.nn.functional.pad(engine.pages, (0, wide.shape[1] - engine.pages.shape[1]), value=1)
        check_cycles(engine, UNIFORM_KINDS, 3, [batch for batch in BATCHES if len(batch[0]) <= 3])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("launched")
def test_a_graph_records_copies_in_place_of_a_launch(form: type) -> None:
    """The dispatcher sees no launch, so a recording would leave it out."""
    state, graph = Engine("fa3", form).state, RecordedGraph()
    lens, rows = torch.tensor([3, 4]), torch.tensor([1, 2]) if form is RequestTable else None
    graph.capture(lambda: state.load(lens, rows))
    lens += 2
    graph.replay()
    assert state.seq_lens.tolist() == [5, 6, 0, 0]
    assert state.num_real.tolist() == [2]


REFUSED: dict[str, Callable[[CommittedState], object]] = {
    "of at most 4 requests, got": lambda state: state.load(torch.arange(5), torch.arange(5)),
    r"seq_lens must be \[2\] int32 or int64": lambda state: state.load(TWO.float(), TWO),
    r"rows must be \[2\] int32 or int64, got None": lambda state: state.load(TWO),
    r"rows must be \[2\] int32 or int64, got \[1\]": lambda state: state.load(TWO, TWO[:1]),
    "rows is on meta and the state on cpu": lambda state: state.load(TWO, TWO.to("meta")),
}


@pytest.mark.parametrize("words", REFUSED)
@pytest.mark.usefixtures("launched")
def test_what_does_not_fit_is_refused_before_a_launch(words: str) -> None:
    state = Engine("fa3", RequestTable).state
    state.load(TWO, TWO)
    with pytest.raises(InvalidStepError, match=words):
        REFUSED[words](state)
    assert state.seq_lens.tolist() == [1, 2, 0, 0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("launched")
def test_a_bound_load_is_launched_as_a_compiled_one(form: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Argument by argument, whatever the number of requests and the strides; one compilation for each pair of types."""
    from attn_backends.kernels.triton_launch import Launch

    compiled, bound, launches = list[object](), list[object](), list[list[object]]()

    def launch(*arguments: object) -> None:
        launches.append([each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments])

    def bind(launch_: Launch, variant: object, fixed: tuple[object, ...]) -> object:
        bound.append(variant)
        return lambda *moving: launch(*moving, *fixed)

    def compile_(launch_: Launch, variant: object, *arguments: object) -> None:
        compiled.append(variant)
        launch(*arguments)

    monkeypatch.setattr(Launch, "compile", compile_)
    monkeypatch.setattr(Launch, "bind", bind)
    longs = torch.arange(16)
    given = [(longs[:2], longs[4:6].int()), (longs[::4], longs[:8:2].int()), (longs[:0], longs[:0].int())]
    state = Engine("fa3", form).state
    for lens, rows in [*given, *given]:
        state.load(lens, rows if form is RequestTable else None)
    assert launches[:3] == launches[3:], "the first was compiled, and is bound then"
    assert (len(compiled), len(bound)) == (1, 1)
    state.load(longs[:2].int(), longs[:2].int() if form is RequestTable else None)
    assert len(compiled) == 2
    assert held(state)["seq_lens"].tolist() == [0] * MAX_BS, "no launch was made here"


def test_a_gpu_s_states_are_loaded_by_a_launch_where_triton_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_state = interpreted("triton_state", "_load_requests")
    state = Engine("fa3", RequestTable).state
    assert list(LOADS.items()) == [("cuda", planners.bind_load)]
    assert state._load is copy_requests
    assert planners.bind_load(state) is copy_requests
    monkeypatch.setattr(providers, "runs_on_triton", lambda device: [])
    monkeypatch.setattr(triton_state, "bind_load", lambda given: (given, GARBAGE))
    assert planners.bind_load(state) == (state, GARBAGE)


@pytest.mark.usefixtures("launched")
def test_a_copy_of_a_state_loads_its_own() -> None:
    state = Engine("fa3", BlockTable).state
    state.load(torch.tensor([3, 4]))
    copied = deepcopy(state)
    copied.load(torch.tensor([7]))
    assert (state.seq_lens[0].item(), copied.seq_lens[0].item(), copied.num_real.item()) == (3, 7, 1)
