"""`inspect`: what a folder holds, what would run it here and in how much memory; no weights are loaded."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from attn_backends.backend import AttentionBackend
from attn_backends.cli import Command
from attn_backends.cli.consoles import output_console, progress
from attn_backends.kernels.device_memory import free_bytes
from attn_backends_reference.cli.options import add_run, add_runtime, choices_in_words, in_bytes, load_config
from attn_backends_reference.config import RunConfig
from attn_backends_reference.eagle.engine import Engine
from attn_backends_reference.models import EMBEDDED_DRAFTS, ByteTokenizer, TargetFolder, folders, open_target, stored
from attn_backends_reference.models.block import EMBEDDED_BLOCKS

TARGET_PHASES = ("prefill", "decode", "verify")
LAYER = ("layers", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "window", "sinks")
SIZES = ("hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings")


def run(args: argparse.Namespace) -> int:
    """Print it; 2 if something of it is refused."""
    console = output_console()
    with progress(f"reading what {args.model} says of itself", "folders"):
        found = open_target(args.model)
        config = load_config(args, args.config, args.backend)
        engine = Engine(config, found.empty(), (), ByteTokenizer())
        refused = [*_refusals(engine), *_too_much(engine, found)]
        kernels = choices_in_words(engine.backends, config.phases)
        described = _described(found, engine)
    if args.json:
        own = {"draft": [*_draft(config)], "notes": [*config.notes], "kernels": [*kernels], "refused": refused}
        console.print_json(json.dumps(described | own))
        return 2 if refused else 0
    lines = [*_in_words(described), *_draft(config), *config.notes, *kernels]
    for line in (*lines, *(f"refused: {reason}" for reason in refused)):
        console.print(line, markup=False, soft_wrap=True)
    return 2 if refused else 0


def _described(found: TargetFolder, engine: Engine) -> dict[str, Any]:
    """A target as JSON values; sizes in bytes."""
    model, config = engine.target, engine.config
    layers = Counter(
        (each.num_heads, each.num_kv_heads, each.head_dim, each.v_head_dim, each.window, each.sinks is not None)
        for each in model.layers
    )
    cache = model.cache_bytes(engine.backends.prefill, config.cache_dtype)
    tokens = engine.geometry.num_pages * engine.geometry.page_size
    return {
        "model": str(found.path),
        "architecture": found.family.architecture,
        **{name: getattr(model, name) for name in ("hidden_size", "vocab_size", "max_positions")},
        "attention": [dict(zip(LAYER, (number, *layer), strict=True)) for layer, number in layers.items()],
        "weights": {
            "elements": found.weights.num_elements,
            "bytes_in_files": found.weights.num_bytes,
            "dtypes": sorted({part.dtype for part in found.weights.parts}),
            "bytes_in_memory": found.num_bytes(config.dtype),
            "dtype": config.runtime.dtype,
        },
        "cache": {"bytes_a_token": cache // tokens, "bytes": cache}
        | {name: getattr(config.runtime, name) for name in ("max_bs", "max_context")},
    }


def _in_words(described: Mapping[str, Any]) -> Iterator[str]:
    """What is described, for a person."""
    attention, weights, cache = (described[name] for name in ("attention", "weights", "cache"))
    yield (
        f"{described['model']}: {described['architecture']}, {sum(each['layers'] for each in attention)} layers, "
        f"hidden size {described['hidden_size']:,}, vocabulary {described['vocab_size']:,}, "
        f"{described['max_positions']:,} positions"
    )
    for each in attention:
        sees = "all keys" if each["window"] is None else f"a window of {each['window']:,} keys"
        sees += " and sinks" if each["sinks"] else ""
        yield (
            f"attention of {each['layers']} layers: {each['num_heads']} heads over {each['num_kv_heads']}, of "
            f"{each['head_dim']} and {each['v_head_dim']}, over {sees}"
        )
    yield (
        f"weights: {weights['elements']:,}, {in_bytes(weights['bytes_in_files'])} in files "
        f"({', '.join(weights['dtypes'])}), {in_bytes(weights['bytes_in_memory'])} in memory as {weights['dtype']}"
    )
    yield (
        f"cache: {cache['bytes_a_token']:,} bytes a token, {in_bytes(cache['bytes'])} for {cache['max_bs']} requests "
        f"of {cache['max_context']:,} tokens"
    )


def _draft(config: RunConfig) -> Iterator[str]:
    """What a draft's folder says; whether it fits its target is found when it is loaded."""
    if config.model.draft is None:
        return
    path = folders.find(config.model.draft, EMBEDDED_DRAFTS | EMBEDDED_BLOCKS)
    fields, tensors = folders.read_fields(path / "config.json"), stored.stored_tensors(path)
    sizes = [f"{name} {fields[name]:,}" for name in SIZES if isinstance(fields.get(name), int)]
    size = in_bytes(sum(each.num_bytes for each in tensors.values()))
    named = fields.get("architectures") or fields.get("speculators_model_type")
    yield f"draft in {path}: {named}, {len(tensors)} tensors, {size}, {', '.join(sizes)}"


def _refusals(engine: Engine) -> Iterator[str]:
    """Why the chosen kernels can't run the target's layers."""
    config, found, format = engine.config, dict[str, None](), engine.target.cache_format
    for phase, kind in config.phases.items():
        if phase not in TARGET_PHASES:
            continue
        backend: AttentionBackend = getattr(engine.backends, phase)
        kernel, is_tree = backend.kernel_of(kind), phase == "verify" and config.capacity.topk > 1
        for layer in engine.target.layers:
            types = config.dtype, config.cache_dtype
            reasons = kernel.layer_reasons(kind, layer, *types, format, is_tree=is_tree)
            found |= {f"{backend.name} ({kernel.name}), {phase}: {reason}": None for reason in reasons}
    yield from found


def _too_much(engine: Engine, found: TargetFolder) -> Iterator[str]:
    """Weights and caches that the device has no room for."""
    config, device = engine.config, engine.config.device
    cache, free = engine.target.cache_bytes(engine.backends.prefill, config.cache_dtype), free_bytes(device)
    needed = found.num_bytes(config.dtype) + cache
    if free is not None and needed > free:
        yield f"weights and cache take {needed:,} bytes, {device} has {free:,} free; see max_bs and max_context"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="FOLDER", help="a target's folder, or an embedded one's name")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_run(parser)
    add_runtime(parser)
    parser.set_defaults(max_new_tokens=None)


COMMAND = Command(
    "What a model's folder is and what would run it. What is refused makes the exit code 2.",
    _add_arguments,
    run,
    "attn-backends inspect gqa --draft gqa-eagle3",
)
"""See the module."""
