"""What of the suite is run: random cases more, profiles, and which contract."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_backends import ConfigError
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.cli import main
from attn_backends.conformance import (
    PROFILES,
    Case,
    Outcome,
    Report,
    Row,
    Selection,
    Subject,
    matrix,
    run_case,
    run_conformance,
    selected_cases,
)
from attn_backends.conformance.catalogue import GROUPS, group_of
from attn_backends.conformance.profiles import lacking, passed, told, totals
from attn_backends.conformance.summary import joined, summary
from attn_backends.contract import CONTRACT
from attn_backends.kernels import torch_attention
from attn_backends.registry import get_backend, list_backends
from attn_backends.results import Head, Results
from tests.mutants.narrow import NarrowBackend

FA3 = Subject(FA3Backend, "torch")
CHAIN_KINDS = PROFILES["chain"].kinds


def drawn(subject: Subject = FA3, **asked) -> list[Case]:
    return [case for case in Selection(**asked).cases(subject) if case.drawn]


def test_random_cases_are_drawn_from_the_seed():
    first = drawn(select="math.*", effort=8)
    assert len(first) == 8
    assert first == drawn(select="math.*", effort=8)
    assert set(first).isdisjoint(drawn(select="math.*", effort=8, seed=1))
    assert set(first).isdisjoint(selected_cases(FA3, "math.*"))
    assert [Case.from_json(case.to_json()) for case in first] == first


@pytest.mark.parametrize("name", list_backends())
def test_every_group_gets_its_random_cases_and_they_pass(name):
    subject = Subject(get_backend(name), "torch")
    cases = drawn(subject, effort=1, seed=7)
    groups = {group_of(case.check) for case in selected_cases(subject)}
    assert {group: 1 for group in GROUPS if group in groups} == {
        group: sum(group_of(case.check) == group for case in cases) for group in groups
    }
    wrong = {case: row for case in cases if (row := run_case(subject, case)).status not in ("pass", "refused")}
    assert not wrong


def test_random_cases_find_what_the_suite_s_own_numbers_miss(monkeypatch):
    """No verify of the suite's math checks has seven rows."""
    over_pages = torch_attention._over_pages

    def seventh_dropped(q, *arguments):
        out, lse = over_pages(q, *arguments)
        return (out * 0, lse) if q.shape[1] == 7 else (out, lse)

    monkeypatch.setattr(torch_attention, "_over_pages", seventh_dropped)
    selection = Selection("math.target_verify", effort=40)
    cases = selection.cases(FA3)
    assert {run_case(FA3, case).status for case in cases if not case.drawn} == {Outcome.PASS}
    assert Outcome.FAIL in {run_case(FA3, case).status for case in cases if case.drawn}


def test_the_command_line_prints_each_random_case_so_that_it_can_be_repeated(capsys):
    options = ["--kernel", "torch", "--select", "math.decode"]
    assert main(["conformance", "fa3", *options, "--quick", "--effort", "3", "--seed", "5"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("random pass math.decode")]
    assert len(lines) == 3
    case = lines[0].split("--case ")[1].strip("'")
    assert main(["conformance", "fa3", "--kernel", "torch", "--case", case]) == 0
    assert "executed 1 of 1: 1 pass" in capsys.readouterr().out


@pytest.mark.parametrize("name", list_backends())
def test_every_case_is_of_a_profile(name):
    cases = selected_cases(Subject(get_backend(name), "torch"))
    homeless = [case for case in cases if not any(profile.holds(case) for profile in PROFILES.values())]
    assert homeless == []


def test_quick_cases_of_seeds_in_turn_are_all_cases():
    every = selected_cases(FA3, "math.decode")
    samples = [Selection("math.decode", quick=True, seed=seed).cases(FA3) for seed in range(len(every) - 2)]
    assert {case for sample in samples for case in sample} == set(every)
    for sample in samples:
        assert len(sample) == 3
        assert (sample[0], sample[-1]) == (every[0], every[-1])
    assert samples[0][1] == every[(len(every) - 1) // 2]
    assert Selection("math.decode", quick=True, seed=len(every) - 2).cases(FA3) == samples[0]
    pairs = [selected_cases(FA3, "math.decode", 2, seed=seed) for seed in range(len(every) - 1)]
    assert {first for first, _ in pairs} == {every[0]}
    assert sorted(second.name for _, second in pairs) == sorted(case.name for case in every[1:])


def row(status: Outcome, kind: str, **case) -> Row:
    case = Case("math.decode", kind, lens=(3,), **case)
    return Row("mine", "own", "math.decode", case, case.path, status)


def test_a_profile_passes_with_a_pass_of_each_kind_and_no_failure():
    def of_all(rows: list[Row]) -> dict[str, list[str]]:
        return passed(rows, {"mine/own": totals(row.case for row in rows)})

    passing = [row(Outcome.PASS, kind) for kind in CHAIN_KINDS]
    assert of_all(passing) == {"mine/own": ["chain"]}
    assert of_all(passing[1:]) == {"mine/own": []}
    refused = [replace(passing[0], status=Outcome.REFUSED), *passing[1:]]
    assert of_all(refused) == {"mine/own": []}
    assert of_all([*passing, row(Outcome.FAIL, "target_verify", topk=3)]) == {"mine/own": ["chain"]}
    for wrong in (Outcome.FAIL, Outcome.ERROR, Outcome.XFAIL):
        assert of_all([*passing, row(wrong, "decode")]) == {"mine/own": []}
    assert told(["chain", "tree", "fp8"]) == f"passes chain, tree and fp8 of contract {CONTRACT}"
    assert told(["tree"]) == f"passes tree of contract {CONTRACT}"
    assert told([]) == f"passes no profile of contract {CONTRACT}"


def test_a_profile_of_which_cases_are_missing_is_not_said_to_pass():
    """Whoever left them out: a pattern, another report that was not joined, or pytest's own -k."""
    passing = [row(Outcome.PASS, kind) for kind in CHAIN_KINDS]
    known = {"mine/own": totals([*(each.case for each in passing), replace(passing[0].case, lens=(5,))])}
    assert (passed(passing, known), lacking(passing, known)) == ({}, {"mine/own": {"chain": 1}})
    assert (passed(passing, {}), lacking(passing, {})) == ({}, {})
    drawn = row(Outcome.PASS, "decode", seed=5, drawn=True)
    assert passed([*passing, drawn], known) == {}, "a random case stands for no other"
    every = [*passing, replace(passing[0], case=replace(passing[0].case, lens=(5,)))]
    assert passed([*every, drawn], known) == {"mine/own": ["chain"]}
    assert passed([*every, replace(drawn, status=Outcome.FAIL)], known) == {"mine/own": []}


def test_a_run_of_a_profile_says_whether_it_passes(capsys):
    report = run_conformance("flashinfer_mla", kernel="torch", profile="prefill-graph")
    assert report.profiles == {"flashinfer_mla/torch": ["prefill-graph"]}
    again = Report.from_json(report.to_json())
    assert (again.contract, again.profiles) == (CONTRACT, report.profiles)
    assert summary(report).profiles == report.profiles
    halves = [replace(again, rows=again.rows[place::2], profiles={}) for place in range(2)]
    assert (joined(halves).profiles, joined(halves[:1]).profiles) == (report.profiles, {})
    assert main(["conformance", "flashinfer_mla", "--kernel", "torch", "--profile", "prefill-graph"]) == 0
    assert f"flashinfer_mla/torch passes prefill-graph of contract {CONTRACT}" in capsys.readouterr().out
    lacking = run_conformance(NarrowBackend, profile="prefill-graph")
    assert not any(lacking.profiles.values())


def test_a_part_of_a_profile_claims_nothing():
    assert run_conformance("fa3", kernel="torch", quick=True, profile="tree", select="api.*").profiles == {}
    assert Selection(quick=True).complete_profiles == ()
    assert Selection(select="math.*").complete_profiles == ()
    assert Selection(effort=3).complete_profiles == tuple(PROFILES)


def test_what_is_not_there_is_refused():
    with pytest.raises(
        ConfigError, match=r"no profile 'chains'\. Did you mean 'chain'\? There are chain, chain-graph, "
    ):
        Selection(profile="chains")
    with pytest.raises(ConfigError, match=rf"checks contract {CONTRACT}, not '1.0'.*docs/contract.md"):
        Selection(contract="1.0")
    with pytest.raises(ConfigError, match="got -1"):
        Selection(effort=-1)


def test_a_backend_of_another_contract_is_not_run():
    class Old(FA3Backend):
        contract = "1.0"

    report = run_conformance(Old, kernel="torch", quick=True)
    (found,) = report.rows
    assert found.status is Outcome.NOT_RUN
    assert "declares contract 1.0" in found.reason
    assert CONTRACT in found.reason
    assert report.exit_code(require_run=False) == 2

    class Minor(FA3Backend):
        contract = f"{CONTRACT.partition('.')[0]}.99"

    assert run_conformance(Minor, kernel="torch", quick=True, select="api.idle").exit_code(require_run=True) == 0


def results(**own) -> Results:
    head = Head("CPU", {"torch": torch.__version__}, "2026-11-22", "", "attn-backends conformance mine")
    return Results(head, (row(Outcome.PASS, "decode").to_dict(),), {"suite_version": "2026.11", **own})


def test_the_results_page_refuses_a_report_of_another_contract():
    with pytest.raises(ConfigError, match=rf"of contract 1.0 .*conformance mine.*page is of contract {CONTRACT}"):
        matrix.page(results(contract="1.0"))
    shown = matrix.page(results(contract=CONTRACT, profiles={"mine/own": ["chain"]}))
    assert f"`mine/own` passes chain of contract {CONTRACT}." in shown
    assert "Suite 2026.11, before contracts had versions; executed: 1 cases of " in matrix.page(results())


def test_patterns_are_joined_by_commas_and_each_must_select_something():
    of_both = {case.check for case in selected_cases(FA3, "math.decode, plan.*", 2)}
    assert of_both == {"math.decode"} | {case.check for case in selected_cases(FA3, "plan.*", 2)}
    with pytest.raises(
        ConfigError, match=r"matches 'maths\.\*'. Did you mean 'math\.\*'\? The groups are plan\.\*, math\.\*, "
    ) as error:
        selected_cases(FA3, "plan.*,maths.*")
    assert "math.decode" not in str(error.value), "the groups alone"
    with pytest.raises(ConfigError, match=r"Did you mean 'math\.target_verify'\?"):
        selected_cases(FA3, "math.target_verfy")
