"""MTP modules: what is read from published folders is what transformers' layers compute; the rest is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from attn_backends.errors import CheckpointError
from attn_backends.graphs import RecordedGraph
from attn_backends_reference.models import DraftModel, TargetModel, load_draft, load_mtp, load_target
from attn_backends_reference.models.mtp import MtpModule, module_config, save_mtp
from spec_metadata import PackedQuery, Step, token_positions
from tests import reference_models as rm
from tests.mtp_models import NAMES, NUM_LAYERS, NUM_MODULES, deep_model, edit_config, extract, publish, random_mtp
from training import models as training_models
from training.corpus import load_heldout
from training.cycles import MtpWindow, Shape
from training.models import CHECKPOINTS

LENS = (5, 13, 9)
BACKENDS = {"gqa_bias": "fa3", "mla_q_lora": "flashinfer_mla", "mla_experts": "trtllm_mla"}


class Published:
    """A tiny model's published folder, and one of its MTP modules alone."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.model = name, deep_model(name)
        self.target_folder, self.mtp_folder = root / "target", root / "mtp"
        self.extra = publish(self.target_folder, self.model)
        extract(self.target_folder, self.mtp_folder)

    @property
    def target(self) -> TargetModel:
        return load_target(self.target_folder, torch.float32)

    def compute(self, index: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Module `index` of transformers' layer on one request: tokens [n] of its rows, hidden [n, HIDDEN]."""
        base, prefix = self.model.model, f"model.layers.{NUM_LAYERS + index}."

        def normed(rows: Tensor, name: str) -> Tensor:
            return nn.functional.rms_norm(rows, rows.shape[-1:], self.extra[f"{prefix}{name}.weight"], 1e-6)

        embeds = base.embed_tokens(tokens[None])
        rows = torch.cat((normed(embeds, "enorm"), normed(hidden[None], "hnorm")), -1)
        rows = rows @ self.extra[f"{prefix}eh_proj.weight"].T
        rotation = base.rotary_emb(rows, torch.arange(len(tokens))[None])
        mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
        rows = base.layers[NUM_LAYERS + index](rows, attention_mask=mask, position_embeddings=rotation)
        return normed(rows[0], "shared_head.norm")


@pytest.fixture(params=NAMES)
def published(request: pytest.FixtureRequest, tmp_path: Path) -> Published:
    return Published(request.param, tmp_path)


@pytest.fixture
def experts(tmp_path: Path) -> Published:
    return Published("mla_experts", tmp_path)


def run(module: DraftModel, backend: str, tokens: list[Tensor], hidden: list[Tensor]) -> list[Tensor]:
    """A module's hidden states of requests that are prefilled at once."""
    requests = rm.Requests(module, backend, len(tokens))
    lens = tuple(len(row) for row in tokens)
    step = Step.prefill(PackedQuery.of(lens), requests.committed, requests.paging)
    attention, positions = requests.attention(step), token_positions(step)
    rows, states = torch.cat(tokens), torch.cat(hidden)
    return list(RecordedGraph().capture(lambda: module.forward(rows, states, positions, attention)).split(lens))


def test_modules_compute_what_transformers_layers_do(published: Published) -> None:
    """Each after the one before, as they draft; of three requests, in a graph."""
    target = published.target
    modules = load_mtp(published.target_folder, target)
    assert len(modules) == NUM_MODULES
    assert [[layer.id for layer in module.layers] for module in modules] == [[0], [0]]
    generator = torch.Generator().manual_seed(6)
    hidden = [torch.randn(n, rm.HIDDEN, generator=generator) for n in LENS]
    expected = hidden
    for index, module in enumerate(modules):
        tokens = rm.random_tokens(LENS, seed=index)
        hidden = run(module, BACKENDS[published.name], tokens, hidden)
        expected = [published.compute(index, *rows) for rows in zip(tokens, expected, strict=True)]
        for ours, plain in zip(hidden, expected, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
            scores = published.model.lm_head(plain)
            torch.testing.assert_close(module.logits(ours), scores, rtol=1e-4, atol=1e-3)


def test_a_target_loads_from_a_folder_with_mtp_modules(published: Published) -> None:
    config = AutoConfig.from_pretrained(published.target_folder, attn_implementation="eager")
    plain = AutoModelForCausalLM.from_config(config).eval()
    plain.load_state_dict(published.model.state_dict(), strict=False)
    tokens = rm.random_tokens((9,))[0]
    target = published.target
    requests = rm.Requests(target, BACKENDS[published.name], 1)
    step = Step.prefill(PackedQuery.of((9,)), requests.committed, requests.paging)
    logits = target.logits(target.forward(tokens, torch.arange(9), requests.attention(step)))
    with torch.no_grad():
        expected = plain(input_ids=tokens[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)


def outputs(modules: tuple[DraftModel, ...], backend: str) -> list[Tensor]:
    """Of each module on the same input."""
    tokens, hidden = rm.random_tokens(LENS), [torch.ones(n, rm.HIDDEN) for n in LENS]
    return [torch.cat(run(module, backend, tokens, hidden)) for module in modules]


def test_a_folder_of_modules_alone(published: Published, tmp_path: Path) -> None:
    """Cut out of the target's folder, or saved by us: the same modules, which share embedding and head."""
    target, backend = published.target, BACKENDS[published.name]
    config = AutoConfig.from_pretrained(published.mtp_folder, experts_implementation="batched_mm")
    saved = [MtpModule(module_config(config, index)) for index in range(NUM_MODULES)]
    for index, module in enumerate(saved):
        rm.randomize(module, index)
    save_mtp(saved, config, tmp_path / "saved", torch.float32)
    given = load_file(tmp_path / "saved" / "model.safetensors")
    assert {name: x.shape for name, x in given.items()} == {
        name: x.shape for name, x in load_file(published.mtp_folder / "model.safetensors").items()
    }
    alone, ours = load_mtp(published.mtp_folder, target), load_mtp(tmp_path / "saved", target)
    expected = outputs(load_mtp(published.target_folder, target), backend)
    assert all(module.embedding is target.embedding and module.head is target.head for module in alone)
    torch.testing.assert_close(outputs(alone, backend), expected, rtol=0, atol=0)
    built = tuple(DraftModel(module, target) for module in saved)
    torch.testing.assert_close(outputs(ours, backend), outputs(built, backend), rtol=0, atol=0)


def test_a_draft_is_the_first_module(published: Published) -> None:
    target, backend = published.target, BACKENDS[published.name]
    expected = outputs(load_mtp(published.target_folder, target), backend)[0]
    for folder in (published.target_folder, published.mtp_folder):
        (given,) = outputs((load_draft(folder, target),), backend)
        torch.testing.assert_close(given, expected, rtol=0, atol=0)


def test_modules_get_the_target_s_dtype(experts: Published) -> None:
    target = load_target(experts.target_folder, torch.bfloat16)
    for module in load_mtp(experts.target_folder, target):
        assert (module.dtype, module.hidden_size, module.max_positions) == (torch.bfloat16, rm.HIDDEN, 128)
        assert module._draft.eh_proj.weight.dtype is torch.bfloat16
        assert module._draft.rotary_emb.inv_freq.dtype is torch.float32


@pytest.mark.parametrize("name", ["gqa", "mla", "mla_experts"])
def test_random_modules_are_seeded(name: str) -> None:
    target = rm.served_target(name, rm.tiny_target(name))
    backend = "fa3" if name == "gqa" else "flashinfer_mla"
    first, again, other = (outputs(random_mtp(target, 2, seed), backend) for seed in (1, 1, 3))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert len({float(out.sum()) for out in first + other}) == 4


def edit_shard(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Changes the tensors of the shard that holds what MTP modules have beside their layers, and the index."""
    shard, file = folder / "model-mtp.safetensors", folder / "model.safetensors.index.json"
    index, tensors = json.loads(file.read_text()), load_file(shard)
    before = set(tensors)
    edit(tensors)
    save_file(tensors, shard, metadata={"format": "pt"})
    places = {name: place for name, place in index["weight_map"].items() if name not in before - set(tensors)}
    file.write_text(json.dumps(index | {"weight_map": places | dict.fromkeys(tensors, shard.name)}))


ENORM, EMBEDDING, HEAD = (f"model.layers.3.{name}.weight" for name in ("enorm", "embed_tokens", "shared_head.head"))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.pop(ENORM), f"1 missing: {ENORM}"),
        (lambda w: w.update({ENORM: torch.ones(7)}), rf"{ENORM} is \[7\], not \[32\]"),
        (
            lambda w: w.update({"model.layers.3.odd": torch.ones(7)}),
            r"not part of the architecture: model.layers.3.odd",
        ),
        (lambda w: w[EMBEDDING].mul_(2), f"output head which is not the target's: {EMBEDDING}. MTP"),
        (lambda w: w[HEAD][5].add_(1), f"output head which is not the target's: {HEAD}. MTP"),
        (lambda w: w.update({HEAD: torch.ones(65, 32)}), rf"{HEAD} is \[65, 32\], not \[64, 32\]"),
        (
            lambda w: w.update({"model.layers.4.enorm.weight": torch.ones(32)}),
            r"should hold 2 MTP modules .* the layers \[2, 3\] .* tensors of \[2, 3, 4\]",
        ),
    ],
    ids=["missing", "shape", "unexpected", "embedding", "head", "head shape", "one more"],
)
def test_tensors_that_do_not_match(
    experts: Published, edit: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    target = experts.target
    edit_shard(experts.target_folder, edit)
    with pytest.raises(CheckpointError, match=message):
        load_mtp(experts.target_folder, target)


def test_embedding_and_head_may_be_absent(experts: Published) -> None:
    target = experts.target
    edit_shard(experts.target_folder, lambda tensors: [tensors.pop(name) for name in (EMBEDDING, HEAD)])
    assert len(load_mtp(experts.target_folder, target)) == NUM_MODULES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nextn_predict_layers": 3}, r"should hold 3 MTP modules .* \[2, 3, 4\] .* it has tensors of \[2, 3\]"),
        ({"num_nextn_predict_layers": None}, r"should hold 0 MTP modules .* it has tensors of \[2, 3\]"),
        ({"num_nextn_predict_layers": 0}, r"should hold 0 MTP modules .* it has tensors of \[2, 3\]"),
        ({"vocab_size": 65}, "does not fit the target: .* vocab_size 65; .* vocab_size 64"),
        ({"hidden_size": 64}, "does not fit the target: .* hidden_size 64; .* hidden_size 32"),
        ({"num_hidden_layers": 3}, "does not fit the target: .* num_hidden_layers 3; .* num_hidden_layers 2"),
        ({"architectures": ["LlamaForCausalLMMTP"]}, "says architectures LlamaForCausalLM; .* DeepseekV3ForCausalLM"),
        ({"architectures": ["DeepseekV4ForCausalLMMTP"]}, "supported here: LlamaForCausalLMMTP, LlamaForCausalLM, "),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size None; served are"),
    ],
)
def test_configurations_that_do_not_match(experts: Published, changes: dict[str, object], message: str) -> None:
    target = experts.target
    for folder in (experts.target_folder, experts.mtp_folder):
        edit_config(folder, **changes)
        with pytest.raises(CheckpointError, match=message):
            load_mtp(folder, target)


def test_a_target_s_folder_without_modules(tmp_path: Path) -> None:
    model: PreTrainedModel = rm.tiny_target("mla")
    model.save_pretrained(tmp_path)
    target = load_target(tmp_path, torch.float32)
    for load in (load_mtp, load_draft):
        with pytest.raises(CheckpointError, match=r"has no MTP modules \(num_nextn_predict_layers is 0\)"):
            load(tmp_path, target)


def test_layers_behind_the_last_are_mtp_modules_or_refused(experts: Published) -> None:
    """A target whose configuration counts a layer too few is no target with an MTP module."""
    names = [f"model.layers.3.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm")]
    edit_shard(experts.target_folder, lambda tensors: [tensors.pop(name) for name in names])
    with pytest.raises(CheckpointError, match=r"not part of the architecture: model\.layers\.3\."):
        load_target(experts.target_folder, torch.float32)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda index, shard: shard.unlink(), "in model-mtp.safetensors, which the folder lacks"),
        (lambda index, shard: shard.write_bytes(b"torn"), r"model-mtp.safetensors, where \S+ should be, can't be read"),
        (
            lambda index, shard: save_file({"a": torch.ones(1)}, shard),
            r"model-mtp.safetensors, where \S+ should be, can't be read",
        ),
        (lambda index, shard: index.write_text("{"), "index.json is not a JSON object"),
        (lambda index, shard: index.write_text("{}"), "is not an index with a weight_map"),
        (lambda index, shard: index.unlink(), "no model.safetensors that can be read"),
    ],
    ids=["no shard", "torn shard", "wrong shard", "torn index", "no map", "no index"],
)
def test_shards_that_cannot_be_read(experts: Published, write: Callable[[Path, Path], object], message: str) -> None:
    target, folder = experts.target, experts.target_folder
    write(folder / "model.safetensors.index.json", folder / "model-mtp.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_mtp(folder, target)


def test_a_folder_of_modules_holds_nothing_else(experts: Published) -> None:
    file, target = experts.mtp_folder / "model.safetensors", experts.target
    save_file(load_file(file) | {"lm_head.weight": torch.ones(64, 32)}, file)
    with pytest.raises(CheckpointError, match=r"not part of the architecture: lm_head\.weight"):
        load_mtp(experts.mtp_folder, target)
    with pytest.raises(CheckpointError, match=r"\['DeepseekV3ForCausalLMMTP'\]; supported here"):
        load_target(experts.mtp_folder, torch.float32)


@torch.no_grad()
def test_the_training_evaluator_drafts_as_a_full_recompute() -> None:
    """At roots near a file's start, where late modules have fewer rows, and far from it."""
    roots = [1, 2, 3, 4, 60, 98]
    plain = training_models.load_target(CHECKPOINTS / "mla" / "target", torch.float32, torch.device("cpu"))
    modules = training_models.new_mtp()
    for index, module in enumerate(modules):
        rm.randomize(module, index)
    file = torch.tensor(list(b"\0" + next(iter(load_heldout().values()))[500:599]))
    window = MtpWindow(plain, modules, file.expand(len(roots), -1))
    trees = window.draft_tree(torch.tensor(roots), Shape(1, 3, 4))
    for root, drafted in zip(roots, trees.tokens.tolist(), strict=True):
        tokens = file[: root + 1].tolist()
        positions = torch.arange(root)[None]
        hidden = training_models.target_hidden(plain, file[None, :root], positions)
        for step, module in enumerate(modules):
            taken = torch.tensor([tokens[step + 1 :]])
            hidden = module(plain.model.embed_tokens(taken), hidden, positions)
            tokens.append(int(plain.lm_head(hidden[0, -1]).argmax()))
        assert drafted == tokens[root:]
    assert len({tuple(row) for row in trees.tokens[:, 1:].tolist()}) > 3
    assert trees.parent[0].tolist() == [0, 0, 1, 2]
