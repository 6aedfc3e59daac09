"""Verification on the device: Triton kernels that equal reference.py, "token" and greedy, without a host wait.

Three launches: normalise the rows in one streaming pass, accept from two numbers a token, draw in one row a sequence.
Filters are applied by logits.py first. It leaves out "block" and "coupled" (reference.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashspec_core.noise import RECOVER
from flashspec_core.records import VerifyResult
from flashspec_core.verify.logits import warp

LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
_RECOVER = tl.constexpr(RECOVER)


@triton.jit
def _normalise_kernel(
    logits_ptr,  # [batch, count, size]
    ids_ptr,  # [batch, gamma] int64, -1 behind a row's own end
    scale_ptr,  # [batch] float32, 1 / temperature; 0 in a greedy row
    max_ptr,  # [batch, rows, splits] float32, largest scaled logit of a part (log2); largest logit where greedy
    sum_ptr,  # [batch, rows, splits] float32, sum of 2^(scaled logit - max)
    arg_ptr,  # [batch, rows, splits] int32, lowest id of the largest logit, greedy rows only
    gamma,
    size,
    count,  # rows of these logits a sequence: gamma + 1 of the target, gamma of the draft
    rows,
    offset,  # where they stand among all rows
    part,  # ids of one split, a multiple of R * BLOCK
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    GAMMA: tl.constexpr,
):
    """Maximum and sum of exponentials of a part of one row; reads each logit once."""
    split, splits = tl.program_id(1), tl.num_programs(1)
    b, r = tl.program_id(0) // count, tl.program_id(0) % count
    at = tl.arange(0, GAMMA)
    drafted = tl.sum((tl.load(ids_ptr + b * gamma + at, mask=at < gamma, other=-1) >= 0).to(tl.int32))
    scale = tl.load(scale_ptr + b)
    size = tl.where(r < drafted + count - gamma, size, 0)  # nothing behind a row's own end is read
    row_ptr = logits_ptr + tl.program_id(0).to(tl.int64) * size
    here = (b * rows + offset + r) * splits + split
    first = split * part
    offsets = tl.arange(0, R)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if scale == 0.0:
        best = tl.full([R, BLOCK], float("-inf"), tl.float32)
        where = tl.zeros([R, BLOCK], tl.int32)
        bad = tl.zeros([R, BLOCK], tl.int32)
        for start in range(first, min(first + part, size), R * BLOCK):
            ids = start + offsets
            x = tl.load(row_ptr + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
            bad |= (x != x).to(tl.int32)
            larger = x > best
            best = tl.where(larger, x, best)
            where = tl.where(larger, ids, where)
        top = tl.max(best)
        tl.store(arg_ptr + here, tl.min(tl.where(best == top, where, size)))
        tl.store(max_ptr + here, tl.where(tl.max(bad) > 0, float("nan"), top))
        tl.store(sum_ptr + here, 1.0)
    else:
        most = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(first, min(first + part, size), R * BLOCK):
            spot = start + offsets
            y = tl.load(row_ptr + spot, mask=spot < size, other=float("-inf")).to(tl.float32) * (scale * LOG2E)
            top_y = tl.maximum(most, tl.max(y, axis=0))
            base = tl.where(top_y == float("-inf"), 0.0, top_y)
            total = total * tl.exp2(most - base) + tl.sum(tl.exp2(y - base[None, :]), axis=0)
            most = top_y
        largest = tl.max(most)
        origin = tl.where(largest == float("-inf"), 0.0, largest)
        tl.store(max_ptr + here, largest)
        tl.store(sum_ptr + here, tl.sum(total * tl.exp2(most - origin)))


@triton.jit
def _log_sum(max_ptr, sum_ptr, row, splits, SPLITS: tl.constexpr):
    """log2 of the sum of a row from its parts; NaN or -inf where it has no law."""
    at = tl.arange(0, SPLITS)
    m = tl.load(max_ptr + row * splits + at, mask=at < splits, other=float("-inf"))
    s = tl.load(sum_ptr + row * splits + at, mask=at < splits, other=0.0)
    largest = tl.max(m)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    return base + tl.log2(tl.sum(tl.where(s > 0, s * tl.exp2(m - base), s)))


@triton.jit
def _accept_kernel(
    target_ptr,  # [batch, gamma + 1, vocab]
    draft_ptr,  # [batch, gamma, draft_vocab]
    ids_ptr,  # [batch, gamma] int64
    inverse_ptr,  # [vocab] int32, a target id's place in the draft's vocabulary, -1: none
    scale_ptr,  # [batch] float32
    kept_ptr,  # [batch, gamma] float32, the draft's log-sum-exp kept from the draw
    log_u_ptr,  # [batch, gamma] float32
    max_ptr,  # [batch, rows, splits] float32
    sum_ptr,  # [batch, rows, splits] float32
    arg_ptr,  # [batch, rows, splits] int32
    accepted_ptr,  # [batch] int64
    next_ptr,  # [batch] int64
    invalid_ptr,  # [batch] int64
    p_ptr,  # [batch, gamma] float32
    q_ptr,  # [batch, gamma] float32
    sums_ptr,  # [batch, 2] float32, log2 of the sums of target and draft at the row that is drawn from
    gamma,
    vocab,
    draft_vocab,
    rows,
    splits,
    SPLITS: tl.constexpr,
    KIND: tl.constexpr,  # 0: deterministic draft, 1: normalised here, 2: log-sum-exp kept
    DENSE: tl.constexpr,  # the draft's ids are 0 .. draft_vocab - 1
):
    """The accepted prefix of one row; its reads do not depend on V."""
    b = tl.program_id(0).to(tl.int64)
    scale = tl.load(scale_ptr + b)
    n, drafted, standing, invalid = 0, 0, 1, -1
    target_sum, draft_sum, chosen = 0.0, 0.0, 0
    for i in range(gamma + 1):
        x = tl.load(ids_ptr + b * gamma + i, mask=i < gamma, other=-1)
        if i == drafted:  # the row's own end is not yet behind us
            row = b * rows + i
            log_p = 0.0
            log_q = 0.0
            p_sum = _log_sum(max_ptr, sum_ptr, row, splits, SPLITS)
            q_sum = 0.0
            bad = (p_sum != p_sum) | (p_sum == float("-inf")) | (p_sum == float("inf"))
            if bad & (invalid < 0):
                invalid = i
            at = tl.arange(0, SPLITS)
            best = 0
            if scale == 0.0:
                m = tl.load(max_ptr + row * splits + at, mask=at < splits, other=float("-inf"))
                a = tl.load(arg_ptr + row * splits + at, mask=at < splits, other=vocab)
                best = tl.min(tl.where(m == tl.max(m), a, vocab))
                best = tl.minimum(best, vocab - 1)
            if x >= 0:
                if scale == 0.0:
                    log_p = tl.where(x == best, 0.0, float("-inf"))
                else:
                    logit = tl.load(target_ptr + (b * (gamma + 1) + i) * vocab + x).to(tl.float32)
                    log_p = (logit * scale * LOG2E - p_sum) * LN2
                    if KIND > 0:
                        if DENSE:
                            column = x.to(tl.int32)
                        else:
                            column = tl.load(inverse_ptr + x)
                        known = (column >= 0) & (column < draft_vocab)
                        logit = tl.load(draft_ptr + (b * gamma + i) * draft_vocab + column, mask=known, other=0.0)
                        if KIND == 1:
                            q_sum = _log_sum(max_ptr, sum_ptr, b * rows + gamma + 1 + i, splits, SPLITS)
                        else:
                            q_sum = tl.load(kept_ptr + b * gamma + i) * LOG2E
                        log_q = (logit.to(tl.float32) * scale * LOG2E - q_sum) * LN2
                        log_q = tl.where(known, log_q, float("-inf"))
                tl.store(p_ptr + b * gamma + i, log_p)
                tl.store(q_ptr + b * gamma + i, log_q)
                drafted += 1
            if standing == 1:
                target_sum, draft_sum, chosen = p_sum, q_sum, best
                log_u = tl.load(log_u_ptr + b * gamma + i, mask=x >= 0, other=0.0)
                log_u = tl.where(scale == 0.0, 0.0, log_u)
                stands = (x >= 0) & (log_p > float("-inf")) & (log_u <= log_p - log_q)
                if stands:
                    n += 1
                else:
                    standing = 0
    tl.store(accepted_ptr + b, n)
    tl.store(invalid_ptr + b, invalid)
    tl.store(next_ptr + b, chosen)
    tl.store(sums_ptr + 2 * b, target_sum)
    tl.store(sums_ptr + 2 * b + 1, draft_sum)


@triton.jit
def _gumbels(seed, blocks, BLOCK: tl.constexpr):
    """Noise of ids 4 * blocks .. + 3 as noise.gumbels defines it, in order."""
    zero = blocks * 0
    w0, w1, w2, w3 = tl.philox(seed, blocks, zero, zero, zero + _RECOVER)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])
    u = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
    rest = 1.0 - u
    exponential = -tl.log(rest) * (u / tl.maximum(1.0 - rest, 9.094947017729282e-13))
    return -tl.log(tl.where(rest == 1.0, u, exponential))


@triton.jit
def _log1mexp(d):
    """log(1 - e^d) for d < 0; (e^d - 1) d / log(e^d) is expm1(d) without its cancellation."""
    e = tl.exp(d)
    near = tl.where(e == 1.0, -d, (1.0 - e) * (d / tl.where(e == 1.0, 1.0, tl.log(e))))
    return tl.log(tl.where(d > -LN2, near, 1.0 - e))


@triton.jit
def _draw_kernel(
    target_ptr,  # [batch, gamma + 1, vocab]
    draft_ptr,  # [batch, gamma, draft_vocab]
    ids_ptr,  # [batch, gamma] int64
    inverse_ptr,  # [vocab] int32, a target id's place in the draft's vocabulary, -1: none
    scale_ptr,  # [batch] float32
    seeds_ptr,  # [batch] int64
    accepted_ptr,  # [batch] int64
    sums_ptr,  # [batch, 2] float32
    best_ptr,  # [batch, splits, 2] float32: best score with the residual, and with p alone
    best_id_ptr,  # [batch, splits, 2] int32
    arrived_ptr,  # [batch] int32, zero before and after
    next_ptr,  # [batch] int64
    out_ptr,  # [batch, gamma + 1] int64
    gamma,
    vocab,
    draft_vocab,
    part,
    splits,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    GAMMA: tl.constexpr,
    DENSE: tl.constexpr,  # the draft's ids are 0 .. draft_vocab - 1
    HAS_DRAFT: tl.constexpr,
):
    """The recovered or bonus token of one row by the Gumbel race; the last part to arrive writes the row's ids."""
    b, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, GAMMA)
    ids = tl.load(ids_ptr + b * gamma + at, mask=at < gamma, other=-1)
    drafted = tl.sum((ids >= 0).to(tl.int32))
    n = tl.load(accepted_ptr + b).to(tl.int32)
    scale = tl.load(scale_ptr + b)
    if scale > 0.0:
        seed = tl.load(seeds_ptr + b)
        p_sum, q_sum = tl.load(sums_ptr + 2 * b), tl.load(sums_ptr + 2 * b + 1)
        fell = n < drafted
        x = tl.sum(tl.where(at == n, ids, 0))
        target_row = target_ptr + (b * (gamma + 1) + n) * vocab
        draft_row = draft_ptr + (b * gamma + tl.minimum(n, gamma - 1)) * draft_vocab
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_id = tl.zeros([BLOCK], tl.int32)
        plain = tl.full([BLOCK], float("-inf"), tl.float32)  # where the residual is empty by rounding: p
        plain_id = tl.zeros([BLOCK], tl.int32)
        first = split * part
        for start in range(first, min(first + part, vocab), BLOCK):
            v = start + tl.arange(0, BLOCK)
            inside = v < vocab
            p = tl.load(target_row + v, mask=inside, other=float("-inf")).to(tl.float32)
            p = (p * scale * LOG2E - p_sum) * LN2
            noise = _gumbels(seed, start // 4 + tl.arange(0, BLOCK // 4), BLOCK)
            score = p + noise
            if fell:
                larger = score > plain
                plain = tl.where(larger, score, plain)
                plain_id = tl.where(larger, v, plain_id)
                if HAS_DRAFT:
                    if DENSE:
                        column = v
                        known = v < draft_vocab
                    else:
                        column = tl.load(inverse_ptr + v, mask=inside, other=-1)
                        known = column >= 0
                    q = tl.load(draft_row + column, mask=known, other=float("-inf")).to(tl.float32)
                    q = (q * scale * LOG2E - q_sum) * LN2
                    over = (p > q) & (p > float("-inf"))
                    score = tl.where(over, score + _log1mexp(tl.where(over, q - p, -1.0)), float("-inf"))
                else:
                    score = tl.where(v == x, float("-inf"), score)
            larger = score > best
            best = tl.where(larger, score, best)
            best_id = tl.where(larger, v, best_id)
        here = (b * splits + split) * 2
        most = tl.max(best)
        tl.store(best_ptr + here, most)
        tl.store(best_id_ptr + here, tl.min(tl.where((best == most) & (best > float("-inf")), best_id, vocab)))
        most = tl.max(plain)
        tl.store(best_ptr + here + 1, most)
        tl.store(best_id_ptr + here + 1, tl.min(tl.where((plain == most) & (plain > float("-inf")), plain_id, vocab)))
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + b, 1) == splits - 1:
        tl.store(arrived_ptr + b, 0)
        if scale > 0.0:
            parts = tl.arange(0, SPLITS)
            each = (b * splits + parts) * 2
            known = parts < splits
            score = tl.load(best_ptr + each, mask=known, other=float("-inf"), volatile=True)
            if tl.max(score) == float("-inf"):
                each += 1
                score = tl.load(best_ptr + each, mask=known, other=float("-inf"), volatile=True)
            known = known & (score == tl.max(score))
            won = tl.load(best_id_ptr + each, mask=known, other=vocab, volatile=True)
            tl.store(next_ptr + b, tl.minimum(tl.min(won), vocab - 1))
        tl.debug_barrier()
        chosen = tl.load(next_ptr + b, volatile=True)
        tl.store(out_ptr + b * (gamma + 1) + at, tl.where(at < n, ids, tl.where(at == n, chosen, -1)), mask=at <= gamma)


class Workspace:
    """Buffers that are kept between calls of one shape, so that a call allocates nothing.

    Args:
        batch, gamma, vocab: the shape.
        device: of the logits.
    """

    def __init__(self, batch: int, gamma: int, vocab: int, device):
        def new(*shape, dtype=torch.float32, value=None):
            make = torch.empty(shape, dtype=dtype, device=device)
            return make if value is None else make.fill_(value)

        cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        rows = 2 * gamma + 1
        self.splits, self.part = _split(batch * (gamma + 1), vocab, 8192, 4 * cores)
        self.draws, self.draw_part = _split(batch, vocab, 1024, 8 * cores)
        self.max, self.sum = (new(batch, rows, self.splits) for _ in range(2))
        self.arg = new(batch, rows, self.splits, dtype=torch.int32)
        self.sums, self.best = new(batch, 2), new(batch, self.draws, 2)
        self.best_id = new(batch, self.draws, 2, dtype=torch.int32)
        self.arrived = new(batch, dtype=torch.int32, value=0)
        self.accepted, self.next, self.invalid = (new(batch, dtype=torch.int64) for _ in range(3))
        self.token_ids = new(batch, gamma + 1, dtype=torch.int64)
        self.p, self.q = new(batch, gamma, value=0.0), new(batch, gamma, value=0.0)
        self.scale, self.scales = new(batch), None
        self.inverse, self.vocab_ids, self.vocab = self.arg, None, vocab

    def prepare(self, scales: list[float], vocab_ids, draft_vocab: int):
        """Take what changes rarely to the device, only when it changes.

        Args: scales, vocab_ids, draft_vocab: 1 / temperature of each row, and the draft's vocabulary.
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


def _split(rows, vocab, tile, wanted):
    """How many parts a row is cut into so that about `wanted` programs run, and the ids of a part."""
    tiles = triton.cdiv(vocab, tile)
    parts = max(1, min(tiles, wanted // max(rows, 1), 64))
    part = triton.cdiv(tiles, parts) * tile
    return triton.cdiv(vocab, part), part


def verify_token(target_logits, draft, samplings, log_uniforms, seeds, workspace=None) -> VerifyResult:
    """The token method and greedy rows on the device; equals reference.verify_token and verify_greedy.

    Args:
        target_logits, draft, samplings, log_uniforms, seeds: see reference.verify_token; all contiguous.
        workspace: a Workspace of this shape, whose buffers the result then shares, or None.
    Returns: VerifyResult.
    Cost: reads each needed row once (the draft's only without its log-sum-exp), then one target and one draft row a
        sequence; three launches, no host wait where no row filters.
    """
    batch, rows, vocab = target_logits.shape
    gamma, logits, scales = rows - 1, draft.logits, [0.0 if s.greedy else 1 / s.temperature for s in samplings]
    if any(not s.greedy and (s.top_k or s.min_p or (s.top_p or 1) < 1) for s in samplings):
        target_logits, scales = warp(target_logits, samplings), [1.0] * batch
        logits = None if logits is None else warp(logits, samplings)
    kind = 0 if logits is None else 1 if draft.logsumexp is None else 2
    target = target_logits.contiguous()
    logits = logits.contiguous() if kind else target
    ws = workspace or Workspace(batch, gamma, vocab, target.device)
    inverse = ws.prepare(scales, draft.vocab_ids, logits.shape[-1])
    ids, kept = draft.token_ids.contiguous(), draft.logsumexp if kind == 2 else log_uniforms
    sizes, width = (gamma, vocab, logits.shape[-1]), triton.next_power_of_2(gamma + 1)
    parts, rows, dense = (ws.max, ws.sum, ws.arg), 2 * gamma + 1, draft.vocab_ids is None
    for x, count, offset in ((target, gamma + 1, 0), (logits, gamma, gamma + 1))[: 2 if kind == 1 else 1]:
        _normalise_kernel[batch * count, ws.splits](
            x, ids, ws.scale, *parts, gamma, x.shape[-1], count, rows, offset, ws.part, R=8, BLOCK=1024, GAMMA=width
        )
    decided, drawn = (ws.accepted, ws.next, ws.invalid, ws.p, ws.q, ws.sums), (ws.best, ws.best_id, ws.arrived, ws.next)
    _accept_kernel[(batch,)](
        target, logits, ids, inverse, ws.scale, kept, log_uniforms, *parts, *decided, *sizes, rows, ws.splits,
        SPLITS=triton.next_power_of_2(ws.splits), KIND=kind, DENSE=dense, num_warps=1,
    )  # fmt: skip
    _draw_kernel[batch, ws.draws](
        target, logits, ids, inverse, ws.scale, seeds, ws.accepted, ws.sums, *drawn, ws.token_ids, *sizes, ws.draw_part,
        ws.draws, BLOCK=1024, SPLITS=triton.next_power_of_2(ws.draws), GAMMA=width, DENSE=dense, HAS_DRAFT=kind > 0,
    )  # fmt: skip
    return VerifyResult(ws.accepted, ws.next, ws.token_ids, ws.p, ws.q, ws.invalid)
