"""How often the host waits for a busy device while it makes steps from lengths that it knows: never.

A row says what was made, the waits, the copies to the device, one for each list of host values, and the launches, of
which SGLang's tree mask may take 32. On a CPU the same runs with a count of reads in place of the profiler
(`tests/test_uploads.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attn_backends.adapters import sglang, tensorrt_llm, vllm
from attn_backends.conformance.scenes import Batch
from benchmarks.timing import Work
from spec_metadata import PackedQuery, StepKind, idle_step
from tests.counts import Probe
from tests.engine_batches import (
    cache_manager,
    common_metadata,
    forward_batch,
    paged_scene,
    sglang_scene,
    trtllm_metadata,
)

PROMPTS = Batch(StepKind.PREFILL, (5, 0, 3), widths=(2, 6, 4))
TREE_MASK, MOST_LAUNCHES = "SGLang's tree mask of 16 nodes", 32
Makers = dict[str, tuple[int, Callable[[], object]]]


def on_device(batch: SimpleNamespace, device: torch.device, mirrors: set[str]) -> SimpleNamespace:
    """An engine's batch with its tensors on a device, but for its host mirrors."""
    fields = vars(batch).items()
    return SimpleNamespace(
        **{name: x.to(device) if isinstance(x, Tensor) and name not in mirrors else x for name, x in fields}
    )


def tree_of_16(device: torch.device) -> SimpleNamespace:
    """SGLang's verify input of 32 requests: node n's children are 2n + 1 and 2n + 2."""
    child, sibling = torch.full((2, 32, 16), -1, device=device).unbind()
    child[:, :8] = torch.arange(1, 16, 2, device=device)
    sibling[:, 1:15:2] = torch.arange(2, 16, 2, device=device)
    return SimpleNamespace(
        draft_token=torch.arange(32 * 16, device=device),
        draft_token_num=16,
        topk=2,
        spec_steps=4,
        retrieve_next_token=child,
        retrieve_next_sibling=sibling,
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
        TREE_MASK: (0, partial(sglang.tree_mask, tree_of_16(device))),
    }


def counted(device: torch.device, probe: Probe) -> Iterator[dict[str, Any]]:
    """A row for each, with what it counts."""
    for name, (num_copies, make) in makers(device).items():
        (found,) = probe([Work(lambda make=make: make)])
        right = found.syncs == 0 and found.to_device == num_copies
        right = right and (name != TREE_MASK or found.launches <= MOST_LAUNCHES)
        counts = {"waits": found.syncs, "copies_to_device": found.to_device, "launches": found.launches}
        reason = {} if right else {"reason": f"no wait, {num_copies} copies, {MOST_LAUNCHES} launches of a tree mask"}
        yield {"made": name, **counts, "status": "pass" if right else "fail", **reason}
