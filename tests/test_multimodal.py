"""Multimodal prompts: hidden tokens with their embeddings are the text itself, on every path; and what is refused."""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nested import nested_tensor

from attn_backends.graphs import RecordedGraph
from attn_backends_reference.config import load_run_config
from attn_backends_reference.eagle.chains import Chains
from attn_backends_reference.eagle.engine import build_engine
from attn_backends_reference.eagle.protocol import Chunk
from attn_backends_reference.eagle.requests import RequestError, RequestOptions
from attn_backends_reference.eagle.serving import Server
from spec_metadata import Capacity, InvalidStepError, Sampling, Step
from tests import mm_laws as laws
from tests import mm_shipped
from tests.mm_laws import PLACEHOLDER, PREFILLS, WORKERS
from tests.mm_shipped import NUM_TOKENS, serve_hidden, texts, worker_of
from tests.mtp_scenes import Place, capacity_of, mtp_worker
from tests.mutants import MUTANTS
from tests.no_host_reads import NoHostReads
from tests.serving_laws import tokens_per_cycle
from tests.serving_scenes import CHAIN, eagle_worker, plain, tokens

HIDDEN = [
    pytest.param(worker, prefill, marks=() if (i + j) % len(PREFILLS) == 0 else pytest.mark.full)
    for (i, worker), (j, prefill) in product(enumerate(WORKERS), enumerate(PREFILLS))
]


@pytest.mark.parametrize(("worker", "prefill"), HIDDEN)
@pytest.mark.one_in(2)
def test_hidden_tokens_change_nothing(worker: str, prefill: str) -> None:
    laws.check_hidden(worker, prefill)


@pytest.mark.parametrize(
    ("worker", "prefill", "chunk", "place", "lag"),
    [
        ("tree", "eager", 1, Place("gqa", "reference", 8), 0),
        ("mtp", "eager", 1, Place("mla", "trtllm_mla", 32), 1),
        ("mtp", "piecewise", 3, Place("gqa", "fa3", 4, (1, 2), "per_module"), 0),
        ("chain", "full", 7, Place("mla", "flashinfer_mla", 1, (2,)), 1),
        ("chain", "piecewise", 26, Place("mla_experts", "fa3", 16), 0),
        ("eagle3", "eager", 26, Place("gqa", "fa3", 4), 1),
        ("plain", "piecewise", 2, Place("mla", "flashinfer_mla", 4), 1),
    ],
    ids=str,
)
@pytest.mark.one_in(3)
def test_nor_do_chunks_pages_or_a_host_that_lags(worker: str, prefill: str, chunk: int, place: Place, lag: int) -> None:
    laws.check_hidden(worker, prefill, chunk, place, lag)


PLACES = [Place("gqa", "fa3", 4, (1, 4)), Place("gqa", "reference", 3), Place("gqa", "fa3", 16, (2,), "per_module")]


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7, 8, 13, 26])
@pytest.mark.parametrize("prefill", PREFILLS)
@pytest.mark.parametrize("worker", WORKERS)
def test_every_way(worker: str, prefill: str, chunk: int, place: Place) -> None:
    laws.check_hidden(worker, prefill, chunk, place)


def test_prompts_of_the_same_ids_share_what_their_embeddings_share() -> None:
    laws.check_sharing()


def test_a_page_is_known_by_the_embedding_behind_it() -> None:
    """A draft's last entry is made from it."""
    slots = laws.make("chain", laws.PLACE, "eager").slots
    same = dict.fromkeys(range(9), b"a")
    keys = [slots.prefix_keys([PLACEHOLDER] * 9, same | other) for other in ({}, {3: b"b"}, {8: b"b"})]
    assert [slots.num_common_tokens(keys[0], other) for other in keys] == [8, 0, 4]


# Trained drafts


TEXTS = texts(64)
MARGINS = {"mla-chain": 0.5, "gqa-chain": 0.25, "gqa-tree": 0.25, "gqa-eagle3": 0.5, "mla-mtp": 0.4}
"""Tokens a cycle that a trained draft loses at least without its embeddings, or with each a row too early."""


TRAINED = [pytest.param(draft, marks=() if draft == "gqa-tree" else pytest.mark.full) for draft in MARGINS]


@pytest.mark.parametrize("draft", TRAINED)
@pytest.mark.one_in(2)
def test_embeddings_are_worth_their_tokens_to_a_trained_draft(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are plain decoding's either way: a draft that is fed something else is only slower, so nobody notices."""
    path = {"prefill_buckets": (64, 256), "chunk": 20}
    expected, _ = plain(draft[:3], "fa3", Capacity(6, 96, 16), TEXTS, NUM_TOKENS)
    whole = serve_hidden(worker_of(draft, 64, **path), TEXTS)
    assert [request.output for request in whole] == tokens(expected)
    for name in ("embeddings_dropped_by_a_replay", "embeddings_not_shifted"):
        with monkeypatch.context() as patch:
            MUTANTS[name].plant(patch)
            worse = serve_hidden(worker_of(draft, 64, **path), TEXTS)
        assert [request.output for request in worse] == tokens(expected)
        assert tokens_per_cycle(worse) < tokens_per_cycle(whole) - MARGINS[draft], name


def test_compressed_attention_begins_its_rows_with_them() -> None:
    capacity = Capacity(3, 96, 128, **CHAIN)
    expected, _ = plain("v4", "dsv4", capacity, TEXTS[:3], NUM_TOKENS)
    worker = eagle_worker("v4", "dsv4", capacity, chunk=20, placeholder_token=mm_shipped.PLACEHOLDER)
    assert [request.output for request in serve_hidden(worker, TEXTS[:3])] == tokens(expected)


# A worker that takes them


@pytest.mark.parametrize("prefill", PREFILLS)
@pytest.mark.parametrize("worker", ["tree", "mtp"])
def test_nothing_is_read_from_the_device_behind_submission(worker: str, prefill: str) -> None:
    place = replace(laws.PLACE, host_lag=1, checking=False)
    made = laws.make(worker, place, prefill, placeholder_token=PLACEHOLDER)
    row, (prompt, embeddings) = made.slots.admit(), laws.prompt_of(made, laws.text(9, (0, 4, 5, 8), 0))
    taken = made.embedding_form.take(prompt, embeddings)
    made.slots.reserve(row, 32)
    with NoHostReads():
        made.admit(row, Sampling())
        for start, end in ((0, 5), (5, 9)):
            made.prefill([Chunk(row, prompt, start, end, taken)])
        made.cycle([row], [9])


@pytest.mark.parametrize("buckets", [(), (1, 4)], ids=["eager", "graph"])
def test_an_idle_rank_runs_windows(buckets: tuple[int, ...]) -> None:
    worker = laws.make("mtp", replace(laws.PLACE, buckets=buckets), "piecewise", placeholder_token=PLACEHOLDER)
    rows = torch.empty(0, dtype=torch.int64)
    idle, width = Step.idle(worker.slots.paging(rows)), worker.target.hidden_size
    with torch.no_grad():
        accepted = worker._run(worker._verify, idle, Chains(worker._chains[rows]))
        window = worker._run(worker._window, idle, worker._window_inputs(rows, worker._lens[rows], accepted))
    assert window.kept_embeddings.shape == (0, worker.capacity.num_rerun, width)


def test_one_module_keeps_none() -> None:
    outputs, given = list[list[int]](), torch.linspace(-1, 1, 64).view(2, 32)
    for worker in (
        mtp_worker(laws.PLACE, capacity_of(1, 4, 48, 4), placeholder_token=PLACEHOLDER, make_graph=RecordedGraph),
        laws.make("plain", laws.PLACE, "eager", placeholder_token=PLACEHOLDER),
    ):
        server = Server(worker)
        outputs.append(server.submit([1, PLACEHOLDER, PLACEHOLDER], RequestOptions(8), given).output)
        list(server.stream())
    assert outputs[0] == outputs[1] != []


def test_a_run_names_its_placeholder() -> None:
    """And its server takes embeddings."""
    config = load_run_config("chain", backend="fa3", runtime={"max_bs": 2, "max_context": 96, "buckets": (1,)})
    model = config.model.model_copy(update={"placeholder_token": mm_shipped.PLACEHOLDER})
    engine = build_engine(config.model_copy(update={"model": model}))
    expected, _ = plain(config.model.target, "fa3", Capacity(2, 96, 16), TEXTS[:2], NUM_TOKENS)
    assert [request.output for request in serve_hidden(engine.eagle, TEXTS[:2])] == tokens(expected)


# What is refused


ROWS = torch.zeros(3, 32)
PROMPT = [1, PLACEHOLDER, 2, PLACEHOLDER, PLACEHOLDER]
IN_WORDS = rf"a prompt has 3 placeholder tokens {PLACEHOLDER}"


@pytest.mark.parametrize(
    ("prompt", "given", "message"),
    [
        (
            PROMPT,
            None,
            rf"{IN_WORDS} and comes with no embeddings; it needs one dense tensor of embeddings, \[3, 32\] in ",
        ),
        (PROMPT, ROWS.tolist(), rf"{IN_WORDS} and comes with a list; it needs one dense tensor"),
        (
            PROMPT,
            ROWS.to_sparse(),
            rf"{IN_WORDS} and comes with a tensor of layout torch.sparse_coo; it needs one dense",
        ),
        (
            PROMPT,
            nested_tensor([*ROWS], layout=torch.jagged),
            rf"{IN_WORDS} and comes with a nested tensor; it needs one dense tensor",
        ),
        (PROMPT, ROWS[:2], rf"{IN_WORDS} and embeddings \[2, 32\].*must be \[3, 32\].*one for each placeholder"),
        (PROMPT, ROWS[:, :16], rf"{IN_WORDS} and embeddings \[3, 16\]"),
        (PROMPT, ROWS.half(), rf"{IN_WORDS} and embeddings \[3, 32\] in torch.float16 on cpu; they must be .*float32"),
        (PROMPT, ROWS.to("meta"), rf"{IN_WORDS} and embeddings .* on meta; they must be .* on cpu"),
        (PROMPT, ROWS[0], rf"{IN_WORDS} and embeddings \[32\]"),
        ([1, 2], ROWS, r"a prompt has 0 placeholder tokens 63 and embeddings \[3, 32\].*must be \[0, 32\]"),
        (PROMPT, ROWS.clone().index_fill_(0, torch.tensor([1]), torch.nan), r"1 .*not finite.*number 1, at position 3"),
        (PROMPT, ROWS.clone().index_fill_(1, torch.tensor([4]), torch.inf), r"3 .*not finite.*number 0, at position 1"),
    ],
    ids=[
        "none",
        "a list",
        "sparse",
        "nested",
        "fewer",
        "narrower",
        "dtype",
        "device",
        "one row",
        "no placeholder",
        "nan",
        "infinite",
    ],
)
def test_embeddings_that_do_not_fit_are_refused(prompt: list[int], given: Tensor | None, message: str) -> None:
    worker = laws.make("chain", laws.PLACE, "eager", placeholder_token=PLACEHOLDER)
    server = Server(worker)
    with pytest.raises(RequestError, match=message):
        server.submit(prompt, multimodal_embeddings=given)
    assert server.is_idle
    assert not worker.slots.in_use


def test_a_worker_of_text_refuses_embeddings() -> None:
    server = Server(laws.make("chain", laws.PLACE, "eager"))
    with pytest.raises(
        RequestError, match=r"takes token ids alone. Build it with WorkerOptions\(placeholder_token=…\)"
    ):
        server.submit(PROMPT, multimodal_embeddings=ROWS)
    assert server.is_idle


@pytest.mark.parametrize("token", [-1, 64, 3.0, "<image>"])
def test_a_placeholder_is_a_token_of_the_model(token: object) -> None:
    with pytest.raises(InvalidStepError, match=rf"placeholder_token is {token!r}; the model knows 0 to 63"):
        laws.make("plain", laws.PLACE, "eager", placeholder_token=token)


@pytest.mark.parametrize("token", [0, PLACEHOLDER])
def test_any_token_may_be_the_placeholder(token: int) -> None:
    worker = laws.make("plain", laws.PLACE, "eager", placeholder_token=token)
    assert worker.embedding_form is not None
    assert worker.embedding_form.placeholder_token == token


def test_a_callers_embeddings_are_its_own_again_after_submission() -> None:
    outputs = []
    for overwritten in (False, True):
        worker = laws.make("chain", laws.PLACE, "eager", placeholder_token=PLACEHOLDER)
        server, given = Server(worker), torch.linspace(-1, 1, 96).view(3, 32)
        request = server.submit(PROMPT, RequestOptions(8), given)
        if overwritten:
            given.fill_(3)
        list(server.stream())
        outputs.append(request.output)
    assert outputs[0] == outputs[1]


STRIDES = {
    "transposed": lambda rows: rows.t().contiguous().t(),
    "every other column": lambda rows: torch.stack((rows, rows + 1), dim=2)[..., 0],
    "with a gradient": lambda rows: rows.clone().requires_grad_(),
    "negated when read": lambda rows: torch.complex(rows, -rows).conj().imag,
}


@pytest.mark.parametrize("form", STRIDES)
def test_embeddings_may_have_any_strides(form: str) -> None:
    outputs, rows = [], torch.linspace(-1, 1, 96).view(3, 32)
    for given in (rows, STRIDES[form](rows)):
        assert torch.equal(given, rows)
        server = Server(laws.make("chain", laws.PLACE, "eager", placeholder_token=PLACEHOLDER))
        outputs.append(server.submit(PROMPT, RequestOptions(8), given))
        list(server.stream())
    assert outputs[0].output == outputs[1].output
    assert outputs[0].prefix_keys == outputs[1].prefix_keys, "they share no pages"


@pytest.mark.parametrize("num_rounds", [0, 2], ids=["waiting", "halfway"])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_cancelled_request_keeps_no_embeddings(lag: int, num_rounds: int) -> None:
    """However long its caller holds on to it."""
    place = replace(laws.PLACE, host_lag=lag)
    server = Server(laws.make("mtp", place, "piecewise", chunk=2, placeholder_token=PLACEHOLDER))
    request = server.submit(PROMPT, multimodal_embeddings=ROWS)
    assert request.embeddings is not None
    rows = weakref.ref(request.embeddings.rows)
    for _ in range(num_rounds):
        server.round()
    assert request.in_prefill
    server.cancel(request)
    list(server.stream())
    assert rows() is None


@pytest.mark.parametrize("lag", [0, 1])
def test_nor_does_one_whose_prompt_is_through(lag: int) -> None:
    server = Server(laws.make("chain", replace(laws.PLACE, host_lag=lag), "eager", placeholder_token=PLACEHOLDER))
    request = server.submit(PROMPT, RequestOptions(20), ROWS)
    server.round()
    assert not request.in_prefill
    assert (request.finish, request.embeddings) == (None, None)


def test_a_worker_of_text_has_no_fields_for_embeddings() -> None:
    """Neither held in buckets nor copied."""
    worker = laws.make("mtp", laws.PLACE, "piecewise")
    for runner in (worker._prefill, worker._first_chains, worker._window):
        captured = next(iter(runner._captured.values()))
        assert not hasattr(captured.inputs, "multimodal_embeddings")
        assert not hasattr(captured.inputs, "kept_embeddings")
