"""Kernel choice: the best that runs and suits for each kind of step, what was passed over, and what was asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_backends import BackendUnavailableError, UnsupportedStepError
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.contract.capabilities import Capabilities, LseBase, listed
from attn_backends.contract.kernel import Kernel
from attn_backends.layer import AttentionLayer
from attn_backends.selection.choose import Workload, choose_kernels
from spec_metadata import BlockTable, CacheGeometry, Capacity, Step, StepKind
from tests.torch_kernels import torch_kernel

CPU = torch.device("cpu")
ANY = Capabilities(page_sizes=None, dtypes=frozenset({torch.float32, torch.bfloat16}))
DECODE, PREFILL, VERIFY = StepKind.DECODE, StepKind.PREFILL, StepKind.TARGET_VERIFY
LAYER = AttentionLayer(0, 8, 2, 64, 64, 0.125)
PLAIN = Workload(16)


def kernel(name: str, *kinds: StepKind, reasons: tuple[str, ...] = (), **changes: object) -> Kernel:
    """A kernel that declares some kinds."""
    declared = replace(ANY, **changes)
    return Kernel(name, torch_kernel(FA3Backend).launch, dict.fromkeys(kinds, declared), lambda device: list(reasons))


def names(choices: dict) -> dict[StepKind, str]:
    """The name of the kernel of each kind."""
    return {kind: choice.kernel.name for kind, choice in choices.items()}


FAST = kernel("fast", DECODE, VERIFY, page_sizes=frozenset({64}))
ABSENT = kernel("absent", DECODE, PREFILL, reasons=("its package is not installed",))
PLAIN_TORCH = kernel("torch", DECODE, PREFILL, VERIFY)
KERNELS = (ABSENT, FAST, PLAIN_TORCH)


def test_auto_takes_the_best_of_each_kind_and_says_what_it_passed_over():
    chosen = choose_kernels("mine", KERNELS, "auto", CPU, Workload(64))
    assert names(chosen) == {DECODE: "fast", PREFILL: "torch", VERIFY: "fast"}
    assert chosen[DECODE].passed_over == ("absent: its package is not installed",)
    assert chosen[PREFILL].passed_over == ("absent: its package is not installed",)
    assert chosen[VERIFY].passed_over == ()


def test_auto_passes_over_a_kernel_that_the_page_size_does_not_suit():
    chosen = choose_kernels("mine", KERNELS, "auto", CPU, PLAIN)
    assert names(chosen) == dict.fromkeys((DECODE, PREFILL, VERIFY), "torch")
    assert chosen[VERIFY].passed_over == ("fast: page size 16 (it takes 64)",)


@pytest.mark.parametrize(
    ("changes", "workload", "reason"),
    [
        ({"head_sizes": frozenset({(128, 128)})}, Workload(16, [LAYER], torch.float32), "head sizes (64, 64)"),
        (
            {"query_heads": frozenset({16, 128})},
            Workload(16, [LAYER], torch.float32),
            "8 query heads (it takes 16, 128)",
        ),
        (
            {"dtypes": frozenset({torch.float16})},
            Workload(16, [LAYER], torch.bfloat16),
            "queries or rows of torch.bfloat16",
        ),
        ({}, Workload(16, [LAYER], torch.bfloat16, torch.float8_e4m3fn), "a cache of torch.float8_e4m3fn"),
        ({}, Workload(16, [LAYER, replace(LAYER, window=128)], torch.float32), "a sliding window of 128 tokens"),
        ({}, Workload(16, [LAYER, replace(LAYER, sinks=torch.zeros(8))], torch.float32), "attention sinks"),
    ],
)
def test_auto_passes_over_a_kernel_that_the_models_layers_do_not_suit(changes, workload, reason):
    able = {"window": True, "sinks": True, "cache_dtypes": frozenset({torch.float8_e4m3fn}), "kv_scales": True}
    best, plain = kernel("best", DECODE, **changes), kernel("plain", DECODE, **able)
    chosen = choose_kernels("mine", (best, plain), "auto", CPU, workload)[DECODE]
    assert chosen.kernel is plain
    assert len(chosen.passed_over) == 1
    assert chosen.passed_over[0].startswith(f"best: {reason}")


@pytest.mark.parametrize(
    ("changes", "capacity", "reason"),
    [
        ({}, Capacity(2, 28, 16, topk=2, num_steps=2, num_draft_tokens=4), "a draft tree"),
        (
            {"max_width": 3},
            Capacity(2, 28, 16, num_steps=3, num_draft_tokens=4),
            "4 query rows per request (at most 3)",
        ),
    ],
)
def test_auto_passes_over_a_kernel_that_the_capacitys_steps_do_not_suit(changes, capacity, reason):
    """Else every verify would be refused although a later kernel takes it."""
    best = kernel("best", DECODE, VERIFY, **changes)
    plain = kernel("plain", DECODE, VERIFY, non_causal=True, lse=LseBase.NATURAL)

    class Mine(FA3Backend):
        kernels = (best, plain)

    choices = Mine(capacity, CacheGeometry(8, 16)).choices
    assert names(choices) == {DECODE: "best", VERIFY: "plain"}
    assert len(choices[VERIFY].passed_over) == 1
    assert choices[VERIFY].passed_over[0].startswith(f"best: {reason}")


def test_auto_passes_over_a_kernel_with_one_window_for_all_rows_where_trees_are_drafted():
    tree, layer = {"non_causal": True, "lse": LseBase.NATURAL, "window": True}, replace(LAYER, window=128)
    kernels = (kernel("vendor", DECODE, VERIFY, **tree), kernel("ours", DECODE, VERIFY, **tree, tree_window=True))
    for topk, verifies in ((1, "vendor"), (2, "ours")):
        capacity = Capacity(2, 64, 16, topk, 3, num_draft_tokens=4)
        workload = Workload(16, [layer], torch.float32, capacity=capacity)
        chosen = choose_kernels("mine", kernels, "auto", CPU, workload)
        assert names(chosen) == {DECODE: "vendor", VERIFY: verifies}
    assert "vendor: a sliding window of 128 tokens over a draft tree" in chosen[VERIFY].passed_over[0]


def test_types_and_layers_that_are_not_known_yet_are_not_held_against_a_kernel():
    best = kernel("best", DECODE, head_sizes=frozenset({(128, 128)}))
    chosen = choose_kernels("mine", (best, PLAIN_TORCH), "auto", CPU, Workload(16, [LAYER]))[DECODE]
    assert (chosen.kernel, chosen.passed_over) == (best, ())


def test_if_none_suits_the_first_that_runs_is_taken_to_refuse_with_its_reasons():
    absent = kernel("absent", DECODE, reasons=("its package is not installed",))
    first, second = (kernel(name, DECODE, page_sizes=frozenset({64})) for name in ("first", "second"))
    chosen = choose_kernels("mine", (absent, first, second), "auto", CPU, PLAIN)[DECODE]
    assert chosen.kernel is first
    assert [reason.split(":")[0] for reason in chosen.passed_over] == ["absent", "first", "second"]


def test_a_name_runs_every_kind_that_it_has_and_the_others_are_auto():
    chosen = choose_kernels("mine", KERNELS, "fast", CPU, Workload(64))
    assert names(chosen) == {DECODE: "fast", PREFILL: "torch", VERIFY: "fast"}
    assert names(choose_kernels("mine", KERNELS, "torch", CPU, Workload(64))) == dict.fromkeys(chosen, "torch")


def test_a_name_is_kept_even_where_it_does_not_suit():
    """An explicit choice never falls back: it refuses steps itself."""
    chosen = choose_kernels("mine", KERNELS, "fast", CPU, PLAIN)
    assert chosen[DECODE].kernel is FAST
    assert chosen[DECODE].passed_over == ("fast: page size 16 (it takes 64)",)


def test_a_name_that_does_not_run_is_refused():
    with pytest.raises(BackendUnavailableError, match=r"mine on cpu, decode.*absent: its package is not installed"):
        choose_kernels("mine", KERNELS, "absent", CPU, PLAIN)


def test_a_mapping_is_strict():
    chosen = choose_kernels("mine", KERNELS, {DECODE: "torch"}, CPU, Workload(64))
    assert names(chosen) == {DECODE: "torch"}
    with pytest.raises(BackendUnavailableError, match=r"prefill.*no kernel of that name has this kind"):
        choose_kernels("mine", KERNELS, {PREFILL: "fast"}, CPU, Workload(64))
    with pytest.raises(BackendUnavailableError, match="its package is not installed"):
        choose_kernels("mine", KERNELS, {DECODE: "absent"}, CPU, Workload(64))


@pytest.mark.parametrize("asked", ["fastest", {DECODE: "fastest"}])
def test_an_unknown_name_is_refused_with_those_that_there_are(asked):
    with pytest.raises(BackendUnavailableError, match=r"'fastest'.*unknown name.*absent, fast, torch"):
        choose_kernels("mine", KERNELS, asked, CPU, PLAIN)


def test_no_kernel_at_all_is_refused_with_everyones_reasons():
    kernels = (kernel("one", DECODE, reasons=("no GPU",)), kernel("two", DECODE, reasons=("no package", "no GPU")))
    with pytest.raises(BackendUnavailableError, match="one: no GPU; two: no package; two: no GPU"):
        choose_kernels("mine", kernels, "auto", CPU, PLAIN)


def test_a_backend_runs_the_kernels_that_were_chosen_and_refuses_kinds_that_were_not():
    capacity, geometry = Capacity(2, 28, 16), CacheGeometry(8, 16)
    backend = FA3Backend(capacity, geometry, kernel={DECODE: "torch"})
    step = Step.decode(torch.tensor([3]), BlockTable(torch.tensor([[1, 2]], dtype=torch.int32), geometry))
    assert backend.kernel_of(DECODE).name == "torch"
    backend.init_forward_metadata(step)
    verify = Step.target_verify(2, step.seq_lens, step.paging)
    with pytest.raises(
        UnsupportedStepError, match=r"no kernel for target_verify was asked for \(.*triton, torch has it\)"
    ):
        backend.init_forward_metadata(verify)


@pytest.mark.parametrize(
    ("values", "words"), [([128, 16], "16, 128"), (range(1, 129), "1 to 128"), ([1, 2], "1, 2"), (["b", "a"], "a, b")]
)
def test_a_run_of_numbers_is_listed_by_its_ends(values, words):
    assert listed(values) == words
