"""Draft heads: what they are made of, taps, files and refusals; and the rule of EAGLE written out for other tests."""

import hashlib
import json

import pytest
import torch
from conftest import make_target, plain_logits, random_ids
from torch.nn import functional as F

import flashspec_core as fs
from flashspec_core.engine import heads

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


def test_eagles_queries_and_keys_turn_as_the_targets_do():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    target = make_target()
    head, x = make_head(target, "eagle"), torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 400], [7, 8, 9, 300, 301]])
    q, k, v = head.attend(x, positions)
    q0, k0, v0 = head.attend(x, positions * 0)
    cos, sin = target.model.model.rotary_emb(x, positions)
    for got, wanted in zip((q, k), apply_rotary_pos_emb(q0, k0, cos, sin), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(v, v0) and q.shape == (2, 4, 5, 8) and k.shape == v.shape == (2, 2, 5, 8)


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
    with pytest.raises(ValueError, match=r"layers in 1..3 .medusa: 3 alone., got 'eagle', \(9,\)"):
        heads.head_config(target, "eagle", layers=(9,))
