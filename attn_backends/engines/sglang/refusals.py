"""Reasons why the backends refuse an SGLang server, found when it starts. Nothing falls back to another backend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheFormat
from attn_backends.contract.kernel import Kernel
from attn_backends.engines.sglang.facts import BLOCKS, RunnerFacts
from attn_backends.engines.sglang.layers import layer_of
from attn_backends.errors import UnsupportedStepError
from spec_metadata import StepKind

POOLS = {"MHATokenToKVPool": CacheFormat.KV, "MLATokenToKVPool": CacheFormat.LATENT}
MISSING = {
    "dsv4": "SGLang's pool of DeepSeek-V4 keeps rows, entries, index keys and states in a layout of its own, of which "
    "the caches of dsv4 have no view"
}
"""Backends that have a name there all the same, so that whoever asks for one reads why there is none."""
ALGORITHMS = (None, "EAGLE", "EAGLE3", *BLOCKS)


def refuse(name: str, reasons: Iterable[str]) -> None:
    """Raise with all reasons, if there are any."""
    if found := list(dict.fromkeys(reasons)):
        raise UnsupportedStepError(
            f"attn_{name} inside SGLang", found, "change the named options, or name one of SGLang's own backends"
        )


def server_reasons(runner: Any, spec: Any, execution: Any, parallel: Any) -> Iterator[str]:
    """Reasons why a server's options and one runner's memory are not supported. spec, execution, parallel: SGLang's
    options.
    """
    if spec.speculative_algorithm not in ALGORITHMS:
        yield f"--speculative-algorithm {spec.speculative_algorithm} (it takes EAGLE, NEXTN, EAGLE3, DFLASH and DSPARK)"
    if spec.enable_multi_layer_eagle:
        yield "--enable-multi-layer-eagle"
    if spec.speculative_algorithm in BLOCKS and spec.speculative_num_draft_tokens < 2:
        yield f"a block of {spec.speculative_num_draft_tokens} token (it has the root and one mask at least)"
    is_taken = runner.sliding_window_size and spec.speculative_algorithm not in BLOCKS
    if runner.is_draft_worker and spec.speculative_draft_window_size and not is_taken:
        yield (
            f"--speculative-draft-window-size {spec.speculative_draft_window_size} with a draft whose layers do not "
            "take it for their window (Llama's EAGLE-3 draft does)"
        )
    if (spec.speculative_eagle_topk or 1) > 1 and runner.page_size > 1:
        yield (
            f"--speculative-eagle-topk {spec.speculative_eagle_topk} with --page-size {runner.page_size} "
            "(trees have page size 1; SGLang lays out their slots in whole pages else)"
        )
    if parallel.dcp_enabled:
        yield "decode context parallelism"
    if parallel.attn_cp_size > 1:
        yield f"context parallelism of {parallel.attn_cp_size}"
    if parallel.pp_size > 1:
        yield f"--pipeline-parallel-size {parallel.pp_size}"
    if execution.overlap.enable_two_batch_overlap:
        yield "--enable-two-batch-overlap"
    if runner.device == "cuda" and execution.graph.cuda_graph_config.prefill.backend != "disabled":
        yield "graphs of prefill (--disable-prefill-cuda-graph switches them off)"
    pool = type(runner.token_to_kv_pool).__name__
    if POOLS.get(pool) is not (CacheFormat.LATENT if runner.use_mla_backend else CacheFormat.KV):
        yield f"a KV pool {pool} (it views {' and '.join(POOLS)})"


def model_reasons(facts: RunnerFacts, backend: AttentionBackend) -> Iterator[str]:
    """Reasons why the layers of a model are not supported by the kernels that were chosen for its steps."""
    if facts.format not in backend.formats:
        yield f"a model whose cache is of {facts.format} (it takes {', '.join(sorted(backend.formats))})"
        return
    if not facts.layers:
        yield "a model without attention layers of this pool (RadixAttention)"
    expected = "encoder_only" if StepKind.DRAFT_BLOCK in facts.kinds else "decoder"
    for layer in facts.layers:
        yield from _layer_reasons(layer, expected)
    for kind in facts.kinds:
        if kind in backend.choices:
            reasons = _kernel_reasons(facts, backend.kernel_of(kind), kind)
            yield from (f"{kind} by kernel {backend.kernel_of(kind).name}: {reason}" for reason in reasons)
        else:
            yield f"{kind} steps (it has no kernel for them)"


def _kernel_reasons(facts: RunnerFacts, kernel: Kernel, kind: StepKind) -> Iterator[str]:
    """Why a kernel can't serve the steps of a kind."""
    able, is_tree = kernel.capabilities[kind], False
    yield from able.page_reasons(facts.capacity.page_size)
    if facts.in_blocks and kind is not StepKind.PREFILL and able.needs_host_lens:
        yield "it plans on the host from exact lengths, and of draft blocks and their verifies SGLang has bounds there"
    if facts.is_ragged and kind is StepKind.TARGET_VERIFY and not able.captures_packed:
        yield (
            "it takes no rows that the device divides among requests (SGLANG_RAGGED_VERIFY_MODE=compact; static and "
            "cap-accept verify as many rows of each)"
        )
    if kind is not StepKind.PREFILL:
        bucket = facts.capacity.bucket(kind, 1)
        is_tree = bucket.tree
        yield from able.width_reasons(bucket.width, is_tree)
    for layer in facts.layers:
        given = (layer_of(layer), facts.dtype, facts.cache_dtype, facts.format)
        reasons = kernel.layer_reasons(kind, *given, is_tree=is_tree)
        yield from (f"layer {layer.layer_id}: {reason}" for reason in reasons)


def _layer_reasons(layer: Any, expected: str) -> Iterator[str]:
    """What of a RadixAttention has no meaning in `AttentionLayer`. expected: its type, "encoder_only" where rows see
    those behind them.
    """
    where, found = f"layer {layer.layer_id} has", layer.attn_type.value
    if layer.is_cross_attention or found != expected:
        yield f"{where} attention of type {found}, cross {layer.is_cross_attention} (it takes {expected})"
    if layer.logit_cap:
        yield f"{where} a logit cap of {layer.logit_cap}"
    if layer.pos_encoding_mode != "NONE":
        yield f"{where} position encoding {layer.pos_encoding_mode} inside attention"
    if layer.xai_temperature_len > 0:
        yield f"{where} a temperature by length ({layer.xai_temperature_len})"
    if layer.use_irope:
        yield f"{where} chunks of attention (irope)"
