"""Faster float32 products for the few tokens of a verification pass on a CPU of AMD's.

A pass over 2 to 8 tokens reads each weight once, like a pass over one; there PyTorch's `linear` takes up to twice as
long as weight @ tokens^T does. The model's own modules are lent for the pass and given back: nothing stays changed.
"""

from __future__ import annotations

import functools
import platform
from contextlib import contextmanager
from pathlib import Path

import torch

MAX_ROWS = 8  # above, both orders take about the same


class _NarrowLinear(torch.nn.Linear):
    def forward(self, x):
        rows = x.numel() // x.shape[-1]
        if not 1 < rows <= MAX_ROWS:
            return super().forward(x)
        out = torch.mm(self.weight, x.reshape(rows, -1).t()).t().contiguous()  # contiguous: attention's fast path asks
        out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], -1)


@functools.cache  # a call of generate asks
def narrow_pays(cpu: str | None = None) -> bool:
    """Whether `narrow_products` is the faster way here: on AMD's CPUs; on Intel's `linear` is, by up to twice.

    Args: cpu: what names its vendor; None: what the system says of this one.

    >>> narrow_pays("vendor_id : AuthenticAMD"), narrow_pays("vendor_id : GenuineIntel")
    (True, False)
    """
    if cpu is None:
        info = Path("/proc/cpuinfo")
        cpu = info.read_text() if info.exists() else platform.processor()
    return "AuthenticAMD" in cpu


def plain_linears(model) -> list[torch.nn.Linear]:
    """The layers that `narrow_products` can serve.

    Args: model: a torch module.
    Returns: Its float32 nn.Linear modules on the CPU (of that very class, or lent just now), in order.
    """
    linears = [m for m in model.modules() if type(m) in (torch.nn.Linear, _NarrowLinear)]
    return [m for m in linears if m.weight.device.type == "cpu" and m.weight.dtype == torch.float32]


@contextmanager
def narrow_products(linears):
    """Within it these layers multiply narrow inputs as weight @ tokens^T.

    Rule: the same sums as `linear`, so equal up to float32 rounding.

    Args: linears: from `plain_linears`.
    """
    for module in linears:
        object.__setattr__(module, "__class__", _NarrowLinear)
    try:
        yield
    finally:
        for module in linears:
            object.__setattr__(module, "__class__", torch.nn.Linear)
