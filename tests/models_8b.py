"""Targets of 8B shape with an EAGLE-3 head of the public shape: tokens, cycle times, and what attention takes of them.

Weights are random and made on the device: memory and speed are real, texts are not. Each of the draft's ids has a
successor, whose row of the output head is that id's embedding. The target's layers disturb a quarter of tokens.
The head reads embeddings alone, by attention of each row to itself. Texts must be plain decoding's, token for token,
in float32. The times are of bfloat16, whose rounding differs with the rows of a product, so ties may fall otherwise.
`python -m tests.models_8b --json FILE`, on a GPU, exits with 1 if a row fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config
from triton.runtime.jit import JITFunction

from attn_backends import results
from attn_backends.graphs import CudaGraph, RecordedGraph
from attn_backends.registry import get_backend
from attn_backends.selection.choose import Workload
from attn_backends_reference.eagle.options import PhaseBackends, WorkerOptions
from attn_backends_reference.eagle.requests import Request, RequestOptions
from attn_backends_reference.eagle.serving import Server
from attn_backends_reference.eagle.worker import EagleWorker, PlainWorker, TargetWorker
from attn_backends_reference.models.decoder import TargetModel
from attn_backends_reference.models.eagle3 import Eagle3Draft, Eagle3Model
from attn_backends_reference.models.fit import cast
from attn_backends_reference.models.head_config import read_eagle3
from attn_backends_reference.models.llama import LLAMA, QWEN3
from spec_metadata import CacheGeometry, Capacity
from tests.head_runs import DenseAttention
from tests.serving_scenes import CHAIN, TREE

SIZES = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
PAGE_SIZE, FOLLOWED = 64, 0.75
VENDORS = "flash"  # in the names of vendors' attention kernels, and of no other
PARTS = {
    "attention": ("triton_decode", "triton_prefill", "triton_tree", "triton_merge", "triton_store"),
    "metadata": ("triton_plan", "triton_inputs", "triton_work", "triton_share_out"),
}


class Shape(NamedTuple):
    """A target, the type of its times, the number of its head's ids, and a batch. compared: new tokens in float32."""

    config: PreTrainedConfig
    dtype: torch.dtype = torch.bfloat16
    num_ids: int = 32000
    batch_size: int = 8
    prompt: int = 1000
    new_tokens: int = 200
    compared: int = 64


SHAPES = {
    "Llama-3.1-8B": Shape(LlamaConfig(vocab_size=128256, intermediate_size=14336, num_hidden_layers=32, **SIZES)),
    "Qwen3-8B": Shape(Qwen3Config(vocab_size=151936, intermediate_size=12288, num_hidden_layers=36, **SIZES)),
}


def target_of(shape: Shape, ids: Tensor, successor: Tensor) -> TargetModel:
    """In float32. successor: [n] places within ids [n]. Layers' outputs are scaled until `FOLLOWED` of 256 random
    tokens are.
    """
    with ids.device:
        model = AutoModelForCausalLM.from_config(shape.config, dtype=torch.float32, attn_implementation="eager")
    embedding = model.get_input_embeddings().weight.normal_()
    model.get_output_embeddings().weight.normal_(std=0.3)[ids[successor]] = embedding[ids]
    target = TargetModel(LLAMA if isinstance(shape.config, LlamaConfig) else QWEN3, model)
    outs = [weight for name, weight in model.named_parameters() if name.endswith(("o_proj.weight", "down_proj.weight"))]
    places, step = torch.randint(len(ids), (256,), device=ids.device), 64.0
    for _ in range(16):
        is_next = scores(target, ids[places]).argmax(-1) == ids[successor[places]]
        for weight in outs:
            weight.mul_(step if is_next.float().mean() > FOLLOWED else 1 / step)
        step **= 0.6
    return target


def scores(target: TargetModel, text: Tensor) -> Tensor:
    """[len(text), vocab_size], without a cache."""
    with text.device:
        return target.logits(target.forward(text, torch.arange(len(text)), DenseAttention(target)))  # type: ignore[arg-type]


def head_of(shape: Shape, target: TargetModel, ids: Tensor, successor: Tensor) -> Eagle3Model:
    """Its residual is the row before; values take that off, as far as the basis reaches, and add the embedding."""
    layers, fields = shape.config.num_hidden_layers, shape.config.to_dict()
    keys = (*SIZES, "vocab_size", "intermediate_size", "rms_norm_eps", "max_position_embeddings")
    taps = [1, layers // 2 - 1, layers - 4]
    config = {key: fields[key] for key in keys} | {"draft_vocab_size": len(ids)}
    draft = Eagle3Draft(read_eagle3(config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": taps}}, "the head"))
    attention, width, dim = draft.layers[0].self_attn, fields["hidden_size"], fields["head_dim"]
    basis = torch.linalg.qr(torch.randn(width, fields["num_key_value_heads"] * dim)).Q.T
    own = torch.cat((torch.randn_like(basis) * 1.5 * width**-0.5, torch.zeros_like(basis)), 1)
    group = fields["num_attention_heads"] // fields["num_key_value_heads"]
    by_query = [each.unflatten(0, (-1, dim)).repeat_interleave(group, 0).flatten(0, 1) for each in (own, basis)]
    attention.k_proj.weight.copy_(own)
    attention.q_proj.weight.copy_(by_query[0])
    attention.v_proj.weight.copy_(torch.cat((basis, -((len(basis) / width) ** 0.5) * basis), 1))
    attention.o_proj.weight.copy_(by_query[1].T * 4 / group)
    draft.fc.weight.mul_(0.1)
    draft = cast(draft, target)
    draft.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
    draft.lm_head.weight[successor] = target.embedding.weight[ids]
    return Eagle3Model(draft, target, tuple(taps))


def served(worker: TargetWorker, prompts: list[list[int]], new_tokens: int, cycles: Any) -> list[Request]:
    """The requests, all at once. cycles: a context for what follows the prompts."""
    with Server(worker) as server:
        requests = [server.submit(prompt, RequestOptions(new_tokens)) for prompt in prompts]
        while not all(request.output for request in requests):
            server.round()
        with cycles:
            while not server.is_idle:
                server.round()
    return requests


def shares(profiled: profile) -> dict[str, float]:
    """Of the device's busy time."""
    events = [each for each in profiled.events() or () if each.device_type == torch.autograd.DeviceType.CUDA]
    found, total = {}, sum(each.time_range.elapsed_us() for each in events)
    for part, modules in PARTS.items():
        named = [item for name in modules for item in vars(import_module(f"attn_backends.kernels.{name}")).items()]
        kernels = {name for name, kernel in named if isinstance(kernel, JITFunction)}
        own = [
            each for each in events if each.name in kernels or (part == "attention" and VENDORS in each.name.lower())
        ]
        took = [each.time_range.elapsed_us() for each in own]
        found[f"{part}_share"] = round(sum(took) / total, 4)
    return found


def gaps(target: TargetModel, plain: list[Request], drafted: list[Request]) -> list[float]:
    """Of each text that differs: by how much of the best score its first other token has less, in a plain forward."""
    found = []
    for one, other in zip(plain, drafted, strict=True):
        at = next((i for i, token in enumerate(one.output) if token != other.output[i]), None)
        if at is not None:
            row = scores(target, torch.tensor(one.prompt + one.output[:at], device=target.device))[-1].float()
            found.append(float(1 - row[other.output[at]] / row.max()))
    return found


def workers(shape: Shape, target: TargetModel, draft: Eagle3Model, form: Any) -> tuple[PlainWorker, EagleWorker]:
    """One that decodes plainly and one that drafts, through graphs, on the kernel that `auto` takes."""
    capacity = Capacity(shape.batch_size, shape.prompt + shape.new_tokens + 8, PAGE_SIZE, **form)
    geometry = CacheGeometry(1 + capacity.max_bs * capacity.max_pages, PAGE_SIZE)
    workload = Workload(PAGE_SIZE, target.layers, target.dtype)
    backend = get_backend("fa3")(capacity, geometry, target.device, kernel="auto", workload=workload)
    graph = CudaGraph if target.device.type == "cuda" else RecordedGraph
    options = WorkerOptions(buckets=(shape.batch_size,), make_graph=graph, planning="in_graph")
    place = PhaseBackends(*[backend] * 5), capacity, geometry, options
    return PlainWorker(target, *place), EagleWorker(target, draft, *place)


def equal_texts(shape: Shape, target: TargetModel, draft: Eagle3Model, prompts: list[list[int]], form: Any) -> int:
    """How many texts are plain decoding's."""
    both = (served(each, prompts, shape.compared, nullcontext()) for each in workers(shape, target, draft, form))
    return sum(one.output == other.output for one, other in zip(*both, strict=True))


def run(shape: Shape, target: TargetModel, draft: Eagle3Model, prompts: list[list[int]], form: Any) -> dict[str, Any]:
    """What a form of drafts emits and takes through graphs, beside plain decoding."""
    both = workers(shape, target, draft, form)
    plain, drafted = (served(worker, prompts, shape.new_tokens, nullcontext()) for worker in both)
    differ = gaps(target, plain, drafted)
    emitted = sum(len(each.output) - 1 for each in drafted) / sum(each.statistics.num_cycles for each in drafted)
    found: dict[str, Any] = {"tokens_per_cycle": round(emitted, 3)}
    found |= {"ties": len(differ), "largest_gap": round(max(differ, default=0.0), 4)}
    for took in (plain[0].statistics, drafted[0].statistics):
        phases = took.seconds.keys() - {"prefill"}
        found |= {f"{phase}_ms": round(1e3 * took.seconds[phase] / took.num_cycles, 4) for phase in sorted(phases)}
    if target.device.type == "cuda":
        served(both[1], prompts, shape.new_tokens, profiled := profile(activities=[ProfilerActivity.CUDA]))
        found |= shares(profiled)
    return found | {"graph_steps": dict(both[1].num_graph_steps), "eager_steps": dict(both[1].num_eager_steps)}


@torch.no_grad()
def rows(device: str = "cuda", shapes: dict[str, Shape] = SHAPES) -> Iterator[dict[str, Any]]:
    """A row of each target and form of drafts."""
    torch.manual_seed(0)
    for name, shape in shapes.items():
        ids = torch.randperm(shape.config.vocab_size, device=device)[: shape.num_ids].sort().values
        order = torch.randperm(shape.num_ids, device=device)
        successor = torch.empty_like(order).scatter_(0, order, order.roll(-1))
        target = target_of(shape, ids, successor)
        draft = head_of(shape, target, ids, successor)
        prompts = ids[torch.randint(shape.num_ids, (shape.batch_size, shape.prompt), device=device)].tolist()
        forms = {"chain": CHAIN, "tree": TREE}
        equal = {form: equal_texts(shape, target, draft, prompts, drafts) for form, drafts in forms.items()}
        for parameter in (*target._decoder.parameters(), *target.head.parameters(), *draft._draft.parameters()):
            parameter.data = parameter.data.to(shape.dtype)
        for form, drafts in forms.items():
            found = run(shape, target, draft, prompts, drafts)
            passes = equal[form] == shape.batch_size and found["tokens_per_cycle"] >= 1.5
            of = {"model": name, "draft": form, "status": "pass" if passes else "fail", "texts": shape.batch_size}
            yield of | {"equal_in_float32": equal[form]} | found
        del target, draft


def main() -> int:
    """Run both; 1 if a row fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path, metavar="FILE")
    file, failed = parser.parse_args().json, 0
    with results.Recording(
        file, results.head(["python", "-m", "tests.models_8b", "--json", str(file)], "cuda")
    ) as made:
        for row in rows():
            made.add(row)
            print(*row.values(), flush=True)
            failed += row["status"] == "fail"
    made.finish()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
