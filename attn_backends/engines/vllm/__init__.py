"""The backends inside vLLM: `vllm serve MODEL --attention-backend ATTN_BACKENDS_FA3` (docs/vllm.md).

vLLM calls `register` in every process, by the entry point `vllm.general_plugins`. Nothing of vLLM is patched; importing
this package imports neither vLLM nor a backend.
"""

from __future__ import annotations

from collections.abc import Callable

from attn_backends.engines.vllm.attended import attended, forget_attended

NAMES = {
    "ATTN_BACKENDS_FA3": "FA3",
    "ATTN_BACKENDS_FA3_MLA": "FA3OnLatents",
    "ATTN_BACKENDS_TRTLLM_MLA": "TrtllmMLA",
    "ATTN_BACKENDS_FLASHINFER_MLA": "FlashInferMLA",
}
"""What `--attention-backend` is given -> the class in `attn_backends.engines.vllm.backends`."""


class ClassPath(str):
    """The path of a registered class. vLLM hands its configuration, with the name that was asked for, to a process that
    it spawns before that one loads plug-ins: it is unpickled by this path, which registers the names first.
    """

    def __reduce__(self) -> tuple[Callable[[str], ClassPath], tuple[str]]:
        return _registered, (str(self),)


def _registered(path: str) -> ClassPath:
    register()
    return ClassPath(path)


def register() -> None:
    """Make the names known to vLLM's `--attention-backend`; again in the same process it does nothing."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, class_name in NAMES.items():
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, ClassPath(f"attn_backends.engines.vllm.backends.{class_name}"))


__all__ = ["NAMES", "attended", "forget_attended", "register"]
