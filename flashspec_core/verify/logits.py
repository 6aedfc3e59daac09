"""From raw logits to the law that tokens are drawn from, the residual law, and draws from given noise.

Temperature comes before everything else, all arithmetic is float32 in log space. It decides nothing: reference.py does.
"""

from __future__ import annotations

import math

import torch

from flashspec_core.records import Sampling

NUCLEUS_CANDIDATES = 1024  # top-p looks among so many ids first; a flatter law takes a full sort


def _column(values, like):
    """One number where all rows agree, else a [batch, 1, ...] float32 tensor that broadcasts with `like`."""
    if all(v == values[0] for v in values):
        return values[0]
    return torch.tensor(values, dtype=torch.float32, device=like.device).view(-1, *(1,) * (like.dim() - 1))


def _wide(logits):
    """float32, or float64 where that came in: exact laws of small cases are computed by this very code."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def row_samplings(sampling, batch: int) -> list[Sampling]:
    """One Sampling a row.

    Args:
        sampling: a Sampling for all rows, or one a row.
        batch: number of rows.
    Returns: A list of length batch.
    Raises: ValueError: another number of them than rows, or another type.
    """
    if isinstance(sampling, Sampling):
        return [sampling] * batch
    rows = list(sampling) if isinstance(sampling, list | tuple) else []
    if len(rows) != batch or not all(isinstance(s, Sampling) for s in rows):
        raise ValueError(f"sampling must be one fs.Sampling or one a row ({batch}), got {sampling!r}")
    return rows


def warp(logits, sampling):
    """Temperature, then top-k, top-p, min-p: logits of the law to draw from, -inf at ids that the filters drop.

    Rule: x = logits / temperature; top-k keeps x >= its k-th largest; top-p keeps the fewest most probable ids whose
    mass reaches top_p; min-p keeps p >= min_p * max p. Ids that tie with the last one kept stay. A greedy row becomes
    0 at its argmax, lowest id among equals, and -inf elsewhere.

    Args:
        logits: [batch, ..., vocab] float32, float16 or bfloat16, raw.
        sampling: a Sampling, or a list of one a row.
    Returns: [batch, ..., vocab] float32, not normalised; its softmax is the law.
    Cost: one pass for temperature; top-k and top-p select among 1,024 ids, a full sort only for a flatter law.
    Source: Fan et al. 2018 (top-k), Holtzman et al. 2020 (top-p), Nguyen et al. 2024 (min-p).

    >>> warp(torch.tensor([[2.0, 1.0, 0.0]]), Sampling(temperature=0.5, top_k=2))
    tensor([[4., 2., -inf]])
    """
    rows = row_samplings(sampling, logits.shape[0])
    rows = rows[:1] if all(s is rows[0] for s in rows) else rows  # one law for all is looked at once
    # a greedy row's temperature is never used: 1 keeps it finite
    x = _wide(logits) / _column([1.0 if s.greedy else float(s.temperature) for s in rows], logits)
    vocab = x.shape[-1]
    if any(s.top_k is not None and s.top_k < vocab for s in rows):
        ks = [min(int(s.top_k or vocab), vocab) for s in rows]
        largest = x.topk(max(ks), dim=-1).values
        index = torch.tensor([k - 1 for k in ks], device=x.device).view(-1, *(1,) * (x.dim() - 1))
        x = _keep(x, largest.gather(-1, index.expand(*x.shape[:-1], 1)))
    if any(s.top_p is not None and s.top_p < 1 for s in rows):
        x = _keep(x, _nucleus_threshold(x, _column([2.0 if s.top_p in (None, 1) else s.top_p for s in rows], x)))
    if any(s.min_p for s in rows):
        floor = _column([math.log(s.min_p) if s.min_p else -math.inf for s in rows], x)
        x = _keep(x, x.amax(-1, keepdim=True) + floor)
    if any(s.greedy for s in rows):
        one_hot = torch.full_like(x, -math.inf).scatter_(-1, greedy_ids(logits)[..., None], 0.0)
        mask = torch.tensor([s.greedy for s in rows], device=x.device).view(-1, *(1,) * (x.dim() - 1))
        x = torch.where(mask, one_hot, x)
    return x


def _keep(x, threshold):
    return x.masked_fill(x < threshold, -math.inf)


def _nucleus_threshold(x, top_p):
    """[..., 1]: the smallest logit that top-p keeps; -inf in a row whose top_p is 2 (no top-p there)."""
    total, top_p = x.logsumexp(-1, keepdim=True), torch.as_tensor(top_p, device=x.device)
    for size in (min(NUCLEUS_CANDIDATES, x.shape[-1]), x.shape[-1]):
        largest = x.topk(size, dim=-1).values
        before = (largest - total).exp().cumsum(-1)
        if size == x.shape[-1] or bool(((before[..., -1:] >= top_p) | (top_p == 2)).all()):
            break
    kept = torch.cat([torch.ones_like(before[..., :1], dtype=torch.bool), before[..., :-1] < top_p], dim=-1)
    lowest = largest.masked_fill(~kept, math.inf).amin(-1, keepdim=True)
    return torch.where(top_p == 2, -math.inf, lowest)


def greedy_ids(logits):
    """Argmax over the vocabulary, the lowest id among equals on every device.

    Args: logits: [..., vocab].
    Returns: [...] int64.

    >>> greedy_ids(torch.tensor([1.0, 3.0, 3.0])).item()
    1
    """
    if logits.device.type == "cpu":
        return logits.argmax(-1)  # takes the first one on a CPU
    ids = torch.arange(logits.shape[-1], device=logits.device)
    best = torch.where(logits == logits.amax(-1, keepdim=True), ids, logits.shape[-1] - 1)
    return best.amin(-1)


def logprobs(logits, sampling):
    """Log of the law that a row's tokens are drawn from.

    Rule: log softmax(warp(logits)), so temperature stands before the softmax.

    Args:
        logits: [batch, ..., vocab] raw.
        sampling: a Sampling, or a list of one a row.
    Returns: [batch, ..., vocab] float32 natural logs, -inf where a filter dropped the id; NaN in a row without a law.

    >>> logprobs(torch.tensor([[1.0, 1.0]]), Sampling(temperature=1.0)).exp()
    tensor([[0.5000, 0.5000]])
    """
    return warp(logits, sampling).log_softmax(-1)


def log1mexp(d):
    """log(1 - e^d) for d < 0, right at both ends.

    Rule: log(-expm1(d)) above d = -ln 2, log1p(-exp(d)) below; -inf at 0 and above.

    Args: d: float tensor.
    Returns: Same shape and dtype.
    Source: Maechler 2012, "Accurately computing log(1 - exp(-|a|))".

    >>> log1mexp(torch.tensor([-1e-8, -20.0]))
    tensor([-1.8421e+01, -2.0612e-09])
    """
    d = d.clamp(max=0)
    return torch.where(d > -math.log(2), (-torch.expm1(d)).log(), torch.log1p(-d.exp()))


def residual_logprobs(target_logprobs, draft_logprobs, vocab_ids=None):
    """The law of the recovered token: what the target has over the draft, normalised.

    Rule: (p - q)+ / sum of (p - q)+; where that is empty by rounding, p.

    Args:
        target_logprobs: [..., vocab] float32, log p.
        draft_logprobs: [..., vocab] float32, log q.
        vocab_ids: [draft_vocab] int64, where q is not 0, or None: anywhere.
    Returns: [..., vocab] float32 natural logs.
    Cost: reads both rows once; the difference is taken at `vocab_ids` alone.
    Source: Leviathan et al. 2023, section 2.3 and appendix A.1.

    >>> p, q = torch.tensor([.1, .6, .3]).log(), torch.tensor([.6, .3, .1]).log()
    >>> residual_logprobs(p, q).exp()
    tensor([0.0000, 0.6000, 0.4000])
    """
    if vocab_ids is None:
        rest = log_excess(target_logprobs, draft_logprobs)
    else:
        own = [law.index_select(-1, vocab_ids) for law in (target_logprobs, draft_logprobs)]
        rest = target_logprobs.index_copy(-1, vocab_ids, log_excess(*own))
    total = rest.logsumexp(-1, keepdim=True)
    return torch.where(total > -math.inf, rest - total, target_logprobs)


def log_excess(target_logprobs, draft_logprobs):
    """log of (p - q)+, as log p + log(1 - e^(log q - log p)); -inf where q >= p.

    Args: target_logprobs, draft_logprobs: [..., vocab] float32, log p and log q.
    Returns: [..., vocab] float32.

    >>> log_excess(torch.tensor([.5, .5]).log(), torch.tensor([.25, .75]).log()).exp()
    tensor([0.2500, 0.0000])
    """
    inside = (target_logprobs > draft_logprobs) & (target_logprobs > -math.inf)
    gap = torch.where(inside, draft_logprobs - target_logprobs, 0.0)
    return torch.where(inside, target_logprobs + log1mexp(gap), -math.inf)


def draw(law_logprobs, noise):
    """One id a row from the law, by the Gumbel race.

    Rule: argmax over v of (log p(v) + gumbel(v)).

    Args:
        law_logprobs: [..., vocab] float32; need not be normalised.
        noise: [..., vocab] float32 standard Gumbels.
    Returns: [...] int64; an id of probability 0 never comes out.
    Source: Gumbel 1954; Maddison et al. 2014.

    >>> draw(torch.tensor([0.0, -math.inf]), torch.tensor([-9.0, 9.0])).item()
    0
    """
    return (law_logprobs + noise).argmax(-1)
