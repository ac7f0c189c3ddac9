"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from attn_backends.errors import CheckpointError


class Tokenizer(Protocol):
    """A tokenizer, as `load_tokenizer` returns it."""

    @property
    def bos_token_id(self) -> int | None:
        """Begins a text."""

    @property
    def eos_token_id(self) -> int | None:
        """Ends a text."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the begin token that the model expects."""

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of a user's message, in the form that the model was trained on. Raises `CheckpointError` if none
        is known.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without begin and end tokens."""


class ByteTokenizer:
    """A token is a byte of UTF-8; the zero byte begins and ends a text. Vocabulary of 256."""

    bos_token_id = 0
    eos_token_id = 0

    def encode(self, text: str) -> list[int]:
        """The begin token and the bytes of a text."""
        return [0, *text.encode("utf-8")]

    def encode_chat(self, text: str) -> list[int]:
        """Bytes have no messages."""
        raise CheckpointError("a model of bytes continues text and knows no messages; leave --chat out")

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the bytes; zero bytes are dropped, invalid UTF-8 becomes the replacement character."""
        return bytes(token for token in ids if token).decode("utf-8", errors="replace")
