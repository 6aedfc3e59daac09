"""The verification step as Triton kernels: one that finds where filters cut, one that normalises, accepts and draws.

Programs share a sequence: each normalises its part of the rows, waits for the others, accepts from two numbers a token,
and races its part of the one row that is drawn from. It leaves out how they are launched (kernels.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashspec_core.noise import ACCEPT, STEP
from flashspec_core.verify import METHODS
from flashspec_core.verify.kernel_parts import (
    LN2,
    LOG2E,
    NO_ID,
    _argmax,
    _block,
    _excess_sum,
    _log_sums,
    _lowest,
    _one_minus_exp,
    _race,
    _sweep,
)

_BLOCK, _COUPLED = tl.constexpr(METHODS.index("block")), tl.constexpr(METHODS.index("coupled"))
_STEP, _ACCEPT = tl.constexpr(STEP), tl.constexpr(ACCEPT)


@triton.jit
def _noise_kernel(
    row_seeds_ptr,  # [batch] int64
    step_ptr,  # [1] int64
    seeds_ptr,  # [batch] int64: noise.step_seeds
    bits_ptr,  # [batch, gamma] float32: the 24 bits behind noise.log_uniforms, and one
    gamma,
    GAMMA: tl.constexpr,
):
    """A step's seed of one row, and the accept test's noise."""
    row, at = tl.program_id(0), tl.arange(0, GAMMA)
    low, high, _, _ = _block(tl.load(row_seeds_ptr + row), tl.load(step_ptr), 0, _STEP)
    seed = low.to(tl.int64) | (high.to(tl.int64) << 32)
    word, _, _, _ = _block(seed, at * 0, at, _ACCEPT)
    tl.store(seeds_ptr + row, seed)
    tl.store(bits_ptr + row * gamma + at, ((word >> 8) + 1).to(tl.float32), mask=at < gamma)


@triton.jit
def _floors_kernel(
    target_ptr,  # [batch, gamma + 1, vocab]
    draft_ptr,  # [batch, gamma, draft_vocab]
    ids_ptr,  # [batch, gamma] int64, -1 behind a row's own end
    laws_ptr,  # [batch, 5] float32: 1 / temperature (0: greedy), temperature, top_k, top_p, log min_p
    floors_ptr,  # [batch, 2 gamma + 1] float32
    gamma,
    vocab,
    draft_vocab,
    SKIP: tl.constexpr,  # low bits that no logit of this dtype has
    GAMMA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The lowest raw logit that top-k, top-p and min-p keep in one row, target rows first; -inf where all stay."""
    row, b, size = tl.program_id(0), tl.program_id(1).to(tl.int64), vocab
    at = tl.arange(0, GAMMA)
    ids = tl.load(ids_ptr + b * gamma + at, mask=at < gamma, other=-1)
    drafted, r = tl.sum((ids >= 0).to(tl.int32)), row
    row_ptr = target_ptr + (b * (gamma + 1) + row) * vocab
    if row > gamma:
        r, size = row - gamma, draft_vocab
        row_ptr = draft_ptr + (b * gamma + r - 1) * draft_vocab
    scale, temperature = tl.load(laws_ptr + 5 * b), tl.load(laws_ptr + 5 * b + 1)
    top_k, top_p = tl.load(laws_ptr + 5 * b + 2), tl.load(laws_ptr + 5 * b + 3)
    log_min_p = tl.load(laws_ptr + 5 * b + 4)
    floor = scale * 0 + float("-inf")
    if (r <= drafted) & (scale > 0):
        most = floor
        for start in range(0, size, BLOCK):
            v = start + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + v, mask=v < size, other=float("-inf")).to(tl.float32)
            most = tl.maximum(most, tl.max(x))
        if (most > float("-inf")) & (most < float("inf")):
            if top_k < size:
                floor = _lowest(row_ptr, size, top_k, floor, scale, most, False, SKIP, BLOCK)
            if top_p < 1:
                lowest = _lowest(row_ptr, size, top_p, floor, scale, most, True, SKIP, BLOCK)
                floor = tl.maximum(floor, lowest)
            if log_min_p > float("-inf"):
                limit, lowest = tl.div_rn(most, temperature) + log_min_p, most
                for start in range(0, size, BLOCK):
                    v = start + tl.arange(0, BLOCK)
                    x = tl.load(row_ptr + v, mask=v < size, other=float("-inf")).to(tl.float32)
                    kept = tl.div_rn(x, tl.zeros([BLOCK], tl.float32) + temperature) >= limit
                    lowest = tl.minimum(lowest, tl.min(tl.where(kept, x, most)))
                floor = tl.maximum(floor, lowest)
    tl.store(floors_ptr + b * (2 * gamma + 1) + row, floor)


@triton.jit
def _wait(arrived_ptr, splits):
    """Until all programs of a sequence have come; they are dispatched one after another, so all of them run."""
    tl.debug_barrier()
    if splits > 1:
        seen = tl.atomic_add(arrived_ptr, 1, sem="release") + 1
        while seen < splits:
            seen = tl.load(arrived_ptr, volatile=True)
    tl.debug_barrier()  # what the others left is then read past this core's own cache (volatile)


@triton.jit
def _block_length(
    excess_ptr, log_u_ptr, log_w, log_p, at, drafted, splits, KIND: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """Block verification: the longest block that stands, n, and log w_n where a draft fell behind it."""
    inner = (at >= 1) & (at < drafted) & (log_w < 0) & (log_w > float("-inf"))
    if KIND == 0:
        excess = tl.exp(log_w) * _one_minus_exp(log_p)  # all of w p but the id that was drafted
    else:
        parts = tl.arange(0, SPLITS)
        mask = inner[:, None] & (parts < splits)[None, :]
        where = at[:, None] * splits + parts[None, :]
        excess = tl.sum(tl.load(excess_ptr + where, mask=mask, other=0.0, volatile=True), axis=1)
    chance = tl.where(inner, excess / (excess + _one_minus_exp(log_w)), tl.where(log_w == 0, 1.0, 0.0))
    log_h = tl.where(at == drafted, log_w, tl.log(chance))
    before = (at >= 1) & (at <= drafted)
    log_u = tl.load(log_u_ptr + at - 1, mask=before, other=0.0)
    n = tl.max(tl.where(before & (log_u <= log_h) & (log_h > float("-inf")), at, 0))
    return n, tl.sum(tl.where((at == n) & (n < drafted), log_w, 0.0))


@triton.jit
def _verify_kernel(
    target_ptr,  # [batch, gamma + 1, vocab]
    draft_ptr,  # [batch, gamma, draft_vocab]
    ids_ptr,  # [batch, gamma] int64, -1 behind a row's own end
    kept_ptr,  # [batch, gamma] float32, the draft's log-sum-exp kept from the draw
    log_u_ptr,  # [batch, gamma] float32
    seeds_ptr,  # [batch] int64
    positions_ptr,  # [batch] int64, coupled only
    inverse_ptr,  # [vocab] int32, a target id's place in the draft's vocabulary, -1: none
    laws_ptr,  # [batch, 5] float32: 1 / temperature (0: greedy), and the filters
    floors_ptr,  # [batch, 2 gamma + 1] float32, the lowest logit that they keep
    parts_ptr,  # [batch, 4, 2 gamma + 2, splits] float32: largest, sum, score, excess of target rows, draft rows, race
    winners_ptr,  # [batch, 2 gamma + 2, splits] int32: the ids of these scores
    bounds_ptr,  # [batch, gamma + 1, splits, BOUNDS] float32: the most that an id of a lane may score
    state_ptr,  # [batch, 4] int32, zero before and after: three counters, bits of the best score so far
    out_ptr,  # [batch, gamma + 4] int64: number accepted, next id, first invalid position, the emitted ids
    logs_ptr,  # [batch, 3, gamma + 1] float32: log p and log q of the drafted ids, log-sum-exp of the target's rows
    gamma,
    vocab,
    draft_vocab,
    part,
    PHASE: tl.constexpr,  # 0: all; 1, 2 and 3: before, between and behind the waits
    METHOD: tl.constexpr,
    PURPOSE: tl.constexpr,  # of the noise
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,  # threads of a program
    TILES: tl.constexpr,  # of a run, whose lanes are bounded apart
    BOUNDS: tl.constexpr,  # lanes of all runs of a part; 0: the race reads all of it
    FEW: tl.constexpr,  # lanes that are raced at a time
    ROWS: tl.constexpr,  # gamma + 1
    GAMMA: tl.constexpr,  # the next power of 2
    SPLITS: tl.constexpr,
    KIND: tl.constexpr,  # 0: deterministic draft, 1: normalised here, 2: log-sum-exp kept
    DENSE: tl.constexpr,  # the draft's ids are 0 .. draft_vocab - 1
    ALIGNED: tl.constexpr,  # the vocabularies are multiples of 8, and the logits begin at multiples of 16 bytes
):
    """One part of one sequence; the last part to arrive writes what comes out."""
    split, b, splits = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    at = tl.arange(0, GAMMA)
    ids = tl.load(ids_ptr + b * gamma + at, mask=at < gamma, other=-1)
    drafted = tl.sum((ids >= 0).to(tl.int32))
    scale = tl.load(laws_ptr + 5 * b)
    seed, position = tl.load(seeds_ptr + b), 0
    if METHOD == _COUPLED:
        position = tl.load(positions_ptr + b).to(tl.int32)
    rows = 2 * gamma + 2
    most_ptr = parts_ptr + b * 4 * rows * splits
    sum_ptr, score_ptr, excess_ptr = (
        most_ptr + rows * splits,
        most_ptr + 2 * rows * splits,
        most_ptr + 3 * rows * splits,
    )
    winners_ptr += b * rows * splits
    floors_ptr += b * (2 * gamma + 1)
    state_ptr += 4 * b
    logs_ptr += 3 * b * (gamma + 1)
    bounds_ptr += (b * (gamma + 1) * splits + split) * BOUNDS
    target_rows = target_ptr + b * (gamma + 1) * vocab
    draft_rows = draft_ptr + b * gamma * draft_vocab
    first = split * part
    last, last_draft = min(first + part, vocab), min(first + part, draft_vocab)
    if PHASE <= 1:
        if scale == 0.0:
            for r in range(drafted + 1):
                o = r * splits + split
                _argmax(
                    target_rows + r * vocab, first, last, most_ptr + o, sum_ptr + o, score_ptr + o, winners_ptr + o,
                    BLOCK,
                )  # fmt: skip
        else:
            _sweep(
                target_rows, vocab, drafted + 1, first, last, scale, floors_ptr, seed, position, most_ptr + split,
                sum_ptr + split, bounds_ptr, splits, ROWS, GAMMA, LANES, TILES, BOUNDS, FILTERED, PURPOSE,
                METHOD == _COUPLED, ALIGNED,
            )  # fmt: skip
            if METHOD == _COUPLED:
                tl.debug_barrier()  # the threads read each other's bounds
                for r in range(drafted + 1):
                    o = r * splits + split
                    floor = float("-inf")
                    if FILTERED:
                        floor = tl.load(floors_ptr + r)
                    row, base = target_rows + r * vocab, tl.load(most_ptr + o)
                    top, winner = _race(
                        row, row, inverse_ptr, bounds_ptr + r * splits * BOUNDS, first, last, scale, floor, floor, seed,
                        position + r, base, 0.0, False, 0, vocab, state_ptr, PURPOSE, LANES, TILES, BOUNDS, FEW, False,
                        True, ALIGNED, False,
                    )  # fmt: skip
                    tl.store(score_ptr + o, base + tl.log2(top))
                    tl.store(winners_ptr + o, winner)
            if KIND == 1:
                _sweep(
                    draft_rows, draft_vocab, drafted, first, last_draft, scale, floors_ptr + gamma + 1, seed, 0,
                    most_ptr + (gamma + 1) * splits + split, sum_ptr + (gamma + 1) * splits + split, bounds_ptr, splits,
                    ROWS - 1, GAMMA, LANES, TILES, 0, FILTERED, PURPOSE, False, ALIGNED,
                )  # fmt: skip
    inside, tested = at <= drafted, at < drafted
    if PHASE != 1:  # two numbers a token, whatever V is; they are on their way while the others are waited for
        weighed, x = at < tl.where(scale > 0.0, drafted, 0), tl.maximum(ids, 0)
        logit = tl.load(target_rows + at * vocab + x, mask=weighed, other=0.0).to(tl.float32)
        log_u = tl.load(log_u_ptr + b * gamma + at, mask=weighed, other=0.0)
        if KIND > 0:
            column = x
            if not DENSE:
                column = tl.load(inverse_ptr + x, mask=weighed, other=-1).to(tl.int64)
            listed = weighed & (column >= 0) & (column < draft_vocab)
            draft_logit = tl.load(draft_rows + at * draft_vocab + column, mask=listed, other=0.0).to(tl.float32)
            if KIND == 2:
                q_sums = tl.load(kept_ptr + b * gamma + at, mask=weighed, other=0.0) * LOG2E
    if PHASE == 0:
        _wait(state_ptr, splits)
    if PHASE != 1:
        # each program for itself
        p_sums = _log_sums(most_ptr, sum_ptr, at, inside, splits, SPLITS)
        log_p = tl.zeros([GAMMA], tl.float32)
        log_q = tl.zeros([GAMMA], tl.float32)
        if KIND == 0:
            q_sums = tl.zeros([GAMMA], tl.float32)
        elif KIND == 1:
            q_sums = tl.where(weighed, _log_sums(most_ptr, sum_ptr, gamma + 1 + at, weighed, splits, SPLITS), 0.0)
        log_w = tl.zeros([GAMMA], tl.float32)
        p_floors = tl.full([GAMMA], float("-inf"), tl.float32)
        q_floors = tl.full([GAMMA], float("-inf"), tl.float32)
        if FILTERED:
            p_floors = tl.load(floors_ptr + at, mask=inside, other=float("-inf"))
            q_floors = tl.load(floors_ptr + gamma + 1 + at, mask=tested, other=float("-inf"))
        if scale > 0.0:
            log_p = (tl.where(logit < p_floors, float("-inf"), logit) * (scale * LOG2E) - p_sums) * LN2
            if KIND > 0:
                kept = tl.where(draft_logit < q_floors, float("-inf"), draft_logit)
                log_q = (kept * (scale * LOG2E) - q_sums) * LN2
                log_q = tl.where(listed, log_q, float("-inf"))
            if METHOD == _BLOCK:
                w = tl.full([], 0.0, tl.float32)
                for i in range(drafted):
                    w = tl.minimum(w + tl.sum(tl.where(at == i, log_p - log_q, 0.0)), 0.0)
                    w = tl.where(w == w, w, float("-inf"))
                    log_w = tl.where(at == i + 1, w, log_w)
                if PHASE != 3 and KIND > 0:
                    for i in range(1, drafted):
                        v = tl.sum(tl.where(at == i, log_w, 0.0))
                        if (v < 0) & (v > float("-inf")):
                            p_sum = tl.sum(tl.where(at == i, p_sums, 0.0)) - v * LOG2E
                            q_sum = tl.sum(tl.where(at == i, q_sums, 0.0))
                            p_floor = tl.max(tl.where(at == i, p_floors, float("-inf")))
                            q_floor = tl.max(tl.where(at == i, q_floors, float("-inf")))
                            excess = _excess_sum(
                                target_rows + i * vocab, draft_rows + i * draft_vocab, inverse_ptr, first, last, scale,
                                p_floor, q_floor, p_sum, q_sum, draft_vocab, BLOCK, DENSE,
                            )  # fmt: skip
                            tl.store(excess_ptr + i * splits + split, excess)
    if METHOD == _BLOCK and PHASE == 0:
        _wait(state_ptr + 1, splits)
    if PHASE == 0 or PHASE == 3:
        drawn = scale > 0.0
        if METHOD == _COUPLED:
            drawn = scale < 0.0  # never: what each row would say is known already
        choice = tl.zeros([GAMMA], tl.int32)
        stands = tested & (log_p > float("-inf")) & (log_u <= log_p - log_q)
        if drawn == 0:
            parts = tl.arange(0, SPLITS)
            where = at[:, None] * splits + parts[None, :]
            mask = inside[:, None] & (parts < splits)[None, :]
            score = tl.load(score_ptr + where, mask=mask, other=float("-inf"), volatile=True)
            winner = tl.load(winners_ptr + where, mask=mask, other=NO_ID, volatile=True)
            choice = tl.min(tl.where(score == tl.max(score, axis=1)[:, None], winner, vocab), axis=1)
            choice = tl.minimum(choice, vocab - 1)
            stands = tested & (choice == ids)
        n = tl.min(tl.where(stands, GAMMA, at))
        w = tl.full([], 0.0, tl.float32)
        if METHOD == _BLOCK:
            if drawn:
                n, w = _block_length(excess_ptr, log_u_ptr + b * gamma, log_w, log_p, at, drafted, splits, KIND, SPLITS)
        log_p = tl.where(scale == 0.0, tl.where(stands, 0.0, float("-inf")), log_p)
        chosen = tl.sum(tl.where(at == n, choice, 0)).to(tl.int64)
        p_sum, q_sum = tl.sum(tl.where(at == n, p_sums, 0.0)), tl.sum(tl.where(at == n, q_sums, 0.0))
        p_floor = tl.max(tl.where(at == n, p_floors, float("-inf")))
        q_floor = tl.max(tl.where(at == n, q_floors, float("-inf")))
        fallen = tl.sum(tl.where(at == n, ids, 0))
        target_row, draft_row = target_rows + n * vocab, draft_rows + tl.minimum(n, gamma - 1) * draft_vocab
        race = (rows - 1) * splits
        if drawn:
            bounds_ptr += n * splits * BOUNDS
            top, winner = _race(
                target_row, draft_row, inverse_ptr, bounds_ptr, first, last, scale, p_floor, q_floor, seed, 0,
                p_sum - w * LOG2E, q_sum, n < drafted, fallen, draft_vocab, state_ptr + 3, PURPOSE, LANES, TILES,
                BOUNDS, FEW, KIND > 0, DENSE, ALIGNED, True,
            )  # fmt: skip
            tl.store(score_ptr + race + split, top)
            tl.store(winners_ptr + race + split, winner)
        tl.debug_barrier()
        arrived = 0
        if splits > 1:
            arrived = tl.atomic_add(state_ptr + 2, 1)
        if arrived == splits - 1:
            if drawn:
                parts = tl.arange(0, SPLITS)
                known = parts < splits
                tops = tl.load(score_ptr + race + parts, mask=known, other=0.0, volatile=True)
                known = known & (tops == tl.max(tops))
                won = tl.load(winners_ptr + race + parts, mask=known, other=NO_ID, volatile=True)
                chosen = tl.min(won).to(tl.int64)
                if tl.max(tops) == 0.0:  # the residual is empty by rounding: draw from p
                    best = 0.0
                    for s in range(splits):
                        begin = s * part
                        top, winner = _race(
                            target_row, draft_row, inverse_ptr, bounds_ptr + (s - split) * BOUNDS, begin,
                            min(begin + part, vocab), scale, p_floor, q_floor, seed, 0, p_sum, q_sum, False, 0,
                            draft_vocab, state_ptr + 3, PURPOSE, LANES, TILES, BOUNDS, FEW, False, DENSE, ALIGNED,
                            False,
                        )  # fmt: skip
                        if top > best:
                            best = top
                            chosen = winner.to(tl.int64)
                chosen = tl.minimum(chosen, vocab - 1)
            out = out_ptr + b * (gamma + 4)
            bad = inside & ((p_sums != p_sums) | (p_sums == float("-inf")) | (p_sums == float("inf")))
            first_bad = tl.min(tl.where(bad, at, GAMMA))
            tl.store(out, n.to(tl.int64))
            tl.store(out + 1, chosen)
            tl.store(out + 2, tl.where(first_bad < GAMMA, first_bad, -1).to(tl.int64))
            tl.store(out + 3 + at, tl.where(at < n, ids, tl.where(at == n, chosen, -1)), mask=at <= gamma)
            tl.store(logs_ptr + at, log_p, mask=tested)
            tl.store(logs_ptr + gamma + 1 + at, log_q, mask=tested)
            tl.store(logs_ptr + 2 * (gamma + 1) + at, tl.where(scale == 0.0, 0.0, p_sums * LN2), mask=inside)
            tl.store(state_ptr + tl.arange(0, 4), tl.zeros([4], tl.int32))
