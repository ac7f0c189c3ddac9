"""Targets, and the pages that are written from results."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from attn_backends import results
from benchmarks.targets import by_target, check_targets
from docs.pages import __main__ as page
from docs.pages import plot
from tests.gpu_results import PARTS

ROOT = Path(__file__).parent.parent
TEN = {"copy_tb_per_s": 10.0, "matmul_tflop_per_s": 100.0}
MLA = {"bench": "kernels", "backend": "trtllm_mla", "kernel": "triton", "batch_size": 128, "context": 4096, "heads": 16}
MLA |= {"width": 1, "us": 100.0, "peer": "flashmla", "peer_us": 90.0, "ratio": 1.1111, "tb_per_s": 8.0}
MLA |= {"tflop_per_s": 9.0}
GROUPED = MLA | {"backend": "fa3", "batch_size": 64, "context": 8192, "heads": 32, "peer": "vllm_flash_attn"}
SPARSE = MLA | {"backend": "dsv4", "kernel": "gluon", "heads": 64, "peer": "flashmla_sparse"}
TREE = GROUPED | {"bench": "trees", "batch_size": 32, "context": 4096, "width": 16, "ratio": 1.25}
TREE |= {"kernel": "vllm_flash_attn", "peer": "vllm_flash_attn, a chain"}
PLAN = {"backend": "trtllm_mla", "kernel": "flashmla", "phase": "cycle", "page_size": 64, "batch_size": 32}
PLAN |= {"context": 4096, "us": 14.0, "kernel_us": 20.0, "nodes": 4}
INSTANCES = PLAN | {"phase": "instances", "heads": 16, "us": 15.4, "cycle_us": 14.0, "bytes": 2_500_000}
STATIC = {"bench": "memory", "backend": "fa3", "batch_size": 128, "context": 131072, "page_size": 64, "topk": 4}
STATIC |= {"paging": "block_table", "phase": "all", "bytes": 4_000_000}
STEPS = {"bench": "steps", "bounds": "none", "us": 15.0, "operators": 0}
SAMPLED = {"bench": "sampling", "mix": "top_p", "requests": 128, "us": 3000.0, "peak_bytes": 3e8, "wrong": 0}


def test_kept_files_hold_no_targets_which_pages_work_out_anew():
    kept = [path.name for path in (ROOT / "docs/results").rglob("*.json") if "targets" in results.read(path).own]
    assert kept == []


def verdicts(*rows, ceilings=TEN):
    return [(reached.value, reached.met) for reached in check_targets(rows, ceilings)]


@pytest.mark.parametrize(
    ("row", "value", "met"),
    [
        (MLA, 0.8, True),
        (MLA | {"tb_per_s": 7.4}, 0.74, False),
        (GROUPED, 0.9, True),
        (GROUPED | {"peer_us": 74.0}, 0.74, False),
        (SPARSE | {"heads": 16}, 0.9, True),
        (SPARSE | {"heads": 16, "peer_us": 59.0}, 0.59, False),
        (TREE, 1.25, True),
        (TREE | {"ratio": 1.26, "batch_size": 128}, 1.26, False),
        (MLA | {"heads": 128, "peer_us": 40.0}, 0.4, None),
        (MLA | {"bench": "attention", "ratio": 1.03}, 1.03, True),
        (MLA | {"bench": "attention", "ratio": 1.04}, 1.04, False),
        (MLA | {"bench": "ragged", "heads": 128, "ratio": 0.61}, 0.61, False),
        (MLA | {"bench": "mixed", "ratio": 1.0}, 1.0, True),
        (STATIC, 4, True),
        (STATIC | {"bytes": 4_000_001}, 4, False),
        (STATIC | {"page_size": 1, "bytes": 141_000_000}, 141, False),
    ],
)
def test_a_target_is_held_against_the_rows_that_it_speaks_of(row, value, met):
    assert verdicts(row) == [(value, met)]


@pytest.mark.parametrize(
    "row",
    [
        MLA | {"width": 4},
        MLA | {"kernel": "flashmla"},
        MLA | {"context": 8192},
        GROUPED | {"peer": "copy"},
        GROUPED | {"heads": 64},
        TREE | {"batch_size": 1},
        PLAN | {"phase": "draft"},
        STATIC | {"phase": "verify"},
        STATIC | {"batch_size": 64},
    ],
)
def test_other_rows_reach_nothing(row):
    assert verdicts(row) == []


def test_a_row_may_have_several_targets():
    assert verdicts(MLA, ceilings={}) == [], "a share of ceilings that were not measured"
    plan = PLAN | {"host_us": 20.5}
    alone = PLAN | {"bench": "plans", "phase": "verify"}
    assert verdicts(alone) == [(4, False)]
    assert verdicts(alone | {"page_size": 256, "nodes": 3}) == [(3, True)]
    assert verdicts(INSTANCES) == [(1.1, True)]
    assert verdicts(INSTANCES | {"us": 18.3}) == [(1.307, False)]
    assert verdicts(INSTANCES | {"cycle_us": 0.0}) == []
    assert verdicts(plan) == [(14.0, True), (4, True), (20.5, False)]
    assert verdicts(PLAN | {"batch_size": 128, "nodes": 5, "host_us": None}) == [(14.0, True), (5, False)]
    assert verdicts(STEPS) == [(0, True), (15.0, True)]
    assert verdicts(STEPS | {"operators": 1, "bounds": "seq_lens_cpu"}) == [(1, False)]
    assert verdicts(SAMPLED) == [(0, True), (3000, True), (300, True)]
    greedy = SAMPLED | {"mix": "greedy", "over_argmax": 1.21, "wrong": 1}
    assert verdicts(greedy) == [(1, False), (1.21, False), (300, True)]


def test_a_line_says_how_many_met_a_target_and_the_worst():
    found = check_targets([TREE, TREE | {"ratio": 1.3}, TREE | {"ratio": 1.4}], {})
    ((worst, num_met, num),) = by_target(found)
    assert (worst.value, worst.met, num_met, num) == (1.4, False, 1, 3)
    assert worst.case == "batch size 32, context 4096, heads 32, width 16"
    ((worst, *_),) = by_target(check_targets([GROUPED, GROUPED | {"peer_us": 80.0}], {}))
    assert worst.value == 0.8


@pytest.fixture
def folder(tmp_path):
    head = results.Head("NVIDIA H200", {}, "2026-01-02", "abc", "python -m benchmarks kernels")
    rows = [MLA, MLA | {"batch_size": 8, "ratio": 1.5, "tb_per_s": 2.0}]
    rows += [MLA | {"kernel": "flashmla", "peer": "copy", "tb_per_s": 9.0}]
    rows += [MLA | {"kernel": "flashinfer_fa2", "peer": "copy", "tb_per_s": 1.0, "tflop_per_s": 50.0}]
    missing = [
        {"backend": "trtllm_mla", "kernel": "torch", "reason": "too large", "failed": False, "cases": ["a", "b"]}
    ]
    results.write(tmp_path / "kernels_trtllm_mla.json", head, rows, ceilings=TEN, missing=missing)
    results.write(tmp_path / "trees.json", head, [TREE])
    results.write(tmp_path / "plan_graphs.json", head, [PLAN, PLAN | {"phase": "draft"}, INSTANCES])
    results.write(tmp_path / "bench_memory.json", results.head(["memory"]), [STATIC, STATIC | {"phase": "draft"}])
    return tmp_path


def written(folder):
    assert page.main([str(folder), "--output", str(folder)]) == 0
    return [line for name in page.PAGES for line in (folder / name).read_text().splitlines()]


def test_the_pages_say_what_was_measured(folder):
    lines = written(folder)
    sizes = "| backend | kernel | heads | width | peer | 8 x 4096 | 128 x 4096 | least | most | roof | peer's roof |"
    copy, case = "MLA of 16 heads, of a copy's bandwidth", "batch size 128, context 4096, heads 16, width 1"
    for line in (
        f"| {copy} | NVIDIA H200 | trtllm_mla | triton | 1 of 1 | 0.8 | {case} | met |",
        sizes,
        "| trtllm_mla | triton | 16 | 1 | flashmla | 1.50 | 1.11 | 1.11 | 1.50 at 8 x 4096 | 0.80 | 0.90 |",
        "| trtllm_mla | flashinfer_fa2 | 16 | 1 | copy |  |  |  |  | 0.50 |  |",
        "| fa3 | vllm_flash_attn | 32 | 16 | vllm_flash_attn, a chain | 1.25 | 1.25 | 1.25 at 32 x 4096 |",
        "- trtllm_mla/torch: too large (2 cases)",
        "A copy moves 10.00 TB/s, a matrix product 100 TFLOP/s.",
        "![Are our kernels faster than flashmla, on NVIDIA H200?](kernels_trtllm_mla.svg)",
        "| cycle | trtllm_mla | flashmla | 64 |  | 32 | 4096 | 14.0 | 20.0 | 4 |  |",
        "| instances | trtllm_mla | flashmla | 64 | 16 | 32 | 4096 | 15.4 | 20.0 | 4 | 2.5 |",
        "| fa3 | 64 | 4 | block_table | 4.0 |",
    ):
        assert line in lines, line
    assert not any(line.startswith("| trtllm_mla | flashmla | 16 ") for line in lines)
    assert sum("| trtllm_mla | flashmla | 64 |" in line for line in lines) == 2, "phases are in the file alone"
    assert (folder / "trees.svg").read_text().startswith("<svg")


def test_the_page_says_that_a_run_was_cut_short(folder):
    path, said = folder / "trees.json", " The run was cut short; these rows were done."
    assert not any(line.endswith(said) for line in written(folder))
    path.write_text(results.read(path).as_incomplete().to_json())
    assert [line for line in written(folder) if line.endswith(said)] == [
        "NVIDIA H200, 2026-01-02, commit abc, `python -m benchmarks kernels`: [all rows](trees.json)." + said
    ]


def test_the_committed_pages_are_what_the_committed_results_give(monkeypatch):
    monkeypatch.chdir(ROOT)
    for path, text in page.written(page.FOLDER, page.OUT).items():
        assert path.read_text() == text, f"run `{page.COMMAND}`"


def test_a_kernel_has_a_median_to_reach_and_a_worst_and_the_page_lists_what_misses(tmp_path):
    speeds = {1: 85.0, 4: 81.0, 8: 69.0}
    rows = [
        MLA | {"kernel": "gluon", "heads": 128, "batch_size": 32, "width": w, "peer_us": us} for w, us in speeds.items()
    ]
    assert verdicts(*rows, ceilings={}) == [(0.81, True), (0.85, True), (0.81, True), (0.69, False)]
    head = results.Head("NVIDIA H200", {}, "2026-01-02", "abc", "python -m benchmarks kernels")
    results.write(tmp_path / "kernels_new.json", head, rows)
    written = list(page._missed({"kernels_new": results.read(tmp_path / "kernels_new.json")}))
    case = "batch size 32, context 4096, heads 128, width 8"
    target = "Gluon: MLA of 128 heads, of the vendor's speed, each"
    assert written == [(target, "NVIDIA H200", "trtllm_mla", "gluon", case, 0.69)]


def test_a_picture_says_which_kernels_are_faster_and_by_how_much():
    rows = [{"backend": "fa3", "kernel": "triton", "heads": 16, "width": 1, "peer": peer, "ratio": ratio}
            for peer, ratio in (("vendor", 0.5), ("vendor", 0.6), ("vendor", 2.0), ("copy", 9.0))]  # fmt: skip
    found = plot.spans(rows, without="copy")
    assert found == [plot.Span("fa3 triton: 16 heads, width 1", 0.5, 0.6, 2.0, 3)]
    slower, even = (found[0]._replace(middle=middle) for middle in (1.4, 1.04))
    svg = plot.to_svg("Is ours faster?", [*found, slower, even])
    assert ">1 faster, 1 as fast, 1 slower; medians 0.60 to 1.40 times the other&#x27;s time<" in svg
    root = ElementTree.fromstring(svg)
    dots = [(float(dot.get("cx")), dot.get("fill")) for dot in root.iter() if dot.tag.endswith("circle")]
    (one,) = (float(text.get("x")) for text in root.iter() if text.text == "1")
    assert [color for _, color in dots] == [plot.FASTER, plot.SLOWER, plot.EVEN]
    assert dots[0][0] < one < dots[2][0] < dots[1][0]


def test_a_folder_without_results_is_refused(tmp_path, capsys):
    assert page.main([str(tmp_path), "--output", str(tmp_path)]) == 2
    assert "holds none of kernels_*.json" in capsys.readouterr().err
    head = results.Head("NVIDIA H200", {}, "2026-01-02", "abc", "python -m benchmarks kernels")
    results.write(tmp_path / "kernels_fa3.json", head, [])
    assert page.main([str(tmp_path), "--output", str(tmp_path)]) == 2
    assert "has no rows of kernels_fa3" in capsys.readouterr().err
    assert not (tmp_path / "kernels.md").exists()


def test_results_that_code_names_are_there():
    folders = ("attn_backends", "spec_metadata", "benchmarks", "reference")
    texts = [path.read_text(encoding="utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"docs/results/[\w/]+\.json", text)}
    assert len(named) > 5
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_result_of_a_gpu_is_a_part_or_has_its_command_on_the_page():
    """The command is the file's own, unless the program that made it was removed."""
    text = (page.OUT / "results.md").read_text(encoding="utf-8")
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    files = {file.stem for file in (page.FOLDER / "h200").glob("*.json")} - PARTS.keys()
    files |= {f"h100/{file.stem}" for file in (page.FOLDER / "h100").glob("*.json")}
    assert {name for names, _ in lines for name in re.findall(r"`([\w/]+)`", names)} == files
    for names, command in lines:
        told = command.strip("`").split()
        for name in re.findall(r"`([\w/]+)`", names) if "of a program" not in names else ():
            start = 3 if told[0] == "python" else 2
            folder = page.FOLDER if "/" in name else page.FOLDER / "h200"
            assert results.read(folder / f"{name}.json").head.command.split()[:start] == told[:start], name
