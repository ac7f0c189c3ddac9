"""EAGLE-3 drafts: what is read from published folders is what transformers' layers compute; the rest is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attn_backends.errors import CheckpointError
from attn_backends.graphs import RecordedGraph
from attn_backends_reference.models import DraftModel, TargetModel, load_draft, load_mtp, load_target
from attn_backends_reference.models.eagle3 import Eagle3Draft, Eagle3Model, save_eagle3
from attn_backends_reference.models.head_config import read_eagle3
from spec_metadata import PackedQuery, Step, token_positions
from tests import reference_models as rm
from tests.eagle3_models import CONFIG, LAYERS, publish, published, random_draft, tiny_oracle, tiny_target

LENS = (5, 13, 9)
WHOLE = {key: value for key, value in CONFIG.items() if key != "draft_vocab_size"}


@pytest.fixture
def target() -> TargetModel:
    return rm.served_target("gqa", tiny_target())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    publish(tmp_path / "draft", random_draft(CONFIG), CONFIG)
    return tmp_path / "draft"


def run(draft: DraftModel, tokens: list[Tensor], features: list[Tensor]) -> Tensor:
    """A draft's hidden states of requests that are prefilled at once, in a graph."""
    requests = rm.Requests(draft, "fa3", len(tokens))
    step = Step.prefill(PackedQuery.of(tuple(map(len, tokens))), requests.committed, requests.paging)
    attention, positions = requests.attention(step), token_positions(step)
    given, rows = torch.cat(tokens), torch.cat(features)
    return RecordedGraph().capture(lambda: draft.forward(given, draft.fuse(rows), positions, attention))


def outputs(draft: DraftModel) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    features = [torch.randn(n, draft.feature_size, generator=generator) for n in LENS]
    return run(draft, rm.random_tokens(LENS), features)


@torch.no_grad()
def test_a_draft_computes_what_transformers_layers_do(folder: Path, target: TargetModel) -> None:
    oracle, draft = tiny_oracle(), load_draft(folder, target)
    assert isinstance(draft, Eagle3Model)
    assert (draft.feature_layers, draft.feature_size, draft.vocab_size) == (LAYERS, 3 * rm.HIDDEN, rm.VOCAB)
    texts = rm.random_tokens(LENS)
    features = [oracle.features(text.tolist())[:-1] for text in texts]
    hidden = run(draft, [text[1:] for text in texts], features).split([n - 1 for n in LENS])
    for text, rows, taken in zip(texts, hidden, features, strict=True):
        scores = draft.logits(rows).log_softmax(-1)
        ids = draft.target_ids(torch.arange(scores.shape[1]))
        for end in range(2, len(text) + 1):
            expected = oracle.log_probs(text[:end].tolist(), [], taken)[0]
            torch.testing.assert_close(scores[end - 2], expected[ids], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_target_gives_its_states_behind_the_layers(target: TargetModel) -> None:
    """One is the last: behind it, not behind the final norm."""
    text = rm.random_tokens((9,))[0]
    results = []
    for model in (target, target.tapped(LAYERS)):
        requests = rm.Requests(model, "fa3", 1)
        step = Step.prefill(PackedQuery.of((9,)), requests.committed, requests.paging)
        results.append(model.forward_features(text, torch.arange(9), requests.attention(step)))
    (hidden, same), (again, features) = results
    assert same is hidden
    assert torch.equal(again, hidden)
    torch.testing.assert_close(features, tiny_oracle().features(text.tolist()), rtol=1e-4, atol=1e-4)


def test_saved_folders_are_as_published(tmp_path: Path, folder: Path, target: TargetModel) -> None:
    draft = random_draft(CONFIG)
    save_eagle3(draft, tmp_path / "saved", torch.float32)
    given, ours = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "saved"))
    assert given.keys() == ours.keys()
    assert all(torch.equal(given[name], ours[name]) and given[name].dtype == ours[name].dtype for name in given)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]
    expected = outputs(Eagle3Model(draft, target, LAYERS))
    for path in (folder, tmp_path / "saved"):
        assert torch.equal(outputs(load_draft(path, target)), expected)


def test_a_draft_gets_the_target_s_dtype(folder: Path, tmp_path: Path) -> None:
    tiny_target().save_pretrained(tmp_path / "target")
    target = load_target(tmp_path / "target", torch.bfloat16)
    draft = load_draft(folder, target)
    assert (draft.dtype, draft._draft.fc.weight.dtype) == (torch.bfloat16, torch.bfloat16)
    assert (draft._draft.d2t.dtype, draft._draft.t2d.dtype) == (torch.int64, torch.bool)
    assert draft._draft.rotary_emb.inv_freq.dtype is torch.float32
    features = [torch.ones(n, draft.feature_size, dtype=torch.bfloat16) for n in LENS]
    assert draft.logits(run(draft, rm.random_tokens(LENS), features)).dtype is torch.bfloat16
    assert (draft.embedding, draft.head) == (target.embedding, draft._draft.lm_head)


@pytest.mark.parametrize("maps", [True, False])
def test_a_draft_of_the_whole_vocabulary_may_lack_maps(tmp_path: Path, target: TargetModel, maps: bool) -> None:
    draft = random_draft(WHOLE)
    assert draft.lm_head.out_features == rm.VOCAB
    publish(tmp_path / "draft", draft, WHOLE)
    if not maps:
        edit_weights(tmp_path / "draft", lambda tensors: [tensors.pop(name) for name in ("d2t", "t2d")])
    ids = torch.arange(rm.VOCAB)
    assert torch.equal(load_draft(tmp_path / "draft", target).target_ids(ids), ids)


def test_the_layers_are_the_published_ones_unless_named(tmp_path: Path) -> None:
    """The state is published before layers 2, n // 2 and n - 3, which is behind those one lower."""
    target = rm.served_target("gqa", tiny_target(7))
    publish(tmp_path, random_draft(CONFIG), {key: value for key, value in CONFIG.items() if key != "eagle_config"})
    assert load_draft(tmp_path, target).feature_layers == (1, 2, 3)


def test_an_embedding_of_the_folder_is_the_draft_s_own_unless_it_is_the_target_s(
    folder: Path, target: TargetModel
) -> None:
    weight = tiny_target().model.embed_tokens.weight
    edit_weights(folder, lambda tensors: tensors.update({"embed_tokens.weight": weight.clone()}))
    assert load_draft(folder, target).embedding is target.embedding
    edit_weights(folder, lambda tensors: tensors["embed_tokens.weight"].mul_(2))
    assert torch.equal(load_draft(folder, target).embedding.weight, 2 * weight)
    edit_weights(folder, lambda tensors: tensors.update({"embed_tokens.weight": torch.ones(rm.VOCAB, 33)}))
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is \[64, 33\], not \[64, 32\]"):
        load_draft(folder, target)


def pickle_weights(folder: Path, content: object = None) -> None:
    """Puts pytorch_model.bin in the place of model.safetensors. content: None for its tensors."""
    whole = folder / "model.safetensors"
    torch.save(load_file(whole) if content is None else content, folder / "pytorch_model.bin")
    whole.unlink()


def test_safeailab_s_own_folders_are_read(folder: Path, target: TargetModel) -> None:
    """They name the architecture of their target, and hold pickled tensors."""
    expected = outputs(load_draft(folder, target))
    pickle_weights(folder)
    edit_config(folder, architectures=["LlamaForCausalLM"])
    assert torch.equal(outputs(load_draft(folder, target)), expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"fc.weight": Path("/")}, r"pytorch_model.bin can't be read: .*[Ww]eights.?only"),
        ({"epoch": 3}, "pytorch_model.bin holds something else than tensors by name"),
        ([torch.ones(2)], "pytorch_model.bin holds something else than tensors by name"),
        ({"fc.weight": torch.ones(32, 96)}, r"missing: d2t, layers\.0\.hidden_norm\.weight, "),
    ],
    ids=["code", "numbers", "list", "missing"],
)
def test_pickles_of_anything_else_are_refused(folder: Path, target: TargetModel, content: object, message: str) -> None:
    pickle_weights(folder, content)
    with pytest.raises(CheckpointError, match=message):
        load_draft(folder, target)


def test_a_pickle_that_is_none_is_refused(folder: Path, target: TargetModel) -> None:
    pickle_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"PK" + bytes(200))
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin can't be read"):
        load_draft(folder, target)


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def shift(tensors: dict[str, Tensor], draft_id: int, by: int) -> None:
    tensors["d2t"][draft_id] += by


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.pop("midlayer.hidden_norm.weight"), r"1 missing: layers\.0\.hidden_norm\.weight"),
        (lambda w: w.pop("d2t"), "1 missing: d2t"),
        (lambda w: w.update({"fc.weight": torch.ones(32, 64)}), r"fc\.weight is \[32, 64\], not \[32, 96\]"),
        (
            lambda w: w.update({"midlayer.self_attn.k_proj.weight": torch.ones(64, 32)}),
            r"k_proj\.weight is \[64, 32\], not \[64, 64\]",
        ),
        (lambda w: w.update({"lm_head.weight": torch.ones(64, 32)}), r"lm_head\.weight is \[64, 32\], not \[40, 32\]"),
        (lambda w: w.update({"odd": torch.ones(7)}), "not part of the architecture: odd"),
        (
            lambda w: shift(w, 39, 64),
            r"d2t in .* maps 1 draft ids out of the target's vocabulary of 64.* 39, to 39 \+ ",
        ),
        (lambda w: shift(w, 0, -64), "d2t in .* maps 1 draft ids out of the target's vocabulary of 64.* 0, to 0 "),
        (lambda w: w["d2t"].zero_(), "d2t in .* names 40 different target ids for 40 draft ids, and t2d 40, "),
        (
            lambda w: w["d2t"].copy_(5 - torch.arange(40)),
            "d2t in .* names 1 different target ids for 40 draft ids, and t2d 40, ",
        ),
        (
            lambda w: (w["d2t"].copy_(5 - torch.arange(40)), w["t2d"].zero_()[5].fill_(True)),
            "d2t in .* names 1 different target ids for 40 draft ids, and t2d 1, 1 of them the same",
        ),
        (lambda w: w["t2d"].fill_(True), "names 40 different target ids for 40 draft ids, and t2d 64, 40 of them"),
        (
            lambda w: w.update(d2t=w["d2t"].int()),
            r"holds d2t as torch\.int32 and t2d as torch\.bool, not int64 and bool",
        ),
    ],
    ids=["missing", "map", "fc", "k_proj", "head", "odd", "high", "low", "other", "one", "repeated", "all", "type"],
)
def test_tensors_that_do_not_match(
    folder: Path, target: TargetModel, edit: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    edit_weights(folder, edit)
    with pytest.raises(CheckpointError, match=message):
        load_draft(folder, target)


def of_layers(*layers: object) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": layers}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (of_layers(0, 2, 4), r"after the layers \[0, 2, 4\] of a target with 4; it needs 3 different ones"),
        (of_layers(0, 1, 1.5), r"eagle_aux_hidden_state_layer_ids=\[0, 1, 1\.5\]; it must be a list of layers"),
        (of_layers("a", 1, 2), r"eagle_aux_hidden_state_layer_ids=\['a', 1, 2\]; it must be a list of layers"),
        ({"eagle_config": [1, 2, 3]}, r"eagle_config in .* is \[1, 2, 3\]; it must be a table"),
        (of_layers(-1, 2, 3), r"after the layers \[-1, 2, 3\]"),
        (of_layers(0, 3), r"fc\.weight is \[32, 96\], not \[32, 64\]"),
        (of_layers(0, 0, 3), r"after the layers \[0, 0, 3\]"),
        (of_layers(3, 2, 0), r"after the layers \[3, 2, 0\].*from low to high"),
        (
            {"eagle_config": {}},
            r"after the layers \[1, 1, 0\] of a target with 4.*fewer than 7 layers need them named",
        ),
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            r"asks for eagle_config\.use_aux_hidden_state=False; served is True",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
            r"before the layers \[1, 2, 3\] and, in eagle_config, after \[0, 2, 3\]; these are not the same",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 4], "eagle_config": {}}, r"after the layers \[-1, 0, 3\]"),
        ({"num_hidden_layers": 2}, r"missing: layers\.1\.input_layernorm\.weight, "),
        ({"hidden_size": 64}, "does not fit the target: .* hidden_size 64; .* hidden_size 32"),
        ({"vocab_size": 65}, "does not fit the target: .* vocab_size 65; .* vocab_size 64"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights"),
    ],
)
def test_configurations_that_do_not_match(
    folder: Path, target: TargetModel, changes: dict[str, Any], message: str
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_draft(folder, target)


def test_a_draft_is_no_target_and_no_module(folder: Path, target: TargetModel) -> None:
    with pytest.raises(CheckpointError, match=r"\['LlamaForCausalLMEagle3'\]; supported here: LlamaForCausalLMMTP"):
        load_mtp(folder, target)
    with pytest.raises(CheckpointError, match=r"\['LlamaForCausalLMEagle3'\]; supported here: LlamaForCausalLM, "):
        load_target(folder, torch.float32)


def test_biases_of_the_configuration_are_those_of_the_tensors(tmp_path: Path, target: TargetModel) -> None:
    config = CONFIG | {"attention_bias": True}
    draft = Eagle3Draft(read_eagle3(config, "the draft"))
    biases = {name: x for name, x in draft.state_dict().items() if name.endswith("bias")}
    assert {name.rsplit(".", 2)[1] for name in biases} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    publish(tmp_path, draft, config)
    with pytest.raises(CheckpointError, match=r"4 missing: layers\.0\.self_attn\.k_proj\.bias"):
        load_draft(tmp_path, target)
    save_file(published(draft) | biases, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_draft(tmp_path, target)


@torch.no_grad()
def test_the_oracle_sees_each_state() -> None:
    """A recompute without the middle layer's state scores otherwise, so that it judges what a draft is given."""
    oracle, text = tiny_oracle(), rm.random_tokens((9,))[0].tolist()
    known, features = text[:8], oracle.features(text)
    right = oracle.log_probs(known, text[8:], features)
    for columns in range(0, 3 * rm.HIDDEN, rm.HIDDEN):
        changed = features.clone()
        changed[:, columns : columns + rm.HIDDEN] = 0
        assert float((oracle.log_probs(known, text[8:], changed) - right).nan_to_num(0).abs().max()) > 0.1
    assert oracle.features(text).shape == replace(oracle, layers=(0, 1, 2)).features(text).shape
