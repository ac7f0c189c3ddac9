"""Trains the block draft of the target ``"gqa"``, on a CPU in minutes: ``python -m training.block``.

The target is frozen, so its hidden states over a part of the corpus are made once. A step takes windows of them, some
places of each as roots, and teaches mask j of a root's block the target's distribution of the token j places further,
the nearer ones more.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from attn_backends_reference.models.block_draft import BlockDraft, save_block
from training import models
from training.corpus import read_corpus
from training.fitting import Recipe, rate

BLOCK = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "intermediate_size": 128,
    "tie_word_embeddings": False,
    "block_size": 4,
}
WEIGHT_DECAY = 0.01
FADING = 0.8
"""The weight of a mask's loss beside that of the one before."""


def new_block() -> BlockDraft:
    """A draft with fresh weights."""
    draft = BlockDraft(LlamaConfig(**models.COMMON | BLOCK))
    for module in draft.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.02)
    torch.nn.init.normal_(draft.mask, std=0.02)
    return draft


def read_block(folder: Path) -> BlockDraft:
    """A stored draft, frozen, in float32."""
    draft = BlockDraft(LlamaConfig.from_pretrained(folder))
    draft.load_state_dict(load_file(folder / "model.safetensors"))
    return draft.float().eval().requires_grad_(False)


def logits_of(draft: BlockDraft, model: PreTrainedModel, hidden: Tensor, roots: Tensor, places: Tensor) -> Tensor:
    """The logits ``[B, A, block_size - 1, V]`` of the masks of blocks.

    Args:
        draft: the draft.
        model: its target, which has embedding and output head.
        hidden: ``[B, T, H]``, the target's hidden states.
        roots: ``[B, A]``, tokens at ``places``.
        places: ``[A]``, where the roots stand; a block's context are the hidden states before.
    """
    size, (batch, length, _) = draft.block_size, hidden.shape
    rows = draft.embed_block(model.model.embed_tokens(roots)).flatten(1, 2)
    positions = (places.unsqueeze(1) + torch.arange(size)).flatten()
    block = torch.arange(len(positions)) // size
    sees = torch.cat((torch.arange(length) < places[block].unsqueeze(1), block.unsqueeze(1) == block), dim=1)
    rotary = draft.rotary_emb(rows, positions.unsqueeze(0))
    context = draft.context(hidden, torch.arange(length).expand(batch, -1))
    for layer, (keys, values) in zip(draft.layers, context, strict=True):
        attention, normed = layer.self_attn, layer.input_layernorm(rows)
        q, k, v = (
            proj(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        k, v = torch.cat((keys.transpose(1, 2), k), dim=2), torch.cat((values.transpose(1, 2), v), dim=2)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True)
        rows = rows + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        rows = rows + layer.mlp(layer.post_attention_layernorm(rows))
    masks = draft.norm(rows).unflatten(1, (-1, size))[:, :, 1:]
    return model.lm_head(masks)


@torch.no_grad()
def states_of(model: PreTrainedModel, stream: bytes, num_windows: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Windows of a stream ``[N, T]`` uint8 and the target's hidden states there ``[N, T, H]`` bfloat16."""
    data, generator = torch.frombuffer(bytearray(stream), dtype=torch.uint8), torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - length, (num_windows, 1), generator=generator)
    windows, positions = data[starts + torch.arange(length)], torch.arange(length)[None]
    hidden = [models.target_hidden(model, part.long(), positions).bfloat16() for part in windows.split(8)]
    return windows, torch.cat(hidden)


def losses_of(draft: BlockDraft, model: PreTrainedModel, ids: Tensor, hidden: Tensor, places: Tensor) -> Tensor:
    """``[2, block_size - 1]``: of each mask the loss, and how often its best token is the target's."""
    hidden, offsets = hidden.float(), torch.arange(1, draft.block_size)
    logits = logits_of(draft, model, hidden, ids[:, places].long(), places)
    with torch.no_grad():  # the token at place p is chosen at p - 1
        goal = model.lm_head(hidden[:, places.unsqueeze(1) + offsets - 1]).softmax(-1)
    loss = -(goal * logits.log_softmax(-1)).sum(-1).mean((0, 1))
    return torch.stack((loss, (logits.argmax(-1) == goal.argmax(-1)).float().mean((0, 1))))


def places_of(length: int, block_size: int, count: int, generator: torch.Generator) -> Tensor:
    """So many places of roots, behind some context."""
    return torch.randint(16, length - block_size, (count,), generator=generator)


def main() -> None:
    """Trains, and stores the draft and its log."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path(".corpus/corpus.xz"))
    parser.add_argument("--out", type=Path, default=models.CHECKPOINTS / "gqa" / "block")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--windows", type=int, default=300, help="of the corpus, whose hidden states are kept")
    parser.add_argument("--length", type=int, default=384)
    parser.add_argument("--roots", type=int, default=64, help="places of a window that a step takes as roots")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--log", type=Path, help="where to write the log, a row a line")
    args = parser.parse_args()
    torch.manual_seed(0)
    began, generator = time.perf_counter(), torch.Generator().manual_seed(0)
    train, valid = read_corpus(args.corpus)
    model = models.load_target(models.CHECKPOINTS / "gqa" / "target", torch.float32, torch.device("cpu"))
    windows, states = states_of(model, train, args.windows, args.length, seed=0)
    held = states_of(model, valid, 16, args.length, seed=1)
    draft, log = new_block(), []
    with torch.no_grad():
        draft.norm.weight.copy_(model.model.norm.weight)
    weights = FADING ** torch.arange(draft.block_size - 1)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    recipe = Recipe(0, args.steps, args.batch, args.length, args.lr, WEIGHT_DECAY)
    for step in range(args.steps):
        chosen = torch.randint(len(windows), (args.batch,), generator=generator)
        places = places_of(args.length, draft.block_size, args.roots, generator)
        loss, _ = losses_of(draft, model, windows[chosen], states[chosen], places)
        (loss * weights).sum().backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate(step / args.steps, recipe)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % (args.steps // 10) == 0:
            every = torch.arange(16, args.length - draft.block_size, 7)
            with torch.no_grad():
                found = losses_of(draft, model, *held, every)
            row = {"step": step + 1, "seconds": round(time.perf_counter() - began, 1)}
            row |= {"loss": [round(x, 3) for x in found[0].tolist()]}
            log.append(row | {"agreement": [round(x, 4) for x in found[1].tolist()]})
            print(json.dumps(log[-1]), flush=True)
            save_block(draft, args.out)
    if args.log:
        args.log.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in log), encoding="utf-8")


if __name__ == "__main__":
    main()
