"""Whole answers on a GPU: plain and speculative beside transformers and flashspec 0.3.1, on models of real sizes.

Where real weights cannot be had a pair has the real shapes and a set agreement: "synthetic acceptance, real timing".
It leaves out the kernels (bench_kernels.py) and CPUs (bench_cpu.py).
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass

import torch

from flashspec_core.engine.decode import generate
from flashspec_core.engine.drafters import EarlyExitDrafter
from flashspec_core.engine.models import Target, default_dtype, load_target
from flashspec_core.lab import bench, bench_cpu, workloads
from flashspec_core.lab.bench_cpu import Way, assistant_of, older_ways, transformers_answer
from flashspec_core.records import Arm, Generation, Sampling

NOTE = "synthetic acceptance, real timing"
NUM_DRAFT_LAYERS = 4
REAL = "smollm2-135m"


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama, and how much its layers behind the draft's say (1: all that they would).

    Args: hidden, intermediate, layers, heads, kv_heads, vocab: as in LlamaConfig; later: factor; nf4: in four bits.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    later: float
    nf4: bool = False


SHAPES = {
    "tinyllama-1.1b-shape": Shape(2048, 5632, 22, 32, 4, 32_000, 0.05),
    "llama-3-8b-shape": Shape(4096, 14_336, 32, 32, 8, 128_256, 0.03),
    "llama-3-70b-shape-nf4": Shape(8192, 28_672, 80, 64, 8, 128_256, 0.02, True),
}


def synthetic_target(shape: Shape, device, dtype=None, seed: int = 0, name: str = "synthetic") -> Target:
    """A Llama of random weights in which the first layers and all of them mostly agree.

    Rule: weights N(0, .02), output rows three times that; behind layer 4 what a layer adds is multiplied by `later`.

    Args: shape: its sizes; device; dtype: None: the device's fast one; seed: of the weights; name.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    device, generator = torch.device(device), torch.Generator(device).manual_seed(seed)
    dtype = dtype or default_dtype(device)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)

    def random(weight, factor=1.0):
        new = torch.empty(weight.shape, dtype=dtype, device=device)
        return torch.nn.Parameter(new.normal_(0, 0.02 * factor, generator=generator), requires_grad=False)

    model.model.embed_tokens.weight = random(model.model.embed_tokens.weight)
    model.lm_head.weight = random(model.lm_head.weight, 3.0)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            ones = torch.ones(module.weight.shape, dtype=dtype, device=device)
            module.weight = torch.nn.Parameter(ones, requires_grad=False)
    for i, layer in enumerate(model.model.layers):
        for part in (layer.self_attn, layer.mlp):
            for role, linear in list(part.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    late = i >= NUM_DRAFT_LAYERS and role in ("o_proj", "down_proj")
                    linear.weight = random(linear.weight, shape.later if late else 1.0)
                    if shape.nf4:
                        setattr(part, role, _packed(linear, dtype, device))
    return Target(model.eval(), None, name)


def _packed(linear, dtype, device):
    import bitsandbytes as bnb

    sizes = linear.in_features, linear.out_features
    packed = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=dtype, quant_type="nf4", device="meta")
    packed.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=packed)
    return packed.to(device)


def own_way(target, arm: Arm, batch: int = 1, capture: bool | None = None, note: str = NOTE) -> Way:
    """A way of this package. Args: target; arm; batch: equal prompts; capture: see generate; note: of its rows."""

    def answer(ids, num_tokens, temperature):
        options = dict(max_new_tokens=num_tokens, sampling=Sampling(temperature), capture=capture)
        return generate(target, arm, ids.tolist(), seed=list(range(batch)), **options)

    return Way("flashspec_core", answer, arm.gamma if arm.drafter is not None else "", note)


def peer_ways(target, compiled: bool = True) -> list[Way]:
    """transformers eager, compiled and assisted, and flashspec 0.3.1 where it is installed; batch 1.

    Args: target: a Target, whose first layers draft; compiled: the compiled ones too.
    """

    def answer(ids, num_tokens, temperature, **options):
        return plain(ids, num_tokens, temperature, min_new_tokens=num_tokens, **options)

    plain, assistant = transformers_answer(target.model), assistant_of(target.model, NUM_DRAFT_LAYERS)
    ways = [
        Way("transformers", answer, note=NOTE),
        Way("transformers-assisted", lambda *a: answer(*a, assistant_model=assistant), 4, NOTE),
    ]
    if compiled:
        ways.append(Way("transformers-compiled", lambda *a: answer(*a, cache_implementation="static"), note=NOTE))

    def drafter(engine):
        return engine.HuggingFaceDrafter("draft", target.device, target.dtype, 1.0, model=assistant)

    return ways + older_ways(target, target.model, drafter, NOTE, compile=compiled)


def way_rows(way: Way, ids, num_tokens: int, temperature: float, repeat: int, weight_bytes: int, **cells) -> list[dict]:
    """What one way does with some prompts: the first call's seconds, then speed, steps and bandwidth.

    Args:
        way: a Way.
        ids: [batch, length] int64.
        num_tokens, temperature: of the answers.
        repeat: timed calls behind the first.
        weight_bytes: that a pass of the target reads, for the bandwidth of plain decoding.
        cells: of every row.
    Returns: Rows. Steps p50, p95 and p99 are of the steps behind the first (the prompt's) of all calls, as p50.
    """
    bench.synchronise()
    start = time.perf_counter()
    way.answer(ids, num_tokens, temperature)
    bench.synchronise()
    first, outs = time.perf_counter() - start, []
    seconds = bench.measure(lambda: outs.append(way.answer(ids, num_tokens, temperature)), warmup=0, repeat=repeat)
    cells = dict(cells, batch=len(ids), gamma=way.gamma, temperature=temperature, note=way.note)
    cells["method"] = "token" if way.gamma else "plain"
    counts = [sum(len(row.token_ids) for row in out) if _own(out) else len(out) for out in outs]
    values = {
        ("first_call", "s"): [first],
        ("tokens_per_second", "1/s"): [n / s for n, s in zip(counts, seconds, strict=True)],
    }
    if _own(outs[0]):
        cells["mode"] = "graph" if outs[0][0].mode == "captured" else "eager"
        steps = sorted(step.step_seconds * 1e3 for out in outs for step in out[0].steps[1:])
        for share in (50, 95, 99):
            values[f"step_p{share}", "ms"] = [steps[min(len(steps) - 1, len(steps) * share // 100)]]
        values["tokens_per_step", "1"] = [row.tokens_per_step for out in outs for row in out]
        if way.gamma:
            values["acceptance_rate", "1"] = [row.acceptance_rate for out in outs for row in out]
        else:
            values["bandwidth", "TB/s"] = [weight_bytes / (steps[len(steps) // 2] * 1e-3) / 1e12]
    return [bench.row("decode", way.provider, *what, each, **cells) for what, each in values.items()]


def _own(out) -> bool:
    return isinstance(out, list) and bool(out) and isinstance(out[0], Generation)


def weight_bytes(target) -> int:
    """Bytes of the weights that a pass reads: all but the embeddings' rows. Args: target: a Target."""
    skipped = target.model.get_input_embeddings().weight
    tied = target.model.get_output_embeddings().weight is skipped
    held = {p.data_ptr(): p.numel() * p.element_size() for p in target.model.parameters() if tied or p is not skipped}
    return sum(held.values())


def shape_rows(name, shape, device, report=print, *, num_tokens=128, repeat=3, batches=(1, 8, 32), peers=True):
    """Every way on one pair. Args: name: of SHAPES; shape; device; report: called with a line a way; the rest: sizes.

    Returns: Rows.
    """
    target = synthetic_target(shape, device, name=name)
    drafter, rows, size = EarlyExitDrafter(target, NUM_DRAFT_LAYERS), [], weight_bytes(target)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(shape.vocab, (max(batches), 64), generator=generator).to(device)
    cells = bench.model_cells(target) | dict(vocab=shape.vocab)
    for temperature in (0.0, 0.7):
        ways = [(own_way(target, Arm(None), b), b) for b in batches]
        ways += [(own_way(target, Arm(drafter, gamma), b), b) for gamma in (2, 4, 6) for b in batches]
        if peers:
            ways += [(way, 1) for way in peer_ways(target, not shape.nf4)]
        for way, batch in ways:
            new = way_rows(way, ids[:batch], num_tokens, temperature, repeat, size, **cells)
            speed = bench.median(new, metric="tokens_per_second")
            report(f"{name} T {temperature} batch {batch} {way.provider} gamma {way.gamma}: {speed:.0f} tokens/s")
            rows += new
    return rows


def real_rows(device, report=print, *, num_tokens=128, num_prompts=4):
    """Every way of bench_cpu.py, draft heads among them, on SmolLM2's own weights.

    Args: device; report: called with a line a way; num_tokens: of an answer; num_prompts: a domain.
    Yields: lists of rows, domain by domain.
    """
    from transformers import AutoModelForCausalLM

    target = load_target(REAL, device=device)
    plain = AutoModelForCausalLM.from_pretrained(target.path, dtype=target.dtype).eval().to(target.device)
    ways = bench_cpu.own_ways(target) + bench_cpu.peers(target, plain)
    for domain, texts in workloads.MEASURED.items():
        yield bench_cpu.answer_rows(target, ways, num_tokens, {domain: texts[:num_prompts]}, report)


def main(arguments=None) -> None:
    """python -m flashspec_core.lab.bench_engine FILE. Args: arguments: a list, or None: the command's."""
    parser = argparse.ArgumentParser(
        prog="python -m flashspec_core.lab.bench_engine", description=__doc__.splitlines()[0]
    )
    parser.add_argument("file", help="the CSV that rows are added to as they come")
    parser.add_argument("--shapes", nargs="+", default=[REAL, *SHAPES], choices=[REAL, *SHAPES])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=4, help=f"a domain, for {REAL}; its peers are slow")
    o = parser.parse_args(arguments)
    for name in o.shapes:
        if name in SHAPES:
            bench.append_rows(shape_rows(name, SHAPES[name], o.device, num_tokens=o.tokens), o.file)
        else:
            for rows in real_rows(o.device, num_tokens=o.tokens, num_prompts=o.prompts):
                bench.append_rows(rows, o.file)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
