"""The interface: types, ownership of results, no hidden state, and steps without requests."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import CheckFailure, Measured, Subject, check
from attn_backends.conformance.comparisons import compare_identical, compare_outputs, nearest
from attn_backends.conformance.exercise import (
    batch_of,
    prepare_memory,
    run_case_eagerly,
    run_forwards,
    scene_of,
    setup_of,
    world_of,
)
from attn_backends.conformance.situations import eager, one_page_size
from spec_metadata import BlockTable, Step, StepKind, TokenBucket, dense_part, idle_step
from spec_metadata.visibility import host_lens


@check("api.idle", one_page_size(eager((StepKind.DECODE,))))
def idle(subject: Subject, case: Case) -> Measured:
    """A step without requests is planned and run, gives outputs without rows, and writes nothing. Tables of any width
    are taken. One of padding alone (`idle_step`), of uniform or packed rows, is right in checking mode, too, and writes
    to the reserved page; the host knows how many keys it sees.
    """
    world = world_of(setup_of(subject, case))
    scene = scene_of(world, batch_of(replace(case, lens=())), case.seed)
    before = prepare_memory(scene, case)
    meta, inputs = world.backend.init_forward_metadata(Step.idle(scene.paging())), scene.inputs()
    (output,) = run_forwards(world, meta, inputs)
    rows = torch.zeros(0, world.layer.num_heads, world.layer.v_head_dim, dtype=world.setup.dtype)
    compare_identical("output", output.out.cpu(), rows)
    compare_identical("cache", world.memory, before)
    capacity, geometry = world.capacity, world.geometry
    checking = world_of(replace(world.setup, checking=True))
    for columns in (0, 1, 2 * world.max_pages):
        table = torch.zeros(0, columns, dtype=world.setup.index, device=world.device)
        world.backend.init_forward_metadata(Step.idle(BlockTable(table, geometry)))
    for bucket in (capacity.bucket(StepKind.DECODE, 2), TokenBucket(StepKind.PREFILL, 1, 3)):
        if bucket.kind in subject.capabilities:
            step = idle_step(bucket, checking.paging(), capacity)
            padding = checking.backend.init_forward_metadata(step).at().write_slots
            compare_identical("slots of padding", padding.cpu(), geometry.reserved_slots(len(padding), rows.device))
            known = torch.tensor(host_lens(step, bucket.bs, 0).kv_lens, dtype=torch.int32)
            compare_identical("keys of padding, as the host knows them", dense_part(step, 0).kv_lens.cpu(), known)
    return Measured()


@check("api.keeps_no_state", one_page_size(eager()))
def keeps_no_state(subject: Subject, case: Case) -> Measured:
    """Metadata holds all there is to know of a step: two planned steps, of two sizes, may be run in any order, and the
    first one again after the other. What they were planned from is overwritten before.
    """
    world = world_of(setup_of(subject, case))
    scenes, planned = [], []
    for turn, lens in enumerate((case.lens, case.lens[:2])):
        scene = scene_of(world, batch_of(replace(case, lens=lens)), case.seed + turn)
        table = world.table.clone()
        step = scene.step()
        planned.append(world.backend.init_forward_metadata(step))
        for given in (step.seq_lens, step.out_cache_loc, step.tree_mask, step.paging.static_input()):
            if given is not None:
                given.zero_()
        scenes.append((scene, table))
    found = []
    for turn in (0, 1, 0):
        (scene, table), meta = scenes[turn], planned[turn]
        world.table.copy_(table)
        prepare_memory(scene, case)
        inputs = scene.inputs()
        found.append(compare_outputs(scene, inputs, run_forwards(world, meta, inputs)))
    return nearest(found)


@check("api.owns_its_results", one_page_size(eager()))
def owns_its_results(subject: Subject, case: Case) -> Measured:
    """Outputs share no memory with queries, cache, metadata or each other."""
    ran = run_case_eagerly(subject, case)
    taken = {"the cache": ran.scene.world.memory, "the table": ran.scene.world.table}
    taken |= {f"q of forward {i}": given.q for i, given in enumerate(ran.inputs)}
    taken |= {f"metadata {name}": tensor for name, tensor in ran.meta.buffers.items()}
    owners = {tensor.untyped_storage().data_ptr(): name for name, tensor in taken.items()}
    for forward, output in enumerate(ran.outputs):
        address = output.out.untyped_storage().data_ptr()
        if address in owners:
            raise CheckFailure(f"output of forward {forward}", f"it lies in the memory of {owners[address]}")
        owners[address] = f"the output of forward {forward}"
    return Measured()


@check("api.leaves_inputs_alone", one_page_size(eager()))
def leaves_inputs_alone(subject: Subject, case: Case) -> Measured:
    """`store` and `forward` change neither queries nor what is to be stored."""
    ran = run_case_eagerly(subject, case)
    for forward, (used, fresh) in enumerate(zip(ran.inputs, ran.scene.inputs(), strict=True)):
        for number, (one, two) in enumerate(zip(used.tensors(), fresh.tensors(), strict=True)):
            compare_identical(f"input {number} of forward {forward}", one, two)
    return Measured()


@check("api.output_types", one_page_size(eager()))
def output_types(subject: Subject, case: Case) -> Measured:
    """Outputs are [num_tokens, num_heads, v_head_dim] in the query's type; the LSE is single precision at least."""
    ran = run_case_eagerly(subject, case)
    layer, declared = ran.scene.world.layer, subject.capabilities[StepKind(case.kind)]
    for forward, (given, output) in enumerate(zip(ran.inputs, ran.outputs, strict=True)):
        expected = ((given.q.shape[0], layer.num_heads, layer.v_head_dim), given.q.dtype)
        if (tuple(output.out.shape), output.out.dtype) != expected:
            got = str((tuple(output.out.shape), output.out.dtype))
            raise CheckFailure(f"output of forward {forward}", "another shape or type", None, str(expected), got)
        lse_dtype = torch.float64 if given.q.dtype is torch.float64 else torch.float32
        lse = (tuple(output.lse.shape), output.lse.dtype)
        if declared.lse is not None and lse != ((given.q.shape[0], layer.num_heads), lse_dtype):
            raise CheckFailure(f"LSE of forward {forward}", "another shape or type", None, str(lse_dtype), str(lse))
    return Measured()
