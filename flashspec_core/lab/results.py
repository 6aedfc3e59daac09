"""README's table of results, made from the stored rows and from nothing else.

A test holds README to it. It measures nothing.
"""

from __future__ import annotations

import itertools

from flashspec_core.lab.bench import RESULTS, median, pick, read_rows

LOOKUP_FIRST = "lookup first, else contextual UCB over heads"  # as bench_adaptive.py calls it


def table() -> str:
    """The table as Markdown, a line a result: what, figures, where it was measured.

    Raises: ValueError: a row is missing.
    """
    lines = ["| what | measured | on |", "|---|---|---|"]
    for what, told, row in [*_cpu(), *_engine(), *_kernels(), *_adaptive()]:
        dtype = f", {row['dtype']}" if row["dtype"] else ""
        lines.append(f"| {what} | {told} | {row['device']}{dtype}, {row['date']} |")
    return "\n".join(lines) + "\n"


def _cpu():
    stored = pick(read_rows(RESULTS / "cpu.csv"), metric="tokens_per_second")
    best = {"chat": "eagle-chat", "code": "eagle-code", "copy-edit": "n-gram, else eagle-mixed"}
    for dtype, (domain, name) in itertools.product(dict.fromkeys(row["dtype"] for row in stored), best.items()):
        rows, told = pick(stored, dtype=dtype, domain=domain), []
        for temperature in ("0.0", "0.7"):
            at = pick(rows, temperature=temperature)
            plain = median(at, provider="transformers")
            own, peer = median(at, note=name) / plain, median(at, provider="transformers-prompt-lookup") / plain
            told.append(f"{own:.2f}x at temperature {temperature} (transformers' prompt lookup {peer:.2f}x)")
        yield f"SmolLM2-135M, {domain}: {name}, over plain transformers", "; ".join(told), rows[0]


def _engine():
    stored = pick(read_rows(RESULTS / "engine.csv"), metric="tokens_per_second", batch=1)
    ours, lines = dict(provider="flashspec_core"), []
    for domain, name in (("chat", "eagle-chat"), ("code", "eagle-code")):
        what = f"SmolLM2-135M, {domain}: {name}, over plain decoding in captured steps"
        rows = pick(stored, model="smollm2-135m", domain=domain)
        lines.append((what, rows, ours | dict(note=name), ours | dict(note="off")))
    for model, size in (("tinyllama-1.1b-shape", "1.1 B"), ("llama-3-8b-shape", "8 B")):
        for gamma, peer in ((4, "flashspec-0.3.1"), ("", "transformers-compiled")):
            how = f"speculative, gamma {gamma}" if gamma else "plain"
            what = f"{size} weights, synthetic acceptance, {how}, over {peer}"
            lines.append((what, pick(stored, model=model, gamma=gamma), ours, dict(provider=peer)))
    for what, rows, own, other in lines:
        told = []
        for temperature in ("0.0", "0.7"):
            at = pick(rows, temperature=temperature)
            speed = median(at, **own)
            told.append(f"{speed:,.0f} tokens/s, {speed / median(at, **other):.1f}x at temperature {temperature}")
        yield what, "; ".join(told), rows[0]


def _kernels():
    rows = pick(read_rows(RESULTS / "kernels.csv"), benchmark="verify", method="token", gamma=4, metric="net_time")
    for batch in (1, 128):
        at = pick(rows, vocab=128_256, batch=batch)
        own, other = median(at, provider="flashspec_core"), median(at, provider="vllm-0.32")
        what = f"verification step, vocabulary 128,256, batch {batch}, over vllm-0.32"
        yield what, f"{own:.1f} us net, {other / own:.1f}x", at[0]


def _adaptive():
    rows = pick(read_rows(RESULTS / "adaptive.csv"), benchmark="stream: changing")
    for device in dict.fromkeys(row["device"] for row in rows):
        at = pick(rows, device=device)
        (best,) = (row["note"] for row in pick(at, metric="best_fixed"))
        told = []
        for note in dict.fromkeys(row["note"] for row in pick(at, metric="gain_low")):
            if note.startswith(LOOKUP_FIRST) or ", else " in note:
                low, high = (median(at, note=note, metric=metric) for metric in ("gain_low", "gain_high"))
                told.append(f"{note} {(low + high) / 2:+.1%} ({low:+.1%} to {high:+.1%})")
        yield f"chat, code and copying in turns, speed over the best single drafter ({best})", "; ".join(told), at[0]
