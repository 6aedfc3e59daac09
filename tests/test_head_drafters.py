"""Drafters with a head: their rule whatever the cache holds, noise, the text's law, other arms beside them."""

import hashlib
import json

import pytest
import torch
from conftest import greedy_ids, make_target, random_ids
from test_heads import DRAFTERS, eagle_by_rule, make_head, tapped_states
from torch.nn import functional as F

import flashspec_core as fs
from flashspec_core.engine import head_drafters, heads
from flashspec_core.engine.drafters import DraftContext, feature_layers
from flashspec_core.engine.kv_cache import CachedModel
from flashspec_core.lab import workloads
from flashspec_core.lab.fit import chi_square_p
from flashspec_core.noise import COUPLED, DraftNoise, gumbels

WARM = fs.Sampling(temperature=1.0)


def context_of(target, cached, texts, row_ids=None):
    row_ids = row_ids or list(range(len(texts)))
    cached.logits(texts, 1, row_ids)  # the target has read all; the last id as good as not
    context = DraftContext([list(ids) for ids in texts], row_ids, target.vocab_size)
    context.features, context.num_features = cached.features(context.token_ids, row_ids)
    return context


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_eagle_drafts_by_its_rule_whatever_its_cache_holds(family):
    target = make_target(family)
    head, cached = make_head(target, "eagle"), CachedModel(target.model, heads.head_config(target, "eagle").layers)
    drafter, seeds = fs.EagleDrafter(head), torch.tensor([3, 4])
    a, b = random_ids(6), random_ids(9, 1)
    for texts, rows in (
        ([a, b], [0, 1]),
        ([a + [5], b + [6, 7, 8]], [0, 1]),  # ragged
        ([a + [5] + random_ids(7, 2), b + [6, 9]], [0, 1]),  # after an idle time; and one that went back
        ([b + [6, 9, 11]], [1]),  # a row has left
        ([b + [6, 9, 11]], [1]),  # nothing new
    ):
        context = context_of(target, cached, texts, rows)
        out = drafter.draft(context, 3, [WARM] * len(texts), DraftNoise(seeds[: len(texts)]))
        assert out.vocab_ids is head.vocab_ids and out.token_ids.shape == (len(texts), 3)
        for i, ids in enumerate(texts):
            wanted = eagle_by_rule(head, target, ids, out.token_ids[i, :-1].tolist())
            torch.testing.assert_close(out.logits[i], wanted, atol=2e-4, rtol=2e-4)


def test_a_pass_that_fails_leaves_no_entries_behind(monkeypatch):
    target = make_target()
    head, cached = make_head(target, "eagle"), CachedModel(target.model, heads.head_config(target, "eagle").layers)
    drafter, noise, ids = fs.EagleDrafter(head), DraftNoise(torch.tensor([3])), random_ids(6)
    drafter.draft(context_of(target, cached, [ids]), 2, [WARM], noise)
    ids += random_ids(4, 1)
    context = context_of(target, cached, [ids])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(drafter, "_pass", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        drafter.draft(context, 2, [WARM], noise)
    out = drafter.draft(context, 2, [WARM], noise)
    wanted = eagle_by_rule(head, target, ids, out.token_ids[0, :-1].tolist())
    torch.testing.assert_close(out.logits[0], wanted, atol=2e-4, rtol=2e-4)


def spoil_q(monkeypatch):
    """From here on heads say that their q sums to less than 1."""
    drawn = head_drafters.drawn
    monkeypatch.setattr(head_drafters, "drawn", lambda *a: (drawn(*a)[0], drawn(*a)[1] + 1))


def test_another_targets_head_is_refused_and_an_empty_first_draft_is_no_proof(monkeypatch):
    target = make_target()
    with pytest.raises(ValueError, match="a head made for this very target, got drafter 'eagle'"):
        fs.generate(make_target(seed=1), fs.EagleDrafter(make_head(target, "eagle")), [1, 2, 3])
    drafter = fs.MedusaDrafter(make_head(target, "medusa"))
    spoil_q(monkeypatch)
    with pytest.raises(ValueError, match="a draft law q that sums to 1"):
        fs.generate(target, drafter, [1, 2, 3], sampling=WARM, max_new_tokens=8)


def test_what_a_cascade_asks_is_checked_and_told_like_any_drafter(monkeypatch):
    target = make_target()
    with pytest.raises(ValueError, match="a head made for this very target, got drafter 'eagle'"):
        fs.generate(make_target(seed=1), cascade(make_head(target, "eagle")), [1, 2, 3])
    eagle, told = fs.EagleDrafter(make_head(target, "eagle")), []
    ngram = fs.NGramDrafter(1)
    ngram.commit, eagle.commit = (lambda *a, n=name: told.append(n) for name in ("n-gram", "eagle"))
    drafter = fs.CascadeDrafter(fs.Arm(ngram, 2), fs.Arm(eagle, 2))
    out = fs.generate(target, drafter, [1, 2, 1, 2], sampling=WARM, max_new_tokens=20, seed=2)
    assert set(told) == {"n-gram", "eagle"} and len(told) == sum(s.gamma > 0 for s in out.steps)
    spoil_q(monkeypatch)  # n-grams have no q and are no proof of the head's
    with pytest.raises(ValueError, match="a draft law q that sums to 1"):
        fs.generate(target, drafter, [1, 2, 1, 2], sampling=WARM, max_new_tokens=20, seed=2)


def test_no_policy_learns_from_a_step_in_which_heads_cannot_draft():
    class Listens(fs.FixedArm):
        def update(self, arm, reward, feedback=None):
            seen.append(feedback.step)

    target, seen = make_target(), []
    fs.generate(target, fs.MedusaDrafter(make_head(target, "medusa")), [1, 2, 3], policy=Listens(0), max_new_tokens=6)
    assert seen and min(seen) == 1


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_draft_too_and_turn_by_the_same_angles(kind, dtype):
    target = make_target()
    target.model.to(dtype)
    head = make_head(target, kind).to(dtype)
    assert kind == "medusa" or head.frequencies.dtype == torch.float32
    out = fs.generate(target, DRAFTERS[kind](head), [1, 2, 3], sampling=WARM, max_new_tokens=8)
    assert len(out.token_ids) == 8 and sum(s.num_draft_tokens for s in out.steps) > 0


def test_a_chats_turns_draft_from_their_second_step_on(smollm2):
    tiny = make_target(vocab=49_152, layers=1)
    tiny.tokenizer = smollm2.tokenizer
    chat = fs.Chat(tiny, fs.EagleDrafter(make_head(tiny, "eagle")), max_new_tokens=6)
    for turn in (chat.say("Hello."), chat.say("And now?")):
        assert turn.steps[0].num_draft_tokens == 0 and turn.steps[1].num_draft_tokens > 0
    chat.close()


def test_medusa_drafts_by_its_rule_and_no_deeper_than_its_blocks():
    target = make_target()
    head, cached = make_head(target, "medusa"), CachedModel(target.model, [3])
    texts = [random_ids(6), random_ids(9, 1)]
    out = fs.MedusaDrafter(head).draft(context_of(target, cached, texts), 9, [WARM] * 2, DraftNoise(torch.arange(2)))
    assert out.token_ids.shape == (2, head.config.depth)
    for i, ids in enumerate(texts):
        h = target.model.model.norm(tapped_states(target, ids, (3,))[-2])
        wanted = torch.stack([F.linear(h + F.silu(block @ h), head.rows) for block in head.blocks])
        torch.testing.assert_close(out.logits[i], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_coupled_draws_with_the_noise_of_the_target_ids(kind):
    target = make_target()
    head = make_head(target, kind)
    context = context_of(target, CachedModel(target.model, head.config.layers), [random_ids(6)])
    out = DRAFTERS[kind](head).draft(context, 2, [WARM], DraftNoise(torch.tensor([7]), torch.tensor([6])))
    for i in range(2):
        noise = gumbels(torch.tensor([7]), 101, COUPLED, torch.tensor([6 + i]))[0, head.vocab_ids]
        assert int(out.token_ids[0, i]) == int(head.vocab_ids[(out.logits[0, i] + noise).argmax()])


def cascade(head):
    return fs.CascadeDrafter(fs.Arm(fs.NGramDrafter(1), 2), fs.Arm(fs.EagleDrafter(head), 3))


def test_a_cascade_asks_the_next_where_a_row_got_nothing():
    target = make_target()
    head, noise = make_head(target, "eagle"), DraftNoise(torch.arange(2))
    cached, drafter = CachedModel(target.model, head.config.layers), cascade(head)
    assert feature_layers([fs.Arm(drafter)]) == set(head.config.layers) and drafter.name == "n-gram, else eagle"
    found, none = [1, 2, 3, 1, 2], [4, 5, 6]
    context = context_of(target, cached, [found])
    assert drafter.draft(context, 8, [WARM], noise).token_ids.tolist() == [[3, 1]]
    context = context_of(target, cached, [found, none])
    out = drafter.draft(context, 8, [WARM] * 2, noise)
    assert out.token_ids.shape == (2, 3) and out.vocab_ids is head.vocab_ids
    with pytest.raises(ValueError, match="arms with a drafter, at least one"):
        fs.CascadeDrafter(fs.Arm(None))


@pytest.mark.parametrize("kind", ["eagle", "medusa", "cascade"])
@pytest.mark.parametrize("method", ["token", "block"])
def test_the_text_keeps_the_targets_law(kind, method):
    # the first token is plain, since nothing has been read; the two behind it are drafted, one in five impossible to
    target = make_target(vocab=6, layers=2)
    head = make_head(target, "medusa" if kind == "medusa" else "eagle", vocab_ids=[0, 1, 2, 4, 5])
    drafter = {**DRAFTERS, "cascade": cascade}[kind](head)
    prompt, sampling = [1, 2, 3], fs.Sampling(temperature=1.5)
    out = fs.generate(
        target, fs.Arm(drafter, 3), [prompt] * 4000, max_new_tokens=4, sampling=sampling, method=method, seed=11
    )
    assert sum(s.num_accepted for o in out for s in o.steps) > 600
    texts = torch.cartesian_prod(*[torch.arange(6)] * 3)
    with torch.no_grad():
        logits = target.model(input_ids=torch.cat([torch.tensor([prompt]).expand(216, -1), texts], 1)).logits
    law = (logits[:, 2:5] / 1.5).log_softmax(-1).gather(-1, texts[..., None]).sum((1, 2)).exp()
    ids = torch.tensor([o.token_ids[:3] for o in out]) @ torch.tensor([36, 6, 1])
    assert chi_square_p(torch.bincount(ids, minlength=216).numpy(), law.numpy()) > 1e-3


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_greedy_text_is_the_targets_own_beside_other_arms(kind):
    target = make_target("mistral")
    arms = [fs.Arm(DRAFTERS[kind](make_head(target, kind)), 4), fs.Arm(None), fs.Arm(fs.NGramDrafter(), 2)]
    prompts = [random_ids(5), random_ids(11, 1)]
    for out, ids in zip(fs.generate(target, arms, prompts, max_new_tokens=25), prompts, strict=True):
        assert out.token_ids == greedy_ids(target, ids, 25)
        assert {0, 1, 2} == set(out.arms)


NAMES = ["eagle-chat", "eagle-code", "eagle-mixed", "medusa-mixed"]


def test_the_packages_heads_are_what_their_cards_say():
    files = sorted(heads.WEIGHTS.iterdir())
    assert [f.name for f in files] == [f"{name}.{end}" for name in NAMES for end in ("json", "safetensors")]
    assert sum(f.stat().st_size for f in files) < 16 * 2**20
    cards = {name: json.loads((heads.WEIGHTS / f"{name}.json").read_text()) for name in NAMES}
    for name, card in cards.items():
        data = (heads.WEIGHTS / f"{name}.safetensors").read_bytes()
        assert card["sha256"] == hashlib.sha256(data).hexdigest() and card["name"] == name
        assert card["target"] == "smollm2-135m" and card["seconds"] > 0 and card["device"] and card["commit"]
        assert card["num_tokens"] > 19e6 and len(card["curve"]) >= 8
        assert all(len(rates["acceptance_rate"]) == card["config"]["depth"] for rates in card["held_out"].values())
    own = {name: cards[name]["held_out"] for name in NAMES}
    assert min(own["eagle-chat"]["chat"]["acceptance_rate"]) > 0.55
    assert min(own["eagle-code"]["code"]["acceptance_rate"]) > 0.68
    again = cards["eagle-code"]["again"]  # README's command, with other dialogues and another seed
    assert again["seed"] != cards["eagle-code"]["seed"]
    for domain, rates in again["held_out"].items():
        assert rates["acceptance_rate"] == pytest.approx(own["eagle-code"][domain]["acceptance_rate"], abs=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_smollm2_says_the_same_with_a_head_and_takes_up_its_drafts(smollm2, name):
    prompt = workloads.chat_messages(workloads.PROMPTS["code"][0])
    plain = fs.generate(smollm2, fs.Arm(None), prompt, max_new_tokens=40)
    out = fs.generate(smollm2, fs.Arm(fs.load_drafter(name, smollm2), 4), prompt, max_new_tokens=40)
    assert out.token_ids == plain.token_ids
    assert out.acceptance_rate > (0.3 if name.startswith("medusa") else 0.5)


def test_the_default_looks_up_and_else_asks_the_mixed_head(smollm2):
    both = fs.load_drafter("default", smollm2)
    assert [(arm.drafter.name, arm.gamma) for arm in both.arms] == [("n-gram", 8), ("eagle-mixed", 4)]
    assert type(fs.load_drafter("default", make_target())) is fs.NGramDrafter
