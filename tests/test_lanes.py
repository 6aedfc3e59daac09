"""engine/lanes.py: drafters that were idle catch up, whatever was played meanwhile; so they do behind any prompt."""

import functools

import pytest
from conftest import make_target, random_ids
from test_cuda_graphs import InTurn, arms_for, assert_same, both, by_rule, on_the_device  # noqa: F401 - a fixture
from test_kernels import GPU, INTERPRETER

import flashspec_core as fs
from flashspec_core.engine import cuda_graphs

ALL = ("model", "eagle", "off", "n-gram", "medusa", "early exit")


@INTERPRETER
@pytest.mark.parametrize("block", [1, 4])
def test_idle_drafters_catch_up(block, by_rule, monkeypatch):  # noqa: F811
    monkeypatch.setattr(cuda_graphs, "STRIDES", (7, 3))
    target = make_target(hidden=64)
    arms = arms_for(target, *ALL)
    policies = []

    def policy():
        policies.append(InTurn(block, len(arms)))
        return policies[-1]

    assert_same(*both(target, arms, max_new_tokens=60, policy=policy))
    assert policies[1].learnt == policies[0].learnt[: len(policies[1].learnt)] or block == 1


@INTERPRETER
@pytest.mark.parametrize("method", ["token", "coupled"])
@pytest.mark.parametrize("kind", ["eagle", "medusa", "model"])
def test_a_prompt_of_one_id_and_of_many(kind, method, by_rule):  # noqa: F811
    # heads draft in the first step too, where one id alone tells them nothing; the text is the target's all the same
    target = make_target(hidden=64)
    (arm,) = arms_for(target, kind)
    texts = [[7], random_ids(150)]
    options = dict(max_new_tokens=20, method=method, seed=3, sampling=fs.Sampling(0.9 if method == "coupled" else 0.0))
    plain = fs.generate(target, fs.Arm(None), texts, **options)
    ours = fs.generate(target, arm, texts, capture=True, **options)
    assert [b.token_ids for b in ours] == [a.token_ids for a in plain]
    assert ours[0].steps[0].num_prefilled == 149 and ours[0].steps[0].num_draft_tokens > 0


@GPU
@pytest.mark.gpu
def test_idle_drafters_catch_up_on_the_device():
    target, arms = on_the_device(*ALL)
    policy = functools.partial(InTurn, 2, len(arms))
    loop, ours = both(target, arms, max_new_tokens=60, policy=policy, capture_loop=False)
    assert_same(loop, ours, mode="eager: capture=False")
