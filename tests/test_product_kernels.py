"""engine/product_kernels.py: products of few rows, each row's numbers its own; whole passes are in test_fused.py."""

import pytest
import torch
from compiled import in_a_child
from test_kernels import GPU, INTERPRETER
from torch import nn

from flashspec_core.engine import product_kernels as products


def case(rows, size, outs, dtype=torch.float16, device="cpu"):
    generator = torch.Generator().manual_seed(rows + size + outs)
    made = [torch.randn(*shape, generator=generator) for shape in ((rows, size), (outs, size), (outs,))]
    return [t.to(device, dtype) for t in made]


@INTERPRETER
@pytest.mark.parametrize("rows, size, outs", [(1, 512, 48), (5, 70, 33), (16, 300, 16)])
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_the_product_and_each_rows_own(rows, size, outs, biased):
    x, weight, bias = case(rows, size, outs)
    bias = bias if biased else None
    out = products.few_rows(x, weight, bias)
    wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(out.double(), wanted, rtol=2e-3, atol=2e-2)
    assert torch.equal(products.few_rows(x[-1:].contiguous(), weight, bias), out[-1:])


def test_others_go_to_the_library(monkeypatch):
    monkeypatch.setattr(products, "few_rows", None)
    x, weight, bias = case(3, 8, 5, torch.float32)
    assert torch.equal(products.by_weight(x, weight, bias), nn.functional.linear(x, weight, bias))
    other = nn.Identity()
    assert products.product(other) is other
    linear = nn.Linear(8, 5)
    assert torch.equal(products.product(linear)(x), linear(x))


@GPU
@pytest.mark.gpu
def test_on_a_gpu_many_rows_and_other_layouts_go_to_the_library(monkeypatch):
    x, weight, bias = case(17, 64, 48, torch.bfloat16, "cuda")
    monkeypatch.setattr(products, "few_rows", None)
    for given in (x, x[:4].T.contiguous().T, x[:4].float()):
        kind = weight.to(given.dtype)
        assert products.by_weight(given, kind, bias.to(given.dtype)).shape == (len(given), 48)


@GPU
@pytest.mark.gpu
@pytest.mark.parametrize(
    "size, outs", [(576, 960), (2048, 2560), (5632, 2048), (4096, 128_256), (1000, 77), (1100, 77)]
)
def test_on_a_gpu_it_is_as_near_as_the_library(size, outs):
    x, weight, bias = case(16, size, outs, torch.bfloat16, "cuda")
    for rows in (1, 5, 16):
        out = products.by_weight(x[:rows], weight, bias)
        wanted = x[:rows].double() @ weight.double().T + bias.double()
        theirs = nn.functional.linear(x[:rows], weight, bias).double()
        assert (out.double() - wanted).abs().max() <= 1.01 * (theirs - wanted).abs().max()
        assert torch.equal(out, products.by_weight(x, weight, bias)[:rows])


COMPILE = """
from compiled import build
from flashspec_core.engine import product_kernels as k
out = []
for capability in (80, 86, 89, 90, 100, 120):
    for size, whole in ((576, False), (4096, True)):
        width, block, warps, stages = k.sizes(size, (capability // 10, capability % 10))
        early = capability >= 90
        cut = dict(ROWS=k.FEW, OUTS=width, BLOCK=block, STAGES=stages, EARLY=early, WHOLE=whole, HAS_BIAS=not whole)
        out.append(build(k.product_kernel, cut, {}, capability, warps, "bf16") | dict(early=early))
"""


def test_it_compiles_for_every_device_that_it_runs_on_and_fits_there(tmp_path):
    most = {80: 163_840, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}  # bytes a program may take
    built = in_a_child(COMPILE, tmp_path)
    assert len(built) == 12
    for b in built:
        assert b["shared"] <= most[b["capability"]] and b["local"] == 0 and b["spilled"] <= 96, b
        assert b["waits"] == b["early"] and not b["reads_first"], b
