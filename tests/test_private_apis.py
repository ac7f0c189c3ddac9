"""The list of what we use of other packages without their promise (`docs/private-apis.md`) is whole and holds here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.private_names import OURS, defined, foreign, is_private, read_of

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "private-apis.md"
HERE, INSTALLED = "here", "where installed"
NEEDED = {"torch", "triton", "transformers", "huggingface_hub"}  # every test run has them

pytestmark = pytest.mark.smoke


class Use(NamedTuple):
    """A row of the list."""

    module: str
    names: list[str]
    where: list[str]
    why: str
    when_gone: str
    probe: str


def rows() -> Iterator[Use]:
    """The rows of the page, in order."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            module, names, where, why, when_gone, probe = line.strip("| ").split(" | ")
            ticked = partial(re.findall, "`([^`]+)`")
            yield Use(module.strip("`"), ticked(names), ticked(where), why, when_gone, probe.strip("`"))


USES = list(rows())
LOOKED_AT = [(use, name) for use in USES if use.probe in (HERE, INSTALLED) for name in use.names]


@cache
def models() -> list[torch.nn.Module]:
    """transformers' models of our three targets, without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folders = sorted((ROOT / "reference" / "attn_backends_reference" / "models" / "checkpoints").glob("*/target"))
    with torch.device("meta"):
        return [AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)) for folder in folders]


def instances(class_: type) -> list[Any]:
    """Objects of a class: the modules of our models that are, else one that it makes of nothing."""
    if issubclass(class_, torch.nn.Module):
        return [module for model in models() for module in model.modules() if type(module) is class_]
    return [torch.empty(1).untyped_storage() if class_ is torch.UntypedStorage else class_()]


def takes(function: Any, name: str) -> bool:
    """Whether a function has a parameter, or takes any."""
    parameters = signature(function).parameters
    return name in parameters or any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())


def is_there(module: str, name: str) -> bool:
    """Whether a name of the list is: a path, in which `A()` stands for any instance, or a function's parameter."""
    path, _, parameter = name.removesuffix(")").partition("(") if not re.search(r"\(\)", name) else (name, "", "")
    try:
        found = [import_module(module)]
    except ImportError:
        return False
    for part in path.split("."):
        found = [getattr(each, part.removesuffix("()")) for each in found if hasattr(each, part.removesuffix("()"))]
        if part.endswith("()"):
            found = [instance for class_ in found for instance in instances(class_)]
    return any(not parameter or takes(each, parameter) for each in found)


def in_words(use: Use, name: str) -> str:
    """What to tell of a name that is gone."""
    return (
        f"{use.module} has no {name} any more. We use it in {', '.join(use.where)}: {use.why}. "
        f"Without it: {use.when_gone}. Mend the use and docs/{PAGE.name}, or bound the version in pyproject.toml."
    )


@pytest.mark.parametrize(
    ("use", "name"),
    [(use, name) for use, name in LOOKED_AT if find_spec(use.module.split(".")[0])],
    ids=lambda value: value if isinstance(value, str) else value.module,
)
def test_what_we_use_is_there(use: Use, name: str) -> None:
    assert is_there(use.module, name), in_words(use, name)


def test_a_name_that_is_gone_is_told_in_words() -> None:
    use = next(use for use in USES if "UntypedStorage()._cdata" in use.names)
    for name in ("UntypedStorage()._gone", "gone", "empty_like.gone", "set_num_threads.gone", "save(gone)"):
        assert not is_there("torch", name)
        assert f"torch has no {name} any more. We use it in attn_backends/graphs.py" in in_words(use, name)
    assert not is_there("torch.gone", "x")


def test_every_row_has_its_reasons_and_a_probe() -> None:
    assert len(USES) > 20
    for use in USES:
        assert all((use.names, use.where, use.why, use.when_gone)), use
        text = "".join((ROOT / file).read_text() for file in use.where)
        last = {re.findall(r"\w+", name)[-1] for name in use.names}
        assert {name for name in last if name not in text} == set(), f"{use.where} use it no more"
        if use.probe in (HERE, INSTALLED):
            assert (use.module.split(".")[0] in NEEDED) == (use.probe == HERE), use
        else:
            file, _, test = use.probe.partition("::")
            assert f"def {test}" in (ROOT / file).read_text()


def sources() -> dict[Path, ast.Module]:
    """Our packages' source files."""
    return {
        path: ast.parse(path.read_text()) for folder in OURS.values() for path in sorted((ROOT / folder).rglob("*.py"))
    }


def test_no_private_name_is_missing_from_the_list() -> None:
    trees = sources()
    ours, listed = defined(trees.values()), set()
    for use in USES:
        listed |= {part for name in (use.module, *use.names) for part in re.findall(r"\w+", name)}
    unlisted = {
        (path.relative_to(ROOT).as_posix(), name)
        for path, tree in trees.items()
        for name in foreign(tree, ours)
        if name not in listed
    }
    assert unlisted == set(), "list them in docs/private-apis.md, or do without them"


def test_what_the_plug_in_reads_of_vllms_configuration_is_on_the_list() -> None:
    """Public names, which vLLM changes from release to release."""
    found = {}
    for path in sorted((ROOT / "attn_backends" / "engines" / "vllm").glob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        rows_of = [use for use in USES if use.module.startswith("vllm") and file in use.where]
        listed = {part for use in rows_of for name in use.names for part in re.findall(r"\w+", name)}
        read = set(read_of(ast.parse(path.read_text()), {"config", "vllm_config"}))
        assert read - listed == set(), f"list them in docs/private-apis.md, with {file}"
        found[path.name] = len(read)
    assert {name for name, number in found.items() if number} == {"builder.py", "refusals.py"}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("config.a.b", {"a", "b"}),
        ("one, two = config.a, other.b\none.c\ntwo.d", {"a", "c"}),
        ("one = config.a\ntwo = one.b\ntwo.c()", {"a", "b", "c"}),
        ("getattr(config.a, 'b')", {"a", "b"}),
        ("getattr(config.a, f'{b}_c')", {"a", "getattr(config.a, f'{b}_c')"}),
        ("other.a, f(config), f(config).a", set()),
    ],
)
def test_what_is_read_of_an_object_is_seen(source: str, found: set[str]) -> None:
    assert set(read_of(ast.parse(source), {"config"})) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from torch._dynamo import mark", {"_dynamo"}),
        ("import torch._inductor.config", {"_inductor"}),
        ("from triton.runtime import _kept", {"_kept"}),
        ("config._private = 1", {"_private"}),
        ("load('flashinfer.jit:_Proxy.plan')", {"_Proxy"}),
        ("load(f'{KIT}:_configure')", {"_configure"}),
        ("self._ours = 1\nother._ours", set()),
        ("x.__class__, x.public, point._replace(x=1)", set()),
        ("from attn_backends._room import _thing", set()),
    ],
)
def test_a_private_name_of_another_package_is_seen(source: str, found: set[str]) -> None:
    tree = ast.parse(source)
    assert set(foreign(tree, defined([tree]))) == found
    assert all(map(is_private, found))
