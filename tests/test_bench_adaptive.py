"""lab/bench_adaptive.py: rows of a small stream are what its times say, and policies live through the stream."""

import os
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
    for ways, why in ((["contextual UCB"], "needs a fixed arm"), (["of", "off"], "expected --ways among")):
        with pytest.raises(SystemExit):
            bench_adaptive.main(["unused.csv", "--dtype", "float32", "--ways", *ways])
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


def test_a_rule_over_several_drafters_is_no_arm(smollm2):
    ways = make_ways()
    ways[1].rule = True
    for way, times in zip(ways, ([2.0] * 3, [1.0] * 3, [1.5] * 3), strict=True):
        way.seconds, way.chosen = [times], [[Counter(off=1)] * 3]
    rows = bench_adaptive.rows_of(smollm2, ways, [STREAM], 0.0, "tiny")
    assert [r["note"] for r in bench.pick(rows, metric="best_fixed")] == ["off"]
    assert bench.median(rows, note="n-gram", metric="gain") == pytest.approx(1.0)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are shared out on Linux alone")
def test_repeats_side_by_side_give_rows_of_all(tmp_path, smollm2):
    path, names = tmp_path / "rows.csv", ["off", "n-gram"]
    small = ["--block", "1", "--blocks", "1", "--repeats", "2", "--tokens", "4", "--domains", "chat"]
    bench_adaptive.main([str(path), "--dtype", "float32", "--ways", *names, "--side-by-side", *small])
    rows = bench.read_rows(path)
    speeds = bench.pick(rows, metric="tokens_per_second")
    assert {r["note"] for r in speeds} == {*names, "oracle by block"} and {r["num_repeats"] for r in speeds} == {"2"}
