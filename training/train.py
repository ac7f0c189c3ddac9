"""Trains a byte-level target, its EAGLE and EAGLE-3 drafts and MTP modules on the corpus of ``training.corpus``.

The target learns next-byte prediction; a draft then learns the frozen target's distributions
(the stored bfloat16 weights) over three unrolled steps that see what drafting sees when serving, and
three MTP modules learn them from the file's own tokens, each from the one before.
Run ``python -m training.train --help`` for the options; ``training/README.md`` has the commands.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from attn_backends_reference.models.draft import EagleDraft
from attn_backends_reference.models.eagle1 import Eagle1Draft, save_eagle1
from attn_backends_reference.models.eagle3 import Eagle3Draft, save_eagle3
from attn_backends_reference.models.mtp import save_mtp
from training import attention, compressed, compressed_plans, eagle3, models
from training.corpus import read_corpus
from training.fitting import Recipe, Row, Windows, autocast, fit

VALID_LENGTH = 1024
DEFAULTS = {"target": (170, 32, 3e-3), "draft": (80, 16, 2e-3), "mtp": (150, 16, 2e-3), "eagle3": (80, 16, 2e-3)}
"""Of each stage: seconds, windows a step, peak rate."""
ONLY = {"mtp": "mla", "eagle3": "gqa"}
"""The stages of one model alone."""
Teacher = Callable[[transformers.PreTrainedModel, Tensor], tuple[Tensor, Tensor, Tensor]]
STEPS = 3
"""How many tokens a draft learns to draft in a row."""
DENSE_SHARE = 0.6
"""The share of a DeepSeek-V4 target's training in which queries see all entries, not the indexer's choice."""


def train_target(
    name: str, train: bytes, valid: bytes, recipe: Recipe, device: torch.device, fast: bool
) -> tuple[transformers.PreTrainedModel, list[Row]]:
    """Trains a target from scratch; ``fast`` compiles it. Returns the model and the log rows."""
    torch.manual_seed(0)
    model = models.new_target(name).to(device)
    held = Windows(valid, device, seed=1, from_start=0.0).sample(32, VALID_LENGTH + 1)

    def cross_entropy(ids: Tensor, first: int = 0, plan: Any = None) -> Tensor:
        """Mean loss over ``ids`` ``[B, T + 1]`` from position ``first`` on."""
        positions = torch.arange(ids.shape[1] - 1, device=ids.device)[None]
        logits = model.lm_head(models.target_hidden(model, ids[:, :-1], positions, plan))[:, first:]
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, first + 1 :].flatten())

    def losses(ids: Tensor, selected: bool) -> Tensor:
        """The loss, then those of DeepSeek-V4's routers and indexers."""
        if not models.is_v4(model):
            return cross_entropy(ids)[None]
        plan = compressed_plans.Training(selected)
        return torch.stack([cross_entropy(ids, plan=plan), *plan.losses])

    compiled = torch.compile(losses) if fast and not models.is_v4(model) else losses

    def loss_of(ids: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        with autocast(device):
            parts = compiled(ids, progress >= DENSE_SHARE)
        return parts.sum(), parts.detach()[:1]

    def validate() -> Row:
        with torch.no_grad(), autocast(device), torch.compiler.set_stance("force_eager"):
            parts = [cross_entropy(part, VALID_LENGTH // 2).item() for part in held.split(8)]
        return {"valid_bpb": round(sum(parts) / len(parts) / math.log(2), 4)}

    with compressed.compiled_parts() if fast and models.is_v4(model) else nullcontext():
        for progress in (0.0, 1.0) if fast and models.is_v4(model) else ():  # compiles before the clock starts
            loss_of(held[:1].repeat(recipe.batch, 2)[:, : recipe.length + 1], progress)[0].backward()
        model.zero_grad(set_to_none=True)
        rows = fit(model, Windows(train, device, seed=0), recipe, loss_of, validate, f"{name} target")
    return model, rows


def unroll(
    draft: EagleDraft | Eagle1Draft | Eagle3Draft,
    embeds: Tensor,
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    steps: int,
) -> list[Tensor]:
    """The draft's logits of each unrolled step ``s``, ``[B, T - s, V]`` over rows ``s..T-1``; row ``t`` predicts token
    ``t + 2``.

    Args:
        draft: on the training attention function.
        embeds: ``[B, T, H]``, row ``t`` embeds token ``t + 1``.
        hidden: ``[B, T, H]``, what the draft takes of the target at ``t``.
        head: maps the draft's outputs to logits.
    """
    length = embeds.shape[1]
    positions = torch.arange(length, device=embeds.device)[None]
    plan = models.plans_of(draft).Unrolled()
    logits = []
    for step in range(steps):
        # all steps have one shape; the last rows of a later step mean nothing, and no other row sees them
        rows = F.pad(embeds[:, step:], (0, 0, 0, step))
        hidden = draft(rows, hidden, positions + step, plan=plan)
        logits.append(head(hidden[:, : length - step]))
    return logits


def teacher(model: transformers.PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the draft learns of a frozen target and ``ids`` ``[B, T + 1]``: ``[B, T, H]`` embeddings of tokens ``1..T``,
    ``[B, T, H]`` hidden states of positions ``0..T-1``, ``[B, T, V]`` distributions at positions ``1..T``.
    """
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    hidden = models.target_hidden(model, ids, positions)
    goal = model.lm_head(hidden[:, 1:]).float().softmax(-1)
    return model.model.embed_tokens(ids[:, 1:]), hidden[:, :-1], goal


def predict(modules: nn.ModuleList, embeds: Tensor, hidden: Tensor, head: nn.Module) -> list[Tensor]:
    """The logits of MTP modules, which learn from the file's own tokens; arguments and result as ``unroll``."""
    outputs = models.run_modules(modules, embeds, hidden)
    return [head(rows[:, : rows.shape[1] - step]) for step, rows in enumerate(outputs)]


def train_draft(
    name: str, model: transformers.PreTrainedModel, train: bytes, valid: bytes, recipe: Recipe, fast: bool
) -> tuple[EagleDraft | Eagle1Draft, list[Row]]:
    """Trains the draft of a frozen target over three unrolled steps. Returns the draft and the log rows."""
    torch.manual_seed(0)
    draft = models.new_draft(name).to(model.device)
    if isinstance(draft, EagleDraft):
        with torch.no_grad():
            draft.norm.weight.copy_(model.model.norm.weight)
    logits_of = partial(unroll, draft, head=model.lm_head, steps=STEPS)
    rows = distil(draft, logits_of, teacher, model, train, valid, recipe, fast, f"{name} draft")
    return draft.eval(), rows


def train_eagle3(
    name: str, model: transformers.PreTrainedModel, train: bytes, valid: bytes, recipe: Recipe, fast: bool
) -> tuple[Eagle3Draft, list[Row]]:
    """Trains the EAGLE-3 draft of a frozen target over three unrolled steps. Returns the draft and the log rows."""
    torch.manual_seed(0)
    draft = eagle3.new_eagle3(train).to(model.device)
    with torch.no_grad():
        draft.norm.weight.copy_(model.model.norm.weight)
        draft.lm_head.weight.copy_(model.lm_head.weight[draft.t2d])

    def logits_of(embeds: Tensor, features: Tensor) -> list[Tensor]:
        return unroll(draft, embeds, draft.fc(features), partial(eagle3.score, draft), STEPS)

    def teach(model: transformers.PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return eagle3.teacher3(model, draft, ids)

    rows = distil(draft, logits_of, teach, model, train, valid, recipe, fast, f"{name} eagle3")
    return draft.eval(), rows


def train_mtp(
    name: str, model: transformers.PreTrainedModel, train: bytes, valid: bytes, recipe: Recipe, fast: bool
) -> tuple[nn.ModuleList, list[Row]]:
    """Trains the MTP modules of a frozen target, one for each step. Returns them and the log rows."""
    torch.manual_seed(0)
    modules = models.new_mtp().to(model.device)
    with torch.no_grad():
        for module in modules:
            module.norm.weight.copy_(model.model.norm.weight)
    compiled = torch.compile(predict) if fast else predict
    logits_of = partial(compiled, modules, head=model.lm_head)
    rows = distil(modules, logits_of, teacher, model, train, valid, recipe, fast, f"{name} mtp")
    return modules.eval(), rows


def distil(
    draft: nn.Module,
    logits_of: Callable[[Tensor, Tensor], list[Tensor]],
    teach: Teacher,
    model: transformers.PreTrainedModel,
    train: bytes,
    valid: bytes,
    recipe: Recipe,
    fast: bool,
    stage: str,
) -> list[Row]:
    """Trains a draft to give a frozen target's distributions at every step. Returns the log rows.

    Args:
        draft: whose parameters are trained.
        logits_of: maps embeddings and hidden states as ``teach`` gives them to the logits of ``STEPS`` steps,
            ``[B, T - s, V]`` of step ``s``; row ``t`` predicts token ``t + s + 2``.
        teach: gives embeddings, hidden states and the target's distributions (``teacher``); a row of zeros teaches
            nothing, and no choice agrees with it.
        model: the target.
        train, valid: the streams.
        recipe: the stage's settings.
        fast: whether to compile the target.
        stage: label of the log rows.
    """
    held = Windows(valid, model.device, seed=1, from_start=0.0).sample(32, VALID_LENGTH + 1)
    compiled = torch.compile(teach) if fast and not models.is_v4(model) else teach

    def loss_of(ids: Tensor, _: float) -> tuple[Tensor, Tensor]:
        losses = []
        with autocast(model.device):
            with torch.no_grad():
                embeds, hidden, goal = compiled(model, ids)
            for step, logits in enumerate(logits_of(embeds, hidden)):
                losses.append(-(goal[:, step:] * logits.float().log_softmax(-1)).sum(-1).mean())
        stacked = torch.stack(losses)
        return stacked.mean(), stacked.detach()

    def validate() -> Row:
        hits = torch.zeros(STEPS)
        with torch.no_grad(), autocast(model.device), torch.compiler.set_stance("force_eager"):
            for ids in held.split(8):
                embeds, hidden, goal = teach(model, ids)
                best = torch.where(goal.any(-1), goal.argmax(-1), -1)
                for step, logits in enumerate(logits_of(embeds, hidden)):
                    match = logits.argmax(-1) == best[:, step:]
                    hits[step] += match[:, VALID_LENGTH // 2 :].float().mean().cpu()
        return {"agreement": [round(h / len(held.split(8)), 4) for h in hits.tolist()]}

    return fit(draft, Windows(train, model.device, seed=2), recipe, loss_of, validate, stage)


def save_target(model: transformers.PreTrainedModel, folder: Path) -> None:
    """Stores the target in bfloat16."""
    copy.deepcopy(model).to("cpu", torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def save_draft(draft: EagleDraft | Eagle1Draft, target: transformers.PreTrainedModel, folder: Path) -> None:
    """Stores a draft in bfloat16."""
    if isinstance(draft, Eagle1Draft):
        save_eagle1(draft, target.model.embed_tokens.weight, folder)
    else:
        draft.save_pretrained(folder)


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
        rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in run["rows"])
        fields = [f"{json.dumps(k)}:{json.dumps(v, separators=(',', ':'))}" for k, v in run.items() if k != "rows"]
        parts.append("{" + ",\n".join([*fields, f'"rows":[\n{rows}\n]']) + "}")
    path.write_text("[\n" + ",\n".join(parts) + "\n]\n")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=models.NAMES, required=True)
    parser.add_argument(
        "--stages", default="target,draft", help=f"which of {','.join(DEFAULTS)} to train; mtp is mla's, eagle3 gqa's"
    )
    parser.add_argument("--corpus", type=Path, default=Path(".corpus/corpus.xz"))
    parser.add_argument("--out", type=Path, default=models.CHECKPOINTS)
    parser.add_argument("--log", type=Path, help="where to write this run's log")
    for stage, (seconds, batch, peak) in DEFAULTS.items():
        parser.add_argument(f"--{stage}-seconds", type=float, default=seconds)
        parser.add_argument(f"--{stage}-steps", type=int, default=0, help=f"overrides --{stage}-seconds")
        parser.add_argument(f"--{stage}-batch", type=int, default=batch)
        parser.add_argument(f"--{stage}-lr", type=float, default=peak)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--weight-decay", type=float, default=0.1, help="of the target")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    args.stages = args.stages.split(",")
    known = [stage for stage in DEFAULTS if ONLY.get(stage, args.model) == args.model]
    if not set(args.stages) <= set(known):
        parser.error(f"--stages {','.join(args.stages)} of {args.model}: known are {', '.join(known)}")
    return args


def recipe_of(args: argparse.Namespace, stage: str) -> Recipe:
    """A stage's recipe."""
    seconds, steps, batch, peak = (getattr(args, f"{stage}_{field}") for field in ("seconds", "steps", "batch", "lr"))
    return Recipe(seconds, steps, batch, args.length, peak, args.weight_decay if stage == "target" else 0.01)


def main() -> None:
    """Trains one family's stages and stores what they make."""
    args = parse_args()
    began = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    fast = device.type == "cuda" and not args.no_compile
    torch._dynamo.config.suppress_errors = True  # fall back to eager rather than fail
    train, valid = read_corpus(args.corpus)
    folder = args.out / args.model
    run: dict[str, Any] = {"model": args.model, **environment(device), "rows": []}
    if device.type == "cuda":
        run["kernel_error"] = attention.check_kernel(device)
        print("kernel error", run["kernel_error"], flush=True)
        if not run["kernel_error"] < 0.02:
            raise RuntimeError(f"the unrolled attention is off by {run['kernel_error']}")
    for stage in (stage for stage in DEFAULTS if stage in args.stages):
        recipe = recipe_of(args, stage)
        if stage == "target":
            target, rows = train_target(args.model, train, valid, recipe, device, fast)
            save_target(target, folder / "target")
        else:
            frozen = models.load_target(folder / "target", torch.float32, device)
        if stage == "draft":
            draft, rows = train_draft(args.model, frozen, train, valid, recipe, fast)
            save_draft(draft, frozen, folder / "draft")
        if stage == "mtp":
            modules, rows = train_mtp(args.model, frozen, train, valid, recipe, fast)
            save_mtp(list(modules), models.mtp_config(), folder / "mtp")
        if stage == "eagle3":
            draft3, rows = train_eagle3(args.model, frozen, train, valid, recipe, fast)
            save_eagle3(draft3, folder / "eagle3")
        run |= {f"{stage}_recipe": asdict(recipe), "rows": run["rows"] + rows}
    run["wall_seconds"] = round(time.perf_counter() - began, 1)
    if args.log:
        write_log(args.log, [run])


if __name__ == "__main__":
    main()
