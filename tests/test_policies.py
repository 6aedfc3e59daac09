"""policies.py: fixed choices, contexts that learn apart, and any policy saved and restored."""

import numpy as np
import pytest
from test_bandits import every, feedback

import flashspec_core as fs


def test_replay_gives_the_arms_in_order_and_says_when_they_end():
    policy = fs.Replay(np.array([2, 0, 1]))
    for arm in (2, 0, 1):
        chosen = policy.select_arm()
        policy.update(0, 1.0)
        assert chosen == arm and type(chosen) is int
    with pytest.raises(ValueError, match="Replay holds 3 arms, and one more step was asked for"):
        policy.select_arm()


def test_fixed_arm_learns_nothing():
    policy = fs.FixedArm(2, num_arms=3)
    policy.update(0, 1.0)
    assert policy.select_arm(context=[1]) == 2 and policy.num_arms == 3
    assert fs.FixedArm(5).num_arms is None


@pytest.mark.parametrize("arm, num_arms", [(-1, None), (-1, 3), (3, 3)])
def test_fixed_arm_refuses_arms_that_are_not_there(arm, num_arms):
    with pytest.raises(ValueError, match=rf"arm must lie in 0\.\..*, got {arm}"):
        fs.FixedArm(arm, num_arms)


@every
def test_a_saved_policy_goes_on_as_if_never_saved(make):
    rng = np.random.default_rng(1)
    policy = make(seed=9)
    for t in range(25):
        policy.update(policy.select_arm(), float(rng.random()), feedback(t))
    again = fs.policy_from_json(fs.policy_to_json(policy))
    for t in range(25):
        reward = float(rng.random())
        arms = policy.select_arm(), again.select_arm()
        assert arms[0] == arms[1]
        for one in (policy, again):
            one.update(arms[0], reward, feedback(t))
    assert fs.policy_to_json(policy) == fs.policy_to_json(again)


def test_contexts_learn_apart_and_are_saved_with_their_order():
    policy = fs.Contextual(fs.ThompsonSampling(2, seed=3))
    first, second = ([policy.select_arm(name) for _ in range(40)] for name in ("code", "prose"))
    assert first != second, "one stream for all contexts"
    for t in range(200):
        context = ("code", "prose")[t % 2]
        arm = policy.select_arm(context)
        policy.update(arm, float(arm == t % 2), feedback(t, context=context))
    assert policy.policies["code"].pulls.argmax() == 0 and policy.policies["prose"].pulls.argmax() == 1
    again = fs.policy_from_json(fs.policy_to_json(policy))
    assert [again.select_arm("new") for _ in range(20)] == [policy.select_arm("new") for _ in range(20)]


def test_a_restarting_policy_forgets_at_a_change_and_not_before():
    rng, policy = np.random.default_rng(0), fs.Restarting(fs.UCB1(2), window=20, threshold=0.25)
    restarts, late = [], 0
    for t in range(600):
        arm = policy.select_arm()
        policy.update(arm, float(np.clip(rng.normal(0.8 if arm == (t >= 300) else 0.3, 0.15), 0, 1)), feedback(t))
        restarts.append(policy.num_restarts)
        late += t >= 400 and arm == 1
    assert restarts[299] == 0 and restarts[-1] >= 1 and late > 150
    again = fs.policy_from_json(fs.policy_to_json(policy))
    assert again.num_restarts == policy.num_restarts and again.select_arm() == policy.select_arm()


def test_a_preferred_arm_needs_no_lesson_and_the_others_learn_theirs():
    policy = fs.Preferring(1, fs.Contextual(fs.UCB1(3)))
    for t in range(300):
        context = (t % 3 == 0, "code" if t % 2 else "prose")
        arm = policy.select_arm(context)
        assert (arm == 1) == context[0]
        best = 3 if context[1] == "code" else 0
        policy.update(arm, float(arm == best), feedback(t, context=context))
    inner = policy.policy.policies
    assert inner["code"].pulls.argmax() == 2 and inner["prose"].pulls.argmax() == 0 and set(inner) == {"code", "prose"}
    again = fs.policy_from_json(fs.policy_to_json(policy))
    assert [again.select_arm((False, "code")), again.select_arm(None)] == [
        policy.select_arm((False, "code")),
        policy.select_arm(None),
    ]


def test_oracle_and_fixed_policies_are_saved_too():
    for policy in (fs.Oracle([[0.1, 0.9], [0.8, 0.2]]), fs.FixedArm(1, 2), fs.Replay([1, 0])):
        policy.select_arm()
        again = fs.policy_from_json(fs.policy_to_json(policy))
        assert again.select_arm() == policy.select_arm()
    with pytest.raises(ValueError, match="expected the JSON of a policy"):
        fs.policy_from_json('{"policy": "os.system", "state": {}}')
