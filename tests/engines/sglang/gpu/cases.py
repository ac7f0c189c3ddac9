"""What engines are started with for correctness, and what is wrong about what they gave."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from tests.engines.sglang.cases import DRAFTS, KINDS, LAYERS, NUM_STEPS
from tests.engines.sglang.gpu.models import ADAPTIVE
from tests.engines.sglang.gpu.probe import APART

ROOT = Path(__file__).parents[4]
TIE = 0.07
"""Two best scores of bfloat16 models that are no further apart may come in either order."""
MAX_BS = 64
GRAPHS = [1, 8, 64]
"""Sizes of graphs: batches between are padded."""
MORE_GRAPHS = [1, 2, 8, 24, 64]
"""Those of drafts that adapt, and of verifies that the device divides: more lengths, and more numbers of rows."""
FEW_RUNNING = 32
"""Running requests beside which prompts are one step, on FlashAttention-3 and FlashInfer's `fa3` (`slower_mixed`)."""
BLOCKS = {"block": ("DFLASH", "dflash"), "dspark": ("DSPARK", "dspark")}


@dataclass(frozen=True)
class Case:
    """kernel: of our backends, "" for one of SGLang's. topk: 0 for plain decoding, 1 for a chain, else a tree. cache:
    SGLang's name of the type. plan_stream: a verify is prepared on another stream while the draft runs. mixes: in how
    many steps prompts and running requests of one batch are attended, 0 where there are no such batches. drafts: how,
    where it is neither a chain nor a tree: "adaptive", "block", or "dspark-" and its mode. of_draft: its backend, where
    it is another.
    """

    model: str
    backend: str
    kernel: str
    topk: int
    page_size: int = 1
    cache: str = "auto"
    plan_stream: bool = False
    mixes: int = 0
    drafts: str = ""
    of_draft: str = ""

    def __str__(self) -> str:
        shape = self.drafts or {0: "plain", 1: "chain"}.get(self.topk, "tree")
        kernel = f".{self.kernel}" if self.kernel else ""
        more = ("" if self.cache == "auto" else f"-{self.cache}") + ("-plan_stream" if self.plan_stream else "")
        more += ("", "-mixed_in_one", "-mixed")[self.mixes] + (f"-draft_on_{self.of_draft}" if self.of_draft else "")
        return f"{self.model}-{self.backend}{kernel}-{shape}-page{self.page_size}{more}"

    @property
    def plain(self) -> Case:
        """The same without a draft, and without mixed batches."""
        return replace(self, topk=0, plan_stream=False, mixes=0, drafts="", of_draft="")

    @property
    def adapts(self) -> bool:
        """Whether the chain's length is that of `ADAPTIVE`."""
        return self.drafts == "adaptive"

    @property
    def in_blocks(self) -> bool:
        """Whether the draft is DFlash's or DSpark's."""
        return self.drafts.partition("-")[0] in BLOCKS

    @property
    def is_compact(self) -> bool:
        """Whether the device divides a verify's rows among requests."""
        return self.drafts == "dspark-compact"

    @property
    def graphs(self) -> list[int]:
        """Their numbers of requests."""
        return MORE_GRAPHS if self.adapts or self.is_compact else GRAPHS

    @property
    def draft(self) -> tuple[str, str]:
        """SGLang's algorithm, and the folder's name."""
        if not self.in_blocks:
            return DRAFTS[self.model]
        algorithm, name = BLOCKS[self.drafts.partition("-")[0]]
        return algorithm, f"{self.model}_{name}"

    def options(self, models: Path) -> dict[str, Any]:
        """Of sglang.Engine."""
        options = {
            "model_path": str(models / f"{self.model}_target"),
            "attention_backend": self.backend,
            "page_size": self.page_size,
            "kv_cache_dtype": self.cache,
            "chunked_prefill_size": 512,
            "max_running_requests": FEW_RUNNING if self.mixes == 1 else MAX_BS,
            "cuda_graph_bs_decode": self.graphs,
            "max_total_tokens": 65536,
            "mem_fraction_static": 0.6,
            "enable_mixed_chunk": bool(self.mixes),
            "enable_fp32_lm_head": True,  # scores of bfloat16 are 0.125 apart, more than what `TIE` allows
        }
        if self.backend == "flashinfer":
            options["flashinfer_mla_disable_ragged"] = True  # its prompts' kernel takes no heads of 80 and 16
        return options | self._draft_options(models)

    def _draft_options(self, models: Path) -> dict[str, Any]:
        if not self.topk:
            return {}
        algorithm, draft = self.draft
        options = {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(models / draft)}
        if self.of_draft:
            options |= {"speculative_draft_attention_backend": self.of_draft}
        if self.in_blocks:  # of the size that the folder says
            times = {"speculative_dspark_sps_table_path": str(models / "step_times.json")}
            return options | (times if algorithm == "DSPARK" else {})
        if self.adapts:
            options |= {"speculative_adaptive": True, "speculative_adaptive_config": str(models / "adaptive.json")}
        return options | {
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
        if self.drafts.startswith("dspark-"):
            given["SGLANG_RAGGED_VERIFY_MODE"] = self.drafts.removeprefix("dspark-")
        return given | ({"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"} if self.plan_stream else {})

    def wrong_counts(self, seen: dict[str, Any]) -> list[str]:
        """Kinds of steps of the target or the draft in which a layer of ours did not attend once a forward of SGLang's,
        and layers that attended in no forward. Beside prompts, the last requests of one row are a decode of its own, or
        part of one step.
        """
        expected: dict[str, int] = {}
        for forward, count in seen["forwards"].items():
            for at in self._layers_of(*forward.split(" ")):
                expected[at] = expected.get(at, 0) + count
        found: dict[str, int] = {}
        for name, count in seen["attended"].items():
            backend, _, at = name.partition("/")
            at = f"attn_{backend.partition('.')[0]}/{at}"
            found[at] = found.get(at, 0) + count
        wrong = [at for at in sorted({*expected, *found}) if found.get(at) != expected.get(at)]
        return [f"{at}: {found.get(at, 0)} of {expected.get(at, 0)}" for at in wrong]

    def _layers_of(self, who: str, mode: str) -> list[str]:
        """Those that attend in a forward, as "backend/kind/layer"."""
        is_draft = who == "draft"
        kinds = [KINDS[is_draft].get(mode, mode)]
        if mode == APART:
            kinds = ["prefill", "decode"] if self.mixes == 2 else ["prefill"]
        backend = (is_draft and self.of_draft) or self.backend
        num_layers = 1 + self.in_blocks if is_draft else LAYERS[self.model]
        return [f"{backend}/{kind}/{layer}" for kind, layer in product(kinds, range(num_layers))]

    def missing(self, seen: dict[str, Any]) -> list[str]:
        """Situations that the engine was to come into, and did not."""
        found = []
        if self.mixes and not seen["forwards"].get(f"target {APART}"):
            found.append("no running request came with a prompt")
        if self.is_compact and not {"1", "2", str(NUM_STEPS + 1)} <= seen["widths"].keys():
            found.append(f"verifies had {seen['widths']} rows of a request")
        if self.adapts:
            found += [
                f"{at} (requests and drafted tokens)"
                for at in seen["drafted"]
                if not _adapted(*map(int, at.split(":")))
            ]
            steps = {int(at.split(":")[1]) for at in seen["drafted"]}
            found += [f"no draft of {step}" for step in ADAPTIVE.values() if step not in steps]
        return found


def _adapted(num_requests: int, num_steps: int) -> bool:
    """Whether SGLang drafted what `ADAPTIVE` says of the graph's size, to which it pads the number of requests."""
    padded = MORE_GRAPHS[bisect_left(MORE_GRAPHS, num_requests)]
    return num_steps == ADAPTIVE[str(padded)]


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
    Case("gqa", FA3, "triton", 0, mixes=2),
    Case("gqa", FA3, "triton", 1, mixes=2),
    Case("mla", FLASHINFER, "triton", 0, mixes=2),
    Case("mla", TRTLLM, "gluon", 0, 64, mixes=2),
    Case("gqa", FA3, "vllm_flash_attn", 1, 64, mixes=1),
    Case("mla", FLASHINFER, "auto", 0, mixes=1),
    Case("gqa", FA3, "triton", 1, drafts="block"),
    Case("gqa", FA3, "vllm_flash_attn", 1, 64, drafts="block"),
    Case("mla", FLASHINFER, "triton", 1, drafts="block", of_draft=FA3),
    Case("gqa", FA3, "triton", 1, drafts="dspark-static"),
    Case("gqa", FA3, "triton", 1, drafts="dspark-cap-accept"),
    Case("gqa", FA3, "triton", 1, drafts="dspark-compact"),
    Case("gqa", FA3, "vllm_flash_attn", 1, 64, drafts="dspark-compact"),
    Case("mla", FLASHINFER, "auto", 1, drafts="dspark-compact", of_draft=FA3),
    Case("gqa", FA3, "vllm_flash_attn", 1, 64, drafts="adaptive"),
    Case("mla", TRTLLM, "flashmla", 1, 64, drafts="adaptive"),
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
