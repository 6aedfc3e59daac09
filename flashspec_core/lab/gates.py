"""Gates that can fail: goodness of fit of door and engine against exact laws, their power, and a certificate.

`certify` judges any callable of the door's signature. The laws are made in exactness.py, faults planted in mutants.py.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch

from flashspec_core.bandits import UCB1, ThompsonSampling
from flashspec_core.engine.decode import generate
from flashspec_core.engine.drafters import ModelDrafter, NGramDrafter
from flashspec_core.lab.exactness import (
    CASES,
    ENUMERATED,
    KS_CASES,
    ImpossibleResult,
    chain_law,
    output_law,
    plain_law,
    random_case,
    sample,
    step_law,
    table_model,
    tiny_models,
    total_variation,
)
from flashspec_core.lab.fit import ALPHA, SAMPLES, Finding, judge, power
from flashspec_core.records import Arm, Sampling
from flashspec_core.verify import METHODS, verify


@functools.cache
def expected(name: str, method: str):
    """Laws that the gates of a case compare with: of three tokens, and of each way the first step can end.

    Args: name, method: of CASES and METHODS.
    Returns: {gate: probabilities}.
    """
    case = CASES[name]
    joints = step_law(case, method)
    accepted = sum(joint.sum(tuple(range(1, joint.ndim))) for joint in joints[1:])
    bonus = joints[-1].sum(tuple(range(case.gamma)))
    return {"joint": chain_law(case, 3), "joints": joints, "accepted": accepted, "rejected": joints[0], "bonus": bonus}


def case_findings(name: str, method: str, num_rows: int, seed: int, alpha: float, verifier=verify) -> list[Finding]:
    """All chi-square gates of one case: positions, the joint law, and the ways in which the first step can end.

    Args: name, method, num_rows, seed, alpha, verifier: see CASES, `sample` and Finding.
    """
    laws, case, where = expected(name, method), CASES[name], f"{name}, {method}"
    tokens, num_accepted, emitted = (x.numpy() for x in sample(case, method, num_rows, 3, seed, verifier))
    counts = np.zeros((case.vocab,) * 3)
    np.add.at(counts, tuple(tokens.T), 1)
    out = [judge("joint", f"{where}: three tokens", counts, laws["joint"], alpha)]
    for i, others in enumerate(((1, 2), (0, 2), (0, 1))):
        marginal = judge("position", f"{where}: token {i + 1}", counts.sum(others), laws["joint"].sum(others), alpha)
        out.append(marginal)
    fates = [joint.sum() for joint in laws["joints"]]
    out.append(
        judge("fate", f"{where}: tokens accepted", np.bincount(num_accepted, minlength=len(fates)), fates, alpha)
    )
    ends = {"accepted": num_accepted > 0, "rejected": num_accepted == 0, "bonus": num_accepted == case.gamma}
    for gate, rows in ends.items():
        ids = emitted[rows, case.gamma if gate == "bonus" else 0]
        law = laws[gate]
        if len(ids):  # that an event never comes is for "fate" to see
            out.append(judge(gate, f"{where}: given {gate}", np.bincount(ids, minlength=case.vocab), law, alpha))
    return out


def ks_finding(vocab: int, method: str, seed: int = 0, verifier=verify, num_samples: int = SAMPLES) -> Finding:
    """The seed's hard gate: 10,000 first tokens against the target's law.

    Args: vocab, method, seed, verifier, num_samples: of KS_CASES, and see `sample`.
    """
    case, counts = KS_CASES[vocab], np.zeros(vocab)
    chunk = min(num_samples, max(1, 2**19 // vocab))  # small tensors stay in the processor's cache
    for start in range(0, num_samples, chunk):
        size = min(chunk, num_samples - start)
        tokens, _, _ = sample(case, method, size, 1, seed, verifier, start)
        counts += np.bincount(tokens[:, 0].numpy(), minlength=vocab)
    return judge("KS", f"V {vocab}, {method}", counts, chain_law(case, 1))


def edge_findings(method: str, verifier=verify) -> list[Finding]:
    """Cases whose outcome no chance decides: each must come out as it must; an exception is red too.

    Args: method, verifier: the rule, and a callable of the door's signature.
    """
    warm, nucleus = Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9)
    sure = torch.full((1, 4, 6), -math.inf).scatter_(-1, torch.tensor([[[1], [2], [3], [4]]]), 0.0)
    padded, unread = sure[:, [0, 0, 2, 3]].roll(-1, -1), sure.clone()  # read as id 0, padding would stand
    unread[0, 2:] = math.nan
    forbidden, certain = torch.tensor([[[0.0, -math.inf]] * 2]), torch.tensor([[[-math.inf, 0.0]]])
    tail = torch.full((1, 2, 8193), -math.inf).index_fill_(-1, torch.tensor([8192]), 0.0)
    unlikely, flat = torch.tensor([0.55, 0.4, 0.05]).log().expand(200, 2, 3), torch.zeros(1, 2, 2)
    trimmed = torch.tensor([[[0.0, -math.inf, -math.inf], [-math.inf, 0.0, -math.inf], [-math.inf, -math.inf, 0.0]]])
    both, rows = torch.tensor([[[1.0, 0.0]] * 2] * 64), [Sampling(), warm] * 32

    def emitted(target, ids, draft=None, log_u=0.0, sampling=warm, **options):
        ids = torch.tensor(ids, dtype=torch.int64)
        options |= dict(sampling=sampling, method=method, positions=torch.zeros(len(ids), dtype=torch.int64))
        noise = dict(log_uniforms=torch.full(ids.shape, log_u), seeds=torch.arange(len(ids)))
        return verifier(target, ids, draft, **options, **noise).token_ids.tolist()

    def refused():
        try:
            return not emitted(torch.tensor([[[math.nan, 0.0]] * 2]), [[1]])
        except ValueError:
            return True

    def beside():
        out = emitted(both, [[0]] * 64, torch.zeros(64, 1, 2), sampling=rows)
        return {tuple(row) for row in out[::2]} == {(0, 0)} and len({tuple(row) for row in out[1::2]}) > 1

    def vocabulary(**kept):
        return emitted(sure, [[1, 2, 5]], trimmed, draft_vocab_ids=torch.tensor([1, 2, 5]), **kept) == [[1, 2, 3, -1]]

    checks = {
        "all stand, then the bonus": lambda: emitted(sure, [[1, 2, 3]]) == [[1, 2, 3, 4]],
        "nothing stands behind a rejection": lambda: emitted(sure, [[1, 5, 3]]) == [[1, 2, -1, -1]],
        "-1 is no id": lambda: emitted(padded, [[0, -1, -1]]) == [[0, 0, -1, -1]],
        "nothing behind a row's end is read": lambda: emitted(unread, [[1, -1, -1]]) == [[1, 2, -1, -1]],
        "p = 0 never stands, not even at u = 0": lambda: emitted(forbidden, [[1]], certain, -math.inf)[0][0] == 0,
        "the last id of 8,193, and none behind it": lambda: emitted(tail, [[8192]]) == [[8192, 8192]],
        "filters reach every verified position": lambda: (
            not any(2 in row for row in emitted(unlikely, [[0]] * 150 + [[2]] * 50, sampling=nucleus))
        ),
        "no silent fall-back to greedy": lambda: len({x[0] for x in emitted(torch.zeros(64, 1, 8), [[]] * 64)}) > 1,
        "a greedy row beside a sampled one": beside,
        "a trimmed vocabulary": vocabulary,
        "a log-sum-exp that was kept": lambda: vocabulary(draft_logsumexp=torch.zeros(1, 3)),
        "logits without a law are refused": refused,
    }
    if method != "coupled":
        checks["p = q stands at u = 1"] = lambda: emitted(flat, [[1]], flat[:, :1])[0][0] == 1
    out = []
    for name, check in checks.items():
        try:
            good = check()
        except Exception as error:  # anybody's verifier may raise anything
            good, name = False, f"{name}: {type(error).__name__}"
        out.append(Finding("edges", f"{name}, {method}", float(not good), 0.0, not good))
    return out


@dataclass
class Report:
    """What `certify` found; prints as a table, the red findings first."""

    findings: list[Finding]

    @property
    def passed(self) -> bool:
        """Whether no gate fell."""
        return not any(f.red for f in self.findings)

    @property
    def lossless(self) -> bool:
        """Whether none fell but those of fates, which another way to accept may change without harm to the text."""
        return not any(f.red for f in self.findings if f.gate not in ("fate", "accepted", "rejected"))

    def gates(self) -> dict[str, bool]:
        """gate -> whether it fell somewhere."""
        names = dict.fromkeys(f.gate for f in self.findings)
        return {name: any(f.red for f in self.findings if f.gate == name) for name in names}

    def __str__(self):
        red = [f for f in self.findings if f.red]
        lines = [f"{'RED':5}{f.gate:14}{f.setting:56}{f.value:.3g} (limit {f.limit:.3g})" for f in red]
        for gate in self.gates():
            here = [f for f in self.findings if f.gate == gate]
            lines.append(f"{gate:19}{len(here):4} settings, {sum(f.red for f in here)} red")
        verdict = "lossless, but not by this method's rule" if self.lossless else "NOT lossless"
        return "\n".join([*lines, "passed" if self.passed else verdict])


def certify(verifier=verify, methods=METHODS, num_rows: int = 20_000, seed: int = 0, vocabs=(2, 80)) -> Report:
    """Judge a verifier: anybody's callable of the door's signature.

    Rule: KS at alpha .01 each, as the seed has it; the chi-square gates share .01 among them; edges are certain.
    "fate", "accepted" and "rejected" compare with the named method's own fates, all others with the target's law.

    Args:
        verifier: called as `fs.verify` is, with keyword options and float32 logits on the CPU, and returning token_ids
            and num_accepted.
        methods: that it is asked for.
        num_rows: texts of each case.
        seed: another seed is another trial.
        vocabs: of the KS gates; 49,152 takes a minute a method.
    Returns: Report.

    >>> certify(methods=["token"], num_rows=500, vocabs=[]).passed
    True
    """
    findings = [finding for method in methods for finding in edge_findings(method, verifier)]
    alpha = ALPHA / (8 * len(CASES) * len(methods))
    calls = [lambda m=m, v=v: [ks_finding(v, m, seed, verifier)] for m in methods for v in vocabs]
    calls += [lambda m=m, n=n: case_findings(n, m, num_rows, seed, alpha, verifier) for m in methods for n in CASES]
    for call in calls:
        try:
            findings += call()
        except ImpossibleResult as error:
            findings.append(Finding("edges", str(error), 1.0, 0.0, True))
    return Report(findings)


def enumeration_findings(methods=METHODS, tolerance: float = 1e-12) -> list[Finding]:
    """The specification's law of three tokens against the target's, every path added up, arms chosen by UCB1 included.

    Args: methods, tolerance: rules, and the largest total variation.
    """
    out = []
    for name, case in ENUMERATED.items():
        for method in methods:
            if method == "coupled":
                continue  # its paths add up whatever its chances are: equality of tokens is its gate
            policy = (lambda: UCB1(2)) if len(case.drafts) > 1 else None
            off = total_variation(output_law(case, method, 3, policy), chain_law(case, 3))
            out.append(Finding("enumeration", f"{name}, {method}", off, tolerance, not off <= tolerance))
    return out


# the engine, end to end


@dataclass(frozen=True)
class Setting:
    """One run of the engine: what is varied. Args: gamma, temperature, top_p, policy, method: as generate has them."""

    gamma: int
    temperature: float
    top_p: float | None
    policy: type
    method: str


SETTINGS = [  # all pairs of temperature, top-p, policy and method, and each gamma
    Setting(1, 0.7, 0.9, UCB1, "token"),
    Setting(2, 1.0, None, ThompsonSampling, "token"),
    Setting(3, 0.7, None, UCB1, "block"),
    Setting(4, 1.0, 0.9, ThompsonSampling, "block"),
    Setting(5, 0.7, 0.9, ThompsonSampling, "coupled"),
    Setting(2, 1.0, None, UCB1, "coupled"),
    Setting(5, 1.0, 0.9, UCB1, "block"),
    Setting(3, 0.7, None, ThompsonSampling, "token"),
]
PROMPT = [1, 2, 0, 1, 2]


def engine_finding(setting: Setting, num_rows: int = 2048, seed: int = 0, batch: int = 2048, alpha=1e-3) -> Finding:
    """The engine's joint law of three tokens on tiny random models, arms switching, against the exact one.

    The reward is the mean of a batch, so an arm hangs on a row's own past only where the batch is small.

    Args:
        setting: what is varied.
        num_rows, batch, seed: texts, how many at once, and which seeds.
        alpha: of the chi-square.
    """
    target, *models = tiny_models()
    arms = [Arm(ModelDrafter(model), setting.gamma) for model in models] + [Arm(NGramDrafter(1), setting.gamma)]
    sampling = Sampling(temperature=setting.temperature, top_p=setting.top_p)
    law = plain_law(target, PROMPT, sampling, 3)
    counts = _engine_counts(target, arms, PROMPT, 3, sampling, setting.method, setting.policy, num_rows, seed, batch)
    name = f"gamma {setting.gamma}, T {setting.temperature}, top-p {setting.top_p}, {setting.policy.__name__}"
    return judge("engine", f"{name}, {setting.method}", counts, law, alpha)


def table_finding(method: str, num_rows: int = 2048, seed: int = 0, alpha=1e-3) -> Finding:
    """The engine's joint law of five tokens in a world of tables, where drafts are poor and often drafted again.

    Args: method, num_rows, seed, alpha: see `engine_finding`.
    """
    case = random_case(3, gamma=4, seed=4, spread=2.0, num_arms=5)
    target, *models = map(table_model, (case.target, case.drafts[0], case.drafts[4]))
    arms = [Arm(ModelDrafter(model), case.gamma) for model in models]
    counts = _engine_counts(target, arms, [0], 5, case.sampling, method, UCB1, num_rows, seed, num_rows)
    return judge("engine", f"tables, {method}: five tokens", counts, chain_law(case, 5), alpha)


def _engine_counts(target, arms, prompt, num_tokens, sampling, method, policy, num_rows, seed, batch):
    counts = np.zeros((target.vocab_size,) * num_tokens)
    options = dict(method=method, sampling=sampling, max_new_tokens=num_tokens + arms[0].gamma)
    for start in range(0, num_rows, batch):
        seeds = dict(policy=policy(len(arms), seed=start), seed=(seed << 32) + start)
        rows = generate(target, arms, [prompt] * batch, **seeds, **options)
        np.add.at(counts, tuple(np.array([out.token_ids[:num_tokens] for out in rows]).T), 1)
    return counts


def false_alarms(repeats: int = 1000) -> dict[str, float]:
    """How often each gate falls without a fault: counts drawn from the target's own law, once a seed.

    Args: repeats: seeds.
    Returns: {gate and setting: share of red trials} at ALPHA and SAMPLES.
    """
    laws = {f"KS, V {v}": ("KS", chain_law(case, 1)) for v, case in KS_CASES.items() if v < 10_000}
    laws |= {f"chi-square, V {v}": ("position", chain_law(case, 1)) for v, case in KS_CASES.items() if v < 10_000}
    laws |= {f"joint, {name}": ("joint", chain_law(case, 3).ravel()) for name, case in CASES.items()}
    return {
        name: power(Finding(gate, name, 0.0, 0.0, False, ALPHA, law, law), SAMPLES, repeats)
        for name, (gate, law) in laws.items()
    }


def identity_findings() -> list[Finding]:
    """The engine where equality is asked for: greedy text, coupled text, and what a draft model says after a step.

    Greedy text and text of "coupled" are those of plain decoding, token for token, whatever drafts; the draft model's
    log-probabilities are those of a fresh pass over the text (BUGS: the bonus token's keys never reach the drafter).
    """
    target, *models = tiny_models()
    arms = [Arm(ModelDrafter(models[0]), 2), Arm(None), Arm(NGramDrafter(1), 3), Arm(ModelDrafter(target), 4)]
    prompts, out = [PROMPT, [3], [2, 2, 1]], []
    for name, options in (
        ("greedy", dict(sampling=Sampling())),
        ("coupled", dict(sampling=Sampling(temperature=1.0), method="coupled", seed=5)),
    ):
        plain = generate(target, Arm(None), prompts, max_new_tokens=16, **options)
        fast = generate(target, arms, prompts, policy=UCB1(4), max_new_tokens=16, **options)
        changed = sum(a.token_ids != b.token_ids for a, b in zip(plain, fast, strict=True))
        out.append(Finding("identity", f"{name} text equals plain decoding", changed, 0, changed > 0))
    drafters = [ModelDrafter(model, name=str(i)) for i, model in enumerate(models)]
    options = dict(sampling=Sampling(temperature=1.0), policy=UCB1(2), gamma=2, trace=True)
    worst, text = 0.0, list(PROMPT)
    for step in generate(target, drafters, PROMPT, max_new_tokens=30, **options).steps:
        with torch.no_grad():
            ids = torch.tensor([text + step.draft_token_ids])
            law = models[step.arm].model(input_ids=ids).logits[0].double().log_softmax(-1)
        for i, (token_id, logprob) in enumerate(zip(step.draft_token_ids, step.draft_logprobs, strict=True)):
            worst = max(worst, abs(float(law[len(text) + i - 1, token_id]) - logprob))
        text += step.token_ids
    out.append(Finding("identity", "a drafter's logits equal a fresh pass", worst, 1e-3, worst > 1e-3))
    return out
