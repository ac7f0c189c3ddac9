"""A step on SGLang's side: the batch that its runner would make, eagerly or over the static buffers of a graph."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_backends.cache import CacheInputs, Latents
from attn_backends.conformance.foreign.driver import ForeignStep, Handed
from attn_backends.conformance.foreign.pages import token_slots
from attn_backends.conformance.foreign.sglang.batches import FILL, Lengths, lengths_of, make_batch
from attn_backends.conformance.foreign.sglang.engine import Engine
from attn_backends.graphs import run_at_replays
from attn_backends.layer import AttentionLayer
from spec_metadata import Bucket, Step, StepKind

Tensors = dict[str, Tensor]


class SGLangStep(ForeignStep):
    """A planned step."""

    def __init__(self, engine: Engine, kind: StepKind, num_steps: int) -> None:
        self.engine, self.kind, self.num_steps = engine, kind, num_steps
        self.backend = engine.backend_of(kind)
        self.batch: Any = None
        self._forwards: list[Any] = []
        self._planned: list[Any] = []

    @property
    def _backends(self) -> Sequence[Any]:
        """The backend of each forward."""
        return self.backend.attn_backends if self.kind is StepKind.DRAFT_DECODE else [self.backend]

    def _plan(self, plan: Callable[[Any], None], batch: Any) -> None:
        """Have the backend plan, and keep what it would attend with: it holds only the last."""
        self.batch = batch
        with self.engine.simulated():
            plan(batch)
        self._planned = self._held()

    def _held(self) -> list[Any]:
        """The metadata that the backends hold."""
        return [getattr(each, self.engine.parts.held, None) for each in self._backends]

    def _hold(self) -> None:
        """Have the backends hold this step's metadata."""
        for backend, planned in zip(self._backends, self._planned, strict=True):
            setattr(backend, self.engine.parts.held, planned)

    def begin(self, forward: int) -> None:
        """Slice the slots of each forward, as `draft_forward` does."""
        self._hold()
        if forward == 0 or not self._forwards:
            self._forwards = self._sliced()

    def _sliced(self) -> list[Any]:
        if self.kind is not StepKind.DRAFT_DECODE:
            return [self.batch]
        slots = self.engine.api.per_step_draft_out_cache_loc(
            self.batch.out_cache_loc, self.batch.batch_size, 1, self.num_steps
        )
        forwards = [copy(self.batch) for _ in self._backends]
        for forward, batch in enumerate(forwards):
            batch.out_cache_loc = slots[forward]
        return forwards

    def store(self, forward: int, inputs: CacheInputs, layer: AttentionLayer) -> None:
        """Have the backend store the rows, as it does when it attends; what it attends to here is dropped."""
        assert isinstance(inputs, Latents), "its cache is one of latents"
        nope, rope = inputs.latent.unsqueeze(1).tensor_split((layer.v_head_dim,), dim=-1)
        q = inputs.latent.new_zeros(len(inputs.latent), layer.num_heads, layer.head_dim)
        self._call(forward, q, layer, {"k": nope, "v": nope, "k_rope": rope})

    def attend(self, forward: int, q: Tensor, layer: AttentionLayer) -> Tensor:
        """Call the backend as an absorbed MLA layer does, with the cache stored already. SGLang plans with the scale of
        its model; queries of a layer of another one are multiplied by what that is off.
        """
        scaled = q if layer.scale == self.engine.layer.scaling else q * (layer.scale / self.engine.layer.scaling)
        return self._call(forward, scaled, layer, {}).view(q.shape[0], layer.num_heads, layer.v_head_dim)

    def _call(self, forward: int, q: Tensor, layer: AttentionLayer, stored: Tensors) -> Tensor:
        """The backend's `forward`. stored: k, v and k_rope, if it is to store them."""
        nope, rope = (part.contiguous() for part in q.tensor_split((layer.v_head_dim,), dim=-1))
        given: dict[str, Any] = {"k": None, "v": None, **stored, "save_kv_cache": bool(stored), "q_rope": rope}
        if self.engine.parts.joined and not self.engine.right:
            nope, _ = q.contiguous(), given.pop("q_rope")
            if stored:
                given["k"] = torch.cat((given["k"], given.pop("k_rope")), dim=-1)
        given |= {"layer": self.engine.layer, "forward_batch": self._forwards[forward]}
        with self.engine.simulated():
            out: Tensor = self._backends[forward].forward(nope, **given)
        return out

    def read_slots(self, forward: int) -> list[list[int]] | None:
        """Slots that the metadata lists for each row."""
        numbers = self.engine.numbers
        listed = self.engine.parts.read(self._backends[forward], self._planned[forward], self.batch)
        return None if listed is None else [numbers.slots(torch.tensor(row)).tolist() for row in listed]

    def handed_slots(self, forward: int) -> Handed:
        """The slots that the pool was handed."""
        return Handed.of(self._forwards[forward].out_cache_loc, self.engine.numbers.slots)

    @abstractmethod
    def load(self, step: Step) -> None:
        """See `ForeignStep`."""


class EagerStep(SGLangStep):
    """A step of a server without graphs."""

    def __init__(self, engine: Engine, step: Step) -> None:
        super().__init__(engine, step.kind, step.num_steps)
        lens = lengths_of(step)
        batch = make_batch(engine.api, lens, _step_tensors(engine, step, lens))
        engine.runner.kv_index_translator.bind_own_plan(batch)
        self._plan(self.backend.init_forward_metadata, batch)

    def load(self, step: Step) -> None:
        """An eager step is planned once."""
        raise AssertionError("an eager step is not replayed")


class CapturedStep(SGLangStep):
    """A step over the static buffers of a graph's runner. They are those of the kind: its graphs take turns."""

    def __init__(self, engine: Engine, bucket: Bucket, num_steps: int) -> None:
        drafts = bucket.kind is StepKind.DRAFT_DECODE
        super().__init__(engine, bucket.kind, num_steps if drafts else 1)
        self.bs, self.width = bucket.bs, bucket.width
        self.static = engine.static_of(bucket.kind, self.width, self.num_steps)
        self._pad()
        self._serve_width()
        lens = self._padded(Lengths(self.kind, (), ()))
        batch = make_batch(engine.api, lens, self._views())
        engine.runner.kv_index_translator.bind_runner_slots(batch)
        self._plan(lambda each: self.backend.init_forward_metadata_out_graph(each, in_capture=True), batch)

    def begin(self, forward: int) -> None:
        """The first call of the region is the backend's own."""
        super().begin(forward)
        if forward == 0:
            run_at_replays(self._plan_in_graph)

    def _plan_in_graph(self) -> None:
        with self.engine.simulated():
            self.backend.init_forward_metadata_in_graph(self.batch)

    def load(self, step: Step) -> None:
        """Copy a step's tensors, padded as the runner pads, and have the backend plan for a replay."""
        raw = lengths_of(step) if step.kind is not StepKind.IDLE else Lengths(self.kind, (), ())
        if len(raw.committed) != self.bs:
            self._pad()
        if raw.committed:
            for name, source in _step_tensors(self.engine, step, raw).items():
                self.static[name][: source.shape[0]].copy_(source)
        batch = make_batch(self.engine.api, self._padded(raw), self._views())
        self.engine.runner.kv_index_translator.bind_runner_slots(batch)
        self._serve_width()
        with self.engine.simulated():
            self.backend.init_forward_metadata_out_graph(batch)

    def _serve_width(self) -> None:
        """Draft extends of graphs are as wide as a server's verifies: make it a server of this width."""
        if self.kind is StepKind.DRAFT_EXTEND and hasattr(self.backend, "num_draft_tokens"):
            self.backend.num_draft_tokens = self.width

    def _pad(self) -> None:
        for name, tensor in self.static.items():
            tensor.fill_(FILL if name.startswith("seq_lens") else 0)

    def _views(self) -> Tensors:
        rows = {"positions": self.width, "out_cache_loc": self.width * self.num_steps}
        return {name: tensor[: self.bs * rows.get(name, 1)] for name, tensor in self.static.items()}

    def _padded(self, raw: Lengths) -> Lengths:
        """The lengths with padded rows, whose seq_lens are the fill value."""
        missing = self.bs - len(raw.committed)
        before = Lengths(self.kind, (FILL,), (self.width,)).seq_lens[0] - FILL
        return replace(raw, committed=raw.committed + (FILL - before,) * missing, widths=(self.width,) * self.bs)


def _step_tensors(engine: Engine, step: Step, lens: Lengths) -> Tensors:
    """The tensors of a step's batch. Its tokens are written into rows of `req_to_token`."""
    rows, device = engine.take_rows(step.bs), step.seq_lens.device
    table = engine.runner.req_to_token_pool.req_to_token
    slots = engine.numbers.slots(token_slots(step, table.shape[1]))
    table[rows, : slots.shape[1]] = slots.to(table.dtype)
    return {
        "req_pool_indices": rows,
        "seq_lens": torch.tensor(lens.seq_lens, device=device),
        "seq_lens_cpu": torch.tensor(lens.seq_lens),
        "positions": torch.tensor(lens.positions, device=device),
        "out_cache_loc": engine.numbers.slots(step.flat_slots()),
    }
