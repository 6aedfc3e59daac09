"""lab/distill.py: the loss looks at what drafting does, a head learns, and training goes on where it stopped."""

import json

import numpy as np
import pytest
import torch
from conftest import make_target
from test_heads import eagle_by_rule, make_head
from torch.nn import functional as F

import flashspec_core as fs
from flashspec_core.lab import distill
from flashspec_core.lab.dialogues import Dialogues

SMALL = dict(epochs=4, draft_vocab=40, batch_tokens=256, depth=3, num_measured=4, held_out=0.2, progress=False)


@pytest.fixture(scope="module")
def target():
    return make_target(vocab=60, layers=2)


@pytest.fixture(scope="module")
def written(target):
    """What the tiny target says, with four ids of a prompt."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 60, 4).tolist() for _ in range(120)]
    out = fs.generate(target, fs.Arm(None), prompts, max_new_tokens=20, sampling=fs.Sampling(0.7), seed=1)
    return Dialogues([np.array(o.prompt_token_ids + o.token_ids) for o in out], [4] * len(out))


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_unrolled_logits_are_those_of_drafting(target, kind):
    head, ids = make_head(target, kind), [5, 9, 2, 33, 41, 7, 8, 20]
    with torch.no_grad():
        features, logits, sums = distill.read(target, head, torch.tensor([ids]))
        chains = list(distill.unrolled(head, torch.tensor([ids]), features, 3))
        plain = target.model(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits[0], plain[:, head.vocab_ids], atol=1e-4, rtol=1e-4)
    wanted = torch.stack([plain.logsumexp(-1), (plain / 0.7).logsumexp(-1), plain.amax(-1)], -1)
    torch.testing.assert_close(sums[0], wanted)
    for t in range(4):  # chain t: the ids up to t + 1 are committed, the next ones drafted
        if kind == "eagle":
            wanted = eagle_by_rule(head, target, ids[: t + 2], ids[t + 2 : t + 4])
        else:
            h = target.model.model.norm(features[0, t])
            wanted = torch.stack([F.linear(h + F.silu(block @ h), head.rows) for block in head.blocks[:3]])
        for k in range(3):
            torch.testing.assert_close(chains[k][0, t], wanted[k], atol=2e-4, rtol=2e-4)


def test_chances_are_the_overlap_of_the_laws():
    generator = torch.Generator().manual_seed(0)
    q, p = torch.randn(5, 9, generator=generator), torch.randn(5, 12, generator=generator)
    sums = (p / 0.7).logsumexp(-1)
    wanted = torch.minimum((q / 0.7).softmax(-1), (p / 0.7).softmax(-1)[:, :9]).sum(-1)
    torch.testing.assert_close(distill.chances(q, p[:, :9], sums), wanted)


def test_acceptance_counts_the_answers_alone_and_each_depth(target):
    head = make_head(target, "eagle")
    ids = np.array([5, 9, 2, 33, 41, 7])
    got = distill.acceptance(target, head, Dialogues([ids], [3]), depth=2)
    with torch.no_grad():
        logits = target.model(input_ids=torch.from_numpy(ids)[None]).logits[0] / 0.7
        law = logits.softmax(-1)[:, head.vocab_ids]
        for k in range(2):  # ids 3, 4, 5 are the answer: chains 1 - k .. 3 - k say them
            bases = [t for t in range(6) if 3 <= t + 2 + k <= 5]
            own = [
                eagle_by_rule(head, target, ids[: t + 2].tolist(), ids[t + 2 : t + 2 + k].tolist())[k] for t in bases
            ]
            overlap = [
                torch.minimum((q / 0.7).softmax(-1), law[t + 1 + k]).sum() for q, t in zip(own, bases, strict=True)
            ]
            assert got["acceptance_rate"][k] == pytest.approx(float(torch.stack(overlap).mean()), abs=1e-4)
            best = [int(head.vocab_ids[q.argmax()]) for q in own]
            same = [float(b == int(logits[t + 1 + k].argmax())) for b, t in zip(best, bases, strict=True)]
            assert got["greedy"][k] == pytest.approx(np.mean(same))


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_a_head_learns_to_say_what_the_target_says(target, written, kind):
    head, report = distill.train(target, written, kind, learning_rate=5e-3, **{**SMALL, "epochs": 20})
    blank = distill.KINDS[kind](head.config, target, head.vocab_ids)
    before, after = (distill.acceptance(target, h, written, 3)["acceptance_rate"] for h in (blank, head))
    assert all(b > a + 0.05 for a, b in zip(before, after, strict=True))
    assert not any(p.requires_grad for p in head.parameters()) and len(head.vocab_ids) == 40
    assert 0.66 < report["coverage"] <= 1
    assert report["curve"][-1]["tokens"] == 20 * report["num_tokens"]


def test_training_goes_on_from_its_checkpoint_and_ends_the_same(target, written, tmp_path, monkeypatch):
    whole, _ = distill.train(target, written, "medusa", **SMALL)
    measure, calls = distill.acceptance, []

    def tired(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(*arguments, **options)

    monkeypatch.setattr(distill, "acceptance", tired)
    with pytest.raises(KeyboardInterrupt):
        distill.train(target, written, "medusa", checkpoint=tmp_path / "state", **SMALL)
    resumed, report = distill.train(target, written, "medusa", checkpoint=tmp_path / "state", **SMALL)
    assert len(calls) == 5 and len(report["curve"]) == 4  # two points before, two behind
    with pytest.raises(ValueError, match="state is of other data or settings; delete it"):
        distill.train(target, written, "medusa", checkpoint=tmp_path / "state", **{**SMALL, "epochs": 2})
    for name, weight in whole.named_parameters():
        torch.testing.assert_close(resumed.get_parameter(name), weight)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_a_sixteen_bit_target_teaches_too(written, kind):
    target = make_target(vocab=60, layers=2)
    target.model.to(torch.bfloat16)
    head, _ = distill.train(target, written, kind, **{**SMALL, "epochs": 1})
    assert {p.dtype for p in head.parameters()} == {torch.bfloat16}


def test_what_is_measured_on_is_not_learnt_from_and_comes_from_everywhere(target, written):
    with pytest.raises(ValueError, match="at least 2 dialogues"):
        distill.train(target, Dialogues(written.ids[:1], [4]), "medusa", **SMALL)
    _, report = distill.train(target, written, "medusa", **{**SMALL, "epochs": 1})
    assert report["num_tokens"] == sum(len(ids) for i, ids in enumerate(written.ids) if i % 5)


def test_batches_hold_every_dialogue_once_and_no_more_than_asked():
    rng = np.random.default_rng(3)
    written = Dialogues([np.arange(1, n + 1) for n in rng.integers(2, 30, 50)], [1] * 50)
    seen = []
    for ids, answer in distill.batches(written, 64, 20, np.random.default_rng(0)):
        assert ids.numel() <= 64 and ids.shape == answer.shape
        for row, said in zip(ids.tolist(), answer.tolist(), strict=True):
            length = sum(i > 0 for i in row)
            assert row == list(range(1, length + 1)) + [0] * (len(row) - length)
            assert said == [False] + [True] * (length - 1) + [False] * (len(row) - length)
            seen.append(length)
    assert sorted(seen) == sorted(min(len(ids), 20) for ids in written.ids)


def test_most_frequent_ids_are_of_the_answers_and_keep_what_must_be():
    written = Dialogues([np.array([9, 9, 9, 9, 3, 3, 5]), np.array([9, 3, 5, 7])], [4, 1])
    ids, coverage = distill.most_frequent(written, 2)
    assert ids.tolist() == [3, 5] and coverage == pytest.approx(5 / 6)
    assert distill.most_frequent(written, 2, always={1})[0].tolist() == [1, 3]
    assert distill.most_frequent(written, 2, always={40})[0].tolist() == [3, 40]


def test_the_command_writes_a_head_and_its_card(smollm2, tmp_path, capsys, monkeypatch):
    tiny = make_target(vocab=49_152, layers=1)
    tiny.tokenizer = smollm2.tokenizer
    monkeypatch.setattr(distill, "load_target", lambda name, dtype: tiny)
    monkeypatch.setattr(distill.dialogues, "OPENERS", {"chat": ("Hi",)})
    write = distill.dialogues.write
    monkeypatch.setattr(
        distill.dialogues,
        "write",
        lambda *a, **o: write(*a, batch=2, steps=90, longest=(4, 8), **{**o, "progress": False}),
    )
    where = ["--folder", str(tmp_path / "data"), "--out", str(tmp_path / "heads")]
    distill.main(
        ["--domain", "chat", "--kind", "medusa", "--tokens", "40", "--held-out", "20", "--epochs", "1", *where]
    )
    assert "chat acceptance rate by depth: 0." in capsys.readouterr().out
    card = json.loads((tmp_path / "heads" / "medusa-chat.json").read_text())
    assert card["held_out"]["chat"]["acceptance_rate"] and card["target"] == "llama" and card["commit"]
    assert fs.load_drafter(str(tmp_path / "heads" / "medusa-chat.safetensors"), tiny).head.config.kind == "medusa"
    assert not list((tmp_path / "data").glob("*.checkpoint"))
