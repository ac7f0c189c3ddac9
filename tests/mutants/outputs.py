"""Mutants of the arithmetic, and of what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.contract.capabilities import Capabilities
from attn_backends.kernels import torch_attention
from attn_backends.layer import AttentionLayer, AttentionOutput
from attn_backends.planning.metadata import Metadata
from attn_backends.selection.choose import Choice
from spec_metadata import Bucket, Paging
from tests.mutants.mutant import mutant

NARROW, WIDE = "tests.mutants.narrow:NarrowBackend", "tests.mutants.wide:WideBackend"


@mutant(
    "the scale of 576 elements, not of the 192 before absorption",
    "math.decode",
    "math.target_verify",
    backend="flashinfer_mla",
)
def scale_of_absorbed_heads(patch: pytest.MonkeyPatch) -> None:
    """The softmax scale comes from the width of the absorbed query."""
    forward = AttentionBackend.forward

    def rescaled(self: AttentionBackend, q: Tensor, cache: Any, meta: Any, layer: AttentionLayer) -> AttentionOutput:
        return forward(self, q, cache, meta, replace(layer, scale=layer.head_dim**-0.5))

    patch.setattr(AttentionBackend, "forward", rescaled)


@mutant(
    "FlashInfer returns base 2 unless told otherwise",
    "math.decode",
    "math.target_verify",
    "laws.tree_verify_is_each_path",
)
def lse_in_base_two(patch: pytest.MonkeyPatch) -> None:
    """The log-sum-exp comes in base 2, declared as e."""
    attend = torch_attention.attend

    def base_two(*arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = attend(*arguments)
        return out, lse / math.log(2)

    patch.setattr(torch_attention, "attend", base_two)


@mutant("memory that no row sees, multiplied by zero", "poison.unowned_nan", "poison.reserved_nan")
def hidden_keys_multiplied_by_zero(patch: pytest.MonkeyPatch) -> None:
    """A kernel reads pages of the pool ahead, and adds their values times zero: NaN spreads."""
    over_pages = torch_attention._over_pages

    def spilt(q, lens, k_pages, v_pages, pages, *rest):
        out, lse = over_pages(q, lens, k_pages, v_pages, pages, *rest)
        return out + (v_pages * 0).sum(), lse

    patch.setattr(torch_attention, "_over_pages", spilt)


@mutant(
    "a layout accepted by a backend that has none",
    "refusals.page_size",
    "refusals.packed",
    backend="trtllm_mla",
)
def undeclared_layouts_accepted(patch: pytest.MonkeyPatch) -> None:
    """Page sizes and query layouts outside the declared capabilities are computed all the same."""
    patch.setattr(Capabilities, "step_reasons", lambda self, step: [])


@mutant(
    "a tree accepted by a backend that has none",
    "refusals.tree",
    "refusals.draft_block",
    "refusals.width",
    "refusals.step_kind",
    backend=NARROW,
)
def undeclared_steps_accepted(patch: pytest.MonkeyPatch) -> None:
    """No step is refused, whatever is declared."""
    patch.setattr(AttentionBackend, "unsupported_reasons", lambda self, step: [])


@mutant("a backend that declares nothing of the kind, and captures", "refusals.graph", backend=NARROW)
def undeclared_graph_captured(patch: pytest.MonkeyPatch) -> None:
    """A kind that can't be captured is."""
    capture = AttentionBackend.capture

    def forced(self: AttentionBackend, bucket: Bucket, paging: Paging) -> Metadata:
        kernel = self.kernel_of(bucket.kind)
        able = {kind: replace(declared, graph=True) for kind, declared in kernel.capabilities.items()}
        self.choices[bucket.kind] = Choice(replace(kernel, capabilities=able))
        return capture(self, bucket, paging)

    patch.setattr(AttentionBackend, "capture", forced)


@mutant(
    "a backend that lacks a capability and computes something anyway",
    "refusals.layer_extras",
    "refusals.query_heads",
    "refusals.head_sizes",
    "refusals.dtype",
    "refusals.cache_dtype",
    "refusals.cache_format",
    backend=NARROW,
)
def layers_never_checked(patch: pytest.MonkeyPatch) -> None:
    """Layers, caches and types are taken as they come: windows, sinks and scales are dropped in silence."""
    patch.setattr(AttentionBackend, "_check_layer", lambda *args: None)


@mutant("SGLang #33892: a step without requests", "api.idle")
def idle_step_gives_a_row(patch: pytest.MonkeyPatch) -> None:
    """An idle step gives one row of padding."""

    forward = AttentionBackend.forward

    def padded(self: AttentionBackend, q: Tensor, cache: Any, meta: Any, layer: AttentionLayer) -> AttentionOutput:
        if len(q):
            return forward(self, q, cache, meta, layer)
        row = q.new_zeros(1, layer.num_heads, layer.v_head_dim)
        return AttentionOutput(row, row[..., 0])

    patch.setattr(AttentionBackend, "forward", padded)


@mutant("SGLang #22930: outputs of a shared pool, overwritten by the next forward", "api.owns_its_results")
def output_in_a_workspace(patch: pytest.MonkeyPatch) -> None:
    """Every forward returns a view of one workspace."""
    forward, workspace = AttentionBackend.forward, torch.empty(1 << 16, dtype=torch.float64)

    def reused(self: AttentionBackend, q: Tensor, cache: Any, meta: Any, layer: AttentionLayer) -> AttentionOutput:
        out, lse = forward(self, q, cache, meta, layer)
        return AttentionOutput(workspace.to(out)[: out.numel()].view(out.shape).copy_(out), lse)

    patch.setattr(AttentionBackend, "forward", reused)


@mutant("our own: a kernel's wrapper that scales the query where it lies", "api.leaves_inputs_alone")
def query_scaled_in_place(patch: pytest.MonkeyPatch) -> None:
    """The output is right, and the caller's query is not what it was."""
    forward = AttentionBackend.forward

    def scaled(self: AttentionBackend, q: Tensor, cache: Any, meta: Any, layer: AttentionLayer) -> AttentionOutput:
        return forward(self, q.mul_(layer.scale), cache, meta, replace(layer, scale=1.0))

    patch.setattr(AttentionBackend, "forward", scaled)


@mutant("our own: a cast left in a kernel's wrapper", "api.output_types")
def lse_in_the_wrong_type(patch: pytest.MonkeyPatch) -> None:
    """The log-sum-exp comes in half precision."""
    forward = AttentionBackend.forward

    def cast(self: AttentionBackend, q: Tensor, cache: Any, meta: Any, layer: AttentionLayer) -> AttentionOutput:
        out, lse = forward(self, q, cache, meta, layer)
        return AttentionOutput(out, lse.half())

    patch.setattr(AttentionBackend, "forward", cast)


@mutant(
    "a backend that declares a capability that it lacks",
    "math.window",
    "math.sinks",
    "math.kv_scales",
    backend=WIDE,
)
def declared_extras_dropped(patch: pytest.MonkeyPatch) -> None:
    """Windows, sinks and scales are declared, and left out."""
    forward = AttentionBackend.forward

    def plain(self: AttentionBackend, q: Tensor, cache: Any, meta: Any, layer: AttentionLayer) -> AttentionOutput:
        return forward(self, q, cache, meta, replace(layer, window=None, sinks=None, k_scale=1.0, v_scale=1.0))

    patch.setattr(AttentionBackend, "forward", plain)


@mutant("a window off by one", "math.window", backend=WIDE)
def window_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """A row sees one key more than its window has."""
    forward = AttentionBackend.forward

    def wider(self: AttentionBackend, q: Tensor, cache: Any, meta: Any, layer: AttentionLayer) -> AttentionOutput:
        window = None if layer.window is None else layer.window + 1
        return forward(self, q, cache, meta, replace(layer, window=window))

    patch.setattr(AttentionBackend, "forward", wider)
