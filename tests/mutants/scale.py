"""Mutants of limits: backends that are right for few requests, pages, heads and elements of a head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.backend import AttentionBackend
from attn_backends.backends.dsv4 import DSV4Backend
from attn_backends.kernels import torch_attention
from attn_backends.layer import AttentionOutput
from spec_metadata import visibility
from tests.mutants.compressed import change_entries, with_visible
from tests.mutants.mutant import mutant

FOUND = "our own: worlds were smaller"
SCALE = ("scale.decode", "scale.draft_decode", "scale.target_verify", "scale.draft_extend", "scale.prefill")


def change_outputs(patch: pytest.MonkeyPatch, change: Any) -> None:
    """Let every forward's output be changed in place. change: (out)."""
    for backend in (AttentionBackend, DSV4Backend):
        forward = backend.forward

        def changed(self: Any, *args: Any, forward: Any = forward) -> AttentionOutput:
            output = forward(self, *args)
            change(output.out)
            return output

        patch.setattr(backend, "forward", changed)


@mutant(FOUND, *SCALE, backend="trtllm_mla")
def pages_past_the_second_not_read(patch: pytest.MonkeyPatch) -> None:
    """A request's pages past its second are read as its second."""
    over_pages = torch_attention._over_pages

    def two_pages(q: Tensor, lens: Tensor, k: Tensor, v: Tensor, pages: Tensor, *rest: Any) -> Any:
        column = torch.arange(pages.shape[1], device=pages.device)
        return over_pages(q, lens, k, v, pages[:, column.clamp(max=1)], *rest)

    patch.setattr(torch_attention, "_over_pages", two_pages)


@mutant(FOUND, *SCALE, backend="flashinfer_mla")
def requests_past_the_fourth_zeroed(patch: pytest.MonkeyPatch) -> None:
    """The kernel writes the outputs of four requests, and zeros for the others."""
    over_pages = torch_attention._over_pages

    def four_requests(q: Tensor, *args: Any) -> Any:
        out, lse = over_pages(q, *args)
        request = torch.arange(len(out), device=out.device)
        return out.masked_fill((request >= 4).view(-1, 1, 1, 1), 0), lse

    patch.setattr(torch_attention, "_over_pages", four_requests)


@mutant(FOUND, *SCALE)
def tables_past_the_seventh_request_repeated(patch: pytest.MonkeyPatch) -> None:
    """From the eighth on, requests read the pages of the seventh."""
    over_pages = torch_attention._over_pages

    def seven_rows(q: Tensor, lens: Tensor, k: Tensor, v: Tensor, pages: Tensor, *rest: Any) -> Any:
        request = torch.arange(len(pages), device=pages.device)
        return over_pages(q, lens, k, v, pages[request.clamp(max=6)], *rest)

    patch.setattr(torch_attention, "_over_pages", seven_rows)


@mutant("our own: no chain was drafted by more than 5 forwards", "scale.widths")
def keys_past_the_fifth_forward_not_seen(patch: pytest.MonkeyPatch) -> None:
    """From the 6th on, forwards of a draft see as many keys as the 5th."""
    added = visibility.num_added
    patch.setattr(visibility, "num_added", lambda step, forward: added(step, forward and min(forward, 4)))


@mutant(FOUND, *SCALE)
def heads_past_the_fourth_zeroed(patch: pytest.MonkeyPatch) -> None:
    """Query heads past the 4th give zeros."""
    change_outputs(patch, lambda out: out[:, 4:].zero_())


@mutant(FOUND, *SCALE)
def elements_past_the_32nd_zeroed(patch: pytest.MonkeyPatch) -> None:
    """Elements of a head past the 32nd are zero."""
    change_outputs(patch, lambda out: out[:, :, 32:].zero_())


@mutant(FOUND, *SCALE, backend="dsv4")
def entries_past_two_pages_not_seen(patch: pytest.MonkeyPatch) -> None:
    """A row sees no entry past those of its request's first two pages."""

    def two_pages(plan: Any, rows: Any, ratio: int) -> None:
        with_visible(plan, plan.num_visible.clamp(max=2 * rows.page_size // ratio))

    change_entries(patch, two_pages)


@mutant("our own: no context over compressed keys was over 1,025 tokens", "scale.edges", backend="dsv4")
def compressed_keys_past_4096_not_seen(patch: pytest.MonkeyPatch) -> None:
    """A row sees no entry of tokens past the 4,096th."""

    def first_tokens(plan: Any, rows: Any, ratio: int) -> None:
        with_visible(plan, plan.num_visible.clamp(max=4096 // ratio))

    change_entries(patch, first_tokens)


@mutant(FOUND, *SCALE, backend="dsv4")
def compressed_requests_past_the_fourth_zeroed(patch: pytest.MonkeyPatch) -> None:
    """Over compressed keys, requests past the 4th give zeros."""
    forward = DSV4Backend.forward

    def four_requests(self: Any, q: Tensor, cache: Any, meta: Any, layer: Any, index: Any) -> AttentionOutput:
        out, lse = forward(self, q, cache, meta, layer, index)
        *_, shape = self._checked(cache, meta, layer, q.dtype)
        request = meta.schedules.planned(meta.forward, shape).request
        return AttentionOutput(out.masked_fill((request >= 4).view(-1, 1, 1), 0), lse)

    patch.setattr(DSV4Backend, "forward", four_requests)
