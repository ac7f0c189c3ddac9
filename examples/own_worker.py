"""A complete EAGLE loop on a backend, without the library's worker: what an engine has to write.

    python examples/own_worker.py [BACKEND]        # flashinfer_mla (default), trtllm_mla, fa3, reference

Two prompts of different lengths, trees of topk 4, greedy; every step is eager. For graphs, `backend.capture(bucket,
paging)` once and record the forwards on its metadata (attn_backends.graphs); then for each step, in place of
`backend.init_forward_metadata(step)`, `backend.replay(meta, step)` and replay the graph.
"""

import sys

import torch

from attn_backends import get_backend
from attn_backends_reference.models import ForwardAttention, load_draft, load_target, load_tokenizer
from spec_metadata import (
    CacheGeometry,
    Capacity,
    DraftBeams,
    PackedQuery,
    RequestTable,
    Step,
    UniformQuery,
    accept,
    compaction_moves,
    token_positions,
)

PROMPTS = ["def main(argv=None):\n    ", "import os\nimport sys\n\nclass "]
NEW_TOKENS = 60

# A model, a cache of pages, and a table of which slots each request owns: here simply a run of pages per request.
target = load_target("mla", torch.float32)
draft = load_draft("mla", target)
tokenizer = load_tokenizer("mla", target.vocab_size)
capacity = Capacity(max_bs=len(PROMPTS), max_context=192, page_size=64, topk=4, num_steps=3, num_draft_tokens=16)
geometry = CacheGeometry(num_pages=1 + capacity.max_bs * capacity.max_pages, page_size=64)
slots = torch.arange(64, geometry.num_slots, dtype=torch.int32).view(capacity.max_bs, -1)
table = torch.cat((torch.zeros(1, slots.shape[1], dtype=torch.int32), slots))  # row 0 and page 0 are reserved
paging = RequestTable(table, torch.arange(1, capacity.max_bs + 1), geometry)
backend = get_backend(sys.argv[1] if len(sys.argv) > 1 else "flashinfer_mla")(capacity, geometry)
caches = {model: model.allocate_caches(backend) for model in (target, draft)}


def attention(model, meta):
    """The attention of one forward of a model."""
    return ForwardAttention(backend, caches[model], meta, model.layers)


def best(hidden):
    """The draft's best children of rows [n, H]: log-probabilities and tokens, [n, topk]."""
    return draft.logits(hidden).float().log_softmax(-1).topk(capacity.topk, dim=-1)


def prefill(prompts):
    """Target, then draft: row p of the draft takes the target's hidden state p and the token p + 1."""
    step = Step.prefill(PackedQuery.of([len(p) for p in prompts]), torch.zeros(len(prompts), dtype=torch.int32), paging)
    meta, positions = backend.init_forward_metadata(step).at(), token_positions(step)
    hidden = target.forward(
        torch.tensor([token for prompt in prompts for token in prompt]), positions, attention(target, meta)
    )
    last = step.query.cu_seqlens[1:].long() - 1
    root = target.logits(hidden[last]).argmax(-1)
    shifted = torch.tensor([t for p, first in zip(prompts, root.tolist(), strict=True) for t in [*p[1:], first]])
    out = draft.forward(shifted, hidden, positions, attention(draft, meta))[last]
    return root, out


def propose(root, hidden, lens):
    """Draft forward i processes the nodes of depth i + 1; the best nodes of all levels form the tree."""
    log_probs, tokens = best(hidden)
    beams, hidden = DraftBeams.start(tokens, log_probs), hidden.unsqueeze(1).expand(-1, capacity.topk, -1)
    step = Step.draft_decode(capacity.topk, capacity.num_steps, lens, paging)
    meta = backend.init_forward_metadata(step)
    for i in range(step.num_forwards):
        rows = hidden.gather(1, beams.parent_branches.unsqueeze(2).expand(-1, -1, hidden.shape[2])).flatten(0, 1)
        forward = attention(draft, meta.at(i, beams.ancestors))
        out = draft.forward(beams.tokens.flatten(), rows, token_positions(step, i), forward)
        log_probs, tokens = (x.view(-1, capacity.topk, capacity.topk) for x in best(out))
        beams, hidden = beams.advance(tokens, log_probs), out.unflatten(0, (-1, capacity.topk))
    return beams.tree(root, capacity.num_draft_tokens)


def verify(tree, lens):
    """One target forward over the tree; the accepted path's KV moves behind the committed tokens."""
    step = Step.target_verify(capacity.num_draft_tokens, lens, paging, tree_mask=tree.mask)
    positions = (lens.unsqueeze(1) + tree.depths).flatten()
    forward = attention(target, backend.init_forward_metadata(step).at())
    hidden = target.forward(tree.tokens.flatten(), positions, forward).unflatten(0, tree.tokens.shape)
    accepted = accept(tree, target.logits(hidden).argmax(-1), capacity.max_accepted)
    for cache in caches[target]:
        cache.move(*compaction_moves(accepted, step))
    return accepted, hidden.gather(1, accepted.path.unsqueeze(2).expand(-1, -1, hidden.shape[2]))


def extend(accepted, hidden, lens):
    """The draft catches up over the accepted path; rows past it are garbage that the next cycle overwrites."""
    step = Step.draft_extend(UniformQuery(capacity.max_accepted), lens, paging)
    forward = attention(draft, backend.init_forward_metadata(step).at())
    out = draft.forward(accepted.tokens.flatten(), hidden.flatten(0, 1), token_positions(step), forward)
    last = torch.arange(len(lens)) * capacity.max_accepted + accepted.num_accepted - 1
    return accepted.bonus, out[last]


with torch.no_grad():
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    lens = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32)
    root, hidden = prefill(prompts)
    texts, num_cycles = [[int(token)] for token in root], 0
    while min(map(len, texts)) < NEW_TOKENS:
        accepted, target_hidden = verify(propose(root, hidden, lens), lens)
        root, hidden = extend(accepted, target_hidden, lens)
        lens = lens + accepted.num_accepted
        num_cycles += 1
        for text, tokens, count in zip(texts, accepted.tokens.tolist(), accepted.num_accepted.tolist(), strict=True):
            text += tokens[:count]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print(f"--- {(len(text) - 1) / num_cycles:.2f} tokens a cycle\n{prompt}{tokenizer.decode(text)}\n")
