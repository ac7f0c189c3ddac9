"""From a name to a backend class: the built-in ones, those of other packages, and `module:Class`.

Another package adds a backend by an entry point of the group `attn_backends.backends`; nothing of it is imported before
its name is looked up.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType

from attn_backends.backend import AttentionBackend
from attn_backends.errors import BackendUnavailableError

ENTRY_POINT_GROUP = "attn_backends.backends"

BUILT_IN = {
    "flashinfer_mla": "attn_backends.backends.flashinfer_mla:FlashInferMLABackend",
    "trtllm_mla": "attn_backends.backends.trtllm_mla:TrtllmMLABackend",
    "fa3": "attn_backends.backends.fa3:FA3Backend",
    "dsv4": "attn_backends.backends.dsv4:DSV4Backend",
    "reference": "attn_backends.backends.reference:ReferenceBackend",
}


def list_backends() -> dict[str, str]:
    """The `module:Class` of every known name, built-in ones first; imports none of them. A name that several packages
    gave has those of all, joined by "and", and `get_backend` refuses it.
    """
    return {name: " and ".join(targets) for name, targets in _targets().items()}


def get_backend(name: str) -> type[AttentionBackend]:
    """The class of a known name or of `module:Class`, whose module may lie in the working folder. Raises
    `BackendUnavailableError` for any other.
    """
    if ":" in name:
        with _working_folder_on_path():
            return _load(name, name)
    known = _targets()
    if name not in known:
        closest = get_close_matches(name, known, n=1)
        guess = f"Did you mean {closest[0]!r}? " if closest else ""
        raise BackendUnavailableError(
            f"backend {name!r}",
            [f"unknown name; there are {', '.join(known)}"],
            f"{guess}A class that has no name yet is given as module:Class.",
        )
    if len(known[name]) > 1:
        raise BackendUnavailableError(
            f"backend {name!r}",
            [f"the name stands for both {' and '.join(known[name])}"],
            "Uninstall one of the packages, or give the one that you mean as module:Class.",
        )
    return _load(name, known[name][0])


def _targets() -> dict[str, list[str]]:
    """The `module:Class` of every known name, several where packages gave the same name."""
    known = {name: [target] for name, target in BUILT_IN.items()}
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name):
        targets = known.setdefault(entry.name, [])
        if entry.value not in targets:
            targets.append(entry.value)
    return known


@contextmanager
def _working_folder_on_path() -> Iterator[None]:
    """The working folder's modules can be imported inside, after all others: commands do not look there, as
    `python -m` does. Not for longer, or its folders would pass for installed packages.
    """
    folder = os.getcwd()
    if folder in sys.path:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _load(name: str, target: str) -> type[AttentionBackend]:
    what = f"backend {name!r}"
    module_name, _, class_name = target.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:  # another package's module may raise anything
        reason = f"importing {module_name!r} failed: {type(error).__name__}: {error}"
        absent = isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
        hint = "Install its package, or run from the folder that holds it." if absent else ""
        raise BackendUnavailableError(what, [reason], hint) from error
    found = getattr(module, class_name, None)
    if not (inspect.isclass(found) and issubclass(found, AttentionBackend)):
        raise BackendUnavailableError(
            what,
            [f"{target} names no subclass of attn_backends.AttentionBackend"],
            f"{module_name} has {', '.join(_backends_of(module)) or 'none'}.",
        )
    missing = sorted(found.__abstractmethods__)
    missing += [attribute for attribute in ("name", "formats", "kernels") if not hasattr(found, attribute)]
    if missing:
        raise BackendUnavailableError(what, [f"{target} does not define {', '.join(missing)}"])
    return found


def _backends_of(module: ModuleType) -> list[str]:
    """The names of the backends in a module."""
    classes = [found for found in vars(module).values() if inspect.isclass(found)]
    return [each.__name__ for each in classes if issubclass(each, AttentionBackend) and each is not AttentionBackend]
