"""The only file of the fuzzer that knows the library: it builds engines, hands steps over, and reads metadata back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_backends import (
    AttentionLayer,
    AttnBackendsError,
    CacheFormat,
    KeyValues,
    Latents,
    PagedKV,
    PagedLatent,
    get_backend,
)
from attn_backends import backend as base
from attn_backends.backend import AttentionBackend
from attn_backends.backends.dsv4 import DSV4Backend
from attn_backends.compressed_cache import FloatPages
from attn_backends.compressed_layer import CompressedInputs, CompressedLayer, Compressor, Projections
from attn_backends.planning.metadata import ForwardMetadata, Metadata
from attn_backends.selection import providers
from attn_backends.selection.choose import Workload
from spec_metadata import (
    BlockTable,
    BoundedQuery,
    Bucket,
    CacheGeometry,
    Capacity,
    InvalidStepError,
    PackedQuery,
    Paging,
    RequestTable,
    Step,
    StepKind,
    TokenBucket,
    UniformQuery,
)
from spec_metadata.plans.compressed import Compression
from tests.fuzz.compressed import Ring
from tests.fuzz.model import Ints
from tests.fuzz.steps import RAGGED, Drawn, Slot, World
from tests.triton_interpreter import interpreted

REFUSALS = (AttnBackendsError, InvalidStepError)
KIND_OF = {
    "prefill": StepKind.PREFILL,
    "decode": StepKind.DECODE,
    "draft": StepKind.DRAFT_DECODE,
    "block": StepKind.DRAFT_BLOCK,
    "verify": StepKind.TARGET_VERIFY,
    "ragged verify": StepKind.TARGET_VERIFY,
    "extend": StepKind.DRAFT_EXTEND,
    "packed extend": StepKind.DRAFT_EXTEND,
    "ragged extend": StepKind.DRAFT_EXTEND,
}


class SmallDSV4(DSV4Backend):
    """DeepSeek-V4's format with blocks and a window that small pages hold."""

    name = "small_dsv4"
    window = 8
    compressions = (Compression(4, overlap=True, indexed=True), Compression(8))


def start(device: str) -> None:
    """Ready a process: one thread, and on a CPU Triton's interpreter, which Triton looks for when it is imported."""
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)


@cache
def interpret_fused_planners() -> None:
    """Run fused planners and input copies in Triton's interpreter, where no GPU is."""
    interpreted("triton_plan", "_plan_pages")
    inputs, torchs = interpreted("triton_inputs", "_copy_inputs"), base.bind_inputs
    providers.runs_on_triton = lambda device: []
    base.bind_inputs = lambda planner, static: (
        inputs.bind_inputs(static) if planner.is_fused and static.device.type == "cpu" else torchs(planner, static)
    )


def flat(plan: Any) -> dict[str, Any]:
    """A plan's fields, those of a compression's entries with its ratio behind their names."""
    found = {field.name: getattr(plan, field.name) for field in fields(plan)}
    for ratio, entries in found.pop("entries", {}).items():
        found |= {f"{name}_{ratio}": part for name, part in flat(entries).items() if part is not None}
    return found


class Recorder:
    """The metadata of the steps of one layout, copied as each is planned and read back once, without a wait between.

    Buffers of a plan are in one allocation, or two where phases share a table; each costs a step one copy. What a tree
    adds costs two for each forward.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._regions: dict[str, Tensor] = {}
        self._trees: dict[tuple[int, str], Tensor] = {}

    def add(self, place: int, meta: Metadata[Any], ancestors: tuple[Tensor, ...]) -> None:
        """Keep what metadata says now. ancestors: of this step, for each forward of a drafted tree."""
        if not self._regions:
            self._look_at(meta, ancestors)
        for name, regions in self._regions.items():
            regions[place].copy_(self._region(meta, name))
        if not self._has_tree:
            return
        for forward in range(len(meta.plans)):
            tree = meta.at(forward, ancestors[forward] if ancestors else None).tree
            for name, part in (("slots", tree.slots), ("mask", tree.mask)):
                if (forward, name) not in self._trees:
                    self._trees[forward, name] = part.new_empty((self._number, *part.shape))
                self._trees[forward, name][place].copy_(part)

    def forwards(self, steps: Ints) -> Iterator[tuple[dict[str, Any], Ints, tuple[Ints, Any] | None]]:
        """Of each forward: its plan, write slots, and a tree's slots and mask; of these steps of all."""
        regions = {name: each.cpu().numpy() for name, each in self._regions.items()}
        for forward, (plan, writes) in enumerate(self._views):
            read = {name: self._read(regions, part)[steps] if _is_place(part) else part for name, part in plan.items()}
            tree = [self._trees[forward, name].cpu().numpy()[steps] for name in ("slots", "mask") if self._trees]
            yield read, self._read(regions, writes)[steps], (tree[0], tree[1]) if tree else None

    def _look_at(self, meta: Metadata[Any], ancestors: tuple[Tensor, ...]) -> None:
        """Where the parts of a plan are in its allocations; all steps of a layout have them there."""
        ats = [meta.at(i, ancestors[i] if ancestors else None) for i in range(len(meta.plans))]
        names = {_memory(buffer): name for name, buffer in meta.buffers.items()}  # a buffer of each allocation

        def is_elsewhere(part: Any) -> bool:
            """A tree's mask, which a window reads, is the step's."""
            return isinstance(part, Tensor) and _memory(part) not in names

        plans = [{n: part for n, part in flat(plan).items() if not is_elsewhere(part)} for plan in meta.plans]
        self._has_tree = ats[0].tree is not None
        tensors = [part for plan in plans for part in plan.values() if isinstance(part, Tensor)]
        tensors += [at.write_slots for at in ats]
        starts = {_memory(part): part.data_ptr() for part in sorted(tensors, key=Tensor.data_ptr, reverse=True)}
        ends = {_memory(part): _end(part) for part in sorted(tensors, key=_end)}

        def place(part: Any) -> Any:
            if not isinstance(part, Tensor):
                return part
            return names[_memory(part)], *_place(part, starts[_memory(part)])

        self._views = [
            ({name: place(part) for name, part in plan.items()}, place(at.write_slots))
            for plan, at in zip(plans, ats, strict=True)
        ]
        self._offsets = {names[m]: start - meta.buffers[names[m]].data_ptr() for m, start in starts.items()}
        for memory, start in starts.items():
            size = (self._number, ends[memory] - start)
            self._regions[names[memory]] = torch.empty(size, dtype=torch.uint8, device=tensors[0].device)

    def _region(self, meta: Metadata[Any], name: str) -> Tensor:
        anchor = meta.buffers[name]
        offset = anchor.data_ptr() - _memory(anchor) + self._offsets[name]
        region = torch.empty(0, dtype=torch.uint8, device=anchor.device)
        return region.set_(anchor.untyped_storage(), offset, (self._regions[name].shape[1],))

    def _read(self, regions: Any, place: tuple[str, int, tuple[int, ...], tuple[int, ...], Any]) -> Any:
        name, offset, shape, strides, dtype = place
        of_name = regions[name]
        return np.ndarray((self._number, *shape), dtype, of_name, offset, (of_name.strides[0], *strides))


def _memory(part: Tensor) -> int:
    """The address of the allocation that a tensor is in."""
    return part.untyped_storage().data_ptr()


def _end(part: Tensor) -> int:
    """The address behind a tensor's last element."""
    last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    return part.data_ptr() + (last + 1) * part.element_size() if part.numel() else part.data_ptr()


def _place(part: Tensor, start: int) -> tuple[int, tuple[int, ...], tuple[int, ...], Any]:
    dtype = np.dtype(str(part.dtype).removeprefix("torch."))
    return part.data_ptr() - start, tuple(part.shape), tuple(s * part.element_size() for s in part.stride()), dtype


def _is_place(part: Any) -> bool:
    return isinstance(part, tuple)


LAYER_SIZES = {CacheFormat.LATENT: (16, 1, 576, 512), CacheFormat.KV: (8, 2, 128, 128)}
"""Of what is attended on a GPU: heads, key-value heads, columns of keys and of values."""


class Engine:
    """A backend with an engine's tables, and the steps of a world handed over to it."""

    def __init__(self, world: World, device: str, kernel: str, *, checking: bool = False) -> None:
        self.world, self.device = world, torch.device(device)
        self.capacity = Capacity(
            world.max_bs, world.max_context, world.page_size, world.topk, world.num_steps, world.num_draft_tokens,
            world.num_rerun,
        )  # fmt: skip
        self.geometry = CacheGeometry(world.num_pages, world.page_size, world.reserved_page, world.reserved_row)
        is_small = world.backend == "dsv4" and world.page_size % 128
        self.kind: type[AttentionBackend] = SmallDSV4 if is_small else get_backend(world.backend)
        chosen = kernel if world.attends and kernel in self.kernels() else "torch"
        if world.attends and kernel == "auto":
            chosen = "triton" if world.backend == "dsv4" and device != "cpu" else "auto"
        workload = None
        if chosen == "auto" and device != "cpu":  # every format of the backend, so that its kernels take each
            layers = [AttentionLayer(0, *LAYER_SIZES[format], 1.0) for format in self.kind.formats]
            workload = Workload(world.page_size, layers, torch.bfloat16)
        self.backend = self.kind(
            self.capacity, self.geometry, self.device, kernel=chosen, planner=world.planner, checking=checking,
            workload=workload,
        )  # fmt: skip
        self.table = torch.zeros(world.num_rows, world.row_tokens, dtype=torch.int32, device=self.device)

    def kernels(self) -> list[str]:
        """Names of the backend's kernels."""
        return [kernel.name for kernel in self.kind.kernels]

    @property
    def rings(self) -> list[Ring]:
        """The compressions of dsv4."""
        return [Ring(c.ratio, c.read_window, ring, not c.indexed) for c, ring in self.backend.rings.items()]

    def needs_lens(self, kind: str) -> bool:
        """Whether the host must bring exact lengths."""
        able = self.backend.kernel_of(KIND_OF[kind]).capabilities
        return bool(able[KIND_OF[kind]].needs_host_lens)

    def takes(self, slot: Slot) -> bool:
        """Whether a vendor's kernel says that it takes steps of a layout; torch's must take what the documents say."""
        kernel = self.backend.kernel_of(KIND_OF[slot.kind])
        able = kernel.capabilities[KIND_OF[slot.kind]]
        if kernel.name == "torch":
            return True
        reasons = able.width_reasons(slot.width, slot.is_tree) + able.page_reasons(self.world.page_size)
        reasons += self.backend.capture_reasons(self.bucket(slot)) if self.world.path == "replay" else []
        packs = able.captures_packed if slot.kind in RAGGED else able.packed
        return not reasons and (packs or not slot.is_packed)

    def bucket(self, slot: Slot) -> Bucket | TokenBucket:
        """A captured slot's key."""
        if slot.is_packed:
            return TokenBucket(KIND_OF[slot.kind], slot.bs, slot.num_tokens)
        return self.capacity.bucket(KIND_OF[slot.kind], slot.bs)

    def set_table(self, owned: Ints) -> None:
        """Write the request-to-token table anew, in place."""
        self.table.copy_(torch.from_numpy(owned[:, : self.world.row_tokens].astype(np.int32)))

    def capture(self, slot: Slot) -> Metadata[Any]:
        """Static metadata of a slot."""
        return self.backend.capture(self.bucket(slot), self._paging())

    def capture_kind(self, kind: str, bs: int, width: int) -> Metadata[Any]:
        """Static metadata of a bucket that the capacity may not have."""
        step_kind = StepKind.IDLE if kind == "idle" else KIND_OF[kind]
        return self.backend.capture(Bucket(step_kind, bs, width), self._paging())

    def idle(self) -> Step:
        """A step without requests."""
        return Step.idle(self._paging(bs=0))

    def _paging(self, bs: int = 1) -> Paging:
        pages = torch.zeros(bs, self.world.max_pages, dtype=torch.int32, device=self.device)
        if self.world.is_block_table:
            return BlockTable(pages, self.geometry)
        return RequestTable(self.table, pages[:, 0], self.geometry)

    def build(self, parts: dict[str, Any]) -> Step:
        """A step of its parts. kind: as `steps.KINDS`. table, rows: of a request table; of a block table rows is None.
        starts, widths: of a packed query, else starts is None. The rest as `Step` has it.
        """
        p, geometry = SimpleNamespace(**parts), parts["geometry"]
        paging = BlockTable(p.table, geometry) if p.rows is None else RequestTable(p.table, p.rows, geometry)
        host = {"max_committed": p.max_committed, "seq_lens_cpu": p.lens_cpu}
        query = UniformQuery(p.width) if p.starts is None else PackedQuery(p.starts, p.widths)
        match p.kind:
            case "prefill":
                return Step.prefill(query, p.lens, paging, p.slots, **host)
            case "decode":
                return Step.decode(p.lens, paging, p.slots, **host)
            case "draft":
                return Step.draft_decode(p.width, p.num_steps, p.lens, paging, p.slots, **host)
            case "block":
                return Step.draft_block(p.width, p.lens, paging, p.slots, **host)
            case "ragged verify" | "ragged extend":
                make = Step.target_verify if p.kind == "ragged verify" else Step.draft_extend
                return make(BoundedQuery(p.asked, p.num_tokens, p.width), p.lens, paging, p.slots, **host)
            case "verify":
                return Step.target_verify(p.width, p.lens, paging, p.slots, tree_mask=p.mask, **host)
        return Step.draft_extend(query, p.lens, paging, p.slots, **host)

    def forwards(
        self, meta: Metadata[Any], ancestors: tuple[Tensor, ...]
    ) -> Iterator[tuple[ForwardMetadata[Any], int]]:
        """The metadata of each forward, and its query rows. ancestors: for each forward of a drafted tree."""
        for forward in range(len(meta.plans)):
            at = meta.at(forward, ancestors[forward] if ancestors else None)
            yield at, at.write_slots.shape[0]

    def contents(self, meta: Metadata[Any]) -> list[Any]:
        """A copy of what lies in the buffers of metadata."""
        return [part.cpu().numpy().copy() for part in meta.buffers.values()]

    def plan(self, meta: Metadata[Any] | None, step: Step) -> Metadata[Any]:
        """Eager metadata of a step, or captured one replayed on it."""
        if meta is None:
            return self.backend.init_forward_metadata(step)
        self.backend.replay(meta, step)
        return meta


class Handed:
    """The tensors of drawn steps, uploaded at once."""

    def __init__(self, engine: Engine, drawn: Drawn) -> None:
        self.engine, self.drawn, group = engine, drawn, drawn.group
        self._lens = self._tensor("seq_lens", group.lens)
        self._rows = self._tensor("paging", group.requests)
        self._tables = self._tensor("paging", drawn.tables)
        self._slots = self._tensor("slots", group.slots if drawn.room is None else drawn.room)
        self._asked = self._tensor("slots", group.widths)
        self._starts = torch.from_numpy(group.starts.astype(np.int32)).to(engine.device)
        self._mask = None if group.mask is None else torch.from_numpy(group.mask).to(engine.device)
        self._ancestors = [torch.from_numpy(each).to(engine.device) for each in group.ancestors]
        self._host_lens = group.lens.tolist()
        self._widths = group.widths.tolist()

    def _tensor(self, name: str, values: Ints) -> Tensor:
        kind = np.int64 if name in self.drawn.wide else np.int32
        values = np.ascontiguousarray(np.repeat(values[..., None], 2, -1) if self.drawn.is_strided else values)
        tensor = torch.from_numpy(values.astype(kind)).to(self.engine.device)
        return tensor[..., 0] if self.drawn.is_strided else tensor

    def ancestors(self, place: int) -> tuple[Tensor, ...]:
        """The paths of one step's drafted tree."""
        return tuple(each[place] for each in self._ancestors)

    def step(self, place: int) -> Step:
        """One step."""
        if self.drawn.group.num_real[place] == 0:
            return self.engine.idle()
        return self.engine.build(self.parts(place))

    def parts(self, place: int) -> dict[str, Any]:
        """What one step of real requests is built from (`Engine.build`)."""
        drawn, group, engine = self.drawn, self.drawn.group, self.engine
        n = int(group.num_real[place])
        widths = tuple(self._widths[place][:n])
        has_own = group.is_packed and drawn.room is None
        num_writes = sum(widths) if has_own else n * group.width * group.num_steps
        gives_lens = drawn.gives_lens or engine.needs_lens(group.kind)
        return {
            "kind": group.kind,
            "lens": self._lens[place, :n],
            "table": self._tables[place, :n] if engine.world.is_block_table else engine.table,
            "rows": None if engine.world.is_block_table else self._rows[place, :n],
            "geometry": engine.geometry,
            "slots": self._slots[place, :num_writes] if drawn.gives_slots else None,
            "mask": None if self._mask is None else self._mask[place, :n],
            "starts": self._starts[place, : n + 1] if has_own else None,
            "widths": widths,
            "asked": None if drawn.room is None else self._asked[place, :n],
            "num_tokens": group.num_tokens,
            "width": group.width,
            "num_steps": group.num_steps,
            "max_committed": drawn.max_committed,
            "lens_cpu": self._host_lens[place][:n] if gives_lens else None,
        }


class Attention:
    """One layer of an engine and its cache, in float64 on a CPU and in bfloat16 on a GPU, for numpy to look at.

    Of dsv4, a layer with a window, and every other time with entries that are listed. guard: pages on either side of
    the cache, which nobody may write.
    """

    guard = 2

    def __init__(self, engine: Engine, rng: np.random.Generator) -> None:
        self.engine, is_cpu = engine, engine.device.type == "cpu"
        self.dtype = torch.float64 if is_cpu else torch.bfloat16
        self.name = "latent" if engine.world.backend in ("flashinfer_mla", "trtllm_mla") else "kv"
        self.name = str(rng.choice(("latent", "kv"))) if engine.world.backend in ("fa3", "reference") else self.name
        if engine.world.backend == "dsv4":
            self.name, self.sizes = "rows", (6, 1, 40, 40) if is_cpu else (16, 1, 512, 512)
        elif self.name == "latent":
            self.sizes = (6, 1, 40, 36) if is_cpu else LAYER_SIZES[CacheFormat.LATENT]
        else:
            self.sizes = (6, 2, 40, 40) if is_cpu else LAYER_SIZES[CacheFormat.KV]
        self.ring = next((r for r in engine.rings if r.has_slots), None) if self.name == "rows" else None
        self.ring = self.ring if rng.random() < 0.5 else None
        self.scale = self.sizes[2] ** -0.5
        self.pools: list[Tensor] = []
        self.layer, self.cache = self._compressed() if self.name == "rows" else self._dense()
        for pool in self.pools:
            pool.copy_(torch.from_numpy(rng.standard_normal(pool.shape)))

    def _guarded(self, *shape: int) -> Tensor:
        geometry = self.engine.geometry
        size = (geometry.num_pages + 2 * self.guard, geometry.page_size, *shape)
        self.pools.append(torch.zeros(size, dtype=self.dtype, device=self.engine.device))
        return self.pools[-1][self.guard : self.guard + geometry.num_pages]

    def _dense(self) -> tuple[AttentionLayer, Any]:
        heads, kv_heads, dim, v_dim = self.sizes
        layer = AttentionLayer(0, heads, kv_heads, dim, v_dim, self.scale)
        if self.name == "latent":
            return layer, PagedLatent(self._guarded(dim), v_dim)
        return layer, PagedKV(self._guarded(kv_heads, dim), self._guarded(kv_heads, v_dim))

    def _compressed(self) -> tuple[AttentionLayer, Any]:
        heads, kv_heads, dim, v_dim = self.sizes
        found = {c.ratio: c for c in self.engine.backend.rings}
        compression = found[self.ring.ratio] if self.ring else None
        made = None
        if compression is not None:
            bias, ones = torch.zeros(compression.ratio, dim * (1 + compression.overlap)), torch.ones(dim)
            made = Compressor(
                *(x.to(self.engine.device) for x in (bias, ones)), 1e-6, torch.ones(2, device=self.engine.device)
            )
        layer = CompressedLayer(
            0, heads, kv_heads, dim, v_dim, self.scale, window=self.engine.backend.window, compression=compression,
            compressor=made,
        )  # fmt: skip
        cache = self.engine.backend.allocate_cache(layer, self.dtype)
        return layer, replace(cache, rows=FloatPages(self._guarded(dim)))

    def random(self, rng: np.random.Generator, *shape: int) -> tuple[Tensor, Any]:
        """Normal values as the layer has them, and the same for numpy."""
        tensor = torch.from_numpy(rng.standard_normal(shape)).to(self.dtype)
        return tensor.to(self.engine.device), tensor.double().numpy()

    def run(self, at: ForwardMetadata[Any], q: Tensor, new: list[Tensor]) -> tuple[Any, Any]:
        """Store a forward's rows and attend: output and log-sum-exp. new: keys, and values of a grouped layer."""
        inputs: Any = Latents(new[0].squeeze(1)) if self.name == "latent" else None
        if self.name == "kv":
            inputs = KeyValues(*new)
        elif self.name == "rows":
            made = Projections(new[0].squeeze(1), new[0].squeeze(1)) if self.ring else None
            inputs = CompressedInputs(new[0].squeeze(1), made)
        self.engine.backend.store(inputs, self.cache, at, self.layer)
        return self.attend(at, q)

    def attend(self, at: ForwardMetadata[Any], q: Tensor) -> tuple[Any, Any]:
        """Output and log-sum-exp over what the cache holds."""
        out, lse = self.engine.backend.forward(q, self.cache, at, self.layer)
        return out.double().cpu().numpy(), lse.double().cpu().numpy()

    def contents(self) -> list[Any]:
        """The pools, guards included: [num_slots, kv_heads, dim] each."""
        return [pool.double().cpu().numpy().reshape(-1, self.sizes[1], pool.shape[-1]) for pool in self.pools]

    def entries(self) -> Any:
        """[num_entries, dim] what dsv4's compressor has made so far."""
        return self.cache.compressor.entries.data.double().cpu().numpy().reshape(-1, self.sizes[2])

    def guards(self) -> list[Any]:
        """What lies on either side of each pool."""
        both = (slice(None, self.guard), slice(-self.guard, None))
        return [pool[part].double().cpu().numpy() for pool in self.pools for part in both]

    @property
    def first_slot(self) -> int:
        """Where slot 0 lies in `contents`."""
        return self.guard * self.engine.geometry.page_size
