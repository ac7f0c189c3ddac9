"""Registers the backends with SGLang. SGLang logs an exception of a plug-in and continues without it. So a name is
registered first, and the error is raised when a server requests that name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from attn_backends.engines.sglang.refusals import MISSING
from attn_backends.engines.sglang.versions import check_version

PREFIX = "attn_"
BACKENDS = ("fa3", "flashinfer_mla", "trtllm_mla", "reference")
FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
LAST_LOC = "sglang.srt.mem_cache.allocation.get_last_loc"


def register_all() -> None:
    """Names first; then all that running them takes, whose failure each name raises."""
    reason = problem()
    names = [PREFIX + name for name in (*BACKENDS, *MISSING)]
    choices = import_module("sglang.srt.arg_groups.choices")
    choices.add_attention_backend_choices(names)
    choices.add_draft_attention_backend_choices(names)
    registry = import_module("sglang.srt.layers.attention.attention_registry")
    for name in (*BACKENDS, *MISSING):
        registry.register_attention_backend(PREFIX + name)(partial(create, name, reason))
    if reason is None:
        _register_hooks()


def problem() -> Exception | None:
    """The error that keeps the backends from running in this SGLang, or None."""
    try:
        check_version()
        import_module("attn_backends.engines.sglang.backends")
    except Exception as error:  # SGLang's modules may raise anything
        return error
    return None


def create(name: str, reason: Exception | None, runner: Any) -> Any:
    """The backend of a runner, as SGLang's registry makes it. Raises the reason why there can be none."""
    if reason is not None:
        raise reason
    from attn_backends.engines.sglang.backends import EngineBackend, plans_of

    return EngineBackend(runner, plans_of(runner, name))


def _register_hooks() -> None:
    from attn_backends.engines.sglang import api

    hooks = import_module("sglang.srt.plugins.hook_registry")
    around = hooks.HookType.AROUND
    hooks.HookRegistry.register(f"{FACTORY}.create_decode_backend", draft_loop, around)
    hooks.HookRegistry.register(f"{FACTORY}.create_draft_extend_backend", draft_extend, around)
    for name in BACKENDS:
        api.mla_handlers.register(PREFIX + name, api.absorbed)
    if import_module("sglang.srt.utils").is_cpu():  # there SGLang launches a Triton kernel but for torch_native
        hooks.HookRegistry.register(LAST_LOC, _last_loc, hooks.HookType.REPLACE)


def _last_loc(*arguments: Any) -> Any:
    from attn_backends.engines.sglang.api import get_last_loc_torch

    return get_last_loc_torch(*arguments)


def draft_loop(original: Callable[[Any], Any], factory: Any) -> Any:
    """Around `DraftBackendFactory.create_decode_backend`, which knows SGLang's own names alone."""
    name = _asked_for(factory, decodes=True)
    if name is None:
        return original(factory)
    if factory.speculative_num_steps <= 1:
        return None
    from attn_backends.engines.sglang.backends import DraftLoop, plans_of

    runner = factory.draft_model_runner
    return _stamped(DraftLoop(runner, plans_of(runner, name), factory.speculative_num_steps), name)


def draft_extend(original: Callable[[Any], Any], factory: Any) -> Any:
    """Around `DraftBackendFactory.create_draft_extend_backend`."""
    from attn_backends.engines.sglang.api import get_spec

    name = _asked_for(factory, decodes=get_spec().speculative_attention_mode == "decode")
    if name is None:
        return original(factory)
    return _stamped(create(name, None, factory.draft_model_runner), name)


def _asked_for(factory: Any, *, decodes: bool) -> str | None:
    """Which of our backends a draft is to attend by; None if it is one of SGLang's."""
    from attn_backends.engines.sglang.api import attention_backends

    of_prefill, of_decode = attention_backends()
    name = factory.draft_attn_backend or (of_decode if decodes else of_prefill)
    ours = name.removeprefix(PREFIX)
    return ours if name.startswith(PREFIX) and ours in (*BACKENDS, *MISSING) else None


def _stamped(backend: Any, name: str) -> Any:
    """With the names that SGLang looks up attention by, as its own factory writes them."""
    for each in (backend, *getattr(backend, "attn_backends", ())):
        each.prefill_attention_backend_str = each.decode_attention_backend_str = PREFIX + name
    return backend
