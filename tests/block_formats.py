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

MARKOV = {"markov_head.markov_w1.weight": "V R", "markov_head.markov_w2.weight": "V R"}
REDUCED = {"markov_head.markov_w1.weight": "V R", "markov_head.markov_w2.weight": "D R"}
GATE = {"markov_head.gate_proj.weight": "R HR", "markov_head.gate_proj.bias": "R"}
JOINT = {"markov_head.joint_proj.weight": "3R HRR", "markov_head.joint_proj.bias": "3R"}
DSPARK_SIZES = {"R": 12, "HR": 44, "HRR": 56}
DENSE = QWEN3 | {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": SIZE,
    "confidence_head_with_markov": True,
    "enable_confidence_head": True,
    "markov_rank": 12,
    "mask_token_id": MASK,
    "num_target_layers": 4,
    "target_layer_ids": list(TAPS),
}
CONFIDENCE = {"confidence_head.proj.weight": "1 HR", "confidence_head.proj.bias": "1"}
READERS = "SGLang 0.5.23 models/dspark.py, dspark_config.py; vLLM 0.33.0 models/qwen3_dspark.py"
DSPARKS = {
    "DSpark": Format(
        catalogue="DeepSeek",
        source=READERS,
        config=DENSE | {"markov_head_type": "vanilla"},
        tensors=layers() | MARKOV | CONFIDENCE | {"lm_head.weight": "V H", "embed_tokens.weight": "V H"},
        sizes=DSPARK_SIZES | {"1": 1},
        facts={"theta": 500.0, "taps": TAPS, "markov": "vanilla", "from_root": True, "embedding": True},
    ),
    "DSpark, recurrent": Format(
        catalogue="DeepSeek",
        source=READERS,
        config={key: value for key, value in DENSE.items() if key not in ("markov_rank", "mask_token_id")}
        | {
            "confidence_head_with_markov": False,
            "enable_confidence_head": False,
            "sample_from_anchor": True,
            "dflash_config": {"markov_rank": 12, "markov_head_type": "rnn", "mask_token_id": MASK},
        },
        tensors=layers() | MARKOV | JOINT,
        sizes=DSPARK_SIZES,
        facts={"theta": 500.0, "taps": TAPS, "markov": "rnn", "from_root": True},
    ),
    "speculators DSpark": Format(
        catalogue="speculators",
        source=f"{SPECULATORS} src/speculators/models/dspark/config.py, core.py, model_definitions.py",
        config=dict(BLOCKS["speculators DFlash"].config)
        | {
            "architectures": ["DSparkSpeculator"],
            "auto_map": {"": "dspark.DSparkSpeculatorConfig"},
            "speculators_model_type": "dspark",
            "markov_rank": 12,
            "markov_head_type": "gated",
            "enable_confidence_head": True,
            "confidence_head_with_markov": False,
        },
        tensors=layers()
        | MAPS
        | REDUCED
        | GATE
        | {"lm_head.weight": "D H", "confidence_head.proj.weight": "1 H", "confidence_head.proj.bias": "1"},
        sizes=DSPARK_SIZES | {"1": 1},
        facts={"theta": 500.0, "taps": TAPS, "markov": "gated", "from_root": False},
    ),
}
"""DSpark drafts. Qwen3's layers of DeepSeek's folders, with each Markov head that there is."""


class BlockOracle(HeadOracle):
    """A format's forward over one block, in float64: no layer of transformers', no cache, no backend."""

    def drafts(self, known: Sequence[int], features: Tensor) -> list[int]:
        """What follows the root, the last of `known`. features: of the tokens before."""
        scores, kind = self.block(known, features), self.config.get("markov")
        if kind is None:
            return scores.argmax(-1).tolist()
        hidden, tokens, state = self.rows(known, features), [known[-1]], torch.zeros(12, dtype=torch.float64)
        w1, w2 = (self.tensors[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
        ids = torch.arange(len(w2)) + self.tensors.get("d2t", 0)
        for row, base in zip(hidden, scores, strict=True):
            factor = w1[tokens[-1]]
            if kind == "gated":
                factor = factor * torch.sigmoid(self.times("markov_head.gate_proj", torch.cat((row, factor))))
            if kind == "rnn":
                joint = self.times("markov_head.joint_proj", torch.cat((state, factor, row)))
                gate = torch.sigmoid(joint[:12])
                state, factor = gate * state + (1 - gate) * torch.tanh(joint[12:24]), torch.tanh(joint[24:])
            tokens.append(int(ids[(base[ids] + w2 @ factor).argmax()]))
        return tokens[1:]

    def block(self, known: Sequence[int], features: Tensor) -> Tensor:
        """[drafted, vocab]: log-probabilities of the rows that propose. known: tokens and the root. features: of the
        tokens.
        """
        rows = self.rows(known, features)
        head = self.tensors.get("lm_head.weight", self.target.lm_head.weight.double())
        scores = linear(rows, head).log_softmax(-1)
        ids = torch.arange(scores.shape[1]) + self.tensors.get("d2t", 0)
        return scores.new_full((len(scores), self.target.config.vocab_size), -torch.inf).index_copy_(1, ids, scores)

    def rows(self, known: Sequence[int], features: Tensor) -> Tensor:
        """[drafted, H]: the rows that propose, behind the final norm."""
        context = self.norm("hidden_norm", self.times("fc", features[: len(known) - 1].double()))
        own = self.config.get("embedding")
        table = self.tensors["embed_tokens.weight"] if own else self.target.model.embed_tokens.weight.double()
        rows = table[torch.tensor([known[-1], *[MASK] * (SIZE - 1)])]
        for index in range(2):
            normed = self.norm(f"layers.{index}.input_layernorm", rows)
            rows = rows + self.over_context(index, normed, context)
            normed = self.norm(f"layers.{index}.post_attention_layernorm", rows)
            mlp = f"layers.{index}.mlp."
            act = gelu if self.config.get("act") else silu
            gated = act(self.times(f"{mlp}gate_proj", normed)) * self.times(f"{mlp}up_proj", normed)
            rows = rows + self.times(f"{mlp}down_proj", gated)
        return self.norm("norm", rows[0 if self.config.get("from_root") else 1 :])

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
