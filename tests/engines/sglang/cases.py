"""What engines are started with: models, shapes of drafts, our backends and page sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.sglang.engine import Run
from tests.engines.sglang.oracle import draft_of

NUM_STEPS = 3
DRAFTS = {"gqa": ("EAGLE3", "gqa_eagle3"), "mla": ("EAGLE", "mla_nextn")}
BLOCK_DRAFTS = {False: ("DFLASH", "dflash"), True: ("DSPARK", "dspark")}
LAYERS = {"gqa": 4, "mla": 3}
ADAPTIVE = {"1": [5], "2": [1], "3": [0], "4": [NUM_STEPS]}
"""Steps of a draft that adapts, by the number of requests."""

KINDS = {
    False: {"EXTEND": "prefill", "MIXED": "prefill", "DECODE": "decode", "TARGET_VERIFY": "target_verify"},
    True: {
        "EXTEND": "prefill",
        "MIXED": "prefill",
        "DECODE": "draft_decode",
        "DRAFT_EXTEND_V2": "draft_extend",
        "TARGET_VERIFY": "draft_block",
    },
}
"""What a forward mode of the target, and of the draft, is for us."""


@dataclass(frozen=True)
class Case:
    """topk: 0 for plain decoding, 1 for a chain, else a tree. of_draft: its backend, where it is another. mixes:
    prompts with running requests, as all plain cases do. adapts: the chain's length, as `ADAPTIVE` says. in_blocks:
    whether the draft is DFlash's, or DSpark's. dspark: of that, which rows SGLang verifies
    (SGLANG_RAGGED_VERIFY_MODE).
    """

    model: str
    backend: str
    topk: int
    page_size: int = 1
    of_draft: str | None = None
    mixes: bool = False
    adapts: bool = False
    in_blocks: bool = False
    dspark: str | None = None

    def __str__(self) -> str:
        shape = {0: "plain", 1: "chain"}.get(self.topk, "tree")
        shape = "adaptive" if self.adapts else "block" if self.in_blocks else shape
        shape = shape if self.dspark is None else f"dspark-{self.dspark}"
        backends = self.backend if self.of_draft is None else f"{self.backend}-{self.of_draft}"
        return f"{self.model}-{backends}-{shape}-page{self.page_size}"

    @property
    def num_nodes(self) -> int:
        """Rows of a verify."""
        return 16 if self.topk > 1 else NUM_STEPS + 1

    @property
    def chunk(self) -> int:
        """Tokens that are prefilled at once, less than the longest prompt. In a mixed batch SGLang takes those of the
        running requests off and rounds to pages, so that one page alone would never be mixed.
        """
        return 64 if self.page_size == 1 else 2 * self.page_size

    @property
    def plain(self) -> Case:
        """The same without a draft."""
        return Case(self.model, self.backend, 0, self.page_size)

    @property
    def draft(self) -> tuple[str, str]:
        """SGLang's algorithm, and the folder's name."""
        return BLOCK_DRAFTS[self.dspark is not None] if self.in_blocks else DRAFTS[self.model]

    def options(self, models: Path) -> dict[str, Any]:
        """Of sglang.Engine, and the environment that it starts in."""
        options = {
            "model_path": str(models / f"{self.model}_target"),
            "attention_backend": self.backend,
            "page_size": self.page_size,
            "chunked_prefill_size": self.chunk,
            "enable_mixed_chunk": self.mixes or not self.topk,
        }
        if not self.topk:
            return options
        algorithm, draft = self.draft
        if self.in_blocks:  # of the size that the folder says; with EAGLE SGLang does so itself on a CPU
            options |= {"disable_overlap_schedule": True}
        else:
            options |= {
                "speculative_num_steps": NUM_STEPS,
                "speculative_eagle_topk": self.topk,
                "speculative_num_draft_tokens": self.num_nodes,
            }
        if self.dspark is not None:
            options |= {"environment": {"SGLANG_RAGGED_VERIFY_MODE": self.dspark}}
            options |= {"speculative_dspark_sps_table_path": str(models / "step_times.json")}
        if self.adapts:
            options |= {"speculative_adaptive": True, "speculative_adaptive_config": str(models / "adaptive.json")}
        return options | {
            "speculative_algorithm": algorithm,
            "speculative_draft_model_path": str(models / draft),
            "speculative_draft_attention_backend": self.of_draft,
        }

    def wrong_drafts(self, run: Run, models: Path) -> list[str]:
        """Cycles whose candidates are not those of the recompute."""
        draft = draft_of(models / f"{self.model}_target", models / self.draft[1])
        wrong = []
        for cycle in run.cycles:
            steps = len(cycle["tokens"]) if self.adapts else NUM_STEPS
            expected = draft.drafted(cycle["text"], self.topk, steps, steps + 1 if self.adapts else self.num_nodes)
            if (cycle["tokens"], cycle["chosen"]) != expected:
                wrong.append(f"{bytes(cycle['text'])!r}: drafted {cycle['tokens']}, not {expected.tokens}")
        return wrong

    def is_apart(self, forward: dict[str, Any]) -> bool:
        """Whether its last requests, of one row, are a decode beside the prefill of the others."""
        return (self.mixes or not self.topk) and {*forward["lens"], 1} != {1} and forward["lens"][-1] == 1

    def kind_of(self, forward: dict[str, Any]) -> str:
        """What a forward is for us; a verify and an extend of no draft are decodes."""
        kind = KINDS[forward["draft"]][forward["forward"]]
        has_one_row = forward["rows"] == forward["bs"] and kind in ("target_verify", "draft_extend")
        return "decode" if self.adapts and has_one_row else kind

    def wrong_counts(self, run: Run) -> list[str]:
        """Forwards in which not every layer attended once by the backend asked for, in SGLang's own situation."""
        wrong = []
        for forward in run.forwards:
            if forward["forward"] == "IDLE" and not forward["attended"]:
                continue
            kinds = {self.kind_of(forward)} | ({"decode"} if self.is_apart(forward) else set())
            layers = 1 + self.in_blocks if forward["draft"] else LAYERS[self.model]
            name = (forward["draft"] and self.of_draft) or self.backend
            expected = {f"{name}/{kind}/{layer}": 1 for kind in kinds for layer in range(layers)}
            if forward["attended"] != expected:
                wrong.append(
                    f"{forward['forward']} of {'draft' if forward['draft'] else 'target'}: {forward['attended']}"
                )
        return wrong


FA3, FLASHINFER, TRTLLM = "attn_fa3", "attn_flashinfer_mla", "attn_trtllm_mla"
STEP_TIMES = {
    "bias_seconds": 1.0,
    "bs_probes": [1, 4],
    "alpha_seconds": [0.0, 0.0],
    "m_probes": [1, 16],
    "theta_seconds": [0.0, 2.0],
}
"""How long SGLang is told that a verify of so many rows takes: so long that it leaves out the least likely ones."""
SPECULATIVE = [
    Case("gqa", FA3, 1),
    Case("gqa", FA3, 4),
    Case("gqa", FA3, 1, page_size=64),
    Case("mla", FA3, 1),
    Case("mla", FA3, 4),
    Case("mla", FLASHINFER, 1),
    Case("mla", FLASHINFER, 4),
    Case("mla", FLASHINFER, 1, page_size=64, of_draft=TRTLLM),
    Case("mla", TRTLLM, 1, page_size=64),
    Case("gqa", FA3, 1, adapts=True),
    Case("mla", TRTLLM, 1, page_size=64, adapts=True),
    Case("gqa", FA3, 1, in_blocks=True),
    Case("gqa", FA3, 1, page_size=64, in_blocks=True),
    Case("mla", FLASHINFER, 1, of_draft=FA3, in_blocks=True),
    Case("gqa", FA3, 1, in_blocks=True, dspark="static"),
    Case("gqa", FA3, 1, in_blocks=True, dspark="cap-accept"),
    Case("gqa", FA3, 1, in_blocks=True, dspark="compact"),
    Case("gqa", FA3, 1, page_size=64, in_blocks=True, dspark="compact"),
    Case("mla", FLASHINFER, 1, of_draft=FA3, in_blocks=True, dspark="compact"),
]
PLAIN = list(dict.fromkeys(case.plain for case in SPECULATIVE))
