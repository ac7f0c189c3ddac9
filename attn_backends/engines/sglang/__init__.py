"""SGLang's plug-in: attention backends `attn_fa3`, `attn_flashinfer_mla`, `attn_trtllm_mla` and `attn_reference`.

SGLang finds `register` by the entry point group `sglang.srt.plugins` and calls it in each of its processes before it
reads its arguments. Nothing of SGLang is imported before, and only `api.py` imports it. `docs/sglang.md` is the guide.
"""

from __future__ import annotations


def register() -> None:
    """Register the backends with SGLang; an obstacle is raised when SGLang requests one of them."""
    from attn_backends.engines.sglang.plugin import register_all

    register_all()
