"""Draft heads: what they compute, whatever their cache holds, that the text keeps its law, files and refusals."""

import hashlib
import json

import pytest
import torch
from conftest import greedy_ids, make_target, plain_logits, random_ids
from torch.nn import functional as F

import flashspec_core as fs
from flashspec_core.engine import heads
from flashspec_core.engine.drafters import DraftContext
from flashspec_core.engine.kv_cache import CachedModel
from flashspec_core.lab.fit import chi_square_p
from flashspec_core.noise import COUPLED, DraftNoise, gumbels

WARM = fs.Sampling(temperature=1.0)
DRAFTERS = {"eagle": fs.EagleDrafter, "medusa": fs.MedusaDrafter}


def make_head(target, kind, vocab_ids=None, seed=1):
    """A random head, far from flat."""
    torch.manual_seed(seed)
    vocab_ids = range(0, target.vocab_size, 2) if vocab_ids is None else vocab_ids
    head = heads.KINDS[kind](heads.head_config(target, kind), target, list(vocab_ids))
    for parameter in head.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return head.eval().requires_grad_(False)


def context_of(target, cached, texts, row_ids=None):
    row_ids = row_ids or list(range(len(texts)))
    cached.logits(texts, 1, row_ids)  # the target has read all; the last id as good as not
    context = DraftContext([list(ids) for ids in texts], row_ids, target.vocab_size)
    context.features, read = cached.features(context.token_ids, row_ids)
    context.num_features = [n - 1 for n in read]
    return context


@torch.no_grad()
def tapped_states(target, ids, layers):
    with heads.tapped(target.model, layers) as seen:
        target.model(input_ids=torch.tensor([ids]))
    return torch.cat([seen[layer] for layer in layers], -1)[0]


@torch.no_grad()
def eagle_by_rule(head, target, ids, drafted):
    """Logits of every drafted position, entry by entry, with attention written out."""
    features = list(head.reduce(tapped_states(target, ids, head.config.layers)[:-1]))
    tokens, keys, values, out = [*ids[1:], *drafted], [], [], []
    groups = head.config.num_heads // head.config.num_kv_heads
    for t, token_id in enumerate(tokens):
        x = head.start(torch.tensor([[token_id]]), features[t][None, None])
        q, k, v = head.attend(x, torch.tensor([[t]]))
        keys.append(k.repeat_interleave(groups, 1))
        values.append(v.repeat_interleave(groups, 1))
        weights = (q @ torch.cat(keys, 2).transpose(2, 3) / head.head_dim**0.5).softmax(-1)
        state = head.finish(x, weights @ torch.cat(values, 2))[0, 0]
        if t + 1 >= len(features):
            out.append(F.linear(head.last_norm(state), head.rows))
            features.append(state)
    return torch.stack(out)


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


def test_an_untrained_medusa_says_what_the_target_said():
    target = make_target()
    head = heads.MedusaHead(heads.head_config(target, "medusa"), target, range(101))
    with torch.no_grad():
        out = target.model(input_ids=torch.tensor([random_ids(5)])).logits[0, -1]
        h = tapped_states(target, random_ids(5), (3,))[-1:]
        torch.testing.assert_close(head(h, 2)[0], out.expand(2, -1), atol=1e-4, rtol=1e-4)


def test_taps_are_the_layers_outputs_and_leave_nothing_behind():
    target = make_target()
    with heads.tapped(target.model, (1, 2)) as seen, torch.no_grad():
        states = target.model(input_ids=torch.tensor([[1, 2, 3]]), output_hidden_states=True).hidden_states
    assert torch.equal(seen[1], states[1]) and torch.equal(seen[2], states[2])
    before = seen[1]
    plain_logits(target.model, [4, 5])
    assert seen[1] is before


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_coupled_draws_with_the_noise_of_the_target_ids(kind):
    target = make_target()
    head = make_head(target, kind)
    context = context_of(target, CachedModel(target.model, head.config.layers), [random_ids(6)])
    out = DRAFTERS[kind](head).draft(context, 2, [WARM], DraftNoise(torch.tensor([7]), torch.tensor([6])))
    for i in range(2):
        noise = gumbels(torch.tensor([7]), 101, COUPLED, torch.tensor([6 + i]))[0, head.vocab_ids]
        assert int(out.token_ids[0, i]) == int(head.vocab_ids[(out.logits[0, i] + noise).argmax()])


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
@pytest.mark.parametrize("method", ["token", "block"])
def test_the_text_keeps_the_targets_law(kind, method):
    # the first token is plain, since nothing has been read; the two behind it are drafted, one in five impossible to
    target = make_target(vocab=6, layers=2)
    drafter = DRAFTERS[kind](make_head(target, kind, vocab_ids=[0, 1, 2, 4, 5]))
    prompt, sampling = [1, 2, 3], fs.Sampling(temperature=1.5)
    out = fs.generate(
        target, fs.Arm(drafter, 3), [prompt] * 6000, max_new_tokens=4, sampling=sampling, method=method, seed=11
    )
    assert sum(s.num_accepted for o in out for s in o.steps) > 1000
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


def test_a_chat_drafts_from_its_second_step_on():
    target = make_target()
    target.tokenizer = None
    drafter = fs.EagleDrafter(make_head(target, "eagle"))
    steps = list(fs.stream(target, drafter, random_ids(5), max_new_tokens=12))
    assert steps[0].num_draft_tokens == 0 and all(s.num_draft_tokens > 0 for s in steps[1:-1])


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_saved_heads_come_back_up_to_their_eight_bits(kind, tmp_path):
    target = make_target()
    head = make_head(target, kind)
    heads.save_head(head, tmp_path / "mine.safetensors", {"tokens": 5})
    drafter = fs.load_drafter(str(tmp_path / "mine.safetensors"), target)
    assert isinstance(drafter, DRAFTERS[kind]) and drafter.name == "mine" and drafter.head.config == head.config
    assert torch.equal(drafter.head.vocab_ids, head.vocab_ids)
    for name, weight in head.named_parameters():
        step = weight.abs().amax(-1, keepdim=True) / 127
        assert ((drafter.head.get_parameter(name) - weight).abs() <= 0.51 * step).all(), name
    card = json.loads((tmp_path / "mine.json").read_text())
    assert card["tokens"] == 5 and card["config"]["kind"] == kind
    assert card["sha256"] == hashlib.sha256((tmp_path / "mine.safetensors").read_bytes()).hexdigest()


def test_heads_of_another_target_and_other_files_are_refused(tmp_path):
    target = make_target()
    heads.save_head(make_head(target, "medusa"), tmp_path / "mine.safetensors", {})
    with pytest.raises(
        ValueError, match=r"hidden size, vocabulary, layers\) \(32, 101, 4\), got one for \(32, 101, 3\)"
    ):
        fs.load_drafter(str(tmp_path / "mine.safetensors"), make_target(layers=4))
    with pytest.raises(OSError, match="expected a draft head by name .* got 'eagle-tea'"):
        fs.load_drafter("eagle-tea", target)
    (tmp_path / "no.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="expected a draft head in"):
        fs.load_drafter(str(tmp_path / "no.safetensors"), target)
    with pytest.raises(ValueError, match=r"kind 'eagle' or 'medusa' and layers in 1..3, got 'eagle', \(9,\)"):
        heads.head_config(target, "eagle", layers=(9,))
