"""A step on vLLM's side: what its runner and its speculator do, eagerly or over the buffers that a graph reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_backends.cache import CacheInputs
from attn_backends.conformance.foreign.driver import ForeignStep, Handed
from attn_backends.conformance.foreign.pages import token_slots
from attn_backends.conformance.foreign.vllm.engine import Engine
from attn_backends.conformance.foreign.vllm.parts import Listed
from attn_backends.graphs import run_at_replays
from attn_backends.layer import AttentionLayer
from spec_metadata import Bucket, Step, StepKind


class Inputs:
    """The runner's buffers: vLLM's own, block tables gathered for a batch, and slots. num_tokens: at most."""

    def __init__(self, engine: Engine, max_reqs: int, num_tokens: int) -> None:
        device = engine.device
        self.own = engine.api.InputBuffers(max_reqs, num_tokens, device)
        self.rows = torch.full((max_reqs,), -1, dtype=torch.int64, device=device)
        self.computed = torch.zeros(engine.num_rows, dtype=torch.int32, device=device)
        self.table = torch.zeros(max_reqs, *engine.tables.input_block_tables[0].shape[1:], dtype=torch.int32).to(device)
        self.table_pointer = torch.tensor([self.table.data_ptr()], dtype=torch.uint64, device=device)
        self.slots = torch.full((1, num_tokens), -1, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Batch:
    """A batch as the host knows it. committed, widths: of each request. bs, num_tokens: of the batch, with padding."""

    committed: tuple[int, ...]
    widths: tuple[int, ...]
    bs: int
    num_tokens: int

    @classmethod
    def of(cls, step: Step) -> Batch:
        """A step's, unpadded."""
        assert step.seq_lens_cpu is not None, "the kernel declares that it needs lengths on the host"
        widths = tuple(getattr(step.query, "lens_cpu", None) or (step.width,) * step.bs)
        padding = (0,) * (len(widths) - len(step.seq_lens_cpu))  # all of a step of padding alone
        return cls((*step.seq_lens_cpu, *padding), widths, step.bs, sum(widths))

    @property
    def starts(self) -> Tensor:
        """[bs + 1] int32, padded requests without a row."""
        ends = torch.tensor((0, *self.widths, *(0,) * (self.bs - len(self.widths)))).cumsum(0)
        return ends.to(torch.int32)

    def lens(self, forward: int) -> Tensor:
        """[bs] int32 tokens of each request with the rows of a forward, padded by 0."""
        real = [n + width + forward for n, width in zip(self.committed, self.widths, strict=True)]
        return torch.tensor([*real, *(0,) * (self.bs - len(real))], dtype=torch.int32)


class VLLMStep(ForeignStep):
    """A planned step. at: the forward of a draft that the buffers are those of, None if it is none yet."""

    def __init__(self, engine: Engine, kind: StepKind, inputs: Inputs, batch: Batch, num_steps: int) -> None:
        self.engine, self.kind, self.inputs, self.batch = engine, kind, inputs, batch
        self.num_steps, self.drafts = num_steps, kind is StepKind.DRAFT_DECODE
        self.at: int | None = None
        self.builder = engine.builder_of(kind)
        self.is_fused = self.drafts and self.builder.supports_draft_decode_metadata_update
        self.planned: Any = None
        self._seen: dict[int, tuple[Listed, Tensor]] = {}

    def fill(self, step: Step) -> None:
        """Bring the buffers a step, as `prepare_inputs` and `prepare_attn` of the runner do."""
        engine, own, batch, bs = self.engine, self.inputs.own, self.batch, len(self.batch.committed)
        rows = engine.take_rows(bs)
        if bs:
            self._assign(rows.tolist(), engine.numbers.slots(token_slots(step, engine.max_model_len)))
        self.inputs.rows.fill_(-1)
        self.inputs.rows[:bs] = rows
        self.inputs.computed[rows] = torch.tensor(batch.committed, dtype=torch.int32, device=engine.device)
        own.query_start_loc.fill_(sum(batch.widths))
        own.query_start_loc[: batch.bs + 1] = batch.starts.to(engine.device)
        engine.tables.gather_block_tables(rows, batch.bs, (self.inputs.table,), self.inputs.table_pointer)
        if not self.drafts:
            rows_and_starts = rows, own.query_start_loc[: bs + 1]
            engine.api.prepare_pos_seq_lens(*rows_and_starts, self.inputs.computed, own.positions, own.seq_lens)
            self._slot_rows(rows)

    def _assign(self, rows: list[int], slots: Tensor) -> None:
        """Give requests their blocks. slots: [bs, ...] of their leading tokens."""
        size, tables = self.engine.block_size, self.engine.tables
        lens = self.batch.lens(max(self.num_steps - 2, 0))[: len(rows)].tolist()
        for row, request, length in zip(rows, slots, lens, strict=True):
            tables.append_block_ids(row, ((request[:length:size] // size).tolist(),), overwrite=True)
        tables.apply_staged_writes()

    def _slot_rows(self, rows: Tensor) -> None:
        """Slots of the rows that the buffers have now."""
        own, num_tokens = self.inputs.own, self.batch.num_tokens
        starts = own.query_start_loc[: rows.shape[0] + 1]
        self.engine.tables.compute_slot_mappings(rows, starts, own.positions, num_tokens, out=self.inputs.slots)

    def common(self, forward: int = 0, max_seq_len: int = 0) -> Any:
        """vLLM's batch object, over the buffers. max_seq_len: of a graph, else that of the batch with all drafts."""
        batch, own, lens = self.batch, self.inputs.own, self.batch.lens(forward)
        longest = int(batch.lens(self.num_steps - 1).max())
        return self.engine.api.CommonAttentionMetadata(
            query_start_loc=own.query_start_loc[: batch.bs + 1],
            query_start_loc_cpu=batch.starts,
            seq_lens=own.seq_lens[: batch.bs],
            seq_lens_cpu_upper_bound=lens,
            max_seq_len=max_seq_len or min(longest, self.engine.max_model_len),
            num_reqs=batch.bs,
            num_actual_tokens=batch.num_tokens,
            max_query_len=max(batch.widths, default=1),
            block_table_tensor=self.inputs.table[: batch.bs],
            slot_mapping=self.inputs.slots[0, : batch.num_tokens],
            positions=own.positions[: batch.num_tokens],
            is_prefilling=torch.full((batch.bs,), self.kind is StepKind.PREFILL),
        )

    def begin(self, forward: int) -> None:
        """Go to a forward of a draft, as the speculator's loop does: one after another, or from the first again."""
        if not self.drafts or forward == self.at:
            return
        if self.at is None or forward < self.at:
            run_at_replays(self._restart)
            self._reach(0)
        while self.at is not None and self.at < forward:
            run_at_replays(self._advance)
            self._reach(self.at + 1)

    def _reach(self, forward: int) -> None:
        """Plan a forward whose lengths are there: on the device, or by the host once more."""
        self.at = forward
        if self.is_fused:
            self.builder.update_draft_decode_metadata(self.planned)
        else:
            run_at_replays(lambda: self.rebuild(forward))
        self._seen[forward] = Listed.of(self.planned).copied(), self.inputs.slots[0].clone()

    def rebuild(self, forward: int) -> None:
        """Build once more."""
        with self.engine.simulated():
            self.planned = self.builder.build(0, self.common(forward))

    def _restart(self) -> None:
        """Lengths of the first forward, as `prepare_decode_inputs` makes them of the committed tokens."""
        own, bs, device = self.inputs.own, len(self.batch.committed), self.engine.device
        committed = torch.tensor(self.batch.committed, dtype=torch.int32, device=device)
        own.positions[:bs] = committed - 1
        nothing = torch.zeros_like(committed)
        sampled = torch.zeros(self.batch.bs, dtype=torch.int64, device=device)
        limits = self.engine.max_model_len, own.max_num_reqs
        self.engine.api.prepare_decode_inputs(nothing, committed, nothing, own, sampled, *limits)
        self._slot_rows(self.inputs.rows[: self.batch.bs])

    def _advance(self) -> None:
        """Lengths of the next forward, as `update_draft_inputs` makes them of the last, and its slots."""
        bs, device = self.batch.bs, self.engine.device
        tokens, hidden = torch.zeros(bs, dtype=torch.int64, device=device), torch.zeros(bs, 1, device=device)
        sampled, drafted = torch.zeros_like(tokens), torch.zeros(bs, self.num_steps, dtype=torch.int64, device=device)
        first = torch.zeros((), dtype=torch.int64, device=device)
        limits = bs, self.engine.max_model_len, self.num_steps + 1
        buffers = drafted, hidden.clone(), self.inputs.own, sampled
        self.engine.api.update_draft_inputs(tokens, first, hidden, *buffers, *limits)
        self._slot_rows(self.inputs.rows[:bs])

    def store(self, forward: int, inputs: CacheInputs, layer: AttentionLayer) -> None:
        """Have vLLM store the rows."""
        with self.engine.simulated():
            self.engine.store(inputs, self.inputs.slots[0, : self.batch.num_tokens], layer)

    def attend(self, forward: int, q: Tensor, layer: AttentionLayer) -> Tensor:
        """Attend as a layer does, with the cache stored already."""
        self.begin(forward)
        with self.engine.simulated():
            return self.engine.attend(q, self.planned, layer)

    def read_slots(self, forward: int) -> list[list[int]] | None:
        """Slots that the metadata lists for each row."""
        listed = self._seen[forward][0] if self.drafts else Listed.of(self.planned)
        slots = self.engine.numbers.slots
        return [slots(torch.tensor(row)).tolist() for row in listed.rows(self.engine.block_size)]

    def handed_slots(self, forward: int) -> Handed:
        """The slots that vLLM was handed."""
        slots = self._seen[forward][1] if self.drafts else self.inputs.slots[0]
        return Handed.of(slots[: self.batch.num_tokens], self.engine.numbers.slots)


class EagerStep(VLLMStep):
    """A step of a server without graphs."""

    def __init__(self, engine: Engine, step: Step) -> None:
        batch = Batch.of(step)
        inputs = Inputs(engine, batch.bs, batch.num_tokens)
        super().__init__(engine, step.kind, inputs, batch, step.num_steps)
        self.fill(step)
        if self.drafts:
            self._restart()
        self.rebuild(0)

    def load(self, step: Step) -> None:
        """An eager step is planned once."""
        raise AssertionError("an eager step is not replayed")


class CapturedStep(VLLMStep):
    """A step over the buffers of a graph. They are those of the kind: its graphs take turns. What is built for a replay
    is dropped: the graph holds what it was captured with.
    """

    def __init__(self, engine: Engine, bucket: Bucket, num_steps: int) -> None:
        bs, width = bucket.bs, bucket.width
        inputs = engine.static.get(bucket.kind)
        if inputs is None:
            most = engine.capacity.max_bs
            inputs = engine.static[bucket.kind] = Inputs(engine, most, most * width)
        batch = Batch((0,) * bs, (width,) * bs, bs, bs * width)
        super().__init__(engine, bucket.kind, inputs, batch, num_steps if bucket.kind is StepKind.DRAFT_DECODE else 1)
        engine.api.InputBatch.make_dummy(bs, bs * width, inputs.own, max_query_len=width)
        inputs.table[:bs].zero_()
        inputs.slots.fill_(-1)
        with engine.simulated():
            common = self.common(max_seq_len=engine.max_model_len)
            self.planned = self.builder.build_for_cudagraph_capture(common)

    def load(self, step: Step) -> None:
        """Bring the buffers another step, padded as the runner pads."""
        real = Batch.of(step) if step.kind is not StepKind.IDLE else Batch((), (), 0, 0)
        self.batch = Batch(real.committed, real.widths, self.batch.bs, self.batch.num_tokens)
        self.at = None
        self.fill(step)
        if self.drafts:
            self._restart()
        if not self.is_fused:
            self.rebuild(0)

    def rebuild(self, forward: int) -> None:
        """Build once more, for what that writes."""
        held = self.planned
        super().rebuild(forward)
        self.planned = held
