"""Values that no row shows, because only a store reads them: what becomes of the inputs of compressors."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from attn_backends.explain.reading import Reader
from spec_metadata import Step, allocate, misfit, pad_step

STORED = ("entry_writes", "entry_positions", "input_rows", "state_reads", "state_writes")
"""Buffers of `spec_metadata.plans.compressed`, without the ratio behind their names."""
TOLD = 3  # values of a buffer


def defined(reader: Reader, step: Step) -> Mapping[str, Tensor]:
    """Such buffers as the backend's own definition, `write`, makes them of the step; none without compressors. step:
    without the padding of a graph.
    """
    meta, backend = reader.meta, reader.backend
    specs = backend.buffers(meta.step.kind)
    stored = [spec.name for spec in specs if spec.name.rpartition("_")[0] in STORED]
    if not stored or not _fits(reader, step):
        return {}
    if meta.bucket is not None:
        step = pad_step(step, meta.bucket, backend.capacity)
    buffers = allocate(specs, meta.buffers.extent, backend.device)
    backend.write(step, buffers)
    return {spec.name: buffers[spec.name] for spec in specs if spec.name in ("qo_indptr", *stored)}


def _fits(reader: Reader, step: Step) -> bool:
    """Whether the metadata has the layout of the step; where it has not, its rows are wrong."""
    planned = reader.meta.step
    if reader.meta.bucket is not None:
        return not misfit(planned, step)
    return (step.kind, step.bs, step.num_tokens) == (planned.kind, planned.bs, planned.num_tokens) and step.bs > 0


def faults_of(reader: Reader, right: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The first values of each buffer that differ from what is right."""
    told = []
    for name, buffer in right.items():
        given = reader.meta.buffers[name]
        places = (given != buffer).nonzero().tolist()
        values = [f"{place} is {int(given[tuple(place)])}, not {int(buffer[tuple(place)])}" for place in places[:TOLD]]
        if places:
            told.append(f"{name} {'; '.join(values)}" + (f"; {len(places) - TOLD} more" if len(places) > TOLD else ""))
    return tuple(told)
