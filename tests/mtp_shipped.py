"""Multi-layer MTP on the shipped models."""

from __future__ import annotations

from functools import cache

import torch
from transformers import AutoModelForCausalLM

from attn_backends_reference.eagle.mtp import MtpWorker
from attn_backends_reference.eagle.options import WorkerOptions
from attn_backends_reference.models import DraftModel, TargetModel, load_draft, load_mtp
from spec_metadata import Capacity
from tests.mtp_oracle import Oracle
from tests.serving_scenes import engine_parts
from training.models import CHECKPOINTS
from training.models import load_mtp as load_trained_mtp

NUM_STEPS = 3


def modules_of(model: str, target: TargetModel) -> list[DraftModel]:
    """The trained modules of a shipped target; of gqa, which has none, its EAGLE draft in the place of each."""
    if model == "mla":
        return list(load_mtp("mla-mtp", target))
    return [load_draft(model, target) for _ in range(NUM_STEPS)]


def shipped_worker(
    model: str,
    backend: str | dict[str, str],
    capacity: Capacity,
    *,
    checking: bool = True,
    device: str = "cpu",
    **options: object,
) -> MtpWorker:
    """A worker on a shipped target."""
    target, _, backends, geometry = engine_parts(model, backend, capacity, checking=checking, device=device)
    return MtpWorker(target, modules_of(model, target), backends, capacity, geometry, WorkerOptions(**options))


@cache
def trained(device: str = "cpu") -> Oracle:
    """The shipped mla target and its modules."""
    target = AutoModelForCausalLM.from_pretrained(
        CHECKPOINTS / "mla" / "target", dtype=torch.float32, attn_implementation="eager"
    )
    modules = load_trained_mtp(CHECKPOINTS / "mla" / "mtp", torch.float32, torch.device(device))
    for module in modules:
        module.config._attn_implementation = "eager"
    return Oracle(target.eval().requires_grad_(False).to(device), list(modules))
