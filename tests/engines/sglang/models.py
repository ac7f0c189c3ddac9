"""The library's trained models in the forms that SGLang loads.

`mla`: the target, and MTP module 0 as a NextN draft, as `attn-backends export` writes them. `dflash` is random:
SGLang's layers have norms of queries and keys, and the shipped block draft has none. The others are shipped so.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attn_backends_reference.models.exports import export

ROOT = Path(__file__).parents[3]
CHECKPOINTS = ROOT / "reference" / "attn_backends_reference" / "models" / "checkpoints"


def write_all(folder: Path, min_hidden: int = 0) -> None:
    """gqa_target, gqa_eagle3, dflash, mla_target and mla_nextn. min_hidden: the smallest hidden size of `mla`."""
    for name in ("target", "eagle3"):
        shutil.copytree(CHECKPOINTS / "gqa" / name, folder / f"gqa_{name}")
    mla = CHECKPOINTS / "mla"
    written = export(mla / "target", mla / "mtp", "sglang", folder / "mla", min_hidden=min_hidden)
    for path, name in zip(written, ("mla_target", "mla_nextn"), strict=True):
        path.rename(folder / name)
    write_dflash(folder / "dflash")
    write_dspark(folder / "dspark")


DFLASH: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 4,
    "dflash_config": {"mask_token_id": ord(" "), "target_layer_ids": [0, 1]},
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 128,
    "is_causal": False,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 9,
    "tie_word_embeddings": True,
    "use_sliding_window": True,
    "vocab_size": 256,
}
"""A draft of blocks of 4, for either target. A mask is a space, which the target often says."""


def write_dflash(folder: Path, hidden: int = DFLASH["hidden_size"]) -> None:
    """A DFlash draft with random weights: small enough that it often proposes spaces, some of which are accepted, and
    large enough that it often does not. hidden: the target's hidden size.
    """
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / 22

    num_taps = len(DFLASH["dflash_config"]["target_layer_ids"])
    dim, inner = DFLASH["head_dim"], DFLASH["intermediate_size"]
    heads, kv_heads = (DFLASH[name] * dim for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"q_proj": (heads, hidden), "k_proj": (kv_heads, hidden), "v_proj": (kv_heads, hidden)}
    attention = shapes | {"o_proj": (hidden, heads)}
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    tensors = {"fc": random(hidden, num_taps * hidden), "hidden_norm": torch.ones(hidden), "norm": torch.ones(hidden)}
    for i in range(DFLASH["num_hidden_layers"]):
        name = f"layers.{i}"
        tensors |= {f"{name}.self_attn.{part}": random(*shape) for part, shape in attention.items()}
        tensors |= {f"{name}.mlp.{part}": random(*shape) for part, shape in mlp.items()}
        tensors |= {f"{name}.self_attn.{part}_norm": torch.ones(dim) for part in "qk"}
        tensors |= {f"{name}.{part}_layernorm": torch.ones(hidden) for part in ("input", "post_attention")}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DFLASH | {"hidden_size": hidden}))
    save_file({f"{name}.weight": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")


MARKOV_RANK = 8
DSPARK: dict[str, Any] = DFLASH | {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 3,
    "confidence_head_with_markov": True,
    "enable_confidence_head": True,
    "markov_head_type": "vanilla",
    "markov_rank": MARKOV_RANK,
}
"""A draft of blocks of 3, whose first row is the root's: its verifies have 4 rows at most."""


def write_dspark(folder: Path, hidden: int = DFLASH["hidden_size"]) -> None:
    """A DSpark draft: the weights of the DFlash draft, and random heads."""
    write_dflash(folder, hidden)
    generator = torch.Generator().manual_seed(11)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    vocab = DSPARK["vocab_size"]
    (folder / "config.json").write_text(json.dumps(DSPARK | {"hidden_size": hidden}))
    tensors = load_file(folder / "model.safetensors") | {
        "markov_head.markov_w1.weight": random(vocab, MARKOV_RANK),
        "markov_head.markov_w2.weight": random(vocab, MARKOV_RANK) / 22,
        "confidence_head.proj.weight": random(1, hidden + MARKOV_RANK) / 5,
        "confidence_head.proj.bias": torch.full((1,), -3.0),
    }
    save_file(tensors, folder / "model.safetensors")
