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
def _sweep(
    rows_ptr, stride, count, first, last, scale, floors_ptr, seed, position, most_ptr, sum_ptr, bounds_ptr, splits,
    ROWS: tl.constexpr, LANES: tl.constexpr, FILTERED: tl.constexpr, RACES: tl.constexpr, PURPOSE: tl.constexpr,
    MOVES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Ids first..last - 1 of all rows of a sequence: largest scaled logit (log2), sum of 2^(logit - largest).

    RACES: and for each lane, eight ids of every tile, the most that an id of it may score: log2 of weight * haste.
    Computed while the rows are on their way, it leaves little of a row to be read again. MOVES: noise of its own a row.
    """
    lanes = tl.arange(0, LANES)
    most, total, bound = (), (), ()
    for _ in tl.static_range(ROWS):
        most += (tl.full([LANES], float("-inf"), tl.float32),)
        total += (tl.zeros([LANES], tl.float32),)
        bound += (tl.zeros([LANES], tl.float32),)
    for start in range(first, last, 8 * LANES):
        own = start + 8 * lanes
        v = own[:, None] + tl.arange(0, 8)[None, :]
        place = v
        if ALIGNED:  # all eight are inside or none: one load
            place = own[:, None] + tl.zeros([1, 8], tl.int32)
        loaded, before = (), (most, total, bound)
        for r in tl.static_range(ROWS):
            inside = place < tl.where(r < count, last, first)
            loaded += (tl.load(rows_ptr + r * stride + v, mask=inside, other=float("-inf")),)
        most, total, bound = (), (), ()
        if RACES and not MOVES:
            haste = _haste(_words(seed, own, position, PURPOSE))
        for r in tl.static_range(ROWS):
            x = loaded[r].to(tl.float32)
            if FILTERED:
                x = tl.where(x < tl.load(floors_ptr + r), float("-inf"), x)
            top = tl.maximum(before[0][r], tl.max(x, axis=1) * (scale * LOG2E))
            base = _finite(top)
            each = tl.exp2(tl.fma(x, scale * LOG2E, -base[:, None]))
            shrink = tl.exp2(before[0][r] - base)
            most += (top,)
            total += (before[1][r] * shrink + tl.sum(each, axis=1),)
            if RACES:
                if MOVES:
                    haste = _haste(_words(seed, own, position + r, PURPOSE))
                bound += (tl.maximum(before[2][r] * shrink, tl.max(each * haste, axis=1)),)
            else:
                bound += (before[2][r],)
    for r in tl.static_range(ROWS):
        if r < count:
            largest = tl.max(most[r])
            tl.store(most_ptr + r * splits, largest)
            tl.store(sum_ptr + r * splits, tl.sum(total[r] * tl.exp2(most[r] - _finite(largest))))
            if RACES:
                tl.store(bounds_ptr + r * splits * LANES + lanes, _finite(most[r]) + tl.log2(bound[r]))


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
def _draft_logits(row_ptr, inverse_ptr, v, inside, floor, draft_vocab, DENSE: tl.constexpr):
    """The draft's logit of each target id, -inf where it has none."""
    column = v
    if not DENSE:
        column = tl.load(inverse_ptr + v, mask=inside, other=-1)
    return _logits(row_ptr + column, inside & (column >= 0) & (column < draft_vocab), floor)


@triton.jit
def _excess(weight, p, drafted, scale, q_sum):
    """(p - q)+ of each id, from weight = 2^p and the draft's logit."""
    d = tl.fma(drafted, scale * LOG2E, -q_sum) - p
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
        drafted = _draft_logits(draft_row, inverse_ptr, v, v < last, q_floor, draft_vocab, DENSE)
        total += _excess(tl.exp2(p), p, drafted, scale, q_sum)
    return tl.sum(total)


@triton.jit
def _block(seed, block, position, PURPOSE: tl.constexpr):
    """Philox4x32-10 of noise.py, four words a block; one wide product a half-round, where tl.philox takes two."""
    key0, key1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = block.to(tl.uint32), (block * 0 + position).to(tl.uint32)
    c2 = c0 * 0
    c3 = c2 + PURPOSE
    for _ in tl.static_range(10):
        product0, product1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (product1 >> 32).to(tl.uint32) ^ c1 ^ key0, (product0 >> 32).to(tl.uint32) ^ c3 ^ key1
        c1, c3 = product1.to(tl.uint32), product0.to(tl.uint32)
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _words(seed, first, position, PURPOSE: tl.constexpr):
    """[rows, 8] words of noise, one an id, of the eight ids from each of first [rows] on; a thread makes its own."""
    a0, a1, a2, a3 = _block(seed, first // 4, position, PURPOSE)
    b0, b1, b2, b3 = _block(seed, first // 4 + 1, position, PURPOSE)
    even = tl.join(tl.join(a0, b0), tl.join(a2, b2))
    odd = tl.join(tl.join(a1, b1), tl.join(a3, b3))
    return tl.reshape(tl.join(even, odd), [first.shape[0], 8])


@triton.jit
def _haste(words):
    """At least 1 / E of each id and cheap: a bit trick that gives 1 / u and up to an eighth more; E is at least u."""
    uniform = ((words >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    return (0x7F000000 - uniform.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _race(
    target_row, draft_row, inverse_ptr, bounds_ptr, first, last, scale, floor, q_floor, seed, position, p_sum, q_sum,
    fell, x, draft_vocab, shared_ptr,
    PURPOSE: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, FEW: tl.constexpr, HAS_DRAFT: tl.constexpr,
    DENSE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """The id of first..last - 1 with the largest weight / E, and that score; 0 where nothing weighs anything.

    An id weighs p, or (p - q)+ where a draft fell: at most p in any case. So a lane whose bound (_sweep) does not reach
    the best score so far cannot win. Lanes are read a few at a time, those within a quarter of the largest bound first.
    """
    best = 0.0
    winner = tl.full([], NO_ID, tl.int32)
    lanes, tiles, places = tl.arange(0, LANES), tl.arange(0, TILES), tl.arange(0, FEW)
    bound = tl.load(bounds_ptr + lanes) - p_sum
    slack = 1e-3 + 2.4e-7 * (tl.abs(bound) + 2 * tl.abs(p_sum) + 32)  # what rounding may take
    bound = tl.where(bound > float("-inf"), bound + slack, float("-inf"))
    most, least = tl.max(bound), float("-inf")
    while (most > float("-inf")) & (most >= least):
        may = bound >= tl.maximum(most - 2, least)
        count = tl.cumsum(may.to(tl.int32))
        picked = may[None, :] & (count[None, :] == places[:, None] + 1)
        lane = tl.min(tl.where(picked, lanes[None, :], LANES * TILES), axis=1)
        bound = tl.where(may & (count <= FEW), float("-inf"), bound)
        own = tl.reshape(first + (tiles[None, :] * LANES + lane[:, None]) * 8, [FEW * TILES])
        v = own[:, None] + tl.arange(0, 8)[None, :]
        logit = _logits(target_row + v, v < last, floor)
        if HAS_DRAFT:
            drafted = _draft_logits(
                draft_row, inverse_ptr, v, v < tl.where(fell, last, first), q_floor, draft_vocab, DENSE
            )
        words = _words(seed, own, position, PURPOSE)
        p = tl.fma(logit, scale * LOG2E, -p_sum)
        weight = tl.exp2(p)
        if HAS_DRAFT:
            weight = _excess(weight, p, drafted, scale, q_sum)
        else:
            weight = tl.where(v == tl.where(fell, x, -1), 0.0, weight)
        score = weight / _times(words)
        top = tl.max(score)
        if (top > 0) & (top >= best):
            lowest = tl.min(tl.where(score == top, v, NO_ID))
            winner = tl.where(top > best, lowest, tl.minimum(winner, lowest))
            best = top
            if SHARED:
                tl.atomic_max(shared_ptr, best.to(tl.int32, bitcast=True), sem="relaxed")
        most, least = tl.max(bound), best
        if SHARED:  # each thread reads for itself, and all must go on with one number
            others = tl.load(shared_ptr + 0 * lanes, volatile=True).to(tl.float32, bitcast=True)
            least = tl.maximum(best, tl.max(others))
        least = tl.log2(least)
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
