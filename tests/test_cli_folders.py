"""`inspect`, and `generate` of folders without a file: what is told of them, decided for them, and refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from attn_backends.cli import consoles, find, guarded, main, run_command
from attn_backends.contract.capabilities import Capabilities
from attn_backends.errors import CheckpointError
from attn_backends_reference.cli import generate, inspect_folders
from attn_backends_reference.cli.options import in_bytes
from attn_backends_reference.models import load_tokenizer, weights
from tests import reference_models as rm

WORDS = {"<s>": 0, "one": 1, "two": 2, "<user>": 3, "<model>": 4, "<unk>": 5}
TEMPLATE = (
    "{{ bos_token }} {% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)


def inspect(*words: str) -> int:
    return guarded(lambda: run_command("attn-backends inspect", inspect_folders.COMMAND, words))


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(weights._Unread, "__getitem__", read)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama whose words have a template."""
    config = LlamaConfig(**rm.GQA, bos_token_id=0, eos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", chat_template=TEMPLATE).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("no_weights")
def test_inspect_tells_what_runs_it_and_in_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect("gqa", "--draft", "gqa-eagle3") == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM, 4 layers, hidden size 256, vocabulary 256, 2,048 positions" in out
    assert "attention of 4 layers: 4 heads over 2, of 64 and 64, over all keys" in out
    assert "weights: 1,837,312, 3.67 MB in files (BF16), 3.67 MB in memory as bfloat16" in out
    assert f"cache: {4 * 2 * 2 * 64 * 2:,} bytes a token, 33.6 MB for 8 requests of 2,044 tokens" in out
    assert "['LlamaForCausalLMEagle3'], 15 tensors, 1.89 MB, hidden_size 256" in out
    assert "max_context = 2,044: prompt and output together; the target has 2,048 positions" in out
    assert "fa3, kernel torch: prefill, decode, draft, verify, draft_extend" in out
    assert "vllm_flash_attn, gluon_mla, triton: runs on CUDA devices, not on cpu" in out


def test_inspect_tells_of_a_block_draft(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "gqa", "--config", "block", "--draft", "gqa-block"]) == 0
    assert "LlamaForCausalLMBlockDraft" in capsys.readouterr().out
    assert main(["inspect", "gqa", "--draft", "gqa-block"]) == 2
    assert "gqa-block is a block draft" in capsys.readouterr().err


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(("name", "backend"), [("mla", "flashinfer_mla"), ("v4", "dsv4")])
def test_inspect_chooses_a_backend_of_the_target_s_cache(
    name: str, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect(name, "--dtype", "float32") == 0
    out = capsys.readouterr().out
    assert f"{backend}, kernel torch: prefill, decode\n" in out
    assert "as float32" in out


@pytest.mark.usefixtures("no_weights")
def test_inspect_tells_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if kernels took windows nowhere, and trees nothing."""
    monkeypatch.setattr(
        Capabilities, "layer_reasons", lambda *given: [f"window {given[1].window}"] * bool(given[1].window)
    )
    monkeypatch.setattr(Capabilities, "tree_reasons", lambda self, layer: ["a tree"])
    rm.tiny_target("qwen2_windows").save_pretrained(tmp_path)
    file = tmp_path / "run.toml"
    tree = "[eagle]\ntopk = 2\nnum_steps = 2\nnum_draft_tokens = 4\n[runtime]\nmax_context = 64\n"
    file.write_text(f'backend = "fa3"\n{tree}')
    assert inspect(str(tmp_path), "--draft", "gqa", "--config", str(file)) == 2
    out = capsys.readouterr().out
    assert "attention of 1 layers: 4 heads over 2, of 8 and 8, over all keys" in out
    assert f"attention of 1 layers: 4 heads over 2, of 8 and 8, over a window of {rm.WINDOW} keys" in out
    expected = [f"fa3 (torch), {phase}: window {rm.WINDOW}" for phase in ("prefill", "decode", "verify")]
    assert re.findall("refused: (.*)", out) == [*expected[:2], "fa3 (torch), verify: a tree", expected[2]]


@pytest.mark.usefixtures("no_weights")
def test_inspect_tells_what_does_not_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(inspect_folders, "free_bytes", lambda device: 10**6)
    assert inspect("gqa") == 2
    assert re.search(
        r"refused: weights and cache take [\d,]{9,} bytes, cpu has 1,000,000 free", capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("GraniteForCausalLM", ""),
        ("DeepseekV41ForCausalLM", ", which needs layers that attend to another layer's entries (kv_source_layer_ids"),
    ],
)
def test_inspect_of_a_folder_that_can_not_be_served(
    name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "model_type": "granite"}))
    assert inspect(str(tmp_path)) == 2
    said = capsys.readouterr().err
    assert f"has architectures ['{name}']{why}" in said
    assert "; supported here: LlamaForCausalLM, " in said


@pytest.mark.usefixtures("no_weights")
def test_inspect_tells_of_sinks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rm.tiny_target("gpt_oss").save_pretrained(tmp_path)
    assert inspect(str(tmp_path)) == 0
    out = capsys.readouterr().out
    for sees in (f"a window of {rm.WINDOW} keys", "all keys"):
        assert f"attention of 1 layers: 4 heads over 2, of 64 and 64, over {sees} and sinks" in out


def test_the_command_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    """As are the others of the reference package, in its pyproject.toml."""
    text = (Path(__file__).parent.parent / "reference" / "pyproject.toml").read_text()
    named = re.findall(r'^(\w+) = "(attn_backends_reference\.cli\.\w+):COMMAND"$', text, flags=re.MULTILINE)
    assert dict(named)["inspect"] == inspect_folders.__name__
    assert dict(named)["generate"] == generate.__name__
    assert find("generate") is generate.COMMAND


def test_generate_takes_folders_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "--prompt", "import ", "--max-new-tokens", "9", "--dtype", "float32"]
    texts = []
    for models_given in (["--model", "gqa"], ["--model", "gqa", "--draft", "gqa"]):
        assert main([*words, *models_given]) == 0
        texts.append(capsys.readouterr().out)
    plain, eagle = texts
    assert plain.splitlines()[0] == eagle.splitlines()[0]
    assert "1.00 tokens a cycle" in plain
    assert "fa3, kernel torch: prefill, decode\n" in plain
    assert "fa3, kernel torch: prefill, decode, draft, verify, draft_extend" in eagle


def test_a_file_may_be_run_with_other_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "--config", "tree", "--backend", "fa3", "--max-new-tokens", "5", "--prompt", "import "]
    assert main([*words, "--model", "gqa", "--draft", "gqa-eagle3"]) == 0
    assert "draft, verify, draft_extend" in capsys.readouterr().out
    assert main([*words, "--model", "gqa"]) == 0
    assert "1.00 tokens a cycle" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--draft", "gqa"], "--draft names a draft and --model no target"),
        (
            ["--model", "gqa", "--draft", "gqa", "--draft-positions", "0"],
            "--draft-positions: must be at least 1, got 0",
        ),
        (["--model", "gqa", "--draft", "gqa-block"], 'a file with worker = "block" runs it (--config block)'),
        (["--model", "gqa", "--draft", "nowhere"], "'nowhere' is neither a folder nor an embedded checkpoint"),
        (["--model", "gqa", "--backend", "flashinfer_mla"], "backend flashinfer_mla takes a cache of latent"),
        (["--model", "gqa", "--chat"], "a model of bytes continues text and knows no messages; leave --chat out"),
    ],
)
def test_models_that_can_not_be_run(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "a", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(params=["max_position_embeddings", "max_sequence_length"])
def short_draft(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The embedded draft, whose folder says by a key that it reaches 64 positions."""
    from attn_backends_reference.models import folders

    source, made = folders.find("gqa", {"gqa": "gqa/draft"}), tmp_path / "draft"
    made.mkdir()
    fields = json.loads((source / "config.json").read_text())
    del fields["max_position_embeddings"]
    (made / "config.json").write_text(json.dumps(fields | {request.param: 64}))
    (made / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    return made


def test_a_draft_does_not_cut_the_context_silently(short_draft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "gqa", "--draft", str(short_draft), "--prompt", "import ", "--max-new-tokens", "3"]
    assert main(["generate", *words]) == 0
    out = capsys.readouterr().out
    assert "max_context = 60: prompt and output together; the target has 2,048 positions" in out
    assert "the draft has 64 positions (max_position_embeddings); model.draft_positions, or --draft-positions" in out
    assert main(["generate", *words, "--config", "chain", "--backend", "fa3"]) == 2
    assert re.search(
        r"\(max_position_embeddings\)\. Set .* to 60, or less, or model\.draft_positions", capsys.readouterr().err
    )
    assert main(["generate", *words, "--draft-positions", "1024"]) == 0
    assert "max_context = 1,020: prompt and output together" in capsys.readouterr().out


def test_messages_have_the_form_of_the_template(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = load_tokenizer(folder, rm.VOCAB)
    assert tokenizer.encode_chat("two one") == [0, 3, 2, 1, 4]
    assert tokenizer.encode("two one") == [2, 1]
    assert main(["generate", "--model", str(folder), "--chat", "--prompt", "two", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("two")


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}", "{% if %}"])
def test_a_template_that_does_not_work_is_told(folder: Path, template: str | None) -> None:
    tokenizer = load_tokenizer(folder, rm.VOCAB)
    tokenizer.tokenizer.chat_template = template  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=rf"the tokenizer in {folder} has no chat template that works"):
        tokenizer.encode_chat("one")


def test_loading_shows_what_was_read_of_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[str, str, int | None]] = []
    read: list[float] = []

    def progress(what: str, unit: str, total: int | None = None) -> object:
        begun.append((what, unit, total))
        return shown(what, unit, total)

    shown = generate.progress
    monkeypatch.setattr(generate, "progress", progress)
    monkeypatch.setattr(consoles.Bar, "advance", lambda bar, number=1: read.append(number))
    assert main(["generate", "--model", "gqa", "--prompt", "a", "--max-new-tokens", "1"]) == 0
    assert begun[0] == ("loading gqa, 3.67 MB in memory as bfloat16", "MB read", 4)
    assert sum(each for each in read if each < 1) == pytest.approx(3.674624)


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 bytes"), (999, "999 bytes"), (16_060_522_496, "16.1 GB"), (1000, "1 kB")]
)
def test_bytes_are_told_in_a_unit(number: int, words: str) -> None:
    assert in_bytes(number) == words


def test_the_type_of_a_run_is_the_folder_s(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(str(folder)) == 0
    assert "as float32" in capsys.readouterr().out
    LlamaForCausalLM.from_pretrained(folder, dtype=torch.float16).save_pretrained(folder)
    assert inspect(str(folder)) == 0
    assert "as float16" in capsys.readouterr().out
