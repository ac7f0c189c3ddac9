"""What exporters write and engines read of draft heads, taken from their wheels: writes ``tests/wheel_lists.json``.

``pip download --no-deps -d FOLDER speculators specforge sglang vllm``, then ``python -m tests.wheel_lists FOLDER``.
Nothing of the wheels is installed. The exporters' own classes are built of the configurations of `head_catalogue`,
without memory and with stand-ins for packages that this machine lacks; their tensors are listed. The engines' readers
need a GPU's packages, so their source is parsed: the keys that they ask a configuration for, the names that they
replace, and the modules and parameters that they set up. `tests/test_wheel_lists.py` compares both with ours.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import nn
from transformers import LlamaConfig, Qwen3Config

from tests.block_formats import BLOCKS
from tests.head_catalogue import FORMATS

LISTS = Path(__file__).parent / "wheel_lists.json"
READERS = {
    "sglang": (
        *("sglang/srt/models/llama_eagle3.py", "sglang/srt/models/kimi_k25_eagle3.py"),
        *("sglang/srt/models/deepseek_v4_nextn.py", "sglang/srt/models/dflash.py"),
        "sglang/srt/speculative/dflash_utils.py",
    ),
    "vllm": (
        *("vllm/model_executor/models/llama_eagle3.py", "vllm/model_executor/models/deepseek_eagle3.py"),
        *("vllm/models/deepseek_v4/nvidia/mtp.py", "vllm/transformers_utils/configs/speculators/algos.py"),
        "vllm/model_executor/models/qwen3_dflash.py",
    ),
}
"""The files that read heads and modules, by package."""
CONFIGS = ("config", "config_", "self.config", "eagle_config", "config_dict", "text_config", "drafter_config")
CONFIGS += ("dflash_cfg", "dflash_config", "draft_hf_config", "draft_text_config")
"""What readers call a configuration."""
RENAMES = ("legacy_name_map", "orig_to_new_substr", "WEIGHT_NAME_REMAPPING")
"""What they call names of tensors that they replace."""


class StandIns(MetaPathFinder, Loader):
    """Makes every module of packages that are named."""

    def __init__(self) -> None:
        self.packages = set[str]()

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Of a module of one of them."""
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in self.packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """One that has everything."""
        made: Any = MagicMock(name=spec.name)
        made.__path__, made.__spec__ = [], spec
        return made

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def imported(name: str, absent: StandIns) -> Any:
    """A module of an unpacked wheel, with stand-ins for what it needs and this machine lacks."""
    package = name.split(".")[0]
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = str(error.name).split(".")[0]
            if missing in absent.packages or missing == package:
                raise
            absent.packages.add(missing)
            for each in [each for each in sys.modules if each.split(".")[0] == package]:
                del sys.modules[each]


def exported(absent: StandIns) -> Iterator[tuple[str, str, nn.Module]]:
    """The formats of the exporters, their classes, and a module of each."""
    specforge = imported("specforge.modeling.draft.llama3_eagle", absent)
    core = imported("speculators.models.eagle3.core", absent)
    config = imported("speculators.models.eagle3.config", absent)
    for name, form in FORMATS.items():
        with torch.device("meta"):
            if form.catalogue == "SpecForge":
                yield name, "LlamaForCausalLMEagle3", specforge.LlamaForCausalLMEagle3(LlamaConfig(**form.config))
            elif form.catalogue == "speculators":
                made = config.Eagle3SpeculatorConfig.model_validate(dict(form.config))
                yield name, "Eagle3DraftModel", core.Eagle3DraftModel(made)
    specforge = imported("specforge.modeling.draft.dflash", absent)
    core = imported("speculators.models.dflash.core", absent)
    config = imported("speculators.models.dflash.config", absent)
    for name, form in BLOCKS.items():
        with torch.device("meta"):
            if form.catalogue == "speculators":
                made = config.DFlashSpeculatorConfig.model_validate(dict(form.config))
                yield name, "DFlashDraftModel", core.DFlashDraftModel(made)
            else:
                yield name, "DFlashDraftModel", specforge.DFlashDraftModel(Qwen3Config(**form.config))


def tensors_of(module: nn.Module) -> dict[str, list[int]]:
    """Those that it saves, and their shapes."""
    unsaved = getattr(module, "_keys_to_ignore_on_save", None) or ()
    return {name: list(x.shape) for name, x in sorted(module.state_dict().items()) if name not in unsaved}


def read_by(source: str) -> dict[str, Any]:
    """What a reader's source says of keys, names and modules."""
    tree = ast.parse(source)
    keys, modules, renames = set[str](), set[str](), dict[str, str]()
    for node in ast.walk(tree):
        keys |= set(_keys(node))
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            words = [ast.unparse(target) for target in targets]
            modules |= {word.removeprefix("self.") for word in words if _is_module(word, node.value)}
            renames |= _renames(words, node.value)
        elif isinstance(node, ast.keyword):
            renames |= _renames([str(node.arg)], node.value)
    return {"keys": sorted(keys), "modules": sorted(modules), "renames": renames}


def _keys(node: ast.AST) -> Iterator[str]:
    """The key that an expression asks a configuration for."""
    match node:
        case ast.Attribute(value=of, attr=key, ctx=ast.Load()) if ast.unparse(of) in CONFIGS and key != "get":
            yield key
        case ast.Call(
            func=ast.Name(id="getattr" | "hasattr" | "_cfg_get"), args=[of, ast.Constant(value=str(key)), *_]
        ):
            yield from [key] * (ast.unparse(of) in CONFIGS)
        case ast.Call(func=ast.Attribute(value=of, attr="get"), args=[ast.Constant(value=str(key)), *_]):
            yield from [key] * (ast.unparse(of) in CONFIGS)
        case ast.Subscript(value=of, slice=ast.Constant(value=str(key)), ctx=ast.Load()):
            yield from [key] * (ast.unparse(of) in CONFIGS)


def _is_module(target: str, value: ast.expr | None) -> bool:
    """Whether an assignment sets up a module or parameter: it calls what is named as a class."""
    if not target.startswith("self.") or target.count(".") > 1 or not isinstance(value, ast.Call):
        return False
    return ast.unparse(value.func).split(".")[-1][:1].isupper()


def _renames(words: list[str], value: ast.expr | None) -> dict[str, str]:
    if not any(word in RENAMES for word in words) or not isinstance(value, ast.Dict):
        return {}
    pairs = zip(value.keys, value.values, strict=True)
    return {
        str(old.value): str(new.value)
        for old, new in pairs
        if isinstance(old, ast.Constant) and isinstance(new, ast.Constant) and isinstance(new.value, str)
    }


def lists_of(folder: Path) -> Mapping[str, Any]:
    """The lists of the wheels in a folder."""
    wheels = {wheel.name.split("-")[0]: wheel for wheel in sorted(folder.glob("*.whl"))}
    versions = {package: wheel.name.split("-")[1] for package, wheel in wheels.items()}
    absent, readers = StandIns(), {}
    sys.meta_path.append(absent)
    with TemporaryDirectory() as unpacked:
        sys.path.insert(0, unpacked)
        for package in ("specforge", "speculators"):
            zipfile.ZipFile(wheels[package]).extractall(unpacked)
        exporters = {name: {"class": of, "tensors": tensors_of(module)} for name, of, module in exported(absent)}
        for package, files in READERS.items():
            with zipfile.ZipFile(wheels[package]) as wheel:
                readers |= {file: read_by(wheel.read(file).decode()) for file in files}
    return {"versions": versions, "exporters": exporters, "readers": readers}


if __name__ == "__main__":
    text = json.dumps(lists_of(Path(sys.argv[1])), indent=0, separators=(",", ":"))
    LISTS.write_text(re.sub(r"\[[^][{}]*\]", lambda found: "".join(found[0].split()), text) + "\n")
