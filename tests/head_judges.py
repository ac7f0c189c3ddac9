"""The engines' own readers as judges of `head_catalogue`: what each makes of a format, held by the engines' tests.

vLLM's runner reads no layers within `eagle_config`, and SGLang's none outside of it, so a target is given whose default
layers are the folder's. SGLang gives a draft of the target's width the target's embedding, so a folder's own is a copy
of that, as in published heads. vLLM's table of YaRN's angles ends at `factor` times the original length.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tests.eagle3_models import tiny_target
from tests.head_catalogue import FORMATS
from tests.head_formats import YARN, write
from tests.head_forward import HeadOracle
from tests.head_runs import TEXT, oracle_of

PROMPTS = [[0, *TEXT[1:11].tolist()], [0, *TEXT[21:24].tolist()], [0, *TEXT[6:33].tolist()]]
"""SGLang's driver begins each text with token 0."""
NUM_TOKENS = 10
MAX_CONTEXT = 64
TIE = 1e-4


@dataclass(frozen=True)
class Verdict:
    """What an engine makes of a format.

    words: in the table. config: keys that it is given instead of the folder's. zeros: more tensors, and their shapes.
    error: what it fails with. drops, reads: tensors that it leaves out and facts that it takes instead of the format's,
    with which its drafts are the forward's.
    """

    words: str = "equal"
    config: Mapping[str, Any] = field(default_factory=dict)
    zeros: Mapping[str, str] = field(default_factory=dict)
    error: str = ""
    drops: tuple[str, ...] = ()
    reads: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_equal(self) -> bool:
        """Whether its drafts are those of the format's forward."""
        return self.words.startswith("equal")


_EAGLE3, _EAGLE1 = ({"architectures": [f"LlamaForCausalLM{name}"]} for name in ("Eagle3", "Eagle"))
_RENAMED = "equal, under SGLang's name in `architectures`"
VLLM = dict.fromkeys(FORMATS, Verdict()) | {
    "SGLang's reader": Verdict("does not know `aux_norm_*`", error="no module or parameter named 'aux_norm_"),
    "SGLang's reader, tied": Verdict(
        "reads no `tie_word_embeddings`: the target's output head", reads={"head": "target"}
    ),
    "MLA": Verdict(
        "equal, with `model_type` `kimi_k2`",
        config={"model_type": "kimi_k2", "rope_scaling": YARN | {"original_max_position_embeddings": 32}},
    ),
    "SafeAILab EAGLE-1/2": Verdict("leaves out `fc.bias`", drops=("fc.bias",)),
    "SafeAILab EAGLE-1/2, Qwen2": Verdict("equal, with `model_type` `llama`", config={"model_type": "llama"}),
}
SGLANG = dict.fromkeys(FORMATS, Verdict()) | {
    "SafeAILab EAGLE-3": Verdict(_RENAMED, config=_EAGLE3),
    "SafeAILab EAGLE-3, wider target": Verdict(_RENAMED, config=_EAGLE3),
    "vLLM's reader": Verdict("leaves out biases and `norm_before_residual`", config=_EAGLE3),
    "speculators": Verdict("not read", error="Should have a `model_type` key in its config.json"),
    "speculators, Qwen3's layer": Verdict("not read", error="Should have a `model_type` key in its config.json"),
    "SafeAILab EAGLE-1/2": Verdict(_RENAMED, config=_EAGLE1),
    "SafeAILab EAGLE-1/2, Qwen2": Verdict(
        "equal, under SGLang's name and with an `fc.bias` of zeros",
        config={"architectures": ["Qwen2ForCausalLMEagle"]},
        zeros={"fc.bias": "H"},
    ),
}


@dataclass(frozen=True)
class Judged:
    """What an engine is given, and what it should draft. oracle: by the format. reading: as the engine reads it."""

    target: Path
    head: Path
    eagle1: bool
    is_mla: bool
    oracle: HeadOracle
    reading: HeadOracle


def given(name: str, verdict: Verdict, folder: Path) -> Judged:
    """Writes a head and a target for it."""
    form = FORMATS[name]
    config, facts, layers = {**form.config, **verdict.config}, dict(form.facts), form.num_layers
    if "taps" in facts:
        layers, facts["taps"] = 7, (1, 2, 3)
        if table := config.get("eagle_config"):
            config["eagle_config"] = table | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
        elif "eagle_aux_hidden_state_layer_ids" in config:
            config["eagle_aux_hidden_state_layer_ids"] = [2, 3, 4]
    facts |= {"rope": verdict.config["rope_scaling"]} if "rope_scaling" in verdict.config else {}
    form = replace(form, config=config, facts=facts, num_layers=layers)
    target = copy.deepcopy(tiny_target(layers))
    target.config.max_position_embeddings = 2 * MAX_CONTEXT
    target.save_pretrained(folder / "target")
    table = target.model.embed_tokens.weight.detach()
    copies = [each for each, sizes in form.tensors.items() if "embed" in each and form.shape(sizes) == table.shape]
    zeros = {each: torch.zeros(form.shape(sizes)) for each, sizes in verdict.zeros.items()}
    tensors = write(form, folder / "head", given=dict.fromkeys(copies, table.clone()) | zeros)
    kept = {each: tensor for each, tensor in tensors.items() if each not in verdict.drops}
    reading = replace(form, facts=facts | dict(verdict.reads))
    kind = bool(facts.get("eagle")), "mla" in facts
    return Judged(folder / "target", folder / "head", *kind, oracle_of(form, tensors), oracle_of(reading, kept))


@torch.no_grad()
def wrong_drafts(oracle: HeadOracle, text: list[int], drafted: list[int]) -> list[str]:
    """Which tokens drafted behind a text are not the oracle's best, which is better by more than a tie's."""
    scores = oracle.log_probs(text, drafted[:-1], oracle.features(text))
    return [
        f"draft {i} behind {len(text)} tokens: {token}, not {row.argmax()}"
        for i, (token, row) in enumerate(zip(drafted, scores, strict=True))
        if row.max() - row[token] > TIE
    ]
