"""How fast whole answers are here, what a wider pass costs here, and from which acceptance rate on drafting pays.

Settings of a small, a T4 and a full run stand here too. It leaves out the peers (bench_engine.py, bench_cpu.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from flashspec_core.engine.decode import generate
from flashspec_core.engine.drafters import EarlyExitDrafter, ModelDrafter, NGramDrafter
from flashspec_core.engine.head_drafters import load_drafter
from flashspec_core.engine.heads import WEIGHTS
from flashspec_core.engine.kv_cache import CachedModel
from flashspec_core.engine.models import load_target
from flashspec_core.engine.text import encode_prompts
from flashspec_core.lab import bench, workloads
from flashspec_core.records import Arm, Sampling

_SMOKE = dict(
    target="smollm2-135m", drafters=("n-gram", "eagle-mixed"), quantization="", max_new_tokens=32, prompts=1, repeat=1
)
PROFILES = {
    "smoke": _SMOKE,
    "t4": dict(
        target="TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        drafters=("n-gram", "vllm-project/llama-160m"),
        quantization="nf4",
        max_new_tokens=128,
        prompts=3,
        repeat=3,
    ),
    "full": _SMOKE | dict(max_new_tokens=128, prompts=5, repeat=3),
}
REPORTED = {"tokens_per_second": 44.2, "acceptance_rate": 0.75, "step_p50": 22.1}  # the seed's, on a T4


def settings(profile: str, **given) -> dict:
    """What a profile says, where nothing else is asked for.

    Args: profile: of PROFILES; given: name -> value; None, "" or an empty list take the profile's.
    Raises: ValueError: no such profile.

    >>> settings("smoke", target="", repeat=4)["repeat"]
    4
    """
    if profile not in PROFILES:
        raise ValueError(f"profile must be one of {', '.join(PROFILES)}, got {profile!r}")
    return PROFILES[profile] | {name: value for name, value in given.items() if value}


def make_drafter(name: str, target):
    """A drafter by name: "n-gram", "early exit" (a quarter of the layers), a draft head, or a small model's name.

    Args: name; target: what `load_target` returns.
    Raises: OSError, ValueError: as `load_target` and `load_drafter` do.
    """
    if name == "n-gram":
        return NGramDrafter()
    if name == "early exit":
        return EarlyExitDrafter(target, max(1, target.model.config.get_text_config().num_hidden_layers // 4))
    if (WEIGHTS / f"{name}.safetensors").exists():
        return load_drafter(name, target)
    return ModelDrafter(load_target(name, target.dtype, target.device), name=name)


def prompts_of(dataset: str, target, count: int) -> dict[str, list[list[int]]]:
    """Prompts as ids by domain.

    Args:
        dataset: "prompts" (this suite's), or a path: Spec-Bench's question.jsonl, HumanEval.jsonl or .jsonl.gz.
        target: what `load_target` returns, with a tokenizer.
        count: prompts a domain.
    """
    if dataset == "prompts":
        domains = {name: workloads.PROMPTS[name] for name in workloads.first_prompts()}
    elif "humaneval" in dataset.lower():
        domains = {"HumanEval": workloads.human_eval(dataset)}
    else:
        domains = workloads.spec_bench(dataset)
    chat = getattr(target.tokenizer, "chat_template", None)
    told = workloads.chat_messages if chat else str
    return {
        name: [encode_prompts(target, told(text))[0][0] for text in texts[:count]] for name, texts in domains.items()
    }


@dataclass
class Measured:
    """One drafter on one domain.

    Args:
        drafter, domain, gamma: which; "off" is plain decoding.
        tokens_per_second: a value a timed round.
        outs: the Generations of the last round.
    """

    drafter: str
    domain: str
    gamma: int
    tokens_per_second: list[float] = field(default_factory=list)
    outs: list = field(default_factory=list, repr=False)

    @property
    def speed(self) -> float:
        """Tokens a second of the median round."""
        return sorted(self.tokens_per_second)[len(self.tokens_per_second) // 2]

    @property
    def steps(self) -> list:
        """All steps behind each answer's first, which reads the prompt."""
        return [step for out in self.outs for step in out.steps[1:]]

    @property
    def acceptance_rate(self) -> float:
        """Accepted over tested tokens of all answers; NaN where nothing was tested."""
        tested = sum(step.num_tested for out in self.outs for step in out.steps)
        return sum(step.num_accepted for out in self.outs for step in out.steps) / tested if tested else float("nan")

    @property
    def step_seconds(self) -> float:
        """The median step's."""
        seconds = sorted(step.step_seconds for step in self.steps)
        return seconds[len(seconds) // 2]

    def rows(self, target, temperature: float, batch: int) -> list[dict]:
        """As tidy rows. Args: target, temperature, batch: what was measured."""
        mode = "graph" if self.outs[0].mode == "captured" else "eager"
        cells = dict(mode=mode, batch=batch, gamma=self.gamma or "", temperature=temperature, domain=self.domain)
        cells |= dict(note=self.drafter, **bench.model_cells(target))
        cells["method"] = "token" if self.gamma else "plain"
        values = {
            ("tokens_per_second", "1/s"): self.tokens_per_second,
            ("step_p50", "ms"): [self.step_seconds * 1e3],
            ("tokens_per_step", "1"): [out.tokens_per_step for out in self.outs],
        }
        if self.acceptance_rate == self.acceptance_rate:
            values["acceptance_rate", "1"] = [self.acceptance_rate]
        return [bench.row("decode", "flashspec_core", *what, each, **cells) for what, each in values.items()]


def measure(
    target, drafters: dict, prompts: dict, gamma: int, temperature: float, max_new_tokens: int, repeat: int, batch=1
) -> list[Measured]:  # fmt: skip
    """Plain decoding and every drafter on every domain, in turn in each round, behind a warm-up.

    Args:
        target: what `load_target` returns.
        drafters: {name: drafter}.
        prompts: {domain: lists of ids}.
        gamma, temperature, max_new_tokens: of the answers.
        repeat: timed rounds.
        batch: prompts at a time; a domain's prompts are repeated to fill it.
    """
    arms = {"off": Arm(None)} | {name: Arm(drafter, gamma) for name, drafter in drafters.items()}
    found = [Measured(name, domain, arm.gamma or 0) for domain in prompts for name, arm in arms.items()]
    options = dict(max_new_tokens=max_new_tokens, sampling=Sampling(temperature), capture=None)
    for number in range(repeat + 1):
        for one in found:
            texts = prompts[one.domain]
            texts = (texts * batch)[: max(batch, len(texts))]
            groups = [texts[i : i + batch] for i in range(0, len(texts), batch)]
            if not number:
                groups = groups[:1]
            bench.synchronise()
            start = time.perf_counter()
            outs = [out for group in groups for out in generate(target, arms[one.drafter], group, **options)]
            seconds = time.perf_counter() - start
            if number:
                one.tokens_per_second.append(sum(len(out.token_ids) for out in outs) / seconds)
                one.outs = outs
    return found


def pass_seconds(target, widths=range(1, 10), context: int = 128, repeat: int = 7) -> dict[int, float]:
    """What a pass over some tokens costs behind a context, the widths in turn.

    Args: target: what `load_target` returns; widths: tokens a pass; context: ids in front; repeat: passes of each.
    Returns: {width: seconds}, medians.
    """
    one, found = _pass(target, context), {width: [] for width in widths}
    for number in range(repeat + 1):
        for width in widths:
            (seconds,) = bench.measure(lambda w=width: one(w), warmup=0, repeat=1)
            found[width] += [seconds] if number else []
    return {width: sorted(seconds)[repeat // 2] for width, seconds in found.items()}


def step_cost(target, head: Arm, names, repeat: int = 5):
    """What a step costs here, for `positions.play`, from whole steps: plain ones, and ones of a head.

    Rule: a pass by its width, what a plain step takes beside its pass, and what a head's step takes beside both, shared
    out among its tokens.

    Args: target; head: an Arm whose drafter is a head; names: drafters that cost as it does; repeat: passes of a width.
    Returns: f((drafter's name, gamma), drafted tokens, up to 8) -> seconds.
    Raises: ValueError: the head drafted in no step.
    """
    passes, prompt = pass_seconds(target, range(1, 10), repeat=repeat), workloads.PROMPTS["code"][0]
    beside = []
    for arm in (Arm(None), head):
        steps = generate(target, arm, workloads.chat_messages(prompt), max_new_tokens=48).steps[1:]
        extra = [
            s.step_seconds - passes[1 + s.num_draft_tokens] for s in steps if s.num_draft_tokens or arm is not head
        ]
        if not extra:
            raise ValueError(
                f"expected a drafter that drafts, got {arm.name!r}, which drafted nothing in {len(steps)} steps"
            )
        beside.append(max(0.0, sorted(extra)[len(extra) // 2]))
    fixed, drafted = beside[0], max(0.0, beside[1] - beside[0]) / head.gamma
    return lambda arm, n: passes[n + 1] + fixed + n * drafted * (arm[0] in names)


def _pass(target, context: int):
    """f(width): a pass over so many tokens, captured where steps are."""
    if target.device.type == "cuda":
        from flashspec_core.engine.cuda_graphs import Station, why_not

        if why_not(target.model) is None:
            station = Station(target, 1, max(512, 2 * context))
            station.lengths.fill_(context)

            def run(width):
                ids = station.tokens[:, :width]
                return station.fused.logits(station.fused.states(ids, station.lengths, station.cache)[0])

            return lambda width: station.replay(("pass", width), lambda: run(width))
    cached, ids = CachedModel(target.model), [1 + i % 97 for i in range(2 * context)]
    cached.logits([ids[:context]], 1)
    return lambda width: cached.logits([ids[: context + width]], width)


def break_even(costs: dict[int, float], draft_seconds: float, gamma: int) -> float:
    """The acceptance rate from which drafting gamma tokens is faster than decoding plainly.

    Rule: tokens a step (1 - a^(gamma + 1)) / (1 - a) equal the step's cost in plain passes; by bisection.

    Args: costs: from `pass_seconds`; draft_seconds: of one drafted token; gamma: drafted tokens.
    Returns: In [0, 1]; 1 where nothing suffices.

    >>> round(break_even({1: 1.0, 3: 1.0}, 0.2, 2), 3)  # 1 + a + a^2 = 1.4
    0.306
    """
    price = (costs[gamma + 1] + gamma * draft_seconds) / costs[1]
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**k for k in range(gamma + 1)) < price else (low, rate)
    return high
