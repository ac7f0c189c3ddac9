"""The formats of `head_catalogue` are the exporters' own classes', and every key that a reader asks for is known.

`tests/wheel_lists.py` takes both from the wheels of speculators, SpecForge, SGLang and vLLM.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attn_backends.errors import CheckpointError
from attn_backends_reference.models import head_keys as keys
from attn_backends_reference.models import load_draft
from attn_backends_reference.models.heads import EMBEDDING, rename
from tests.block_formats import BLOCKS
from tests.head_catalogue import FORMATS
from tests.head_formats import SGLANG, VLLM, write
from tests.head_runs import target_of
from tests.test_v4_published import MODULE
from tests.wheel_lists import LISTS, read_by

MADE = json.loads(LISTS.read_text())
HEADS = {file: read for file, read in MADE["readers"].items() if "eagle3" in file or "speculators" in file}
HONOURED = {*keys.GQA_HONOURED, *keys.MLA_HONOURED, *keys.FIXED, "architectures"}
ASKED = {(file, key) for file, read in HEADS.items() for key in read["keys"]}
OF_V4 = ("sglang/srt/models/deepseek_v4_nextn.py", "vllm/models/deepseek_v4/nvidia/mtp.py")


@pytest.mark.parametrize("name", MADE["exporters"])
def test_an_exporter_writes_a_format_s_tensors(name: str) -> None:
    """By name and shape. A folder may leave out the embedding, which is the target's then."""
    written = {tensor: tuple(shape) for tensor, shape in MADE["exporters"][name]["tensors"].items()}
    format = (FORMATS | BLOCKS)[name]
    typed = {tensor: format.shape(sizes) for tensor, sizes in format.tensors.items()}
    assert typed | {tensor: shape for tensor, shape in written.items() if tensor == EMBEDDING} == written


def test_every_format_of_an_exporter_is_listed() -> None:
    ours = {name for name, form in FORMATS.items() if form.catalogue in ("SpecForge", "speculators")}
    assert MADE["exporters"].keys() == ours | BLOCKS.keys()
    assert MADE["versions"]["sglang"] in SGLANG
    assert MADE["versions"]["vllm"] in VLLM


def test_what_readers_ask_for_is_found() -> None:
    """So that an empty list is not taken for a reader that asks for nothing."""
    assert {"fc_norm", "norm_output", "draft_vocab_size"} <= {key for _, key in ASKED}
    assert {file: "rms_norm_eps" in read["keys"] for file, read in HEADS.items()} == {
        file: "models/" in file for file in HEADS
    }


@pytest.mark.parametrize("key", sorted({key for _, key in ASKED} - HONOURED))
def test_a_key_that_readers_ask_for_and_we_do_not_honour_is_refused(key: str, tmp_path: Path) -> None:
    write(FORMATS["SpecForge"], tmp_path, dict(FORMATS["SpecForge"].config) | {key: 7})
    with pytest.raises(CheckpointError, match=f"asks for {key}=7; no rule covers this key"):
        load_draft(tmp_path, target_of(FORMATS["SpecForge"]))


def test_no_key_that_readers_ask_for_is_said_to_change_nothing() -> None:
    assert {key for _, key in ASKED} & (keys.INERT | keys.MLA_INERT) == {"architectures"}


@pytest.mark.parametrize("file", HEADS)
def test_names_that_readers_replace_are_replaced(file: str) -> None:
    for old, new in HEADS[file]["renames"].items():
        assert rename(f"{old.rstrip('.')}.x.weight") == rename(f"{new.rstrip('.')}.x.weight")


@pytest.mark.parametrize("file", OF_V4)
def test_the_tensors_of_a_v4_module_are_those_that_readers_set_up(file: str) -> None:
    """Beside its layer's, which all of its layers have, and what it shares with the target."""
    of_layer = ("attn", "ffn", "hc_attn", "hc_ffn")
    own = {name.split(".")[0] for name in MODULE if not name.startswith(of_layer)}
    modules = set(MADE["readers"][file]["modules"])
    containers = {"model", "decoder", "layers", "mtp_block", "embed_tokens", "lm_head", "logits_processor"}
    assert modules - containers - {"shared_head"} == own - {"norm"}
    assert "shared_head" in modules  # which holds the norm


def test_a_source_is_read() -> None:
    read = read_by(
        "class A:\n"
        "    def __init__(self, config):\n"
        "        eagle_config = getattr(config, 'eagle_config', None) or {}\n"
        "        self.fc = torch.nn.Linear(self.config.a, config.b, bias=eagle_config.get('c', 1))\n"
        "        self.width, other = vllm_config.d, hasattr(config, 'e')\n"
        "        self.made = make(config_dict['f'])\n"
        "        legacy_name_map = {'old': 'new', 'gone': None}\n"
        "        config.g = 1\n"
    )
    assert read == {"keys": [*"abc", "e", "eagle_config", "f"], "modules": ["fc"], "renames": {"old": "new"}}
