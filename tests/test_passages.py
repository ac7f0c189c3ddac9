"""Three passages of every page, with questions that each answers alone: quotes stand there, answers add no fact."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PASSAGES = tomllib.loads((ROOT / "tests" / "passages.toml").read_text())
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_three_passages_of_the_page_answer_their_questions(page):
    text = " ".join((ROOT / page).read_text().split())
    assert len(PASSAGES[page]) == 3, f"{page} has three passages, with questions and answers, in tests/passages.toml"
    for quote, question, answer in PASSAGES[page]:
        assert quote in text, f"{page} no longer says {quote!r}: renew the passage, its question and its answer"
        assert question.endswith("?")
        facts = set(re.findall(r"`[^`]+`|\d[\d.,]*\d|\d", answer))
        assert all(fact in quote for fact in facts), f"{page}: {answer!r} says what {quote!r} does not"


def test_no_passages_are_of_a_page_that_is_gone():
    assert set(PASSAGES) == set(PAGES)
