"""What engines are started with for correctness, and what is wrong about what they gave."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from tests.engines.sglang.cases import DRAFTS, KINDS, LAYERS, NUM_STEPS
from tests.engines.sglang.gpu.probe import APART

ROOT = Path(__file__).parents[4]
TIE = 0.07
"""Two best scores of bfloat16 models that are no further apart may come in either order."""
MAX_BS = 64
GRAPHS = [1, 8, 64]
"""Sizes of graphs: batches between are padded."""


@dataclass(frozen=True)
class Case:
    """kernel: of our backends, "" for one of SGLang's. topk: 0 for plain decoding, 1 for a chain, else a tree. cache:
    SGLang's name of the type. plan_stream: a verify is prepared on another stream while the draft runs. mixes: prompts
    with running requests.
    """

    model: str
    backend: str
    kernel: str
    topk: int
    page_size: int = 1
    cache: str = "auto"
    plan_stream: bool = False
    mixes: bool = False

    def __str__(self) -> str:
        shape = {0: "plain", 1: "chain"}.get(self.topk, "tree")
        kernel = f".{self.kernel}" if self.kernel else ""
        more = ("" if self.cache == "auto" else f"-{self.cache}") + ("-plan_stream" if self.plan_stream else "")
        more += "-mixed" if self.mixes else ""
        return f"{self.model}-{self.backend}{kernel}-{shape}-page{self.page_size}{more}"

    @property
    def plain(self) -> Case:
        """The same without a draft, and without mixed batches."""
        return replace(self, topk=0, plan_stream=False, mixes=False)

    def options(self, models: Path) -> dict[str, Any]:
        """Of sglang.Engine."""
        options = {
            "model_path": str(models / f"{self.model}_target"),
            "attention_backend": self.backend,
            "page_size": self.page_size,
            "kv_cache_dtype": self.cache,
            "chunked_prefill_size": 512,
            "max_running_requests": MAX_BS,
            "cuda_graph_bs_decode": GRAPHS,
            "max_total_tokens": 65536,
            "mem_fraction_static": 0.6,
            "enable_mixed_chunk": self.mixes,
            "enable_fp32_lm_head": True,  # scores of bfloat16 are 0.125 apart, more than what `TIE` allows
        }
        if self.backend == "flashinfer":
            options["flashinfer_mla_disable_ragged"] = True  # its prompts' kernel takes no heads of 80 and 16
        if not self.topk:
            return options
        algorithm, draft = DRAFTS[self.model]
        return options | {
            "speculative_algorithm": algorithm,
            "speculative_draft_model_path": str(models / draft),
            "speculative_num_steps": NUM_STEPS,
            "speculative_eagle_topk": self.topk,
            "speculative_num_draft_tokens": 16 if self.topk > 1 else NUM_STEPS + 1,
        }

    @property
    def environment(self) -> dict[str, str]:
        """Of its processes."""
        given = {
            "SGLANG_PLUGINS": "attn_backends,probe",
            "TORCHDYNAMO_DISABLE": "1",
        }  # compiles small helpers of SGLang's
        if self.kernel:
            given["ATTN_BACKENDS_KERNEL"] = self.kernel
        if self.backend == "flashinfer":
            given["SGLANG_IS_FLASHINFER_AVAILABLE"] = "true"
        return given | ({"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"} if self.plan_stream else {})

    def wrong_counts(self, seen: dict[str, Any]) -> list[str]:
        """Kinds of steps of the target or the draft in which a layer of ours did not attend once a forward of SGLang's,
        and layers that attended in no forward. Beside prompts, the last requests of one row are a decode of its own.
        """
        expected: dict[str, int] = {}
        for forward, count in seen["forwards"].items():
            who, mode = forward.split(" ")
            kinds = [KINDS[who == "draft"].get(mode, mode)]
            if mode == APART:
                kinds = ["prefill", "decode"] if self.mixes else ["prefill"]
            for kind, layer in product(kinds, range(1 if who == "draft" else LAYERS[self.model])):
                at = f"{kind}/{layer}"
                expected[at] = expected.get(at, 0) + count
        found: dict[str, int] = {}
        for name, count in seen["attended"].items():
            backend, _, at = name.partition("/")
            if f"attn_{backend.partition('.')[0]}" == self.backend:
                found[at] = found.get(at, 0) + count
        every = sorted({*expected, *found})
        wrong = [
            f"{at}: {found.get(at, 0)} of {expected.get(at, 0)}" for at in every if found.get(at) != expected.get(at)
        ]
        alone = self.mixes and not seen["forwards"].get(f"target {APART}")
        return wrong + (["no running request came with a prompt"] if alone else [])


FA3, FLASHINFER, TRTLLM = "attn_fa3", "attn_flashinfer_mla", "attn_trtllm_mla"
FP8 = "fp8_e4m3"
OURS = [
    Case("gqa", FA3, "triton", 1),
    Case("mla", FLASHINFER, "flashinfer_fa3", 1),
    Case("mla", FLASHINFER, "flashinfer_fa3", 4),
    Case("mla", FLASHINFER, "flashinfer_fa3", 4, plan_stream=True),
    Case("mla", FLASHINFER, "flashinfer_fa2", 1, 64, FP8),
    Case("gqa", FA3, "triton", 4),
    Case("gqa", FA3, "triton", 4, plan_stream=True),
    Case("gqa", FA3, "triton", 1, 64, FP8),
    Case("gqa", FA3, "vllm_flash_attn", 1, 64),
    Case("gqa", FA3, "vllm_flash_attn", 4),
    Case("mla", FA3, "triton", 4),
    Case("mla", FA3, "vllm_flash_attn", 4),
    Case("mla", FLASHINFER, "gluon", 4),
    Case("mla", FLASHINFER, "triton", 4, cache=FP8),
    Case("mla", TRTLLM, "flashmla", 1, 64),
    Case("mla", TRTLLM, "gluon", 1, 64),
    Case("gqa", FA3, "triton", 0, mixes=True),
    Case("gqa", FA3, "triton", 1, mixes=True),
    Case("mla", FLASHINFER, "triton", 0, mixes=True),
    Case("mla", TRTLLM, "gluon", 0, 64, mixes=True),
]
"""Those that compile or draw samples start first. Mixed ones without a draft are held to plain decoding, too."""
SGLANG = [
    Case("gqa", "triton", "", 1),
    Case("gqa", "triton", "", 4),
    Case("gqa", "triton", "", 1, 64, FP8),
    Case("mla", "flashinfer", "", 1),
]
"""SGLang's own: their counts are to be wrong; their differences from plain decoding and acceptance are told."""


def prompts() -> list[list[int]]:
    """64 of bytes, of 3 to 600 tokens: what the models were trained on is Python. Every fourth begins like the one
    before it.
    """
    files = sorted((ROOT / "spec_metadata").rglob("*.py"))
    text = "".join(path.read_text() for path in files).encode("ascii", "ignore")
    found: list[list[int]] = []
    for i in range(MAX_BS):
        length = 3 + (i * 37) % 198 + (400 if i % 16 == 5 else 0)
        start = text.index(b"\n", i * (len(text) // MAX_BS - 16)) + 1
        prefix = found[-1][:150] if i % 4 == 3 else [0]
        found.append([*prefix, *text[start : start + length]])
    return found


def lengths() -> list[int]:
    """Tokens that each is to generate: a batch shrinks from 64 to 1."""
    return [16 + (i * 29) % 49 for i in range(MAX_BS)]


def differences(found: list[list[int]], plain: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first difference of each request from plain decoding, and how far the two best scores were apart there."""
    different = []
    for i, (ids, expected) in enumerate(zip(found, plain, strict=True)):
        first = next((at for at, pair in enumerate(zip(ids, expected["ids"], strict=True)) if pair[0] != pair[1]), None)
        if first is not None:
            different.append({"request": i, "at": first, "gap": expected["gaps"][first]})
    return different
