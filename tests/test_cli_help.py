"""What every command has: a help with an example that is understood, exit codes, and JSON where it reports."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import replace

import pytest

from attn_backends.cli import EXIT_CODES, HELP, find, main, run_command
from attn_backends.errors import ConfigError
from attn_backends.results import read
from benchmarks import __main__ as benchmarks

COMMANDS = {f"attn-backends {name}": find(name) for name in sorted(HELP)} | {"python -m benchmarks": benchmarks.COMMAND}


@pytest.mark.parametrize("program", COMMANDS)
def test_the_help_has_an_example_that_is_understood_and_the_exit_codes(program, capsys):
    command = COMMANDS[program]
    with pytest.raises(SystemExit):
        run_command(program, command, ["--help"])
    shown = capsys.readouterr().out
    assert f"\nexample:\n  {command.example}\n" in shown
    assert EXIT_CODES in " ".join(shown.split())
    parser = argparse.ArgumentParser(exit_on_error=False)
    command.add_arguments(parser)
    assert command.example.startswith(f"{program} ")
    parser.parse_args(shlex.split(command.example.removeprefix(program)))


@pytest.mark.parametrize("program", COMMANDS)
def test_words_that_are_not_understood_are_one_line_that_leads_to_the_help(program):
    with pytest.raises(ConfigError, match=f"--nope; {program} --help shows what there is, with an example$"):
        run_command(program, replace(COMMANDS[program], add_arguments=lambda parser: None), ["--nope"])


@pytest.mark.parametrize("program", COMMANDS)
def test_every_command_reports_as_json(program):
    parser = argparse.ArgumentParser()
    COMMANDS[program].add_arguments(parser)
    assert "--json" in parser.format_help()


def test_the_help_lists_every_command(capsys):
    for words in (["--help"], []):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"  {name:12} {text}" in shown for name, text in HELP.items())


def test_inspect_prints_json(capsys):
    assert main(["inspect", "gqa", "--draft", "gqa-eagle3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["architecture"] == "LlamaForCausalLM"
    layer = {"layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64}
    assert found["attention"] == [layer | {"window": None, "sinks": False}]
    assert found["weights"]["elements"] == 1_837_312
    assert found["cache"]["max_context"] == 2044
    assert found["refused"] == []


def test_generate_writes_each_text_as_it_ends(tmp_path, capsys, monkeypatch):
    path, counts = tmp_path / "texts.json", []
    from attn_backends_reference.cli import generate

    plain = generate._as_row

    def watched(prompt, request):
        counts.append(len(read(path).rows))
        return plain(prompt, request)

    monkeypatch.setattr(generate, "_as_row", watched)
    words = ["generate", "--prompt", "import ", "--prompt", "def ", "--max-new-tokens", "4", "--json", str(path)]
    assert main(words) == 0
    assert counts == [0, 1]
    written = read(path)
    assert written.is_complete
    assert sorted(row["prompt"] for row in written.rows) == ["def ", "import "]
    assert all(len(row["tokens"]) == 4 and row["finish"] == "length" and row["cycles"] > 0 for row in written.rows)
    assert all(row["prompt"] + row["text"] in capsys.readouterr().out for row in written.rows[:1])
