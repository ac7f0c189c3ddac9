"""docs/models.md: its tables have the keys, defaults and values of the option classes, and its file is taken."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic.fields import FieldInfo

from attn_backends.config.toml_options import Options, validated
from attn_backends_reference.models.families import served_families
from attn_backends_reference.models.folders import ROPE_TYPES
from attn_backends_reference.models.head_keys import BLOCK_DRAFTS
from attn_backends_reference.run_options import EagleOptions, ModelOptions, PhaseNames, RunOptions, RuntimeOptions
from tests.head_catalogue import FORMATS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "models.md").read_text()
TABLES: dict[str, type[Options]] = {
    "`backend`": PhaseNames,
    "`[model]`": ModelOptions,
    "`[eagle]`": EagleOptions,
    "`[runtime]`": RuntimeOptions,
}


def rows(heading: str) -> list[list[str]]:
    """The rows of the table behind a heading, without its head."""
    _, _, behind = PAGE.partition(f"\n### {heading}")
    table = re.search(r"(?:^\|.*\n)+", behind, flags=re.MULTILINE)
    assert table is not None
    return [re.split(r"(?<!\\)\|", line)[1:-1] for line in table[0].splitlines()[2:]]


def default_of(field: FieldInfo) -> str:
    """A field's default as the page writes it."""
    if field.is_required():
        return "required"
    return (
        "none"
        if field.default is None
        else f'`"{field.default}"`'
        if isinstance(field.default, str)
        else str(field.default)
    )


def literals(annotation: Any) -> set[str]:
    """The words that a value may be."""
    inside = get_args(annotation)
    return {each for each in inside if isinstance(each, str)}.union(*map(literals, inside), set())


@pytest.mark.smoke
@pytest.mark.parametrize("heading", TABLES)
def test_a_table_has_the_keys_of_its_class(heading: str) -> None:
    fields = TABLES[heading].model_fields
    given = {key.strip(" `"): (default.strip(), meaning) for key, default, meaning in rows(heading)}
    assert list(given) == list(fields)
    assert {key: default for key, (default, _) in given.items()} == {key: default_of(fields[key]) for key in fields}
    for key, field in fields.items():
        meaning = given[key][1]
        assert {word for word in literals(field.annotation) if f'`"{word}"`' not in meaning} == set(), key


def test_every_table_of_a_file_has_a_heading() -> None:
    headings = re.findall(r"^### `\[?(\w+)\]?`", PAGE, flags=re.MULTILINE)
    assert sorted(headings) == sorted(RunOptions.model_fields)


def test_the_file_is_one_that_is_taken() -> None:
    text, *_ = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    run = validated(RunOptions, tomllib.loads(text), Path("llama.toml"))
    assert set(RunOptions.model_fields) == run.model_fields_set
    assert run.model is not None
    assert run.runtime.max_context <= (run.model.draft_positions or 0) - 4


def test_the_table_of_drafts_has_every_kind_and_names_tests() -> None:
    lines = PAGE.partition("\n## Drafts\n")[2].partition("\n## ")[0].splitlines()
    table = [line.split("|")[1:-1] for line in lines if line.startswith("|")][2:]
    files = {file for row in table for file in re.findall("`(tests/.*?)`", row[4])}
    assert {file for file in files if not (ROOT / file).is_file()} == set()
    refused = {row[0].strip().lower().replace("-", "") for row in table if " no: " in row[2]}
    assert refused == {kind for kind, missing in BLOCK_DRAFTS.items() if missing}
    assert "fifteen" in table[0][1]
    assert len(FORMATS) == 15


def test_every_family_is_named() -> None:
    targets = PAGE.partition("\n## Targets\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+ForCausalLM)`", targets))
    assert named == {family.architecture for family in served_families()}
    assert {kind for kind in ROPE_TYPES if f"`{kind}`" not in PAGE} == set()
