"""Runs of P-EAGLE on the shipped target: its EAGLE-3 draft with random values for the masks, which drafts the first
token of a cycle as well as EAGLE-3 does, and the others at random.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from attn_backends_reference.eagle.options import WorkerOptions
from attn_backends_reference.eagle.parallel import ParallelWorker
from attn_backends_reference.models import TargetModel, load_parallel
from attn_backends_reference.models.peagle import PEagleModel
from spec_metadata import Capacity
from tests.serving_scenes import engine_parts
from training.models import CHECKPOINTS

NUM_STEPS = 3
SHAPE = {"topk": 1, "num_steps": NUM_STEPS, "num_draft_tokens": NUM_STEPS + 1, "num_extended": 2 * NUM_STEPS}


def write_head(folder: Path, **changes: Any) -> None:
    """The folder of a P-EAGLE head of the shipped EAGLE-3 draft. changes: of its config.json."""
    shipped = CHECKPOINTS / "gqa" / "eagle3"
    fields = json.loads((shipped / "config.json").read_text()) | {"mask_token_id": 255, "parallel_drafting": True}
    (folder / "config.json").write_text(json.dumps(fields | changes))
    tensors = load_file(shipped / "model.safetensors")
    noise = torch.randn(1, 1, tensors["fc.weight"].shape[1], generator=torch.Generator().manual_seed(3))
    save_file(tensors | {"mask_hidden": noise}, folder / "model.safetensors", metadata={"format": "pt"})


@cache
def head(target: TargetModel) -> PEagleModel:
    """Of the shipped target."""
    with TemporaryDirectory() as folder:
        write_head(Path(folder))
        return load_parallel(folder, target)


def parallel_worker(
    capacity: Capacity, backend: str = "fa3", *, checking: bool = True, **options: Any
) -> ParallelWorker:
    """A worker on the shipped target and this head."""
    target, _, backends, geometry = engine_parts("gqa", backend, capacity, checking=checking)
    return ParallelWorker(target, head(target), backends, capacity, geometry, WorkerOptions(**options))
