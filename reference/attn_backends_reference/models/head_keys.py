"""The keys of a published head's ``config.json``: those that are honoured, those that change nothing,
those of one value.

Every other key is refused by its name, unless its value is nothing or false. `tests/test_head_keys.py` leaves out each
honoured one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from attn_backends.errors import CheckpointError
from attn_backends_reference.models import folders

Fields = Mapping[str, Any]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


GQA_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
MLA_ARCHITECTURES = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
BLOCK_DRAFTS = {
    "dflash2": "a convolution over the block and a selector of candidates are missing",
    "dflash": "",
    "dspark": "",
    "domino": "its recurrent head, which draws a block's tokens one after another, is missing",
}
"""Drafts of a whole block in one forward, by what their architectures and types have in common, and what is missing to
serve them; DFlash's and DSpark's are served."""
PARALLEL_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
"""What speculators and NeMo, vLLM and AWS call the token of P-EAGLE's mask rows."""
DSPARK_NAMES = ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator", "dspark")
"""DSpark drafts with Qwen3's layers; others are those of DeepSeek, Gemma, Kimi, Ling, LFM2, MiniMax and Muse."""
MLA_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")
GQA_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral")
"""Types of a model whose head has Llama's layers; of speculators, qwen3 has Qwen3's, with norms of queries and keys."""

LAYER_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("hidden_act", "rms_norm_eps"),
)
GQA_KEYS = ("num_key_value_heads", "head_dim", "attention_bias", "mlp_bias")
MLA_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
WINDOW_KEYS = ("layer_types", "sliding_window", "use_sliding_window")
POSITION_KEYS = ("max_position_embeddings", "max_sequence_length")
NORM_KEYS = ("fc_norm", "use_aux_norm", "norm_before_fc", "norm_output", "norm_before_residual")
STATE_KEYS = ("eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states", "target_hidden_size")
EAGLE_CONFIG_KEYS = ("eagle_aux_hidden_state_layer_ids", "norm_before_fc")
"""Honoured inside of ``eagle_config``."""

COMMON_KEYS = (*LAYER_KEYS, *ROPE_KEYS, *POSITION_KEYS, "bias", "model_type")
EAGLE_HONOURED = (*COMMON_KEYS, *GQA_KEYS, *WINDOW_KEYS, "qkv_bias")
EAGLE3_HONOURED = (*COMMON_KEYS, *NORM_KEYS, *STATE_KEYS, "eagle_config", "draft_vocab_size", "tie_word_embeddings")
GQA_HONOURED = (*EAGLE3_HONOURED, *GQA_KEYS, *WINDOW_KEYS)
MLA_HONOURED = (*EAGLE3_HONOURED, *MLA_KEYS)
DFLASH_CONFIG_KEYS = (
    *("block_size", "causal", "mask_token_id", "num_target_layers", "sample_from_anchor", "target_layer_ids"),
)
"""Honoured inside of ``dflash_config``."""
DFLASH_HONOURED = (
    *(*LAYER_KEYS, *ROPE_KEYS, *WINDOW_KEYS, *DFLASH_CONFIG_KEYS, "max_position_embeddings", "model_type"),
    *("num_key_value_heads", "head_dim", "attention_bias", "dflash_config", "is_causal"),
    *("aux_hidden_state_layer_ids", "draft_vocab_size", "target_hidden_size"),
)
DSPARK_HONOURED = (*("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),)
"""Beside those of DFlash; the first two also inside of ``dflash_config``."""
DFLASH_INERT = ("sliding_window_non_causal", "tie_word_embeddings")
"""Of windows, which speculators' drafts must not have, and of an output head, which is the target's or a tensor."""

PARALLEL_HONOURED = (*GQA_HONOURED, *PARALLEL_TOKENS, "parallel_drafting")
PARALLEL_INERT = ("down_sample_ratio", "down_sample_ratio_min", "num_depths")
"""Of P-EAGLE's training: which rows of a text it took, and how many masks it put behind one."""

CHECKED = ("model_type", "num_aux_hidden_states", "use_sliding_window")
"""Honoured ones that only must not contradict others."""

FIXED: Fields = {
    "is_causal": True,
    "logit_scale": 1,
    "parallel_drafting": False,
    "partial_rotary_factor": 1,
    "pretraining_tp": 1,
    "rope_interleave": True,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""What every head here does, by the key that could ask for something else, also inside of ``eagle_config``."""

INERT = _words(
    "architectures auto_map _name_or_path transformers_version torch_dtype dtype use_cache initializer_range "
    "attention_dropout bos_token_id eos_token_id pad_token_id max_window_layers target_model_type "
    "_attn_implementation speculators_model_type speculators_version speculators_config embed_requires_grad "
    "num_lookahead_tokens chunk_size_feed_forward id2label label2id return_dict max_length min_length "
    "num_beams num_beam_groups num_return_sequences temperature top_k top_p typical_p repetition_penalty "
    "length_penalty diversity_penalty"
)
"""Keys that change nothing in a forward: tokens of texts, training, types, and transformers' own."""
MLA_INERT = _words(
    "aux_loss_alpha ep_size first_k_dense_replace head_dim moe_intermediate_size moe_layer_freq n_group "
    "n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok num_nextn_predict_layers num_key_value_heads "
    "qk_head_dim routed_scaling_factor scoring_func seq_aux topk_group topk_method"
)
"""Keys of the target's experts and modules. The MLP of an MLA head is dense in SGLang and vLLM whatever they say."""


def refuse(where: object, key: str, value: object, why: str) -> NoReturn:
    """Raises `CheckpointError` for a key and its value."""
    raise CheckpointError(f"{where}/config.json asks for {key}={value!r}; {why}")


def names(fields: Fields) -> list[str]:
    """Names of a head in its configuration: its architectures, and its type in speculators."""
    architectures = fields.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    return [str(name) for name in [*named, fields.get("speculators_model_type", "")] if name]


def positions(fields: Fields, where: object) -> int:
    """The positions that a draft was made for; of one that does not say, in itself or for its layers, Llama's 2,048."""
    of_layers = fields.get("transformer_layer_config")
    table = of_layers if isinstance(of_layers, dict) else fields
    key = next((key for key in POSITION_KEYS if table.get(key) is not None), None)
    if key is None:
        return 2048
    if type(table[key]) is not int:
        refuse(where, key, table[key], "it must be a number of positions")
    return int(table[key])


def block_drafts(names: list[str]) -> list[str]:
    """The `names` of block drafts."""
    return [name for name in names if any(kind in name.lower() for kind in BLOCK_DRAFTS)]


def is_parallel(fields: Fields) -> bool:
    """Whether a configuration is that of a P-EAGLE head, by its name or its mask token."""
    named = any("peagle" in name.lower() for name in names(fields))
    said = [fields.get(key) is not None for key in PARALLEL_TOKENS[1:]]
    return named or fields.get("parallel_drafting") is True or any(said)


def missing_parts(names: list[str]) -> list[str]:
    """Parts that are missing to serve block drafts of these names."""
    found = [next(kind for kind in BLOCK_DRAFTS if kind in name.lower()) for name in block_drafts(names)]
    return [BLOCK_DRAFTS[kind] for kind in dict.fromkeys(found) if BLOCK_DRAFTS[kind]]


def unwrapped(fields: Fields, where: object, served: str = "eagle3") -> dict[str, Any]:
    """The keys that are given a value, those of speculators' `transformer_layer_config` among them. served: the type of
    speculators' that is read.
    """
    flat = {key: value for key, value in fields.items() if value is not None}
    if "speculators_model_type" not in fields:
        return flat
    if fields["speculators_model_type"] != served:
        refuse(where, "speculators_model_type", fields["speculators_model_type"], f"served are {served} heads")
    if served == "eagle3" and "norm_before_residual" not in flat:
        raise CheckpointError(
            f"{where}/config.json does not say norm_before_residual, which speculators takes for false and vLLM for "
            f"true; add what the head was trained with"
        )
    layer = flat.pop("transformer_layer_config", None)
    if not isinstance(layer, dict):
        raise CheckpointError(f"{where}/config.json has no table transformer_layer_config, the keys of its layer")
    inner = {key: value for key, value in layer.items() if value is not None}
    twice = [key for key in inner.keys() & flat.keys() - INERT - {"model_type"} if inner[key] != flat[key]]
    if twice:
        raise CheckpointError(
            f"{where}/config.json gives {', '.join(sorted(twice))} twice, with other values in transformer_layer_config"
        )
    return flat | inner


def check_keys(flat: Fields, where: object, honoured: Collection[str], inert: Collection[str]) -> None:
    """Refuses a key that no rule covers, and one of `FIXED` with another value. False and nothing ask for nothing."""
    folders.refuse_quantized(where, flat)
    _check_fixed(flat, where, "")
    for key in sorted(flat.keys() - set(honoured) - INERT - set(inert) - FIXED.keys()):
        if flat[key] not in (False, 0, "", [], {}):
            refuse(where, key, flat[key], "no rule covers this key, which could change the head")


def _check_fixed(table: Fields, where: object, prefix: str) -> None:
    for key in FIXED.keys() & table.keys():
        if table[key] != FIXED[key]:
            refuse(where, prefix + key, table[key], f"served is {FIXED[key]!r}")


def eagle_config(flat: Fields, where: object) -> Fields:
    """The table `eagle_config`, or an empty one."""
    given = flat.get("eagle_config", {})
    if not isinstance(given, dict):
        raise CheckpointError(f"eagle_config in {where} is {given!r}; it must be a table")
    table = {key: value for key, value in given.items() if value is not None}
    _check_fixed(table, where, "eagle_config.")
    for key in sorted(table.keys() - set(EAGLE_CONFIG_KEYS) - FIXED.keys()):
        if table[key]:
            refuse(where, f"eagle_config.{key}", table[key], "no rule covers this key, which could change the head")
    return table
