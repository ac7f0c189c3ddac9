"""Laws: two ways of computing the same thing that must agree. They need no oracle, but for the budget."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import Measured, Subject, check
from attn_backends.conformance.comparisons import expectations, largest_error, returns_lse
from attn_backends.conformance.exercise import (
    Ran,
    batch_of,
    run_case_eagerly,
    run_eagerly,
    scene_of,
    setup_of,
    world_of,
)
from attn_backends.conformance.inputs import ForwardInputs
from attn_backends.conformance.scenes import Scene
from attn_backends.conformance.situations import TREE_TOPK, around_pages, eager, situations
from attn_backends.conformance.worlds import World
from attn_backends.layer import AttentionOutput
from spec_metadata import Step, StepKind


def _agree(ran: Ran, what: str, others: list[AttentionOutput]) -> Measured:
    """Outputs that must equal those of a run, within twice the budget: both may be off by one."""
    out, lse = expectations(ran.scene, ran.inputs)
    worst = 0.0
    for forward, (one, two) in enumerate(zip(ran.outputs, others, strict=True)):
        fields = [(out, one.out, two.out)] + ([(lse, one.lse, two.lse)] if returns_lse(ran.scene) else [])
        for expected, ours, theirs in fields:
            field = f"{expected.field} of forward {forward}, {what}"
            worst = max(worst, largest_error(field, theirs, ours.cpu(), 2 * expected.budget))
    return Measured(worst, 2 * out.budget)


@check("laws.relabelled_pages", eager())
def relabelled_pages(subject: Subject, case: Case) -> Measured:
    """The places of pages change nothing."""
    ran = run_case_eagerly(subject, case)
    elsewhere = scene_of(world_of(setup_of(subject, case)), batch_of(case), case.seed, placement=case.seed + 100)
    return _agree(ran, "with pages elsewhere", run_eagerly(elsewhere, case).outputs)


def _part(ran: Ran, order: list[int]) -> list[AttentionOutput]:
    """The outputs of some of the requests, run in an order on the same cache."""
    scene, numbers = ran.scene.select(order)
    world, requests = ran.scene.world, torch.tensor(order)
    world.memory.copy_(ran.before)
    meta = world.backend.init_forward_metadata(scene.step())
    outputs = []
    for forward, (given, rows) in enumerate(zip(ran.inputs, numbers, strict=True)):
        taken = given.take(torch.tensor(rows, device=world.device), requests.to(world.device))
        at = meta.at(forward, taken.ancestors)
        world.store(taken, at)
        outputs.append(world.attend(taken, at))
    return outputs


def _rows_of(ran: Ran, order: list[int]) -> list[Tensor]:
    return [torch.tensor(rows) for rows in ran.scene.select(order)[1]]


@check("laws.permuted_requests", eager())
def permuted_requests(subject: Subject, case: Case) -> Measured:
    """The order of the requests in a batch changes nothing."""
    ran = run_case_eagerly(subject, case)
    order = list(range(len(case.lens)))[::-1]
    back = [rows.argsort().to(ran.scene.world.device) for rows in _rows_of(ran, order)]
    permuted = _part(ran, order)
    others = [AttentionOutput(o.out[rows], o.lse[rows]) for o, rows in zip(permuted, back, strict=True)]
    return _agree(ran, "with the requests in another order", others)


@check("laws.alone_or_in_a_batch", eager())
def alone_or_in_a_batch(subject: Subject, case: Case) -> Measured:
    """A request gives the same alone as among others."""
    ran = run_case_eagerly(subject, case)
    alone = [_part(ran, [request]) for request in range(len(case.lens))]
    others = [
        AttentionOutput(*(torch.cat([outputs[forward][i] for outputs in alone]) for i in range(2)))
        for forward in range(ran.scene.num_forwards)
    ]
    return _agree(ran, "of each request alone", others)


def _chains(subject: Subject) -> list[Case]:
    if not {StepKind.DECODE, StepKind.TARGET_VERIFY} <= subject.capabilities.keys():
        return []
    return situations(subject, StepKind.TARGET_VERIFY, topks=(1,))


@check("laws.chain_verify_is_repeated_decode", _chains)
def chain_verify_is_repeated_decode(subject: Subject, case: Case) -> Measured:
    """A verify of a chain gives what decoding its tokens one after another gives."""
    ran = run_case_eagerly(subject, case)
    scene, world, width = ran.scene, ran.scene.world, ran.scene.width
    world.memory.copy_(ran.before)
    slots = torch.tensor(scene.write_order(), device=world.device).view(-1, width)
    rows = torch.arange(len(case.lens) * width, device=world.device).view(-1, width)
    outs = []
    for depth in range(width):
        exact = [length + depth for length in case.lens]
        lens = torch.tensor(exact, device=world.device)
        step = Step.decode(lens, scene.paging(), slots[:, depth], seq_lens_cpu=exact)
        outs.append(_attend(world, step, ran.inputs[0].take(rows[:, depth], rows[:, 0])))
    others = AttentionOutput(*(torch.stack([o[i] for o in outs], dim=1).flatten(0, 1) for i in range(2)))
    return _agree(ran, "decoded one by one", [others])


def _trees(subject: Subject) -> list[Case]:
    return [replace(case, lens=around_pages(case)[:2]) for case in _tree_verifies(subject)]


def _tree_verifies(subject: Subject) -> list[Case]:
    return situations(subject, StepKind.TARGET_VERIFY, topks=(TREE_TOPK,))


@check("laws.tree_verify_is_each_path", _trees)
def tree_verify_is_each_path(subject: Subject, case: Case) -> Measured:
    """A verify of a tree gives each node what a chain of its ancestors and itself gives."""
    ran = run_case_eagerly(subject, case)
    scene, world, width = ran.scene, ran.scene.world, ran.scene.width
    outs, lses = torch.empty_like(ran.outputs[0].out), torch.empty_like(ran.outputs[0].lse)
    for request in range(len(case.lens)):
        for node, path in enumerate(scene.paths[request][0]):
            world.memory.copy_(ran.before)
            chosen = torch.tensor([request * width + ancestor for ancestor in path], device=world.device)
            step = _chain_step(scene, request, len(path))
            chain = _attend(world, step, ran.inputs[0].take(chosen, chosen[:0]))
            outs[request * width + node], lses[request * width + node] = chain.out[-1], chain.lse[-1]
    return _agree(ran, "of each path alone", [AttentionOutput(outs, lses)])


def _chain_step(scene: Scene, request: int, length: int) -> Step:
    """A verify of a chain of one request, in the slots that its table has next."""
    one, _ = scene.select([request])
    lens = torch.tensor(one.batch.lens, device=scene.world.device)
    return Step.target_verify(length, lens, one.paging(), seq_lens_cpu=one.batch.lens)


def _attend(world: World, step: Step, given: ForwardInputs) -> AttentionOutput:
    at = world.backend.init_forward_metadata(step).at()
    world.store(given, at)
    return world.attend(given, at)
