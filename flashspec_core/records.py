"""What crosses rooms: settings in, one record a step out, and the text that came of it.

Plain dataclasses that import no torch. They compute nothing but their own summaries; JSON traces live here too.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PLACEHOLDER_TOKEN_ID = -1
GREEDY_TEMPERATURE = 1e-5
TRACE_FORMAT = 1


@dataclass(frozen=True)
class Sampling:
    """The law that a row's tokens are drawn from: temperature first, then top-k, top-p and min-p, in that order.

    Rule: law = softmax(filters(logits / temperature)); below temperature 1e-5 the law is 1 at the argmax (lowest id
    among equals), for target and drafter alike, and the filters change nothing.

    Args:
        temperature: at least 0, finite; 0 is greedy.
        top_p: in (0, 1]: the smallest set of most probable ids whose mass reaches top_p stays; None keeps all.
        top_k: at least 1: the k most probable ids stay; None keeps all.
        min_p: in [0, 1]: ids of at least min_p times the largest probability stay; None keeps all.
    Raises: ValueError: a value outside its range, saying the range and the value.

    >>> Sampling(temperature=0.7, top_p=0.95).greedy
    False
    >>> Sampling(temperature=-1)
    Traceback (most recent call last):
    ValueError: temperature must be a finite number >= 0 (0 is greedy), got -1
    """

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None

    def __post_init__(self):
        checks = (
            ("temperature", "a finite number >= 0 (0 is greedy)", lambda v: math.isfinite(v) and v >= 0),
            ("top_p", "in (0, 1] or None", lambda v: 0 < v <= 1),
            ("top_k", "a whole number >= 1 or None", lambda v: v >= 1 and v == int(v)),
            ("min_p", "in [0, 1] or None", lambda v: 0 <= v <= 1),
        )
        for name, wanted, holds in checks:
            value = getattr(self, name)
            if value is None and name != "temperature":
                continue
            try:
                good = not isinstance(value, bool) and holds(value)
            except (TypeError, OverflowError, ValueError):
                good = False
            if not good:
                raise ValueError(f"{name} must be {wanted}, got {value!r}")

    @property
    def greedy(self) -> bool:
        """Whether the law is the argmax: temperature below 1e-5."""
        return self.temperature < GREEDY_TEMPERATURE


@dataclass(frozen=True)
class Arm:
    """What a policy may choose: a drafter and how many tokens it drafts a step.

    Args:
        drafter: an object with `name`, `draft`, `commit` and `reset`, or None: "off", plain decoding.
        gamma: at most this many drafted tokens a step, at least 1; None takes `generate`'s gamma.
    Raises: ValueError: gamma is below 1.

    >>> Arm(None).name
    'off'
    """

    drafter: Any
    gamma: int | None = None

    def __post_init__(self):
        if self.gamma is not None:
            check_gamma(self.gamma)

    @property
    def name(self) -> str:
        """The drafter's name, or "off"."""
        return "off" if self.drafter is None else self.drafter.name


def check_gamma(gamma) -> int:
    """Return gamma if it is a whole number of at least 1.

    Args: gamma: the speculation length, tokens.
    Raises: ValueError: it is not; `fs.Arm(None)` is how to draft nothing.
    """
    if isinstance(gamma, bool) or not hasattr(gamma, "__index__") or gamma < 1:
        raise ValueError(f"gamma must be a whole number >= 1 (to draft nothing use fs.Arm(None)), got {gamma!r}")
    return int(gamma)


@dataclass
class Draft:
    """What a drafter proposes for one step.

    Args:
        token_ids: [batch, gamma] int64 target ids; -1 fills the end of a row that drafted fewer.
        logits: [batch, gamma, draft_vocab] raw logits that the ids were drawn from, or None: deterministic (one-hot).
        logsumexp: [batch, gamma] float32, kept from the draw, or None.
        vocab_ids: [draft_vocab] int64, the target ids of a trimmed vocabulary, or None: ids 0 to draft_vocab - 1.
    """

    token_ids: Any
    logits: Any = None
    logsumexp: Any = None
    vocab_ids: Any = None


@dataclass
class VerifyResult:
    """What verification decided, a row each.

    Args:
        num_accepted: [batch] int64, 0 to gamma.
        next_token_ids: [batch] int64, the recovered or bonus token.
        token_ids: [batch, gamma + 1] int64: num_accepted drafted ids, the next token, then -1.
        target_logprobs: [batch, gamma] float32, log p of the drafted ids (0 and -inf in a greedy row).
        draft_logprobs: [batch, gamma] float32, log q of the drafted ids; 0 where the rule reads none: greedy rows and
            "coupled".
        invalid: [batch] int64, the first position read whose target logits hold no law (NaN, or none finite), else -1.
        impl: what decided: "reference" or "triton".
    """

    num_accepted: Any
    next_token_ids: Any
    token_ids: Any
    target_logprobs: Any = None
    draft_logprobs: Any = None
    invalid: Any = None
    impl: str = "reference"


@dataclass
class Feedback:
    """What a policy may learn of a step beside its reward; it may arrive late.

    Args:
        step: the step's number.
        num_draft_tokens: drafted tokens, summed over rows.
        num_accepted: accepted tokens, summed over rows.
        num_rejected: rows in which a rejection was seen (positions behind it were never tested).
        rewards: the rewards of all arms, or None.
        context: the context that the arm was chosen with, or None.
    """

    step: int
    num_draft_tokens: int
    num_accepted: int
    num_rejected: int = 0
    rewards: Any = None
    context: Any = None


@dataclass
class DecodeStep:
    """One step of one row; bandit, widget, plot, benchmark row and test all read this.

    Args:
        row, step: which row of the batch, and its step, from 0.
        arm, drafter, gamma: the arm's index, its drafter's name, the arm's gamma (0 for "off").
        num_draft_tokens, num_accepted: tokens drafted for this row, and how many stood.
        token_ids: the ids emitted: accepted ones, then the recovered or bonus token, cut where the row ended.
        text: the characters that these ids completed; over all steps they concatenate to `Generation.text`.
        reward: of this row, what the policy learnt from; see generate's `reward`.
        tokens_per_second: emitted over step_seconds, of this row.
        step_seconds, draft_seconds, verify_seconds: of the whole step; verify includes the target's pass. Of a captured
            step the device's time, not told apart.
        num_prefilled: prompt tokens read in this step (its time holds the prefill), 0 after the first.
        logprobs: with `logprobs=True`, the target's own log-probability of each emitted token.
        draft_token_ids, target_logprobs, draft_logprobs, log_uniforms: with `trace=True`, one value a drafted token
            (draft_logprobs and log_uniforms are 0 where the rule reads none: greedy rows, "coupled").
    """

    row: int
    step: int
    arm: int
    drafter: str
    gamma: int
    num_draft_tokens: int
    num_accepted: int
    token_ids: list[int]
    text: str
    reward: float
    step_seconds: float
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    num_prefilled: int = 0
    logprobs: list[float] | None = None
    draft_token_ids: list[int] | None = None
    target_logprobs: list[float] | None = None
    draft_logprobs: list[float] | None = None
    log_uniforms: list[float] | None = None

    @property
    def num_tested(self) -> int:
        """Drafted tokens that were tested: those that stood, and the first that fell."""
        return self.num_accepted + (self.num_accepted < self.num_draft_tokens)

    @property
    def accepted_fraction(self) -> float:
        """Accepted over drafted tokens, 0 where nothing was drafted."""
        return self.num_accepted / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over step_seconds."""
        return len(self.token_ids) / self.step_seconds if self.step_seconds else math.inf

    @property
    def fates(self) -> list[str]:
        """One word for each emitted token: "accepted", "recovered", "bonus", or "plain" where nothing was drafted."""
        tested = "bonus" if self.num_accepted == self.num_draft_tokens else "recovered"
        last = tested if self.num_draft_tokens else "plain"
        return (["accepted"] * self.num_accepted + [last])[: len(self.token_ids)]


@dataclass
class Generation:
    """What one prompt became.

    Args:
        text: the new text, special tokens left out.
        token_ids: the new ids, the end-of-sequence id included where it ended the row.
        prompt_token_ids: the prompt's ids.
        steps: the row's DecodeSteps, in order.
        seed: the row's seed, drawn where None was asked for.
        finish_reason: "eos", "stop", "length" (max_new_tokens), "context" (the model's context is full), "time",
            or "error".
        seconds: from the first step's start to the last one's end, prefill included.
        error: what ended a row with finish_reason "error", else None.
        mode: "captured", or "eager: " and why; see generate's `capture`.

    >>> step = DecodeStep(0, 0, 0, "n-gram", 4, 4, 2, [5, 6, 7], "abc", 0.5, 0.1)
    >>> out = Generation("abc", [5, 6, 7], [1, 2], [step], 0, "length", 0.1)
    >>> out.acceptance_rate, out.accepted_fraction, step.fates
    (0.6666666666666666, 0.5, ['accepted', 'accepted', 'recovered'])
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    steps: list[DecodeStep] = field(repr=False)
    seed: int
    finish_reason: str
    seconds: float
    error: str | None = None
    mode: str = "eager"

    def save(self, path) -> None:
        """Write everything as JSON: a trace that `load` gives back equal (numbers that JSON lacks as "inf", "nan").

        Args: path: of the file; written whole or not at all.
        """
        partial = Path(path).with_name(Path(path).name + ".partial")
        values = json.loads(json.dumps(asdict(self)), parse_constant=lambda word: str(float(word)))
        text = json.dumps({"format": TRACE_FORMAT, **values}, ensure_ascii=False, allow_nan=False)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)

    @classmethod
    def load(cls, path) -> Generation:
        """Read what `save` wrote.

        Args: path: of the file.
        Raises: ValueError: it is no trace of this format.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"), object_hook=_with_floats)
            kind = values.pop("format")
            if kind != TRACE_FORMAT:
                raise ValueError(f"format {kind}")
            return cls(**{**values, "steps": [DecodeStep(**step) for step in values["steps"]]})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"expected a trace of format {TRACE_FORMAT} in {path}, got: {error}") from error

    @property
    def arms(self) -> list[int]:
        """The arm of each step: `fs.Replay(out.arms)` repeats them."""
        return [step.arm for step in self.steps]

    @property
    def tokens_per_second(self) -> float:
        """New tokens over seconds, prefill included."""
        return len(self.token_ids) / self.seconds if self.seconds else math.inf

    @property
    def logprobs(self) -> list[float] | None:
        """The target's own log-probability of each new token, where `logprobs=True` was asked for."""
        kept = [step.logprobs for step in self.steps]
        return None if None in kept else [value for values in kept for value in values]

    @property
    def tokens_per_step(self) -> float:
        """New tokens a pass of the target."""
        return len(self.token_ids) / len(self.steps) if self.steps else math.nan

    @property
    def acceptance_rate(self) -> float:
        """Chance that one tested drafted token passes: accepted / tested (behind a rejection none is tested)."""
        tested = sum(s.num_tested for s in self.steps)
        return sum(s.num_accepted for s in self.steps) / tested if tested else math.nan

    @property
    def accepted_fraction(self) -> float:
        """Accepted over drafted tokens; smaller than `acceptance_rate` wherever gamma is above 1."""
        drafted = sum(s.num_draft_tokens for s in self.steps)
        return sum(s.num_accepted for s in self.steps) / drafted if drafted else math.nan


_NUMBER_LISTS = ("target_logprobs", "draft_logprobs", "log_uniforms", "logprobs")


def _with_floats(record):
    """Words of `save` back to floats, where numbers stand."""
    for name in _NUMBER_LISTS:
        if record.get(name) is not None:
            record[name] = [float(v) for v in record[name]]
    return record
