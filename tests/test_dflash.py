"""Folders of published DFlash and DSpark drafts load unchanged, the block worker runs them, and what they draft is what
an independent forward gives; every key of their configurations is honoured, or refused by its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends.errors import CheckpointError
from attn_backends.registry import get_backend
from attn_backends_reference.eagle.block import BlockWorker
from attn_backends_reference.eagle.options import PhaseBackends, WorkerOptions
from attn_backends_reference.eagle.serving import serve
from attn_backends_reference.eagle.worker import PlainWorker
from attn_backends_reference.models import ForwardAttention
from attn_backends_reference.models import head_keys as keys
from attn_backends_reference.models.block import BlockModel, load_block
from attn_backends_reference.models.dflash import read_dflash
from spec_metadata import BlockTable, CacheGeometry, Capacity, PackedQuery, Step, token_positions
from tests.block_formats import BLOCKS, DSPARKS, SIZE, BlockOracle
from tests.eagle3_models import tiny_target
from tests.head_formats import Format, write
from tests.head_runs import BUDGET, TEXT, target_of
from tests.serving_scenes import PHASES
from tests.test_head_keys import mentions, without
from tests.test_wheel_lists import MADE

FORMATS = BLOCKS | DSPARKS


def place_of(num_drafted: int) -> tuple[Capacity, CacheGeometry]:
    """Of two requests, for blocks that propose as many tokens."""
    capacity = Capacity(2, 48, 4, 1, num_drafted, num_drafted + 1, block_size=SIZE)
    return capacity, CacheGeometry(1 + capacity.max_bs * capacity.max_pages, 4)


def oracle_of(format: Format, tensors: dict[str, Tensor]) -> BlockOracle:
    """Of a folder's tensors."""
    wide = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
    return BlockOracle(tiny_target(format.num_layers), format.facts, wide, format.facts["taps"])


@torch.no_grad()
def scores_of(draft: BlockModel, features: Tensor) -> Tensor:
    """[drafted, vocab]: log-probabilities of a block behind all of `TEXT` but its last token, the root."""
    capacity, geometry = place_of(draft.num_drafted)
    backend = get_backend("fa3")(capacity, geometry, kernel="torch", checking=True)
    caches, count = draft.allocate_caches(backend), len(TEXT) - 1
    pages = BlockTable(1 + torch.arange(capacity.max_pages)[None], geometry)

    def attention(step: Step) -> ForwardAttention:
        return ForwardAttention(backend, caches, backend.init_forward_metadata(step).at(), draft.layers)

    stored = Step.prefill(PackedQuery.of((count,)), torch.tensor([0]), pages)
    draft.store_context(features[:count], token_positions(stored), attention(stored))
    block = Step.draft_block(SIZE, torch.tensor([count], dtype=torch.int32), pages, max_committed=count)
    rows = draft.forward(TEXT[-1:], token_positions(block), attention(block))
    scores = draft.logits(draft.proposing(rows).squeeze(0)).log_softmax(-1)
    ids = draft.target_ids(torch.arange(scores.shape[1]))
    return scores.new_full((draft.num_drafted, draft.vocab_size), -torch.inf).index_copy_(1, ids, scores)


@pytest.mark.parametrize("name", FORMATS)
@torch.no_grad()
def test_logits_are_those_of_an_independent_forward(name: str, tmp_path: Path) -> None:
    oracle = oracle_of(FORMATS[name], write(FORMATS[name], tmp_path))
    features = oracle.features(TEXT.tolist())
    found = scores_of(load_block(tmp_path, target_of(FORMATS[name])), features)
    torch.testing.assert_close(found.double(), oracle.block(TEXT.tolist(), features), rtol=0, atol=BUDGET)


@pytest.mark.parametrize("name", FORMATS)
@torch.no_grad()
def test_a_worker_drafts_what_an_independent_forward_does(name: str, tmp_path: Path) -> None:
    """And its requests get the tokens of plain decoding."""
    format, target, drafted = FORMATS[name], target_of(FORMATS[name]), []
    oracle, draft = oracle_of(format, write(format, tmp_path)), load_block(tmp_path, target)
    capacity, geometry = place_of(draft.num_drafted)
    backend = get_backend("fa3")(capacity, geometry, kernel="torch", checking=True)
    backends, options = PhaseBackends(**dict.fromkeys(PHASES, backend)), WorkerOptions(chunk=5)
    worker = BlockWorker(target, draft, backends, capacity, geometry, options)
    run = worker._run

    def seen(runner: Any, step: Any, inputs: Any) -> Any:
        lens, value = step.seq_lens.tolist(), run(runner, step, inputs)
        if runner.phase.name == "draft":
            drafted.append((lens[0], value.tokens[0].tolist()))
        return value

    worker._run = seen  # type: ignore[method-assign]
    prompt = TEXT[:11].tolist()
    (found,) = serve(worker, [prompt], 12)
    (plain,) = serve(PlainWorker(target, backends, capacity, geometry, options), [prompt], 12)
    assert found.tokens == plain.tokens
    text = [*prompt, *found.tokens]
    features = oracle.features(text)
    assert len(drafted) > 6
    for count, chain in drafted:
        assert chain == [text[count], *oracle.drafts(text[: count + 1], features)]


UNSEEN = {
    "model_type": "it only must not be another's",
    "use_sliding_window": "it only must not contradict layer_types",
    "causal": "is_causal is asked first",
    "num_target_layers": "it only must be the target's",
    "target_hidden_size": "the fitting one is the draft's own",
}
"""Keys that are checked alone; `test_what_is_refused` has another value of each."""


@pytest.mark.parametrize("key", sorted({*keys.DFLASH_HONOURED, *keys.DSPARK_HONOURED} - UNSEEN.keys()))
def test_a_key_that_is_ignored_is_seen(key: str, tmp_path: Path) -> None:
    """In one format at least: the folder is refused without it, or has other scores, positions or blocks."""
    found = []
    for name, format in FORMATS.items():
        if key not in format.config and not mentions(format.config, key):
            continue
        folder = tmp_path / name.replace(",", "")
        features = oracle_of(format, write(format, folder)).features(TEXT.tolist())
        whole = load_block(folder, target_of(format))
        write(format, folder, without(format.config, key))
        try:
            draft = load_block(folder, target_of(format))
        except CheckpointError:
            found.append(True)
            continue
        said = [(each.max_positions, each.block_size, each.feature_layers) for each in (draft, whole)]
        moved = (scores_of(draft, features) - scores_of(whole, features)).nan_to_num(0).abs().max()
        found.append(said[0] != said[1] or bool(moved > 100 * BUDGET))
    assert any(found)


PLAIN, OTHER, DSPARK = "SpecForge DFlash", "speculators DFlash", "speculators DSpark"
WINDOWS = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (PLAIN, {"is_causal": True}, "is_causal=True; layers are causal within a block then"),
        (PLAIN, WINDOWS, r"is_causal=None; .* \(windowed ones by default\)"),
        (PLAIN, {"dflash_config": {"causal": True}}, "is_causal=True; layers are causal"),
        (PLAIN, {"causal": True}, "is_causal=True; layers are causal"),
        (PLAIN, {"model_type": "llama"}, "model_type='llama'; a DFlash draft's layers are Qwen3's"),
        (PLAIN, {"num_target_layers": 5}, "says num_target_layers 5; the target has num_target_layers 4"),
        (PLAIN, {"sample_from_anchor": True}, "sample_from_anchor=True; the root of a DFlash block proposes nothing"),
        (PLAIN, {"target_hidden_size": 16}, "does not fit the target"),
        (PLAIN, {"use_sliding_window": False} | {"layer_types": ["sliding_attention"] * 2}, "sliding_window=None"),
        (PLAIN, {"dflash_config": {"mask_token_id": 64, "target_layer_ids": [1]}}, "mask_token_id=64; the vocabulary"),
        (PLAIN, {"dflash_config": {"mask_token": "<m>", "target_layer_ids": [1]}}, "dflash_config.mask_token='<m>'"),
        (PLAIN, {"dflash_config": [1]}, r"dflash_config=\[1\]; it must be a table"),
        (PLAIN, {"dflash_config": {"mask_token_id": 1}}, "must say target_layer_ids or aux_hidden_state_layer_ids"),
        (PLAIN, {"mask_token_id": 1}, "says mask_token_id=1 and, in dflash_config, 63"),
        (PLAIN, {"block_size": 1}, "block_size=1; a block has the root and one mask at least"),
        (PLAIN, {"block_size": None}, "block_size=None; it must be an integer"),
        (OTHER, {"transformer_layer_config": FORMATS[PLAIN].config | WINDOWS}, "block_size twice|layer_types="),
        (PLAIN, {"architectures": ["DFlash2DraftModel"]}, "not served: a convolution over the block"),
        (PLAIN, {"architectures": ["Qwen3DSparkModel"]}, "markov_rank=None; it must be an integer"),
        (DSPARK, {"markov_rank": 0}, "markov_rank=0; a DSpark draft has a Markov head"),
        (DSPARK, {"markov_head_type": "lstm"}, "markov_head_type='lstm'; served are vanilla, gated, rnn"),
        (DSPARK, {"sample_from_anchor": None}, "sample_from_anchor=None; speculators takes it for true and vLLM for"),
        (DSPARK, {"markov_head_type": "rnn"}, "markov_head_type='rnn'; speculators begins the state at the root"),
        (DSPARK, {"markov_head_type": "vanilla"}, "gate_proj"),
        (DSPARK, {"enable_confidence_head": False}, "confidence_head"),
        (DSPARK, {"confidence_head_with_markov": True}, "confidence_head"),
        ("DSpark", {"architectures": ["Gemma4DSparkModel"]}, r"of other layers than Qwen3's \(Gemma4DSparkModel\)"),
        ("DSpark", {"dspark_config": {"markov_rank": 3}}, "dspark_config="),
        (PLAIN, {"architectures": ["PeagleLlamaForCausalLM"]}, "is a P-EAGLE head, .* worker = 'parallel' runs"),
        (PLAIN, {"architectures": ["DominoDraftModel"]}, "not served: its recurrent head"),
    ],
)
def test_what_is_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(FORMATS[name], tmp_path, dict(FORMATS[name].config) | changes)
    with pytest.raises(CheckpointError, match=message):
        load_block(tmp_path, target_of(FORMATS[name]))


ASKED = {key for file, read in MADE["readers"].items() if "dflash" in file for key in read["keys"]}


@pytest.mark.parametrize("inside", [False, True], ids=["top", "dflash_config"])
def test_keys_that_readers_ask_for_are_honoured_or_refused(inside: bool) -> None:
    assert {"block_size", "mask_token_id", "target_layer_ids", "attention_value_scale", "rms_norm_eps"} <= ASKED
    honoured = keys.DFLASH_CONFIG_KEYS if inside else (*keys.DFLASH_HONOURED, *keys.DFLASH_INERT, *keys.INERT)
    config = dict(FORMATS[PLAIN].config)
    for key in ASKED - set(honoured):
        changed = config | ({"dflash_config": config["dflash_config"] | {key: 7}} if inside else {key: 7})
        with pytest.raises(CheckpointError, match=key):
            read_dflash(changed, "folder")


def test_the_page_explains_every_key() -> None:
    page = (Path(__file__).parent.parent / "docs" / "heads.md").read_text(encoding="utf-8")
    known = {*keys.DFLASH_HONOURED, *keys.DFLASH_CONFIG_KEYS, *keys.DSPARK_HONOURED}
    assert {key for key in known if f"`{key}`" not in page} == set()
