"""What the kernels of kernels.py are made of: one row, or a part of one, normalised, raced or filtered.

Functions of the device, all float32, logits scaled to log2. They leave out who waits for whom and what is accepted.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
NO_ID = tl.constexpr(2147483647)
LEAST = tl.constexpr(-3.4028234663852886e38)  # of float32
NOTHING = tl.constexpr(-0x7F0080)  # -inf twice, as bfloat16


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
def _columns(each, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """[n, SIZE] from a tuple of COUNT tensors [n]; what is left over repeats the first."""
    for _ in tl.static_range(SIZE - COUNT):
        each += (each[0],)
    for bit in tl.static_range(8):
        if SIZE >> bit > 1:
            joined = ()
            for i in tl.static_range(SIZE >> bit + 1):
                joined += (tl.join(each[i], each[i + (SIZE >> bit + 1)]),)
            each = joined
    return tl.reshape(each[0], [each[0].shape[0], SIZE])


@triton.jit
def _eights(rows_ptr, stride, count, first, last, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    """Raw logits of the eight ids from each of first on, in all rows; -inf outside. Aligned bfloat16: two a word."""
    loaded, eight = (), first[:, None] + tl.arange(0, 8)[None, :]
    place = first[:, None] if ALIGNED else eight  # all eight are inside or none: one load
    for r in tl.static_range(ROWS):
        row, inside = rows_ptr + r * stride, place < tl.where(r < count, last, 0)
        if ALIGNED and rows_ptr.dtype.element_ty == tl.bfloat16:
            words = row.to(tl.pointer_type(tl.int32)) + (first // 2)[:, None] + tl.arange(0, 4)[None, :]
            loaded += (tl.load(words, mask=inside, other=NOTHING),)
        else:
            loaded += (tl.load(row + eight, mask=inside, other=float("-inf")),)
    return loaded


@triton.jit
def _widened(x):
    """float32 of what _eights loads."""
    if x.dtype == tl.int32:
        low, high = (x << 16).to(tl.float32, bitcast=True), (x & -65536).to(tl.float32, bitcast=True)
        return tl.reshape(tl.join(low, high), [x.shape[0], 8])
    else:
        return x.to(tl.float32)


@triton.jit
def _sweep(
    rows_ptr, stride, count, first, last, scale, floors_ptr, seed, position, most_ptr, sum_ptr, bounds_ptr, splits,
    ROWS: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, BOUNDS: tl.constexpr,
    FILTERED: tl.constexpr, PURPOSE: tl.constexpr, MOVES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Ids first..last - 1 of all rows of a sequence: largest scaled logit (log2), sum of 2^(logit - largest).

    BOUNDS > 0: for each lane, eight ids of every tile of a run, the most that an id of it may score: log2 of the larger
    weight of a pair over its lesser time. Computed while the next rows are on their way, it leaves little of a row to
    be read again. MOVES: noise of its own a row.
    """
    lanes = tl.arange(0, LANES)
    most, total = (), ()
    for _ in tl.static_range(ROWS):
        most += (tl.full([LANES], LEAST, tl.float32),)
        total += (tl.zeros([LANES], tl.float32),)
    waiting = _eights(rows_ptr, stride, count, first + 8 * lanes, last, ROWS, ALIGNED)
    for run in range(first, last, TILES * 8 * LANES):
        bound = ()
        for _ in tl.static_range(ROWS):
            bound += (tl.full([LANES], float("-inf"), tl.float32),)
        for start in range(run, tl.minimum(run + TILES * 8 * LANES, last), 8 * LANES):
            own, loaded, before = start + 8 * lanes, waiting, (most, total, bound)
            waiting = _eights(rows_ptr, stride, count, own + 8 * LANES, last, ROWS, ALIGNED)  # of the next tile
            most, total, bound = (), (), ()
            if BOUNDS > 0 and not MOVES:
                haste = _haste(seed, own, position, PURPOSE)
            for r in tl.static_range(ROWS):
                x = _widened(loaded[r])
                if FILTERED:
                    x = tl.where(x < tl.load(floors_ptr + r), float("-inf"), x)
                large = tl.max(tl.reshape(x, [LANES, 4, 2]), axis=2)
                top = tl.maximum(before[0][r], tl.max(large, axis=1) * (scale * LOG2E))
                each = tl.exp2(tl.fma(x, scale * LOG2E, -top[:, None]))
                most += (top,)
                total += (before[1][r] * tl.exp2(before[0][r] - top) + tl.sum(each, axis=1),)
                if BOUNDS > 0:
                    if MOVES:
                        haste = _haste(seed, own, position + r, PURPOSE)
                    bound += (tl.maximum(before[2][r], tl.max(tl.fma(large, scale * LOG2E, haste), axis=1)),)
                else:
                    bound += (before[2][r],)
        if BOUNDS > 0:
            for r in tl.static_range(ROWS):
                if r < count:
                    tl.store(bounds_ptr + r * splits * BOUNDS + (run - first) // (TILES * 8) + lanes, bound[r])
    rows, mosts = tl.arange(0, SIZE), _columns(most, ROWS, SIZE)
    largest = tl.max(mosts, axis=0)
    sums = tl.sum(_columns(total, ROWS, SIZE) * tl.exp2(mosts - largest[None, :]), axis=0)
    tl.store(most_ptr + rows * splits, largest, mask=rows < count)
    tl.store(sum_ptr + rows * splits, sums, mask=rows < count)


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
def _uniforms(words):
    """v of each word, inside (0, 1), as noise.gumbels has it."""
    v = tl.fma(words.to(tl.float32), 2.3283064365386963e-10, 1.1641532182693481e-10)
    return tl.minimum(v, 0.999999940395355224609375)


@triton.jit
def _times(words):
    """E of each id, exponential of rate 1, as noise.gumbels has it: its Gumbel is -log E."""
    v = _uniforms(words)
    series = v * tl.fma(v, tl.fma(v, tl.fma(v, tl.fma(v, 0.2, 0.25), 1 / 3), 0.5), 1.0)
    return tl.where(v < 0.0625, series, -LN2 * tl.log2(1 - v))


@triton.jit
def _draft_logits(row_ptr, inverse_ptr, v, inside, floor, draft_vocab, DENSE: tl.constexpr):
    """The draft's logit of each target id, -inf where it has none."""
    if DENSE:
        return _logits(row_ptr + v, inside, floor)
    else:
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
        known = v < (tl.minimum(last, draft_vocab) if DENSE else last)
        drafted = _draft_logits(draft_row, inverse_ptr, v, known, q_floor, draft_vocab, DENSE)
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
def _haste(seed, first, position, PURPOSE: tl.constexpr):
    """log2, [rows, 4]: at least 1 / E of both ids of each of the four pairs from first [rows] on; E is at least v."""
    pairs = tl.reshape(_words(seed, first, position, PURPOSE), [first.shape[0], 4, 2])
    bits = _uniforms(tl.min(pairs, axis=2)).to(tl.int32, bitcast=True).to(tl.float32)
    return tl.fma(bits, -1.1920928955078125e-07, 127.0)  # a line under each octave of log2


@triton.jit
def _scores(
    target_row, draft_row, inverse_ptr, own, last, scale, floor, q_floor, seed, position, p_sum, q_sum, fell, x,
    draft_vocab, PURPOSE: tl.constexpr, HAS_DRAFT: tl.constexpr, DENSE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The largest weight / E of the eight ids from each of own on, and the lowest id that has it."""
    v = own[:, None] + tl.arange(0, 8)[None, :]
    place = own[:, None] if ALIGNED else v
    logit = _logits(target_row + v, place < last, floor)
    if HAS_DRAFT:
        end = tl.where(fell, last, 0)
        if DENSE:
            end = tl.minimum(end, draft_vocab)
        drafted = _draft_logits(draft_row, inverse_ptr, v, place < end, q_floor, draft_vocab, DENSE)
    p = tl.fma(logit, scale * LOG2E, -p_sum)
    weight = tl.exp2(p)
    if HAS_DRAFT:
        weight = _excess(weight, p, drafted, scale, q_sum)
    else:
        weight = tl.where(v == tl.where(fell, x, -1), 0.0, weight)
    score = weight / _times(_words(seed, own, position, PURPOSE))
    top = tl.max(score)
    return top, tl.min(tl.where(score == top, v, NO_ID))


@triton.jit
def _race(
    target_row, draft_row, inverse_ptr, bounds_ptr, first, last, scale, floor, q_floor, seed, position, p_sum, q_sum,
    fell, x, draft_vocab, shared_ptr,
    PURPOSE: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, BOUNDS: tl.constexpr, FEW: tl.constexpr,
    HAS_DRAFT: tl.constexpr, DENSE: tl.constexpr, ALIGNED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """The id of first..last - 1 with the largest weight / E, and that score; 0 where nothing weighs anything.

    An id weighs p, or (p - q)+ where a draft fell: at most p in any case. So a lane whose bound (_sweep) does not reach
    the best score so far cannot win. Lanes are read a few at a time, the best of each of FEW groups; without bounds
    (BOUNDS = 0: parts of few tiles) all are read at once.
    """
    best, winner = 0.0, tl.full([], NO_ID, tl.int32)
    if BOUNDS == 0:
        top, lowest = _scores(
            target_row, draft_row, inverse_ptr, first + 8 * tl.arange(0, TILES * LANES), last, scale, floor, q_floor,
            seed, position, p_sum, q_sum, fell, x, draft_vocab, PURPOSE, HAS_DRAFT, DENSE, ALIGNED,
        )  # fmt: skip
        if top > 0:
            best, winner = top, lowest
    else:
        at = tl.arange(0, FEW * TILES)
        lanes = tl.arange(0, FEW)[:, None] * (BOUNDS // FEW) + tl.arange(0, BOUNDS // FEW)[None, :]
        inside = lanes // LANES * (TILES * 8 * LANES) < last - first  # runs that were swept
        bound = tl.load(bounds_ptr + lanes, mask=inside, other=float("-inf")) - p_sum
        slack = 1e-3 + 2.4e-7 * (tl.abs(bound) + 2 * tl.abs(p_sum) + 32)  # what rounding may take
        bound = tl.where(bound > float("-inf"), bound + slack, float("-inf"))
        tops, least = tl.max(bound, axis=1), tl.full([], float("-inf"), tl.float32)
        most = tl.max(tops)
        while (most > float("-inf")) & (most >= least):
            lane = tl.max(tl.where(bound == tops[:, None], lanes, -1), axis=1)
            bound = tl.where(lanes == lane[:, None], float("-inf"), bound)
            lane = tl.where((tops > float("-inf")) & (tops >= least), lane, BOUNDS)
            lane = tl.gather(lane, at // TILES, axis=0)
            own = first + ((lane // LANES * TILES + at % TILES) * LANES + lane % LANES) * 8
            top, lowest = _scores(
                target_row, draft_row, inverse_ptr, own, last, scale, floor, q_floor, seed, position, p_sum, q_sum,
                fell, x, draft_vocab, PURPOSE, HAS_DRAFT, DENSE, ALIGNED,
            )  # fmt: skip
            if (top > 0) & (top >= best):
                winner = tl.where(top > best, lowest, tl.minimum(winner, lowest))
                best = top
                if SHARED and tl.num_programs(0) > 1:
                    tl.atomic_max(shared_ptr, best.to(tl.int32, bitcast=True), sem="relaxed")
            tops, least = tl.max(bound, axis=1), best
            most = tl.max(tops)
            if SHARED and tl.num_programs(0) > 1:  # each thread reads for itself, and all must go on with one number
                others = tl.load(shared_ptr + 0 * tl.arange(0, LANES), volatile=True).to(tl.float32, bitcast=True)
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
