"""Random changes of one token: which are drawn, which are known to change nothing, and how one is judged."""

from __future__ import annotations

import ast
import subprocess
import sys

from tests import random_tokens
from tests.random_tokens import FILES, Change, Verdict, changes, drawn, known


def test_changes_are_drawn_from_the_seed():
    assert drawn(20, 3) == drawn(20, 3)
    assert set(drawn(20, 3)) != set(drawn(20, 4))
    assert len(set(drawn(200, 0))) == 200


def test_every_file_has_changes_each_of_one_token_of_code_that_computes():
    assert all(changes(file) for file in FILES)
    for change in drawn(30, 0):
        text = random_tokens._text(change.file)
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(change.applied())), change
        assert not change.source().startswith(("@", "import ", "from ", "raise ")), change
        assert change.equivalence() != "the compiled code is the same", change


def written(monkeypatch, text: str) -> list[Change]:
    monkeypatch.setattr(random_tokens, "_text", lambda file: text)
    return changes("any")


def test_annotations_texts_and_what_is_raised_are_left_alone(monkeypatch):
    text = 'def f(x: int | None = None) -> int | None:\n    raise ValueError(f"{x + 1}")\n'
    assert written(monkeypatch, text) == []


def test_a_comparison_with_none_is_turned_round(monkeypatch):
    found = written(monkeypatch, "a = x is not None\nb = x is None\n")
    assert [(change.old, change.new) for change in found] == [("is not", "is"), ("is", "is not")]
    assert [change.line for change in found] == [1, 2]


def test_what_compiles_to_the_same_is_dropped(monkeypatch):
    folded = [change for change in written(monkeypatch, "y = 4 - 0\n") if change.old == "-"]
    assert [change.equivalence() for change in folded] == ["the compiled code is the same"]
    (sign,) = [change for change in written(monkeypatch, "y = x - 1\n") if change.old == "-"]
    assert sign.equivalence() == ""
    monkeypatch.setattr(random_tokens, "EQUIVALENT", {("any", "y = x - 1", "+"): "nobody reads y"})
    assert sign.equivalence() == "nobody reads y"


def test_a_backend_that_declares_less_is_dropped(monkeypatch):
    text = "_RECORD = Capabilities(lse=None, packed=True)\nx = f(packed=True)\n"
    less, other = (change for change in written(monkeypatch, text) if change.old == "True")
    assert less.equivalence() == "it declares less, and what is not declared is refused"
    assert other.equivalence() == ""


def test_what_is_known_to_change_nothing_is_of_one_line():
    found = [change for file in FILES for change in changes(file)]
    lines = {known: {one.source() for one in found if one.is_known_as(known)} for known in random_tokens.EQUIVALENT}
    assert [known for known, own in lines.items() if len(own) != 1] == []


def test_of_two_equal_tokens_of_a_line_one_may_be_known(monkeypatch):
    first, second = written(monkeypatch, "y = f(1, high=1)\n")
    monkeypatch.setattr(random_tokens, "EQUIVALENT", {("any", "y = f(1, high=1)", "high=2"): "looser"})
    assert (first.equivalence(), second.equivalence()) == ("", "looser")


def test_what_earlier_runs_killed_or_let_pass_whole_is_known(tmp_path):
    one, two, three, four = drawn(4, 0)
    file = tmp_path / "verdicts.txt"
    told = [Verdict(one, "killed", "plan.padding (fail)"), Verdict(two, "survived", "all 9 cases")]
    told += [Verdict(three, "survived", "9 cases"), Verdict(four, "survived", "all 4 cases of 2/4")]
    file.write_text("".join(f"{verdict}\n" for verdict in told))
    assert [known(file, change) for change in (one, two, three, four)] == [*told[:2], None, None]
    assert [known(file, change, "2/4") for change in (one, two, three, four)] == [told[0], None, None, told[3]]
    assert known(tmp_path / "none.txt", one) is None


def test_nothing_is_judged_where_the_suite_fails_without_a_change():
    broken = "from tests import random_tokens as rt; rt._first_failure = lambda *_: 1 / 0; rt.check_unchanged()"
    ended = subprocess.run([sys.executable, "-c", broken], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.strip() == "without a change the suite says: ZeroDivisionError: division by zero"
