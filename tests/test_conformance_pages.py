"""The pages about the suite say what is so: the report as HTML, the matrix, and the walk through the example."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import replace
from hashlib import sha256
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

import attn_backends
import attn_backends.conformance
import attn_backends_reference.models
import spec_metadata
from attn_backends.conformance import (
    CATALOGUE,
    Case,
    Outcome,
    Report,
    Row,
    conforming,
    resolve_subjects,
    run_case,
    selected_cases,
)
from attn_backends.conformance.failures import explained
from attn_backends.conformance.matrix import main, page
from attn_backends.conformance.outcomes import SUITE_VERSION
from attn_backends.conformance.profiles import PROFILES
from attn_backends.conformance.report import html_page, write_html
from attn_backends.conformance.runner import profile_cases_of
from attn_backends.conformance.selection import QUICK_CASES, Selection
from attn_backends.conformance.summary import joined, summary
from attn_backends.conformance.summary import main as summarize
from attn_backends.errors import ConfigError
from attn_backends.results import Results, read
from spec_metadata import Dim

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
EXAMPLE = ROOT / "examples" / "out_of_tree_backend"
CASE = Case("math.decode", "decode", lens=(3, 17))


def row(outcome: Outcome, **changes: object) -> Row:
    """A row of each kind."""
    plain = {"backend": "fa3", "kernel": "torch", "check": "math.decode", "case": CASE, "path": "eager"}
    return Row(**(plain | {"status": outcome, "reason": f"why <{outcome}> & so on"} | changes))


def test_a_row_says_its_check_and_path_once_and_is_read_back():
    case = Case("graph.padded", "target_verify", path="graph", topk=3, lens=(17, 15), captured_lens=(16, 2), bs=5)
    written = row(Outcome.PASS, check=case.check, case=case, path="graph", reason="", max_err=0.0, budget=0.25)
    values = written.to_dict()
    assert not {"check", "path"} & values["case"].keys()
    assert not {"reason", "ms", "excused"} & values.keys()
    assert Row.from_dict(values) == written
    several = replace(written, case=None, cases=7)
    assert "case" not in several.to_dict()
    assert Row.from_dict(several.to_dict()) == several


REPORT = Report("1", "cpu", {"torch": "2"}, tuple(row(outcome) for outcome in Outcome))


class Tags(HTMLParser):
    """The tags of a page, and whether each that must be closed is."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: set[str] = set()
        self.ids: set[str] = set()

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.links |= {values["href"]} if "href" in values else set()
        self.ids |= {"#" + values["id"]} if "id" in values else set()
        assert "src" not in values, "the page needs another file"
        if tag not in ("meta", "br", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_html_report_is_whole_and_names_every_outcome_and_reason(tmp_path):
    write_html(REPORT, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.links == tags.ids == {"#math.decode--fa3/torch"}
    for outcome in Outcome:
        assert f"1 {outcome}</span>" in text
        assert f"why &lt;{outcome}&gt; &amp; so on" in text
    assert text.count(CASE.name) == len(Outcome) + 2  # in the cell's table, and what failed and broke above it
    assert CASE.in_words() in text


def test_the_matrix_of_the_html_report_has_the_kernels_that_ran_and_breaks_no_word_of_them():
    absent = replace(row(Outcome.NOT_RUN), kernel="sgl_kernel", case=None)
    page = html_page(replace(REPORT, rows=(row(Outcome.PASS), absent)))
    assert re.search("<th>what it holds</th>(.*?)</tr>", page)[1] == "<th>fa3/<wbr>torch</th>"
    assert "th, td { overflow-wrap: normal }" in page


def test_the_html_report_says_what_checks_hold_and_what_runs_a_case_again(tmp_path):
    head = {"date": "2026-01-02", "commit": "abc123", "command": "attn-backends conformance my_package:Mine"}
    write_html(replace(REPORT, **head), tmp_path / "report.html", {"fa3": "my_package:Mine"})
    text = unescape((tmp_path / "report.html").read_text())
    assert all(value in text for value in head.values())
    assert f"<td>{CATALOGUE['math.decode'].about}</td>" in text
    options = f"my_package:Mine --device cpu --kernel torch --case '{CASE.to_json()}'"
    assert text.count(f"attn-backends conformance {options}") == 2
    assert text.count(f"attn-backends explain {options}") == 2
    assert "attn-backends conformance my_package:Mine --device cpu --kernel torch --select math.decode<" in text


def test_failures_after_the_first_three_are_folded(tmp_path):
    write_html(replace(REPORT, rows=tuple(row(Outcome.FAIL) for _ in range(5))), tmp_path / "report.html")
    shown, folded = (tmp_path / "report.html").read_text().split("<summary>2 more, from basic to derived</summary>")
    assert shown.count("run it again") == 3
    assert folded.count("run it again") == 2


def test_a_refusal_has_no_picture(tmp_path):
    rows = (row(Outcome.FAIL, check="refusals.width"),)
    write_html(replace(REPORT, rows=rows, device="NVIDIA H200"), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "--device cuda" in text
    assert "attn-backends explain" not in text


def test_an_empty_report_is_a_page(tmp_path):
    write_html(Report("1", "cpu", {}, ()), tmp_path / "report.html")
    assert "Nothing was run." in (tmp_path / "report.html").read_text()


def test_the_matrix_counts_and_gives_reasons():
    text = page(Results.from_json(REPORT.to_json()))
    assert "| `math.decode` | 1 error, 1 fail, 1 xfail, 1 not_run, 1 refused, 1 pass |" in text
    for outcome in (Outcome.FAIL, Outcome.XFAIL, Outcome.NOT_RUN, Outcome.ERROR):
        assert f"| {outcome} | fa3/torch | `math.decode` | 1 | why <{outcome}> & so on |" in text
    assert all(f"| `{id}` |" in text for id in CATALOGUE)


def test_the_matrix_refuses_what_is_no_report(tmp_path, capsys):
    (tmp_path / "report.json").write_text("[]")
    assert main([str(tmp_path / "report.json"), "--output", str(tmp_path / "matrix.md")]) == 2
    assert "report.json: not a result" in capsys.readouterr().err
    assert not (tmp_path / "matrix.md").exists()


def test_a_summary_counts_cases_and_keeps_what_did_not_pass():
    long = replace(CASE, lens=(65,))
    passed = [row(Outcome.PASS, case=case, reason="", max_err=err, budget=1.0, ms=2.0) for case, err in
              ((CASE, 0.25), (long, 0.5))]  # fmt: skip
    graph = replace(CASE, check="graph.replay", path="graph")
    other = row(Outcome.PASS, check=graph.check, case=graph, path="graph", reason="")
    wrong = [row(outcome, case=case) for outcome in (Outcome.FAIL, Outcome.NOT_RUN) for case in (CASE, long)]
    report = replace(REPORT, rows=(passed[0], other, *wrong, passed[1]))
    short = summary(report)
    assert short.rows == (replace(passed[1], case=None, ms=4.0, cases=2), other, *wrong)
    assert (short.counts, short.executed) == (report.counts, report.executed)
    assert summary(Report.from_json(short.to_json())) == short


def test_a_summary_of_another_projects_backend_keeps_the_first_failure_of_a_check():
    graph = replace(CASE, path="graph")
    failed = [replace(row(Outcome.FAIL, case=case, ms=2.0), backend="them:theirs") for case in (CASE, graph)]
    assert summary(replace(REPORT, rows=tuple(failed))).rows == (replace(failed[0], cases=2, ms=4.0),)


def test_reports_of_parts_are_joined(tmp_path):
    other = replace(CASE, check="graph.replay", path="graph")
    rows = [row(Outcome.PASS, case=case, check=case.check, path=case.path, reason="") for case in (CASE, other)]
    left_out = row(Outcome.NOT_RUN, check="worker.*", case=None, path="")
    parts = [replace(REPORT, rows=(each, left_out), command=f"part {i}") for i, each in enumerate(rows)]
    files = [tmp_path / f"{i}.json" for i in range(2)]
    for file, part in zip(files, parts, strict=True):
        file.write_text(part.to_json())
    assert summarize(["--joined", str(tmp_path / "whole.json"), *map(str, files)]) == 0
    whole = Report.from_json((tmp_path / "whole.json").read_text())
    assert (whole.executed, whole.command) == (2, "part 0; part 1")
    assert whole.counts[Outcome.NOT_RUN] == 1
    assert len(Report.from_json(files[0].read_text()).rows) == 2


def test_a_joined_report_names_the_profiles_that_its_parts_have_all_cases_of(tmp_path, capsys):
    """Not one that lacks a case, nor any where parts, as those of earlier versions, do not say how many there are."""
    (subject,), _ = resolve_subjects("trtllm_mla")
    sizes = profile_cases_of(["trtllm_mla"], "auto", "cpu", Selection("math.*"))
    made = {"backend": "trtllm_mla", "kernel": "torch", "reason": ""}
    rows = [row(Outcome.PASS, check=case.check, case=case, path=case.path, **made) for case in selected_cases(subject)]
    of_chain = next(each for each in rows if [k for k, p in PROFILES.items() if p.holds(each.case)] == ["chain"])

    def outcome(*parts: list[Row], sizes: dict[str, dict[str, int]]) -> tuple[dict[str, list[str]], str]:
        """The profiles of a joined report, and what is said of the others."""
        files = [tmp_path / f"{number}.json" for number in range(len(parts))]
        for file, of_part in zip(files, parts, strict=True):
            file.write_text(replace(REPORT, rows=tuple(of_part), profile_cases=sizes).to_json())
        assert summarize(["--joined", str(tmp_path / "whole.json"), *map(str, files)]) == 0
        return dict(Report.of(read(tmp_path / "whole.json")).profiles), capsys.readouterr().err

    profiles, said = outcome(rows[::2], rows[1::2], sizes=sizes)
    assert {"chain", "chain-graph", "tree", "streams"} < set(profiles["trtllm_mla/torch"])
    assert said == ""
    rest = [each for each in rows if each is not of_chain]
    fewer, said = outcome(rest[::2], rest[1::2], sizes=sizes)
    assert fewer == {"trtllm_mla/torch": [name for name in profiles["trtllm_mla/torch"] if name != "chain"]}
    lacks = "the reports lack cases of chain (1)"
    assert said == f"note: trtllm_mla/torch: {lacks}; the joined one does not name these profiles\n"
    graphs = [each for each in rows if each.path == "graph"]
    assert set(outcome(graphs, sizes=sizes)[0]["trtllm_mla/torch"]) == {"chain-graph", "prefill-graph", "streams"}
    none, said = outcome(rows[::2], rows[1::2], sizes={})
    assert (none, said.count("do not say how many cases")) == ({}, 1)


def test_parts_with_other_numbers_of_cases_are_not_joined():
    one, two = ({"fa3/torch": {"chain": number}} for number in (3, 4))
    with pytest.raises(ConfigError, match="fa3/torch has other numbers of cases in them"):
        joined([replace(REPORT, rows=(), profile_cases=one), replace(REPORT, rows=(), profile_cases=two)])


def test_summaries_are_not_joined():
    """Rows without a case can't be told from one another: the same part given twice would lose its count."""
    report = replace(REPORT, rows=(row(Outcome.PASS, case=None, reason="", cases=2),))
    with pytest.raises(ConfigError, match="is a summary already"):
        joined([report, report])


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"commit": "another"}, "commit is .* of the first and another of another"),
        ({"device": "another"}, "device is"),
        ({}, "2 cases are in two reports"),
    ],
)
def test_reports_of_different_runs_are_not_joined(changed, why):
    cases = (CASE, replace(CASE, lens=(65,)))
    report = replace(REPORT, rows=tuple(row(Outcome.PASS, case=case, reason="") for case in cases))
    with pytest.raises(ConfigError, match=why):
        joined([report, replace(report, **changed)])


def test_the_matrix_of_a_summary_is_that_of_the_report(tmp_path):
    report = replace(REPORT, rows=(*REPORT.rows, *(row(outcome, path="graph") for outcome in Outcome), *REPORT.rows))
    path = tmp_path / "report.json"
    path.write_text(report.to_json())
    assert summarize([str(path)]) == 0
    assert len(Results.from_json(path.read_text()).rows) < len(report.rows)
    assert page(read(path)) == page(Results.from_json(report.to_json()))


def test_a_summary_is_of_reports_only(tmp_path, capsys):
    (tmp_path / "report.json").write_text("[]")
    assert summarize([str(tmp_path / "report.json")]) == 2
    assert "report.json: not a result" in capsys.readouterr().err


def blocks(name: str, language: str) -> list[str]:
    """The code blocks of a page."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / name).read_text(), flags=re.DOTALL)


def test_the_walk_through_is_the_example_and_the_whole_of_it():
    *parts, one_line_test = blocks("write-a-backend.md", "python")
    words = [line for part in parts for line in part.splitlines() if line]
    assert words == [line for line in (EXAMPLE / "seqmajor.py").read_text().splitlines() if line]
    assert one_line_test == (EXAMPLE / "tests" / "test_seqmajor.py").read_text()


def test_the_walk_through_registers_as_the_example_does():
    entry, expected_failures = blocks("write-a-backend.md", "toml")
    assert entry in (EXAMPLE / "pyproject.toml").read_text()
    assert "[[expected_failures]]" in expected_failures


def test_the_failure_of_the_walk_through_is_what_the_suite_says(monkeypatch):
    """Up to the budget, which depends on the processor."""
    source = (EXAMPLE / "seqmajor.py").read_text()
    assert source.count(" - rows_after") == 1
    broken = ModuleType("seqmajor")
    monkeypatch.setitem(sys.modules, "seqmajor", broken)
    exec(source.replace(" - rows_after", ""), vars(broken))
    (subject,), _ = resolve_subjects(broken.SeqMajorBackend, "auto", "cpu")
    case = selected_cases(subject, "math.target_verify", QUICK_CASES)[0]
    options = "--attn-backend seqmajor --attn-kernel torch --attn-device cpu"
    found = explained(run_case(subject, case), f"pytest --pyargs attn_backends.conformance {options} -k {case.name}")
    (told,) = [text for text in blocks("write-a-backend.md", "text") if text.startswith("fail: ")]
    budget = re.compile(r"budget of \S+")
    assert budget.sub("", told.strip()) == budget.sub("", found)


PUBLIC = (attn_backends, spec_metadata, attn_backends.conformance, attn_backends_reference.models)


def private_imports(source: str) -> list[str]:
    """What source takes of the library that is in no `__all__` of a package."""
    packages = {package.__name__ for package in PUBLIC}
    public = packages | {f"{package.__name__}.{name}" for package in PUBLIC for name in package.__all__}
    names, known = list[str](), dict[str, str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
            known |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and known.get(node.value.id) in packages
        ):
            names.append(f"{known[node.value.id]}.{node.attr}")
    return [name for name in names if name.startswith(("attn_backends", "spec_metadata")) and name not in public]


@pytest.mark.parametrize(
    "source",
    [EXAMPLE / "seqmajor.py", EXAMPLE / "tests" / "test_seqmajor.py", EXAMPLE.parent / "own_worker.py"],
    ids=lambda path: path.name,
)
def test_the_examples_use_public_names_only(source):
    text = source.read_text()
    assert private_imports(text) == []
    assert re.findall(r"\b(?:self|cls|step|plan|layer|cache|meta|backend)\._\w+", text) == []


def test_a_private_name_is_seen():
    source = "import attn_backends.backend\nfrom attn_backends.cache import PagedCache\nfrom spec_metadata import Step"
    assert private_imports(source) == ["attn_backends.backend", "attn_backends.cache.PagedCache"]
    assert private_imports("import spec_metadata as spec\nspec.Step(spec.layout)") == ["spec_metadata.layout"]


def test_every_public_name_is_there():
    assert [name for package in PUBLIC for name in package.__all__ if not hasattr(package, name)] == []


def test_the_guide_for_backends_lists_every_size():
    sizes = {name for name in spec_metadata.__all__ if isinstance(getattr(spec_metadata, name), Dim)}
    (table,) = re.findall(r"\| size \|.*?\n\n", (DOCS / "write-a-backend.md").read_text(), flags=re.DOTALL)
    assert sizes == set(re.findall("`(.*?)`", table))
    assert [name for name in sizes - {"NOTHING"} if name not in Dim.__doc__] == []


@pytest.mark.parametrize("name", ["conformance.md", "write-a-backend.md", "matrix.md"])
def test_links_lead_somewhere(name):
    links = re.findall(r"\]\(([^)#]+)\)", (DOCS / name).read_text())
    assert [link for link in links if not link.startswith("http") and not (DOCS / link).exists()] == []


def test_every_group_of_checks_and_every_option_is_described():
    text = (DOCS / "conformance.md").read_text()
    groups = {id.partition(".")[0] for id in CATALOGUE}
    assert groups == set(
        re.findall(r"^\| `(\w+)` \|", text.split("## Six")[0].split("## What is")[1], flags=re.MULTILINE)
    )
    options = re.findall(r'add\(\s*"(--attn-[a-z-]+)"', (ROOT / "attn_backends_pytest" / "__init__.py").read_text())
    assert len(options) == 12
    assert [option for option in options if option not in text] == []


def test_checks_have_the_suite_s_version() -> None:
    digest = sha256(repr(sorted((check.id, check.about) for check in CATALOGUE.values())).encode()).hexdigest()[:8]
    assert (SUITE_VERSION, digest) == ("2026.11.3", "203be75b"), "checks were changed: raise the version, and this"


def test_the_page_of_conforming_packages_is_what_their_reports_give():
    reports = DOCS / "conforming"
    assert [path.stem for path in reports.glob("*.json")] == ["seqmajor-0.1.0"]
    assert (DOCS / "conforming.md").read_text() == conforming.page(reports), f"stale; run {conforming.COMMAND}"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("seqmajor.json", {}, r"seqmajor\.json: a report is named PACKAGE-VERSION\.json"),
        ("a-1.json", {"contract": "1.0"}, r"a-1\.json: a report of contract 1\.0 .* of contract 2\.0"),
        ("a-1.json", {"profiles": {}}, r"a-1\.json: no profile passes"),
        ("a-1.json", {"profiles": {"seqmajor/torch": []}}, r"a-1\.json: no profile passes"),
        ("a-1.json", {"status": "fail"}, r"a-1\.json: 1 cases failed or broke"),
        ("a-1.json", {"incomplete": True}, r"a-1\.json: the run was interrupted"),
    ],
)
def test_a_report_that_does_not_conform_is_refused(name, changes, message, tmp_path, capsys):
    found = read(DOCS / "conforming" / "seqmajor-0.1.0.json")
    status = {"status": changes.pop("status", "pass"), "cases": 1}
    rows = (found.rows[0] | status, *found.rows[1:])
    (tmp_path / name).write_text(replace(found, rows=rows, own={**found.own, **changes}).to_json())
    page = tmp_path / "page.md"
    assert conforming.main(["--reports", str(tmp_path), "--output", str(page)]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not page.exists()
