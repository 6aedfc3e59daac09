"""Figures of draft heads: how one is wired, how it learns, and every drafter against plain decoding.

They take style and canvas from plots.py. It measures nothing.
"""

from __future__ import annotations

from flashspec_core.lab.bench import pick
from flashspec_core.lab.plots import MARKERS, PALETTE, Figure, style


def wiring_figure(config, draft_vocab: int) -> Figure:
    """An EAGLE head as boxes with their widths, its own output led back as the next entry's features.

    Args: config: heads.HeadConfig; draft_vocab: ids that it can draft.
    """
    size, layers = config.hidden_size, len(config.layers)
    boxes = {  # name: (x, y, text)
        "features": (0.0, 0.0, f"the target's layers\n{', '.join(map(str, config.layers))}\n{layers} x {size}"),
        "reduce": (1.5, 0.0, f"reduce\n{layers * size} to {size}"),
        "token": (1.5, 1.3, f"next token's\nembedding\n{size}"),
        "mix": (3.0, 0.65, f"mix\n{2 * size} to {size}"),
        "layer": (4.5, 0.65, f"one decoder layer\n{config.num_heads} heads, {config.num_kv_heads} of keys\n{size}"),
        "logits": (6.3, 0.65, f"the target's own\noutput rows\n{draft_vocab:,} ids"),
    }
    arrows = [("features", "reduce"), ("reduce", "mix"), ("token", "mix"), ("mix", "layer"), ("layer", "logits")]
    with style():
        figure = Figure(figsize=(8.5, 2.9), layout="constrained")
        axes = figure.subplots()
        look = dict(ha="center", va="center", fontsize=8.5, zorder=3)
        for name, (x, y, text) in boxes.items():
            shared = name in ("features", "token", "logits")
            box = dict(boxstyle="round,pad=.45", facecolor="#f2f2f2" if shared else "#dcebf7", edgecolor="#555555")
            axes.text(x, y, text, bbox=box, **look)
        for a, b in arrows:
            (x0, y0, _), (x1, y1, _) = boxes[a], boxes[b]
            axes.annotate("", (x1 - 0.55, y1), (x0 + 0.55, y0), arrowprops=dict(arrowstyle="->", color="#555555"))
        bend = dict(arrowstyle="->", color=PALETTE[1], connectionstyle="arc3,rad=-.35", linestyle="--")
        axes.annotate("", (3.0, 0.3), (4.5, 0.2), arrowprops=bend)
        axes.text(3.75, -0.35, "its own output, where the target has not read yet", color="#8a5a00", **look)
        axes.set(xlim=(-0.9, 7.2), ylim=(-0.7, 1.9))
        axes.axis("off")
    return figure


def learning_figure(curves: dict) -> Figure:
    """The held-out acceptance rate of each depth while heads learn.

    Args: curves: {name of a head: list of {"tokens", "acceptance_rate"}}, from distill.train or the cards.
    """
    with style():
        figure = Figure(figsize=(2.1 + 2.1 * len(curves), 2.9), layout="constrained")
        every = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
        for axes, (name, curve) in zip(every, curves.items(), strict=True):
            for depth in range(len(curve[0]["acceptance_rate"])):
                xs = [point["tokens"] for point in curve]
                ys = [point["acceptance_rate"][depth] for point in curve]
                axes.plot(xs, ys, MARKERS[depth % 8] + "-", ms=3.5, color=PALETTE[depth], label=f"depth {depth + 1}")
            axes.set(title=name, xlabel="ids learnt from", ylim=(0, 1))
            axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 4))
        every[0].set_ylabel("acceptance rate, held out")
        every[-1].legend(frameon=False, fontsize=8)
    return figure


def drafters_figure(rows, baseline: str = "transformers") -> Figure:
    """Tokens a second of every way over plain decoding's, a panel a domain, filled at temperature 0, hollow above.

    Args: rows: from bench_cpu.answer_rows; baseline: the provider that counts 1.
    """
    rows = pick(rows, metric="tokens_per_second")
    names = list(dict.fromkeys(_label(r) for r in rows if r["provider"] != baseline))
    domains = list(dict.fromkeys(r["domain"] for r in rows))
    with style():
        figure = Figure(figsize=(2.0 + 2.4 * len(domains), 1.2 + 0.3 * len(names)), layout="constrained")
        every = figure.subplots(1, len(domains), sharey=True, squeeze=False)[0]
        for axes, domain in zip(every, domains, strict=True):
            here = pick(rows, domain=domain)
            base = {r["temperature"]: float(r["p50"]) for r in here if r["provider"] == baseline}
            for r in here:
                if r["provider"] == baseline:
                    continue
                own, cold = r["provider"] == "flashspec_core", float(r["temperature"]) == 0
                color = PALETTE[0] if own else "#777777"
                ratio, y = float(r["p50"]) / base[r["temperature"]], names.index(_label(r))
                look = dict(markerfacecolor=color if cold else "white", markeredgecolor=color, ms=6.5, zorder=3)
                axes.plot(ratio, y + (-0.12 if cold else 0.12), "o" if own else "s", **look)
            axes.axvline(1, color="#333333", lw=1)
            axes.set(title=domain, xlabel=f"x {baseline}")
            axes.set_xlim(left=0)
        every[0].set_yticks(range(len(names)), names)
        every[0].invert_yaxis()
    return figure


def _label(row) -> str:
    return row["note"] if row["provider"] == "flashspec_core" else row["provider"]
