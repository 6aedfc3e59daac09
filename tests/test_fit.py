"""lab/fit.py: chi-square, KS and power against known figures."""

import numpy as np
import pytest
from scipy import stats

from flashspec_core.lab.fit import ALPHA, SAMPLES, Finding, chi_square_p, ks_distance, ks_limit, power


def test_the_limit_of_the_seeds_gate():
    assert ks_limit(SAMPLES) == pytest.approx(0.01626, abs=5e-6)  # THEORY


def test_chi_square_equals_scipys_and_merges_rare_cells():
    rng = np.random.default_rng(0)
    law = rng.dirichlet(np.ones(12) * 5)
    counts = rng.multinomial(2000, law)
    assert chi_square_p(counts, law) == pytest.approx(stats.chisquare(counts, law * 2000).pvalue)
    rare = np.array([0.5, 0.4989, 0.0005, 0.0006])  # of 2,000 the last ones expect 1.0 and 1.2: one cell of 2.2
    counts = np.array([1000, 990, 4, 6])
    merged = stats.chisquare([1000, 1000], [1000, 1000]).pvalue  # which is too few, so the next smallest joins them
    assert chi_square_p(counts, rare) == pytest.approx(merged)


def test_an_id_of_probability_zero_fails_at_once():
    assert chi_square_p([500, 499, 1], [0.5, 0.5, 0.0]) == 0 and chi_square_p([500, 500, 0], [0.5, 0.5, 0.0]) == 1


def test_ks_distance_by_hand():
    assert ks_distance([5, 0, 5], [0.25, 0.5, 0.25]) == pytest.approx(0.25)
    assert ks_distance([10, 0], [0.0, 1.0]) == 1.0


@pytest.mark.parametrize(
    "vocab, gate, tv, wanted",
    [
        (80, "KS", 0.30, 0.16),
        (80, "chi-square", 0.03, 0.57),
        (80, "chi-square", 0.05, 0.999),
        (2, "chi-square", 0.019, 0.90),
        (80, "chi-square", 0.038, 0.90),
        (1000, "chi-square", 0.066, 0.90),
    ],
)
def test_power_against_alternating_faults(vocab, gate, tv, wanted):
    # THEORY: probabilities (1 +- 2 TV) / V, neighbours of opposite sign, 10,000 samples, alpha .01
    law = np.full(vocab, 1 / vocab)
    faulty = law * (1 + 2 * tv * (-1.0) ** np.arange(vocab))
    found = Finding(gate, "", 0, 0, False, ALPHA, faulty, law)
    assert power(found, SAMPLES, repeats=2000) == pytest.approx(wanted, abs=0.04)


@pytest.mark.parametrize("gate, wanted", [("KS", 0.84), ("chi-square", 0.14)])
def test_power_against_a_shift_between_halves(gate, wanted):
    # THEORY: the other way round, TV .02 between the two halves of the ids
    law = np.full(80, 1 / 80)
    faulty = law * (1 + 0.04 * np.where(np.arange(80) < 40, 1, -1))
    found = Finding(gate, "", 0, 0, False, ALPHA, faulty, law)
    assert power(found, SAMPLES, repeats=2000) == pytest.approx(wanted, abs=0.04)
