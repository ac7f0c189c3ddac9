"""The families that are served."""

from __future__ import annotations

from attn_backends.errors import CheckpointError
from attn_backends_reference.models.decoder import Family


def served_families() -> tuple[Family, ...]:
    """Every family. Raises `CheckpointError` if transformers, which holds their layers, is not installed."""
    try:
        import safetensors  # noqa: F401
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{error}; loading a model needs transformers: pip install 'attn-backends[models]'"
        ) from error
    from attn_backends_reference.models.deepseek import DEEPSEEK, DEEPSEEK_V2, GLM4_MOE_LITE
    from attn_backends_reference.models.deepseek_v4 import DEEPSEEK_V4
    from attn_backends_reference.models.llama import GPT_OSS, LLAMA, MISTRAL, MIXTRAL, OLMOE, QWEN2, QWEN3, QWEN3_MOE

    grouped = (MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, OLMOE, GPT_OSS)
    return LLAMA, DEEPSEEK, DEEPSEEK_V2, DEEPSEEK_V4, *grouped, GLM4_MOE_LITE
