"""The specification of verification, in eager PyTorch, readable on one screen; kernels.py must equal it.

It takes what the door has checked; it leaves out speed. Noise comes in as arguments and nothing is drawn elsewhere.
"""

from __future__ import annotations

import math

import torch

from flashspec_core.noise import RECOVER, gumbels
from flashspec_core.records import PLACEHOLDER_TOKEN_ID, VerifyResult
from flashspec_core.verify.logits import draw, greedy_ids, logprobs, residual_logprobs, warp


def verify_greedy(target_logits, draft_token_ids) -> VerifyResult:
    """Greedy rows: a drafted token stands while it is the target's argmax.

    Rule: x_i stands if x_i = argmax p_i and all before it stand; the next token is the argmax behind them.

    Args:
        target_logits: [batch, gamma + 1, vocab], any float dtype.
        draft_token_ids: [batch, gamma] int64, -1 at the end of a row that drafted fewer.
    Returns: VerifyResult.
    Cost: reads target_logits once.

    >>> logits = torch.tensor([[[0., 1.], [2., 0.], [0., 3.]]])
    >>> verify_greedy(logits, torch.tensor([[1, 1]])).token_ids
    tensor([[ 1,  0, -1]])
    """
    best = greedy_ids(target_logits)
    num_accepted = _prefix(best[:, :-1] == draft_token_ids)
    p_drafted = torch.where(best[:, :-1] == draft_token_ids, 0.0, -math.inf)
    next_ids = best.gather(1, num_accepted[:, None])[:, 0]
    q_drafted = torch.zeros_like(p_drafted)
    return _result(draft_token_ids, num_accepted, next_ids, p_drafted, q_drafted, _lawless(target_logits))


def verify_token(
    target_logits, draft_token_ids, draft_logits, draft_logsumexp, draft_vocab_ids, samplings, log_uniforms, seeds
) -> VerifyResult:
    """Speculative sampling: each drafted token is tested by itself, up to the first rejection.

    Rule: x_i stands if log u_i <= log p_i(x_i) - log q_i(x_i), so with probability min(1, p/q), and all before it
    stand. Behind n < g accepted tokens the next one is drawn from (p - q)+ / sum, behind all g from p.
    Without draft_logits q is 1 at x_i: x_i stands with probability p(x_i), else p without x_i.

    Args:
        target_logits, draft_token_ids, draft_logits, draft_logsumexp, draft_vocab_ids: see verify.
        samplings: list of one Sampling a row.
        log_uniforms, seeds: see verify; fresh whenever a position is drafted again.
    Returns: VerifyResult.
    Cost: normalises gamma + 1 target and gamma draft rows of V; the test reads two numbers a token; draws in one row.
    Source: Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2.
    """
    vocab = target_logits.shape[-1]
    p = logprobs(target_logits, samplings)  # [batch, gamma + 1, vocab]
    ids = draft_token_ids.clamp_min(0)
    p_drafted = p[:, :-1].gather(-1, ids[..., None])[..., 0]
    q, q_drafted = None, torch.zeros_like(p_drafted)
    if draft_logits is not None:
        q = draft_logprobs(draft_logits, draft_logsumexp, draft_vocab_ids, samplings, vocab)
        q_drafted = q.gather(-1, ids[..., None])[..., 0]
    # NaN (p = q = 0) does not stand, nor does what the target forbids, were u 0
    stands = (log_uniforms <= p_drafted - q_drafted) & (p_drafted > -math.inf) & (draft_token_ids >= 0)
    num_accepted = _prefix(stands)

    row = torch.arange(len(ids), device=ids.device)
    law = p[row, num_accepted]
    if draft_token_ids.shape[1]:
        at = num_accepted.clamp_max(draft_token_ids.shape[1] - 1)
        if q is None:
            residual = law.scatter(1, ids[row, at][:, None], -math.inf)
            residual = torch.where(residual.amax(-1, keepdim=True) > -math.inf, residual, law)
        else:
            residual = residual_logprobs(law, q[row, at])
        rejected = num_accepted < (draft_token_ids >= 0).sum(1)
        law = torch.where(rejected[:, None], residual, law)
    next_ids = draw(law, gumbels(seeds, vocab, RECOVER))
    lawless = _lawless(target_logits) | _lawless(p)  # large logits may leave float32 when the temperature divides them
    return _result(draft_token_ids, num_accepted, next_ids, p_drafted, q_drafted, lawless)


def draft_logprobs(draft_logits, draft_logsumexp, draft_vocab_ids, samplings, vocab: int):
    """The draft's law on the target's vocabulary.

    Rule: log softmax(warp(draft_logits)) at the draft's ids, -inf (q = 0) at every other id.

    Args:
        draft_logits, draft_logsumexp, draft_vocab_ids: see verify; draft_logits is not None.
        samplings: list of one Sampling a row.
        vocab: V of the target.
    Returns: [batch, gamma, vocab] float32.
    """
    q = warp(draft_logits, samplings)
    q = q.log_softmax(-1) if draft_logsumexp is None else q - draft_logsumexp[..., None]
    if draft_vocab_ids is None and q.shape[-1] == vocab:
        return q
    where = torch.arange(q.shape[-1], device=q.device) if draft_vocab_ids is None else draft_vocab_ids
    return torch.full((*q.shape[:-1], vocab), -math.inf, device=q.device).index_copy_(-1, where, q)


def _prefix(stands):
    """[batch] int64: how many stand before the first that does not."""
    return stands.long().cumprod(-1).sum(-1)


def _lawless(logits):
    """[batch, rows]: NaN, or nothing finite."""
    return ~logits.amax(-1).isfinite()


def _result(draft_token_ids, num_accepted, next_ids, p_drafted, q_drafted, lawless) -> VerifyResult:
    batch, gamma = draft_token_ids.shape
    position = torch.arange(gamma + 1, device=num_accepted.device)
    accepted = num_accepted[:, None]
    shown = torch.cat([draft_token_ids, draft_token_ids.new_zeros(batch, 1)], dim=1)
    token_ids = torch.where(position < accepted, shown, PLACEHOLDER_TOKEN_ID)
    token_ids = torch.where(position == accepted, next_ids[:, None], token_ids)
    read = position <= (draft_token_ids >= 0).sum(1, keepdim=True)  # what lies behind a row's own end is not
    bad = read & lawless
    invalid = torch.where(bad.any(1), bad.long().argmax(1), -1)
    return VerifyResult(num_accepted, next_ids, token_ids, p_drafted, q_drafted, invalid)
