"""The one definition of noise: a counter function of (seed, position, purpose), the same words in torch and in Triton.

Philox4x32-10 with the seed as key, so a number never depends on what was drawn before it or on who shares the batch.
It leaves out Triton's side (verify/kernel_parts.py has the same key and counter).

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; constants and test vectors of Random123.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import numpy as np
import torch

STEP, DRAFT, ACCEPT, RECOVER, COUPLED = range(5)  # purposes: the counter's last word, so no two share a stream

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(seeds, counter, rounds: int = 10):
    """Four pseudo-random 32-bit words for each (seed, counter).

    Rule: Philox4x32: ten rounds of two 32 x 32 -> 64 bit products, key words (low, high) of the seed.

    Args:
        seeds: int64 tensor, any shape; all 64 bits count.
        counter: four int64 tensors or ints in [0, 2^32) that broadcast with seeds.
        rounds: of the cipher; 10 everywhere.
    Returns: Four int64 tensors in [0, 2^32).
    Cost: about 100 integer operations a call's element; no host wait.
    Source: Salmon et al. 2011, section 3.3.

    >>> [hex(int(w)) for w in philox(torch.tensor(0), (0, 0, 0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    device = seeds.device
    if device.type == "cpu":  # the same operators on numpy's int64, which wrap alike, take half the time there
        seeds, counter = seeds.numpy(), [np.asarray(c, dtype=np.int64) for c in counter]
    key0, key1 = seeds & _MASK, (seeds >> 32) & _MASK
    c0, c1, c2, c3 = counter
    with np.errstate(over="ignore"):
        for _ in range(rounds):
            product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # wraps in int64; the 64 bits are right
            c0 = ((product1 >> 32) & _MASK) ^ c1 ^ key0
            c2 = ((product0 >> 32) & _MASK) ^ c3 ^ key1
            c1, c3 = product1 & _MASK, product0 & _MASK
            key0, key1 = (key0 + _WEYL[0]) & _MASK, (key1 + _WEYL[1]) & _MASK
    return tuple(torch.as_tensor(c, dtype=torch.int64, device=device) for c in (c0, c1, c2, c3))


def step_seeds(row_seeds, step: int):
    """A fresh seed for each row and step, so that a position drafted again gets fresh noise.

    Args:
        row_seeds: [batch] int64.
        step: the row's step, from 0; an int or a [batch] int64 tensor.
    Returns: [batch] int64, all 64 bits used.

    >>> step_seeds(torch.tensor([7, 7, 8]), 3).unique().numel()
    2
    """
    low, high, _, _ = philox(row_seeds, (step, 0, 0, STEP))
    return low | (high << 32)


def log_uniforms(seeds, num_positions: int):
    """Log of one uniform in (0, 1] for each row and position of a block: the accept test's noise.

    Rule: u = (k + 1) / 2^24 with 24 random bits k, so u is never 0 (log 0 would accept what the target forbids).

    Args:
        seeds: [batch] int64, of this step (`step_seeds`).
        num_positions: gamma.
    Returns: [batch, num_positions] float32, at most 0.

    >>> bool((log_uniforms(torch.arange(1000), 4) <= 0).all())
    True
    """
    positions = torch.arange(num_positions, device=seeds.device)
    word = philox(seeds[:, None], (0, positions, 0, ACCEPT))[0]
    return (((word >> 8) + 1).to(torch.float32) * 2.0**-24).log()


def gumbels(seeds, vocab_size: int, purpose: int, positions=0):
    """Standard Gumbel noise for every id: argmax(log-probabilities + it) is a draw from the law.

    Rule: v = (word + 1/2) / 2^32, at most 1 - 2^-24; E = -log1p(-v); gumbel = -log E. Taking v near 0, where float32
    is fine-grained, for the large values keeps ids of tiny probability right; all values are finite.

    Args:
        seeds: [batch] int64.
        vocab_size: V.
        purpose: DRAFT, RECOVER or COUPLED.
        positions: an int or [batch] int64: the position in the block (DRAFT) or in the sequence (COUPLED).
    Returns: [batch, V] float32. Id v takes word v % 4 of counter (v // 4, position, 0, purpose).
    Cost: V / 4 Philox calls and 2 V logs a row; no host wait.

    >>> bool(gumbels(torch.arange(100), 50, DRAFT).isfinite().all())
    True
    """
    blocks = torch.arange((vocab_size + 3) // 4, device=seeds.device)
    positions = torch.as_tensor(positions, dtype=torch.int64, device=seeds.device).reshape(-1, 1)
    words = torch.stack(philox(seeds[:, None], (blocks, positions, 0, purpose)), dim=-1)
    words = words.flatten(1)[:, :vocab_size].to(torch.float32)
    uniform = ((words + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    rest = 1 - uniform
    exponential = -rest.log() * (uniform / (1 - rest).clamp_min(2.0**-40))  # log1p by the textbook correction
    return -torch.where(rest == 1, uniform, exponential).log_()


def fresh_seed() -> int:
    """A seed from the operating system, in [0, 2^63)."""
    return secrets.randbits(63)


@dataclass(frozen=True)
class DraftNoise:
    """The drafter's noise of one step: what `Drafter.draft` gets as `noise`.

    Args:
        seeds: [batch] int64: the step's seeds, or the row seeds under "coupled".
        positions: None, or [batch] int64 under "coupled": where in the sequence the first drafted token will stand.
        gamma: positions whose noise a CPU makes at once, when the first is asked for; most of a call is the calling.
    """

    seeds: torch.Tensor
    positions: torch.Tensor | None = None
    gamma: int = 1
    made: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    def gumbels(self, index: int, vocab_size: int):
        """Noise of the index-th drafted token of the block.

        Args:
            index: 0 to gamma - 1.
            vocab_size: of the target ids that may be drawn.
        Returns: [batch, vocab_size] float32.
        """
        first = index // self.gamma * self.gamma
        if (first, vocab_size) not in self.made:
            at = torch.arange(first, first + self.gamma, device=self.seeds.device)[:, None]
            purpose, positions = (DRAFT, 0) if self.positions is None else (COUPLED, self.positions)
            seeds, positions = torch.broadcast_tensors(self.seeds, positions + at)
            block = gumbels(seeds.flatten(), vocab_size, purpose, positions.flatten())
            self.made[first, vocab_size] = block.view(self.gamma, -1, vocab_size)
        return self.made[first, vocab_size][index - first]

    def on(self, device) -> DraftNoise:
        """The same noise for a drafter on another device."""
        positions = None if self.positions is None else self.positions.to(device)
        return DraftNoise(self.seeds.to(device), positions, self.gamma)
