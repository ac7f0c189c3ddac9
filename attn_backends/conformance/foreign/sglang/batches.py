"""SGLang's batch object of a step: what its scheduler hands to a runner, and what a graph's runner keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_metadata import Step, StepKind

FILL = 1  # SGLang's length of a padded row


@dataclass(frozen=True)
class Lengths:
    """The lengths of a batch. committed: of each request, on the host. widths: query rows of each."""

    kind: StepKind
    committed: tuple[int, ...]
    widths: tuple[int, ...]

    @property
    def seq_lens(self) -> list[int]:
        """SGLang's seq_lens: with the rows of the step in a decode, prefill and draft extend, else without."""
        if self.kind in (StepKind.DRAFT_DECODE, StepKind.TARGET_VERIFY):
            return list(self.committed)
        return [n + width for n, width in zip(self.committed, self.widths, strict=True)]

    @property
    def positions(self) -> list[int]:
        """Position of each row; of a draft, that of its first forward."""
        return [n + i for n, width in zip(self.committed, self.widths, strict=True) for i in range(width)]


def lengths_of(step: Step) -> Lengths:
    """The lengths of a step."""
    assert step.seq_lens_cpu is not None, "the kernel declares that it needs lengths on the host"
    widths = getattr(step.query, "lens_cpu", None) or (step.width,) * step.bs
    padding = (0,) * (len(widths) - len(step.seq_lens_cpu))  # all of a step of padding alone
    return Lengths(step.kind, (*step.seq_lens_cpu, *padding), tuple(widths))


def make_batch(api: Any, lens: Lengths, tensors: dict[str, Tensor]) -> Any:
    """A ForwardBatch. tensors: its req_pool_indices, seq_lens, seq_lens_cpu, positions and out_cache_loc."""
    modes = {StepKind.PREFILL: "EXTEND", StepKind.TARGET_VERIFY: "TARGET_VERIFY"}
    modes[StepKind.DRAFT_EXTEND] = "DRAFT_EXTEND_V2"
    batch = api.ForwardBatch(
        forward_mode=api.ForwardMode[modes.get(lens.kind, "DECODE")],
        batch_size=len(lens.committed),
        input_ids=None,
        seq_lens_sum=sum(lens.seq_lens),
        spec_algorithm=api.SpeculativeAlgorithm.EAGLE,
        spec_info=_spec_info(api, lens, tensors),
        capture_hidden_mode=api.CaptureHiddenMode.LAST,
        **tensors,
    )
    if lens.kind in (StepKind.PREFILL, StepKind.DRAFT_EXTEND):
        device = tensors["seq_lens"].device
        batch.extend_prefix_lens = torch.tensor(lens.committed, dtype=torch.int32, device=device)
        batch.extend_prefix_lens_cpu = list(lens.committed)
        batch.extend_seq_lens = torch.tensor(lens.widths, dtype=torch.int32, device=device)
        batch.extend_seq_lens_cpu = list(lens.widths)
        batch.extend_start_loc = batch.extend_seq_lens.cumsum(0) - batch.extend_seq_lens
        batch.extend_num_tokens = sum(lens.widths)
    return batch


def _spec_info(api: Any, lens: Lengths, tensors: dict[str, Tensor]) -> Any:
    """What an EAGLE worker passes beside the batch."""
    device, bs, width = tensors["seq_lens"].device, len(lens.committed), max(lens.widths, default=1)
    if lens.kind is StepKind.DRAFT_DECODE:
        return api.EagleDraftInput(
            topk_p=torch.ones(bs, 1, device=device),
            topk_index=torch.zeros(bs, 1, dtype=torch.int64, device=device),
            capture_hidden_mode=api.CaptureHiddenMode.LAST,
            num_tokens_per_req=1,
            num_tokens_for_logprob_per_req=1,
        )
    if lens.kind is StepKind.TARGET_VERIFY:
        nothing = dict.fromkeys(("draft_token", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling"))
        chain = torch.ones(width, width, dtype=torch.bool).tril()
        masks = [torch.cat((chain.new_ones(width, length), chain), dim=1).flatten() for length in lens.committed]
        mask = torch.cat([*masks, chain[:0, 0]]).to(device)
        return api.EagleVerifyInput(
            **nothing,
            custom_mask=mask,
            positions=tensors["positions"],
            retrieve_cum_len=None,
            spec_steps=width - 1,
            topk=1,
            draft_token_num=width,
            capture_hidden_mode=api.CaptureHiddenMode.FULL,
            seq_lens_sum=sum(lens.committed),
            seq_lens_cpu=tensors["seq_lens_cpu"],
        )
    if lens.kind is StepKind.DRAFT_EXTEND:
        accepted = torch.tensor(lens.widths, dtype=torch.int32, device=device)
        spec_info = api.EagleDraftExtendInput(
            num_correct_drafts=accepted - 1,
            num_accept_tokens=accepted,
            num_accept_tokens_cpu=list(lens.widths),
            num_tokens_per_req=width,
        )
        spec_info.extend_seq_lens_tensor = accepted  # set by the runner of graphs
        return spec_info
    return None
