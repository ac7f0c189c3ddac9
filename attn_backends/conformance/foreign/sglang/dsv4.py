"""SGLang's DeepSeek-V4 backend: a draft model of DeepSeek-V4 has layers of a window alone, and these are driven.

Its pool holds rows in the 8-bit page format of the suite's own cache, byte for byte. What layers with compressed
entries need, `raw_out_loc` and what is made from it, is in the metadata of these layers too: it is compared with what
the step owes (`ForeignStep.latent_slots`).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from attn_backends.compressed_cache import CompressedCache, CompressedFormat, Fp8Pages, cache_reasons
from attn_backends.compressed_layer import CompressedInputs, IndexQuery
from attn_backends.conformance.foreign.driver import (
    NOWHERE,
    Exempt,
    ForeignPlan,
    Handed,
    LatentSlots,
    first_use,
    launch,
)
from attn_backends.conformance.foreign.places import DECODES, Where, can
from attn_backends.conformance.foreign.sglang import control, stand_ins
from attn_backends.conformance.foreign.sglang.backends import SGLangBackend, on_cpu, on_gpu
from attn_backends.conformance.foreign.sglang.engine import MARGIN, ROOM, Engine
from attn_backends.conformance.foreign.sglang.parts import DSV4
from attn_backends.conformance.foreign.sglang.steps import CapturedStep, EagerStep, SGLangStep
from attn_backends.contract.capabilities import FP8_TYPES, Capabilities
from attn_backends.contract.kernel import Kernel
from attn_backends.errors import UnsupportedStepError
from attn_backends.kernels.fp8_pages import ROW_DIM
from attn_backends.layer import AttentionLayer, AttentionOutput, LatentQuery
from attn_backends.planning.metadata import ForwardMetadata
from spec_metadata import Bucket, CacheGeometry, Step, StepKind
from spec_metadata.plans.compressed import Compression

PAGE_SIZE = 256  # SGLang's backend takes no other
ON_CPU: Where = ((ROW_DIM, ROW_DIM), 4, torch.float32)
ON_GPU: Where = ((ROW_DIM, ROW_DIM), 64, torch.bfloat16)
WINDOWS_ALONE = Exempt(
    ("compressed.*",),
    "its layers of compressed entries want SGLang's JIT kernels of compressors and DeepGEMM's indexer, and of prompts "
    "this driver has none",
)


class DSV4Engine(Engine):
    """The parts of a server of a DeepSeek-V4 draft model of one layer, and of a target whose first layer it is."""

    def __init__(self, *place: Any, **options: Any) -> None:
        super().__init__(*place, **options)
        if self.device.type == "cpu":
            self.api.memory_module("deepseek_v4_memory_pool").fused_store_cache = stand_ins.write_rows_of_512

    def _runner(self, geometry: CacheGeometry, dtype: torch.dtype, layer: AttentionLayer) -> Any:
        kit, capacity, nodes = self.api.kit("dsv4_attention"), self.capacity, self.capacity.num_draft_tokens
        lens = (1,) * self.num_rows, (nodes,) * self.num_rows
        mode, page_size = self.api.ForwardMode.TARGET_VERIFY, geometry.page_size
        runner = kit.MockDSV4ModelRunner(
            case=kit.DSV4AttentionCase("suite", self.parts.name, mode, layer.num_heads, page_size, *lens),
            model_config=kit.TinyDSV4ModelConfig(num_heads=layer.num_heads, context_len=capacity.max_context + MARGIN),
            dtype=dtype,
            device=self.device.type,
            max_context_len=capacity.max_context + MARGIN + ROOM + nodes,
            swa_size=(geometry.num_pages - 1) * page_size,
            disable_cuda_graph=False,
        )
        runner.spec_algorithm = self.api.SpeculativeAlgorithm.EAGLE
        all_slots = torch.arange(geometry.num_pages * page_size, device=self.device)
        runner.token_to_kv_pool.register_mapping(all_slots)
        return runner

    def _make(self, role: str) -> Any:
        self.runner.is_draft_worker = role in ("draft", "extend")
        if not self.right:
            return super()._make(role)
        if role == "draft":
            return control.RightDraftBackend(self.runner, self.capacity.num_steps, control.RightWindowBackend)
        return control.RightWindowBackend(self.runner)

    @property
    def pages(self) -> Tensor:
        """[num_pages, bytes] uint8 the pool's memory."""
        memory: Tensor = self.runner.token_to_kv_pool.get_swa_raw_buffer(0)
        return memory


class WindowStep(SGLangStep):
    """A step through a layer of a window."""

    def store(self, forward: int, inputs: Any, layer: AttentionLayer) -> None:
        """Have the backend store the rows, as it does when it attends; what it attends to here is dropped."""
        assert isinstance(inputs, CompressedInputs), "its cache is one of compressed layers"
        rows = inputs.rows
        self._attend(forward, rows.new_zeros(len(rows), layer.num_heads, layer.head_dim), layer, rows)

    def attend(self, forward: int, q: Tensor, layer: AttentionLayer) -> Tensor:
        """Call the backend as a layer does, with the cache stored already. SGLang's scale is that of its model."""
        return self._attend(forward, q * (layer.scale * layer.head_dim**0.5), layer, None)

    def _attend(self, forward: int, q: Tensor, layer: AttentionLayer, rows: Tensor | None) -> Tensor:
        with self.engine.simulated():
            out: Tensor = self._backends[forward].forward(
                q,
                rows,
                rows,
                self.engine.layer,
                self._forwards[forward],
                compress_ratio=0,
                save_kv_cache=rows is not None,
                attn_sink=layer.sinks,
            )
        return out

    def handed_slots(self, forward: int) -> Handed:
        """The slots in its window pool that the metadata names, else those of the batch."""
        planned = getattr(self._planned[forward], "core_attn_metadata", None)
        slots = getattr(planned, "swa_out_cache_loc", None)
        return super().handed_slots(forward) if slots is None else Handed.of(slots, self.engine.numbers.slots)

    def latent_slots(self, forward: int) -> list[LatentSlots]:
        """`raw_out_loc`, and what SGLang's planner makes of this metadata for layers of ratios 4 and 128."""
        lens, positions, rows = self._lens_and_slots(forward)
        made = self.engine.api.plan_compression(lens, positions, rows, compute_page_indices=False)
        slots = self.engine.numbers.slots
        found = [LatentSlots("raw_out_loc", slots(rows).tolist())]
        for name, block, entries in (("c4_out_loc", 4, made[0]), ("c128_out_loc", 128, made[4])):
            places = torch.where(entries == 0, NOWHERE, slots(entries * block))  # entry 0 is the reserved page's
            found.append(LatentSlots(name, places.tolist(), block))
        return found

    def _lens_and_slots(self, forward: int) -> tuple[Tensor, Tensor, Tensor]:
        """[num_tokens] keys, position and slot of each row, by the metadata, or by the batch for a right backend."""
        core = getattr(self._planned[forward], "core_attn_metadata", None)
        if core is not None:
            return core.seq_lens_casual, core.positions_casual, core.raw_out_loc
        batch = self._forwards[forward]
        positions = self._backends[forward].positions(batch, batch.out_cache_loc.shape[0]).int()
        return positions + 1, positions, batch.out_cache_loc.contiguous()


class EagerWindowStep(WindowStep, EagerStep):
    """A step of a server without graphs, whose verifies are as wide as the step."""

    def __init__(self, engine: Engine, step: Step) -> None:
        engine.backend_of(step.kind).speculative_num_draft_tokens = step.width
        super().__init__(engine, step)


class CapturedWindowStep(WindowStep, CapturedStep):
    """A step over static buffers. The backend makes its metadata inside of the graph, from what was prepared outside.
    On a CPU it does so by torch's operators alone, which a recording sees one by one.
    """

    def __init__(self, engine: Engine, bucket: Bucket, num_steps: int) -> None:
        super().__init__(engine, bucket, num_steps)
        self._prepared = self._planned

    def begin(self, forward: int) -> None:
        """Before the first forward the metadata is made, from what was prepared, also after a warm-up."""
        if forward == 0:
            self._planned = self._prepared
            self._hold()
            with self.engine.simulated():
                self.backend.init_forward_metadata_in_graph(self.batch)
            self._planned = self._held()
        SGLangStep.begin(self, forward)


class DeepSeekV4(SGLangBackend):
    """SGLang's `dsv4` backend, and its multi-step draft backend, in layers of a window of 128 tokens."""

    name = "sglang:dsv4"
    formats: ClassVar[frozenset[Any]] = frozenset({CompressedFormat.COMPRESSED})
    exempt = (*SGLangBackend.exempt, WINDOWS_ALONE)
    parts = DSV4
    engine_type, eager_type, captured_type = DSV4Engine, EagerWindowStep, CapturedWindowStep
    window: ClassVar[int] = 128
    compressions: ClassVar[tuple[Compression, ...]] = ()

    @staticmethod
    def _able(where: Where) -> dict[StepKind, Capabilities]:
        able = can(where, {PAGE_SIZE}, window=True, sinks=True, cache_dtypes=FP8_TYPES, own_cache=False)
        return dict.fromkeys((*DECODES, StepKind.DRAFT_EXTEND), able)

    kernels = (
        Kernel("stand_in_on_gpu", launch, _able(ON_GPU), on_gpu, source="stand_in", schedule=first_use),
        Kernel("stand_in", launch, _able(ON_CPU), on_cpu, source="stand_in", schedule=first_use),
    )

    @classmethod
    def model_on(cls, device: torch.device) -> tuple[torch.dtype, AttentionLayer]:
        """A layer of a window."""
        (head_dim, _), heads, dtype = ON_GPU if device.type == "cuda" else ON_CPU
        return dtype, AttentionLayer(0, heads, 1, head_dim, head_dim, head_dim**-0.5, window=cls.window)

    @staticmethod
    def pages_of(cache: Any) -> Tensor:
        """[num_pages, bytes]"""
        assert isinstance(cache.rows, Fp8Pages), "it takes no other format"
        return cache.rows.data

    def ring(self, layer: AttentionLayer) -> int:
        """State rows of a page: a layer of a window alone has none."""
        return 0

    def forward(
        self,
        q: Tensor | LatentQuery,
        cache: Any,
        meta: ForwardMetadata[ForeignPlan],
        layer: AttentionLayer,
        index: IndexQuery | None = None,
    ) -> AttentionOutput:
        """Attend over the pool. index: of a layer of a window None."""
        return super().forward(q, cache, meta, layer)

    def _check_layer(self, cache: Any, meta: ForwardMetadata[ForeignPlan], layer: Any, dtype: torch.dtype) -> None:
        """See `AttentionBackend._check_layer`."""
        reasons = [] if isinstance(cache, CompressedCache) else [f"a cache of {cache.format}"]
        reasons = reasons or cache_reasons(cache, self.geometry, layer, 0)
        if not reasons and meta.kind is not StepKind.IDLE:
            place = dtype, cache.dtype, cache.format
            reasons = self.kernel_of(meta.kind).layer_reasons(meta.kind, layer, *place, is_tree=False)
        if reasons:
            raise UnsupportedStepError(f"{self.name} layer {layer.id}", reasons)
