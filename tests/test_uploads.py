"""Host values go to a GPU through pinned memory, without a wait: a CPU stands in for the GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_backends.adapters import tensorrt_llm
from attn_backends.conformance.scenes import Batch
from spec_metadata import PackedQuery, StepKind
from spec_metadata.upload import to_device, upload
from tests.engine_batches import cache_manager, paged_scene, trtllm_metadata
from tests.host_traffic import HostTraffic
from tests.host_uploads import counted, makers

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PROMPTS = Batch(StepKind.PREFILL, (5, 0, 3), widths=(2, 6, 4))


class Pinned(Tensor):
    """A tensor of pinned memory."""


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is copied to "cuda", which stays on the CPU; to make a tensor there at once waits."""
    made: list[str] = []
    to, tensor = Tensor.to, torch.tensor

    def pin(self: Tensor) -> Tensor:
        return self.clone().as_subclass(Pinned)

    def copied(self: Tensor, *args: object, **options: object) -> Tensor:
        if torch.device("cuda") not in args:
            return to(self, *args, **options)
        is_free = isinstance(self, Pinned) and options.get("non_blocking") is True
        made.append("no wait" if is_free else "wait")
        return self.as_subclass(Tensor).clone()

    def tensor_at(values: object, *, device: torch.device | str = "cpu", **options: object) -> Tensor:
        if torch.device(device).type == "cuda":
            made.append("wait")
        return tensor(values, **options)

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "to", copied)
    monkeypatch.setattr(torch, "tensor", tensor_at)
    return made


@pytest.mark.parametrize("device", ["cuda", GPU], ids=["name", "device"])
def test_lengths_of_a_packed_query_go_to_a_gpu_without_a_wait(copies: list[str], device: torch.device | str) -> None:
    query = PackedQuery.of([2, 5, 1], device)
    assert copies == ["no wait"]
    assert query.cu_seqlens.tolist() == [0, 2, 7, 8]


def test_blocks_of_tensorrt_llm_go_to_a_gpu_without_a_wait(copies: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    scene = paged_scene(PROMPTS)
    metadata = trtllm_metadata(scene)
    monkeypatch.setattr(tensorrt_llm, "upload", lambda table, device: upload(table, GPU))
    read = tensorrt_llm.read(metadata, cache_manager(scene), scene.world.geometry, scene.world.capacity)
    assert copies == ["no wait"]
    assert read.paging.table.shape == (3, scene.world.capacity.max_pages)


@pytest.mark.parametrize("values", [[], [3], [1, 2, 3]], ids=str)
def test_host_values_arrive(values: list[int]) -> None:
    assert to_device(values, torch.int64, CPU).tolist() == values
    own = torch.arange(3)
    assert upload(own, CPU) is own


@pytest.mark.parametrize("name", makers(CPU))
def test_steps_of_host_lengths_wait_for_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU's results count, on a CPU in the device's place."""
    found = {row["made"]: row for row in counted(CPU, HostTraffic(monkeypatch).probe)}
    assert found[name]["waits"] == 0
