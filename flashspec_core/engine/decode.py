"""The loop: choose an arm, draft, verify with one pass of the target, commit; a DecodeStep a row and step.

Batches of one and of many take the same path. It leaves out how drafts come about (drafters.py) and captured steps.
"""

from __future__ import annotations

import time
from statistics import fmean
from types import SimpleNamespace

import torch

from flashspec_core.bandits import UCB1, share_of_fastest
from flashspec_core.engine.checks import as_arms, check_same_target, check_same_tokenizer, row_seeds
from flashspec_core.engine.contexts import Committed
from flashspec_core.engine.drafters import DraftContext, all_drafters, feature_layers, reset_drafters
from flashspec_core.engine.kv_cache import CachedModel
from flashspec_core.engine.rows import Row
from flashspec_core.engine.text import TextStream, encode_prompts
from flashspec_core.engine.turns import turn
from flashspec_core.noise import DraftNoise, log_uniforms, step_seeds
from flashspec_core.policies import FixedArm
from flashspec_core.records import DecodeStep, Draft, Feedback, Generation, Sampling, check_gamma
from flashspec_core.verify import METHODS, check_draft, check_normalised, decide
from flashspec_core.verify.logits import row_samplings


def generate(
    target,
    arms,
    prompt,
    *,
    policy=None,
    gamma: int = 4,
    reward: str = "accepted_fraction",
    method: str = "token",
    sampling=Sampling(),  # noqa: B008 - frozen
    max_new_tokens: int = 128,
    stop=(),
    seed=0,
    max_seconds: float | None = None,
    logits_processor=None,
    logprobs: bool = False,
    trace: bool = False,
    capture: bool | None = None,
    context=None,
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
        reward: what the policy learns from: "accepted_fraction" (0 where nothing was drafted), or "tokens_per_second":
            a step's emitted tokens over its time, as a share of the fastest step that the policy has seen in any call
            (bandits.share_of_fastest); the first step, which reads the prompt, is then not learnt from.
        method: "token", "block", or "coupled": the text then hangs on the row seed alone, whatever drafts.
        sampling: one Sampling, or one a row; default greedy.
        max_new_tokens: at least 1; never overshot.
        stop: a string or strings that end the text and are left out of it.
        seed: an int (row i takes seed + i), None (drawn and reported), or one a row.
        max_seconds: no step begins after so long; rows then end with "time".
        logits_processor: called as transformers' are, f(ids [1, length], logits [1, vocab]) -> logits [1, vocab], once
            for each verified position with that position's own prefix, before temperature; on the target alone.
        logprobs: keep the model's own log-probability of every emitted token (before temperature, filters, processor).
        trace: keep drafted ids, their log-probabilities and log-uniforms in every DecodeStep.
        capture: replay whole steps as CUDA graphs; None: wherever that can be (`Generation.mode` says what was done,
            and why), True: or refuse, False: never. The policy then learns of a step one step late.
        context: f(list of contexts.Committed) -> hashable: asked before each step, and what it says goes to the policy.
    Returns: A Generation, or a list of them for a list of prompts.
    Raises:
        ValueError: an argument that does not fit, saying what was expected and what came.
        RowError: logits without a law in some rows, after the others have ended; `.generations` has them all.
        MemoryError: the device's memory does not suffice, saying what to lower.
    Cost: a target pass a step; on the host well under 2 ms a step beside the models.
    Threads: steps on one target run one at a time, so a callback must not wait for another thread that decodes there; a
        drafter serves one target at a time.
    Source: Leviathan et al. 2023, algorithm 1.
    """
    return Run(**locals()).finish()


def stream(target, arms, prompt, **options):
    """Like `generate`, step by step: an iterator of DecodeSteps; their texts concatenate to the whole.

    Args:
        target, arms, prompt: see generate.
        options: what else `generate` takes.
    Returns: A generator of DecodeStep, one a row and step; closing it frees the caches.
    Raises: ValueError, RowError: as `generate`; arguments are checked at the call.
    """
    return Run(target, arms, prompt, **options).steps()


REWARDS = ("accepted_fraction", "tokens_per_second")


class RowError(ValueError):
    """Some rows could not go on; `generations` holds every row, these with finish_reason "error"."""

    def __init__(self, message, generations):
        super().__init__(message)
        self.generations = generations


class Run:
    """One call of generate or stream; `cached` is the target's cache where it outlives the call (chat.py)."""

    def __init__(self, target, arms, prompt, cached=None, **options):
        if unknown := set(options) - set(generate.__kwdefaults__):
            raise TypeError(f"expected options among {', '.join(generate.__kwdefaults__)}; got {', '.join(unknown)}")
        o = SimpleNamespace(**{**generate.__kwdefaults__, **options})
        if o.method not in METHODS:
            raise ValueError(f"method must be one of {METHODS}, got {o.method!r}")
        if o.reward not in REWARDS:
            raise ValueError(f"reward must be one of {REWARDS}, got {o.reward!r}")
        if isinstance(o.max_new_tokens, bool) or not hasattr(o.max_new_tokens, "__index__") or o.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be a whole number >= 1, got {o.max_new_tokens!r}")
        if o.max_seconds is not None and not o.max_seconds > 0:
            raise ValueError(f"max_seconds must be a number > 0 or None, got {o.max_seconds!r}")
        stop = (o.stop,) if isinstance(o.stop, str) else tuple(o.stop)
        if not all(isinstance(s, str) and s for s in stop) or (stop and target.tokenizer is None):
            raise ValueError(f"stop must be non-empty strings, and needs a tokenizer; got {stop!r}")
        self.arms = as_arms(arms, check_gamma(o.gamma))
        for drafter in all_drafters(self.arms):
            check_same_tokenizer(target, drafter)
            check_same_target(target, drafter)
        self.policy = o.policy or (FixedArm(0) if len(self.arms) == 1 else UCB1(len(self.arms)))
        wanted = getattr(self.policy, "num_arms", None)
        if wanted is not None and wanted != len(self.arms):
            raise ValueError(f"policy chooses among {wanted} arms, but {len(self.arms)} were given")
        prompts, self.is_batch = encode_prompts(target, prompt)
        samplings, seeds = row_samplings(o.sampling, len(prompts)), row_seeds(o.seed, len(prompts))
        self.layers = feature_layers(self.arms)
        self.cached = cached or CachedModel(target.model, self.layers)
        self.rows = []
        for i, ids in enumerate(prompts):
            end = min(len(ids) + o.max_new_tokens, target.max_length)
            if self.cached.window is not None and end > self.cached.window:
                wanted = f"prompt and max_new_tokens within the model's sliding window of {self.cached.window} tokens"
                raise ValueError(f"expected {wanted} (older keys cannot be rolled back to), got {end} (row {i})")
            text = TextStream(target.tokenizer, stop)
            self.rows.append(Row(i, list(ids), len(ids), samplings[i], seeds[i], end, o.max_new_tokens, text))
        self.target, self.options, self.eos = target, o, target.eos_token_ids
        self.keeps_cache = cached is not None
        self.why_eager = self._why_eager()
        if o.capture and self.why_eager:
            raise ValueError(f"expected what can be captured, got: {self.why_eager}; see capture=None")
        self.num_steps, self.workspaces, self.checked, self.alone = 0, {}, set(), True

    def _why_eager(self) -> str | None:
        """Why no step is captured, or None."""
        if self.options.capture is False:
            return "capture=False"
        if self.target.device.type != "cuda" and not self.options.capture:
            return "no CUDA device"
        from flashspec_core.engine import cuda_graphs

        return cuda_graphs.why_eager(self)

    def finish(self):
        """Take every step; a Generation, or a list of them for a list of prompts."""
        for _ in self.steps():
            pass
        return self.generations if self.is_batch else self.generations[0]

    @property
    def generations(self) -> list[Generation]:
        mode = f"eager: {self.why_eager}" if self.why_eager else "captured"
        return [row.generation(mode) for row in self.rows]

    def steps(self):
        """Yield a DecodeStep a row and step until every row has ended; steps on one model run one at a time."""
        steps, model = self._steps(), self.target.model

        def step():
            with turn(model):
                return next(steps, None)

        try:
            for records in iter(step, None):
                yield from records
        finally:  # closed, maybe by a collection within another step: then it leaves that one's drafters alone
            with turn(model, wait=False) as self.alone:
                steps.close()

    def _steps(self):
        """Yield each step's records."""
        self.start = time.perf_counter()
        if not self.keeps_cache:
            reset_drafters(self.arms)
        try:
            active = self.rows
            if self.why_eager is None:
                from flashspec_core.engine import cuda_graphs

                yield from cuda_graphs.steps(self, active)
                active = []
            while active:
                yield self._step(active)
                active = [row for row in active if row.finish_reason is None]
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
                raise
            longest = max(len(row.ids) for row in self.rows)
            for station in self.target.stations.values():
                station.free()
            self.target.stations.clear()
            raise MemoryError(
                f"{self.target.device} has too little memory for {len(self.rows)} rows of up to {longest} tokens; "
                "lower the number of prompts, max_new_tokens, gamma, or take a 16-bit dtype"
            ) from error
        finally:  # also when a stream is closed
            if not self.keeps_cache:
                self.cached.clear()
                if self.alone:
                    reset_drafters(self.arms)
        errors = [row.error for row in self.rows if row.error]
        if errors:
            raise RowError("; ".join(errors), self.generations)

    def _step(self, rows):
        start = time.perf_counter()
        arm_index, told = self.choose(rows)
        arm = self.arms[arm_index]
        device = self.target.device
        samplings = [row.sampling for row in rows]
        context = DraftContext([row.ids for row in rows], [row.index for row in rows], self.target.vocab_size)
        if self.layers:
            context.features, context.num_features = self.cached.features(context.token_ids, context.row_ids)
        seeds = torch.tensor([row.seed for row in rows], device=device)
        greedy, method, positions = all(s.greedy for s in samplings), self.options.method, None
        if method == "coupled":  # noise of (row seed, position), at every step the same
            positions = torch.tensor([len(row.ids) for row in rows], device=device)
        elif not greedy:
            seeds = step_seeds(seeds, self.num_steps)
        draft = self._draft(arm, context, samplings, DraftNoise(seeds, positions, min(4, arm.gamma)), rows)
        drafted = time.perf_counter()

        shown = draft.token_ids.tolist()
        width = draft.token_ids.shape[1]
        before = self.cached.num_read
        inputs = [row.ids + [max(i, 0) for i in ids] for row, ids in zip(rows, shown, strict=True)]
        logits = self.cached.logits(inputs, width + 1, context.row_ids)
        unread = greedy or method == "coupled"
        log_u = torch.zeros(len(rows), width, device=device) if unread else log_uniforms(seeds, width)
        processed = self._processed(logits, inputs, shown)
        result = decide(processed, draft, samplings, log_u, seeds, positions, method, workspaces=self.workspaces)
        emitted, accepted, invalid = result.token_ids.tolist(), result.num_accepted.tolist(), result.invalid.tolist()
        if self.options.logprobs:
            own = logits.float().log_softmax(-1).gather(-1, result.token_ids.clamp_min(0)[..., None])[..., 0].tolist()
        verified = time.perf_counter()

        prefilled = self.cached.num_read - before - len(rows) * (width + 1) if self.num_steps == 0 else 0
        records = []
        for i, row in enumerate(rows):
            num_draft = sum(token_id >= 0 for token_id in shown[i])
            record = self._record(row, arm_index, num_draft, accepted[i], invalid[i], emitted[i], verified)
            record.draft_seconds, record.verify_seconds = drafted - start, verified - drafted
            record.num_prefilled = prefilled
            if self.options.logprobs:
                record.logprobs = own[i][: len(record.token_ids)]
            if self.options.trace:
                record.draft_token_ids = shown[i][:num_draft]
                record.target_logprobs = result.target_logprobs[i, :num_draft].tolist()
                record.draft_logprobs = result.draft_logprobs[i, :num_draft].tolist()
                record.log_uniforms = log_u[i, :num_draft].tolist()
            records.append(record)
        if arm.drafter is not None:
            arm.drafter.commit(context, result)
        self._learn(arm_index, records, time.perf_counter() - start, told)
        seconds = time.perf_counter() - start
        for row, record in zip(rows, records, strict=True):
            record.step_seconds = seconds
            row.seconds += seconds
        return records

    def choose(self, rows):
        """The policy's next arm, and what it was told. Args: rows: that go on, as far as they have come."""
        if self.options.context is None:
            return int(self.policy.select_arm()), None
        told = self.options.context([Committed(row.ids, row.text.text, row.steps) for row in rows])
        return int(self.policy.select_arm(told)), told

    def take(self, rows, arm_index: int, record: list[list[int]], seconds: float, learns: bool = True, told=None):
        """Take up what a captured step put out; rows that had ended before are passed over.

        Args:
            rows, arm_index, seconds, told: of the step, its arm, how long it took, what the policy was told.
            record: for each row accepted, next id, first invalid position, the emitted ids, number drafted.
            learns: whether the policy learns from these seconds.
        Returns: A DecodeStep a row.
        """
        now, records = time.perf_counter(), []
        prefilled = 0 if self.num_steps else sum(len(row.ids) - 1 for row in rows)
        for row, (accepted, _, invalid, *emitted, num_draft) in zip(rows, record, strict=True):
            if row.finish_reason is None:
                records.append(self._record(row, arm_index, num_draft, accepted, invalid, emitted, now))
                records[-1].step_seconds = seconds
                records[-1].num_prefilled = prefilled
                row.seconds = now - self.start
        self._learn(arm_index, records, seconds if learns else None, told)
        return records

    def _record(self, row, arm_index, num_draft, accepted, invalid, emitted, now) -> DecodeStep:
        """What a row keeps of a step, as a record that joins its steps."""
        if invalid >= 0:
            where = f"in row {row.index} at position {len(row.ids) + invalid - 1}"
            row.error = f"the target's logits hold no law (NaN, or nothing finite) {where}"
            row.finish_reason, new = "error", []
        else:
            new = row.commit(emitted, self.eos)
            late = self.options.max_seconds is not None and now - self.start > self.options.max_seconds
            row.finish_reason = row.finish_reason or ("time" if late else None)
        arm = self.arms[arm_index]
        record = DecodeStep(
            row=row.index,
            step=self.num_steps,
            arm=arm_index,
            drafter=arm.name,
            gamma=arm.gamma if arm.drafter is not None else 0,
            num_draft_tokens=num_draft,
            num_accepted=accepted,
            token_ids=new,
            text=row.text.piece(final=row.finish_reason is not None),
            reward=0.0,
            step_seconds=0.0,
        )
        row.steps.append(record)
        return record

    def _learn(self, arm_index, records, seconds, told):
        """Rewards of a step, and the policy's lesson; seconds None: they say nothing of the arm."""
        num_rejected = sum(r.num_accepted < r.num_draft_tokens for r in records)
        drafted, accepted = sum(r.num_draft_tokens for r in records), sum(r.num_accepted for r in records)
        by_time, knows = self.options.reward == "tokens_per_second", self.num_steps and seconds is not None
        speeds = [len(record.token_ids) / seconds for record in records] if by_time and knows else []
        for i, record in enumerate(records):
            if not by_time:
                record.reward = record.accepted_fraction
            elif knows:
                record.reward = share_of_fastest(self.policy, speeds[i], speeds)
        early = self.layers and not self.num_steps  # heads cannot draft in the first step
        if not (early or (by_time and not knows)):
            feedback = Feedback(self.num_steps, drafted, accepted, num_rejected, None, told)
            self.policy.update(arm_index, fmean(r.reward for r in records), feedback)
        self.num_steps += 1

    def _draft(self, arm, context, samplings, noise, rows) -> Draft:
        """The arm's draft, cut to what each row may still emit; a row of width 0 where nothing is drafted."""
        device = self.target.device
        room = [row.end - len(row.ids) - 1 for row in rows]  # a step emits its drafts and one more
        gamma = min(arm.gamma, max(room))
        if arm.drafter is None or gamma == 0:
            return Draft(torch.empty(len(rows), 0, dtype=torch.int64, device=device))
        draft = arm.drafter.draft(context, gamma, samplings, noise)
        try:
            width = draft.token_ids.shape[-1] if isinstance(draft.token_ids, torch.Tensor) else gamma
            shape = (len(rows), min(gamma, width), context.vocab_size)
            check_draft(draft, *shape)
            if draft.logits is not None and id(arm.drafter) not in self.checked:  # reads all of q: once a drafter
                check_normalised(draft, samplings)
                self.checked.add(id(arm.drafter))
        except (ValueError, AttributeError) as error:
            raise ValueError(f"drafter {arm.name!r}, asked for at most {gamma} tokens: {error}") from error
        ids = draft.token_ids.to(device)
        if min(room) < ids.shape[1]:
            position = torch.arange(ids.shape[1], device=device)
            ids = torch.where(position < torch.tensor(room, device=device)[:, None], ids, -1)
        moved = [None if t is None else t.to(device) for t in (draft.logits, draft.logsumexp, draft.vocab_ids)]
        return Draft(ids, *moved)

    def _processed(self, logits, inputs, shown):
        """The target's logits after `logits_processor`, each position with its own prefix."""
        if self.options.logits_processor is None:
            return logits
        logits = logits.clone()
        for i, (ids, drafted) in enumerate(zip(inputs, shown, strict=True)):
            start, count = len(ids) - len(drafted), sum(token_id >= 0 for token_id in drafted)
            for j in range(count + 1):
                prefix = torch.tensor([ids[: start + j]], device=logits.device)
                logits[i, j] = self.options.logits_processor(prefix, logits[i, j : j + 1])[0]
        return logits
