"""verify/kernel_parts.py: the same noise as noise.py, sums and differences right where float32 is thin."""

import math

import pytest
import torch
import triton
import triton.language as tl
from test_kernels import INTERPRETER

import flashspec_core as fs
from flashspec_core.noise import COUPLED, RECOVER, gumbels, philox
from flashspec_core.verify import kernels
from flashspec_core.verify.kernel_parts import _one_minus_exp, _times, _words

pytestmark = [INTERPRETER, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@triton.jit
def _noise_kernel(words_ptr, times_ptr, seed_ptr, position, PURPOSE: tl.constexpr):
    words = _words(tl.load(seed_ptr), 8 * tl.arange(0, 32), position, PURPOSE)
    at = 8 * tl.arange(0, 32)[:, None] + tl.arange(0, 8)[None, :]
    tl.store(words_ptr + at, words.to(tl.int64))
    tl.store(times_ptr + at, _times(words))


@triton.jit
def _difference_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, _one_minus_exp(tl.load(x_ptr + at)))


@pytest.mark.parametrize(
    "seed, position, purpose", [(0, 0, RECOVER), (-(2**63), 12345, COUPLED), (2**40 + 7, 1, COUPLED)]
)
def test_words_and_times_are_those_of_noise(seed, position, purpose):
    seeds = torch.tensor([seed])
    words, times = torch.empty(256, dtype=torch.int64), torch.empty(256)
    _noise_kernel[1,](words, times, seeds, position, PURPOSE=purpose)
    wanted = torch.stack(philox(seeds[:, None], (torch.arange(64), position, 0, purpose)), -1).flatten()
    assert torch.equal(words, wanted)
    torch.testing.assert_close(-times.log(), gumbels(seeds, 256, purpose, position)[0], atol=2e-6, rtol=2e-6)


def test_one_minus_exp_keeps_its_digits_at_both_ends():
    x = torch.tensor([0.0, -1e-9, -1e-4, -0.1249, -0.1251, -0.7, -20.0, -math.inf])
    out = torch.empty(8)
    _difference_kernel[1,](x, out, SIZE=8)
    torch.testing.assert_close(out, -torch.expm1(x.double()).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("vocab, dtype", [(5000, torch.float32), (40_001, torch.float32), (18_000, torch.bfloat16)])
def test_bounds_hold_for_every_id_of_their_lane_and_are_tight(vocab, dtype):
    target, seeds, workspaces = (torch.randn(2, 1, vocab) * 3).to(dtype), torch.tensor([5, -9]), {}
    rows = [fs.Sampling(0.7), fs.Sampling(1.0, top_k=200)]
    kernels.verify(target, fs.Draft(seeds.new_empty(2, 0)), rows, None, seeds, workspaces=workspaces)
    (ws,) = workspaces.values()
    logits = target[:, 0].float() / torch.tensor([[0.7], [1.0]])
    logits[1, logits[1] < logits[1].topk(200).values[-1]] = -math.inf
    scores = logits + gumbels(seeds, vocab, RECOVER, 0)  # log of weight / E
    v = torch.arange(vocab)
    lanes = v // ws.part * ws.bounded + v % ws.part // (ws.run * kernels.TILE) * kernels.LANES + v % kernels.TILE // 8
    top, wanted = (torch.full((2, ws.splits * ws.bounded), -math.inf) for _ in range(2))
    top.scatter_reduce_(1, lanes.expand(2, -1), scores, "amax")
    words = torch.stack(philox(seeds[:, None], (torch.arange((vocab + 7) // 8 * 2), 0, 0, RECOVER)), -1).flatten(1)
    least = ((words + 0.5) * 2.0**-32).view(2, -1, 2).amin(2).repeat_interleave(2, 1)[:, :vocab]
    large = torch.nn.functional.pad(logits, (0, vocab % 2), value=-math.inf).view(2, -1, 2).amax(2)
    pairs = large.repeat_interleave(2, 1)[:, :vocab] - least.log()  # the largest weight of two, the least time of two
    wanted.scatter_reduce_(1, lanes.expand(2, -1), pairs.float(), "amax")
    bounds, swept = ws.bounds[:, 0].flatten(1) * math.log(2), top > -math.inf
    assert swept.sum() > ws.splits * kernels.LANES and (bounds >= top - 1e-4)[swept].all()
    off = (bounds - wanted)[swept]
    assert -1e-4 < float(off.min()) and float(off.max()) < 0.0861 * math.log(2) + 1e-4  # a line under log2's octaves


def test_the_race_goes_on_until_the_one_id_that_the_residual_has():
    # the draft lacks a little of one unlikely id alone, so every lane whose bound is larger loses its race first
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(4, 2, 5000, generator=generator)
    logits = target[:, :1].clone()
    only = target[:, 0].argsort(1)[:, [10, 100, 1000, 4000]].diagonal()
    logits[torch.arange(4), 0, only] -= 1.0
    ids = logits[:, 0].argmax(1, keepdim=True)  # q > p by the little that the one id lacks: rejected at u = 1
    log_u = torch.zeros(4, 1)
    out = kernels.verify(target, fs.Draft(ids, logits), [fs.Sampling(1.0)] * 4, log_u, torch.arange(4))
    assert out.num_accepted.tolist() == [0] * 4 and out.next_token_ids.tolist() == only.tolist()
