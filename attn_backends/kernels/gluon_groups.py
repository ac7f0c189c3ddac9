"""The warp groups of a program of `gluon_mla` and `gluon_sparse`: one gathers latents, two attend to blocks of them.

Each pair of blocks of 64 keys is in shared memory as left halves, right halves and rotated rests of both, [2, 64, 256],
[2, 64, 256] and [2, 64, 64]. A half belongs to the group that gathers until it is full, then to the two others until
the one that reads it last says that it is free. Rows that are key and value alike (`gluon_sparse`, which has a third
group of its own) have no rest: its place holds weights alone.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

PLAIN = ("query_indptr", "page_indptr", "page_ids", "kv_lens", "lse", "table_stride")
"""Arguments of both kernels that they are not compiled anew for, when an address or a number is a multiple of 16, or a
number is 1.
"""

_LN_2 = gl.constexpr(0.6931471805599453)
_LOWEST = gl.constexpr(-1.0e30)  # below every score, and no infinity: differences of peaks are never NaN
_LEAST = gl.constexpr(2.0**-63)  # below the weights of a row that sees a key; the largest scale over it is finite
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 16 bytes a thread, 128 of an entry at once
_COPIED_8 = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))  # the same of 8 bits an element
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_OUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
_WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, _OUT.value, 2))
_ROWS = gl.constexpr(gl.SliceLayout(1, _SCORES.value))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
NUMBERS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    """NUM barriers, each expecting COUNT arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def barriers_of_groups():
    """`full` and `free` of left halves and of right ones, each of both blocks, where `full[2]` is of the queries; and
    those by which the groups hand on weights.
    """
    full = (barriers(2, 128), barriers(2, 128), barriers(1, 128))
    return full, (barriers(2, 128), barriers(2, 128)), barriers(2, 1)


@gluon.jit
def halves(dtype: gl.constexpr, NUM: gl.constexpr):
    """NUM stages of shared memory for the left and right halves of 64 rows."""
    left = gl.allocate_shared_memory(dtype, [NUM, 64, 256], TILE)
    return left, gl.allocate_shared_memory(dtype, [NUM, 64, 256], TILE)


@gluon.jit
def signal(bar):
    """Arrive when all warps of the group have come here."""
    gl.thread_barrier()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def arrive(bar):
    """Arrive thread by thread, each after its own copies; at `free`, after the group waited for its products.

    PTX promises the order for copies alone. That of products is seen in the compiled code, where this follows the wait.
    """
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def zero_in_turn(i):
    """Zero, which the compiler can't move out of turn i."""
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _of_rows(value):
    """A value of each row, for the outputs."""
    return gl.convert_layout(value, gl.SliceLayout(1, _OUT))[:, None]


@gluon.jit
def _entries(ids, key, end, strides, PAGE_SIZE: gl.constexpr):
    """Where the latents of keys begin."""
    page = gl.load(ids + key // PAGE_SIZE, mask=key < end, other=0)
    return page.to(gl.int64) * strides[0] + (key % PAGE_SIZE) * strides[1]


@gluon.jit
def copy(entry, live, place, FIRST: gl.constexpr, NUM: gl.constexpr):
    """Begin to copy elements of live entries, 0 for the others, to shared memory."""
    element = FIRST + gl.arange(0, NUM, layout=gl.SliceLayout(0, COPIED))
    async_copy.async_copy_global_to_shared(place, entry[:, None] + element[None, :], mask=live[:, None])


@gluon.jit
def gather(blocks, full, free, latents, strides, ids, keys_of, PAGE_SIZE: gl.constexpr):
    """The third group. blocks: left halves of both blocks, right ones, and rotated rests, which come with the half that
    is free last. full, free: as of `barriers_of_groups`.
    """
    left, right, rest = blocks
    start, end, pairs = keys_of
    offset = gl.arange(0, 64, layout=gl.SliceLayout(1, COPIED))
    arrive(full[2].index(0))  # of the queries, which these threads load
    entry_0 = _entries(ids, start + offset, end, strides, PAGE_SIZE)
    entry_1 = _entries(ids, start + 64 + offset, end, strides, PAGE_SIZE)
    for i in range(pairs):
        key = start + i * 128 + offset
        phase = (i & 1) ^ 1
        source, live = latents + entry_0, key < end
        mbarrier.wait(free[0].index(0), phase)
        copy(source, live, left.index(0), 0, 256)
        arrive(full[0].index(0))
        entry_0 = _entries(ids, key + 128, end, strides, PAGE_SIZE)
        mbarrier.wait(free[1].index(0), phase)
        copy(source, live, right.index(0), 256, 256)
        copy(source, live, rest.index(0), 512, 64)
        arrive(full[1].index(0))
        source, live = latents + entry_1, key + 64 < end
        mbarrier.wait(free[0].index(1), phase)
        copy(source, live, left.index(1), 0, 256)
        copy(source, live, rest.index(1), 512, 64)
        arrive(full[0].index(1))
        entry_1 = _entries(ids, key + 192, end, strides, PAGE_SIZE)
        mbarrier.wait(free[1].index(1), phase)
        copy(source, live, right.index(1), 256, 256)
        arrive(full[1].index(1))


@gluon.jit
def _read(entry, live, FIRST: gl.constexpr, NUM: gl.constexpr):
    """Elements of 8 bits of live entries, 0 for the others."""
    element = FIRST + gl.arange(0, NUM, layout=gl.SliceLayout(0, _COPIED_8))
    return gl.load(entry[:, None] + element[None, :], mask=live[:, None], other=0.0)


@gluon.jit
def _convert(entry, live, place, FIRST: gl.constexpr, free, phase):
    """Read half of the values' elements, and write them when the half of a block is free."""
    one, two = _read(entry, live, FIRST, 128), _read(entry, live, FIRST + 128, 128)
    mbarrier.wait(free, phase)
    place.slice(0, 128, dim=1).store(one.to(place.dtype))
    place.slice(128, 128, dim=1).store(two.to(place.dtype))


@gluon.jit
def filled(full):
    """Arrive for all threads, with what they wrote for the tensor cores."""
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(full, count=128)


@gluon.jit
def gather_8(blocks, full, free, latents, strides, ids, keys_of, PAGE_SIZE: gl.constexpr):
    """`gather` of latents of 8 bits an element, through registers, where they become the queries' type."""
    left, right, rest = blocks
    start, end, pairs = keys_of
    arrive(full[2].index(0))
    for block in range(pairs * 2):
        key = start + block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, _COPIED_8))
        odd, phase, live = block & 1, ((block >> 1) & 1) ^ 1, key < end
        entry = latents + _entries(ids, key, end, strides, PAGE_SIZE)
        _convert(entry, live, left.index(odd), 0, free[0].index(odd), phase)
        filled(full[0].index(odd))
        entry = latents + _entries(ids, key, end, strides, PAGE_SIZE)  # again, as they would be spilled in between
        _convert(entry, live, right.index(odd), 256, free[1].index(odd), phase)
        rest.index(odd).store(_read(entry, live, 512, 64).to(rest.dtype))
        filled(full[1].index(odd))


@gluon.jit
def gather_any(blocks, full, free, latents, strides, ids, keys_of, PAGE_SIZE: gl.constexpr):
    """The third group, for latents of the queries' type or of 8 bits."""
    if latents.dtype.element_ty == blocks[0].dtype:
        gather(blocks, full, free, latents, strides, ids, keys_of, PAGE_SIZE)
    else:
        gather_8(blocks, full, free, latents, strides, ids, keys_of, PAGE_SIZE)


@gluon.jit
def _scores(queries, blocks, full, i, zero, ODD: gl.constexpr):
    """Products of the queries with a block of latents, or of rows of as many elements as its values."""
    block, phase = zero + ODD, i & 1
    scores = gl.zeros([64, 64], gl.float32, layout=_SCORES)
    mbarrier.wait(full[0].index(ODD), phase)
    fence_async_shared()  # what cp.async wrote, for the tensor cores
    keys = blocks[0].index(block).permute((1, 0))
    scores = warpgroup_mma(queries[0].index(zero), keys, scores, use_acc=False, is_async=True)
    mbarrier.wait(full[1].index(ODD), phase)
    fence_async_shared()
    keys = blocks[1].index(block).permute((1, 0))
    scores = warpgroup_mma(queries[1].index(zero), keys, scores, is_async=True)
    if len(queries) == 3:
        keys = blocks[2].index(block).permute((1, 0))
        scores = warpgroup_mma(queries[2].index(zero), keys, scores, is_async=True)
    return warpgroup_mma_wait(0, deps=(scores,))


@gluon.jit
def _visible(scores, first_key, end_seen, live, score_scale, ODD: gl.constexpr):
    """Scores in base 2, -inf where a row does not see a key. live: None, or of both blocks which keys all rows see."""
    if live is None:
        key = first_key + gl.arange(0, 64, layout=gl.SliceLayout(0, _SCORES))
        seen = key[None, :] < end_seen[:, None]
    else:
        seen = (live.index(ODD).load(gl.SliceLayout(0, _SCORES)) > 0)[None, :]
    return gl.where(seen, scores * score_scale, float("-inf"))


@gluon.jit
def _with_sink(total, peak, sinks, is_part, rows):
    """The sums of weights, with that of each head's sink. is_part: they are added where parts are merged."""
    if sinks is not None:
        tile, group, _, _, _ = rows
        head = tile * 64 + gl.arange(0, 64, layout=_ROWS)
        sink = gl.load(sinks + head, mask=(head < group) & (is_part == 0), other=float("-inf")).to(gl.float32)
        total += gl.exp2(sink / _LN_2 - peak)
    return total


@gluon.jit
def _end_seen(rows, end, CAUSAL: gl.constexpr):
    """The key past the last one that each row sees in a part."""
    tile, group, _, num_rows, num_keys = rows
    row = tile * 64 + gl.arange(0, 64, layout=_ROWS)
    return gl.minimum(num_keys - (num_rows - 1 - row // group) * CAUSAL, end)


@gluon.jit
def _store(summed, total, outputs, rows, v_scale, FIRST: gl.constexpr):
    """256 elements of the outputs, or of a part of them."""
    out, partial_out, is_part = outputs
    tile, group, first, num_rows, _ = rows
    result = summed * _of_rows(v_scale / gl.maximum(total, _LEAST))
    row = tile * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, _OUT))
    place = ((first + row // group).to(gl.int64) * group + row % group) * 512
    element = FIRST + gl.arange(0, 256, layout=gl.SliceLayout(0, _OUT))
    place, real = place[:, None] + element[None, :], (row < num_rows * group)[:, None]
    if is_part:
        gl.store(partial_out + place, result, mask=real)
    else:
        gl.store(out + place, result.to(out.dtype.element_ty), mask=real)


@gluon.jit
def even(given, outputs, lse, CAUSAL: gl.constexpr):
    """The group of the even blocks and the left half of the outputs. given: as `_attend` makes it."""
    queries, blocks, full, free, peaks, handed, rows, keys_of, score_scale, v_scale, live, sinks = given
    left, _, rest = blocks
    start, end, pairs = keys_of
    end_seen = _end_seen(rows, end, CAUSAL)
    summed = gl.zeros([64, 256], gl.float32, layout=_OUT)
    total, peak = gl.zeros([64], gl.float32, layout=_ROWS), gl.full([64], _LOWEST, gl.float32, layout=_ROWS)
    mbarrier.wait(full[2].index(0), 0)
    for i in range(pairs):
        zero = zero_in_turn(i)
        scores = _scores(queries, blocks, full, i, zero, 0)
        scores = _visible(scores, start + i * 128, end_seen, live, score_scale, 0)
        even_peak = gl.maximum(peak, gl.max(scores, 1))
        weights = gl.exp2(scores - even_peak[:, None])
        rounded = weights.to(left.dtype)
        peaks.index(0).store(even_peak)
        rest.index(zero).store(rounded)
        fence_async_shared()
        signal(handed.index(0))
        fading = gl.exp2(peak - even_peak)
        total = total * fading + gl.sum(weights, 1)
        operand = gl.convert_layout(rounded, _WEIGHTS)
        adding = warpgroup_mma(operand, left.index(zero), summed * _of_rows(fading), is_async=True)
        mbarrier.wait(handed.index(1), i & 1)
        peak = peaks.index(1).load(_ROWS)
        fading = gl.exp2(even_peak - peak)
        total = total * fading
        summed, operand = warpgroup_mma_wait(0, deps=(adding, operand))
        arrive(free[0].index(0))
        adding = warpgroup_mma(rest.index(zero + 1), left.index(zero + 1), summed * _of_rows(fading), is_async=True)
        summed = warpgroup_mma_wait(0, deps=(adding,))
        arrive(free[0].index(1))
    peaks.index(2).store(total)
    signal(handed.index(0))
    mbarrier.wait(handed.index(1), pairs & 1)
    total += peaks.index(3).load(_ROWS)
    _store(summed, _with_sink(total, peak, sinks, outputs[2], rows), outputs, rows, v_scale, 0)
    tile, group, first, num_rows, _ = rows
    row = tile * 64 + gl.arange(0, 64, layout=_ROWS)
    place = (first + row // group) * group + row % group
    gl.store(lse + place, (peak + gl.log2(total)) * _LN_2, mask=row < num_rows * group)


@gluon.jit
def odd(given, outputs, CAUSAL: gl.constexpr):
    """The group of the odd blocks and the right half of the outputs; else as `even`."""
    queries, blocks, full, free, peaks, handed, rows, keys_of, score_scale, v_scale, live, sinks = given
    left, right, rest = blocks
    start, end, pairs = keys_of
    end_seen = _end_seen(rows, end, CAUSAL)
    summed = gl.zeros([64, 256], gl.float32, layout=_OUT)
    total, peak = gl.zeros([64], gl.float32, layout=_ROWS), gl.full([64], _LOWEST, gl.float32, layout=_ROWS)
    mbarrier.wait(full[2].index(0), 0)
    for i in range(pairs):
        zero = zero_in_turn(i)
        scores = _scores(queries, blocks, full, i, zero, 1)
        mbarrier.wait(handed.index(0), i & 1)
        even_peak = peaks.index(0).load(_ROWS)
        even_fading = gl.exp2(peak - even_peak)
        adding = warpgroup_mma(rest.index(zero), right.index(zero), summed * _of_rows(even_fading), is_async=True)
        scores = _visible(scores, start + i * 128 + 64, end_seen, live, score_scale, 1)
        peak = gl.maximum(even_peak, gl.max(scores, 1))
        weights = gl.exp2(scores - peak[:, None])
        rounded = weights.to(left.dtype)
        peaks.index(1).store(peak)
        rest.index(zero + 1).store(rounded)
        fence_async_shared()
        signal(handed.index(1))
        fading = gl.exp2(even_peak - peak)
        total = total * (even_fading * fading) + gl.sum(weights, 1)
        operand = gl.convert_layout(rounded, _WEIGHTS)
        summed = warpgroup_mma_wait(0, deps=(adding,))
        arrive(free[1].index(0))
        adding = warpgroup_mma(operand, right.index(zero + 1), summed * _of_rows(fading), is_async=True)
        summed, operand = warpgroup_mma_wait(0, deps=(adding, operand))
        arrive(free[1].index(1))
    # In this order, as the other group may not have seen the last turn's arrival yet: it would miss one of two.
    mbarrier.wait(handed.index(0), pairs & 1)
    even_total = peaks.index(2).load(_ROWS)
    peaks.index(3).store(total)
    signal(handed.index(1))
    total += even_total
    _store(summed, _with_sink(total, peak, sinks, outputs[2], rows), outputs, rows, v_scale, 256)
