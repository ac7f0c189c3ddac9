"""A complete EAGLE loop on a backend, without the library's worker: what an engine has to write.

    python examples/own_worker.py [BACKEND]        # flashinfer_mla (default), trtllm_mla, fa3, reference

Two prompts, trees of topk 4, greedy. A cycle is one graph, whose phases plan themselves from a committed state.
"""

import sys

import torch

import spec_metadata as spec
from attn_backends import RecordedGraph, get_backend
from attn_backends_reference.models import ForwardAttention, load_draft, load_target, load_tokenizer

PROMPTS = ["def main(argv=None):\n    ", "import os\nimport sys\n\nclass "]
NEW_TOKENS, bs = 60, len(PROMPTS)

# A model, a cache of pages, and a table of which slots each request owns: here simply a run of pages per request.
target = load_target("mla", torch.float32)
draft = load_draft("mla", target)
tokenizer = load_tokenizer("mla", target.vocab_size)
capacity = spec.Capacity(max_bs=bs, max_context=192, page_size=64, topk=4, num_steps=3, num_draft_tokens=16)
geometry = spec.CacheGeometry(num_pages=1 + bs * capacity.max_pages, page_size=64)
slots = torch.arange(64, geometry.num_slots, dtype=torch.int32).view(bs, -1)
table = torch.cat((torch.zeros(1, slots.shape[1], dtype=torch.int32), slots))  # row 0 and page 0 are reserved
paging = spec.RequestTable(table, torch.arange(1, bs + 1), geometry)
backend = get_backend(sys.argv[1] if len(sys.argv) > 1 else "flashinfer_mla")(capacity, geometry)
caches = {model: model.allocate_caches(backend) for model in (target, draft)}

# What a cycle leaves to the next one, and its phases, which read the state and the tree mask in place.
state, mask = spec.CommittedState.of(paging, bs), torch.ones(bs, 16, 16, dtype=torch.bool)
root, root_hidden = torch.zeros(bs, dtype=torch.int64), torch.zeros(bs, draft.hidden_size)
drafts = backend.capture(capacity.bucket(spec.StepKind.DRAFT_DECODE, bs), *state.bound(bs))
verifies = backend.capture(capacity.bucket(spec.StepKind.TARGET_VERIFY, bs), *state.bound(bs, tree_mask=mask))
extends = backend.capture(capacity.bucket(spec.StepKind.DRAFT_EXTEND, bs), *state.bound(bs))


def attention(model, meta):
    """The attention of one forward of a model."""
    return ForwardAttention(backend, caches[model], meta, model.layers)


def best(hidden):
    """The draft's best children of rows [n, H]: log-probabilities and tokens, [n, topk]."""
    return draft.logits(hidden).float().log_softmax(-1).topk(capacity.topk, dim=-1)


def prefill(prompts):
    """Target, then draft: row p of the draft takes the target's hidden state p and the token p + 1."""
    query = spec.PackedQuery.of([len(prompt) for prompt in prompts])
    step = spec.Step.prefill(query, torch.zeros(len(prompts), dtype=torch.int32), paging)
    meta, positions = backend.init_forward_metadata(step).at(), spec.token_positions(step)
    last = step.query.cu_seqlens[1:].long() - 1
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    hidden = target.forward(tokens, positions, attention(target, meta))
    root.copy_(target.logits(hidden[last]).argmax(-1))
    shifted = tokens.roll(-1).index_copy(0, last, root)
    root_hidden.copy_(draft.forward(shifted, hidden, positions, attention(draft, meta))[last])


def propose():
    """Draft forward i processes the nodes of depth i + 1; the best nodes of all levels form the tree."""
    log_probs, tokens = best(root_hidden)
    beams, hidden = spec.DraftBeams.start(tokens, log_probs), root_hidden.unsqueeze(1).expand(-1, capacity.topk, -1)
    for i in range(drafts.step.num_forwards):
        rows = hidden.gather(1, beams.parent_branches.unsqueeze(2).expand(-1, -1, hidden.shape[2])).flatten(0, 1)
        forward = attention(draft, drafts.at(i, beams.ancestors))
        out = draft.forward(beams.tokens.flatten(), rows, spec.token_positions(drafts.step, i), forward)
        log_probs, tokens = (x.view(-1, capacity.topk, capacity.topk) for x in best(out))
        beams, hidden = beams.advance(tokens, log_probs), out.unflatten(0, (-1, capacity.topk))
    return beams.tree(root, capacity.num_draft_tokens)


def verify(tree):
    """One target forward over the tree; the accepted path's KV moves behind the committed tokens."""
    positions, forward = (verifies.step.seq_lens.unsqueeze(1) + tree.depths).flatten(), attention(target, verifies.at())
    hidden = target.forward(tree.tokens.flatten(), positions, forward).unflatten(0, tree.tokens.shape)
    accepted = spec.accept(tree, target.logits(hidden).argmax(-1), capacity.max_accepted)
    for cache in caches[target]:
        cache.move(*spec.compaction_moves(accepted, verifies.step))
    return accepted, hidden.gather(1, accepted.path.unsqueeze(2).expand(-1, -1, hidden.shape[2]))


def extend(accepted, hidden):
    """The draft catches up over the accepted path; rows past it are garbage that the next cycle overwrites."""
    forward, positions = attention(draft, extends.at()), spec.token_positions(extends.step)
    out = draft.forward(accepted.tokens.flatten(), hidden.flatten(0, 1), positions, forward)
    root.copy_(accepted.bonus)
    root_hidden.copy_(out[torch.arange(bs) * capacity.max_accepted + accepted.num_accepted - 1])


def cycle():
    """Each phase plans itself from the state before it runs."""
    backend.refresh(drafts)
    tree = propose()
    mask.copy_(tree.mask)
    backend.refresh(verifies)
    accepted, hidden = verify(tree)
    backend.refresh(extends)
    extend(accepted, hidden)
    state.seq_lens.add_(accepted.num_accepted)
    return accepted


with torch.no_grad():
    graph = RecordedGraph()  # CudaGraph() on a GPU
    accepted = graph.capture(cycle)  # which runs it, on padding
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    prefill(prompts)
    state.load(torch.tensor([len(prompt) for prompt in prompts]), paging.rows)
    texts, num_cycles = [[int(token)] for token in root], 0
    while min(map(len, texts)) < NEW_TOKENS:
        graph.replay()
        num_cycles += 1
        for text, tokens, count in zip(texts, accepted.tokens.tolist(), accepted.num_accepted.tolist(), strict=True):
            text += tokens[:count]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print(f"--- {(len(text) - 1) / num_cycles:.2f} tokens a cycle\n{prompt}{tokenizer.decode(text)}\n")
