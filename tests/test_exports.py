"""`attn-backends export`: folders for SGLang and vLLM are the same models, logit for logit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attn_backends.cli import main
from attn_backends.errors import CheckpointError
from attn_backends_reference.models.exports import export, vllm
from tests.engines.sglang.models import CHECKPOINTS
from tests.engines.sglang.oracle import Draft, Model, draft_of, target_states

TARGET, MTP = CHECKPOINTS / "mla" / "target", CHECKPOINTS / "mla" / "mtp"
TEXT = [0, *b"def main(argv):\n    parser = "]


def logits(folder: Path) -> torch.Tensor:
    model = Model(folder)
    head = model.weights.get("lm_head.weight", model.weights["model.embed_tokens.weight"])
    return model.norm(target_states(model, TEXT)[-1], "model.norm") @ head.T


def drafted(target: Path, draft: Path) -> list[torch.Tensor]:
    return Draft(Model(target), Model(draft)).chain_logits(TEXT, [120, 61, 32])


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_target_has_the_same_logits(tmp_path: Path, engine: str) -> None:
    target, _ = export(TARGET, MTP, engine, tmp_path)
    assert torch.allclose(logits(target), logits(TARGET), atol=1e-9, rtol=0)


def test_a_repeated_hidden_state_changes_no_logit_of_a_draft(tmp_path: Path) -> None:
    narrow = export(TARGET, MTP, "sglang", tmp_path / "narrow", min_hidden=0)
    wide = export(TARGET, MTP, "sglang", tmp_path / "wide")
    sizes = [json.loads((folder / "config.json").read_text())["hidden_size"] for folder in (*narrow, *wide)]
    assert sizes == [256, 256, 512, 512]
    for one, other in zip(drafted(*narrow), drafted(*wide), strict=True):
        assert torch.allclose(one, other, atol=1e-9, rtol=0)
    assert draft_of(*narrow).drafted(TEXT, 4, 3, 16) == draft_of(*wide).drafted(TEXT, 4, 3, 16)


def test_modules_for_vllm_are_the_drafts_own(tmp_path: Path) -> None:
    _, draft = export(TARGET, MTP, "vllm", tmp_path, num_modules=2)
    own, found = (load_file(folder / "model.safetensors") for folder in (MTP, draft))
    embedding = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"]
    kept = {name: tensor for name, tensor in own.items() if ".5." not in name}
    assert all(torch.equal(found.pop(name), tensor) for name, tensor in kept.items())
    assert len(found) == 4
    assert all(torch.equal(tensor, embedding) for tensor in found.values())


def test_a_head_of_the_targets_own_is_its_modules_too() -> None:
    fields, own = ({"num_hidden_layers": 4, "num_nextn_predict_layers": 1} for _ in range(2))
    embedding, head = torch.zeros(2, 3), torch.ones(2, 3)
    target = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    (_, written), (_, modules) = vllm((fields, target), (own, {}))
    assert written["lm_head.weight"] is modules["model.layers.4.shared_head.head.weight"] is head
    assert modules["model.layers.4.embed_tokens.weight"] is embedding


def test_what_is_not_exported_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="only DeepseekV3ForCausalLM is exported"):
        export(CHECKPOINTS / "gqa" / "target", MTP, "vllm", tmp_path)
    export(TARGET, MTP, "vllm", tmp_path)
    shutil.rmtree(tmp_path / "target")
    with pytest.raises(CheckpointError, match="draft is there already"):
        export(TARGET, MTP, "vllm", tmp_path)
    assert not (tmp_path / "target").exists(), "half of it was written"


def test_the_command_prints_where_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", "mla", "--draft", "mla-mtp", "--to", "vllm", "--out", str(tmp_path / "out"), "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out) == {name: str(tmp_path / "out" / name) for name in ("target", "draft")}
