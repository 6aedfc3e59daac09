"""lab/bench_adaptive.py: rows of a small stream are what its times say, and policies live through the stream."""

from collections import Counter

import numpy as np
import pytest

import flashspec_core as fs
from flashspec_core.lab import bench, bench_adaptive, workloads

STREAM = workloads.Stream((("chat", "Hello."), ("code", "Print one."), ("chat", "Hi.")), (1, 2))


def make_ways():
    arms = [fs.Arm(None), fs.Arm(fs.NGramDrafter(), 3)]
    return [
        bench_adaptive.Way("off", arms[:1]),
        bench_adaptive.Way("n-gram", arms[1:]),
        bench_adaptive.Way("UCB1", arms, lambda: fs.UCB1(2)),
    ]


def test_every_way_decodes_the_stream_and_a_policy_lives_through_it(smollm2):
    ways, made = make_ways(), []
    make = ways[2].policy
    ways[2].policy = lambda: made.append(make()) or made[-1]
    bench_adaptive.run(smollm2, ways, STREAM, 4, 0.0)
    assert all(len(way.seconds) == 1 and len(way.seconds[0]) == 3 and min(way.seconds[0]) > 0 for way in ways)
    assert len(made) == 1 and made[0].num_rounds == sum(sum(c.values()) for c in ways[2].chosen[0]) - 3
    assert {name for c in ways[2].chosen[0] for name in c} <= {"off", "n-gram"}
    rows = bench_adaptive.rows_of(smollm2, ways, [STREAM], 0.0, "tiny")
    shares = [float(r["p50"]) for r in bench.pick(rows, metric="arm_share", domain="chat")]
    assert sum(shares) == pytest.approx(1) and len(shares) == 2


def test_where_one_arm_is_the_fastest_everywhere_there_is_nothing_to_share(smollm2):
    ways = make_ways()
    for way, times in zip(ways, ([1.0] * 3, [2.0] * 3, [1.5] * 3), strict=True):
        way.seconds, way.chosen = [times], [[Counter(off=1)] * 3]
    rows = bench_adaptive.rows_of(smollm2, ways[:2], [STREAM], 0.0, "tiny")
    assert not bench.pick(rows, metric="share_of_oracle") and all(r["p50"] == r["p50"] for r in rows)


def test_it_refuses_ways_that_are_none_and_policies_alone(smollm2, capsys):
    for options, why in (
        (["--ways", "contextual UCB"], "needs a fixed arm"),
        (["--ways", "of", "off"], "expected --ways among"),
        (["--gammas", "eagle-cod=3"], "expected --gammas of ['eagle-chat'"),
    ):
        with pytest.raises(SystemExit):
            bench_adaptive.main(["unused.csv", "--dtype", "float32", *options])
        assert why in capsys.readouterr().err


def test_gains_and_regret_follow_from_the_times(smollm2):
    ways = make_ways()
    seconds = np.array([[[1.0, 3.0, 1.0], [1.1, 3.0, 0.9]], [[2.0, 1.0, 2.0], [2.0, 1.0, 2.0]], [[1.0, 2.0, 1.0]] * 2])
    for way, each in zip(ways, seconds, strict=True):
        way.seconds, way.chosen = each.tolist(), [[Counter(off=1)] * 3] * 2
    rows = bench_adaptive.rows_of(smollm2, ways, [STREAM] * 2, 0.0, "tiny")
    value = lambda note, metric: bench.median(rows, note=note, metric=metric)  # noqa: E731
    assert [r["note"] for r in bench.pick(rows, metric="best_fixed")] == ["off"]  # the first of equals
    assert value("oracle by block", "tokens_per_second") == pytest.approx(1)  # a second a token in each block
    assert value("off", "regret") == pytest.approx(2 / 3) and value("UCB1", "regret") == pytest.approx(1 / 3)
    assert value("UCB1", "gain") == pytest.approx(5 / 4 - 1) and value("off", "gain") == 0
    assert value("UCB1", "share_of_oracle") == pytest.approx((5 / 4 - 1) / (5 / 3 - 1))


def test_a_rule_is_no_arm(smollm2):
    ways = {way.name: way for way in bench_adaptive.ways(smollm2)}
    rule = ways["n-gram, else eagle-mixed"]
    assert [rule.arms[rule.policy().select_arm((found, False))].name for found in (True, False)] == [
        "n-gram", "eagle-mixed"
    ]  # fmt: skip
    few = [ways["off"], rule, ways["n-gram"]]
    for way, times in zip(few, ([2.0] * 3, [1.0] * 3, [2.5] * 3), strict=True):
        way.seconds, way.chosen = [times], [[Counter({"n-gram": 1})] * 3]
    rows = bench_adaptive.rows_of(smollm2, few, [STREAM], 0.0, "tiny")
    assert [r["note"] for r in bench.pick(rows, metric="best_fixed")] == ["off"]
    assert bench.median(rows, note="n-gram, else eagle-mixed", metric="gain") == pytest.approx(1.0)
    assert [r["gamma"] for r in bench.pick(rows, metric="tokens_per_second", note="n-gram")] == [8]


def test_ways_take_turns_prompt_by_prompt(smollm2, monkeypatch):
    ways, calls = make_ways()[:2], []
    out = type("Out", (), dict(token_ids=[1], steps=[]))
    told = lambda target, arms, prompt, **o: calls.append((prompt[0]["content"], arms[0].name, o["seed"])) or out  # noqa: E731
    monkeypatch.setattr(bench_adaptive, "generate", told)
    for repeat in range(6):
        bench_adaptive.run(None, ways, STREAM, 4, 0.0, repeat)
    orders = [tuple(calls[i : i + 2]) for i in range(0, len(calls), 2)]
    assert [pair[0][0] for pair in orders] == [pair[1][0] for pair in orders] == ["Hello.", "Print one.", "Hi."] * 6
    assert {pair[0][1] for pair in orders} == {"off", "n-gram"}  # who begins changes
    assert calls[0][2] == 0 and calls[-1][2] == 5002 and all(len(way.seconds) == 6 for way in ways)


def test_a_taught_policy_has_played_the_logs_other_prompts_at_this_machines_costs(smollm2, monkeypatch):
    monkeypatch.setattr(bench_adaptive.throughput, "step_cost", lambda *a: lambda arm, n: 0.05 + 0.003 * n)
    ways = {way.name: way for way in bench_adaptive.ways(smollm2, **{"eagle-code": 3})}
    assert (
        ways["eagle-code"].arms[0].gamma == 3
        and ways["eagle-chat"].arms[0].gamma == bench_adaptive.GAMMAS["eagle-chat"]
    )
    name = f"{bench_adaptive.LOOKUP_FIRST}, taught"
    policy, untaught = ways[name].policy(), ways[bench_adaptive.LOOKUP_FIRST].policy()
    assert policy.num_arms == untaught.num_arms == len(ways[name].arms) == 4
    assert sorted(policy.policy.policies) == ["False", "True"] and not untaught.policy.policies
    lessons = {p for _, p in workloads.changing(bench_adaptive.DOMAINS, bench_adaptive.TUNED_ON, 3).prompts}
    stream = workloads.changing(bench_adaptive.DOMAINS, 7, 9, 3, bench_adaptive.TUNED_ON)
    assert not lessons & {p for _, p in stream.prompts}  # the longest that is measured
    assert 0 < policy.fastest <= 9 / 0.05  # tokens a second, as in the engine
    code = policy.policy.policies["True"]
    assert code.select_arm() != 0 and ways[name].policy().policy.policies["True"].num_rounds == code.num_rounds > 100
