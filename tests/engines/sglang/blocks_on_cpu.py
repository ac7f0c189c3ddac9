"""What SGLang's DFLASH and DSPARK lack on a CPU, patched in before an engine starts, in the process that it forks."""

from __future__ import annotations

import functools
from typing import Any

import torch


class Allowing:
    """SGLang's platform as one that is not its own. Of such a platform it asks whether an algorithm may run, and which
    attention its draft may have; of its own it knows that block drafts run on GPUs and NPUs.
    """

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_out_of_tree(self) -> bool:
        return True

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return True

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return True


class OnGPU:
    """Options as those of a GPU: DSPARK's are read once, and of the device they ask nothing else."""

    device = "xpu"

    def __init__(self, options: Any) -> None:
        self._options = options

    def __getattr__(self, name: str) -> Any:
        return getattr(self._options, name)


def _let_dspark_start(hook: Any) -> None:
    original, view = hook._handle_dspark, hook.resolving_view

    @functools.wraps(original)
    def handle(options: Any) -> None:
        hook.resolving_view = lambda given: OnGPU(view(given))
        try:
            original(options)
        finally:
            hook.resolving_view = view

    hook._handle_dspark = handle


def allow() -> None:
    """Let the options name either, give the draft's rows its own dtype, and let tensors have no stream to record.

    SGLang casts embeddings that it gives a model to bfloat16. Of the shipped targets' that loses nothing, as they are
    stored so; but the draft's layers are in float32 here.
    """
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.models.dflash import DFlashDraftModel

    speculative_hook.current_platform = Allowing(speculative_hook.current_platform)
    original = DFlashDraftModel.forward

    @functools.wraps(original)
    def forward(draft: Any, *given: Any, input_embeds: Any = None, **named: Any) -> Any:
        rows = None if input_embeds is None else input_embeds.to(draft.fc.weight.dtype)
        return original(draft, *given, input_embeds=rows, **named)

    DFlashDraftModel.forward = forward
    _let_dspark_start(speculative_hook)
    if not torch.cuda.is_available():
        torch.Tensor.record_stream = lambda tensor, stream: None
