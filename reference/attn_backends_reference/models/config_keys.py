"""The keys of a target's config.json: what transformers' class does not know and could matter is refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_backends.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MATTERS = re.compile(
    "act|alpha|attn|attention|bias|cap|chunk|clip|expert|factor|glu|group|head|hidden|index|interval|layer|limit|lora|"
    "mask|moe|mul|mup|norm|position|quant|rank|residual|ratio|rope|rotary|router|scal|scor|sink|size|sparse|state|temp|theta|topk|window"
)
"""What the name of a key that changes what is computed holds."""
INERT = {
    "_attn_implementation_autoset",  # what transformers 4 noted of its own choice
    "attn_implementation",  # the backends' takes its place
    "aux_loss_alpha",  # training's
    "ep_size",  # how DeepSeek's own engine spreads experts
    "expert_dtype",  # DeepSeek-V4's, which its tensors tell
    "head_dim",  # which Qwen's layers read, though some of their classes do not declare it
    "max_window_layers",  # of files made from a Qwen's; without use_sliding_window it says nothing
    "num_nextn_predict_layers",  # MTP modules after the layers, which `load_mtp` reads
    "quantization_config",  # `models.quantization`
    "rope_scaling",  # the older names of rope_parameters
    "rope_theta",
    "rotary_emb_base",
    "torch_dtype",
}
COMPUTED: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "": {"moe_layer_freq": (1,), "hidden_activation": ("silu",), "partial_rotary_factor": (1,)},
    "deepseek_v2": {
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (False,),
    },
    "deepseek_v3": {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    "deepseek_v4": {"topk_method": ("noaux_tc",), "norm_topk_prob": (True,)},
    "glm4_moe_lite": {"first_k_dense_replace": (1,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    "gpt_oss": {"swiglu_limit": (7.0,), "hidden_act": ("silu",)},
}
"""Keys of published folders, by model_type ("" for all whose class does not know it), that transformers' layers do not
read, and the values for which they compute what is asked."""
FOLDED = {"deepseek_v4": {"compress_ratios", "num_hash_layers", "qk_rope_head_dim"}}
"""Keys, by model_type, that transformers' class makes others of."""
REPEATED = {"experts_per_token": "num_experts_per_tok"}
"""Keys that say what another one does."""


def check_keys(path: Path, fields: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Raises `CheckpointError` that names the keys of config.json that nothing here honours."""
    known = set(vars(type(config)())) | set(getattr(config, "attribute_map", {})) | INERT
    known |= FOLDED.get(config.model_type, set())
    computed = {key: values for key, values in COMPUTED[""].items() if key not in known} | dict(
        COMPUTED.get(config.model_type, {})
    )
    computed |= {key: (getattr(config, other),) for key, other in REPEATED.items() if hasattr(config, other)}
    wrong = [
        f"{key} = {value!r}"
        for key, value in fields.items()
        if value not in (None, *computed.get(key, (False,)))
        and (key in computed or (key not in known and MATTERS.search(key)))
    ]
    if wrong:
        raise CheckpointError(
            f"{path / 'config.json'} has keys that model_type {config.model_type!r} does not honour here: "
            f"{', '.join(wrong)}. Ignoring them would give other logits; remove those that change nothing"
        )
