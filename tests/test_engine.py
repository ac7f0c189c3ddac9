"""From a configuration to a worker: which one, with what, and what is refused before anything runs."""

from __future__ import annotations

import copy

import pytest
import torch

from attn_backends import ConfigError
from attn_backends.backends.dsv4 import DSV4Backend
from attn_backends.errors import CheckpointError, UnsupportedStepError
from attn_backends.selection.choose import Workload
from attn_backends_reference.config import RunConfig, load_run_config
from attn_backends_reference.eagle.engine import Engine, build_engine
from attn_backends_reference.eagle.mtp import MtpWorker
from attn_backends_reference.eagle.options import PhaseBackends, WorkerOptions
from attn_backends_reference.eagle.worker import EagleWorker
from attn_backends_reference.models import DraftModel, load_draft, load_target, load_tokenizer
from spec_metadata import CacheGeometry, Capacity, InvalidStepError
from tests.mtp_models import random_mtp
from tests.serving_scenes import PHASES, engine_parts, models, plain, prompts

NUM_MODULES = 3
GRAPHS = {"one": {"draft_extend"}, "per_module": {"draft_extend", "draft_extend_1", "draft_extend_2"}}


def engine_of(config: RunConfig, num_modules: int = NUM_MODULES) -> Engine:
    """An engine of a shipped target and random modules."""
    target = load_target(config.model.target, torch.float32)
    return Engine(config, target, random_mtp(target, num_modules), load_tokenizer("mla", 256))


def changed(**eagle) -> RunConfig:
    """The preset of modules, with other keys of [eagle] and a small runtime."""
    config = load_run_config("mtp", runtime={"max_bs": 2, "buckets": (1,), "max_context": 96, "prefill_chunk": 20})
    return config.model_copy(update={"eagle": config.eagle.model_copy(update=eagle)})


@pytest.mark.parametrize("graphs", GRAPHS)
def test_modules_generate_what_plain_decoding_does(graphs):
    engine, given = engine_of(changed(draft_graphs=graphs)), prompts(3, 40)
    assert [c.tokens for c in engine.generate(given, 12)] == [c.tokens for c in engine.generate_plain(given, 12)]
    assert isinstance(engine.eagle, MtpWorker)
    graphed = {phase for phase, steps in engine.ran.items() if steps["graph"]}
    assert graphed == {"verify", "decode", *GRAPHS[graphs]}
    assert len(engine.eagle.modules) == NUM_MODULES


def test_any_end_of_text_token_of_the_target_ends_a_request():
    engine, given = engine_of(changed()), prompts(1, 40)
    endless = [c.tokens for c in engine.generate_plain(given, 24)]
    engine = engine_of(changed())
    engine.target.eos_token_ids = frozenset({endless[0][9], 255})
    for generate in (engine.generate, engine.generate_plain):
        (done,) = generate(given, 24)
        assert done.tokens == endless[0][: endless[0].index(endless[0][9]) + 1]


def test_fewer_steps_run_the_first_modules():
    engine = engine_of(changed(num_steps=2, num_draft_tokens=3))
    assert engine.eagle.modules == tuple(engine.drafts[:2])


def test_a_module_can_run_all_steps():
    engine, given = engine_of(changed(worker="eagle", draft_graphs=None), num_modules=1), prompts(3, 40)
    assert [c.tokens for c in engine.generate(given, 12)] == [c.tokens for c in engine.generate_plain(given, 12)]
    assert isinstance(engine.eagle, EagleWorker)


def test_more_steps_than_modules_are_refused():
    with pytest.raises(ConfigError, match=r"mtp.toml: eagle.num_steps 3 takes as many modules; mla-mtp has 2\."):
        engine_of(changed(), num_modules=2)


def test_room_for_the_window_counts_among_the_positions():
    config = changed()
    most = load_target("mla", torch.float32).max_positions - config.capacity.draft_room
    for max_context, fits in ((most, True), (most + 1, False)):
        runtime = config.runtime.model_copy(update={"max_context": max_context})
        asked = config.model_copy(update={"runtime": runtime})
        if fits:
            engine_of(asked)
            continue
        need = f"{max_context} and 5 drafted tokens need {max_context + 5} positions"
        with pytest.raises(ConfigError, match=rf"{need}; the target mla has .* runtime.max_context to {most}, or less"):
            engine_of(asked)


def test_the_model_with_the_fewest_positions_is_named():
    config, target = changed(), load_target("mla", torch.float32)
    drafts = random_mtp(target, NUM_MODULES)
    for draft in drafts:
        draft.max_positions = 100
    with pytest.raises(ConfigError, match=r"need 101 positions; the draft mla-mtp has 100 .* to 95, or less"):
        Engine(config, target, drafts, load_tokenizer("mla", 256))


@pytest.mark.parametrize("model", ["gqa", "v4"])
def test_a_target_alone_decodes_plainly(model, tmp_path):
    """Through its graphs, with the backend's other phases unused."""
    file, backend = tmp_path / "run.toml", "dsv4" if model == "v4" else "fa3"
    file.write_text(f'backend = "{backend}"\n[model]\ntarget = "{model}"\n[runtime]\nmax_context = 96\nmax_bs = 2\n')
    engine, given = build_engine(load_run_config(str(file))), prompts(2, 40)
    expected, _ = plain(model, backend, Capacity(2, 96, engine.config.page_size), given, 9)
    assert [c.tokens for c in engine.generate(given, 9)] == [c.tokens for c in expected]
    assert (engine.drafts, list(engine.kernels)) == ((), ["prefill", "decode"])
    assert engine.ran["decode"] == {"graph": 8, "eager": 0}
    with pytest.raises(ConfigError, match=r"run.toml names no draft, .* add model.draft and \[eagle\]"):
        _ = engine.eagle


def test_a_backend_that_can_not_take_the_window_is_refused():
    """Before a verify has run: its states of compression are for the rows of a verify, which are fewer."""
    capacity = Capacity(1, 200, 128, num_steps=2, num_draft_tokens=3, num_rerun=1)
    target, draft = models("v4")
    geometry = CacheGeometry(3, 128)
    workload = Workload(128, (*target.layers, *draft.layers), torch.float32)
    backends = PhaseBackends(**dict.fromkeys(PHASES, DSV4Backend(capacity, geometry, workload=workload)))
    with pytest.raises(UnsupportedStepError, match=r"dsv4 can't take MTP's draft extend, 3 rows and the 1 that run ag"):
        MtpWorker(target, (draft, draft), backends, capacity, geometry)


def test_one_draft_runs_no_position_again():
    capacity = Capacity(2, 96, 16, num_steps=2, num_draft_tokens=3, num_rerun=1)
    target, draft, backends, geometry = engine_parts("gqa", "fa3", capacity)
    with pytest.raises(UnsupportedStepError, match=r"EAGLE: num_rerun=1 .*\. Instead: num_rerun=0, or MtpWorker"):
        EagleWorker(target, draft, backends, capacity, geometry)


def test_one_draft_has_one_graph():
    capacity = Capacity(2, 96, 16, num_steps=2, num_draft_tokens=3)
    target, draft, backends, geometry = engine_parts("gqa", "fa3", capacity)
    with pytest.raises(
        UnsupportedStepError, match=r"EAGLE: draft_graphs='per_module' .*\. Instead: draft_graphs='one'"
    ):
        EagleWorker(target, draft, backends, capacity, geometry, WorkerOptions(draft_graphs="per_module"))


OTHERS = {
    "dtype": (
        lambda target: load_draft("gqa", load_target("gqa", torch.bfloat16)),
        r"dtype torch.bfloat16 \(.*float32",
    ),
    "device": (lambda target: load_draft("gqa", load_target("gqa", torch.float32, "meta")), r"device meta \(.* is cpu"),
    "model": (lambda target: models("mla")[1], r"a draft of cache format latent \(the target's is kv\)"),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("kind", [EagleWorker, MtpWorker])
def test_a_draft_is_made_for_its_target(kind, other):
    """Its first step would find out, with words of torch's."""
    shape = {"num_steps": 2, "num_draft_tokens": 3, "num_rerun": 1} if kind is MtpWorker else {}
    capacity, (make, message) = Capacity(2, 96, 16, **shape), OTHERS[other]
    target, draft, backends, geometry = engine_parts("gqa", "fa3", capacity)
    drafts = (draft, make(target)) if kind is MtpWorker else make(target)
    with pytest.raises(UnsupportedStepError, match=f"{message}.* Instead: what load_draft or load_mtp makes for this"):
        kind(target, drafts, backends, capacity, geometry)


def test_so_are_its_own_weights():
    target, draft = models("gqa")
    message = r"weights are torch.float64 on cpu, its target's torch.float32 on cpu; .* draft.to\(torch.float32\)"
    with pytest.raises(CheckpointError, match=message):
        DraftModel(copy.deepcopy(draft._draft).double(), target)


def test_modules_are_captured_in_one_graph_or_each_in_its_own():
    with pytest.raises(InvalidStepError, match="draft_graphs must be 'one' or 'per_module', got 'all'"):
        WorkerOptions(draft_graphs="all")
