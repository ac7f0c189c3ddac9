"""The backends as SGLang's classes: of a target or a draft extend, and of the draft loop."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from attn_backends.engines.sglang import api
from attn_backends.engines.sglang.attended import Attended
from attn_backends.engines.sglang.facts import RunnerFacts
from attn_backends.engines.sglang.layers import Layers, layer_of
from attn_backends.engines.sglang.plans import Plans, forwards_of
from attn_backends.engines.sglang.refusals import MISSING, model_reasons, refuse, server_reasons
from attn_backends.registry import get_backend
from attn_backends.selection.choose import Workload
from spec_metadata import StepKind

KERNEL = "ATTN_BACKENDS_KERNEL"
"""The environment variable that names a kernel of the backend, for every step that it can run; else "auto"."""


def plans_of(runner: Any, name: str) -> Plans:
    """The plans of a new backend for a runner, each with static memory of its own: SGLang may plan a verify on another
    stream while a draft runs. Refuses what it lacks, before anything is allocated.
    """
    spec = api.get_spec()
    refuse(name, [MISSING[name]] if name in MISSING else [])
    refuse(name, server_reasons(runner, spec, api.get_exec(), api.get_parallel()))
    modes = {"mixes": api.get_schedule().enable_mixed_chunk, "compact": api.ragged_verify_compact_enabled()}
    facts = RunnerFacts.of(runner, spec, _layers(runner), **modes)
    geometry = facts.batches.geometry
    sinks = _sinks(runner)
    layers = [layer_of(layer, sinks.get(layer.layer_id)) for layer in facts.layers]
    workload = Workload(geometry.page_size, layers, facts.dtype, facts.cache_dtype)
    kernel = os.environ.get(KERNEL, "auto")
    backend = get_backend(name)(facts.capacity, geometry, facts.device, kernel=kernel, workload=workload)
    refuse(name, model_reasons(facts, backend))
    return Plans(facts, backend)


def _layers(runner: Any) -> list[Any]:
    """The attention layers of a runner's model; of MLA the absorbed ones, beside which SGLang keeps others."""
    found = [module for module in runner.model.modules() if isinstance(module, api.RadixAttention)]
    if not runner.use_mla_backend:
        return found
    return [layer for layer in found if layer.tp_k_head_num == 1 and layer.head_dim > layer.v_head_dim]


def _sinks(runner: Any) -> dict[int, Tensor]:
    """Attention sinks by layer. SGLang's models keep them beside the layer, and hand them over in the forward alone."""
    holders = [
        module for module in runner.model.modules() if isinstance(getattr(module, "attn", None), api.RadixAttention)
    ]
    return {each.attn.layer_id: each.sinks for each in holders if getattr(each, "sinks", None) is not None}


class EngineBackend(api.AttentionBackend):
    """The attention of a runner, or of one forward of a draft, which is handed its metadata and plans nothing."""

    def __init__(self, runner: Any, plans: Plans) -> None:
        super().__init__()
        facts = plans.facts
        self.plans, self.is_draft = plans, runner.is_draft_worker
        self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, runner.req_to_token_pool
        self.max_context_len = facts.max_context
        self.needs_cpu_seq_lens = plans.needs_host_lens
        layers = Layers(facts.pool, facts.capacity.page_size, facts.format)
        self.attended = Attended(plans.backend, layers)
        self._mask: api.VerifyMask | None = None
        self._view: Any = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan an eager batch."""
        self.attended.parts = [part.at() for part in self.plans.eager(forward_batch)]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Take the buffer that SGLang writes the masks of verified trees to. All else is allocated by captures."""
        if self.is_draft or StepKind.TARGET_VERIFY not in self.plans.facts.kinds:
            return
        nodes = self.plans.facts.capacity.num_draft_tokens
        masks = torch.zeros(max_bs * nodes * nodes, dtype=torch.bool, device=self.plans.facts.device)
        is_read = self.plans.facts.batches.topk > 1
        self._mask = api.VerifyMask(buffer=masks, mode=api.TreeMaskMode.QLEN_ONLY, max_bs=max_bs, is_read=is_read)

    @property
    def supports_ragged_verify_graph(self) -> bool:
        """Whether SGLang may replay graphs of verifies whose rows the device divides among requests."""
        return self.plans.takes_ragged_verifies

    @property
    def verify_mask(self) -> Any:
        """The buffer for masks of nodes alone, [bs, nodes, nodes], so that SGLang makes none of the whole context."""
        return self._mask

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a capture: the metadata. Before a replay: what a kernel plans on the host, else nothing."""
        if in_capture:
            masks = None if self._mask is None else self._mask.buffer
            self.attended.parts = [self.plans.capture(forward_batch, masks).at()]
        else:
            self._view = forward_batch
            self.plans.load(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """The first nodes of a graph: read the runner's buffers and plan."""
        self.plans.refresh(forward_batch)

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """After a draft, if the verify was prepared on another stream. A graph reads the mask when it runs, by then it
        is written; what was copied for a kernel that plans on the host is copied again. An eager verify is planned
        after the draft.
        """
        if cuda_graph_bs is not None and self._view is not None:
            self.plans.load(self._view)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of padded requests; no value matters, as their row of the table says that they are padding."""
        return 1

    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value  # of ranks that pad for one another, on a CPU

    def support_triton(self) -> bool:
        """Whether SGLang may use its own Triton kernels beside it."""
        return self.plans.facts.device.type != "cpu"

    def forward_decode(
        self, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **extras: Any
    ) -> Tensor:
        """Attention of one layer; every kind of step alike."""
        return self.attended(q, k, v, layer, save_kv_cache, extras)

    forward_extend = forward_decode


api.TRTLLMHAAttnBackend.register(EngineBackend)  # SGLang captures draft extends of classes that it lists, by isinstance


class DraftLoop:
    """The draft loop: planned once for all its forwards, each of which attends by a backend of its own."""

    def __init__(self, runner: Any, plans: Plans, num_steps: int) -> None:
        self.plans, self.needs_cpu_seq_lens = plans, plans.needs_host_lens
        self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, runner.req_to_token_pool
        self.attn_backends = [EngineBackend(runner, plans) for _ in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan all forwards of an eager batch."""
        (meta,) = self.plans.eager(forward_batch)
        self._hand_out(meta)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Captures allocate."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """As of `EngineBackend`."""
        if in_capture:
            self._hand_out(self.plans.capture(forward_batch, None))
        else:
            self.plans.load(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """As of `EngineBackend`."""
        self.plans.refresh(forward_batch)

    def _hand_out(self, meta: Any) -> None:
        for child, forward in zip(self.attn_backends, forwards_of(meta), strict=True):
            child.attended.parts = [forward]
