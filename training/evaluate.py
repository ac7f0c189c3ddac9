"""Bits per byte and drafting acceptance of the shipped models on the held-out files.

A file is the stream ``[0] + bytes``, cut into windows of 1024 tokens every 512. Each prediction
and each cycle's start counts once, in the window that gives it at least 512 tokens of context
(except in a file's first 512 tokens). A cycle starts from the file's bytes up to a root token,
drafts a tree, verifies it greedily against the target's own choices and advances along the file
by the accepted drafts plus one. The prefix is always the file, so that the target's and draft's
rows of a window are computed once.

Run ``python -m training.evaluate --model gqa``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from training import eagle3, models
from training.corpus import load_heldout
from training.cycles import Eagle3Window, MtpWindow, Shape, Window, walk

WINDOW, STRIDE = 1024, 512
CHAIN, TREE = Shape(1, 3, 4), Shape(4, 3, 16)


@dataclass
class Spans:
    """Windows ``ids`` ``[S, WINDOW]`` and the range ``first..end`` of each that counts."""

    ids: Tensor
    first: Tensor
    end: Tensor


def cut(files: dict[str, bytes]) -> Spans:
    """Cuts files into spans of at most ``STRIDE`` counted positions."""
    rows, first, end = [], [], []
    for data in files.values():
        stream = b"\0" + data
        for low in range(0, len(stream), STRIDE):
            start = max(0, low - STRIDE)
            rows.append(stream[start : start + WINDOW].ljust(WINDOW, b"\0"))
            first.append(max(1, low - start))
            end.append(min(low + STRIDE, len(stream)) - start)
    ids = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
    return Spans(ids.view(-1, WINDOW).long(), torch.tensor(first), torch.tensor(end))


def summary(counts: Tensor) -> dict[str, Any]:
    """Tokens a cycle and the acceptance at each depth given the one before."""
    reached = counts.flip(0).cumsum(0).flip(0).double()
    return {
        "tokens_per_cycle": round((reached.sum() / reached[0]).item(), 4),
        "acceptance_by_depth": [round(x, 4) for x in (reached[1:] / reached[:-1]).tolist()],
        "cycles": int(reached[0]),
    }


def drafters(
    folder: Path, target: transformers.PreTrainedModel, dtype: torch.dtype, device: torch.device
) -> dict[str, tuple[Shape, Callable[[Tensor], Window]]]:
    """What is drafted by whom: the shape, and what starts windows of given tokens."""
    eagle = partial(Window, target, models.load_draft(folder / "draft", dtype, device))
    found: dict[str, tuple[Shape, Callable[[Tensor], Window]]] = {"chain": (CHAIN, eagle)}
    if not models.is_v4(target):  # which compresses one chain of tokens: it can't hold a tree's branches
        found["tree"] = (TREE, eagle)
    if (folder / "eagle3").is_dir():
        start = partial(Eagle3Window, target, eagle3.load_eagle3(folder / "eagle3", dtype, device))
        found |= {"eagle3_chain": (CHAIN, start), "eagle3_tree": (TREE, start)}
    if (folder / "mtp").is_dir():
        found["mtp_chain"] = (CHAIN, partial(MtpWindow, target, models.load_mtp(folder / "mtp", dtype, device)))
    return found


@torch.no_grad()
def evaluate(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    batch: int = 64,
    limit: int | None = None,
    acceptance: bool = True,
) -> dict[str, Any]:
    """Measures one family.

    Args:
        folder: holds ``target``, ``draft`` and perhaps ``mtp`` or ``eagle3``.
        device: where to run.
        dtype: the arithmetic; the stored weights are bfloat16 in any case.
        batch: windows at a time.
        limit: measure only this many windows, spread evenly.
        acceptance: measure the drafts, too.

    Returns:
        ``bits_per_byte``, ``bytes`` and the summary of each of ``drafters``.
    """
    target = models.load_target(folder / "target", dtype, device)
    drafting = drafters(folder, target, dtype, device) if acceptance else {}
    spans = cut(load_heldout())
    chosen = torch.arange(len(spans.ids))
    if limit and limit < len(chosen):
        chosen = torch.linspace(0, len(chosen) - 1, limit).long()
    nats, total = 0.0, 0
    counts: dict[str, Tensor] = {}
    for part in chosen.split(batch):
        ids, first, end = (x[part].to(device) for x in (spans.ids, spans.first, spans.end))
        window = Window(target, None, ids)
        loss = F.cross_entropy(window.logits[:, :-1].mT.float(), ids[:, 1:], reduction="none")
        place = window.positions[:, 1:]
        counted = (place >= first[:, None]) & (place < end[:, None])
        nats += loss[counted].double().sum().item()
        total += int(counted.sum())
        for name, (shape, start) in drafting.items():
            found = walk(start(ids), first, end, shape)
            counts[name] = counts.get(name, torch.zeros_like(found)) + found
    result: dict[str, Any] = {"bits_per_byte": round(nats / total / math.log(2), 4), "bytes": total}
    return result | {name: summary(count) for name, count in counts.items()}


def main() -> None:
    """Prints one JSON line for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=models.NAMES, action="append")
    parser.add_argument("--checkpoints", type=Path, default=models.CHECKPOINTS)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--limit", type=int, help="only this many windows of 512 counted bytes")
    parser.add_argument("--no-acceptance", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in args.model or models.NAMES:
        began = time.perf_counter()
        result = evaluate(
            args.checkpoints / name,
            device,
            getattr(torch, args.dtype),
            args.batch,
            args.limit,
            not args.no_acceptance,
        )
        place = {"model": name, "dtype": args.dtype, "device": device.type}
        seconds = round(time.perf_counter() - began, 1)
        print(json.dumps(place | result | {"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
