"""Drafts and options that a worker refuses before it is built."""

from __future__ import annotations

from collections.abc import Sequence

from attn_backends.errors import UnsupportedStepError
from attn_backends_reference.eagle.options import WorkerOptions
from attn_backends_reference.models.decoder import DraftModel, TargetModel
from spec_metadata import Capacity


def check_drafts(target: TargetModel, drafts: Sequence[DraftModel]) -> None:
    """Refuse drafts that are not made for a target, which their first step would find out."""
    reasons = [reason for draft in drafts for reason in draft.misfits(target)]
    if reasons:
        raise UnsupportedStepError("speculative decoding", reasons, "what load_draft or load_mtp makes for this target")


def check_eagle(target: TargetModel, draft: DraftModel, capacity: Capacity, options: WorkerOptions) -> None:
    """Refuse what EAGLE does not draft with."""
    check_drafts(target, [draft])
    if capacity.num_rerun:
        reasons = [f"num_rerun={capacity.num_rerun} (one draft runs no position again)"]
        raise UnsupportedStepError("EAGLE", reasons, "num_rerun=0, or MtpWorker with a module for each step")
    if options.draft_graphs != "one":
        reasons = [f"draft_graphs={options.draft_graphs!r} (one draft runs all steps, in one graph)"]
        raise UnsupportedStepError("EAGLE", reasons, "draft_graphs='one', or MtpWorker")
    if capacity.topk > draft.head.out_features:
        reasons = [f"topk={capacity.topk} (the draft has {draft.head.out_features} tokens to propose)"]
        raise UnsupportedStepError("EAGLE", reasons, f"topk={draft.head.out_features}, or less")
    if options.placeholder_token is not None and draft.embedding.embedding_dim != target.hidden_size:
        reasons = [f"embeddings of {target.hidden_size} columns in a draft of {draft.embedding.embedding_dim}"]
        raise UnsupportedStepError("prompts with embeddings", reasons, "text, or a draft of the target's width")
