"""The formats of published P-EAGLE heads, in the manner of `head_catalogue`, and what one drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.block_formats import BIASES, LAYER, MASK, NORMS
from tests.head_formats import EAGLE3, ENDS, LLAMA3, MAPS, SPECFORGE, SPECULATORS, TAPS, Format, gqa, layer, speculators
from tests.head_forward import HeadOracle

AUTOMODEL = "NVIDIA-NeMo/Automodel 36044ad3"
VLLM = "vLLM 0.33.0 models/llama_eagle3.py, v1/spec_decode/llm_base_proposer.py, speculators/algos.py"
QK_NORMS = {f"layers.{i}.self_attn.{name}_norm.weight": "HEAD" for i in range(2) for name in "qk"}


def layers(prefix: str = "", *biases: str) -> dict[str, str]:
    """Two of them, the first as wide as EAGLE-3's, and what is around them."""
    first = layer(f"{prefix}layers.0.", gqa("2H"), "hidden_norm", *NORMS, biases=biases)
    ends = {name if name.startswith("lm_head") else prefix + name: sizes for name, sizes in ENDS.items()}
    return ends | MAPS | first | layer(f"{prefix}layers.1.", gqa("H"), *NORMS, biases=biases)


PEAGLES = {
    "speculators P-EAGLE": Format(
        catalogue="speculators",
        source=f"{SPECULATORS} src/speculators/models/peagle/config.py, core.py; {VLLM}",
        config={key: value for key, value in speculators(LAYER).items() if key != "norm_before_residual"}
        | {
            "architectures": ["PEagleSpeculator"],
            "auto_map": {"": "peagle.PEagleSpeculatorConfig"},
            "embed_requires_grad": True,
            "fc_norm": True,
            "mask_token_id": MASK,
            "speculators_model_type": "peagle",
        },
        tensors=layers()
        | QK_NORMS
        | {f"fc_norm.{i}.weight": "T" for i in range(3)}
        | {"embed_tokens.weight": "V H", "mask_hidden": "1 1 3T"},
        facts={
            "theta": 500.0,
            "num_layers": 2,
            "taps": TAPS,
            "qk_norm": True,
            "fc_norms": [f"fc_norm.{i}" for i in range(3)],
        },
        sizes={"1": 1},
    ),
    "SpecForge P-EAGLE": Format(
        catalogue="SpecForge",
        source=f"{SPECFORGE} specforge/modeling/draft/peagle.py, configs/qwen3-8b-peagle.json; the mask's token added",
        config=EAGLE3
        | {
            "architectures": ["PEagleDraftModel"],
            "attention_bias": False,
            "head_dim": 16,
            "hidden_act": "gelu",
            "max_window_layers": 36,
            "norm_before_residual": True,
            "num_hidden_layers": 2,
            "pard_token": MASK,
            "rope_scaling": None,
            "rope_theta": 500.0,
            "sliding_window": None,
            "use_sliding_window": False,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS)},
        },
        tensors=layers() | {"embed_tokens.weight": "V H", "mask_hidden": "1 1 3T"},
        facts={"theta": 500.0, "num_layers": 2, "taps": TAPS, "residual_normed": True, "act": "gelu"},
        sizes={"1": 1},
    ),
    "NeMo P-EAGLE": Format(
        catalogue="NeMo AutoModel",
        source=f"{AUTOMODEL} components/speculative/eagle/draft_llama.py, recipes/llm/peagle_recipe.py",
        config=EAGLE3
        | {
            "architectures": ["LlamaEagle3DraftModel"],
            "down_sample_ratio": 0.7,
            "down_sample_ratio_min": 0.2,
            "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS],
            "head_dim": 16,
            "mask_token_id": MASK,
            "num_depths": 8,
            "num_hidden_layers": 2,
            "parallel_drafting": True,
            "rope_scaling": LLAMA3,
            "target_hidden_size": 32,
        },
        tensors=layers("model.") | {"model.embed_tokens.weight": "V H", "mask_hidden": "1 1 3T"},
        facts={"rope": LLAMA3, "num_layers": 2, "taps": TAPS},
        sizes={"1": 1},
    ),
    "vLLM's reader, P-EAGLE": Format(
        catalogue="AWS (amazon/*-P-EAGLE)",
        source=f"{VLLM}: ptd_token_id, windows, biases of queries, keys and values, mask_hidden of any shape",
        config=EAGLE3
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "attention_bias": True,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS), "norm_before_fc": True},
            "head_dim": 16,
            "layer_types": ["full_attention", "sliding_attention"],
            "num_hidden_layers": 2,
            "ptd_token_id": MASK,
            "sliding_window": 9,
        },
        tensors=layers("", *BIASES) | {"input_norm.weight": "3T", "mask_hidden": "1 3T"},
        facts={"num_layers": 2, "taps": TAPS, "input_norm": True, "windows": (None, 9)},
        sizes={"1": 1},
    ),
}


class PEagleOracle(HeadOracle):
    """What a head drafts over a whole text, with mask rows behind it: no cache, no layer of transformers'."""

    def drafts(self, known: Sequence[int], features: Tensor, num_drafted: int) -> list[int]:
        """What follows the root, the last of `known`. features: of the tokens before, and perhaps of more."""
        scores = self.drafted_scores(known, features, num_drafted)
        return (scores.argmax(-1) + self.tensors["d2t"][scores.argmax(-1)]).tolist()

    def drafted_scores(self, known: Sequence[int], features: Tensor, num_drafted: int) -> Tensor:
        """[num_drafted, tokens of the draft]: log-probabilities of the last row and of the mask rows behind it."""
        own = next((name for name in self.tensors if name.endswith("embed_tokens.weight")), None)
        dtype = self.tensors["mask_hidden"].dtype
        table = self.target.model.embed_tokens.weight.to(dtype) if own is None else self.tensors[own]
        masks = [self.tensors["mask_hidden"].flatten()] * (num_drafted - 1)
        taken = torch.stack([*features[: len(known) - 1].to(dtype), *masks])
        embeddings = table[torch.tensor([*known[1:], *[self.config.get("mask", MASK)] * (num_drafted - 1)])]
        return self.scores(self.run(embeddings, self.joined(taken))[-num_drafted:], table).log_softmax(-1)
