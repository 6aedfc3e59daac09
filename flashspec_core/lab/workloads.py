"""Prompts by domain, streams of them whose domain changes or drifts, and readers of two public benchmarks' prompts.

The texts were written for this suite (prompts.json); the benchmarks' files are not part of it and are not fetched.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_FILE = Path(__file__).with_name("prompts.json")
# {domain: texts}: six domains, and "mixed-answer", whose prompts ask for a change of kind within one answer
PROMPTS = {domain: tuple(texts) for domain, texts in json.loads(_FILE.read_text(encoding="utf-8"))["domains"].items()}
# what stored rows were measured on; the notebooks ask the first of each
MEASURED = {domain: PROMPTS[domain][:10] for domain in ("chat", "code", "copy-edit")}


def chat_messages(text: str) -> list[dict[str, str]]:
    """A prompt as chat messages.

    Args:
        text: what the user says.

    Returns:
        One message of the user's.

    >>> chat_messages("Hello")
    [{'role': 'user', 'content': 'Hello'}]
    """
    return [{"role": "user", "content": text}]


def first_prompts() -> dict[str, list[dict[str, str]]]:
    """The first prompt of each measured domain, as chat messages."""
    return {domain: chat_messages(texts[0]) for domain, texts in MEASURED.items()}


@dataclass(frozen=True)
class Stream:
    """Prompts in the order in which they are asked.

    Args:
        prompts: (domain, text) of each.
        changes: indices of prompts whose domain is another than the prompt's before.
    """

    prompts: tuple[tuple[str, str], ...]
    changes: tuple[int, ...] = ()


def _at_least(least: int, **numbers) -> None:
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < least:
            raise ValueError(f"{name} must be a whole number >= {least}, got {number!r}")


def _stream(order: Sequence[str], rng: np.random.Generator, skip: int) -> Stream:
    """Prompts of these domains: of each the first ones behind those skipped, shuffled."""
    _at_least(0, skip=skip)
    left = {}
    for domain, count in Counter(order).items():
        if domain not in PROMPTS:
            raise ValueError(f"expected domains among {tuple(PROMPTS)}, got {domain!r}")
        texts = PROMPTS[domain][skip : skip + count]
        if len(texts) < count:
            wanted = f"at least {count} prompts of {domain!r} behind the {skip} skipped"
            raise ValueError(f"expected {wanted}, got {len(texts)} (of {len(PROMPTS[domain])})")
        left[domain] = [texts[i] for i in rng.permutation(count)]
    changes = tuple(i for i in range(1, len(order)) if order[i] != order[i - 1])
    return Stream(tuple((domain, left[domain].pop()) for domain in order), changes)


def changing(domains: Sequence[str], block: int, num_blocks: int, seed: int = 0, skip: int = 0) -> Stream:
    """Blocks of one domain each, the domains in turn and in equal shares; no prompt comes twice.

    Rule: of each domain the first prompts behind those skipped are taken, and the seed gives their order. So settings
    that were tuned on a stream of n prompts a domain are measured on other prompts with skip=n, whatever the seeds.

    Args:
        domains: names of PROMPTS, each once.
        block: prompts of a block.
        num_blocks: blocks altogether, a multiple of the number of domains.
        seed: of the order within the domains.
        skip: leaves out that many prompts of each domain.
    Returns: Stream of block * num_blocks prompts.
    Raises: ValueError: too few prompts, or domains and num_blocks that allow no equal shares.

    >>> [domain for domain, _ in changing(("chat", "code"), 2, 2).prompts], changing(("chat", "code"), 2, 4).changes
    (['chat', 'chat', 'code', 'code'], (2, 4, 6))
    """
    _at_least(1, block=block, num_blocks=num_blocks)
    if not domains or len(set(domains)) < len(domains) or num_blocks % len(domains):
        wanted = "domains that come once each, and num_blocks a multiple of their number"
        raise ValueError(f"expected {wanted}, got {domains!r}, {num_blocks}")
    order = [domains[i % len(domains)] for i in range(num_blocks) for _ in range(block)]
    return _stream(order, np.random.default_rng(seed), skip)


def drifting(start: str, end: str, length: int, seed: int = 0, skip: int = 0) -> Stream:
    """A domain gives way to another: the chance of the second grows linearly from 0 to 1; no prompt comes twice.

    Rule: prompt i is of the second domain with chance i / (length - 1). Which prompts are taken: see `changing`; how
    many of a domain depends on the seed, so other prompts for sure are those behind skip=length.

    Args:
        start, end: names of PROMPTS.
        length: prompts.
        seed: of the domains drawn and of the order within them.
        skip: leaves out that many prompts of each domain, so that settings can be tuned on others than the measured.
    Returns: Stream; its changes are all indices at which the domain is another than before, to and fro.
    Raises: ValueError: too few prompts.
    """
    _at_least(1, length=length)
    rng = np.random.default_rng(seed)
    late = rng.random(length) < np.arange(length) / max(length - 1, 1)
    return _stream([end if second else start for second in late], rng, skip)


def within(length: int, seed: int = 0, skip: int = 0) -> Stream:
    """Prompts that ask for a change of kind within one answer, such as prose, code and prose again; none comes twice.

    Args:
        length: prompts.
        seed: of their order.
        skip: leaves out that many prompts, so that settings can be tuned on others than the measured (`changing`).
    Returns: Stream of the domain "mixed-answer" alone, without changes between prompts.
    Raises: ValueError: too few prompts.
    """
    _at_least(1, length=length)
    return _stream(["mixed-answer"] * length, np.random.default_rng(seed), skip)


def _records(path, wanted: str, fits: Callable[[dict], bool]) -> Iterator[dict]:
    """Objects of a file that holds JSON, one a line, compressed if it ends in .gz; blank lines are passed over."""
    with (gzip.open if str(path).endswith(".gz") else open)(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict) or not fits(record):
                came = line[:60].decode(errors="replace").rstrip()
                raise ValueError(f"expected {wanted} in {path}, line {number}, got {came!r}")
            yield record


def spec_bench(path) -> dict[str, tuple[str, ...]]:
    """The first turns of Spec-Bench's questions.

    Args: path: of its question.jsonl.
    Returns: {category: texts}, as the file orders them.
    Raises: ValueError: a line of another form; OSError: no such file.
    Source: Xia et al. 2024 (arXiv 2401.07851); github.com/hemingkx/Spec-Bench.
    """

    def fits(record):
        turns = record.get("turns")
        first = turns[0] if isinstance(turns, list) and turns else None
        return isinstance(record.get("category"), str) and isinstance(first, str)

    turns: dict[str, list[str]] = {}
    for record in _records(path, "an object with a category and a list of turns", fits):
        turns.setdefault(record["category"], []).append(record["turns"][0])
    return {category: tuple(texts) for category, texts in turns.items()}


def human_eval(path) -> tuple[str, ...]:
    """The prompts of HumanEval: heads of Python functions, to be gone on with.

    Args: path: of its HumanEval.jsonl or HumanEval.jsonl.gz.
    Returns: Texts, as the file orders them.
    Raises: ValueError: a line of another form; OSError: no such file.
    Source: Chen et al. 2021 (arXiv 2107.03374); github.com/openai/human-eval.
    """

    def fits(record):
        return all(isinstance(record.get(name), str) for name in ("task_id", "prompt"))

    return tuple(record["prompt"] for record in _records(path, "an object with a task_id and a prompt", fits))
