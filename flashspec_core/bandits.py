"""Choose what drafts next: policies over arms, numpy only.

A policy sees what was fixed before a round's draws and never this round's drafts or logits, because none is passed: the
hypothesis of exactness is the signature. It leaves out policies that learn nothing (policies.py) and simulation.
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

    def rescale(self, factor: float) -> None:
        """Put what was learnt on a new scale: past rewards are multiplied by `factor`."""


class _Counting:
    """Pulls and reward sums of each arm, arrays of shape [*shape, num_arms].

    Each round a policy may forget: all that was counted is multiplied by `discount`. Feedback that comes late counts as
    a round when it comes, so d rounds late it leaves the state that timely feedback left d rounds ago.
    """

    discount = 1.0

    def __init__(self, num_arms: int, seed: int | None = 0, shape: tuple[int, ...] = ()):
        if isinstance(num_arms, bool) or not hasattr(num_arms, "__index__") or num_arms < 1:
            raise ValueError(f"num_arms must be a whole number >= 1, got {num_arms!r}")
        self.num_arms, self.shape = int(num_arms), tuple(shape)
        self.seed, self.rng = seed, np.random.default_rng(seed)  # the policy's own: never the sampler's
        self.pulls = np.zeros((*self.shape, self.num_arms))
        self.reward_sums = np.zeros((*self.shape, self.num_arms))
        self.num_rounds = 0  # with feedback

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
            feedback: a records.Feedback, or None.
        Raises: ValueError: a reward outside [0, 1], an arm outside 0..num_arms - 1.
        """
        reward, arm = np.asarray(reward, dtype=float), np.asarray(arm)
        if not ((reward >= 0) & (reward <= 1)).all():
            raise ValueError(f"a reward must lie in [0, 1], got {reward.tolist()}")
        if not ((arm >= 0) & (arm < self.num_arms)).all():
            raise ValueError(f"an arm must lie in 0..{self.num_arms - 1}, got {arm.tolist()}")
        self.num_rounds += 1
        if self.discount < 1:
            self.pulls *= self.discount
            self.reward_sums *= self.discount
        self._count(arm, reward, feedback)

    def rescale(self, factor: float) -> None:
        """Put what was learnt on a new scale. Args: factor: that past rewards are multiplied by."""
        self.reward_sums *= factor

    def _count(self, arm, reward, feedback, weight=1.0) -> None:
        if not self.shape:  # the engine's case: plain indexing
            self.pulls[arm] += weight
            self.reward_sums[arm] += weight * reward
            return
        played = weight * (arm[..., None] == np.arange(self.num_arms))
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
    >>> policy.index().round(3).tolist(), policy.select_arm()
    ([1.177, 2.177], 1)
    """

    def __init__(self, num_arms: int, seed: int | None = 0, shape: tuple[int, ...] = ()):
        super().__init__(num_arms, seed, shape)
        self.chosen = np.zeros_like(self.pulls)  # with what has no feedback yet

    @property
    def rounds(self):
        """t: rounds played, feedback outstanding or not."""
        return max(self.num_rounds, self.chosen.reshape(-1, self.num_arms)[0].sum())

    def index(self):
        """[*shape, num_arms]: the upper confidence bounds, infinite for an arm not yet tried."""
        return self._bound(2.0, self.rounds)

    def select_arm(self, context=None):
        """The arm with the largest index, lowest one among equals; of untried arms the one chosen least often.

        Args: context: not used.
        Returns: int, or an int array of `shape`.
        """
        index = self.index()
        untried = np.isinf(index)
        if untried.any():
            index = np.where(untried.any(-1, keepdims=True), np.where(untried, -self.chosen, -np.inf), index)
        best = index.argmax(-1)
        self.chosen += best[..., None] == np.arange(self.num_arms)
        return best if self.shape else int(best)

    def _bound(self, xi, t):
        with np.errstate(divide="ignore", invalid="ignore"):
            bound = self.reward_sums / self.pulls + np.sqrt(xi * np.log(t) / self.pulls)
        return np.where(self.pulls < 1e-6, np.inf, bound)


class SlidingWindowUCB(UCB1):
    """UCB over the last rounds only, so that what was learnt before a change is forgotten.

    Rule: index = s/n + sqrt(xi ln min(t, window) / n), n and s over the last `window` rounds of the whole run (a window
    of each arm's own would never age an arm that is not pulled).

    Args:
        num_arms, seed, shape: see UCB1.
        window: rounds.
        xi: width of the bound; 0.5 unless you have a reason.
    Raises: ValueError: a window below 1.
    Source: Garivier and Moulines 2011, section 3.2.

    >>> policy = SlidingWindowUCB(2, window=2)
    >>> for arm, reward in ((0, 1.0), (1, 0.0), (1, 0.0)): policy.update(arm, reward)
    >>> policy.pulls.tolist(), policy.select_arm()
    ([0.0, 2.0], 0)
    """

    def __init__(self, num_arms: int, seed=0, shape=(), window: int = 2000, xi: float = 0.5):
        super().__init__(num_arms, seed, shape)
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self.window, self.xi = int(window), xi
        self.recent = np.full((self.window, *self.shape), -1)  # the arm of each round, -1: none
        self.recent_rewards = np.zeros((self.window, *self.shape))

    def index(self):
        """[*shape, num_arms]: the upper confidence bounds, infinite for an arm not in the window."""
        return self._bound(self.xi, min(self.rounds, self.window))

    def _count(self, arm, reward, feedback):
        slot = (self.num_rounds - 1) % self.window
        leaves = self.recent[slot][..., None] == np.arange(self.num_arms)  # the round that the window loses
        self.pulls -= leaves
        self.reward_sums -= leaves * self.recent_rewards[slot][..., None]
        super()._count(arm, reward, feedback)
        self.recent[slot], self.recent_rewards[slot] = arm, reward

    def rescale(self, factor: float) -> None:
        """Put what was learnt on a new scale. Args: factor: that past rewards are multiplied by."""
        super().rescale(factor)
        self.recent_rewards *= factor


class DiscountedUCB(UCB1):
    """UCB whose memory fades.

    Rule: each round every n and s is multiplied by `discount`, then the played arm adds (1, reward); index = s/n +
    sqrt(xi ln N / n) with N the sum of all n; an arm with n below 1e-6 goes first.

    Args:
        num_arms, seed, shape: see UCB1.
        discount: in (0, 1].
        xi: width of the bound.
    Raises: ValueError: a discount outside (0, 1].
    Source: Garivier and Moulines 2011, section 3.1.

    >>> policy = DiscountedUCB(2, discount=0.5)
    >>> for arm in (0, 1): policy.update(arm, 1.0)
    >>> policy.pulls.tolist()
    [0.5, 1.0]
    """

    def __init__(self, num_arms: int, seed=0, shape=(), discount: float = 0.998, xi: float = 0.5):
        super().__init__(num_arms, seed, shape)
        self.discount, self.xi = _checked(discount), xi

    def index(self):
        """[*shape, num_arms]: the upper confidence bounds."""
        return self._bound(self.xi, np.maximum(self.pulls.sum(-1, keepdims=True), 1.0))


class ThompsonSampling(_Counting):
    """Probability matching: play the arm whose posterior draw is largest.

    Rule: draw from Beta(1 + S, 1 + F); S += reward, F += 1 - reward. With `tokens` the posterior is of the chance that
    one drafted token passes: S += accepted tokens, F += rejections seen; tokens behind a rejection were never tested.

    Args:
        num_arms: K.
        seed: of the policy's own generator.
        shape: leading dimensions of the state.
        tokens: learn from `feedback.num_accepted` and `num_rejected` instead of the reward.
    Source: Thompson 1933; Agrawal and Goyal 2012, algorithm 2 (rewards in [0, 1] taken as fractions).

    >>> policy = ThompsonSampling(num_arms=2, seed=0)
    >>> for _ in range(50): policy.update(0, 0.1); policy.update(1, 0.9)
    >>> policy.select_arm()
    1
    """

    def __init__(self, num_arms: int, seed=0, shape=(), tokens: bool = False):
        super().__init__(num_arms, seed, shape)
        self.tokens = tokens

    def index(self):
        """[*shape, num_arms]: one posterior draw an arm."""
        return self.rng.beta(1 + self.reward_sums, 1 + self.pulls - self.reward_sums)

    def rescale(self, factor: float) -> None:
        """Put what was learnt on a new scale. Args: factor: of past rewards; accepted tokens have no scale."""
        if not self.tokens:
            super().rescale(factor)

    def _count(self, arm, reward, feedback):
        if not self.tokens:
            super()._count(arm, reward, feedback)
        elif tested := feedback.num_accepted + feedback.num_rejected:
            super()._count(arm, np.asarray(feedback.num_accepted / tested), feedback, tested)


class DiscountedThompson(ThompsonSampling):
    """Thompson sampling whose memory fades; undiscounted, it hardly notices a change.

    Rule: each round every arm's S and F are multiplied by `discount`, then the played arm adds; the prior's ones stay.

    Args:
        num_arms, seed, shape, tokens: see ThompsonSampling.
        discount: in (0, 1].
    Raises: ValueError: a discount outside (0, 1].
    Source: Raj and Kalyani 2017.

    >>> policy = DiscountedThompson(2, discount=0.5)
    >>> for reward in (1.0, 0.0): policy.update(0, reward)
    >>> policy.reward_sums.tolist(), policy.pulls.tolist()
    ([0.5, 0.0], [1.5, 0.0])
    """

    def __init__(self, num_arms: int, seed=0, shape=(), discount: float = 0.998, tokens: bool = False):
        super().__init__(num_arms, seed, shape, tokens)
        self.discount = _checked(discount)


class FullInformation(_Counting):
    """Follow the discounted leader, for when every arm was scored: nothing has to be explored.

    Rule: each round every n and s is multiplied by `discount`, then each arm that was scored adds (1, its reward); play
    the largest s/n, at random among equals.

    Args:
        num_arms, seed, shape: see ThompsonSampling.
        discount: in (0, 1].
    Raises: ValueError: a discount outside (0, 1]; at an update, rewards of another shape or outside [0, 1].
    Source: Hedge-like learning from all arms, as in "Not a Bandit" (arXiv 2510.20064); here follow-the-leader.

    >>> from flashspec_core.records import Feedback
    >>> policy = FullInformation(2)
    >>> policy.update(0, 0.1, Feedback(0, 0, 0, rewards=[0.1, 0.9]))
    >>> policy.select_arm()
    1
    """

    def __init__(self, num_arms: int, seed=0, shape=(), discount: float = 0.99):
        super().__init__(num_arms, seed, shape)
        self.discount = _checked(discount)

    def index(self):
        """[*shape, num_arms]: discounted means, infinite for an arm that was never scored."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.pulls < 1e-6, np.inf, self.reward_sums / self.pulls)

    def select_arm(self, context=None):
        """The leader. Args: context: not used."""
        index = self.index()
        leads = index == index.max(-1, keepdims=True)
        best = np.where(leads, self.rng.random(index.shape), -1.0).argmax(-1)
        return best if self.shape else int(best)

    def _count(self, arm, reward, feedback):
        rewards = getattr(feedback, "rewards", None)
        if rewards is None:  # only the played arm was scored
            return super()._count(arm, reward, feedback)
        rewards = np.array(rewards, dtype=float)  # None becomes NaN
        scored = ~np.isnan(rewards)
        if rewards.shape != self.pulls.shape or not ((rewards >= 0) & (rewards <= 1) | ~scored).all():
            wanted = f"feedback.rewards in [0, 1] of shape {self.pulls.shape} (NaN or None: not scored)"
            raise ValueError(f"expected {wanted}, got {rewards.tolist()}")
        self.pulls += scored
        self.reward_sums += np.where(scored, rewards, 0.0)


def share_of_fastest(policy, speed: float, speeds=()) -> float:
    """A speed as a reward: its share of the fastest that a policy has seen, kept with it as `fastest`.

    Rule: when a faster one comes, what was learnt before is put on the new scale, or arms that were not played lately
    would look better than they are.

    Args: policy: any, with `rescale` or without; speed: tokens a second; speeds: others of the same step.
    """
    old = getattr(policy, "fastest", 0.0)
    fastest = max(old, speed, *speeds)
    if fastest > old:
        policy.fastest = fastest
        if old and hasattr(policy, "rescale"):
            policy.rescale(old / fastest)
    return speed / fastest if fastest else 0.0


def _checked(discount):
    if not 0 < discount <= 1:
        raise ValueError(f"discount must lie in (0, 1], got {discount}")
    return float(discount)
