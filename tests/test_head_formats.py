"""Folders of every published format load unchanged, and their logits and drafts are those of an independent forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attn_backends.errors import UnsupportedStepError
from attn_backends.registry import get_backend
from attn_backends_reference.eagle.options import PhaseBackends, WorkerOptions
from attn_backends_reference.eagle.serving import serve
from attn_backends_reference.eagle.worker import EagleWorker
from attn_backends_reference.models import load_draft
from spec_metadata import CacheGeometry, Capacity
from tests.eagle3_laws import CHAIN, TREE, check_drafts
from tests.eagle3_scenes import watch
from tests.head_catalogue import FORMATS, VARIANTS
from tests.head_formats import write
from tests.head_runs import (
    BUDGET,
    TEXT,
    DenseAttention,
    expected_log_probs,
    has_window,
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
    for attention in [DenseAttention(draft)] if has_window(format) else [DenseAttention(draft), paged(draft)]:
        torch.testing.assert_close(log_probs(draft, features, attention), expected, rtol=0, atol=BUDGET)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", [name for name, format in FORMATS.items() if not has_window(format)])
def test_drafts_are_those_of_an_independent_forward(name: str, shape: tuple[int, int, int], tmp_path: Path) -> None:
    format = FORMATS[name]
    oracle, worker = oracle_of(format, write(format, tmp_path)), worker_of(name, tmp_path, shape)
    with watch(worker) as seen:
        serve(worker, [TEXT[:11].tolist(), TEXT[20:24].tolist()], 12)
    assert sum(len(request.cycles) for request in seen) > 6
    for request in seen:
        check_drafts(oracle, request, shape)


def test_a_window_is_honoured_or_refused_by_name(tmp_path: Path) -> None:
    """Kernels of the torch definition take none."""
    write(FORMATS["speculators"], tmp_path)
    worker = worker_of("speculators", tmp_path, CHAIN)
    with pytest.raises(UnsupportedStepError, match=r"layer 0: a sliding window of 7 tokens \(it takes none\)"):
        serve(worker, [TEXT[:11].tolist()], 2)


def worker_of(name: str, folder: Path, shape: tuple[int, int, int]) -> EagleWorker:
    target = target_of(FORMATS[name])
    capacity = Capacity(2, 40, 4, *shape)
    geometry = CacheGeometry(1 + capacity.max_bs * capacity.max_pages, 4)
    backend = get_backend("fa3")(capacity, geometry, kernel="torch", checking=True)
    backends = PhaseBackends(**dict.fromkeys(PHASES, backend))
    return EagleWorker(target, load_draft(folder, target), backends, capacity, geometry, WorkerOptions(chunk=5))
