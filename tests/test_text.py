"""Text that grows token by token: characters of several tokens, and stop strings across the edges of tokens."""

from __future__ import annotations

import random

import pytest

from attn_backends_reference.eagle.text import GrowingText
from attn_backends_reference.models.tokenizer import ByteTokenizer
from tests.request_laws import check_text, grow


def decode_bytes(ids):
    return ByteTokenizer().decode(ids)


class Words:
    """Tokens of several characters that begin with a space, dropped at the beginning of a text, as SentencePiece's."""

    words = (" in", "t", " the", "é", "🙂", ".", " s", "elf")

    def decode(self, ids):
        return "".join(self.words[i] for i in ids).removeprefix(" ")


def test_text_only_grows_and_ends_where_the_stop_string_begins():
    check_text()


def test_what_may_become_a_stop_string_is_held_back():
    shown = grow(GrowingText(decode_bytes, ("</s>",)), list(b"a</b</s"))
    assert shown == ["a", "a", "a", "a</b", "a</b", "a</b", "a</b", "a</b</s"]


def test_a_character_of_four_bytes_is_shown_when_it_is_whole():
    assert grow(GrowingText(decode_bytes), list("x🙂".encode())) == ["x", "x", "x", "x", "x🙂", "x🙂"]


def test_bytes_that_are_no_text_are_shown_in_the_end():
    assert grow(GrowingText(decode_bytes), [0x61, 0xFF, 0xFE])[-1] == "a\ufffd\ufffd"


def test_a_stop_string_before_half_a_character_is_seen_at_once():
    text = GrowingText(lambda ids: b"".join([b"end\xc3", b"\xa9"][i] for i in ids).decode(errors="replace"), ("end",))
    assert text.append(0)
    assert text.shown == ""


@pytest.mark.parametrize("seed", range(10))
def test_tokens_of_several_characters_come_out_as_in_one(seed):
    rng, tokenizer = random.Random(seed), Words()
    ids = [rng.randrange(len(tokenizer.words)) for _ in range(30)]
    assert grow(GrowingText(tokenizer.decode), ids)[-1] == tokenizer.decode(ids)


def test_a_token_is_decoded_with_few_others_however_long_the_text_is():
    seen = []

    def decode(ids):
        seen.append(len(ids))
        return ByteTokenizer().decode(ids)

    grow(GrowingText(decode, ("stop",)), list(b"x" * 500))
    assert max(seen) <= 3
