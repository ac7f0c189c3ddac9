"""The warp groups of a program of `gluon_prefill`: one gathers, two attend with 64 rows of each tile.

Barriers say when blocks of keys (`full[0]`), of values (`full[1]`) and a tile's queries (`full[2]`) are there, and were
read (`free`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn_backends.kernels.gluon_groups import COPIED, arrive, copy, filled, signal, zero_in_turn

_LN_2 = gl.constexpr(0.6931471805599453)
_LOWEST = gl.constexpr(-1.0e30)  # below every score, and no infinity: differences of peaks are never NaN
_LEAST = gl.constexpr(2.0**-63)  # below the weights of a row that sees a key; the largest scale over it is finite
_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_BYTES = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))  # 16 bytes a thread, 64 of an entry at once
_COPIED_ROWS = gl.constexpr(gl.SliceLayout(1, COPIED.value))


@gluon.jit
def _tile_of(work, lists, shape, CAUSAL: gl.constexpr):
    """A tile's request, and of the tile: KV head, first query row of the request, rows of the request, first row times
    heads in it, keys of the request, and keys that any row of the tile sees.

    Of columns that are taken together the last tiles come first, which see most keys. Packed, request i has the tiles
    from query_indptr[i] * group // 128 + i on: at least as many as its rows fill.
    """
    query_indptr, kv_lens = lists
    bs, width, group, num_tiles, num_columns, together = shape
    before = work // (together * num_tiles) * together
    work -= before * num_tiles
    together = gl.minimum(together, num_columns - before)
    column, tile = before + work % together, num_tiles - 1 - work // together
    kv_head = column
    if query_indptr is None:
        kv_head, request = column // bs, column % bs
        first = request * width
    else:
        request, end = tile * 0, tile * 0 + bs
        while end - request > 1:
            middle = (request + end) // 2
            is_before = gl.load(query_indptr + middle) * group // 128 + middle <= tile
            request, end = gl.where(is_before, middle, request), gl.where(is_before, end, middle)
        first = gl.load(query_indptr + request)
        width = gl.load(query_indptr + request + 1) - first
        tile -= first * group // 128 + request
    num_keys, row = gl.load(kv_lens + request), tile * 128
    last = gl.minimum(row + 127, width * group - 1) // group
    end = gl.where(row < width * group, gl.maximum(num_keys - (width - 1 - last) * CAUSAL, 0), 0)
    return request, (kv_head, first, width, row, num_keys, end)


@gluon.jit
def _copy(source, live, parts, i, DIM: gl.constexpr):
    """Begin to copy rows to tile i. parts: of the first elements, and of the rest where DIM is no power of two."""
    FIRST: gl.constexpr = parts[0].shape[2]
    copy(source, live, parts[0].index(i), 0, FIRST)
    if FIRST < DIM:
        copy(source, live, parts[1].index(i), FIRST, DIM - FIRST)


@gluon.jit
def _gather_queries(q, queries, tile, group, half, DIM: gl.constexpr):
    """Begin to load half of a tile's query rows, 0 past the last."""
    kv_head, first, width, row, _num_keys, _end = tile
    row += half * 64 + gl.arange(0, 64, layout=_COPIED_ROWS)
    source = q[0] + (first + row // group).to(gl.int64) * q[1][0] + (kv_head * group + row % group) * q[1][1]
    _copy(source, row < width * group, queries, half, DIM)


@gluon.jit
def _ids_of(pages, request):
    """Where a request's page ids begin."""
    page_indptr, page_ids, table_stride, _counter = pages
    if page_indptr is None:
        return page_ids + request.to(gl.int64) * table_stride
    else:
        return page_ids + gl.load(page_indptr + request)


@gluon.jit
def _page_of(ids, key, end, PAGE_SIZE: gl.constexpr):
    """The pages of keys."""
    return gl.load(ids + key // PAGE_SIZE, mask=key < end, other=0)


@gluon.jit
def _entries(pages, page, key, kv_head, PAGE_SIZE: gl.constexpr):
    """Where the elements of keys begin. pages: pointer and strides."""
    of_head = pages[0] + kv_head * pages[1][2]
    return of_head + (page.to(gl.int64) * pages[1][0] + (key % PAGE_SIZE) * pages[1][1])


@gluon.jit
def _read(entry, live, FIRST: gl.constexpr):
    """64 elements of 8 bits of live entries, 0 for the others."""
    element = FIRST + gl.arange(0, 64, layout=gl.SliceLayout(0, _BYTES))
    return gl.load(entry[:, None] + element[None, :], mask=live[:, None], other=0.0)


@gluon.jit
def _convert(entry, live, parts, stage, DIM: gl.constexpr):
    """Write keys or values of 8 bits to a stage, in the queries' type."""
    FIRST: gl.constexpr = parts[0].shape[2]
    for i in gl.static_range(DIM // 64):
        found = _read(entry, live, i * 64).to(parts[0].dtype)
        if i * 64 < FIRST:
            parts[0].index(stage).slice(i * 64, 64, dim=1).store(found)
        else:
            parts[1].index(stage).store(found)


@gluon.jit
def _announce(tiles, full, tile):
    """Say which tile comes, and arrive when its queries are there."""
    for i in gl.static_range(6):
        tiles.index(i).store(gl.full([1], 0, gl.int32, layout=_ONE) + tile[i])
    signal(full[2].index(0))
    arrive(full[2].index(0))


@gluon.jit
def _number(tiles, i: gl.constexpr):
    return gl.max(tiles.index(i).load(_ONE), 0)


@gluon.jit
def _tile(tiles):
    """The tile that was announced last: as of `_tile_of`, KV head -1 after the last."""
    kv_head, first, width = _number(tiles, 0), _number(tiles, 1), _number(tiles, 2)
    return kv_head, first, width, _number(tiles, 3), _number(tiles, 4), _number(tiles, 5)


@gluon.jit
def gather(
    given,
    q,
    k_pages,
    v_pages,
    pages,
    CAUSAL: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    DIM: gl.constexpr,
    V_DIM: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """The third group: queries, keys and values of each tile."""
    IS_8_BIT: gl.constexpr = k_pages[0].dtype.element_ty != given[2].dtype
    LAYOUT: gl.constexpr = gl.SliceLayout(1, _BYTES if IS_8_BIT else COPIED)
    queries, keys, values, _totals, tiles, full, free, lists, shape = given
    KEYS: gl.constexpr = values.shape[1]
    step, turn, work = 0, 0, gl.program_id(0)
    offset = gl.arange(0, KEYS, layout=LAYOUT)
    while work < shape[3] * shape[4]:
        request, tile = _tile_of(work, lists, shape, CAUSAL)
        kv_head, _first, _width, _row, _num_keys, end = tile
        ids = _ids_of(pages, request)
        mbarrier.wait(free[2].index(0), (turn & 1) ^ 1)
        for half in range(2):
            _gather_queries(q, queries, tile, shape[2], half + zero_in_turn(half), DIM)
        _announce(tiles, full, tile)
        page = _page_of(ids, offset, end, PAGE_SIZE)
        for block in range(gl.maximum(gl.cdiv(end, KEYS), 1)):
            stage, phase = step & 1, ((step >> 1) & 1) ^ 1
            key = block * KEYS + offset
            if not AHEAD:
                page = _page_of(ids, key, end, PAGE_SIZE)
            live, source = key < end, _entries(k_pages, page, key, kv_head, PAGE_SIZE)
            mbarrier.wait(free[0].index(stage), phase)
            if IS_8_BIT:
                _convert(source, live, keys, stage, DIM)
                filled(full[0].index(stage))
            else:
                _copy(source, live, keys, stage, DIM)
                arrive(full[0].index(stage))
            if not AHEAD:
                page = _page_of(ids, key, end, PAGE_SIZE)  # again, as it would be spilled
            source = _entries(v_pages, page, key, kv_head, PAGE_SIZE)
            if AHEAD:
                page = _page_of(ids, key + KEYS, end, PAGE_SIZE)
            mbarrier.wait(free[1].index(stage), phase)
            if IS_8_BIT:
                _convert(source, live, (values,), stage, V_DIM)
                filled(full[1].index(stage))
            else:
                _copy(source, live, (values,), stage, V_DIM)
                arrive(full[1].index(stage))
            step += 1
        turn += 1
        work = gl.atomic_add(pages[3], 1) + gl.num_programs(0)  # not before: a program with a long tile takes fewer
    mbarrier.wait(free[2].index(0), (turn & 1) ^ 1)
    _announce(tiles, full, (-1, 0, 0, 0, 0, 0))


@gluon.jit
def _wait(full, step):
    """Until a block is there, for the tensor cores too."""
    mbarrier.wait(full.index(step & 1), (step >> 1) & 1)
    fence_async_shared()


@gluon.jit
def _multiply_keys(queries, keys, step, zero, SCORES: gl.constexpr, HALF: gl.constexpr):
    """Begin the products of the queries with a block of keys."""
    KEYS: gl.constexpr = keys[0].shape[1]
    scores, place = gl.zeros([64, KEYS], gl.float32, layout=SCORES), (step & 1) + zero
    block = keys[0].index(place).permute((1, 0))
    scores = warpgroup_mma(queries[0].index(HALF), block, scores, use_acc=False, is_async=True)
    if len(keys) == 2:
        block = keys[1].index(place).permute((1, 0))
        scores = warpgroup_mma(queries[1].index(HALF), block, scores, is_async=True)
    return scores


@gluon.jit
def _narrow(weights, dtype: gl.constexpr):
    """Weights of 16 bits. Triton's own conversion makes the compiler swap the halves of each pair."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [weights], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [weights], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def _weights(scores, state, block, end_seen, score_scale, SCORES: gl.constexpr, MASKED: gl.constexpr):
    """Weights of a block in base 2, the running peak and total, and what is kept of the sums before."""
    KEYS: gl.constexpr = scores.shape[1]
    peak, total = state
    if MASKED:
        key = block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
        scores = gl.where(key[None, :] < end_seen[:, None], scores, float("-inf"))
    higher = gl.maximum(peak, gl.max(scores, 1) * score_scale)
    weights = gl.exp2(scores * score_scale - higher[:, None])
    kept = gl.exp2(peak - higher)
    return weights, kept, (higher, total * kept + gl.sum(weights, 1))


@gluon.jit
def _pass_over(
    state,
    block_range,
    tensors,
    bars,
    end_seen,
    score_scale,
    SCORES: gl.constexpr,
    OUT: gl.constexpr,
    MASKED: gl.constexpr,
    HALF: gl.constexpr,
):
    """Blocks of keys from the second on: the products with each are under way with those of the values before it.

    The groups begin their products in turns, so that one multiplies while the other computes weights.
    """
    summed, operand, softmax, step, passed = state
    queries, keys, values, totals = tensors
    full, free, order = bars
    for block in range(block_range[0], block_range[1]):
        zero = zero_in_turn(block)
        mbarrier.wait(order[HALF].index(0), (passed & 1) ^ (1 - HALF))
        _wait(full[0], step + 1)
        scores = _multiply_keys(queries, keys, step + 1, zero, SCORES, HALF)
        _wait(full[1], step)
        adding = warpgroup_mma(operand, values.index((step & 1) + zero), summed, is_async=True)
        signal(order[1 - HALF].index(0))
        scores = warpgroup_mma_wait(1, deps=(scores,))
        weights, kept, softmax = _weights(scores, softmax, block, end_seen, score_scale, SCORES, MASKED)
        totals.store(softmax[1])  # the wait below is not moved before it
        signal(free[0].index((step + 1) & 1))
        summed, _ = warpgroup_mma_wait(0, deps=(adding, operand))
        signal(free[1].index(step & 1))
        operand = gl.convert_layout(_narrow(weights, values.dtype), gl.DotOperandLayout(0, OUT, 2))
        summed = summed * gl.convert_layout(kept, gl.SliceLayout(1, OUT))[:, None]
        step, passed = step + 1, passed + 1
    return summed, operand, softmax, step, passed


@gluon.jit
def _store(summed, share, out, tile, group, num_heads, DIM: gl.constexpr):
    """The outputs of a group's rows, 16 bytes a thread."""
    kv_head, first, width, row = tile
    row += gl.arange(0, 64, layout=_COPIED_ROWS)
    place = ((first + row // group).to(gl.int64) * num_heads + kv_head * group + row % group) * DIM
    element = gl.arange(0, DIM, layout=gl.SliceLayout(0, COPIED))
    result = gl.convert_layout((summed * share[:, None]).to(out.dtype.element_ty), COPIED)
    gl.store(out + place[:, None] + element[None, :], result, mask=(row < width * group)[:, None])


@gluon.jit
def attend(given, out, lse, scales, CAUSAL: gl.constexpr, HALF: gl.constexpr):
    """The group of one half of each tile's rows."""
    queries, keys, values, totals, tiles, full, free, order, heads = given
    KEYS: gl.constexpr = values.shape[1]
    V_DIM: gl.constexpr = values.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_DIM, 16])
    score_scale, v_scale = scales
    group, num_columns, of_head = heads
    num_heads = num_columns // of_head * group  # not given: the compiler would keep it through all blocks, and spill
    tensors, bars = (queries, keys, values, totals.index(HALF)), (full, free, order)
    step, turn, passed = 0, 0, 0
    mbarrier.wait(full[2].index(0), 0)
    kv_head, first, width, row, num_keys, end = _tile(tiles)
    while kv_head >= 0:
        whole = gl.maximum(num_keys - (width - 1 - row // group) * CAUSAL, 0) // KEYS  # blocks that all rows see whole
        num_blocks = gl.maximum(gl.cdiv(end, KEYS), 1)
        seen = row + HALF * 64 + gl.arange(0, 64, layout=ROWS)
        end_seen = gl.minimum(num_keys - (width - 1 - seen // group) * CAUSAL, end)
        softmax = gl.full([64], _LOWEST, gl.float32, layout=ROWS), gl.zeros([64], gl.float32, layout=ROWS)
        _wait(full[0], step)
        scores = warpgroup_mma_wait(0, deps=(_multiply_keys(queries, keys, step, zero_in_turn(turn), SCORES, HALF),))
        signal(free[0].index(step & 1))
        weights, _kept, softmax = _weights(scores, softmax, 0, end_seen, score_scale, SCORES, True)
        operand = gl.convert_layout(_narrow(weights, values.dtype), gl.DotOperandLayout(0, OUT, 2))
        state = gl.zeros([64, V_DIM], gl.float32, layout=OUT), operand, softmax, step, passed
        masked = gl.minimum(gl.maximum(whole, 1), num_blocks)
        state = _pass_over(state, (1, masked), tensors, bars, end_seen, score_scale, SCORES, OUT, False, HALF)
        state = _pass_over(state, (masked, num_blocks), tensors, bars, end_seen, score_scale, SCORES, OUT, True, HALF)
        kv_head, first, width, row, num_keys, end = _tile(tiles)  # again, as it would be spilled in between
        signal(free[2].index(0))
        summed, operand, softmax, step, passed = state
        _wait(full[1], step)
        adding = warpgroup_mma(operand, values.index((step & 1) + zero_in_turn(turn)), summed, is_async=True)
        summed, _ = warpgroup_mma_wait(0, deps=(adding, operand))
        signal(free[1].index(step & 1))
        step, turn = step + 1, turn + 1
        peak, total = softmax
        row += HALF * 64
        seen = row + gl.arange(0, 64, layout=ROWS)
        place = (first + seen // group) * num_heads + kv_head * group + seen % group
        gl.store(lse + place, (peak + gl.log2(total)) * _LN_2, mask=seen < width * group)
        share = gl.convert_layout(v_scale / gl.maximum(total, _LEAST), gl.SliceLayout(1, OUT))
        _store(summed, share, out, (kv_head, first, width, row), group, num_heads, V_DIM)
        mbarrier.wait(full[2].index(0), turn & 1)
        kv_head, first, width, row, num_keys, end = _tile(tiles)
