"""Reasons for a refusal before an engine runs; vLLM prints them together with its own."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import torch

from attn_backends.backend import AttentionBackend
from attn_backends.engines.vllm import NAMES
from attn_backends.errors import BackendUnavailableError, UnsupportedStepError
from attn_backends.selection.choose import Workload, choose_kernels
from spec_metadata import StepKind

KINDS = (StepKind.PREFILL, StepKind.DECODE, StepKind.TARGET_VERIFY)
"""The steps that vLLM's batches become: a draft's forwards are decode steps, and its extend is a verify."""

ANY_PAGE_SIZE = 64
KERNEL = "ATTN_BACKENDS_KERNEL"
"""The environment variable that names a kernel of the backends, for every step that it can run; else "auto"."""

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"

NO_NAME = "vLLM would choose one itself; name one, such as ATTN_BACKENDS_FA3"
"""Why a draft of blocks needs a name: vLLM hands the target's backend on to other drafts alone."""


def asked_kernel() -> str:
    """The kernel that is asked for."""
    return os.environ.get(KERNEL, "auto")


def page_size_of(config: Any) -> int:
    """Tokens of a page as far as they are known before weights are loaded: as asked for, or what every kernel takes."""
    cache = config.cache_config
    return cache.block_size if cache.user_specified_block_size else ANY_PAGE_SIZE


def config_reasons(config: Any) -> list[str]:
    """Parts of an engine's configuration that are not served. config: a `VllmConfig`, or None if there is none."""
    if config is None:
        return []
    reasons = []
    if not config.use_v2_model_runner:
        is_asked = RUNNER in os.environ
        why = f"unset {RUNNER}" if is_asked else "vLLM chose it itself, and its warning says for what"
        reasons.append(f"vLLM's model runner V1 ({why}; attn_backends serves V2 alone)")
    spec = config.speculative_config
    if spec is not None and spec.parallel_drafting and not (spec.use_dflash() or spec.use_dspark()):
        reasons.append("parallel drafting other than DFlash's and DSpark's")
    if spec is not None and (spec.use_dflash() or spec.use_dspark()) and spec.attention_backend is None:
        reasons.append(f'a {spec.method} draft without "attention_backend" in the speculative configuration: {NO_NAME}')
    model, parallel = config.model_config, config.parallel_config
    if model is not None and spec is not None and spec.enable_adaptive_verification and model.attention_chunk_size:
        reasons.append(f"adaptive verification in chunks of {model.attention_chunk_size} tokens, made on the host")
    if model is not None and model.is_hybrid:
        reasons.append("layers that keep a state (Mamba, linear attention), which were not tested")
    if model is not None and model.is_diffusion:
        reasons.append("a diffusion model, some of whose rows see one another")
    if config.lora_config is not None:
        reasons.append("LoRA (enable_lora), which was not tested")
    if parallel.use_ubatching:
        reasons.append("microbatches (enable_dbo), which were not tested")
    if parallel.pipeline_parallel_size > 1:
        reasons.append(f"pipeline parallelism ({parallel.pipeline_parallel_size} ranks), which was not tested")
    ranks = {"decode": parallel.decode_context_parallel_size, "prefill": parallel.prefill_context_parallel_size}
    reasons += [f"{phase} context parallelism ({each} ranks)" for phase, each in ranks.items() if each > 1]
    return reasons + _draft_reasons(config)


def _draft_reasons(config: Any) -> list[str]:
    """Reasons against the backend of a draft, if it is one of ours: that of the target, or its own. vLLM asks when it
    makes the draft, after the target's weights are loaded; a target on a backend of ours asks before.
    """
    spec = config.speculative_config
    draft = spec and spec.draft_model_config
    named = draft and (spec.attention_backend or config.attention_config.backend)
    if not named or named.name not in NAMES:
        return []
    backend, cache, reasons = named.get_class(), config.cache_config, []
    if draft.use_mla != backend.is_mla():
        reasons.append(f"{'MLA' if draft.use_mla else 'non-MLA'} not supported")
    if spec.attention_backend is not None or spec.kv_cache_dtype is not None:
        block_size = cache.block_size if cache.user_specified_block_size else None
        reasons += backend.reasons_against(draft.dtype, spec.kv_cache_dtype or cache.cache_dtype, block_size)
        if spec.enable_adaptive_verification and not backend.supports_device_cpu_query_lens_mismatch():
            reasons.append("adaptive verification, whose rows the device divides")
    return [f"{named.name} of the draft: {reason}" for reason in reasons]


def kernel_reasons(
    backend: type[AttentionBackend], device: torch.device, workload: Workload, kinds: Collection[StepKind] = KINDS
) -> list[str]:
    """Reasons why no kernel of a backend serves a workload on a device; empty if one does for every kind of step.

    vLLM gives no exact lengths on the host, so a kernel that plans on the host is none.
    """
    try:
        choices = choose_kernels(backend.name, backend.kernels, asked_kernel(), device, workload)
    except BackendUnavailableError as error:
        asked = asked_kernel()
        return [("" if asked == "auto" else f"{KERNEL}={asked}: ") + str(error).rstrip(".")]
    reasons: list[str] = []
    for kind in kinds:
        kernel = choices[kind].kernel
        against = workload.reasons_against(kernel.capabilities[kind], kind)
        reasons += [f"kernel {kernel.name}: {reason}" for reason in against] + kernel.bound_reasons(kind)
    return list(dict.fromkeys(reasons))


def takes_ragged_verifies(backend: type[AttentionBackend], device: torch.device, workload: Workload) -> bool:
    """Whether the kernel of verifies takes rows that the device alone divides among requests."""
    try:
        choices = choose_kernels(backend.name, backend.kernels, asked_kernel(), device, workload)
    except BackendUnavailableError:
        return False
    return choices[StepKind.TARGET_VERIFY].kernel.capabilities[StepKind.TARGET_VERIFY].captures_packed


def refuse(what: str, reasons: list[str]) -> None:
    """Raise if there are reasons."""
    if reasons:
        kernel = "" if asked_kernel() == "auto" else f"another {KERNEL} or none, or "
        raise UnsupportedStepError(what, reasons, f"{kernel}another --attention-backend, such as vLLM's own")


def layer_reasons(
    attn_type: str,
    alibi_slopes: object,
    logits_soft_cap: float | None,
    kv_sharing_target_layer_name: str | None,
    others: dict[str, Any],
) -> list[str]:
    """The properties of a layer that are not supported. others: arguments of vLLM's that only some of its backends
    know.
    """
    reasons = []
    if attn_type != "decoder":
        reasons.append(f"{attn_type} attention")
    if alibi_slopes is not None:
        reasons.append("ALiBi slopes")
    if logits_soft_cap:
        reasons.append(f"a soft cap of {logits_soft_cap} on logits")
    if kv_sharing_target_layer_name is not None:
        reasons.append(f"the cache of another layer ({kv_sharing_target_layer_name})")
    return reasons + [f"the argument {name}" for name, value in others.items() if value is not None]
