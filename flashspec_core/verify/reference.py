"""The specification of verification, in eager PyTorch, readable on one screen; kernels.py must equal it.

It takes what the door has checked; it leaves out speed. Noise comes in as arguments and nothing is drawn elsewhere.
"""

from __future__ import annotations

import math

import torch

from flashspec_core.noise import COUPLED, RECOVER, gumbels
from flashspec_core.records import PLACEHOLDER_TOKEN_ID, VerifyResult
from flashspec_core.verify.logits import draw, greedy_ids, log1mexp, log_excess, logprobs, residual_logprobs, warp


def verify_greedy(target_logits, draft) -> VerifyResult:
    """Greedy rows, under every method: a drafted token stands while it is the target's argmax.

    Rule: x_i stands if x_i = argmax p_i and all before it stand; the next token is the argmax behind them.

    Args:
        target_logits: [batch, gamma + 1, vocab], any float dtype.
        draft: a records.Draft; its logits are not read.
    Returns: VerifyResult.
    Cost: reads target_logits once.

    >>> from flashspec_core.records import Draft
    >>> logits = torch.tensor([[[0., 1.], [2., 0.], [0., 3.]]])
    >>> verify_greedy(logits, Draft(torch.tensor([[1, 1]]))).token_ids
    tensor([[ 1,  0, -1]])
    """
    best = greedy_ids(target_logits)
    p_drafted = torch.where(best[:, :-1] == draft.token_ids, 0.0, -math.inf)
    return _matched(best, draft, p_drafted, _lawless(target_logits))


def verify_coupled(target_logits, draft, samplings, seeds, positions) -> VerifyResult:
    """Coupled: target and draft take the same Gumbel noise, so the text is that of plain sampling with this noise.

    Rule: x_i stands if x_i = argmax(log p_i + noise of (row seed, position i)) and all before it stand; the next token
    is that argmax behind them. So drafter, arm, gamma and batch change the speed and no token, up to float ties.

    Args:
        target_logits, draft, samplings: see verify_token; the draft's logits are not read.
        seeds: [batch] int64 row seeds, the same at every step: here noise must *not* be fresh.
        positions: [batch] int64, position of the first drafted token in its sequence.
    Returns: VerifyResult.
    Cost: normalises gamma + 1 target rows and makes noise for them; reads nothing of the draft but its ids.
    Source: Gumbel-max with common random numbers; compare Daliri et al. 2025 (arXiv 2408.07978).
    """
    p = logprobs(target_logits, samplings)
    rows = range(p.shape[1])
    choice = torch.stack([draw(p[:, i], gumbels(seeds, p.shape[-1], COUPLED, positions + i)) for i in rows], dim=1)
    return _matched(choice, draft, _at_drafted(p, draft.token_ids), _lawless(target_logits) | _lawless(p))


def verify_token(target_logits, draft, samplings, log_uniforms, seeds) -> VerifyResult:
    """Speculative sampling: each drafted token is tested by itself, up to the first rejection.

    Rule: x_i stands with probability min(1, p_i(x_i) / q_i(x_i)) if all before it stand. Behind n < g accepted tokens
    the next one is drawn from (p - q)+ / sum, behind all g from p. Without draft logits q is 1 at x_i.

    Args:
        target_logits, log_uniforms, seeds: see verify; fresh whenever a position is drafted again.
        draft: a records.Draft.
        samplings: list of one Sampling a row.
    Returns: VerifyResult.
    Cost: normalises gamma + 1 target and gamma draft rows of V; the test reads two numbers a token; draws in one row.
    Source: Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2.
    """
    p, q, p_drafted, q_drafted = laws(target_logits, draft, samplings)
    num_accepted = _prefix(_stands(log_uniforms, token_chances(p_drafted, q_drafted), draft.token_ids))
    log_weight = torch.zeros_like(p[:, 0, 0])
    law = next_law(p, q, num_accepted, _num_drafted(draft), log_weight, draft.vocab_ids)
    return _drawn(target_logits, draft, num_accepted, law, seeds, p, p_drafted, q_drafted)


def verify_block(target_logits, draft, samplings, log_uniforms, seeds) -> VerifyResult:
    """Block verification: the whole block is looked at, and never fewer tokens are accepted on average than by token.

    Rule: n is the largest i with u_i <= h_i (see `block_chances`), or 0: a failed test does not end the block. Behind
    n < g accepted tokens the next one is drawn from (w_n p - q)+ / sum, behind all g from p.

    Args: see verify_token; the uniforms are looked at even behind n, so noise keyed by position alone would be biased.
    Returns: VerifyResult.
    Cost: as verify_token, and two rows of V more at each position but the last: deciding is O(B gamma V) here.
    Source: Sun et al. 2024, "Block verification accelerates speculative decoding" (arXiv 2403.10444).
    """
    p, q, p_drafted, q_drafted = laws(target_logits, draft, samplings)
    log_chances, log_weights = block_chances(p, q, p_drafted, q_drafted, _num_drafted(draft))
    stands = _stands(log_uniforms, log_chances, draft.token_ids)
    order = torch.arange(1, stands.shape[1] + 1, device=stands.device)
    num_accepted = torch.cat([stands.new_zeros(len(stands), 1), stands * order], dim=1).amax(1)
    log_weight = log_weights.gather(1, num_accepted[:, None])[:, 0]
    law = next_law(p, q, num_accepted, _num_drafted(draft), log_weight, draft.vocab_ids)
    return _drawn(target_logits, draft, num_accepted, law, seeds, p, p_drafted, q_drafted)


def laws(target_logits, draft, samplings):
    """What target and draft are drawn from.

    Args: target_logits, draft, samplings: see verify_token.
    Returns: log p [batch, gamma + 1, vocab], log q [batch, gamma, vocab], and both at the drafted ids [batch, gamma].
    """
    p = logprobs(target_logits, samplings)
    if draft.logits is None:  # deterministic: q is 1 at the drafted id
        q = torch.full_like(p[:, :-1], -math.inf).scatter_(-1, draft.token_ids.clamp_min(0)[..., None], 0.0)
    else:
        q = draft_logprobs(draft, samplings, p.shape[-1])
    return p, q, _at_drafted(p, draft.token_ids), _at_drafted(q, draft.token_ids)


def draft_logprobs(draft, samplings, vocab: int):
    """The draft's law on the target's vocabulary.

    Rule: log softmax(warp(draft.logits)) at the draft's ids, -inf (q = 0) at every other id.

    Args:
        draft: a records.Draft with logits.
        samplings: list of one Sampling a row.
        vocab: V of the target.
    Returns: [batch, gamma, vocab] float32.
    """
    q = warp(draft.logits, samplings)
    q = q.log_softmax(-1) if draft.logsumexp is None else q - draft.logsumexp[..., None]
    if draft.vocab_ids is None and q.shape[-1] == vocab:
        return q
    where = torch.arange(q.shape[-1], device=q.device) if draft.vocab_ids is None else draft.vocab_ids
    return q.new_full((*q.shape[:-1], vocab), -math.inf).index_copy_(-1, where, q)


def token_chances(p_drafted, q_drafted):
    """Log of each drafted token's own chance to stand: min(0, log p - log q).

    Args: p_drafted, q_drafted: [batch, gamma] log p and log q of the drafted ids.
    Returns: [batch, gamma]; NaN where p = q = 0.
    """
    return (p_drafted - q_drafted).clamp(max=0)


def block_chances(p, q, p_drafted, q_drafted, num_drafted):
    """Log of the chance h_i that a block ends at i if it did not end behind it, and of the weight w_i.

    Rule: w_0 = 1, w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)); for i < g, S_i = sum of (w_i p_{i+1} - q_{i+1})+ and
    h_i = S_i / (S_i + 1 - w_i), 1 where w_i = 1; at the row's own end g, h_g = w_g.

    Args:
        p, q, p_drafted, q_drafted: as `laws` returns them.
        num_drafted: [batch] int64, g.
    Returns: log h [batch, gamma] of i = 1..gamma, log w [batch, gamma + 1] of i = 0..gamma.
    Source: Sun et al. 2024 (arXiv 2403.10444).
    """
    log_w = [torch.zeros_like(p[:, 0, 0])]
    for i in range(p_drafted.shape[1]):
        weight = (log_w[-1] + p_drafted[:, i] - q_drafted[:, i]).clamp(max=0)
        log_w.append(torch.where(weight.isnan(), -math.inf, weight))
    log_w = torch.stack(log_w, dim=1)
    inner = log_w[:, 1:-1]
    log_s = log_excess(p[:, 1:-1] + inner[..., None], q[:, 1:]).logsumexp(-1)
    log_h = torch.where(inner == 0, 0.0, log_s - torch.logaddexp(log_s, log1mexp(inner)))
    log_h = torch.cat([log_h, log_w[:, -1:]], dim=1)[:, : p_drafted.shape[1]]
    at = torch.arange(1, p_drafted.shape[1] + 1, device=p.device)
    return torch.where(at == num_drafted[:, None], log_w[:, 1:], log_h), log_w


def next_law(p, q, num_accepted, num_drafted, log_weight, vocab_ids=None):
    """The law of the token behind the accepted ones: the residual where one fell, else the target's own.

    Args:
        p, q: as `laws` returns them.
        num_accepted, num_drafted: [batch] int64.
        log_weight: [batch], log w_n of "block", 0 under "token".
        vocab_ids: of a trimmed draft, or None.
    Returns: [batch, vocab] natural logs.
    """
    law = p[torch.arange(len(p), device=p.device), num_accepted]
    fell = (num_accepted < num_drafted).nonzero()[:, 0]
    law[fell] = residual_logprobs(law[fell] + log_weight[fell, None], q[fell, num_accepted[fell]], vocab_ids)
    return law


def _at_drafted(law, token_ids):
    return law[:, : token_ids.shape[1]].gather(-1, token_ids.clamp_min(0)[..., None])[..., 0]


def _stands(log_uniforms, log_chances, token_ids):
    """[batch, gamma] bool; NaN (p = q = 0) does not stand, nor does what the target forbids, were u 0."""
    return (log_uniforms <= log_chances) & (log_chances > -math.inf) & (token_ids >= 0)


def _prefix(stands):
    """[batch] int64: how many stand before the first that does not."""
    return stands.long().cumprod(-1).sum(-1)


def _num_drafted(draft):
    return (draft.token_ids >= 0).sum(1)


def _lawless(logits):
    """[batch, rows]: NaN, or nothing finite."""
    return ~logits.amax(-1).isfinite()


def _matched(choice, draft, p_drafted, lawless) -> VerifyResult:
    """A drafted token stands while it is the target's own choice, [batch, gamma + 1] int64."""
    num_accepted = _prefix(choice[:, :-1] == draft.token_ids)
    next_ids = choice.gather(1, num_accepted[:, None])[:, 0]
    return _result(draft, num_accepted, next_ids, p_drafted, torch.zeros_like(p_drafted), lawless)


def _drawn(target_logits, draft, num_accepted, law, seeds, p, p_drafted, q_drafted) -> VerifyResult:
    next_ids = draw(law, gumbels(seeds, p.shape[-1], RECOVER))
    lawless = _lawless(target_logits) | _lawless(p)  # large logits may leave float32 when the temperature divides them
    return _result(draft, num_accepted, next_ids, p_drafted, q_drafted, lawless)


def _result(draft, num_accepted, next_ids, p_drafted, q_drafted, lawless) -> VerifyResult:
    batch, gamma = draft.token_ids.shape
    position = torch.arange(gamma + 1, device=num_accepted.device)
    accepted = num_accepted[:, None]
    shown = torch.cat([draft.token_ids, draft.token_ids.new_zeros(batch, 1)], dim=1)
    token_ids = torch.where(position < accepted, shown, PLACEHOLDER_TOKEN_ID)
    token_ids = torch.where(position == accepted, next_ids[:, None], token_ids)
    bad = (position <= _num_drafted(draft)[:, None]) & lawless  # what lies behind a row's own end is not read
    invalid = torch.where(bad.any(1), bad.long().argmax(1), -1)
    return VerifyResult(num_accepted, next_ids, token_ids, p_drafted, q_drafted, invalid)
