"""verify/kernel_parts.py: the same noise as noise.py, sums and differences right where float32 is thin."""

import math

import pytest
import torch
import triton
import triton.language as tl
from test_kernels import INTERPRETER

from flashspec_core.noise import COUPLED, RECOVER, gumbels, philox
from flashspec_core.verify.kernel_parts import _one_minus_exp, _times, _words

pytestmark = [INTERPRETER, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@triton.jit
def _noise_kernel(words_ptr, times_ptr, seed_ptr, position, PURPOSE: tl.constexpr):
    words = _words(tl.load(seed_ptr), tl.arange(0, 64), position, PURPOSE)
    at = 4 * tl.arange(0, 64)[:, None] + tl.arange(0, 4)[None, :]
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
