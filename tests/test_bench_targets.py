"""Targets of the kernels, and the page that is written from results."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from attn_backends import results
from benchmarks import page, plot
from benchmarks.ceilings import Ceilings
from benchmarks.rows import KernelRow, Row
from benchmarks.targets import check_targets

TEN = Ceilings(10.0, 100.0)
MLA = KernelRow("kernels", "trtllm_mla", "triton", 128, 4096, 16, 1, 100.0, "flashmla", 90.0, 1.1111, 8.0, 9.0)
GROUPED = replace(MLA, backend="fa3", batch_size=64, context=8192, heads=32, peer="vllm_flash_attn")
SPARSE = replace(MLA, backend="dsv4", heads=64, peer="flashmla_sparse")
TREE = Row("trees", "fa3", "vllm_flash_attn", 32, 4096, 32, 16, 125.0, "vllm_flash_attn, a chain", 100.0, 1.25)


def verdicts(*rows, ceilings=TEN):
    return [(reached.value, reached.met) for reached in check_targets(map(asdict, rows), ceilings)]


@pytest.mark.parametrize(
    ("row", "value", "met"),
    [
        (MLA, 0.8, True),
        (replace(MLA, tb_per_s=7.4), 0.74, False),
        (GROUPED, 0.9, True),
        (replace(GROUPED, peer_us=74.0), 0.74, False),
        (SPARSE, 0.9, True),
        (replace(SPARSE, heads=16, peer_us=59.0), 0.59, False),
        (TREE, 1.25, True),
        (replace(TREE, us=126.0, batch_size=128), 1.26, False),
        (replace(MLA, heads=128, peer_us=40.0), 0.4, None),
        (replace(MLA, heads=128, kernel="gluon"), 0.9, None),
    ],
)
def test_a_target_is_held_against_the_rows_that_it_speaks_of(row, value, met):
    assert verdicts(row) == [(value, met)]


@pytest.mark.parametrize(
    "row",
    [
        replace(MLA, width=4),
        replace(MLA, kernel="flashmla"),
        replace(MLA, context=8192),
        replace(MLA, batch_size=32),
        replace(GROUPED, peer="copy"),
        replace(GROUPED, heads=64),
        replace(SPARSE, peer="copy"),
        replace(TREE, batch_size=1),
        replace(TREE, context=32768),
        replace(MLA, bench="attention"),
    ],
)
def test_other_rows_reach_nothing(row):
    assert verdicts(row) == []


def test_without_ceilings_no_share_of_them_is_said():
    assert verdicts(MLA, ceilings=None) == []
    assert verdicts(GROUPED, ceilings=None) == [(0.9, True)]


@pytest.fixture
def folder(tmp_path):
    head = results.Head("NVIDIA H200", {}, "2026-01-02", "abc", "python -m benchmarks attention --set kernels")
    rows = [
        MLA,
        replace(MLA, batch_size=8, ratio=1.5, tb_per_s=2.0),
        replace(MLA, kernel="flashmla", peer="copy", tb_per_s=9.0),
    ]
    rows += [replace(MLA, kernel="flashinfer_fa2", peer="copy", tb_per_s=1.0, tflop_per_s=50.0)]
    missing = [
        {"backend": "trtllm_mla", "kernel": "torch", "reason": "too large", "failed": False, "cases": ["a", "b"]}
    ]
    targets = [asdict(reached) for reached in check_targets(map(asdict, rows), TEN)]
    own = {"ceilings": asdict(TEN), "missing": missing, "targets": targets}
    results.write(tmp_path / "kernels_trtllm_mla.json", head, map(asdict, rows), **own)
    results.write(tmp_path / "trees.json", head, [asdict(TREE)])
    return tmp_path


def written(folder):
    assert page.main([str(folder), "--output", str(folder / "page.md")]) == 0
    return (folder / "page.md").read_text().splitlines()


def test_the_page_says_which_targets_are_met(folder):
    assert "| MLA of 16 heads, of a copy's bandwidth | trtllm_mla | triton | 1 | 0.80 | 0.80 | met |" in written(folder)


def test_the_page_shows_our_kernels_beside_the_vendors_by_shape_and_both_under_the_roof(folder):
    lines = written(folder)
    sizes = "| backend | kernel | heads | width | peer | 8 x 4096 | 128 x 4096 | least | most | roof | peer's roof |"
    assert sizes in lines
    assert "| trtllm_mla | triton | 16 | 1 | flashmla | 1.50 | 1.11 | 1.11 | 1.50 at 8 x 4096 | 0.80 | 0.90 |" in lines
    assert "| trtllm_mla | flashinfer_fa2 | 16 | 1 | copy |  |  |  |  | 0.50 |  |" in lines
    assert not any(line.startswith("| trtllm_mla | flashmla |") for line in lines)


def test_the_page_shows_a_tree_beside_its_chain_at_sizes_of_its_own(folder):
    line = "| fa3 | vllm_flash_attn | 32 | 16 | vllm_flash_attn, a chain | 1.25 | 1.25 | 1.25 at 32 x 4096 |"
    assert line in written(folder)


def test_the_page_says_what_is_missing_and_links_rows_and_pictures(folder):
    lines = written(folder)
    assert "- trtllm_mla/torch: too large (2 cases)" in lines
    assert any("A copy moves 10.00 TB/s, a matrix product 100 TFLOP/s." in line for line in lines)
    assert "![Our kernels, times the time of flashmla, on NVIDIA H200](kernels_trtllm_mla.svg)" in lines
    assert any("[all rows](trees.json)." in line for line in lines)


def test_the_page_says_that_a_run_was_cut_short(folder):
    path = folder / "trees.json"
    said = " The run was cut short; these rows were done."
    assert not any(line.endswith(said) for line in written(folder))
    path.write_text(results.read(path).as_incomplete().to_json())
    assert [line for line in written(folder) if line.endswith(said)] == [
        "NVIDIA H200, 2026-01-02, `python -m benchmarks attention --set kernels`: [all rows](trees.json)." + said
    ]


def test_the_committed_page_is_what_the_committed_results_give():
    root = Path(page.__file__).parents[1]
    given = page.summed_up(root / page.FOLDER, (root / page.PAGE).parent)
    assert (root / page.PAGE).read_text() == given, f"run `{page.COMMAND}`"
    for path, svg in page.pictures(root / page.FOLDER).items():
        assert path.read_text() == svg, f"run `{page.COMMAND}`"


def test_a_picture_says_which_kernels_are_faster_and_by_how_much():
    rows = [{"backend": "fa3", "kernel": "triton", "heads": 16, "width": 1, "peer": peer, "ratio": ratio}
            for peer, ratio in (("vendor", 0.5), ("vendor", 0.6), ("vendor", 2.0), ("copy", 9.0))]  # fmt: skip
    found = plot.spans(rows, without="copy")
    assert found == [plot.Span("fa3 triton: 16 heads, width 1", 0.5, 0.6, 2.0, 3)]
    slower, even = (found[0]._replace(middle=middle) for middle in (1.4, 1.04))
    svg = plot.to_svg("times the vendor's", [*found, slower, even])
    root = ElementTree.fromstring(svg)
    dots = [(float(dot.get("cx")), dot.get("fill")) for dot in root.iter() if dot.tag.endswith("circle")]
    (one,) = (float(text.get("x")) for text in root.iter() if text.text == "1")
    assert [color for _, color in dots] == [plot.FASTER, plot.SLOWER, plot.EVEN]
    assert dots[0][0] < one < dots[2][0] < dots[1][0]


def test_a_folder_without_results_is_refused(tmp_path, capsys):
    assert page.main([str(tmp_path), "--output", str(tmp_path / "page.md")]) == 2
    assert "holds none of kernels_*.json" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()
