"""The code of README and the documents runs as it stands: Python, commands, TOML. `tests/doc_blocks.py` finds it."""

from __future__ import annotations

import shlex
import sys
import tomllib
from argparse import ArgumentParser
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from attn_backends import cli
from attn_backends.engines import vllm
from benchmarks import __main__ as benchmarks
from tests.commands import DEADLINE, run_module
from tests.doc_blocks import BLOCK, DOCUMENTS, MINUTES, ROOT, Snippet, snippets
from tests.doc_desk import environment, lay_out, words_of_module

CODE = [snippet for document in DOCUMENTS for snippet in snippets(document)]
HOUR = 3600  # seconds, for what takes minutes


def those(language: str, run: bool = True) -> list[Snippet]:
    return [snippet for snippet in CODE if snippet.language == language and (snippet.reason == "") is run]


@pytest.mark.smoke
@pytest.mark.parametrize("document", sorted({snippet.document for snippet in those("python")}), ids=str)
def test_the_python_blocks_of_a_document_run_one_after_the_other(document, monkeypatch):
    lines = [""] * len((ROOT / document).read_text().splitlines())
    for snippet in those("python"):
        if snippet.document == document:
            code = snippet.text.splitlines()
            lines[snippet.line - 1 : snippet.line - 1 + len(code)] = code
    module = ModuleType("document")
    monkeypatch.setitem(sys.modules, "document", module)  # where a dataclass looks for its module's names
    exec(compile("\n".join(lines) + "\n", ROOT / document, "exec", dont_inherit=True), vars(module))


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    """A copy of the example, in which the documents' commands find what they name."""
    folder = tmp_path_factory.mktemp("documents") / "desk"
    lay_out(folder)
    return folder


LONG = {  # commands that take longest, and what of them `make test` runs beside
    "attn-backends demo --backend fa3": "the demo of one prompt and one draft, `test_cli`",
    "attn-backends demo --backend my_package.my_mla:MyMLABackend": "the demo of another package's backend, `test_cli`",
    "attn-backends conformance seqmajor --quick": "most of the same cases, `test_pip_install`",
    'attn-backends generate --config eagle3-tree --prompt "import os"': "EAGLE-3 in `test_examples`",
    'attn-backends generate --config mtp --prompt "def main():"': "MTP in `test_examples`",
    'attn-backends generate --model gqa --draft gqa --prompt "import os"': "a chain in `test_examples`",
    'attn-backends generate --model gqa --draft gqa-eagle3 --prompt "import os"': "EAGLE-3 in `test_examples`",
    "pytest": "the workflow of the example, `test_third_party`, and what other cases pip installs, `test_pip_install`",
    "pytest --pyargs attn_backends.conformance --attn-backend seqmajor --attn-quick": "other cases, `test_out_of_tree`",
    'attn-backends generate --config tree --backend fa3 --prompt "import os"': "a tree in `test_examples`",
}
COMMANDS = sorted({snippet.text for snippet in those("sh")})
MINUTES_LONG = sorted({snippet.text for snippet in CODE if snippet.reason == MINUTES})


def test_the_longest_commands_are_commands_of_the_documents():
    assert LONG.keys() <= set(COMMANDS)


@pytest.mark.parametrize(
    "command",
    [
        *(pytest.param(each, marks=pytest.mark.full if each in LONG else ()) for each in COMMANDS),
        *(pytest.param(each, marks=pytest.mark.full) for each in MINUTES_LONG),
    ],
)
def test_a_command_of_the_documents_runs(command, desk, site):
    deadline = DEADLINE if command in COMMANDS else HOUR
    code, output = run_module(words_of_module(command), desk, environment(site), deadline)
    assert code == 0, output


@pytest.mark.parametrize("block", those("toml"), ids=str)
def test_the_toml_of_the_documents_is_toml(block):
    assert tomllib.loads(block.text)


def understood(command: cli.Command, words: list[str]) -> None:
    parser = ArgumentParser()
    command.add_arguments(parser)
    parser.parse_args(words)


class Understood(Exception):
    """The words were."""


def understood_by_module(module: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(parser: ArgumentParser, read=ArgumentParser.parse_args) -> None:
        read(parser)
        raise Understood

    main = f"{module}.__main__" if find_spec(module).submodule_search_locations else module
    monkeypatch.setattr(ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", [module, *words])
    with pytest.raises(Understood):
        import_module(main).main()


@pytest.mark.parametrize("snippet", [*those("sh", run=False), *those("python", run=False)], ids=str)
def test_what_is_not_run_is_at_least_understood(snippet, monkeypatch):
    if snippet.language == "python":
        compile(snippet.text, str(snippet), "exec")
        return
    match shlex.split(snippet.text):
        case ["attn-backends", name, *words]:
            understood(cli.find(name), words)
        case ["python", "-m", "benchmarks", *words]:
            understood(benchmarks.COMMAND, words)
        case ["python", "-m", module, *words]:
            understood_by_module(module, words, monkeypatch)
        case ["make", target, *_]:
            assert f"\n{target}:" in (ROOT / "Makefile").read_text()
        case ["vllm", "serve", *words]:
            assert words[words.index("--attention-backend") + 1] in vllm.NAMES
        case [program, *_]:
            assert program in ("pip", "pytest", "sglang")


def test_no_block_of_a_document_escapes():
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        assert 2 * len(BLOCK.findall(text)) == text.count("```"), document


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("```\nls\n```\n", "a block of ''"),
        ("<!-- not run: too slow -->\n```sh\nls\n```\n", "too slow"),
        ("<!-- not run: `make *` takes minutes -->\n```sh\nls\n```\n", r"`make \*` in front of the block names no"),
    ],
)
def test_a_wrong_block_is_named(block, message, tmp_path):
    (tmp_path / "page.md").write_text(block)
    with pytest.raises(ValueError, match=message):
        snippets(tmp_path / "page.md")
