"""Names to backend classes: built in, by entry point, by module:Class, and what is refused."""

from __future__ import annotations

import json
import sys
from importlib.metadata import EntryPoint

import pytest

from attn_backends import AttentionBackend, BackendUnavailableError, get_backend, list_backends, registry
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.cli import main

pytestmark = pytest.mark.smoke


class Unfinished(AttentionBackend):
    """A backend without its parts."""


def register(monkeypatch, *targets):
    """Pretend that other packages register (name, value) pairs."""
    entries = [EntryPoint(name, value, registry.ENTRY_POINT_GROUP) for name, value in targets]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)


def test_every_built_in_backend_loads_under_its_own_name():
    for name in registry.BUILT_IN:
        assert get_backend(name).name == name


def test_an_unknown_name_lists_the_known_and_guesses():
    with pytest.raises(BackendUnavailableError, match=r"there are flashinfer_mla, .*Did you mean 'trtllm_mla'\?"):
        get_backend("trtlm_mla")


def test_a_class_is_found_by_module_and_name():
    assert get_backend("attn_backends.backends.fa3:FA3Backend") is FA3Backend


def test_an_entry_point_is_known_by_name_and_loaded_at_lookup(monkeypatch):
    mine, missing = ("mine", "attn_backends.backends.fa3:FA3Backend"), ("missing", "no_such_package:Backend")
    register(monkeypatch, mine, missing)
    assert list(list_backends()) == [*registry.BUILT_IN, "mine", "missing"]
    assert get_backend("mine") is FA3Backend
    with pytest.raises(
        BackendUnavailableError, match=r"'no_such_package' failed: ModuleNotFoundError.*Install its pack"
    ):
        get_backend("missing")


def test_a_name_of_two_packages_is_refused_when_it_is_asked_for_and_no_other(monkeypatch):
    register(monkeypatch, ("fa3", "my_package:Backend"), ("mine", "attn_backends.backends.fa3:FA3Backend"))
    with pytest.raises(BackendUnavailableError, match=r"both attn_backends\.backends\.fa3:FA3Backend and my_package:B"):
        get_backend("fa3")
    assert get_backend("reference").name == "reference"
    assert get_backend("mine") is FA3Backend
    assert get_backend("attn_backends.backends.fa3:FA3Backend") is FA3Backend
    assert list_backends()["fa3"] == "attn_backends.backends.fa3:FA3Backend and my_package:Backend"


def test_list_and_info_show_a_name_of_two_packages(monkeypatch, capsys):
    register(monkeypatch, ("fa3", "my_package:Backend"))
    assert main(["list", "--json"]) == 0
    shown = {each["name"]: each for each in json.loads(capsys.readouterr().out)["backends"]}
    assert "fa3:FA3Backend and my_package:Backend" in shown["fa3"]["reason"]
    assert all("kernels" in each for name, each in shown.items() if name != "fa3")
    assert main(["info", "reference"]) == 0
    assert main(["info", "fa3"]) == 2
    assert "Uninstall one of the packages" in capsys.readouterr().err


def test_the_same_entry_point_seen_twice_is_one(monkeypatch):
    register(monkeypatch, ("mine", "my_package:Backend"), ("mine", "my_package:Backend"))
    assert list_backends()["mine"] == "my_package:Backend"


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("json:dumps", "json:dumps names no subclass .*json has none"),
        ("attn_backends.backends.fa3:FA3Backnd", r"attn_backends\.backends\.fa3 has FA3Backend\."),
        ("json:Missing", "json:Missing names no subclass"),
        ("json:JSONDecoder", "json:JSONDecoder names no subclass"),
        ("tests.test_registry:Unfinished", "does not define buffers, plans, write, name, formats, kernels"),
        (":Backend", "importing '' failed"),
        ("tests.raises_at_import:Backend", "importing 'tests.raises_at_import' failed: RuntimeError: no driver"),
    ],
)
def test_what_is_no_backend_is_refused(target, reason):
    with pytest.raises(BackendUnavailableError, match=reason):
        get_backend(target)


def test_a_class_of_the_working_folder_is_found_there_and_nothing_else(tmp_path, monkeypatch):
    """The folder is on Python's path while the name is resolved: what else lies in it hides or fakes no package."""
    (tmp_path / "of_this_folder.py").write_text(
        "from attn_backends.backends.fa3 import FA3Backend\nclass Mine(FA3Backend):\n    name = 'mine'\n"
    )
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert get_backend("of_this_folder:Mine").name == "mine"
    with pytest.raises(BackendUnavailableError, match="or run from the folder that holds it"):
        get_backend("of_no_folder:Mine")
    assert sys.path == before


def test_a_folder_that_was_on_the_path_stays_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.path)
    get_backend("attn_backends.backends.fa3:FA3Backend")
    assert sys.path == before
