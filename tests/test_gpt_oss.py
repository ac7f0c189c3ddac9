"""gpt-oss from a folder as OpenAI publishes it: experts of 4-bit blocks (MXFP4), sinks, windows in alternate layers;
and random serving on a random one.

`tests/test_published_targets.py` and `tests/test_models.py` hold the logits to transformers' own.
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

from attn_backends.errors import CheckpointError
from attn_backends.graphs import RecordedGraph
from attn_backends.registry import get_backend
from attn_backends_reference.eagle.engine import serve
from attn_backends_reference.eagle.options import PhaseBackends, WorkerOptions
from attn_backends_reference.eagle.worker import EagleWorker, PlainWorker
from attn_backends_reference.models import load_draft, load_target, open_target
from spec_metadata import CacheGeometry, Capacity
from tests import head_formats
from tests import reference_models as rm
from tests import serving_laws as laws
from tests.eagle3_laws import accepted_lengths
from tests.eagle3_scenes import accept_any_length, watch
from tests.head_catalogue import FORMATS
from tests.published_targets import LAYERS, TARGETS, WINDOW, write
from tests.serving_scenes import CHAIN, NEWLINE, PHASES, TREE, arrivals, eagle_worker, endless
from tests.test_published_targets import plain_model
from tests.test_target_families import greedy

GPT_OSS = TARGETS["gpt-oss"]
QUANTIZATION = GPT_OSS.config["quantization_config"]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
GATE_UP, DOWN = ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.3.mlp.experts.down_proj")
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny gpt-oss."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    write(GPT_OSS, folder)
    return folder


@pytest.fixture
def folder(published: Path, tmp_path: Path) -> Path:
    """A copy that a test may edit."""
    for file in published.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def edit_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(dict(GPT_OSS.config) | changes))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_are_dequantized_to_the_bit(published: Path, dtype: torch.dtype) -> None:
    stored, target = load_file(published / "model.safetensors"), load_target(published, dtype)
    given, theirs = target._decoder.state_dict(), plain_model(published).to(dtype).model.state_dict()
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
        assert layer.sinks.dtype is torch.bfloat16, "as the checkpoint has them, and FlashAttention-3 takes them"
        assert torch.equal(layer.sinks, stored[f"model.layers.{index}.self_attn.sinks"])


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
@pytest.mark.one_in(3)
def test_texts_are_transformers_own(published: Path, tmp_path: Path, shape: str, graphs: type | None) -> None:
    """Plainly and with an EAGLE-3 head of SpecForge's gpt-oss format, over texts longer than the windows."""
    target, model = load_target(published, torch.float32), plain_model(published)
    head_formats.write(FORMATS["SpecForge, gpt-oss"], tmp_path)
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


GRAPH = {"buckets": (1, 2, 4), "make_graph": RecordedGraph}


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("path", [GRAPH, {}], ids=["recorded", "eager"])
@pytest.mark.one_in(3)
def test_requests_that_come_and_go_get_what_plain_decoding_gives(path: dict[str, Any], shape: dict[str, int]) -> None:
    """Greedy and sampled, a round late, whatever lengths cycles accept of a random head's drafts."""
    scene = arrivals(20, 25, 80, 20, seed=3)
    prompts, texts = [arrival.prompt for arrival in scene], endless("gpt_oss", scene, 28)
    assert sum(len(prompt) > 3 * rm.WINDOW for prompt in prompts) > len(scene) / 2
    options = {"chunk": 24, "eos_tokens": (NEWLINE,), "seed": 2, "host_lag": 1} | path
    worker = eagle_worker("gpt_oss", "fa3", Capacity(6, 112, 8, **shape), **options)
    assert [layer.window for layer in worker.target.layers] == [rm.WINDOW, None] * (LAYERS // 2)
    with watch(worker, accept_any_length(prompts, texts)) as seen:
        figures = laws.check_scene(worker, scene, texts)
    assert accepted_lengths(seen).keys() == {1, 2, 3, 4}
    assert figures["largest_batch"] > 4, "more than the largest bucket"
    assert figures["most_rows_of_a_page"] > 1
    assert bool(worker.num_graph_steps) == bool(path)
