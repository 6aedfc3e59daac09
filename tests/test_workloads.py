"""lab/workloads.py: prompts that a model can be asked, none twice; streams of them; benchmarks' files are read."""

import gzip
import hashlib
import inspect
import json
import re
import tomllib
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

from flashspec_core.lab import bench_cpu, workloads
from flashspec_core.lab.workloads import PROMPTS, changing, drifting, human_eval, spec_bench, within

DOMAINS = ("chat", "code", "copy-edit", "summary", "arithmetic", "translation")
ALIKE = 0.9


def words(text: str) -> Counter:
    return Counter(re.findall(r"\w+", text.lower()))


def shared(one: str, other: str) -> float:
    """How much of the shorter text's words the other has."""
    one, other = words(one), words(other)
    return (one & other).total() / min(one.total(), other.total())


def test_prompts_are_many_short_and_none_comes_twice():
    assert tuple(PROMPTS) == (*DOMAINS, "mixed-answer")
    assert all(len(PROMPTS[domain]) >= 30 for domain in DOMAINS) and len(PROMPTS["mixed-answer"]) >= 12
    texts = [text for prompts in PROMPTS.values() for text in prompts]
    assert all(type(prompts) is tuple for prompts in PROMPTS.values())
    assert len(texts) == len(set(texts))
    assert all(len(text) > 20 and text == text.lstrip() and len(text.split()) <= 220 for text in texts)


@pytest.mark.parametrize("domain", PROMPTS)
def test_no_two_prompts_say_the_same(domain):
    for one, other in combinations(PROMPTS[domain], 2):
        if domain == "copy-edit":  # there a text may come again under another instruction
            ask, text, again, other_text = *one.split("\n\n", 1), *other.split("\n\n", 1)
            if shared(text, other_text) > ALIKE:
                assert words(ask) != words(again) and shared(ask, again) <= ALIKE, (one, other)
                continue
        most = max(words(one).total(), words(other).total())
        assert shared(one, other) <= ALIKE and (words(one) & words(other)).total() < most - 1, (one, other)


def test_texts_to_copy_are_many():
    sources = []
    for prompt in PROMPTS["copy-edit"]:
        text = prompt.split("\n\n", 1)[1]
        if all(shared(text, source) < 0.6 for source in sources):
            sources.append(text)
    assert len(sources) >= 24


def test_domains_ask_for_what_their_names_say():
    assert all(re.search("quot|literal|copied|unchanged", text.split("\n\n")[0]) for text in PROMPTS["summary"])
    assert all(re.search(r"\d|three times", text) for text in PROMPTS["arithmetic"])
    asks = [text.split("\n\n")[0] for text in PROMPTS["translation"]]
    for language in ("French", "German", "Spanish", "Portuguese", "Italian"):
        assert sum(bool(re.search(f"(into|in) {language}", ask)) for ask in asks) >= 3
        assert sum(language in ask and "English" in ask and "into " + language not in ask for ask in asks) >= 2


def test_the_measured_prompts_are_those_of_the_stored_rows():
    assert tuple(workloads.MEASURED) == DOMAINS[:3]
    for domain, texts in workloads.MEASURED.items():
        assert texts == PROMPTS[domain][:10]
    digest = hashlib.sha256(json.dumps(workloads.MEASURED).encode()).hexdigest()
    assert digest.startswith("89aa3e8dc622f1ce")  # a changed text would need new rows
    assert inspect.signature(bench_cpu.answer_rows).parameters["prompts"].default is workloads.MEASURED


def test_first_prompts_are_chat_messages():
    assert tuple(workloads.first_prompts()) == DOMAINS[:3]
    for domain, messages in workloads.first_prompts().items():
        assert messages == [{"role": "user", "content": PROMPTS[domain][0]}]


def test_the_prompts_travel_with_the_package():
    core = Path(workloads.__file__).parents[1]
    listed = tomllib.loads((core.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packed = {path for pattern in listed["flashspec_core"] for path in core.glob(pattern)}
    assert core / "lab" / "prompts.json" in packed
    assert json.loads((core / "lab" / "prompts.json").read_text(encoding="utf-8"))["licence"].startswith("Apache-2.0")


def check_stream(stream, skip=0):
    """What holds of every stream: prompts of their domains, none twice, none skipped, and changes where they are."""
    assert len(set(stream.prompts)) == len(stream.prompts)
    assert all(text in PROMPTS[domain][skip:] for domain, text in stream.prompts)
    domains = [domain for domain, _ in stream.prompts]
    assert stream.changes == tuple(i for i in range(1, len(domains)) if domains[i] != domains[i - 1])
    return domains


@pytest.mark.parametrize("skip", [0, 7])
@pytest.mark.parametrize(
    "domains, block, num_blocks", [(("summary", "code"), 4, 6), (DOMAINS, 5, 12), (("chat",), 3, 2)]
)
def test_a_changing_stream_has_blocks_in_turn_and_equal_shares(domains, block, num_blocks, skip):
    stream = changing(domains, block, num_blocks, seed=1, skip=skip)
    came = check_stream(stream, skip)
    assert came == [domain for _ in range(num_blocks // len(domains)) for domain in domains for _ in range(block)]
    assert set(Counter(came).values()) == {block * num_blocks // len(domains)}
    assert stream.changes == (tuple(range(block, block * num_blocks, block)) if len(domains) > 1 else ())


def test_a_drifting_stream_moves_from_one_domain_to_the_other():
    late = [[domain == "code" for domain in check_stream(drifting("chat", "code", 40, seed))] for seed in range(200)]
    for i, column in enumerate(zip(*late, strict=True)):
        assert abs(sum(column) / 200 - i / 39) < 0.15  # four deviations
    assert not any(row[0] for row in late) and all(row[-1] for row in late)
    assert len({tuple(row) for row in late}) > 190
    assert drifting("chat", "code", 1).prompts == (("chat", PROMPTS["chat"][0]),)


def test_a_stream_within_answers_is_of_one_domain():
    stream = within(12, seed=3)
    assert set(check_stream(stream)) == {"mixed-answer"} and len(stream.prompts) == 12 and stream.changes == ()
    assert {text for _, text in within(4, skip=12).prompts} == set(PROMPTS["mixed-answer"][12:16])


MAKERS = {
    "changing": lambda **o: changing(("chat", "code"), 4, 4, **o),
    "drifting": lambda **o: drifting("copy-edit", "translation", 12, **o),
    "within": lambda **o: within(8, **o),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_seed_gives_one_stream_and_skipped_prompts_are_others_whatever_the_seed(make):
    assert make(seed=5) == make(seed=5) != make(seed=6)
    assert make() == make(seed=0, skip=0)
    tuned = {prompt for seed in range(5) for prompt in make(seed=seed).prompts}
    for seed in range(5):
        stream = make(seed=seed, skip=8 if make is not MAKERS["drifting"] else 12)
        check_stream(stream, 8)
        assert not tuned & set(stream.prompts)


def test_streams_that_cannot_be_are_refused():
    have = len(PROMPTS["chat"])
    with pytest.raises(ValueError, match=f"at least 40 prompts of 'chat' behind the 0 skipped, got {have} .of {have}."):
        changing(("chat", "code"), 20, 4)
    with pytest.raises(ValueError, match=f"at least 10 prompts of 'chat' behind the 25 skipped, got {have - 25} .of"):
        changing(("chat", "code"), 10, 2, skip=25)
    with pytest.raises(ValueError, match="prompts of '(chat|summary)' behind the 20 skipped"):
        drifting("chat", "summary", 100, skip=20)
    with pytest.raises(ValueError, match="at least 1000 prompts of 'mixed-answer' behind the 0 skipped"):
        within(1000)
    with pytest.raises(ValueError, match=r"expected domains among \('chat', .*\), got 'tea'"):
        drifting("chat", "tea", 5)
    for domains, num_blocks in ((("chat", "code"), 3), (("chat", "chat"), 2), ((), 2)):
        with pytest.raises(ValueError, match="once each, and num_blocks a multiple of their number, got"):
            changing(domains, 2, num_blocks)
    for call, message in (
        (lambda: changing(("chat", "code"), 0, 2), "block must be a whole number >= 1, got 0"),
        (lambda: changing(("chat", "code"), 1, 2.0), "num_blocks must be a whole number >= 1, got 2.0"),
        (lambda: drifting("chat", "code", 0), "length must be a whole number >= 1, got 0"),
        (lambda: within(True), "length must be a whole number >= 1, got True"),
        (lambda: within(3, skip=-1), "skip must be a whole number >= 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_spec_bench_is_read_by_category(tmp_path):
    path = tmp_path / "question.jsonl"
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["Write a poem.", "Now without rhymes."]},
        {"question_id": 82, "category": "qa", "turns": ["Who laid the café's floor?"], "reference": ["a mason"]},
        {"question_id": 83, "category": "writing", "turns": ["Write a letter."]},
    ]
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n", encoding="utf-8")
    read = spec_bench(path)
    assert read == {"writing": ("Write a poem.", "Write a letter."), "qa": ("Who laid the café's floor?",)}
    assert list(read) == ["writing", "qa"] and spec_bench(str(path)) == read
    with pytest.raises(FileNotFoundError):
        spec_bench(tmp_path / "nothing.jsonl")


BAD = ["no json", "[1, 2]", "3", '{"turns": ["a"], "task_id": 3, "prompt": "a"}', '{"category": "qa", "task_id": "a"}']
BAD += ['{"category": "qa", "turns": []}', '{"category": "qa", "turns": [1]}', '{"category": "qa", "turns": "a"}']


@pytest.mark.parametrize("bad", BAD)
def test_a_line_of_another_form_is_named(bad, tmp_path):
    path = tmp_path / "lines.jsonl"
    for read, good, wanted in (
        (spec_bench, '{"category": "qa", "turns": ["a"]}', "a category and a list of turns"),
        (human_eval, '{"task_id": "a/0", "prompt": "def f():"}', "a task_id and a prompt"),
    ):
        path.write_text(f"{good}\n\n{bad}\n{good}\n")
        with pytest.raises(ValueError) as caught:
            read(path)
        assert str(caught.value) == f"expected an object with {wanted} in {path}, line 3, got {bad[:60]!r}"


def test_bytes_that_are_no_text_are_named_too(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"category": "\xff\xfe", "turns": ["a"]}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1, got"):
        spec_bench(tmp_path / "a.jsonl")


def test_human_eval_is_read_packed_and_unpacked(tmp_path):
    prompts = ("def one():\n    '''Returns 1.'''\n", "def two():\n")
    lines = [
        json.dumps({"task_id": f"HumanEval/{i}", "prompt": prompt, "test": ""}) for i, prompt in enumerate(prompts)
    ]
    (tmp_path / "HumanEval.jsonl").write_text("\n".join(lines))
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))
    assert human_eval(tmp_path / "HumanEval.jsonl") == human_eval(str(tmp_path / "HumanEval.jsonl.gz")) == prompts
    with pytest.raises(FileNotFoundError):
        human_eval(tmp_path / "nothing.jsonl.gz")
