"""verify/kernel_step.py: where filters cut, and one binary for every vocabulary, compilable for each architecture."""

import json
import os
import subprocess
import sys

import pytest
import torch
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
import json, os, re, subprocess, sys, tempfile
import triton
import triton.backends.nvidia as nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from flashspec_core.verify import kernel_step
types = dict.fromkeys("laws floors kept log_u parts bounds logs".split(), "*fp32")
types |= dict.fromkeys("ids seeds positions out".split(), "*i64")
types |= dict.fromkeys("inverse winners state".split(), "*i32")
verify = dict(PHASE=0, BLOCK=1024, LANES=128, TILES=8, FEW=8, ROWS=5, GAMMA=8, SPLITS=16, DENSE=True, ALIGNED=True)
cases = [(kernel_step._floors_kernel, dict(SKIP=16, GAMMA=8, BLOCK=4096), 8)]
for method, kind in ((0, 2), (1, 1), (2, 0)):
    shape = dict(METHOD=method, PURPOSE=3, KIND=kind, FILTERED=method == 1)
    cases.append((kernel_step._verify_kernel, verify | shape, 4))
out = []
for capability in (75, 80, 90, 100):
    for fn, constants, warps in cases:
        known = types | {"target": "*bf16", "draft": "*bf16"}
        signature = {n: known.get(n.removesuffix("_ptr"), "i32") for n in fn.arg_names}
        signature |= dict.fromkeys(constants, "constexpr")
        assert signature["vocab"] == "i32"
        source, target = ASTSource(fn, signature, constexprs=constants), GPUTarget("cuda", capability, 32)
        built = triton.compile(source, target=target, options={"num_warps": warps})
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(built.asm["cubin"])
            file.flush()
            tool = os.path.join(os.path.dirname(nvidia.__file__), "bin", "cuobjdump")
            usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
        local, registers = int(re.search(r"LOCAL:(\\d+)", usage)[1]), int(re.search(r"REG:(\\d+)", usage)[1])
        bf16 = len(re.findall(r"^\\s*[a-z.]+\\.bf16", built.asm["ptx"], re.M))
        row = dict(capability=capability, shared=built.metadata.shared, local=local, registers=registers, bf16=bf16)
        out.append(row)
print(json.dumps(out))
"""


def test_it_compiles_for_each_architecture_and_its_footprint_does_not_hang_on_the_vocabulary(tmp_path):
    # the seed's O(1) claim, read from the compiler: V is an argument of the kernel and no constant of it, so one binary
    # serves every vocabulary, with the shared memory and the registers that stand here
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    built = json.loads(done.stdout.splitlines()[-1])
    assert [b["capability"] for b in built] == [c for c in (75, 80, 90, 100) for _ in range(4)]
    for b in built:
        assert b["shared"] <= 8192 and b["local"] == 0 and b["registers"] <= 255
        assert b["bf16"] == 0 or b["capability"] > 75
    for kernel in (kernel_step._verify_kernel, kernel_step._floors_kernel):
        assert "vocab" in kernel.arg_names
