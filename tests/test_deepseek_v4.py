"""The embedded DeepSeek-V4 and its MTP draft: what they compute over pages, and what EAGLE makes of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from attn_backends.backends.dsv4 import DSV4Backend
from attn_backends.graphs import RecordedGraph
from attn_backends_reference.eagle.engine import serve
from attn_backends_reference.eagle.options import PhaseBackends, WorkerOptions
from attn_backends_reference.eagle.phases import Nothing
from attn_backends_reference.eagle.worker import EagleWorker, PlainWorker
from attn_backends_reference.models import load_draft, load_target
from attn_backends_reference.models.attention import ForwardAttention
from attn_backends_reference.models.decoder import DraftModel, PagedModel, TargetModel
from attn_backends_reference.models.deepseek_v4_draft import MtpDraft
from spec_metadata import BlockTable, CacheGeometry, Capacity, PackedQuery, Step
from training.compressed_plans import Nodes
from training.corpus import load_heldout
from training.cycles import Window
from training.models import CHECKPOINTS, target_hidden
from training.models import load_target as load_trained_target

PAGE = 256
MIB = 2**20
TEXT = next(iter(load_heldout().values()))


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return load_target("v4", torch.float32)


@pytest.fixture(scope="module")
def draft(target: TargetModel) -> DraftModel:
    return load_draft("v4", target)


def file_tokens(num_tokens: int) -> Tensor:
    """The begin token and a held-out file's first bytes."""
    return torch.tensor([0, *TEXT[: num_tokens - 1]])


class Pages:
    """One request of a model over pages in reverse order, everything but the reserved page NaN."""

    def __init__(self, model: PagedModel) -> None:
        capacity = Capacity(1, 2 * PAGE, PAGE, topk=1, num_steps=3, num_draft_tokens=4)
        geometry = CacheGeometry(capacity.max_pages + 1, PAGE)
        self.model, self.backend = model, DSV4Backend(capacity, geometry, checking=True)
        self.caches = model.allocate_caches(self.backend)
        for cache in self.caches:
            pairs = [pools for pools in (cache.compressor, cache.indexer) if pools is not None]
            for pool in (cache.rows, *(pool for pair in pairs for pool in (pair.entries, pair.states))):
                pool.data[1:] = float("nan")
        pages = torch.arange(capacity.max_pages, 0, -1, dtype=torch.int32)
        self.paging = BlockTable(pages.unsqueeze(0), geometry)

    def attention(self, committed: int, width: int, *, verify: bool = False) -> ForwardAttention:
        """Of a prefill of `width` tokens, or a verify of them."""
        lens = torch.tensor([committed], dtype=torch.int32)
        prefill = Step.prefill(PackedQuery.of((width,)), lens, self.paging) if not verify else None
        meta = self.backend.init_forward_metadata(prefill or Step.target_verify(width, lens, self.paging))
        return ForwardAttention(self.backend, self.caches, meta.at(), self.model.layers)


@pytest.mark.smoke
@torch.no_grad()
def test_paged_logits_are_transformers_own(target):
    """Prefill in chunks and verify with rejected drafts, past two blocks of 128 and more entries than are selected."""
    tokens = file_tokens(304)
    source = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "v4" / "target", dtype=torch.float32)
    expected = source(tokens[None], use_cache=False).logits[0]
    pages, committed, worst = Pages(target), 0, 0.0
    for width, accepted in [(125, 125), (4, 1), (4, 3), (4, 4), (120, 120), (4, 1), (4, 2), (4, 4), (40, 40)]:
        rows = tokens[committed : committed + width].clone()
        rows[accepted:] = (rows[accepted:] + 1) % 256
        positions = torch.arange(committed, committed + width)
        attention = pages.attention(committed, width, verify=width == 4)
        logits = target.logits(target.forward(rows, positions, attention))[:accepted]
        worst = max(worst, float((logits - expected[committed : committed + accepted]).abs().max()))
        committed += accepted
    assert committed > 2 * 128
    assert committed // 4 > target.layers[1].index_topk
    assert worst < 2e-4, worst  # logits reach 20


@torch.no_grad()
def test_the_paged_draft_is_transformers_own(draft):
    """Past its window, against the same module on transformers' attention."""
    num_tokens = 200
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, draft.hidden_size, generator=generator)
    tokens, positions = file_tokens(num_tokens), torch.arange(num_tokens)
    plain = MtpDraft.from_pretrained(CHECKPOINTS / "v4" / "draft", torch.float32)
    distance = positions[:, None] - positions
    mask = torch.zeros(num_tokens, num_tokens).masked_fill((distance < 0) | (distance >= 128), float("-inf"))
    embeds = draft.embedding(tokens[None])
    expected = plain(embeds, hidden[None], positions[None], attention_mask=mask[None, None], past_key_values=None)
    given = draft.forward(tokens, hidden, positions, Pages(draft).attention(0, num_tokens))
    torch.testing.assert_close(given, expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", ["target", "draft"])
@torch.no_grad()
def test_decoder_layers_get_contiguous_streams(model, request):
    """transformers' own model hands them over so; from 5.23 on its layers view the streams as rows."""
    paged: PagedModel = request.getfixturevalue(model)
    contiguous = []

    def see(layer, given):
        contiguous.append(given[0].is_contiguous())

    hooks = [block.register_forward_pre_hook(see) for block in blocks_of(paged)]
    tokens, attention = file_tokens(9), Pages(paged).attention(0, 9)
    hidden = (torch.zeros(9, paged.hidden_size),) if isinstance(paged, DraftModel) else ()
    paged.forward(tokens, *hidden, torch.arange(9), attention)
    for hook in hooks:
        hook.remove()
    assert contiguous == [True] * len(paged.layers)


def blocks_of(model: PagedModel) -> Iterable[nn.Module]:
    """transformers' decoder layers of a model."""
    return model._draft.layers if isinstance(model, DraftModel) else model._decoder.layers


OPTIONS = {"eager": WorkerOptions(), "graph": WorkerOptions((2,), RecordedGraph)}


def eagle_worker(target: TargetModel, draft: DraftModel, options: WorkerOptions) -> EagleWorker:
    """Two requests of at most a page, drafting three tokens."""
    capacity = Capacity(2, PAGE, PAGE, topk=1, num_steps=3, num_draft_tokens=4)
    backend = DSV4Backend(capacity, CacheGeometry(2 * capacity.max_pages + 1, PAGE))
    backends = PhaseBackends(backend, backend, backend, backend, backend)
    return EagleWorker(target, draft, backends, capacity, backend.geometry, options)


@pytest.mark.parametrize("path", ["eager", "graph"])
def test_eagle_equals_plain_decoding(target, draft, path):
    """Two requests, one of which crosses a block of 128."""
    prompts = [file_tokens(118).tolist(), file_tokens(50).tolist()]
    eagle = eagle_worker(target, draft, OPTIONS[path])
    plain = PlainWorker(target, eagle.backends, eagle.capacity, eagle.slots.geometry, OPTIONS[path])
    expected, given = (serve(worker, prompts, 24) for worker in (plain, eagle))
    assert [done.tokens for done in given] == [done.tokens for done in expected]
    assert all(done.num_cycles < 20 for done in given), "the draft is of no use"
    assert bool(eagle.num_graph_steps) == (path == "graph")


@torch.no_grad()
def test_the_training_evaluator_scores_nodes_as_transformers_does():
    """A chain of four nodes behind a recorded prefix, at roots around blocks, the window and the selection."""
    folder = CHECKPOINTS / "v4" / "target"
    source = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trained = load_trained_target(folder, torch.float32, torch.device("cpu"))
    file = file_tokens(300)
    roots = torch.tensor([1, 2, 3, 5, 124, 125, 126, 127, 128, 131, 254, 255, 297])
    window = Window(trained, None, file.expand(len(roots), -1))
    depth = torch.arange(4)
    nodes = (file[(roots[:, None] + depth).clamp(max=299)] + (depth > 1)) % 256
    mask = torch.ones(4, 4, dtype=torch.bool).tril().expand(len(roots), -1, -1)
    plan = Nodes(window.target_kv, window.positions < roots[:, None], mask)
    given = trained.lm_head(target_hidden(trained, nodes, roots[:, None] + depth, plan))
    for row, root in enumerate(roots.tolist()):
        expected = source(torch.cat((file[:root], nodes[row]))[None], use_cache=False).logits[0, -4:]
        torch.testing.assert_close(given[row], expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("path", ["eager", "graph"])
def test_an_idle_rank_runs_every_phase(target, draft, path):
    """A rank without requests takes part: every region runs on no row at all, or on padding."""
    worker = eagle_worker(target, draft, OPTIONS[path])
    rows = torch.empty(0, dtype=torch.int64)
    idle = Step.idle(worker.slots.paging(rows))
    phases = worker.step_sets[0]
    with torch.no_grad():
        tree = worker._run(phases.draft, idle, Nothing())
        accepted = worker._run(phases.verify, idle, tree)
        extended = worker._run(phases.extend, idle, accepted)
    assert [x.shape[0] for x in (tree.tokens, accepted.hidden, extended.tokens)] == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_sinks_are_of_a_type_that_layers_and_flashmla_take(dtype: torch.dtype) -> None:
    target = load_target("v4", dtype)
    assert target.dtype is dtype
    layers = (*target.layers, *load_draft("v4", target).layers)
    assert {layer.sinks.dtype for layer in layers} == {torch.float32}


def test_both_files_together_are_small():
    files = [CHECKPOINTS / "v4" / part / "model.safetensors" for part in ("target", "draft")]
    assert sum(Path(file).stat().st_size for file in files) <= 6 * MIB
