"""What engines are built with for correctness, and what is wrong about what they gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from spec_metadata import StepKind
from tests.engines.vllm.given import BUG, COSTS, SINKS
from tests.engines.vllm.kinds import draft_steps, wrong_layers

ROOT = Path(__file__).parents[4]
TIES = {"bfloat16": 0.25, "float32": 1e-3}
"""Two best scores that are no further apart may come in either order: four steps of bfloat16 between 8 and 16, where
the scores are, and a thousand of float32.
"""
TIE_OF_8_BITS = 0.5
"""The same with an 8-bit cache, whose steps are a sixteenth of a value. The last bit of a dtype decides how a value
rounds. Of 600 values one step further, each alone, the median moved two best scores by 0.011, the worst by 0.36.
"""
ALIKE = {"bfloat16": 0.9, "float32": 0.999}
"""The part of the drafted tokens that must be those on attention in float64: of drafts no scores are kept, so that a
tie is not told from a mistake.
"""
NUM_DRAFTED, MAX_MODEL_LEN, MAX_NUM_SEQS, NUM_PROMPTS = 3, 384, 16, 64
_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True, "async_scheduling": False},
    "full": {"compilation_config": _GRAPHS, "async_scheduling": False},
    "pieces": {
        "compilation_config": _GRAPHS | {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"},
        "async_scheduling": False,
    },
    "async": {"compilation_config": _GRAPHS, "async_scheduling": True},
}
"""Graphs of vLLM's; pieces are torch.compile's, and full graphs run beside them."""
DEFAULT = "default"
"""The mode of an engine that is given none: pieces with async scheduling, and the core in a process of its own."""


DRAFTING: dict[str, dict[str, Any]] = {
    "": {},
    "by-batch": {"num_speculative_tokens_per_batch_size": [(1, 4, 3), (5, 8, 2), (9, 12, 1), (13, 16, 0)]},
    "cut": {"enable_adaptive_verification": True},
}
"""How many tokens are drafted, and who says which are verified: the number of requests, or the device."""
METHODS = {"gqa-eagle": "eagle", "gqa-dflash": "dflash", "gqa-dspark": "dspark", "mla-1": "mtp", "mla-3": "mtp"}
"""vLLM's names of the speculators of models, of others eagle3."""
TARGETS = {"gqa-eagle": "gqa", "gqa-dflash": "gqa", "gqa-dspark": "gqa", "mla-3": "mla-1"}
"""Models with the same target, which one plain decoding serves."""


@dataclass(frozen=True)
class Case:
    """backend: as `--attention-backend` is given. kernel: of our backends, "" for one of vLLM's. mode: of `MODES`, or
    `DEFAULT`. drafts: False for plain decoding. cache: vLLM's name of the type. ranks: of tensor parallelism, a GPU
    each. drafting: of `DRAFTING`. bug: one that is planted, of `BUGS`.
    """

    model: str
    backend: str
    kernel: str = ""
    mode: str = "eager"
    dtype: str = "bfloat16"
    cache: str = "auto"
    drafts: bool = True
    ranks: int = 1
    drafting: str = ""
    bug: str = ""

    def __str__(self) -> str:
        words = [self.model, self.backend.removeprefix("ATTN_BACKENDS_").lower(), self.kernel, self.mode]
        words += ["float32"] * (self.dtype == "float32") + [self.cache] * (self.cache != "auto")
        words += [f"{self.ranks}-ranks"] * (self.ranks > 1) + [self.drafting, self.bug.replace(" ", "_")]
        return "-".join(filter(None, [*words, "" if self.drafts else "plain"]))

    @property
    def is_ours(self) -> bool:
        return self.backend.startswith("ATTN_BACKENDS_")

    @property
    def plain(self) -> Case:
        """What its tokens are held to: plain decoding on vLLM's Triton, or on attention in float64 of a model in
        float32 or with sinks, and of MLA, since none of vLLM's backends takes the small heads of the trained model; of
        8-bit caches on the same backend.
        """
        model = TARGETS.get(self.model, self.model)
        same = replace(self, mode="eager", drafts=False, model=model, ranks=1, drafting="", bug="")
        if self.cache != "auto":
            return same
        is_exact = self.is_mla or self.dtype == "float32" or self.model == "gqa-sinks"
        return replace(same, backend=self.exact.backend if is_exact else "TRITON_ATTN", kernel="")

    @property
    def exact(self) -> Case:
        """What its drafts are held to: the same drafts on attention in float64, eagerly."""
        backend = PLAIN_MLA if self.is_mla else PLAIN
        return replace(self, backend=backend, kernel="", mode="eager", ranks=1, drafting="", bug="")

    @property
    def has_exact(self) -> bool:
        """Whether its drafts are compared: attention in float64 knows no cache of 8 bits."""
        return self.is_ours and self.drafts and self.cache == "auto"

    @property
    def accepts_as_exact(self) -> bool:
        """Whether as many of its drafts are to be accepted as on attention in float64."""
        return self.has_exact and self.dtype == "float32" and not self.drafting

    @property
    def is_mla(self) -> bool:
        return self.model.startswith("mla")

    @property
    def method(self) -> str:
        """As of `METHODS`."""
        return METHODS.get(self.model, "eagle3")

    @property
    def is_block(self) -> bool:
        """Whether all tokens are drafted in one forward, and their rows see one another."""
        return self.method in ("dflash", "dspark")

    @property
    def tie(self) -> float:
        """As of `TIES` and `TIE_OF_8_BITS`."""
        return TIES[self.dtype] if self.cache == "auto" else TIE_OF_8_BITS

    @property
    def forwards(self) -> int:
        """Of each draft layer in a step: one module runs for every token, of several each for its own."""
        return 1 if self.model == "mla-3" else NUM_DRAFTED

    def options(self, models: Path) -> dict[str, Any]:
        """Of vllm.LLM."""
        options = (MODES["pieces"] | {"async_scheduling": True} if self.mode == DEFAULT else MODES[self.mode]) | {
            "model": str(models / self.model),
            "attention_backend": self.backend,
            "dtype": self.dtype,
            "kv_cache_dtype": self.cache,
            "block_size": 64 if self.is_mla else 16,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": 256,
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": 1 << 28,
        }
        if self.drafts:
            draft = str(models / f"{self.model}-draft")
            drafts = {"method": self.method, "model": draft, "num_speculative_tokens": NUM_DRAFTED}
            drafts |= {"attention_backend": self.backend} if self.is_block else {}
            options["speculative_config"] = drafts | DRAFTING[self.drafting]
        if self.ranks > 1:
            options |= {"tensor_parallel_size": self.ranks, "distributed_executor_backend": "mp"}
            options["disable_custom_all_reduce"] = True  # NCCL's
        return options

    def forwards_of(self, seen: dict[str, Any]) -> dict[str, Mapping[str, int]]:
        """Of each layer of an engine, by kind of step."""
        looped = draft_steps(seen["steps"], seen["looped"] if self.forwards > 1 else 0)
        drafted = {"draft_block": seen["drafting"]} if self.is_block else looped
        return {name: drafted if name in seen["draft_layers"] else seen["steps"] for name in seen["layers"]}

    @property
    def environment(self) -> dict[str, str]:
        """Of its process."""
        given = {"ATTN_BACKENDS_COUNT": "1"} | ({"ATTN_BACKENDS_KERNEL": self.kernel} if self.kernel else {})
        given |= {COSTS: "1"} if self.drafting == "cut" else {}
        given |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} if self.mode == DEFAULT else {}
        given |= {BUG: self.bug} if self.bug else {}
        return given | ({SINKS: "1"} if self.model == "gqa-sinks" else {})

    def wrong_counts(self, seen: dict[str, Any]) -> list[str]:
        """Layers of target and draft in which our backend did not attend once a forward of the engine, kind by kind, by
        kernels other than the case's, without graphs that were to be replayed, or with rows that the device divided
        where it was not to, or not where it was to.
        """
        wanted = self.forwards_of(seen)
        if self.drafting == "cut":  # the host's lengths do not tell a verify from a mixed batch
            wanted = {name: {" or ".join(map(str, StepKind)): sum(kinds.values())} for name, kinds in wanted.items()}
        wrong = wrong_layers(seen["attended"], wanted)
        blocks = seen["draft_layers"] if self.is_block else []
        verified = {
            kinds.get("draft_block" if name in blocks else "target_verify", {}).get("kernel", "none")
            for name, kinds in seen["attended"].items()
        }
        wrong += [] if verified == {self.kernel} else [f"verified by {', '.join(sorted(verified))}"]
        wrong += [f"rank {rank} counted otherwise" for rank in seen["otherwise"]]
        wrong += [] if seen["ranks"] == self.ranks else [f"{seen['ranks']} ranks"]
        wrong += [] if bool(seen["cut"]) == (self.drafting == "cut") else [f"{seen['cut']} batches were cut"]
        return wrong + ([] if bool(seen["replays"]) == (self.mode != "eager") else [f"{seen['replays']} replays"])


PLAIN, PLAIN_MLA = "TESTS_PLAIN", "TESTS_PLAIN_MLA"
FA3, FA3_MLA = "ATTN_BACKENDS_FA3", "ATTN_BACKENDS_FA3_MLA"
TRTLLM, FLASHINFER = "ATTN_BACKENDS_TRTLLM_MLA", "ATTN_BACKENDS_FLASHINFER_MLA"
IN_EVERY_MODE = [("gqa", FA3, "vllm_flash_attn"), ("mla-1", TRTLLM, "flashmla"), ("mla-1", FA3_MLA, "vllm_flash_attn")]
ON_OURS = [("gqa", FA3, "triton"), ("mla-1", TRTLLM, "triton"), ("mla-1", FLASHINFER, "triton")]
SPECULATIVE = [
    *(Case(*each, mode) for each, mode in product(IN_EVERY_MODE, MODES)),
    *(Case(*each, mode) for each, mode in product(ON_OURS, ("full", "async"))),
    Case("gqa", FA3, "vllm_flash_attn", DEFAULT),
    Case("mla-1", TRTLLM, "flashmla", DEFAULT),
    Case("mla-1", TRTLLM, "gluon", "async"),
    Case("mla-1", FLASHINFER, "gluon", "full"),
    Case("mla-3", TRTLLM, "flashmla", "full"),
    Case("mla-3", FLASHINFER, "triton", "async"),
    Case("gqa", FA3, "triton", "full", dtype="float32"),
    Case("mla-1", TRTLLM, "triton", "full", dtype="float32"),
    Case("gqa", FA3, "triton", "full", cache="fp8"),
    Case("gqa", FA3, "triton", "full", dtype="float32", cache="fp8"),
    Case("mla-1", TRTLLM, "triton", "full", cache="fp8"),
    Case("gqa", FA3, "vllm_flash_attn", "full", drafting="by-batch"),
    Case("mla-1", TRTLLM, "flashmla", "async", drafting="by-batch"),
    Case("gqa", FA3, "vllm_flash_attn", "async", drafting="cut"),
    Case("mla-1", FLASHINFER, "triton", "pieces", drafting="cut"),
    Case("mla-1", FA3_MLA, "vllm_flash_attn", "full", drafting="cut"),
    Case("gqa", FA3, "triton", "full", dtype="float32", drafting="by-batch"),
    Case("gqa", FA3, "triton", "full", dtype="float32", drafting="cut"),
    Case("gqa-dflash", FA3, "vllm_flash_attn", "full"),
    Case("gqa-dflash", FA3, "vllm_flash_attn", "async"),
    Case("gqa-dflash", FA3, "triton", "full", dtype="float32"),
    Case("gqa-dspark", FA3, "vllm_flash_attn", "pieces"),
    Case("gqa-dspark", FA3, "triton", "full", dtype="float32"),
    Case("gqa-dspark", FA3, "vllm_flash_attn", "async", drafting="cut"),
    Case("gqa-dspark", FA3, "triton", "full", dtype="float32", drafting="cut"),
    Case("gqa-eagle", FA3, "vllm_flash_attn", "full"),
    Case("gqa-eagle", FA3, "vllm_flash_attn", "async"),
    Case("gqa-eagle", FA3, "triton", "full", dtype="float32"),
    Case("gqa-sinks", FA3, "vllm_flash_attn", "full"),
    Case("gqa-sinks", FA3, "vllm_flash_attn", "pieces"),
    Case("gqa-sinks", FA3, "triton", "async", dtype="float32"),
]
IN_PARALLEL = [
    Case("gqa", FA3, "vllm_flash_attn", "async", ranks=2),
    Case("mla-1", TRTLLM, "flashmla", "async", ranks=2),
]
"""Of tensor parallelism, where the machine has a GPU for each rank."""
OTHERS = [Case("gqa", "TRITON_ATTN", mode="full"), Case("gqa", "FLASH_ATTN", mode="full"), Case("mla-1", PLAIN_MLA)]
"""None of ours: their counts are to be wrong. What they accept, and where they differ, stands beside ours."""
FLASHINFER_KERNELS = [
    Case("mla-1", FLASHINFER, "flashinfer_fa3", "full"),
    Case("mla-1", FLASHINFER, "flashinfer_fa2", "full"),
    Case("mla-1", FLASHINFER, "flashinfer_fa3", "async"),
    Case("mla-1", FLASHINFER, "flashinfer_fa3", "async", drafting="cut"),
]
"""FlashInfer compiles them on the machine, in about 70 s: run when asked for by name."""
BUGS = [
    "draft length one short", "all drafts on forward 0", "no refresh", "no replay", "stale block table",
    "slots of padded rows",
]  # fmt: skip
"""As of `defects.py`. vLLM stores latents itself, so that the last is none of an MLA model."""
WITH_BUGS = [Case("gqa", FA3, "triton", "full", dtype="float32", bug=bug) for bug in BUGS]
WITH_BUGS += [Case("mla-1", TRTLLM, "triton", "full", dtype="float32", bug=bug) for bug in BUGS[:-1]]


def prompts() -> list[list[int]]:
    """64 of bytes, of 3 to 380 tokens: what the models were trained on is Python. Every fourth begins like the one
    before it, and every 16th leaves no room for what it is asked.
    """
    files = sorted((ROOT / "spec_metadata").rglob("*.py"))
    text = "".join(path.read_text() for path in files).encode("ascii", "ignore")
    found: list[list[int]] = []
    for i in range(NUM_PROMPTS):
        length = 360 if i % 16 == 5 else 3 + (i * 37) % 198
        start = text.index(b"\n", i * (len(text) // NUM_PROMPTS - 16)) + 1
        prefix = found[-1][:100] if i % 4 == 3 else []
        found.append([*prefix, *text[start : start + length]][:380])
    return found


def lengths() -> list[int]:
    """Tokens that each is to generate."""
    return [24 + (i * 29) % 73 for i in range(NUM_PROMPTS)]


def as_many(found: list[int], wanted: list[int]) -> bool:
    """Whether accepted drafts are as many by position, but for one in a hundred or two."""
    return all(abs(mine - other) <= max(2, other // 100) for mine, other in zip(found, wanted, strict=True))


def differences(found: list[list[int]], plain: dict[str, Any]) -> list[tuple[int, int, float]]:
    """Of each request that differs from plain decoding: its number, the first token that does, and how far the two best
    scores were apart there.
    """
    different = []
    for i, (ids, wanted, gaps) in enumerate(zip(found, plain["ids"], plain["gaps"], strict=True)):
        assert len(ids) == len(wanted), "a text that is longer than it was asked for, or shorter"
        if ids != wanted:
            first = next(at for at, pair in enumerate(zip(ids, wanted, strict=True)) if pair[0] != pair[1])
            different.append((i, first, gaps[first]))
    return different


def alike(found: dict[str, Any], exact: dict[str, Any]) -> tuple[int, int]:
    """Drafted tokens that are those of another engine, and how many were compared: where both knew the same tokens, of
    each draft up to the first that differs, and none that reaches the end of the context.
    """
    given, wanted = prompts(), {(request, known): drafts for request, known, drafts in exact["drafts"]}
    ends = [
        min(len(prompt) + _num_equal(*ids), MAX_MODEL_LEN - NUM_DRAFTED - 1)
        for prompt, *ids in zip(given, found["ids"], exact["ids"], strict=False)
    ]
    equal = compared = 0
    for request, known, drafts in found["drafts"]:
        other = wanted.get((request, known), [])
        if known <= ends[request] and other:
            same = _num_equal(drafts, other)
            equal += same
            compared += min(same + 1, len(drafts), len(other))
    return equal, compared


def _num_equal(one: list[int], other: list[int]) -> int:
    """Tokens before the first that differs."""
    pairs = zip(one, other, strict=False)
    return next((i for i, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(one), len(other)))
