"""lab/exactness.py: laws by the book, every path added up, and sampling that agrees with both."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

import flashspec_core as fs
from flashspec_core.lab import exactness, mutants
from flashspec_core.lab.exactness import (
    CASES,
    Case,
    chain_law,
    output_law,
    plain_law,
    random_case,
    sample,
    step_law,
    table_model,
    tiny_models,
    total_variation,
    true_law,
)
from flashspec_core.verify import METHODS
from flashspec_core.verify.logits import logprobs


def log_row(*probs):
    return torch.tensor([probs], dtype=torch.float64).log()


HAND = Case(log_row(1 / 3, 2 / 3), (log_row(2 / 3, 1 / 3),))
PAIR = Case(log_row(0.2, 0.4, 0.4), (log_row(0.1, 0.6, 0.3),))


def accepted(case, method):
    return sum(n * joint.sum() for n, joint in enumerate(step_law(case, method)))


def tokens_a_step(case, method):
    return 1 + accepted(case, method)


@pytest.mark.parametrize(
    "sampling",
    [
        fs.Sampling(temperature=0.7),
        fs.Sampling(temperature=1.3, top_k=3),
        fs.Sampling(temperature=0.9, top_p=0.8),
        fs.Sampling(temperature=1.0, min_p=0.2),
        fs.Sampling(temperature=0.6, top_k=5, top_p=0.95, min_p=0.02),
    ],
)
def test_the_law_by_the_book_equals_the_packages(sampling):
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 2, (4, 3, 9)))
    np.testing.assert_allclose(true_law(logits, sampling), logprobs(logits, sampling).exp().numpy(), atol=1e-14)


@pytest.mark.parametrize("method, wanted", [("token", 10 / 9), ("block", 11 / 9)])
def test_hand_computed_accepted_tokens(method, wanted):
    # THEORY: p = (1/3, 2/3), q = (2/3, 1/3), gamma 2
    assert accepted(HAND, method) == pytest.approx(wanted, abs=1e-12)
    law = output_law(HAND, method, 2)
    np.testing.assert_allclose(law, [[1 / 9, 2 / 9], [2 / 9, 4 / 9]], atol=1e-14)


def test_figures_of_theory():
    deep = Case(HAND.target, HAND.drafts, gamma=4)
    assert tokens_a_step(deep, "token") == pytest.approx(2.605, abs=5e-4)
    assert tokens_a_step(deep, "block") == pytest.approx(3.049, abs=5e-4)
    assert accepted(PAIR, "token") == pytest.approx(1.44, abs=5e-3)
    assert accepted(PAIR, "block") == pytest.approx(1.50, abs=5e-3)


@pytest.mark.parametrize(
    "name, wanted",
    [("block: h is w", 0.127), ("block: w not clamped at 1", 0.060), ("block: residual with w = 1", 0.010)],
)
def test_how_far_faults_of_block_are_off(name, wanted):
    # THEORY: total variation of the first three tokens, p = (.2, .4, .4), q = (.1, .6, .3), gamma 2
    mutant = next(m for m in mutants.MUTANTS if m.name == name)
    with mutants.planted(mutant):
        law = np.zeros((3, 3, 3))
        for joint in step_law(PAIR, "block"):  # one faulty step, and plain tokens behind it
            while joint.ndim < 3:
                joint = joint[..., None] * true_law(PAIR.target[0], PAIR.sampling)
            law += joint
    assert total_variation(law, chain_law(PAIR, 3)) == pytest.approx(wanted, abs=5e-4)
    assert total_variation(output_law(PAIR, "block", 3), chain_law(PAIR, 3)) < 1e-14


class StaysAfterSuccess:
    """A policy made to hurt: it leaves an arm as soon as one of its drafts fell."""

    def __init__(self):
        self.arm = 0

    def select_arm(self, context=None):
        return self.arm

    def update(self, arm, reward, feedback=None):
        self.arm = arm if reward == 1 else 1 - arm


POLICIES = {
    "none": None,
    "UCB1": lambda: fs.UCB1(2),
    "Thompson": lambda: fs.ThompsonSampling(2, seed=3),
    "leaves what fell": StaysAfterSuccess,
}


@pytest.mark.parametrize("method", ["token", "block"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_every_path_adds_up_to_the_targets_law(method, policy, gamma):
    for seed in range(3):
        case = random_case(3 if gamma < 3 else 2, gamma, seed, num_arms=2, spread=2.0)
        if seed == 1:  # zeros in p and q
            case.target[0, 0] = case.drafts[0][1, -1] = case.drafts[1][0, 0] = -math.inf
        assert total_variation(output_law(case, method, 4, policy), chain_law(case, 4)) < 1e-12


@pytest.mark.parametrize("method", ["token", "block"])
@pytest.mark.parametrize("name", CASES)
def test_every_path_adds_up_under_filters_and_deterministic_drafts(method, name):
    assert total_variation(output_law(CASES[name], method, 3), chain_law(CASES[name], 3)) < 1e-12


def test_a_draft_that_ignores_its_own_block_is_lossless():
    # THEORY: heads that draw each depth on its own: q_i hangs on what stands before the block only
    case = random_case(3, seed=9)
    flat = Case(case.target, (case.drafts[0][:1].expand(3, 3),), case.gamma)
    for method in ("token", "block"):
        assert total_variation(output_law(flat, method, 3), chain_law(case, 3)) < 1e-12


def test_block_never_emits_fewer_tokens_than_token():
    for seed in range(60):
        rng = np.random.default_rng(seed)
        case = random_case(int(rng.integers(2, 4)), int(rng.integers(1, 4)), seed, spread=float(rng.uniform(0.2, 2)))
        assert accepted(case, "block") >= accepted(case, "token") - 1e-12


def test_acceptance_is_one_minus_total_variation():
    for seed in range(20):
        case = random_case(5, gamma=1, seed=seed)
        p, q = true_law(case.target[0], case.sampling), true_law(case.drafts[0][0], case.sampling)
        for method in ("token", "block"):
            assert accepted(case, method) == pytest.approx(1 - total_variation(p, q), abs=1e-12)
        assert accepted(case, "coupled") <= 1 - total_variation(p, q) + 1e-12  # one noise for both couples less tightly


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
def test_sampled_steps_have_the_enumerated_law(method, name):
    case, rows = CASES[name], 20_000
    _, num_accepted, emitted = sample(case, method, rows, 1, seed=5)
    for n, joint in enumerate(step_law(case, method)):
        here = emitted[num_accepted == n, : n + 1].numpy()
        counts = np.zeros(joint.shape)
        np.add.at(counts, tuple(here.T), 1)
        assert counts[joint == 0].sum() == 0
        expected = joint[joint > 0].ravel() * rows
        counts = counts[joint > 0].ravel()
        rest = rows - counts.sum(), rows - expected.sum()
        kept = expected >= 5
        cells = [np.append(x[kept], x[~kept].sum() + r) for x, r in ((counts, rest[0]), (expected, rest[1]))]
        assert stats.chisquare(*cells).pvalue > 1e-4


def test_a_row_of_sample_does_not_depend_on_its_batch():
    case = CASES["V 5"]
    whole = sample(case, "block", 40, 3, seed=2)[0]
    part = sample(case, "block", 10, 3, seed=2, first_row=20)[0]
    assert torch.equal(whole[20:30], part)


def test_what_no_verifier_may_return_is_named():
    def broken(*args, **options):
        result = fs.verify(*args, **options)
        result.token_ids[:, 0] = 99
        return result

    with pytest.raises(exactness.ImpossibleResult, match="expected num_accepted . 1 ids of the vocabulary"):
        sample(CASES["V 5"], "token", 10, 2, verifier=broken)


def test_table_model_gives_the_tables_rows():
    case = random_case(4, seed=2)
    logits = table_model(case.target).model(input_ids=torch.tensor([[3, 1, 2]])).logits[0]
    torch.testing.assert_close(logits.double(), case.target[[3, 1, 2]], atol=1e-5, rtol=0)


def test_plain_law_is_the_product_of_plain_passes():
    target, sampling = tiny_models()[0], fs.Sampling(temperature=0.8)
    law = plain_law(target, [1, 2], sampling, 3)
    assert law.sum() == pytest.approx(1, abs=1e-12)
    for ids in ((0, 1, 2), (3, 3, 0)):
        product = 1.0
        for i in range(3):
            with torch.no_grad():
                row = target.model(input_ids=torch.tensor([[1, 2, *ids[:i]]])).logits[0, -1]
            product *= float((row.double() / 0.8).softmax(-1)[ids[i]])
        assert law[ids] == pytest.approx(product, rel=1e-5)
