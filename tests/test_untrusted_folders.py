"""Folders from anywhere: Python that they bring along is never run, no hub is asked, and what is broken is named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from attn_backends.errors import CheckpointError
from attn_backends_reference.models import load_draft, load_mtp, load_target, load_tokenizer
from attn_backends_reference.models.deepseek_v4_draft import MtpDraft
from attn_backends_reference.models.draft import EagleDraft
from tests import reference_models as rm

PYTHON = """
from pathlib import Path

from transformers import {base}

Path({ran!r}).write_text("ran")


class Evil({base}):
    model_type = "evil"
"""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the Python of a folder writes; somebody at the keyboard agrees to everything."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "ran.txt"


def write_json(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(fields))


def write_words(folder: Path) -> None:
    """A tokenizer of transformers with two words."""
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)


LOADERS: dict[str, Callable[[Path], object]] = {
    "target": lambda folder: load_target(folder, torch.float32),
    "draft": lambda folder: load_draft(folder, rm.served_target("gqa", rm.tiny_target("gqa"))),
    "mtp": lambda folder: load_mtp(folder, rm.served_target("gqa", rm.tiny_target("gqa"))),
    "eagle": EagleDraft.from_pretrained,
    "v4": MtpDraft.from_pretrained,
}


@pytest.mark.parametrize("loader", LOADERS)
def test_a_configuration_that_needs_its_own_python_is_refused(loader: str, tmp_path: Path, ran: Path) -> None:
    (tmp_path / "evil.py").write_text(PYTHON.format(base="PreTrainedConfig", ran=str(ran)))
    auto_map, named = {"AutoConfig": "evil.Evil"}, "LlamaForCausalLM"
    write_json(tmp_path / "config.json", architectures=[named], model_type="evil", auto_map=auto_map)
    with pytest.raises(
        CheckpointError, match=r"config\.json needs Python code .*auto_map: \{'AutoConfig': 'evil.Evil'"
    ):
        LOADERS[loader](tmp_path)
    assert not ran.exists()


def test_python_that_a_known_architecture_does_not_need_is_left_alone(tmp_path: Path, ran: Path) -> None:
    """Published DeepSeek-V3 folders bring such code along."""
    rm.tiny_target("gqa").save_pretrained(tmp_path)
    (tmp_path / "evil.py").write_text(PYTHON.format(base="PreTrainedConfig", ran=str(ran)))
    fields = json.loads((tmp_path / "config.json").read_text())
    classes = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "evil.Evil")
    write_json(tmp_path / "config.json", **fields | {"auto_map": classes})
    load_target(tmp_path, torch.float32)
    assert not ran.exists()


def test_attention_that_a_folder_asks_for_is_not_fetched(tmp_path: Path) -> None:
    """transformers would ask a hub for such a kernel; the backends' attention takes its place in any case."""
    rm.tiny_target("gqa").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", **fields | {"attn_implementation": "somebody/attention"})
    load_target(tmp_path, torch.float32)


def test_a_tokenizer_that_needs_its_own_python_is_refused(tmp_path: Path, ran: Path) -> None:
    (tmp_path / "evil.py").write_text(PYTHON.format(base="PreTrainedTokenizer", ran=str(ran)))
    named = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    write_json(tmp_path / "tokenizer_config.json", **named)
    with pytest.raises(
        CheckpointError, match=r"tokenizer_config\.json needs Python code .*'evil.Evil'.* never run here"
    ):
        load_tokenizer(tmp_path, 4)
    assert not ran.exists()


def test_a_tokenizer_that_can_not_be_read_is_refused(tmp_path: Path) -> None:
    write_words(tmp_path)
    load_tokenizer(tmp_path, 4)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE"')
    with pytest.raises(CheckpointError, match=r"can't read the tokenizer in .*tokenizer\.json"):
        load_tokenizer(tmp_path, 4)


@pytest.mark.parametrize("kind", [EagleDraft, MtpDraft])
def test_a_draft_of_a_name_is_no_question_for_a_hub(kind: type[EagleDraft], monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object, **__: object) -> None:
        raise AssertionError("a hub was asked")

    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", ask)
    with pytest.raises(CheckpointError, match=r"somebody/eagle has no config\.json; .* a folder .* on this machine"):
        kind.from_pretrained("somebody/eagle")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "somebody's"),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 0),
        ("head_dim", -1),
        ("vocab_size", -1),
        ("pad_token_id", 10**12),
        ("intermediate_size", 10**12),
        ("dtype", []),
        ("model_type", []),
        ("rope_parameters", {"rope_type": 3}),
    ],
)
def test_a_configuration_of_wrong_values_is_refused(key: str, value: object, tmp_path: Path) -> None:
    rm.tiny_target("gqa").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", **fields | {key: value})
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
        load_target(tmp_path, torch.float32)
