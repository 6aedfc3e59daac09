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
    monkeypatch.setattr(cuda_graphs, "STRIDES", (3, 7, 21))
    target = make_target(hidden=64)
    arms = arms_for(target, *ALL)
    policies = []

    def policy():
        policies.append(InTurn(block, len(arms)))
        return policies[-1]

    assert_same(*both(target, arms, max_new_tokens=60, policy=policy))
    assert policies[1].learnt == policies[0].learnt[: len(policies[1].learnt)] or block == 1


@pytest.mark.parametrize(
    "missing, batch, strides",
    [
        (0, 1, []),
        (8, 1, [8]),
        (9, 1, [64]),
        (128, 1, [64, 64]),
        (129, 1, [512]),
        (129, 9, [64, 64, 8]),
        (700, 1, [512] * 2),
    ]
    + [(700, 9, [512, 64, 64, 64])],
)
def test_missing_ids_are_read_in_few_passes(missing, batch, strides):
    station = cuda_graphs.Station(make_target(hidden=64), batch, 1024)
    read = []
    station._catch_up("target", read.append, missing)
    assert read == strides and sum(strides) >= missing


@INTERPRETER
@pytest.mark.parametrize("kind", ["eagle", "model", "medusa"])
def test_reading_beyond_what_is_missing_changes_nothing(kind, by_rule):  # noqa: F811
    # a short row beside a long one, and one that ends where the capacity does
    target = make_target(hidden=64)
    (arm,) = arms_for(target, kind)
    for texts, new in (([random_ids(10), random_ids(75)], 20), ([random_ids(470)], 20)):
        plain = fs.generate(target, fs.Arm(None), texts, max_new_tokens=new)
        ours = fs.generate(target, arm, texts, max_new_tokens=new, capture=True)
        assert [b.token_ids for b in ours] == [a.token_ids for a in plain]


@INTERPRETER
def test_a_drafter_whose_drafts_all_stood_goes_on_behind_an_idle_time(by_rule):  # noqa: F811
    # its last draft was never read by itself; what it knows of the idle time's ids must begin with that one
    target = make_target(hidden=64)
    arms = [fs.Arm(fs.ModelDrafter(make_target(hidden=64)), 3), fs.Arm(None)]
    out = fs.generate(target, arms, random_ids(20), policy=InTurn(2, 2), max_new_tokens=40, capture=True)
    own = [s for s in out.steps if s.arm == 0]
    assert len(own) > 6 and all(s.num_accepted == s.num_draft_tokens for s in own[:-2])


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
