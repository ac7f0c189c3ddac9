"""Targets load from folders as they are published, compute what transformers' own do, and ignore no key."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from attn_backends_reference.models import load_target
from attn_backends_reference.models.folders import SAME_MODELS
from tests import reference_models as rm
from tests.head_runs import BUDGET
from tests.published_targets import TARGETS, write
from tests.test_target_families import DenseAttention

TEXT = rm.random_tokens((40,))[0]
"""Longer than the windows and the original lengths of the rotary embeddings."""
SAYS_NOTHING = {
    *("attention_dropout", "aux_loss_alpha", "initializer_range", "output_router_logits", "router_aux_loss_coef"),
    *("seq_aux", "transformers_version", "use_cache", "auto_map", "pretraining_tp", "ep_size"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initial_context_length", "num_nextn_predict_layers"),
    *("torch_dtype", "modules_to_not_convert"),
}
"""Of training, of texts, of engines, and of what is stored."""
OF_LATENTS = ("num_key_value_heads",)
"""What latents, which all heads share, do not have."""


def plain_model(folder: Path) -> PreTrainedModel:
    """transformers' own model of a folder, float32; of MXFP4 what transformers makes of it."""
    tensors = load_file(folder / "model.safetensors")
    for weight in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        tensors[weight] = convert_moe_packed_tensors(tensors.pop(f"{weight}_blocks"), tensors.pop(f"{weight}_scales"))
    fields = json.loads((folder / "config.json").read_text())
    fields["model_type"] = SAME_MODELS.get(fields["model_type"], fields["model_type"])
    left = {key: value for key, value in fields.items() if key not in ("auto_map", "quantization_config")}
    with TemporaryDirectory() as twin:
        (Path(twin) / "config.json").write_text(json.dumps(left))
        save_file(tensors, Path(twin) / "model.safetensors", metadata={"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32, attn_implementation="eager")
    model.set_experts_implementation("eager")
    return model.eval().requires_grad_(False)


def logits_of(folder: Path) -> tuple[Tensor, int]:
    """Scores of `TEXT`, and positions, of a folder's target."""
    target = load_target(folder, torch.float32)
    hidden = target.forward(TEXT, torch.arange(len(TEXT)), DenseAttention(target.layers))
    return target.logits(hidden), target.max_positions


class Right(NamedTuple):
    """A folder, its target's scores and positions."""

    folder: Path
    logits: Tensor
    positions: int


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Right]:
    """Targets by name, each made once."""

    @cache
    def of(name: str) -> Right:
        folder = tmp_path_factory.mktemp(name)
        write(TARGETS[name], folder)
        return Right(folder, *logits_of(folder))

    return of


@pytest.mark.parametrize("name", TARGETS)
def test_logits_are_transformers_own(name: str, published: Callable[[str], Right]) -> None:
    right, errors = published(name), rm.Errors()
    errors.add(right.logits, *rm.PlainTarget(plain_model(right.folder)).logits(TEXT))
    errors.check()


def keys_of(config: Mapping[str, Any], *inside: str) -> Iterator[tuple[str, ...]]:
    """The paths of all values of a configuration."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from keys_of(value, *inside, key)
        else:
            yield *inside, key


def idle(name: str) -> set[str]:
    """Keys that a target's configuration may have any value of."""
    of_latents = OF_LATENTS if "kv_lora_rank" in TARGETS[name].config else ()
    return SAYS_NOTHING | {*TARGETS[name].idle, *of_latents}


def another(key: str, value: Any) -> Any:
    """Another value that a key may have."""
    if key in ("architectures", "mlp_only_layers"):
        return {"architectures": ["OddForCausalLM"], "mlp_only_layers": [0]}[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return value[::-1]
    if value is None:
        return {"rope_type": "linear", "factor": 2.0} if key == "rope_scaling" else 5
    return "odd" if isinstance(value, str) else value + 1 if isinstance(value, int) and value < 30 else 2 * value + 1


CASES = [
    (name, path) for name, target in TARGETS.items() for path in keys_of(target.config) if idle(name).isdisjoint(path)
]


@pytest.mark.parametrize(
    ("name", "path"), CASES, ids=lambda value: value if isinstance(value, str) else ".".join(value)
)
@pytest.mark.one_in(3)
def test_a_key_that_is_ignored_is_seen(
    name: str, path: tuple[str, ...], published: Callable[[str], Right], tmp_path: Path
) -> None:
    """With another value a target is refused, or fails, or computes something else."""
    right = published(name)
    config = copy.deepcopy(dict(TARGETS[name].config))
    table = config
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = another(path[-1], table[path[-1]])
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(right.folder / "model.safetensors")
    try:
        logits, positions = logits_of(tmp_path)
    except Exception:  # of any kind: it is not ignored
        return
    assert positions != right.positions or (logits - right.logits).abs().max() > 100 * BUDGET
