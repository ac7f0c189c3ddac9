"""The command line: what it prints, writes and returns."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from attn_backends import CacheFormat, list_backends
from attn_backends.backends.dsv4 import DSV4Backend
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.cli import main
from attn_backends.selection.providers import _vendor_reasons
from attn_backends_reference.cli import demo
from attn_backends_reference.cli.generate import _InOrder
from attn_backends_reference.eagle.report import Row
from tests.torch_kernels import torch_kernel

ROW = Row("fa3", "torch", "gqa", "tree", "graph", "cpu", "float32", "float32", 6, 3.5, True, True, 0, 0.0)
FIELDS = (
    "backend kernel model draft path device dtype cache_dtype batch_size tokens_per_cycle identical consistent "
    "divergences max_gap"
)


def declaring(**changes):
    """fa3's torch kernel with another record."""
    kernel = torch_kernel(FA3Backend)
    return replace(kernel, capabilities={kind: replace(r, **changes) for kind, r in kernel.capabilities.items()})


@pytest.fixture
def short_run(tmp_path):
    """A file of a run that takes a second."""
    path = tmp_path / "run.toml"
    path.write_text(
        'backend = "fa3"\n[eagle]\ntopk = 1\nnum_steps = 2\nnum_draft_tokens = 3\n'
        "[runtime]\nmax_bs = 2\nbuckets = [2]\nmax_context = 64\nmax_new_tokens = 8\n"
    )
    return str(path)


def run_json(capsys, *arguments):
    """What a command prints as JSON."""
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.smoke
def test_list_has_every_backend_and_says_what_runs(capsys):
    backends = run_json(capsys, "list")["backends"]
    assert [backend["name"] for backend in backends] == list(list_backends())
    for backend in backends:
        runs = [kernel["name"] for kernel in backend["kernels"] if "cpu" in kernel["runs_on"]]
        assert runs == ["torch"]
    assert main(["list"]) == 0
    assert "trtllm_mla" in capsys.readouterr().out


def test_list_shows_a_backend_that_can_not_be_imported(capsys, monkeypatch):
    monkeypatch.setattr("attn_backends.registry.BUILT_IN", {"broken": "tests.raises_at_import:Backend"})
    (backend,) = run_json(capsys, "list")["backends"]
    assert "RuntimeError: no driver" in backend["reason"]
    assert main(["list"]) == 0
    assert "broken" in capsys.readouterr().out


def test_info_gives_reasons_capabilities_and_buffers(capsys):
    info = run_json(capsys, "info", "trtllm_mla")
    kernels = {kernel["name"]: kernel for kernel in info["kernels"]}
    assert {"trtllm_gen", "flashmla", "torch"} <= kernels.keys()
    assert kernels["flashmla"]["reasons"][0] == "cpu: runs on CUDA devices, not on cpu"
    assert info["workspaces"]["flashmla"][0].startswith("tile_scheduler_metadata [num_forwards, ")
    assert info["workspaces"]["torch"] == []
    assert info["capabilities"]["torch"]["draft_extend"]["packed"] is False
    assert info["capabilities"]["torch"]["target_verify"]["page_sizes"] == [32, 64]
    assert info["capabilities"]["torch"]["target_verify"]["tree"] is True
    assert info["capabilities"]["flashmla"]["decode"]["head_sizes"] == [[576, 512]]
    assert info["buffers"]["decode"][0].startswith("block_table [bs, ")
    assert info["planners"]["cpu"] == {"name": "torch", "reason": "no fused planner: runs on CUDA devices, not on cpu"}
    assert main(["info", "trtllm_mla"]) == 0
    shown = capsys.readouterr().out
    assert "'attn-backends[flashmla]'" in shown.replace("\n", "")
    (hint,) = re.findall(r"capability means: python (-m pydoc .*)", shown)
    assert "page_sizes" in subprocess.check_output([sys.executable, *hint.split()], text=True)


def test_info_says_which_pages_a_compressed_cache_takes(capsys):
    assert run_json(capsys, "info", "trtllm_mla")["page_multiple"] == 1
    assert main(["info", "dsv4"]) == 0
    shown = capsys.readouterr().out
    assert "cache: compressed, page sizes: multiples of 128" in shown
    assert "because buffers are declared from them" in shown, "a docstring's line breaks are not the terminal's"
    assert "│ 1 to 128 " in shown


@pytest.fixture
def fresh_reasons():
    """Forgets, before and after, which vendors' kernels can't run here."""
    _vendor_reasons.cache_clear()
    yield
    _vendor_reasons.cache_clear()


def test_info_recognizes_flash_attention_2(capsys, monkeypatch, fresh_reasons):
    installed = {"flash-attn": "2.8.3"}
    monkeypatch.setattr("attn_backends.selection.providers.version_of", installed.get)
    reasons = {kernel["name"]: kernel["reasons"] for kernel in run_json(capsys, "info", "fa3")["kernels"]}
    assert (
        "cuda: installed flash-attn 2.8.3 is FlashAttention-2; FA3 is a source build of its hopper folder"
        in (reasons["flash_attn_interface"])
    )


@pytest.mark.parametrize("on_path", [False, True], ids=["attn-backends", "python -m"])
def test_info_takes_no_folder_for_an_installed_vendor(capsys, monkeypatch, fresh_reasons, tmp_path, on_path):
    """Such as a clone of vLLM beside the run, in both forms of starting."""
    for name in ("vllm", "sgl_kernel", "flashinfer"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    if on_path:
        monkeypatch.syspath_prepend(tmp_path)
    reasons = {
        kernel["name"]: " ".join(kernel["reasons"])
        for backend in ("fa3", "flashinfer_mla")
        for kernel in run_json(capsys, "info", backend)["kernels"]
    }
    assert "vllm is not installed" in reasons["vllm_flash_attn"]
    assert "sgl-kernel is not installed" in reasons["sgl_kernel"]
    assert "flashinfer-python is not installed" in reasons["flashinfer_fa3"]
    assert (str(tmp_path) in sys.path) is on_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "fa4"], "Did you mean 'fa3'? A class that has no name yet is given as module:Class."),
        (["info", "a:x:b"], "backend 'a:x:b'"),
        (["generate"], "at least one --prompt"),
        (["generate", "--prompt", ""], "none of them empty"),
        (["generate", "--prompt", "a", "--device", "cuda:9x"], "error: --device: 'cuda:9x' is not a device"),
        (["generate", "--prompt", "a" * 600], "Shorten it"),
        (["generate", "--prompt-file", "missing.txt"], "--prompt-file missing.txt can't be read"),
        (["generate", "--prompt", "a", "--config", "tre"], "Did you mean 'tree'?"),
        (["generate", "--prompt", "a", "--max-new-tokens", "0"], "error: --max-new-tokens: must be at least 1, got 0"),
        (
            ["generate", "--prompt", "a", "--kernel", "flashinfer_fa3"],
            "flashinfer_fa3: runs on CUDA devices, not on cpu",
        ),
        (["demo", "--kernel", "nonesuch"], "kernel 'nonesuch'"),
        (["demo", "--json", "no/such/folder/rows.json"], "there is no folder no/such/folder"),
    ],
)
def test_misuse_is_an_error_for_people(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert re.fullmatch(r"attn-backends (\d+\.\d+\.\d+|without package metadata)\n", capsys.readouterr().out)


def test_generate_continues_every_prompt(short_run, tmp_path, capsys):
    file = tmp_path / "prompt.txt"
    file.write_text("import sys\n\n\ndef ")
    arguments = ["generate", "--config", short_run, "--prompt", "class [bold]A[:x:/](", "--prompt-file", str(file)]
    assert main([*arguments, "--dtype", "float64"]) == 0
    output = capsys.readouterr().out
    assert "class [bold]A[:x:/](" in output
    assert "import sys\n\n\ndef " in output
    assert "tokens a cycle" in output
    assert output.count("─ 8 tokens, ended by: max_new_tokens = 8 ─") == 2
    assert "fa3, kernel torch: prefill, decode, draft, verify, draft_extend" in output
    assert "through graphs" in output


def test_generate_needs_no_draft(tmp_path, capsys):
    file = tmp_path / "plain.toml"
    file.write_text('backend = "fa3"\n[model]\ntarget = "gqa"\n[runtime]\nmax_context = 12\nmax_bs = 1\n')
    assert main(["generate", "--config", str(file), "--prompt", "import "]) == 0
    output = capsys.readouterr().out
    assert "─ 4 tokens, ended by: the context is full, max_context = 12 ─" in output
    assert "1.00 tokens a cycle" in output
    assert "fa3, kernel torch: prefill, decode\n" in output


def test_generate_says_that_a_text_ended_itself(short_run, monkeypatch, capsys):
    """Every token ends the text, and the first does."""
    monkeypatch.setattr("attn_backends_reference.models.folders.eos_token_ids", lambda path: frozenset(range(256)))
    assert main(["generate", "--config", short_run, "--prompt", "import o"]) == 0
    assert re.search(r"─ 1 tokens?, ended by: end-of-text token \d+ ─", capsys.readouterr().out)


@pytest.mark.parametrize("stream", [True, False])
def test_generate_streams_if_asked_to(stream, short_run, monkeypatch, capsys):
    """Into a pipe, too; without it a text comes in one piece."""
    pieces, requests = [], []

    def update(view):
        requests.append(view._left[0][1])
        pieces.append(len(requests[0].output))
        shown(view)

    shown = _InOrder.update
    monkeypatch.setattr(_InOrder, "update", update)
    assert main(["generate", "--config", short_run, "--prompt", "import ", *["--stream"] * stream]) == 0
    assert pieces[-1] == 8
    assert (len(pieces) > 1) == stream
    assert capsys.readouterr().out.startswith(f"import {requests[0].text}\n")


def test_demo_makes_a_row_of_each_backend_draft_and_path(monkeypatch, tmp_path, capsys):
    runs = []

    def fake_row(engine, prompts, on_progress, exact):
        config = engine.config
        runs.append((config.backends.distinct, config.model.draft, config.eagle.topk, config.runtime.path))
        return ROW

    monkeypatch.setattr(demo, "run_row", fake_row)
    file = tmp_path / "rows.json"
    assert main(["demo", "--json", str(file)]) == 0
    made = [
        ("flashinfer_mla", "mla", 1),
        ("flashinfer_mla", "mla", 4),
        ("trtllm_mla", "mla", 1),
        ("trtllm_mla", "mla", 4),
        ("fa3", "gqa", 1),
        ("fa3", "gqa", 4),
        ("fa3", "gqa-eagle3", 1),
        ("fa3", "gqa-eagle3", 4),
        ("fa3", "gqa-block", 1),
        ("flashinfer_mla", "mla-mtp", 1),
        ("dsv4", "v4", 1),
    ]
    assert runs == [((backend,), draft, topk, path) for backend, draft, topk in made for path in ("eager", "graph")]
    written = json.loads(file.read_text())
    assert (written["device"], written["command"]) == ("CPU", "attn-backends demo --json FILE")
    assert [list(row) for row in written["rows"]] == [FIELDS.split()] * 22
    output, told = capsys.readouterr()
    assert output.count("identical") == 23
    assert output.endswith("\n22 of 22 rows identical\n")
    assert told.splitlines()[::21] == ["flashinfer_mla chain, eager: identical", "dsv4 chain, graph: identical"]
    assert output.startswith("flashinfer_mla chain, eager: after 'def read_file(path, encoding=' comes\n'")
    assert "trtllm_mla, kernel torch: prefill, decode, draft, verify, draft_extend\n" in output
    assert (
        "fa3 (chain, tree, eagle3, eagle3-tree), kernel torch: prefill, decode, draft, verify, draft_extend" in output
    )
    assert "fa3 (block), kernel torch: prefill, decode, draft, verify\n" in output
    assert "flashinfer_mla (mtp), kernel torch: prefill, decode, verify, draft_extend\n" in output
    assert output.count("sgl_kernel, vllm_flash_attn, gluon_mla, triton: runs on CUDA devices, not on cpu") == 2, (
        "by fa3 and by its run of blocks, which has other phases"
    )
    assert all(line in output for line in written["kernels"])


def test_demo_runs_the_backends_that_are_named_on_the_cache_that_is_asked_for(monkeypatch, capsys):
    caches = []

    def fake_row(engine, prompts, on_progress, exact):
        caches.extend((engine.config.backends.distinct, cache.dtype) for cache in engine.eagle.target_caches)
        caches.extend((engine.config.backends.distinct, cache.dtype) for cache in engine.eagle.draft_caches)
        return ROW

    monkeypatch.setattr(demo, "run_row", fake_row)
    assert main(["demo", "--backend", "fa3", "--cache-dtype", "float8_e4m3fn"]) == 0
    assert set(caches) == {(("fa3",), torch.float8_e4m3fn)}
    assert main(["demo", "--backend", "vllm"]) == 2
    assert "unknown name; there are flashinfer_mla, trtllm_mla, fa3, dsv4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dtype", "consistent", "code", "verdict"),
    [("float32", True, 1, "WRONG"), ("bfloat16", True, 0, "consistent"), ("bfloat16", False, 1, "WRONG")],
)
def test_demo_fails_if_a_row_does(dtype, consistent, code, verdict, monkeypatch, capsys):
    fields = {"dtype": dtype, "identical": False, "consistent": consistent, "divergences": 2, "max_gap": 0.25}
    row = Row(**{name: getattr(ROW, name) for name in FIELDS.split()} | fields)
    rows = iter([ROW, row])
    monkeypatch.setattr(demo, "run_row", lambda *args: next(rows))
    assert main(["demo", "--backend", "dsv4"]) == code
    output = capsys.readouterr().out
    assert output.endswith(f"\n1 of 2 rows identical, 1 of 2 rows {verdict}\n")
    assert "2 of 6" in output


class Theirs(FA3Backend):
    """Another package's backend of keys and values, whose kernel takes pages of 32 and 64."""

    name = "theirs"
    formats = frozenset({CacheFormat.KV})
    kernels = (declaring(page_sizes=frozenset({32, 64})),)


class ChainsOnly(Theirs):
    """One of latents that can't do trees, in pages of any size."""

    name = "chains_only"
    formats = frozenset({CacheFormat.LATENT})
    kernels = (declaring(non_causal=False),)


class Compressed(Theirs):
    """One of a cache that no model of the demo's has."""

    formats = DSV4Backend.formats


@pytest.mark.parametrize(
    ("backend", "made"),
    [
        ("Theirs", [("gqa", 1, 32), ("gqa", 4, 32)]),
        ("ChainsOnly", [("mla", 1, 16)]),
    ],
)
def test_demo_runs_another_packages_backend(backend, made, monkeypatch, capsys):
    runs = []

    def fake_row(engine, prompts, on_progress, exact):
        config = engine.config
        assert type(engine.backends.verify).__name__ == backend
        runs.append((config.model.target, config.eagle.topk, config.page_size, config.runtime.path))
        return ROW

    monkeypatch.setattr(demo, "run_row", fake_row)
    assert main(["demo", "--backend", f"tests.test_cli:{backend}"]) == 0
    assert runs == [(*run, path) for run in made for path in ("eager", "graph")]
    assert ("chains only; its kernels declare no trees" in capsys.readouterr().out) == (backend == "ChainsOnly")


def test_demo_decodes_on_another_packages_backend(monkeypatch, capsys):
    monkeypatch.setattr(demo, "demo_prompts", lambda: ["import os\nimport "])
    monkeypatch.setattr(demo, "_runs", lambda names: [(name, "tree") for name in names])
    assert main(["demo", "--backend", "tests.test_cli:Theirs"]) == 0
    output = capsys.readouterr().out
    assert output.count("identical") == 3
    assert "theirs, kernel torch: prefill, decode, draft, verify, draft_extend" in output


def test_generate_runs_another_packages_backend_and_tells_its_model(tmp_path, capsys):
    path = tmp_path / "texts.json"
    words = ["--prompt", "import os", "--max-new-tokens", "2", "--json", str(path)]
    assert main(["generate", "--backend", "tests.test_cli:ChainsOnly", *words]) == 0
    assert "\nmodel mla, draft mla (what tests.test_cli:ChainsOnly takes; set [model]" in capsys.readouterr().out
    written = json.loads(path.read_text())
    assert (written["model"], written["draft"]) == ("mla", "mla")
    assert written["backends"] == dict.fromkeys(written["kernels"], "tests.test_cli:ChainsOnly")


def test_demo_says_which_caches_it_has_a_model_for(capsys):
    assert main(["demo", "--backend", "tests.test_cli:Compressed"]) == 2
    assert "whose cache is compressed, there is none; there are models for kv and latent" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "options", "threads"), [(None, [], 1), ("3", [], 2), (None, ["--threads", "3"], 3)], ids=str
)
def test_a_command_sets_its_number_of_threads(variable, options, threads, monkeypatch, short_run, capsys):
    """One, unless the environment or an option says otherwise; torch has read the environment before."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    torch.set_num_threads(2)
    assert main(["generate", "--config", short_run, "--prompt", "a", *options]) == 0
    assert torch.get_num_threads() == threads


def test_threads_are_at_least_one_and_in_the_help(capsys):
    assert main(["demo", "--threads", "0"]) == 2
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--help"])
    assert stop.value.code == 0
    output = capsys.readouterr()
    assert "'0' is not a number of at least 1" in output.err
    assert "default: OMP_NUM_THREADS if it is set, else 1" in " ".join(output.out.split())
