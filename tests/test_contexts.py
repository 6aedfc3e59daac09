"""engine/contexts.py: what a policy may know, told before each step and with its feedback; committed tokens alone."""

import pytest
from conftest import make_target, random_ids
from test_cuda_graphs import by_rule  # noqa: F401 - a fixture
from test_kernels import INTERPRETER

import flashspec_core as fs
from flashspec_core.engine.contexts import Committed, InCode, RecentAcceptance, Repeats, Together


def row(text="", ids=(), steps=()):
    return Committed(list(ids), text, list(steps))


def step(drafted, accepted):
    return fs.DecodeStep(0, 0, 0, "n-gram", 4, drafted, accepted, [1], "", 0.0, 0.1)


def test_inside_code_or_not():
    inside, outside = row("so:\n```python\nx = 1"), row("```\nx\n``` done")
    assert InCode()([inside]) and not InCode()([outside]) and not InCode()([row()])
    assert InCode()([inside, inside, outside]) and not InCode()([inside, outside])


def test_what_repeats_can_be_looked_up():
    again, new = row(ids=[1, 2, 3, 4, 9, 2, 3, 4]), row(ids=[1, 2, 3, 4, 5])
    context = Repeats(3)
    assert context([again]) and not context([new]) and not context([row(ids=[7])])
    assert not Repeats(4)([again]) and Repeats(1)([row(ids=[7, 7])])
    again.token_ids.append(8)  # the same row goes on
    assert not context([again])


def test_recent_acceptance_in_grades():
    context = RecentAcceptance(num_steps=2, grades=4)
    assert context([row()]) is None and context([row(steps=[step(0, 0)])]) is None
    assert context([row(steps=[step(4, 4), step(4, 0), step(4, 0)])]) == 0  # the first is too long ago
    assert context([row(steps=[step(4, 4), step(4, 4)])]) == 3
    assert context([row(steps=[step(4, 2)]), row(steps=[step(4, 0)])]) == 1
    assert Together(InCode(), context)([row(steps=[step(4, 2)])]) == (False, 2)


class Told(fs.FixedArm):
    """Keeps what it was told, when it chose and when it learnt."""

    def __init__(self):
        super().__init__(0, 1)
        self.asked, self.learnt = [], []

    def select_arm(self, context=None):
        self.asked.append(context)
        return 0

    def update(self, arm, reward, feedback=None):
        self.learnt.append(feedback.context)


@INTERPRETER
@pytest.mark.parametrize("capture", [False, True])
def test_a_policy_is_told_what_is_committed(capture, by_rule):  # noqa: F811
    target, seen = make_target(hidden=64), []

    def lengths(rows):
        seen.append([len(r.token_ids) for r in rows])
        return sum(seen[-1])

    policy = Told()
    out = fs.generate(
        target, fs.NGramDrafter(), random_ids(9), policy=policy, context=lengths, max_new_tokens=12, capture=capture
    )
    steps, before = out.steps, [9]
    for s in steps:
        before.append(before[-1] + len(s.token_ids))
    late = 1 if capture else 0
    wanted = [before[max(0, i - late)] for i in range(len(steps))]
    assert policy.asked[: len(steps)] == policy.learnt == wanted and seen[0] == [9]


def test_a_contextual_policy_learns_for_each_context_by_itself():
    target, policy = make_target(), fs.Contextual(fs.UCB1(2))
    arms = [fs.Arm(None), fs.Arm(fs.NGramDrafter(), 2)]
    fs.generate(
        target, arms, random_ids(9), policy=policy, context=lambda rows: len(rows[0].token_ids) < 20, max_new_tokens=30
    )
    assert set(policy.policies) == {"True", "False"}
    assert sum(p.num_rounds for p in policy.policies.values()) > 10
