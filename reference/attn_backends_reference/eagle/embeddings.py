"""Embeddings that come with a prompt, such as an encoder's of an image, in place of those of its placeholder tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from numbers import Integral

import torch
from torch import Tensor

from attn_backends_reference.eagle.requests import RequestError
from attn_backends_reference.models.decoder import TargetModel
from spec_metadata import InvalidStepError


@dataclass(frozen=True, slots=True, eq=False)
class PromptEmbeddings:
    """Embeddings of one prompt. positions: of its placeholders, rising. rows: [len(positions), hidden_size], in memory
    of their own. digests: by position, of the bytes of each, which tell placeholders apart where pages are shared.
    """

    positions: tuple[int, ...]
    rows: Tensor
    digests: dict[int, bytes]

    def between(self, start: int, end: int) -> tuple[Sequence[int], Tensor]:
        """Positions and rows of the placeholders in [start, end)."""
        found = slice(bisect_left(self.positions, start), bisect_left(self.positions, end))
        return self.positions[found], self.rows[found]


@dataclass(frozen=True, slots=True)
class EmbeddingForm:
    """The form of embeddings that a worker takes. placeholder_token: the token that each stands for in a prompt; the
    others are of the target.
    """

    placeholder_token: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, target: TargetModel, placeholder_token: int) -> EmbeddingForm:
        """The form of a target's embeddings. Raises `InvalidStepError` for a token that it does not know."""
        if not isinstance(placeholder_token, Integral) or not 0 <= placeholder_token < target.vocab_size:
            raise InvalidStepError(
                f"placeholder_token is {placeholder_token!r}; the model knows 0 to {target.vocab_size - 1}. Choose one "
                "that no prompt has otherwise"
            )
        return cls(placeholder_token, target.hidden_size, target.dtype, target.device)

    def take(self, prompt: Sequence[int], given: Tensor | None) -> PromptEmbeddings | None:
        """The embeddings of a prompt, None if it has no placeholder.

        given: [num_placeholders, hidden_size], in the order of the placeholders, any strides. The host waits for them
        and reads their bytes once. Raises `RequestError` if they can't be what the target begins its rows with.
        """
        positions = tuple(place for place, token in enumerate(prompt) if token == self.placeholder_token)
        if given is None and not positions:
            return None
        needed = f"[{len(positions)}, {self.hidden_size}] in {self.dtype} on {self.device}"
        what = f"a prompt has {len(positions)} placeholder tokens {self.placeholder_token}"
        if not isinstance(given, Tensor) or given.is_nested or given.layout is not torch.strided:
            raise RequestError(
                f"{what} and comes with {_named(given)}; it needs one dense tensor of embeddings, {needed}"
            )
        form = given.shape, given.dtype, given.device
        if form != ((len(positions), self.hidden_size), self.dtype, self.device):
            found = f"{list(given.shape)} in {given.dtype} on {given.device}"
            raise RequestError(f"{what} and embeddings {found}; they must be {needed}, one for each placeholder")
        rows = given.detach().clone(memory_format=torch.contiguous_format)
        on_host = rows.cpu()
        broken = (~on_host.isfinite()).any(dim=1).nonzero().flatten().tolist()
        if broken:
            raise RequestError(
                f"{what}; {len(broken)} of its embeddings are not finite, the first is number {broken[0]}, at position "
                f"{positions[broken[0]]}"
            )
        contents = (blake2b(row.numpy(), digest_size=16).digest() for row in on_host.view(torch.uint8))
        return PromptEmbeddings(positions, rows, dict(zip(positions, contents, strict=True)))


def _named(given: object) -> str:
    """What came in place of a dense tensor."""
    if isinstance(given, Tensor):
        return "a nested tensor" if given.is_nested else f"a tensor of layout {given.layout}"
    return "no embeddings" if given is None else f"a {type(given).__name__}"
