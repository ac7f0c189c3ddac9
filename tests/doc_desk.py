"""The folder in which commands of the documents find what they name, and what `python` takes for a command."""

from __future__ import annotations

import os
import shlex
import shutil
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from attn_backends.conformance.cases import Case
from tests.doc_blocks import ROOT, Snippet

EXAMPLE = ROOT / "examples" / "out_of_tree_backend"
CHECKPOINTS = Path("reference/attn_backends_reference/models/checkpoints")
PUBLISHED = {"Llama-3.1-8B-Instruct": "gqa/target", "EAGLE3-LLaMA3.1-Instruct-8B": "gqa/eagle3"}  # and what stands in
OWN_BACKEND = """
from attn_backends.backends.flashinfer_mla import FlashInferMLABackend

class MyMLABackend(FlashInferMLABackend):
    name = "my_mla"
"""


def lay_out(folder: Path) -> None:
    """Write what commands that run on a CPU name: a copy of the example and some files."""
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "my_package").mkdir()
    (folder / "my_package" / "my_mla.py").write_text(OWN_BACKEND)
    shutil.copy(ROOT / "reference" / "configs" / "eagle" / "chain.toml", folder / "my.toml")
    (folder / "prompt.txt").write_text("import os\n")
    (folder / "case.json").write_text(Case("math.decode", kind="decode", lens=(5, 3)).to_json())


def lay_out_for_gpu(folder: Path) -> None:
    """The same, with a place for results, checkpoints to train on, stand-ins of published models, and entry points of
    packages that need not be installed.
    """
    lay_out(folder)
    (folder / "docs" / "results" / "h200").mkdir(parents=True)
    shutil.copytree(ROOT / CHECKPOINTS, folder / CHECKPOINTS)
    for name, checkpoint in PUBLISHED.items():
        shutil.copytree(ROOT / CHECKPOINTS / checkpoint, folder / name)
    write_tokenizer(folder / next(iter(PUBLISHED)))
    for project in (ROOT, ROOT / "reference", EXAMPLE):
        _write_entry_points(folder, tomllib.loads((project / "pyproject.toml").read_text())["project"])


def write_tokenizer(folder: Path) -> None:
    """Write one that knows no word, with a template of messages, into a model's folder."""
    words = Tokenizer(models.WordLevel({"<s>": 0, "<unk>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", chat_template=template).save_pretrained(folder)


def environment(folder: Path) -> dict[str, str]:
    """Our variables with a folder's modules and those of this tree first on the path."""
    path = [str(folder), str(ROOT), str(ROOT / "reference"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def arguments(snippet: Snippet) -> list[str]:
    """What `python` takes for a command or a block of Python."""
    return ["-c", snippet.text] if snippet.language == "python" else ["-m", *words_of_module(snippet.text)]


def words_of_module(command: str) -> Sequence[str]:
    """What `python -m` takes for a command."""
    match shlex.split(command):
        case ["attn-backends", *words]:
            return ["attn_backends.cli", *words]
        case ["pytest", *words]:
            return ["pytest", *words]
        case ["python", "-m", *words]:
            return words
    raise ValueError(f"a command of a document that no test knows how to run: {command}")


def _write_entry_points(folder: Path, project: dict) -> None:
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))
