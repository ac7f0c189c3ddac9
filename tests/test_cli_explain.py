"""The command `explain`: what it writes, its exit codes, and that a failed check names it."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from attn_backends.cli import main
from attn_backends.conformance.cases import Case
from attn_backends.results import read

WRONG = "tests.test_report:OneKeyShort"
CASE = Case("math.target_verify", "target_verify", lens=(17, 3))


def test_an_example_is_shown_on_every_backend_that_takes_it(capsys):
    assert main(["explain", "--example", "tree"]) == 0
    output = capsys.readouterr().out
    assert "no picture of dsv4: dsv4 (torch) can't take a target_verify step: a draft tree" in output
    assert all(
        f"declared buffers of {name}\n" in output for name in ("fa3", "flashinfer_mla", "trtllm_mla", "reference")
    )
    assert "row 5 node 5  ████  ██   ·  ██   ·   · ██w" in output


def test_a_named_backend_that_refuses_is_an_error(capsys):
    assert main(["explain", "dsv4", "--example", "tree"]) == 2
    assert "topk > 1" in capsys.readouterr().err


@pytest.mark.parametrize(("suffix", "begins"), [(".svg", "<svg "), (".html", "<!doctype html>"), (".txt", "█ sees")])
def test_a_picture_is_written(suffix, begins, tmp_path, capsys):
    path, rows = tmp_path / f"step{suffix}", tmp_path / "rows.json"
    assert main(["explain", "fa3", "--graph", "--output", str(path), "--json", str(rows)]) == 0
    assert path.read_text().startswith(begins)
    assert capsys.readouterr().out == "fa3 (torch): every row sees and writes what it must\n"
    (row,) = read(rows).rows
    assert (row["backend"], row["path"], row["right"]) == ("fa3", "graph", True)
    assert [each["request"] for each in row["rows"][::6]] == [0, 1, None]
    assert len(row["rows"][0]["sees"]["0"]) == 31


def test_a_failed_check_names_what_shows_its_wrong_rows(capsys):
    assert main(["conformance", WRONG, "--quick", "--select", "math.target_verify"]) == 1
    (words, *_) = re.findall(r"^  picture: attn-backends (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert main(shlex.split(words)) == 1
    assert "\n! row 0 pos 8 " in capsys.readouterr().out


def test_a_case_is_taken_as_json(capsys):
    assert main(["explain", "fa3", "--case", CASE.to_json(), "--kernel", "torch"]) == 0
    assert "request 0: 17 committed tokens" in capsys.readouterr().out
    assert json.loads(CASE.to_json())["lens"] == [17, 3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--case", CASE.to_json()], "--case is of one backend: name it"),
        (["fa3", "--output", "step.png"], "a picture ends in .svg, .html, .txt"),
        (["fa3", "--output", "nowhere/step.svg"], "there is no folder nowhere"),
        (["fa3", "--case", CASE.to_json(), "--kernel", "triton"], "no kernel of fa3 runs here"),
        (["fa3", "--kernel", "wrong"], "wrong"),
        (["nobody"], "nobody"),
    ],
)
def test_misuse_is_one_line(words, message, capsys):
    assert main(["explain", *words]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
