"""The ``config.json`` of a published EAGLE or EAGLE-3 head. Every key is honoured, or refused by its name.

The forms are those of SafeAILab (``eagle/model/cnets.py``, ``cnets1.py``), SpecForge (``draft/llama3_eagle.py``),
SGLang and vLLM (``llama_eagle3.py``, ``deepseek_eagle3.py``), and speculators (``models/eagle3/config.py``), which
keeps the layer's keys in ``transformer_layer_config``. docs/heads.md has the formats, and what each key does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import DeepseekV3Config, LlamaConfig, PreTrainedConfig, Qwen3Config

from attn_backends.errors import CheckpointError
from attn_backends_reference.models import head_keys as keys
from attn_backends_reference.models.folders import ROPE_FIELDS, ROPE_TYPES
from attn_backends_reference.models.head_keys import Fields, refuse

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A head's configuration, decided.

    layer: of its decoder layers, for transformers' modules. draft_vocab_size: tokens that it can propose; None if it
    does not say, so all of the target's. target_hidden_size: columns of a state of the target. taps: layers of the
    target after which it takes states, None for SafeAILab's choice; num_states of them. windows: of each layer, keys
    that a row sees, None for all. fc_bias, qkv_bias: biases of `fc`, and of queries, keys and values alone; fc_bias is
    None if it does not say. fc_norm: a norm of each state before `fc`; norm_before_fc: one of all of them.
    norm_before_residual: the residual begins after `hidden_norm`. norm_output: drafted rows take normed states. tied:
    the output head is the embedding. fields: what the file says, as it stands there.
    """

    layer: PreTrainedConfig
    draft_vocab_size: int | None
    target_hidden_size: int
    taps: tuple[int, ...] | None = None
    num_states: int = 3
    windows: tuple[int | None, ...] = (None,)
    fc_bias: bool | None = None
    qkv_bias: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    tied: bool = False
    fields: Fields = field(default_factory=dict)

    @property
    def num_ids(self) -> int:
        """Tokens that it can propose."""
        return self.draft_vocab_size or self.layer.vocab_size

    def feature_layers(self, where: object, num_layers: int) -> tuple[int, ...]:
        """The layers of a target of `num_layers` after which it takes states, low to high.

        The published target of n layers keeps its states before the layers 2, n // 2 and n - 3. Raises
        `CheckpointError` for layers that there are not.
        """
        layers = [1, num_layers // 2 - 1, num_layers - 4] if self.taps is None else list(self.taps)
        rising = len(layers) == self.num_states and layers == sorted(set(layers))
        if not rising or not 0 <= layers[0] <= layers[-1] < num_layers:
            raise CheckpointError(
                f"the draft in {where} takes the states after the layers {layers} of a target with {num_layers}; it "
                f"needs {self.num_states} different ones, from low to high. Targets of fewer than 7 layers need them "
                f"named: eagle_config.eagle_aux_hidden_state_layer_ids"
            )
        return tuple(layers)


def is_eagle3(fields: Fields) -> bool:
    """Whether a configuration is that of an EAGLE-3 head, or of one that is refused by its name.

    SafeAILab's folders say their target's architecture, and a `draft_vocab_size`.
    """
    named = keys.names(fields)
    known = {*keys.GQA_ARCHITECTURES, *keys.MLA_ARCHITECTURES}
    is_named = bool(keys.block_drafts(named)) or keys.is_parallel(fields) or not known.isdisjoint(named)
    return is_named or "draft_vocab_size" in fields or "speculators_model_type" in fields


def read_eagle3(fields: Fields, where: object) -> HeadConfig:
    """The configuration of an EAGLE-3 head. where: what errors call its folder.

    Raises `CheckpointError`, which names the key, if it asks for what is not served.
    """
    if keys.is_parallel(fields):
        raise CheckpointError(
            f"{where} is a P-EAGLE head, which drafts all tokens at once: worker = 'parallel' runs it"
        )
    blocks = keys.block_drafts(keys.names(fields))
    if blocks:
        why = "; ".join(keys.missing_parts(blocks)) or 'worker = "block" runs it'
        raise CheckpointError(f"{where} is a block draft ({', '.join(blocks)}), which drafts all tokens at once: {why}")
    flat = keys.unwrapped(fields, where)
    is_mla = not set(keys.MLA_ARCHITECTURES).isdisjoint(keys.names(fields))
    honoured, inert = (keys.MLA_HONOURED, keys.MLA_INERT) if is_mla else (keys.GQA_HONOURED, ())
    keys.check_keys(flat, where, honoured, inert)
    return head_of(flat, fields, where, is_mla)


def head_of(flat: Fields, fields: Fields, where: object, is_mla: bool) -> HeadConfig:
    """A head's configuration from checked keys. flat: its keys and those of its layers. fields: as they stand in the
    file.
    """
    eagle = keys.eagle_config(flat, where)
    layer = layer_config(flat, where, is_mla, "speculators_model_type" in fields)
    taps = _taps(flat, eagle, where)
    return HeadConfig(
        layer=layer,
        draft_vocab_size=flat.get("draft_vocab_size"),
        target_hidden_size=flat.get("target_hidden_size") or layer.hidden_size,
        taps=taps,
        num_states=_num_states(flat, taps, where),
        windows=windows(flat, layer.num_hidden_layers, where),
        fc_bias=bool(flat.get("bias")),
        fc_norm=bool(flat.get("fc_norm") or flat.get("use_aux_norm")),
        norm_before_fc=bool(flat.get("norm_before_fc") or eagle.get("norm_before_fc")),
        norm_before_residual=bool(flat.get("norm_before_residual")),
        norm_output=bool(flat.get("norm_output")),
        tied=bool(flat.get("tie_word_embeddings")),
        fields=fields,
    )


def read_eagle(fields: Fields, where: object) -> HeadConfig:
    """The configuration of an EAGLE-1 or EAGLE-2 head of SafeAILab's format; raises as `read_eagle3`.

    Its layers are Llama's whatever model its target is, and its output head is the target's.
    """
    given = {key: value for key, value in fields.items() if value is not None}
    keys.check_keys(given, where, keys.EAGLE_HONOURED, ("tie_word_embeddings",))
    layer = layer_config(given, where, is_mla=False, in_speculators=False)
    return HeadConfig(
        layer=layer,
        draft_vocab_size=None,
        target_hidden_size=layer.hidden_size,
        windows=windows(given, layer.num_hidden_layers, where),
        fc_bias=given.get("bias"),
        qkv_bias=bool(given.get("qkv_bias")),
        fields=fields,
    )


def layer_config(flat: Fields, where: object, is_mla: bool, in_speculators: bool) -> PreTrainedConfig:
    """transformers' configuration of the head's layers, of honoured keys alone."""
    types, own = (keys.MLA_TYPES, keys.MLA_KEYS) if is_mla else (keys.GQA_TYPES, keys.GQA_KEYS)
    kind = flat.get("model_type", types[0])
    if kind not in types:
        refuse(where, "model_type", kind, f"served are heads of {', '.join(types)}")
    missing = [key for key in REQUIRED if key not in flat]
    if missing:
        raise CheckpointError(f"{where}/config.json does not say {', '.join(missing)}")
    given = {key: flat[key] for key in (*keys.LAYER_KEYS, *own) if key in flat}
    given["num_hidden_layers"] = num_layers = flat.get("num_hidden_layers", 1)
    given["num_key_value_heads"] = flat.get("num_key_value_heads", flat["num_attention_heads"])
    given["max_position_embeddings"] = keys.positions(flat, where)
    given["rope_parameters"] = _rope(flat, where)
    try:
        if is_mla:
            return DeepseekV3Config(**given, first_k_dense_replace=num_layers)
        return (Qwen3Config if in_speculators and kind == "qwen3" else LlamaConfig)(**given)
    except Exception as error:  # what a wrong value makes transformers raise may be anything
        raise CheckpointError(f"transformers can't make the layers of {where}/config.json: {error}") from error


def _rope(flat: Fields, where: object) -> dict[str, Any]:
    """`rope_parameters`, or what older configurations say as `rope_scaling` and `rope_theta`."""
    tables = [flat[key] for key in ("rope_parameters", "rope_scaling") if flat.get(key)]
    if not all(isinstance(table, dict) for table in tables):
        raise CheckpointError(f"rope_parameters and rope_scaling in {where} must be tables, got {tables}")
    said = [{key: value for key, value in table.items() if value is not None} for table in tables]
    for table in said:
        if "mrope_section" in table:
            refuse(where, "mrope_section", table["mrope_section"], "tokens stand at one position here, not at three")
        for key in sorted(table.keys() - ROPE_FIELDS):
            refuse(where, f"rope_parameters.{key}", table[key], "no rule covers this key, which could change the head")
        older = table.pop("type", None)
        table.setdefault("rope_type", older)
        if table["rope_type"] not in ROPE_TYPES:
            refuse(where, "rope_type", table["rope_type"], f"served are {', '.join(ROPE_TYPES)}")
    theta = {table.pop("rope_theta") for table in said if "rope_theta" in table} | {flat.get("rope_theta")} - {None}
    if len(theta) > 1 or any(table != said[0] for table in said):
        raise CheckpointError(
            f"{where}/config.json gives its rotary embeddings twice, with other values: {tables}, {theta}"
        )
    return {"rope_theta": theta.pop() if theta else 10000.0} | (said[0] if said else {"rope_type": "default"})


def windows(flat: Fields, num_layers: int, where: object) -> tuple[int | None, ...]:
    """The window of each layer, which `layer_types` gives it."""
    types, window, used = (flat.get(key) for key in keys.WINDOW_KEYS)
    if types is None:
        if window is not None and used is not False:
            refuse(where, "sliding_window", window, "layer_types must say which layers have it")
        return (None,) * num_layers
    known = {"full_attention", "sliding_attention"}
    if not isinstance(types, list) or len(types) != num_layers or not known.issuperset(types):
        refuse(where, "layer_types", types, f"it must name {num_layers} layers, full_attention or sliding_attention")
    slides = [kind == "sliding_attention" for kind in types]
    if any(slides) and (type(window) is not int or window < 1 or used is False):
        refuse(where, "sliding_window", window, f"layer_types {types} need it (use_sliding_window is {used})")
    return tuple(window if slide else None for slide in slides)


def _taps(flat: Fields, eagle: Fields, where: object) -> tuple[int, ...] | None:
    """The layers after which states are taken, as `eagle_config` counts; beside it the layers before are named."""
    before, behind = (table.get("eagle_aux_hidden_state_layer_ids") or None for table in (flat, eagle))
    for layers in (before, behind):
        if layers is not None and not (isinstance(layers, list) and all(type(layer) is int for layer in layers)):
            refuse(where, "eagle_aux_hidden_state_layer_ids", layers, "it must be a list of layers")
    if before is None:
        return None if behind is None else tuple(behind)
    taps = tuple(layer - 1 for layer in before)
    if behind is not None and tuple(behind) != taps:
        raise CheckpointError(
            f"{where}/config.json takes the states before the layers {before} and, in eagle_config, after {behind}; "
            f"these are not the same"
        )
    return taps


def _num_states(flat: Fields, taps: tuple[int, ...] | None, where: object) -> int:
    """How many states of the target a row takes."""
    count = 3 if taps is None else len(taps)
    if flat.get("num_aux_hidden_states", count) != count:
        named = "SafeAILab's choice of layers" if taps is None else f"the layers {list(taps)}"
        refuse(where, "num_aux_hidden_states", flat["num_aux_hidden_states"], f"{named} are {count}")
    return count
