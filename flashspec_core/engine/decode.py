"""The loop: choose an arm, draft, verify with one pass of the target, commit; a DecodeStep a row and step.

Batches of one and of many take the same path. It leaves out how drafts come about (drafters.py) and captured steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import fmean

import torch

from flashspec_core.bandits import UCB1, FixedArm
from flashspec_core.engine.drafters import DraftContext
from flashspec_core.engine.kv_cache import CachedModel
from flashspec_core.engine.text import TextStream, encode_prompts
from flashspec_core.noise import DraftNoise, fresh_seed, log_uniforms, step_seeds
from flashspec_core.records import Arm, DecodeStep, Draft, Feedback, Generation, Sampling, check_gamma
from flashspec_core.verify import METHODS, decide
from flashspec_core.verify.logits import row_samplings


def generate(
    target,
    arms,
    prompt,
    *,
    policy=None,
    gamma: int = 4,
    method: str = "token",
    sampling=Sampling(),  # noqa: B008 - frozen
    max_new_tokens: int = 128,
    stop=(),
    seed=0,
    trace: bool = False,
):
    """Continue a prompt speculatively: the text has the target's own law, whatever drafts.

    Rule: each step a policy picks an arm from what is past, its drafter proposes up to gamma tokens, one target pass
    scores them, `verify` keeps a prefix and adds one token. A greedy run equals plain greedy decoding in float32.

    Args:
        target: what `load_target` returns.
        arms: a drafter, an Arm, or a list of them; Arm(None) is plain decoding.
        prompt: text, chat messages, ids, or a list of prompts.
        policy: a bandits.Policy; None: FixedArm(0) for one arm, else UCB1.
        gamma: drafted tokens a step, for arms that do not say.
        method: "token".
        sampling: one Sampling, or one a row; default greedy.
        max_new_tokens: at least 1; never overshot.
        stop: a string or strings that end the text and are left out of it.
        seed: an int (row i takes seed + i), None (drawn and reported), or one a row.
        trace: keep drafted ids, their log-probabilities and log-uniforms in every DecodeStep.

    Returns:
        A Generation, or a list of them for a list of prompts.

    Raises:
        ValueError: an argument that does not fit, saying what was expected and what came.
        RowError: logits without a law in some rows, after the others have ended; `.generations` has them all.

    Cost: a target pass a step; on the host well under 2 ms a step beside the models.
    Source: Leviathan et al. 2023, algorithm 1.
    """
    run = _Run(target, arms, prompt, policy, gamma, method, sampling, max_new_tokens, stop, seed, trace)
    for _ in run.steps():
        pass
    return run.generations if run.is_batch else run.generations[0]


def stream(target, arms, prompt, **options):
    """Like `generate`, step by step: an iterator of DecodeSteps; their texts concatenate to the whole.

    Args:
        target, arms, prompt: see generate.
        options: what else `generate` takes.

    Returns:
        A generator of DecodeStep, one a row and step; closing it frees the caches.

    Raises:
        ValueError, RowError: as `generate`; arguments are checked at the call.
    """
    defaults = dict(policy=None, gamma=4, method="token", sampling=Sampling(), max_new_tokens=128, stop=(), seed=0)
    unknown = set(options) - set(defaults) - {"trace"}
    if unknown:
        raise TypeError(f"stream() got unexpected options: {', '.join(sorted(unknown))}")
    return _Run(target, arms, prompt, **{**defaults, "trace": False, **options}).steps()


class RowError(ValueError):
    """Some rows could not go on; `generations` holds every row, these with finish_reason "error"."""

    def __init__(self, message, generations):
        super().__init__(message)
        self.generations = generations


@dataclass
class _Row:
    index: int
    ids: list[int]
    num_prompt: int
    sampling: Sampling
    seed: int
    end: int
    text: TextStream
    steps: list[DecodeStep] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    seconds: float = 0.0

    def generation(self) -> Generation:
        new, prompt = self.ids[self.num_prompt :], self.ids[: self.num_prompt]
        reason = self.finish_reason or "cancelled"
        return Generation(self.text.text, new, prompt, self.steps, self.seed, reason, self.seconds, self.error)


class _Run:
    """One call of generate or stream."""

    def __init__(self, target, arms, prompt, policy, gamma, method, sampling, max_new_tokens, stop, seed, trace):
        if method not in METHODS:
            raise ValueError(f"method must be one of {METHODS}, got {method!r}")
        if isinstance(max_new_tokens, bool) or not hasattr(max_new_tokens, "__index__") or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be a whole number >= 1, got {max_new_tokens!r}")
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(s, str) and s for s in stop) or (stop and target.tokenizer is None):
            raise ValueError(f"stop must be non-empty strings, and needs a tokenizer; got {stop!r}")
        self.target, self.trace = target, trace
        self.arms = as_arms(arms, check_gamma(gamma))
        for drafter in {id(a.drafter): a.drafter for a in self.arms if a.drafter is not None}.values():
            check_same_tokenizer(target, drafter)
        self.policy = policy or (FixedArm(0) if len(self.arms) == 1 else UCB1(len(self.arms)))
        wanted = getattr(self.policy, "num_arms", None)
        if wanted is not None and wanted != len(self.arms):
            raise ValueError(f"policy chooses among {wanted} arms, but {len(self.arms)} were given")
        prompts, self.is_batch = encode_prompts(target, prompt)
        samplings, seeds = row_samplings(sampling, len(prompts)), row_seeds(seed, len(prompts))
        self.rows = []
        for i, ids in enumerate(prompts):
            end = min(len(ids) + max_new_tokens, target.max_length)
            text = TextStream(target.tokenizer, stop)
            self.rows.append(_Row(i, list(ids), len(ids), samplings[i], seeds[i], end, text))
        self.max_new_tokens, self.eos = max_new_tokens, target.eos_token_ids
        self.cached = CachedModel(target.model)
        self.num_steps = 0

    @property
    def generations(self) -> list[Generation]:
        return [row.generation() for row in self.rows]

    def steps(self):
        drafters = [arm.drafter for arm in self.arms if arm.drafter is not None]
        for drafter in drafters:
            drafter.reset()
        try:
            active = self.rows
            while active:
                yield from self._step(active)
                active = [row for row in active if row.finish_reason is None]
        finally:  # also when a stream is closed
            self.cached.clear()
            for drafter in drafters:
                drafter.reset()
        errors = [row.error for row in self.rows if row.error]
        if errors:
            raise RowError("; ".join(errors), self.generations)

    def _step(self, rows):
        start = time.perf_counter()
        arm_index = int(self.policy.select_arm())
        arm = self.arms[arm_index]
        device, vocab = self.target.device, self.target.vocab_size
        samplings = [row.sampling for row in rows]
        context = DraftContext([row.ids for row in rows], [row.index for row in rows], vocab)
        seeds = torch.tensor([row.seed for row in rows], device=device)
        greedy = all(s.greedy for s in samplings)
        if not greedy:
            seeds = step_seeds(seeds, self.num_steps)
        draft = self._draft(arm, rows, context, samplings, seeds)
        drafted = time.perf_counter()

        shown = draft.token_ids.tolist()
        width = draft.token_ids.shape[1]
        before = self.cached.num_read
        inputs = [row.ids + [max(i, 0) for i in ids] for row, ids in zip(rows, shown, strict=True)]
        logits = self.cached.logits(inputs, width + 1, context.row_ids)
        log_u = torch.zeros(len(rows), width, device=device) if greedy else log_uniforms(seeds, width)
        result = decide(
            logits, draft.token_ids, draft.logits, draft.logsumexp, draft.vocab_ids, samplings, log_u, seeds
        )
        emitted, accepted, invalid = result.token_ids.tolist(), result.num_accepted.tolist(), result.invalid.tolist()
        verified = time.perf_counter()

        prefilled = self.cached.num_read - before - len(rows) * (width + 1) if self.num_steps == 0 else 0
        records = []
        for i, row in enumerate(rows):
            num_draft = sum(token_id >= 0 for token_id in shown[i])
            if invalid[i] >= 0:
                row.error = (
                    f"the target's logits hold no law (NaN, or nothing finite) in row {row.index} at position "
                    f"{len(row.ids) + invalid[i] - 1}"
                )
                row.finish_reason, new = "error", []
            else:
                new = self._commit(row, emitted[i])
            record = DecodeStep(
                row=row.index,
                step=self.num_steps,
                arm=arm_index,
                drafter=arm.name,
                gamma=arm.gamma if arm.drafter is not None else 0,
                num_draft_tokens=num_draft,
                num_accepted=accepted[i],
                token_ids=new,
                text=row.text.piece(final=row.finish_reason is not None),
                reward=accepted[i] / num_draft if num_draft else 0.0,
                step_seconds=0.0,
                draft_seconds=drafted - start,
                verify_seconds=verified - drafted,
                num_prefilled=prefilled,
            )
            if self.trace:
                record.draft_token_ids = shown[i][:num_draft]
                for name, values in (
                    ("target_logprobs", result.target_logprobs),
                    ("draft_logprobs", result.draft_logprobs),
                    ("log_uniforms", log_u),
                ):
                    setattr(record, name, values[i, :num_draft].tolist())
            records.append(record)
            row.steps.append(record)
        if arm.drafter is not None:
            arm.drafter.commit(context, result)
        feedback = Feedback(
            self.num_steps,
            sum(r.num_draft_tokens for r in records),
            sum(accepted),
            sum(r.num_accepted < r.num_draft_tokens for r in records),
        )
        self.policy.update(arm_index, fmean(r.reward for r in records), feedback)
        self.num_steps += 1
        seconds = time.perf_counter() - start
        for row, record in zip(rows, records, strict=True):
            record.step_seconds = seconds
            row.seconds += seconds
        yield from records

    def _draft(self, arm, rows, context, samplings, seeds) -> Draft:
        """The arm's draft, cut to what each row may still emit; a row of width 0 where nothing is drafted."""
        device = self.target.device
        room = [row.end - len(row.ids) - 1 for row in rows]  # a step emits its drafts and one more
        gamma = min(arm.gamma, max(room))
        if arm.drafter is None or gamma == 0:
            return Draft(torch.empty(len(rows), 0, dtype=torch.int64, device=device))
        draft = arm.drafter.draft(context, gamma, samplings, DraftNoise(seeds))
        ids = draft.token_ids.to(device)
        if min(room) < ids.shape[1]:
            position = torch.arange(ids.shape[1], device=device)
            ids = torch.where(position < torch.tensor(room, device=device)[:, None], ids, -1)
        moved = [None if t is None else t.to(device) for t in (draft.logits, draft.logsumexp, draft.vocab_ids)]
        return Draft(ids, *moved)

    def _commit(self, row, emitted) -> list[int]:
        """Append what the row keeps of the emitted ids, and say why it ends where it does."""
        new = []
        for token_id in emitted:
            if token_id < 0:
                break
            new.append(token_id)
            row.ids.append(token_id)
            stopped = row.text.push(token_id)
            if token_id in self.eos:
                row.finish_reason = "eos"
            elif stopped:
                row.finish_reason = "stop"
            elif len(row.ids) >= row.end:
                reached = len(row.ids) - row.num_prompt >= self.max_new_tokens
                row.finish_reason = "length" if reached else "context"
            if row.finish_reason:
                break
        return new


def as_arms(arms, gamma: int) -> list[Arm]:
    """A drafter, an Arm or a list of them as Arms that all have a gamma.

    Args:
        arms: see generate.
        gamma: for those that do not say.

    Returns:
        At least one Arm.

    Raises:
        ValueError: none was given.
        TypeError: neither an Arm nor a drafter.
    """
    arms = list(arms) if isinstance(arms, list | tuple) else [arms]
    if not arms:
        raise ValueError("expected at least one arm, got none; fs.Arm(None) is plain decoding")
    for arm in arms:
        if not isinstance(arm, Arm) and not (hasattr(arm, "draft") and hasattr(arm, "name")):
            raise TypeError(f"an arm is an fs.Arm or a drafter with `name` and `draft`, got {arm!r}")
    arms = [arm if isinstance(arm, Arm) else Arm(arm) for arm in arms]
    return [arm if arm.gamma is not None else Arm(arm.drafter, gamma) for arm in arms]


def row_seeds(seed, batch: int) -> list[int]:
    """One seed a row.

    Args:
        seed: an int (row i takes seed + i), None (drawn), or a sequence of these, one a row.
        batch: number of rows.

    Returns:
        A list of ints, each the 64-bit seed that repeats its row alone.

    Raises:
        ValueError: another number of seeds than rows, or not whole numbers.

    >>> row_seeds(7, 2), row_seeds([3, 3], 2)
    ([7, 8], [3, 3])
    """
    given = [seed] * batch if seed is None or isinstance(seed, int) else list(seed)
    if len(given) != batch:
        raise ValueError(f"expected one seed or one a row ({batch}), got {len(given)}")
    if not all(s is None or (isinstance(s, int) and -(2**63) <= s < 2**63 - batch) for s in given):
        raise ValueError(f"expected whole 64-bit seeds or None, got {seed!r}")
    spread = isinstance(seed, int)
    return [fresh_seed() if s is None else s + i * spread for i, s in enumerate(given)]


def check_same_tokenizer(target, drafter) -> None:
    """Refuse a drafter whose ids mean other text.

    Args:
        target: with `tokenizer` or None.
        drafter: with `tokenizer` or without.

    Raises:
        ValueError: an id stands for another token there.
    """
    theirs, ours = getattr(drafter, "tokenizer", None), target.tokenizer
    if theirs is None or ours is None or theirs is ours:
        return
    a, b = ours.get_vocab(), theirs.get_vocab()
    if a != b:
        token = next(t for t in [*a, *b] if a.get(t) != b.get(t))
        raise ValueError(
            f"drafter {drafter.name!r} has another tokenizer: {token!r} is id {a.get(token)} in the target's and "
            f"{b.get(token)} in the drafter's; a draft must be in the target's ids"
        )
