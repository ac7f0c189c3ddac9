"""What is larger than the memory that is free is refused with its bytes, before it is allocated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends import MemoryLimitError
from attn_backends.backends.dsv4 import DSV4Backend
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.cache import PagedKV, PagedLatent, allocate_caches
from attn_backends.cli import main
from attn_backends.kernels import device_memory
from attn_backends.kernels.device_memory import host_free_bytes, room_for
from attn_backends_reference.models import load_target
from spec_metadata import CacheGeometry, Capacity

CPU = torch.device("cpu")
GEOMETRY = CacheGeometry(10, 16)
KV_BYTES = 2 * 10 * 16 * 2 * 8 * 4


def limit(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> list[torch.device]:
    """Pretend that so many bytes are free. Returns where zeros were allocated since."""
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: num_bytes if device.type == "cpu" else None)
    allocated: list[torch.device] = []
    zeros: Any = torch.zeros

    def watched(*size: object, **options: object) -> Tensor:
        made = zeros(*size, **options)
        allocated.append(made.device)
        return made

    monkeypatch.setattr(torch, "zeros", watched)
    return allocated


def keys_and_values(device: torch.device) -> list[PagedKV]:
    return [PagedKV(*(torch.zeros(10, 16, 2, 8, device=device) for _ in range(2)))]


def latents(device: torch.device) -> list[PagedLatent]:
    return [PagedLatent(torch.zeros(10, 16, 40, dtype=torch.bfloat16, device=device), 32)]


def test_a_cache_of_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = limit(monkeypatch, KV_BYTES - 1)
    message = r"1 layer, 10 pages of 16 tokens.* 20,480 bytes and cpu has 20,479 free.*max_bs or max_context"
    with pytest.raises(MemoryLimitError, match=message):
        allocate_caches(GEOMETRY, keys_and_values, CPU)
    assert CPU not in allocated
    limit(monkeypatch, KV_BYTES)
    assert allocate_caches(GEOMETRY, keys_and_values, CPU)[0].num_bytes == KV_BYTES


def test_a_cache_of_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 100)
    with pytest.raises(MemoryLimitError, match="needs 12,800 bytes and cpu has 100 free"):
        allocate_caches(GEOMETRY, latents, CPU)


def test_the_cache_of_a_compressed_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, entries, index keys and states of one layer are all there, or none."""
    backend = DSV4Backend(Capacity(2, 256, 128, 1, 3, 4), CacheGeometry(10, 128), kernel="torch")
    layer = next(layer for layer in load_target("v4", torch.float32).layers if layer.indexer is not None)
    whole = backend.allocate_cache(layer, torch.bfloat16).num_bytes
    allocated = limit(monkeypatch, whole - 1)
    with pytest.raises(MemoryLimitError, match=rf"1 layer, 10 pages of 128 tokens.* {whole:,} bytes"):
        backend.allocate_cache(layer, torch.bfloat16)
    assert CPU not in allocated
    limit(monkeypatch, whole)
    assert backend.allocate_cache(layer, torch.bfloat16).num_bytes == whole


def test_all_layers_of_a_model_count_before_the_first_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target("gqa", torch.float32)
    backend = FA3Backend(Capacity(2, 64, 16, 1, 3, 4), GEOMETRY, kernel="torch")
    sizes = [cache.k.nbytes + cache.v.nbytes for cache in target.allocate_caches(backend)]
    assert len(sizes) == 4
    allocated = limit(monkeypatch, sum(sizes) - 1)
    with pytest.raises(
        MemoryLimitError, match=rf"4 layers, .* needs {sum(sizes):,} bytes and cpu has {sum(sizes) - 1:,} "
    ):
        target.allocate_caches(backend)
    assert CPU not in allocated
    limit(monkeypatch, sum(sizes))
    assert len(target.allocate_caches(backend)) == 4


def test_the_command_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Nobody has as much: a hundred million requests."""
    path = tmp_path / "run.toml"
    path.write_text(
        'backend = "fa3"\n[eagle]\ntopk = 1\nnum_steps = 2\nnum_draft_tokens = 3\n'
        "[runtime]\nmax_bs = 100000000\nbuckets = [1]\nmax_context = 64\n"
    )
    assert main(["generate", "--config", str(path), "--prompt", "import"]) == 2
    error = capsys.readouterr().err
    assert "error: a KV cache of 4 layers" in error
    assert "lower max_bs or max_context" in error


def raises(error: Exception) -> Callable[[], None]:
    """An allocation that fails."""

    def allocate() -> None:
        raise error

    return allocate


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9")],
)
def test_an_allocation_that_fails_is_refused_in_words(error: Exception) -> None:
    """Where the system does not tell what is free, or another process was faster."""
    with pytest.raises(MemoryLimitError, match="cpu has less"), room_for(1, CPU, MemoryLimitError):
        raises(error)()
    with pytest.raises(RuntimeError, match="something else"), room_for(1, CPU, MemoryLimitError):
        raises(RuntimeError("something else"))()


def write(folder: Path, files: dict[str, str]) -> None:
    """Files below a folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


VERSION_1 = {
    "memory/memory.limit_in_bytes": "1000",
    "memory/memory.usage_in_bytes": "700",
    "memory/memory.stat": "cache 5\ntotal_inactive_file 50\n",
}
VERSION_2 = {"memory.max": "1000\n", "memory.current": "950\n", "memory.stat": "anon 1\ninactive_file 20\n"}


@pytest.mark.parametrize(
    ("group", "free"), [({}, 4096), (VERSION_1, 350), (VERSION_2, 70), (VERSION_2 | {"memory.max": "max"}, 4096)]
)
def test_what_is_free_on_the_host(tmp_path: Path, group: dict[str, str], free: int) -> None:
    """The least of what the machine has and what a container may take; files that are cached give way."""
    write(tmp_path, {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:       4 kB\n"})
    write(tmp_path / "groups", group)
    assert host_free_bytes(tmp_path / "proc", tmp_path / "groups") == free
    assert host_free_bytes(tmp_path / "nothing", tmp_path / "nothing") is None
