"""What the kernels of kernels.py are made of: one row, or a part of one, normalised, raced or filtered.

Functions of the device, all float32, logits scaled to log2. They leave out who waits for whom and what is accepted.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
NO_ID = tl.constexpr(2147483647)


@triton.jit
def _logits(ptr, mask, floor):
    """float32 logits, -inf outside the mask and where a filter dropped the id; NaN stays."""
    x = tl.load(ptr, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(x < floor, float("-inf"), x)


@triton.jit
def _finite(x):
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def _one_minus_exp(e):
    """1 - exp(e) for e <= 0, by its series where e is small."""
    series = -e * tl.fma(e, tl.fma(e, tl.fma(e, tl.fma(e, 1 / 120, 1 / 24), 1 / 6), 0.5), 1.0)
    return tl.where(e > -0.125, series, 1 - tl.exp2(e * LOG2E))


@triton.jit
def _normalise(row_ptr, first, last, scale, floor, most_ptr, sum_ptr, R: tl.constexpr, BLOCK: tl.constexpr):
    """Largest scaled logit (log2) and sum of 2^(logit - largest) of ids first..last - 1 of one row."""
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    offsets = tl.arange(0, R)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    for start in range(first, last, R * BLOCK):
        ids = start + offsets
        x = _logits(row_ptr + ids, ids < last, floor) * (scale * LOG2E)
        top = tl.maximum(most, tl.max(x, axis=0))
        base = _finite(top)
        total = total * tl.exp2(most - base) + tl.sum(tl.exp2(x - base[None, :]), axis=0)
        most = top
    largest = tl.max(most)
    tl.store(most_ptr, largest)
    tl.store(sum_ptr, tl.sum(total * tl.exp2(most - _finite(largest))))
    return largest


@triton.jit
def _normalise_together(
    rows_ptr, stride, count, first, last, scale, floors_ptr, most_ptr, sum_ptr, step,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FILTERED: tl.constexpr,
):  # fmt: skip
    """The same for all rows of a sequence, where a part is one block: every load is on its way before the first sum."""
    ids = first + tl.arange(0, BLOCK)
    rows = ()
    for r in tl.static_range(ROWS):
        here = ids < tl.where(r < count, last, first)
        rows = rows + (tl.load(rows_ptr + r * stride + ids, mask=here, other=float("-inf")),)
    for r in tl.static_range(ROWS):
        if r < count:
            floor = float("-inf")
            if FILTERED:
                floor = tl.load(floors_ptr + r)
            x = rows[r].to(tl.float32)
            x = tl.where(x < floor, float("-inf"), x) * (scale * LOG2E)
            largest = tl.max(x)
            tl.store(most_ptr + r * step, largest)
            tl.store(sum_ptr + r * step, tl.sum(tl.exp2(x - _finite(largest))))


@triton.jit
def _argmax(row_ptr, first, last, most_ptr, sum_ptr, score_ptr, id_ptr, BLOCK: tl.constexpr):
    """Largest logit and its lowest id; NaN where there is one."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32) + last
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(first, last, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = _logits(row_ptr + ids, ids < last, float("-inf"))
        bad |= (x != x).to(tl.int32)
        larger = x > best
        best = tl.where(larger, x, best)
        where = tl.where(larger, ids, where)
    top = tl.max(best)
    tl.store(id_ptr, tl.min(tl.where(best == top, where, last)))
    tl.store(score_ptr, top)
    tl.store(most_ptr, tl.where(tl.max(bad) > 0, float("nan"), top))
    tl.store(sum_ptr, 1.0)


@triton.jit
def _log_sums(most_ptr, sum_ptr, rows, inside, splits, SPLITS: tl.constexpr):
    """log2 of the sums of several rows from their parts."""
    at = tl.arange(0, SPLITS)
    where = rows[:, None] * splits + at[None, :]
    mask = inside[:, None] & (at < splits)[None, :]
    m = tl.load(most_ptr + where, mask=mask, other=float("-inf"), volatile=True)
    s = tl.load(sum_ptr + where, mask=mask, other=0.0, volatile=True)
    base = _finite(tl.max(m, axis=1))
    return base + tl.log2(tl.sum(tl.where(s > 0, s * tl.exp2(m - base[:, None]), s), axis=1))


@triton.jit
def _times(words):
    """E of each id, exponential of rate 1, as noise.gumbels has it: its Gumbel is -log E."""
    v = tl.fma(words.to(tl.float32), 2.3283064365386963e-10, 1.1641532182693481e-10)
    v = tl.minimum(v, 0.999999940395355224609375)
    series = v * tl.fma(v, tl.fma(v, tl.fma(v, tl.fma(v, 0.2, 0.25), 1 / 3), 0.5), 1.0)
    return tl.where(v < 0.0625, series, -LN2 * tl.log2(1 - v))


@triton.jit
def _excess(weight, p, draft_row, inverse_ptr, v, inside, scale, floor, q_sum, draft_vocab, DENSE: tl.constexpr):
    """(p - q)+ of each id, from weight = 2^p."""
    column = v
    if not DENSE:
        column = tl.load(inverse_ptr + v, mask=inside, other=-1)
    known = inside & (column >= 0) & (column < draft_vocab)
    d = tl.fma(_logits(draft_row + column, known, floor), scale * LOG2E, -q_sum) - p
    return weight * _one_minus_exp(tl.where(d < 0, d, 0.0) * LN2)  # NaN, where both are 0, becomes 0 too


@triton.jit
def _excess_sum(
    target_row, draft_row, inverse_ptr, first, last, scale, floor, q_floor, p_sum, q_sum, draft_vocab,
    BLOCK: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Sum of (p - q)+ over ids first..last - 1."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(first, last, BLOCK):
        v = start + tl.arange(0, BLOCK)
        p = tl.fma(_logits(target_row + v, v < last, floor), scale * LOG2E, -p_sum)
        total += _excess(tl.exp2(p), p, draft_row, inverse_ptr, v, v < last, scale, q_floor, q_sum, draft_vocab, DENSE)
    return tl.sum(total)


@triton.jit
def _words(seed, blocks, position, PURPOSE: tl.constexpr):
    """Philox4x32-10 of noise.py, four words a block; one wide product a half-round, where tl.philox takes two."""
    key0, key1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = blocks.to(tl.uint32), (blocks * 0 + position).to(tl.uint32)
    c2 = c0 * 0
    c3 = c2 + PURPOSE
    for _ in tl.static_range(10):
        product0, product1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (product1 >> 32).to(tl.uint32) ^ c1 ^ key0, (product0 >> 32).to(tl.uint32) ^ c3 ^ key1
        c1, c3 = product1.to(tl.uint32), product0.to(tl.uint32)
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [blocks.shape[0], 4])


@triton.jit
def _race(
    target_row, draft_row, inverse_ptr, first, last, scale, floor, q_floor, seed, position, p_sum, q_sum, fell, x,
    draft_vocab, shared_ptr,
    PURPOSE: tl.constexpr, BLOCK: tl.constexpr, HAS_DRAFT: tl.constexpr, DENSE: tl.constexpr, SHARED: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """The id of first..last - 1 with the largest weight / E, and that score; 0 where nothing weighs anything.

    An id weighs p, or (p - q)+ where a draft fell: at most p in any case. E is at least its own uniform. So a tile in
    which no p over the uniform reaches the best score so far cannot win: no draft row is read for it, no E computed.
    """
    best, bound = 0.0, 0.0
    winner = tl.full([], NO_ID, tl.int32)
    four = tl.arange(0, BLOCK)
    v = first + 4 * four[:, None] + tl.arange(0, 4)[None, :]
    inside = v < last
    if ALIGNED:
        inside = (first + 4 * four[:, None] + tl.zeros([1, 4], tl.int32)) < last
    ahead = _logits(target_row + v, inside, floor)
    for start in range(first, last, 4 * BLOCK):
        logit = ahead
        v = start + 4 * four[:, None] + tl.arange(0, 4)[None, :]
        inside = v + 4 * BLOCK < last
        if ALIGNED:
            inside = (start + 4 * BLOCK + 4 * four[:, None] + tl.zeros([1, 4], tl.int32)) < last
        ahead = _logits(target_row + v + 4 * BLOCK, inside, floor)
        if SHARED:
            bound = tl.maximum(best, tl.load(shared_ptr, volatile=True).to(tl.float32, bitcast=True))
        words = _words(seed, start // 4 + four, position, PURPOSE)
        p = tl.fma(logit, scale * LOG2E, -p_sum)
        weight = tl.exp2(p)
        uniform = ((words >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
        may = weight > 0.9999 * bound * uniform
        if tl.max(may.to(tl.int32)) > 0:
            if fell:
                if HAS_DRAFT:
                    weight = _excess(
                        weight, p, draft_row, inverse_ptr, v, v < last, scale, q_floor, q_sum, draft_vocab, DENSE
                    )
                else:
                    weight = tl.where(v == x, 0.0, weight)
            score = weight / _times(words)
            top = tl.max(score)
            if top > best:
                best = top
                winner = tl.min(tl.where(score == top, v, NO_ID))
                if SHARED:
                    tl.atomic_max(shared_ptr, best.to(tl.int32, bitcast=True), sem="relaxed")
            bound = tl.maximum(bound, best)
    return best, winner


@triton.jit
def _lowest(row_ptr, vocab, limit, floor, scale, most, MASS: tl.constexpr, SKIP: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest logit above which less than the limit lies, by halving the float's own bits.

    MASS: the limit is a share of what all ids from the floor on weigh; else a number of ids. NaN lies nowhere.
    """
    bits = most.to(tl.int32, bitcast=True)  # as an integer that orders as the float does, -0 as 0
    high = (tl.where(most == 0, 0, bits) ^ ((bits >> 31) & 0x7FFFFFFF)) >> SKIP
    low = tl.full([], -2139095041, tl.int32) >> SKIP  # of -inf
    middle, whole = low, tl.full([], 0.0 if MASS else 1.0, tl.float32)
    nothing = tl.zeros([BLOCK], tl.float32)
    while low < high:
        total = nothing
        for start in range(0, vocab, BLOCK):
            v = start + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + v, mask=v < vocab, other=float("-inf")).to(tl.float32)
            own = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
            above = (x >= floor) & (((own ^ ((own >> 31) & 0x7FFFFFFF)) >> SKIP) > middle)
            weight = 1.0
            if MASS:
                weight = tl.exp2((x - most) * (scale * LOG2E))
            total += tl.where(above, weight, 0.0)
        weighed = tl.sum(total)
        if whole == 0.0:  # the first round weighs all: at least the largest, which weighs 1
            whole = weighed
        elif weighed < limit * whole:
            high = middle
        else:
            low = middle + 1
        middle = (low & high) + ((low ^ high) >> 1)
    key = low << SKIP
    if low < 0:
        key = key | ((1 << SKIP) - 1)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
