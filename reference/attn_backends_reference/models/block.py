"""A block draft as a worker sees it; `block_draft` has its modules."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from attn_backends.cache import KeyValues
from attn_backends.errors import CheckpointError
from attn_backends_reference.models import folders, weights
from attn_backends_reference.models.attention import Attention
from attn_backends_reference.models.decoder import Family, PagedModel, TargetModel
from attn_backends_reference.models.fit import cast, check_fit

if TYPE_CHECKING:
    from attn_backends_reference.models.block_draft import BlockDraft

EMBEDDED_BLOCKS = {"gqa-block": "gqa/block"}


class BlockModel(PagedModel):
    """A block draft with the target's embedding and output head. Takes over `draft`, which has its target's dtype and
    device. family: of its attention. feature_layers, feature_size: as of a `DraftModel`. num_drafted: the last rows of
    a block, each of which proposes a token.
    """

    feature_layers: tuple[int, ...] = ()

    def __init__(self, family: Family, draft: BlockDraft, target: TargetModel) -> None:
        draft.eval().requires_grad_(False)
        super().__init__(family, draft.config, draft.layers, target.embedding, target.head)
        self._draft, self.block_size, self.feature_size = draft, draft.block_size, draft.fc.in_features
        self.num_drafted = self.block_size - 1

    def forward(self, root: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states [bs * block_size, hidden_size] of blocks. root: [bs] int64. positions: of all rows."""
        rows = self._draft.embed_block(self.embedding(root)).flatten(0, 1)
        return self._draft(rows.unsqueeze(0), positions.unsqueeze(0), attention=attention).squeeze(0)

    def store_context(self, hidden: Tensor, positions: Tensor, attention: Attention) -> None:
        """Store the context of tokens that the target ran. hidden: [T, feature_size], what it takes of the target."""
        for index, (keys, values) in enumerate(self._draft.context(hidden.unsqueeze(0), positions.unsqueeze(0))):
            attention.store(index, KeyValues(keys.squeeze(0), values.squeeze(0)))

    def proposing(self, hidden: Tensor) -> Tensor:
        """[bs, num_drafted, hidden_size], of the rows that propose. hidden: of blocks, as `forward` returns them."""
        return hidden.unflatten(0, (-1, self.block_size))[:, -self.num_drafted :]

    def propose(self, hidden: Tensor, root: Tensor) -> Tensor:
        """[bs, num_drafted] int64, the proposed tokens. hidden: of blocks, as `forward` returns them. root: [bs]."""
        return self.target_ids(self.logits(self.proposing(hidden)).argmax(dim=-1))

    def target_ids(self, ids: Tensor) -> Tensor:
        """The target's ids of those that `logits` scores, in any shape."""
        return ids


def load_block(folder: str | Path, target: TargetModel) -> BlockModel:
    """The block draft in a folder of `block_draft.save_block`, that of a published DFlash or DSpark draft
    (`models.dflash`), or an embedded one by name (`EMBEDDED_BLOCKS`), in the target's dtype and on its device. Raises
    `CheckpointError` as `load_draft` does.
    """
    from attn_backends_reference.models import dflash, head_keys
    from attn_backends_reference.models.block_draft import ARCHITECTURE, BlockDraft
    from attn_backends_reference.models.llama import LLAMA

    path = folders.find(folder, EMBEDDED_BLOCKS)
    fields = folders.read_fields(path / "config.json")
    if head_keys.is_parallel(fields):
        raise CheckpointError(f"{path} is a P-EAGLE head, whose rows are causal: worker = 'parallel' runs it")
    if head_keys.block_drafts(head_keys.names(fields)):
        return dflash.load_dflash(path, fields, target)
    folders.refuse_quantized(path, fields)
    _, config = folders.read_architecture(path, {ARCHITECTURE: LLAMA}, own=("block_size",))
    check_fit(path, *({"hidden_size": x.hidden_size, "vocab_size": x.vocab_size} for x in (config, target)))
    draft = BlockDraft(config)
    draft.load_state_dict(weights.read_checked(weights.read_headers(path, None), draft.state_dict()))
    return BlockModel(LLAMA, cast(draft, target), target)
