"""Targets of transformers' own classes: their windows, their features, and a whole forward that reads nothing.

Their logits through the backends are held to transformers' own in `tests/test_models.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attn_backends.backends.fa3 import FA3Backend
from attn_backends.cache import KeyValues, Latents
from attn_backends.graphs import RecordedGraph
from attn_backends.layer import AttentionLayer
from attn_backends_reference.eagle.engine import serve
from attn_backends_reference.eagle.options import PhaseBackends, WorkerOptions
from attn_backends_reference.eagle.worker import EagleWorker, PlainWorker
from attn_backends_reference.models import TargetModel, interface, load_target
from attn_backends_reference.models.decoder import MultimodalRows
from spec_metadata import CacheGeometry, Capacity
from tests import reference_models as rm

LENS = (5, 13, 9)
GROUPED = [name for name in rm.CONFIGS if not name.startswith(("gqa", "mla"))]
WINDOWS = {
    "mistral": [None, None],
    "mistral_window": [rm.WINDOW, rm.WINDOW],
    "qwen2": [None, None],
    "qwen2_windows": [None, rm.WINDOW],
    "qwen3": [None, None],
    "qwen3_bias": [None, rm.WINDOW],
    "qwen3_moe": [None, None],
    "qwen3_moe_window": [rm.WINDOW, rm.WINDOW],
    "mixtral": [rm.WINDOW, rm.WINDOW],
    "olmoe": [None, None],
    "gpt_oss": [rm.WINDOW, None],
}


class DenseAttention:
    """Attention of one text's rows over themselves, in float64; an `Attention` without cache."""

    def __init__(self, layers: tuple[AttentionLayer, ...]) -> None:
        self.layers = layers

    def attend(self, layer_index: int, q: Tensor, inputs: KeyValues | Latents) -> Tensor:
        layer = self.layers[layer_index]
        if isinstance(inputs, Latents):
            k, v = inputs.latent[:, None], inputs.latent[:, None, : layer.v_head_dim]
        else:
            k, v = inputs.k, inputs.v
        k, v = (x.double().repeat_interleave(q.shape[1] // layer.num_kv_heads, dim=1) for x in (k, v))
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        seen = (distance >= 0) & (distance < (layer.window or len(q)))
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * layer.scale
        scores = scores.masked_fill(~seen, float("-inf"))
        sums = scores.exp().sum(-1) + (0 if layer.sinks is None else layer.sinks.double().exp()[:, None])
        return torch.einsum("hqk,khd->qhd", scores.exp() / sums[..., None], v).to(q.dtype)


@pytest.mark.smoke
@pytest.mark.parametrize("name", GROUPED)
def test_layers_have_the_windows_of_the_model(name: str) -> None:
    plain = rm.PlainTarget(rm.tiny_target(name))
    served = rm.served_target(name, plain.single)
    assert [layer.window for layer in served.layers] == WINDOWS[name]
    tokens, errors = rm.random_tokens((3 * rm.WINDOW,))[0], rm.Errors()
    hidden = served.forward(tokens, torch.arange(len(tokens)), DenseAttention(served.layers))
    errors.add(served.logits(hidden), *plain.logits(tokens))
    errors.check()


@pytest.mark.smoke
@pytest.mark.parametrize("name", [*rm.CONFIGS])
def test_a_whole_forward_reads_nothing_on_the_host(name: str) -> None:
    """Embedding, masks, rotary embeddings, experts and features are recorded; of the backend there is one call."""
    served = rm.served_target(name, rm.tiny_target(name)).tapped((0, 1))
    tokens, positions = rm.random_tokens((9,))[0], torch.arange(9)
    attention = GivenAttention(served)
    expected = served.forward_features(tokens, positions, attention)
    given = torch.zeros(2, 9, dtype=torch.int64)
    graph = RecordedGraph()
    hidden, features = graph.capture(lambda: served.forward_features(given[0], given[1], attention))
    given.copy_(torch.stack((tokens, positions)))
    graph.replay()
    torch.testing.assert_close((hidden, features), expected, rtol=0, atol=0)
    assert features.shape == (9, 2 * rm.HIDDEN)


class GivenAttention:
    """Attention that gives back its queries, cut to the values' width; an `Attention` of any family."""

    def __init__(self, model: TargetModel) -> None:
        self.layers = model.layers

    def attend(self, layer_index: int, q: Tensor, inputs: object) -> Tensor:
        return q[..., : self.layers[layer_index].v_head_dim].clone()


def test_features_are_taken_without_a_trace() -> None:
    """What tells a layer's states is gone after the forward, also when that fails."""
    served = rm.served_target("qwen3", rm.tiny_target("qwen3"))
    tapped, tokens = served.tapped((1,)), torch.arange(4)
    hidden, features = tapped.forward_features(tokens, tokens, GivenAttention(served))
    assert torch.equal(served.forward(tokens, tokens, GivenAttention(served)), hidden)
    torch.testing.assert_close(served._decoder.norm(features), hidden)
    with pytest.raises(AttributeError):
        tapped.forward_features(tokens, tokens, None)  # type: ignore[arg-type]
    assert [len(layer._forward_hooks) for layer in served._decoder.layers] == [0, 0]


def test_embeddings_take_the_place_of_tokens() -> None:
    served = rm.served_target("qwen3_moe", rm.tiny_target("qwen3_moe"))
    tokens, where = torch.arange(6), torch.tensor([False, True, True, False, False, True])
    rows = MultimodalRows(served.embedding(tokens), where)
    attention = GivenAttention(served)
    expected = served.forward(tokens, tokens, attention)
    hidden, _ = served.forward_features(torch.where(where, 60, tokens), tokens, attention, rows)
    assert torch.equal(hidden, expected)


@pytest.mark.parametrize("limit", [1, 9000, 1 << 30])
def test_experts_run_in_parts_that_fit(
    limit: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A part's rows are as many as gather no more weights than the limit, but one at least."""
    served = rm.served_target("qwen3_moe", rm.tiny_target("qwen3_moe"))
    tokens, attention = torch.arange(7), GivenAttention(served)
    expected = served.forward(tokens, tokens, attention)
    monkeypatch.setattr(interface, "GATHERED_BYTES", limit)
    gathered: list[int] = []
    batched = interface.ExpertsInterface()["batched_mm"]

    def watch(module: torch.nn.Module, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        gathered.append(chosen.numel() * module.gate_up_proj[0].nbytes)
        return batched(module, rows, chosen, weights)

    request.addfinalizer(lambda: interface.ExpertsInterface.register("batched_mm", batched))
    interface.ExpertsInterface.register("batched_mm", watch)
    torch.testing.assert_close(served.forward(tokens, tokens, attention), expected)
    one = 2 * 2 * 16 * rm.HIDDEN * 4
    assert max(gathered) == {1: one, 9000: one, 1 << 30: 7 * one}[limit]


@pytest.mark.parametrize("name", GROUPED)
def test_a_folder_of_a_family_loads(name: str, tmp_path: Path) -> None:
    model = rm.tiny_target(name)
    model.save_pretrained(tmp_path)
    loaded, built = load_target(tmp_path, torch.float32), rm.served_target(name, model)
    assert loaded.family is rm.family_of(name)
    assert loaded._decoder.config._attn_implementation == interface.IMPLEMENTATION
    tokens = torch.arange(9)
    outputs = [target.forward(tokens, tokens, GivenAttention(target)) for target in (loaded, built)]
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


DRAFTS = {
    "chain": {"topk": 1, "num_steps": 3, "num_draft_tokens": 4},
    "tree": {"topk": 2, "num_steps": 2, "num_draft_tokens": 5},
}


@pytest.mark.parametrize(
    ("name", "shape"), [("mistral", "chain"), ("qwen2", "tree"), ("qwen3", "chain"), ("qwen3_moe", "tree")]
)
@pytest.mark.one_in(2)
def test_texts_are_transformers_own(name: str, shape: str) -> None:
    """Greedily, plainly and by a random EAGLE draft of Llama's layers, through recorded graphs and in chunks."""
    source, prompts = rm.tiny_target(name), [text.tolist() for text in rm.random_tokens((11, 5))]
    target = rm.served_target(name, source)
    capacity = Capacity(2, 48, 4, **DRAFTS[shape])
    backend = FA3Backend(capacity, CacheGeometry(2 * capacity.max_pages + 1, 4))
    place = PhaseBackends(backend, backend, backend, backend, backend), capacity, backend.geometry
    options = WorkerOptions((2,), RecordedGraph, chunk=4)
    eagle = EagleWorker(target, rm.served_draft(rm.tiny_draft("gqa"), target), *place, options)
    plain = PlainWorker(target, *place, options)
    expected = [greedy(source, prompt, 14) for prompt in prompts]
    for worker in (plain, eagle):
        assert [done.tokens for done in serve(worker, prompts, 14)] == expected
        assert worker.num_graph_steps


def greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """The next tokens of a prompt, each of a forward of the whole text."""
    text = list(prompt)
    for _ in range(num_tokens):
        text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]
