"""Our Gluon kernels on a CPU, on a model of Hopper's warp groups: they attend, whichever group goes first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from attn_backends.kernels import torch_compressed
from attn_backends.kernels.paged_operators import latent_attention
from attn_backends.kernels.prefill_operator import prefill_attention
from tests.compressed_arguments import blocks_scene
from tests.gluon_model import KERNELS, Deadlock, Model, Pointer
from tests.paged_arguments import FORMS, Sizes, arguments

LATENTS = Sizes((3, 3, 3), (400, 5, 130), num_heads=24, num_kv_heads=1, dim=576, v_dim=512, page_size=16, latent=True)
PROMPTS = Sizes((100, 100, 100), (300, 100, 420), num_heads=4, num_kv_heads=2, dim=64, v_dim=64, page_size=16)
KINDS = {"latents": LATENTS, "prompts": PROMPTS}
EIGHT_BITS, EIGHT_BIT_PROMPTS = "latents of 8 bits", "prompts of 8 bits"
SPARSE = {"sparse rows": False, "sparse rows of 8 bits": True}  # whether pages are bytes
SEEDS = 16
pytestmark = [  # of rows that see nothing
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]


def given(sizes: Sizes, form: str, causal: bool, dtype: torch.dtype, cache: torch.dtype | None = None) -> list:
    """Arguments of an operator, dense; those of latents without values. cache: its type, if not the queries'."""
    q, k, v, *rest = arguments(sizes, form, causal, dtype, cache)
    keys = [k.squeeze(2)] if sizes.latent else [k, v]
    return [each.contiguous() for each in (q, *keys)] + rest


def attend(model: Model, arguments: list) -> tuple[Tensor, Tensor]:
    """The kernel's outputs, on the model."""
    if isinstance(arguments[1], list):
        return model.sparse_attention(*arguments)
    if arguments[1].dim() == 3:
        return model.latent_attention(*arguments)
    *lists, _max_kv_len, causal, scale, k_scale, v_scale = arguments[:-2]
    return model.paged_attention(*lists, causal, scale, k_scale, v_scale)


def expected(arguments: list) -> tuple[Tensor, Tensor]:
    """The operator's in torch, which is the definition."""
    if isinstance(arguments[1], list):
        return torch_compressed.attend_rows(*arguments)
    return (latent_attention if arguments[1].dim() == 3 else prefill_attention)(*arguments)


def is_near(found: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> bool:
    """Whether outputs differ by the rounding of weights, and log-sum-exps by that of sums."""
    (out, lse), (right_out, right_lse) = found, right
    return torch.allclose(out.float(), right_out.float(), rtol=2e-2, atol=2e-2) and torch.allclose(
        lse, right_lse, rtol=0, atol=1e-4
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "page_size"), [(torch.bfloat16, 16), (torch.float16, 1)], ids=str)
def test_it_attends_whoever_goes_first(kind, form, dtype, page_size):
    """To the bit the same for all seeds, and near to torch."""
    sizes = replace(KINDS[kind], page_size=page_size)
    if form != "block table":  # packed rows may be of any number
        sizes = replace(sizes, widths=(sizes.widths[0], 1, sizes.widths[2] - 1))
    arguments = given(sizes, form, form != "csr", dtype)
    right, first = expected(arguments), attend(Model(0), arguments)
    assert is_near(first, right)
    for seed in range(1, 3):
        assert all(map(torch.equal, attend(Model(seed), arguments), first)), seed


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_latents_of_8_bits(form, dtype):
    arguments = given(LATENTS, form, form != "csr", dtype, torch.float8_e4m3fn)
    arguments[10:12] = 0.5, 0.5  # scales of keys and values
    right, first = expected(arguments), attend(Model(0), arguments)
    assert is_near(first, right)
    for seed in range(1, 4):
        assert all(map(torch.equal, attend(Model(seed), arguments), first)), seed


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shares", [(0, 2), (1, 3), (2, 9), (3, 1)], ids=str)
def test_the_last_requests_latents_may_be_divided(form, shares):
    """Into parts that need no more memory than theirs: an access past its end is an error of the model."""
    num_whole, num_splits = shares
    arguments = given(LATENTS, form, form != "csr", torch.bfloat16)
    num_rows = (len(LATENTS.lens) - num_whole) * LATENTS.widths[0] * LATENTS.num_heads * num_splits
    arguments[-2:] = [torch.full((num_rows * size,), torch.nan) for size in (512, 1)]
    asked = "shares = share_requests(batch, processors)"
    model = Model(num_splits, {asked: f"{asked}._replace(num_whole={num_whole}, num_splits={num_splits})"})
    assert is_near(attend(model, arguments), expected(arguments))
    assert arguments[-1].isnan().all() == (num_splits == 1)


@pytest.mark.parametrize(("form", "shares"), list(zip(FORMS, [(3, 1), (1, 3), (0, 3)], strict=True)), ids=str)
def test_a_long_request_has_pieces_instead_of_parts(form, shares):
    """Of 21 blocks at least 5 each, where 5 run at once; not where the parts of all are hardly longer."""
    num_whole, num_splits = shares
    num_heads, width = 24 if form == "csr" else 8, LATENTS.widths[0]  # two tiles or one
    arguments = given(replace(LATENTS, lens=(2600, 5, 130), num_heads=num_heads), form, form != "csr", torch.bfloat16)
    divided = (3 - num_whole) * num_splits if num_splits > 1 else 0
    num_rows = (divided + 5) * width * num_heads
    arguments[-2:] = [torch.full((num_rows * size,), torch.nan) for size in (512, 1)]
    asked = "shares = share_requests(batch, processors)"
    changes = {asked: f"{asked}._replace(num_whole={num_whole}, num_splits={num_splits})"}
    changes |= {"at_once = processors": "at_once = 10 + 0 * processors"}
    right, first = expected(arguments), attend(Model(0, changes), arguments)
    assert is_near(first, right)
    of_pieces = arguments[-1][divided * width * num_heads :].view(-1, width * num_heads)
    assert (~of_pieces.isnan().any(1)).sum() == (4 if num_whole else 0)
    assert all(map(torch.equal, attend(Model(1, changes), arguments), first))


def in_parts(num: int) -> dict[str, str]:
    """A change of the sparse kernel that divides each row's keys into so many parts."""
    return {"splits = num_splits(": f"splits = {num} + 0 * num_splits("}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bytes", SPARSE.values(), ids=SPARSE)
@pytest.mark.parametrize(("num_heads", "parts"), [(3, 1), (3, 3), (64, 1), (128, 1)])
def test_sparse_rows(bytes, num_heads, parts):
    """With and without entries and sinks; a row that sees nothing gets 0 and -inf."""
    q, sources = blocks_scene(num_heads, bytes=bytes)
    for given, sinks in ((sources, torch.randn(num_heads)), (sources[:1], None)):
        arguments = [q, given, 512**-0.5, sinks]
        right, first = expected(arguments), attend(Model(0, in_parts(parts)), arguments)
        assert is_near(first, right)
        assert not first[0][-1].any()
        for seed in range(1, 3):
            assert all(map(torch.equal, attend(Model(seed, in_parts(parts)), arguments), first)), seed


def test_sparse_rows_of_other_strides_and_more_heads_than_two_tiles():
    q, sources = blocks_scene(130, bytes=True)
    sources = [each._replace(slots=each.slots.T.contiguous().T, lens=each.lens.repeat(2)[::2]) for each in sources]
    sources[0] = sources[0]._replace(lens=sources[1].lens)  # past the width: no row sees more than that
    wide = torch.full((5, 2 * sources[0].pages.shape[1]), 255, dtype=torch.uint8)
    wide[:, : wide.shape[1] // 2] = sources[0].pages
    sources[0] = sources[0]._replace(pages=wide[:, : wide.shape[1] // 2])
    arguments = [q, sources, 0.05, torch.randn(260).half()[::2]]
    assert is_near(attend(Model(0), arguments), expected(arguments))


def test_heads_of_128_elements():
    sizes = replace(PROMPTS, dim=128, v_dim=128, num_heads=2, num_kv_heads=1)
    arguments = given(sizes, "page table", True, torch.bfloat16)
    assert is_near(attend(Model(0), arguments), expected(arguments))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("dim", "cache"),
    [(192, None), (192, torch.float8_e4m3fn), (64, torch.float8_e4m3fn), (256, None), (256, torch.float8_e4m3fn)],
    ids=str,
)
def test_prompts_of_other_sizes_and_of_8_bits(dim, cache, form):
    sizes = replace(PROMPTS, dim=dim, v_dim=128 if dim == 192 else dim, num_heads=2, num_kv_heads=1)
    arguments = given(sizes, form, form != "csr", torch.bfloat16, cache)
    arguments[11:13] = (0.5, 0.25) if cache else (1.0, 1.0)  # scales of keys and values
    right, first = expected(arguments), attend(Model(0), arguments)
    assert is_near(first, right)
    assert all(map(torch.equal, attend(Model(1), arguments), first))


@cache
def small(kind: str) -> tuple[list, tuple[Tensor, Tensor]]:
    """Arguments of several blocks, and what is right."""
    if kind in SPARSE:
        q, sources = blocks_scene(5, bytes=SPARSE[kind])
        sparse = [q, sources, 512**-0.5, torch.full((5,), 5.0)]  # a sink as heavy as some of the keys
        return sparse, expected(sparse)
    sizes = replace(PROMPTS, num_heads=2) if "prompts" in kind else LATENTS
    cache = torch.float8_e4m3fn if kind in (EIGHT_BITS, EIGHT_BIT_PROMPTS) else None
    arguments = given(sizes, "page table", True, torch.bfloat16, cache)
    return arguments, expected(arguments)


def complaint(kind: str, old: str, new: str) -> str:
    """What is said of a kernel with a change of its source; empty if nothing is, for no seed."""
    arguments, right = small(kind)
    planted = {old: new} | (in_parts(1) if kind in SPARSE else {})
    for seed in range(SEEDS):
        try:
            if not is_near(attend(Model(seed, planted), arguments), right):
                return "wrong outputs"
        except (Deadlock, AssertionError) as error:
            return str(error)
    return ""


PLANTED = {
    "no signal that a half is free": (
        "latents",
        "        arrive(free[0].index(1))\n",
        "",
        "groups wait for ever: gather",
    ),
    "no wait for a free half": ("latents", "        mbarrier.wait(free[1].index(0), phase)\n", "", "wrong outputs"),
    "no wait for a full half": ("latents", "    mbarrier.wait(full[0].index(ODD), phase)\n", "", "wrong outputs"),
    "another parity": ("latents", "handed.index(1), i & 1", "handed.index(1), (i & 1) ^ 1", "groups wait for ever"),
    "no wait for a free half, 8 bits": (EIGHT_BITS, "    mbarrier.wait(free, phase)\n", "", "wrong outputs|ever"),
    "no wait for queries": (EIGHT_BITS, "    mbarrier.wait(full[2].index(0), 0)\n", "", "wrong outputs"),
    "an arrival too few": (EIGHT_BITS, "arrive(full, count=128)", "arrive(full, count=127)", "wait for ever"),
    "no wait for a free half, sparse": (
        "sparse rows",
        "        groups = _read_half(found, stride, 0)\n        mbarrier.wait(free[0].index(odd), phase)\n",
        "        groups = _read_half(found, stride, 0)\n",
        "wrong outputs|ever",
    ),
    "no wait for a free half, sparse bytes": (
        "sparse rows of 8 bits",
        "        mbarrier.wait(free[1].index(odd), phase)\n        _write_half(others",
        "        _write_half(others",
        "wrong outputs|ever",
    ),
    "another parity, sparse": (
        "sparse rows of 8 bits",
        "mbarrier.wait(free[0].index(odd), phase)",
        "mbarrier.wait(free[0].index(odd), phase ^ 1)",
        "wait for ever",
    ),
    "no signal that a half is there, sparse": (
        "sparse rows",
        "        _write_half(groups, None, right.index(odd), 1)\n        filled(full[1].index(odd))\n",
        "        _write_half(groups, None, right.index(odd), 1)\n",
        "wait for ever",
    ),
    "half of the queries": ("sparse rows", "    _load_queries(q, given, 1)\n", "", "wait for ever"),
    "the next block's scales": (
        "sparse rows of 8 bits",
        "        _write_half(others, scales, right",
        "        _write_half(others, _read_scales(found), right",
        "wrong outputs",
    ),
    "which keys count is said too late": (
        "sparse rows",
        "        _write_half(groups, None, right.index(odd), 1)\n        filled(full[1].index(odd))\n",
        "        _write_half(groups, None, right.index(odd), 1)\n"
        "        live.index(odd).store(0 * live.index(odd).data)\n"
        "        filled(full[1].index(odd))\n        live.index(odd).store(found[2].to(gl.int32))\n",
        "wrong outputs",
    ),
    "which keys count is said too early": (
        "sparse rows",
        "        groups = _read_half(found, stride, 0)\n",
        "        groups = _read_half(found, stride, 0)\n        live.index(odd).store(found[2].to(gl.int32))\n",
        "wrong outputs",
    ),
    "no sink": ("sparse rows", "(is_part == 0)", "(is_part != 0)", "wrong outputs"),
    "slots past the last": (
        "sparse rows",
        "mask=key < num_rows, other",
        "mask=key < num_rows + 1, other",
        "wrong outputs",
    ),
    "no signal of free keys": (
        "prompts",
        "        signal(free[0].index((step + 1) & 1))\n",
        "",
        "groups wait for ever",
    ),
    "no wait for keys": (
        "prompts",
        "        _wait(full[0], step + 1)\n",
        "",
        "wrong outputs|for ever",
    ),
    "no signal of keys of 8 bits": (EIGHT_BIT_PROMPTS, "filled(full[0].index(stage))", "pass", "wait for ever"),
    "no wait for a free stage, 8 bits": (
        EIGHT_BIT_PROMPTS,
        "            mbarrier.wait(free[0].index(stage), phase)\n",
        "",
        "wrong outputs|ever",
    ),
    "another parity of a tile": (
        "prompts",
        "full[2].index(0), turn & 1",
        "full[2].index(0), 1 - (turn & 1)",
        "wait for ever",
    ),
    "a product used early": (
        "prompts",
        "summed, _ = warpgroup_mma_wait(0",
        "summed, _ = warpgroup_mma_wait(1",
        "waited",
    ),
    "an arrival too many": (
        "prompts",
        "    signal(full[2].index(0))\n",
        "    signal(full[2].index(0))\n" * 2,
        "too many",
    ),
    "keys past the last": (
        "prompts",
        "mask=key < end, other=0)",
        "mask=key > -1, other=0)",
        "access outside of a tensor",
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "old", "new", "said"), PLANTED.values(), ids=PLANTED)
def test_what_is_planted_is_reported(kind, old, new, said):
    assert re.search(said, complaint(kind, old, new))


def changes(module: str) -> Iterator[tuple[str, str, str]]:
    """Lines of a module that wait or signal, with their neighbours, and these without the line, or with the other
    parity.
    """
    text = (KERNELS / f"{module}.py").read_text()
    lines = text.splitlines(keepends=True)
    for i, line in enumerate(lines):
        without = re.sub(r"(?<!def )\b(signal|filled|_?wait|_?arrive|mbarrier\.(wait|arrive))\(.*", "pass", line)
        other = re.sub(r"(mbarrier\.wait\(.*), (.*)\)", r"\1, (\2) ^ 1)", line)
        before, after = "".join(lines[i - 3 : i]), "".join(lines[i + 1 : i + 4])
        for changed in {without, other} - {line}:
            if line.startswith("    ") and text.count(before + line + after) == 1:
                yield line.strip(), before + line + after, before + changed + after


@pytest.mark.full
@pytest.mark.parametrize(
    ("module", "kinds", "least"),
    [
        ("gluon_groups", ("latents", EIGHT_BITS), 40),
        ("gluon_sparse", tuple(SPARSE), 12),
        ("gluon_prefill_groups", ("prompts", EIGHT_BIT_PROMPTS), 25),
    ],
)
def test_each_wait_and_each_signal_matters(module, kinds, least):
    """But for the turns in which the groups of a prompt begin products, which are for speed, and for values, which have
    come where the next keys have.
    """
    found = [(line, any(complaint(kind, old, new) for kind in kinds)) for line, old, new in changes(module)]
    assert len(found) > least
    silent = {line for line, said in found if not said}
    assert silent <= {"mbarrier.wait(order[HALF].index(0), (passed & 1) ^ (1 - HALF))", "_wait(full[1], step)"}


@pytest.mark.parametrize(("form", "bs", "most"), [("block table", 1, 10), ("csr", 1, 10), ("block table", 8, 73)])
def test_programs_take_the_longest_tiles_of_prompts_first(form, bs, most):
    """Every tile once, and so that 132 programs have few more blocks than the mean: 8.7 of a prompt of 1024 rows."""
    model = Model(0, {"gpu_of(q.device).num_processors": "132 + 0 * gpu_of(q.device).num_processors"})
    launches = list[tuple]()
    prefill, groups = (model._modules[name] for name in ("gluon_prefill", "gluon_prefill_groups"))
    prefill.__dict__["_launch"] = lambda tensors, shape, *_: launches.append((tensors, shape))
    sizes = replace(PROMPTS, widths=(1024,) * bs, lens=(1024,) * bs, num_heads=32, num_kv_heads=8)
    attend(model, given(sizes, form, True, torch.bfloat16))
    ((tensors, shape),) = launches
    num_tiles, num_columns = shape[3:5]
    lists = None if form == "block table" else Pointer(tensors[5]), Pointer(tensors[8])
    programs, seen = [0] * 132, []
    for work in range(num_tiles * num_columns):
        request, (kv_head, _first, _width, row, _keys, end) = groups._tile_of(work, lists, (*shape[:5], shape[6]), True)
        if row < 1024 * 4:
            seen.append((int(request), int(kv_head), int(row)))
            programs[programs.index(min(programs))] += -(-int(end) // 128)
    assert sorted(seen) == [(i, head, row) for i in range(bs) for head in range(8) for row in range(0, 4096, 128)]
    assert max(programs) <= most
