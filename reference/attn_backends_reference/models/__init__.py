"""Models that attend through a backend: transformers' modules, loaded from local folders.

Importing this package needs torch only; loading a model imports transformers.
"""

from attn_backends_reference.models.attention import Attention, ForwardAttention
from attn_backends_reference.models.decoder import DraftModel, TargetModel
from attn_backends_reference.models.loading import (
    EMBEDDED_DRAFTS,
    load_draft,
    load_mtp,
    load_parallel,
    load_tokenizer,
)
from attn_backends_reference.models.targets import EMBEDDED_TARGETS, TargetFolder, load_target, open_target
from attn_backends_reference.models.tokenizer import ByteTokenizer, Tokenizer

__all__ = [
    "EMBEDDED_DRAFTS",
    "EMBEDDED_TARGETS",
    "Attention",
    "ByteTokenizer",
    "DraftModel",
    "ForwardAttention",
    "TargetFolder",
    "TargetModel",
    "Tokenizer",
    "load_draft",
    "load_mtp",
    "load_parallel",
    "load_target",
    "load_tokenizer",
    "open_target",
]
