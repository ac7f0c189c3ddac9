"""What a fused planner and a fused copy of inputs must do: equal their definitions in torch, and write nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attn_backends.kernels import plan_operators
from attn_backends.kernels.schedule_operators import share_out
from attn_backends.kernels.tile_sizes import TileSizes
from attn_backends.kernels.work_operators import NUM_WORDS, WorkLists, list_work
from attn_backends.planning.metadata import WRITE_SLOTS
from spec_metadata import (
    BlockTable,
    Buffers,
    BufferSpec,
    Extent,
    Step,
    allocate,
    copy_step,
    input_specs,
    static_step,
    write_slots,
)
from spec_metadata.plans import block_table, compressed, csr, ragged
from spec_metadata.plans.compressed import Compression
from spec_metadata.visibility import leading, query_starts
from tests.plan_batches import Case
from tests.specified import specified
from tests.tile_words import words_of

GARBAGE = 12345


class Form(NamedTuple):
    """A plan: its buffers, definition, specified elements, and what binds the fused planner."""

    specs: tuple[BufferSpec, ...]
    write: Callable[[Step, Buffers], None]
    specified: Callable[[Step, Buffers], dict[str, Tensor]]
    bind: Callable[..., Callable[[], None]]


FORMS = {
    "ragged": Form(ragged.BUFFERS, ragged.write_ragged, specified, plan_operators.bind_ragged),
    "block_table": Form(
        block_table.BUFFERS,
        block_table.write_block_table,
        specified,
        plan_operators.bind_block_table,
    ),
    "csr": Form(csr.BUFFERS, csr.write_csr, specified, plan_operators.bind_csr),
}


class Rings(NamedTuple):
    """What a compressed plan is made for. is_block: of draft blocks."""

    window: int
    rings: dict[Compression, int]
    is_block: bool = False

    @property
    def form(self) -> Form:
        """The plan."""
        window, rings, is_block = self
        return Form(
            compressed.buffer_specs(window, tuple(rings), is_block=is_block),
            lambda step, buffers: compressed.write_compressed(step, buffers, window, rings),
            lambda step, buffers: specified(step, buffers, rings),
            lambda step, buffers, bound=None: plan_operators.bind_compressed(step, buffers, window, rings, bound),
        )


RINGS = {  # each with its page size
    "small": (16, Rings(8, {Compression(4, overlap=True, indexed=True): 10, Compression(8): 2})),
    "odd": (12, Rings(5, {Compression(2, overlap=True, indexed=True): 7, Compression(6): 12, Compression(3): 5})),
    "real": (256, Rings(128, {Compression(4, overlap=True, indexed=True): 12, Compression(128): 136})),
    "window alone": (4, Rings(7, {})),
}
RAGGED_RINGS = Rings(5, {Compression(2, overlap=True, indexed=True): 7, Compression(4): 5})
"""Of pages of `ragged_steps`."""
BLOCKS = {"short": (4, Rings(7, {}, is_block=True)), "wide": (64, Rings(128, {}, is_block=True))}


def garbage(specs: tuple[BufferSpec, ...], case: Case) -> Buffers:
    """Buffers in which nothing is right."""
    buffers = allocate((WRITE_SLOTS, *specs), case.step.extent(case.capacity), torch.device(case.device))
    for tensor in buffers.values():
        tensor.fill_(GARBAGE)
    return buffers


def check_equal(form: Form, case: Case) -> None:
    """Every specified element is the definition's; nothing else was written."""
    step = case.step
    expected, fused = garbage(form.specs, case), garbage(form.specs, case)
    for forward in range(step.num_forwards):
        expected[WRITE_SLOTS.name][forward].copy_(write_slots(step, forward))
    form.write(step, expected)
    masks, plan = form.specified(step, expected), form.bind(step, fused)
    made = written_along(plan, fused)
    for launch in launches(case):
        plan()
        for name, given in fused.items():
            mask = masks.get(name, torch.ones_like(given, dtype=torch.bool))
            wanted = torch.where(mask, expected[name], GARBAGE)
            assert torch.equal(given, wanted), (
                f"{name} of {case.kind}, {launch}, lengths {case.lens}:\n{given}\n{wanted}"
            )
            given.fill_(GARBAGE)
        check_along(made, expected)
        for tensor in made:
            tensor.fill_(GARBAGE)


def written_along(plan: Callable[[], None], buffers: Buffers) -> tuple[Tensor, ...]:
    """A vendor's schedule that a launch is to write along: of a block table FlashMLA's share-outs to some parts, and
    their scratch; of CSR FlashInfer's lists of work; of the ragged form FlashAttention-3's words.
    """
    names = ("cache_seqlens", "kv_len", "seqused_k")
    if next((buffers[name] for name in names if name in buffers), torch.empty(0)).numel() == 0:
        return ()  # of another form, or an idle step
    assert isinstance(plan, plan_operators.PagePlanner)
    made = _garbage_along(buffers)
    for is_first in (True, False):
        if "kv_len" in buffers:
            assert plan.list_work(WorkLists(*made), *_listed(buffers)) is is_first, "a launch writes one"
        elif "seqused_k" in buffers:
            assert plan.split_tiles(*made, _tiles(buffers)) is is_first, "a launch writes one for each forward"
        else:
            assert plan.share_out(*made) is is_first, "a launch writes one for each forward"
    return made


def check_along(made: tuple[Tensor, ...], expected: Buffers) -> None:
    """What was written along is what the definition makes of the expected lengths."""
    if not made:
        return
    given = {name: tensor.cpu() for name, tensor in expected.items()}
    wanted = tuple(tensor.cpu() for tensor in _garbage_along(expected))
    if "kv_len" in given:
        rows = given["qo_indptr"], given["kv_indptr"], given["kv_len"]
        num_tokens, num_heads, causal = _listed(expected)
        list_work(*rows, WorkLists(*wanted), num_tokens=num_tokens, num_heads=num_heads, causal=causal)
    elif "seqused_k" in given:
        rows, (words,) = given["cu_seqlens_q"].diff().tolist(), wanted
        for lens, of_forward in zip(given["seqused_k"].tolist(), words, strict=True):
            told = torch.tensor(words_of(rows, lens, _tiles(expected)), dtype=torch.int32)
            of_forward[: len(told)] = told
            runs = of_forward[: len(told) - 1].view(-1, _tiles(expected).stride)
            runs[:, len(lens) :] = GARBAGE
    else:
        for forward, *of_forward in zip(given["cache_seqlens"], *wanted, strict=True):
            share_out(forward, *of_forward)
    for number, (ours, theirs) in enumerate(zip(made, wanted, strict=True)):
        assert torch.equal(ours.cpu(), theirs), f"tensor {number} of a schedule:\n{ours}\n{theirs}"


def _listed(buffers: Buffers) -> tuple[int, int, bool]:
    """num_tokens, num_heads, causal of lists."""
    return buffers.extent.num_tokens, 24, buffers.extent.bs % 2 == 0


def _tiles(buffers: Buffers) -> TileSizes:
    """Sizes of tiles that few tokens fill: every kind of word, or rows alone."""
    bs = buffers.extent.bs
    has_splits, stride = bs % 3 != 0, -(-bs // 4) * 4
    return TileSizes(4, 8, 3, 4, 2, 7, 9 if has_splits else 1, 12, int(has_splits), bs % 2, stride)


def _garbage_along(buffers: Buffers) -> tuple[Tensor, ...]:
    if "seqused_k" in buffers:
        shape, device = (buffers["seqused_k"].shape[0], 3 * _tiles(buffers).stride + 4), buffers["seqused_k"].device
        return (torch.full(shape, GARBAGE, dtype=torch.int32, device=device),)
    if "kv_len" not in buffers:
        return _share_outs(buffers["cache_seqlens"])
    words = torch.full((NUM_WORDS,), GARBAGE, dtype=torch.int32, device=buffers["kv_len"].device)
    return WorkLists.of(words, 5, 1 + buffers.extent.bs % 2)


def _share_outs(lens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_forwards, bs = lens.shape
    shapes = ((num_forwards, (5, 132)[bs % 2], 8), (num_forwards, bs + 1), (num_forwards, bs, 2))
    parts, splits, marks = (torch.full(shape, GARBAGE, dtype=torch.int32, device=lens.device) for shape in shapes)
    return parts, splits, marks


def launches(case: Case) -> tuple[str, ...]:
    """The first launch of a kernel compiles it; those behind it are bound to that, but for the interpreter's."""
    return ("compiled", "bound") if torch.device(case.device).type == "cuda" else ("interpreted",)


def check_inputs(case: Case, num_more: int, step: Step | None = None) -> None:
    """The static step is `copy_step`'s, in a block table as far as tokens reach; garbage stays behind them."""
    from attn_backends.kernels import triton_inputs  # it imports Triton, which those that call this have

    step, bucket = step or case.step, case.bucket(num_more)
    extent = Extent.of_bucket(bucket, case.capacity, case.geometry.num_pages)
    specs = input_specs(bucket, case.paging)
    expected, given = (allocate(specs, extent, torch.device(case.device)) for _ in range(2))
    static = static_step(bucket, case.paging, expected)
    fused = static_step(bucket, case.paging, given)
    for name, tensor in given.items():
        tensor.fill_(name == "tree_mask" or GARBAGE)
    untouched = {name: tensor.clone() for name, tensor in given.items()}
    copy_step(static, step)
    fill = triton_inputs.bind_inputs(fused)(step)
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in given.items()), "bound, and written"
    masks = {}
    if isinstance(case.paging, BlockTable):
        num_writes = query_starts(static).diff() * static.num_steps
        masks["paging"] = leading(-(-(static.seq_lens + num_writes) // case.page_size), extent.max_pages)
    for launch in launches(case):
        fill(step)
        for name, tensor in given.items():
            mask = masks.get(name, torch.ones_like(tensor, dtype=torch.bool))
            wanted = torch.where(mask, expected[name], GARBAGE).to(tensor.dtype)
            assert torch.equal(tensor, wanted), f"{name} of {case.kind}, {launch}:\n{tensor}\n{wanted}"
            tensor.copy_(untouched[name])
