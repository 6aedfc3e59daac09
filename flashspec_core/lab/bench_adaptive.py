"""Streams of prompts, decoded by fixed arms and by policies in turns: tokens a second, regret, and which arm when.

A policy lives through a whole stream. Settings belong to other prompts than the measured ones (positions.py replays
those in no time). It leaves out the streams (workloads.py) and the policies.
"""

from __future__ import annotations

import argparse
import copy
import functools
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy import stats

from flashspec_core.bandits import UCB1, DiscountedUCB, ThompsonSampling
from flashspec_core.engine.contexts import InCode, Repeats, Together
from flashspec_core.engine.decode import generate
from flashspec_core.engine.drafters import CascadeDrafter
from flashspec_core.engine.models import load_target
from flashspec_core.lab import bench, positions, throughput, workloads
from flashspec_core.lab.bench_cpu import GAMMAS, own_arms
from flashspec_core.policies import Contextual, FixedArm, Preferring
from flashspec_core.records import Arm, Sampling

TUNED_ON = 10  # prompts a domain that settings were chosen on; measured are those behind them
DOMAINS = ("chat", "code", "copy-edit")
LOOKUP_FIRST = "lookup first, else contextual UCB over heads"


@dataclass
class Way:
    """A fixed arm, or a policy over several.

    Args:
        name: of its rows.
        arms: Arms.
        policy: f() -> a new policy, or None: one arm.
        context, reward: see generate.
        rule: one arm that is several drafters by a fixed rule: shown beside the others, no arm that policies choose.
        seconds, chosen: of each repeat a list an answer: its time; a Counter of arms' names.
    """

    name: str
    arms: list
    policy: Callable | None = None
    context: object = None
    reward: str = "tokens_per_second"
    rule: bool = False
    seconds: list = field(default_factory=list)
    chosen: list = field(default_factory=list)


def ways(target, **gammas) -> list[Way]:
    """Each arm alone, n-grams with a head behind them, the seed's two policies, and this suite's.

    Args: target: SmolLM2, as `load_target` returns it; gammas: drafted tokens of an arm, where not as in bench_cpu.py.
    """
    arms = own_arms(target, {name: gamma for name, gamma in GAMMAS.items() if name != "medusa-mixed"})
    arms |= {name: Arm(arms[name].drafter, gamma) for name, gamma in gammas.items()}
    own, count = list(arms.values()), len(arms)
    drafting = own[1:]  # n-grams, then heads
    both = CascadeDrafter(arms["n-gram"], arms["eagle-mixed"])
    contextual = lambda: Contextual(DiscountedUCB(count, discount=0.998, xi=0.005))  # noqa: E731
    heads = Contextual(DiscountedUCB(len(drafting) - 1, discount=0.998, xi=0.01))
    lookup_first = lambda: Preferring(0, copy.deepcopy(heads))  # noqa: E731
    return [
        *(Way(name, [arm]) for name, arm in arms.items()),
        Way(both.name, [Arm(both, arms["n-gram"].gamma)], rule=True),
        Way("UCB1 on accepted fraction", own, lambda: UCB1(count), reward="accepted_fraction"),
        Way("Thompson on accepted fraction", own, lambda: ThompsonSampling(count), reward="accepted_fraction"),
        Way("contextual UCB", own, contextual, Together(InCode(), Repeats(2))),
        Way(LOOKUP_FIRST, drafting, lookup_first, Together(Repeats(2), InCode())),
        Way(
            f"{LOOKUP_FIRST}, taught", drafting, _taught(target, drafting, lookup_first), Together(Repeats(2), InCode())
        ),
    ]


def _taught(target, arms, make) -> Callable:
    """f() -> a policy that has played the log's other prompts, at the costs of this machine, before it decodes."""
    log = positions.read(bench.RESULTS / "arms_by_position.csv.gz")
    others = positions.stream(log, workloads.changing(DOMAINS, 5, 6, 0).prompts)  # the first TUNED_ON of each domain
    pairs = [(arm.drafter.name, arm.gamma) for arm in arms]
    cost = functools.cache(lambda: throughput.step_cost(target, arms[-1], positions.HEADS))

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
    fixed = [way for way in ways if way.policy is None and not way.rule]
    sums = {way.name: np.array([np.sum(seconds) for seconds in way.seconds]) for way in ways}
    best = min(fixed, key=lambda way: sums[way.name].sum()).name
    oracle = np.array([_oracle(fixed, i, stream) for i, stream in enumerate(streams)])
    rows, put = (
        [],
        lambda note, metric, unit, values, **more: rows.append(
            bench.row(f"stream: {name}", "flashspec_core", metric, unit, values, note=note, **cells, **more)
        ),
    )
    for note, seconds in [*sums.items(), ("oracle by block", oracle)]:
        put(note, "tokens_per_second", "1/s", [len(s.prompts) / t for s, t in zip(streams, seconds, strict=True)])
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


def warm(target, ways, temperature: float) -> None:
    """Every arm of every way once: kernels, graphs, threads and caches are there before anything counts.

    Args: target; ways; temperature.
    """
    for way in ways:
        for i in range(len(way.arms)):
            options = dict(policy=FixedArm(i, len(way.arms)), sampling=Sampling(temperature))
            generate(target, way.arms, "Warm up.", max_new_tokens=8, **options)


def _alone(o, number: int, stream, cores) -> list[tuple]:
    """One repeat in a process of its own, on cores of its own. Returns: seconds and choices of each way."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    target = load_target(dtype=o.dtype, device=o.device)
    chosen = [way for way in ways(target, **dict(o.gammas)) if not o.ways or way.name in o.ways]
    warm(target, chosen, o.temperature)
    run(target, chosen, stream, o.tokens, o.temperature, number)
    return [(way.seconds, way.chosen) for way in chosen]


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
    parser.add_argument("--side-by-side", action="store_true", help="Linux: repeats at the same time, cores shared out")
    o = parser.parse_args(arguments)
    target = load_target(dtype=o.dtype, device=o.device)
    every = ways(target, **dict(o.gammas))
    streams = [workloads.changing(o.domains, o.block, o.blocks, seed, TUNED_ON) for seed in range(o.repeats)]
    unknown = set(o.ways or ()) - {way.name for way in every}
    if unknown:
        parser.error(f"expected --ways among {[way.name for way in every]}, got {sorted(unknown)}")
    every = [way for way in every if not o.ways or way.name in o.ways]
    if all(way.policy for way in every):
        parser.error("--ways needs a fixed arm among them, to compare with")
    if o.side_by_side:
        cores = sorted(os.sched_getaffinity(0))
        each = max(1, len(cores) // o.repeats)
        jobs = [(o, i, stream, cores[i * each : (i + 1) * each]) for i, stream in enumerate(streams)]
        with multiprocessing.get_context("spawn").Pool(o.repeats) as pool:
            for found in pool.starmap(_alone, jobs, chunksize=1):
                for way, (seconds, chosen) in zip(every, found, strict=True):
                    way.seconds, way.chosen = way.seconds + seconds, way.chosen + chosen
    else:
        warm(target, every, o.temperature)
        for number, stream in enumerate(streams):
            run(target, every, stream, o.tokens, o.temperature, number)
            print(f"repeat {number} of {o.repeats}", flush=True)
    for way in every:
        print(f"{way.name}: " + ", ".join(f"{1 / np.mean(seconds):.1f}" for seconds in way.seconds), flush=True)
    name = "changing" if len(o.domains) > 1 else f"stationary {o.domains[0]}"
    bench.append_rows(rows_of(target, every, streams, o.temperature, name), o.file)


if __name__ == "__main__":
    main()
