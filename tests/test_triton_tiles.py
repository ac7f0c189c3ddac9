"""Tiles of the Triton kernels of attention: their sizes, what fits a GPU, and heads that no tiles fit."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from attn_backends.contract.kernel import LayerShape
from attn_backends.errors import UnsupportedStepError
from attn_backends.kernels import devices
from attn_backends.vendors import ours as paged_kernel
from tests.triton_interpreter import interpreted


@pytest.fixture
def triton_tiles():
    """The module of the rules."""
    interpreted("triton_decode", "_attend")
    return import_module("attn_backends.kernels.triton_tiles")


@pytest.fixture
def h200(triton_tiles):
    """What the interpreter stands for."""
    return devices.gpu_of(torch.device("cpu"))


@pytest.mark.parametrize(
    ("num_programs", "num_slots", "most", "num_parts"),
    [
        (1, 264, 500, 238),  # the fewest that use nine tenths of the slots
        (1, 264, 8, 8),
        (128, 264, 100, 2),
        (32, 264, 4096, 8),
        (264, 264, 100, 1),
        (300, 264, 0, 1),
    ],
)
def test_keys_are_divided_to_fill_the_last_wave(triton_tiles, num_programs, num_slots, most, num_parts):
    assert triton_tiles.choose_num_splits(num_programs, num_slots, most) == num_parts


@pytest.mark.parametrize(
    ("shared", "tensor_memory"), [(99 * 1024, False), (163 * 1024, False), (227 * 1024, False), (227 * 1024, True)]
)
@pytest.mark.parametrize("dot", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dims", [(576, 512, True), (128, 128, False), (256, 256, False)], ids=str)
def test_tiles_fit_the_shared_memory(triton_tiles, shared, tensor_memory, dot, dims):
    gpu = devices.Gpu(100, shared, tensor_memory)
    for num_rows in (1, 16, 17, 33, 64, 500):
        sizes = triton_tiles.sizes_of(*dims)
        assert triton_tiles.tile_bytes(triton_tiles.choose_tiles(num_rows, sizes, dot, gpu), sizes, dot, gpu) <= shared


@pytest.mark.parametrize(
    ("tiles", "num_bytes"),
    [((16, 32, 4, 3), 93184), ((32, 32, 4, 3), 112640), ((64, 64, 8, 2), 221184), ((64, 32, 8, 3), 184320)],
)
def test_bytes_of_tiles_of_latents(triton_tiles, h200, tiles, num_bytes):
    """As Triton 3.6 compiles them for SM90."""
    sizes = triton_tiles.sizes_of(576, 512, True)
    assert triton_tiles.tile_bytes(triton_tiles.Tiles(*tiles), sizes, torch.bfloat16, h200) == num_bytes


@pytest.mark.parametrize(
    ("tiles", "num_bytes"), [((16, 32, 4, 4), 54272), ((32, 64, 4, 3), 77824), ((64, 64, 4, 3), 114688)]
)
def test_bytes_of_tiles_of_keys_and_values(triton_tiles, h200, tiles, num_bytes):
    """As Triton 3.6 compiles them for SM90."""
    sizes = triton_tiles.sizes_of(128, 128, False)
    assert triton_tiles.tile_bytes(triton_tiles.Tiles(*tiles), sizes, torch.bfloat16, h200) == num_bytes


def test_latents_are_held_twice_beside_tensor_memory(triton_tiles):
    """Triton 3.6 compiles the tile of 64 rows for SM100 with 352816 bytes."""
    sizes, gpu = triton_tiles.sizes_of(576, 512, True), devices.Gpu(148, 227 * 1024, tensor_memory=True)
    assert triton_tiles.tile_bytes(triton_tiles.Tiles(64, 64, 8, 2), sizes, torch.bfloat16, gpu) >= 352816
    assert triton_tiles.choose_tiles(64, sizes, torch.bfloat16, gpu) == triton_tiles.Tiles(32, 32, 4, 3)


@pytest.mark.parametrize(("num_rows", "rows"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (500, 64)])
def test_tiles_are_at_least_half_full(triton_tiles, h200, num_rows, rows):
    for dims in ((576, 512, True), (128, 128, False)):
        assert triton_tiles.choose_tiles(num_rows, triton_tiles.sizes_of(*dims), torch.bfloat16, h200).rows == rows


@pytest.mark.parametrize(
    ("shape", "shared", "nearest"),
    [
        ((8, 8, 2048, 2048, torch.bfloat16), 227, ""),
        ((8, 8, 4096, 4096, torch.bfloat16), 227, "head sizes up to 2048"),
        ((8, 8, 1024, 1024, torch.float32), 99, "head sizes up to 512"),
        ((16, 1, 576, 512, torch.float32), 99, ""),
        ((16, 1, 2048, 1536, torch.bfloat16), 99, "head sizes up to 1024"),
    ],
)
def test_heads_that_no_tiles_fit_are_refused_with_the_nearest(triton_tiles, monkeypatch, shape, shared, nearest):
    monkeypatch.setattr(paged_kernel, "gpu_of", lambda device: devices.Gpu(100, shared * 1024))
    *sizes, dtype = shape
    asked = LayerShape(*sizes, 1.0, dtype, dtype)
    if not nearest:
        paged_kernel._refuse_sizes(asked, torch.device("cuda"))
        return
    with pytest.raises(
        UnsupportedStepError, match=r"head sizes \(\d+, \d+\) in torch.* bytes of shared memory"
    ) as error:
        paged_kernel._refuse_sizes(asked, torch.device("cuda"))
    assert error.value.nearest == nearest


@pytest.mark.parametrize(
    ("size", "cache", "reason"), [(4096, torch.bfloat16, "head sizes"), (64, torch.float8_e4m3fn, "a cache of")]
)
def test_refusals_come_with_the_metadata_of_a_gpu(triton_tiles, monkeypatch, size, cache, reason):
    monkeypatch.setattr(paged_kernel, "gpu_of", lambda device: devices.Gpu(100, 227 * 1024))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(paged_kernel, "paged_keys", lambda plan: ())
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    buffers = {spec.name: on_gpu for spec in (paged_kernel.PARTIAL_OUT, paged_kernel.PARTIAL_LSE)}
    paged_kernel.Scratch(None, LayerShape(8, 8, 64, 64, 1.0, torch.bfloat16, torch.bfloat16), buffers)
    with pytest.raises(UnsupportedStepError, match=reason):
        paged_kernel.Scratch(None, LayerShape(8, 8, size, size, 1.0, torch.bfloat16, cache), buffers)


@pytest.mark.parametrize("num_kv_heads", [1, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dims", [(576, 512), (24, 20), (1024, 1024), (2048, 256)])
def test_sizes_that_are_taken_fit_both_kernels(triton_tiles, monkeypatch, num_kv_heads, dtype, dims):
    prefill = interpreted("triton_prefill", "_paged_attention")
    for kib in (99, 163, 227):
        gpu = devices.Gpu(100, kib * 1024)
        monkeypatch.setattr(paged_kernel, "gpu_of", lambda device, gpu=gpu: gpu)
        try:
            paged_kernel._refuse_sizes(LayerShape(16, num_kv_heads, *dims, 1.0, dtype, dtype), torch.device("cuda"))
        except UnsupportedStepError:
            continue
        is_latent = num_kv_heads == 1 and dims[0] > dims[1]
        sizes = triton_tiles.sizes_of(*dims, is_latent)
        assert (
            triton_tiles.tile_bytes(triton_tiles.choose_tiles(64, sizes, dtype, gpu), sizes, dtype, gpu) <= gpu.shared
        )
        assert prefill.tile_bytes(prefill.choose_tiles(sizes, dtype, gpu.shared), sizes, dtype) <= gpu.shared
