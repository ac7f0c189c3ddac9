"""Every attribute that our models read of transformers' modules is in docs/private-apis.md, underscore or not."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attn_backends_reference.models import DraftModel, TargetModel, load_draft, load_target
from tests import reference_models as rm
from tests.head_catalogue import FORMATS
from tests.head_formats import write
from tests.head_runs import target_of
from tests.test_private_apis import USES

PROMISED = {*dir(PreTrainedModel), "config"}
"""What transformers documents of its models, and torch of modules."""
EMBEDDED = {"gqa": ["gqa", "gqa-eagle3"], "mla": ["mla", "mla-mtp"], "v4": ["v4"]}
HEADS = ("SafeAILab EAGLE-1/2", "MLA", "speculators, Qwen3's layer")


class Echo:
    """Gives back queries, cut to the values' width; an `Attention` of any model."""

    def __init__(self, model: TargetModel | DraftModel) -> None:
        self.layers = model.layers

    def attend(self, layer_index: int, q: Tensor, *given: object) -> Tensor:
        return q[..., : self.layers[layer_index].v_head_dim].clone()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What files of our models read of transformers' modules, as `Class.attribute`, from now on."""
    found = set[str]()

    def spy(module: nn.Module, name: str) -> Any:
        kind, reader = type(module), sys._getframe(1).f_code.co_filename
        if kind.__module__.startswith("transformers.") and "attn_backends_reference" in reader and name not in PROMISED:
            found.add(f"{kind.__name__}.{name}")
        return object.__getattribute__(module, name)

    monkeypatch.setattr(nn.Module, "__getattribute__", spy, raising=False)
    return found


def listed() -> set[str]:
    """The names that the list has of transformers' modules, and every part of a path to one."""
    names = [name for use in USES if use.module.startswith("transformers") for name in use.names]
    return {part for name in names for part in re.findall(r"\w+", name)}


@torch.no_grad()
def run(model: TargetModel | DraftModel) -> None:
    """A forward of five rows."""
    tokens = torch.arange(5)
    if isinstance(model, TargetModel):
        model.logits(model.tapped((0,)).forward_features(tokens, tokens, Echo(model))[0])
        return
    hidden = model.fuse(torch.zeros(5, model.feature_size, dtype=model.dtype))
    model.logits(model.forward(tokens, hidden, tokens, Echo(model)))


def test_what_is_read_of_transformers_modules_is_listed(read: set[str], tmp_path: Path) -> None:
    for name, drafts in EMBEDDED.items():
        target = load_target(name, torch.float32)
        for model in (target, *(load_draft(draft, target) for draft in drafts)):
            run(model)
    for name in HEADS:
        write(FORMATS[name], tmp_path / name.replace("/", ""))
        run(load_draft(tmp_path / name.replace("/", ""), target_of(FORMATS[name])))
    for name in ("mla_v2", "gpt_oss"):
        run(rm.served_target(name, rm.tiny_target(name)))
    assert len(read) > 40, read
    unlisted = {each for each in read if each.partition(".")[2] not in listed()}
    assert unlisted == set(), "list them in docs/private-apis.md, or do without them"
