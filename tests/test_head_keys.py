"""Every key of a head's configuration is honoured, or refused by its name: each honoured one is left out in turn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.errors import CheckpointError
from attn_backends_reference.models import head_keys as keys
from attn_backends_reference.models import heads, load_draft
from attn_backends_reference.models.eagle3 import Eagle3Model
from attn_backends_reference.models.folders import ROPE_FIELDS
from attn_backends_reference.models.head_config import HeadConfig, read_eagle, read_eagle3
from tests.head_catalogue import FORMATS as PUBLISHED
from tests.head_catalogue import VARIANTS
from tests.head_formats import LLAMA3, Format, write
from tests.head_runs import BUDGET, DenseAttention, log_probs, oracle_of, target_of

FORMATS = PUBLISHED | VARIANTS
TABLES = {"EAGLE": keys.EAGLE_HONOURED, "EAGLE-3": keys.GQA_HONOURED, "EAGLE-3, MLA": keys.MLA_HONOURED}
CASES = [(table, key) for table, honoured in TABLES.items() for key in honoured if key not in keys.CHECKED]
CASES.remove(("EAGLE", "bias"))  # which its tensors say, so that it only must not contradict them


def table_of(format: Format) -> str:
    """The table that a format is read by."""
    if format.facts.get("eagle") == 1:
        return "EAGLE"
    return "EAGLE-3, MLA" if "mla" in format.facts else "EAGLE-3"


def without(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A configuration whose reader ignores a key, wherever it stands."""
    left = {name: value for name, value in config.items() if name != key}
    return {name: without(value, key) if isinstance(value, dict) else value for name, value in left.items()}


def mentions(config: Mapping[str, Any], key: str) -> bool:
    """Whether a configuration gives a key a value that asks for something."""
    return any(
        (name == key and value) or (isinstance(value, dict) and mentions(value, key)) for name, value in config.items()
    )


@cache
def outcome(name: str, folder: Path, left_out: str | None = None) -> tuple[Tensor, int] | None:
    """Scores and positions of a format's head, of a folder whose configuration lacks a key; None if it is refused."""
    format = FORMATS[name]
    tensors = write(format, folder, format.config if left_out is None else without(format.config, left_out))
    features = oracle_of(format, tensors).features(list(range(40)))
    try:
        draft = load_draft(folder, target_of(format))
    except CheckpointError:
        return None
    taken = isinstance(draft, Eagle3Model) and draft.feature_layers != format.facts["taps"]
    return (
        features.new_full((1,), torch.inf) if taken else log_probs(draft, features, DenseAttention(draft))
    ), draft.max_positions


def is_seen(name: str, key: str, folder: Path) -> bool:
    """Whether a head without a key is refused, has other positions, or scores otherwise."""
    right, found = outcome(name, folder.parent / f"{name} whole".replace("/", " ")), outcome(name, folder, key)
    assert right is not None
    if found is None or found[1] != right[1] or found[0].shape != right[0].shape:
        return True
    return bool((found[0] - right[0]).nan_to_num(0).abs().max() > 100 * BUDGET)


@pytest.mark.parametrize(("table", "key"), CASES, ids=map(" ".join, CASES))
def test_a_key_that_is_ignored_is_seen(table: str, key: str, tmp_path: Path) -> None:
    """In one format at least, by what the head computes or by a refusal."""
    candidates = [
        name for name, format in FORMATS.items() if table_of(format) == table and mentions(format.config, key)
    ]
    assert candidates, f"no format of {table} has {key}"
    assert any(is_seen(name, key, tmp_path / name.replace("/", " ")) for name in candidates)


DECIDED = [each for each in fields(HeadConfig) if each.default is not MISSING and each.name != "num_states"]
"""What a head's configuration decides and may leave out. The number of states is that of the layers they come from."""


@pytest.mark.parametrize("decided", DECIDED, ids=lambda each: each.name)
def test_a_decision_that_is_not_taken_is_seen(
    decided: Field[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a reader that knows a key and does nothing with it: in every format that asks for something else than the
    default, the head is refused for its tensors, or its logits move.
    """

    def ignoring(fields: Mapping[str, Any], where: object) -> HeadConfig:
        head = read(fields, where)
        default = (None,) * len(head.windows) if decided.name == "windows" else decided.default
        return replace(head, **{decided.name: default})

    asking = 0
    for name, format in FORMATS.items():
        read = read_eagle if format.facts.get("eagle") == 1 else read_eagle3
        head, other = (reader(format.config, name) for reader in (read, ignoring))
        if getattr(head, decided.name) in (False, getattr(other, decided.name)):
            continue
        asking += 1
        whole = outcome(name, tmp_path / f"{name} whole".replace("/", " "))
        with monkeypatch.context() as patched:
            patched.setattr(heads, read.__name__, ignoring)
            found = outcome(name, tmp_path / name.replace("/", " "))
        if found is not None and found[0].shape == whole[0].shape:
            assert (found[0] - whole[0]).nan_to_num(0).abs().max() > 100 * BUDGET, name
    assert asking > 0


def load(folder: Path, name: str = "SpecForge", **changes: Any) -> None:
    """Loads a format's folder with other values in its configuration."""
    write(FORMATS[name], folder, dict(FORMATS[name].config) | changes)
    load_draft(folder, target_of(FORMATS[name]))


WHOLE_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 24}
WHOLE_YARN |= {"beta_fast": 2.0, "beta_slow": 0.25, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5}
ROPES = {
    **dict.fromkeys(ROPE_FIELDS, WHOLE_YARN),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), LLAMA3 | {"rope_theta": 100.0}),
    "attention_factor": WHOLE_YARN | {"attention_factor": 1.5},
    "type": {key: value for key, value in WHOLE_YARN.items() if key != "rope_type"} | {"type": "yarn"},
}
"""Rotary embeddings that have a field."""


@pytest.mark.parametrize("field", sorted(ROPE_FIELDS))
def test_a_field_of_rotary_embeddings_that_is_ignored_is_seen(field: str, tmp_path: Path) -> None:
    """Each field with another value: the head is refused, or scores otherwise."""
    rope, format = ROPES[field], FORMATS["SpecForge"]
    other = {"yarn": "linear", False: True}.get(rope[field]) or 2 * rope[field] + 1
    scores = []
    for table in (rope, rope | {field: other}):
        config = {key: value for key, value in format.config.items() if key not in keys.ROPE_KEYS}
        tensors = write(format, tmp_path, config | {"rope_parameters": table})
        features = oracle_of(format, tensors).features(list(range(40)))
        draft = load_draft(tmp_path, target_of(format))
        scores.append(log_probs(draft, features, DenseAttention(draft)))
    assert (scores[0] - scores[1]).nan_to_num(0).abs().max() > 100 * BUDGET


@pytest.mark.parametrize("key", keys.EAGLE_CONFIG_KEYS)
def test_a_key_of_eagle_config_that_is_ignored_is_seen(key: str, tmp_path: Path) -> None:
    assert is_seen("NVIDIA Model Optimizer", key, tmp_path / "left out")


ONE_VALUE = [(key, inside) for key in keys.FIXED for inside in (False, True)]
ONE_VALUE.remove(("parallel_drafting", False))  # which says that it is a P-EAGLE head


@pytest.mark.parametrize(("key", "inside"), ONE_VALUE)
def test_a_key_of_one_value_is_refused_with_another(key: str, inside: bool, tmp_path: Path) -> None:
    other = not keys.FIXED[key] if isinstance(keys.FIXED[key], bool) else 3
    ids = FORMATS["SpecForge"].config["eagle_config"]
    with pytest.raises(CheckpointError, match=rf"config\.json asks for .*{key}={other}; served is {keys.FIXED[key]}"):
        load(tmp_path, **({"eagle_config": ids | {key: other}} if inside else {key: other}))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("SpecForge", {"model_type": "llama4_text"}, "model_type='llama4_text'; served are heads of llama, qwen2, "),
        ("MLA", {"model_type": "llama"}, "model_type='llama'; served are heads of deepseek_v2, deepseek_v3, kimi_k2"),
        ("SpecForge", {"num_aux_hidden_states": 4}, r"num_aux_hidden_states=4; the layers \[0, 2, 3\] are 3"),
        ("SafeAILab EAGLE-3", {"num_aux_hidden_states": 1}, "=1; SafeAILab's choice of layers are 3"),
        ("SpecForge", {"sliding_window": 64, "use_sliding_window": True}, "sliding_window=64; layer_types must say"),
        ("SpecForge", {"sliding_window": 64, "use_sliding_window": None}, "sliding_window=64; layer_types must say"),
        ("SpecForge", {"layer_types": ["sliding_attention"]}, r"sliding_window=None; layer_types .* need it"),
        ("SpecForge", {"layer_types": ["chunked_attention"]}, "layer_types=.*; it must name 1 layers, full_attention"),
        ("SpecForge", {"layer_types": ["full_attention"] * 2}, "layer_types=.*; it must name 1 layers"),
        (
            "SpecForge",
            {"layer_types": ["sliding_attention"], "sliding_window": 9, "use_sliding_window": False},
            r"sliding_window=9; .* \(use_sliding_window is False\)",
        ),
        ("SpecForge", {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, r"mrope_section=\[2, 3, 3\]"),
        ("SpecForge", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'; served are def"),
        ("SpecForge", {"rope_scaling": {"rope_type": "linear", "odd": 2.0}}, r"rope_parameters\.odd=2\.0; no rule"),
        ("SpecForge", {"rope_parameters": {"rope_type": "default"}}, "gives its rotary embeddings twice"),
        ("SpecForge", {"rope_scaling": [2]}, "rope_parameters and rope_scaling in .* must be tables"),
        ("SpecForge", {"qk_clip": 3}, "asks for qk_clip=3; no rule covers this key, which could change the head"),
        ("SpecForge", {"eagle_config": {"odd": [1]}}, r"eagle_config\.odd=\[1\]; no rule covers this key"),
        ("SpecForge", {"hidden_size": None}, "does not say hidden_size"),
        ("SpecForge", {"max_position_embeddings": "long"}, "max_position_embeddings='long'; it must be a number"),
        ("SpecForge", {"quantization_config": {"quant_method": "fp8"}}, "holds quantized weights"),
        ("MLA", {"sliding_window": 64}, "sliding_window=64; no rule covers this key"),
        ("SafeAILab EAGLE-1/2", {"qk_norm": True}, "qk_norm=True; no rule covers this key"),
        ("SafeAILab EAGLE-1/2", {"bias": False}, "says bias=False and has fc.bias"),
        ("SafeAILab EAGLE-1/2, Qwen2", {"bias": True}, "says bias=True and lacks fc.bias"),
        (
            "SGLang's reader, tied",
            {"draft_vocab_size": 40},
            r"says tie_word_embeddings.* another draft_vocab_size \(40",
        ),
        ("SpecForge", {"tie_word_embeddings": True}, r"says tie_word_embeddings.* must not have lm_head\.weight"),
        (
            "SafeAILab EAGLE-3, wider target",
            {"target_hidden_size": None},
            "hidden_size 24; .* hidden_size 32",
        ),
        ("speculators", {"norm_before_residual": None}, "does not say norm_before_residual, .* vLLM for true"),
        ("speculators", {"transformer_layer_config": None}, "has no table transformer_layer_config"),
        ("speculators", {"rms_norm_eps": 1e-5}, "gives rms_norm_eps twice"),
        ("speculators", {"speculators_model_type": "mtp"}, "speculators_model_type='mtp'; served are eagle3 heads"),
        ("speculators", {"speculators_model_type": "dflash"}, r"is a block draft \(dflash\), which drafts all tokens"),
        (
            "speculators",
            {"speculators_model_type": "dspark"},
            r"is a block draft \(dspark\), .* worker = .block. runs it",
        ),
        ("speculators", {"speculators_model_type": "peagle"}, "is a P-EAGLE head, .* worker = 'parallel' runs it"),
        ("speculators", {"speculators_model_type": "dflash2"}, r"is a block draft \(dflash2\), .* a convolution"),
        ("SpecForge", {"architectures": ["DFlashDraftModel"]}, r"is a block draft \(DFlashDraftModel\)"),
        ("SpecForge", {"architectures": ["Qwen3DSparkModel"]}, r"is a block draft \(Qwen3DSparkModel\)"),
        ("SpecForge", {"architectures": ["PEagleDraftModel"]}, "is a P-EAGLE head"),
        ("SpecForge", {"parallel_drafting": True}, "is a P-EAGLE head"),
        ("SpecForge", {"ptd_token_id": 3}, "is a P-EAGLE head"),
    ],
)
def test_what_is_refused_by_its_name(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, name, **changes)


def test_nothing_and_false_ask_for_nothing(tmp_path: Path) -> None:
    load(tmp_path, use_qk_norm=False, attention_sinks=None, is_causal=True, logit_scale=1.0, extra={})


def test_the_page_explains_every_key() -> None:
    page = (Path(__file__).parent.parent / "docs" / "heads.md").read_text(encoding="utf-8")
    known = {key for honoured in TABLES.values() for key in honoured} | keys.FIXED.keys()
    assert {key for key in known if f"`{key}`" not in page} == set()


def test_a_folder_with_a_tensor_under_two_names(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = write(FORMATS["SpecForge"], tmp_path)
    again = {"layers.0.hidden_norm.weight": tensors["midlayer.hidden_norm.weight"].clone()}
    save_file(tensors | again, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has two tensors for layers\.0\.hidden_norm\.weight"):
        load_draft(tmp_path, target_of(FORMATS["SpecForge"]))
    assert json.loads((tmp_path / "config.json").read_text())["draft_vocab_size"] == 40
