"""The fused pass equals transformers' own, row by row, whatever lengths the rows have."""

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from conftest import make_target, random_ids
from test_kernels import INTERPRETER

import flashspec_core as fs
from flashspec_core.engine import fused
from flashspec_core.engine.kv_cache import CachedModel
from flashspec_core.engine.layer_kernels import ngrams

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
def test_ngrams_are_those_of_the_drafter():
    generator = torch.Generator().manual_seed(0)
    for gamma, settings in ((4, (2, 16, 4)), (7, (1, 3, 1)), (3, (3, 5, 2))):
        rows = [torch.randint(3, (n,), generator=generator).tolist() for n in (2, 5, 40, 600, 1100)]
        tokens = torch.tensor([ids + [0] * (1100 - len(ids)) for ids in rows])
        out = ngrams(tokens, torch.tensor([len(ids) for ids in rows]), gamma, *settings)
        for got, ids in zip(out.tolist(), rows, strict=True):
            wanted = fs.NGramDrafter(*settings)._lookup(0, ids, gamma)
            assert got == wanted + [-1] * (gamma - len(wanted))


@INTERPRETER
def test_the_devices_step_by_its_own_kernels():
    # test_cuda_graphs.py has the kernels' rules stand in; here once all together
    target = fs.Target(make_target(hidden=64, layers=1).model)
    arms = [fs.Arm(fs.ModelDrafter(make_target(hidden=64, layers=1, seed=1)), 2), fs.Arm(fs.NGramDrafter(), 3)]
    for arm in arms:
        options = dict(sampling=fs.Sampling(0.9), max_new_tokens=8, seed=3)
        loop = fs.generate(target, arm, random_ids(9), **options)
        assert fs.generate(target, arm, random_ids(9), capture=True, **options).token_ids[:6] == loop.token_ids[:6]


COMPILE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from flashspec_core.engine import layer_kernels as k
from flashspec_core.verify import kernel_step
types = dict.fromkeys("parts sums bits".split(), "*fp32") | {"arrived": "*i32"}
types |= dict.fromkeys("starts tokens lengths row_seeds step seeds".split(), "*i64")
small = dict(GROUP=8, ROWS=16, BLOCK=64, DIM=64)
cases = [
    (k.norm_kernel, dict(ADDS=True, BLOCK=4096), 4),
    (k.gate_kernel, dict(BLOCK=1024), 4),
    (k.rotary_kernel, dict(NORMED=True, HALF=64), 1),
    (k.attention_kernel, small, 4),
    (k.ngram_kernel, dict(MOST=16, GAMMA=8, BLOCK=512), 4),
    (kernel_step._noise_kernel, dict(GAMMA=8), 4),
]
out = []
for capability, dtype in ((75, "fp16"), (90, "bf16")):
    here = cases + [(k.attention_kernel, small | dict(ROWS=64, DIM=128), 4)] * (capability == 90)
    for fn, constants, warps in here:
        known = types | ({"out": "*i64"} if fn is k.ngram_kernel else {})
        other = lambda n: "*" + dtype if n.endswith("_ptr") else "i32"
        signature = {n: known.get(n.removesuffix("_ptr"), other(n)) for n in fn.arg_names}
        signature |= {n: "fp32" for n in ("eps", "scale") if n in signature} | dict.fromkeys(constants, "constexpr")
        source = ASTSource(fn, signature, constexprs=constants)
        built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
        row = dict(name=fn.__name__, capability=capability, shared=built.metadata.shared, ptx=len(built.asm["ptx"]))
        out.append(row)
print(json.dumps(out))
"""


def test_the_layers_kernels_compile_for_a_t4_and_an_h200(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    built = json.loads(done.stdout.splitlines()[-1])
    assert [b["capability"] for b in built] == [75] * 6 + [90] * 7
    for b in built:
        assert b["shared"] <= (65_536 if b["capability"] == 75 else 102_400), b
