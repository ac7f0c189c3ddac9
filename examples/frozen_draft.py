"""A draft that reads the target's cache and writes none, as Gemma-4's MTP layers do, with branches, in checking mode.

    python examples/frozen_draft.py [BACKEND]        # flashinfer_mla (default), trtllm_mla, fa3, reference

Gemma's layers have queries alone. None that are trained for a model of this size are public, so the target's own stand
in for them: a drafted row sees the committed tokens, and neither itself nor the row that it was drafted from.
"""

import sys
from dataclasses import dataclass

import torch

from attn_backends import AttentionBackend, get_backend
from attn_backends.planning.metadata import ForwardMetadata
from attn_backends_reference.models import ForwardAttention, load_target, load_tokenizer
from spec_metadata import (
    CacheGeometry,
    Capacity,
    DraftBeams,
    PackedQuery,
    RequestTable,
    Step,
    accept,
    compaction_moves,
    token_positions,
)

PROMPTS = ["def main(argv=None):\n    ", "import os\nimport sys\n\nclass "]
NEW_TOKENS, TOPK = 40, 2

target = load_target("mla", torch.float32)
tokenizer = load_tokenizer("mla", target.vocab_size)
num_rows = TOPK * len(PROMPTS)  # of a draft's forward: each branch is a row of its own
capacity = Capacity(max_bs=num_rows, max_context=128, page_size=64, topk=TOPK, num_steps=3, num_draft_tokens=6)
geometry = CacheGeometry(num_pages=1 + capacity.max_bs * capacity.max_pages, page_size=64)
slots = torch.arange(64, geometry.num_slots, dtype=torch.int32).view(capacity.max_bs, -1)
table = torch.cat((torch.zeros(1, slots.shape[1], dtype=torch.int32), slots))  # row 0 and page 0 are reserved
rows = torch.arange(1, len(PROMPTS) + 1)
paging, of_branches = (RequestTable(table, index, geometry) for index in (rows, rows.repeat_interleave(TOPK)))
backend = get_backend(sys.argv[1] if len(sys.argv) > 1 else "flashinfer_mla")(capacity, geometry, checking=True)
caches = target.allocate_caches(backend)


@dataclass(frozen=True)
class FrozenAttention:
    """Attention of layers without keys: each reads the cache of the target's layer."""

    backend: AttentionBackend
    meta: ForwardMetadata

    def attend(self, index, q, inputs):
        """What rows see is there already; what they would store is left."""
        return self.backend.forward(q, caches[index], self.meta, target.layers[index]).out


def prefill(prompts):
    """The target over the prompts, and its first tokens."""
    step = Step.prefill(PackedQuery.of([len(p) for p in prompts]), torch.zeros(len(prompts), dtype=torch.int32), paging)
    forward = ForwardAttention(backend, caches, backend.init_forward_metadata(step).at(), target.layers)
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    hidden = target.forward(tokens, token_positions(step), forward)
    return target.logits(hidden[step.query.cu_seqlens[1:].long() - 1]).argmax(-1)


def propose(root, lens):
    """All forwards share one plan: what a row sees is the same at every depth."""
    step = Step.frozen_draft(lens.repeat_interleave(TOPK) - 1, of_branches)
    forward = FrozenAttention(backend, backend.init_forward_metadata(step).at())

    def best(tokens, depth):
        positions = (lens + depth).repeat_interleave(TOPK)
        scores = target.logits(target.forward(tokens.flatten(), positions, forward)).log_softmax(-1)
        return (x.unflatten(0, tokens.shape) for x in scores.topk(TOPK))

    log_probs, tokens = best(root.unsqueeze(1).expand(-1, TOPK), 0)
    beams = DraftBeams.start(tokens[:, 0], log_probs[:, 0])
    for depth in range(1, capacity.num_steps):
        log_probs, tokens = best(beams.tokens, depth)
        beams = beams.advance(tokens, log_probs)
    return beams.tree(root, capacity.num_draft_tokens)


def verify(tree, lens):
    """One target forward over the tree; the accepted path's KV moves behind the committed tokens."""
    step = Step.target_verify(capacity.num_draft_tokens, lens, paging, tree_mask=tree.mask)
    forward = ForwardAttention(backend, caches, backend.init_forward_metadata(step).at(), target.layers)
    hidden = target.forward(tree.tokens.flatten(), (lens.unsqueeze(1) + tree.depths).flatten(), forward)
    accepted = accept(tree, target.logits(hidden).argmax(-1).view_as(tree.tokens), capacity.max_accepted)
    for cache in caches:
        cache.move(*compaction_moves(accepted, step))
    return accepted


with torch.no_grad():
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    lens, root = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32), prefill(prompts)
    texts, num_cycles = [[int(token)] for token in root], 0
    while min(map(len, texts)) < NEW_TOKENS:
        accepted = verify(propose(root, lens), lens)
        root, lens, num_cycles = accepted.bonus, lens + accepted.num_accepted, num_cycles + 1
        for text, tokens, count in zip(texts, accepted.tokens.tolist(), accepted.num_accepted.tolist(), strict=True):
            text += tokens[:count]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print(f"--- {(len(text) - 1) / num_cycles:.2f} tokens a cycle\n{prompt}{tokenizer.decode(text)}\n")
