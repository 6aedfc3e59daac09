"""The fused pass equals transformers' own, row by row, whatever lengths the rows have."""

import pytest
import torch
import transformers
from conftest import make_target, random_ids
from test_kernels import INTERPRETER

import flashspec_core as fs
from flashspec_core.engine import fused
from flashspec_core.engine.kv_cache import CachedModel

FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]


def llama_like(family, **options):
    if family != "qwen3":
        return make_target(family, hidden=64, **options)
    shape = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=96)
    shape |= dict(vocab_size=101, num_hidden_layers=3, initializer_range=0.3, eos_token_id=None, pad_token_id=None)
    torch.manual_seed(0)
    return fs.Target(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape)).eval())


@INTERPRETER
@pytest.mark.parametrize("family, width", [*((f, 4) for f in FAMILIES), ("llama", 1), ("llama", 20)])
def test_it_equals_transformers(family, width):
    target = llama_like(family)
    model = target.model
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    texts = [random_ids(n, seed=n) for n in (45, 70, 200)]  # read by one program, two or all of them
    cached = CachedModel(model)
    cached.logits([t[:-width] for t in texts], 1)
    cached.cache.begin([len(t) for t in texts], 1)  # room
    pass_ = fused.FusedModel(model)
    starts = torch.tensor([len(t) - width for t in texts])
    states, seen = pass_.states(torch.tensor([t[-width:] for t in texts]), starts, cached.cache, {2, 3})
    logits = pass_.logits(states)
    ((_, splits, _),) = pass_.places.buffers
    assert splits > 1 or width == 20  # parts of a row's keys are added up
    assert sorted(seen) == [2, 3]
    for i, text in enumerate(texts):
        out = model(torch.tensor([text]), output_hidden_states=True)
        torch.testing.assert_close(logits[i], out.logits[0, -width:], atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(seen[2][i], out.hidden_states[2][0, -width:], atol=2e-4, rtol=2e-4)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@INTERPRETER
def test_the_devices_step_by_its_own_kernels():
    # test_cuda_graphs.py has the kernels' rules stand in; here once all together
    target = fs.Target(make_target(hidden=64, layers=1).model)
    arms = [fs.Arm(fs.ModelDrafter(make_target(hidden=64, layers=1, seed=1)), 2), fs.Arm(fs.NGramDrafter(), 3)]
    for arm in arms:
        options = dict(sampling=fs.Sampling(0.9), max_new_tokens=8, seed=3)
        loop = fs.generate(target, arm, random_ids(9), **options)
        assert fs.generate(target, arm, random_ids(9), capture=True, **options).token_ids[:6] == loop.token_ids[:6]
