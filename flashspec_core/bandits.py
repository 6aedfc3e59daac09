"""Choose what drafts next: policies over arms, numpy only.

A policy sees what was fixed before a round's draws and never this round's drafts or logits, because none is passed: the
hypothesis of exactness is the signature. It leaves out simulation and bounds (lab/regret.py).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Policy(Protocol):
    """What the engine needs of a policy; one that inherits from it learns nothing unless it says how."""

    num_arms: int

    def select_arm(self, context=None) -> int:
        """The arm of the next round; `context` is computed from committed tokens only."""

    def update(self, arm, reward, feedback=None) -> None:
        """Learn that `arm` paid `reward` in [0, 1]; `feedback` is a records.Feedback or None. It may come late."""


class _Counting:
    """Pulls and reward sums of each arm, arrays of shape [*shape, num_arms]; arms not yet tried go first, in order."""

    def __init__(self, num_arms: int, seed: int | None = 0, shape: tuple[int, ...] = ()):
        if num_arms < 1:
            raise ValueError(f"num_arms must be at least 1, got {num_arms}")
        self.num_arms, self.shape = int(num_arms), tuple(shape)
        self.rng = np.random.default_rng(seed)  # the policy's own: never the sampler's
        self.pulls = np.zeros((*self.shape, self.num_arms))
        self.reward_sums = np.zeros((*self.shape, self.num_arms))

    def index(self):
        raise NotImplementedError

    def select_arm(self, context=None):
        """The arm with the largest index, lowest one among equals.

        Args: context: not used.
        Returns: int, or an int array of `shape`.
        """
        best = self.index().argmax(-1)
        return best if self.shape else int(best)

    def update(self, arm, reward, feedback=None) -> None:
        """Count one round.

        Args:
            arm: int, or an int array of `shape`.
            reward: in [0, 1], same shape.
            feedback: not used.
        Raises: ValueError: a reward outside [0, 1].
        """
        reward = np.asarray(reward, dtype=float)
        if not ((reward >= 0) & (reward <= 1)).all():
            raise ValueError(f"a reward must lie in [0, 1], got {reward.tolist()}")
        if not self.shape:  # the engine's case: plain indexing
            self.pulls[arm] += 1
            self.reward_sums[arm] += reward
            return
        played = np.asarray(arm)[..., None] == np.arange(self.num_arms)
        self.pulls += played
        self.reward_sums += played * reward[..., None]


class UCB1(_Counting):
    """Optimism: play the arm whose mean could still be highest.

    Rule: index = s/n + sqrt(2 ln t / n), with n pulls, s reward sum, t rounds completed; an arm with n = 0 goes first.

    Args:
        num_arms: K.
        seed: kept for a common signature; UCB1 draws nothing.
        shape: leading dimensions of the state: one engine (), or many simulated runs.
    Source: Auer, Cesa-Bianchi, Fischer 2002, figure 1.

    >>> policy = UCB1(num_arms=2)
    >>> for reward in (0.0, 1.0): policy.update(policy.select_arm(), reward)
    >>> policy.select_arm(), policy.index().round(3).tolist()
    (1, [1.177, 2.177])
    """

    def index(self):
        """[*shape, num_arms]: the upper confidence bounds, infinite for an arm not yet tried."""
        with np.errstate(divide="ignore", invalid="ignore"):
            t = self.pulls.sum(-1, keepdims=True)
            bound = self.reward_sums / self.pulls + np.sqrt(2 * np.log(t) / self.pulls)
        return np.where(self.pulls == 0, np.inf, bound)


class ThompsonSampling(_Counting):
    """Probability matching: play the arm whose posterior draw is largest.

    Rule: draw from Beta(1 + S, 1 + F); S += reward, F += 1 - reward.

    Args:
        num_arms: K.
        seed: of the policy's own generator.
        shape: leading dimensions of the state.
    Source: Thompson 1933; Agrawal and Goyal 2012, algorithm 2 (rewards in [0, 1] taken as fractions).

    >>> policy = ThompsonSampling(num_arms=2, seed=0)
    >>> for _ in range(50): policy.update(0, 0.1); policy.update(1, 0.9)
    >>> policy.select_arm()
    1
    """

    def index(self):
        """[*shape, num_arms]: one posterior draw an arm."""
        return self.rng.beta(1 + self.reward_sums, 1 + self.pulls - self.reward_sums)


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

    def select_arm(self, context=None) -> int:
        """The next arm. Args: context: not used."""
        if self.position >= len(self.arms):
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
