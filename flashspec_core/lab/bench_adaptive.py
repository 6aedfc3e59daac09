"""Streams of prompts, decoded by fixed arms and by policies in turns: tokens a second, regret, and which arm when.

A policy lives through a whole stream, and lessons are of other prompts than the measured ones (positions.py replays
those in no time). It leaves out the streams (workloads.py) and the policies.
"""

from __future__ import annotations

import argparse
import copy
import functools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from scipy import stats

from flashspec_core.bandits import UCB1, DiscountedUCB, ThompsonSampling
from flashspec_core.engine.contexts import InCode, Repeats, Together
from flashspec_core.engine.decode import generate
from flashspec_core.engine.models import load_target
from flashspec_core.lab import bench, positions, throughput, workloads
from flashspec_core.lab.bench_cpu import GAMMAS, own_arms
from flashspec_core.lab.results import LOOKUP_FIRST
from flashspec_core.policies import Contextual, FixedArm, Preferring
from flashspec_core.records import Arm, Sampling

TUNED_ON = 10  # prompts a domain for settings and lessons; measured are those behind them
DOMAINS = ("chat", "code", "copy-edit")
EAGLES = [name for name in positions.HEADS if name.startswith("eagle")]


@dataclass
class Way:
    """A fixed arm, or a policy over several.

    Args:
        name: of its rows.
        arms: Arms.
        policy: f() -> a new policy, or None: one arm.
        context, reward: see generate.
        seconds, chosen: of each repeat a list an answer: its time; a Counter of arms' names.
    """

    name: str
    arms: list
    policy: Callable | None = None
    context: object = None
    reward: str = "tokens_per_second"
    seconds: list = field(default_factory=list)
    chosen: list = field(default_factory=list)


def ways(target, **gammas) -> list[Way]:
    """Each arm alone, n-grams and else a head by a fixed rule, the seed's two policies, and this suite's.

    Args: target: SmolLM2, as `load_target` returns it; gammas: drafted tokens of an arm, where not as in bench_cpu.py.
    """
    arms = own_arms(target, {name: gamma for name, gamma in GAMMAS.items() if name != "medusa-mixed"})
    arms |= {name: Arm(arms[name].drafter, gamma) for name, gamma in gammas.items()}
    own, count = list(arms.values()), len(arms)
    drafting = own[1:]  # n-grams, then heads
    rule = lambda: Preferring(0, FixedArm(len(drafting) - 2, len(drafting) - 1))  # noqa: E731 - eagle-mixed is the last
    contextual = lambda: Contextual(DiscountedUCB(count, discount=0.998, xi=0.005))  # noqa: E731
    heads = Contextual(DiscountedUCB(len(drafting) - 1, discount=0.998, xi=0.01))
    lookup_first = lambda: Preferring(0, copy.deepcopy(heads))  # noqa: E731
    return [
        *(Way(name, [arm]) for name, arm in arms.items()),
        Way("n-gram, else eagle-mixed", drafting, rule, Together(Repeats(2), InCode())),
        Way("UCB1 on accepted fraction", own, lambda: UCB1(count), reward="accepted_fraction"),
        Way("Thompson on accepted fraction", own, lambda: ThompsonSampling(count), reward="accepted_fraction"),
        Way("contextual UCB", own, contextual, Together(InCode(), Repeats(2))),
        Way(LOOKUP_FIRST, drafting, lookup_first, Together(Repeats(2), InCode())),
        Way(
            f"{LOOKUP_FIRST}, taught", drafting, _taught(target, drafting, lookup_first), Together(Repeats(2), InCode())
        ),
    ]


def _taught(target, arms, make) -> Callable:
    """f() -> a policy that has played the log's other prompts, at this machine's costs, in time that is not counted."""
    log = positions.read(bench.RESULTS / "arms_by_position.csv.gz")
    others = positions.stream(log, workloads.changing(DOMAINS, TUNED_ON, len(DOMAINS)).prompts)
    pairs = [(arm.drafter.name, arm.gamma) for arm in arms]
    cost = functools.cache(lambda: throughput.step_cost(target, arms[-1], EAGLES))

    def policy():
        new = make()
        positions.play(others, pairs, cost(), new, lambda row: (row["proposed"] > 0, bool(row["in_code"])))
        return new

    return policy


def run(target, ways, stream, num_tokens: int, temperature: float, seed: int = 0) -> None:
    """Every way decodes the stream once, all of them prompt by prompt in random turns; what it took is kept with them.

    Rule: a slow moment of the machine then hits all; a policy still lives through the whole stream.

    Args: target; ways; stream: a workloads.Stream; num_tokens, temperature: of an answer; seed: of it and of the turns.
    """
    rng, policies = np.random.default_rng(seed), [way.policy() if way.policy else None for way in ways]
    for way in ways:
        way.seconds.append([])
        way.chosen.append([])
    for i, (_, text) in enumerate(stream.prompts):
        for number in rng.permutation(len(ways)):
            way = ways[number]
            options = dict(max_new_tokens=num_tokens, sampling=Sampling(temperature), reward=way.reward)
            options |= dict(policy=policies[number], context=way.context, seed=seed * 1000 + i)
            bench.synchronise()
            start = time.perf_counter()
            out = generate(target, way.arms, workloads.chat_messages(text), **options)
            bench.synchronise()
            way.seconds[-1].append((time.perf_counter() - start) / len(out.token_ids))
            way.chosen[-1].append(Counter(step.drafter for step in out.steps))


def rows_of(target, ways, streams, temperature: float, name: str) -> list[dict]:
    """What the repeats say: speed, gain over the best fixed arm, the oracle's share, regret, and arms by domain.

    Rule: seconds are a token's, an answer at a time, so that each answer counts alike; the best fixed arm is the
    drafter whose sum over all repeats is least; the oracle takes in each block of a stream the arm fastest there.
    Gains are paired by repeat, with 95 % bands of Student's t over times and orders: the prompts are the same.

    Args: target; ways: after `run`; streams: one a repeat; temperature; name: of the kind of stream.
    """
    cells = dict(temperature=temperature, **bench.model_cells(target))
    if target.device.type == "cpu":
        cells["device"] = bench.cpu_name()
    fixed = [way for way in ways if way.policy is None]
    sums = {way.name: np.array([np.sum(seconds) for seconds in way.seconds]) for way in ways}
    best = min(fixed, key=lambda way: sums[way.name].sum()).name
    oracle = np.array([_oracle(fixed, i, stream) for i, stream in enumerate(streams)])
    rows, put = (
        [],
        lambda note, metric, unit, values, **more: rows.append(
            bench.row(f"stream: {name}", "flashspec_core", metric, unit, values, note=note, **cells, **more)
        ),
    )
    gammas = {way.name: way.arms[0].gamma for way in fixed if way.arms[0].drafter is not None}
    for note, seconds in [*sums.items(), ("oracle by block", oracle)]:
        speeds = [len(s.prompts) / t for s, t in zip(streams, seconds, strict=True)]
        put(note, "tokens_per_second", "1/s", speeds, gamma=gammas.get(note, ""))
        put(note, "regret", "s/token", list((seconds - oracle) / [len(s.prompts) for s in streams]))
        gains = sums[best] / seconds - 1
        put(note, "gain", "1", list(gains))
        if len(gains) > 1 and gains.std():
            low, high = stats.t.interval(0.95, len(gains) - 1, gains.mean(), stats.sem(gains))
            put(note, "gain_low", "1", [low])
            put(note, "gain_high", "1", [high])
        most = (sums[best] / oracle - 1).mean()
        if most > 0:  # else one arm was the fastest everywhere
            put(note, "share_of_oracle", "1", [gains.mean() / most])
    put(best, "best_fixed", "", [1])
    for way in ways:
        if way.policy is None:
            continue
        for domain in dict.fromkeys(d for d, _ in streams[0].prompts):
            counts = [
                sum((c for c, (d, _) in zip(chosen, s.prompts, strict=True) if d == domain), Counter())
                for chosen, s in zip(way.chosen, streams, strict=True)
            ]
            for arm in way.arms:
                shares = [count[arm.name] / sum(count.values()) for count in counts]
                put(f"{way.name}: {arm.name}", "arm_share", "1", shares, domain=domain)
    return rows


def _oracle(fixed, repeat: int, stream) -> float:
    ends = [*stream.changes, len(stream.prompts)]
    blocks = zip([0, *stream.changes], ends, strict=True)
    return sum(min(sum(way.seconds[repeat][a:b]) for way in fixed) for a, b in blocks)


def warm(target, ways, domains, num_tokens: int, temperature: float) -> None:
    """Every arm and policy decodes a prompt of each domain that is not measured: kernels, graphs, threads, caches.

    Rule: 16 tokens on a CPU; whole answers where steps are captured, as an arm that comes late is captured then.

    Args: target; ways; domains: of the stream; num_tokens, temperature: of an answer.
    """
    few = num_tokens if target.device.type == "cuda" else min(16, num_tokens)
    for way in ways:
        policies = [FixedArm(i, len(way.arms)) for i in range(len(way.arms))]
        for policy in [*policies, way.policy()] if way.policy else policies:
            for prompt in (workloads.chat_messages(workloads.PROMPTS[domain][0]) for domain in domains):
                options = dict(policy=policy, context=way.context, reward=way.reward, sampling=Sampling(temperature))
                generate(target, way.arms, prompt, max_new_tokens=few, **options)


def _gamma(text: str) -> tuple[str, int]:
    name, _, gamma = text.partition("=")
    return name, int(gamma)


def main(arguments=None) -> None:
    """python -m flashspec_core.lab.bench_adaptive FILE. Args: arguments: a list, or None: the command's."""
    parser = argparse.ArgumentParser(
        prog="python -m flashspec_core.lab.bench_adaptive", description=__doc__.splitlines()[0]
    )
    parser.add_argument("file", help="the CSV that rows are added to")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", help="as in load_target")
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS), help="one alone: a stationary stream")
    parser.add_argument("--block", type=int, default=3, help="prompts of a block")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--ways", nargs="+", help="names; default: all")
    parser.add_argument("--gammas", nargs="+", type=_gamma, default=[], help="NAME=TOKENS, as eagle-code=3")
    parser.add_argument("--temperature", type=float, default=0.0)
    o = parser.parse_args(arguments)
    target = load_target(dtype=o.dtype, device=o.device)
    known = {*GAMMAS, "n-gram"} - {"medusa-mixed"}
    if set(dict(o.gammas)) - known:
        parser.error(f"expected --gammas of {sorted(known)}, got {sorted(dict(o.gammas))}")
    every = ways(target, **dict(o.gammas))
    streams = [workloads.changing(o.domains, o.block, o.blocks, seed, TUNED_ON) for seed in range(o.repeats)]
    unknown = set(o.ways or ()) - {way.name for way in every}
    if unknown:
        parser.error(f"expected --ways among {[way.name for way in every]}, got {sorted(unknown)}")
    every = [way for way in every if not o.ways or way.name in o.ways]
    if all(way.policy for way in every):
        parser.error("--ways needs a fixed arm among them, to compare with")
    warm(target, every, o.domains, o.tokens, o.temperature)
    for number, stream in enumerate(streams):
        run(target, every, stream, o.tokens, o.temperature, number)
        print(f"repeat {number} of {o.repeats}", flush=True)
    for way in every:
        print(f"{way.name}: " + ", ".join(f"{1 / np.mean(seconds):.1f}" for seconds in way.seconds), flush=True)
    name = "changing" if len(o.domains) > 1 else f"stationary {o.domains[0]}"
    bench.append_rows(rows_of(target, every, streams, o.temperature, name), o.file)


if __name__ == "__main__":
    main()
