"""EAGLE-3 on the shipped model."""

from __future__ import annotations

from functools import cache

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from attn_backends_reference.eagle.worker import EagleWorker, WorkerOptions
from attn_backends_reference.models import load_draft
from spec_metadata import Capacity
from tests.eagle3_oracle import Oracle
from tests.serving_scenes import engine_parts
from training import models
from training.eagle3 import EAGLE3

TARGET, DRAFT = (models.CHECKPOINTS / "gqa" / name for name in ("target", "eagle3"))


def shipped_worker(
    backend: str, capacity: Capacity, *, device: str = "cpu", checking: bool = True, **options: object
) -> EagleWorker:
    """A worker on the shipped target and draft."""
    target, _, backends, geometry = engine_parts("gqa", backend, capacity, device=device, checking=checking)
    draft = load_draft("gqa-eagle3", target)
    return EagleWorker(target, draft, backends, capacity, geometry, WorkerOptions(**options))


@cache
def trained() -> Oracle:
    """The shipped target and the tensors of its draft."""
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32, attn_implementation="eager")
    tensors = load_file(DRAFT / "model.safetensors")
    tensors |= {name: tensor.float() for name, tensor in tensors.items() if tensor.is_floating_point()}
    layers = EAGLE3["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    return Oracle(target.eval().requires_grad_(False), models.COMMON | EAGLE3, tensors, layers)
