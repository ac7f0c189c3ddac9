"""Folders of every published format load unchanged, and their logits and drafts are those of an independent forward."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from attn_backends.cache import CacheFormat
from attn_backends.errors import CheckpointError, UnsupportedStepError
from attn_backends.registry import get_backend
from attn_backends_reference.eagle.options import PhaseBackends, WorkerOptions
from attn_backends_reference.eagle.serving import serve
from attn_backends_reference.eagle.worker import EagleWorker, PlainWorker
from attn_backends_reference.models import load_draft
from spec_metadata import CacheGeometry, Capacity
from tests import reference_models as rm
from tests.eagle3_laws import CHAIN, TREE, check_drafts
from tests.eagle3_scenes import watch
from tests.head_catalogue import FORMATS, VARIANTS
from tests.head_formats import write
from tests.head_runs import (
    CLOSE,
    TEXT,
    DenseAttention,
    expected_log_probs,
    log_probs,
    oracle_of,
    paged,
    target_of,
)
from tests.serving_scenes import PHASES


@pytest.mark.parametrize("name", FORMATS | VARIANTS)
@torch.no_grad()
def test_logits_are_those_of_an_independent_forward(name: str, tmp_path: Path) -> None:
    format = (FORMATS | VARIANTS)[name]
    oracle = oracle_of(format, write(format, tmp_path))
    draft = load_draft(tmp_path, target_of(format))
    assert draft.feature_layers == tuple(oracle.layers)
    features, expected = oracle.features(TEXT.tolist()), expected_log_probs(oracle)
    for attention in (DenseAttention(draft), paged(draft)):
        torch.testing.assert_close(log_probs(draft, features, attention), expected, **CLOSE)


SHAPES = {"chain": CHAIN, "tree": TREE}
DRAFTS = [
    pytest.param(name, SHAPES[shape], marks=() if (i + j) % 2 == 0 else pytest.mark.full, id=f"{name}-{shape}")
    for (i, name), (j, shape) in product(enumerate(FORMATS), enumerate(SHAPES))
]


@pytest.mark.parametrize(("name", "shape"), DRAFTS)
def test_drafts_are_those_of_an_independent_forward(name: str, shape: tuple[int, int, int], tmp_path: Path) -> None:
    format = FORMATS[name]
    oracle, worker = oracle_of(format, write(format, tmp_path)), worker_of(name, tmp_path, shape)
    with watch(worker) as seen:
        serve(worker, [TEXT[:11].tolist(), TEXT[20:24].tolist()], 12)
    assert sum(len(request.cycles) for request in seen) > 6
    for request in seen:
        check_drafts(oracle, request, shape)


def test_embeddings_of_prompts_do_not_fit_a_head_of_another_width(tmp_path: Path) -> None:
    name = "SafeAILab EAGLE-3, wider target"
    write(FORMATS[name], tmp_path)
    with pytest.raises(
        UnsupportedStepError, match=r"prompts with embeddings: embeddings of 32 columns in a draft of 24"
    ):
        worker_of(name, tmp_path, CHAIN, placeholder_token=3)


def worker_of(name: str, folder: Path, shape: tuple[int, int, int], **options: Any) -> EagleWorker:
    """A worker of a tiny target and a format's folder."""
    target = target_of(FORMATS[name])
    capacity = Capacity(2, 40, 4, *shape)
    geometry = CacheGeometry(1 + capacity.max_bs * capacity.max_pages, 4)
    backend = get_backend("fa3")(capacity, geometry, kernel="torch", checking=True)
    backends = PhaseBackends(**dict.fromkeys(PHASES, backend))
    return EagleWorker(
        target, load_draft(folder, target), backends, capacity, geometry, WorkerOptions(chunk=5, **options)
    )


def test_a_head_of_another_attention_than_its_target_has_its_own_cache(tmp_path: Path) -> None:
    """As Kimi-K2's head of grouped queries, and an MLA head of a Llama; a draft of our own has its target's."""
    format = FORMATS["SpecForge"]
    write(format, tmp_path, dict(format.config) | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}})
    target = rm.served_target("mla", tiny_mla())
    draft = load_draft(tmp_path, target)
    assert (draft.cache_format, target.cache_format) == (CacheFormat.KV, CacheFormat.LATENT)
    capacity, prompts = Capacity(2, 40, 4, *TREE), [TEXT[:11].tolist(), TEXT[20:24].tolist()]
    geometry = CacheGeometry(1 + capacity.max_bs * capacity.max_pages, 4)
    latents, both = (get_backend(name)(capacity, geometry, kernel="torch") for name in ("flashinfer_mla", "fa3"))
    one = PhaseBackends(prefill=both, decode=latents, draft=both, verify=latents, draft_extend=both)
    worker, plain = EagleWorker(target, draft, one, capacity, geometry), PlainWorker(target, one, capacity, geometry)
    assert [c.tokens for c in serve(worker, prompts, 12)] == [c.tokens for c in serve(plain, prompts, 12)]
    with pytest.raises(UnsupportedStepError, match=r"a cache of kv: flashinfer_mla takes"):
        EagleWorker(target, draft, PhaseBackends(**dict.fromkeys(PHASES, latents)), capacity, geometry)


def tiny_mla() -> PreTrainedModel:
    """A random MLA target of three layers."""
    model = AutoModelForCausalLM.from_config(rm.tiny_config("mla", num_hidden_layers=3, first_k_dense_replace=3))
    rm.randomize(model, 0)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("place", "cut", "message"),
    [
        ("../b.safetensors", 0, r"index\.json places norm\.weight in '\.\./b\.safetensors', which is not the name of"),
        ("c.safetensors", 0, r"index\.json places norm\.weight in c\.safetensors, which the folder lacks"),
        ("b.safetensors", 5, r"b\.safetensors, where \S+ should be, can't be read: "),
    ],
    ids=["outside", "missing", "cut short"],
)
def test_shards_that_are_wrong(place: str, cut: int, message: str, tmp_path: Path) -> None:
    """A head in two shards loads; with one outside of its folder, missing or cut short it is refused by name."""
    format = FORMATS["SpecForge"]
    tensors = write(format, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    later = {name: tensors.pop(name) for name in ("norm.weight", "lm_head.weight")}
    placed = dict.fromkeys(tensors, "a.safetensors") | dict.fromkeys(later, "b.safetensors")
    save_file(tensors, tmp_path / "a.safetensors")
    save_file(later, tmp_path / "b.safetensors")
    index, shard = tmp_path / "model.safetensors.index.json", tmp_path / "b.safetensors"
    index.write_text(json.dumps({"weight_map": placed}))
    load_draft(tmp_path, target_of(format))
    index.write_text(json.dumps({"weight_map": placed | {"norm.weight": place}}))
    shard.write_bytes(shard.read_bytes()[: len(shard.read_bytes()) - cut])
    with pytest.raises(CheckpointError, match=message):
        load_draft(tmp_path, target_of(format))
