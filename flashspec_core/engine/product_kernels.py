"""x W^T for a few rows x, which is how a decoding step uses its weights: each is read once.

One rule sums each row whatever other rows stand beside it, so one token alone and five to be verified give the same
numbers. Libraries serve many rows, 32-bit weights and CPUs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from flashspec_core.engine.layer_kernels import begin, launch_options

FEW = 16  # rows, the least that matrix units take


@triton.jit
def product_kernel(
    x_ptr,  # [rows, size]
    weight_ptr,  # [outs, size]
    bias_ptr,  # [outs]
    out_ptr,  # [rows, outs]
    rows,
    size,
    outs,
    HAS_BIAS: tl.constexpr,
    WHOLE: tl.constexpr,  # size is a multiple of BLOCK, outs of OUTS
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,  # that a program makes
    BLOCK: tl.constexpr,  # of size, at a time
    STAGES: tl.constexpr,  # blocks on their way
    EARLY: tl.constexpr,
):
    """Some outputs of all rows."""
    begin(EARLY)
    o, r, k = tl.program_id(0) * OUTS + tl.arange(0, OUTS), tl.arange(0, ROWS), tl.arange(0, BLOCK)
    weights = weight_ptr + o.to(tl.int64)[:, None] * size + k[None, :]
    inputs = x_ptr + r[None, :] * size + k[:, None]
    total = tl.zeros([OUTS, ROWS], tl.float32)
    for first in tl.range(0, size, BLOCK, num_stages=STAGES):
        if WHOLE:
            w = tl.load(weights + first, eviction_policy="evict_first")
            x = tl.load(inputs + first, mask=(r < rows)[None, :], other=0.0)
        else:
            inside = k < size - first
            w = tl.load(weights + first, mask=(o < outs)[:, None] & inside[None, :], other=0.0)
            x = tl.load(inputs + first, mask=(r < rows)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(w, x, total)
    if HAS_BIAS:
        total += tl.load(bias_ptr + o, mask=o < outs, other=0.0).to(tl.float32)[:, None]
    place = r[None, :] * outs + o[:, None]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=(r < rows)[None, :] & (o < outs)[:, None])


def sizes(size: int, capability=(9, 0)) -> tuple[int, int, int, int]:
    """How a product is cut; measured on an H200.

    Args: size: of a weight's row; capability: of the device: most have less than half of an H100's shared memory.
    Returns: OUTS, BLOCK, warps and STAGES of the kernel.
    """
    stages = 6 if capability[0] in (9, 10) else 4
    return (64, 128, 4, stages) if size >= 1024 else (16, 128, 2, stages)


def few_rows(x, weight, bias=None):
    """The kernel.

    Args: x: [rows, size], at most FEW rows; weight: [outs, size]; bias: [outs] or None; all of one 16-bit dtype.
    Returns: [rows, outs], summed in float32.
    """
    (rows, size), outs = x.shape, len(weight)
    out = x.new_empty(rows, outs)
    width, block, warps, stages = sizes(size, torch.cuda.get_device_capability(x.device) if x.is_cuda else (9, 0))
    whole = size % block == 0 and outs % width == 0
    product_kernel[triton.cdiv(outs, width),](
        x, weight, weight if bias is None else bias, out, rows, size, outs, bias is not None, whole, FEW, width, block,
        stages, num_warps=warps, **launch_options(x),
    )  # fmt: skip
    return out


def product(linear):
    """A linear layer's product, by the kernel where rows are few and 16 bits wide on a fit device.

    Args: linear: a module; others than a plain nn.Linear are called as they are.
    Returns: f(x [rows, size]) -> [rows, outs].
    """
    if type(linear) is not torch.nn.Linear:
        return linear
    return lambda x: by_weight(x, linear.weight, linear.bias)


def by_weight(x, weight, bias=None):
    """x weight^T + bias. Args: x: [rows, size]; weight: [outs, size]; bias: [outs] or None. Returns: [rows, outs]."""
    fit = x.is_cuda and x.element_size() == 2 and torch.cuda.get_device_capability(x.device) >= (8, 0)
    if fit and len(x) <= FEW and x.is_contiguous() and weight.is_contiguous():
        return few_rows(x, weight, bias)
    return F.linear(x, weight, bias)
