"""What a decoder layer does between its matrix products, as Triton kernels: norm, rotary and cache, attention, gate.

All read from the device how far each row is, so that a captured step serves every length. They leave out the products
and who asks for them (fused.py, lanes.py).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
MOST_ROWS = 64  # queries that a program takes, where 16-bit matrix units are
MOST_SPLITS = 16  # programs that share a row's keys


@triton.jit
def begin(EARLY: tl.constexpr):
    """EARLY: a kernel is put in place while the one before it runs, and waits for its end here, before it reads."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _normed(x, weight, size, eps, dtype):
    """RMS norm in float32, rounded, then weighted: as transformers does it."""
    x = x * tl.rsqrt(tl.sum(x * x) / size + eps)
    return (x.to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@triton.jit
def norm_kernel(
    x_ptr,
    more_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    size,
    eps,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A row's norm; ADDS: of x + more, which is kept in sum. x, more, sum, out: [rows, size]."""
    begin(EARLY)
    at = tl.arange(0, BLOCK)
    inside, place = at < size, tl.program_id(0).to(tl.int64) * size + at
    x = tl.load(x_ptr + place, mask=inside, other=0.0)
    if ADDS:
        x = (x.to(tl.float32) + tl.load(more_ptr + place, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + place, x, mask=inside)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + place, _normed(x.to(tl.float32), weight, size, eps, x.dtype), mask=inside)


@triton.jit
def gate_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """silu(gate) * up. x: [rows, 2 size], gates first; out: [rows, size]."""
    begin(EARLY)
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(x_ptr + 2 * row * size + at, mask=inside, other=0.0)
    up = tl.load(x_ptr + (2 * row + 1) * size + at, mask=inside, other=0.0).to(tl.float32)
    x = gate.to(tl.float32)
    x = (x / (1 + tl.exp(-x))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * size + at, (x * up).to(gate.dtype), mask=inside)


@triton.jit
def rotary_kernel(
    x_ptr,  # [batch * width, q_heads + 2 kv_heads, 2 HALF]
    q_weight_ptr,  # [2 HALF], of the norms of queries and keys
    k_weight_ptr,
    cos_ptr,  # [positions, HALF]
    sin_ptr,
    starts_ptr,  # [batch] int64, where the first token of each row stands
    q_ptr,  # [batch * width, q_heads, 2 HALF]
    keys_ptr,  # [batch, kv_heads, capacity, 2 HALF]
    values_ptr,
    width,
    capacity,
    q_heads,
    kv_heads,
    eps,
    NORMED: tl.constexpr,
    HALF: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One head of one token: queries are turned, keys turned and put into the cache, values put there."""
    begin(EARLY)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, at = token // width, tl.arange(0, HALF)
    position = tl.load(starts_ptr + row) + token % width
    place = x_ptr + (token * (q_heads + 2 * kv_heads) + head) * 2 * HALF + at
    a, b = tl.load(place), tl.load(place + HALF)
    first = a
    dtype = x_ptr.dtype.element_ty
    kept = at < tl.where(position < capacity, HALF, 0)
    if head < q_heads + kv_heads:
        if NORMED:
            weight_ptr = k_weight_ptr
            if head < q_heads:
                weight_ptr = q_weight_ptr
            x, y = a.to(tl.float32), b.to(tl.float32)
            scale = tl.rsqrt((tl.sum(x * x) + tl.sum(y * y)) / (2 * HALF) + eps)
            a = ((x * scale).to(dtype).to(tl.float32) * tl.load(weight_ptr + at).to(tl.float32)).to(dtype)
            b = ((y * scale).to(dtype).to(tl.float32) * tl.load(weight_ptr + HALF + at).to(tl.float32)).to(dtype)
        safe = tl.minimum(position, capacity - 1)
        cos = tl.load(cos_ptr + safe * HALF + at).to(tl.float32)
        sin = tl.load(sin_ptr + safe * HALF + at).to(tl.float32)
        first = (a.to(tl.float32) * cos - b.to(tl.float32) * sin).to(dtype)
        b = (b.to(tl.float32) * cos + a.to(tl.float32) * sin).to(dtype)
    if head < q_heads:
        out = q_ptr + (token * q_heads + head) * 2 * HALF + at
        tl.store(out, first)
        tl.store(out + HALF, b)
    else:
        cache_ptr, own = keys_ptr, head - q_heads
        if own >= kv_heads:
            cache_ptr, own = values_ptr, own - kv_heads
        out = cache_ptr + ((row * kv_heads + own) * capacity + position) * 2 * HALF + at
        tl.store(out, first, mask=kept)
        tl.store(out + HALF, b, mask=kept)


@triton.jit
def attention_kernel(
    q_ptr,  # [batch * width, q_heads, DIM]
    keys_ptr,  # [batch, kv_heads, capacity, DIM]
    values_ptr,
    starts_ptr,  # [batch] int64
    out_ptr,  # as q
    parts_ptr,  # [batch, kv_heads, tiles, splits, ROWS, DIM] float32
    sums_ptr,  # [batch, kv_heads, tiles, splits, 2, ROWS] float32: largest score (log2) and sum
    arrived_ptr,  # [batch, kv_heads, tiles] int32, zero before and after
    width,
    capacity,
    q_heads,
    kv_heads,
    splits,
    scale,
    GROUP: tl.constexpr,  # query heads a key head
    ROWS: tl.constexpr,  # queries of a tile, a power of 2: whole tokens, GROUP each
    BLOCK: tl.constexpr,  # keys at a time
    DIM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Some keys of one key head for a tile of a row's tokens, all queries of the group; the last to arrive adds up.

    Only the filled part of the cache is read: a row's keys are split among as many programs as it has blocks for.
    """
    begin(EARLY)
    tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    head, row, tiles = tl.program_id(1), tl.program_id(2).to(tl.int64), tl.num_programs(0) // splits
    start, tokens = tl.load(starts_ptr + row), ROWS // GROUP
    end = tl.minimum(start + tl.minimum(tile * tokens + tokens, width), capacity).to(tl.int32)
    part = tl.cdiv(tl.cdiv(end, splits), BLOCK) * BLOCK
    active = tl.cdiv(end, part)
    if split < active:
        r, d = tl.arange(0, ROWS), tl.arange(0, DIM)
        token = tile * tokens + r // GROUP
        inside = (r < tokens * GROUP) & (token < width)
        q_place = ((row * width + token) * q_heads + head * GROUP + r % GROUP)[:, None] * DIM + d[None, :]
        q = tl.load(q_ptr + q_place, mask=inside[:, None], other=0.0)
        seen = start + token  # the last key that a query sees
        most = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, DIM], tl.float32)
        cache = (row * kv_heads + head) * capacity * DIM
        for first in range(split * part, tl.minimum(split * part + part, end), BLOCK):
            at = first + tl.arange(0, BLOCK)
            there = (at < end)[:, None]
            place = cache + at[:, None] * DIM + d[None, :]
            k = tl.load(keys_ptr + place, mask=there, other=0.0)
            v = tl.load(values_ptr + place, mask=there, other=0.0)
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
            score = tl.where((at[None, :] <= seen[:, None]) & (at < end)[None, :], score, float("-inf"))
            top = tl.maximum(most, tl.max(score, axis=1))
            base = tl.where(top == float("-inf"), 0.0, top)
            shrink, weight = tl.exp2(most - base), tl.exp2(score - base[:, None])
            total = total * shrink + tl.sum(weight, axis=1)
            mixed = mixed * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
            most = top
        if active > 1:
            unit = ((row * kv_heads + head) * tiles + tile) * splits
            mine = unit + split
            tl.store(sums_ptr + mine * 2 * ROWS + r, most)
            tl.store(sums_ptr + mine * 2 * ROWS + ROWS + r, total)
            tl.store(parts_ptr + mine * ROWS * DIM + r[:, None] * DIM + d[None, :], mixed)
            tl.debug_barrier()
            last = tl.atomic_add(arrived_ptr + unit // splits, 1, sem="acq_rel") == active - 1
            if last:
                top = tl.full([ROWS], float("-inf"), tl.float32)
                for s in range(active):
                    top = tl.maximum(top, tl.load(sums_ptr + (unit + s) * 2 * ROWS + r, volatile=True))
                total = tl.zeros([ROWS], tl.float32)
                mixed = tl.zeros([ROWS, DIM], tl.float32)
                for s in range(active):
                    weight = tl.exp2(tl.load(sums_ptr + (unit + s) * 2 * ROWS + r, volatile=True) - top)
                    total += weight * tl.load(sums_ptr + (unit + s) * 2 * ROWS + ROWS + r, volatile=True)
                    place = (unit + s) * ROWS * DIM + r[:, None] * DIM + d[None, :]
                    mixed += weight[:, None] * tl.load(parts_ptr + place, volatile=True)
                tl.store(arrived_ptr + unit // splits, 0)
                tl.store(out_ptr + q_place, (mixed / total[:, None]).to(q.dtype), mask=inside[:, None])
        else:
            tl.store(out_ptr + q_place, (mixed / total[:, None]).to(q.dtype), mask=inside[:, None])


@triton.jit
def ngram_kernel(
    tokens_ptr,  # [batch, capacity] int64
    lengths_ptr,  # [batch] int64
    out_ptr,  # [batch, gamma] int64, -1 behind what is proposed
    capacity,
    gamma,
    min_ngram,
    trust,
    MOST: tl.constexpr,  # longest match looked for
    GAMMA: tl.constexpr,  # the next power of 2
    BLOCK: tl.constexpr,
):
    """Where a row's last ids stood before, the longest match and the latest of these, and what followed there."""
    row = tl.program_id(0).to(tl.int64)
    length, tokens_ptr = tl.load(lengths_ptr + row).to(tl.int32), tokens_ptr + row * capacity
    best = tl.zeros([BLOCK], tl.int64)
    for first in range(0, length, BLOCK):
        end = first + tl.arange(0, BLOCK)
        same = (end >= min_ngram) & (end < length)
        match = tl.zeros([BLOCK], tl.int64)
        for k in range(1, MOST + 1):
            same = same & (end >= k)
            last = tl.load(tokens_ptr + tl.maximum(length - k, 0))
            same = same & (tl.load(tokens_ptr + end - k, mask=same, other=-1) == last)
            match += same.to(tl.int64)
        best = tl.maximum(best, tl.where(match >= min_ngram, match * 4294967296 + end, 0))
    top = tl.max(best)
    match, end = (top // 4294967296).to(tl.int32), (top % 4294967296).to(tl.int32)
    at = tl.arange(0, GAMMA)
    proposed = at < tl.minimum(gamma, trust * match)
    place = end + at % tl.maximum(length - end, 1)  # behind the text's end its last period comes again
    ids = tl.load(tokens_ptr + place, mask=proposed, other=-1)
    tl.store(out_ptr + row * gamma + at, tl.where(proposed, ids, -1), mask=at < gamma)


def launch_options(x) -> dict:
    """How these kernels are launched: before their turn, where a device can (`begin`). Args: x: a tensor there.

    Returns: keyword arguments of a launch.
    """
    early = x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


class Places:
    """Attention over a cache whose rows have lengths of their own, as kept on the device.

    Args: heads, kv_heads, dim: of the layer.
    """

    def __init__(self, heads: int, kv_heads: int, dim: int):
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.cos = self.sin = None
        self.buffers: dict = {}

    def set_angles(self, cos, sin):
        """Args: cos, sin: [positions, dim / 2]."""
        self.cos, self.sin = cos.contiguous(), sin.contiguous()

    def attend(self, qkv, starts, keys, values, width: int, q_norm=None, k_norm=None, eps: float = 1e-6):
        """Turn queries and keys, keep keys and values, and mix what each token sees.

        Args:
            qkv: [batch * width, (heads + 2 kv_heads) dim].
            starts: [batch] int64: where each row's first token stands.
            keys, values: [batch, kv_heads, capacity, dim].
            width: tokens a row.
            q_norm, k_norm: [dim] or None; eps: of these norms.
        Returns: [batch * width, heads dim].
        """
        tokens, capacity, batch = len(qkv), keys.shape[2], len(starts)
        q, options = qkv.new_empty(tokens, self.heads * self.dim), launch_options(qkv)
        out, unused = torch.empty_like(q), self.cos
        rotary_kernel[tokens, self.heads + 2 * self.kv_heads](
            qkv, unused if q_norm is None else q_norm, unused if k_norm is None else k_norm, self.cos, self.sin, starts,
            q, keys, values, width, capacity, self.heads, self.kv_heads, eps, q_norm is not None, self.dim // 2,
            num_warps=1, **options,
        )  # fmt: skip
        group, block = self.heads // self.kv_heads, 64 if qkv.element_size() == 2 else 32
        fast = qkv.is_cuda and qkv.element_size() == 2 and torch.cuda.get_device_capability(qkv.device) >= (8, 0)
        wanted = triton.next_power_of_2(group * width)
        rows = max(16, triton.next_power_of_2(group), min(wanted, MOST_ROWS if fast else 16))
        tiles, units = triton.cdiv(width, rows // group), batch * self.kv_heads
        cores = torch.cuda.get_device_properties(qkv.device).multi_processor_count if qkv.is_cuda else 16
        splits = max(1, min(triton.cdiv(capacity, 2 * block), 2 * cores // (units * tiles), MOST_SPLITS))
        key = units * tiles, splits, rows
        if key not in self.buffers:
            new = functools.partial(torch.empty, device=qkv.device)
            many = units * tiles if splits > 1 else 1  # alone, a program has nothing to leave
            parts, sums = new(many, splits, rows, self.dim), new(many, splits, 2, rows)
            self.buffers[key] = parts, sums, torch.zeros(units * tiles, dtype=torch.int32, device=qkv.device)
        attention_kernel[splits * tiles, self.kv_heads, batch](
            q, keys, values, starts, out, *self.buffers[key], width, capacity, self.heads, self.kv_heads, splits,
            self.dim**-0.5, group, rows, block, self.dim, num_warps=4, **options,
        )  # fmt: skip
        return out


def norm(x, more, weight, eps: float):
    """RMS norm of x + more. Args: x, more: [rows, size], more may be None. Returns: the sum, and its norm."""
    out, total = torch.empty_like(x), x if more is None else torch.empty_like(x)
    given = x if more is None else more
    block = triton.next_power_of_2(x.shape[1])
    norm_kernel[(len(x),)](
        x, given, weight, total, out, x.shape[1], eps, more is not None, block, num_warps=4, **launch_options(x)
    )
    return total, out


def gate(x):
    """silu(first half) * second half. Args: x: [rows, 2 size]. Returns: [rows, size]."""
    size = x.shape[1] // 2
    out = x.new_empty(len(x), size)
    gate_kernel[len(x), triton.cdiv(size, 1024)](x, out, size, 1024, num_warps=4, **launch_options(x))
    return out


def ngrams(tokens, lengths, gamma: int, min_ngram: int, max_ngram: int, trust: int):
    """What followed where the last ids stood before; see NGramDrafter.

    Args: tokens: [batch, capacity] int64; lengths: [batch] int64; gamma, min_ngram, max_ngram, trust: as there.
    Returns: [batch, gamma] int64, -1 behind what is proposed.
    """
    out, width = tokens.new_empty(len(tokens), gamma), triton.next_power_of_2(gamma)
    ngram_kernel[(len(tokens),)](
        tokens, lengths, out, tokens.shape[1], gamma, min_ngram, trust, max_ngram, width, 512, num_warps=4
    )
    return out
