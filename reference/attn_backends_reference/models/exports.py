"""MTP drafts and their DeepSeek targets as SGLang and vLLM load them: other keys and tensors of the same models.

SGLang (0.5.23) runs module 0 again in every drafted step, and takes its MLP for a mixture: of two equal experts here,
and a shared one of zeros. Its CUDA kernel in front of the module takes no hidden state below 512, so a smaller one is
repeated. vLLM (0.33.0) takes the number of modules from the target's configuration, and ties no head.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_backends.errors import CheckpointError
from attn_backends_reference.models import folders

Fields = dict[str, Any]
Tensors = dict[str, Tensor]
TARGET, DRAFT = "DeepseekV3ForCausalLM", "DeepseekV3ForCausalLMMTP"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MIN_HIDDEN = 512
SGLANG_FIELDS: Fields = {
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "ep_size": 1,
    "aux_loss_alpha": 0.001,
}
MIXTURE: Fields = {
    "architectures": [TARGET],
    "num_nextn_predict_layers": 1,
    "n_routed_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
}
YARN: Fields = {
    "rope_type": "yarn",  # of factor 1, so none: the only kind that SGLang's DeepSeek takes on a CPU
    "type": "yarn",
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
_NORMS = ("input_layernorm", "post_attention_layernorm", "norm", "enorm", "hnorm")
_READ_HIDDEN = ("lm_head", "q_a_proj", "q_proj", "kv_a_proj_with_mqa", "gate_proj", "up_proj", "gate")
_WRITE_HIDDEN = ("o_proj", "down_proj")


def export(target: Path, draft: Path, engine: str, out: Path, **options: int) -> list[Path]:
    """Write `out`/target and `out`/draft for an engine of `ENGINES`; returns both. options: see `sglang` and `vllm`.

    Raises `CheckpointError` for folders of another form, and if `out` has such folders already.
    """
    models = [_read(folder, name) for folder, name in ((target, TARGET), (draft, DRAFT))]
    if any(".mlp.experts." in name for name in models[1][1]):
        raise CheckpointError(f"{draft} has experts already, as {engine} loads them; name the folder there as it is")
    written = [out / "target", out / "draft"]
    if there := [folder for folder in written if folder.exists()]:
        raise CheckpointError(f"{there[0]} is there already; name another --out")
    for folder, (fields, tensors) in zip(written, ENGINES[engine](*models, **options), strict=True):
        _write(folder, fields, tensors)
    return written


def sglang(
    target: tuple[Fields, Tensors], draft: tuple[Fields, Tensors], min_hidden: int = MIN_HIDDEN
) -> list[tuple[Fields, Tensors]]:
    """The target, and module 0 as a NextN layer. min_hidden: the smallest hidden size."""
    fields, tensors = target
    rope = {"rope_theta": fields["rope_parameters"]["rope_theta"], **YARN}
    rope["original_max_position_embeddings"] = fields["max_position_embeddings"]
    common = SGLANG_FIELDS | {"rope_parameters": rope}
    own, layer = draft[0], draft[0]["num_hidden_layers"]
    mixture = MIXTURE | {"moe_intermediate_size": own["intermediate_size"]}
    both = [
        (fields | common, tensors),
        (own | common | mixture, _mixture(_module(draft[1], layer), layer) | {EMBEDDING: tensors[EMBEDDING]}),
    ]
    copies = -(-min_hidden // fields["hidden_size"])
    return both if copies <= 1 else [repeated(*each, copies) for each in both]


def vllm(
    target: tuple[Fields, Tensors], draft: tuple[Fields, Tensors], num_modules: int | None = None
) -> list[tuple[Fields, Tensors]]:
    """The target and its first modules with heads of their own. num_modules: None for all."""
    (fields, tensors), (own, modules) = target, draft
    num, first = num_modules or own["num_nextn_predict_layers"], fields["num_hidden_layers"]
    common = {"num_nextn_predict_layers": num, "tie_word_embeddings": False}
    head = tensors.get(HEAD, tensors[EMBEDDING])
    shared = {"embed_tokens": tensors[EMBEDDING], "shared_head.head": head}
    kept: Tensors = {}
    for layer in range(first, first + num):
        kept |= _module(modules, layer)
        kept |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in shared.items()}
    return [(fields | common, tensors | {HEAD: head}), (own | common, kept)]


ENGINES: dict[str, Callable[..., list[tuple[Fields, Tensors]]]] = {"sglang": sglang, "vllm": vllm}


def repeated(fields: Fields, tensors: Tensors, copies: int) -> tuple[Fields, Tensors]:
    """A model whose hidden state is there `copies` times, of which the first is read: no mean over it changes. The head
    reads what the embedding wrote, so it is untied.
    """
    sizes = {"hidden_size": copies * fields["hidden_size"], "tie_word_embeddings": False}
    if "model.norm.weight" in tensors:
        tensors = {HEAD: tensors[EMBEDDING]} | tensors
    return fields | sizes, {name: _repeated(name, given, copies) for name, given in tensors.items()}


def _repeated(name: str, given: Tensor, copies: int) -> Tensor:
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part in _NORMS or part in _WRITE_HIDDEN:
        return torch.cat([given] * copies)
    if part == "embed_tokens":
        return torch.cat([given] * copies, 1)
    if part in _READ_HIDDEN:
        return _first_read(given, copies)
    if part == "eh_proj":
        halves = [_first_read(half, copies) for half in given.chunk(2, 1)]
        return torch.cat([torch.cat(halves, 1)] * copies)
    return given


def _first_read(given: Tensor, copies: int) -> Tensor:
    return torch.cat((given, *[torch.zeros_like(given)] * (copies - 1)), 1)


def _module(tensors: Tensors, layer: int) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(f"model.layers.{layer}.")}


def _mixture(module: Tensors, layer: int) -> Tensors:
    mlp = f"model.layers.{layer}.mlp."
    made = {name: tensor for name, tensor in module.items() if not name.startswith(mlp)}
    for part in ("gate_proj", "up_proj", "down_proj"):
        dense = module[f"{mlp}{part}.weight"]
        made |= {f"{mlp}experts.{expert}.{part}.weight": dense for expert in range(2)}
        made[f"{mlp}shared_experts.{part}.weight"] = torch.zeros_like(dense)
    hidden = module[f"{mlp}gate_proj.weight"].shape[1]
    made[f"{mlp}gate.weight"] = dense.new_zeros(2, hidden)
    made[f"{mlp}gate.e_score_correction_bias"] = dense.new_zeros(2)
    return made


def _read(folder: Path, architecture: str) -> tuple[Fields, Tensors]:
    fields = folders.read_fields(folder / "config.json")
    if fields.get("architectures") != [architecture]:
        raise CheckpointError(
            f"{folder} has architectures {fields.get('architectures')}; only {architecture} is exported"
        )
    return fields, dict(folders.read_tensors(folders.locate_tensors(folder)))


def _write(folder: Path, fields: Fields, tensors: Tensors) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
    whole = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
