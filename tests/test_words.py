"""Documents, public docstrings, errors and help say things plainly: short sentences, the field's terms, no idioms; and
three passages of every page answer a question each.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
import zlib
from pathlib import Path

import pytest

from attn_backends import AttentionBackend, get_backend
from spec_metadata import Step
from tests.words import (
    MOST_WORDS,
    of_docstrings,
    of_documents,
    of_messages,
    public,
    sentences,
    without_subject,
    wrong,
)

ROOT = Path(__file__).parent.parent
PASSAGES = tomllib.loads((ROOT / "tests" / "passages.toml").read_text())
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("source", [of_documents, of_docstrings, of_messages], ids=lambda source: source.__name__)
def test_every_sentence_is_plain(source):
    found = list(source())
    assert len(found) > 400
    assert [(each.place, complaint, each.text) for each in found for complaint in wrong(each.text)] == []


def test_docstrings_begin_with_a_noun():
    assert [(each.place, each.text) for each in without_subject()] == []


def test_what_engines_call_says_what_it_raises():
    names = ("init_forward_metadata", "capture", "replay", "store", "forward")
    calls = (get_backend, Step, *(getattr(AttentionBackend, name) for name in names))
    assert [call for call in calls if "Raises" not in str(call.__doc__)] == []


@pytest.mark.parametrize(
    ("text", "complaints"),
    [
        ("The page table holds page ids. The padded rows come after the real ones.", 0),
        ("word " * (MOST_WORDS + 1), 1),
        ("The list of work is padded behind.", 2),
        ("The layers *behind* which they are taken, and the rows behind CODE others.", 2),
        ("A row a request, in pieces.", 2),
        ("What it took once it takes again, and says so.", 2),
        ("Their entries are told whose they are now.", 2),
        ("Layers that somebody is to run shall go on.", 3),
        ("For who asks: the file that is gone is without rows.", 3),
        ("x [bs, width, num_tokens], " * 12, 0),
    ],
)
def test_what_is_not_plain_is_seen(text, complaints):
    assert len(wrong(text)) == complaints, wrong(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# Title\n\nOne. Two\nlines, 1.5 of them.", ["# Title", "One.", "Two lines, 1.5 of them."]),
        ("```sh\nls. Ls.\n```\nAfter `a. B` [it](x.md#y).", ["After CODE it."]),
        ("| One. Two | three |\n|---|---|\n", ["One.", "Two", "three", "---", "---"]),
        (
            "lens: of requests. widths, heads: of rows. vLLM pads.",
            ["lens: of requests.", "widths, heads: of rows.", "vLLM pads."],
        ),
        ("- One\n- two\n\n::: attn_backends.Kernel\n", ["- One", "- two"]),
    ],
)
def test_sentences_of_markdown(text, expected):
    assert list(sentences(text)) == expected


def test_public_docstrings_are_read_and_private_ones_are_not():
    source = """class A:\n  def b(self):\n    def c(): 1\n  def _d(self): 1\nclass _E:\n  def f(self): 1"""
    assert [getattr(node, "name", "") for node in public(ast.parse(source))] == ["", "A", "b", "c"]


@pytest.mark.parametrize("page", PAGES)
def test_three_passages_of_the_page_answer_their_questions(page):
    text = " ".join((ROOT / page).read_text().split())
    assert len(PASSAGES[page]) == 3, f"{page} has three passages, with questions and answers, in tests/passages.toml"
    for quote, question, answer in PASSAGES[page]:
        assert quote in text, f"{page} no longer says {quote!r}: renew the passage, its question and its answer"
        assert question.endswith("?")
        facts = set(re.findall(r"`[^`]+`|\d[\d.,]*\d|\d", answer))
        assert all(fact in quote for fact in facts), f"{page}: {answer!r} says what {quote!r} does not"


def test_every_passage_has_a_readers_answer_as_it_stands():
    answered = json.loads((ROOT / "tests" / "passages_answered.json").read_text())
    asked = {
        f"{zlib.crc32((quote + question).encode()):08x}" for page in PASSAGES.values() for quote, question, _ in page
    }
    assert answered.keys() - {"about"} == asked, "a reader who has not seen the code answers what is new"


def test_no_passages_are_of_a_page_that_is_gone():
    assert set(PASSAGES) == set(PAGES)
