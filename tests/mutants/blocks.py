"""Mutants of draft blocks, whose rows see one another: engines came to them from causal steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_backends import backend as base
from attn_backends.backend import AttentionBackend
from attn_backends.backends import fa3
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.cache import PagedLatent
from attn_backends.conformance.compressed_worlds import WINDOW
from attn_backends.graphs import is_capturing
from attn_backends.layer import AttentionLayer, AttentionOutput
from attn_backends.planning import metadata
from spec_metadata import Buffers, Step, StepKind
from spec_metadata.capacity import TokenBucket
from spec_metadata.layout import repeat_requests
from spec_metadata.plans import compressed, ragged
from spec_metadata.visibility import BlockRows, KeptRows
from tests.mutants.mutant import mutant
from tests.mutants.visibility import change_lengths

BLOCK = StepKind.DRAFT_BLOCK


def read_stored_bytes(patch: pytest.MonkeyPatch, where: Callable[[Any, Any], bool]) -> None:
    """Attend without the scales of keys and values. where: whether to, of a cache and a forward's metadata."""
    forward = AttentionBackend.forward

    def unscaled(self: Any, q: Any, cache: Any, meta: Any, layer: AttentionLayer) -> AttentionOutput:
        given = replace(layer, k_scale=1.0, v_scale=1.0) if where(cache, meta) else layer
        return forward(self, q, cache, meta, given)

    patch.setattr(AttentionBackend, "forward", unscaled)


def in_windows_of_blocks(patch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Let `page_table_attention` of a windowed draft block get other options than it is given. change: of all, by name,
    to those that are others.
    """
    attend, windowed, is_block = fa3.page_table_attention, fa3.windowed, [False]

    def looked_at(window: int | None, drafted: Any) -> Any:
        is_block[0] = window is not None and isinstance(drafted, BlockRows)
        return windowed(window, drafted)

    def changed(q: Any, k: Any, v: Any, starts: Any, table: Any, lens: Any, **options: Any) -> Any:
        given = {"starts": starts, "table": table, "lens": lens, **options}
        if is_block[0]:
            given |= change(given)
        return attend(q, k, v, given.pop("starts"), given.pop("table"), given.pop("lens"), **given)

    patch.setattr(fa3, "windowed", looked_at)
    patch.setattr(fa3, "page_table_attention", changed)


@mutant("vLLM #57432: causal visibility for a block that is not causal", "math.draft_block", "scale.draft_block")
def block_is_causal(patch: pytest.MonkeyPatch) -> None:
    """Rows of a draft block see those before them alone."""
    patch.setattr(ragged, "is_causal", lambda step: not step.is_tree)


@mutant("vLLM #57432: a padded width for the active one", "math.draft_block", backend="trtllm_mla")
def block_is_as_long_as_its_tile(patch: pytest.MonkeyPatch) -> None:
    """The lengths of a draft block count the rows that its width is padded to."""
    change_lengths(patch, lambda step, _, lens: lens + (8 - step.width) * (step.kind is BLOCK))


@mutant("vLLM #48787, #41559", "math.cache_types")
def block_reads_stored_bytes(patch: pytest.MonkeyPatch) -> None:
    """Draft blocks read an 8-bit cache without its scales."""
    read_stored_bytes(patch, lambda cache, meta: meta.kind is BLOCK)


@mutant("our own: no prompt over 8-bit latents was in a case of fa3", "math.cache_types")
def prompts_read_stored_latents(patch: pytest.MonkeyPatch) -> None:
    """Prompts read 8-bit latents, and no other 8-bit cache, without their scales."""
    read_stored_bytes(patch, lambda cache, meta: meta.kind is StepKind.PREFILL and isinstance(cache, PagedLatent))


@mutant("our own: no captured prompt had an 8-bit cache", "math.cache_types", backend="flashinfer_mla", graph=True)
def captured_prompts_read_stored_bytes(patch: pytest.MonkeyPatch) -> None:
    """Prompts through graphs read an 8-bit cache without its scales."""
    read_stored_bytes(patch, lambda cache, meta: meta.kind is StepKind.PREFILL and meta.captured is not None)


@mutant("our own: no packed draft extend had an 8-bit cache", "math.cache_types", graph=True)
def packed_extends_read_stored_bytes(patch: pytest.MonkeyPatch) -> None:
    """Captured draft extends of packed rows read an 8-bit cache without its scales."""

    def is_packed(_: Any, meta: Any) -> bool:
        extends = meta.kind is StepKind.DRAFT_EXTEND and meta.captured is not None
        return extends and isinstance(meta.captured.bucket, TokenBucket)

    read_stored_bytes(patch, is_packed)


RAGGED = "math.ragged_verify", "math.ragged_cut"


@mutant("our own: no ragged verify had an 8-bit cache", *RAGGED, backend="flashinfer_mla", graph=True)
def ragged_verifies_read_stored_bytes(patch: pytest.MonkeyPatch) -> None:
    """Captured verifies of packed rows read an 8-bit cache without its scales."""

    def is_packed(_: Any, meta: Any) -> bool:
        verifies = meta.kind is StepKind.TARGET_VERIFY and meta.captured is not None
        return verifies and isinstance(meta.captured.bucket, TokenBucket)

    read_stored_bytes(patch, is_packed)


@mutant("our own: the mode without a mask that trees have", "math.draft_block", backend="flashinfer_mla")
def block_is_not_among_the_keys(patch: pytest.MonkeyPatch) -> None:
    """Rows of a draft block see the committed tokens alone, as those of a tree do in the prefix."""
    change_lengths(patch, lambda step, _, lens: lens - step.width * (step.kind is BLOCK))


@mutant("our own: the lengths that a block is planned with", "math.draft_block", backend="trtllm_mla")
def block_counts_masks_alone(patch: pytest.MonkeyPatch) -> None:
    """The root is counted among the committed tokens: the last row of a block is seen by none."""
    change_lengths(patch, lambda step, _, lens: lens - int(step.kind is BLOCK))


def change_rows(patch: pytest.MonkeyPatch, change: Callable[[Step, Any], dict[str, torch.Tensor]]) -> None:
    """Let the rows of draft blocks see other tokens of compressed plans. change: (step, rows as planned) -> fields."""
    rows_of = compressed._rows

    def changed(step: Step, *rest: Any) -> Any:
        rows = rows_of(step, *rest)
        return replace(rows, **change(step, rows)) if step.kind is BLOCK else rows

    patch.setattr(compressed, "_rows", changed)


@mutant("vLLM #57432: causal visibility for DSpark's block, which is not causal", "math.draft_block", backend="dsv4")
def listed_block_is_causal(patch: pytest.MonkeyPatch) -> None:
    """Rows of a draft block list the tokens up to themselves alone."""
    change_rows(patch, lambda _, rows: {"last_seen": rows.position})


@mutant("vLLM #57432: a padded width for the active one", "math.draft_block", backend="dsv4")
def listed_block_is_as_long_as_its_tile(patch: pytest.MonkeyPatch) -> None:
    """The lists of a draft block hold the rows that its width is padded to."""
    change_rows(patch, lambda step, rows: {"last_seen": rows.last_seen + 8 - step.width})


@mutant(
    "our own: the window that DFlash's blocks have, from each row's own position", "math.draft_block", backend="dsv4"
)
def listed_block_has_a_window_for_each_row(patch: pytest.MonkeyPatch) -> None:
    """The windows of a draft block's rows begin one token after the other, not all before the block."""
    change_rows(patch, lambda _, rows: {"first_seen": (rows.position + 1 - WINDOW).clamp_min(0)})


@mutant("vLLM's (window - 1, 0) of a layer without a causal mask", "math.window", "math.window_and_sinks")
def windowed_block_is_causal(patch: pytest.MonkeyPatch) -> None:
    """A windowed layer's rows of a draft block see nothing after them."""
    in_windows_of_blocks(patch, lambda given: {"causal": True, "drafted": None})


@mutant("one window for all rows, as a tree's branches of one depth have it", "math.window")
def window_of_a_block_is_its_last_row_s(patch: pytest.MonkeyPatch) -> None:
    """The window of every row of a draft block begins where that of its last one does."""
    behind_end = BlockRows.behind_end
    patch.setattr(BlockRows, "behind_end", lambda self: torch.zeros_like(behind_end(self)))


@mutant("SGLang #39287: a clipped prefix gathered from offset 0", "math.window")
def window_of_a_block_is_clipped_from_offset_zero(patch: pytest.MonkeyPatch) -> None:
    """A window of a draft block has the right number of keys, but the first ones of the request."""

    def clipped(given: dict[str, Any]) -> dict[str, Any]:
        return {"lens": given["lens"].clamp(max=given["window"] + given["max_seqlen_q"] - 1)}

    in_windows_of_blocks(patch, clipped)


@mutant("SGLang #31198: a flag that a phase of a block draft leaves on the backend", "api.kinds_in_turn")
def block_leaves_its_mask_behind(patch: pytest.MonkeyPatch) -> None:
    """What follows a draft block is planned without a causal mask, too."""

    def plans(self: FA3Backend, step: Step, buffers: Buffers) -> Any:
        self.saw_a_block = getattr(self, "saw_a_block", False) or step.kind is BLOCK
        made = ragged.view_ragged(step, buffers)
        return tuple(replace(plan, causal=plan.causal and not self.saw_a_block) for plan in made)

    patch.setattr(FA3Backend, "plans", plans)


def keeping(patch: pytest.MonkeyPatch, change: Callable[..., KeptRows]) -> None:
    """Let change(kept_rows, step, slots, num_kept, num_rows) say which rows are kept."""
    kept = metadata.kept_rows
    patch.setattr(metadata, "kept_rows", lambda *given: change(kept, *given))


@mutant("our own: the context of a block draft, stored as a draft extend's rows are", "cache.keeps_first_rows")
def rejected_rows_are_stored(patch: pytest.MonkeyPatch) -> None:
    """The rows after the accepted ones go to their slots, too."""
    keeping(patch, lambda kept, step, slots, num, most: kept(step, slots, torch.full_like(num, step.width), most))


@mutant("TensorRT-LLM's clamped row numbers, without the mask after them", "cache.keeps_first_rows")
def rows_behind_the_last_kept_one_are_stored(patch: pytest.MonkeyPatch) -> None:
    """Packed rows that no request kept are written where the step's first row is."""
    keeping(patch, lambda kept, step, slots, *rest: replace(found := kept(step, slots, *rest), slots=slots[found.rows]))


@mutant("the host's counts in place of the device's", "cache.keeps_first_rows", graph=True)
def rows_kept_as_at_the_capture(patch: pytest.MonkeyPatch) -> None:
    """A graph keeps as many rows of each request as when it was captured, all of them."""

    def counted(kept: Callable[..., KeptRows], step: Step, slots: Any, num: Any, most: int) -> KeptRows:
        return kept(step, slots, torch.full_like(num, step.width) if is_capturing() else num, most)

    keeping(patch, counted)


@mutant("packed rows by the number of their request, as if all were kept", "cache.keeps_first_rows")
def kept_rows_are_not_packed(patch: pytest.MonkeyPatch) -> None:
    """The first rows of the step are stored in place of the kept ones."""
    keeping(patch, lambda kept, *given: replace(found := kept(*given), rows=torch.ones_like(found.rows).cumsum(0) - 1))


@mutant("sglang-jax #1612: an assistant that mutates a cache", "cache.reads_alone")
def frozen_draft_writes(patch: pytest.MonkeyPatch) -> None:
    """Attention writes what it is given, at the slots of its rows, as a kernel with a fused store does."""
    forward = AttentionBackend.forward

    def fused(self: AttentionBackend, q: Any, cache: Any, meta: Any, layer: Any) -> Any:
        cache.pages[0].flatten(0, 1)[meta.write_slots] = q[:, : cache.pages[0].shape[2]].to(cache.dtype)
        return forward(self, q, cache, meta, layer)

    patch.setattr(AttentionBackend, "forward", fused)


@mutant("vLLM's Gemma-4 speculator: positions stay where they are", "cache.reads_alone")
def frozen_draft_advances(patch: pytest.MonkeyPatch) -> None:
    """Lengths advance with each forward of a draft on one metadata, as if it had stored a token."""
    forward = AttentionBackend.forward

    def advanced(self: AttentionBackend, q: Any, cache: Any, meta: Any, layer: AttentionLayer) -> AttentionOutput:
        output = forward(self, q, cache, meta, layer)
        if meta.reads_alone:
            meta.schedules._plans[meta.forward].seqused_k.add_(1)
        return output

    patch.setattr(AttentionBackend, "forward", advanced)


@mutant("SGLang #24436: a draft without KV of its own, run as one that has", "cache.reads_alone")
def frozen_draft_stores(patch: pytest.MonkeyPatch) -> None:
    """A store by metadata of rows that read alone is taken, and overwrites the target's cache."""
    patch.setattr(base, "slots_to_write", lambda backend, meta: meta.write_slots)


@mutant("checking mode once: two branches of a request stand at one token", "cache.reads_alone")
def frozen_draft_has_write_slots(patch: pytest.MonkeyPatch) -> None:
    """A frozen draft is a decode like others, whose rows write, each to a slot of its own."""
    patch.setattr(Step, "frozen_draft", Step.decode)


@mutant("SGLang #25545: a frozen draft's graph of requests, not of their branches", "cache.reads_alone", graph=True)
def frozen_branches_of_other_requests(patch: pytest.MonkeyPatch) -> None:
    """Branches are planned one after the other for all requests, and run request after request."""
    frozen = Step.frozen_draft

    def by_branch(lens: Any, paging: Any, seq_lens_cpu: Any) -> Step:
        order = torch.arange(len(lens), device=lens.device)
        order = torch.cat((order[::2], order[1::2]))
        known = [*seq_lens_cpu[::2], *seq_lens_cpu[1::2]]
        return frozen(lens[order], repeat_requests(paging, order), seq_lens_cpu=known)

    patch.setattr(Step, "frozen_draft", by_branch)


@mutant("SGLang #24436: what the assistant reads ends before the target's last token", "cache.reads_alone")
def frozen_draft_sees_one_key_less(patch: pytest.MonkeyPatch) -> None:
    """A frozen draft sees the tokens before the last committed one."""
    frozen = Step.frozen_draft

    def shorter(lens: Any, paging: Any, seq_lens_cpu: Any) -> Step:
        return frozen(lens - 1, paging, seq_lens_cpu=[length - 1 for length in seq_lens_cpu])

    patch.setattr(Step, "frozen_draft", shorter)
