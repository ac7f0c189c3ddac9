"""Published P-EAGLE heads (Hui et al., 2026, https://arxiv.org/abs/2602.01469), unchanged: EAGLE-3 heads that draft all
tokens in one forward.

Mask rows come after the row of the last accepted token, at the positions that follow. A mask row takes the embedding of
the mask token, and in place of the target's states the learned ``mask_hidden``. The accepted row predicts the first
token, each mask row the next one. All rows are causal, so that a mask row sees the committed
rows and the mask rows before it.

The forms are those of speculators' ``models/peagle``, SpecForge's ``draft/peagle.py`` and NeMo AutoModel's
``eagle/draft_llama.py``, as vLLM's ``llama_eagle3.py`` and ``qwen3_eagle3.py`` read them. docs/heads.md has the keys.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from attn_backends.errors import CheckpointError
from attn_backends_reference.models import head_keys as keys
from attn_backends_reference.models import heads, stored
from attn_backends_reference.models.attention import Attention
from attn_backends_reference.models.decoder import TargetModel
from attn_backends_reference.models.eagle3 import Eagle3Draft, Eagle3Model
from attn_backends_reference.models.fit import cast
from attn_backends_reference.models.head_config import HeadConfig, head_of
from attn_backends_reference.models.head_keys import Fields, refuse


class PEagleDraft(Eagle3Draft):
    """The modules of a folder. mask_shape: of its ``mask_hidden``, as many values as `fuse` takes of a row."""

    def __init__(self, head: HeadConfig, mask_shape: tuple[int, ...] | None = None) -> None:
        super().__init__(head)
        self.mask_hidden = nn.Parameter(torch.zeros(mask_shape or (1, 1, self.fc.in_features)))


class PEagleModel(Eagle3Model):
    """A P-EAGLE head as a worker sees it. Takes over `draft`. mask_token: the target's token whose embedding a mask row
    takes. The others are as of `Eagle3Model`.
    """

    def __init__(
        self,
        draft: PEagleDraft,
        target: TargetModel,
        feature_layers: tuple[int, ...],
        mask_token: int,
        embedding: nn.Embedding | None = None,
        head: nn.Linear | None = None,
    ) -> None:
        super().__init__(draft, target, feature_layers, embedding, head)
        self.mask_token = mask_token
        self._mask = self.fuse(draft.mask_hidden.flatten())

    def forward_masked(
        self, tokens: Tensor, features: Tensor, is_mask: Tensor, positions: Tensor, attention: Attention
    ) -> Tensor:
        """Outputs [T, hidden_size] of rows that the target ran and of mask rows.

        tokens: [T] int64, the token after each row's position. features: [T, feature_size], the target's there.
        is_mask: [T] bool, rows for which both of them are not read. positions: [T] int64.
        """
        hidden = torch.where(is_mask.unsqueeze(1), self._mask, self.fuse(features))
        return self.forward(tokens.masked_fill(is_mask, self.mask_token), hidden, positions, attention)

    def propose(self, hidden: Tensor) -> Tensor:
        """[...] int64, the target's ids of the best tokens of rows. hidden: [..., hidden_size], their outputs."""
        return self.target_ids(self.logits(hidden).argmax(dim=-1))


def load_peagle(path: Path, fields: Fields, target: TargetModel) -> PEagleModel:
    """The P-EAGLE head in a folder whose config.json says `fields`. Raises `CheckpointError` as `load_draft` does."""
    head, mask_token = read_peagle(fields, path)
    heads.check_sizes(path, head, target)
    layers = head.feature_layers(path, len(target.layers))
    draft = PEagleDraft(head)
    found = stored.stored_tensors(path).get("mask_hidden")
    if found is not None and prod(found.shape) == draft.fc.in_features:  # exporters write [1, 1, F], vLLM reads any
        draft = PEagleDraft(head, found.shape)
    embedding, output = heads.fill(path, draft, target)
    return PEagleModel(cast(draft, target), target, layers, mask_token, embedding, output)


def read_peagle(fields: Fields, where: object) -> tuple[HeadConfig, int]:
    """The configuration of a P-EAGLE head and its mask token. Raises `CheckpointError`, which names the key, for what
    is not served.
    """
    if not keys.is_parallel(fields):
        raise CheckpointError(
            f"{where} is no P-EAGLE head ({', '.join(keys.names(fields))}): it says neither parallel_drafting nor "
            f"pard_token or ptd_token_id, the token of a mask"
        )
    if other := [name for name in keys.names(fields) if name in keys.MLA_ARCHITECTURES]:
        raise CheckpointError(f"{where} is a P-EAGLE head of other layers than Llama's or Qwen3's ({', '.join(other)})")
    flat = keys.unwrapped(fields, where, "peagle")
    if flat.pop("parallel_drafting", True) is not True:
        refuse(where, "parallel_drafting", fields["parallel_drafting"], "a P-EAGLE head drafts all tokens at once")
    keys.check_keys(flat, where, keys.PARALLEL_HONOURED, keys.PARALLEL_INERT)
    head = head_of(flat, fields, where, is_mla=False)
    return head, _mask_token(flat, head.layer.vocab_size, where)


def _mask_token(flat: Fields, vocab_size: int, where: object) -> int:
    """The token of mask rows, by any of its names."""
    said = {key: flat[key] for key in keys.PARALLEL_TOKENS if key in flat}
    if len(set(said.values())) != 1:
        raise CheckpointError(
            f"{where}/config.json must say the token of mask rows, as one of {', '.join(keys.PARALLEL_TOKENS)}; got "
            f"{said or 'none'}"
        )
    (key, token), *_ = said.items()
    if type(token) is not int or not 0 <= token < vocab_size:
        refuse(where, key, token, f"it must be one of the vocabulary's {vocab_size} tokens")
    return token
