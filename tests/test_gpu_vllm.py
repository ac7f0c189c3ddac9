"""What the GPU's harness of vLLM's engine says about runs, without a GPU and without vLLM."""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import partial
from importlib.metadata import distributions, version
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from tests.engines.vllm.given import BUG
from tests.engines.vllm.gpu import correctness
from tests.engines.vllm.gpu.__main__ import extensions
from tests.engines.vllm.gpu.cases import (
    DEFAULT,
    FA3,
    FLASHINFER_KERNELS,
    IN_PARALLEL,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    OTHERS,
    SPECULATIVE,
    WITH_BUGS,
    Case,
    alike,
    differences,
    lengths,
    prompts,
)
from tests.engines.vllm.gpu.correctness import row
from tests.engines.vllm.gpu.serve import Spans
from tests.engines.vllm.gpu.server import write_entry_points
from tests.engines.vllm.gpu.slim import MACHINE_CODE, MAGIC, entries
from tests.engines.vllm.gpu.throughput import SIDES, summarized
from tests.engines.vllm.kinds import kind_of, wrong_kinds

CASE = Case("gqa", FA3, "triton", "full")


def attended(prefills: int = 1, verifies: int = 4, loops: int = 8, kernel: str = "triton") -> dict[str, Any]:
    """Five steps of two layers and a draft layer, of which one has no draft loop. The first layer is always right."""
    told = {"0": {"prefill": 1, "target_verify": 4}}
    told |= {name: {"prefill": prefills, "target_verify": verifies} for name in "12"}
    told["2"]["decode"] = loops
    each = {"backend": "fa3", "kernel": kernel}
    return {name: {kind: each | {"forwards": n} for kind, n in kinds.items() if n} for name, kinds in told.items()}


def answer(**changed: Any) -> dict[str, Any]:
    steps = {"prefill": 1, "target_verify": 4}
    counts = {"steps": steps, "looped": 8, "replays": 7, "layers": ["0", "1", "2"], "draft_layers": ["2"]}
    counts |= {"ranks": 1, "otherwise": [], "cut": 0, "drafting": 5, "drafts": []}
    told = {"ids": [[1, 2, 3]], "gaps": [[0.5, 0.06, 0.5]], "cached": 0, "accepted": [3, 2, 1], "is_async": False}
    return counts | told | {"attended": attended()} | changed


def run(**changed: Any) -> dict[str, Any]:
    return {"start": 1.0, "first": answer(**changed), "again": answer(**changed)}


def test_a_run_in_which_all_is_right() -> None:
    told = row(CASE, run(), run())
    assert (told["ok"], told["differ"], told["wrong_counts"]) == (True, [], [])
    assert told["kernels"] == dict.fromkeys(("prefill", "target_verify", "decode"), "triton")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"attended": attended(verifies=3)}, ["1: 3 of 4 target_verify", "2: 3 of 4 target_verify"]),
        (
            {"attended": attended(prefills=5, verifies=0)},
            [f"{layer}: {reason}" for layer in "12" for reason in ("5 of 1 prefill", "0 of 4 target_verify")]
            + ["verified by none, triton"],
        ),
        ({"attended": attended(loops=10)}, ["2: 10 of 8 decode"]),
        ({"attended": attended(kernel="torch")}, ["verified by torch"]),
        ({"replays": 0}, ["0 replays"]),
        ({"otherwise": [1]}, ["rank 1 counted otherwise"]),
        ({"ranks": 2}, ["2 ranks"]),
        ({"cut": 3}, ["3 batches were cut"]),
    ],
    ids=[
        "a layer was left out",
        "verifies planned as prefills",
        "a draft loop that was not to run",
        "another kernel",
        "no graph ran",
        "a rank that did less",
        "a rank too many",
        "rows that the device divided otherwise",
    ],
)
def test_counts_that_are_not_the_engines_are_told(changed: dict[str, Any], words: list[str]) -> None:
    told = row(CASE, run(**changed), run())
    assert not told["ok"]
    assert told["wrong_counts"] == 2 * words


@pytest.mark.parametrize(
    ("lens", "kind"),
    [
        ([4, 4], "target_verify"),
        ([1, 1], "decode"),
        ([4], "target_verify"),
        ([60], "prefill"),
        ([4, 4, 60], "prefill"),
        ([60, 3], "prefill"),
        ([4, 4, 1], "prefill or decode"),
        ([1, 4, 4], "prefill or target_verify"),
        ([4, 1, 60], "prefill"),
    ],
    ids=str,
)
def test_the_kind_of_a_batch_is_that_of_its_widths(lens: list[int], kind: str) -> None:
    assert kind_of(lens, 3) == kind


def test_a_mixed_batch_may_count_as_either_and_once() -> None:
    asked = {"decode": 2, "prefill or decode": 1}
    assert wrong_kinds({"decode": 3}, asked) == wrong_kinds({"decode": 2, "prefill": 1}, asked) == []
    assert wrong_kinds({"decode": 1, "prefill": 1}, asked) == ["1 of 2 to 3 decode"]
    assert wrong_kinds({"decode": 3, "prefill": 1}, asked) == ["4 of 3 forwards"]


def test_where_the_device_cuts_verifies_forwards_are_counted_and_not_their_kinds() -> None:
    case = replace(CASE, drafting="cut")
    told = attended(prefills=3, verifies=2)
    assert row(case, run(attended=told, cut=1), run())["wrong_counts"] == []
    assert row(case, run(attended=told), run())["wrong_counts"] == 2 * ["0 batches were cut"]
    assert row(case, run(attended=attended(prefills=2), cut=1), run())["wrong_counts"] == 2 * [
        f"{layer}: {found} of {asked} forwards" for layer, found, asked in (("1", 6, 5), ("2", 14, 13))
    ]


def test_a_block_is_one_forward_of_its_own_kind() -> None:
    case, told = replace(CASE, model="gqa-dflash"), attended()
    assert row(case, run(), run())["wrong_counts"][:3] == [
        "2: 8 of 0 decode",
        "2: 0 of 5 draft_block",
        "2: 1 of 0 prefill",
    ]
    told["2"] = {"draft_block": {"backend": "fa3", "kernel": "triton", "forwards": 5}}
    found = row(case, run(attended=told), run())
    assert found["wrong_counts"] == []
    assert found["attended"] == {"target": {"prefill": 2, "target_verify": 8}, "draft": {"draft_block": 5}}
    told["2"]["draft_block"]["kernel"] = "torch"
    assert row(case, run(attended=told), run())["wrong_counts"] == 2 * ["verified by torch, triton"]


def test_drafts_are_held_to_those_behind_the_same_tokens() -> None:
    start = len(prompts()[0])
    exact = {"ids": [[5, 6, 7, 8]], "drafts": [(0, start + 1, [6, 7, 8]), (0, start + 2, [7, 8, 9])]}
    mine = [(0, start + 1, [6, 7, 8]), (0, start + 2, [7, 1, 9]), (0, start + 3, [1, 1, 1])]
    assert alike({"ids": [[5, 6, 7, 8]], "drafts": mine}, exact) == (4, 5)
    assert alike({"ids": [[5, 0, 7, 8]], "drafts": mine}, exact) == (3, 3), "the texts differ before the second"
    told = row(CASE, run(ids=[[5, 6, 7, 8]], gaps=[[1.0] * 4], drafts=mine), run(ids=[[5, 6, 7, 8]]), {"first": exact})
    assert (told["alike"], told["ok"]) == ([(4, 5), (4, 5)], False)
    assert not row(CASE, run(), run(), {"first": answer()})["ok"], "nothing was compared"


def test_an_engine_on_another_backend_has_wrong_counts() -> None:
    nothing = run(attended={})
    assert not row(CASE, nothing, run())["ok"]
    assert row(OTHERS[0], nothing, run())["ok"]
    assert not row(OTHERS[0], run(), run())["ok"], "ours attended in its place"


@pytest.mark.parametrize(("ids", "ok"), [([1, 7, 9], True), ([1, 2, 9], False)])
def test_the_first_difference_from_plain_decoding_may_be_a_tie(ids: list[int], ok: bool) -> None:
    assert row(CASE, run(ids=[ids]), run())["ok"] is ok
    assert not row(replace(CASE, dtype="float32"), run(ids=[ids]), run())["ok"], "0.06 is none in float32"


def test_differences_are_each_requests_first() -> None:
    plain = {"ids": [[1, 2, 3], [4, 5, 6]], "gaps": [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]}
    assert differences([[1, 2, 3], [4, 0, 0]], plain) == [(1, 1, 0.5)]


def test_an_engine_that_failed_is_a_row() -> None:
    assert row(CASE, {"failed": "out of memory"}, run())["failed"] == "out of memory"
    assert not row(CASE, run(), {"failed": "out of memory"})["ok"]


def test_every_case_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correctness, "run", lambda case, models, folder, gpus: run())
    told = {each["case"]: each for each in correctness.rows(Path(), Path(), "")}
    assert set(told) > {*map(str, SPECULATIVE), *map(str, OTHERS)}
    assert [name for name, each in told.items() if "not_run" in each] == [
        *map(str, IN_PARALLEL),
        *map(str, FLASHINFER_KERNELS),
    ]


@pytest.mark.parametrize(("accepted", "ok"), [([300, 198, 12], True), ([300, 196, 10], False), ([300, 200, 7], False)])
def test_as_many_drafts_are_accepted_as_on_attention_in_float64(accepted: list[int], ok: bool) -> None:
    """In float32, where rounding changes none; in bfloat16 it does."""
    drafts = [(0, len(prompts()[0]) + 1, [2, 3])]
    exact = {"first": answer(drafts=drafts, accepted=[300, 200, 10])}
    case = replace(CASE, dtype="float32")
    told = row(case, run(drafts=drafts, accepted=accepted), run(), exact)
    assert told["ok"] is ok, told["why"]
    assert told["why"] == ([] if ok else 2 * [f"{accepted} accepted for [300, 200, 10]"])
    assert row(CASE, run(drafts=drafts, accepted=accepted), run(), exact)["ok"]


OVERWRITTEN = "StaleMetadataError: metadata of (target_verify) was overwritten by a replay or capture of it"


def test_a_planted_bug_is_to_make_its_row_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = [(0, len(prompts()[0]) + 1, [2, 3])]
    right, others = run(drafts=drafts), run(drafts=[(0, len(prompts()[0]) + 1, [2, 4])])
    found = {
        "no refresh": others,
        "no replay": {"failed": OVERWRITTEN},
        "stale block table": {"failed": "out of memory"},
        "": right,
    }
    monkeypatch.setattr(correctness, "run", lambda case, models, folder, gpus: found.get(case.bug, right))
    told = {each["bug"]: each for each in correctness.bugs(Path(), Path(), "gqa")}
    assert len(told) == 6
    assert [name for name, each in told.items() if each["ok"]] == ["no refresh", "no replay"]
    assert told["no refresh"]["why"] == 2 * ["1 of 2 drafts are alike"]
    assert told["no replay"]["why"] == [OVERWRITTEN]
    found[""] = {"failed": "out of memory"}
    assert not any(each["ok"] for each in correctness.bugs(Path(), Path(), "")), "there is nothing to compare with"


def test_a_case_says_its_bug_and_its_mode_to_its_process() -> None:
    assert WITH_BUGS[0].environment[BUG] == "draft length one short"
    assert str(WITH_BUGS[0]).endswith("full-float32-draft_length_one_short")
    assert BUG not in WITH_BUGS[0].plain.environment | WITH_BUGS[0].exact.environment
    default = next(case for case in SPECULATIVE if case.mode == DEFAULT)
    assert default.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert default.options(Path())["async_scheduling"]
    assert default.options(Path())["compilation_config"]["mode"] == 3
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in default.plain.environment


def test_engines_take_the_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[str]] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    monkeypatch.setattr(correctness, "run", lambda case, models, folder, gpus: taken.append(gpus) or run())
    assert [told["ranks"] for told in correctness.rows(Path(), Path(), "2-ranks")] == [2, 2]
    assert sorted(taken) == [["2"], ["2"], ["3"], ["3", "5"], ["5"], ["5", "2"]]


def test_prompts_share_prefixes_and_reach_the_ends() -> None:
    found = prompts()
    assert len(found) == len(lengths()) == 4 * MAX_NUM_SEQS
    assert min(map(len, found)) == 3
    assert all(found[i][: min(100, len(found[i - 1]))] == found[i - 1][:100] for i in range(3, 64, 4))
    assert max(len(prompt) + length for prompt, length in zip(found, lengths(), strict=True)) > MAX_MODEL_LEN
    assert max(map(len, found)) < MAX_MODEL_LEN


def test_rates_are_held_to_the_same_kernels_and_to_the_best() -> None:
    ours, same, best = SIDES[:3]
    more = {"steps": 10, "metadata_us": 40.0, "step_us": [1, 3], "host_us": {"wait": 7.4}}
    more["launches"] = [("all", 2.0, 3.0)] * 20
    rates, luck = {ours: [98, 99, 97], same: [100, 90, 110], best: [200, 200, 200]}, {ours: 90, same: 110, best: 100}
    first, *others = summarized(
        {side: [more | {"tokens": luck[side], "seconds": 100 / n} for n in each] for side, each in rates.items()}, 32
    )
    assert (first["tokens_per_s"], first["least"], first["most"]) == (98, 97, 99), "what each drew is not its speed"
    assert (first["of_same_kernel"], first["of_best"], first["best"]) == (0.98, 0.49, str(best))
    assert first["in_turn"] == [0.98, 1.1, 0.882]
    assert (first["deciles_us"], first["host_us"]) == ([1, 2, 3], {"wait": 7})
    assert len(first["launches_us"]) == 9, "all together, and the longest"
    assert all("of_best" not in told for told in others)


def test_a_part_of_the_host_has_not_the_time_of_those_inside() -> None:
    spans = Spans()
    inner = spans.timed("wait", partial(sleep, 0.05))
    spans.timed("engine", lambda: (inner(), inner()))()
    assert spans.seconds["wait"] >= 0.1 > spans.seconds["engine"] > 0


def test_a_head_has_the_versions_of_compiled_modules() -> None:
    found = extensions("torch")
    assert found["torch/_C"] == found["torch"] == version("torch")


def test_entry_points_are_found_on_the_path(tmp_path: Path) -> None:
    write_entry_points(tmp_path)
    found = {each.name: each.value for one in distributions(path=[str(tmp_path)]) for each in one.entry_points}
    assert found["attn_backends"] == "attn_backends.engines.vllm:register"
    assert found["tests_plain"] == "tests.engines.vllm.plain:register"
    assert found["tests_bugs"] == "tests.engines.vllm.defects:register"
    assert found["tests_given"] == "tests.engines.vllm.given:register"


def test_the_pieces_of_a_fat_binary_are_found() -> None:
    pieces = [(1, 90, b"p" * 8), (MACHINE_CODE, 80, b"8" * 16), (MACHINE_CODE, 90, b"9" * 24)]
    body = b"".join(
        struct.pack("<HHIQ", kind, 0, 64, len(code)).ljust(28, b"\0") + struct.pack("<I", arch).ljust(36, b"\0") + code
        for kind, arch, code in pieces
    )
    data = b"\0" * 8 + struct.pack("<IHHQ", MAGIC, 1, 16, len(body)) + body
    assert [(kind, arch, data[place]) for kind, arch, place in entries(data, 0, len(data))] == pieces
