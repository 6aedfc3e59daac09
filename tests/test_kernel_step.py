"""verify/kernel_step.py: where filters cut, and that it compiles for each architecture, in little shared memory."""

import pytest
import torch
from compiled import in_a_child
from test_kernels import INTERPRETER

import flashspec_core as fs
from flashspec_core.verify import kernel_step, kernels
from flashspec_core.verify.logits import warp

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter is numpy: log 0 warns there


@INTERPRETER
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floors_are_the_lowest_logits_that_warp_keeps(dtype):
    # each filter alone and all together; ties, negative logits and a zero of either sign among them
    rows = [fs.Sampling(0.7, top_k=5), fs.Sampling(1.3, top_p=0.8), fs.Sampling(2.0, min_p=0.1)]
    rows += [fs.Sampling(1.0, top_p=0.9, top_k=20, min_p=0.02), fs.Sampling(0.9), fs.Sampling()]
    generator = torch.Generator().manual_seed(1)
    target, logits = ((torch.randn(6, n, 300, generator=generator) * 2).round(decimals=1).to(dtype) for n in (3, 2))
    target[:, 0, :40], target[:, 0, 40:80] = 0.0, -0.0
    workspaces: dict = {}
    draft = fs.Draft(logits.argmax(-1), logits)
    kernels.verify(target, draft, rows, torch.zeros(6, 2), torch.arange(6), workspaces=workspaces)
    (workspace,) = workspaces.values()
    for i, sampling in enumerate(rows):
        for place, row in enumerate([*target[i], *logits[i]]):
            kept = warp(row[None], sampling)[0] > -torch.inf
            wanted = -torch.inf if sampling.greedy or kept.all() else float(row[kept].min())
            floor = float(workspace.floors[i, place])
            assert floor == wanted or (kept.all() and floor <= float(row.min())), (sampling, place)


COMPILE = """
from compiled import build
from flashspec_core.verify import kernel_step
types = dict.fromkeys("laws floors kept log_u parts bounds logs".split(), "*fp32")
types |= dict.fromkeys("ids seeds positions out".split(), "*i64")
types |= dict.fromkeys("inverse winners state".split(), "*i32")
verify = dict(PHASE=0, BLOCK=1024, LANES=128, FEW=16, ROWS=5, GAMMA=8, SPLITS=16, DENSE=True, ALIGNED=True)
aligned = [name for name in kernel_step._verify_kernel.arg_names if name.endswith("_ptr")]
aligned += ["vocab", "draft_vocab", "part"]
cases = [(kernel_step._floors_kernel, dict(SKIP=16, GAMMA=8, BLOCK=4096), 8, {})]
shapes = [(0, 2, 5, 8, 512), (0, 2, 5, 8, 2048), (0, 2, 5, 16, 2048), (1, 1, 5, 2, 0), (2, 0, 7, 8, 256)]
for method, kind, rows, tiles, bounds in shapes:  # the first two: V 32,000 and 128,256 at batch 512 on 132 processors
    shape = dict(METHOD=method, PURPOSE=3, KIND=kind, FILTERED=method > 0, TILES=tiles, BOUNDS=bounds, ROWS=rows)
    cases.append((kernel_step._verify_kernel, verify | shape, 4, dict(maxnreg=128, aligned=aligned)))
cases.append((kernel_step._verify_kernel, verify | shape | dict(METHOD=0, KIND=2, ROWS=5, ALIGNED=False), 4, {}))
assert all("vocab" in fn.arg_names and "vocab" not in constants for fn, constants, _, _ in cases)
out = [
    build(fn, constants, types, capability, warps, **options)
    for capability in (75, 80, 90, 100) for fn, constants, warps, options in cases
]
"""


def test_it_compiles_for_each_architecture_and_shared_memory_does_not_grow_with_the_vocabulary(tmp_path):
    # the seed's O(1) claim, read from the compiler: V is an argument; what hangs on it are a part's runs, 16 at most
    assert [kernels.shares(512, v, 132)[2:] for v in (32_000, 128_256, 262_144)] == [(8, 512), (8, 2048), (16, 2048)]
    built = in_a_child(COMPILE, tmp_path)
    assert [b["capability"] for b in built] == [c for c in (75, 80, 90, 100) for _ in range(7)]
    for b in built:
        assert b["shared"] <= 8192 and b["local"] == 0 and b["spilled"] <= 96 and b["registers"] <= 255
        assert b["bf16"] == 0 or b["capability"] > 75
    for kernel in (kernel_step._verify_kernel, kernel_step._floors_kernel):
        assert "vocab" in kernel.arg_names
    for capability in range(4):  # aligned rows: four programs run at once
        of = built[7 * capability + 1 : 7 * capability + 6]
        assert all(b["registers"] <= kernels.REGISTERS == 128 for b in of) and of[0]["spilled"] == 0
        assert of[0]["shared"] == of[1]["shared"] == of[2]["shared"] <= 128
