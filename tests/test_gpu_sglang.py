"""What the GPU's harness of SGLang's engine says about runs, without a GPU and without SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_backends.graphs import RecordedGraph
from attn_backends.registry import get_backend
from benchmarks import plans
from benchmarks.rows import Asked, Size, Stage
from benchmarks.speculation import Batch, Tables, speculative
from benchmarks.timing import CudaClock, Work
from tests.counts import Counts
from tests.engines.sglang.gpu import correctness, drafts
from tests.engines.sglang.gpu import plans as sglang_plans
from tests.engines.sglang.gpu.cases import FA3, FLASHINFER, OURS, SGLANG, Case, differences, lengths, prompts
from tests.engines.sglang.gpu.correctness import row
from tests.engines.sglang.gpu.plans import load_row
from tests.engines.sglang.gpu.sampling import p_value
from tests.engines.sglang.gpu.sampling import told as sampled
from tests.engines.sglang.gpu.server import write_entry_points
from tests.engines.sglang.gpu.throughput import SIDES, summarized
from tests.engines.sglang.models import write_all as write_narrow
from tests.engines.sglang.oracle import BlockDraft, draft_of
from tests.launches import CountsLaunches

CHAIN = Case("gqa", FA3, "triton", 1)
LAUNCHES = {"all": [1, 100], "plans eager": [2, 6], "plans replay": [9, 0]}


def seen(missing: str = "") -> dict[str, Any]:
    """Two cycles and a prefill, in which every layer attended but one."""
    attended = {f"fa3.triton/{kind}/{layer}": 2 for kind in ("prefill", "target_verify") for layer in range(4)}
    attended["fa3.triton/prefill/0"] = 4  # the draft's layer, too
    attended |= {"fa3.triton/draft_decode/0": 4, "fa3.triton/draft_extend/0": 2}
    attended = {name: count for name, count in attended.items() if not missing or missing not in name}
    target = {"target EXTEND": 2, "target TARGET_VERIFY": 2}
    forwards = target | {"draft EXTEND": 2, "draft draft_decode": 4, "draft draft_extend": 2}
    verifies = {"batches": {"target": [2, 1, 4]}, "drafted": {"4:3": 2}, "widths": {}}
    return {"attended": attended, "forwards": forwards} | verifies


def run(**changed: Any) -> dict[str, Any]:
    one = {"ids": [1, 2, 3], "cached": 0, "accepted": 2.0, "gaps": [0.5, 0.06, 0.5]}
    whole = {"start": 1.0, "answers": [one], "singly": [one], "seen": seen(), "launches": LAUNCHES}
    return whole | {"alone": [one], "together": [one], "sampled": None} | changed


def test_a_run_in_which_all_is_right() -> None:
    told = row(CHAIN, run(), run())
    assert told["ok"]
    assert (told["differ"], told["wrong_counts"], told["acceptance"]) == ([], [], 2.0)


@pytest.mark.parametrize("missing", ["prefill/0", "target_verify/3", "draft_decode", "draft_extend"])
def test_a_layer_that_did_not_attend_is_told(missing: str) -> None:
    told = row(CHAIN, run(seen=seen(missing)), run())
    assert not told["ok"]
    assert [found for found in told["wrong_counts"] if missing in found]


def test_running_requests_beside_prompts_are_a_decode_of_their_own() -> None:
    mixed = Case("gqa", FA3, "triton", 0, mixes=2)
    kinds = {"prefill": 5, "decode": 9}  # of prompts 3 and 2 beside running requests, and 7 of these alone
    attended = {f"fa3.triton/{kind}/{layer}": count for kind, count in kinds.items() for layer in range(4)}
    found = {"attended": attended, "forwards": {"target EXTEND": 3, "target APART": 2, "target DECODE": 7}}
    assert mixed.wrong_counts(found) == []
    as_one_step = attended | {f"fa3.triton/decode/{layer}": 7 for layer in range(4)}
    apart = [f"attn_fa3/decode/{layer}: 7 of 9" for layer in range(4)]
    assert mixed.wrong_counts(found | {"attended": as_one_step}) == apart
    in_one = replace(mixed, mixes=1)
    assert in_one.wrong_counts(found | {"attended": as_one_step}) == []
    assert in_one.wrong_counts(found) == [f"attn_fa3/decode/{layer}: 9 of 7" for layer in range(4)]
    assert mixed.plain.wrong_counts(found | {"attended": as_one_step}) == [], "there it is a short prompt"
    never = {"attended": attended, "forwards": {"target EXTEND": 5, "target DECODE": 9}}
    assert mixed.wrong_counts(never) == []
    assert mixed.missing(never) == in_one.missing(never) == ["no running request came with a prompt"]


def test_a_block_draft_attends_in_two_layers_by_a_backend_of_its_own() -> None:
    case = Case("mla", FLASHINFER, "triton", 1, drafts="block", of_draft=FA3)
    attended = {
        f"flashinfer_mla.triton/{kind}/{layer}": 2 for kind in ("prefill", "target_verify") for layer in range(3)
    }
    of_draft = {f"fa3.triton/draft_block/{layer}": 2 for layer in range(2)}
    forwards = {"target EXTEND": 2, "target TARGET_VERIFY": 2, "draft TARGET_VERIFY": 2}
    assert case.wrong_counts({"attended": attended | of_draft, "forwards": forwards}) == []
    alike = {name.replace("fa3", "flashinfer_mla"): count for name, count in of_draft.items()}
    assert len(case.wrong_counts({"attended": attended | alike, "forwards": forwards})) == 4
    assert case.plain == Case("mla", FLASHINFER, "triton", 0)


def test_verifies_that_are_to_have_rows_of_every_number_are_told_if_they_have_not() -> None:
    case = Case("gqa", FA3, "triton", 1, drafts="dspark-compact")
    assert case.missing({"widths": {"1": 5, "2": 1, "4": 2}}) == []
    assert case.missing({"widths": {"4": 8}}) == ["verifies had {'4': 8} rows of a request"]
    assert row(case, run(seen=seen() | {"widths": {"4": 8}}), run())["ok"] is False


def test_a_draft_that_adapts_is_held_to_the_steps_of_the_graph() -> None:
    case = Case("gqa", FA3, "triton", 1, drafts="adaptive")
    right = {"1:5": 1, "2:1": 1, "3:0": 2, "8:0": 1, "9:3": 1, "64:1": 9}
    assert case.missing({"drafted": right}) == []
    assert case.missing({"drafted": right | {"7:3": 1}}) == ["7:3 (requests and drafted tokens)"]
    assert case.missing({"drafted": {"2:1": 1, "9:3": 1, "4:0": 1}}) == ["no draft of 5"]
    without = {"target EXTEND": 1, "draft EXTEND": 1, "target decode": 6, "draft decode": 6}
    attended = {
        f"fa3.triton/{kind}/{layer}": n for kind, n in {"prefill": 1, "decode": 6}.items() for layer in range(4)
    }
    attended |= {"fa3.triton/prefill/0": 2, "fa3.triton/decode/0": 12}
    assert case.wrong_counts({"attended": attended, "forwards": without}) == []


def test_mixed_decoding_is_held_to_plain_decoding() -> None:
    mixed, ids = Case("gqa", FA3, "triton", 0, mixes=2), [{"ids": [1, 7, 3], "cached": 0, "accepted": None}]
    assert correctness._beside(mixed) == mixed.plain
    assert correctness._beside(mixed.plain) is None
    assert row(mixed, run(answers=ids), run())["differ"] == [[0, 1, 0.06]]


def test_an_engine_on_sglangs_own_backend_has_wrong_counts() -> None:
    own = Case("gqa", "triton", "", 1)
    nothing = seen() | {"attended": {}}
    assert row(own, run(seen=nothing), None)["ok"]
    assert len(CHAIN.wrong_counts(nothing)) == len({*seen()["attended"]})


def test_a_launch_of_metadata_on_replay_is_told() -> None:
    assert not row(CHAIN, run(launches=LAUNCHES | {"plans replay": [9, 1]}), run())["ok"]
    assert not row(CHAIN, run(launches=LAUNCHES | {"plans eager": [2, 0]}), run())["ok"], "nothing was profiled"


@pytest.mark.parametrize(("ids", "gap", "ok"), [([1, 7, 9], 0.06, True), ([1, 2, 9], 0.5, False)])
def test_the_first_difference_from_plain_decoding_may_be_a_tie(ids: list[int], gap: float, ok: bool) -> None:
    told = row(CHAIN, run(answers=[run()["answers"][0] | {"ids": ids}]), run())
    assert told["ok"] is ok
    assert [each[2] for each in told["differ"]] == [gap]


def test_what_plain_decoding_decides_otherwise_alone_a_draft_may_decide_otherwise() -> None:
    other, elsewhere = ([run()["answers"][0] | {"ids": ids}] for ids in ([1, 2, 9], [9, 2, 3]))
    assert row(CHAIN, run(answers=other), run(singly=other))["ok"]
    assert not row(CHAIN, run(answers=other), run(singly=elsewhere))["ok"]


def test_plain_decoding_is_compared_with_itself_and_sglangs_own_backends_with_theirs() -> None:
    other = [run()["answers"][0] | {"ids": [1, 2, 9]}]
    assert row(CHAIN, run(), run(singly=other))["plain_differs"] == [[0, 2, 0.5]]
    told = row(Case("gqa", "triton", "", 1), run(answers=other, seen=seen() | {"attended": {}}), run())
    assert told["ok"], "what SGLang's own backends decode is told, and not judged"
    assert told["differ"] == [[0, 2, 0.5]]


def test_differences_are_each_requests_first() -> None:
    plain = [{"ids": [1, 2, 3], "gaps": [0.1, 0.2, 0.3]}, {"ids": [4, 5, 6], "gaps": [0.4, 0.5, 0.6]}]
    assert differences([[1, 2, 3], [4, 0, 0]], plain) == [{"request": 1, "at": 1, "gap": 0.5}]


def test_an_engine_that_failed_is_a_row() -> None:
    assert row(CHAIN, {"failed": "out of memory"}, run())["failed"] == "out of memory"
    assert row(CHAIN, run(), {"failed": "out of memory"})["failed"] == "plain decoding: out of memory"


def test_each_case_is_a_row_once_it_and_its_plain_decoding_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def ran(case: Case, models: Path, folder: Path, gpu: str) -> dict[str, Any]:
        given.append(gpu)
        return run(seen=seen())

    monkeypatch.setattr(correctness, "run", ran)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    names = [told["case"] for told in correctness.rows(Path(), Path(), "gqa")]
    chosen = [case for case in (*OURS, *SGLANG) if case.model == "gqa"]
    assert sorted(names) == sorted({str(each) for case in chosen for each in (case, case.plain)})
    assert abs(given.count("2") - given.count("5")) <= 1


def test_prompts_share_prefixes_and_end_at_other_lengths() -> None:
    found = prompts()
    assert len(found) == len(lengths()) == 64
    assert min(map(len, found)) < 8
    assert max(map(len, found)) > 512
    assert all(found[i][: min(150, len(found[i - 1]))] == found[i - 1][:150] for i in range(3, 64, 4))
    assert max(map(len, found)) + max(lengths()) < 2048


def test_draws_of_one_distribution_and_of_another() -> None:
    draws = torch.Generator().manual_seed(1)
    weights = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04])
    one, other = (torch.multinomial(weights, 20_000, True, generator=draws).tolist() for _ in range(2))
    shifted = torch.multinomial(weights + torch.tensor([0.06, 0, 0, 0, 0]), 20_000, True, generator=draws).tolist()
    assert p_value(one, other) > 1e-3 > p_value(shifted, other)


def test_a_likeliest_token_may_differ_from_the_greedy_one_at_a_tie() -> None:
    drawn = {"drawn": [1, 2] * 50, "top_k_1": [[1, 2]]}
    tied, apart = ([{"ids": [1, 3], "gaps": [0.5, gap]}] for gap in (0.01, 0.5))
    assert sampled(drawn, drawn, tied)["ok"]
    assert not sampled(drawn, drawn, apart)["ok"]
    assert sampled(drawn, {"failed": "out of memory"}, tied) == {"ok": False, "failed": "out of memory"}


def test_errors_of_a_drafts_logits_are_told_by_forward(tmp_path: Path) -> None:
    write_narrow(tmp_path)
    draft = draft_of(tmp_path / "mla_target", tmp_path / "mla_nextn")
    text = [0, *b"for i in range("]
    tokens = draft.drafted(text, 1, 3, 4).tokens
    first, second = draft.chain_logits(text, tokens)
    assert [int(each.argmax()) for each in (first, second)] == tokens[1:]
    cycle = {"text": text, "tokens": tokens, "logits": [first.tolist(), (1.5 * second).tolist()]}
    found = drafts.told(draft, [cycle, cycle])
    assert (found["error_median"], found["error_largest"]) == ([0.0, 0.5], [0.0, 0.5])
    assert found["same_tokens"] == 1.0


def test_tokens_of_blocks_are_compared_up_to_the_first_that_differs(tmp_path: Path) -> None:
    write_narrow(tmp_path)
    draft = draft_of(tmp_path / "gqa_target", tmp_path / "dspark")
    assert isinstance(draft, BlockDraft)
    text = [0, *b"for i in range("]
    tokens = draft.drafted(text, 1, 3, 4).tokens
    cycles = [{"text": text, "tokens": tokens}, {"text": text, "tokens": [tokens[0], -1, -1]}]
    assert drafts.told_blocks(draft, cycles) == {"cycles": 2, "same_tokens": 0.8}


def test_rates_are_held_to_the_same_kernels_and_to_the_best() -> None:
    ours, same, best = SIDES[0], SIDES[1], SIDES[2]
    times = {ours: [98.0, 99.0, 97.0], same: [100.0, 90.0, 110.0], best: [200.0, 200.0, 200.0]}
    first, *others = summarized(times, 32)
    assert (first["tokens_per_s"], first["least"], first["most"]) == (98.0, 97.0, 99.0)
    assert (first["of_same_kernel"], first["of_best"], first["best"]) == (0.98, 0.49, str(best))
    assert all("of_best" not in told for told in others)


@pytest.mark.parametrize("name", plans.PAGE_SIZES)
def test_what_the_plug_in_does_before_replays_is_a_row(name: str) -> None:
    """A look-up: metadata that is bound to the engine's buffers is planned in the graph."""
    tables = Tables.of(speculative(4, 512, 256 if name == "dsv4" else 64, 1, 3), torch.device("cpu"))
    stage = Stage(torch.device("cpu"), RecordedGraph, CudaClock(), 10)

    def probe(works: Sequence[Work]) -> list[Counts]:
        with CountsLaunches() as launches:
            works[0].run()
        return [Counts(0.0, launches.num, 0, 0)]

    row = load_row(get_backend(name), Batch.of(tables, 2, 300), stage, probe)
    assert (row["kernel"], row["batch_size"], row["context"], row["launches"]) == ("torch", 2, 300, 0)
    assert row["host_us"] >= 0


def test_ours_are_measured_of_every_backend_and_what_sglang_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_plans, "_theirs", lambda name, *_: [{"theirs": name}])
    monkeypatch.setattr(sglang_plans, "load_row", lambda backend, batch, stage: {"ours": backend.name})
    monkeypatch.setattr(plans, "plans", lambda asked: [{"plans": len(asked.backends)}])
    monkeypatch.setattr(plans, "CAPACITY_CONTEXT", 512)
    stage = Stage(torch.device("cpu"), RecordedGraph, CudaClock(), 10)
    asked = Asked(stage, [get_backend(name) for name in plans.PAGE_SIZES], (1,), (300,))
    monkeypatch.setattr(sglang_plans, "is_installed", lambda module: False)
    assert not any("theirs" in row for row in sglang_plans.rows(asked))
    monkeypatch.setattr(sglang_plans, "is_installed", lambda module: True)
    found = list(sglang_plans.rows(asked))
    theirs = {row["theirs"] for row in found if "theirs" in row}
    assert theirs == {row["ours"] for row in found if "ours" in row} - {sglang_plans.NOT_THEIRS["backend"]}
    assert found[-1] == {"plans": 4}


def test_entry_points_are_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import distributions

    write_entry_points(tmp_path)
    found = {each.name: each.value for one in distributions(path=[str(tmp_path)]) for each in one.entry_points}
    assert found["attn_backends"] == "attn_backends.engines.sglang:register"
    assert found["probe"] == "tests.engines.sglang.gpu.probe:install"


def test_what_sglangs_graph_holds_is_timed_as_ours_is(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed, lens, none, device = [], torch.zeros(1), Work.of(lambda: None), torch.device("cpu")
    half = Work(lambda: lambda: None, lambda: replayed.append(lens.add_(1)))
    monkeypatch.setattr(sglang_plans, "works", lambda *_: {"verify": ("Captured", half), "extend": ("Eager", none)})
    monkeypatch.setattr(sglang_plans, "count_on_cuda", lambda works: [Counts(3.0, 2, 1, 0)] * len(works))
    monkeypatch.setattr(plans, "take_turns", lambda replays, *_: [0, *[2 * plans.COPIES + 1] * (len(replays) - 2), 1])
    monkeypatch.setattr(plans, "nodes_of", lambda graph: [0.5] * 4 * plans.COPIES)
    stage, tables = Stage(device, RecordedGraph, CudaClock(), 10), Tables.of(speculative(2, 64, 4, 1, 3), device)
    rows = list(sglang_plans._theirs("fa3", tables, Size(2, 64), stage))
    assert len(replayed) >= plans.COPIES
    assert [(row["phase"], row["kernel_us"], row["nodes"], row.get("graph_us")) for row in rows] == [
        ("verify", 3.0, 3, 2.0),
        ("extend", 3.0, 3, None),
    ]
    assert (rows[0]["graph_kernel_us"], rows[0]["graph_nodes"]) == (2.0, 4)
