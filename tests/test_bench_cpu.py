"""lab/bench_cpu.py: every way gives the target's own greedy answer, and a row each."""

import copy

import pytest
import torch
from conftest import greedy_ids, make_target
from test_heads import make_head

from flashspec_core.engine import heads
from flashspec_core.lab import bench_cpu


@pytest.fixture(scope="module")
def target(smollm2, tmp_path_factory):
    """A tiny random target that speaks SmolLM2's ids, and has a head."""
    target = make_target(vocab=49_152, layers=4)
    target.tokenizer = smollm2.tokenizer
    target.head = str(tmp_path_factory.mktemp("head") / "eagle-tiny.safetensors")
    heads.save_head(make_head(target, "eagle", range(0, 49_152, 9)), target.head, {})
    return target


@pytest.fixture(scope="module")
def ways(target):
    plain = copy.deepcopy(target.model)
    return bench_cpu.own_ways(target, {target.head: 3}) + bench_cpu.peers(target, plain)


def test_every_way_gives_the_targets_greedy_answer(target, ways):
    ids = [5, 6, 7, 8, 9, 5, 6, 7]
    for way in ways:
        answer = way.answer(torch.tensor([ids]), 12, 0.0)
        assert list(getattr(answer, "token_ids", answer)) == greedy_ids(target, ids, 12), way


def test_the_assistant_is_asked_for_four_tokens_at_a_time(ways, monkeypatch):
    from transformers.generation import candidate_generator

    asked = []
    kept = candidate_generator.AssistedCandidateGenerator.get_candidates

    def counts(self, input_ids, *more, **options):
        out = kept(self, input_ids, *more, **options)
        asked.append(out[0].shape[1] - input_ids.shape[1])
        return out

    monkeypatch.setattr(candidate_generator.AssistedCandidateGenerator, "get_candidates", counts)
    (way,) = [way for way in ways if way.provider == "transformers-assisted"]
    way.answer(torch.tensor([[5, 6, 7, 8]]), 16, 0.0)
    assert max(asked) == 4 == way.gamma


def test_the_assistant_says_how_many_layers_it_has(target):
    assistant = bench_cpu.assistant_of(target.model, 2)  # older transformers make its cache by that
    assert assistant.config.num_hidden_layers == len(assistant.model.layers) == 2
    assert target.model.config.num_hidden_layers == 4


def test_every_way_has_its_rows(target, ways):
    lines = []
    rows = bench_cpu.answer_rows(target, ways, 4, {"chat": ["Hello there.", "And again."]}, report=lines.append)
    assert len(lines) == 2 * len(ways)
    speeds = [r for r in rows if r["metric"] == "tokens_per_second"]
    assert len(speeds) == 2 * len(ways) and all(r["p50"] > 0 and r["num_repeats"] == 2 for r in speeds)
    assert {r["provider"] for r in speeds} >= {
        "flashspec_core",
        "transformers",
        "transformers-prompt-lookup",
        "transformers-assisted",
    }
    # no n-gram comes again in four random tokens, so nothing of it was tested: no row, and no NaN
    with_a_head = {target.head, "n-gram, else eagle-tiny"}
    assert {r["note"] for r in rows if r["metric"] == "acceptance_rate"} == with_a_head
    assert all(r["p50"] == r["p50"] for r in rows)
    assert {(r["domain"], r["temperature"], r["dtype"]) for r in rows} == {("chat", t, "float32") for t in (0.0, 0.7)}
