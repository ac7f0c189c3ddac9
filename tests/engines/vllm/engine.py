"""One run of vLLM's engine: a row of what it is given, and what came out."""

from __future__ import annotations

import gc
import inspect
import os
import random
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engines.vllm import platform, recorded_graphs
from tests.engines.vllm.kinds import kind_of

_FREEZE = gc.freeze
gc.freeze = gc.unfreeze = lambda: None
"""vLLM collects garbage 15 times an engine, 0.4 s each, mostly modules: these are frozen for good, engines never."""
NUM_DRAFTED = 3
MAX_MODEL_LEN = 128  # a multiple of 128: the block table has no columns beyond it
MAX_NUM_SEQS = 4
CHUNK = 64
CAPTURE_SIZES = [4, 16, 64]  # so of 2 and 3 requests the graph of 4 runs


@dataclass(frozen=True)
class Row:
    """What an engine is built with.

    model: gqa, gqa-window, gqa-eagle, mla-1 or mla-3, which has three modules. backend: as `--attention-backend` is
    given. graphs: vLLM's cudagraph_mode. caching, chunked: prefix caching; prompts longer than a step. drafts: whether
    it drafts at all. fused: whether the draft loop is one graph, or a graph or call for each forward. is_async: False
    turns vLLM's asynchronous scheduling off, which is its default. block_size: None leaves it to vLLM. schedule: of the
    number of drafted tokens, where it depends on that of requests (first, last, drafted). is_cut: whether the device
    cuts verifies. others: more arguments of `LLM`.
    """

    model: str
    backend: str
    graphs: str = "NONE"
    caching: bool = False
    chunked: bool = True
    drafts: bool = True
    fused: bool = True
    is_async: bool = True
    block_size: int | None = 16
    schedule: tuple[tuple[int, int, int], ...] = ()
    is_cut: bool = False
    others: tuple[tuple[str, Any], ...] = ()

    @property
    def is_mla(self) -> bool:
        return self.model.startswith("mla")

    @property
    def method(self) -> str:
        """vLLM's name of the speculator."""
        return "mtp" if self.is_mla else "eagle" if self.model == "gqa-eagle" else "eagle3"

    @property
    def drafted(self) -> set[int]:
        """Tokens that may be drafted."""
        return {number for _, _, number in self.schedule} or {NUM_DRAFTED}

    @property
    def forwards(self) -> int:
        """Forwards of each draft layer in a step: one module runs for every token, of several each for its own."""
        return 1 if self.model == "mla-3" else NUM_DRAFTED

    def __str__(self) -> str:
        words = [self.model, self.backend.removeprefix("ATTN_BACKENDS_").lower(), self.graphs.lower()]
        words += ["caching"] * self.caching + ["chunked"] * self.chunked + ["steps"] * (not self.fused)
        words += ["synchronous"] * (not self.is_async) + ["scheduled"] * bool(self.schedule) + ["cut"] * self.is_cut
        return "-".join(words)


@dataclass
class Run:
    """What came out. tokens: of each prompt. drafts: (prompt, tokens known by then) -> drafted tokens. steps: of the
    engine, by kind (kinds.py). drafted: tokens that each step drafts, 0 where no request wants any. layers: of the
    target and the draft, by name. graphs: captured and replayed. attended: as of `attn_backends.engines.vllm.attended`.
    padded: steps that a larger graph ran. idle: steps without a request, for the others of data parallelism. cached:
    prompt tokens from the cache. accepted: drafted tokens that the engine counted as accepted, by position. is_async:
    whether a step is scheduled before the one ahead of it is done.
    """

    tokens: list[list[int]]
    drafts: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    steps: Counter[str] = field(default_factory=Counter)
    drafted: list[int] = field(default_factory=list)
    layers: tuple[set[str], set[str]] = field(default_factory=lambda: (set(), set()))
    graphs: dict[str, int] = field(default_factory=dict)
    attended: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    padded: int = 0
    idle: int = 0
    cached: int = 0
    accepted: list[int] = field(default_factory=list)
    is_async: bool = False


def prompts(num: int) -> list[list[int]]:
    """Pieces of Python's source, of 3 to 110 tokens; every other one begins as the others do."""
    source, rng = inspect.getsource(textwrap).encode(), random.Random(0)
    pieces = []
    for i in range(num):
        start, length = rng.randrange(len(source) - 200), rng.choice([3, 16, 33, 60, 100, 110])
        pieces.append(list(source[:80] * (i % 2) + source[start : start + length])[:110])
    return pieces


def build(row: Row, models: Path) -> Any:
    """vLLM's `LLM`, in this process."""
    from vllm import LLM

    return LLM(**arguments(row, models))


def arguments(row: Row, models: Path) -> dict[str, Any]:
    """Of `LLM`, or of vLLM's `EngineArgs`."""
    os.environ[platform.GRAPHS] = str(int(row.graphs != "NONE"))
    compilation = {"mode": 0, "cudagraph_mode": row.graphs, "cudagraph_capture_sizes": CAPTURE_SIZES}
    options: dict[str, Any] = {"compilation_config": compilation} if row.graphs != "NONE" else {"enforce_eager": True}
    if not row.is_async:
        options["async_scheduling"] = False
    if row.drafts:
        draft = str(models / f"{row.model}-draft")
        given = {"method": row.method, "model": draft, "num_speculative_tokens": NUM_DRAFTED}
        given |= {"num_speculative_tokens_per_batch_size": [*row.schedule]} if row.schedule else {}
        options["speculative_config"] = given | ({"enable_adaptive_verification": True} if row.is_cut else {})
    return {
        "model": str(models / row.model),
        "attention_backend": row.backend,
        "skip_tokenizer_init": True,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": CHUNK if row.chunked else MAX_MODEL_LEN,
        "enable_chunked_prefill": row.chunked,
        "enable_prefix_caching": row.caching,
        **({} if row.block_size is None else {"block_size": row.block_size}),
        "kv_cache_memory_bytes": 1 << 28,
        "seed": 0,
        "disable_log_stats": False,
        **{"dtype": "float32", "num_gpu_blocks_override": 48} | options | dict(row.others),
    }


def runner_of(llm: Any) -> Any:
    """The model runner of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def accepted_of(llm: Any) -> list[int]:
    """Drafted tokens that an engine's metrics count as accepted, by position."""
    found = {metric.name: metric for metric in llm.get_metrics()}
    metric = found.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    return list(metric.values) if metric else []


def _watch(llm: Any, row: Row, run: Run) -> None:
    """Keep what is drafted in every step."""
    runner = runner_of(llm)
    speculator, layers = runner.speculator, runner.vllm_config.compilation_config.static_forward_context
    propose, drafts = speculator.propose, speculator.draft_attn_layer_names
    run.layers = set(layers) - drafts, set(drafts)

    def watched(*args: Any, **kwargs: Any) -> Any:
        drafted = propose(*args, **kwargs)
        is_idle = kwargs.get("dummy_run", False)  # vLLM names all arguments of these, and not of others
        batch = kwargs["input_batch"] if is_idle else args[0]
        run.idle += is_idle
        rows = batch.num_scheduled_tokens.tolist()
        run.steps["idle" if max(rows) > MAX_MODEL_LEN else kind_of(rows, *row.drafted)] += 1
        number = kwargs.get("num_speculative_tokens")
        number = NUM_DRAFTED if number is None else number
        run.drafted.append(number)
        run.padded += batch.num_reqs_after_padding > batch.num_reqs
        if is_idle:
            return drafted
        sampled, rejected = args[5], args[6]
        for i, request in enumerate(batch.req_ids):
            if sampled[i] and number:
                known = int(batch.seq_lens[i] - rejected[i]) + 1
                run.drafts[int(request.split("-")[0]), known] = drafted[i, :number].tolist()
        return drafted

    speculator.propose = watched


class EngineFailed(Exception):
    """What an engine raised, in words: the error itself would keep the engine alive."""


def run(
    row: Row, models: Path, given: list[list[int]], num_tokens: int, begin: Callable[[], None] = lambda: None
) -> Run:
    """Greedy texts of a row. begin: called when the engine is built. Raises `EngineFailed`."""
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    _FREEZE()
    found, failure = Run([]), ""
    try:
        _run(row, models, given, num_tokens, found, begin)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    gc.collect()
    cleanup_dist_env_and_memory()
    if failure:
        raise EngineFailed(failure)
    return found


def _run(
    row: Row, models: Path, given: list[list[int]], num_tokens: int, found: Run, begin: Callable[[], None]
) -> None:
    from vllm import SamplingParams

    from attn_backends.engines.vllm import attended, forget_attended

    recorded_graphs.NUM.clear()
    llm = build(row, models)
    if row.drafts:
        _watch(llm, row, found)
    forget_attended()
    begin()
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": each} for each in given], params, use_tqdm=False)
    found.tokens = [list(output.outputs[0].token_ids) for output in outputs]
    found.cached = sum(output.num_cached_tokens or 0 for output in outputs)
    found.graphs, found.attended = dict(recorded_graphs.NUM), attended()
    found.accepted = accepted_of(llm)
    found.is_async = llm.llm_engine.engine_core.engine_core.batch_queue is not None
