"""Policies that learn nothing themselves (an arm, a log, an oracle, one bandit a context), and any policy as JSON.

They choose under the same rule as bandits.py: from what is past, never from this round's drafts. No index lives here.
"""

from __future__ import annotations

import copy
import dataclasses
import json

import numpy as np

from flashspec_core.bandits import (
    UCB1,
    DiscountedThompson,
    DiscountedUCB,
    FullInformation,
    Policy,
    SlidingWindowUCB,
    ThompsonSampling,
)


class Contextual(Policy):
    """One policy a context: what pays inside code need not pay in prose.

    Rule: `context` (a few values, of committed tokens only) names a bucket; each bucket learns for itself.

    Args: policy: copied for each new context, with a random generator of its own.

    >>> from flashspec_core.records import Feedback
    >>> policy = Contextual(UCB1(2))
    >>> for context in ("prose", "code"): policy.update(0, 1.0, Feedback(0, 0, 0, context=context))
    >>> policy.select_arm("code"), sorted(policy.policies)
    (1, ['code', 'prose'])
    """

    def __init__(self, policy):
        self.policy, self.policies, self.num_arms = policy, {}, policy.num_arms

    def _of(self, context):
        key = str(context)
        if key not in self.policies:
            self.policies[key] = copy.deepcopy(self.policy)
            if getattr(self.policy, "seed", None) is not None:
                self.policies[key].rng = np.random.default_rng([self.policy.seed, len(self.policies)])
        return self.policies[key]

    def select_arm(self, context=None):
        """The arm that the context's own policy plays. Args: context: printed, it names the bucket."""
        return self._of(context).select_arm()

    def rescale(self, factor: float) -> None:
        """Put what was learnt on a new scale. Args: factor: that past rewards are multiplied by."""
        for policy in self.policies.values():
            policy.rescale(factor)

    def update(self, arm, reward, feedback=None) -> None:
        """Teach the policy of `feedback.context`. Args: arm, reward, feedback: see Policy."""
        self._of(getattr(feedback, "context", None)).update(arm, reward)


class Restarting(Policy):
    """Forgets all at once when an arm no longer pays what it did: for worlds that change at points.

    Rule: where the mean of an arm's last `window` rewards differs by more than `threshold` from that of its earlier
    ones, as many at least, a copy of the untaught policy takes over.

    Args: policy: untaught; window: rewards; threshold: in rewards.

    >>> policy = Restarting(UCB1(2), window=4, threshold=0.5)
    >>> for reward in [1.0] * 4 + [0.0] * 3: policy.update(0, reward)
    >>> policy.num_restarts, policy.update(0, 0.0), policy.num_restarts, policy.policy.num_rounds
    (0, None, 1, 0)
    """

    def __init__(self, policy, window: int = 16, threshold: float = 0.2):
        self.first, self.window, self.threshold = policy, window, threshold
        self.num_arms, self.num_restarts = policy.num_arms, -1
        self._start()

    def _start(self):
        self.policy, self.late = copy.deepcopy(self.first), [[] for _ in range(self.num_arms)]
        self.early = [[0, 0.0] for _ in range(self.num_arms)]  # of what lies behind the last ones: count and sum
        self.num_restarts += 1

    def select_arm(self, context=None) -> int:
        """The policy's arm. Args: context: passed on."""
        return self.policy.select_arm(context)

    def rescale(self, factor: float) -> None:
        """Put what was learnt on a new scale. Args: factor: that past rewards are multiplied by."""
        self.policy.rescale(factor)
        self.late = [[factor * reward for reward in rewards] for rewards in self.late]
        self.early = [[count, factor * total] for count, total in self.early]

    def update(self, arm, reward, feedback=None) -> None:
        """Teach the policy, and look whether to start anew. Args: arm, reward, feedback: see Policy."""
        self.policy.update(arm, reward, feedback)
        late, early = self.late[arm], self.early[arm]
        late.append(float(reward))
        if len(late) > self.window:
            early[0], early[1] = early[0] + 1, early[1] + late.pop(0)
        if early[0] >= self.window and abs(sum(late) / self.window - early[1] / early[0]) > self.threshold:
            self._start()


class Preferring(Policy):
    """One arm wherever the context speaks for it, another policy's choice among the others elsewhere.

    Rule: a lookup that finds something is nearly free, so when to ask it need not be learnt; which of the dear drafters
    to ask is. The context is (whether it speaks for the arm, what the other policy is told).

    Args: arm: the preferred; policy: over the other arms, in their order.

    >>> from flashspec_core.records import Feedback
    >>> policy = Preferring(1, UCB1(2))
    >>> policy.update(0, 1.0, Feedback(0, 0, 0, context=(False, None)))
    >>> policy.select_arm((True, None)), policy.select_arm((False, None)), policy.num_arms
    (1, 2, 3)
    """

    def __init__(self, arm: int, policy):
        self.arm, self.policy, self.num_arms = arm, policy, policy.num_arms + 1

    def select_arm(self, context=None) -> int:
        """The preferred arm, or the policy's. Args: context: a pair, see above; None speaks for nothing."""
        speaks, told = context or (False, None)
        if speaks:
            return self.arm
        arm = self.policy.select_arm(told)
        return arm + (arm >= self.arm)

    def rescale(self, factor: float) -> None:
        """Put what was learnt on a new scale. Args: factor: that past rewards are multiplied by."""
        self.policy.rescale(factor)

    def update(self, arm, reward, feedback=None) -> None:
        """Teach the policy of the other arms. Args: arm, reward, feedback: see Policy."""
        if arm != self.arm:
            if feedback is not None and feedback.context:
                feedback = dataclasses.replace(feedback, context=feedback.context[1])
            self.policy.update(arm - (arm > self.arm), reward, feedback)


class Oracle(Policy):
    """Knows each round's best arm: what regret is measured against.

    Args: means: [horizon, num_arms] mean rewards of each round.

    >>> policy = Oracle([[0.1, 0.9], [0.8, 0.2]])
    >>> policy.select_arm(), policy.select_arm()
    (1, 0)
    """

    def __init__(self, means):
        self.means, self.position = np.asarray(means, dtype=float), 0
        self.num_arms = self.means.shape[-1]

    def select_arm(self, context=None) -> int:
        """The best arm of the next round; the last round's from then on. Args: context: not used."""
        row = self.means[min(self.position, len(self.means) - 1)]
        self.position += 1
        return int(row.argmax())


class Replay(Policy):
    """The arms of an earlier run, in order: with the same seeds it repeats that run exactly.

    Args: arms: an arm a step, as `Generation.arms` gives them (of a batch: those of the row that took longest).
    Raises: ValueError: asked for more steps than there are arms.

    >>> policy = Replay([2, 0])
    >>> policy.select_arm(), policy.select_arm()
    (2, 0)
    """

    num_arms = None

    def __init__(self, arms):
        self.arms, self.position = [int(arm) for arm in arms], 0

    @property
    def left(self) -> int:
        """Steps that it still has arms for: captured steps are not sent ahead beyond them."""
        return len(self.arms) - self.position

    def select_arm(self, context=None) -> int:
        """The next arm. Args: context: not used."""
        if not self.left:
            raise ValueError(f"Replay holds {len(self.arms)} arms, and one more step was asked for")
        self.position += 1
        return self.arms[self.position - 1]


class FixedArm(Policy):
    """Always the same arm.

    Args:
        arm: its index.
        num_arms: K, or None: any number above `arm`.

    >>> FixedArm(2).select_arm()
    2
    """

    def __init__(self, arm: int, num_arms: int | None = None):
        if arm < 0 or (num_arms is not None and arm >= num_arms):
            raise ValueError(f"arm must lie in 0..{'num_arms - 1' if num_arms is None else num_arms - 1}, got {arm}")
        self.arm, self.num_arms = arm, num_arms

    def select_arm(self, context=None) -> int:
        """The arm. Args: context: not used."""
        return self.arm


_KINDS = (
    UCB1, SlidingWindowUCB, DiscountedUCB, ThompsonSampling, DiscountedThompson, FullInformation, Contextual,
    Preferring, Restarting, Oracle, Replay, FixedArm,
)  # fmt: skip


def policy_to_json(policy) -> str:
    """A policy's whole state, its random generator included.

    Args: policy: one of this module's.
    Returns: JSON that `policy_from_json` turns into an equal policy, to the last bit.

    >>> policy = ThompsonSampling(3, seed=5)
    >>> again = policy_from_json(policy_to_json(policy))
    >>> [policy.select_arm() for _ in range(5)] == [again.select_arm() for _ in range(5)]
    True
    """
    return json.dumps(_plain(policy))


def policy_from_json(text: str):
    """The policy that `policy_to_json` wrote.

    Args: text: its JSON.
    Raises: ValueError: it is no such text.
    """
    try:
        return _object(json.loads(text))
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"expected the JSON of a policy, got {text[:60]!r} ({error})") from error


def _plain(value):
    if isinstance(value, _KINDS):
        return {"policy": type(value).__name__, "state": {k: _plain(v) for k, v in vars(value).items()}}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": str(value.dtype), "shape": value.shape}
    if isinstance(value, np.random.Generator):
        return {"generator": value.bit_generator.state}
    if isinstance(value, dict):
        return {"items": [[k, _plain(v)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": list(value)}
    return value


def _object(value):
    if not isinstance(value, dict):
        return value
    if "policy" in value:
        kind = {k.__name__: k for k in _KINDS}[value["policy"]]
        policy = kind.__new__(kind)
        vars(policy).update({k: _object(v) for k, v in value["state"].items()})
        return policy
    if "array" in value:
        return np.array(value["array"], dtype=value["dtype"]).reshape(value["shape"])
    if "generator" in value:
        generator = np.random.default_rng(0)
        generator.bit_generator.state = value["generator"]
        return generator
    return {k: _object(v) for k, v in value["items"]} if "items" in value else tuple(value["tuple"])
