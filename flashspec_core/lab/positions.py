"""A log of real text in which every drafter was scored at every position, and streams replayed from it.

Greedy text is the same whatever drafts, so that one pass over an answer tells what each drafter would have got at each
of its positions. It leaves out models, times, which are given, and sampled text.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch

from flashspec_core.bandits import share_of_fastest
from flashspec_core.engine.contexts import Committed, InCode, Repeats
from flashspec_core.engine.decode import generate
from flashspec_core.engine.drafters import DraftContext, NGramDrafter
from flashspec_core.engine.head_drafters import load_drafter
from flashspec_core.engine.heads import tapped
from flashspec_core.engine.models import load_target
from flashspec_core.lab import distill, workloads
from flashspec_core.records import Arm, Feedback

MOST = 8  # tokens that are looked at behind a position
HEADS = {"medusa-mixed": 4, "eagle-chat": MOST, "eagle-code": MOST, "eagle-mixed": MOST}  # how far each drafts
FIELDS = ("domain", "prompt", "position", "in_code", "repeats", "entropy", "proposed", "n-gram", *HEADS)


def score(target, prompts: dict, heads: dict, num_tokens: int = 64, batch: int = 8, report=print) -> list[dict]:
    """What each drafter would have got at each position of the greedy answers.

    Rule: at a position a drafter's score is how many of its first tokens are those that the answer goes on with; a head
    reads the target's own states up to there. At an answer's first position it cannot draft yet: `step` sees to that.

    Args:
        target: what `load_target` returns, in float32.
        prompts: {domain: texts}.
        heads: {name: a drafter with a head}.
        num_tokens, batch: of the answers; prompts at a time.
        report: called with a line a domain.
    Returns: Rows with FIELDS: entropy is that of the target's law at temperature 1 behind the position, in nats;
        repeats: the last three ids stood before; proposed: ids that n-grams put forward.
    """
    rows = []
    for domain, texts in prompts.items():
        for first in range(0, len(texts), batch):
            messages = [workloads.chat_messages(text) for text in texts[first : first + batch]]
            for i, out in enumerate(generate(target, Arm(None), messages, max_new_tokens=num_tokens)):
                cells = {"domain": domain, "prompt": first + i}
                rows += [cells | row for row in _positions(target, heads, out.prompt_token_ids, out.token_ids)]
        report(f"{domain}: {len(texts)} answers")
    return rows


@torch.inference_mode()
def _positions(target, heads, prompt, answer) -> list[dict]:
    ids, start = [*prompt, *answer], len(prompt)
    whole = torch.tensor([ids], device=target.device)
    with tapped(target.model, {layer for drafter in heads.values() for layer in drafter.head.config.layers}) as seen:
        logits = target.model(input_ids=whole, logits_to_keep=len(answer) + 1).logits[0, :-1].log_softmax(-1)
    entropy = -(logits.exp() * logits).sum(-1)
    scores = {}
    for name, drafter in heads.items():
        head = drafter.head
        features = torch.cat([seen[layer] for layer in head.config.layers], -1)
        said = [head.vocab_ids[x[0].argmax(-1)] for x in distill.unrolled(head, whole, features, HEADS[name])]
        scores[name] = [[bool(s[c - 2] == ids[c + k]) for k, s in enumerate(said) if c + k < len(ids)] for c in
                        range(start, len(ids))]  # fmt: skip
    finder, code, repeats, rows = NGramDrafter(), InCode(), Repeats(), []
    for at, c in enumerate(range(start, len(ids))):
        found = finder.draft(DraftContext([ids[:c]], [0], 0), MOST, None, None).token_ids[0].tolist()
        scores["n-gram"] = {at: [a == b for a, b in zip(found, ids[c:], strict=False)]}
        text = target.tokenizer.decode(answer[:at])
        row = {"position": at, "in_code": int(code([Committed([], text, [])])), "proposed": len(found)}
        row |= {"repeats": int(repeats([Committed(ids[:c], text, [])])), "entropy": round(float(entropy[at]), 2)}
        rows.append(row | {name: _leading(each[at]) for name, each in scores.items()})
    return rows


def _leading(flags) -> int:
    return len(list(itertools.takewhile(bool, flags)))


def write(rows, path) -> None:
    """Keep a log. Args: rows: from `score`; path: of a .csv.gz."""
    with gzip.open(path, "wt", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read(path) -> dict:
    """A log by answer. Args: path: of a .csv.gz. Returns: {(domain, prompt): list of rows, numbers as numbers}."""
    with gzip.open(path, "rt", newline="", encoding="utf-8") as file:
        kinds = {"domain": str, "entropy": float}
        return by_answer({k: kinds.get(k, int)(v) for k, v in row.items()} for row in csv.DictReader(file))


def by_answer(rows) -> dict:
    """Rows of each answer. Args: rows: from `score`. Returns: {(domain, prompt): list of rows}."""
    answers: dict = {}
    for row in rows:
        answers.setdefault((row["domain"], row["prompt"]), []).append(row)
    return answers


@dataclass
class Played:
    """A stream as it went.

    Args:
        seconds, tokens: of each answer.
        arms: a list a answer: the arm of each step.
    """

    seconds: list[float]
    tokens: list[int]
    arms: list[list[int]]

    @property
    def tokens_per_second(self) -> float:
        """Over the whole stream."""
        return sum(self.tokens) / sum(self.seconds)


def step(row: dict, arm: tuple, left: int) -> tuple[int, int]:
    """What an arm does at a position. Args: row: of the log; arm: (drafter or None, gamma); left: ids to the end.

    Returns: ids that it emits, ids that it drafts.
    """
    name, gamma = arm
    if gamma > MOST:
        raise ValueError(f"expected gamma up to {MOST}, which is what the log looks at, got {gamma}")
    gamma = min(gamma, HEADS.get(name, MOST))
    drafted = 0 if name is None or (name in HEADS and not row["position"]) else min(gamma, max(0, left - 1))
    drafted = min(drafted, row["proposed"]) if name == "n-gram" else drafted
    return min(row[name] if drafted else 0, drafted) + 1, drafted


def play(answers, arms, cost, policy, context=None) -> Played:
    """Decode a stream from the log, the policy choosing each step's arm and learning tokens per second.

    A policy that has learnt so may go on in `generate`: `fastest`, its scale of speed, is the same there. Reading the
    prompts, which takes every arm as long, is not in the seconds: gains are larger than those of whole answers.

    Args:
        answers: lists of rows of the log, one a prompt of the stream.
        arms: list of (drafter or None, gamma).
        cost: f(arm, drafted ids) -> seconds of the step.
        policy: of bandits.py or policies.py.
        context: f(row of the log) -> hashable, or None.
    Returns: Played.
    """
    played, count = Played([], [], []), 0
    for rows in answers:
        at, seconds, chosen = 0, 0.0, []
        while at < len(rows):
            told = context(rows[at]) if context else None
            arm = int(policy.select_arm(told))
            emitted, drafted = step(rows[at], arms[arm], len(rows) - at)
            took = cost(arms[arm], drafted)
            if at:  # as in the engine: the first step reads the prompt
                reward = share_of_fastest(policy, emitted / took)
                policy.update(arm, reward, Feedback(count, drafted, emitted - 1, int(emitted <= drafted), context=told))
            at, seconds, count = at + emitted, seconds + took, count + 1
            chosen.append(arm)
        played.seconds.append(seconds)
        played.tokens.append(len(rows))
        played.arms.append(chosen)
    return played


def best_path(rows, arms, cost) -> tuple[float, list[int]]:
    """The fastest way through one answer that any choice of arms has, known from behind: a bound on every policy.

    Args: rows: of one answer; arms, cost: see play.
    Returns: seconds, and the arms of its steps.
    """
    best = [(0.0, None, 0)] * (len(rows) + 1)
    for at in reversed(range(len(rows))):
        ways = []
        for i, arm in enumerate(arms):
            emitted, drafted = step(rows[at], arm, len(rows) - at)
            ways.append((cost(arm, drafted) + best[at + emitted][0], i, emitted))
        best[at] = min(ways)
    at, path = 0, []
    while at < len(rows):
        path.append(best[at][1])
        at += best[at][2]
    return best[0][0], path


def stream(answers: dict, prompts) -> list:
    """The log's answers in a stream's order. Args: answers: from `read`; prompts: of a workloads.Stream."""
    return [answers[domain, workloads.PROMPTS[domain].index(text)] for domain, text in prompts]


def main(arguments=None) -> None:
    """python -m flashspec_core.lab.positions FILE. Args: arguments: a list, or None: the command's."""
    parser = argparse.ArgumentParser(prog="python -m flashspec_core.lab.positions", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="the .csv.gz to write")
    parser.add_argument("--prompts", type=int, default=32, help="a domain")
    parser.add_argument("--tokens", type=int, default=64)
    o = parser.parse_args(arguments)
    target = load_target(dtype="float32")
    heads = {name: load_drafter(name, target) for name in HEADS}
    prompts = {domain: texts[: o.prompts] for domain, texts in workloads.PROMPTS.items()}
    write(score(target, prompts, heads, o.tokens), o.file)


if __name__ == "__main__":
    main()
