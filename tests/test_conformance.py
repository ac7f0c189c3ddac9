"""The suite passes on every registered backend, and says what is wrong with backends that are."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
import torch

from attn_backends import get_backend, list_backends
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.cache import CacheFormat
from attn_backends.conformance import (
    CATALOGUE,
    Case,
    Outcome,
    Subject,
    resolve_subjects,
    run_conformance,
    selected_cases,
)
from attn_backends.conformance.cases import CACHE_DTYPES
from attn_backends.conformance.compressed_worlds import compressed_layer, is_compressed
from attn_backends.conformance.exercise import run_case_eagerly, setup_of
from attn_backends.conformance.worlds import World, head_sizes, layer_of, query_heads, scaled_to_fill
from attn_backends.contract.capabilities import DTYPES
from attn_backends.contract.kernel import Kernel
from attn_backends.layer import AttentionOutput
from attn_backends.registry import BUILT_IN
from spec_metadata import StepKind
from spec_metadata.capacity import UNIFORM_KINDS
from tests.mutants.hosted import HostedBackend, ScheduledBackend, UnitsBackend
from tests.mutants.narrow import NarrowBackend
from tests.mutants.wide import WideBackend
from tests.torch_kernels import torch_kernel

GOOD = {Outcome.PASS, Outcome.REFUSED}


def bad(report):
    """What is neither right nor a kernel for another machine."""
    return [(row.check, row.case, row.reason) for row in report.rows if row.status not in GOOD and not row.excused]


SEED = int(os.environ.get("CONFORMANCE_SEED", "0"))  # .ci/run gives another every day


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.smoke] * (name == "fa3")) for name in BUILT_IN])
def test_backend_conforms(name):
    report = run_conformance(name, quick=True, seed=SEED)
    assert bad(report) == [], f"attn-backends conformance {name} --quick --seed {SEED}"
    assert report.executed > 100
    assert report.counts[Outcome.PASS] > 0
    assert report.counts[Outcome.REFUSED] > 0
    assert report.exit_code(require_run=True) == 0


@pytest.mark.full
@pytest.mark.parametrize("name", list_backends())
def test_backend_conforms_in_every_case(name):
    report = run_conformance(name)
    assert report.executed >= 300
    assert report.exit_code(require_run=True) == 0


@pytest.mark.parametrize("name", list_backends())
def test_cases_are_many_and_their_names_tell_them_apart(name):
    cases = selected_cases(resolve_subjects(name)[0][0])
    assert len(cases) >= 300
    assert len({(case.check, case.name) for case in cases}) == len(cases)
    assert all(Case.from_json(case.to_json()) == case for case in cases)


def vendor_subjects():
    """Every kernel of the registered backends, whether it runs here or not."""
    return [Subject(get_backend(name), kernel.name) for name in list_backends() for kernel in get_backend(name).kernels]


@pytest.mark.parametrize("subject", vendor_subjects(), ids=lambda subject: f"{subject.backend.name}-{subject.kernel}")
def test_cases_keep_to_what_a_kernel_declares(subject):
    """Types, head sizes and numbers of heads of a vendor's kernel, without its package or a GPU."""
    kinds, kernel = set(), subject.chosen.by_name()
    for case in [*selected_cases(subject, "math.*"), *selected_cases(subject, "scale.*")]:
        declared = kernel.capabilities[case.kind]
        cache_dtype = CACHE_DTYPES.get(case.cache_dtype)
        if is_compressed(subject.backend):
            layer = compressed_layer(setup_of(subject, case), kernel)
        else:
            sizes = head_sizes(subject.backend, kernel, case.format, case.size)
            layer, _ = layer_of(CacheFormat(case.format), sizes, query_heads(kernel), case.size)
            if cache_dtype is not None:
                layer = scaled_to_fill(layer, cache_dtype)
        assert declared.layer_reasons(layer, DTYPES[case.dtype], cache_dtype or DTYPES[case.dtype]) == []
        kinds.add(case.kind)
    assert kinds == {str(kind) for kind in subject.capabilities}


@pytest.mark.parametrize("select", ["graph.*", pytest.param("*", marks=pytest.mark.full)])
@pytest.mark.parametrize("backend", [HostedBackend, UnitsBackend, ScheduledBackend])
def test_backends_with_schedules_conform(backend, select):
    """Schedules are made before a graph; what is eager is among the unusual backends too."""
    report = run_conformance(backend, quick=True, select=select)
    assert bad(report) == []
    assert report.executed > 40
    assert {row.status for row in report.rows if row.check == "graph.host_plan_stays_outside"} <= {Outcome.REFUSED}


def with_torch_kernel(launch=None, **changes):
    """A fa3 whose kernel computes with another function, or declares something else."""
    kernel = torch_kernel(FA3Backend)
    declared = {kind: replace(known, **changes) for kind, known in kernel.capabilities.items()}
    return Kernel("torch", launch or kernel.launch, declared, kernel.unavailable_reasons), kernel.launch


def limited_kernel():
    """fa3's kernel with a limit of every kind, as vendors' kernels have them."""
    kernel = torch_kernel(FA3Backend)
    limits = {
        StepKind.DECODE: {"graph": False},
        StepKind.DRAFT_DECODE: {"non_causal": False},
        StepKind.TARGET_VERIFY: {"max_width": 2},
    }
    declared = {
        kind: replace(
            kernel.capabilities[kind],
            page_sizes=frozenset({16}),
            dtypes=frozenset({torch.bfloat16}),
            head_sizes=frozenset({(8, 8)}),
            query_heads=frozenset({4}),
            over_read=True,
            **limit,
        )
        for kind, limit in limits.items()
    }
    return replace(kernel, capabilities=declared)


class Limited(FA3Backend):
    """A backend that declares little, and keeps to it."""

    name = "limited"
    formats = frozenset({CacheFormat.KV})
    kernels = (limited_kernel(),)


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_backend_of_limits_conforms(quick):
    report = run_conformance(Limited, quick=quick)
    assert bad(report) == []
    assert {row.case.dtype for row in report.rows} == {"bfloat16"}


def extras_kernel():
    """fa3's kernel, which takes sinks, with a window that it only declares."""
    kernel, right = with_torch_kernel()
    return replace(kernel, launch=lambda q, cache, plan, layer: right(q, cache, plan, replace(layer, window=None)))


class Extras(FA3Backend):
    """A backend that declares all of a layer's extras and lacks the sliding window."""

    name = "extras"
    formats = frozenset({CacheFormat.KV})
    kernels = (extras_kernel(),)


@pytest.mark.parametrize(("extra", "executed"), [("sinks", 50), ("kv_scales", 39)])
def test_declared_extras_of_a_layer_are_checked(extra, executed):
    """Over chains, trees and packed rows."""
    report = run_conformance(Extras, select=f"math.{extra}")
    assert report.executed == executed
    assert report.exit_code(require_run=True) == 0


@pytest.mark.parametrize("declared", [True, False])
def test_a_log_sum_exp_of_rounded_weights_is_declared(declared):
    """Off by a part of a rounding step of bfloat16, as where the weights were rounded before they were counted."""
    kernel, right = with_torch_kernel(dtypes=frozenset({torch.bfloat16}), rounded_lse=declared)

    def launch(q, cache, plan, layer):
        out, lse = right(q, cache, plan, layer)
        return AttentionOutput(out, lse + 2e-4)

    class Rounded(FA3Backend):
        kernels = (replace(kernel, launch=launch),)

    report = run_conformance(Rounded, select="math.decode", quick=True)
    assert report.exit_code(require_run=True) == (0 if declared else 1)
    assert all(row.reason.startswith("LSE") for row in report.rows if row.status is Outcome.FAIL)


@pytest.mark.parametrize("name", ["fa3", "flashinfer_mla"])
def test_outputs_and_their_comparisons_agree_on_which_log_sum_exps_there_are(name, monkeypatch):
    """Both ask whether drafted tokens are joined to a prefix: of trees, and of chains where it is planned alone."""
    asked, worlds, right = {}, [], World.returns_lse

    def noted(world, kind, layer, *, in_parts):
        worlds.append(world)  # as long as it lives, its id is its own
        asked.setdefault((id(world), kind, world.setup.topk > 1), []).append(in_parts)
        return right(world, kind, layer, in_parts=in_parts)

    monkeypatch.setattr(World, "returns_lse", noted)
    report = run_conformance(name, quick=True, select="math.d*,math.target_verify,math.prefill")
    assert report.exit_code(require_run=True) == 0
    found = {(kind, is_tree, answer) for (_, kind, is_tree), answers in asked.items() for answer in answers}
    joined = {(kind, is_tree) for kind, is_tree, answer in found if answer}
    trees = {(StepKind.DRAFT_DECODE, True), (StepKind.TARGET_VERIFY, True)}
    assert joined == trees | ({(StepKind.DRAFT_DECODE, False)} if name == "flashinfer_mla" else set())
    assert all(len(set(answers)) == 1 < len(answers) for answers in asked.values())


def test_windows_and_sinks_are_asked_of_every_kind_of_step():
    """Chains and trees, packed rows and uniform ones, eagerly and through graphs."""
    trees = {(kind, True, False) for kind in (StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND)}
    packed = {(kind, False, True) for kind in (StepKind.PREFILL, StepKind.TARGET_VERIFY, StepKind.DRAFT_EXTEND)}
    expected = {(kind, False, False) for kind in UNIFORM_KINDS} | trees | packed
    for check in ("math.window", "math.sinks", "math.window_and_sinks"):
        cases = CATALOGUE[check].cases(Subject(FA3Backend, "torch"))
        for path in ("eager", "graph"):
            asked = {(case.kind, case.topk > 1, bool(case.widths)) for case in cases if case.path == path}
            assert asked == expected, f"{check}, {path}"


def test_a_declared_window_that_is_ignored():
    assert "rows are wrong" in failures(Extras, "math.window")["math.window"]


def test_every_check_has_cases_somewhere():
    subjects = [
        resolve_subjects(each)[0][0]
        for each in (*list_backends(), Limited, Extras, NarrowBackend, WideBackend, HostedBackend)
    ]
    subjects.append(Subject(get_backend("fa3"), "torch", "cuda"))  # only asked for its cases
    assert {case.check for subject in subjects for case in selected_cases(subject)} == set(CATALOGUE)


def failures(backend, select="*"):
    """The reasons of a backend's failures, by check."""
    report = run_conformance(backend, quick=True, select=select)
    assert report.exit_code(require_run=True) == 1
    return {row.check: row.reason for row in report.rows if row.status is Outcome.FAIL}


def test_a_replay_that_does_nothing():
    class Stale(FA3Backend):
        def replay(self, meta, step):
            pass

    found = failures(Stale, "[mg]*")
    assert "rows are wrong" in found["math.draft_decode"]
    assert "page" in found["graph.shrinking"] or "rows are wrong" in found["graph.shrinking"]
    assert "cache" in found["graph.equals_eager"]


def test_a_replay_that_rebinds():
    class Rebinds(FA3Backend):
        def replay(self, meta, step):
            for name in ("write_slots", "page_table"):
                dict.__setitem__(meta.buffers, name, meta.buffers[name].clone())
            super().replay(meta, step)

    found = failures(Rebinds, "graph.*")
    assert "the tensor that it was captured with, and this is another one" in found["graph.stable_addresses"]
    assert "it keeps" in found["graph.keeps_no_memory"]


def test_a_declared_capability_that_is_not_there():
    kernel, right = with_torch_kernel()

    def uniform_alone(q, cache, plan, layer):
        bs = plan.cu_seqlens_q.shape[0] - 1
        starts = torch.arange(bs + 1, dtype=torch.int32) * q.shape[0] // bs
        return right(q, cache, replace(plan, cu_seqlens_q=starts, max_seqlen_q=-(-q.shape[0] // bs)), layer)

    class Uniform(FA3Backend):
        kernels = (replace(kernel, launch=uniform_alone),)

    assert "rows are wrong" in failures(Uniform, "math.packed*")["math.packed_draft_extend"]


def test_a_declared_capability_that_is_refused():
    kernel, _ = with_torch_kernel()
    undeclared = {kind: replace(known, packed=False) for kind, known in kernel.capabilities.items()}

    class Refuses(FA3Backend):
        kernels = (kernel,)

        def unsupported_reasons(self, step):
            return undeclared[step.kind].step_reasons(step)

    found = failures(Refuses, "math.packed*")
    assert found["math.packed_draft_extend"].startswith("declared, yet refused")


def test_an_undeclared_capability_that_is_computed_anyway():
    kernel, _ = with_torch_kernel(page_sizes=frozenset({16}), packed=False, window=False)

    class Anyway(FA3Backend):
        kernels = (kernel,)

        def unsupported_reasons(self, step):
            return []

        def _check_layer(self, cache, meta, layer, dtype):
            pass

    found = failures(Anyway, "refusals.*")
    for check in ("refusals.page_size", "refusals.packed", "refusals.layer_extras"):
        assert "not declared, yet taken instead of refused" in found[check]


def test_right_at_batch_size_one_only():
    kernel, right = with_torch_kernel()

    def first_request_for_all(q, cache, plan, layer):
        rows = torch.zeros_like(plan.page_table) + plan.page_table[:1]
        return AttentionOutput(*right(q, cache, replace(plan, page_table=rows), layer))

    class FirstAlone(FA3Backend):
        kernels = (replace(kernel, launch=first_request_for_all),)

    found = failures(FirstAlone, "[ml]a*")
    assert "rows are wrong" in found["math.decode"]
    assert "of each request alone" in found["laws.alone_or_in_a_batch"]


def test_an_error_says_where_it_was_raised():
    """In the backend's own file, also where torch or this library raised it."""

    class Misspells(FA3Backend):
        def write(self, step, buffers):
            buffers["page_tabel"].zero_()

    class Normalizes(FA3Backend):
        def write(self, step, buffers):
            torch.nn.functional.normalize(None)

    class Asserts(FA3Backend):
        def write(self, step, buffers):
            raise AssertionError

    for backend, outcome, words in (
        (Misspells, Outcome.ERROR, "KeyError: 'page_tabel'"),
        (Normalizes, Outcome.ERROR, "AttributeError: 'NoneType'"),
        (Asserts, Outcome.FAIL, "an assertion failed"),
    ):
        report = run_conformance(backend, kernel="torch", quick=True, select="math.decode")
        assert {row.status for row in report.rows} == {outcome}
        assert words in report.rows[0].reason
        assert re.search(r"\(test_conformance.py:\d+ in write\)$", report.rows[0].reason)


def test_a_plan_outside_its_declaration_is_not_called_a_refusal():
    class Outside(FA3Backend):
        def write(self, step, buffers):
            super().write(step, buffers)
            buffers["page_table"].fill_(10**6)

    report = run_conformance(Outside, kernel="torch", quick=True, select="graph.guards")
    assert {row.status for row in report.rows} == {Outcome.FAIL}
    assert report.rows[0].reason.startswith("fa3 planned outside its declaration: page_table holds")


@pytest.mark.parametrize("kind", [StepKind.DECODE, StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY])
@pytest.mark.parametrize("topk", [1, 3])
def test_all_mla_backends_agree(kind, topk):
    """The same latents, pages and queries give the same attention, whatever the metadata looks like."""
    case = Case("", kind, format="latent", page_size=32, topk=topk, lens=(33, 5, 1), seed=4)
    names = [name for name in list_backends() if CacheFormat.LATENT in get_backend(name).formats]
    ran = [run_case_eagerly(Subject(get_backend(name), "torch"), case) for name in names]
    assert len(ran) >= 4
    for other in ran[1:]:
        for one, two in zip(ran[0].outputs, other.outputs, strict=True):
            torch.testing.assert_close(one.out, two.out, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(one.lse, two.lse, rtol=1e-12, atol=1e-12)
