"""DeepSeek-V4's folder as it is published: names, 8- and 4-bit types, and the MTP module that takes streams.

Names and types: DeepSeek-V4-Flash's MTP shard, 1,575 tensors of 256 experts; read so by SGLang 0.5.23
(models/deepseek_v4_nextn.py) and vLLM 0.33.0 (models/deepseek_v4/nvidia/mtp.py). Keys: its config.json.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, DeepseekV4Config, PreTrainedModel

from attn_backends.errors import CheckpointError
from attn_backends_reference.eagle.engine import serve
from attn_backends_reference.eagle.worker import PlainWorker
from attn_backends_reference.models import DraftModel, TargetModel, load_draft, load_target, open_target
from tests.test_deepseek_v4 import OPTIONS, Pages, eagle_worker, file_tokens

H, STREAMS, EXPERTS, BLOCK = 64, 2, 4, 32
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": STREAMS,
    "hc_sinkhorn_iters": 4,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": H,
    "index_head_dim": 64,
    "index_n_heads": 16,
    "index_topk": 64,
    "initializer_range": 0.02,
    "max_position_embeddings": 2048,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 32,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_hash_layers": 1,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 2,
    "o_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [BLOCK, BLOCK],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 4,
        "original_max_position_embeddings": 512,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "vocab_size": 256,
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 4, 128, 0],
}
MODULE = {
    *(f"{name}.weight" for name in ("e_proj", "h_proj", "enorm", "hnorm", "norm", "attn_norm", "ffn_norm")),
    *(f"attn.{name}.weight" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "q_norm", "kv_norm")),
    *(f"hc_{site}_{name}" for site in ("attn", "ffn", "head") for name in ("fn", "base", "scale")),
    *(f"ffn.shared_experts.w{part}.weight" for part in (1, 2, 3)),
    *(f"ffn.experts.{expert}.w{part}.weight" for expert in range(EXPERTS) for part in (1, 2, 3)),
    *("attn.attn_sink", "ffn.gate.weight", "ffn.gate.bias"),
}
"""The tensors of a module, scales apart."""
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Tensors = dict[str, Tensor]


def random_model(seed: int, **changes: Any) -> PreTrainedModel:
    """transformers' model of the configuration."""
    fields = {key: value for key, value in (CONFIG | changes).items() if key != "quantization_config"}
    model = AutoModelForCausalLM.from_config(DeepseekV4Config(**fields), attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if "tid2eid" in name:
            weight.data = torch.randint(EXPERTS, weight.shape, generator=generator)
        elif "inv_freq" not in name:
            noise = torch.randn(weight.shape, generator=generator)
            scale = 0.2 if weight.ndim == 1 else 1.5 * weight.shape[-1] ** -0.5
            weight.data = ("norm" in name) + scale * noise
    return model.requires_grad_(False)


def published(model: PreTrainedModel) -> Tensors:
    """A model's tensors by published names, as far as transformers does not save them so."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = load_file(Path(folder) / "model.safetensors")
    renamed = {
        r"^model\.": "",
        "^embed_tokens": "embed",
        r"^hc_head\.hc_": "hc_head_",
        r"attn\.norm\.": "attn.kv_norm.",
    }
    found = {}
    for name, tensor in saved.items():
        for old, new in renamed.items():
            name = re.sub(old, new, name)
        found[name] = tensor
    return found


def module_tensors(model: PreTrainedModel) -> Tensors:
    """The tensors of a module, whose layer, head and norm are those of a model of one layer."""
    generator = torch.Generator().manual_seed(9)
    tensors = {name: 1 + 0.2 * torch.randn(H, generator=generator) for name in ("enorm.weight", "hnorm.weight")}
    tensors |= {name: torch.randn(H, H, generator=generator) / 8 for name in ("e_proj.weight", "h_proj.weight")}
    kept = {name: x for name, x in published(model).items() if name not in ("embed.weight", "head.weight")}
    return tensors | {name.removeprefix("layers.0."): tensor for name, tensor in kept.items()}


def quantized(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Tensors in the types that are published, and what they are, element by element, in bfloat16."""
    stored, values = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if re.search(r"ffn\.experts\.\d", name):
            rows, columns = weight.shape
            codes, powers = torch.randint(16, (rows, columns)), torch.randint(-6, -2, (rows, columns // 32))
            stored[name] = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8)
            values[name] = E2M1[codes & 7] * torch.where(codes > 7, -1, 1) * (2.0**powers).repeat_interleave(32, dim=1)
        elif re.search(r"attn\.w|indexer\.wq|shared_experts|[eh]_proj", name):
            rows, columns = (-(-size // BLOCK) for size in weight.shape)
            powers = torch.randint(-3, 0, (rows, columns))
            stored[name] = weight.clamp(-9, 9).to(torch.float8_e4m3fn)
            whole = (2.0**powers).repeat_interleave(BLOCK, dim=0).repeat_interleave(BLOCK, dim=1)
            values[name] = stored[name].float() * whole[: weight.shape[0], : weight.shape[1]]
        else:
            continue
        values[name] = values[name].bfloat16()
        stored[name.removesuffix("weight") + "scale"] = (2.0**powers).to(torch.float8_e8m0fnu)
    return stored, values


class Folders(NamedTuple):
    """The folder as published, one of the same values in floats, and the module's model of one layer."""

    eights: Path
    floats: Path
    layer: PreTrainedModel


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    torch.manual_seed(3)
    layer = random_model(8, num_hidden_layers=1, num_hash_layers=0, compress_ratios=[0])
    module = {f"mtp.0.{name}": tensor for name, tensor in module_tensors(layer).items()}
    stored, values = quantized(published(random_model(7)) | module)
    made = Folders(tmp_path_factory.mktemp("eights"), tmp_path_factory.mktemp("floats"), layer)
    for folder, tensors in zip(made[:2], (stored, values), strict=True):
        save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
        fields = CONFIG | ({} if folder is made.eights else {"quantization_config": None})
        (folder / "config.json").write_text(json.dumps(fields))
    return made


def test_the_target_is_read_by_its_published_names_and_types(folders: Folders) -> None:
    given, expected = (load_target(folder, torch.float32) for folder in folders[:2])
    states = [target._decoder.state_dict() | {"head": target.head.weight} for target in (given, expected)]
    assert [name for name in states[1] if not torch.equal(states[0][name], states[1][name])] == []
    stored = load_file(folders.floats / "model.safetensors")
    assert torch.equal(
        given._decoder.layers[1].self_attn.source.q_a_proj.weight, stored["layers.1.attn.wq_a.weight"].float()
    )
    found = open_target(folders.eights)
    assert found.num_bytes(torch.bfloat16) == sum(2 * x.numel() for n, x in stored.items() if not n.startswith("mtp."))


@pytest.fixture(scope="module")
def models(folders: Folders) -> tuple[TargetModel, DraftModel]:
    target = load_target(folders.eights, torch.float32)
    return target, load_draft(folders.eights, target)


def test_the_list_of_a_module_s_tensors(folders: Folders) -> None:
    names = {name.removeprefix("mtp.0.") for name in load_file(folders.floats / "model.safetensors") if "mtp" in name}
    assert names == MODULE
    assert (
        len(MODULE) + sum("experts" in name or "_proj" in name or "attn.w" in name for name in MODULE)
        == 39 + 6 * EXPERTS
    )


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * weight


def model_of_one_layer(folders: Folders, stored: Tensors) -> PreTrainedModel:
    """transformers' model whose layer, head and norm are the module's, by transformers' own reading of the names."""
    tensors = {"embed.weight": stored["embed.weight"], "head.weight": stored["head.weight"]}
    for name, tensor in stored.items():
        own = name.removeprefix("mtp.0.")
        if own != name and own.startswith(("norm", "hc_head")):
            tensors[own] = tensor
        elif own != name and not own.startswith(("e_", "h_", "enorm", "hnorm")):
            tensors[f"layers.0.{own}"] = tensor
    with TemporaryDirectory() as folder:
        save_file({name: tensor.float() for name, tensor in tensors.items()}, Path(folder) / "model.safetensors")
        folders.layer.config.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def test_what_a_module_computes(folders: Folders, models: tuple[TargetModel, DraftModel]) -> None:
    """Of the target's streams, and of those of its own rows, against transformers' layer and joins written out here."""
    target, draft = models
    count = 150
    tokens, positions = file_tokens(count), torch.arange(count)
    streams = torch.randn(count - 1, STREAMS * H, generator=torch.Generator().manual_seed(4))
    pages = Pages(draft)
    first = draft.forward(tokens[1:], streams, positions[:-1], pages.attention(0, count - 1))
    last = draft.forward(tokens[:1], first[-1:], positions[-1:], pages.attention(count - 1, 1))

    stored = load_file(folders.floats / "model.safetensors")
    weights = {name.removeprefix("mtp.0."): x.float() for name, x in stored.items() if name.startswith("mtp.")}
    model = model_of_one_layer(folders, stored)
    embeds = stored["embed.weight"].float()[torch.cat((tokens[1:], tokens[:1]))]
    rows = torch.cat((streams, first[-1:])).unflatten(1, (STREAMS, H))
    inputs = linear(norm(embeds, weights["enorm.weight"]), weights["e_proj.weight"])[:, None]
    inputs = inputs + linear(norm(rows, weights["hnorm.weight"]), weights["h_proj.weight"])
    distance = positions[:, None] - positions
    mask = torch.zeros(count, count).masked_fill((distance < 0) | (distance >= 128), float("-inf"))
    angles = {"main": model.model.rotary_emb(embeds[None], position_ids=positions[None], layer_type="main")}
    given = {"position_embeddings": angles, "position_ids": positions[None], "attention_mask": mask[None, None]}
    out = model.model.layers[0](inputs[None], past_key_values=None, **given)
    scores = model.lm_head(model.model.norm(model.model.hc_head(out)))[0]
    torch.testing.assert_close(torch.cat((first, last)), out[0].flatten(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(draft.logits(torch.cat((first, last))), scores, rtol=1e-4, atol=1e-4)
    assert target.tapped(draft.feature_layers).feature_layers == (2,)


@pytest.mark.parametrize("path", ["eager", "graph"])
@pytest.mark.one_in(2)
def test_texts_are_those_of_plain_decoding(path: str, models: tuple[TargetModel, DraftModel]) -> None:
    target, draft = models
    given = [file_tokens(140).tolist(), file_tokens(30).tolist()]
    eagle = eagle_worker(target, draft, OPTIONS[path])
    plain = PlainWorker(target, eagle.backends, eagle.capacity, eagle.slots.geometry, OPTIONS[path])
    expected, drafted = ([done.tokens for done in serve(worker, given, 12)] for worker in (plain, eagle))
    assert drafted == expected
    assert bool(eagle.num_graph_steps) == (path == "graph")


def edited(folder: Path, into: Path, fields: dict[str, Any], tensors: dict[str, Tensor | None]) -> Path:
    """A copy of a folder with other keys and tensors; None leaves one out."""
    (into / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | fields))
    given = load_file(folder / "model.safetensors") | tensors
    save_file({name: x for name, x in given.items() if x is not None}, into / "model.safetensors")
    return into


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        ({}, {"mtp.0.hnorm.weight": None}, r"1 missing: mtp\.0\.hnorm\.weight"),
        ({}, {"mtp.0.eh_proj.weight": torch.ones(2, 2)}, r"1 not part of the architecture: mtp\.0\.eh_proj\.weight"),
        ({}, {"mtp.0.hc_head_base": torch.ones(4)}, r"of another shape: mtp\.0\.hc_head_base is \[4\], not \[2\]"),
        ({}, {"mtp.0.head.weight": torch.ones(256, H)}, r"which is not the target's: mtp\.0\.head\.weight"),
        ({"num_nextn_predict_layers": 0}, {}, "has tensors of the MTP modules 0; num_nextn_predict_layers.* is 0"),
        ({"hidden_size": 128}, {}, "does not fit the target: .* hidden_size 128; .* hidden_size 64"),
    ],
)
def test_modules_that_do_not_fit(
    fields: dict[str, Any], tensors: Any, message: str, models: Any, folders: Folders, tmp_path: Path
) -> None:
    folder = edited(folders.floats, tmp_path, fields, tensors)
    with pytest.raises(CheckpointError, match=message):
        load_draft(folder, models[0])
