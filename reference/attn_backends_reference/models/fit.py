"""The last part of loading any draft: it must fit its target, and gets its target's dtype and device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from attn_backends.errors import CheckpointError
from attn_backends_reference.models.decoder import TargetModel

Draft = TypeVar("Draft", bound=nn.Module)


def check_fit(path: Path, given: Mapping[str, object], needed: Mapping[str, object]) -> None:
    """Raises `CheckpointError` unless what a draft is made for is the target's: values by keys of config.json."""
    other = [key for key, value in given.items() if value != needed[key]]
    if other:
        have, need = (", ".join(f"{key} {values[key]}" for key in other) for values in (given, needed))
        raise CheckpointError(
            f"the draft in {path} does not fit the target: its config.json says {have}; the target has {need}"
        )


def cast(draft: Draft, target: TargetModel) -> Draft:
    """The draft in its target's dtype and on its device."""
    for parameter in draft.parameters():  # the rotary frequencies are buffers, which stay float32
        parameter.data = parameter.data.to(target.dtype)
    return draft.to(target.device)


def check_shared(path: Path, given: Mapping[str, Tensor], shared: Mapping[str, Tensor], target: TargetModel) -> None:
    """Raises `CheckpointError` for tensors that a draft shares with its target, if they are there and other ones."""
    other = [
        name
        for name in given.keys() & shared.keys()
        if not torch.equal(given[name].to(target.device, target.dtype), shared[name])
    ]
    if other:
        raise CheckpointError(
            f"{path} has an embedding or output head which is not the target's: {', '.join(sorted(other))}. MTP "
            f"modules share both with their target; load the target of the same checkpoint"
        )
