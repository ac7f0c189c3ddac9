"""Trains a byte-level target and its EAGLE draft head on the corpus of ``training.corpus``.

The target learns next-byte prediction; the draft then learns the frozen target's distributions
(the stored bfloat16 weights) over three unrolled steps that see what drafting sees when serving.
Run ``python -m training.train --help`` for the options; ``training/README.md`` has the commands.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from attn_backends.models.draft import EagleDraft
from training import attention, models
from training.corpus import read_corpus

Row = dict[str, Any]
LOG_EVERY = 100
VALID_LENGTH = 1024


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
    loss_of: Callable[[Tensor], tuple[Tensor, Tensor]],
    validate: Callable[[], Row],
    stage: str,
) -> list[Row]:
    """Optimises ``module``.

    Args:
        module: whose parameters are trained.
        windows: source of training windows.
        recipe: the stage's settings.
        loss_of: maps windows ``[B, length + 1]`` to (loss, detached values to log).
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
        loss, values = loss_of(windows.sample(recipe.batch, recipe.length + 1))
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


def train_target(
    name: str, train: bytes, valid: bytes, recipe: Recipe, device: torch.device, fast: bool
) -> tuple[transformers.PreTrainedModel, list[Row]]:
    """Trains a target from scratch; ``fast`` compiles it. Returns the model and the log rows."""
    torch.manual_seed(0)
    model = models.new_target(name).to(device)
    held = Windows(valid, device, seed=1, from_start=0.0).sample(32, VALID_LENGTH + 1)

    def cross_entropy(ids: Tensor, first: int = 0) -> Tensor:
        """Mean loss over ``ids`` ``[B, T + 1]`` from position ``first`` on."""
        positions = torch.arange(ids.shape[1] - 1, device=ids.device)[None]
        logits = model.lm_head(models.target_hidden(model, ids[:, :-1], positions))[:, first:]
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, first + 1 :].flatten())

    compiled = torch.compile(cross_entropy) if fast else cross_entropy

    def loss_of(ids: Tensor) -> tuple[Tensor, Tensor]:
        with autocast(device):
            loss = compiled(ids)
        return loss, loss.detach()[None]

    def validate() -> Row:
        with torch.no_grad(), autocast(device):
            parts = [cross_entropy(part, VALID_LENGTH // 2).item() for part in held.split(8)]
        return {"valid_bpb": round(sum(parts) / len(parts) / math.log(2), 4)}

    rows = fit(model, Windows(train, device, seed=0), recipe, loss_of, validate, f"{name} target")
    return model, rows


def unroll(draft: EagleDraft, embeds: Tensor, hidden: Tensor, head: nn.Module, steps: int) -> list[Tensor]:
    """The draft's logits over unrolled steps.

    Args:
        draft: the head, on the training attention function.
        embeds: ``[B, T, H]``, row ``t`` embeds token ``t + 1``.
        hidden: ``[B, T, H]``, the target's hidden states at ``t``.
        head: the target's output head.
        steps: how many steps; step ``s`` covers rows ``s..T-1``.

    Returns:
        For each step the logits ``[B, T - s, V]``; row ``t`` predicts token ``t + 2``.
    """
    positions = torch.arange(embeds.shape[1], device=embeds.device)[None]
    plan = attention.Unrolled()
    logits = []
    for step in range(steps):
        hidden = draft(embeds[:, step:], hidden, positions[:, step:], plan=plan)
        logits.append(head(hidden))
        hidden = hidden[:, :-1]
    return logits


def teacher(model: transformers.PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the draft learns from: next-token embeddings, hidden states and target logits.

    Args:
        model: the frozen target.
        ids: ``[B, T + 1]``.

    Returns:
        ``[B, T, H]`` embeddings of tokens ``1..T``, ``[B, T, H]`` hidden states of positions
        ``0..T-1``, ``[B, T, V]`` logits of positions ``1..T``.
    """
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    hidden = models.target_hidden(model, ids, positions)
    return model.model.embed_tokens(ids[:, 1:]), hidden[:, :-1], model.lm_head(hidden[:, 1:])


def train_draft(
    name: str,
    model: transformers.PreTrainedModel,
    train: bytes,
    valid: bytes,
    recipe: Recipe,
    device: torch.device,
    fast: bool,
    steps: int = 3,
) -> tuple[EagleDraft, list[Row]]:
    """Trains the draft of a frozen target. Returns the draft and the log rows."""
    torch.manual_seed(0)
    draft = EagleDraft(models.draft_config(name), attention.NAME)
    for module in draft.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=draft.config.initializer_range)
    draft.to(device)
    with torch.no_grad():
        draft.norm.weight.copy_(model.model.norm.weight)
    held = Windows(valid, device, seed=1, from_start=0.0).sample(32, VALID_LENGTH + 1)
    teach = torch.compile(teacher) if fast else teacher

    def loss_of(ids: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            embeds, hidden, target = teach(model, ids)
            goal = target.float().softmax(-1)
        losses = []
        with autocast(device):
            for step, logits in enumerate(unroll(draft, embeds, hidden, model.lm_head, steps)):
                losses.append(-(goal[:, step:] * logits.float().log_softmax(-1)).sum(-1).mean())
        stacked = torch.stack(losses)
        return stacked.mean(), stacked.detach()

    def validate() -> Row:
        hits = torch.zeros(steps)
        with torch.no_grad(), autocast(device):
            for ids in held.split(8):
                embeds, hidden, target = teacher(model, ids)
                best = target.argmax(-1)
                for step, logits in enumerate(unroll(draft, embeds, hidden, model.lm_head, steps)):
                    match = logits.argmax(-1) == best[:, step:]
                    hits[step] += match[:, VALID_LENGTH // 2 :].float().mean().cpu()
        return {"agreement": [round(h / len(held.split(8)), 4) for h in hits.tolist()]}

    rows = fit(draft, Windows(train, device, seed=2), recipe, loss_of, validate, f"{name} draft")
    return draft.eval(), rows


def check_kernel(device: torch.device) -> float:
    """Largest relative error of ``UnrolledFlash`` (output and gradients) against the reference."""
    shape, scale = (2, 4, 300, 80), 80**-0.5
    torch.manual_seed(0)
    leaves = [torch.randn(shape, device=device).bfloat16() for _ in range(7)]
    grad = torch.randn(shape, device=device).bfloat16()

    def run(dtype: torch.dtype, flash: bool) -> list[Tensor]:
        q, *flat = (x.to(dtype).requires_grad_() for x in leaves)
        if flash:
            out = attention.UnrolledFlash.apply(q, scale, *flat)
        else:
            kept = list(zip(flat[::2], flat[1::2], strict=True))
            out = attention.unrolled_reference(q, kept, scale)
        return [out, *torch.autograd.grad(out, [q, *flat], grad.to(dtype))]

    fast, exact = run(torch.bfloat16, True), run(torch.float64, False)
    pairs = zip(fast, exact, strict=True)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)


def save_target(model: transformers.PreTrainedModel, folder: Path) -> None:
    """Stores the target in bfloat16."""
    copy.deepcopy(model).to("cpu", torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def environment(device: torch.device) -> dict[str, str]:
    """Where and when a run happened."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else device.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": "python -m training.train " + " ".join(sys.argv[1:]),
    }


def write_log(path: Path, runs: list[dict[str, Any]]) -> None:
    """Writes runs as JSON with one log row a line."""
    parts = []
    for run in runs:
        rows = ",\n   ".join(json.dumps(row) for row in run["rows"])
        fields = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in run.items() if k != "rows"]
        parts.append(" {\n" + ",\n".join([*fields, f'  "rows": [\n   {rows}\n  ]']) + "\n }")
    path.write_text("[\n" + ",\n".join(parts) + "\n]\n")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=models.NAMES, required=True)
    parser.add_argument("--stages", default="target,draft", help="which of target,draft to train")
    parser.add_argument("--corpus", type=Path, default=Path(".corpus/corpus.xz"))
    parser.add_argument("--out", type=Path, default=models.CHECKPOINTS)
    parser.add_argument("--log", type=Path, help="where to write this run's log")
    parser.add_argument("--target-seconds", type=float, default=170)
    parser.add_argument("--draft-seconds", type=float, default=80)
    parser.add_argument("--target-steps", type=int, default=0, help="overrides --target-seconds")
    parser.add_argument("--draft-steps", type=int, default=0, help="overrides --draft-seconds")
    parser.add_argument("--target-batch", type=int, default=32)
    parser.add_argument("--draft-batch", type=int, default=16)
    parser.add_argument("--target-lr", type=float, default=3e-3)
    parser.add_argument("--draft-lr", type=float, default=2e-3)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Trains one family's target, draft or both and stores them."""
    args = parse_args()
    began = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    fast = device.type == "cuda" and not args.no_compile
    torch._dynamo.config.suppress_errors = True  # fall back to eager rather than fail
    train, valid = read_corpus(args.corpus)
    folder = args.out / args.model
    decay = args.weight_decay
    run: dict[str, Any] = {"model": args.model, **environment(device), "rows": []}
    if device.type == "cuda":
        run["kernel_error"] = check_kernel(device)
        print("kernel error", run["kernel_error"], flush=True)
        if not run["kernel_error"] < 0.02:
            raise RuntimeError(f"the unrolled attention is off by {run['kernel_error']}")
    if "target" in args.stages:
        recipe = Recipe(
            args.target_seconds,
            args.target_steps,
            args.target_batch,
            args.length,
            args.target_lr,
            decay,
        )
        target, rows = train_target(args.model, train, valid, recipe, device, fast)
        save_target(target, folder / "target")
        run |= {"target_recipe": asdict(recipe), "rows": run["rows"] + rows}
    if "draft" in args.stages:
        recipe = Recipe(args.draft_seconds, args.draft_steps, args.draft_batch, args.length, args.draft_lr, 0.01)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        frozen = models.load_target(folder / "target", dtype, device)
        draft, rows = train_draft(args.model, frozen, train, valid, recipe, device, fast)
        draft.save_pretrained(folder / "draft")
        run |= {"draft_recipe": asdict(recipe), "rows": run["rows"] + rows}
    run["wall_seconds"] = round(time.perf_counter() - began, 1)
    if args.log:
        write_log(args.log, [run])


if __name__ == "__main__":
    main()
