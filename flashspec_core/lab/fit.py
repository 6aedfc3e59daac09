"""Goodness of fit of counted ids: chi-square with merged cells, Kolmogorov and Smirnov's distance, and their power.

What is counted stands in gates.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy import stats

ALPHA, SAMPLES = 0.01, 10_000  # the seed's hard gate


@dataclass
class Finding:
    """What one gate says of one setting.

    Args:
        gate, setting: which test, and where.
        value, limit: KS distance and its largest allowed, or p-value and its smallest, or faults and 0.
        red: whether the gate fell.
        alpha: the level of a test.
        counts, law: what was counted in each cell, and the cells' true probabilities, where the gate counts.
    """

    gate: str
    setting: str
    value: float
    limit: float
    red: bool
    alpha: float = 0.0
    counts: np.ndarray | None = field(default=None, repr=False)
    law: np.ndarray | None = field(default=None, repr=False)


def chi_square_p(counts, law):
    """p-value of counts against a law; cells that expect fewer than 5 are merged into one.

    Args:
        counts: [..., cells], the same total in each trial.
        law: [cells], scaled to sum to 1.
    Returns: [...] p-values; 0 at once where an id of probability 0 came out.
    """
    counts, law = np.asarray(counts, dtype=float), np.asarray(law, dtype=float)
    expected = law / max(law.sum(), 1e-300) * counts.sum(-1).flat[0]
    rare = expected < 5
    for i in np.argsort(expected):  # the merged cell itself must expect 5
        if rare.any() and expected[rare].sum() < 5:
            rare[i] = True
    merged = np.concatenate([counts[..., ~rare], counts[..., rare].sum(-1, keepdims=True)], axis=-1)
    expected = np.append(expected[~rare], expected[rare].sum())
    used = expected > 0
    statistic = ((merged[..., used] - expected[used]) ** 2 / expected[used]).sum(-1)
    return np.where(counts[..., law == 0].any(-1), 0.0, stats.chi2.sf(statistic, max(used.sum() - 1, 1)))


def ks_distance(counts, law):
    """Kolmogorov and Smirnov's distance: the largest gap between the two cumulative distributions, ids in order.

    Args: counts, law: [..., vocab] and [vocab].
    Returns: [...].
    """
    counts = np.asarray(counts, dtype=float)
    return np.abs((counts / counts.sum(-1, keepdims=True) - law).cumsum(-1)).max(-1)


def ks_limit(num_samples: int, alpha: float = ALPHA) -> float:
    """The distance that the seed's gate allows: .01626 at 10,000 samples. Args: num_samples, alpha: of the test."""
    return float(stats.kstwo.ppf(1 - alpha, num_samples))


def judge(gate: str, setting: str, counts, law, alpha: float = ALPHA) -> Finding:
    """A Finding from counts: by KS where the gate's name begins so, else by chi-square.

    Args: gate, setting, counts, law, alpha: see Finding.
    """
    counts, law = np.ravel(counts), np.ravel(law)
    value, limit, red = _decide(gate, counts, law, alpha)
    return Finding(gate, setting, float(value), limit, bool(red), alpha, counts, law)


def _decide(gate, counts, law, alpha):
    """Statistic, limit and whether the gate falls, of one trial or of many."""
    if gate.startswith("KS"):
        value, limit = ks_distance(counts, law), ks_limit(int(np.sum(counts, axis=-1).flat[0]), alpha)
        return value, limit, value > limit
    value = chi_square_p(counts, law)
    return value, alpha, value < alpha


def power(finding: Finding, num_samples: int, repeats: int = 1000, seed: int = 0) -> float:
    """Chance that a gate notices at a number of samples: by drawing from the law that was observed.

    Args:
        finding: of far more samples than are asked for here; its counts stand for the law of the faulty code.
        num_samples: of each trial.
        repeats, seed: trials, and numpy's generator.
    Returns: Share of red trials; where counts are the law itself, the rate of false alarms.
    """
    observed = finding.counts / finding.counts.sum()
    trials = np.random.default_rng(seed).multinomial(num_samples, observed, repeats)
    return float(_decide(finding.gate, trials, finding.law, finding.alpha)[2].mean())
