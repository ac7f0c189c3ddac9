"""SGLang's own objects of a ragged verify as our steps."""

from __future__ import annotations

import torch
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from spec_metadata import StepKind
from tests.engine_batches import LENS, sglang_steps
from tests.test_adapter_ragged import ragged_batch, scene_of


def test_a_layout_is_the_widths_of_a_verify_padded_or_not():
    scene = scene_of(StepKind.TARGET_VERIFY)
    num_rows, width = 16, scene.most_rows
    layout = RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=scene.widths, device="cpu", grid=[num_rows])
    batch = ragged_batch(scene)
    batch.spec_info = DFlashVerifyInput(
        draft_token=torch.zeros(num_rows),
        positions=torch.zeros(num_rows),
        draft_token_num=width,
        ragged_verify_layout=layout,
        live_seq_lens_cpu=torch.tensor(LENS),
    )
    step = sglang_steps(scene).step(batch)
    assert (step.query.widths.tolist(), step.query.width, step.num_tokens) == ([*scene.widths], width, num_rows)
    assert step.seq_lens_cpu == LENS
    batch.spec_info.ragged_verify_layout = layout.padded_to_bucket(padded_bs=5, cap=width)
    _, inputs = sglang_steps(scene).bound(batch)
    assert inputs.widths.tolist() == [*scene.widths, width, width]
