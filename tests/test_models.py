"""Models through every dense backend against transformers' own forward."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attn_backends.graphs import RecordedGraph
from attn_backends_reference.models import ForwardAttention, TargetModel
from spec_metadata import DraftTree, PackedQuery, Step, UniformQuery, token_positions
from tests import reference_models as rm

LENS = (5, 13, 9)


@functools.cache
def plain_target(name: str) -> rm.PlainTarget:
    return rm.PlainTarget(rm.tiny_target(name))


@functools.cache
def served_target(name: str) -> TargetModel:
    return rm.served_target(name, plain_target(name).single)


@functools.cache
def plain_draft(name: str) -> rm.PlainDraft:
    return rm.PlainDraft(plain_target(name), rm.tiny_draft(name))


@functools.cache
def plain_logits(name: str, tokens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return plain_target(name).logits(torch.tensor(tokens))


class TargetCase:
    """Requests whose tokens run through a target in steps; every row's logits are compared."""

    def __init__(self, name: str, backend: str) -> None:
        self.name = name
        self.requests = rm.Requests(served_target(name), backend, len(LENS))
        self.texts = rm.random_tokens([n + 8 for n in LENS])
        self.errors = rm.Errors()

    def run(self, step: Step, tokens: Tensor, positions: Tensor) -> Tensor:
        model = self.requests.model
        assert isinstance(model, TargetModel)
        return model.logits(model.forward(tokens, positions, self.requests.attention(step)))

    def advance(self, build: Callable[[Tensor], Step], lens: tuple[int, ...]) -> None:
        """Run the next `lens` tokens of each request in the step that `build` makes of the committed lengths."""
        starts = self.requests.committed.tolist()
        step = build(self.requests.committed)
        tokens = torch.cat([text[at : at + n] for text, at, n in zip(self.texts, starts, lens, strict=True)])
        logits = self.run(step, tokens, token_positions(step)).split(list(lens))
        for text, at, n, ours in zip(self.texts, starts, lens, logits, strict=True):
            single, double = plain_logits(self.name, tuple(text.tolist()))
            self.errors.add(ours, single[at : at + n], double[at : at + n])
        self.requests.committed = self.requests.committed + torch.tensor(lens)

    def prefill(self, lens: tuple[int, ...] = LENS) -> None:
        self.advance(lambda committed: Step.prefill(PackedQuery.of(lens), committed, self.requests.paging), lens)


@pytest.fixture(params=rm.PAIRS, ids="-".join)
def case(request: pytest.FixtureRequest) -> TargetCase:
    return TargetCase(*request.param)


def test_prefill(case: TargetCase) -> None:
    case.prefill()
    case.errors.check()


def test_chunked_prefill(case: TargetCase) -> None:
    case.prefill((2, 6, 1))
    case.prefill((1, 5, 8))
    case.prefill((2, 2, 2))
    case.errors.check()


def test_decode(case: TargetCase) -> None:
    case.prefill()
    case.errors = rm.Errors()
    for _ in range(3):
        case.advance(lambda committed: Step.decode(committed, case.requests.paging), (1, 1, 1))
    case.errors.check()


@pytest.mark.smoke
def test_chain_verify(case: TargetCase) -> None:
    case.prefill()
    case.errors = rm.Errors()
    case.advance(lambda committed: Step.target_verify(4, committed, case.requests.paging), (4, 4, 4))
    case.errors.check()


def test_tree_verify(case: TargetCase) -> None:
    case.prefill()
    case.errors = rm.Errors()
    parents = torch.tensor([[0, 0, 0, 1, 1, 3], [0, 0, 1, 2, 0, 4], [0, 0, 0, 2, 2, 2]])
    nodes = torch.stack(rm.random_tokens([6, 6, 6], seed=4))
    tree = DraftTree.from_parents(nodes, parents, max_depth=3)
    committed = case.requests.committed
    step = Step.target_verify(6, committed, case.requests.paging, tree_mask=tree.mask)
    logits = case.run(step, nodes.flatten(), (committed.unsqueeze(1) + tree.depths).flatten())
    for request, (text, length) in enumerate(zip(case.texts, LENS, strict=True)):
        for node in range(6):
            path = nodes[request, tree.mask[request, node]]
            single, double = plain_logits(case.name, (*text[:length].tolist(), *path.tolist()))
            case.errors.add(logits[6 * request + node][None], single[-1:], double[-1:])
    case.errors.check()


DRAFT_PAIRS = [pair for pair in rm.PAIRS if pair[0] in ("gqa", "gqa_bias", "mla", "mla_q_lora")]


class DraftCase:
    """Requests that run through a draft; the hidden states it is given are random."""

    def __init__(self, name: str, backend: str) -> None:
        self.model = rm.served_draft(plain_draft(name).single, served_target(name))
        self.requests = rm.Requests(self.model, backend, len(LENS))
        self.tokens = rm.random_tokens([n + 8 for n in LENS], seed=5)
        generator = torch.Generator().manual_seed(6)
        self.hidden = [torch.randn(n + 8, rm.HIDDEN, generator=generator) for n in LENS]
        pairs = zip(self.tokens, self.hidden, strict=True)
        self.expected = [plain_draft(name).logits(tokens, hidden) for tokens, hidden in pairs]
        self.errors = rm.Errors()

    def run(self, step: Step, lens: tuple[int, ...], forward: int = 0) -> None:
        """Run rows from each request's committed length on, `lens` of them, and compare their logits."""
        spans = [
            slice(start + forward, start + forward + n)
            for start, n in zip(self.requests.committed.tolist(), lens, strict=True)
        ]
        tokens = torch.cat([rows[span] for rows, span in zip(self.tokens, spans, strict=True)])
        hidden = torch.cat([rows[span] for rows, span in zip(self.hidden, spans, strict=True)])
        attention = self.requests.attention(step, forward)
        out = self.model.forward(tokens, hidden, token_positions(step, forward), attention)
        logits = self.model.logits(out).split(list(lens))
        for ours, span, (single, double) in zip(logits, spans, self.expected, strict=True):
            self.errors.add(ours, single[span], double[span])

    def prefill(self) -> None:
        self.run(Step.prefill(PackedQuery.of(LENS), self.requests.committed, self.requests.paging), LENS)
        self.requests.committed = torch.tensor(LENS)
        self.errors = rm.Errors()


@pytest.mark.parametrize(("name", "backend"), DRAFT_PAIRS)
def test_draft_extend(name: str, backend: str) -> None:
    case = DraftCase(name, backend)
    case.prefill()
    for accepted in ((1, 3, 2), (3, 1, 1)):  # rows past the accepted ones are run again
        committed = case.requests.committed
        case.run(Step.draft_extend(UniformQuery(3), committed, case.requests.paging), (3, 3, 3))
        case.requests.committed = committed + torch.tensor(accepted)
    case.errors.check()


@pytest.mark.parametrize(("name", "backend"), [pair for pair in DRAFT_PAIRS if pair[1] != "trtllm_mla"])
def test_packed_draft_extend(name: str, backend: str) -> None:
    case = DraftCase(name, backend)
    case.prefill()
    query = PackedQuery.of((1, 3, 2))
    case.run(Step.draft_extend(query, case.requests.committed, case.requests.paging), (1, 3, 2))
    case.errors.check()


@pytest.mark.parametrize(("name", "backend"), DRAFT_PAIRS)
def test_chain_draft_decode(name: str, backend: str) -> None:
    case = DraftCase(name, backend)
    case.prefill()
    step = Step.draft_decode(1, 3, case.requests.committed, case.requests.paging)
    for forward in range(2):
        case.run(step, (1, 1, 1), forward)
    case.errors.check()


@pytest.mark.parametrize(("name", "backend"), rm.PAIRS)
def test_a_recorded_verify_replays_as_eager(name: str, backend: str) -> None:
    case = TargetCase(name, backend)
    case.prefill()
    requests, model = case.requests, served_target(name)
    committed, kernels = requests.committed, requests.backend
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool().expand(3, -1, -1)
    step = Step.target_verify(3, committed, requests.paging, tree_mask=mask)
    tokens, positions = torch.arange(9), (committed.unsqueeze(1) + torch.tensor([0, 1, 1])).flatten()
    expected = case.run(step, tokens, positions)

    meta = kernels.capture(step.bucket(), requests.paging)
    inputs = torch.zeros(2, 9, dtype=torch.int64)
    attention = ForwardAttention(kernels, requests.caches, meta.at(), model.layers)
    graph = RecordedGraph()
    logits = graph.capture(lambda: model.logits(model.forward(inputs[0], inputs[1], attention)))
    inputs.copy_(torch.stack((tokens, positions)))
    kernels.replay(meta, step)
    graph.replay()
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "backend"), DRAFT_PAIRS)
def test_a_recorded_draft_extend_replays_as_eager(name: str, backend: str) -> None:
    case = DraftCase(name, backend)
    case.prefill()
    requests, model, kernels = case.requests, case.model, case.requests.backend
    step = Step.draft_extend(UniformQuery(2), requests.committed, requests.paging)
    tokens, hidden = torch.arange(6), torch.ones(6, rm.HIDDEN)
    expected = model.forward(tokens, hidden, token_positions(step), requests.attention(step))

    meta = kernels.capture(step.bucket(), requests.paging)
    positions = torch.zeros(6, dtype=torch.int64)
    attention = ForwardAttention(kernels, requests.caches, meta.at(), model.layers)
    graph = RecordedGraph()
    out = graph.capture(lambda: model.forward(tokens, hidden, positions, attention))
    positions.copy_(token_positions(step))
    kernels.replay(meta, step)
    graph.replay()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
