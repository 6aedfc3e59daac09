"""Every figure; the only file that imports matplotlib and seaborn.

Colours are seaborn's colour-blind palette, and nothing is told by colour alone. It measures nothing.
"""

from __future__ import annotations

import base64
import io

import matplotlib
import numpy as np

matplotlib.use("agg", force=False)
import seaborn as sns  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from flashspec_core.lab.bench import pick  # noqa: E402

QUANTILES = ("p20", "p50", "p80")
PALETTE = sns.color_palette("colorblind").as_hex()
MARKERS = "os^Dv<>p"  # beside the colours, one each


def style():
    """The one style of all figures, as a context manager."""
    return sns.axes_style("whitegrid", {"axes.spines.top": False, "axes.spines.right": False, "font.size": 10})


def speed_figure(rows) -> Figure:
    """Tokens per second of each provider, a group of bars a domain, with the ratio to plain decoding above.

    Args:
        rows: from `bench.compare_decode`.

    Returns:
        A matplotlib Figure.
    """
    speed = {(r["domain"], r["provider"]): float(r["p50"]) for r in rows if r["metric"] == "tokens_per_second"}
    domains, providers = (list(dict.fromkeys(key[i] for key in speed)) for i in (0, 1))
    labels = {"transformers": "transformers, plain", "transformers-prompt-lookup": "transformers, prompt lookup"}
    with style():
        figure = Figure(figsize=(7.5, 3.4), layout="constrained")
        axes = figure.subplots()
        for i, provider in enumerate(providers):
            xs = [x + (i - 1) * 0.27 for x in range(len(domains))]
            heights = [speed[d, provider] for d in domains]
            hatch = ("", "//", "")[i % 3]
            color = ("#b0b0b0", PALETTE[1], PALETTE[0])[i % 3]
            axes.bar(xs, heights, 0.25, label=labels.get(provider, provider), color=color, hatch=hatch, edgecolor="w")
            for x, domain, height in zip(xs, domains, heights, strict=True):
                ratio = height / speed[domain, providers[0]]
                axes.annotate(f"{ratio:.2f}x", (x, height), ha="center", va="bottom", fontsize=8)
        axes.set_xticks(range(len(domains)), domains)
        axes.set_ylabel("tokens per second")
        axes.set_title(f"{rows[0]['model']}, {rows[0]['dtype']}, greedy, {rows[0]['device']}", fontsize=9)
        axes.grid(axis="x", visible=False)
        axes.legend(frameon=False, fontsize=8)
        axes.set_ylim(0, max(speed.values()) * 1.15)
    return figure


def show(figure: Figure, caption: str) -> None:
    """Display a figure as PNG with a caption that is also its alternative text.

    Args:
        figure: a matplotlib Figure.
        caption: what it shows, at least 20 characters.

    Raises:
        ValueError: a shorter caption.
    """
    from IPython.display import display

    if len(caption) < 20:
        raise ValueError(f"expected a caption of at least 20 characters, got {caption!r}")
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=100, metadata={"Software": None})
    data = {"image/png": base64.b64encode(png.getvalue()).decode(), "text/plain": caption}
    display(data, raw=True, metadata={"image/png": {"alt": caption}})


def overlap_figure(p, q) -> Figure:
    """Two laws as bars: what they share is accepted, what the draft has over is rejected, what the target has over
    comes back as the residual; both of these areas are the total variation.

    Args: p, q: probabilities of target and draft, [vocab].
    """
    with style():
        figure = Figure(figsize=(7.5, 3), layout="constrained")
        axes = figure.subplots()
        ids = range(len(p))
        shared = [min(a, b) for a, b in zip(p, q, strict=True)]
        parts = (
            (shared, [0] * len(p), PALETTE[2], "", f"both: accepted, {sum(shared):.2f}"),
            ([b - s for b, s in zip(q, shared, strict=True)], shared, PALETTE[1], "//", "draft over target: rejected"),
            ([a - s for a, s in zip(p, shared, strict=True)], shared, PALETTE[0], "..", "target over draft: residual"),
        )
        for heights, bottoms, color, hatch, label in parts:
            axes.bar(ids, heights, 0.8, bottom=bottoms, color=color, hatch=hatch, edgecolor="w", label=label)
        axes.set(xticks=ids, xlabel="id", ylabel="probability", title=f"total variation {1 - sum(shared):.2f}")
        axes.grid(axis="x", visible=False)
        axes.legend(frameon=False, fontsize=8)
    return figure


def verdict_figure(ks, chi_square) -> Figure:
    """What each test looks at, side by side: the gap between cumulative distributions, and each id's own deviation.

    Args: ks, chi_square: gates.Findings of the same counts.
    """
    total, expected = ks.counts.sum(), ks.law * ks.counts.sum()
    with style():
        figure = Figure(figsize=(7.5, 3), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.plot((ks.counts / total - ks.law).cumsum(), color=PALETTE[0])
        for limit in (ks.limit, -ks.limit):
            left.axhline(limit, color=PALETTE[3], linestyle="--", linewidth=1)
        left.set(title=f"KS: {'red' if ks.red else 'green'}", xlabel="id", ylabel="cumulative, seen less true")
        used = expected > 0
        right.bar(used.nonzero()[0], ((ks.counts - expected)[used] / expected[used] ** 0.5), color=PALETTE[1])
        word = "red" if chi_square.red else "green"
        right.set(title=f"chi-square: {word}, p = {chi_square.value:.2g}", xlabel="id", ylabel="standard deviations")
    return figure


def power_figure(curves: dict, sizes, samples: int) -> Figure:
    """Chance of each gate to notice, by number of samples.

    Args: curves, sizes, samples: gate -> a power for each size; and the size that the gates run at.
    """
    with style():
        figure = Figure(figsize=(7.5, 3), layout="constrained")
        axes = figure.subplots()
        for i, (gate, curve) in enumerate(curves.items()):
            axes.plot(sizes, curve, marker="os^Dvx"[i % 6], color=PALETTE[i], label=gate, markersize=4)
        axes.axvline(samples, color="0.5", linestyle="--", linewidth=1)
        axes.set(xscale="log", xlabel="samples", ylabel="power at alpha .01", ylim=(-0.03, 1.03))
        axes.legend(frameon=False, fontsize=8)
    return figure


def gate_matrix(table: dict) -> Figure:
    """Faults against gates: a filled mark where the gate turned red, a ring where it stayed green.

    Args: table: name -> {gate: red}, from `mutants.table`.
    """
    gates = list(dict.fromkeys(gate for row in table.values() for gate in row))
    with style():
        figure = Figure(figsize=(7.5, 0.24 * len(table) + 0.9), layout="constrained")
        axes = figure.subplots()
        for y, row in enumerate(table.values()):
            for gate, red in row.items():
                face = PALETTE[3] if red else "none"
                axes.plot(gates.index(gate), y, "o", color=PALETTE[3] if red else "0.7", markerfacecolor=face)
        axes.set_xticks(range(len(gates)), gates, fontsize=8, rotation=30, ha="left")
        axes.set_yticks(range(len(table)), list(table), fontsize=8)
        axes.xaxis.tick_top()
        axes.invert_yaxis()
    return figure


def tokens_figure(rates, gammas, points: dict) -> Figure:
    """Tokens a step, and the accepted fraction, by speculation length: the formula as lines, what was run as marks.

    Args:
        rates: acceptance rates to draw the formula for.
        gammas: speculation lengths.
        points: label -> list of (gamma, tokens a step, accepted fraction).
    """
    with style():
        figure = Figure(figsize=(7.5, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        for i, rate in enumerate(rates):
            tokens = [sum(rate**k for k in range(gamma + 1)) for gamma in gammas]
            line = dict(color=PALETTE[i], linestyle=("-", "--", "-.")[i % 3])
            left.plot(gammas, tokens, label=f"formula, rate {rate:.2f}", **line)
            fractions = [(t - 1) / gamma for t, gamma in zip(tokens, gammas, strict=True)]
            right.plot(gammas, fractions, **line)
            right.axhline(rate, color=PALETTE[i], linestyle=":", linewidth=1)
        for i, (label, found) in enumerate(points.items()):
            for axes, column in ((left, 1), (right, 2)):
                xs, ys = [point[0] for point in found], [point[column] for point in found]
                axes.plot(xs, ys, "os^D"[i % 4], color="0.2", markerfacecolor="none", label=label)
        left.set(xlabel="gamma", ylabel="tokens a step")
        right.set(xlabel="gamma", ylabel="accepted fraction (dotted: the rate)", ylim=(0, 1.02))
        right.legend(*left.get_legend_handles_labels(), frameon=False, fontsize=7)
    return figure


def step_figure(rows, gamma: int = 4) -> Figure:
    """The verification step by batch, a panel a vocabulary: each provider's net time, and the logits' read once.

    Args:
        rows: of kernels.csv.
        gamma: speculation length.
    """
    vocabs = sorted({int(r["vocab"]) for r in rows if r["vocab"]})
    bandwidth = float(pick(rows, provider="floor", metric="bandwidth")[0]["p50"])
    with style():
        figure = Figure(figsize=(7.5, 3.2), layout="constrained")
        panels = figure.subplots(1, len(vocabs), sharey=True)
        for axes, vocab in zip(panels, vocabs, strict=True):
            here = pick(rows, benchmark="verify", vocab=vocab, gamma=gamma, method="token")
            for i, (name, mode, metric) in enumerate(
                (("torch", "eager", "time"), ("torch-compiled", "eager", "time"))
                + tuple((p, "graph", "net_time") for p in ("vllm-0.32", "flashspec_core"))
            ):
                found = sorted((int(r["batch"]), r) for r in pick(here, provider=name, mode=mode, metric=metric))
                xs, low, ys, high = ([x if k is None else float(r[k]) for x, r in found] for k in (None, *QUANTILES))
                color, label = PALETTE[(7, 1, 3, 0)[i]], f"{name}, {mode}"
                axes.plot(xs, ys, marker="s^Do"[i], color=color, markersize=4, label=label)
                axes.fill_between(xs, low, high, color=color, alpha=0.2)
            bytes_read = [2 * x * vocab * (gamma + 1) for x in xs]
            axes.plot(xs, [b / bandwidth * 1e-6 for b in bytes_read], "k:", label="the logits once at copy speed")
            axes.set(xscale="log", yscale="log", xlabel="batch", title=f"V = {vocab:,}")
            axes.set_xticks(xs, [f"{x:g}" for x in xs])
            axes.minorticks_off()
        panels[0].set_ylabel("microseconds a step")
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8
        )
    return figure


def parts_figure(rows, gamma: int = 4) -> Figure:
    """The parts of our step against the vocabulary: the accept test alone, normalising, accepting and drawing.

    Args:
        rows: of kernels.csv.
        gamma: speculation length.
    """
    batches = (8, 32, 128)
    with style():
        figure = Figure(figsize=(7.5, 2.8), layout="constrained")
        panels = figure.subplots(1, len(batches), sharey=True)
        for axes, batch in zip(panels, batches, strict=True):
            for i, part in enumerate(("verify_accept", "verify_normalise", "verify_recover")):
                here = pick(rows, benchmark=part, batch=batch, gamma=gamma, metric="net_time")
                found = sorted((int(r["vocab"]), float(r["p50"])) for r in here)
                label = part.removeprefix("verify_").replace("recover", "accept and recover")
                axes.plot(*zip(*found, strict=True), marker="o^s"[i], color=PALETTE[i], label=label)
            axes.axhline(0, color="0.3", lw=0.8)  # net of an empty graph: a part may lie below it by noise
            axes.set(xlabel="V", title=f"batch {batch}", xscale="log")
            axes.set_xticks([int(r["vocab"]) for r in here], [f"{int(r['vocab']) // 1000}k" for r in here])
            axes.minorticks_off()
        panels[0].set_ylabel("net microseconds")
        panels[0].legend(frameon=False, fontsize=8)
    return figure


def skip_figure(bound, score, best: float) -> Figure:
    """Each id's score against its bound, and what a race need not look at.

    Args: bound, score, best: p over the uniform, weight over E, [vocab] each; the best score.
    """
    with style():
        figure = Figure(figsize=(7.5, 3), layout="constrained")
        axes = figure.subplots()
        alive = (score > 0) & (bound > 0)
        out = alive & (bound < best)
        for ids, mark, color, label in ((out, ".", "0.7", "cannot win"), (alive & ~out, "o", PALETTE[3], "looked at")):
            axes.plot(bound[ids], score[ids], mark, color=color, markersize=4, label=f"{label}: {int(ids.sum())} ids")
        ends = [float(bound[alive].min()), float(bound[alive].max())]
        axes.plot(ends, ends, "k:", linewidth=1, label="score = bound")
        axes.axvline(best, color=PALETTE[0], linestyle="--", label="the winning score")
        axes.set(xscale="log", yscale="log", xlabel="bound: p / uniform", ylabel="score: weight / E")
        axes.legend(frameon=False, fontsize=8)
    return figure


def regret_figure(curves: dict, lines: dict, change: int | None = None) -> Figure:
    """Regret over rounds: the mean of all seeds, and the middle 80 % of them; bounds as lines.

    Args:
        curves: name -> [horizon, num_seeds] regret so far.
        lines: label -> value at the horizon, drawn across.
        change: a round to mark.
    """
    with style():
        figure = Figure(figsize=(7.5, 3.2), layout="constrained")
        axes = figure.subplots()
        for i, (name, regret) in enumerate(curves.items()):
            every = max(1, len(regret) // 400)
            rounds = range(0, len(regret), every)
            line, low_high = ("-", "--", "-.", ":")[i % 4], np.quantile(regret[::every], [0.1, 0.9], axis=1)
            axes.plot(rounds, regret[::every].mean(1), color=PALETTE[i], linestyle=line, label=name)
            axes.fill_between(rounds, *low_high, color=PALETTE[i], alpha=0.15)
        for i, (label, value) in enumerate(lines.items()):
            axes.axhline(value, color="0.4", linestyle=(0, (1 + 2 * i, 2)), linewidth=1)
            axes.annotate(label, (len(regret) * (0.05 + 0.3 * (i % 3)), value), fontsize=8, va="bottom")
        if change is not None:
            axes.axvline(change, color="0.4", linewidth=1)
        axes.set(xlabel="round", ylabel="regret")
        axes.legend(frameon=False, fontsize=8, loc="center right")
    return figure


def world_matrix(table: dict) -> Figure:
    """Mean regret of each policy in each world; darker is worse within a world, the best one is ringed.

    Args: table: policy -> {world: mean regret}.
    """
    worlds = list(next(iter(table.values())))
    with style():
        figure = Figure(figsize=(7.5, 0.34 * len(table) + 0.8), layout="constrained")
        axes = figure.subplots()
        values = [[table[policy][world] for world in worlds] for policy in table]
        best = [min(column) for column in zip(*values, strict=True)]
        shade = [[np.log(v / b) for v, b in zip(row, best, strict=True)] for row in values]
        axes.imshow(shade, cmap="Greys", aspect="auto", vmin=0, vmax=6)
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                ring = dict(boxstyle="round", facecolor="none", edgecolor=PALETTE[3]) if value == best[x] else None
                ink = "k" if shade[y][x] < 3 else "w"
                axes.text(x, y, f"{value:.0f}", ha="center", va="center", bbox=ring, color=ink)
        axes.set_xticks(range(len(worlds)), worlds)
        axes.set_yticks(range(len(table)), list(table))
        axes.xaxis.tick_top()
        axes.grid(visible=False)
    return figure


def best_arm_figure(shares: dict, change: int) -> Figure:
    """How often each policy plays the best arm of the moment.

    Args: shares, change: name -> [horizon] share of seeds; the round of the change.
    """
    with style():
        figure = Figure(figsize=(7.5, 3), layout="constrained")
        axes = figure.subplots()
        for i, (name, share) in enumerate(shares.items()):
            smooth = np.convolve(share, np.ones(100) / 100, mode="valid")[::25]
            line = ("-", "--", "-.", ":")[i % 4]
            axes.plot(np.arange(len(smooth)) * 25 + 100, smooth, color=PALETTE[i], linestyle=line, label=name)
        axes.axvline(change, color="0.4", linewidth=1)
        axes.set(xlabel="round (mean of the last 100)", ylabel="share that plays the best arm", ylim=(-0.02, 1.02))
        axes.legend(frameon=False, fontsize=8)
    return figure


def monitor_figure(monitor) -> Figure:
    """The static twin of the live panel: acceptance over steps, by position, and how often each arm was played.

    Args: monitor: a live.AcceptanceMonitor.
    """
    with style():
        figure = Figure(figsize=(7.5, 2.8), layout="constrained")
        left, middle, right = figure.subplots(1, 3)
        left.plot(range(1, len(monitor.rates) + 1), monitor.rates, color=PALETTE[0])
        for arm, name in enumerate(monitor.arms):
            at = [i for i, step in enumerate(monitor.steps) if step.drafter == name]
            left.plot([i + 1 for i in at], [monitor.rates[i] for i in at], "os^Dv"[arm % 5], markersize=4, label=name)
        left.set(xlabel="step", ylabel="acceptance rate", ylim=(-0.03, 1.03))
        left.legend(frameon=False, fontsize=7)
        shares = [accepted / tested if tested else 0.0 for accepted, tested in monitor.by_position]
        middle.bar(range(1, len(shares) + 1), shares, color=PALETTE[2])
        middle.set(xlabel="position in the block", ylabel="stood, of those tested", ylim=(0, 1.03))
        right.barh(range(len(monitor.arms)), monitor.pulls, color=PALETTE[: len(monitor.arms)])
        right.set_yticks(range(len(monitor.arms)), monitor.arms, fontsize=8)
        right.set(xlabel="pulls")
    return figure


def stages_figure(found) -> Figure:
    """The static twin of slow motion: every stage of one verification, one below the other.

    Args: found: from slow.stages.
    """
    with style():
        figure = Figure(figsize=(7.5, 1.7 * len(found)), layout="constrained")
        for axes, stage in zip(np.atleast_1d(figure.subplots(len(found), 1)), found, strict=True):
            for i, (name, law) in enumerate(stage.laws.items()):
                xs = [x + (i - 0.5) * 0.4 for x in range(len(law))]
                axes.bar(xs, law, 0.38, color=PALETTE[i], hatch=("", "//")[i % 2], edgecolor="w", label=name)
            words = [f"[{word!r}]" if j == stage.chosen else f"{word!r}" for j, word in enumerate(stage.tokens)]
            axes.set_xticks(range(len(words)), words, fontsize=8)
            axes.set_title(stage.title, fontsize=7, loc="left")
            axes.grid(axis="x", visible=False)
            axes.legend(frameon=False, fontsize=7)
    return figure
