"""gpt-oss from a folder as OpenAI publishes it: experts of 4-bit blocks (MXFP4), sinks, windows in alternate layers.

Names, shapes and keys: openai/gpt-oss-20b's config.json and transformers' conversion of its weights (4.55,
models/gpt_oss/convert_gpt_oss_weights_to_hf.py). `tests/test_models.py` holds the logits to transformers' own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from attn_backends.errors import CheckpointError
from attn_backends.graphs import RecordedGraph
from attn_backends.registry import get_backend
from attn_backends_reference.eagle.engine import serve
from attn_backends_reference.eagle.options import PhaseBackends, WorkerOptions
from attn_backends_reference.eagle.worker import EagleWorker, PlainWorker
from attn_backends_reference.models import load_draft, load_target, open_target
from spec_metadata import CacheGeometry, Capacity
from tests import reference_models as rm
from tests.head_catalogue import FORMATS
from tests.head_formats import write
from tests.serving_scenes import PHASES
from tests.test_target_families import greedy

LAYERS, EXPERTS, HIDDEN, INNER, WINDOW = 4, 8, 32, 64, 6
QUANTIZATION = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 63,
    "experts_per_token": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initial_context_length": 16,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "max_position_embeddings": 128,
    "model_type": "gpt_oss",
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "num_local_experts": EXPERTS,
    "output_router_logits": False,
    "pad_token_id": 62,
    "quantization_config": QUANTIZATION,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": WINDOW,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 64,
}
SIZES = {"V": 64, "H": HIDDEN, "Q": 4 * 64, "K": 2 * 64, "N": 4, "E": EXPERTS, "2I": 2 * INNER, "B": 16}
SIZES |= {"HB": HIDDEN // 32, "IB": INNER // 32}
LAYER = {
    "input_layernorm.weight": "H",
    "post_attention_layernorm.weight": "H",
    "self_attn.sinks": "N",
    **{f"self_attn.{name}_proj.weight": f"{rows} H" for name, rows in (("q", "Q"), ("k", "K"), ("v", "K"))},
    **{f"self_attn.{name}_proj.bias": rows for name, rows in (("q", "Q"), ("k", "K"), ("v", "K"))},
    "self_attn.o_proj.weight": "H Q",
    "self_attn.o_proj.bias": "H",
    "mlp.router.weight": "E H",
    "mlp.router.bias": "E",
    "mlp.experts.gate_up_proj_blocks": "E 2I HB B",
    "mlp.experts.gate_up_proj_scales": "E 2I HB",
    "mlp.experts.gate_up_proj_bias": "E 2I",
    "mlp.experts.down_proj_blocks": "E H IB B",
    "mlp.experts.down_proj_scales": "E H IB",
    "mlp.experts.down_proj_bias": "E H",
}
NAMES = {"model.embed_tokens.weight": "V H", "model.norm.weight": "H", "lm_head.weight": "V H"}
NAMES |= {f"model.layers.{layer}.{name}": sizes for layer in range(LAYERS) for name, sizes in LAYER.items()}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
GATE_UP, DOWN = ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.3.mlp.experts.down_proj")
Tensors = dict[str, Tensor]


def random_tensors() -> Tensors:
    """Every tensor of a folder. Blocks are any bytes; their powers of two keep weights near the others'."""
    generator, tensors = torch.Generator().manual_seed(5), Tensors()
    for name, sizes in NAMES.items():
        shape = [SIZES[word] for word in sizes.split()]
        noise = torch.randn(shape, generator=generator)
        if name.endswith("_blocks"):
            tensors[name] = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        elif name.endswith("_scales"):
            tensors[name] = torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)
        elif "norm" in name:
            tensors[name] = (1 + 0.2 * noise).bfloat16()
        else:
            tensors[name] = (noise * (1.5 * shape[-1] ** -0.5 if len(shape) > 1 else 0.5)).bfloat16()
    return tensors


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny gpt-oss."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(random_tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def folder(published: Path, tmp_path: Path) -> Path:
    """A copy that a test may edit."""
    for file in published.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def edit_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


def exact(blocks: Tensor, scales: Tensor) -> Tensor:
    """[experts, K, N] float64, number by number."""
    experts, columns, groups, _ = blocks.shape
    values = torch.empty(experts, 32 * groups, columns, dtype=torch.float64)
    for expert, column, group in torch.cartesian_prod(*map(torch.arange, (experts, columns, groups))).tolist():
        power = 2.0 ** (int(scales[expert, column, group]) - 127)
        for at, byte in enumerate(blocks[expert, column, group].tolist()):
            for half, bits in enumerate((byte & 15, byte >> 4)):
                value = E2M1[bits & 7] * (-1 if bits & 8 else 1)
                values[expert, 32 * group + 2 * at + half, column] = value * power
    return values


def plain_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """transformers' own model of the folder's weights, dequantized by transformers."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        weight = name.removesuffix("_blocks")
        tensors[weight] = convert_moe_packed_tensors(tensors.pop(name), tensors.pop(f"{weight}_scales"))
    fields = {key: value for key, value in CONFIG.items() if key != "quantization_config"}
    model = AutoModelForCausalLM.from_config(GptOssConfig(**fields), attn_implementation="eager")
    model.load_state_dict(tensors)
    model.set_experts_implementation("eager")
    return model.to(dtype).eval().requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_are_dequantized_to_the_bit(published: Path, dtype: torch.dtype) -> None:
    stored, target = load_file(published / "model.safetensors"), load_target(published, dtype)
    given, theirs = target._decoder.state_dict(), plain_model(published, dtype).model.state_dict()
    assert [name for name in theirs if not torch.equal(given[name].to(dtype), theirs[name])] == []
    for name in (GATE_UP, DOWN):
        values = exact(stored[f"{name}_blocks"], stored[f"{name}_scales"])
        assert torch.equal(given[name.removeprefix("model.")], values.to(dtype))


def test_any_byte_and_power_is_read_as_the_format_says() -> None:
    from attn_backends_reference.models.quantization import Mxfp4

    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 1, 16)
    scales = torch.tensor([0, 1, 2, 64, 100, 120, 126, 127, 128, 130, 140, 180, 200, 240, 251, 255])
    scales = scales.to(torch.uint8).reshape(1, 16, 1)
    given, expected = Mxfp4(()).dequantized(blocks, scales), exact(blocks, scales)
    assert given[0, :, -1].isnan().all()
    assert torch.equal(given[..., :-1].double(), expected[..., :-1])


def test_the_bytes_are_told_before_anything_is_read(published: Path) -> None:
    found, read = open_target(published), list[int]()
    loaded = found.load(torch.bfloat16, "cpu", read.append)
    parts = [*loaded._decoder.state_dict().values(), loaded.head.weight]
    assert found.num_bytes(torch.bfloat16) == sum(2 * tensor.numel() for tensor in parts)
    assert sum(read) == found.weights.num_bytes < found.num_bytes(torch.bfloat16)


def test_layers_have_their_sinks_and_windows(published: Path) -> None:
    stored, target = load_file(published / "model.safetensors"), load_target(published, torch.bfloat16)
    assert [layer.window for layer in target.layers] == [WINDOW, None] * (LAYERS // 2)
    for index, layer in enumerate(target.layers):
        assert layer.sinks is not None
        assert torch.equal(layer.sinks, stored[f"model.layers.{index}.self_attn.sinks"].float())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "mxfp8"}, r"quantization_config\.quant_method = 'mxfp8' is not served"),
        ({"weight_block_size": [16, 16]}, r"weight_block_size \[16, 16\]; blocks of quant_method 'mxfp4' are 32"),
        ({"bits": 4}, r"quantization_config\.bits = 4 is not served"),
        (
            {"modules_to_not_convert": ["model.layers.*.mlp.experts"]},
            "down_proj_blocks is stored as U8, but .* not converted",
        ),
    ],
)
def test_quantizations_that_are_refused_by_name(folder: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(folder, quantization_config=QUANTIZATION | changes)
    with pytest.raises(CheckpointError, match=message):
        open_target(folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{DOWN}_scales"), f"{DOWN}_blocks is stored as U8 without its scales, {DOWN}_scales"),
        (lambda t: t.pop(f"{DOWN}_blocks"), f"{DOWN}_scales is stored as U8, which config.json says nothing of"),
        (
            lambda t: t.update({f"{DOWN}_scales": t[f"{DOWN}_scales"][..., :1].clone()}),
            r"_scales \[8, 32, 1\] U8; MXFP4 is",
        ),
        (lambda t: t.update({f"{DOWN}_scales": t[f"{DOWN}_scales"].float()}), r"_scales \[8, 32, 2\] F32; MXFP4 is"),
        (lambda t: t.update({f"{DOWN}_blocks": t[f"{DOWN}_blocks"][..., :8].clone()}), r"_blocks is \[8, 32, 2, 8\]"),
        (lambda t: t.update({f"{DOWN}_blocks": t[f"{DOWN}_blocks"].flatten(2)}), r"_blocks is \[8, 32, 32\]"),
        (lambda t: t.update({f"{DOWN}_bias": torch.ones(3)}), r"of another shape: .*down_proj_bias is \[3\]"),
    ],
    ids=["no scales", "no blocks", "scales", "type", "bytes", "dimensions", "bias"],
)
def test_tensors_that_do_not_fit(folder: Path, edit: Callable[[Tensors], object], message: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        open_target(folder)


SHAPES = {
    "chain": {"topk": 1, "num_steps": 3, "num_draft_tokens": 4},
    "tree": {"topk": 3, "num_steps": 3, "num_draft_tokens": 10},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("graphs", [RecordedGraph, None], ids=["recorded", "eager"])
def test_texts_are_transformers_own(published: Path, tmp_path: Path, shape: str, graphs: type | None) -> None:
    """Plainly and with an EAGLE-3 head of SpecForge's gpt-oss format, over texts longer than the windows."""
    target, model = load_target(published, torch.float32), plain_model(published)
    write(FORMATS["SpecForge, gpt-oss"], tmp_path)
    draft, given = load_draft(tmp_path, target), [text.tolist() for text in rm.random_tokens((3 * WINDOW, 5))]
    capacity = Capacity(2, 60, 4, **SHAPES[shape])
    geometry = CacheGeometry(1 + capacity.max_bs * capacity.max_pages, 4)
    backend = get_backend("fa3")(capacity, geometry, kernel="torch", checking=True)
    options = WorkerOptions((1, 2), graphs, chunk=5) if graphs else WorkerOptions(chunk=5)
    place = PhaseBackends(**dict.fromkeys(PHASES, backend)), capacity, geometry, options
    expected = [greedy(model, prompt, 16) for prompt in given]
    for worker in (PlainWorker(target, *place), EagleWorker(target, draft, *place)):
        assert [done.tokens for done in serve(worker, given, 16)] == expected
        assert bool(worker.num_graph_steps) == bool(graphs)
