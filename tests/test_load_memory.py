"""The memory that loading says it takes is what it takes: the peak of a process that loads weights of fewer bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

CONFIG = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GPT_OSS = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_local_experts": 32,
    "vocab_size": 1000,
}
LOAD = """
import sys, threading, torch
from attn_backends_reference.models import load_target, open_target

def own_memory():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

load_target("gqa", torch.bfloat16)  # what the first load of a process imports and keeps
found, peak, done = open_target(sys.argv[1]), [0], threading.Event()
before = own_memory()

def watch():
    while not done.wait(0.001):
        peak.append(own_memory())

watching = threading.Thread(target=watch)
watching.start()
model = found.load(torch.bfloat16, "cpu")
done.set()
watching.join()
print(found.num_bytes(torch.bfloat16), max(peak) - before)
"""


def eight_bits(folder: Path) -> None:
    """190 million weights, most of them in 8-bit blocks."""
    config, tensors = LlamaConfig(**CONFIG), dict[str, torch.Tensor]()
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    for name, shape in shapes.items():
        tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        if "_proj" in name:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.ones(shape[0] // 128, shape[1] // 128)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "quantization_config": BLOCKS}
    (folder / "config.json").write_text(json.dumps(fields))


def four_bits(folder: Path) -> None:
    """210 million weights, most of them in 4-bit blocks."""
    config, tensors = GptOssConfig(**GPT_OSS), dict[str, torch.Tensor]()
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in GptOssForCausalLM(config).state_dict().items()}
    for name, shape in shapes.items():
        if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
            experts, rows, columns = shape
            tensors[f"{name}_blocks"] = torch.ones(experts, columns, rows // 32, 16, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.full((experts, columns, rows // 32), 127, dtype=torch.uint8)
        else:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "mxfp4"}
    fields = config.to_dict() | {"architectures": ["GptOssForCausalLM"], "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(fields))


@pytest.mark.full
@pytest.mark.parametrize(("write", "fold"), [(eight_bits, 1.8), (four_bits, 3.3)])
def test_loading_takes_the_memory_that_it_says(write: Callable[[Path], None], fold: float, tmp_path: Path) -> None:
    """fold: what the files' bytes become, at least."""
    write(tmp_path)
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is given back at once
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    said, taken = map(int, done.stdout.split())
    assert said > (tmp_path / "model.safetensors").stat().st_size * fold
    assert taken == pytest.approx(said, rel=0.1)
