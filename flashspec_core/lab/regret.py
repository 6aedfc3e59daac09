"""Bandits without a model: worlds whose rewards change, many seeds at once, regret, recovery, and proven bounds.

A round's regret is the best mean of that round less the played arm's. It leaves out the policies (bandits.py).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from flashspec_core.records import Feedback


@dataclass(frozen=True)
class Environment:
    """A world of arms.

    Args:
        means: [horizon, num_arms] mean reward of each arm in each round, in [0, 1].
        fixed: rewards are the means themselves, as in a log; else they are drawn, 0 or 1.
        changes: rounds at which something changed.
    """

    means: np.ndarray
    fixed: bool = False
    changes: tuple[int, ...] = ()

    @property
    def horizon(self) -> int:
        """T, rounds."""
        return len(self.means)

    @property
    def num_arms(self) -> int:
        """K."""
        return self.means.shape[1]


def stationary(means, horizon: int) -> Environment:
    """Bernoulli arms that never change.

    Args: means, horizon: of each arm; rounds.

    >>> stationary([0.3, 0.7], 5).means.shape
    (5, 2)
    """
    return Environment(np.tile(np.asarray(means, dtype=float), (horizon, 1)))


def change_points(segments, horizon: int) -> Environment:
    """Segments of equal length, one behind the other; the i-th begins at floor(i T / number of segments).

    Args:
        segments: list of means, one of each arm.
        horizon: T.

    >>> change_points([[1, 0], [0, 1]], 4).means[:, 0].tolist()
    [1.0, 1.0, 0.0, 0.0]
    """
    segments = np.asarray(segments, dtype=float)
    starts = [i * horizon // len(segments) for i in range(len(segments))]
    which = np.searchsorted(starts, np.arange(horizon), side="right") - 1
    return Environment(segments[which], changes=tuple(starts[1:]))


def drift(start, end, horizon: int) -> Environment:
    """Means that move in a straight line.

    Args: start, end, horizon: means of the first and last round; T.
    """
    share = np.linspace(0, 1, horizon)[:, None]
    return Environment((1 - share) * np.asarray(start, dtype=float) + share * np.asarray(end, dtype=float))


def replay(rewards) -> Environment:
    """A log in which every arm was scored in every round.

    Args: rewards: [horizon, num_arms] in [0, 1].
    """
    return Environment(np.asarray(rewards, dtype=float), fixed=True)


@dataclass(frozen=True)
class Simulation:
    """What a policy did in an environment.

    Args:
        environment: the world.
        arms: [horizon, num_seeds] the played arms.
    """

    environment: Environment
    arms: np.ndarray

    @property
    def regret(self):
        """[horizon, num_seeds]: dynamic pseudo-regret so far, against each round's best arm."""
        return np.cumsum(self.environment.means.max(1)[:, None] - self._played(), axis=0)

    @property
    def static_regret(self):
        """[horizon, num_seeds]: pseudo-regret so far, against the arm that is best over the whole run."""
        best = self.environment.means.sum(0).argmax()
        return np.cumsum(self.environment.means[:, best, None] - self._played(), axis=0)

    def _played(self):
        return np.take_along_axis(self.environment.means, self.arms, axis=1)

    def recovery(self, change: int, window: int = 100, share: float = 0.8):
        """Rounds from a change until the new best arm filled a share of the last rounds.

        Args: change, window, share: the round of the change; how many last rounds; how much of them.
        Returns: [num_seeds], infinite where it never did.
        """
        best = self.environment.means.argmax(1)[:, None] == self.arms
        sums = np.cumsum(best[change:], axis=0)
        sums[window:] -= sums[:-window].copy()
        good = sums[window - 1 :] >= share * window
        return np.where(good.any(0), good.argmax(0) + window, np.inf)


def simulate(policy, environment: Environment, rng, delay: int = 0, every_arm: bool = False) -> Simulation:
    """Play a policy through an environment, all its seeds at once.

    Args:
        policy: of shape (num_seeds,), or () for one run.
        environment: the world.
        rng: numpy Generator of the rewards: one number a round and seed (one an arm where every arm is scored).
        delay: feedback of a round comes this many rounds later.
        every_arm: each round's feedback holds the rewards of all arms.
    Returns: Simulation.
    Cost: ten array operations of num_seeds x num_arms a round.
    """
    shape, means = policy.shape, environment.means
    arms = np.empty((environment.horizon, math.prod(shape)), dtype=np.int64)
    waiting: deque = deque()
    for t in range(environment.horizon):
        arm = policy.select_arm()
        arms[t] = arm
        if environment.fixed:
            every = np.broadcast_to(means[t], (*shape, environment.num_arms))
        elif every_arm:
            every = (rng.random((*shape, environment.num_arms)) < means[t]).astype(float)
        if environment.fixed or every_arm:
            reward = np.take_along_axis(every, np.asarray(arm)[..., None], -1)[..., 0]
        else:
            reward = rng.random(shape or None) < means[t][arm]
        waiting.append((arm, reward, Feedback(t, 0, 0, rewards=every) if every_arm else None))
        if len(waiting) > delay:
            policy.update(*waiting.popleft())
    return Simulation(environment, arms)


def order(num_arms: int, horizon: int) -> float:
    """sqrt(K T ln T): how worst-case regret grows; an order, with a constant left out, and no bound.

    >>> round(order(3, 10_000))
    526
    """
    return math.sqrt(num_arms * horizon * math.log(horizon))


def _gaps(means):
    gaps = np.max(means) - np.asarray(means, dtype=float)
    return gaps[gaps > 0]


def auer_bound(means, horizon: int) -> float:
    """Proven for UCB1: sum of 8 ln T / gap + (1 + pi^2 / 3) times the sum of gaps.

    Args: means, horizon: of each arm; T.
    Source: Auer, Cesa-Bianchi, Fischer 2002, theorem 1.

    >>> round(auer_bound([0.3, 0.7, 0.5], 10_000))
    555
    """
    gaps = _gaps(means)
    return float((8 * math.log(horizon) / gaps).sum() + (1 + math.pi**2 / 3) * gaps.sum())


def gap_free_bound(means, horizon: int) -> float:
    """Proven for UCB1 whatever the gaps are: 2 sqrt(8 K T ln T) + (1 + pi^2 / 3) times the sum of gaps.

    Args: means, horizon: of each arm; T.
    Source: from theorem 1 by splitting arms at a gap of sqrt(8 K ln T / T).

    >>> round(gap_free_bound([0.3, 0.7, 0.5], 10_000))
    2976
    """
    k = len(means)
    return 2 * math.sqrt(8 * k * horizon * math.log(horizon)) + (1 + math.pi**2 / 3) * float(_gaps(means).sum())


def lai_robbins(means, horizon: int) -> float:
    """The rate that no consistent policy beats in the long run: sum of gap / KL(mean, best) times ln T.

    Asymptotic: a finite run may lie below it.

    Args: means, horizon: of each Bernoulli arm; T.
    Source: Lai and Robbins 1985.

    >>> round(lai_robbins([0.3, 0.7, 0.5], 10_000), 1)
    32.0
    """
    best, rate = max(means), 0.0
    for mean in means:
        if mean < best:
            parts = ((mean, best), (1 - mean, 1 - best))
            divergence = sum(a * math.log(a / b) for a, b in parts if a > 0)
            rate += (best - mean) / divergence
    return rate * math.log(horizon)
