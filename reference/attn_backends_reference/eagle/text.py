"""The text of tokens that come one by one: whole characters, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"  # what tokenizers make of a character that is not whole yet


class GrowingText:
    """Turns tokens into text that only grows, so that what was shown stays true.

    Held back until more is known: the bytes of a character that is not whole, and the beginning of what may become a
    stop string. Tokens are decoded in windows of the last few, so that a token costs the same however long the text is.

    decode: token ids to text, such as `Tokenizer.decode`. stop: strings that end the text; they are left out of it.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._tokens: list[int] = []
        self._first, self._next = 0, 0  # the window: from the token before the last whole character ended
        self._settled = ""
        self._tail = ""
        self._ended = False

    @property
    def shown(self) -> str:
        """The text so far, without what is held back."""
        if self._ended:
            return self._settled
        text = self._settled + self._tail.rstrip(REPLACEMENT)
        return text[: len(text) - self._held(text)]

    def append(self, token: int) -> bool:
        """Take the next token; returns whether it completed a stop string, which ends the text before that string."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._first : self._next])
        searched = len(self._settled) + len(self._tail.rstrip(REPLACEMENT))
        self._tail = self._decode(self._tokens[self._first :])[len(before) :]
        if self._tail and not self._tail.endswith(REPLACEMENT):
            self._settled, self._tail = self._settled + self._tail, ""
            self._first, self._next = self._next, len(self._tokens)
        return self._cut(searched)

    def end(self) -> None:
        """No token follows: show what was held back."""
        if not self._ended:
            self._settled, self._tail, self._ended = self._settled + self._tail, "", True

    def _cut(self, searched: int) -> bool:
        """End the text at the first stop string that reaches past what was searched before."""
        text = self._settled + self._tail.rstrip(REPLACEMENT)
        starts = [text.find(stop, max(searched - len(stop) + 1, 0)) for stop in self._stop]
        found = [start for start in starts if start >= 0]
        if found:
            self._settled, self._tail, self._ended = text[: min(found)], "", True
        return self._ended

    def _held(self, text: str) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        lengths = range(max(map(len, self._stop), default=1) - 1, 0, -1)
        return next((n for n in lengths if any(s.startswith(text[-n:]) for s in self._stop) and n <= len(text)), 0)
