"""The formats of published DFlash drafts, in the manner of `head_catalogue`, and what one computes over a block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from tests.head_formats import BASE, LLAMA3, MAPS, SPECFORGE, SPECULATORS, Format, gqa, layer, speculators
from tests.head_forward import HeadOracle, rotate_halves, rotation

SIZE, MASK, TAPS = 4, 63, (0, 2, 3)
QWEN3 = BASE | {"model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 16, "rope_theta": 500.0}
LAYER = {key: value for key, value in QWEN3.items() if key != "rope_theta"} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}
}
NORMS = ("input_layernorm", "post_attention_layernorm")
BIASES = tuple(f"self_attn.{name}_proj" for name in "qkvo")


def layers(*biases: str) -> dict[str, str]:
    """Two of Qwen3's, and what is around them."""
    of_head = {f"layers.{i}.self_attn.{name}_norm.weight": "HEAD" for i in range(2) for name in "qk"}
    ends = {"fc.weight": "H 3T", "hidden_norm.weight": "H", "norm.weight": "H"}
    return (
        ends
        | of_head
        | layer("layers.0.", gqa("H"), *NORMS, biases=biases)
        | layer("layers.1.", gqa("H"), *NORMS, biases=biases)
    )


BLOCKS = {
    "SpecForge DFlash": Format(
        catalogue="SpecForge",
        source=f"{SPECFORGE} specforge/modeling/draft/dflash.py; sglang 0.5.23 speculative/dflash_utils.py",
        config=QWEN3
        | {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "block_size": SIZE,
            "num_target_layers": 4,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TAPS)},
        },
        tensors=layers(),
        facts={"theta": 500.0, "taps": TAPS},
    ),
    "SpecForge DFlash, windows": Format(
        catalogue="SpecForge",
        source="vLLM 0.33.0 models/qwen3_dflash.py, SGLang 0.5.23 models/dflash.py: layer_types, is_causal",
        config=QWEN3
        | {
            "architectures": ["DFlashDraftModel"],
            "attention_bias": True,
            "dflash_config": {
                **{"block_size": SIZE, "mask_token_id": MASK},
                **{"num_target_layers": 4, "target_layer_ids": list(TAPS)},
            },
            "block_size": SIZE,
            "hidden_act": "gelu",
            "is_causal": False,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_target_layers": 4,
            "rope_scaling": LLAMA3,
            "sliding_window": 9,
            "use_sliding_window": True,
        },
        tensors=layers(*BIASES),
        facts={"theta": 500.0, "rope": LLAMA3, "act": "gelu", "taps": TAPS, "windows": (9, None)},
    ),
    "speculators DFlash": Format(
        catalogue="speculators",
        source=f"{SPECULATORS} (0.9.0) src/speculators/models/dflash/config.py, core.py",
        config={
            key: value
            for key, value in speculators(LAYER).items()
            if key not in ("eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc", "norm_output")
        }
        | {
            "architectures": ["DFlashSpeculator"],
            "auto_map": {"": "dflash.DFlashSpeculatorConfig"},
            "aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS],
            "block_size": SIZE,
            "mask_token_id": MASK,
            "sample_from_anchor": False,
            "sliding_window_non_causal": False,
            "speculators_model_type": "dflash",
            "target_hidden_size": 32,
        },
        tensors=layers() | MAPS | {"lm_head.weight": "D H"},
        facts={"theta": 500.0, "taps": TAPS},
    ),
}


class BlockOracle(HeadOracle):
    """A format's forward over one block, in float64: no layer of transformers', no cache, no backend."""

    def block(self, known: Sequence[int], features: Tensor) -> Tensor:
        """[SIZE - 1, vocab]: log-probabilities at the masks. known: tokens and the root. features: of the tokens."""
        context = self.norm("hidden_norm", self.times("fc", features[: len(known) - 1].double()))
        table = self.target.model.embed_tokens.weight.double()
        rows = table[torch.tensor([known[-1], *[MASK] * (SIZE - 1)])]
        for index in range(2):
            normed = self.norm(f"layers.{index}.input_layernorm", rows)
            rows = rows + self.over_context(index, normed, context)
            normed = self.norm(f"layers.{index}.post_attention_layernorm", rows)
            mlp = f"layers.{index}.mlp."
            act = gelu if self.config.get("act") else silu
            gated = act(self.times(f"{mlp}gate_proj", normed)) * self.times(f"{mlp}up_proj", normed)
            rows = rows + self.times(f"{mlp}down_proj", gated)
        head = self.tensors.get("lm_head.weight", self.target.lm_head.weight.double())
        scores = linear(self.norm("norm", rows[1:]), head).log_softmax(-1)
        ids = torch.arange(scores.shape[1]) + self.tensors.get("d2t", 0)
        return scores.new_full((len(scores), len(table)), -torch.inf).index_copy_(1, ids, scores)

    def over_context(self, index: int, rows: Tensor, context: Tensor) -> Tensor:
        """Attention of a block's rows over the context and one another: 4 heads over 2."""
        name = f"layers.{index}.self_attn."
        both = torch.cat((context, rows))
        q, k, v = (
            self.times(f"{name}{each}_proj", x).unflatten(-1, (-1, 16))
            for each, x in zip("qkv", (rows, both, both), strict=True)
        )
        cos, sin, _ = rotation(len(both), 16, self.config)
        q = rotate_halves(self.norm(f"{name}q_norm", q), cos[-SIZE:], sin[-SIZE:])
        k = rotate_halves(self.norm(f"{name}k_norm", k), cos, sin)
        places, window = torch.arange(len(both)), self.config.get("windows", (None, None))[index]
        seen = places > places[-SIZE:, None] - (window or len(both) + 1)
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) / 4
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(2, 1))
        return self.times(f"{name}o_proj", mixed.flatten(1))
