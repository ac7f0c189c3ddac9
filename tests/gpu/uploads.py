"""How often the host waits for a busy device while it makes steps from lengths that it knows: never.

    python -m tests.gpu.uploads --json uploads.json

A row says what was made, the waits, and the copies to the device, one for each list of host values. On a CPU the same
runs with a count of reads in place of the profiler (`tests/test_uploads.py`). Exit code 1 if anything waits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attn_backends import results
from attn_backends.adapters import sglang, tensorrt_llm, vllm
from attn_backends.conformance.scenes import Batch
from benchmarks.counts import Probe, count_on_cuda
from benchmarks.host import Work
from spec_metadata import PackedQuery, StepKind, idle_step
from tests.engine_batches import (
    cache_manager,
    common_metadata,
    forward_batch,
    paged_scene,
    sglang_scene,
    trtllm_metadata,
)

PROMPTS = Batch(StepKind.PREFILL, (5, 0, 3), widths=(2, 6, 4))
Makers = dict[str, tuple[int, Callable[[], object]]]


def on_device(batch: SimpleNamespace, device: torch.device, mirrors: set[str]) -> SimpleNamespace:
    """An engine's batch with its tensors on a device, but for its host mirrors."""
    fields = vars(batch).items()
    return SimpleNamespace(
        **{name: x.to(device) if isinstance(x, Tensor) and name not in mirrors else x for name, x in fields}
    )


def makers(device: torch.device) -> Makers:
    """What is made of host lengths, with how many copies to the device."""
    slots, pages = sglang_scene(StepKind.PREFILL, topk=1), paged_scene(PROMPTS)
    world, geometry = slots.world, pages.world.geometry
    steps = sglang.ForwardBatches(world.table.to(device), world.geometry)
    batch = on_device(forward_batch(slots), device, {"seq_lens_cpu"})
    common = on_device(common_metadata(pages), device, {"query_start_loc_cpu"})
    metadata, manager = on_device(trtllm_metadata(pages), device, {"seq_lens"}), cache_manager(pages)
    paging, capacity = steps._paging(batch, 3), world.capacity

    def read_trtllm() -> Any:
        return tensorrt_llm.read(metadata, manager, geometry, pages.world.capacity).prefill()

    return {
        "PackedQuery.of": (1, lambda: PackedQuery.of([3, 1, 4], device)),
        "idle_step": (1, lambda: idle_step(capacity.prefill_bucket(8), paging, capacity)),
        "SGLang's prompts": (1, lambda: steps.step(batch)),
        "vLLM's prompts": (1, lambda: vllm.read(common, geometry).prefill()),
        "TensorRT-LLM's prompts": (2, read_trtllm),
    }


def rows(device: torch.device, probe: Probe) -> Iterator[dict[str, Any]]:
    """A row for each, with what it counts."""
    for name, (num_copies, make) in makers(device).items():
        (found,) = probe([Work(lambda make=make: make)])
        counts = {"waits": found.syncs, "copies_to_device": found.to_device}
        right = counts == {"waits": 0, "copies_to_device": num_copies}
        reason = {} if right else {"reason": f"waits 0 times, for {num_copies} copies"}
        yield {"made": name, **counts, "status": "pass" if right else "fail", **reason}


def main() -> int:
    """Count; 1 if anything waits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path, metavar="FILE")
    args = parser.parse_args()
    found = []
    for row in rows(torch.device("cuda"), count_on_cuda):
        found.append(row)
        print(*row.values(), flush=True)
    command = ["python", "-m", "tests.gpu.uploads", "--json", str(args.json)]
    results.write(args.json, results.head(command, "cuda"), found)
    return int(any(row["status"] == "fail" for row in found))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
