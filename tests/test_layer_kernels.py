"""engine/layer_kernels.py: n-grams on the device, and every kernel compiled; a whole layer is in test_fused.py."""

import torch
from compiled import in_a_child
from test_kernels import INTERPRETER

import flashspec_core as fs
from flashspec_core.engine.layer_kernels import ngrams


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


COMPILE = """
from compiled import build
from flashspec_core.engine import layer_kernels as k
from flashspec_core.verify import kernel_step
types = dict.fromkeys("parts sums bits".split(), "*fp32") | {"arrived": "*i32", "eps": "fp32", "scale": "fp32"}
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
    for fn, constants, warps in cases + [(k.attention_kernel, small | dict(ROWS=64, DIM=128), 4)] * (capability == 90):
        known = types | ({"out": "*i64"} if fn is k.ngram_kernel else {})
        early = {"EARLY": capability == 90} if "EARLY" in fn.arg_names else {}
        out.append(build(fn, constants | early, known, capability, warps, dtype) | early)
"""


def test_they_compile_for_a_t4_and_an_h200(tmp_path):
    built = in_a_child(COMPILE, tmp_path)
    assert [b["capability"] for b in built] == [75] * 6 + [90] * 7
    for b in built:
        assert b["shared"] <= (65_536 if b["capability"] == 75 else 102_400), b
        assert b["waits"] == b.get("EARLY", False) and not b["reads_first"], b
