"""What SGLang's own classes take to prepare the phases of a cycle, beside our planning in the same run.

    PYTHONPATH=tests/engines/sglang/gpu/stubs:$PYTHONPATH python -m tests.engines.sglang.gpu.plans --json FILE

Written against SGLang 0.5.23. Its backends and multi-step containers run on the mock model runner of its wheel's test
kit, over our request table and without a cache, on batches that carry what these classes read. Lengths and rows are
int64, as in its engine. What its graph holds of the work, as the kit runs it, is counted on the device and not timed on
the host. FlashInfer's draft extend has no graph there, and so runs eagerly; the lengths that FlashInfer reads on the
host are there already, which an engine has to fetch.

Rows `sglang` are of its classes: kernel_us and nodes of all that they launch, and graph_us, graph_kernel_us and
graph_nodes of what its graph holds of that, timed as ours is (`benchmarks.plans.timed`). Rows `loads` are of what our
plug-in does on the host before the replays of a cycle, rows `plans` of our graphs. Of FlashAttention-3 ours run on
sgl-kernel's, which has no schedule (has_schedule). `missing` says why SGLang's DeepSeek-V4 has no rows.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attn_backends import results
from attn_backends.backend import AttentionBackend
from attn_backends.engines.sglang.plans import Plans
from attn_backends.errors import BackendUnavailableError
from attn_backends.graphs import CudaGraph
from attn_backends.registry import get_backend
from attn_backends.selection.packages import is_installed
from attn_backends.selection.providers import load
from benchmarks import plans, speculation
from benchmarks.rows import Asked, Row, Size, Stage
from benchmarks.speculation import NUM_STEPS, Tables, speculative
from benchmarks.timing import CALIBRATION, CudaClock, Work, nothing, take_host_turns
from spec_metadata import BoundInputs, StepKind
from tests.counts import Probe, count_on_cuda
from tests.engines.sglang.gpu import fa3_of_vllm
from tests.engines.sglang.gpu.server import ENVIRONMENT

BACKENDS = {"flashinfer_mla": "flashinfer", "trtllm_mla": "trtllm_mla", "fa3": "fa3"}
NOT_THEIRS = {
    "backend": "dsv4",
    "reason": "SGLang's mock runner has layers of a window alone; what its backend plans for compressed entries wants "
    "its JIT kernels and DeepGEMM, which are not carried here. Rows of dsv4 are ours",
}
NO_SGLANG = {"backend": "all", "reason": "sglang is not installed: every row is ours"}
MODES = ("DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2")  # of a draft, a verify and a draft extend
HEADS, RANK, ROPE = 16, 512, 64
_KIT = "sglang.test.kits.attention_unittest"
_RUNNER = f"{_KIT}.runner_modes.speculative_draft_runner"
_INFO, _BATCH = "sglang.srt.speculative.eagle_info", "sglang.srt.model_executor.forward_batch_info"
_UNREAD_OF_VERIFY = (
    "draft_token",
    "retrieve_index",
    "retrieve_next_token",
    "retrieve_next_sibling",
    "retrieve_cum_len",
    "capture_hidden_mode",
    "seq_lens_sum",
    "seq_lens_cpu",
)
_TINY = 64  # hidden size and vocabulary of the model that is never run


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Requests of one length between two cycles. context: committed tokens of each."""

    tables: Tables
    batch_size: int
    context: int


@dataclass(frozen=True, slots=True, eq=False)
class _Backends:
    """What prepares each phase, over one table."""

    runner: Any
    draft: Any
    verify: Any
    draft_extend: Any


def works(backend: str, batch: Batch) -> dict[str, tuple[str, Work]]:
    """By phase, SGLang's class and what it does before a replay. Raises if it is not here or has no such step."""
    if not is_installed("sglang"):
        raise BackendUnavailableError("SGLang", ["sglang is not installed"])
    made = _backends(backend, batch.tables)
    batches = {"draft": _draft(batch), "verify": _verify(batch), "draft_extend": _draft_extend(batch)}
    found = {}
    for phase, given in batches.items():
        own = getattr(made, phase)
        made.runner.kv_index_translator.bind_own_plan(given)
        is_eager = backend == "flashinfer_mla" and phase == "draft_extend"
        found[phase] = (type(own).__name__, _eager(own, given) if is_eager else _captured(own, given, backend))
    return found


def _captured(own: Any, given: Any, backend: str) -> Work:
    """A replay; what was captured are the same requests."""
    own.init_forward_metadata_out_graph(given, in_capture=True)
    own.init_forward_metadata_in_graph(given)
    if backend != "flashinfer_mla":  # the others never read lengths on the host, which an engine then does not fetch
        given.seq_lens_cpu = given.seq_lens_sum = None
    view = SimpleNamespace(**vars(given), actual_forward_mode=given.forward_mode, num_padding=0)
    return Work(_always(own.init_forward_metadata_out_graph, view), lambda: own.init_forward_metadata_in_graph(view))


def _eager(own: Any, given: Any) -> Work:
    return Work(_always(own.init_forward_metadata, given), nothing)


def _always(prepare: Callable[[Any], object], given: Any) -> Callable[[], Callable[[], object]]:
    return lambda: lambda: prepare(given)


@lru_cache(maxsize=1)
def _backends(backend: str, tables: Tables) -> _Backends:
    """Built and given their static buffers once for all batch sizes."""
    capacity, device, name = tables.capacity, tables.table.device.type, BACKENDS[backend]
    context = capacity.max_kv_len
    mla = f"{_KIT}.attention_methods.mla_attention"
    mode = load(f"{_BATCH}:ForwardMode").TARGET_VERIFY
    case = load(f"{mla}:MLAAttentionCase")(
        "bench", name, mode, HEADS, capacity.page_size, (1,), (capacity.num_draft_tokens,)
    )
    sizes = {"kv_lora_rank": RANK, "qk_rope_head_dim": ROPE}
    config = load(f"{mla}:TinyMLAModelConfig")(num_heads=HEADS, hidden_size=_TINY, context_len=context, **sizes)
    runner = load(f"{mla}:MockMLAModelRunner")(
        case=case,
        model_config=config,
        dtype=torch.bfloat16,
        device=device,
        max_context_len=2 * capacity.page_size,  # of its cache, which nothing reads
        disable_cuda_graph=False,
        **sizes,
    )
    runner.max_running_requests = capacity.max_bs
    pool = load("sglang.srt.mem_cache.memory_pool:ReqToTokenPool")
    runner.req_to_token_pool = pool(
        size=capacity.max_bs, max_context_len=context, device=device, enable_memory_saver=False
    )
    runner.req_to_token_pool.req_to_token.copy_(tables.table)
    runner.init_kv_index_translator()
    settings = load(f"{_RUNNER}:EagleDraftRunnerSettings")(
        topk=1,
        speculative_num_steps=capacity.num_steps,
        speculative_num_draft_tokens=capacity.num_draft_tokens,
        capture_batch_size=capacity.max_bs,
        hidden_size=_TINY,
        vocab_size=_TINY,
        max_context_len=context,
        dtype=torch.bfloat16,
        device=device,
        atol=0.0,
        rtol=0.0,
    )
    load(f"{_RUNNER}:_configure_runner_for_eagle_draft")(runner, case, settings)
    runner.is_draft_worker = False
    verify = load("sglang.srt.layers.attention.attention_registry:ATTENTION_BACKENDS")[name](runner)
    runner.is_draft_worker = True
    factory = load("sglang.srt.speculative.draft_utils:DraftBackendFactory")(runner, 1, capacity.num_steps)
    made = _Backends(runner, factory.create_decode_backend(), verify, factory.create_draft_extend_backend())
    for own, width in (
        (made.draft, 1),
        (verify, capacity.num_draft_tokens),
        (made.draft_extend, capacity.extend_width),
    ):
        own.init_cuda_graph_state(capacity.max_bs, capacity.max_bs * width)
    return made


def _draft(batch: Batch) -> Any:
    slots = _slots(batch, batch.tables.capacity.num_steps)
    spec = load(f"{_INFO}:EagleDraftInput")()
    return _forward_batch(batch, "DECODE", batch.context, _positions(batch, 1), slots, spec)


def _verify(batch: Batch) -> Any:
    width, bs = batch.tables.capacity.num_draft_tokens, batch.batch_size
    positions = _positions(batch, width)
    spec = load(f"{_INFO}:EagleVerifyInput")(
        **dict.fromkeys(_UNREAD_OF_VERIFY),
        custom_mask=torch.ones(bs * width * (batch.context + width), dtype=torch.bool, device=positions.device),
        positions=positions,
        spec_steps=width - 1,
        topk=1,
        draft_token_num=width,
    )
    return _forward_batch(batch, "TARGET_VERIFY", batch.context, positions, _slots(batch, width), spec)


def _draft_extend(batch: Batch) -> Any:
    width, bs, device = batch.tables.capacity.extend_width, batch.batch_size, batch.tables.table.device
    widths = torch.full((bs,), width, dtype=torch.int32, device=device)
    spec = load(f"{_INFO}:EagleDraftExtendInput")(num_correct_drafts=widths - 1, num_tokens_per_req=width)
    spec.extend_seq_lens_tensor, spec.extend_seq_lens_cpu = widths, [width] * bs
    positions, slots = _positions(batch, width), _slots(batch, width)
    given = _forward_batch(batch, "DRAFT_EXTEND_V2", batch.context + width, positions, slots, spec)
    given.extend_seq_lens, given.extend_prefix_lens = widths, torch.full_like(widths, batch.context)
    given.extend_prefix_lens_cpu = [batch.context] * bs
    return given


def _forward_batch(batch: Batch, mode: str, num_tokens: int, positions: Tensor, slots: Tensor, spec: Any) -> Any:
    """num_tokens: of each request, as the mode counts its seq_lens."""
    bs = batch.batch_size
    return load(f"{_BATCH}:ForwardBatch")(
        forward_mode=getattr(load(f"{_BATCH}:ForwardMode"), mode),
        batch_size=bs,
        input_ids=None,
        req_pool_indices=batch.tables.paging(bs).rows,
        seq_lens=torch.full((bs,), num_tokens, device=positions.device),
        seq_lens_cpu=torch.full((bs,), num_tokens),
        out_cache_loc=slots,
        seq_lens_sum=bs * num_tokens,
        positions=positions,
        spec_info=spec,
    )


def _positions(batch: Batch, width: int) -> Tensor:
    """[batch_size * width] int64."""
    return (batch.context + torch.arange(width, device=batch.tables.table.device)).repeat(batch.batch_size)


def _slots(batch: Batch, num: int) -> Tensor:
    """[batch_size * num] int64: of each request's next tokens."""
    return batch.tables.table[1 : 1 + batch.batch_size, batch.context : batch.context + num].flatten().long()


def rows(asked: Asked) -> Iterator[Row]:
    """A row of each phase of each class at every size, then ours: what the plug-in does on the host, and its graphs."""
    for backend, tables, size in places(asked):
        if backend.name in BACKENDS and is_installed("sglang"):
            yield from _theirs(backend.name, tables, size, asked.stage)
    for backend, tables, size in places(asked):
        yield load_row(backend, speculation.Batch.of(tables, size.batch_size, size.context), asked.stage)
    yield from (row for row in plans.plans(asked) if isinstance(row, dict))


def places(asked: Asked) -> Iterator[tuple[type[AttentionBackend], Tables, Size]]:
    """Each backend on tables of each of its page sizes, with requests of every size."""
    for backend in asked.backends:
        for page_size in plans.PAGE_SIZES[backend.name]:
            capacity = speculative(max(asked.batch_sizes), plans.CAPACITY_CONTEXT, page_size, 1, NUM_STEPS)
            tables = Tables.of(capacity, asked.stage.device)
            yield from ((backend, tables, size) for size in asked.sizes)


def _theirs(backend: str, tables: Tables, size: Size, stage: Stage) -> Iterator[Row]:
    found = works(backend, Batch(tables, size.batch_size, size.context))
    prepared = [work for _, work in found.values()]
    *times, loop_us = take_host_turns([*prepared, CALIBRATION], stage.rounds // 10, stage.device)
    in_graph = {phase: partial(_repeated, work) for phase, (_, work) in found.items() if work.in_graph is not nothing}
    graphs = plans.timed(in_graph, stage)
    place = {"page_size": tables.capacity.page_size, "heads": HEADS, **size._asdict()}
    for (phase, (name, _)), host_us, count in zip(found.items(), times, count_on_cuda(prepared), strict=True):
        device = {"kernel_us": round(count.gpu_us, 2), "nodes": count.launches + count.copies}
        device |= {f"graph_{of}": value for of, value in graphs.get(phase, {}).items()}
        host = {"host_us": round(host_us, 2), "loop_us": round(loop_us, 1)}
        yield {"bench": "sglang", "backend": backend, "kernel": name, "phase": phase, **place, **device, **host}


def _repeated(work: Work) -> None:
    for _ in range(plans.COPIES):
        work.in_graph()


def load_row(
    backend: type[AttentionBackend], batch: speculation.Batch, stage: Stage, probe: Probe = count_on_cuda
) -> Row:
    """What our plug-in does on the host before the three replays of a cycle, whose graphs read SGLang's buffers: it
    looks up what was captured. launches, copies: on the device meanwhile.
    """
    made = backend(batch.capacity, batch.paging.geometry, stage.device)
    bound = SimpleNamespace(bound=lambda view, mask: (batch.paging, BoundInputs(batch.lens)))
    facts: Any = SimpleNamespace(capacity=batch.capacity, batches=bound, kinds=tuple(StepKind))
    plugin, bs = Plans(facts, made), len(batch.lens)
    views = [SimpleNamespace(forward_mode=SimpleNamespace(name=name), spec_info=(), batch_size=bs) for name in MODES]
    for view in views:
        plugin.capture(view, None)
    work = Work.of(lambda: [plugin.load(view) for view in views])
    host_us, loop_us = take_host_turns([work, CALIBRATION], stage.rounds // 10, stage.device)
    (count,) = probe([work])
    kernel = made.kernel_of(StepKind.TARGET_VERIFY).name
    row = {"bench": "loads", "backend": backend.name, "kernel": kernel, "phase": speculation.CYCLE}
    row |= {"page_size": batch.capacity.page_size, "batch_size": bs, "context": batch.host["max_committed"]}
    row |= {"launches": count.launches, "copies": count.copies}
    return row | {"host_us": round(host_us, 2), "loop_us": round(loop_us, 1)}


def prepare() -> None:
    """What SGLang's classes and their kit import: FlashAttention-3, FlashInfer, and not the generator of load, whose
    packages nothing here needs.
    """
    os.environ.update(ENVIRONMENT | {"SGLANG_IS_FLASHINFER_AVAILABLE": "true"})
    for name in ("sglang.benchmark", "sglang.benchmark.serving"):
        sys.modules[name] = module = ModuleType(name)
        module.__dict__["run_benchmark"] = None
    if is_installed("sglang"):
        fa3_of_vllm.install()


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path, metavar="FILE")
    args = parser.parse_args()
    prepare()
    stage = Stage(torch.device("cuda", 0), CudaGraph, CudaClock(), 200)
    asked = Asked(stage, [get_backend(name) for name in plans.PAGE_SIZES], (1, 32, 128), (4096,))
    head = results.head(["python", "-m", "tests.engines.sglang.gpu.plans", "--json", str(args.json)], "cuda")
    with results.Recording(args.json, head) as recording:
        for row in rows(asked):
            recording.add(row)
            print(*row.values(), flush=True)
        recording.finish(missing=[NOT_THEIRS, *([] if is_installed("sglang") else [NO_SGLANG])])
    return 0


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
