"""What pyproject.toml declares of other packages, and the rows of `make test-versions` that hold it to that."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests import versions
from tests.generated_tables import page_with

ROOT = Path(__file__).parent.parent
PASSED = {"row": "oldest", "tests": "smoke", "gates": True, "passed": 3, "skipped": 0, "failed": 0}
XML = """<testsuites><testsuite>
<testcase name="test_a"/><testcase name="test_b"><skipped/></testcase>
<testcase name="test_c"><failure message="AttributeError: gone&#10;in /home/me/site/x.py"/></testcase>
</testsuite></testsuites>"""


def test_every_package_of_the_matrix_has_one_lower_bound():
    declared = versions.declared()
    assert declared.keys() == set(versions.PACKAGES)
    oldest = versions.wanted("oldest")
    assert oldest == [f"{name}=={versions.lower_bound(declared[name])}" for name in declared]
    assert all(declared[name].specifier.contains(wish) for name, wish in (each.split("==") for each in oldest))


def test_the_pins_are_versions_that_are_declared():
    pins = dict(line.split("==") for line in (ROOT / "requirements-cpu.txt").read_text().split("\n") if "==" in line)
    declared = versions.declared()
    assert {name: pins[name] for name in declared if not declared[name].specifier.contains(pins[name])} == {}


def test_an_upper_bound_says_why():
    files = (ROOT / "pyproject.toml", ROOT / "reference" / "pyproject.toml")
    lines = [line for file in files for line in file.read_text().splitlines()]
    bounded = [line for line in lines if re.search(r'"[\w-]+[^"]*<', line)]
    assert bounded
    assert [line for line in bounded if "#" not in line] == []


def test_the_rows_ask_for_what_they_are_called():
    assert versions.wanted("registry") == list(versions.PACKAGES)
    assert [re.split("[<>]", wish)[0] for wish in versions.wanted("newest")] == list(versions.declared())
    assert any("<" in wish for wish in versions.wanted("newest"))
    assert versions.wanted("triton==3.6.0,rich==13") == ["triton==3.6.0", "rich==13"]


def test_models_are_tested_by_every_file_that_uses_them():
    files = versions.selections()["models"]
    kinds = (
        "target_f*",
        "head_f*",
        "head_keys",
        "quantized_folders",
        "gpt_oss",
        "v4_published",
        "transformers_*",
        "dflash",
    )
    for kind in (*kinds, "model_loading", "models", "published_targets"):
        assert {f"tests/{path.name}" for path in (ROOT / "tests").glob(f"test_{kind}.py")} <= {*files}, kind
    assert "tests/test_planners.py" not in files
    assert "tests/test_versions.py" not in files


def test_an_environment_is_kept_until_what_it_sees_lies_elsewhere(monkeypatch, tmp_path):
    """And pip looks at its packages each time, for a newer release."""
    asked = []
    monkeypatch.setattr(versions.subprocess, "run", lambda command, **_: asked.append(command[-1]))
    for requirement, is_new in (("rich==13", True), ("rich==14", False), ("rich==15", True)):
        (tmp_path / "kept").touch()
        assert versions.make_environment(tmp_path, [requirement]).exists()
        assert (tmp_path / "kept").exists() is not is_new
        if requirement == "rich==14":
            monkeypatch.setattr(versions, "ROOT", tmp_path)
    assert asked == ["rich==13", "rich==14", "rich==15"]


def test_the_page_has_what_was_measured():
    found, page = versions.results.read(versions.RESULT), versions.PAGE.read_text(encoding="utf-8")
    assert page_with({"versions": versions.table(found)}, page) == page, (
        "write it anew: python -m tests.versions --page"
    )
    assert {(row["row"], row["tests"]) for row in found.rows} >= {
        (row, name) for row in ("oldest", "newest") for name in versions.selections()
    }
    assert all(versions.passes(row) for row in found.rows if row["gates"])
    measured = {row["row"]: row["versions"] for row in found.rows}["oldest"]
    asked = [Requirement(wish) for wish in versions.wanted("oldest")]
    assert [wish for wish in asked if not wish.specifier.contains(measured[wish.name])] == [], "run make test-versions"


def test_a_row_counts_tests_and_names_what_failed():
    found = versions.counts(XML)
    assert found == {"passed": 1, "skipped": 1, "failed": 1, "failures": ["test_c: AttributeError: gone"]}
    assert not versions.passes(PASSED | found)
    lines = list(versions.in_words(PASSED | found | {"versions": {"triton": "3.9.0"}}))
    assert lines[0] == "oldest, smoke: FAILS (1 passed, 1 skipped, 1 failed) with triton 3.9.0"
    assert lines[1].strip() == "test_c: AttributeError: gone"


def test_what_pip_says_is_kept_without_addresses():
    said = "Looking in indexes: https://host/simple\nERROR: No matching distribution found for triton==99 (at https://host)\n"
    assert versions.reason(said) == "ERROR: No matching distribution found for triton==99 (at ADDRESS)"


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ({"oldest": {}, "newest": {}, "registry": {}}, 0),
        ({"oldest": {"failed": 1}}, 1),
        ({"newest": {"passed": 0}}, 1),
        ({"newest": {"reason": "no such version", "passed": 0}}, 1),
        ({"oldest": {}, "registry": {"gates": False, "failed": 1}}, 0),
    ],
)
def test_the_newest_of_the_registry_reports_and_fails_nothing(rows, code, monkeypatch, tmp_path):
    monkeypatch.setattr(versions, "run_row", lambda name, tests: [PASSED | {"row": name} | rows[name]])
    path = tmp_path / "rows.json"
    monkeypatch.setattr("sys.argv", ["versions", *rows, "--json", str(path)])
    assert versions.main() == code
    assert [row["row"] for row in versions.results.read(path).rows] == list(rows)
