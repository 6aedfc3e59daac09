"""lab/throughput.py: settings, drafters by name, prompts by dataset, costs of passes, and what breaks even."""

import json
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from conftest import make_target, random_ids

import flashspec_core as fs
from flashspec_core.lab import bench, throughput


def test_a_profile_fills_what_is_not_given():
    smoke = throughput.settings("smoke", target="", drafters=[], quantization="", max_new_tokens=0, repeat=5)
    assert smoke == throughput.PROFILES["smoke"] | {"repeat": 5}
    assert throughput.settings("t4")["quantization"] == "nf4"
    assert throughput.settings("t4", drafters=["n-gram"])["drafters"] == ["n-gram"]
    with pytest.raises(ValueError, match="profile must be one of smoke, t4, full, got 'fast'"):
        throughput.settings("fast")


def test_drafters_by_name(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    target = make_target(layers=8)
    assert type(throughput.make_drafter("n-gram", target)) is fs.NGramDrafter
    assert throughput.make_drafter("early exit", target).name == "early-exit:2"
    with pytest.raises(OSError, match="got 'no-such-folder/model'"):
        throughput.make_drafter("no-such-folder/model", target)


def test_prompts_by_dataset(smollm2, tmp_path):
    own = throughput.prompts_of("prompts", smollm2, 2)
    assert list(own) == ["chat", "code", "copy-edit"] and all(len(texts) == 2 for texts in own.values())
    text = smollm2.tokenizer.decode(own["chat"][0])
    assert "why the sky is blue" in text and text.rstrip().endswith("<|im_start|>assistant")  # the chat template's
    bench_file, human = tmp_path / "question.jsonl", tmp_path / "HumanEval.jsonl"
    bench_file.write_text(json.dumps({"question_id": 1, "category": "math", "turns": ["What is 2 + 2?"]}) + "\n")
    human.write_text(json.dumps({"task_id": "HumanEval/0", "prompt": "def one():\n"}) + "\n")
    assert list(throughput.prompts_of(str(bench_file), smollm2, 3)) == ["math"]
    assert list(throughput.prompts_of(str(human), smollm2, 3)) == ["HumanEval"]


def test_break_even_is_where_tokens_pay_for_the_step():
    costs = {1: 2.0, 2: 2.2, 3: 2.5, 5: 3.0}
    for gamma, draft in ((1, 0.1), (2, 0.3), (4, 0.2)):
        rate = throughput.break_even(costs, draft, gamma)
        assert sum(rate**k for k in range(gamma + 1)) == pytest.approx((costs[gamma + 1] + gamma * draft) / 2.0)
    assert throughput.break_even(costs, 5.0, 4) == 1.0  # nothing suffices
    assert throughput.break_even({1: 1.0, 2: 0.9}, 0.0, 1) == pytest.approx(0, abs=1e-9)


def test_wider_passes_are_measured_behind_the_same_context():
    target, widths = make_target(), (1, 3, 5)
    with torch.no_grad():
        costs = throughput.pass_seconds(target, widths, context=20, repeat=2)
    assert list(costs) == [1, 3, 5] and all(seconds > 0 for seconds in costs.values())
    read = []
    hook = target.model.register_forward_pre_hook(
        lambda m, a, k: read.append(k["input_ids"].shape[1]), with_kwargs=True
    )
    throughput.pass_seconds(target, widths, context=20, repeat=2)
    hook.remove()
    assert read == [20] + [1, 3, 5] * 3


def test_every_way_answers_every_prompt_and_becomes_rows():
    target = make_target()
    prompts = {"a": [random_ids(8), random_ids(9, 1), random_ids(5, 2)], "b": [random_ids(7) * 3]}
    drafters = {"n-gram": fs.NGramDrafter(), "model": fs.ModelDrafter(target)}
    found = throughput.measure(target, drafters, prompts, 3, 0.0, 12, repeat=2, batch=2)
    assert [(one.domain, one.drafter) for one in found] == [(d, n) for d in "ab" for n in ("off", "n-gram", "model")]
    plain = {one.domain: [out.token_ids for out in one.outs] for one in found if one.drafter == "off"}
    for one in found:
        assert [out.token_ids for out in one.outs] == plain[one.domain] and len(one.tokens_per_second) == 2
        assert len(one.outs) == {"a": 3, "b": 2}[one.domain]
        rows = one.rows(target, 0.0, 2)
        assert {r["note"] for r in rows} == {one.drafter} and bench.median(rows, metric="tokens_per_second") > 0
    assert found[2].acceptance_rate == 1.0 and found[0].acceptance_rate != found[0].acceptance_rate


def test_what_a_step_costs_is_taken_from_whole_steps(monkeypatch):
    monkeypatch.setattr(
        throughput, "pass_seconds", lambda target, widths, repeat: {w: 0.04 + 0.002 * w for w in widths}
    )
    took = {
        None: 0.047,
        "head": 0.061,
    }  # 5 ms beside a pass of one; 13 ms more than a pass of four, so 8 ms are three drafts

    def generate(target, arm, prompt, max_new_tokens):
        name = arm.drafter and arm.drafter.name
        step = SimpleNamespace(step_seconds=took[name], num_draft_tokens=arm.gamma if name else 0)
        late = SimpleNamespace(step_seconds=9.0, num_draft_tokens=0)
        return SimpleNamespace(steps=[late, step, step, step, *[late] * bool(name)])

    monkeypatch.setattr(throughput, "generate", generate)
    head = fs.Arm(fs.NGramDrafter(), 3)
    head.drafter.name = "head"
    cost = throughput.step_cost(None, head, ["head"])
    assert cost((None, 0), 0) == pytest.approx(0.047) and cost(("n-gram", 8), 8) == pytest.approx(0.063)
    assert cost(("head", 3), 3) == pytest.approx(0.061) and cost(("head", 3), 1) == pytest.approx(0.049 + 0.008 / 3)
    monkeypatch.setattr(throughput, "generate", lambda *a, **o: SimpleNamespace(steps=[0]))
    with pytest.raises(ValueError, match="drafted nothing"):
        throughput.step_cost(None, head, ["head"])
