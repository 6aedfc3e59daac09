"""Verification on the device: one Triton kernel that equals reference.py, "token" and greedy, without a host wait.

Programs share a sequence: each normalises its part of the rows, waits for the others, accepts from two numbers a token,
and races its part of the one row that is drawn from. It leaves out "block" and "coupled"; filters are logits.py's.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from flashspec_core.noise import RECOVER
from flashspec_core.records import VerifyResult
from flashspec_core.verify.logits import warp

LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
_RECOVER = tl.constexpr(RECOVER)
PER_CORE = 4  # programs a multiprocessor
INTERPRETED = triton.knobs.runtime.interpret  # its programs run one after another, so none may wait for the next


@triton.jit
def _normalise(row_ptr, first, last, scale, most_ptr, sum_ptr, R: tl.constexpr, BLOCK: tl.constexpr):
    """Largest scaled logit (log2) and sum of 2^(logit - largest) of ids first..last - 1 of one row."""
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    offsets = tl.arange(0, R)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    for start in range(first, last, R * BLOCK):
        ids = start + offsets
        x = tl.load(row_ptr + ids, mask=ids < last, other=float("-inf")).to(tl.float32) * (scale * LOG2E)
        top = tl.maximum(most, tl.max(x, axis=0))
        base = tl.where(top == float("-inf"), 0.0, top)
        total = total * tl.exp2(most - base) + tl.sum(tl.exp2(x - base[None, :]), axis=0)
        most = top
    largest = tl.max(most)
    origin = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(most_ptr, largest)
    tl.store(sum_ptr, tl.sum(total * tl.exp2(most - origin)))


@triton.jit
def _normalise_together(
    rows_ptr, stride, count, first, last, scale, most_ptr, sum_ptr, step, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """The same for all rows of a sequence at once: more loads in flight where a part is short."""
    row = tl.arange(0, ROWS)
    most = tl.full([ROWS, BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(first, last, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        mask = (row < count)[:, None] & (ids < last)[None, :]
        x = tl.load(rows_ptr + row[:, None] * stride + ids[None, :], mask=mask, other=float("-inf"))
        x = x.to(tl.float32) * (scale * LOG2E)
        top = tl.maximum(most, x)
        base = tl.where(top == float("-inf"), 0.0, top)
        total = total * tl.exp2(most - base) + tl.exp2(x - base)
        most = top
    largest = tl.max(most, axis=1)
    origin = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(most_ptr + row * step, largest, mask=row < count)
    tl.store(sum_ptr + row * step, tl.sum(total * tl.exp2(most - origin[:, None]), axis=1), mask=row < count)


@triton.jit
def _argmax(row_ptr, first, last, most_ptr, sum_ptr, arg_ptr, BLOCK: tl.constexpr):
    """Largest logit and its lowest id; NaN where there is one."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32) + last
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(first, last, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + ids, mask=ids < last, other=float("-inf")).to(tl.float32)
        bad |= (x != x).to(tl.int32)
        larger = x > best
        best = tl.where(larger, x, best)
        where = tl.where(larger, ids, where)
    top = tl.max(best)
    tl.store(arg_ptr, tl.min(tl.where(best == top, where, last)))
    tl.store(most_ptr, tl.where(tl.max(bad) > 0, float("nan"), top))
    tl.store(sum_ptr, 1.0)


@triton.jit
def _log_sums(most_ptr, sum_ptr, rows, inside, splits, GAMMA: tl.constexpr, SPLITS: tl.constexpr):
    """log2 of the sums of several rows [GAMMA] from their parts, and the largest logits."""
    at = tl.arange(0, SPLITS)
    where = rows[:, None] * splits + at[None, :]
    mask = inside[:, None] & (at < splits)[None, :]
    m = tl.load(most_ptr + where, mask=mask, other=float("-inf"), volatile=True)
    s = tl.load(sum_ptr + where, mask=mask, other=0.0, volatile=True)
    top = tl.max(m, axis=1)
    base = tl.where(top == float("-inf"), 0.0, top)
    return base + tl.log2(tl.sum(tl.where(s > 0, s * tl.exp2(m - base[:, None]), s), axis=1)), m


@triton.jit
def _times(words):
    """E of each id, exponential of rate 1, as noise.gumbels has it: its Gumbel is -log E."""
    v = tl.fma(words.to(tl.float32), 2.3283064365386963e-10, 1.1641532182693481e-10)
    v = tl.minimum(v, 0.999999940395355224609375)
    series = v * tl.fma(v, tl.fma(v, tl.fma(v, tl.fma(v, 0.2, 0.25), 1 / 3), 0.5), 1.0)
    return tl.where(v < 0.0625, series, -LN2 * tl.log2(1 - v))


@triton.jit
def _weights(
    target_row, draft_row, inverse_ptr, v, inside, scale, p_sum, q_sum, fell, x, draft_vocab,
    HAS_DRAFT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """What each id weighs in the race: p, or (p - q)+ where a draft fell; 1 - e^d by its series for small d."""
    p = tl.fma(tl.load(target_row + v, mask=inside, other=float("-inf")).to(tl.float32), scale * LOG2E, -p_sum)
    weight = tl.exp2(p)
    if fell:
        if HAS_DRAFT:
            column = v
            if not DENSE:
                column = tl.load(inverse_ptr + v, mask=inside, other=-1)
            known = inside & (column >= 0) & (column < draft_vocab)
            q = tl.load(draft_row + column, mask=known, other=float("-inf")).to(tl.float32)
            d = tl.fma(q, scale * LOG2E, -q_sum) - p
            d = tl.where(d < 0, d, 0.0)  # NaN, where both are 0, too
            e = d * LN2
            series = -e * tl.fma(e, tl.fma(e, tl.fma(e, tl.fma(e, 1 / 120, 1 / 24), 1 / 6), 0.5), 1.0)
            weight *= tl.where(e > -0.125, series, 1 - tl.exp2(d))
        else:
            weight = tl.where(v == x, 0.0, weight)
    return weight


@triton.jit
def _race(
    target_row, draft_row, inverse_ptr, first, last, scale, seed, p_sum, q_sum, fell, x, draft_vocab,
    BLOCK: tl.constexpr, HAS_DRAFT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """The id of first..last - 1 with the largest weight / E, and that score; 0 where nothing weighs anything."""
    weights = tl.zeros([BLOCK], tl.float32)
    times = tl.full([BLOCK], 1.0, tl.float32)
    winners = tl.zeros([BLOCK], tl.int32) + 2147483647
    for start in range(first, last, 4 * BLOCK):
        four = start // 4 + tl.arange(0, BLOCK)  # one Philox call gives the words of four ids
        words = tl.philox(seed, four, four * 0, four * 0, four * 0 + _RECOVER)
        for j in tl.static_range(4):
            v = 4 * four + j
            weight = _weights(
                target_row,
                draft_row,
                inverse_ptr,
                v,
                v < last,
                scale,
                p_sum,
                q_sum,
                fell,
                x,
                draft_vocab,
                HAS_DRAFT,
                DENSE,
            )
            time = _times(words[j])
            larger = weight * times > weights * time  # weight / time compared without a division
            weights = tl.where(larger, weight, weights)
            times = tl.where(larger, time, times)
            winners = tl.where(larger, v, winners)
    scores = weights / times
    top = tl.max(scores)
    return top, tl.min(tl.where(scores == top, winners, 2147483647))


@triton.jit
def _verify_kernel(
    target_ptr,  # [batch, gamma + 1, vocab]
    draft_ptr,  # [batch, gamma, draft_vocab]
    ids_ptr,  # [batch, gamma] int64, -1 behind a row's own end
    inverse_ptr,  # [vocab] int32, a target id's place in the draft's vocabulary, -1: none
    scale_ptr,  # [batch] float32, 1 / temperature; 0 in a greedy row
    kept_ptr,  # [batch, gamma] float32, the draft's log-sum-exp kept from the draw
    log_u_ptr,  # [batch, gamma] float32
    seeds_ptr,  # [batch] int64
    most_ptr,  # [batch, 2 gamma + 1, splits] float32, parts of target rows, then of draft rows
    sum_ptr,  # [batch, 2 gamma + 1, splits] float32
    arg_ptr,  # [batch, 2 gamma + 1, splits] int32, greedy rows only
    best_ptr,  # [batch, splits] float32, the best score of a part
    best_id_ptr,  # [batch, splits] int32
    arrived_ptr,  # [batch, 2] int32, zero before and after
    accepted_ptr,  # [batch] int64
    next_ptr,  # [batch] int64
    invalid_ptr,  # [batch] int64
    p_ptr,  # [batch, gamma] float32
    q_ptr,  # [batch, gamma] float32
    out_ptr,  # [batch, gamma + 1] int64
    gamma,
    vocab,
    draft_vocab,
    part,
    PHASE: tl.constexpr,  # 0: all; 1 and 2: before and behind the wait
    TOGETHER: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    RACE: tl.constexpr,
    GAMMA: tl.constexpr,
    SPLITS: tl.constexpr,
    KIND: tl.constexpr,  # 0: deterministic draft, 1: normalised here, 2: log-sum-exp kept
    DENSE: tl.constexpr,  # the draft's ids are 0 .. draft_vocab - 1
):
    """One part of one sequence; the last part to arrive writes what comes out."""
    split, b, splits = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    at = tl.arange(0, GAMMA)
    ids = tl.load(ids_ptr + b * gamma + at, mask=at < gamma, other=-1)
    drafted = tl.sum((ids >= 0).to(tl.int32))
    scale = tl.load(scale_ptr + b)
    rows = b * (2 * gamma + 1)
    target_rows = target_ptr + b * (gamma + 1) * vocab
    draft_rows = draft_ptr + b * gamma * draft_vocab
    first = split * part
    last, last_draft = min(first + part, vocab), min(first + part, draft_vocab)
    if PHASE != 2:
        here = rows * splits + split
        if scale == 0.0:
            for r in range(drafted + 1):
                o = here + r * splits
                _argmax(target_rows + r * vocab, first, last, most_ptr + o, sum_ptr + o, arg_ptr + o, BLOCK)
        else:
            if TOGETHER:
                _normalise_together(
                    target_rows, vocab, drafted + 1, first, last, scale, most_ptr + here, sum_ptr + here, splits,
                    GAMMA, BLOCK,
                )  # fmt: skip
            else:
                for r in range(drafted + 1):
                    o = here + r * splits
                    _normalise(target_rows + r * vocab, first, last, scale, most_ptr + o, sum_ptr + o, R, BLOCK)
            if KIND == 1:
                for r in range(drafted):
                    o = here + (gamma + 1 + r) * splits
                    row_ptr = draft_rows + r * draft_vocab
                    _normalise(row_ptr, first, last_draft, scale, most_ptr + o, sum_ptr + o, R, BLOCK)
    if PHASE == 0:
        tl.debug_barrier()
        seen = tl.atomic_add(arrived_ptr + 2 * b, 1) + 1
        while seen < splits:  # programs of a sequence are dispatched one after another, so all of them run
            seen = tl.atomic_add(arrived_ptr + 2 * b, 0)
        tl.debug_barrier()
    if PHASE != 1:
        # accept, each program for itself: two numbers a token, whatever V is
        inside, tested = at <= drafted, at < drafted
        p_sums, m = _log_sums(most_ptr, sum_ptr, rows + at, inside, splits, GAMMA, SPLITS)
        bad = inside & ((p_sums != p_sums) | (p_sums == float("-inf")) | (p_sums == float("inf")))
        x = tl.maximum(ids, 0)
        log_p = tl.zeros([GAMMA], tl.float32)
        log_q = tl.zeros([GAMMA], tl.float32)
        q_sums = tl.zeros([GAMMA], tl.float32)
        best = tl.zeros([GAMMA], tl.int32)
        log_u = tl.zeros([GAMMA], tl.float32)
        if scale == 0.0:
            parts = tl.arange(0, SPLITS)
            where = (rows + at)[:, None] * splits + parts[None, :]
            mask = inside[:, None] & (parts < splits)[None, :]
            a = tl.load(arg_ptr + where, mask=mask, other=2147483647, volatile=True)
            best = tl.min(tl.where(m == tl.max(m, axis=1)[:, None], a, vocab), axis=1)
            best = tl.minimum(best, vocab - 1)
            log_p = tl.where(best == ids, 0.0, float("-inf"))
        else:
            logit = tl.load(target_rows + at * vocab + x, mask=tested, other=0.0).to(tl.float32)
            log_p = (logit * (scale * LOG2E) - p_sums) * LN2
            log_u = tl.load(log_u_ptr + b * gamma + at, mask=tested, other=0.0)
            if KIND > 0:
                column = x
                if not DENSE:
                    column = tl.load(inverse_ptr + x, mask=tested, other=-1).to(tl.int64)
                known = tested & (column >= 0) & (column < draft_vocab)
                if KIND == 1:
                    behind_rows = rows + gamma + 1 + at
                    q_sums, _ = _log_sums(most_ptr, sum_ptr, behind_rows, tested, splits, GAMMA, SPLITS)
                else:
                    q_sums = tl.load(kept_ptr + b * gamma + at, mask=tested, other=0.0) * LOG2E
                logit = tl.load(draft_rows + at * draft_vocab + column, mask=known, other=0.0)
                log_q = (logit.to(tl.float32) * (scale * LOG2E) - q_sums) * LN2
                log_q = tl.where(known, log_q, float("-inf"))
        stands = tested & (log_p > float("-inf")) & (log_u <= log_p - log_q)
        n = tl.min(tl.where(stands, GAMMA, at))
        chosen = tl.sum(tl.where(at == n, best, 0)).to(tl.int64)
        seed, fallen = tl.load(seeds_ptr + b), tl.sum(tl.where(at == n, ids, 0))
        p_sum, q_sum = tl.sum(tl.where(at == n, p_sums, 0.0)), tl.sum(tl.where(at == n, q_sums, 0.0))
        target_row, draft_row = target_rows + n * vocab, draft_rows + tl.minimum(n, gamma - 1) * draft_vocab
        if scale > 0.0:
            top, winner = _race(
                target_row, draft_row, inverse_ptr, first, last, scale, seed, p_sum, q_sum, n < drafted, fallen,
                draft_vocab, RACE, KIND > 0, DENSE,
            )  # fmt: skip
            tl.store(best_ptr + b * splits + split, top)
            tl.store(best_id_ptr + b * splits + split, winner)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + 2 * b + 1, 1) == splits - 1:
            if scale > 0.0:
                parts = tl.arange(0, SPLITS)
                known = parts < splits
                tops = tl.load(best_ptr + b * splits + parts, mask=known, other=0.0, volatile=True)
                known = known & (tops == tl.max(tops))
                won = tl.load(best_id_ptr + b * splits + parts, mask=known, other=vocab, volatile=True)
                chosen = tl.min(won).to(tl.int64)
                if tl.max(tops) == 0.0:  # the residual is empty by rounding: draw from p
                    _, winner = _race(
                        target_row, draft_row, inverse_ptr, 0, vocab, scale, seed, p_sum, q_sum, False, 0, draft_vocab,
                        RACE, False, DENSE,
                    )  # fmt: skip
                    chosen = winner.to(tl.int64)
                chosen = tl.minimum(chosen, vocab - 1)
            emitted = tl.where(at < n, ids, tl.where(at == n, chosen, -1))
            tl.store(out_ptr + b * (gamma + 1) + at, emitted, mask=at <= gamma)
            tl.store(p_ptr + b * gamma + at, log_p, mask=tested)
            tl.store(q_ptr + b * gamma + at, log_q, mask=tested)
            tl.store(accepted_ptr + b, n.to(tl.int64))
            tl.store(next_ptr + b, chosen)
            first_bad = tl.min(tl.where(bad, at, GAMMA))
            tl.store(invalid_ptr + b, tl.where(first_bad < GAMMA, first_bad, -1).to(tl.int64))
            tl.store(arrived_ptr + 2 * b, 0)
            tl.store(arrived_ptr + 2 * b + 1, 0)


class Workspace:
    """Buffers that are kept between calls of one shape, so that a call allocates nothing; for one stream at a time.

    Args: batch, gamma, vocab, device: of the logits.
    """

    def __init__(self, batch: int, gamma: int, vocab: int, device):
        new = functools.partial(torch.zeros, device=device)
        cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
        tiles = triton.cdiv(vocab, 1024)
        wanted = max(1, min(tiles, PER_CORE * cores // batch, cores, 128))  # all parts of a sequence must run at once
        self.part = triton.cdiv(tiles, wanted) * 1024
        self.splits, self.together = triton.cdiv(vocab, self.part), self.part <= 1024 and gamma < 8
        self.R = 8 if self.part >= 8192 else 4 if self.part >= 4096 else 2
        self.race = 512 if self.part >= 8192 else 256
        rows = 2 * gamma + 1
        self.most, self.sum = (new(batch, rows, self.splits) for _ in range(2))
        self.arg = new(batch, rows, self.splits, dtype=torch.int32)
        self.best, self.best_id = new(batch, self.splits), new(batch, self.splits, dtype=torch.int32)
        self.arrived = new(batch, 2, dtype=torch.int32)
        self.accepted, self.next, self.invalid = (new(batch, dtype=torch.int64) for _ in range(3))
        self.token_ids = new(batch, gamma + 1, dtype=torch.int64)
        self.p, self.q = new(batch, gamma), new(batch, gamma)
        self.scale, self.scales = new(batch), None
        self.inverse, self.vocab_ids, self.vocab = self.arg, None, vocab

    def prepare(self, scales: list[float], vocab_ids, draft_vocab: int):
        """Take 1 / temperature of each row and the draft's vocabulary to the device, when they change.

        Args: scales, vocab_ids, draft_vocab: see above.
        Returns: [vocab] int32, a target id's place in the draft's vocabulary; not read where it has all ids.
        """
        if scales != self.scales:
            self.scales = scales
            self.scale.copy_(torch.tensor(scales))
        if vocab_ids is not None and vocab_ids is not self.vocab_ids:
            self.inverse = torch.full((self.vocab,), -1, dtype=torch.int32, device=self.scale.device)
            self.inverse[vocab_ids] = torch.arange(draft_vocab, dtype=torch.int32, device=self.scale.device)
            self.vocab_ids = vocab_ids
        return self.inverse


def verify_token(target_logits, draft, samplings, log_uniforms, seeds, workspace=None) -> VerifyResult:
    """The token method and greedy rows on the device; equals reference.verify_token and verify_greedy.

    Args:
        target_logits, draft, samplings, log_uniforms, seeds: see reference.verify_token.
        workspace: a Workspace of this shape, whose buffers the result then shares, or None.
    Returns: VerifyResult.
    Cost: one launch, no host wait where no row filters; reads the target once (the draft only without its log-sum-exp),
        then one target and one draft row a sequence.
    """
    batch, rows, vocab = target_logits.shape
    gamma, logits, scales = rows - 1, draft.logits, [0.0 if s.greedy else 1 / s.temperature for s in samplings]
    if any(not s.greedy and (s.top_k or s.min_p or (s.top_p or 1) < 1) for s in samplings):
        target_logits, scales = warp(target_logits, samplings), [1.0] * batch
        logits = None if logits is None else warp(logits, samplings)
    kind = 0 if logits is None or not gamma else 1 if draft.logsumexp is None else 2
    target = target_logits.contiguous()
    logits = logits.contiguous() if kind else target
    ws = workspace or Workspace(batch, gamma, vocab, target.device)
    inverse = ws.prepare(scales, draft.vocab_ids, logits.shape[-1])
    ids, log_u = draft.token_ids.contiguous(), log_uniforms.contiguous()
    kept, width = draft.logsumexp.contiguous() if kind == 2 else log_u, triton.next_power_of_2(gamma + 1)
    inputs = target, logits, ids, inverse, ws.scale, kept, log_u, seeds, ws.most, ws.sum, ws.arg
    outputs = ws.best, ws.best_id, ws.arrived, ws.accepted, ws.next, ws.invalid, ws.p, ws.q, ws.token_ids
    for phase in (1, 2) if INTERPRETED else (0,):
        _verify_kernel[ws.splits, batch](
            *inputs, *outputs, gamma, vocab, logits.shape[-1], ws.part, PHASE=phase, TOGETHER=ws.together, R=ws.R,
            BLOCK=1024, RACE=ws.race, GAMMA=width, SPLITS=triton.next_power_of_2(ws.splits), KIND=kind,
            DENSE=draft.vocab_ids is None, num_warps=4,
        )  # fmt: skip
    return VerifyResult(ws.accepted, ws.next, ws.token_ids, ws.p, ws.q, ws.invalid, "triton")
