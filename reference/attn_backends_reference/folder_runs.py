"""The run of a target and a draft that no file describes: a chain, on what this machine has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attn_backends.cache import CacheFormat
from attn_backends.compressed_cache import CompressedFormat
from attn_backends.contract.capabilities import DTYPES
from attn_backends.errors import CheckpointError
from attn_backends_reference.models import EMBEDDED_DRAFTS, TargetFolder, folders, head_keys, open_target
from attn_backends_reference.models.block import EMBEDDED_BLOCKS

BACKENDS = {CacheFormat.KV: "fa3", CacheFormat.LATENT: "flashinfer_mla", CompressedFormat.COMPRESSED: "dsv4"}
CHAIN = {"topk": 1, "num_steps": 3, "num_draft_tokens": 4}
MAX_CONTEXT = 4096
"""Tokens of a request, prompt and output together, if the models have as many positions: a cache for a few requests."""


@dataclass(frozen=True, slots=True)
class FolderRun:
    """tables: as a run's file has them. notes: what was decided for a reason that a user would want to know."""

    tables: dict[str, Any]
    notes: tuple[str, ...]


def run_of_folders(target: str, draft: str | None, draft_positions: int | None) -> FolderRun:
    """The run of a target, with a draft or without. draft_positions: taken in place of those that the draft names.

    Raises `CheckpointError` as `open_target` does, if the draft's folder has no config.json, and for a block draft.
    """
    found = open_target(target)
    said, eagle = (None, CHAIN) if draft is None else _of_draft(draft)
    named = said if draft_positions is None else draft_positions
    room = 2 * CHAIN["num_steps"] if "worker" in eagle else max(CHAIN.values())
    own, room = found.config.max_position_embeddings, room if draft else 0
    max_context = min(MAX_CONTEXT, *(positions - room for positions in (own, named) if positions is not None))
    notes = [f"max_context = {max_context:,}: prompt and output together; the target has {own:,} positions"]
    if named is not None and named < own:
        notes.append(
            f"the draft has {named:,} positions (max_position_embeddings); model.draft_positions, or "
            f"--draft-positions, takes more of one whose positions reach further than its folder says"
        )
    tables: dict[str, Any] = {
        "backend": BACKENDS[found.family.cache_format],
        "model": {"target": target} | ({"draft": draft} if draft else {}),
        "runtime": {
            "dtype": _dtype(found),
            "device": "cuda" if torch.cuda.is_available() else "cpu",
            "max_context": max_context,
        },
    }
    if draft_positions is not None:
        tables["model"]["draft_positions"] = draft_positions
    return FolderRun(tables | ({"eagle": eagle} if draft else {}), tuple(notes))


def _of_draft(draft: str) -> tuple[int, dict[str, Any]]:
    """The positions that a draft's folder was made for, and how it drafts. Refuses a block draft, whose number of
    tokens is its own.
    """
    from attn_backends_reference.models.block_draft import ARCHITECTURE

    fields = folders.read_fields(folders.find(draft, EMBEDDED_DRAFTS | EMBEDDED_BLOCKS) / "config.json")
    kinds = head_keys.names(fields)
    if head_keys.is_parallel(fields):
        return head_keys.positions(fields, draft), {"worker": "parallel", **CHAIN}
    if head_keys.block_drafts(kinds) or ARCHITECTURE in kinds:
        why = "; ".join(head_keys.missing_parts(kinds)) or 'a file with worker = "block" runs it (--config block)'
        raise CheckpointError(f"{draft} is a block draft ({', '.join(kinds)}), which drafts all tokens at once: {why}")
    return head_keys.positions(fields, draft), CHAIN


def _dtype(found: TargetFolder) -> str:
    """The type that config.json names, or bfloat16, which weights of fewer bits become."""
    named = str(getattr(found.config, "dtype", None)).removeprefix("torch.")
    return named if named in DTYPES and not found.weights.is_quantized else "bfloat16"
