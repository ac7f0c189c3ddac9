"""What is wrong with a target's folder is said by file, and key or tensor, before a weight is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from attn_backends.errors import CheckpointError, MemoryLimitError
from attn_backends_reference.models import EMBEDDED_TARGETS, load_target, open_target, targets
from attn_backends_reference.models.config_keys import COMPUTED, FOLDED, INERT, REPEATED, check_keys
from tests import reference_models as rm

NAMES = ("gqa", "mla_experts", "qwen3_moe")
NORM = "model.norm.weight"


@pytest.fixture(params=NAMES)
def shards(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder whose weights are in several files."""
    rm.tiny_target(request.param).save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def edit_json(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    fields = json.loads(file.read_text())
    edit(fields)
    file.write_text(json.dumps(fields))


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    edit_json(folder / "model.safetensors.index.json", edit)


def shard_of(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][name]


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight may be read."""

    def read(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("attn_backends_reference.models.weights._Unread.__getitem__", read)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_shards_hold_the_model(shards: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    whole = tmp_path / "whole"
    tensors = {name: part[name] for file in shards.glob("*.safetensors") for part in [load_file(file)] for name in part}
    whole.mkdir()
    (whole / "config.json").write_text((shards / "config.json").read_text())
    save_file(tensors, whole / "model.safetensors")
    given, expected = (load_target(path, dtype)._decoder.state_dict() for path in (shards, whole))
    assert [name for name in expected if not torch.equal(given[name], expected[name])] == []


def test_weights_of_an_old_folder_load(tmp_path: Path) -> None:
    """pytorch_model.bin, and frequencies beside the weights, which are computed now."""
    model = rm.tiny_target("gqa")
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path)
    old = model.state_dict() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    torch.save(old, tmp_path / "pytorch_model.bin")
    assert torch.equal(load_target(tmp_path, torch.float32).head.weight, model.lm_head.weight)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda index: index["weight_map"].update({NORM: "../else.safetensors"}), f"places {NORM} in '../else.*beside"),
        (lambda index: index["weight_map"].update({NORM: "/else.safetensors"}), f"places {NORM} in '/else.*beside"),
        (lambda index: index["weight_map"].update({NORM: 3}), f"places {NORM} in 3, which is not the name"),
        (lambda index: index["weight_map"].update({NORM: "else.safetensors"}), f"places {NORM} in else.*folder lacks"),
        (lambda index: index["weight_map"].pop(NORM), f"1 missing: {NORM}"),
        (lambda index: index.update(weight_map=[]), r"index\.json is not an index with a weight_map: it is \[\]"),
        (lambda index: index.pop("weight_map"), r"index\.json is not an index with a weight_map: it is None"),
    ],
)
def test_an_index_that_is_wrong(shards: Path, edit: Callable[[dict[str, Any]], object], message: str) -> None:
    edit_index(shards, edit)
    with pytest.raises(CheckpointError, match=message):
        load_target(shards, torch.float32)


@pytest.mark.usefixtures("unread")
def test_shards_that_are_wrong(shards: Path) -> None:
    file = shard_of(shards, NORM)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=rf"{file.name}, where .* should be, can't be read: .*incomplete"):
        load_target(shards, torch.float32)
    file.write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=rf"{file.name}, where .* should be, can't be read"):
        load_target(shards, torch.float32)
    file.write_bytes(whole)
    edit_index(shards, lambda index: index["weight_map"].update({"odd.weight": file.name}))
    with pytest.raises(CheckpointError, match=rf"{file.name}, where .* should be, can't be read: .*odd\.weight"):
        load_target(shards, torch.float32)


@pytest.mark.usefixtures("unread")
def test_tensors_of_another_shape_are_found_before_any_is_read(shards: Path) -> None:
    file = shard_of(shards, NORM)
    save_file(load_file(file) | {NORM: torch.ones(7)}, file)
    with pytest.raises(CheckpointError, match=rf"of another shape: {NORM} is \[7\], not \[32\]"):
        load_target(shards, torch.float32)


@pytest.mark.usefixtures("unread")
def test_weights_that_do_not_fit_are_refused_with_their_bytes(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = open_target(shards).num_bytes(torch.float32)
    monkeypatch.setattr("attn_backends.kernels.device_memory.free_bytes", lambda device: needed - 1)
    message = rf"need {needed:,} bytes as torch\.float32 and cpu has {needed - 1:,} free; take a smaller type"
    with pytest.raises(MemoryLimitError, match=message):
        load_target(shards, torch.float32)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sliding_window", 16),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("norm_output", True),
        ("residual_multiplier", 0.2),
        ("attention_sinks", 4),
        ("layer_types", ["sliding_attention", "full_attention"]),
        ("moe_layer_freq", 2),
    ],
)
def test_a_key_that_is_not_honoured_is_refused_by_name(key: str, value: object, tmp_path: Path) -> None:
    rm.tiny_target("gqa").save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda fields: fields.update({key: value}))
    with pytest.raises(CheckpointError, match=rf"config\.json has keys that model_type 'llama' does not .*{key} = "):
        load_target(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("gqa", {"unsloth_version": "2026.1", "auto_map": {}, "rope_theta": 1e4, "torch_dtype": "bfloat16"}),
        ("gqa", {"_attn_implementation_autoset": True, "attn_pdrop": 0.0, "max_sequence_length": 2048}),
        ("gqa", {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 28}),
        ("qwen3_moe", {"head_dim": 128, "max_window_layers": 48, "sliding_window": None}),
        ("mla", {"ep_size": 1, "seq_aux": True, "aux_loss_alpha": 0.001, "scoring_func": None}),
        ("gpt_oss", {"initial_context_length": 4096, "experts_per_token": 2}),
        *(("gqa", {key: 3}) for key in INERT),
    ],
)
def test_keys_that_change_nothing_are_left_alone(name: str, more: dict[str, object]) -> None:
    config = rm.tiny_config(name)
    check_keys(Path(), config.to_dict() | more, config)


NOT_READ = [(kind, key, value) for kind, table in COMPUTED.items() for key, values in table.items() for value in values]


@pytest.mark.parametrize(("kind", "key", "served"), NOT_READ)
def test_a_key_that_transformers_does_not_read_has_the_values_that_it_computes(
    kind: str, key: str, served: object
) -> None:
    """Every key of the table: another value would be ignored."""
    config = CONFIG_MAPPING[kind or "llama"]()
    check_keys(Path(), {key: served}, config)
    other = "odd" if isinstance(served, str) else 3
    with pytest.raises(CheckpointError, match=f"does not honour here: {key} = {other!r}"):
        check_keys(Path(), {key: other}, config)


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind, keys in FOLDED.items() for key in sorted(keys)])
def test_a_key_that_transformers_makes_another_of_is_taken(kind: str, key: str) -> None:
    check_keys(Path(), {key: [1]}, CONFIG_MAPPING[kind]())
    with pytest.raises(CheckpointError, match=rf"does not honour here: {key} = \[1\]"):
        check_keys(Path(), {key: [1]}, CONFIG_MAPPING["llama"]())


@pytest.mark.parametrize(("key", "other"), REPEATED.items())
def test_a_key_that_repeats_another_must_agree_with_it(key: str, other: str) -> None:
    config = rm.tiny_config("gpt_oss")
    with pytest.raises(CheckpointError, match=f"does not honour here: {key} = 5"):
        check_keys(Path(), config.to_dict() | {key: getattr(config, other) + 3}, config)


@pytest.mark.parametrize("name", EMBEDDED_TARGETS)
def test_what_ships_is_opened_without_reading(name: str, unread: None) -> None:
    found = open_target(name)
    assert found.num_bytes(torch.bfloat16) == found.weights.num_bytes


@pytest.mark.parametrize("model_type", ["dynamic", "longrope", "proportional"])
def test_other_rotary_embeddings(model_type: str, tmp_path: Path, unread: None) -> None:
    rm.tiny_target("gqa").save_pretrained(tmp_path)
    rope = {"rope_type": model_type, "rope_theta": 1e4, "factor": 2.0}
    edit_json(tmp_path / "config.json", lambda fields: fields.update(rope_parameters=rope))
    with pytest.raises(CheckpointError, match=f"{model_type} rotary embeddings|can't read .*config.json"):
        targets.open_target(tmp_path)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(("key", "value"), [("mrope_section", [2, 3, 3]), ("partial_rotary_factor", 0.5)])
def test_keys_of_rotary_embeddings_that_are_not_honoured(key: str, value: object, tmp_path: Path) -> None:
    rm.tiny_target("gqa").save_pretrained(tmp_path)
    rope = {"rope_type": "default", "rope_theta": 1e4, key: value}
    edit_json(tmp_path / "config.json", lambda fields: fields.update(rope_parameters=rope))
    with pytest.raises(
        CheckpointError, match=rf"rope_parameters has keys .*'{key}': .*turn queries and keys otherwise"
    ):
        targets.open_target(tmp_path)


def test_an_output_head_that_contradicts_tied_embeddings(tmp_path: Path) -> None:
    rm.tiny_target("gqa").save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda fields: fields.update(tie_word_embeddings=True))
    with pytest.raises(CheckpointError, match=r"says tie_word_embeddings and has an lm_head\.weight that is not its"):
        load_target(tmp_path, torch.float32)
