"""Folders of published P-EAGLE heads load unchanged, a worker drafts with them in its draft extends, and what it drafts
is what an independent forward gives; every key of their configurations is honoured, or refused by its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from attn_backends.errors import CheckpointError
from attn_backends.graphs import RecordedGraph
from attn_backends.registry import get_backend
from attn_backends_reference.models import ForwardAttention, load_draft, load_parallel
from attn_backends_reference.models import head_keys as keys
from attn_backends_reference.models.block import load_block
from attn_backends_reference.models.peagle import PEagleModel, read_peagle
from spec_metadata import BlockTable, PackedQuery, Step, token_positions
from tests import parallel_laws
from tests.head_formats import write
from tests.head_runs import BUDGET, TEXT, target_of
from tests.parallel_laws import NUM_DRAFTED, oracle_of, place_of
from tests.peagle_formats import PEAGLES
from tests.test_head_keys import mentions, without
from tests.test_wheel_lists import MADE


@torch.no_grad()
def scores_of(draft: PEagleModel, features: Tensor, num_drafted: int) -> Tensor:
    """[num_drafted, tokens of the draft]: of the last row of `TEXT` and the mask rows behind it, in one step."""
    capacity, geometry = place_of(num_drafted)
    backend = get_backend("fa3")(capacity, geometry, kernel="torch", checking=True)
    caches, count, num_masks = draft.allocate_caches(backend), len(TEXT) - 1, num_drafted - 1
    pages = BlockTable(1 + torch.arange(capacity.max_pages)[None], geometry)
    step = Step.prefill(PackedQuery.of((count + num_masks,)), torch.tensor([0]), pages)
    attention = ForwardAttention(backend, caches, backend.init_forward_metadata(step).at(), draft.layers)
    tokens = torch.cat((TEXT[1:], TEXT[:num_masks]))
    given = torch.cat((features[:count], torch.full((num_masks, features.shape[1]), torch.nan)))
    out = draft.forward_masked(tokens, given, torch.arange(len(tokens)) >= count, token_positions(step), attention)
    return draft.logits(out[-num_drafted:]).log_softmax(-1)


@pytest.mark.parametrize("num_drafted", [1, 2, 8])
@pytest.mark.parametrize("name", PEAGLES)
@torch.no_grad()
def test_logits_are_those_of_an_independent_forward(name: str, num_drafted: int, tmp_path: Path) -> None:
    """What a mask row is given in the place of states is not read."""
    oracle = oracle_of(PEAGLES[name], write(PEAGLES[name], tmp_path))
    features = oracle.features(TEXT.tolist())
    found = scores_of(load_parallel(tmp_path, target_of(PEAGLES[name])), features.float(), num_drafted)
    expected = oracle.drafted_scores(TEXT.tolist(), features, num_drafted)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=BUDGET)


@pytest.mark.parametrize("path", [{}, {"buckets": (1, 2), "make_graph": RecordedGraph}], ids=["eager", "graph"])
@pytest.mark.parametrize("name", PEAGLES)
def test_a_worker_drafts_what_an_independent_forward_does(name: str, path: dict[str, Any]) -> None:
    """After every number of accepted tokens; and its requests get the tokens of plain decoding."""
    parallel_laws.check_drafts(name, **path)


UNSEEN = {
    "model_type": "it only must not be another's",
    "use_sliding_window": "it only must not contradict layer_types",
    "num_aux_hidden_states": "it only must be as many as the layers",
    "target_hidden_size": "the fitting one is the head's own",
    "norm_output": "no drafted row takes another's output",
    "tie_word_embeddings": "heads of EAGLE-3's formats have it (`tests/test_head_keys.py`)",
    "use_aux_norm": "fc_norm's other name",
    "bias": "of fc, which no exporter of P-EAGLE writes",
    "mlp_bias": "no exporter of P-EAGLE writes it",
    "rope_parameters": "rope_scaling's newer name",
    "max_sequence_length": "max_position_embeddings' older name",
    "parallel_drafting": "of one that says its mask's token by another name; left out, another reader takes the folder",
}
"""Keys that are checked alone, or of formats that EAGLE-3 shares."""


@pytest.mark.parametrize("key", sorted({*keys.PARALLEL_HONOURED} - UNSEEN.keys()))
def test_a_key_that_is_ignored_is_seen(key: str, tmp_path: Path) -> None:
    """In one format at least: the folder is refused without it, or has other scores, positions or layers."""
    found = []
    for name, format in PEAGLES.items():
        if not mentions(format.config, key):
            continue
        folder = tmp_path / name.replace("/", " ")
        features = oracle_of(format, write(format, folder)).features(TEXT.tolist()).float()
        whole = load_parallel(folder, target_of(format))
        write(format, folder, without(format.config, key))
        try:
            draft = load_parallel(folder, target_of(format))
        except CheckpointError:
            found.append(True)
            continue
        said = [(each.max_positions, each.feature_layers) for each in (draft, whole)]
        scores = [scores_of(each, features, NUM_DRAFTED) for each in (draft, whole)]
        found.append(said[0] != said[1] or bool((scores[0] - scores[1]).abs().max() > 100 * BUDGET))
    assert any(found)


PLAIN, OTHER, READER = "NeMo P-EAGLE", "speculators P-EAGLE", "vLLM's reader, P-EAGLE"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (PLAIN, {"mask_token_id": None}, r"must say the token of mask rows, as one of mask_token_id, .*; got none"),
        (PLAIN, {"pard_token": 3}, r"got \{'mask_token_id': 63, 'pard_token': 3\}"),
        (PLAIN, {"mask_token_id": 64}, "mask_token_id=64; it must be one of the vocabulary's 64 tokens"),
        (READER, {"ptd_token_id": "63"}, "ptd_token_id='63'; it must be one of"),
        (READER, {"ptd_token_id": None}, r"is no P-EAGLE head \(LlamaForCausalLMEagle3\): it says neither parallel"),
        (READER, {"parallel_drafting": False}, "parallel_drafting=False; a P-EAGLE head drafts all tokens at once"),
        (READER, {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "of other layers than Llama's or Qwen3's"),
        (READER, {"eagle_config": {"parallel_draft_step": 4}}, "eagle_config.parallel_draft_step=4; served is 1"),
        (OTHER, {"speculators_model_type": "eagle3", "pard_token": 1}, "'eagle3'; served are peagle heads"),
        (OTHER, {"sample_from_anchor": True}, "sample_from_anchor=True; no rule covers this key"),
        (OTHER, {"fc_norm": False}, r"fc_norm\.0\.weight"),
        (PLAIN, {"vocab_size": 70}, "does not fit the target"),
        (PLAIN, {"eagle_aux_hidden_state_layer_ids": [1, 3, 9]}, "of a target with 4"),
        (PLAIN, {"quantization_config": {"quant_method": "fp8"}}, "holds quantized weights"),
    ],
)
def test_what_is_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(PEAGLES[name], tmp_path, dict(PEAGLES[name].config) | changes)
    with pytest.raises(CheckpointError, match=message):
        load_parallel(tmp_path, target_of(PEAGLES[name]))


@pytest.mark.parametrize("changed", [None, torch.ones(1, 1, 32)], ids=["missing", "of one state"])
def test_a_folder_without_its_mask_is_refused(changed: Tensor | None, tmp_path: Path) -> None:
    tensors = write(PEAGLES[PLAIN], tmp_path)
    del tensors["mask_hidden"]
    save_file(tensors | ({} if changed is None else {"mask_hidden": changed}), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="mask_hidden"):
        load_parallel(tmp_path, target_of(PEAGLES[PLAIN]))


@pytest.mark.parametrize("name", PEAGLES)
def test_other_workers_name_this_one(name: str, tmp_path: Path) -> None:
    write(PEAGLES[name], tmp_path)
    for load in (load_draft, load_block):
        with pytest.raises(CheckpointError, match=r"is a P-EAGLE head, .*: worker = 'parallel' runs it"):
            load(tmp_path, target_of(PEAGLES[name]))


def test_keys_that_readers_ask_for_are_honoured_or_refused(tmp_path: Path) -> None:
    """Those of vLLM's readers of EAGLE-3 heads and of speculators' folders."""
    asked = {
        key for file, read in MADE["readers"].items() if "eagle3" in file or "algos" in file for key in read["keys"]
    }
    assert {"mask_token_id", "fc_norm", "norm_before_fc"} <= asked
    known = {*keys.PARALLEL_HONOURED, *keys.PARALLEL_INERT, *keys.INERT, *keys.FIXED}
    for key in asked - known:
        with pytest.raises(CheckpointError, match=f"asks for {key}=7"):
            read_peagle(dict(PEAGLES[PLAIN].config) | {key: 7}, "folder")


def test_the_page_explains_every_key() -> None:
    page = (Path(__file__).parent.parent / "docs" / "heads.md").read_text(encoding="utf-8")
    assert {key for key in keys.PARALLEL_HONOURED if f"`{key}`" not in page} == set()
