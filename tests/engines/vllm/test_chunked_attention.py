"""Llama 4's layers, which see the chunk of their row: vLLM makes requests of chunks, and our builder plans those."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Llama4ForCausalLM, Llama4TextConfig
from vllm.model_executor.layers.attention import chunked_local_attention

from tests.engines.vllm.engine import NUM_DRAFTED, Row, prompts, run
from tests.engines.vllm.laws import wrong_drafts
from tests.engines.vllm.recompute import greedy_by_transformers
from tests.engines.vllm.shadow import compared

CHUNK = 32
FIELDS: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "intermediate_size_mlp": 96, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "attention_chunk_size": CHUNK,
    "moe_layers": [], "interleave_moe_layer_step": 0, "num_local_experts": 1, "initializer_range": 0.3,
    "attn_temperature_tuning": False, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": 0,
}  # fmt: skip
DRAFT = {"yoco_global_kv_layer": None, "yoco_local_kv_layer": None, "draft_vocab_size": 256}
ROWS = [
    Row("llama4", "ATTN_BACKENDS_FA3"),
    pytest.param(Row("llama4", "ATTN_BACKENDS_FA3", "PIECEWISE", caching=True), marks=pytest.mark.full),
    pytest.param(Row("llama4", "ATTN_BACKENDS_FA3", caching=True, drafts=False), marks=pytest.mark.full),
]


@pytest.fixture(scope="module")
def llama4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, the last of which sees all, and EAGLE's head with a layer that sees a chunk; of random weights."""
    folder = tmp_path_factory.mktemp("llama4")
    torch.manual_seed(0)
    for name, rope in (("llama4", [1, 1, 1, 0]), ("llama4-draft", [1])):
        model = Llama4ForCausalLM(Llama4TextConfig(**FIELDS, num_hidden_layers=len(rope), no_rope_layers=rope))
        model.config.architectures = ["Llama4ForCausalLM"]
        model.save_pretrained(folder / name)
    config = json.loads((folder / "llama4-draft/config.json").read_text())
    (folder / "llama4-draft/config.json").write_text(json.dumps(config | DRAFT))
    tensors = {key.removeprefix("model."): value for key, value in model.state_dict().items()}
    head = {key: value for key, value in tensors.items() if "embed_tokens" not in key and "lm_head" not in key}
    head["fc.weight"] = 0.1 * torch.randn(64, 128)
    save_file(head, folder / "llama4-draft/model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Batches of chunks keep the batch that they were made of. Returns how many more chunks each has than requests."""
    divide, seen = chunked_local_attention.make_local_attention_virtual_batches, list[int]()

    def divided(chunk: int, common: Any, block_size: int) -> Any:
        chunks, table = divide(chunk, common, block_size)
        chunks.whole = common
        seen.append(chunks.num_reqs - common.num_reqs)
        return chunks, table

    monkeypatch.setattr(chunked_local_attention, "make_local_attention_virtual_batches", divided)
    return seen


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_row_sees_its_chunk(row: Row, llama4: Path, whole: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", "1")
    asked = {"method": "eagle", "model": str(llama4 / "llama4-draft"), "num_speculative_tokens": NUM_DRAFTED}
    row = replace(row, others=(("speculative_config", asked if row.drafts else None),))
    given = prompts(4)
    with compared() as shadow:
        found = run(row, llama4, given, 12, begin=shadow.begin)
    assert max(whole) > 1
    for prompt, text in zip(given, found.tokens, strict=True):
        assert text == greedy_by_transformers(llama4 / "llama4", prompt, text)
    counts = {name: sum(kind["forwards"] for kind in kinds.values()) for name, kinds in found.attended.items()}
    assert sum(shadow.compared.values()) == sum(counts.values()) > 0
    assert bool(found.cached) == row.caching
    assert bool(found.graphs.get("replayed")) == (row.graphs != "NONE")
    if not row.drafts:
        return
    steps, loops = sum(found.steps.values()), sum(max(0, number - 1) for number in found.drafted)
    assert counts == dict.fromkeys(found.layers[0], steps) | dict.fromkeys(found.layers[1], steps + loops)
    wanted = run(replace(row, backend="TESTS_PLAIN", graphs="NONE"), llama4, given, 12)
    assert wrong_drafts(found, wanted, given) == []
