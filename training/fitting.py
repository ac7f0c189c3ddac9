"""Optimising one stage: windows of the corpus, the schedule that follows steps or the clock, and its log rows."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Row = dict[str, Any]
LOG_EVERY = 100


@dataclass(frozen=True)
class Recipe:
    """One stage's optimisation; it ends after ``steps``, or after ``seconds`` if ``steps`` is 0."""

    seconds: float
    steps: int
    batch: int
    length: int
    peak_lr: float
    weight_decay: float
    warmup: float = 0.03
    clip: float = 1.0


class Windows:
    """Random windows of a byte stream that lives on the device.

    Args:
        stream: the bytes, documents joined by the separator 0.
        device: where to keep them.
        seed: seed of the windows' places.
        from_start: the share of windows that begin at a document's separator.
    """

    def __init__(self, stream: bytes, device: torch.device, seed: int, from_start: float = 0.1) -> None:
        self.data = torch.frombuffer(bytearray(stream), dtype=torch.uint8).to(device)
        self.documents = (self.data == 0).nonzero().flatten()
        self.generator = torch.Generator(device).manual_seed(seed)
        self.from_start = from_start

    def sample(self, batch: int, length: int) -> Tensor:
        """Draws windows: ``[batch, length]`` int64."""
        device, last = self.data.device, len(self.data) - length
        draw = torch.rand(3, batch, device=device, generator=self.generator, dtype=torch.float64)
        place = (draw[0] * last).long()
        document = self.documents[(draw[1] * len(self.documents)).long()].clamp(max=last)
        start = torch.where(draw[2] < self.from_start, document, place)
        return self.data[start[:, None] + torch.arange(length, device=device)].long()


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    """bfloat16 autocast on a GPU, full precision elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def optimizer_for(module: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW with weight decay on the matrices of the layers only."""
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    decayed = [p for n, p in named if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in named if not (p.ndim == 2 and "embed" not in n)]
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.peak_lr, betas=(0.9, 0.95), fused=named[0][1].is_cuda)


def rate(progress: float, recipe: Recipe) -> float:
    """Linear warm-up, then linear decay to zero, at ``progress`` in 0..1."""
    if progress < recipe.warmup:
        return recipe.peak_lr * max(progress / recipe.warmup, 0.01)
    return recipe.peak_lr * max(0.0, (1 - progress) / (1 - recipe.warmup))


def progress_of(recipe: Recipe) -> Iterator[tuple[int, float, float]]:
    """Yields (step, seconds since the third step, progress) until the recipe is done.

    The first three steps, which compile, don't count against ``recipe.seconds``.
    """
    begin, step = time.perf_counter(), 0
    while True:
        seconds = time.perf_counter() - begin
        progress = step / recipe.steps if recipe.steps else seconds / recipe.seconds
        if progress >= 1:
            return
        yield step, seconds, progress
        step += 1
        if step <= 3:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            begin = time.perf_counter()


def fit(
    module: nn.Module,
    windows: Windows,
    recipe: Recipe,
    loss_of: Callable[[Tensor, float], tuple[Tensor, Tensor]],
    validate: Callable[[], Row],
    stage: str,
) -> list[Row]:
    """Optimises ``module``.

    Args:
        module: whose parameters are trained.
        windows: source of training windows.
        recipe: the stage's settings.
        loss_of: maps windows ``[B, length + 1]`` and the progress 0..1 to (loss, detached values to log).
        validate: numbers of the validation split, called ten times in all.
        stage: label of the log rows.

    Returns:
        The log rows.
    """
    optimizer = optimizer_for(module, recipe)
    parameters = [p for p in module.parameters() if p.requires_grad]
    rows: list[Row] = []
    checked = 0.1
    step, seconds = 0, 0.0
    for step, seconds, progress in progress_of(recipe):
        for group in optimizer.param_groups:
            group["lr"] = rate(progress, recipe)
        loss, values = loss_of(windows.sample(recipe.batch, recipe.length + 1), progress)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, recipe.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % LOG_EVERY == 0 or progress >= checked:
            row: Row = {"stage": stage, "step": step, "seconds": round(seconds, 1)}
            row["bits"] = [round(v / math.log(2), 4) for v in values.tolist()]
            if progress >= checked:
                row |= validate()
                checked += 0.1
            rows.append(row)
            print(json.dumps(row), flush=True)
    rows.append({"stage": stage, "step": step + 1, "seconds": round(seconds, 1)} | validate())
    rows[-1]["tokens_per_second"] = round((step + 1) * recipe.batch * recipe.length / seconds)
    print(json.dumps(rows[-1]), flush=True)
    return rows
