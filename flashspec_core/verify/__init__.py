"""The one door to verification: checks what comes in, picks the implementation, and never falls back silently.

The rules themselves stand in reference.py; noise comes from the caller, so every call can be repeated.
"""

from __future__ import annotations

import torch

from flashspec_core.records import Draft, VerifyResult
from flashspec_core.verify.logits import draw, row_samplings, warp

METHODS = ("token", "block", "coupled")
IMPLEMENTATIONS = ("reference", "triton")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def verify(
    target_logits,
    draft_token_ids,
    draft_logits=None,
    *,
    draft_logsumexp=None,
    draft_vocab_ids=None,
    sampling,
    log_uniforms,
    seeds,
    positions=None,
    method="token",
    impl=None,
) -> VerifyResult:
    """Accept a prefix of each row's drafted tokens and draw the token behind it, so that the output keeps p's law.

    Rule: "token": stand while log u <= log p - log q; then draw from (p - q)+ / sum, or from p where all stood.
    "block": the same for the whole block at once, never fewer tokens on average. "coupled": stand while the drafted id
    is the argmax of log p + the noise of its position, so that the text depends on the row seed alone. A greedy row
    stands while the drafted id is the argmax, under every method. The rules stand in verify/reference.py.

    Args:
        target_logits: [batch, gamma + 1, vocab] raw logits, float32, float16 or bfloat16.
        draft_token_ids: [batch, gamma] int64 target ids; -1 at the end of a row that drafted fewer.
        draft_logits: [batch, gamma, draft_vocab] raw logits that the ids were drawn from with the same sampling, or
            None: the draft was deterministic.
        draft_logsumexp: [batch, gamma] float32, kept from the draw (after temperature and filters), or None.
        draft_vocab_ids: [draft_vocab] int64, sorted and unique: target ids of a trimmed vocabulary, or None.
        sampling: a Sampling, or one a row.
        log_uniforms: [batch, gamma] float32, log of u in (0, 1]; not read in greedy rows and under "coupled".
        seeds: [batch] int64, noise of the recovered or bonus token, new whenever a position is drafted again; under
            "coupled" the row seeds, the same at every step.
        positions: [batch] int64, position of the first drafted token; only "coupled" needs it.
        method: "token", "block" or "coupled".
        impl: "reference", "triton", or None: "triton" on CUDA; the result's `impl` says which it was.
    Returns: VerifyResult with num_accepted [batch], next_token_ids [batch], token_ids [batch, gamma + 1].
    Raises:
        ValueError: a shape, dtype, id or name that does not fit; "triton" without a CUDA device; target logits without
            a law (NaN, or nothing finite).
    Cost: normalising reads (2 gamma + 1) rows of V a sequence, the test two numbers a token ("block": two rows of V),
        the draw two rows of V.
    Source: Leviathan et al. 2023 (arXiv 2211.17192); Chen et al. 2023 (arXiv 2302.01318); Sun et al. 2024 (2403.10444).

    >>> from flashspec_core.records import Sampling
    >>> result = verify(torch.tensor([[[0., 9.], [9., 0.]]]), torch.tensor([[1]]), sampling=Sampling(),
    ...                 log_uniforms=torch.zeros(1, 1), seeds=torch.tensor([0]))
    >>> result.num_accepted.item(), result.token_ids.tolist()
    (1, [[1, 0]])
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}")
    if impl not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"impl must be one of {IMPLEMENTATIONS} or None, got {impl!r}")
    draft = Draft(draft_token_ids, draft_logits, draft_logsumexp, draft_vocab_ids)
    _check(target_logits, draft, log_uniforms, seeds)
    if method == "coupled":
        _shaped("positions", positions, target_logits.shape[:1], (torch.int64,))
    samplings = row_samplings(sampling, target_logits.shape[0])
    result = decide(target_logits, draft, samplings, log_uniforms, seeds, positions, method, impl)
    if bool((result.invalid >= 0).any()):
        row = int((result.invalid >= 0).long().argmax())
        where = f"row {row}, position {int(result.invalid[row])}"
        raise ValueError(f"target_logits must hold at least one finite number and no NaN a row; {where} does not")
    return result


def decide(
    target_logits, draft, samplings, log_uniforms, seeds, positions, method, impl=None, workspaces=None
) -> VerifyResult:
    """What `verify` does behind its checks; rows without a law are flagged in `invalid` and raise nothing.

    Args:
        target_logits, log_uniforms, seeds, positions, method, impl: see verify.
        draft: a records.Draft.
        samplings: list of one Sampling a row.
        workspaces: a dict in which the kernels keep their buffers; the result then stands until the next call.
    Returns: VerifyResult.
    """
    from flashspec_core.verify import reference

    if impl == "triton" or (impl is None and target_logits.is_cuda):
        from flashspec_core.verify import kernels

        here = target_logits.is_cuda or kernels.INTERPRETED
        _expect(here, "CUDA tensors for impl 'triton' (or TRITON_INTERPRET=1 from the start)", target_logits.device)
        return kernels.verify(target_logits, draft, samplings, log_uniforms, seeds, positions, method, workspaces)
    if all(s.greedy for s in samplings):
        return reference.verify_greedy(target_logits, draft)
    if method == "coupled":
        return reference.verify_coupled(target_logits, draft, samplings, seeds, positions)
    rule = reference.verify_block if method == "block" else reference.verify_token
    return rule(target_logits, draft, samplings, log_uniforms, seeds)


def draw_draft(logits, samplings, noise, index: int, workspaces=None):
    """A drafter's next tokens, and what their laws sum to, so that verification need not sum them again.

    Rule: argmax over v of (log q(v) + noise(v)); a greedy row's token is its argmax.

    Args:
        logits: [batch, vocab] raw, float32, float16 or bfloat16.
        samplings: list of one Sampling a row.
        noise: the step's noise.DraftNoise.
        index: position in the block.
        workspaces: see decide.
    Returns: ids [batch] int64; log-sum-exp of the logits after temperature and filters [batch] float32.
    Cost: on CUDA one launch (two where a row filters) that reads the logits once.
    """
    if logits.is_cuda:
        from flashspec_core.verify import kernels

        return kernels.draw(logits, samplings, noise, index, workspaces)
    law = warp(logits, samplings)
    return draw(law, noise.gumbels(index, law.shape[-1])), law.logsumexp(-1)


def check_draft(draft, batch: int, gamma: int, vocab: int) -> None:
    """Refuse a draft whose shapes, dtypes or ids do not fit.

    Args: draft, batch, gamma, vocab: a records.Draft, and what its shapes must agree with.
    Raises: ValueError: saying what was expected and what came.
    """
    token_ids, logits, logsumexp, vocab_ids = draft.token_ids, draft.logits, draft.logsumexp, draft.vocab_ids
    _shaped("draft_token_ids", token_ids, (batch, gamma), (torch.int64,))
    if gamma:
        lowest, highest = int(token_ids.min()), int(token_ids.max())
        _expect(-1 <= lowest and highest < vocab, f"draft_token_ids in -1..{vocab - 1}", f"{lowest}..{highest}")
        ends = (token_ids[:, :-1] < 0) & (token_ids[:, 1:] >= 0)
        _expect(not bool(ends.any()), "-1 in draft_token_ids only at the end of a row", "ids behind a -1")
    if logits is None:
        given = [name for name, t in (("logsumexp", logsumexp), ("vocab_ids", vocab_ids)) if t is not None]
        _expect(not given, "draft_logits beside draft_" + " and draft_".join(given), "None")
        return
    draft_vocab = logits.shape[-1] if isinstance(logits, torch.Tensor) and logits.dim() else 0
    _shaped("draft_logits", logits, (batch, gamma, draft_vocab), FLOATS)
    _expect(draft_vocab > 0, "draft_logits of at least one id", list(logits.shape))
    if logsumexp is not None:
        _shaped("draft_logsumexp", logsumexp, (batch, gamma), (torch.float32,))
    if vocab_ids is None:
        _expect(draft_vocab <= vocab, f"draft_vocab <= {vocab} (mask and cut ids the target lacks)", draft_vocab)
        return
    _shaped("draft_vocab_ids", vocab_ids, (draft_vocab,), (torch.int64,))
    inside = int(vocab_ids.min()) >= 0 and int(vocab_ids.max()) < vocab
    sorted_unique = bool((vocab_ids[1:] > vocab_ids[:-1]).all())
    _expect(inside and sorted_unique, f"draft_vocab_ids sorted, unique, in 0..{vocab - 1}", vocab_ids.tolist()[:8])


def check_normalised(draft, samplings) -> None:
    """Refuse a draft whose q, with the log-sum-exp that it kept, does not sum to 1.

    Args:
        draft: a records.Draft.
        samplings: list of one Sampling a row.
    Raises: ValueError: naming row and position.
    """
    if draft.logits is None or draft.logsumexp is None or not draft.token_ids.numel():
        return
    off = (warp(draft.logits, samplings).logsumexp(-1) - draft.logsumexp).masked_fill(draft.token_ids < 0, 0)
    row, position = divmod(int(off.abs().nan_to_num(torch.inf).argmax()), off.shape[1])
    total = float(off[row, position].exp())
    _expect(abs(total - 1) < 1e-3, "a draft law q that sums to 1", f"{total:.4g} in row {row} at position {position}")


def _check(target_logits, draft, log_uniforms, seeds):
    got = list(target_logits.shape) if isinstance(target_logits, torch.Tensor) else type(target_logits).__name__
    good = isinstance(got, list) and len(got) == 3 and 0 not in got
    _expect(good, "target_logits as [batch, gamma + 1, vocab], none of them 0", got)
    batch, gamma, vocab = got[0], got[1] - 1, got[2]
    _shaped("target_logits", target_logits, target_logits.shape, FLOATS)
    check_draft(draft, batch, gamma, vocab)
    _shaped("log_uniforms", log_uniforms, (batch, gamma), (torch.float32,))
    _shaped("seeds", seeds, (batch,), (torch.int64,))


def _expect(good, wanted, got):
    if not good:
        raise ValueError(f"expected {wanted}, got {got}")


def _shaped(name, tensor, shape, dtypes):
    good = isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == tuple(shape) and tensor.dtype in dtypes
    got = f"{list(tensor.shape)} {tensor.dtype}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
    _expect(good, f"{name} as {list(shape)} {' or '.join(str(d).removeprefix('torch.') for d in dtypes)}", got)
