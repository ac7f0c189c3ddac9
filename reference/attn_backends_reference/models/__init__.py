"""Models that attend through a backend: transformers' modules, loaded from local folders.

Importing this package needs torch only; loading a model imports transformers.
"""

from attn_backends_reference.models.attention import Attention, ForwardAttention
from attn_backends_reference.models.decoder import DraftModel, TargetModel
from attn_backends_reference.models.loading import (
    EMBEDDED_DRAFTS,
    EMBEDDED_TARGETS,
    load_draft,
    load_mtp,
    load_target,
    load_tokenizer,
)
from attn_backends_reference.models.tokenizer import ByteTokenizer, Tokenizer

__all__ = [
    "EMBEDDED_DRAFTS",
    "EMBEDDED_TARGETS",
    "Attention",
    "ByteTokenizer",
    "DraftModel",
    "ForwardAttention",
    "TargetModel",
    "Tokenizer",
    "load_draft",
    "load_mtp",
    "load_target",
    "load_tokenizer",
]
