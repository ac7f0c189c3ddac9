"""The EAGLE-3 draft of the target ``"gqa"``: its configuration, its vocabulary, and what it learns from."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from attn_backends_reference.models.eagle3 import Eagle3Draft
from attn_backends_reference.models.folders import read_fields
from attn_backends_reference.models.head_config import HeadConfig, read_eagle3
from attn_backends_reference.models.heads import rename
from training import attention, models

EAGLE3 = {
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "tie_word_embeddings": False,
    "draft_vocab_size": 96,
    # the published choice needs 7 layers, the target has 4; engines hand out states in front of a layer, so never
    # the last one's
    "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}


def eagle3_config() -> HeadConfig:
    """The draft's configuration."""
    return read_eagle3(models.COMMON | EAGLE3, "the draft")


def new_eagle3(stream: bytes) -> Eagle3Draft:
    """A draft with fresh weights on the training attention, whose vocabulary are the commonest tokens of a stream."""
    head = eagle3_config()
    draft = Eagle3Draft(head, attention.NAME)
    models.initialize(draft, head.layer)
    commonest = Counter(stream).most_common(head.num_ids)
    if len(commonest) < head.num_ids:
        raise ValueError(f"the stream has {len(commonest)} different tokens, the draft {head.num_ids}")
    ids = torch.tensor(sorted(token for token, _ in commonest))
    draft.d2t.copy_(ids - torch.arange(len(ids)))
    draft.t2d.zero_()[ids] = True
    return draft


def load_eagle3(folder: Path, dtype: torch.dtype, device: torch.device) -> Eagle3Draft:
    """A stored draft, frozen, on the training attention."""
    draft = Eagle3Draft(read_eagle3(read_fields(folder / "config.json"), folder), attention.NAME)
    draft.load_state_dict({rename(name): x for name, x in load_file(folder / "model.safetensors").items()})
    for parameter in draft.parameters():  # the rotary frequencies are buffers that must stay float32
        parameter.data = parameter.data.to(dtype)
    return draft.eval().requires_grad_(False).to(device)


def layers_of(draft: Eagle3Draft) -> tuple[int, ...]:
    """The layers of the target whose outputs a draft takes."""
    return draft.head.taps or ()


def score(draft: Eagle3Draft, rows: Tensor) -> Tensor:
    """The draft's logits ``[..., draft_vocab_size]`` of rows ``[..., H]``."""
    return draft.lm_head(draft.norm(rows))


def teacher3(model: PreTrainedModel, draft: Eagle3Draft, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a draft learns from: next-token embeddings, the target's states and goals in the draft's vocabulary.

    Args:
        model: the frozen target.
        draft: whose vocabulary it is.
        ids: ``[B, T + 1]``.

    Returns:
        ``[B, T, H]`` embeddings of tokens ``1..T``, ``[B, T, 3H]`` states of positions ``0..T-1``, ``[B, T, D]`` the
        target's distributions at ``1..T`` among the draft's tokens: zeros where the draft lacks the likeliest.
    """
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    hidden, features = models.target_features(model, ids, positions, layers_of(draft))
    logits = model.lm_head(hidden[:, 1:]).float()
    goal = logits[..., draft.target_ids].softmax(-1) * draft.t2d[logits.argmax(-1)].unsqueeze(-1)
    return model.model.embed_tokens(ids[:, 1:]), features[:, :-1], goal
