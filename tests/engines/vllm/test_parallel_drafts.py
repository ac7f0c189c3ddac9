"""Folders of published P-EAGLE heads in vLLM 0.33's own engine (its model runner V1, attention of these tests): what it
drafts in parallel is what the independent forward gives that our worker's drafts equal, too.
"""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.eagle3_models import tiny_target
from tests.engines.vllm import stand_ins
from tests.engines.vllm.engine import NUM_DRAFTED, Row, build, runner_of
from tests.head_formats import write
from tests.head_judges import MAX_CONTEXT, NUM_TOKENS, PROMPTS, TIE
from tests.parallel_laws import oracle_of
from tests.peagle_formats import PEAGLES, PEagleOracle

TAPS = (1, 2, 3)
"""Which vLLM's runner reads, outside of `eagle_config`."""
NAMED = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS]}


@dataclass(frozen=True)
class Given:
    """What vLLM is given. config: keys in the place of the folder's. facts: that follow. drops: tensors left out, by
    what they begin with; of a prefix that ends in a dot, the prefix alone.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    drops: str = ""

    def tensors(self, named: Mapping[str, str]) -> dict[str, str]:
        """Those that it is given."""
        if self.drops.endswith("."):
            return {name.removeprefix(self.drops): sizes for name, sizes in named.items()}
        return {name: sizes for name, sizes in named.items() if not (self.drops and name.startswith(self.drops))}


READ = {
    "speculators P-EAGLE": Given(
        NAMED | {"architectures": ["PEagleSpeculator"], "fc_norm": False}, {"fc_norms": []}, "fc_norm"
    ),
    "SpecForge P-EAGLE": Given(NAMED | {"hidden_act": "silu"}, {"act": "silu"}),
    "NeMo P-EAGLE": Given(NAMED, drops="model."),
    "vLLM's reader, P-EAGLE": Given(NAMED | {"layer_types": None, "sliding_window": None}, {"windows": (None, None)}),
}
"""What of each is changed. vLLM does not pass on speculators' `fc_norm`, knows SiLU alone, refuses a draft with windows
in some layers, and takes neither the architectures that SpecForge and NeMo write nor NeMo's `model.`.
"""


@pytest.mark.full
@pytest.mark.parametrize("name", PEAGLES)
def test_drafts_are_those_of_an_independent_forward(name: str, tmp_path: Path) -> None:
    given, form = READ[name], PEAGLES[name]
    config, facts = {**form.config, **given.config}, {**form.facts, **given.facts, "taps": TAPS}
    if "eagle_config" in config:
        config["eagle_config"] = config["eagle_config"] | {"eagle_aux_hidden_state_layer_ids": list(TAPS)}
    form = replace(form, config=config, facts=facts, tensors=given.tensors(form.tensors), num_layers=7)
    target = copy.deepcopy(tiny_target(7))
    target.config.max_position_embeddings = 2 * MAX_CONTEXT
    target.save_pretrained(tmp_path / "target")
    oracle = oracle_of(form, write(form, tmp_path / "head"))
    texts, drafts = drafted(tmp_path)
    assert len(drafts) > 20
    assert [each for (i, known), found in drafts for each in wrong(oracle, texts[i][:known], found)] == []


@torch.no_grad()
def wrong(oracle: PEagleOracle, text: list[int], found: list[int]) -> list[str]:
    """Which tokens drafted after a text are not the forward's best."""
    scores = oracle.drafted_scores(text, oracle.features(text), NUM_DRAFTED)
    ids = {int(i + offset): i for i, offset in enumerate(oracle.tensors["d2t"].tolist())}
    return [
        f"draft {i} after {len(text)} tokens: {token}"
        for i, (token, row) in enumerate(zip(found, scores, strict=True))
        if row.max() - row[ids[token]] > TIE
    ]


Drafts = list[tuple[tuple[int, int], list[int]]]
"""(prompt, tokens known by then), and the tokens that were drafted after them."""


def drafted(folder: Path) -> tuple[list[list[int]], Drafts]:
    """Texts, and what was drafted. Behind the last token of a text nothing counts."""
    from triton.runtime import interpreter
    from vllm.distributed import cleanup_dist_env_and_memory

    stand_ins.install_sampling()
    convert = interpreter._implicit_cvt  # it makes a truth value a number of 32 bits, which it then refuses
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_implicit_cvt", lambda arg: convert(int(arg) if type(arg) is bool else arg))
        texts, drafts = _run(folder)
    gc.collect()
    cleanup_dist_env_and_memory()
    return texts, [(place, found) for place, found in drafts if place[1] <= len(texts[place[0]])]


def _run(folder: Path) -> tuple[list[list[int]], Drafts]:
    from vllm import SamplingParams

    asked = {"method": "eagle3", "model": str(folder / "head"), "num_speculative_tokens": NUM_DRAFTED}
    asked |= {"parallel_drafting": True, "attention_backend": "TESTS_PLAIN"}
    others = (("speculative_config", asked), ("num_gpu_blocks_override", 96))
    llm, drafts = build(Row("target", "TESTS_PLAIN", is_async=False, others=others), folder), Drafts()
    runner = runner_of(llm)
    propose = runner.drafter.propose

    def watched(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(propose).bind(*args, **kwargs).arguments
        ends = given["common_attn_metadata"].query_start_loc[1:] - 1 - given["num_rejected_tokens_gpu"]
        known = (given["target_positions"][ends.long()] + 2).tolist()
        made = propose(*args, **kwargs)
        places = zip((int(each.split("-")[0]) for each in runner.input_batch.req_ids), known, strict=True)
        drafts.extend(zip(places, made.tolist(), strict=True))
        return made

    runner.drafter.propose = watched
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], params, use_tqdm=False)
    return [prompt + list(made.outputs[0].token_ids) for prompt, made in zip(PROMPTS, outputs, strict=True)], drafts
