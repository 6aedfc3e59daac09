"""Policies: the index by hand, the order of first tries, what is refused, and regret within the known bands."""

import math

import numpy as np
import pytest

import flashspec_core as fs
from flashspec_core.bandits import share_of_fastest
from flashspec_core.records import Feedback

MEANS = np.array([0.3, 0.7, 0.5])
COUNTING = pytest.mark.parametrize("policy_class", [fs.UCB1, fs.ThompsonSampling])


def pseudo_regret(policy, rng, horizon=10_000):
    """Summed gap to the best mean, one reward draw a round; a float, or an array of the policy's shape."""
    regret = np.zeros(policy.shape)
    for _ in range(horizon):
        arm = policy.select_arm()
        regret += MEANS.max() - MEANS[arm]
        policy.update(arm, np.asarray(rng.random(policy.shape or None) < MEANS[arm], dtype=float))
    return regret


@pytest.mark.parametrize(
    "played, index",
    [
        # ln 2 = .6931, ln 3 = 1.0986, ln 4 = 1.3863; s/n + sqrt(2 ln t / n)
        ([(0, 0.0), (1, 1.0)], [1.1774, 2.1774]),
        ([(0, 0.0), (1, 1.0), (1, 0.5)], [1.4823, 1.7981]),
        ([(0, 0.0), (1, 1.0), (1, 0.5), (1, 0.0)], [1.6651, 1.4613]),
        ([(0, 0.25), (0, 0.75), (0, 0.5), (1, 1.0)], [1.4613, 2.6651]),
        ([(0, 1.0)], [1.0, math.inf]),
        ([], [math.inf, math.inf]),
    ],
)
def test_ucb1_index_by_hand(played, index):
    policy = fs.UCB1(num_arms=2)
    for arm, reward in played:
        policy.update(arm, reward)
    np.testing.assert_allclose(policy.index(), index, atol=6e-5)
    assert policy.select_arm() == int(np.argmax(index))


def test_ucb1_bonus_is_divided_by_the_arms_own_pulls():
    # in other suites: divided by the sum of all pulls, equal for every arm, so nothing is explored
    policy = fs.UCB1(num_arms=2)
    for arm in (0, 1, 1, 1, 1, 1, 1, 1, 1):
        policy.update(arm, 0.5)
    bonus = policy.index() - 0.5
    assert bonus[0] / bonus[1] == pytest.approx(math.sqrt(8)) and policy.select_arm() == 0


def test_ucb1_tries_every_arm_first_in_order_and_breaks_ties_low():
    policy, chosen = fs.UCB1(num_arms=5), []
    for _ in range(6):
        chosen.append(policy.select_arm())
        policy.update(chosen[-1], 1.0)
    assert chosen == [0, 1, 2, 3, 4, 0]
    assert all(type(arm) is int for arm in chosen)
    assert fs.UCB1(num_arms=1).select_arm() == 0


def test_a_late_first_reward_keeps_the_arm_first():
    policy = fs.UCB1(num_arms=3)
    policy.update(2, 1.0)  # feedback of a later round comes in before those of arms 0 and 1
    assert policy.select_arm() == 0


@COUNTING
@pytest.mark.parametrize("reward", [-1e-9, 1.0000001, 4, math.nan, math.inf, [0.5, math.nan]])
def test_rewards_outside_0_1_are_refused_and_leave_no_trace(policy_class, reward):
    # in other suites: raw counts 0..gamma fed to a posterior that expects [0, 1]
    policy = policy_class(num_arms=2, shape=np.shape(reward))
    with pytest.raises(ValueError, match=r"reward must lie in \[0, 1\], got"):
        policy.update(np.zeros(policy.shape, dtype=int) if policy.shape else 0, reward)
    assert policy.pulls.sum() == 0 and policy.reward_sums.sum() == 0


@COUNTING
@pytest.mark.parametrize("num_arms", [0, -1])
def test_no_arms_is_refused(policy_class, num_arms):
    with pytest.raises(ValueError, match=f"num_arms must be a whole number >= 1, got {num_arms}"):
        policy_class(num_arms=num_arms)


@COUNTING
def test_update_counts_fractions_and_ends_are_allowed(policy_class):
    policy = policy_class(num_arms=3)
    for arm, reward in ((0, 0), (2, 1), (2, 0.25)):
        policy.update(arm, reward, feedback=fs.Feedback(step=0, num_draft_tokens=4, num_accepted=1))
    assert policy.pulls.tolist() == [1, 0, 2] and policy.reward_sums.tolist() == [0, 0, 1.25]


def test_vectorised_ucb1_equals_single_ones():
    size, rng = 7, np.random.default_rng(0)
    many, singles = fs.UCB1(num_arms=3, shape=(size,)), [fs.UCB1(num_arms=3) for _ in range(size)]
    for _ in range(300):
        arms = many.select_arm()
        assert arms.tolist() == [policy.select_arm() for policy in singles]
        rewards = rng.random(size)
        many.update(arms, rewards)
        for policy, arm, reward in zip(singles, arms, rewards, strict=True):
            policy.update(int(arm), reward)
    np.testing.assert_array_equal(many.index(), [policy.index() for policy in singles])
    np.testing.assert_array_equal(many.pulls, [policy.pulls for policy in singles])


@pytest.mark.parametrize("shape", [(4,), (2, 3)])
@COUNTING
def test_any_leading_shape(policy_class, shape):
    policy = policy_class(num_arms=2, shape=shape)
    arms = policy.select_arm()
    policy.update(arms, np.full(shape, 0.5))
    assert arms.shape == shape and policy.pulls.shape == (*shape, 2)
    assert (policy.pulls.sum(-1) == 1).all() and (policy.reward_sums.sum(-1) == 0.5).all()


@pytest.mark.parametrize("seed, regret", list(enumerate([70.2, 117.8, 99.8, 123.4, 89.6])))
def test_ucb1_regret_of_the_seeds_claim(seed, regret):
    assert pseudo_regret(fs.UCB1(num_arms=3), np.random.default_rng(seed)) == pytest.approx(regret, abs=0.1)


def test_regret_means_of_200_runs_are_in_their_bands():
    # THEORY: Thompson 18.6-18.9 (one run's sd 8 to 16), UCB1 99.0-99.6 (sd 16.8)
    thompson = pseudo_regret(fs.ThompsonSampling(num_arms=3, seed=0, shape=(200,)), np.random.default_rng(1))
    ucb1 = pseudo_regret(fs.UCB1(num_arms=3, shape=(200,)), np.random.default_rng(2))
    assert 14 < thompson.mean() < 26
    assert 94 < ucb1.mean() < 105


def test_thompson_draws_from_the_posterior():
    policy = fs.ThompsonSampling(num_arms=2, shape=(20_000,))
    policy.pulls[:], policy.reward_sums[:] = [3, 0], [2.5, 0]
    draws = policy.index()  # Beta(3.5, 1.5) and Beta(1, 1)
    np.testing.assert_allclose(draws.mean(0), [0.7, 0.5], atol=0.01)
    np.testing.assert_allclose(draws.var(0), [0.7 * 0.3 / 6, 1 / 12], rtol=0.05)


def test_thompson_repeats_from_its_seed_and_owns_its_generator():
    def choices(seed):
        policy = fs.ThompsonSampling(num_arms=4, seed=seed)
        return [policy.select_arm() for _ in range(40)]

    first = choices(3)
    np.random.seed(0)  # the global generator must not matter
    assert choices(3) == first and choices(4) != first and set(first) == {0, 1, 2, 3}


EVERY = {
    "UCB1": lambda **o: fs.UCB1(3, **o),
    "sliding window": lambda **o: fs.SlidingWindowUCB(3, window=7, **o),
    "discounted UCB": lambda **o: fs.DiscountedUCB(3, discount=0.9, **o),
    "Thompson": lambda **o: fs.ThompsonSampling(3, **o),
    "discounted Thompson": lambda **o: fs.DiscountedThompson(3, discount=0.9, **o),
    "full information": lambda **o: fs.FullInformation(3, discount=0.9, **o),
}
every = pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)


def feedback(step, rewards=None, accepted=0, rejected=0, context=None):
    return fs.Feedback(step, 4, accepted, rejected, rewards, context)


def test_sliding_window_by_hand():
    # the last 3 of (0, 1), (1, 0), (1, .5), (0, 0): n = (1, 2), s = (0, .5); .5 ln min(4, 3) = .5493
    policy = fs.SlidingWindowUCB(2, window=3)
    for arm, reward in ((0, 1.0), (1, 0.0), (1, 0.5), (0, 0.0)):
        policy.update(arm, reward)
    assert policy.pulls.tolist() == [1, 2] and policy.reward_sums.tolist() == [0, 0.5]
    np.testing.assert_allclose(policy.index(), [0.7412, 0.25 + 0.5241], atol=6e-5)


def test_a_window_is_global_in_time():
    # a window of each arm's own would never age an arm that is not pulled
    policy = fs.SlidingWindowUCB(2, window=5)
    policy.update(0, 1.0)
    for _ in range(5):
        policy.update(1, 1.0)
    assert policy.pulls.tolist() == [0, 5] and policy.select_arm() == 0


def test_discounted_ucb_by_hand():
    # discount .5: n = (.25, 1.5), s = (.25, .5), N = 1.75; .5 ln 1.75 = .27981
    policy = fs.DiscountedUCB(2, discount=0.5)
    for arm, reward in ((0, 1.0), (1, 1.0), (1, 0.0)):
        policy.update(arm, reward)
    assert policy.pulls.tolist() == [0.25, 1.5] and policy.reward_sums.tolist() == [0.25, 0.5]
    np.testing.assert_allclose(policy.index(), [1 + 1.05795, 1 / 3 + 0.43191], atol=6e-5)


def test_discounted_posterior_by_hand():
    # every arm fades, the prior's ones do not: S = (.25, .5), F = (0, 1) after (0, 1), (1, 1), (1, 0) at .5
    policy = fs.DiscountedThompson(2, discount=0.5)
    for arm, reward in ((0, 1.0), (1, 1.0), (1, 0.0)):
        policy.update(arm, reward)
    assert policy.reward_sums.tolist() == [0.25, 0.5]
    assert (policy.pulls - policy.reward_sums).tolist() == [0, 1]


def test_thompson_may_learn_from_tested_tokens():
    # 3 of 4 drafted stood: three passed, one was seen to fail; all 4 stood: nothing failed; nothing drafted: no news
    policy = fs.ThompsonSampling(2, tokens=True)
    for accepted, rejected in ((3, 1), (4, 0), (0, 0)):
        policy.update(0, accepted / 4, feedback(0, accepted=accepted, rejected=rejected))
    assert policy.reward_sums.tolist() == [7, 0] and policy.pulls.tolist() == [8, 0]


def test_full_information_follows_the_leader_and_breaks_ties_at_random():
    policy = fs.FullInformation(3)
    assert {policy.select_arm() for _ in range(60)} == {0, 1, 2}
    policy.update(0, 0.2, feedback(0, [0.2, 0.6, 0.6]))
    assert {policy.select_arm() for _ in range(60)} == {1, 2}
    policy.update(1, 0.6, feedback(1, [None, 0.6, 1.0]))  # arm 0 was not scored
    assert policy.select_arm() == 2
    np.testing.assert_allclose(policy.pulls, [0.99, 1.99, 1.99])
    with pytest.raises(ValueError, match="expected feedback.rewards"):
        policy.update(0, 0.5, feedback(2, [0.5, 2.0, 0.1]))
    policy.update(2, 0.0)  # a round in which the played arm alone was scored
    assert policy.pulls[2] > policy.pulls[1]


@every
def test_every_arm_is_explored(make):
    policy = make()
    chosen = []
    for t in range(120):
        chosen.append(policy.select_arm())
        policy.update(chosen[-1], 0.5, feedback(t))
    assert set(chosen) == {0, 1, 2}


@pytest.mark.parametrize("name", ["UCB1", "sliding window", "discounted UCB"])
def test_permuting_arms_permutes_pulls(name):
    means, order = np.array([0.2, 0.55, 0.9]), [2, 0, 1]
    pulls = []
    for permuted in (means, means[order]):
        policy = EVERY[name]()
        for arm in range(3):  # first tries go by index; give both the same start
            policy.update(arm, permuted[arm])
        for _ in range(300):
            arm = policy.select_arm()
            policy.update(arm, permuted[arm])
        pulls.append(policy.chosen)
    np.testing.assert_allclose(pulls[0][order], pulls[1], atol=12)  # ties and the window's start differ


@every
def test_late_feedback_leaves_the_state_of_timely_feedback_shifted(make):
    rng = np.random.default_rng(0)
    rounds = [(int(rng.integers(3)), float(rng.random()), feedback(t, rng.random(3).tolist())) for t in range(40)]
    timely, late = make(), make()
    for t, one in enumerate(rounds):
        if t >= 3:
            late.update(*rounds[t - 3])
        if t < 37:
            timely.update(*one)
    for name in ("pulls", "reward_sums"):
        np.testing.assert_array_equal(getattr(timely, name), getattr(late, name))


@pytest.mark.parametrize("make", [EVERY["UCB1"], EVERY["Thompson"]])
def test_feedback_may_come_out_of_order(make):
    rounds = [(0, 0.5), (1, 0.25), (0, 1.0), (2, 0.0)]
    one, other = make(), make()
    for arm, reward in rounds:
        one.update(arm, reward)
    for arm, reward in reversed(rounds):
        other.update(arm, reward)
    assert np.array_equal(one.pulls, other.pulls) and np.array_equal(one.reward_sums, other.reward_sums)


def test_before_any_feedback_untried_arms_take_turns():
    policy = fs.UCB1(3)
    assert [policy.select_arm() for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("arm", [-1, 3])
@every
def test_an_arm_that_is_none_is_refused(make, arm):
    with pytest.raises(ValueError, match="an arm must lie in 0..2"):
        make().update(arm, 0.5)


@pytest.mark.parametrize("discount", [0, 1.01, -0.5])
def test_a_discount_outside_its_range_is_refused(discount):
    for kind in (fs.DiscountedUCB, fs.DiscountedThompson, fs.FullInformation):
        with pytest.raises(ValueError, match="discount must lie in"):
            kind(2, discount=discount)
    with pytest.raises(ValueError, match="window must be at least 1"):
        fs.SlidingWindowUCB(2, window=0)


SCALED = [
    lambda: fs.UCB1(2), lambda: fs.SlidingWindowUCB(2, window=3), lambda: fs.DiscountedUCB(2),
    lambda: fs.ThompsonSampling(2), lambda: fs.DiscountedThompson(2), lambda: fs.FullInformation(2),
    lambda: fs.Contextual(fs.UCB1(2)),
    lambda: fs.Restarting(fs.UCB1(2), window=2, threshold=0.9), lambda: fs.Preferring(0, fs.UCB1(1)),
]  # fmt: skip


@pytest.mark.parametrize("make", SCALED)
def test_a_new_scale_leaves_what_rewards_on_it_had_left(make):
    told = [(0, 1.0), (1, 0.5), (1, 0.25), (0, 0.75), (1, 1.0)]
    late, early = make(), make()
    for arm, reward in told[:4]:
        late.update(arm, reward, Feedback(0, 0, 0, context=None))
        early.update(arm, reward / 4, Feedback(0, 0, 0, context=None))
    late.rescale(0.25)
    for policy in (late, early):
        policy.update(*told[4], Feedback(0, 0, 0, context=None))
    assert fs.policy_to_json(late) == fs.policy_to_json(early)


def test_accepted_tokens_have_no_scale():
    policy = fs.ThompsonSampling(2, tokens=True)
    policy.update(0, 0.0, Feedback(0, 4, 3, 1))
    policy.rescale(0.5)
    assert policy.reward_sums.tolist() == [3.0, 0.0]


def test_a_speed_is_a_share_of_the_fastest_and_a_faster_one_moves_the_scale():
    policy = fs.UCB1(2)
    assert share_of_fastest(policy, 20.0) == 1 and share_of_fastest(policy, 10.0, [40.0]) == 0.25
    policy.update(0, 0.5)
    assert share_of_fastest(policy, 80.0) == 1 and policy.fastest == 80 and policy.reward_sums[0] == 0.25
    assert share_of_fastest(policy, 20.0) == 0.25 and policy.reward_sums[0] == 0.25
    assert share_of_fastest(fs.FixedArm(0), 0.0) == 0 and share_of_fastest(fs.FixedArm(0), 3.0) == 1


@pytest.mark.parametrize("outer", [fs.Contextual, fs.Restarting, lambda policy: fs.Preferring(1, policy)])
def test_policies_that_learn_nothing_may_stand_within_others_when_the_scale_moves(outer):
    policy = outer(fs.FixedArm(0, 1))
    policy.update(0, 1.0, Feedback(0, 0, 0, context=(False, None)))
    assert share_of_fastest(policy, 10.0) == 1 and share_of_fastest(policy, 20.0) == 1 and policy.fastest == 20
