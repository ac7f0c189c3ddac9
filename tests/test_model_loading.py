"""Loading targets, drafts and tokenizers: what is read is what was saved, and what is refused, with reasons."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from attn_backends.errors import CheckpointError
from attn_backends.graphs import RecordedGraph
from attn_backends_reference.models import (
    EMBEDDED_DRAFTS,
    EMBEDDED_TARGETS,
    ByteTokenizer,
    load_draft,
    load_mtp,
    load_target,
    load_tokenizer,
)
from spec_metadata import PackedQuery, Step
from tests import reference_models as rm

LENS = (5, 13, 9)


@pytest.fixture(params=["gqa", "mla_q_lora", "mla_experts"])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Path]:
    """A model's name, and folders of its target and draft."""
    rm.tiny_target(request.param).save_pretrained(tmp_path / "target")
    rm.tiny_draft(request.param).save_pretrained(tmp_path / "draft", torch.float32)
    return request.param, tmp_path / "target", tmp_path / "draft"


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_loaded_models_equal_those_that_were_saved(folders: tuple[str, Path, Path]) -> None:
    name, target_folder, draft_folder = folders
    target = load_target(target_folder, torch.float32)
    draft = load_draft(draft_folder, target)
    built = rm.served_target(name, rm.tiny_target(name))
    outputs = []
    for a_target, a_draft in ((target, draft), (built, rm.served_draft(rm.tiny_draft(name), built))):
        tokens, positions = torch.cat(rm.random_tokens(LENS)), torch.cat([torch.arange(n) for n in LENS])
        lens = PackedQuery.of(LENS)
        requests, drafts = rm.Requests(a_target, "fa3", len(LENS)), rm.Requests(a_draft, "fa3", len(LENS))
        step = Step.prefill(lens, requests.committed, requests.paging)
        attention, draft_attention = requests.attention(step), drafts.attention(step)
        hidden = RecordedGraph().capture(partial(a_target.forward, tokens, positions, attention))
        outputs.append((hidden, a_draft.forward(tokens, hidden, positions, draft_attention)))
    for loaded, saved in zip(*outputs, strict=True):
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)


@pytest.mark.smoke
@pytest.mark.parametrize("name", EMBEDDED_DRAFTS)
def test_embedded_checkpoints_load_by_name(name: str) -> None:
    of_target, _, _ = name.partition("-")
    target = load_target(of_target, torch.bfloat16)
    draft = load_draft(name, target)
    assert isinstance(load_tokenizer(of_target, target.vocab_size), ByteTokenizer)
    assert (len(draft.layers), draft.hidden_size) == (1, target.hidden_size)


def test_embedded_mtp_modules_load_by_name() -> None:
    target = load_target("mla", torch.bfloat16)
    assert [len(module.layers) for module in load_mtp("mla-mtp", target)] == [1, 1, 1]
    assert set(EMBEDDED_DRAFTS) - set(EMBEDDED_TARGETS) == {"gqa-eagle3", "mla-mtp"}
    with pytest.raises(CheckpointError, match=r"DeepseekV3ForCausalLMEagle.*supported here: LlamaForCausalLMMTP"):
        load_mtp("mla", target)
    with pytest.raises(CheckpointError, match="'mla-mtp' is neither a folder nor an embedded"):
        load_target("mla-mtp", torch.bfloat16)


def test_dtype_and_sizes(folders: tuple[str, Path, Path]) -> None:
    target = load_target(folders[1], torch.bfloat16)
    draft = load_draft(folders[2], target)
    for model in (target, draft):
        assert (model.dtype, model.device.type) == (torch.bfloat16, "cpu")
        assert (model.vocab_size, model.hidden_size, model.max_positions) == (rm.VOCAB, rm.HIDDEN, 128)
    assert ([layer.id for layer in target.layers], [layer.id for layer in draft.layers]) == ([0, 1], [0])
    rotaries = (target._decoder.rotary_emb, draft._draft.rotary_emb)
    assert [rotary.inv_freq.dtype for rotary in rotaries] == [torch.float32] * 2
    requests, tokens = rm.Requests(draft, "fa3", 3), torch.tensor([1, 2, 3])
    step = Step.decode(requests.committed, requests.paging)
    hidden = torch.ones(3, rm.HIDDEN, dtype=torch.bfloat16)
    assert draft.forward(tokens, hidden, tokens, requests.attention(step)).dtype is torch.bfloat16


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither a folder nor an embedded checkpoint \(gqa, mla, v4\)"):
        load_target(tmp_path / "absent", torch.float32)
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_target(tmp_path, torch.float32)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not a JSON object"):
        load_target(tmp_path, torch.float32)


def test_other_architectures(folders: tuple[str, Path, Path]) -> None:
    _, target_folder, draft_folder = folders
    target = load_target(target_folder, torch.float32)
    with pytest.raises(CheckpointError, match=r"Eagle.*supported here: LlamaForCausalLM, DeepseekV3ForCausalLM"):
        load_target(draft_folder, torch.float32)
    with pytest.raises(CheckpointError, match="has no MTP modules"):
        load_draft(target_folder, target)
    for folder in (target_folder, draft_folder):
        edit_config(folder, architectures=["GemmaForCausalLM"])
    with pytest.raises(CheckpointError, match="GemmaForCausalLM"):
        load_target(target_folder, torch.float32)
    with pytest.raises(CheckpointError, match="supported here: LlamaForCausalLMEagle, DeepseekV3ForCausalLMEagle"):
        load_draft(draft_folder, target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic rotary"),
        (
            {"rope_scaling": {"type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0] * 8}},
            "longrope rotary",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size None; served are"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"model_type": "gpt2", "rope_parameters": None}, "model_type 'gpt2' without rotary embeddings"),
        ({"model_type": "nonesuch"}, r"can't read .*config\.json"),
    ],
)
def test_configurations_that_cannot_be_served(
    folders: tuple[str, Path, Path], changes: dict[str, Any], message: str
) -> None:
    edit_config(folders[1], **changes)
    with pytest.raises(CheckpointError, match=message):
        load_target(folders[1], torch.float32)


@pytest.mark.parametrize("changes", [{"vocab_size": 65}, {"hidden_size": 64}, {"architectures": None}])
def test_a_draft_of_another_target(folders: tuple[str, Path, Path], changes: dict[str, Any]) -> None:
    name, target_folder, draft_folder = folders
    target = load_target(target_folder, torch.float32)
    other = "DeepseekV3ForCausalLMEagle" if name == "gqa" else "LlamaForCausalLMEagle"
    edit_config(draft_folder, **{key: value or [other] for key, value in changes.items()})
    with pytest.raises(CheckpointError, match="does not fit the target"):
        load_draft(draft_folder, target)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(2, None, {2}), ([2, 5], None, {2, 5}), (2, [5, 7], {2, 5, 7}), (None, 9, {9}), (None, None, set())],
)
def test_end_of_text_tokens_are_those_of_both_files(
    config: object, generation: object, expected: set[int], tmp_path: Path
) -> None:
    rm.tiny_target("gqa").save_pretrained(tmp_path)
    edit_config(tmp_path, eos_token_id=config)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert load_target(tmp_path, torch.float32).eos_token_ids == expected


def test_an_end_of_text_token_that_is_none_is_refused(tmp_path: Path) -> None:
    rm.tiny_target("gqa").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, "</s>"]}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id must be .* got \[1, '</s>'\]"):
        load_target(tmp_path, torch.float32)


def test_bytes_round_trip(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, 256)
    assert isinstance(tokenizer, ByteTokenizer)
    ids = tokenizer.encode("größer ✓\n")
    assert ids[0] == tokenizer.bos_token_id == 0
    assert max(ids) < 256
    assert tokenizer.decode([*ids, 0]) == "größer ✓\n"
    assert tokenizer.decode(ids[:4]) == "gr\ufffd"


def test_a_vocabulary_that_is_not_bytes(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a vocabulary of 64 is not that of bytes"):
        load_tokenizer(tmp_path, 64)


def test_a_tokenizer_of_transformers(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<s>": 0, "one": 1, "two": 2, "<unk>": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path, 4)
    assert tokenizer.encode("two one") == [2, 1]
    assert tokenizer.decode([0, 2, 1]) == "two one"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, None)
    with pytest.raises(CheckpointError, match="has 4 tokens, the target 3"):
        load_tokenizer(tmp_path, 3)


def test_importing_needs_no_transformers() -> None:
    code = (
        "import sys; sys.modules['transformers'] = sys.modules['safetensors'] = None\n"
        "import attn_backends, attn_backends_reference.models\n"
        "attn_backends_reference.models.load_target('gqa', None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "needs transformers" in done.stderr.splitlines()[-1], done.stderr


@pytest.mark.parametrize("shown", [True, False])
def test_loading_shows_no_bar_and_leaves_others_as_they_were(
    shown: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rm.tiny_target("gqa").save_pretrained(tmp_path)
    before = logging.is_progress_bar_enabled()
    (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
    try:
        capfd.readouterr()
        load_target(tmp_path, torch.float32)
        assert "Loading weights" not in capfd.readouterr().err
        assert logging.is_progress_bar_enabled() is shown
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()
