"""The verification step timed on a CUDA device: our kernels, the reference, the same compiled, vLLM's, and floors.

`python -m flashspec_core.lab.bench_kernels FILE` writes the rows of notebooks/results/kernels.csv. No model runs here.
"""

from __future__ import annotations

import csv
import itertools
import subprocess
import sys
from types import SimpleNamespace

import torch
import triton

from flashspec_core.lab import bench
from flashspec_core.noise import RECOVER, DraftNoise, log_uniforms
from flashspec_core.records import Draft, Sampling
from flashspec_core.verify import kernels, reference

BATCHES, VOCABS, GAMMAS = (1, 8, 32, 128, 512), (32_000, 49_152, 128_256), (1, 4, 8)
SOFT = Sampling(temperature=1.0)


def case(batch: int, vocab: int, gamma: int, device="cuda", seed: int = 0) -> SimpleNamespace:
    """A verification step as an engine meets it: target logits N(0, 2), draft = target + N(0, 1), drawn from it.

    Args: batch, vocab, gamma, device, seed: of the tensors; bfloat16.
    Returns: target, draft (with its log-sum-exp), samplings, log_uniforms, seeds, positions.
    """
    generator = torch.Generator(device).manual_seed(seed)
    normal = dict(generator=generator, device=device, dtype=torch.bfloat16)
    target = torch.randn(batch, gamma + 1, vocab, **normal).mul_(2)
    logits = target[:, :gamma] + torch.randn(batch, gamma, vocab, **normal)
    seeds = torch.arange(batch, device=device) + seed * batch
    samplings, noise = [SOFT] * batch, DraftNoise(seeds)
    drawn = [kernels.draw(logits[:, i].contiguous(), samplings, noise, i) for i in range(gamma)]
    ids, sums = (torch.stack(each, 1) for each in zip(*drawn, strict=True))
    draft = Draft(ids, logits, sums)
    return SimpleNamespace(
        call=(target, draft, samplings, log_uniforms(seeds, gamma), seeds), positions=torch.arange(batch, device=device)
    )


def vllm_call(c, block: bool = False):
    """vLLM's rejection sampler on the same case, or None where it is not installed.

    Args:
        c: from `case`.
        block: its block verification.
    """
    try:
        from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample
    except ImportError:
        return None
    target, draft, _, _, seeds = c.call
    batch, rows, vocab = target.shape
    like = dict(dtype=torch.int32, device=target.device)
    each = torch.arange(batch, **like)
    arguments = dict(
        target_logits=target.view(-1, vocab),
        draft_logits=draft.logits,
        draft_sampled=torch.cat([torch.zeros_like(seeds)[:, None], draft.token_ids], 1).flatten(),
        cu_num_logits=torch.arange(batch + 1, **like) * rows,
        pos=torch.arange(rows, device=target.device).repeat(batch),
        idx_mapping=each,
        expanded_idx_mapping=each.repeat_interleave(rows),
        expanded_local_pos=torch.arange(rows, **like).repeat(batch),
        temperature=torch.ones(batch, device=target.device),
        seed=seeds,
        num_speculative_steps=rows - 1,
        use_block_verification=block,
    )
    return lambda: rejection_sample(**arguments)


def captured(call):
    """A CUDA graph of a call, warmed up first."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def device_times(call, repeat: int = 100) -> list[float]:
    """Microseconds of each of several calls between two events of the device."""
    for _ in range(10):
        call()
    torch.cuda.synchronize()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def host_times(call, repeat: int = 50) -> list[float]:
    """Microseconds of each of several eager calls, waited for."""
    return [seconds * 1e6 for seconds in bench.measure(call, warmup=3, repeat=repeat)]


def shape_rows(batch: int, vocab: int, gamma: int, empty, compiled=None) -> list[dict]:
    """All providers on one shape, graphs replayed in turn so that a slow moment hits all.

    Args:
        batch, vocab, gamma: the shape.
        empty: graph of nothing, whose time is taken off for `net_time`.
        compiled: the reference under torch.compile, or None.
    Returns: rows.
    """
    c = case(batch, vocab, gamma)
    kept: dict = {}
    own = {m: lambda m=m: kernels.verify(*c.call, c.positions, m, kept) for m in ("token", "block", "coupled")}
    calls = {("verify", "flashspec_core", m): call for m, call in own.items() if m == "token" or gamma == 4}
    for name, block in (("token", False), ("block", True)):
        if (peer := vllm_call(c, block)) and ("verify", "flashspec_core", name) in calls:
            calls["verify", "vllm-0.32", name] = peer
    timed = dict(calls)
    part = lambda method, phase: lambda: kernels._launch(*c.call, c.positions, method, 3, kept, (phase,))  # noqa: E731
    timed["verify_normalise", "flashspec_core", "token"] = part("token", 1)
    timed["verify_recover", "flashspec_core", "token"] = part("token", 3)
    timed["verify_accept", "flashspec_core", "token"] = part("coupled", 3)
    notes = {
        "verify_recover": "one part of the kernel launched alone; the accept test is in it",
        "verify_accept": "one part of the kernel launched alone, without a draw",
        "verify_normalise": "one part of the kernel launched alone; where parts have bounds, the race's noise is in it",
    }
    cells = dict(batch=batch, vocab=vocab, gamma=gamma, temperature=1, dtype="bfloat16")
    rows, graphs = [], {key: captured(call) for key, call in timed.items()}
    rounds = [(device_times(empty.replay), {k: device_times(g.replay) for k, g in graphs.items()}) for _ in range(3)]
    floor = sorted(time for times, _ in rounds for time in times)
    middle = floor[len(floor) // 2]
    for key in graphs:
        (name, provider, method), times = key, [time for _, each in rounds for time in each[key]]
        here = dict(mode="graph", method=method, note=notes.get(name, ""), **cells)
        rows.append(bench.row(name, provider, "time", "us", times, **here))
        rows.append(bench.row(name, provider, "net_time", "us", [t - middle for t in times], **here))
    calls["verify", "torch", "token"] = lambda: reference.verify_token(*c.call)
    if compiled is not None:
        calls["verify", "torch-compiled", "token"] = lambda: compiled(*c.call)
    for (name, provider, method), call in calls.items():
        few = 10 if provider.startswith("torch") else 50
        rows.append(
            bench.row(name, provider, "time", "us", host_times(call, few), mode="eager", method=method, **cells)
        )
    return rows


def bandwidth() -> list[float]:
    """TB/s of a device copy of 2 GB, bytes read and written."""
    source = torch.empty(2**30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return [2 * source.nbytes / time * 1e-6 for time in device_times(lambda: target.copy_(source), 20)]


def shared_bytes(vocab: int, batch: int = 8, gamma: int = 4, capability: int = 75, cores: int = 40) -> int:
    """Shared memory of one program of the verification kernel, from the compiler; no GPU is needed.

    Args: vocab, batch, gamma: the shape, in float16; capability, cores: of the GPU it is for; default: a Tesla T4.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, (_, splits, run, bounded) = kernels._verify_kernel, kernels.shares(batch, vocab, cores)
    constants = dict(METHOD=0, PURPOSE=RECOVER, FILTERED=False, KIND=2, DENSE=True, ALIGNED=True, PHASE=0)
    constants |= dict(BLOCK=kernels.TILE, LANES=kernels.LANES, TILES=run, BOUNDS=bounded, FEW=kernels.FEW)
    constants |= dict(SPLITS=2 ** (splits - 1).bit_length(), ROWS=gamma + 1, GAMMA=2 ** gamma.bit_length())
    types = dict.fromkeys(("laws", "floors", "kept", "log_u", "parts", "bounds", "logs"), "*fp32")
    types |= dict.fromkeys(("ids", "seeds", "positions", "out"), "*i64")
    types |= dict.fromkeys(("inverse", "winners", "state"), "*i32")
    of = lambda name: types.get(name.removesuffix("_ptr"), "*fp16" if name.endswith("_ptr") else "i32")  # noqa: E731
    signature = {name: of(name) for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
    whole = {i: name.endswith("_ptr") or name in ("vocab", "draft_vocab", "part") for i, name in enumerate(signature)}
    attributes = {(i,): [["tt.divisibility", 16]] for i, multiple in whole.items() if multiple}
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": 4, "maxnreg": kernels.REGISTERS}).metadata.shared


def counted_bytes(batch: int, vocab: int, gamma: int) -> float | None:
    """Bytes that one step reads from the device's memory, by Nsight Compute; None where it cannot run."""
    counter = "dram__bytes_read.sum"
    command = [
        "ncu",
        "--clock-control",
        "none",
        "--metrics",
        counter,
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
    ]
    command += ["-k", "_verify_kernel", "--launch-skip", str(gamma), "--launch-count", "1"]
    command += [sys.executable, "-m", "flashspec_core.lab.bench_kernels", "once", str(batch), str(vocab), str(gamma)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        table = list(csv.DictReader(line for line in done.stdout.splitlines() if line.startswith('"')))
        return float(table[-1][counter].replace(",", ""))
    except (OSError, ValueError, IndexError, KeyError, subprocess.TimeoutExpired):
        return None


def main(path: str) -> None:
    """Every shape, one after another; rows are kept as they come.

    Args: path: of the CSV.
    """
    empty, one = captured(lambda: None), torch.empty(1, device="cuda")
    least = host_times(lambda: one.fill_(0), 500)
    rows = [
        bench.row("verify", "floor", "time", "us", device_times(empty.replay), mode="graph", note="an empty graph"),
        bench.row("verify", "floor", "time", "us", least, mode="eager", note="one number is set, and waited for"),
        bench.row("verify", "floor", "bandwidth", "TB/s", bandwidth(), note="device copy"),
    ]
    bench.append_rows(rows, path)
    compiled = torch.compile(reference.verify_token, dynamic=True)
    for vocab, batch, gamma in itertools.product(VOCABS, BATCHES, GAMMAS):
        bench.append_rows(shape_rows(batch, vocab, gamma, empty, compiled if gamma == 4 else None), path)
        torch.cuda.empty_cache()
        print(f"V {vocab}, batch {batch}, gamma {gamma}", flush=True)


def count(path: str) -> None:
    """Bytes by hardware counters, where Nsight Compute is there.

    Args: path: of the CSV.
    """
    for vocab, batch in itertools.product(VOCABS, (8, 128)):
        if (read := counted_bytes(batch, vocab, 4)) is not None:
            cells = dict(batch=batch, vocab=vocab, gamma=4, dtype="bfloat16", method="token", note="Nsight Compute")
            bench.append_rows([bench.row("verify", "flashspec_core", "memory_read", "bytes", [read], **cells)], path)


def once(batch: int, vocab: int, gamma: int) -> None:
    """One step, for a profiler to look at."""
    c = case(batch, vocab, gamma)
    torch.cuda.synchronize()
    kernels.verify(*c.call)
    torch.cuda.synchronize()


if __name__ == "__main__":
    if sys.argv[1] == "once":
        once(*map(int, sys.argv[2:]))
    else:
        main(sys.argv[1])
        count(sys.argv[1])
