"""Configurations: what ships is valid, what a run makes of a file, and errors that name file and key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from attn_backends import BackendUnavailableError, CacheFormat, ConfigError, list_backends
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.config.backend_files import backend_options
from attn_backends.config.toml_options import validated
from attn_backends_reference.config import load_run_config, preset_names
from attn_backends_reference.run_options import PHASES, RunOptions, RuntimeOptions
from spec_metadata import Capacity, StepKind

EAGLE = "[eagle]\ntopk = 1\nnum_steps = 3\nnum_draft_tokens = 4\n"
FA3 = 'backend = "fa3"\n'

pytestmark = pytest.mark.smoke


class KeysAndValuesOnly(FA3Backend):
    """A backend of another package that shares no format with MLA."""

    name = "kv_only"
    formats = frozenset({CacheFormat.KV})


@pytest.fixture
def load(tmp_path):
    """Loads a run from the text of a file."""

    def load_text(text, **options):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return load_run_config(str(path), **options)

    return load_text


def per_phase(**backends):
    """The line that names a backend per phase; fa3 where none is given."""
    named = dict.fromkeys(PHASES, "fa3") | backends
    return "backend = {" + ", ".join(f'{phase} = "{name}"' for phase, name in named.items()) + "}\n"


def test_every_backend_has_its_file():
    for name in list_backends():
        options = backend_options(name)
        assert options is not None
        assert options.name == name


@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize("backend", [None, *list_backends()])
def test_every_preset_runs_on_every_backend(preset, backend):
    run = load_run_config(preset, backend=backend)
    own = "fa3" if preset.startswith(("block", "eagle3")) else "flashinfer_mla"
    assert run.backends.distinct == (backend or own,)
    assert isinstance(run.capacity, Capacity)


def test_a_run_of_modules_has_no_phase_of_drafting(load):
    assert load_run_config("chain").phases == PHASES
    assert load_run_config("mtp").phases.keys() == PHASES.keys() - {"draft"}
    assert load(FA3 + EAGLE + 'worker = "parallel"').phases.keys() == PHASES.keys() - {"draft"}
    block = load_run_config("block").phases
    assert block.keys() == PHASES.keys() - {"draft_extend"}
    assert block["draft"] is StepKind.DRAFT_BLOCK


def test_the_presets_are_chains_trees_blocks_and_modules():
    runs = {name: load_run_config(name) for name in preset_names()}
    assert {name: (run.eagle.worker, run.eagle.topk, run.model.draft) for name, run in runs.items()} == {
        "block": ("block", 1, "gqa-block"),
        "chain": ("eagle", 1, "mla"),
        "eagle3": ("eagle", 1, "gqa-eagle3"),
        "eagle3-tree": ("eagle", 4, "gqa-eagle3"),
        "mtp": ("mtp", 1, "mla-mtp"),
        "tree": ("eagle", 4, "mla"),
    }


@pytest.mark.parametrize(("worker", "num_rerun", "draft_room"), [("eagle", 0, 4), ("mtp", 2, 5)])
def test_modules_run_positions_again(load, worker, num_rerun, draft_room):
    capacity = load(FA3 + EAGLE + f'worker = "{worker}"').capacity
    assert (capacity.num_rerun, capacity.draft_room, capacity.num_draft_tokens) == (num_rerun, draft_room, 4)


def test_verifies_by_confidence_are_of_chains_that_one_draft_makes(load):
    keys = "verify_threshold = 0.25\nverify_rows = 40\n"
    run = load(FA3 + EAGLE + keys)
    assert (run.eagle.verify_threshold, run.eagle.verify_rows) == (0.25, 40)
    assert load(FA3 + EAGLE).eagle.verify_threshold is None, "off by default"
    with pytest.raises(ConfigError, match=r"eagle.verify_threshold: worker = 'mtp' keeps no probabilities"):
        load(FA3 + EAGLE + keys + 'worker = "mtp"')
    with pytest.raises(ConfigError, match=r"eagle.verify_rows: the rows of a ragged verify are a chain; set topk = 1"):
        load(FA3 + EAGLE.replace("topk = 1", "topk = 2") + "verify_rows = 40\n")


def test_windows_are_of_drafts_that_one_model_makes_step_by_step(load):
    run = load(FA3 + EAGLE + "draft_window = 256\ndraft_sink_tokens = 4\n")
    assert (run.eagle.draft_window, run.eagle.draft_sink_tokens) == (256, 4)
    assert load(FA3 + EAGLE).eagle.draft_window is None, "off by default"
    with pytest.raises(ConfigError, match=r"eagle.draft_window: worker = 'mtp' has no forwards of drafts to window"):
        load(FA3 + EAGLE + 'draft_window = 256\nworker = "mtp"')
    with pytest.raises(ConfigError, match=r"eagle.draft_sink_tokens: drafts see all tokens; set draft_window"):
        load(FA3 + EAGLE + "draft_sink_tokens = 4\n")


@pytest.mark.parametrize("graphs", ["one", "per_module"])
def test_how_modules_are_captured_is_of_mtp_alone(load, graphs):
    text = FA3 + EAGLE + f'draft_graphs = "{graphs}"\n'
    assert load(text + 'worker = "mtp"').eagle.draft_graphs == graphs
    with pytest.raises(ConfigError, match=r"run.toml: eagle.draft_graphs: worker = 'eagle' has one draft"):
        load(text)


def test_a_backend_brings_its_page_size_and_model():
    run = load_run_config("tree", backend="trtllm_mla")
    assert (run.page_size, run.model.target, run.kernels) == (64, "mla", {"trtllm_mla": "auto"})
    assert load_run_config("tree", backend="fa3").model.draft == "gqa"


def test_the_file_goes_before_the_backend_and_the_command_line_before_the_file(load):
    text = FA3 + EAGLE + '[model]\ntarget = "a"\ndraft = "b"\n[runtime]\npage_size = 8\nkernel = "torch"\nseed = 5\n'
    run = load(text, runtime={"dtype": "bfloat16", "seed": 7})
    assert (run.page_size, run.kernels, run.model.target) == (8, {"fa3": "torch"}, "a")
    assert (run.dtype, run.cache_dtype, run.runtime.seed) == (torch.bfloat16, torch.bfloat16, 7)
    assert load(text, runtime={"cache_dtype": "float8_e4m3fn"}).cache_dtype is torch.float8_e4m3fn


def test_a_backend_per_phase(load):
    run = load(per_phase(prefill="reference", verify="reference") + EAGLE + '[model]\ntarget = "gqa"\ndraft = "gqa"\n')
    assert [run.backends.of(phase) for phase in PHASES] == ["reference", "fa3", "fa3", "reference", "fa3"]


def test_phases_that_differ_in_page_size_are_refused(load):
    with pytest.raises(ConfigError, match=r"run.toml: backend: .* page sizes differ: trtllm_mla 64, fa3 16"):
        load(per_phase(prefill="trtllm_mla") + EAGLE)
    text = (
        per_phase(prefill="trtllm_mla") + EAGLE + '[runtime]\npage_size = 32\n[model]\ntarget = "mla"\ndraft = "mla"\n'
    )
    assert load(text).page_size == 32


def test_phases_without_a_common_format_are_refused(load):
    latent = per_phase(prefill="flashinfer_mla", draft="tests.test_config:KeysAndValuesOnly")
    with pytest.raises(ConfigError, match=r"agree on no format: prefill \(flashinfer_mla\) takes latent, .* takes kv"):
        load(latent + EAGLE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FA3 + EAGLE.replace("topk = 1", "topk = 0"), r"eagle.topk: must be at least 1, got 0$"),
        (FA3 + EAGLE.replace("num_steps = 3", "num_steps = 0"), r"eagle.num_steps: .* got 0"),
        (FA3 + EAGLE.replace("= 4", "= 5"), r"eagle.num_draft_tokens: .* must be in \[2, 4\].* got 5"),
        (
            FA3 + EAGLE + '[model]\ntarget = "gqa"\ndraft = "gqa"\nplaceholder_token = -1',
            r"model.placeholder_token: must be at least 0, got -1$",
        ),
        (
            FA3 + EAGLE + "worker = 'eagel'",
            r"eagle.worker: must be 'eagle', 'mtp', 'block' or 'parallel', got 'eagel'$",
        ),
        (FA3 + EAGLE + "worker = 'mtp'\ndraft_graphs = 'two'", r"eagle.draft_graphs: .* got 'two'"),
        (
            FA3 + EAGLE.replace("= 4", "= 3") + "worker = 'mtp'",
            r"eagle.num_draft_tokens: worker = 'mtp' .* needs topk = 1 and num_draft_tokens = 4; got 1 and 3",
        ),
        (FA3 + EAGLE.replace("topk = 1", "topk = 2") + "worker = 'mtp'", r"eagle.num_draft_tokens: .* got 2 and 4"),
        (FA3 + EAGLE.replace("= 4", '= "4"'), r"eagle.num_draft_tokens: must be a whole number, got '4'$"),
        (FA3 + EAGLE + "[runtime]\nbukets = [1]", r"unknown key runtime.bukets; .*Did you mean 'buckets'\?"),
        (FA3 + EAGLE + "[model]\ntarget = 'a'\ndraft = 'a'\nx = 1", "unknown key model.x; there are target, draft"),
        (FA3 + EAGLE + "[egale]\ntopk = 1", r"unknown key egale; .*Did you mean 'eagle'\?"),
        (FA3 + EAGLE + "[runtime]\nbuckets = [1, 9]", r"runtime.buckets: a bucket of 9 requests .* max_bs = 8"),
        (
            FA3 + EAGLE + "[runtime]\nmax_bs = 4\nbuckets = [8]",
            r"runtime.buckets: a bucket of 8 requests .* max_bs = 4",
        ),
        (FA3 + EAGLE + "[runtime]\nbuckets = []", r"runtime.buckets: must be a list of 1 or more, got \[\]$"),
        (FA3 + EAGLE + "[runtime]\nmax_bs = 0", r"runtime.max_bs: [^;]* got 0$"),
        (FA3 + EAGLE + "[runtime]\ndevice = 'gpu0'", r"runtime.device: 'gpu0' is not a device to run on"),
        (FA3 + EAGLE + "[runtime]\ndevice = 'meta'", r"runtime.device: 'meta' is not a device to run on"),
        (FA3 + EAGLE + "[runtime]\ndtype = 'float8'", r"runtime.dtype: .* got 'float8'"),
        (FA3 + EAGLE + "[runtime]\ncache_dtype = 'float32'", r"runtime.cache_dtype: .* got 'float32'"),
        (FA3 + EAGLE + "[runtime]\npath = 'fast'", r"runtime.path: must be 'graph' or 'eager', got 'fast'$"),
        ("runtime = 3\n" + FA3 + EAGLE, r"runtime: must be a table, got 3$"),
        (FA3, "eagle is missing"),
        (FA3 + "[model]\ntarget = 'gqa'\ndraft = 'gqa'", "eagle is missing"),
        (FA3 + EAGLE + "[model]\ntarget = 'gqa'", r"model.draft is missing, .* leave \[eagle\] out to decode plainly"),
        ("backend = 3\n" + EAGLE, r"backend: must be a backend's name, or a table .*, got 3$"),
        ("backend = {prefill = 'fa3'}\n" + EAGLE, "backend.decode is missing"),
        ("backend = ", "is not valid TOML"),
    ],
)
def test_errors_name_file_and_key(load, text, message):
    with pytest.raises(ConfigError, match=f"run.toml.*{message}"):
        load(text)


ODD = (-1, 0, 3, 1.5, True, "", "odd", [], [0], ["odd"], [1.5], {}, {"odd": 1})
WHOLE = {
    "backend": dict.fromkeys(PHASES, "fa3"),
    "eagle": {"worker": "mtp", "topk": 1, "num_steps": 3, "num_draft_tokens": 4, "draft_graphs": "one"},
    "model": {"target": "gqa", "draft": "gqa", "placeholder_token": 0},
    "runtime": {**RuntimeOptions().model_dump(), "prefill": "full"},
}


@pytest.mark.parametrize("table", WHOLE)
def test_no_value_is_refused_in_the_words_of_a_library(table):
    """Every key with every kind of value that TOML has: the key is named, and what it takes."""
    changed = [*ODD, *(WHOLE[table] | {key: odd} for key in WHOLE[table] for odd in ODD)]
    messages = [message for tables in changed if (message := refusal(WHOLE | {table: tables}))]
    assert len(messages) > len(ODD)
    assert [message for message in messages if not re.match(rf"run.toml: (unknown key )?{table}\b", message)] == []
    assert [message for message in messages if re.search("Input should|valid |instance|pydantic", message)] == []


def refusal(raw):
    """What is said of tables; nothing of those that are taken."""
    try:
        validated(RunOptions, raw, Path("run.toml"))
    except ConfigError as error:
        return str(error)
    return ""


def test_values_that_are_not_the_files_are_named_where_they_come_from(load):
    with pytest.raises(ConfigError, match=r"^--max-new-tokens: must be at least 1, got -5$"):
        load(FA3 + EAGLE, runtime={"max_new_tokens": -5}, flags={"max_new_tokens": "--max-new-tokens"})
    with pytest.raises(
        ConfigError, match=r"^runtime\['buckets'\]: must be at least 1, got 0; .*run.toml: eagle.topk: "
    ):
        load(FA3 + EAGLE.replace("topk = 1", "topk = 0"), runtime={"buckets": (0,)})


def test_a_run_without_a_draft_decodes_plainly(load):
    run = load(FA3 + '[model]\ntarget = "gqa"\n[runtime]\nmax_bs = 2\n')
    assert (run.model.draft, run.eagle, list(run.phases)) == (None, None, ["prefill", "decode"])
    assert run.capacity == Capacity(2, 1024, 16)


@pytest.mark.parametrize(
    ("max_bs", "buckets"),
    [(1, (1,)), (3, (1, 2, 3)), (4, (1, 2, 4)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8)), (32, (1, 2, 4, 8))],
)
def test_buckets_that_nobody_sets_hold_no_more_than_a_step(load, max_bs, buckets):
    assert load(FA3 + EAGLE + f"[runtime]\nmax_bs = {max_bs}").runtime.buckets == buckets
    assert load(FA3 + EAGLE).runtime.buckets == (1, 2, 4, 8)


@pytest.mark.parametrize("line", ['backend = "fa33"\n', per_phase(draft="fa33")])
def test_an_unknown_backend_is_named_before_anything_that_it_would_bring(load, line):
    with pytest.raises(BackendUnavailableError, match=r"backend 'fa33' .* Did you mean 'fa3'\?"):
        load(line + EAGLE)


def test_page_size_and_model_of_another_packages_backend_come_from_what_it_declares(load):
    mine = "backend = 'tests.test_config:KeysAndValuesOnly'\n" + EAGLE
    assert (load(mine).page_size, load(mine).model.target) == (16, "gqa")
    assert load(mine + "[runtime]\npage_size = 4\n[model]\ntarget = 'mla'\ndraft = 'mla'").model.target == "mla"


def test_a_model_that_the_backend_brought_is_told(load):
    told = {name: load_run_config("chain", backend=name).notes for name in ("fa3", "trtllm_mla")}
    assert told["fa3"] == ("model gqa, draft gqa (what fa3 takes; set [model] to keep one)",)
    assert told["trtllm_mla"] == ("model mla, draft mla (what trtllm_mla takes; set [model] to keep one)",)
    assert load(FA3 + EAGLE + '[model]\ntarget = "gqa"\ndraft = "gqa"\n').notes == ()


def test_an_unknown_preset_lists_the_known():
    known = "block, chain, eagle3, eagle3-tree, mtp, tree"
    with pytest.raises(ConfigError, match=rf"neither a file nor a preset \({known}\). Did you mean 'tree'\?"):
        load_run_config("tre")


@pytest.mark.parametrize(
    ("backend", "kernel", "reason"),
    [
        ("trtllm_mla", "flashmla", r"flashmla: runs on CUDA devices, not on cpu"),
        ("fa3", "flashmla", r"fa3 kernel 'flashmla' can't run here: unknown name\. It has flash_attn_interface, "),
        ("reference", "cuda_magic", r"unknown name\. It has torch"),
    ],
)
def test_a_kernel_that_can_not_run_is_refused(backend, kernel, reason):
    with pytest.raises(BackendUnavailableError, match=reason):
        load_run_config("chain", backend=backend, runtime={"kernel": kernel})


def test_a_device_that_is_not_here_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        BackendUnavailableError, match=r"fa3 on cuda, prefill can't run here: .*; torch: torch sees no CUDA device"
    ):
        load_run_config("chain", backend="fa3", runtime={"device": "cuda"})


def test_a_run_can_not_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        load_run_config("chain").page_size = 3
